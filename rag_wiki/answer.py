"""What a call answers with: the saved copies that speak, the global results beside them, and who said what.

Pure: documents and findings in, documents and drafts of provenance out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np
from langchain_core.documents import Document

from rag_wiki.lifecycle.query import FetchedDocument, QueryFindings
from rag_wiki.pieces import CachedDocument, GlobalDocument, as_number, copy_metadata, label
from rag_wiki.ranking import Ranked, first_of, in_focus, in_turn
from rag_wiki.search.calibration import Focus
from rag_wiki.search.index import ChunkHit, IndexedDocument
from rag_wiki.storage.records import DocumentState, UserDocRecord
from rag_wiki.transparency.provenance import SourceEntry, WithheldCopy

__all__ = ["Answer", "ChunkScores", "CopyFindings", "CopyVerdict", "compose", "describe_sources", "unavailable_copy"]


class CopyVerdict(NamedTuple):
    """What a piece from the source says about the saved copy of its document."""

    copy_id: str = ""
    """The copy that was compared."""
    stale: str | None = None
    """What was seen that the copy does not have; `None` when nothing."""
    is_new: bool = False
    """A piece that an incomplete copy does not have: served beside it."""
    positions: tuple[int, ...] | None = ()
    """The places in the copy of the chunks that hold the piece; `None` when they could not be read."""


_NO_VERDICT = CopyVerdict()

ChunkScores: TypeAlias = Callable[[IndexedDocument, Sequence[int]], Sequence[float]]
"""The scores of chunks of a saved document, by their places in its copy."""


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


class Answer(NamedTuple):
    """The documents of a call, what they mean for the records, and what each is made of."""

    documents: list[Document]
    origins: Sequence[CachedDocument | Sequence[GlobalDocument]]
    """The copies, and the pieces of each other source document, in the order of the documents."""
    found_ids: set[str]
    """What the wrapped retriever found."""
    findings: QueryFindings
    withheld: tuple[WithheldCopy, ...] = ()
    left_out: int = 0
    """Documents and pieces that were too far from the best one."""


def compose(
    found: Sequence[GlobalDocument] | None,
    copies: CopyFindings,
    verdicts: Mapping[tuple[str, str], CopyVerdict],
    *,
    only_found: bool,
    k: int | None,
    query: str = "",
    focus: Focus | None = None,
    scores_of: ChunkScores | None = None,
    began_at: int = 0,
) -> Answer:
    """Put the answer together, `k` documents at most: pinned ones, then cached and global ones in turn.

    A copy brings the chunks along that hold what was found of its document: those pieces are not served beside it. With
    a focus: cached and global ones in one ranking, and only what is close to the best.

    Args:
        found: What the wrapped retriever returned; `None` when it was not asked.
        copies: What the search in the saved copies gave.
        verdicts: By (document id, digest): what the found pieces say about saved copies.
        only_found: Serve only copies of documents that the wrapped retriever found: the call told it something
            (a filter, say) that a copy can't obey.
        k: Documents at most; `None` for all.
        query: What was asked; a focus ranks by its words too.
        focus: How close to the best; `None` to serve all.
        scores_of: The scores of what comes along; `None` when chunks have none.
        began_at: The user's revision when the query began.
    """
    pieces = found or ()
    found_ids = {item.doc_id for item in pieces if item.doc_id is not None}
    stale = {
        doc_id: (verdict.copy_id, verdict.stale)
        for (doc_id, _), verdict in verdicts.items()
        if verdict.stale is not None
    }
    withheld = _withheld(pieces, copies, stale, found_ids) if stale or copies.unavailable else {}
    serving = {
        item.record.doc_id: item
        for item in copies.cached
        if item.record.doc_id not in stale and (not only_found or item.record.doc_id in found_ids)
    }
    beside = _beside(serving, pieces, verdicts)
    if focus is None:
        ranked = in_turn(_with_found(serving, verdicts, scores_of), beside)
    else:
        ranked = in_focus(query, serving.values(), beside, focus, _pinned(copies))
    chosen = first_of(ranked, k)
    return Answer(
        documents=[item.document if isinstance(item, GlobalDocument) else _as_document(item) for item in chosen],
        origins=_by_document(chosen),
        found_ids=found_ids,
        findings=QueryFindings(
            fetched=_fetched(pieces if focus is None else _seen(pieces, beside, chosen, focus), chosen),
            answered=_answered(chosen),
            matched=copies.matched,
            stale={doc_id: seen for doc_id, seen in stale.items() if doc_id not in copies.unavailable},
            searched=copies.searched,
            asked=found is not None,
            began_at=began_at,
        ),
        withheld=tuple(withheld.values()),
        left_out=len(serving) + len(beside) - len(ranked),
    )


def _answered(chosen: Sequence[Ranked]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The copies that answered: document id → (copy id, the numbers of the chunks that matched)."""
    return {
        item.record.doc_id: (item.record.copy_id or "", item.hit_chunks)
        for item in chosen
        if isinstance(item, CachedDocument) and item.found.above_threshold
    }


def _pinned(copies: CopyFindings) -> set[str]:
    """The documents that are pinned, whether or not their copy can answer."""
    return {item.record.doc_id for item in copies.cached if item.record.pinned} | copies.wanted


def _beside(
    serving: Mapping[str, CachedDocument],
    pieces: Sequence[GlobalDocument],
    verdicts: Mapping[tuple[str, str], CopyVerdict],
) -> list[GlobalDocument]:
    """The pieces that no copy stands for."""
    return [
        item
        for item in pieces
        if item.doc_id not in serving or verdicts.get((item.doc_id or "", item.digest), _NO_VERDICT).is_new
    ]


def _with_found(
    serving: Mapping[str, CachedDocument],
    verdicts: Mapping[tuple[str, str], CopyVerdict],
    scores_of: ChunkScores | None,
) -> list[CachedDocument]:
    """The copies, with the chunks that hold what was found: saving takes nothing away that the retriever found."""
    found: dict[str, set[int]] = {}
    for (doc_id, _), verdict in verdicts.items():
        if verdict.positions and doc_id in serving:
            found.setdefault(doc_id, set()).update(verdict.positions)
    return [
        _bringing(item, found[doc_id], scores_of) if doc_id in found and not item.full_document else item
        for doc_id, item in serving.items()
    ]


def _bringing(item: CachedDocument, positions: set[int], scores_of: ChunkScores | None) -> CachedDocument:
    """A copy with these of its chunks along, as far as it does not answer with them already."""
    document, hits, _ = item.found
    missing = sorted(positions.difference([hit.position for hit in hits]))
    if not missing or document.copy is None:
        return item
    scores = [0.0] * len(missing) if scores_of is None else scores_of(document, missing)
    along = [
        ChunkHit(position, document.copy.indices[position], score, is_neighbour=True)
        for position, score in zip(missing, scores, strict=True)
    ]
    return item._replace(found=item.found._replace(hits=(*hits, *along)))


def _seen(
    pieces: Sequence[GlobalDocument], beside: Sequence[GlobalDocument], chosen: Sequence[Ranked], focus: Focus
) -> list[GlobalDocument]:
    """The pieces that count as fetched.

    What was left out or found no room nobody was shown; what scores no more than any text does (for a question about
    nothing, say) was not wanted.
    """
    left_out = {id(item) for item in beside} - {id(item) for item in chosen}
    return [item for item in pieces if id(item) not in left_out and (item.score is None or item.score > focus.chance)]


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


def _fetched(found: Sequence[GlobalDocument], chosen: Sequence[Ranked]) -> dict[str, FetchedDocument]:
    shown = {item.doc_id if isinstance(item, GlobalDocument) else item.record.doc_id for item in chosen}
    pieces: dict[str, list[GlobalDocument]] = {}
    for item in found:
        if item.doc_id is not None:
            pieces.setdefault(item.doc_id, []).append(item)
    return {
        doc_id: FetchedDocument(own[0].doc_title, own[0].doc_path, own, doc_id in shown)
        for doc_id, own in pieces.items()
    }


def _as_document(item: CachedDocument) -> Document:
    record, copied = item.record, item.found.document.copy
    metadata = {
        **(copy_metadata(copied.metadata) if copied is not None else {}),
        **(copy_metadata(item.own_metadata) if item.own else {}),
        "doc_id": record.doc_id,
        "doc_title": record.doc_title,
        "doc_path": record.doc_path,
        "from_cache": True,
        "user_state": record.user_state.value,
        "chunks_used": list(item.chunks),
        "scores": list(item.scores),
        "total_chunks": _known_total(record),
        "full_doc_injected": item.full_document,
    }
    # A copy of a document takes a fifth of the time that a new one's checks take.
    return _EMPTY.model_copy(update={"page_content": item.text, "metadata": metadata})


_EMPTY = Document(page_content="", metadata={})


def _known_total(record: UserDocRecord) -> int | None:
    """The chunks of a document. Of a copy made of what was retrieved nobody knows how much it lacks."""
    return None if record.content_source == "retrieved" else record.chunk_count or None


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
        total_chunks=_known_total(record),
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
    scores = map(_score_of, pieces)
    title = first.doc_title or label(metadata, "doc_title", "title")
    return SourceEntry(
        doc_id=first.doc_id,
        doc_title=title,
        doc_path=first.doc_path,
        user_state=DocumentState.GLOBAL if after is None else after.user_state,
        fetch_count=0 if after is None else after.fetch_count,
        chunks_used=() if None in numbers else tuple(sorted(number for number in numbers if number is not None)),
        total_chunks=as_number(metadata.get("total_chunks")),
        section_heading=label(metadata, "section", "section_heading") or None,
        scores=tuple(score for score in scores if score is not None),
        stale=first.doc_id in stale,
        passages=len(pieces),
    )


def _score_of(piece: GlobalDocument) -> float | None:
    """Its cosine; else the score that the wrapped retriever gave, where it is a number that can be one."""
    value = piece.document.metadata.get("score") if piece.score is None else piece.score
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
