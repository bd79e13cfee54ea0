"""32 questions of one user at once, against 32 single ones."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from benchmarks import ours
from benchmarks.plan import Bench, failing, progress
from benchmarks.results import Figure, Row, Target
from benchmarks.stores import Servers
from benchmarks.work import Work, samples_in_turns

_QUESTIONS = 32
_WAYS = (f"{_QUESTIONS} single", "batch", "abatch")
_FEW = 16
"""Saved documents that take no time to search."""
_SHARE = 1 / 3
"""What a batch may take of the search time of single questions."""
MS = 1_000.0


def run(bench: Bench) -> list[Row]:
    """In memory, where nothing but searching costs much, and on Redis, where trips do."""
    kinds = bench.chosen(*bench.sizes.batch_stores)
    return [row for kind in progress(kinds, "batch") for row in _case(bench, kind)]


def _case(bench: Bench, kind: str) -> list[Row]:
    """What each way takes beyond the wrapped retriever, and how much of it grows with what is saved: the search."""
    documents = bench.sizes.large
    rows = {way: Row("batch", f"{way}, beyond the wrapped", kind, documents) for way in _WAYS}
    searches = {way: Row("batch", f"{way}, search time", kind, documents) for way in _WAYS}
    with failing([*rows.values(), *searches.values()]):
        few, many = _measure(bench, kind, (_FEW, documents))
        for way in _WAYS:
            rows[way].ours = many[way]
            searches[way].ours = Figure(many[way].p50 - few[way].p50, many[way].p90 - few[way].p50, many[way].count)
            if way != _WAYS[0]:
                searches[way].target = Target((many[_WAYS[0]].p50 - few[_WAYS[0]].p50) * _SHARE)
    return [*rows.values(), *searches.values()]


def _measure(bench: Bench, kind: str, sizes: Sequence[int]) -> list[dict[str, Figure]]:
    """What each way takes beyond the wrapped retriever, for each number of saved documents."""
    steps: dict[tuple[int, str, bool], Callable[[], object]] = {}
    with ExitStack() as closing:
        for documents in sizes:
            work = Work(documents)
            questions = work.questions("hit", _QUESTIONS)
            texts = [question.text for question in questions]
            # With servers of its own: a place on a server empties it.
            place = closing.enter_context(closing.enter_context(Servers()).place(kind))
            retriever, wrapped = closing.enter_context(ours.with_saved(place, work, questions))
            for way in _WAYS:
                _ask(way, retriever, texts)
                steps[documents, way, True] = partial(_ask, way, retriever, texts)
                steps[documents, way, False] = partial(_ask, way, wrapped, texts)
        taken = samples_in_turns(steps, bench.sizes.batches)

    def beyond(documents: int, way: str) -> Figure:
        bare = Figure.of(taken[documents, way, False], MS).p50
        return Figure.of([MS * seconds - bare for seconds in taken[documents, way, True]])

    return [{way: beyond(documents, way) for way in _WAYS} for documents in sizes]


def _ask(way: str, retriever: Any, texts: list[str]) -> object:
    ways: dict[str, Callable[[], object]] = {
        _WAYS[0]: lambda: [retriever.invoke(text) for text in texts],
        "batch": lambda: retriever.batch(texts),
        "abatch": lambda: asyncio.run(retriever.abatch(texts)),
    }
    return ways[way]()
