"""In which order the pieces of an answer come, and which of them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import zip_longest
from typing import TypeAlias

from rag_wiki.pieces import CachedDocument, GlobalDocument
from rag_wiki.search.calibration import Focus
from rag_wiki.search.index import ChunkHit

__all__ = ["Ranked", "first_of", "in_focus", "in_turn"]

Ranked: TypeAlias = CachedDocument | GlobalDocument


def in_turn(serving: Collection[CachedDocument], beside: Sequence[GlobalDocument]) -> list[Ranked]:
    """Pinned documents, then the other copies and the pieces beside them in turn, each in its own order."""
    pinned = [item for item in serving if item.record.pinned]
    claimed = [item for item in serving if not item.record.pinned]
    return [*pinned, *_alternating(claimed, beside)]


def in_focus(
    query: str,
    serving: Collection[CachedDocument],
    beside: Sequence[GlobalDocument],
    focus: Focus,
    pinned: Collection[str] = (),
) -> list[Ranked]:
    """One ranking of saved and global pieces, of what lies within the margin of the best.

    A piece is ranked by its cosine, raised by the share of the query's words that it holds, and by the prior where it
    is saved. Of a saved document each chunk stands for itself.

    Pieces without a cosine are ranked by their rank, in turn with the saved documents, and never left out. A pinned
    document that is no hit, or lies too low, comes along at the end with its best chunk.

    Args:
        query: What was asked.
        serving: The saved documents that may answer.
        beside: The pieces that no saved document stands for.
        focus: How close to the best.
        pinned: Documents whose pieces are never left out: they are pinned, and their copy can't answer.
    """
    hits = [item for item in serving if item.found.above_threshold]
    chunks = [(item, hit) for item in hits for hit in item.hits[: 1 if item.full_document else None]]
    comparable = list(beside) if all(item.score is not None for item in beside) else []
    scores = _scores(query, chunks, comparable, focus)
    floor = max(scores, default=0.0) - focus.margin
    close: dict[str, list[tuple[float, ChunkHit]]] = {}
    for (item, hit), score in zip(chunks, scores, strict=False):
        if score >= floor:
            close.setdefault(item.record.doc_id, []).append((score, hit))
    cached: list[tuple[float, Ranked]] = [
        (max(score for score, _ in own), item.keeping([hit for _, hit in own]))
        for item in hits
        if (own := close.get(item.record.doc_id))
    ]
    along = [item.keeping(item.hits[:1]) for item in serving if item.record.pinned and item.record.doc_id not in close]
    if not comparable:
        return [*_alternating([item for _, item in _best_first(cached)], beside), *along]
    near = [
        (score, item)
        for item, score in zip(comparable, scores[len(chunks) :], strict=True)
        if score >= floor or item.doc_id in pinned
    ]
    return [*(item for _, item in _best_first([*cached, *near])), *along]


def _scores(
    query: str,
    chunks: Sequence[tuple[CachedDocument, ChunkHit]],
    pieces: Sequence[GlobalDocument],
    focus: Focus,
) -> list[float]:
    """What chunks of saved documents, and then pieces with a cosine, are ranked by."""
    cosines = [hit.score + focus.prior for _, hit in chunks] + [item.score or 0.0 for item in pieces]
    if not focus.words:
        return cosines
    # Its tables of scripts take some milliseconds to make, which only a focused retriever should pay.
    from rag_wiki.search.keyword import word_shares

    texts = [item.text_of(hit) for item, hit in chunks] + [item.document.page_content for item in pieces]
    return [cosine + focus.words * share for cosine, share in zip(cosines, word_shares(query, texts), strict=True)]


def _best_first(scored: Sequence[tuple[float, Ranked]]) -> list[tuple[float, Ranked]]:
    return sorted(scored, key=lambda pair: -pair[0])


def first_of(ranked: Sequence[Ranked], k: int | None) -> list[Ranked]:
    """The first `k`, for which pinned documents count first."""
    if k is None or len(ranked) <= k:
        return list(ranked)
    pinned = [at for at, item in enumerate(ranked) if _is_pinned(item)]
    others = [at for at, item in enumerate(ranked) if not _is_pinned(item)]
    return [ranked[at] for at in sorted([*pinned, *others][:k])]


def _alternating(claimed: Sequence[Ranked], beside: Sequence[GlobalDocument]) -> Iterator[Ranked]:
    return (item for pair in zip_longest(claimed, beside) for item in pair if item is not None)


def _is_pinned(item: Ranked) -> bool:
    return isinstance(item, CachedDocument) and item.record.pinned
