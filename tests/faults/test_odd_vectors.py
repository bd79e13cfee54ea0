"""Vectors of zeros, of no number, of any length and any type: nothing crashes, and nothing is ranked by chance."""

from __future__ import annotations

import array
import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from helpers import TableEmbeddings, document
from langchain_core.callbacks import BaseCallbackHandler
from places import PLACES, PlacedWorld
from scenarios import (
    OTHER_QUESTION,
    POD_QUESTION,
    PODS,
    Paragraphs,
    World,
    cached,
    direction,
    doc_ids,
)

from rag_wiki import DocumentState, EmbeddingError, RagWikiRetriever
from rag_wiki.storage.chunk_store import ChunkStore

NAN, INF = math.nan, math.inf
WIDTH = 8
TABLE: dict[str, Sequence[float]] = {
    "what are pods": direction(1.0),
    "best": direction(0.95),
    "good": direction(0.85),
    "far": direction(0.3),
}
TABLE |= {"Pods": direction(1.0)}

Change = Callable[[list[float]], Any]


class ChangedEmbeddings(TableEmbeddings):
    """Gives its vectors in another form."""

    def __init__(self, change: Change = list) -> None:
        super().__init__(TABLE, WIDTH)
        self.change = change
        self.change_query: Change = list

    def embed_query(self, text: str) -> Any:
        return self.change_query(super().embed_query(text))

    def embed_documents(self, texts: list[str]) -> Any:
        return [self.change(vector) for vector in super().embed_documents(texts)]


def zeros(vector: Sequence[float]) -> list[float]:
    """As many zeros."""
    return [0.0] * len(vector)


def answers(retriever: RagWikiRetriever, query: str = "what are pods") -> list[tuple[str | None, list[float]]]:
    """Which copies answer a query, in order, and their scores; provenance is plain JSON without NaN."""
    found, provenance = retriever.invoke_with_provenance(query)
    assert provenance.degraded == ()
    assert "NaN" not in json.dumps(provenance.to_dict(), allow_nan=False)
    return [(item.metadata["doc_id"], item.metadata["scores"]) for item in cached(found)]


def save_three(world: World, retriever: RagWikiRetriever) -> None:
    """Three documents at known angles to the question about pods."""
    for name in ("good", "far", "best"):
        world.save(retriever, name, f"The {name} one.")


def streaks(retriever: RagWikiRetriever) -> dict[str, int]:
    """How many searches in a row missed each saved document."""
    return {record.doc_id: record.cache_miss_streak for record in retriever.documents(["CLAIMED", "PINNED"])}


RANKED = [("best", [0.95]), ("good", [0.85])]


# -- the query


@pytest.mark.parametrize("awaiting", [False, True])
async def test_a_query_without_a_direction_gets_the_source_and_the_pins(world: PlacedWorld, awaiting: bool) -> None:
    """A query whose vector is all zeros matches no copy and is no miss; pins come along, and the source answers."""
    model = ChangedEmbeddings()
    world.embeddings = model
    retriever = world.retriever()
    save_three(world, retriever)
    retriever.force_pin("far")
    before = streaks(retriever)
    world.shows(document("tax", "Tax is due in May."))
    model.change_query = zeros
    for query in ("what are pods", "something else"):
        if awaiting:
            found, provenance = await retriever.ainvoke_with_provenance(query)
        else:
            found, provenance = retriever.invoke_with_provenance(query)
        assert doc_ids(found) == ["far", "tax"]
        assert (provenance.mode, provenance.threshold, provenance.degraded) == ("none", None, ())
        assert "NaN" not in json.dumps(provenance.to_dict(), allow_nan=False)
    assert streaks(retriever) == before
    model.change_query = list
    assert answers(retriever)[:2] == [("far", [0.3]), ("best", [0.95])]


@pytest.mark.parametrize("settings", [{"similarity_threshold": -1.0}, {"context": "focused"}, {"k": 1}])
def test_a_query_without_a_direction_matches_nothing_with_any_setting(settings: dict[str, Any]) -> None:
    """Also where the least threshold would let everything pass, a query of zeros has no copy to answer it."""
    model = ChangedEmbeddings()
    world = World(embeddings=model)
    retriever = world.retriever(**settings)
    save_three(world, retriever)
    world.shows(document("tax", "Tax is due in May."))
    model.change_query = zeros
    found, provenance = retriever.invoke_with_provenance("what are pods")
    assert (doc_ids(found), provenance.mode, provenance.degraded) == (["tax"], "none", ())


NO_NUMBERS: dict[str, Change] = {
    "NaN": lambda vector: [NAN, *vector[1:]],
    "infinity": lambda vector: [INF, *vector[1:]],
    "all NaN": lambda vector: [NAN] * len(vector),
    "NaN in an array": lambda vector: np.array([*vector[1:], NAN], dtype=np.float16),
    "both infinities": lambda vector: [INF, -INF, *vector[2:]],
    "empty": lambda vector: [],
    "nothing": lambda vector: None,
    "a number": lambda vector: vector[0],
    "a text": lambda vector: "1234",
    "texts": lambda vector: [str(number) for number in vector],
    "several": lambda vector: [vector, vector],
    "complex numbers": lambda vector: [complex(number) for number in vector],
    "numpy's complex numbers": lambda vector: [np.complex64(number) for number in vector],
    "moments": lambda vector: np.array([0] * len(vector), dtype="datetime64[s]"),
}


@pytest.mark.parametrize("name", NO_NUMBERS)
@pytest.mark.parametrize("awaiting", [False, True])
async def test_a_query_that_is_no_vector_gets_the_source_and_is_no_miss(name: str, awaiting: bool) -> None:
    """A query embedded as NaN, infinity or nothing is answered by the source, and provenance says what was wrong."""
    model = ChangedEmbeddings()
    world = World(embeddings=model)
    retriever = world.retriever()
    save_three(world, retriever)
    before = streaks(retriever)
    world.shows(document("tax", "Tax is due in May."))
    model.change_query = NO_NUMBERS[name]
    if awaiting:
        found, provenance = await retriever.ainvoke_with_provenance("what are pods")
    else:
        found, provenance = retriever.invoke_with_provenance("what are pods")
    assert doc_ids(found) == ["tax"]
    assert provenance.degraded == ("the query could not be embedded, saved copies were not searched (EmbeddingError)",)
    json.dumps(provenance.to_dict(), allow_nan=False)
    assert streaks(retriever) == before


@pytest.mark.parametrize("awaiting", [False, True])
async def test_odd_queries_of_a_batch_change_no_other_ones_answer(awaiting: bool) -> None:
    """Beside questions embedded as zeros and as NaN the other questions of a batch are answered as alone."""

    class Mixed(ChangedEmbeddings):
        def embed_query(self, text: str) -> Any:
            vector = super().embed_query(text)
            return zeros(vector) if "zeros" in text else [NAN] * WIDTH if "nothing" in text else vector

    world = World(embeddings=Mixed())
    retriever = world.retriever()
    save_three(world, retriever)
    asked = ["zeros", "what are pods", "nothing", "what are pods, again"]
    found = await retriever.abatch(asked) if awaiting else retriever.batch(asked)
    assert [doc_ids(documents) for documents in found] == [[], ["best", "good"], [], ["best", "good"]]


# -- the saved chunks


@pytest.mark.parametrize("name", ["NaN", "infinity", "empty"])
def test_a_chunk_that_is_no_vector_is_refused_and_changes_no_ranking(world: PlacedWorld, name: str) -> None:
    """A model that gives one chunk no vector saves nothing of the document, and the others rank as before."""
    model = ChangedEmbeddings()
    world.embeddings = model
    retriever = world.retriever(text_splitter=Paragraphs())
    save_three(world, retriever)
    whole = "The best start.\n\nThe odd one.\n\nThe good end."
    world.shows(document("odd", whole))
    retriever.invoke("an introduction")
    world.shows()
    before = world.record("odd")

    odd_at: list[int] = []

    def change(vector: list[float]) -> Any:
        odd_at.append(len(odd_at))
        return NO_NUMBERS[name](vector) if len(odd_at) == 2 else vector

    model.change = change
    with pytest.raises(EmbeddingError, match="'odd'"):
        retriever.accept_suggestion("odd", full_content=whole)
    assert world.record("odd") == before
    assert retriever.chunk_store.place.copies("ada", "odd") == []
    assert answers(retriever) == RANKED
    # The next answer is a good one.
    retriever.accept_suggestion("odd", full_content=whole)
    assert {doc_id for doc_id, _ in answers(world.reopened().retriever())} == {"best", "good", "odd"}


def test_a_chunk_without_a_direction_never_answers_and_changes_no_ranking(world: PlacedWorld) -> None:
    """A chunk embedded as zeros scores 0 with every question; all others rank as they would without it."""
    model = ChangedEmbeddings()
    world.embeddings = model
    retriever = world.retriever(text_splitter=Paragraphs())
    save_three(world, retriever)
    model.change = lambda vector: zeros(vector) if vector[-1] else vector
    world.save(retriever, "half", "Nothing in particular.\n\nThe best half.")
    for seen in (retriever, world.reopened().retriever()):
        assert sorted(answers(seen)) == [("best", [0.95]), ("good", [0.85]), ("half", [0.95])]
        # Texts that the table does not know share the direction of this question.
        assert answers(seen, OTHER_QUESTION) == []
        ((found, *_),) = [[item for item in seen.invoke("what are pods") if item.metadata["doc_id"] == "half"]]
        assert (found.page_content, found.metadata["chunks_used"]) == ("The best half.", [1])


def test_a_pinned_document_without_any_direction_comes_with_its_first_chunk(world: PlacedWorld) -> None:
    """A pin all of whose chunks are zeros is in every answer all the same, with a score of 0."""
    model = ChangedEmbeddings(zeros)
    world.embeddings = model
    retriever = world.retriever(text_splitter=Paragraphs())
    world.save(retriever, "blank", "One.\n\nTwo.")
    retriever.force_pin("blank")
    (found,) = world.reopened().retriever().invoke("what are pods")
    assert (found.page_content, found.metadata["scores"]) == ("One.", [0.0])
    assert answers(retriever) == [("blank", [0.0])]


@pytest.mark.parametrize(
    ("world", "length"),
    [*((place, length) for place in PLACES for length in (1e6, 1e-6)), ("memory", 1e30), ("sqlite+disk", 1e-30)],
    indirect=["world"],
)
def test_the_length_of_vectors_changes_no_score(world: PlacedWorld, length: float) -> None:
    """Chunks and queries a million times as long or short as unit vectors rank and score as unit vectors do."""

    def stretch(vector: list[float]) -> list[float]:
        return [value * length for value in vector]

    model = ChangedEmbeddings(stretch)
    model.change_query = stretch
    world.embeddings = model
    retriever = world.retriever()
    save_three(world, retriever)
    assert answers(retriever) == RANKED
    assert answers(world.reopened().retriever()) == RANKED


def test_vectors_of_different_lengths_rank_by_direction() -> None:
    """A long vector is no nearer than a short one: only the angle counts."""
    model = ChangedEmbeddings(lambda vector: [value * 10 ** (12 * vector[0] - 6) for value in vector])
    world = World(embeddings=model)
    retriever = world.retriever(similarity_threshold=0.2)
    save_three(world, retriever)
    assert answers(retriever) == [*RANKED, ("far", [0.3])]


FORMS: dict[str, Change] = {
    "list": list,
    "tuple": tuple,
    "float16": lambda vector: np.array(vector, dtype=np.float16),
    "float32": lambda vector: np.array(vector, dtype=np.float32),
    "float64": lambda vector: np.array(vector, dtype=np.float64),
    "longdouble": lambda vector: np.array(vector, dtype=np.longdouble),
    "list of numpy floats": lambda vector: [np.float16(value) for value in vector],
    "one row of a matrix": lambda vector: np.array([vector], dtype=np.float64),
    "every second number": lambda vector: np.repeat(np.array(vector), 2)[::2],
    "read-only": lambda vector: np.frombuffer(np.array(vector).tobytes()),
    "array": lambda vector: array.array("d", vector),
    "whole numbers": lambda vector: [round(value * 10**6) for value in vector],
    "int32 array": lambda vector: np.array([round(value * 10**6) for value in vector], dtype=np.int32),
}


@pytest.mark.parametrize("form", FORMS)
async def test_vectors_of_every_type_are_taken(form: str) -> None:
    """Saved and asked with whatever kind of numbers a model gives, documents rank alike, blocking and awaited."""
    model = ChangedEmbeddings(FORMS[form])
    model.change_query = FORMS[form]
    world = World(embeddings=model)
    retriever = world.retriever()
    save_three(world, retriever)
    found = answers(retriever)
    assert [doc_id for doc_id, _ in found] == ["best", "good"]
    # Half-precision numbers have three digits.
    assert [score for _, scores in found for score in scores] == pytest.approx([0.95, 0.85], abs=1e-3)
    assert doc_ids(cached(await retriever.ainvoke("what are pods"))) == ["best", "good"]
    assert [doc_ids(cached(one)) for one in retriever.batch(["what are pods", "a tax"])] == [["best", "good"], []]
    focused = world.retriever(context="focused")
    assert doc_ids(cached(focused.invoke("what are pods")))[0] == "best"


@pytest.mark.parametrize("form", ["float16", "float64"])
def test_a_matrix_of_vectors_is_taken(form: str) -> None:
    """A model that answers with one numpy matrix for all texts is understood."""

    class Matrix(ChangedEmbeddings):
        def embed_documents(self, texts: list[str]) -> Any:
            return np.array(super().embed_documents(texts), dtype=form)

    world = World(embeddings=Matrix())
    retriever = world.retriever(text_splitter=Paragraphs())
    world.save(retriever, "two", "The best.\n\nThe good.")
    ((doc_id, scores),) = answers(retriever)
    assert doc_id == "two"
    assert scores == pytest.approx([0.95, 0.85], abs=1e-3)


# -- what is told


class Told(BaseCallbackHandler):
    """Keeps what the provenance event carries."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def on_custom_event(self, name: str, data: Any, **named: Any) -> None:
        """Keep it."""
        self.events.append(data)


@pytest.mark.parametrize("score", [NAN, INF, -INF, np.float32("nan"), np.float64("inf"), "NaN", None, 10**400])
def test_no_score_of_the_source_makes_provenance_unreadable(score: Any) -> None:
    """Whatever a source calls a score, provenance is plain JSON, and the score is left out when it is no number."""
    world = World()
    retriever = world.retriever()
    odd = document("odd", "Pods", score=score)
    world.shows(odd, document("fine", "Pods, too", score=np.float32(0.5)))
    told = Told()
    documents, provenance = retriever.invoke_with_provenance(POD_QUESTION, {"callbacks": [told]})
    # Some releases of numpy copy their numbers.
    served = documents[0].metadata["score"]
    assert (type(served), repr(served)) == (type(score), repr(score))
    for told_of in (provenance.to_dict(), *told.events):
        plain = json.loads(json.dumps(told_of, allow_nan=False))
        assert [source["scores"] for source in plain["sources"]] == [[], [0.5]]


@pytest.mark.parametrize("change", [zeros, lambda vector: [NAN] * len(vector), lambda vector: [1.0] * len(vector)])
@pytest.mark.parametrize("settings", [{"similarity_threshold": "auto"}, {"context": "focused"}])
async def test_a_model_that_knows_no_angles_is_measured_without_a_warning(
    change: Change, settings: dict[str, Any]
) -> None:
    """A model all of whose vectors are zeros, NaN or alike costs no answer, blocking or awaited, and tells no NaN."""
    model = ChangedEmbeddings()
    world = World(embeddings=model)
    retriever = world.retriever(**settings)
    world.save(retriever, "pods", PODS)
    world.shows(document("tax", "Tax is due in May."))
    model.change, model.change_query = change, list
    for documents, provenance in (
        retriever.invoke_with_provenance("what are pods"),
        await retriever.ainvoke_with_provenance("what are pods"),
    ):
        assert doc_ids(documents)[-1] == "tax"
        assert all("RuntimeWarning" not in sentence for sentence in provenance.degraded)
        json.dumps(provenance.to_dict(), allow_nan=False)
    assert world.state("pods") is DocumentState.CLAIMED


# -- chunks that an application keeps itself


@pytest.mark.parametrize("keep", ["add_chunks", "save_chunks"])
@pytest.mark.parametrize("number", [NAN, INF])
def test_chunks_kept_by_hand_are_refused_when_they_are_no_vectors(keep: str, number: float) -> None:
    """A chunk store takes no vector with NaN or infinity in it, says which chunk it is, and keeps what it had."""
    chunks = ChunkStore()
    chunks.add_chunks("ada", "pods", [{"chunk_index": 0, "text": "Pods", "vector": [1.0, 0.0]}])
    with pytest.raises(ValueError, match="1"):
        getattr(chunks, keep)("ada", "pods", [{"chunk_index": 1, "text": "odd", "vector": [number, 0.0]}])
    assert [chunk["text"] for chunk in chunks.load_chunks("ada", "pods")] == ["Pods"]


@pytest.mark.parametrize("number", [NAN, INF, -INF])
def test_cosines_are_numbers_whatever_is_compared(number: float) -> None:
    """Rows and queries that are no vectors score 0, as those without a direction do, and no warning is raised."""
    matrix = [[1.0, 0.0], [number, 0.0], [0.0, 0.0], [0.6, 0.8]]
    assert ChunkStore.cosine_similarity_matrix([1.0, 0.0], matrix).tolist() == pytest.approx([1.0, 0.0, 0.0, 0.6])
    assert ChunkStore.cosine_similarity_matrix([number, 0.0], matrix).tolist() == [0.0] * 4


def test_cosines_of_any_finite_rows_are_in_range() -> None:
    """Rows of zeros score 0, and very long and very short ones as unit vectors do, for any float type."""
    for kind in (np.float16, np.float32, np.float64):
        matrix = np.array([[0, 0], [3, 4], [-3, -4], [0.006, 0.008]], dtype=kind)
        scores = ChunkStore.cosine_similarity_matrix(np.array([3, 4], dtype=kind), matrix)
        assert scores.tolist() == pytest.approx([0, 1, -1, 1], abs=1e-3)
        assert np.all(np.abs(scores) <= 1)
    long = ChunkStore.cosine_similarity_matrix([1e30, 0], [[1e30, 0], [1e-30, 0], [0, 1e30]])
    assert long.tolist() == [1.0, 1.0, 0.0]
