"""`context="focused"`: one ranking of saved and global pieces, a wrapped retriever asked by vector; and neighbours."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from geometry import GeometryEmbeddings, low
from helpers import document
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore, VectorStoreRetriever
from scenarios import Paragraphs, World, cached, doc_ids, texts

from rag_wiki import RagWikiRetriever

QUESTION = "bees in general?"
SHOWN = [
    document("hive", "bees live in a hive."),
    document("honey", "bees/0.9 make honey."),
    document("wax", "bees/0.3 and wax."),
    document("tax", "taxes are due in May."),
]
"""From the best to the worst answer; the margin of a focus reaches the second one."""


class Recorder(BaseCallbackHandler):
    """Notes what the wrapped retriever's run looked like."""

    def __init__(self) -> None:
        self.started: list[tuple[Any, ...]] = []
        self.ended: list[list[str | None]] = []
        self.failed: list[str] = []

    def on_retriever_start(
        self, serialized: Any, query: str, *, tags: Any = None, metadata: Any = None, name: Any = None, **kwargs: Any
    ) -> None:
        if kwargs.get("parent_run_id"):
            self.started.append((name, query, tags, {key: metadata[key] for key in sorted(metadata or {})}))

    def on_retriever_end(self, documents: Sequence[Document], **kwargs: Any) -> None:
        if kwargs.get("parent_run_id"):
            self.ended.append(doc_ids(documents))

    def on_retriever_error(self, error: BaseException, **kwargs: Any) -> None:
        if kwargs.get("parent_run_id"):
            self.failed.append(str(error))


def store_of(model: GeometryEmbeddings, kind: type[InMemoryVectorStore] = InMemoryVectorStore) -> InMemoryVectorStore:
    """A vector store with all that is shown."""
    store = kind(model)
    store.add_documents(SHOWN)
    return store


def focused(wrapped: Any, model: GeometryEmbeddings, world: World | None = None, **options: Any) -> RagWikiRetriever:
    """A focused retriever over another one; unless words are what it is about, it ranks by cosine alone."""
    world = world or World(embeddings=model)
    return world.retriever(
        global_retriever=wrapped, context="focused", **{"focus_words": 0.0, "focus_margin": 0.5, **options}
    )


def settled(retriever: RagWikiRetriever) -> None:
    """Ask until the store's ways are known."""
    for number in range(3):
        retriever.invoke(f"tides {number}")


@pytest.mark.parametrize("way", ["invoke", "ainvoke"])
def test_what_is_far_from_the_best_is_left_out(way: str) -> None:
    """Pieces come by cosine and only those close to the best; provenance has their scores, and how many are missing."""
    model = low()
    retriever = focused(store_of(model).as_retriever(search_kwargs={"k": 4}), model)
    if way == "invoke":
        documents, provenance = retriever.invoke_with_provenance(QUESTION)
    else:
        documents, provenance = asyncio.run(retriever.ainvoke_with_provenance(QUESTION))
    assert doc_ids(documents) == ["hive", "honey"]
    assert (provenance.left_out, provenance.to_dict()["left_out"], provenance.degraded) == (2, 2, ())
    assert [source.scores[0] for source in provenance.sources] == pytest.approx(
        [float(model.vector(QUESTION) @ model.vector(text)) for text in texts(documents)], abs=1e-5
    )


def test_all_is_served_by_default() -> None:
    """Without `context="focused"` the same retriever serves everything, in the wrapped one's order."""
    model = low()
    retriever = World(embeddings=model).retriever(global_retriever=store_of(model).as_retriever(search_kwargs={"k": 4}))
    assert doc_ids(retriever.invoke(QUESTION)) == ["hive", "honey", "wax", "tax"]


def test_a_saved_document_is_raised_a_little() -> None:
    """A saved document wins against a global one that is a little better, and not against one that is much better."""
    model = low()
    world = World(embeddings=model)
    store = InMemoryVectorStore(model)
    wrapped = store.as_retriever(search_kwargs={"k": 4})
    retriever = focused(wrapped, model, world, similarity_threshold="auto", focus_margin=2.0)
    world.save(world.retriever(), "honey", SHOWN[1].page_content)
    world.save(world.retriever(), "wax", "bees/0.6 and wax.")
    store.add_documents([SHOWN[0]])
    assert doc_ids(retriever.invoke(QUESTION)) == ["honey", "hive", "wax"]
    assert doc_ids(
        focused(wrapped, model, world, similarity_threshold="auto", focus_margin=2.0, focus_prior=0.0).invoke(QUESTION)
    ) == [
        "hive",
        "honey",
        "wax",
    ]


def test_chunks_of_a_saved_document_compete_too() -> None:
    """Of a saved document only the chunks close to the best piece are served; the rest of it stays away."""
    model = low()
    world = World(embeddings=model)
    retriever = focused(
        InMemoryVectorStore(model).as_retriever(), model, world, similarity_threshold="auto", local_top_k=4
    )
    world.save(
        world.retriever(text_splitter=Paragraphs()),
        "bees",
        "bees fly.\n\nbees/0.2 again.\n\nbees/0.9 dance.\n\ntaxes are no bees.",
    )
    documents, provenance = retriever.invoke_with_provenance(QUESTION)
    assert texts(documents) == ["bees fly.\n\nbees/0.9 dance."]
    assert documents[0].metadata["chunks_used"] == [0, 2]
    assert len(provenance.sources[0].scores) == 2


def test_the_words_of_the_query_count() -> None:
    """Of texts about as close, the one that holds the query's rare words comes first, saved or not."""
    model = low()
    world = World(embeddings=model)
    store = InMemoryVectorStore(model)
    store.add_documents([document("near", "bees and their young"), document("exact", "bees/0.9 and propolis")])
    wrapped = store.as_retriever(search_kwargs={"k": 2})
    question = "bees and propolis?"
    assert doc_ids(focused(wrapped, model, world).invoke(question)) == ["near", "exact"]
    assert doc_ids(focused(wrapped, model, world, focus_words=1.0, focus_margin=2.0).invoke(question)) == [
        "exact",
        "near",
    ]
    world.save(world.retriever(), "saved", "bees/0.8 and propolis")
    asked = focused(wrapped, model, world, similarity_threshold=0.2, focus_words=1.0, focus_prior=0.0, focus_margin=2.0)
    assert doc_ids(asked.invoke(question)) == ["exact", "saved", "near"]


def test_what_scores_by_chance_is_not_counted() -> None:
    """A question about nothing gets what there is, and no document is on its way to being suggested for it."""
    model = low()
    world = World(embeddings=model)
    retriever = focused(store_of(model).as_retriever(search_kwargs={"k": 4}), model, world)
    for number in range(6):
        documents, provenance = retriever.invoke_with_provenance(f"small talk number {number}")
        assert documents
        assert provenance.suggestions == ()
    assert retriever.documents() == []
    retriever.invoke(QUESTION)
    assert [record.doc_id for record in retriever.documents()] == ["hive", "honey"]


def test_an_answer_from_copies_alone_says_so() -> None:
    """Provenance tells when nothing but the saved copies was searched."""
    model = low()
    world = World(embeddings=model)
    retriever = focused(
        store_of(model).as_retriever(), model, world, similarity_threshold="auto", global_search="on_miss"
    )
    world.save(world.retriever(), "own", "tides come and go.")
    for question, asked in (("tides in general?", False), (QUESTION, True)):
        _, provenance = retriever.invoke_with_provenance(question)
        assert (provenance.asked, provenance.to_dict()["asked"]) == (asked, asked)
        assert ("nothing else was searched" in provenance.render()) is not asked


def test_a_cut_passage_is_whole_again() -> None:
    """Where splitting cut a passage, its other half comes along with the half that matched, and nothing twice."""
    model = low()
    world = World(embeddings=model)
    passage = "bees leave the hive in the morning and come home in the evening when the light is low over the field."
    saving = world.retriever(chunk_size=70, chunk_overlap=30)
    world.save(saving, "bees", f"{passage}\n\ntaxes are another matter, and stand in a paragraph of their own.")
    retriever = focused(InMemoryVectorStore(model).as_retriever(), model, world, similarity_threshold="auto")
    (found,) = retriever.invoke(QUESTION)
    assert found.page_content == passage
    chunks = world.store.chunk_store.load_chunks("ada", "bees")
    hits = [chunk["chunk_index"] for chunk in chunks if chunk["hit_count"]]
    assert 0 < len(hits) < len(found.metadata["chunks_used"]) < len(chunks)


def test_a_pinned_document_stays() -> None:
    """A pinned document is in a focused answer whatever is asked, at its end when it is no match, and within `k`."""
    model = low()
    world = World(embeddings=model)
    retriever = focused(store_of(model).as_retriever(search_kwargs={"k": 4}), model, world, similarity_threshold="auto")
    world.save(world.retriever(), "pinned", "sonatas have movements.")
    retriever.force_pin("pinned")
    assert doc_ids(retriever.invoke(QUESTION)) == ["hive", "honey", "pinned"]
    assert doc_ids(retriever.invoke(QUESTION, k=2)) == ["hive", "pinned"]
    assert doc_ids(retriever.invoke("sonatas in general?"))[0] == "pinned"


def test_one_embedding_serves_both_searches() -> None:
    """Once the store's ways are known, a question is embedded once for the store and for the saved copies."""
    model = low()
    world = World(embeddings=model)
    retriever = focused(store_of(model).as_retriever(), model, world, similarity_threshold="auto")
    world.save(world.retriever(), "own", "tides come and go.")
    settled(retriever)
    model.asked.clear()
    assert doc_ids(retriever.invoke(QUESTION)) == ["hive", "honey"]
    assert doc_ids(asyncio.run(retriever.ainvoke("tides in general?"))) == ["own"]
    assert model.asked == [QUESTION, "tides in general?"]
    model.asked.clear()
    retriever.batch(["bees/0.9 now?", "tides now?"])
    assert sorted(model.asked) == ["bees/0.9 now?", "tides now?"]


@pytest.mark.parametrize("way", ["invoke", "ainvoke"])
def test_traces_show_the_retriever_that_was_wrapped(way: str) -> None:
    """Asked by vector, the wrapped retriever's run has its name, tags, metadata and results all the same."""
    model = low()
    wrapped = store_of(model).as_retriever(search_kwargs={"k": 2}, tags=["own"], metadata={"team": "apiary"})
    retriever = focused(wrapped, model)
    settled(retriever)
    runs = []
    for asked in (retriever, World(embeddings=model).retriever(global_retriever=wrapped)):
        recorder = Recorder()
        if way == "invoke":
            asked.invoke(QUESTION, config={"callbacks": [recorder]})
        else:
            asyncio.run(asked.ainvoke(QUESTION, config={"callbacks": [recorder]}))
        runs.append((recorder.started, recorder.ended, recorder.failed))
    assert runs[0] == runs[1]
    ((name, query, tags, metadata),) = runs[0][0]
    assert (name, query, metadata["team"], runs[0][1]) == (
        "VectorStoreRetriever",
        QUESTION,
        "apiary",
        [["hive", "honey"]],
    )
    assert "own" in tags


class Plain(BaseRetriever):
    """Any retriever that is not a vector store's."""

    documents: list[Document] = SHOWN

    def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
        return self.documents


class Own(VectorStoreRetriever):
    """A vector store's retriever that does something of its own."""

    def _get_relevant_documents(self, query: str, *, run_manager: Any, **kwargs: Any) -> list[Document]:
        return super()._get_relevant_documents("tax", run_manager=run_manager, **kwargs)


class Hybrid(InMemoryVectorStore):
    """Finds other documents by text than by vector."""

    def similarity_search(self, query: str, k: int = 4, **kwargs: Any) -> list[Document]:
        return SHOWN[::-1][:k]


class TwoWays(InMemoryVectorStore):
    """Searches by text without its method by vector, as most stores do."""

    def similarity_search(self, query: str, k: int = 4, **kwargs: Any) -> list[Document]:
        vector = self.embedding.embed_query(query)
        return [item for item, *_ in self._similarity_search_with_score_by_vector(vector, k)]


class Refusing(TwoWays):
    """Has the method by vector, and does not do it."""

    def similarity_search_with_score_by_vector(self, *args: Any, **kwargs: Any) -> Any:
        raise ValueError("not in this mode")


class Rated(InMemoryVectorStore):
    """Can say how relevant its documents are."""

    def _select_relevance_score_fn(self) -> Any:
        return abs


class Odd(InMemoryVectorStore):
    """Its scores are no cosines, nor anything that one follows from."""

    def similarity_search_with_score_by_vector(
        self,
        embedding: list[float],
        k: int = 4,
        filter: Any = None,  # noqa: A002 - so it is called
        **kwargs: Any,
    ) -> list[tuple[Document, float]]:
        found = super().similarity_search_with_score_by_vector(embedding, k=k, filter=filter, **kwargs)
        return [(item, 100 - position) for position, (item, _) in enumerate(found)]


def _wrapped(kind: str, model: GeometryEmbeddings) -> BaseRetriever:
    if kind == "any retriever":
        return Plain()
    if kind == "a subclass":
        return Own(vectorstore=store_of(model), search_kwargs={"k": 4})
    if kind == "another model":
        return store_of(GeometryEmbeddings(0.02, 0.4, model="another")).as_retriever(search_kwargs={"k": 4})
    if kind == "mmr":
        return store_of(model).as_retriever(search_type="mmr", search_kwargs={"k": 4})
    if kind == "a threshold":
        return store_of(model, Rated).as_retriever(
            search_type="similarity_score_threshold", search_kwargs={"k": 4, "score_threshold": -1.0}
        )
    if kind == "arguments that it may not take":
        return store_of(model).as_retriever(search_kwargs={"k": 4, "rerank": False})
    store: VectorStore = {"hybrid": Hybrid, "refusing": Refusing, "odd scores": Odd}[kind](model)
    store.add_documents(SHOWN)
    return store.as_retriever(search_kwargs={"k": 4})


@pytest.mark.parametrize(
    "kind",
    [
        "any retriever",
        "a subclass",
        "another model",
        "mmr",
        "a threshold",
        "arguments that it may not take",
        "hybrid",
        "refusing",
        "odd scores",
    ],
)
def test_what_has_no_comparable_scores_is_not_dropped_on_a_guess(kind: str) -> None:
    """Any other retriever is called as it is: all of its pieces, in its order, in turn with the saved copies."""
    model = low()
    world = World(embeddings=model)
    wrapped = _wrapped(kind, model)
    retriever = focused(wrapped, model, world, similarity_threshold="auto")
    world.save(world.retriever(), "own", "bees/0.9 are mine.")
    for _ in range(3):
        expected = wrapped.invoke(QUESTION)
        assert len(expected) == 4
        documents, provenance = retriever.invoke_with_provenance(QUESTION)
        assert doc_ids(documents) == ["own", *doc_ids(expected)]
        assert (provenance.left_out, provenance.degraded) == (0, ())


def test_a_filter_is_for_the_retriever_s_own_method() -> None:
    """A call that tells the wrapped retriever something is not asked by vector; what it tells is obeyed."""
    model = low()
    retriever = focused(store_of(model).as_retriever(search_kwargs={"k": 4}), model)
    settled(retriever)
    documents = retriever.invoke(QUESTION, filter=lambda item: item.metadata["doc_id"] == "tax")
    assert doc_ids(documents) == ["tax"]


class Flaky(InMemoryVectorStore):
    """A store that can be down."""

    down = False

    def _similarity_search_with_score_by_vector(self, *args: Any, **kwargs: Any) -> Any:
        if self.down:
            raise ConnectionError("the store is down")
        return super()._similarity_search_with_score_by_vector(*args, **kwargs)


@pytest.mark.parametrize("known", [False, True])
def test_a_store_that_is_down_raises_its_own_error(known: bool) -> None:
    """Down before or after its ways are known, the store's exception rises; back again, it is focused as before."""
    model = low()
    store = store_of(model, Flaky)
    assert isinstance(store, Flaky)
    retriever = focused(store.as_retriever(search_kwargs={"k": 4}), model)
    if known:
        settled(retriever)
    store.down = True
    recorder = Recorder()
    with pytest.raises(ConnectionError, match="the store is down"):
        retriever.invoke(QUESTION, config={"callbacks": [recorder]})
    assert recorder.failed == ["the store is down"]
    store.down = False
    assert doc_ids(retriever.invoke(QUESTION)) == ["hive", "honey"]


@pytest.mark.parametrize("space", ["l2", "cosine", "ip"])
def test_chroma_is_asked_by_vector(space: str) -> None:
    """A Chroma collection of any metric gives comparable scores."""
    chroma = pytest.importorskip("langchain_chroma").Chroma
    model = low()
    store = chroma(
        collection_name=f"focused-{space}", embedding_function=model, collection_metadata={"hnsw:space": space}
    )
    store.add_documents(SHOWN)
    retriever = focused(store.as_retriever(search_kwargs={"k": 4}), model)
    settled(retriever)
    model.asked.clear()
    documents, provenance = retriever.invoke_with_provenance(QUESTION)
    assert (doc_ids(documents), model.asked) == (["hive", "honey"], [QUESTION])
    assert provenance.sources[0].scores == pytest.approx(
        [float(model.vector(QUESTION) @ model.vector(SHOWN[0].page_content))], abs=1e-4
    )
    store.delete_collection()


def test_a_query_that_can_t_be_embedded_is_the_retriever_s_own_matter() -> None:
    """Where the embedding fails, the wrapped retriever is asked as it is, and raises what it raises."""
    model = low()
    retriever = focused(store_of(model).as_retriever(), model)
    settled(retriever)
    model.error = TimeoutError("no model")
    with pytest.raises(TimeoutError, match="no model"):
        retriever.invoke(QUESTION)


@pytest.mark.parametrize(("k", "seen"), [(None, ["hive", "honey"]), (1, ["hive"])])
def test_what_nobody_saw_is_not_fetched(k: int | None, seen: list[str]) -> None:
    """Only documents that were close enough, and found room, are counted and suggested."""
    model = low()
    world = World(embeddings=model)
    retriever = focused(store_of(model).as_retriever(search_kwargs={"k": 4}), model, world, k=k)
    for _ in range(3):
        _, provenance = retriever.invoke_with_provenance(QUESTION)
    assert sorted(event.doc_id for event in provenance.suggestions) == seen
    assert sorted(record.doc_id for record in retriever.documents()) == seen


@pytest.mark.parametrize("pinned", [False, True])
def test_a_whole_document_is_served_whole(pinned: bool) -> None:
    """A document that answers with all of its text does so in a focused answer too."""
    model = low()
    world = World(embeddings=model)
    retriever = focused(store_of(model).as_retriever(), model, world, similarity_threshold="auto")
    text = "bees fly.\n\ntaxes are due.\n\nsonatas have parts."
    world.save(world.retriever(text_splitter=Paragraphs()), "own", text)
    retriever.set_always_full_doc("own")
    if pinned:
        retriever.force_pin("own")
    for question in (QUESTION, "volcanoes and their smoke?"):
        served = [item.page_content for item in retriever.invoke(question) if item.metadata["doc_id"] == "own"]
        assert served == ([text] if pinned or question == QUESTION else [])


def test_changes_of_the_wrapped_retriever_count_at_once() -> None:
    """A filter, a `k`, another store or another kind of search that is set later is what the next question gets."""
    model = low()
    store = store_of(model)
    wrapped = store.as_retriever(search_kwargs={"k": 4, "filter": lambda item: item.metadata["doc_id"] != "hive"})
    retriever = focused(wrapped, model, focus_margin=10.0)
    settled(retriever)
    assert doc_ids(retriever.invoke(QUESTION)) == ["honey", "wax", "tax"]
    wrapped.search_kwargs["filter"] = lambda item: item.metadata["doc_id"] == "hive"
    assert doc_ids(retriever.invoke(QUESTION)) == ["hive"]
    wrapped.search_kwargs = {"k": 1}
    assert doc_ids(retriever.invoke(QUESTION)) == ["hive"]
    wrapped.search_type = "mmr"
    wrapped.search_kwargs = {"k": 2, "fetch_k": 4}
    assert len(retriever.invoke(QUESTION)) == 2
    other = InMemoryVectorStore(model)
    other.add_documents([document("other", "bees elsewhere.")])
    wrapped.search_type, wrapped.search_kwargs, wrapped.vectorstore = "similarity", {"k": 4}, other
    assert doc_ids(retriever.invoke(QUESTION)) == ["other"]


def test_a_store_that_fails_once_is_asked_again() -> None:
    """An error that passes, while a store's ways are being found out, costs that question its focus and no more."""
    model = low()
    errors: list[Exception] = [TimeoutError("slow today")]

    class Slow(TwoWays):
        def similarity_search_with_score_by_vector(
            self,
            embedding: list[float],
            k: int = 4,
            filter: Any = None,  # noqa: A002 - so it is called
            **kwargs: Any,
        ) -> list[tuple[Document, float]]:
            if errors:
                raise errors.pop()
            return super().similarity_search_with_score_by_vector(embedding, k=k, filter=filter, **kwargs)

    retriever = focused(store_of(model, Slow).as_retriever(search_kwargs={"k": 4}), model)
    assert doc_ids(retriever.invoke(QUESTION)) == ["hive", "honey", "wax", "tax"]
    assert doc_ids(retriever.invoke(QUESTION)) == ["hive", "honey"]


def test_an_empty_store_proves_nothing() -> None:
    """That a store finds nothing either way says nothing about how it searches."""
    model = low()
    store = Hybrid(model)
    store.similarity_search = lambda query, k=4, **kwargs: []  # type: ignore[method-assign]
    wrapped = store.as_retriever(search_kwargs={"k": 4})
    retriever = focused(wrapped, model)
    settled(retriever)
    del store.similarity_search
    store.add_documents(SHOWN)
    assert doc_ids(retriever.invoke(QUESTION)) == doc_ids(wrapped.invoke(QUESTION)) == ["tax", "wax", "honey", "hive"]


def test_a_store_that_is_asked_by_text_costs_no_embedding() -> None:
    """Where the store can't be asked by vector, nobody embeds the question but the store."""
    model = low()
    retriever = focused(_wrapped("refusing", model), model)
    settled(retriever)
    model.asked.clear()
    retriever.invoke(QUESTION)
    assert model.asked == [QUESTION]


def test_the_fresh_text_of_a_pinned_document_stays() -> None:
    """A pinned document whose source has changed answers with its fresh text, however far that is from the question."""
    model = low()
    world = World(embeddings=model)
    store = store_of(model)
    retriever = focused(store.as_retriever(search_kwargs={"k": 5}), model, world, similarity_threshold="auto")
    world.save(world.retriever(), "pinned", "sonatas have movements.")
    retriever.force_pin("pinned")
    store.add_documents([document("pinned", "sonatas have four movements now.")])
    documents, provenance = retriever.invoke_with_provenance(QUESTION)
    assert texts(documents) == [*texts(SHOWN[:2]), "sonatas have four movements now."]
    assert [(copy.doc_id, copy.reason) for copy in provenance.withheld] == [("pinned", "stale")]


def test_a_model_that_tells_nothing_leaves_everything(caplog: pytest.LogCaptureFixture) -> None:
    """A model that scores matches like anything else drops nothing, and the log says so once."""
    model = GeometryEmbeddings(0.3, 0.3)
    retriever = focused(store_of(model).as_retriever(search_kwargs={"k": 4}), model)
    for _ in range(2):
        assert sorted(map(str, doc_ids(retriever.invoke(QUESTION)))) == ["hive", "honey", "tax", "wax"]
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(told) == 1
    assert "about as high as matching ones" in told[0]
    assert not retriever.calibrate().is_telling
    assert retriever.calibrate().focus is None


def test_on_miss_answers_from_the_copies_alone() -> None:
    """With `on_miss`, a sure copy answers without the store; else the store is asked by vector."""
    model = low()
    world = World(embeddings=model)
    store = store_of(model)
    retriever = focused(
        store.as_retriever(search_kwargs={"k": 4}), model, world, similarity_threshold="auto", global_search="on_miss"
    )
    world.save(world.retriever(), "own", "tides come and go.")
    settled(retriever)
    documents, provenance = retriever.invoke_with_provenance("tides in general?")
    assert (doc_ids(documents), "global" in provenance.timings) == (["own"], False)
    assert doc_ids(retriever.invoke(QUESTION)) == ["hive", "honey"]


class TestNeighbours:
    """`expand_neighbours`."""

    TEXT = "bees fly out.\n\nThen they dance.\n\nbees/0.9 return.\n\nNight falls.\n\ntaxes are due."

    @pytest.mark.parametrize(("size", "overlap"), [(60, 30), (40, 12), (3000, 1500)])
    def test_what_chunks_share_is_written_once(self, size: int, overlap: int) -> None:
        """Neighbouring chunks that overlap are joined without repeating the overlap, however long it is."""
        world = World(embeddings=low())
        settings: dict[str, Any] = {
            "chunk_size": size,
            "chunk_overlap": overlap,
            "expand_neighbours": 1,
            "local_top_k": 1,
        }
        retriever = world.retriever(similarity_threshold=0.2, **settings)
        text = "bees " + " ".join(f"number {number} left the hive in the morning." for number in range(size // 8))
        world.save(retriever, "bees", text)
        (found,) = retriever.invoke(QUESTION)
        assert len(found.metadata["chunks_used"]) >= 2
        assert found.page_content in text

    def test_a_heading_is_written_once(self) -> None:
        """A heading that a splitter put at the end of one chunk and the start of the next stands once in the text."""
        world = World(embeddings=low())
        retriever = world.retriever(
            similarity_threshold=0.2, expand_neighbours=1, chunk_size=60, chunk_overlap=15, local_top_k=1
        )
        text = (
            "bees need a place to live, and here is how to give it.\n\n## Hives\n\nbees like wooden boxes in the sun."
        )
        world.save(retriever, "bees", text)
        chunks = [chunk["text"] for chunk in world.store.chunk_store.load_chunks("ada", "bees")]
        assert len(chunks) > 1
        (found,) = retriever.invoke(QUESTION)
        assert found.page_content.count("## Hives") == 1

    @pytest.mark.parametrize(("reach", "chunks"), [(0, [0, 2]), (1, [0, 1, 2, 3]), (2, [0, 1, 2, 3, 4])])
    def test_chunks_beside_a_hit_come_along(self, reach: int, chunks: list[int]) -> None:
        """Each hit brings so many chunks before and after it, once, in the order of the document."""
        world = World(embeddings=low())
        retriever = world.retriever(
            similarity_threshold=0.2, expand_neighbours=reach, text_splitter=Paragraphs(), local_top_k=2
        )
        world.save(retriever, "bees", self.TEXT)
        documents, provenance = retriever.invoke_with_provenance(QUESTION)
        (found,) = cached(documents)
        assert found.page_content == "\n\n".join(self.TEXT.split("\n\n")[number] for number in chunks)
        assert found.metadata["chunks_used"] == list(provenance.sources[0].chunks_used) == chunks
        assert len(found.metadata["scores"]) == len(chunks)
        # What only came along has not answered.
        hits = world.store.chunk_store.load_chunks("ada", "bees")
        assert [chunk["hit_count"] for chunk in hits] == [1, 0, 1, 0, 0]

    def test_a_gap_between_retrieved_chunks_stays_one(self) -> None:
        """A copy made of single chunks has no neighbour where a chunk between is missing."""
        world = World(embeddings=low())
        retriever = world.retriever(similarity_threshold=0.2, expand_neighbours=1)
        world.shows(
            document("bees", "bees fly out.", chunk_index=0),
            document("bees", "Night falls.", chunk_index=3),
        )
        retriever.invoke("an introduction")
        world.shows()
        retriever.accept_suggestion("bees")
        (found,) = retriever.invoke(QUESTION)
        assert (found.page_content, found.metadata["chunks_used"]) == ("bees fly out.", [0])

    def test_neighbours_of_a_match_by_words(self) -> None:
        """Without an embedding model the chunks beside a match come along as well."""
        world = World(embeddings=low())
        world.save(world.retriever(text_splitter=Paragraphs()), "bees", self.TEXT)
        retriever = world.retriever(embedding_model=None, expand_neighbours=1)
        (found,) = retriever.invoke("when do they dance")
        assert found.metadata["chunks_used"] == [0, 1, 2]


def test_a_source_of_which_nothing_counts_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    """The log says once that nothing counted for twenty questions in a row; one that counts begins the row anew."""
    model = low()
    retriever = focused(store_of(model).as_retriever(search_kwargs={"k": 4}), model)

    def told() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]

    def ask_in_vain(times: int) -> None:
        for number in range(times):
            retriever.invoke(f"chess {number} in general?")

    ask_in_vain(19)
    assert retriever.documents() == []
    retriever.invoke(QUESTION)
    assert [record.doc_id for record in retriever.documents()] == ["hive", "honey"]
    ask_in_vain(19)
    assert told() == []
    ask_in_vain(10)

    (only,) = told()
    assert "for many questions in a row nothing counted" in only
    assert "context='all'" in only


def test_what_found_no_room_is_no_sign_of_a_silent_model(caplog: pytest.LogCaptureFixture) -> None:
    """Pinned documents that fill the answer leave no room for what was found, which was found all the same."""
    model = low()
    world = World(embeddings=model)
    retriever = focused(store_of(model).as_retriever(search_kwargs={"k": 4}), model, world)
    world.save(world.retriever(), "pinned", "sonatas have movements.")
    retriever.force_pin("pinned")
    for number in range(25):
        retriever.invoke(f"bees {number} in general?", k=1)
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == []
