"""What a warm question costs beyond the bare wrapped retriever, by store and by how much is saved."""

from __future__ import annotations

import itertools
from functools import lru_cache

from benchmarks import floors, ours
from benchmarks.plan import Bench, failing, outcome, progress
from benchmarks.results import Failed, Figure, Row, Target
from benchmarks.stores import STORES, Place
from benchmarks.work import KINDS, Question, Work, added_seconds, samples
from rag_wiki import RagWikiRetriever

_LIMITS = {"memory": 0.5, "memory+disk": 0.5, "sqlite": 2.0, "sqlite+disk": 2.0, "redis": 1.5}
"""Milliseconds that a question may cost with 100 saved documents."""
_LARGE = 1_600
_ALIKE = 0.7
"""The cosine of unrelated vectors in a work whose search has to read all of them; those of e5 models are like that."""
MS = 1_000.0


@lru_cache(maxsize=1)
def _work(documents: int) -> Work:
    return Work(documents)


def run(bench: Bench) -> list[Row]:
    """Every store at every size, and what the layer costs beyond the arithmetic."""
    sizes = sorted({*bench.sizes.documents, *bench.sizes.memory_documents})
    cases = [
        (documents, kind)
        for documents, kind in itertools.product(sizes, bench.chosen(*STORES))
        if kind == "memory" or documents in bench.sizes.documents
    ]
    rows = [row for documents, kind in progress(cases, "query") for row in _case(bench, documents, kind)]
    return [*rows, *_beyond_product(rows)]


def _case(bench: Bench, documents: int, kind: str) -> list[Row]:
    rows = {case: Row("query", case, kind, documents) for case in KINDS}
    extra: list[Row] = []
    with failing(rows.values()), bench.servers.place(kind) as place:
        _measure_ours(bench, place, _work(documents), rows)
        extra = _through_sqlalchemy(bench, place, _work(documents))
    if kind == "memory":
        extra.append(_of_vectors_alike(bench, documents))
    for version in bench.older:
        if documents in bench.sizes.older_documents and kind in bench.sizes.older_stores:
            with bench.servers.place(kind) as place:
                _measure_older(bench, place, version, documents, rows)
    return [*rows.values(), *extra]


def _measure_ours(bench: Bench, place: Place, work: Work, rows: dict[str, Row]) -> None:
    questions = {case: work.questions(case) for case in rows}
    everything = list(itertools.chain.from_iterable(questions.values()))
    multiply = floors.product(work.matrix, everything[0].vector)
    with ours.with_saved(place, work, everything) as (retriever, wrapped), floors.bare_write(place) as write:
        _check(retriever, questions)
        for case, row in rows.items():
            taken = added_seconds(
                retriever.invoke, wrapped.invoke, questions[case], bench.sizes.pace, lambda: (multiply(), write())
            )
            row.ours, row.floor = Figure.of(taken.added, MS), Figure.of(taken.floor, MS)
            row.target = _target(row, row.floor)


def _check(retriever: RagWikiRetriever, questions: dict[str, list[Question]]) -> None:
    """See that what is called a hit is one, and what is called a miss is none."""
    for case, wanted in (("hit", True), ("miss", False)):
        for question in questions.get(case, ()):
            answered = any(document.metadata["from_cache"] for document in retriever.invoke(question.text))
            if answered is not wanted:
                msg = f"a saved copy {'answered' if answered else 'did not answer'} a {case}"
                raise RuntimeError(msg)


def _of_vectors_alike(bench: Bench, documents: int) -> Row:
    """A hit where no vector is known to be far away before all of it was read: what the search can't save."""
    row = Row("query", "hit, vectors alike", "memory", documents)
    with failing([row]), bench.servers.place("memory") as place:
        _measure_ours(bench, place, Work(documents, alike=_ALIKE), {"hit": row})
        row.target = None
    return row


def _through_sqlalchemy(bench: Bench, place: Place, work: Work) -> list[Row]:
    """The floor of SQLite once more, by way of SQLAlchemy."""
    if place.kind != "sqlite":
        return []
    multiply = floors.product(work.matrix, work.questions("miss")[0].vector)
    with floors.bare_write(place, sqlalchemy=True) as write:
        floor = Figure.of(samples(lambda: (multiply(), write()), bench.sizes.pace), MS)
    return [Row("query", "floor through SQLAlchemy", place.kind, work.documents, floor=floor)]


def _target(row: Row, floor: Figure) -> Target | None:
    if row.store == "memory" and row.n == _LARGE:
        return Target(1.3 * floor.p50 + 0.5)
    return Target(_LIMITS[row.store]) if row.n <= 100 and row.store in _LIMITS else None


def _measure_older(bench: Bench, place: Place, version: str, documents: int, rows: dict[str, Row]) -> None:
    sizes = bench.sizes
    task = {"n": documents, "kinds": sizes.older_kinds, "repeats": sizes.pace.repeats}
    answer = bench.ask_older(version, place, task="query", kind_seconds=sizes.older_kind_seconds, **task)
    for case in sizes.older_kinds:
        rows[case].older[version] = outcome(answer.of(case), MS)
    saved = next((line for line in answer.lines if "saved" in line), None)
    if saved is not None and saved["embedded"] < documents * 10:
        rows["hit"].note = f"{version} embedded {saved['embedded']} chunks"


def _beyond_product(rows: list[Row]) -> list[Row]:
    """The time of a hit in memory beyond the bare product; it should not grow with what is saved."""
    found: list[Row] = []
    for row in rows:
        if row.store == "memory" and row.case == "hit" and isinstance(row.floor, Figure):
            beyond = Row("query", "hit, beyond the product", row.store, row.n)
            beyond.ours = Failed("no figure")
            if isinstance(row.ours, Figure):
                beyond.ours = Figure(row.ours.p50 - row.floor.p50, row.ours.p90 - row.floor.p50, row.ours.count)
            found.append(beyond)
            first = found[0].ours
            if len(found) > 1 and isinstance(first, Figure):
                # The same as with few documents, up to the noise of the two products in it.
                beyond.target = Target(1.5 * first.p50 + 0.05 * row.floor.p50)
    return found
