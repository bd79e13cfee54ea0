"""A saved copy that looks alike is no proof that it answers: it never costs the user a better document."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from geometry import high
from helpers import TableEmbeddings, document
from langchain_core.documents import Document
from langchain_core.vectorstores import InMemoryVectorStore
from places import PlacedWorld
from scenarios import (
    OTHER_QUESTION,
    PODS,
    Paragraphs,
    World,
    cached,
    direction,
    doc_ids,
    texts,
)

from rag_wiki import ProvenanceBlock, RagWikiRetriever, RagWikiRetrieverConfig

ALIKE = 0.85
CATS = "Cats sleep through most of the day."
TAX = "Tax is due in May."


class AllAlike(TableEmbeddings):
    """Any two different texts have the same cosine: what they share, and a direction of their own."""

    def __init__(self) -> None:
        super().__init__(width=256)
        self._numbers: dict[str, int] = {}

    def vector(self, text: str) -> list[float]:
        number = self._numbers.setdefault(text, len(self._numbers))
        values = [0.0] * self.width
        values[0], values[1 + number] = math.sqrt(ALIKE), math.sqrt(1 - ALIKE)
        return values


def near_and_far() -> TableEmbeddings:
    """The question lies at 0.76, 0.75 and 0.74 to three texts."""
    return TableEmbeddings(
        {"near": direction(0.76), "equal": direction(0.75), "far": direction(0.74), "tax": [1.0, 0.0]}
    )


def of_sources(provenance: ProvenanceBlock) -> list[tuple[str | None, bool, list[float]]]:
    """What provenance says of each source: id, whether from a copy, scores."""
    return [
        (source.doc_id, source.from_cache, [round(score, 4) for score in source.scores])
        for source in provenance.sources
    ]


async def ask(retriever: RagWikiRetriever, question: str, awaiting: bool) -> tuple[list[Document], ProvenanceBlock]:
    """Ask plainly, or awaited."""
    if awaiting:
        return await retriever.ainvoke_with_provenance(question)
    return retriever.invoke_with_provenance(question)


async def test_the_threshold_divides_and_equal_is_in(world: PlacedWorld) -> None:
    """Of chunks at 0.76, 0.75 and 0.74, a threshold of 0.75 lets in the first two; the scores are told, awaited too."""
    world.embeddings = near_and_far()
    retriever = world.retriever(text_splitter=Paragraphs())
    world.save(retriever, "two", "near\n\nfar")
    world.save(retriever, "one", "equal")
    world.save(retriever, "none", "far")
    asked = [await ask(retriever, OTHER_QUESTION, awaiting) for awaiting in (False, True)]
    asked.append(await ask(world.reopened().retriever(), OTHER_QUESTION, awaiting=False))
    for documents, provenance in asked:
        assert texts(documents) == ["near", "equal"]
        assert [item.metadata["scores"] for item in documents] == [[0.76], [0.75]]
        assert of_sources(provenance) == [("two", True, [0.76]), ("one", True, [0.75])]
        assert [list(source.chunks_used) for source in provenance.sources] == [[0], [0]]
        assert (provenance.threshold, provenance.mode) == (0.75, "semantic")
        assert [source["scores"] for source in provenance.to_dict()["sources"]] == [[0.76], [0.75]]


@pytest.mark.parametrize("threshold", [1.01, -1.01, math.nan, math.inf, -math.inf, "high", None, True])
def test_a_threshold_that_is_no_cosine_is_refused(threshold: Any) -> None:
    """What can't be a cosine is a ValueError that names the setting."""
    with pytest.raises(ValueError, match="similarity_threshold"):
        RagWikiRetrieverConfig(similarity_threshold=threshold)


@pytest.mark.parametrize("length", [1.0, 1e-6, 1e6, 3.0])
def test_a_threshold_of_one_asks_for_the_same_direction(length: float) -> None:
    """At 1.0 the same direction is in, whatever its length and rounding, and what is nearly the same is not."""
    world = World(embeddings=TableEmbeddings({"same": [0.1 * length, 0.7 * length], "near": direction(0.9999)}))
    world.table.table |= {"tax": [0.1, 0.7], "near": [0.11, 0.7]}
    retriever = world.retriever(similarity_threshold=1.0)
    world.save(retriever, "same", "same")
    world.save(retriever, "near", "near")
    documents, provenance = retriever.invoke_with_provenance(OTHER_QUESTION)
    assert doc_ids(documents) == ["same"]
    assert of_sources(provenance) == [("same", True, [1.0])]


def test_a_high_cosine_is_near_and_not_a_distance() -> None:
    """The threshold is a cosine: the opposite of the question, which is the furthest, never passes a positive one."""
    world = World(embeddings=TableEmbeddings({"tax": [1.0, 0.0], "same": [1.0, 0.0], "opposite": [-1.0, 0.0]}))
    retriever = world.retriever(similarity_threshold=0.1)
    world.save(retriever, "opposite", "opposite")
    world.save(retriever, "same", "same")
    assert doc_ids(retriever.invoke(OTHER_QUESTION)) == ["same"]
    retriever = world.retriever(similarity_threshold=-1.0)
    assert doc_ids(retriever.invoke(OTHER_QUESTION)) == ["same", "opposite"]


@pytest.mark.parametrize("threshold", [0.75, "auto"])
@pytest.mark.parametrize("context", ["all", "focused"])
async def test_a_model_for_which_all_is_alike_hides_nothing(
    world: PlacedWorld, threshold: float | str, context: str
) -> None:
    """Where any two texts are at 0.85, a copy about cats stands beside the document about tax, never in its place."""
    world.embeddings = AllAlike()
    retriever = world.retriever(similarity_threshold=threshold, context=context)
    world.save(retriever, "cats", CATS)
    world.shows(document("tax", TAX))
    for awaiting in (False, True):
        documents, provenance = await ask(retriever, "when is tax due?", awaiting)
        assert TAX in texts(documents)
        assert of_sources(provenance) == [("cats", True, [ALIKE]), ("tax", False, [])]
        assert provenance.asked


def test_asking_only_on_a_miss_is_a_setting_and_said() -> None:
    """With a number and `on_miss` the copy may stand alone, as documented; provenance says so."""
    world = World(embeddings=AllAlike())
    retriever = world.retriever(global_search="on_miss")
    world.save(retriever, "cats", CATS)
    world.shows(document("tax", TAX))
    documents, provenance = retriever.invoke_with_provenance("when is tax due?")
    assert doc_ids(documents) == ["cats"]
    assert not provenance.asked
    assert provenance.to_dict()["asked"] is False
    assert "nothing else was searched" in provenance.render()


@pytest.mark.parametrize("context", ["all", "focused"])
def test_a_model_that_can_not_tell_never_skips_the_search(context: str) -> None:
    """Where `"auto"` found that the model tells nothing, a copy is no answer, and `on_miss` asks all the same."""
    world = World(embeddings=AllAlike())
    retriever = world.retriever(similarity_threshold="auto", global_search="on_miss", context=context)
    world.save(retriever, "cats", CATS)
    world.shows(document("tax", TAX))
    documents, provenance = retriever.invoke_with_provenance("when is tax due?")
    assert provenance.asked
    assert TAX in texts(documents)


@pytest.mark.parametrize("awaiting", [False, True], ids=["sync", "async"])
async def test_a_better_document_is_not_lost_to_a_copy(world: PlacedWorld, awaiting: bool) -> None:
    """The copy at 0.76 is served, and so is the source's document at 0.95, also where there is room for two."""
    world.embeddings = TableEmbeddings({"tax": [1.0, 0.0], "copy": direction(0.76), "better": direction(0.95)})
    retriever = world.retriever()
    world.save(retriever, "copy", "the copy")
    world.shows(document("better", "a better one"), document("third", "a third one"))
    documents, _ = await ask(retriever, OTHER_QUESTION, awaiting)
    assert doc_ids(documents) == ["copy", "better", "third"]
    documents, _ = await ask(world.retriever(k=2), OTHER_QUESTION, awaiting)
    assert doc_ids(documents) == ["copy", "better"]


def test_one_ranking_puts_the_better_document_first() -> None:
    """With `focused`, room for one goes to the better one, be it saved or not."""
    for saved, shared in (("tax/0.6", "tax"), ("tax", "tax/0.6")):
        model = high()
        collection = InMemoryVectorStore(model)
        collection.add_documents([document("shared", f"{shared} in the collection")])
        world = World(embeddings=model)
        retriever = world.retriever(similarity_threshold=0.5, context="focused", focus_prior=0.0, focus_words=0.0)
        world.save(retriever, "saved", f"{saved} in the copy")
        asking = retriever.model_copy(update={"global_retriever": collection.as_retriever(), "k": 1})
        documents, provenance = asking.invoke_with_provenance("tax when is it due?")
        best = "shared" if shared == "tax" else "saved"
        assert doc_ids(documents) == [best]
        ((_, _, (score,)),) = of_sources(provenance)
        assert score > 0.85


def test_a_crowd_of_copies_leaves_room_for_the_source() -> None:
    """Ten copies above the threshold do not push the source's document out of three places."""
    world = World(embeddings=AllAlike())
    retriever = world.retriever(k=3)
    for number in range(10):
        world.save(retriever, f"cats {number}", f"{CATS} {number}")
    world.shows(document("tax", TAX))
    documents = retriever.invoke("when is tax due?")
    assert len(documents) == 3
    assert TAX in texts(documents)
    assert len(cached(documents)) == 2


def test_a_negated_text_of_the_source_is_served_beside_the_copy() -> None:
    """A text that says the opposite scores as high as the copy; both are served, each with its own origin."""
    model = TableEmbeddings({"Pods": direction(0.97), "pods": [1.0, 0.0]})
    world = World(embeddings=model)
    retriever = world.retriever()
    world.save(retriever, "old", PODS)
    world.shows(document("new", "Pods are not the smallest unit that can be deployed."))
    documents, provenance = retriever.invoke_with_provenance("what are pods?")
    assert of_sources(provenance) == [("old", True, [0.97]), ("new", False, [])]
    assert [item.metadata["from_cache"] for item in documents] == [True, False]


async def test_all_ways_of_asking_agree() -> None:
    """Plain, awaited, streamed and batched calls serve the same documents in the same order with the same scores."""
    world = World(embeddings=near_and_far())
    retriever = world.retriever(text_splitter=Paragraphs())
    world.save(retriever, "two", "near\n\nfar")
    world.save(retriever, "one", "equal")
    world.shows(document("shared", "something else"))
    answers = [
        retriever.invoke(OTHER_QUESTION),
        await retriever.ainvoke(OTHER_QUESTION),
        *retriever.batch([OTHER_QUESTION] * 2),
        *await retriever.abatch([OTHER_QUESTION] * 2),
        list(itertools.chain(*retriever.stream(OTHER_QUESTION))),
    ]
    said = [[(item.metadata["doc_id"], item.metadata.get("scores")) for item in answer] for answer in answers]
    assert said == [[("two", [0.76]), ("shared", None), ("one", [0.75])]] * len(answers)
