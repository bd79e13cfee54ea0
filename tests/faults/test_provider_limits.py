"""Embedding providers with limits and odd answers: a save is whole or nothing, and texts keep their own vectors."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from helpers import TableEmbeddings, document
from langchain_core.embeddings import Embeddings
from scenarios import POD_QUESTION, PODS, USER, Paragraphs, World, cached, texts, topics

from rag_wiki import DocumentState
from rag_wiki.errors import EmbeddingError
from rag_wiki.search.calibration_pairs import PAIRS

TEN = "\n\n".join(f"Pods of the kind {number}." for number in range(10))


class Limited(TableEmbeddings):
    """Refuses more texts in one call than it allows, and more calls than it has left."""

    def __init__(self, most: int = 4, calls: int = 1000) -> None:
        super().__init__(topics().table)
        self.most = most
        self.calls = calls

    def embed_documents(self, given: list[str]) -> list[list[float]]:
        if len(given) > self.most:
            message = f"at most {self.most} inputs"
            raise ValueError(message)
        if not self.calls:
            message = "429 too many requests"
            raise RuntimeError(message)
        self.calls -= 1
        return super().embed_documents(given)


class Odd(TableEmbeddings):
    """Gives its answers in another shape."""

    def __init__(self, shape: Callable[[list[list[float]]], Any]) -> None:
        super().__init__(topics().table)
        self.shape = shape

    def embed_documents(self, given: list[str]) -> list[list[float]]:
        answer: list[list[float]] = self.shape(super().embed_documents(given))
        return answer


def met(embeddings: Embeddings, **options: Any) -> tuple[World, Any]:
    """A world in which the pods were met once, and its retriever."""
    world = World(embeddings=embeddings)
    world.shows(document("pods", PODS))
    retriever = world.retriever(text_splitter=Paragraphs(), **options)
    retriever.invoke(POD_QUESTION)
    world.shows()
    return world, retriever


@pytest.mark.parametrize("awaiting", [False, True], ids=["blocking", "awaiting"])
async def test_a_batch_limit_is_kept(awaiting: bool) -> None:
    """No call has more texts than `embedding_batch_size`, in saving, re-indexing and calibrating."""
    model = Limited(most=4)
    world, retriever = met(model, embedding_batch_size=4)
    if awaiting:
        await retriever.aaccept_suggestion("pods", full_content=TEN)
    else:
        retriever.accept_suggestion("pods", full_content=TEN)
    assert [len(batch) for batch in model.batches] == [4, 4, 2]
    other = Limited(most=4)
    other.model = "another"
    moved = world.retriever(text_splitter=Paragraphs(), embedding_model=other, embedding_batch_size=4)
    assert (await moved.areindex() if awaiting else moved.reindex()) == ["pods"]
    assert [len(batch) for batch in other.batches] == [4, 4, 2]
    other.batches.clear()
    if awaiting:
        await moved.acalibrate()
    else:
        moved.calibrate()
    assert max(len(batch) for batch in other.batches) == 4
    assert sum(len(batch) for batch in other.batches) == len(PAIRS)
    assert texts(cached(moved.invoke(POD_QUESTION)))


def test_a_limit_that_is_too_small_is_the_providers_own_error() -> None:
    """A provider that refuses so many texts says so itself; nothing is saved, and smaller batches save it."""
    world, retriever = met(Limited(most=4))
    with pytest.raises(ValueError, match="at most 4 inputs"):
        retriever.accept_suggestion("pods", full_content=TEN)
    assert world.state("pods") is DocumentState.SURFACED
    assert (
        world.retriever(embedding_batch_size=4, text_splitter=Paragraphs())
        .accept_suggestion("pods", full_content=TEN)
        .saved
    )


def test_a_rate_limit_in_the_middle_leaves_nothing() -> None:
    """A provider that has had enough halfway leaves the state as it was, no chunk, and the old copy."""
    model = Limited(most=4, calls=2)
    world, retriever = met(model, embedding_batch_size=4)
    before = world.record("pods")
    with pytest.raises(RuntimeError, match="429"):
        retriever.accept_suggestion("pods", full_content=TEN)
    assert world.record("pods") == before
    assert world.store.chunk_store.place.copies(USER, "pods") == []
    model.calls = 3
    assert retriever.accept_suggestion("pods", full_content=TEN).chunk_count == 10
    model.calls = 1
    saved = world.record("pods")
    with pytest.raises(RuntimeError, match="429"):
        retriever.refresh("pods", full_content=TEN.replace("Pods", "Images"))
    assert world.record("pods") == saved
    assert len(world.store.chunk_store.place.copies(USER, "pods")) == 1
    assert "Pods of the kind 0." in texts(cached(retriever.invoke(POD_QUESTION)))[0]


def test_a_rate_limit_on_queries_costs_no_answer() -> None:
    """A provider that refuses a query's embedding takes the copies away for this call, and provenance says so."""
    model = topics()
    world, retriever = met(model)
    retriever.accept_suggestion("pods", full_content=PODS)
    world.shows(document("tax", "About tax."))
    model.error = RuntimeError("429 too many requests")
    found, provenance = retriever.invoke_with_provenance(POD_QUESTION)
    assert texts(found) == ["About tax."]
    assert provenance.degraded == ("the query could not be embedded, saved copies were not searched (RuntimeError)",)
    model.error = None
    assert texts(cached(retriever.invoke(POD_QUESTION))) == [PODS]
    assert world.record("pods").cache_miss_streak == 0


TAKEN: dict[str, Callable[[list[list[float]]], Any]] = {
    "array": np.array,
    "half": lambda rows: np.array(rows, dtype=np.float16),
    "list of arrays": lambda rows: [np.array(row) for row in rows],
    "tuple of tuples": lambda rows: tuple(map(tuple, rows)),
    "rows of rows": lambda rows: [[row] for row in rows],
    "Fortran": lambda rows: np.asfortranarray(rows),
    "strided": lambda rows: np.repeat(np.array(rows), 2, axis=1)[:, ::2],
    "read-only": lambda rows: np.broadcast_to(np.array(rows), (len(rows), 8)),
    "whole numbers": lambda rows: [[int(number) for number in row] for row in rows],
}
REFUSED: dict[str, Callable[[list[list[float]]], Any]] = {
    "generator": lambda rows: (row for row in rows),
    "map": lambda rows: map(list, rows),
    "dictionary": lambda rows: dict(enumerate(rows)),
    "nothing": lambda rows: None,
    "empty": lambda rows: [],
    "one short": lambda rows: rows[:-1],
    "one more": lambda rows: [*rows, rows[0]],
    "a hole": lambda rows: [*rows[:-1], None],
    "a hole inside": lambda rows: [*rows[:-1], [None] * 8],
    "unequal": lambda rows: [*rows[:-1], rows[-1][:-1]],
    "no width": lambda rows: [[] for _ in rows],
    "one text": lambda rows: "x" * len(rows),
    "texts": lambda rows: ["vector"] * len(rows),
    "not a number": lambda rows: [*rows[:-1], [float("nan")] * 8],
    "infinite": lambda rows: [*rows[:-1], [float("-inf")] * 8],
    "beyond float32": lambda rows: [*rows[:-1], [1e300] * 8],
    "error object": lambda rows: {"error": {"message": "quota"}},
    "complex": lambda rows: np.array(rows) * 1j,
    "lists of complex": lambda rows: [list(row) for row in np.array(rows) * 1j],
    "turned": lambda rows: np.array(rows).T,
}


@pytest.mark.parametrize("shape", TAKEN.values(), ids=TAKEN)
def test_vectors_in_any_form_are_taken(shape: Callable[[list[list[float]]], Any]) -> None:
    """Vectors of any sequence and number type are taken as they are meant."""
    world, retriever = met(Odd(shape))
    assert retriever.accept_suggestion("pods", full_content=TEN).chunk_count == 10
    vectors = [chunk["vector"] for chunk in world.store.chunk_store.load_chunks(USER, "pods")]
    assert vectors == [[1.0, *[0.0] * 7]] * 10


@pytest.mark.parametrize("shape", REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("awaiting", [False, True], ids=["blocking", "awaiting"])
async def test_answers_that_are_no_vectors_save_nothing(
    shape: Callable[[list[list[float]]], Any], awaiting: bool
) -> None:
    """An answer that is not one finite vector of one width a text is an error in our words, and changes nothing."""
    world, retriever = met(Odd(shape))
    before = world.record("pods")

    async def save() -> None:
        if awaiting:
            await retriever.aaccept_suggestion("pods", full_content=TEN)
        else:
            retriever.accept_suggestion("pods", full_content=TEN)

    with pytest.raises(EmbeddingError, match="Nothing was saved"):
        await save()
    assert world.record("pods") == before
    assert world.store.chunk_store.place.copies(USER, "pods") == []


class OnlyAwaited(Embeddings):
    """Has no blocking methods."""

    def __init__(self) -> None:
        self.table = topics()

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        raise NotImplementedError

    def embed_query(self, text: str) -> list[float]:
        raise NotImplementedError

    async def aembed_documents(self, texts: list[str]) -> list[list[float]]:
        await asyncio.sleep(0)
        return self.table.embed_documents(texts)

    async def aembed_query(self, text: str) -> list[float]:
        await asyncio.sleep(0)
        return self.table.embed_query(text)


async def test_a_model_that_is_only_awaited_works_awaiting() -> None:
    """A model without blocking methods saves, answers, calibrates and re-indexes where calls are awaited."""
    world, retriever = met(OnlyAwaited(), similarity_threshold="auto")
    with pytest.raises(NotImplementedError):
        retriever.accept_suggestion("pods", full_content=PODS)
    assert world.state("pods") is DocumentState.SURFACED
    assert (await retriever.aaccept_suggestion("pods", full_content=PODS)).saved
    assert await retriever.areindex() == []
    plain = world.retriever()
    assert texts(cached(await plain.ainvoke(POD_QUESTION))) == [PODS]
    answers: Sequence[Any] = await plain.abatch([POD_QUESTION] * 3)
    assert [texts(cached(answer)) for answer in answers] == [[PODS]] * 3
    assert plain.invoke_with_provenance(POD_QUESTION).provenance.degraded == (
        "the query could not be embedded, saved copies were not searched (NotImplementedError)",
    )


def test_a_model_without_a_direction_for_a_chunk_saves_the_others() -> None:
    """A chunk whose vector is all zeros never answers, and spoils neither the save nor the ranking."""
    _, retriever = met(Odd(lambda rows: [*rows[:-1], [0.0] * 8]))
    retriever.accept_suggestion("pods", full_content=TEN)
    found, provenance = retriever.invoke_with_provenance(POD_QUESTION)
    assert provenance.sources[0].chunks_used == (0, 1, 2)
    assert provenance.sources[0].scores == (1.0, 1.0, 1.0)
    assert "kind 9" not in found[0].page_content
