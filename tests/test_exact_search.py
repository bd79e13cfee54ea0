"""What answers is what the whole product of the vectors says, however little of it a search computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from helpers import TableEmbeddings, document
from langchain_core.documents import Document
from numpy.typing import NDArray
from scenarios import Paragraphs, World

from rag_wiki import MemoryStateStore, RagWikiRetriever, StateStore

CHUNKS = 12
DOCUMENTS = 40
QUESTIONS = 6
THRESHOLD = 0.75
TOP_K = 3

Vectors = NDArray[np.float64]
Answered = dict[str, dict[int, float]]
"""Document id -> chunk -> cosine."""


def unit(rows: Vectors) -> Vectors:
    """The rows at length one."""
    return np.asarray(rows / np.linalg.norm(rows, axis=-1, keepdims=True))


def random_rows(generator: np.random.Generator, width: int) -> Vectors:
    """Vectors that have nothing to do with each other: nearly all are known to be far away after a part of them."""
    return generator.standard_normal((DOCUMENTS * CHUNKS, width))


def skewed_rows(generator: np.random.Generator, width: int) -> Vectors:
    """Vectors around one direction, with cosines of 0.5 to 0.9: nothing is known before the end."""
    rows: Vectors = random_rows(generator, width) + 1.6 * np.sqrt(width) * unit(generator.standard_normal(width))
    return rows


def late_rows(generator: np.random.Generator, width: int) -> Vectors:
    """Vectors that all but vanish in their first columns."""
    rows: Vectors = random_rows(generator, width) * np.linspace(1e-4, 1.0, width) ** 4
    return rows


def sparse_rows(generator: np.random.Generator, width: int) -> Vectors:
    """Vectors of a few numbers at random places, so that whole parts are zero."""
    rows = random_rows(generator, width)
    kept: Vectors = np.where(generator.random(rows.shape) < 4 / width, rows, 0.0) + 1e-9
    return kept


def same_rows(generator: np.random.Generator, width: int) -> Vectors:
    """One vector in all places."""
    return np.tile(generator.standard_normal(width), (DOCUMENTS * CHUNKS, 1))


Rows = Callable[[np.random.Generator, int], Vectors]
KINDS: Sequence[Rows] = (random_rows, skewed_rows, late_rows, sparse_rows)


class Case:
    """Saved documents whose chunks have given vectors, and questions near some of them."""

    def __init__(self, make: Rows, width: int, store: StateStore | None = None, **settings: Any) -> None:
        generator = np.random.default_rng(width)
        self.rows = unit(make(generator, width)).astype(np.float32).astype(np.float64)
        near = self.rows[generator.choice(len(self.rows), QUESTIONS, replace=False)]
        noise = unit(generator.standard_normal(near.shape))
        self.questions = unit(near + noise * np.linspace(0.0, 1.1, QUESTIONS)[:, None])
        table = {f"chunk {number:04d}.": row.tolist() for number, row in enumerate(self.rows)}
        table |= {f"question {number}": row.tolist() for number, row in enumerate(self.questions)}
        self.settings = {
            "similarity_threshold": THRESHOLD,
            "local_top_k": TOP_K,
            "text_splitter": Paragraphs(),
            "fetch_threshold": 10**6,
            **settings,
        }
        self.world = World(store or MemoryStateStore(), TableEmbeddings(table, width=width))
        self.retriever = self.world.retriever(**self.settings)

    def on(self, store: StateStore) -> RagWikiRetriever:
        """A retriever over the same saved documents, as another process has it."""
        return replace(self.world, store=store).retriever(**self.settings)

    def save(self, first: int, last: int, chunks: int = CHUNKS) -> None:
        """Save some of the documents, with so many of their chunks."""
        texts = {
            f"d{number:02d}": "\n\n".join(f"chunk {number * CHUNKS + chunk:04d}." for chunk in range(chunks))
            for number in range(first, last)
        }
        self.world.shows(*(document(doc_id, text) for doc_id, text in texts.items()))
        self.retriever.invoke("an introduction")
        self.world.shows()
        for doc_id, text in texts.items():
            self.retriever.accept_suggestion(doc_id, full_content=text)

    def asked(self) -> list[Answered]:
        """What the saved copies answer to each question."""
        return [answered(self.retriever.invoke(f"question {number}")) for number in range(QUESTIONS)]

    def asked_in_order(self, retriever: RagWikiRetriever) -> list[list[tuple[str, list[int]]]]:
        """What answers to each question, in its order."""
        return [in_order(retriever.invoke(f"question {number}")) for number in range(QUESTIONS)]

    def expected(self, last: int, *, pinned: int | None = None, gone: int | None = None) -> list[Answered]:
        """Of each question: the best chunks at or above the threshold, and the best of a pinned document anyway."""
        cosines = (self.questions @ self.rows[: last * CHUNKS].T).reshape(QUESTIONS, last, CHUNKS)
        return [
            {
                f"d{number:02d}": {chunk: float(own[chunk]) for chunk in chunks}
                for number, own in enumerate(of_a_question)
                if number != gone and (chunks := best_of(own, is_pinned=number == pinned))
            }
            for of_a_question in cosines
        ]


def best_of(cosines: Vectors, *, is_pinned: bool) -> list[int]:
    """The chunks of a document that are in an answer."""
    best: list[int] = np.argsort(-cosines.round(6), kind="stable")[:TOP_K].tolist()
    return [chunk for chunk in best if cosines[chunk] >= THRESHOLD] or best[: int(is_pinned)]


def in_order(documents: list[Document]) -> list[tuple[str, list[int]]]:
    """(document id, chunks) of the saved copies in an answer."""
    return [
        (item.metadata["doc_id"], item.metadata["chunks_used"]) for item in documents if item.metadata["from_cache"]
    ]


def answered(documents: list[Document]) -> Answered:
    """Document id → chunk → cosine, of the saved copies in an answer."""
    return {
        item.metadata["doc_id"]: dict(zip(item.metadata["chunks_used"], item.metadata["scores"], strict=True))
        for item in documents
        if item.metadata["from_cache"]
    }


def assert_same(found: Mapping[str, Mapping[int, float]], expected: Mapping[str, Mapping[int, float]]) -> None:
    """The same chunks, with the same cosines but for rounding."""
    assert {doc_id: sorted(own) for doc_id, own in found.items()} == {
        doc_id: sorted(own) for doc_id, own in expected.items()
    }
    for doc_id, own in expected.items():
        assert found[doc_id] == pytest.approx(own, abs=2e-6)


@pytest.mark.parametrize("width", [8, 100, 128, 129, 256, 384, 520])
@pytest.mark.parametrize("make", KINDS)
def test_answers_are_those_of_the_whole_product(make: Rows, width: int) -> None:
    """By itself and in a batch, in a first index and in one that grew."""
    case = Case(make, width)
    for first, last in ((0, 25), (25, 33), (33, DOCUMENTS)):
        # The first index is made at once; then it grows, beyond its room and within it.
        case.save(first, last)
        together = case.retriever.batch([f"question {number}" for number in range(QUESTIONS)])
        expected = case.expected(last)
        assert any(expected)
        for own, of_batch, wanted in zip(case.asked(), together, expected, strict=True):
            assert_same(own, wanted)
            assert_same(answered(of_batch), wanted)


@pytest.mark.parametrize("width", [8, 384])
@pytest.mark.parametrize("make", KINDS)
def test_a_pinned_document_comes_with_its_best_chunk_though_it_is_far_away(make: Rows, width: int) -> None:
    """Which of its chunks is the best is found among all of them."""
    case = Case(make, width)
    case.save(0, DOCUMENTS)
    case.retriever.force_pin("d11")
    for own, wanted in zip(case.asked(), case.expected(DOCUMENTS, pinned=11), strict=True):
        assert "d11" in own
        assert_same(own, wanted)


@pytest.mark.parametrize("make", KINDS)
def test_rows_move_up_when_a_document_goes(make: Rows) -> None:
    """And it comes back behind them."""
    case = Case(make, 384)
    case.save(0, DOCUMENTS)
    assert any(case.asked())
    case.retriever.force_remove("d03")
    for own, wanted in zip(case.asked(), case.expected(DOCUMENTS, gone=3), strict=True):
        assert_same(own, wanted)
    case.save(3, 4)
    for own, wanted in zip(case.asked(), case.expected(DOCUMENTS), strict=True):
        assert_same(own, wanted)


@pytest.mark.parametrize("make", KINDS)
def test_neighbours_have_their_own_cosines(make: Rows) -> None:
    """Those that are no hits are computed by themselves."""
    case = Case(make, 384, expand_neighbours=1)
    case.save(0, DOCUMENTS)
    found = case.asked()
    assert any(found)
    for question, own in enumerate(found):
        for doc_id, scores in own.items():
            for chunk, score in scores.items():
                row = case.rows[int(doc_id[1:]) * CHUNKS + chunk]
                assert score == pytest.approx(float(row @ case.questions[question]), abs=2e-6)
        for doc_id, wanted in case.expected(DOCUMENTS)[question].items():
            assert set(wanted) <= set(own[doc_id])


@pytest.mark.parametrize("width", [8, 60, 129, 384])
def test_equal_vectors_come_in_the_same_order_everywhere(width: int, make_store: Callable[[str], StateStore]) -> None:
    """By itself, in a batch, and in a process that built its index anew: by id and place, not by what rounding adds."""
    case = Case(same_rows, width, make_store("sqlite"))
    for number in (7, 3, 11, 5, 9):
        # Odd numbers of rows: the last ones are multiplied in another way.
        case.save(number, number + 1, chunks=number)
        before = [case.asked_in_order(case.retriever) for _ in range(2)]
    other = case.on(make_store("sqlite"))
    near = 4
    wanted = [[(f"d{number:02d}", [0, 1, 2]) for number in (3, 5, 7, 9, 11)]] * near
    assert [asked[:near] for asked in before] == [wanted, wanted]
    assert case.asked_in_order(other)[:near] == wanted
    together = other.batch([f"question {number}" for number in range(QUESTIONS)])
    assert [in_order(documents) for documents in together[:near]] == wanted
