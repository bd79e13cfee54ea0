"""Every setting, with its default and its check."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rag_wiki.errors import ConfigurationError

if TYPE_CHECKING:
    from langchain_core.documents import Document
    from langchain_text_splitters import TextSplitter

__all__ = ["DecayConfig", "RagWikiRetrieverConfig"]

_DEFAULT_NO_RESUGGEST_DAYS = 30


def _number(owner: str, name: str, value: object, low: float, high: float = math.inf) -> None:
    if isinstance(value, bool) or not isinstance(value, Real) or not _is_finite(value):
        msg = f"{owner}.{name} must be a finite number, got {value!r}"
        raise ConfigurationError(msg)
    if not low <= float(value) <= high:
        span = f"at least {low:g}" if high == math.inf else f"between {low:g} and {high:g}"
        msg = f"{owner}.{name} must be {span}, got {value!r}"
        raise ConfigurationError(msg)


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _whole(owner: str, name: str, value: object, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        msg = f"{owner}.{name} must be a whole number, got {value!r}"
        raise ConfigurationError(msg)
    _number(owner, name, value, low)


@dataclass(frozen=True)
class DecayConfig:
    """How saved documents are scored, promoted and let go.

    Raises:
        ConfigurationError: A value is NaN, negative or impossible; the message names the field.
    """

    w_recency: float = 0.40
    """Weight of how recently the document was fetched."""
    w_frequency: float = 0.30
    """Weight of how often it was fetched."""
    w_explicit: float = 0.20
    """Weight of the user's last vote."""
    w_chunk_hit: float = 0.15
    """Weight of the fraction of its chunks that ever answered."""
    max_cache_miss_streak: int = 10
    """Semantic searches in a row without a hit, for each saved document of the user, that demote one at once: of six
    saved documents, say, each has sixty searches to be hit once."""
    decay_lambda: float = 0.05
    """Decay per day; 0.05 halves recency in about 14 days."""
    freq_cap: int = 20
    """Fetches at which frequency counts in full."""
    pin_threshold: float = 0.85
    """Score from which a saved document is on its way to being pinned."""
    demotion_threshold: float = 0.15
    """Score below which a saved document is on its way out."""
    pin_hold_days: float = 7
    """Days that the score must hold before the pin."""
    demotion_hold_days: float = 3
    """Days that the score must hold before the demotion."""
    max_idle_days: float | None = None
    """Days without a fetch after which a document goes at once, whatever its score: frequency, votes and hits never
    fade. `None` leaves it to the score."""

    def __post_init__(self) -> None:
        owner = type(self).__name__
        if self.max_idle_days is not None:
            _number(owner, "max_idle_days", self.max_idle_days, 0)
            if self.max_idle_days == 0:
                msg = f"{owner}.max_idle_days must be more than 0: every document would go at once"
                raise ConfigurationError(msg)
        weights = ("w_recency", "w_frequency", "w_explicit", "w_chunk_hit")
        for name in (*weights, "decay_lambda", "pin_hold_days", "demotion_hold_days"):
            _number(owner, name, getattr(self, name), 0)
        for name in ("pin_threshold", "demotion_threshold"):
            _number(owner, name, getattr(self, name), 0, 1)
        for name in ("max_cache_miss_streak", "freq_cap"):
            _whole(owner, name, getattr(self, name), 1)
        if not any(getattr(self, name) for name in weights):
            msg = f"{owner}.{', '.join(weights)} must not all be zero"
            raise ConfigurationError(msg)
        if self.demotion_threshold > self.pin_threshold:
            msg = (
                f"{owner}.demotion_threshold must not exceed pin_threshold, "
                f"got {self.demotion_threshold!r} and {self.pin_threshold!r}"
            )
            raise ConfigurationError(msg)


@dataclass(frozen=True)
class RagWikiRetrieverConfig:
    """How the retriever counts, saves and answers.

    Raises:
        ConfigurationError: A value is out of range; the message names the field.
    """

    fetch_threshold: int = 3
    """Fetches after which saving a document is suggested."""
    reset_threshold: int = 3
    """Queries in a row without a document after which its count starts again at zero."""
    similarity_threshold: float | Literal["auto"] = 0.75
    """Cosine from which a saved chunk answers; equal counts. Cosine, not distance: 1 is the same direction.
    `"auto"` measures, once for each embedding model, what its cosines mean, and follows from `false_hit_rate`."""
    false_hit_rate: float = 0.01
    """For `"auto"`: the share of questions that nothing saved has to do with and that a saved copy may answer."""
    local_top_k: int = 3
    """Matching chunks that one saved document contributes at most; what the wrapped retriever found of it comes along
    besides. Where `context` is `"focused"`, its margin decides, and this many may be looked at if it is more than
    eight."""
    expand_neighbours: int = 0
    """Chunks before and after each one that answers that come along, joined without repeating what they share."""
    context: Literal["all", "focused"] = "all"
    """What is served: all that was found, saved and global pieces in turn; or one ranking of both by cosine, of which
    only what lies close to the best piece is served."""
    focus_prior: float = 0.35
    """For `"focused"`: what a saved document is raised by, as a share of the gap between unrelated and matching
    texts."""
    focus_words: float = 1.0
    """For `"focused"`: what a text is raised by that holds all of the query's words, as a share of that gap; words that
    few of the texts hold count most. 0 ranks by cosine alone."""
    focus_margin: float = 0.65
    """For `"focused"`: how far below the best piece another one may lie, as a share of that gap."""
    wiki_save_dir: str | Path | None = None
    """Folder for saved chunks and readable copies of saved documents; `None` keeps chunks beside the state."""
    no_resiluggest_days: int = _DEFAULT_NO_RESUGGEST_DAYS
    """Deprecated and without effect: a declined suggestion comes back by count, not by date."""
    decay: DecayConfig = field(default_factory=DecayConfig)
    """The decay model's settings."""
    auto_save: bool = False
    """Save at once what would be suggested."""
    document_id: str | Callable[[Document], str | None] | None = None
    """The metadata key, or a function of a document, that identifies the source document;
    `None` looks for `doc_id`, then `source`, then `doc_path`."""
    version_key: str | None = None
    """The metadata key of the source's version, where there is one; it then decides what is stale."""
    document_roots: Sequence[str | Path] = ()
    """Folders whose files may be read when a document is saved; a path in metadata is not a permission."""
    global_search: Literal["always", "on_miss"] = "always"
    """Ask the wrapped retriever on every query, or only when no saved copy answered."""
    text_splitter: TextSplitter | None = None
    """Splits saved documents; by default a `RecursiveCharacterTextSplitter` of the two sizes below."""
    chunk_size: int = 1000
    """Characters per chunk, for the default splitter."""
    chunk_overlap: int = 100
    """Characters that neighbouring chunks share, for the default splitter."""
    embedding_name: str | None = None
    """Names the embedding model in the fingerprint of saved vectors; by default its class and model name."""
    embedding_batch_size: int = 64
    """Texts that are embedded in one call when a document is saved."""
    index_max_bytes: int = 256 * 1024 * 1024
    """Bytes of indexes that this process keeps in memory, over all users; the least recently used user goes first."""

    def __post_init__(self) -> None:
        owner = type(self).__name__
        for name in ("fetch_threshold", "reset_threshold", "local_top_k", "chunk_size", "embedding_batch_size"):
            _whole(owner, name, getattr(self, name), 1)
        for name in ("no_resiluggest_days", "chunk_overlap", "index_max_bytes", "expand_neighbours"):
            _whole(owner, name, getattr(self, name), 0)
        if self.similarity_threshold != "auto":
            if isinstance(self.similarity_threshold, str):
                msg = f"{owner}.similarity_threshold must be a number or 'auto', got {self.similarity_threshold!r}"
                raise ConfigurationError(msg)
            _number(owner, "similarity_threshold", self.similarity_threshold, -1, 1)
        # A rate of zero would ask for what no threshold can promise.
        _number(owner, "false_hit_rate", self.false_hit_rate, 1e-6, 0.5)
        for name in ("focus_prior", "focus_words", "focus_margin"):
            _number(owner, name, getattr(self, name), 0)
        if self.chunk_overlap >= self.chunk_size:
            msg = (
                f"{owner}.chunk_overlap must be smaller than chunk_size, "
                f"got {self.chunk_overlap!r} and {self.chunk_size!r}"
            )
            raise ConfigurationError(msg)
        for name, choices in (("global_search", ("always", "on_miss")), ("context", ("all", "focused"))):
            if getattr(self, name) not in choices:
                msg = f"{owner}.{name} must be {' or '.join(map(repr, choices))}, got {getattr(self, name)!r}"
                raise ConfigurationError(msg)
        self._check_types(owner)
        # What the caller does to a list later is no permission to read more.
        object.__setattr__(self, "document_roots", tuple(self.document_roots))
        if self.no_resiluggest_days != _DEFAULT_NO_RESUGGEST_DAYS:
            warnings.warn(
                f"{owner}.no_resiluggest_days is deprecated and without effect: "
                "a declined suggestion comes back when the document was fetched often enough again",
                DeprecationWarning,
                stacklevel=3,
            )

    def _check_types(self, owner: str) -> None:
        roots = self.document_roots
        listed = isinstance(roots, Sequence) and not isinstance(roots, (str, bytes))
        # A blank root would be the folder that the process happens to run in.
        if not listed or not all(root is not None and _is_path(root) for root in roots):
            msg = f"{owner}.document_roots must be a list of folders, got {roots!r}"
            raise ConfigurationError(msg)
        if self.text_splitter is not None and not callable(getattr(self.text_splitter, "split_text", None)):
            msg = f"{owner}.text_splitter must be a TextSplitter, got {type(self.text_splitter).__name__}"
            raise ConfigurationError(msg)
        expected: list[tuple[str, bool, str]] = [
            ("decay", isinstance(self.decay, DecayConfig), "a DecayConfig"),
            ("auto_save", isinstance(self.auto_save, bool), "True or False"),
            ("wiki_save_dir", _is_path(self.wiki_save_dir), "a path or None"),
            ("document_id", _is_key(self.document_id) or callable(self.document_id), "a key, a function or None"),
            ("version_key", _is_key(self.version_key), "a key or None"),
            ("embedding_name", _is_key(self.embedding_name), "a name or None"),
        ]
        for name, right, wanted in expected:
            if not right:
                msg = f"{owner}.{name} must be {wanted}, got {getattr(self, name)!r}"
                raise ConfigurationError(msg)


def _is_path(value: Any) -> bool:
    return value is None or (isinstance(value, (str, Path)) and bool(str(value).strip()))


def _is_key(value: Any) -> bool:
    return value is None or (isinstance(value, str) and bool(value.strip()))
