"""Memory: the index against the bytes of its vectors, and many users under a cap."""

from __future__ import annotations

import gc
import tracemalloc

from benchmarks import ours
from benchmarks.plan import Bench, failing, isolated, progress
from benchmarks.results import Figure, Row, Target
from benchmarks.stores import Place
from benchmarks.work import CHUNKS, WIDTH, TableEmbeddings, Work, wrapped_retriever

_RATIO = 1.3
_CAP = 256 * 1024
_EACH = 2
"""Documents that each of many users saved."""
_FILLS = 1_100
"""Questions after which what keeps the latest ones (timings, for one) is as large as it gets."""
_PER_USER = 0.1
"""Kilobytes that may stay for each user who came and went: none but for what the allocator keeps."""


def run(bench: Bench) -> list[Row]:
    """One user with many documents; many users with few."""
    rows: list[Row] = []
    measures = {"one user": _index, "many users": _many_users}
    for case in progress(list(measures), "memory"):
        rows += measures[case](bench)
    return rows


def _index(bench: Bench) -> list[Row]:
    documents = bench.sizes.large
    vectors = documents * CHUNKS * WIDTH * 4
    told = Row("memory", "index, as it says / its vectors", "memory", documents, "×", target=Target(_RATIO))
    real = Row("memory", "index, traced / its vectors", "memory", documents, "×", target=Target(_RATIO))
    with failing([told, real]), bench.servers.place("memory") as place:
        grown, says = isolated(_build_index, place, documents, seconds=bench.sizes.ours_seconds)
        told.ours, real.ours = Figure.one(says / vectors), Figure.one(grown / vectors)
    return [told, real]


def _build_index(place: Place, documents: int) -> tuple[int, int]:
    """Bytes that the first search keeps, and bytes that the index says it holds."""
    work = Work(documents)
    questions = work.questions("miss", 2)
    with ours.with_saved(place, work, questions) as (retriever, _):
        # Somebody without documents first, so that only the index is new.
        retriever.invoke(questions[0].text, user_id="nobody")
        gc.collect()
        tracemalloc.start()
        retriever.invoke(questions[1].text)
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        return grown, retriever.stats().index_bytes


def _many_users(bench: Bench) -> list[Row]:
    users = bench.sizes.users
    held = Row("memory", f"indexes of {users:,} users, cap 256 KiB", "sqlite", users, "MB", target=Target(_CAP * 1e-6))
    kept = Row("memory", "kept for each user who went", "sqlite", users, "kB", target=Target(_PER_USER))
    if not bench.chosen("sqlite"):
        return []
    with failing([held, kept]), bench.servers.place("sqlite") as place:
        bytes_held, per_user = isolated(_ask_users, place, users, seconds=bench.sizes.ours_seconds)
        held.ours, kept.ours = Figure.one(bytes_held * 1e-6), Figure.one(per_user * 1e-3)
    return [held, kept]


def _ask_users(place: Place, users: int) -> tuple[int, float]:
    """Bytes of all indexes at the end, and by how much memory grew for each user of the second half."""
    work = Work(_EACH)
    questions = work.questions("miss", 2)
    names = [f"user-{number:05d}" for number in range(users)]
    embeddings, wrapped = TableEmbeddings(work, questions), wrapped_retriever(questions)
    with ours.retriever_at(place, embeddings, wrapped, index_max_bytes=_CAP) as retriever:
        for name in names:
            ours.write_documents(retriever.state_store, retriever.chunk_store, work, name)
        for _ in range(_FILLS):
            retriever.invoke(questions[0].text, user_id=names[0])
        traced = []
        tracemalloc.start()
        for half in (names[: users // 2], names[users // 2 :]):
            for name in half:
                for question in questions:
                    retriever.invoke(question.text, user_id=name)
            gc.collect()
            traced.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
        held = sum(retriever.stats(name).index_bytes for name in names)
    return held, (traced[1] - traced[0]) / (users - users // 2)
