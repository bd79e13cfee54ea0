"""What is known about a user's documents: the values that stores keep and rules work on."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime, timezone
from enum import Enum
from operator import itemgetter
from types import MappingProxyType
from typing import Any, NamedTuple

from typing_extensions import Self

from rag_wiki.clock import as_utc
from rag_wiki.errors import InvalidDocumentError, InvalidUserError

__all__ = [
    "COUNTING_STATES",
    "SAVED_STATES",
    "TIME_FIELDS",
    "Clocks",
    "DocumentEvent",
    "DocumentState",
    "ForgottenUser",
    "PurgedDocument",
    "QueryStart",
    "RetrievedText",
    "SavedChanges",
    "UserChange",
    "UserDocRecord",
    "UserView",
    "check_doc_id",
    "check_user_id",
    "join_halves",
]


class DocumentState(str, Enum):
    """Where a document stands for one user."""

    GLOBAL = "GLOBAL"
    """Only in the shared collection; this user has not met it."""
    SURFACED = "SURFACED"
    """Retrieved for this user; its fetches are being counted."""
    SUGGESTED = "SUGGESTED"
    """Came back often enough; saving it was proposed."""
    CLAIMED = "CLAIMED"
    """Saved; answered from the local copy."""
    PINNED = "PINNED"
    """Saved and part of every answer."""
    DEMOTED = "DEMOTED"
    """Let go, by decay or by the user; the local copy is gone."""

    def __str__(self) -> str:
        return self.value


SAVED_STATES = frozenset({DocumentState.CLAIMED, DocumentState.PINNED})
"""The states in which a local copy answers."""

COUNTING_STATES = frozenset({DocumentState.SURFACED, DocumentState.SUGGESTED})
"""The states in which fetches count towards a suggestion."""


_TWO_HALVES = re.compile("[\ud800-\udbff][\udc00-\udfff]")


def join_halves(text: str) -> str:
    """The text with each character that came as two surrogates made one, as JSON gives it back.

    An id that is not written so would be stored under one name and say another.
    """
    if text.isascii() or _TWO_HALVES.search(text) is None:
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")


def check_user_id(user_id: object) -> str:
    """Return `user_id` (see `join_halves`), or raise `InvalidUserError` when it names nobody."""
    if not isinstance(user_id, str):
        msg = f"user_id must be a string, got {type(user_id).__name__}: {user_id!r}"
        raise InvalidUserError(msg)
    if not user_id.strip():
        msg = f"user_id must not be blank, got {user_id!r}"
        raise InvalidUserError(msg)
    return join_halves(user_id)


def check_doc_id(doc_id: object) -> str:
    """Return `doc_id` (see `join_halves`), or raise `InvalidDocumentError` when it names nothing."""
    if not isinstance(doc_id, str):
        msg = f"doc_id must be a string, got {type(doc_id).__name__}: {doc_id!r}"
        raise InvalidDocumentError(msg)
    if not doc_id.strip():
        msg = f"doc_id must not be blank, got {doc_id!r}"
        raise InvalidDocumentError(msg)
    return join_halves(doc_id)


NOTHING: Mapping[str, Any] = MappingProxyType({})
"""What tuples of facts hold where there is nothing to hold."""
SAME_LIFE, NEW_LIFE = -1, -2
"""What a record says in place of its life until it is stored."""


@dataclass
class UserDocRecord:
    """All that is known about one document for one user.

    A record is a value: a store hands out copies and keeps copies, and the lifecycle returns new ones.
    Times are aware UTC; a naive time given in is read as UTC.

    Raises:
        InvalidUserError: `user_id` is blank or not a string.
        InvalidDocumentError: `doc_id` is blank or not a string, or another field holds what can't be stored.
    """

    user_id: str
    doc_id: str
    doc_title: str
    doc_path: str
    user_state: DocumentState = DocumentState.SURFACED
    fetch_count: int = 0
    """Queries in which the document was fetched, since it was last started afresh."""
    last_fetched_at: datetime | None = None
    suggestion_sent: bool = False
    """A suggestion is out and was neither accepted, declined nor lapsed."""
    decay_score: float = 1.0
    """The score of the last decay run, in [0, 1]."""
    explicit_signal: float = 0.0
    """The user's last vote: +1, −1, or 0 for none."""
    full_content: str | None = field(default=None, repr=False)
    """The saved text. `get` and the lists fill it; views for rules leave it out."""
    cached_at: datetime | None = None
    """When the present copy was saved."""
    pinned_at: datetime | None = None
    """Since when the document is PINNED."""
    demoted_at: datetime | None = None
    """Since when the document is DEMOTED."""
    no_resiluggest_until: datetime | None = None
    """No suggestion before this moment."""
    next_suggest_at: int = 0
    """The fetch count at which saving is suggested next; 0 stands for the configured threshold."""
    queries_missed: int = 0
    """The user's queries in a row that did not fetch the document."""
    cache_miss_streak: int = 0
    """Semantic searches in a row without a hit in the saved copy."""
    always_full_doc: bool = False
    """Answer with the whole document instead of its best chunks."""
    decline_count: int = 0
    """Suggestions declined since the document was last saved or removed; each doubles the next gap."""
    pinned_by_user: bool = False
    """The pin is the user's own: decay and miss streaks leave it alone."""
    pin_candidate_since: datetime | None = None
    """Since when the score holds at or above the pin threshold."""
    demotion_candidate_since: datetime | None = None
    """Since when the score holds below the demotion threshold."""
    copy_id: str | None = None
    """Names the stored copy (its chunks); a new save makes a new one."""
    chunk_count: int = 0
    """Chunks in the copy."""
    content_source: str | None = None
    """Where the saved text came from: `argument`, `loader`, `file` or `retrieved`."""
    source_version: str | None = None
    """The source's version when the copy was saved, where `config.version_key` names one."""
    stale_since: datetime | None = None
    """Since when the copy is known to differ from its source."""
    retrieved: tuple[str, ...] = ()
    """Digests of the retrieved texts that are kept for saving, oldest first."""
    retrieved_seen: tuple[int, ...] = ()
    """The user's query that showed each of them last."""
    retrieved_chars: int = 0
    """Characters of those texts."""
    life: int = field(default=SAME_LIFE, compare=False)
    """The user's revision when this life of the document began, with its first record or when it was last let go.

    A record that says `SAME_LIFE` keeps the life of the one that it replaces. A save that began in another life
    saves nothing.
    """
    why: str = field(default="", compare=False)
    """Why it stands where it does: the reason of the last step that its history tells of. A change fills it in."""

    def __post_init__(self) -> None:
        self.user_id, self.doc_id = check_user_id(self.user_id), check_doc_id(self.doc_id)
        for name, kinds in _KINDS:
            value = getattr(self, name)
            if not isinstance(value, kinds) or (isinstance(value, float) and not math.isfinite(value)):
                raise self._refused(name)
        if type(self.user_state) is not DocumentState:
            try:
                self.user_state = DocumentState(self.user_state)
            except ValueError as error:
                raise self._refused("user_state") from error
        for name, kind in (("retrieved", str), ("retrieved_seen", int)):
            values = getattr(self, name)
            if not isinstance(values, Sequence) or not {*map(type, values)} <= {kind}:
                raise self._refused(name)
            if type(values) is not tuple:
                setattr(self, name, tuple(values))
        self.normalize_times()

    def normalize_times(self) -> None:
        """Bring the times to UTC, also those that were set on the record since it was made.

        Raises:
            InvalidDocumentError: One is no time, or none that UTC has.
        """
        held = self.__dict__
        for name in TIME_FIELDS:
            moment = held[name]
            if moment is None or (type(moment) is datetime and moment.tzinfo is timezone.utc):
                continue
            if not isinstance(moment, datetime):
                raise self._refused(name)
            try:
                held[name] = as_utc(moment)
            except OverflowError as error:
                raise self._refused(name) from error

    def _refused(self, name: str) -> InvalidDocumentError:
        value = getattr(self, name)
        return InvalidDocumentError(f"{name} of document {self.doc_id!r} of user {self.user_id!r} can't be {value!r}")

    def changed(self, **values: Any) -> Self:
        """A copy with some fields changed, for rules: the values are of the right kind, times aware UTC.

        `dataclasses.replace` would check all fields again, five times as long; a query changes every record it
        touches.
        """
        own = self.__dict__
        # A dictionary is copied as a whole in half the time that its entries take one by one.
        held = own | values
        if len(held) != len(own):
            msg = f"a record has no field {', '.join(sorted(values.keys() - own.keys()))}"
            raise TypeError(msg)
        copied = object.__new__(type(self))
        copied.__dict__ = held
        return copied

    @property
    def saved(self) -> bool:
        """Whether a local copy answers for this document."""
        # Asked many times in a query: looking an Enum up in a set costs five times as much.
        return self.user_state is DocumentState.CLAIMED or self.user_state is DocumentState.PINNED

    @property
    def pinned(self) -> bool:
        """Whether the document is part of every answer."""
        return self.user_state is DocumentState.PINNED

    @property
    def counting(self) -> bool:
        """Whether there is a count or a suggestion that absence would reset."""
        unsaved = self.user_state is DocumentState.SURFACED or self.user_state is DocumentState.SUGGESTED
        return unsaved and (self.fetch_count > 0 or self.suggestion_sent)

    @property
    def streak_counts(self) -> bool:
        """Whether searches without a hit can demote this document."""
        return self.saved and not self.pinned_by_user

    @property
    def index_facts(self) -> tuple[object, ...] | None:
        """What an index of the saved copies knows of this record; `None` when it is not saved."""
        return _index_facts(self.__dict__) if self.saved else None


_index_facts = itemgetter(
    "user_state",
    "copy_id",
    "doc_title",
    "doc_path",
    "always_full_doc",
    "pinned_by_user",
    "stale_since",
    "source_version",
    "content_source",
)


_KIND_OF_TYPE: Mapping[str, type | tuple[type, ...]] = {
    "str": str,
    "int": int,
    "float": (int, float),
    "bool": bool,
    "str | None": (str, type(None)),
}
_KINDS = [(item.name, _KIND_OF_TYPE[str(item.type)]) for item in fields(UserDocRecord) if item.type in _KIND_OF_TYPE]
"""Checked when a record is made, so that what is made can be stored, and read back."""

TIME_FIELDS = tuple(item.name for item in fields(UserDocRecord) if "datetime" in str(item.type))
"""The fields of a record that hold a moment."""


@dataclass(frozen=True)
class DocumentEvent:
    """One step in the life of a document: what happened, when, why, at which count and score."""

    doc_id: str
    at: datetime
    what: str
    """`surfaced`, `suggested`, `declined`, `lapsed`, `saved`, `refreshed`, `stale`, `voted`, `pinned`,
    `unpinned`, `demoted` or `removed`."""
    why: str
    """The reason, as a sentence for people."""
    from_state: DocumentState
    to_state: DocumentState
    fetch_count: int
    decay_score: float

    def __str__(self) -> str:
        step = f"{self.from_state} -> {self.to_state}" if self.from_state != self.to_state else str(self.to_state)
        scored = self.from_state in SAVED_STATES
        figures = f"count {self.fetch_count}" + (f", score {self.decay_score:.2f}" if scored else "")
        return f"{self.at:%Y-%m-%d %H:%M} {self.what:<10} {step:<22} {self.why} ({figures})"


@dataclass(frozen=True)
class RetrievedText:
    """A text of an unsaved document as the wrapped retriever returned it, kept so that any worker can save it."""

    doc_id: str
    digest: str
    text: str
    chunk_index: int | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The caller's metadata in JSON types."""
    first_seen: int = 0
    """The user's query that showed it first."""


class Clocks(NamedTuple):
    """A user's two counters: `queries` asked, and `searches` (semantic ones over the saved copies) that ran."""

    queries: int = 0
    searches: int = 0


class QueryStart(NamedTuple):
    """What a query needs to know before it asks anybody."""

    clocks: Clocks
    revision: int
    """Moves whenever what is saved, or how it is served, changed."""
    saved: int
    """Documents that a local copy answers for."""
    idle_keys: tuple[str, ...] = ()
    """Stored keys of documents that this query, missing them, would let lapse or demote."""


@dataclass(frozen=True)
class SavedChanges:
    """What happened to a user's saved documents since a revision."""

    saved: Sequence[UserDocRecord] = ()
    """Those that were saved, or are served in another way now, without their content."""
    gone: Sequence[str] = ()
    """The ids of documents that were let go; some may have been saved and let go since."""


class UserView(NamedTuple):
    """What a rule sees of a user: the clocks and the records asked for (without their content)."""

    user_id: str
    clocks: Clocks
    revision: int
    records: Mapping[str, UserDocRecord]
    """By document id; a document without a record is not in it."""
    saved: int = 0
    """How many documents are saved."""


_NO_STEPS = frozenset({"refreshed", "stale", "voted"})
"""Events of a document after which it stands where it stood."""


@dataclass(frozen=True)
class UserChange:
    """What a rule wants done, all of it or nothing."""

    records: Sequence[UserDocRecord] = ()
    """Written as they are, but for `full_content`, which stays what it was."""
    contents: Mapping[str, str | None] = field(default_factory=dict)
    """New content by document id; `None` removes it."""
    scores: Mapping[str, float] = field(default_factory=dict)
    """New scores, by document id, of records that change in nothing else: a decay run has little more to write."""
    deleted: Sequence[str] = ()
    """Documents of which every trace in the state store goes."""
    events: Sequence[DocumentEvent] = ()
    texts: Sequence[RetrievedText] = ()
    """Retrieved texts to keep."""
    clear_texts: Sequence[str] = ()
    """Documents whose retrieved texts go; texts in the same change are kept."""
    chunk_hits: Mapping[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    """Document id → (copy id, chunk indices that answered); kept where the chunks live beside the state."""
    hit_at: datetime | None = None
    """When those chunks answered."""
    queries: int = 0
    """How far the query clock moves."""
    searches: int = 0
    """How far the search clock moves."""
    outcome: Any = None
    """Whatever the rule tells its caller; not stored."""
    own: bool = False
    """The records are the rule's own, made of those in the view by `changed`, and nobody will change them: then the
    store keeps them as they are, where it else makes copies."""

    def __post_init__(self) -> None:
        if not self.events:
            return
        # Records say why they stand where they do: who lists them reads no histories, a trip for each of them.
        whys = {event.doc_id: event.why for event in self.events if event.what not in _NO_STEPS}
        told = [record.changed(why=whys.get(record.doc_id, record.why)) for record in self.records]
        object.__setattr__(self, "records", told)


@dataclass(frozen=True)
class ForgottenUser:
    """What `forget_user` removed, counted."""

    documents: int = 0
    events: int = 0
    retrieved_texts: int = 0
    chunks: int = 0
    files: int = 0


@dataclass(frozen=True)
class PurgedDocument:
    """What `purge` removed of a document, counted over all users."""

    doc_id: str
    users: int = 0
    """Users who had met it, saved or not."""
    copies: int = 0
    """Saved copies."""
    files: int = 0
    """Readable copies in a folder."""
