"""Which of the retrieved texts that are kept for saving a document its source still has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple

from rag_wiki.storage.codec import dump_json, plain
from rag_wiki.storage.records import RetrievedText, UserDocRecord
from rag_wiki.texts import are_alike, flat

__all__ = ["OF_ONE_CHUNK", "compare_spans", "current_texts", "is_of_a_search", "last_seen", "source_version"]

OF_ONE_CHUNK = frozenset(
    {
        "doc_id",
        "doc_title",
        "doc_path",
        "chunk_index",
        "total_chunks",
        "start_index",
        "score",
        "relevance_score",
        "from_cache",
        "_id",
        "node_id",
    }
)
"""Metadata that belongs to a chunk or is filled in by us; the rest is the source's own."""
_OF_A_SEARCH = frozenset({"id", "distance", "similarity", "query", "last_accessed_at"})
"""Metadata of a passage that is another one with the next search."""


def is_of_a_search(name: str) -> bool:
    """Whether what metadata says under a name is another thing with the next search."""
    return name in _OF_A_SEARCH or name.startswith("@") or name.lower().endswith("score")


class _Span(NamedTuple):
    """What a passage covers of the text that a splitter cut, by its `start_index`."""

    of: str
    """Tells one text that was cut from another: all that passages of one say alike."""
    start: int
    """Characters before it, from 0."""
    text: str

    def contradicts(self, other: _Span) -> bool | None:
        """Whether the two say different things where they overlap; `None` where they don't."""
        first, end = max(self.start, other.start), min(self.start + len(self.text), other.start + len(other.text))
        if self.of != other.of or first >= end:
            return None
        own, others = (flat(span.text[first - span.start : end - span.start]) for span in (self, other))
        return own != others


def _span_of(text: RetrievedText) -> _Span | None:
    """What a passage covers; `None` without a `start_index`.

    LangChain's splitters (`add_start_index=True`) count within the document that they cut: a page, say, or what is
    under a heading. Passages are of one when the rest of their metadata is the same.
    """
    start = text.metadata.get("start_index")
    # Some stores keep all numbers as floats; a splitter that does not find its chunk again says -1.
    if isinstance(start, bool) or not isinstance(start, (int, float)) or start < 0 or start != int(start):
        return None
    rest = [
        (name, value) for name, value in text.metadata.items() if name not in OF_ONE_CHUNK and not is_of_a_search(name)
    ]
    return _Span(dump_json(sorted(rest)), int(start), text.text)


def compare_spans(text: RetrievedText, kept: Sequence[RetrievedText]) -> tuple[bool, set[str]]:
    """What kept passages say where they overlap a text, by where each begins.

    Returns:
        Whether one says something else there, and the digests of those that say the same.
    """
    span = _span_of(text)
    if span is None:
        return False, set()
    others = {other.digest: found for other in kept if (found := _span_of(other)) is not None}
    said = {digest: span.contradicts(other) for digest, other in others.items()}
    # Several that begin in one place are parts of a piece that was cut: none of them is where it says.
    is_cut = len({(other.of, other.start) for other in others.values()}) < len(others)
    return True in said.values() and not is_cut, {digest for digest, differs in said.items() if differs is False}


def source_version(metadata: Mapping[str, Any], version_key: str | None) -> str | None:
    """The source's version that a piece of it is of; `None` where it names none."""
    version = plain(metadata.get(version_key)) if version_key is not None else None
    return None if version is None else str(version)


def last_seen(record: UserDocRecord) -> dict[str, int]:
    """The texts that are kept, in the order in which they were first seen: digest → query that showed it last."""
    return {**dict.fromkeys(record.retrieved, 0), **dict(zip(record.retrieved, record.retrieved_seen, strict=False))}


def current_texts(
    record: UserDocRecord, texts: Sequence[RetrievedText], version_key: str | None
) -> list[RetrievedText]:
    """What of the kept texts the source still has, as far as can be told, in document order.

    Of several versions the one seen last stays, and of several texts under one number, or that begin in one place. A
    text gives way to one that says something else where the two overlap, or, where no number tells, to one much like
    it, if that came up after it was last seen: parts of one text that are alike have been seen together, or in turn.

    Args:
        record: The document's record, which knows when each text was last seen.
        texts: The kept texts, in the order in which they were first seen. What the record does not name is not kept.
        version_key: The metadata key of the source's version.
    """
    seen = last_seen(record)
    kept = [text for text in texts if text.digest in seen]
    versions = {text.digest: source_version(text.metadata, version_key) for text in kept}
    # Of those that one query showed, the one that came up last is the newest.
    in_turn = sorted(kept, key=lambda text: seen[text.digest])
    named = [version for text in in_turn if (version := versions[text.digest]) is not None]
    in_turn = [text for text in in_turn if versions[text.digest] in (None, *named[-1:])]
    numbers = _numbers(kept, seen)
    latest = {text.digest if numbers[text.digest] is None else numbers[text.digest]: text for text in in_turn}.values()
    current: list[RetrievedText] = []
    for text in [text for text in kept if text in latest]:
        old = [
            at
            for at, other in enumerate(current)
            if (versions[other.digest] is None or versions[text.digest] is None)
            and seen[other.digest] < text.first_seen
            and _is_version(text, other, numbers)
        ]
        if not old:
            current.append(text)
            continue
        # It takes the place of what it is the new version of.
        current[old[0]] = text
        for at in reversed(old[1:]):
            del current[at]
    return _in_order(current)


def _is_version(text: RetrievedText, other: RetrievedText, numbers: Mapping[str, _Number | None]) -> bool:
    """Whether a text is another version of one, by where they are; where that can not be compared, by what they say."""
    own, others = numbers[text.digest], numbers[other.digest]
    if own is None or others is None or own.of != others.of:
        return are_alike(other.text, text.text)
    return own.of is not None and compare_spans(text, [other])[0]


def _in_order(texts: list[RetrievedText]) -> list[RetrievedText]:
    """In document order, by what all of them say of their place; as they are where it does not tell."""
    numbers = [text.chunk_index for text in texts]
    pages = [text.metadata.get("page") for text in texts]
    on_pages = all(isinstance(page, (int, float)) and not isinstance(page, bool) for page in pages)
    spans = [_span_of(text) for text in texts]
    starts = [span.start for span in spans if span is not None]
    # Where each counts from must be known: from its page, or all from one beginning.
    in_one = on_pages or len({span.of for span in spans if span is not None}) == 1
    places: Sequence[Any]
    if None not in numbers:
        places = numbers
    elif len(starts) == len(texts) and in_one:
        places = list(zip(pages, starts, strict=True)) if on_pages else starts
    elif on_pages:
        places = pages
    else:
        return texts
    return [texts[at] for _, at in sorted(zip(places, range(len(texts)), strict=True))]


class _Number(NamedTuple):
    """Which piece a text is: its number among the chunks of its document, or where it begins in a text."""

    of: str | None
    """The text that it begins in (see `_Span.of`); `None` for the number of a chunk."""
    number: int


def _numbers(texts: Sequence[RetrievedText], seen: Mapping[str, int]) -> dict[str, _Number | None]:
    """The number of the piece that each text is, or where it begins, if it says so and that tells: by digest.

    Under one that a query gave to several unlike texts stand parts of a piece: a compressor has cut it, say.
    """
    own = {text.digest: _number(text) for text in texts}
    shared = {
        own[text.digest]
        for text, other in combinations([text for text in texts if own[text.digest] is not None], 2)
        if own[text.digest] == own[other.digest]
        and (0 < text.first_seen == other.first_seen or 0 < seen[text.digest] == seen[other.digest])
        and not are_alike(text.text, other.text)
    }
    return {digest: None if number in shared else number for digest, number in own.items()}


def _number(text: RetrievedText) -> _Number | None:
    if text.chunk_index is not None:
        return _Number(None, text.chunk_index)
    span = _span_of(text)
    return None if span is None else _Number(span.of, span.start)
