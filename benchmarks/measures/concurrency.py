"""Many at once: threads, processes, and calls that are awaited together."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from langchain_core.retrievers import BaseRetriever

from benchmarks import ours
from benchmarks.plan import Bench, failing, isolated, progress, together
from benchmarks.results import Figure, Row, Target
from benchmarks.stores import Place
from benchmarks.work import Question, TableEmbeddings, Work, wrapped_retriever
from rag_wiki import RagWikiRetriever

_DOCUMENTS = 100
_THREADS = (1, 2, 4, 8)
_DELAY = 0.05
"""Seconds that the embedding model and the wrapped retriever take where calls are awaited."""
_BLOCK = 5.0
_ABOUT = 2.0
"""Many calls awaited together may take so many times what one takes."""
_ROUNDS = 3
MS = 1_000.0


def run(bench: Bench) -> list[Row]:
    """Threads on each kind of store, two processes on Redis, and awaited calls."""
    rows: list[Row] = []
    for kind in progress(bench.chosen("memory", "sqlite", "redis"), "concurrency"):
        rows += [*_threads(bench, kind), *(_processes(bench) if kind == "redis" else ()), *_awaited(bench, kind)]
    return rows


def _rate_row(case: str, kind: str) -> Row:
    return Row("concurrency", case, kind, _DOCUMENTS, "questions/s", more_is_better=True)


def _threads(bench: Bench, kind: str) -> list[Row]:
    rows = {count: _rate_row(f"{count} threads, a user each", kind) for count in _THREADS}
    one_user = _rate_row(f"{_THREADS[-1]} threads, one user", kind)
    with failing([*rows.values(), one_user]), bench.servers.place(kind) as place:
        work = Work(_DOCUMENTS)
        questions = work.questions("mixed")
        users = [f"user-{number}" for number in range(_THREADS[-1])]
        embeddings = TableEmbeddings(work, questions)
        with ours.retriever_at(place, embeddings, wrapped_retriever(questions)) as retriever:
            for user in users:
                ours.write_documents(retriever.state_store, retriever.chunk_store, work, user)
                _ask(retriever, user, questions, len(questions))
            for count, row in rows.items():
                row.ours = Figure.one(_throughput(retriever, users[:count], questions, bench.sizes.questions))
            same = users[:1] * len(users)
            one_user.ours = Figure.one(_throughput(retriever, same, questions, bench.sizes.questions))
    return [*rows.values(), one_user]


def _ask(retriever: RagWikiRetriever, user: str, questions: Sequence[Question], count: int) -> None:
    for number in range(count):
        retriever.invoke(questions[number % len(questions)].text, user_id=user)


def _throughput(retriever: RagWikiRetriever, users: Sequence[str], questions: Sequence[Question], count: int) -> float:
    """Questions a second, with a thread for each of the users."""
    with ThreadPoolExecutor(len(users)) as pool:
        start = time.perf_counter()
        for done in [pool.submit(_ask, retriever, user, questions, count) for user in users]:
            done.result()
        return len(users) * count / (time.perf_counter() - start)


def _processes(bench: Bench) -> list[Row]:
    rows = {count: _rate_row(f"{count} processes, a user each", "redis") for count in (1, 2)}
    for count, row in rows.items():
        with failing([row]), bench.servers.place("redis") as place:
            gate = multiprocessing.get_context("spawn").Barrier(count)
            calls = [(place, f"user-{number}", bench.sizes.questions, gate) for number in range(count)]
            spans = together(_ask_in_process, calls, seconds=bench.sizes.ours_seconds)
            taken = max(end for _, end in spans) - min(start for start, _ in spans)
            row.ours = Figure.one(count * bench.sizes.questions / taken)
    return list(rows.values())


def _ask_in_process(place: Place, user: str, count: int, gate: Any) -> tuple[float, float]:
    """When the questions of a process began and ended."""
    work = Work(_DOCUMENTS)
    questions = work.questions("mixed")
    with ours.retriever_at(place, TableEmbeddings(work, questions), wrapped_retriever(questions)) as retriever:
        ours.write_documents(retriever.state_store, retriever.chunk_store, work, user)
        _ask(retriever, user, questions, len(questions))
        gate.wait(timeout=60)
        start = time.time()
        _ask(retriever, user, questions, count)
        return start, time.time()


def _awaited(bench: Bench, kind: str) -> list[Row]:
    tasks = bench.sizes.tasks
    at_once = Row("concurrency", f"{tasks} ainvoke at once", kind, _DOCUMENTS)
    step = Row("concurrency", "longest step of the loop", kind, _DOCUMENTS, target=Target(_BLOCK))
    with failing([at_once, step]), bench.servers.place(kind) as place:
        taken: Awaited = isolated(_await_many, place, tasks, seconds=bench.sizes.ours_seconds)
        one = Figure.of(taken.one, MS)
        at_once.ours, at_once.floor = Figure.of(taken.ours, MS), Figure.of(taken.wrapped, MS)
        at_once.target = Target(_ABOUT * one.p50)
        at_once.note = f"one alone takes {one.p50:.1f} ms; the floor is {tasks} of the wrapped retriever at once"
        step.ours, step.floor = Figure.of(taken.step, MS), Figure.of(taken.wrapped_step, MS)
    return [at_once, step]


@dataclass
class Awaited:
    """Seconds: of one call alone, of many at once, and the longest step of the loop meanwhile."""

    one: list[float] = field(default_factory=list)
    ours: list[float] = field(default_factory=list)
    step: list[float] = field(default_factory=list)
    wrapped: list[float] = field(default_factory=list)
    wrapped_step: list[float] = field(default_factory=list)


def _await_many(place: Place, tasks: int) -> Awaited:
    work = Work(_DOCUMENTS)
    questions = work.questions("hit")
    with ours.with_saved(place, work, questions, delay=_DELAY) as (retriever, wrapped):
        # As a server does once it is up: else a full collection of everything that was ever imported, some 70 ms,
        # falls into some step of somebody's.
        gc.collect()
        gc.freeze()
        return asyncio.run(
            _await_rounds(retriever, wrapped, [questions[at % len(questions)].text for at in range(tasks)])
        )


async def _await_rounds(retriever: BaseRetriever, wrapped: BaseRetriever, texts: Sequence[str]) -> Awaited:
    taken = Awaited()
    await _gather(retriever, texts)
    for _ in range(_ROUNDS):
        taken.one.append(await _gather(retriever, texts[:1]))
        for asked, seconds, steps in (
            (retriever, taken.ours, taken.step),
            (wrapped, taken.wrapped, taken.wrapped_step),
        ):
            with longest_step() as longest:
                seconds.append(await _gather(asked, texts))
            steps.append(longest[0])
    return taken


async def _gather(retriever: BaseRetriever, texts: Sequence[str]) -> float:
    start = time.perf_counter()
    await asyncio.gather(*(retriever.ainvoke(text) for text in texts))
    return time.perf_counter() - start


@contextmanager
def longest_step() -> Iterator[list[float]]:
    """The seconds of the longest single thing that an event loop ran: as long, nobody else was served.

    A loop with 200 calls that are ready at once serves them one after the other; what blocks it is one that
    does not give way.
    """
    longest = [0.0]
    run_handle: Callable[[asyncio.Handle], object] = asyncio.Handle._run

    def timed_run(handle: asyncio.Handle) -> object:
        start = time.perf_counter()
        try:
            return run_handle(handle)
        finally:
            longest[0] = max(longest[0], time.perf_counter() - start)

    asyncio.Handle._run = timed_run  # type: ignore[assignment,method-assign]  # no public way to time a step
    try:
        yield longest
    finally:
        asyncio.Handle._run = run_handle  # type: ignore[assignment,method-assign]
