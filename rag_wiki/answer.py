"""What a call answers with: the saved copies that speak, the global results beside them, and who said what.

Pure: documents and findings in, documents and drafts of provenance out.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from numbers import Integral
from pathlib import PurePath, PurePosixPath
from typing import Any, NamedTuple
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


_ATOMS = (str, int, float, bool, type(None))
_BEYOND_ANY_ID = 10**100
"""Python refuses to write out numbers of some thousand digits."""


class GlobalDocument(NamedTuple):
    """A piece that the wrapped retriever returned, and the source document that it belongs to."""

    document: Document
    doc_id: str | None
    """`None` when nothing identifies it."""
    doc_title: str = ""
    doc_path: str = ""
    chunk_index: int | None = None
    digest: str = ""

    @property
    def length(self) -> int:
        """Its characters."""
        return len(self.document.page_content)

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


class CachedDocument(NamedTuple):
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
    """The documents of a call, what they mean for the records, and what each is made of."""

    documents: list[Document]
    origins: Sequence[CachedDocument | Sequence[GlobalDocument]]
    """The copies, and the pieces of each other source document, in the order of the documents."""
    found_ids: set[str]
    """What the wrapped retriever found."""
    findings: QueryFindings
    withheld: tuple[WithheldCopy, ...] = ()


def identify(document: Document, document_id: str | Callable[[Document], str | None] | None) -> str | None:
    """The id of the source document, or `None` when nothing identifies it."""
    if callable(document_id):
        try:
            return _as_id(document_id(document))
        except LookupError:
            # The usual function looks into the metadata; a document without the key has no id.
            return None
    return _first_id(document.metadata, ("doc_id", "source", "doc_path") if document_id is None else (document_id,))


def _first_id(metadata: Mapping[str, Any], keys: Sequence[str]) -> str | None:
    for key in keys:
        found = _as_id(metadata.get(key))
        if found is not None:
            return found
    return None


def _as_id(value: object) -> str | None:
    """An id of a kind that identifies: text, a whole number, a UUID, a path. `nan`, say, would be everybody's."""
    text = ""
    if type(value) is str:
        text = value
    elif isinstance(value, (str, UUID, PurePath)):
        text = str(value)
    elif isinstance(value, (Integral, np.integer)) and not isinstance(value, bool):
        number = int(value)
        text = str(number) if abs(number) < _BEYOND_ANY_ID else ""
    return text if text.strip() else None


def _label(metadata: Mapping[str, Any], *keys: str) -> str:
    """The first of these values that can name something, as text; other types name nothing."""
    return _first_id(metadata, keys) or ""


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
        origins=_by_document(chosen),
        found_ids=found_ids,
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
    copied = dict(metadata)
    for name, value in metadata.items():
        if type(value) not in _ATOMS:
            # What deepcopy raises is up to the value's class.
            with contextlib.suppress(Exception):
                copied[name] = copy.deepcopy(value)
    return copied


def _in_document_order(found: DocumentHits) -> list[Any]:
    return sorted(found.hits, key=lambda hit: hit.position)


def _fetched(found: Sequence[GlobalDocument], in_place: set[str]) -> dict[str, FetchedDocument]:
    pieces: dict[str, list[GlobalDocument]] = {}
    for item in found:
        if item.doc_id is not None:
            pieces.setdefault(item.doc_id, []).append(item)
    return {
        doc_id: FetchedDocument(own[0].doc_title, own[0].doc_path, own, in_place_of_copy=doc_id in in_place)
        for doc_id, own in pieces.items()
    }


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


def _by_document(
    chosen: Sequence[CachedDocument | GlobalDocument],
) -> list[CachedDocument | Sequence[GlobalDocument]]:
    """The copies as they are, and pieces of one document together where the first of them stands."""
    origins: list[CachedDocument | Sequence[GlobalDocument]] = []
    by_id: dict[str, list[GlobalDocument]] = {}
    for item in chosen:
        if isinstance(item, CachedDocument):
            origins.append(item)
        elif item.doc_id is not None and item.doc_id in by_id:
            by_id[item.doc_id].append(item)
        else:
            pieces = [item]
            origins.append(pieces)
            if item.doc_id is not None:
                by_id[item.doc_id] = pieces
    return origins


def describe_sources(answer: Answer, records: Mapping[str, UserDocRecord]) -> list[SourceEntry]:
    """An entry for each document of an answer, with the state and count that it has after the call."""
    stale = {kept.doc_id for kept in answer.withheld if kept.reason == "stale"}
    return [
        _cached_source(origin, answer.found_ids, records.get(origin.record.doc_id))
        if isinstance(origin, CachedDocument)
        else _global_source(origin, stale, records.get(origin[0].doc_id or ""))
        for origin in answer.origins
    ]


def _cached_source(item: CachedDocument, found_ids: set[str], after: UserDocRecord | None) -> SourceEntry:
    record, copied = item.record, item.found.document.copy
    best = item.found.hits[0].position if item.found.hits else 0
    return SourceEntry(
        doc_id=record.doc_id,
        doc_title=record.doc_title,
        doc_path=record.doc_path,
        # A document that this very call let go answered as what it was.
        user_state=record.user_state if after is None or not after.saved else after.user_state,
        fetch_count=record.fetch_count if after is None else after.fetch_count,
        chunks_used=item.chunks,
        total_chunks=record.chunk_count or None,
        section_heading=copied.section(best) if copied is not None else None,
        from_cache=True,
        scores=item.scores,
        full_document=item.full_document,
        content_source=record.content_source,
        also_global=record.doc_id in found_ids,
    )


def _global_source(pieces: Sequence[GlobalDocument], stale: set[str], after: UserDocRecord | None) -> SourceEntry:
    first, metadata = pieces[0], pieces[0].document.metadata
    numbers = {piece.chunk_index for piece in pieces}
    total = metadata.get("total_chunks")
    given = [piece.document.metadata["score"] for piece in pieces if "score" in piece.document.metadata]
    scores = map(_score, given)
    title = first.doc_title or _label(metadata, "doc_title", "title")
    return SourceEntry(
        doc_id=first.doc_id,
        doc_title=title,
        doc_path=first.doc_path,
        user_state=DocumentState.GLOBAL if after is None else after.user_state,
        fetch_count=0 if after is None else after.fetch_count,
        chunks_used=() if None in numbers else tuple(sorted(number for number in numbers if number is not None)),
        total_chunks=total if isinstance(total, int) and not isinstance(total, bool) else None,
        section_heading=_label(metadata, "section", "section_heading") or None,
        scores=tuple(score for score in scores if score is not None),
        stale=first.doc_id in stale,
        passages=len(pieces),
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


def unavailable_copy(document: IndexedDocument, reason: str) -> WithheldCopy:
    """A saved copy that is not served."""
    return WithheldCopy(document.record.doc_id, document.record.doc_title, reason)
