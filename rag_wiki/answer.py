"""What a call answers with: the saved copies that speak, the global results beside them, and who said what.

Pure: documents and findings in, documents and drafts of provenance out.
"""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from numbers import Integral
from pathlib import PurePath, PurePosixPath
from typing import Any
from uuid import UUID

import numpy as np
from langchain_core.documents import Document

from rag_wiki.config import RagWikiRetrieverConfig
from rag_wiki.lifecycle.query import FetchedDocument, QueryFindings
from rag_wiki.search.index import DocumentHits, IndexedDocument
from rag_wiki.storage.codec import plain
from rag_wiki.storage.records import DocumentState, RetrievedText, UserDocRecord
from rag_wiki.transparency.provenance import SourceEntry, WithheldCopy

__all__ = [
    "Answer",
    "CachedDocument",
    "CopyFindings",
    "CopyVerdict",
    "GlobalDocument",
    "compose",
    "describe_sources",
    "identify",
    "read_global",
]


_BEYOND_ANY_ID = 10**100
"""Python refuses to write out numbers of some thousand digits."""


@dataclass(frozen=True)
class GlobalDocument:
    """A piece that the wrapped retriever returned, and the source document that it belongs to."""

    document: Document
    doc_id: str | None
    """`None` when nothing identifies it."""
    doc_title: str = ""
    doc_path: str = ""
    chunk_index: int | None = None
    digest: str = ""

    @property
    def retrieved_text(self) -> RetrievedText:
        """The piece as it is kept for saving."""
        metadata = plain(self.document.metadata)
        return RetrievedText(self.doc_id or "", self.digest, self.document.page_content, self.chunk_index, metadata)


@dataclass(frozen=True)
class CopyVerdict:
    """What a piece from the source says about the saved copy of its document."""

    copy_id: str = ""
    """The copy that was compared."""
    stale: str | None = None
    """What was seen that the copy does not have; `None` when nothing."""
    is_new: bool = False
    """A piece that an incomplete copy does not have: served beside it."""


@dataclass(frozen=True)
class CachedDocument:
    """A saved document that may answer, with the text to answer with."""

    found: DocumentHits
    text: str
    full_document: bool = False

    @property
    def record(self) -> UserDocRecord:
        """Its record, as the index has it."""
        return self.found.document.record

    @property
    def chunks(self) -> tuple[int, ...]:
        """The numbers of the chunks used, in document order."""
        return tuple(hit.chunk_index for hit in _in_document_order(self.found))

    @property
    def scores(self) -> tuple[float, ...]:
        """Their cosines, in the same order."""
        return tuple(hit.score for hit in _in_document_order(self.found))


@dataclass
class CopyFindings:
    """What the search in the saved copies gave."""

    cached: list[CachedDocument] = field(default_factory=list)
    """Documents with something to say, best first."""
    unavailable: dict[str, WithheldCopy] = field(default_factory=dict)
    """Documents whose copy may not or can't answer, by id."""
    wanted: set[str] = field(default_factory=set)
    """Those of them that would have answered."""
    matched: frozenset[str] = frozenset()
    """Documents with a chunk at or above the threshold, served or not."""
    searched: frozenset[str] | None = None
    """The documents that a semantic search compared; `None` when none ran."""


@dataclass(frozen=True)
class Answer:
    """The documents of a call, what they mean for the records, and where each came from."""

    documents: list[Document]
    sources: list[SourceEntry]
    """In the order of the documents; states and counts are filled in by `describe_sources`."""
    findings: QueryFindings
    withheld: tuple[WithheldCopy, ...] = ()


@dataclass
class _Pieces:
    """Pieces of one document in the result, gathered for its entry."""

    first: GlobalDocument
    pieces: list[GlobalDocument] = field(default_factory=list)


def identify(document: Document, document_id: str | Callable[[Document], str | None] | None) -> str | None:
    """The id of the source document, or `None` when nothing identifies it."""
    if callable(document_id):
        try:
            return _as_id(document_id(document))
        except LookupError:
            # The usual function looks into the metadata; a document without the key has no id.
            return None
    keys = ("doc_id", "source", "doc_path") if document_id is None else (document_id,)
    candidates = (_as_id(document.metadata.get(key)) for key in keys)
    return next((found for found in candidates if found is not None), None)


def _as_id(value: object) -> str | None:
    """An id of a kind that identifies: text, a whole number, a UUID, a path. `nan`, say, would be everybody's."""
    text = ""
    if isinstance(value, (str, UUID, PurePath)):
        text = str(value)
    elif isinstance(value, (Integral, np.integer)) and not isinstance(value, bool):
        number = int(value)
        text = str(number) if abs(number) < _BEYOND_ANY_ID else ""
    return text if text.strip() else None


def _label(metadata: Mapping[str, Any], *keys: str) -> str:
    """The first of these values that can name something, as text; other types name nothing."""
    values = (_as_id(metadata.get(key)) for key in keys)
    return next((value for value in values if value is not None), "")


def read_global(document: Document, config: RagWikiRetrieverConfig) -> GlobalDocument:
    """A copy of a document that the wrapped retriever returned, with the missing metadata filled in.

    A document that nothing identifies is copied as it is.
    """
    doc_id = identify(document, config.document_id)
    metadata = _copied(document.metadata)
    if doc_id is None:
        return GlobalDocument(document.model_copy(update={"metadata": metadata}), None)
    path = _label(metadata, "doc_path", "source", "file_path")
    title = _label(metadata, "doc_title", "title") or PurePosixPath(path or doc_id).name or doc_id
    for key, value in (("doc_id", doc_id), ("doc_title", title), ("doc_path", path)):
        if metadata.get(key) is None:
            metadata[key] = value
    metadata["from_cache"] = False
    index = metadata.get("chunk_index")
    return GlobalDocument(
        document=document.model_copy(update={"metadata": metadata}),
        doc_id=doc_id,
        doc_title=title,
        doc_path=path,
        chunk_index=index if isinstance(index, int) and not isinstance(index, bool) else None,
        digest=hashlib.sha256(document.page_content.encode("utf-8", "surrogatepass")).hexdigest()[:16],
    )


def compose(
    found: Sequence[GlobalDocument] | None,
    copies: CopyFindings,
    verdicts: Mapping[tuple[str, str], CopyVerdict],
    *,
    only_found: bool,
    k: int | None,
) -> Answer:
    """Put the answer together: pinned documents, then cached and global ones in turn, `k` at most.

    Args:
        found: What the wrapped retriever returned; `None` when it was not asked.
        copies: What the search in the saved copies gave.
        verdicts: By (document id, digest): what the found pieces say about saved copies.
        only_found: Serve only copies of documents that the wrapped retriever found: the call told it something
            (a filter, say) that a copy can't obey.
        k: Documents at most; `None` for all.
    """
    pieces = found or ()
    found_ids = {item.doc_id for item in pieces if item.doc_id is not None}
    stale = {
        doc_id: (verdict.copy_id, verdict.stale)
        for (doc_id, _), verdict in verdicts.items()
        if verdict.stale is not None
    }
    withheld = _withheld(pieces, copies, stale, found_ids)
    serving = {
        item.record.doc_id: item
        for item in copies.cached
        if item.record.doc_id not in stale and (not only_found or item.record.doc_id in found_ids)
    }
    chosen = _in_turn(serving, pieces, verdicts)[:k]
    findings = QueryFindings(
        fetched=_fetched(pieces, (copies.unavailable.keys() | stale.keys()) & found_ids),
        answered={
            item.record.doc_id: (item.record.copy_id or "", item.chunks)
            for item in chosen
            if isinstance(item, CachedDocument) and item.found.above_threshold
        },
        matched=copies.matched,
        stale={doc_id: seen for doc_id, seen in stale.items() if doc_id not in copies.unavailable},
        searched=copies.searched,
        asked=found is not None,
    )
    return Answer(
        documents=[item.document if isinstance(item, GlobalDocument) else _as_document(item) for item in chosen],
        sources=_sources(chosen, found_ids, {doc_id for doc_id, kept in withheld.items() if kept.reason == "stale"}),
        findings=findings,
        withheld=tuple(withheld.values()),
    )


def _in_turn(
    serving: Mapping[str, CachedDocument],
    pieces: Sequence[GlobalDocument],
    verdicts: Mapping[tuple[str, str], CopyVerdict],
) -> list[CachedDocument | GlobalDocument]:
    """Pinned documents, then the other copies and the pieces beside them in turn, each in its own order."""
    pinned = [item for item in serving.values() if item.record.pinned]
    claimed = [item for item in serving.values() if not item.record.pinned]
    beside = [
        item
        for item in pieces
        if item.doc_id not in serving or verdicts.get((item.doc_id or "", item.digest), CopyVerdict()).is_new
    ]
    turns = (item for pair in zip_longest(claimed, beside) for item in pair if item is not None)
    return [*pinned, *turns]


def _withheld(
    pieces: Sequence[GlobalDocument],
    copies: CopyFindings,
    stale: Mapping[str, tuple[str, str]],
    found_ids: set[str],
) -> dict[str, WithheldCopy]:
    """The copies that this call would have used and did not."""
    withheld = {
        doc_id: kept for doc_id, kept in copies.unavailable.items() if doc_id in copies.wanted or doc_id in found_ids
    }
    titles = {item.doc_id: item.doc_title for item in pieces}
    for doc_id in stale:
        withheld.setdefault(doc_id, WithheldCopy(doc_id, titles.get(doc_id, ""), "stale"))
    return withheld


def _copied(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """A copy that shares nothing that can be copied; a value that can't (a handle, a lock) stays the caller's."""
    copied: dict[str, Any] = {}
    for name, value in metadata.items():
        try:
            copied[name] = value if isinstance(value, (str, int, float, type(None))) else copy.deepcopy(value)
        except Exception:  # what deepcopy raises is up to the value's class
            copied[name] = value
    return copied


def _in_document_order(found: DocumentHits) -> list[Any]:
    return sorted(found.hits, key=lambda hit: hit.position)


def _fetched(found: Sequence[GlobalDocument], in_place: set[str]) -> dict[str, FetchedDocument]:
    fetched: dict[str, FetchedDocument] = {}
    for item in found:
        if item.doc_id is None:
            continue
        if item.doc_id not in fetched:
            fetched[item.doc_id] = FetchedDocument(
                item.doc_title, item.doc_path, in_place_of_copy=item.doc_id in in_place
            )
        before = fetched[item.doc_id]
        fetched[item.doc_id] = replace(before, texts=(*before.texts, item.retrieved_text))
    return fetched


def _as_document(item: CachedDocument) -> Document:
    record, copied = item.record, item.found.document.copy
    metadata = {
        **(_copied(copied.metadata) if copied is not None else {}),
        "doc_id": record.doc_id,
        "doc_title": record.doc_title,
        "doc_path": record.doc_path,
        "from_cache": True,
        "user_state": record.user_state.value,
        "chunks_used": list(item.chunks),
        "scores": list(item.scores),
        "total_chunks": record.chunk_count,
        "full_doc_injected": item.full_document,
    }
    return Document(page_content=item.text, metadata=metadata)


def _sources(
    chosen: Sequence[CachedDocument | GlobalDocument], found_ids: set[str], stale: set[str]
) -> list[SourceEntry]:
    entries: list[SourceEntry | _Pieces] = []
    by_id: dict[str, _Pieces] = {}
    for item in chosen:
        if isinstance(item, CachedDocument):
            entries.append(_cached_source(item, found_ids))
        elif item.doc_id is not None and item.doc_id in by_id:
            by_id[item.doc_id].pieces.append(item)
        else:
            pieces = _Pieces(item, [item])
            entries.append(pieces)
            if item.doc_id is not None:
                by_id[item.doc_id] = pieces
    return [_global_source(entry, stale) if isinstance(entry, _Pieces) else entry for entry in entries]


def _cached_source(item: CachedDocument, found_ids: set[str]) -> SourceEntry:
    record, copied = item.record, item.found.document.copy
    best = item.found.hits[0].position if item.found.hits else 0
    return SourceEntry(
        doc_id=record.doc_id,
        doc_title=record.doc_title,
        doc_path=record.doc_path,
        user_state=record.user_state,
        fetch_count=record.fetch_count,
        chunks_used=item.chunks,
        total_chunks=record.chunk_count or None,
        section_heading=copied.section(best) if copied is not None else None,
        from_cache=True,
        scores=item.scores,
        full_document=item.full_document,
        content_source=record.content_source,
        also_global=record.doc_id in found_ids,
    )


def _global_source(entry: _Pieces, stale: set[str]) -> SourceEntry:
    first, metadata = entry.first, entry.first.document.metadata
    numbers = [piece.chunk_index for piece in entry.pieces if piece.chunk_index is not None]
    total = metadata.get("total_chunks")
    scores = [_score(piece.document.metadata.get("score")) for piece in entry.pieces]
    title = first.doc_title or _label(metadata, "doc_title", "title")
    return SourceEntry(
        doc_id=first.doc_id,
        doc_title=title,
        doc_path=first.doc_path,
        user_state=DocumentState.GLOBAL,
        fetch_count=0,
        chunks_used=tuple(sorted(set(numbers))) if len(numbers) == len(entry.pieces) else (),
        total_chunks=total if isinstance(total, int) and not isinstance(total, bool) else None,
        section_heading=_label(metadata, "section", "section_heading") or None,
        scores=tuple(score for score in scores if score is not None),
        stale=first.doc_id in stale,
        passages=len(entry.pieces),
    )


def _score(value: object) -> float | None:
    """A score that the wrapped retriever gave, where it is a number that can be one."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.number)):
        return None
    try:
        score = float(value)
    except (OverflowError, TypeError):
        return None
    return score if math.isfinite(score) else None


def describe_sources(sources: Sequence[SourceEntry], records: Mapping[str, UserDocRecord]) -> list[SourceEntry]:
    """The entries with the states and counts that their documents have after the call."""
    described = []
    for source in sources:
        record = records.get(source.doc_id) if source.doc_id is not None else None
        if record is None:
            described.append(source)
            continue
        # A document that this very call let go answered as what it was.
        state = source.user_state if source.from_cache and not record.saved else record.user_state
        described.append(replace(source, user_state=state, fetch_count=record.fetch_count))
    return described


def unavailable_copy(document: IndexedDocument, reason: str) -> WithheldCopy:
    """A saved copy that is not served."""
    return WithheldCopy(document.record.doc_id, document.record.doc_title, reason)
