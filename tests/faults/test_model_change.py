"""Vectors of one embedding model are never compared with those of another, and chunks of two splittings never mix."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from helpers import TableEmbeddings, document
from langchain_core.embeddings import Embeddings
from places import PlacedWorld
from scenarios import OTHER_QUESTION, POD_QUESTION, PODS, Paragraphs, World, cached, doc_ids, texts, topics

from rag_wiki import ProvenanceBlock, RagWikiRetriever

SWAPPED = {"pods": [0, 1, 0], "Pods": [1, 0, 0], "tax": [1, 0, 0]}
"""A model in whose eyes a question about tax is one about saved pods; its vectors of these are those of `topics`."""


def model(width: int = 8, name: str = "table", table: dict[str, Any] | None = None) -> TableEmbeddings:
    """A model by its width and name."""
    return TableEmbeddings(topics().table if table is None else table, width=width, model=name)


OTHERS: dict[str, Callable[[], TableEmbeddings]] = {
    "another width": lambda: model(width=16),
    "another name": lambda: model(name="other"),
    "another name, other vectors": lambda: model(name="other", table=SWAPPED),
    "narrower": lambda: model(width=4, name="small"),
}
REMEDIES: dict[str, Callable[[RagWikiRetriever], Awaitable[Any]]] = {
    "reindex": lambda retriever: in_thread(retriever.reindex()),
    "areindex": lambda retriever: retriever.areindex(),
    "refresh": lambda retriever: retriever.arefresh("pods", full_content=PODS),
    "saving anew": lambda retriever: retriever.aaccept_suggestion("pods", full_content=PODS),
}


async def in_thread(value: object) -> object:
    """What a blocking call gave, for where calls are awaited."""
    return value


def reasons(provenance: ProvenanceBlock) -> list[tuple[str, str]]:
    """The copies that were kept back, and why."""
    return [(kept.doc_id, kept.reason) for kept in provenance.withheld]


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the log warned of."""
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def changed(world: PlacedWorld, embeddings: Embeddings) -> PlacedWorld:
    """The same data in a process that has another model."""
    opened = world.reopened()
    opened.embeddings = embeddings
    return opened


@pytest.mark.parametrize("kind", OTHERS)
async def test_a_copy_of_another_model_does_not_answer_until_it_is_embedded_anew(
    world: PlacedWorld, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """With another model the source answers, one warning says what helps, and a public call brings the copy back."""
    world.save(world.retriever(), "pods", PODS)
    opened = changed(world, OTHERS[kind]())
    opened.shows(document("pods", PODS), document("tax", "Tax."))
    retriever = opened.retriever()
    for question in (POD_QUESTION, OTHER_QUESTION):
        found, provenance = retriever.invoke_with_provenance(question)
        assert (cached(found), doc_ids(found), reasons(provenance)) == (
            [],
            ["pods", "tax"],
            [("pods", "other embedding model")],
        )
        assert provenance.mode == "none"
        assert any("reindex()" in said for said in provenance.degraded)
    assert [doc_ids(found) for found in await retriever.abatch([POD_QUESTION, "others"])] == [["pods", "tax"]] * 2
    (warning,) = warnings(caplog)
    assert "other embedding model" in warning
    assert "reindex()" in warning
    assert await retriever.areindex() == ["pods"]
    assert retriever.reindex() == []
    question = OTHER_QUESTION if kind == "another name, other vectors" else POD_QUESTION
    for again in (retriever, changed(opened, OTHERS[kind]()).retriever()):
        found, provenance = again.invoke_with_provenance(question)
        assert (texts(cached(found)), provenance.mode, provenance.degraded) == ([PODS], "semantic", ())
    assert len(warnings(caplog)) == 1


@pytest.mark.parametrize("remedy", REMEDIES)
async def test_each_remedy_leaves_one_copy_of_the_new_model(world: PlacedWorld, remedy: str) -> None:
    """However a copy is embedded anew, its chunks have vectors of the new width only, and the old model's are gone."""
    world.save(world.retriever(), "pods", PODS)
    opened = changed(world, model(width=16))
    retriever = opened.retriever()
    await REMEDIES[remedy](retriever)
    chunks = retriever.chunk_store.load_chunks("ada", "pods")
    assert [(chunk["text"], len(chunk["vector"])) for chunk in chunks] == [(PODS, 16)]
    assert len(retriever.chunk_store.place.copies("ada", "pods")) == 1
    assert texts(cached(retriever.invoke(POD_QUESTION))) == [PODS]
    back = changed(opened, model(width=8)).retriever()
    assert reasons(back.invoke_with_provenance(POD_QUESTION).provenance) == []
    opened.shows(document("pods", PODS))
    assert reasons(back.invoke_with_provenance(POD_QUESTION).provenance) == [("pods", "other embedding model")]


def test_the_same_model_made_again_is_that_model(world: PlacedWorld, caplog: pytest.LogCaptureFixture) -> None:
    """A model of the same class, name and width answers from what was saved before, without a warning."""
    world.save(world.retriever(), "pods", PODS)
    opened = changed(world, model())
    assert texts(cached(opened.retriever().invoke(POD_QUESTION))) == [PODS]
    assert (opened.retriever().reindex(), warnings(caplog)) == ([], [])


def test_two_models_over_one_store_see_what_is_their_own(world: PlacedWorld) -> None:
    """Where two workers have different models, each is answered by copies of its own, also when the other saves."""
    old, new = world.retriever(), changed(world, model(name="other")).retriever()
    for retriever, doc_id in ((old, "old"), (new, "new"), (old, "more")):
        world.save(old, doc_id, f"Pods, {doc_id}.")
        retriever.refresh(doc_id, full_content=f"Pods, {doc_id}.")
    for _ in range(2):
        assert set(doc_ids(cached(old.invoke(POD_QUESTION)))) == {"old", "more"}
        assert doc_ids(cached(new.invoke(POD_QUESTION))) == ["new"]
    assert sorted(new.reindex()) == ["more", "old"]
    assert set(doc_ids(cached(new.invoke(POD_QUESTION)))) == {"old", "new", "more"}
    assert old.invoke(POD_QUESTION) == []


@pytest.mark.parametrize("how", ["pinned", "on miss", "full document", "best of all"])
def test_however_a_copy_is_served_another_model_does_not_serve_it(how: str) -> None:
    """A pin, a whole document, or a source that is asked on a miss only: a copy of another model is kept back."""
    world = World()
    world.save(world.retriever(), "pods", PODS)
    if how == "pinned":
        world.retriever().force_pin("pods")
    if how == "full document":
        world.retriever().set_always_full_doc("pods")
    world.embeddings = model(name="other", table=SWAPPED)
    world.shows(document("tax", "Tax."))
    retriever = world.retriever(
        global_search="on_miss" if how == "on miss" else "always",
        similarity_threshold=0.0 if how == "best of all" else 0.75,
    )
    found, provenance = retriever.invoke_with_provenance(OTHER_QUESTION)
    assert (doc_ids(found), provenance.asked) == (["tax"], True)
    assert reasons(provenance) == ([("pods", "other embedding model")] if how == "pinned" else [])
    retriever.reindex()
    assert "pods" in doc_ids(cached(retriever.invoke(OTHER_QUESTION)))


def test_a_model_set_on_a_retriever_that_was_asked_is_the_one_compared() -> None:
    """A retriever that is given another model compares nothing of the one before, at once."""
    world = World()
    retriever = world.retriever()
    world.save(retriever, "pods", PODS)
    assert texts(cached(retriever.invoke(POD_QUESTION))) == [PODS]
    retriever.embedding_model = model(name="other", table=SWAPPED)
    assert retriever.invoke(OTHER_QUESTION) == []
    retriever.embedding_model = model()
    assert texts(cached(retriever.invoke(POD_QUESTION))) == [PODS]


class Remembering(Embeddings):
    """Keeps what an underlying model gives, as caches of LangChain do; it has no name of its own."""

    def __init__(self, underlying: Embeddings) -> None:
        self.underlying_embeddings = underlying

    def embed_query(self, text: str) -> list[float]:
        return self.underlying_embeddings.embed_query(text)

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return self.underlying_embeddings.embed_documents(texts)


class Nameless(TableEmbeddings):
    """A model that says nothing of which one it is."""

    def __init__(self, table: dict[str, Any] | None = None) -> None:
        super().__init__(topics().table if table is None else table, model="")


def test_a_cache_before_a_model_does_not_hide_which_one_it_is() -> None:
    """Another model behind the same kind of cache is another model, and the same one behind none is the same."""
    world = World(embeddings=Remembering(model()))
    world.save(world.retriever(), "pods", PODS)
    world.embeddings = model()
    assert texts(cached(world.retriever().invoke(POD_QUESTION))) == [PODS]
    world.embeddings = Remembering(model(name="other", table=SWAPPED))
    assert world.retriever().invoke(OTHER_QUESTION) == []


def test_a_name_tells_models_apart_that_have_none() -> None:
    """`embedding_name` makes two models of one nameless class different, and one model under a new name another."""
    # Without it, two models that differ in nothing that can be seen (class, name, width) are one model.
    world = World(embeddings=Nameless())
    world.save(world.retriever(embedding_name="first"), "pods", PODS)
    world.embeddings = Nameless(SWAPPED)
    second = world.retriever(embedding_name="second")
    assert second.invoke(OTHER_QUESTION) == []
    assert second.reindex() == ["pods"]
    assert texts(cached(second.invoke(OTHER_QUESTION))) == [PODS]
    assert world.retriever(embedding_name="first").invoke(OTHER_QUESTION) == []


class Limited(TableEmbeddings):
    """Embeds one batch of documents, and no further one."""

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        if self.batches:
            raise ConnectionError("rate limit")
        return super().embed_documents(texts)


def test_embedding_anew_is_whole_for_each_document(world: PlacedWorld) -> None:
    """When the model fails on the way, what was embedded anew answers, the rest is as before, and a repeat ends it."""
    for doc_id in ("first", "second", "third"):
        world.save(world.retriever(), doc_id, f"Pods, {doc_id}.")
    world.save(world.retriever("bob"), "first", "Pods of bob.", user_id="bob")

    limited = Limited(topics().table, width=16)
    retriever = changed(world, limited).retriever()
    with pytest.raises(ConnectionError, match="rate limit"):
        retriever.reindex()
    assert doc_ids(cached(retriever.invoke(POD_QUESTION))) == ["first"]
    assert set(doc_ids(cached(world.retriever().invoke(POD_QUESTION)))) == {"second", "third"}
    limited.batches.clear()
    working = changed(world, limited).retriever()
    with pytest.raises(ConnectionError, match="rate limit"):
        working.reindex()
    limited.batches.clear()
    assert working.reindex() == ["third"]
    assert set(doc_ids(cached(working.invoke(POD_QUESTION)))) == {"first", "second", "third"}
    assert texts(cached(world.retriever("bob").invoke(POD_QUESTION))) == ["Pods of bob."]


# -- another splitting

CONTENT = "Pods are one.\n\nPods are two.\n\nPods are three."


def test_another_chunk_size_mixes_nothing(world: PlacedWorld) -> None:
    """A copy answers with the chunks that it was split into; saved anew, it has the new ones only, in every place."""
    coarse = world.retriever(chunk_size=1000, local_top_k=5)
    world.save(coarse, "pods", CONTENT)
    opened = world.reopened()
    fine = opened.retriever(text_splitter=Paragraphs(), local_top_k=5)
    (found,) = cached(fine.invoke(POD_QUESTION))
    assert (found.page_content, found.metadata["chunks_used"], found.metadata["total_chunks"]) == (CONTENT, [0], 1)
    fine.refresh("pods", full_content=CONTENT)
    for retriever in (fine, coarse, opened.reopened().retriever(chunk_size=20, chunk_overlap=0, local_top_k=5)):
        (found,) = cached(retriever.invoke(POD_QUESTION))
        assert (found.page_content, found.metadata["chunks_used"]) == (CONTENT, [0, 1, 2])
        chunks = [chunk["text"] for chunk in retriever.chunk_store.load_chunks("ada", "pods")]
        assert (chunks, retriever.stats().chunks) == (CONTENT.split("\n\n"), 3)
    coarse.accept_suggestion("pods", full_content=CONTENT)
    (found,) = cached(fine.invoke(POD_QUESTION))
    assert (found.metadata["chunks_used"], fine.stats().chunks) == ([0], 1)
    assert len(fine.chunk_store.place.copies("ada", "pods")) == 1
    if world.folder is not None:
        assert len(list(world.folder.rglob("*.chunks"))) == len(list(world.folder.rglob("*.md"))) == 1


def test_another_model_and_chunk_size_at_once_mix_nothing(world: PlacedWorld) -> None:
    """Embedded anew under other settings, a document is split by them, and no chunk of the old splitting is left."""
    world.save(world.retriever(chunk_size=1000), "pods", CONTENT)
    opened = changed(world, model(width=16))
    retriever = opened.retriever(text_splitter=Paragraphs(), local_top_k=5)
    assert retriever.reindex() == ["pods"]
    chunks = retriever.chunk_store.load_chunks("ada", "pods")
    assert [(chunk["text"], len(chunk["vector"])) for chunk in chunks] == [(text, 16) for text in CONTENT.split("\n\n")]
    (found,) = cached(retriever.invoke(POD_QUESTION))
    assert (found.page_content, found.metadata["scores"]) == (CONTENT, [1.0, 1.0, 1.0])
