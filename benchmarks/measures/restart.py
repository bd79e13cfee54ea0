"""The first question after a restart: the index is built of what the store holds."""

from __future__ import annotations

import gc
import time

from benchmarks import floors, ours
from benchmarks.plan import Bench, failing, progress
from benchmarks.results import Figure, Row, Target
from benchmarks.stores import Place
from benchmarks.work import Pace, Question, TableEmbeddings, Work, samples, wrapped_retriever

_BEYOND = 150.0
"""Milliseconds beyond reading the same bytes."""
MS = 1_000.0


def run(bench: Bench) -> list[Row]:
    """Every store that outlives the process."""
    kinds = bench.chosen("sqlite", "sqlite+disk", "redis")
    return [_case(bench, kind) for kind in progress(kinds, "restart")]


def _case(bench: Bench, kind: str) -> Row:
    row = Row("restart", "first question", kind, bench.sizes.large)
    with failing([row]), bench.servers.place(kind) as place:
        work = Work(bench.sizes.large)
        questions = work.questions("hit", bench.sizes.starts + 1)
        with ours.with_saved(place, work, []):
            pass
        row.floor = _floor(bench, place, work)
        row.target = Target(row.floor.p50 + _BEYOND)
        # The first one warms what is not the store's: imports, and LangChain's own caches.
        taken = [_first_question(place, work, question) for question in questions]
        row.ours = Figure.of(taken[1:], MS)
    return row


def _floor(bench: Bench, place: Place, work: Work) -> Figure:
    blobs = [work.vectors(document).tobytes() for document in range(work.documents)]
    with floors.bare_read(place, blobs) as read:
        read()
        return Figure.of(samples(read, Pace(bench.sizes.starts, 10)), MS)


def _first_question(place: Place, work: Work, question: Question) -> float:
    embeddings, wrapped = TableEmbeddings(work, [question]), wrapped_retriever([question])
    # Retrievers over one folder share their index while any of them lives, and those of before may be in a cycle.
    gc.collect()
    start = time.perf_counter()
    with ours.retriever_at(place, embeddings, wrapped) as retriever:
        documents = retriever.invoke(question.text)
        taken = time.perf_counter() - start
    if not documents[0].metadata["from_cache"]:
        msg = "the saved copy did not answer"
        raise RuntimeError(msg)
    return taken
