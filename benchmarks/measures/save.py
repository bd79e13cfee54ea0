"""Saving a document of 500 chunks: what it takes beyond embedding them."""

from __future__ import annotations

import time

from langchain_text_splitters import RecursiveCharacterTextSplitter

from benchmarks import ours
from benchmarks.plan import Bench, failing, outcome, progress
from benchmarks.results import Figure, Row, Target
from benchmarks.stores import STORES
from benchmarks.work import LONG, TableEmbeddings, Work, wrapped_retriever

_LIMIT = 50.0
MS = 1_000.0


def run(bench: Bench) -> list[Row]:
    """Every store."""
    return [_case(bench, kind) for kind in progress(bench.chosen(*STORES), "save")]


def _case(bench: Bench, kind: str) -> Row:
    row = Row("save", "beyond embedding", kind, LONG, target=Target(_LIMIT))
    with failing([row]):
        row.ours = _ours(bench, kind)
    for version in bench.older:
        if kind in bench.sizes.older_stores and bench.sizes.older_saves:
            with bench.servers.place(kind) as place:
                answer = bench.ask_older(version, place, task="save", repeats=bench.sizes.older_saves)
            row.older[version] = outcome(answer.of("save"), MS)
    return row


def _ours(bench: Bench, kind: str) -> Figure:
    work = Work(1)
    embeddings = TableEmbeddings(work)
    # The splitter that a user gets, at the size that keeps these paragraphs apart; so splitting counts.
    splitter = RecursiveCharacterTextSplitter(chunk_size=500, chunk_overlap=50)
    taken = []
    with (
        bench.servers.place(kind) as place,
        ours.retriever_at(place, embeddings, wrapped_retriever([]), text_splitter=splitter) as retriever,
    ):
        ours.accept(retriever, 0, LONG)
        for document in range(1, bench.sizes.saves + 1):
            before, start = embeddings.seconds, time.perf_counter()
            ours.accept(retriever, document, LONG)
            taken.append(time.perf_counter() - start - (embeddings.seconds - before))
        record = retriever.documents()[0]
        if record.chunk_count != LONG:
            msg = f"the document was split into {record.chunk_count} chunks"
            raise RuntimeError(msg)
    return Figure.of(taken, MS)
