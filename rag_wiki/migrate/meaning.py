"""What a record of release 0.2 means here: values in, a draft of what is to be written out.

Fields that mean the same keep their value. The others:

- A CLAIMED document that might be pinned or let go had that moment in `pinned_at` or `demoted_at`; here these tell of
  the states alone, and candidates have fields of their own. The later of the two holds.
- `explicit_signal` grew by 0.3 with each vote; here it is the last vote. Above zero is +1.
- `force_pin` set it to exactly 1, and the decay run took such a pin back. Here a pin of the user's own stays: that is
  what a PINNED document with a signal of 1 or more becomes, and its signal is no vote.
- A saved document said that a suggestion was out, or when the next one was due. Here it has none.
- `next_suggest_at` beyond zero comes of a declined suggestion: one decline, though it may have been more.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from langchain_core.documents import Document
from numpy.typing import NDArray

from rag_wiki.config import RagWikiRetrieverConfig
from rag_wiki.errors import RagWikiError
from rag_wiki.lifecycle.query import MOST_TEXT_CHARS, MOST_TEXTS
from rag_wiki.migrate.older_chunks import ChunkFile, OlderChunk
from rag_wiki.migrate.values import moment_of, number_of, text_of, whole_of
from rag_wiki.pieces import read_global
from rag_wiki.storage.records import DocumentState, RetrievedText, UserDocRecord, join_halves
from rag_wiki.texts import flat, join_texts

__all__ = ["ChunkDraft", "Draft", "UnreadableRecordError", "understand"]

_TIMES = ("last_fetched_at", "cached_at", "pinned_at", "demoted_at", "no_resiluggest_until")


class UnreadableRecordError(Exception):
    """A record of which not even the state can be told; the message says why."""


@dataclass(frozen=True)
class ChunkDraft:
    """The chunks of a copy, in document order."""

    chunks: tuple[OlderChunk, ...]
    vectors: NDArray[np.float32] | None = None
    """(n, dim) float32, of a model that nobody named; rows of zeros stand for those without one."""
    without_vector: tuple[int, ...] = ()
    probes: tuple[OlderChunk, ...] = ()
    """Those with a vector that were kept first and last."""

    @property
    def texts(self) -> list[str]:
        """The text of each chunk."""
        return [chunk.text for chunk in self.chunks]


@dataclass(frozen=True)
class Draft:
    """What is to be written for one document."""

    record: UserDocRecord
    """With its content."""
    own_content: str | None = None
    """The content that was kept with the record, without regard to its chunks."""
    copy: ChunkDraft | None = None
    """The chunks of a saved document, where there are any."""
    complete: bool = True
    """Whether the chunks hold all of the content."""
    texts: tuple[RetrievedText, ...] = ()
    """What was retrieved of a document that is not saved, for saving it."""
    notes: tuple[str, ...] = ()
    """What of it could not be read, or is not as it was."""


def understand(
    user_id: str, doc_id: str, fields: Mapping[str, object], file: ChunkFile | None, *, shared: bool = False
) -> Draft:
    """The draft of a record and the file of its chunks; `shared` where the file may hold another document's, too.

    Raises:
        UnreadableRecordError: Its state can't be told, or our records refuse its ids.
    """
    reader = _Reader(fields)
    try:
        record = _record(user_id, doc_id, reader)
    except RagWikiError as error:
        raise UnreadableRecordError(str(error)) from error
    notes = [f"{name} {fields[name]!r:.80} can't be read and is left out" for name in reader.unreadable]
    content = record.full_content
    chunks, told = _chunks(file, content, shared=shared)
    notes += told
    if not record.saved:
        if content is not None and not chunks:
            chunks = [OlderChunk(0, content)]
        record = replace(record, full_content=None)
        # What was let go is gone: the user may have wanted that.
        kept = () if record.user_state is DocumentState.DEMOTED else _kept(record, chunks)
        return Draft(_with_texts(record, kept), content, texts=kept, notes=tuple(notes))
    if not chunks:
        return Draft(record, content, notes=tuple(notes))
    own = content
    ordered, content, source = _in_order(chunks, content)
    if source is not None and record.full_content is not None:
        notes.append("its chunks hold more than its content did, which is now made of them")
    record = replace(record, full_content=content, content_source=source)
    copy, told = _with_vectors(ordered)
    with_vector = [chunk for chunk in chunks if chunk.vector is not None]
    copy = replace(copy, probes=tuple(with_vector[:1] + with_vector[1:][-1:]))
    complete = source is not None or _cover(copy.texts, content)
    return Draft(record, own, copy, complete, notes=(*notes, *told))


class _Reader:
    """Fields of a record, read one by one; those that are not as they should be are noted, and take their default."""

    def __init__(self, fields: Mapping[str, object]) -> None:
        self._fields = fields
        self.unreadable: list[str] = []

    def __call__(self, name: str, read: Any, default: Any = None) -> Any:
        raw = self._fields.get(name)
        # Releases before a field was added have none; Redis keeps an empty text for nothing.
        if raw is None or (raw == "" and read is not text_of):
            return default
        value = read(raw)
        if value is None:
            self.unreadable.append(name)
            return default
        return value


def _count(raw: object) -> int | None:
    value = whole_of(raw)
    return value if value is not None and value >= 0 else None


def _flag(raw: object) -> bool | None:
    value = whole_of(raw)
    return bool(value) if value in (0, 1) else None


def _score(raw: object) -> float | None:
    value = number_of(raw)
    return value if value is not None and 0.0 <= value <= 1.0 else None


def _record(user_id: str, doc_id: str, read: _Reader) -> UserDocRecord:
    name = read("user_state", text_of, "")
    try:
        state = DocumentState(name)
    except ValueError as error:
        msg = f"its state is {name!r}" if name else "it has no state"
        raise UnreadableRecordError(msg) from error
    times = {field: read(field, moment_of) for field in _TIMES}
    signal = read("explicit_signal", number_of, 0.0)
    content = read("full_content", text_of)
    content = join_halves(content) if content is not None and content.strip() else None
    saved, pinned = state in (DocumentState.CLAIMED, DocumentState.PINNED), state is DocumentState.PINNED
    own_pin = pinned and signal >= 1.0
    next_suggest_at = read("next_suggest_at", _count, 0)
    declined = next_suggest_at > 0 and not saved
    full_document, streak = read("always_full_doc", _flag, False), read("cache_miss_streak", _count, 0)
    # Read although it follows from the state: what is wrong with it is told.
    read("suggestion_sent", _flag)
    pins, sinks = (None, None) if state is not DocumentState.CLAIMED else (times["pinned_at"], times["demoted_at"])
    return UserDocRecord(
        user_id=user_id,
        doc_id=doc_id,
        doc_title=join_halves(read("doc_title", text_of, "")),
        doc_path=join_halves(read("doc_path", text_of, "")),
        user_state=state,
        fetch_count=read("fetch_count", _count, 0),
        last_fetched_at=times["last_fetched_at"],
        suggestion_sent=state is DocumentState.SUGGESTED,
        decay_score=read("decay_score", _score, 1.0),
        explicit_signal=0.0 if own_pin else float((signal > 0) - (signal < 0)),
        full_content=content,
        cached_at=times["cached_at"] if saved else None,
        pinned_at=times["pinned_at"] if pinned else None,
        demoted_at=times["demoted_at"] if state is DocumentState.DEMOTED else None,
        no_resiluggest_until=None if saved else times["no_resiluggest_until"],
        next_suggest_at=next_suggest_at if declined else 0,
        decline_count=int(declined),
        queries_missed=read("queries_missed", _count, 0),
        cache_miss_streak=streak if saved and not own_pin else 0,
        always_full_doc=full_document and saved,
        pinned_by_user=own_pin,
        pin_candidate_since=None if pins is None or (sinks is not None and sinks > pins) else pins,
        demotion_candidate_since=None if sinks is None or (pins is not None and sinks <= pins) else sinks,
    )


def _chunks(file: ChunkFile | None, content: str | None, *, shared: bool) -> tuple[list[OlderChunk], list[str]]:
    """The chunks that are this document's, each text once, and what is to be said of the others."""
    if file is None:
        return [], []
    notes = [f"its chunk file can't be read: {file.problem}"] if file.problem and not file.unread else []
    if file.unreadable:
        notes.append(f"{file.unreadable} lines of its chunk file can't be read")
    own = list(file.chunks)
    if shared and own:
        # Ids that differed in other characters than letters and digits shared a file: nobody gets another's text.
        whole = flat(content or "")
        own = [chunk for chunk in own if flat(chunk.text) in whole]
        notes.append(
            f"another document had the same chunk file: {len(own)} of {len(file.chunks)} chunks are in the content of "
            "this one, and came along"
        )
    once: dict[str, OlderChunk] = {}
    for chunk in own:
        before = once.get(chunk.text, replace(chunk, hit_count=0, last_hit_at=None))
        times = [time for time in (before.last_hit_at, chunk.last_hit_at) if time is not None]
        once[chunk.text] = replace(
            before,
            hit_count=before.hit_count + chunk.hit_count,
            last_hit_at=max(times, default=None),
            vector=before.vector or chunk.vector,
        )
    return list(once.values()), notes


def _in_order(chunks: Sequence[OlderChunk], content: str | None) -> tuple[list[OlderChunk], str, str | None]:
    """The chunks in document order, numbered so that no two share a number; the content, and its source if it is them.

    Release 0.2.4 kept all retrieved texts of a document as chunks, and as its content often the first of them alone.
    """
    whole = flat(content or "")
    places = {chunk.text: whole.find(flat(chunk.text)) for chunk in chunks}
    inside = content is not None and min(places.values()) >= 0
    ordered = sorted(chunks, key=lambda chunk: (places[chunk.text] if inside else 0, chunk.index))
    indices = [chunk.index for chunk in ordered]
    # Where the source had no numbers, 0.2 took a checksum of the text.
    made_up = any(zlib.crc32(chunk.text.encode("utf-8", "surrogatepass")) == chunk.index for chunk in ordered)
    if made_up or len(set(indices)) < len(indices):
        ordered = [replace(chunk, index=number) for number, chunk in enumerate(ordered)]
    joined = join_texts([chunk.text for chunk in ordered])
    if content is None or (not inside and whole in flat(joined)):
        return ordered, joined, "retrieved"
    return ordered, content, None


def _cover(texts: Sequence[str], content: str) -> bool:
    """Whether chunks leave nothing of a content out but white space, and have nothing that is not in it.

    Release 0.2.4 passed over a part of the text when a retrieved chunk had the same number.
    """
    whole, spans = flat(content), list[tuple[int, int]]()
    for text in map(flat, texts):
        at = whole.find(text)
        if at < 0:
            return False
        while at >= 0:
            spans.append((at, at + len(text)))
            at = whole.find(text, at + 1)
    end = 0
    for start, stop in sorted(spans):
        if whole[end:start].strip():
            return False
        end = max(end, stop)
    return not whole[end:].strip()


def _with_vectors(chunks: Sequence[OlderChunk]) -> tuple[ChunkDraft, list[str]]:
    """The chunks with their vectors in one matrix, where they can be compared with each other."""
    widths = {len(chunk.vector) for chunk in chunks if chunk.vector is not None}
    if len(widths) != 1:
        notes = [f"its vectors are of the widths {sorted(widths)} and are left out"] if widths else []
        return ChunkDraft(tuple(chunks)), notes
    width = widths.pop()
    with np.errstate(over="ignore"):
        matrix = np.array([chunk.vector or [0.0] * width for chunk in chunks], dtype=np.float64).astype(np.float32)
    if not np.isfinite(matrix).all():
        return ChunkDraft(tuple(chunks)), ["its vectors hold infinity and are left out"]
    without = tuple(at for at, chunk in enumerate(chunks) if chunk.vector is None)
    return ChunkDraft(tuple(chunks), matrix, without), []


_DEFAULTS = RagWikiRetrieverConfig()


def _kept(record: UserDocRecord, chunks: Sequence[OlderChunk]) -> tuple[RetrievedText, ...]:
    """The chunks as texts that are kept for saving the document, as many as are kept."""
    texts: dict[str, RetrievedText] = {}
    chars = 0
    for chunk in chunks:
        number = None if zlib.crc32(chunk.text.encode("utf-8", "surrogatepass")) == chunk.index else chunk.index
        metadata = {"doc_id": record.doc_id, "doc_title": record.doc_title, "doc_path": record.doc_path}
        if number is not None:
            metadata["chunk_index"] = number  # type: ignore[assignment]  # of several types, as metadata is
        text = read_global(Document(page_content=chunk.text, metadata=metadata), _DEFAULTS).retrieved_text
        chars += len(text.text)
        if len(texts) == MOST_TEXTS or chars > MOST_TEXT_CHARS:
            break
        texts.setdefault(text.digest, text)
    return tuple(texts.values())


def _with_texts(record: UserDocRecord, texts: Sequence[RetrievedText]) -> UserDocRecord:
    return replace(
        record,
        retrieved=tuple(text.digest for text in texts),
        retrieved_seen=(0,) * len(texts),
        retrieved_chars=sum(len(text.text) for text in texts),
    )
