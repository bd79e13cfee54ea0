"""32 questions of one user at once, against 32 single ones."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks import ours
from benchmarks.plan import Bench, failing, progress
from benchmarks.results import Figure, Row, Target
from benchmarks.work import Work, samples

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
        few, many = _measure(bench, kind, _FEW), _measure(bench, kind, documents)
        for way in _WAYS:
            rows[way].ours = many[way]
            searches[way].ours = Figure(many[way].p50 - few[way].p50, many[way].p90 - few[way].p50, many[way].count)
            if way != _WAYS[0]:
                searches[way].target = Target((many[_WAYS[0]].p50 - few[_WAYS[0]].p50) * _SHARE)
    return [*rows.values(), *searches.values()]


def _measure(bench: Bench, kind: str, documents: int) -> dict[str, Figure]:
    work, found = Work(documents), dict[str, Figure]()
    questions = work.questions("hit", _QUESTIONS)
    texts = [question.text for question in questions]
    with bench.servers.place(kind) as place, ours.with_saved(place, work, questions) as (retriever, wrapped):
        for way in _WAYS:
            _ask(way, retriever, texts)
            bare = Figure.of(samples(partial(_ask, way, wrapped, texts), bench.sizes.batches), MS)
            taken = samples(partial(_ask, way, retriever, texts), bench.sizes.batches)
            found[way] = Figure.of([MS * seconds - bare.p50 for seconds in taken])
    return found


def _ask(way: str, retriever: Any, texts: list[str]) -> object:
    ways: dict[str, Callable[[], object]] = {
        _WAYS[0]: lambda: [retriever.invoke(text) for text in texts],
        "batch": lambda: retriever.batch(texts),
        "abatch": lambda: asyncio.run(retriever.abatch(texts)),
    }
    return ways[way]()
