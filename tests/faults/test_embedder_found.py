"""The embedding model is found in whatever LangChain retriever is wrapped, and never guessed."""

from __future__ import annotations

import importlib
import itertools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from helpers import ListRetriever, TableEmbeddings, document
from langchain_core.callbacks import CallbackManagerForRetrieverRun
from langchain_core.documents import BaseDocumentCompressor, Document
from langchain_core.embeddings import DeterministicFakeEmbedding, Embeddings
from langchain_core.language_models import FakeListLLM
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import ConfigurableField, Runnable, RunnableLambda
from langchain_core.stores import InMemoryStore
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore
from langchain_text_splitters import RecursiveCharacterTextSplitter
from scenarios import PODS, USER, World, cached, doc_ids, texts, topics

from rag_wiki import DocumentState, EmbeddingUnavailableError, RagWikiRetriever

Retriever = Runnable[str, list[Document]]
QUESTION = "what are pods?"
_names = (f"collection{number}" for number in itertools.count())


# -- the vector stores ---------------------------------------------------------------------------------


def in_memory(model: Embeddings) -> VectorStore:
    """LangChain's own store in memory."""
    return InMemoryVectorStore(model)


def chroma(model: TableEmbeddings | None) -> VectorStore:
    """Chroma, in memory."""
    module = pytest.importorskip("langchain_chroma")
    found: VectorStore = module.Chroma(collection_name=next(_names), embedding_function=model)
    return found


def faiss(model: TableEmbeddings) -> VectorStore:
    """FAISS, of LangChain's community package."""
    library = pytest.importorskip("faiss")
    pytest.importorskip("langchain_community")
    with warnings.catch_warnings():
        # That the package will not be developed further is not what this is about.
        warnings.simplefilter("ignore", DeprecationWarning)
        module = importlib.import_module("langchain_community.vectorstores.faiss")
        docstore = importlib.import_module("langchain_community.docstore.in_memory")
    index = library.IndexFlatL2(model.width)
    found: VectorStore = module.FAISS(model, index, docstore.InMemoryDocstore(), {})
    return found


def qdrant(model: TableEmbeddings) -> VectorStore:
    """Qdrant, in memory."""
    module = pytest.importorskip("langchain_qdrant")
    client_module = pytest.importorskip("qdrant_client")
    client, name = client_module.QdrantClient(":memory:"), next(_names)
    vectors = client_module.models.VectorParams(size=model.width, distance=client_module.models.Distance.COSINE)
    client.create_collection(name, vectors_config=vectors)
    found: VectorStore = module.QdrantVectorStore(client, name, model)
    return found


STORES: dict[str, Callable[[TableEmbeddings], VectorStore]] = {
    "InMemory": in_memory,
    "Chroma": chroma,
    "FAISS": faiss,
    "Qdrant": qdrant,
}


# -- what may be around them -----------------------------------------------------------------------------


class Unchanged(BaseDocumentCompressor):
    """A compressor that leaves the documents as they are."""

    def compress_documents(self, documents: Sequence[Document], query: str, callbacks: Any = None) -> list[Document]:
        return list(documents)


def classic(name: str) -> Any:
    """A retriever class of `langchain_classic`."""
    return getattr(pytest.importorskip("langchain_classic.retrievers"), name)


def parent_document(store: VectorStore) -> Retriever:
    """A retriever of whole documents by their parts, filled by itself."""
    splitter = RecursiveCharacterTextSplitter(chunk_size=200, chunk_overlap=0)
    found = classic("ParentDocumentRetriever")(vectorstore=store, docstore=InMemoryStore(), child_splitter=splitter)
    found.add_documents([document("pods", PODS)])
    retriever: Retriever = found
    return retriever


def nested(store: VectorStore) -> Retriever:
    """A vector store three wrappers deep."""
    retriever: Retriever = WRAPPERS["MultiQuery"](store).with_config(tags=["inner"]) | RunnableLambda(list)
    return retriever


WRAPPERS: dict[str, Callable[[VectorStore], Any]] = {
    "bare": lambda store: store.as_retriever(),
    "Ensemble": lambda store: classic("EnsembleRetriever")(
        retrievers=[ListRetriever(), store.as_retriever()], weights=[0.5, 0.5]
    ),
    "MultiQuery": lambda store: classic("MultiQueryRetriever").from_llm(
        retriever=store.as_retriever(), llm=FakeListLLM(responses=[QUESTION])
    ),
    "ContextualCompression": lambda store: classic("ContextualCompressionRetriever")(
        base_compressor=Unchanged(), base_retriever=store.as_retriever()
    ),
    "ParentDocument": parent_document,
    "configurable_fields": lambda store: store.as_retriever().configurable_fields(
        search_kwargs=ConfigurableField(id="search_kwargs")
    ),
    "with_config": lambda store: store.as_retriever().with_config(tags=["ours"]),
    "configurable_alternatives": lambda store: store.as_retriever().configurable_alternatives(
        ConfigurableField(id="source"), other=ListRetriever()
    ),
    "with_retry": lambda store: store.as_retriever().with_retry(),
    "nested": nested,
}


def over(source: Any, **options: Any) -> tuple[World, RagWikiRetriever]:
    """A retriever of ours over another one, and nothing said of an embedding model."""
    world = World(embeddings=None)
    return world, world.retriever(global_retriever=source, **options)


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("kind", STORES)
def test_the_model_of_the_store_is_found_and_saves(kind: str, wrapper: str) -> None:
    """In each store, bare and inside each wrapper, the store's own model is found: saving works, the copy answers."""
    model = topics()
    store = STORES[kind](model)
    if wrapper != "ParentDocument":
        store.add_documents([document("pods", PODS)])
    world, retriever = over(WRAPPERS[wrapper](store))
    assert doc_ids(retriever.invoke(QUESTION)) == ["pods"]
    model.batches.clear()
    saved = retriever.accept_suggestion("pods", full_content=PODS)
    assert saved.user_state is DocumentState.CLAIMED
    assert model.batches == [[PODS]]
    documents, provenance = retriever.invoke_with_provenance(QUESTION)
    assert texts(cached(documents)) == [PODS]
    assert (provenance.mode, provenance.sources[0].scores) == ("semantic", (1.0,))
    assert world.record("pods").fetch_count == 2


class Holding(ListRetriever):
    """A retriever that keeps something under a name where others keep their vector store."""

    vectorstore: Any = None


class Broken:
    """Has nothing but properties that fail."""

    @property
    def embeddings(self) -> Any:
        raise RuntimeError("connect first")

    vectorstore = retriever = embeddings


class BestWords(BaseRetriever):
    """Finds by words, as BM25 does, and has no vectors at all."""

    documents: list[Document]
    k: int = 4

    def _get_relevant_documents(self, query: str, *, run_manager: CallbackManagerForRetrieverRun) -> list[Document]:
        words = set(query.lower().strip("?").split())
        return sorted(self.documents, key=lambda item: -len(words & set(item.page_content.lower().split())))[: self.k]


def without_vectors() -> list[Document]:
    """What a source without embeddings returns."""
    return [document("pods", PODS)]


class Loop(ListRetriever):
    """A retriever that holds itself."""

    retriever: Any = None


def looping() -> Loop:
    """One that wraps itself."""
    loop = Loop(documents=without_vectors())
    loop.retriever = [loop, {"retriever": loop}]
    return loop


WITHOUT: dict[str, Callable[[], Any]] = {
    "a list": lambda: ListRetriever(documents=without_vectors()),
    "by words": lambda: BestWords(documents=without_vectors()),
    "Chroma without a function": lambda: Holding(documents=without_vectors(), vectorstore=chroma(None)),
    "a function": lambda: RunnableLambda(lambda _: without_vectors()),
    "an ensemble of none": lambda: classic("EnsembleRetriever")(
        retrievers=[ListRetriever(documents=without_vectors()), BestWords(documents=without_vectors())],
        weights=[0.5, 0.5],
    ),
    "properties that fail": lambda: Holding(documents=without_vectors(), vectorstore=Broken()),
    "a name for a model": lambda: Holding(documents=without_vectors(), vectorstore="text-embedding-9"),
    "a circle": looping,
    "configured": lambda: ListRetriever(documents=without_vectors()).with_config(tags=["ours"]),
}


@pytest.mark.parametrize("source", WITHOUT)
async def test_without_a_model_all_works_but_saving(source: str) -> None:
    """Where none is found, calls pass through and count; saving is an error that names the parameter, and no change."""
    world, retriever = over(WITHOUT[source](), reset_threshold=100)
    for number in range(4):
        found = await retriever.ainvoke_with_provenance(QUESTION) if number % 2 else None
        documents, provenance = found or retriever.invoke_with_provenance(QUESTION)
        assert texts(documents) == [PODS]
        assert (provenance.degraded, provenance.mode) == ((), "none")
    assert (world.state("pods"), world.record("pods").fetch_count) == (DocumentState.SUGGESTED, 4)
    before, history = world.record("pods"), retriever.history("pods")
    for act in (retriever.accept_suggestion, retriever.force_pin):
        with pytest.raises(EmbeddingUnavailableError, match=r"'pods'.*'ada'.*embedding_model="):
            act("pods")
    with pytest.raises(EmbeddingUnavailableError, match="embedding_model="):
        await retriever.aaccept_suggestion("pods", full_content=PODS)
    assert (world.record("pods"), retriever.history("pods")) == (before, history)
    assert retriever.chunk_store.place.copies(USER, "pods") == []
    # As the error says: with a model it works, on the same state.
    helped = world.retriever(global_retriever=WITHOUT[source](), embedding_model=topics())
    assert helped.accept_suggestion("pods").user_state is DocumentState.CLAIMED
    assert texts(cached(helped.invoke(QUESTION))) == [PODS]


def two_models(first: Embeddings, second: Embeddings) -> BaseRetriever:
    """An ensemble of two stores."""
    stores = [in_memory(model) for model in (first, second)]
    for store in stores:
        store.add_documents([document("pods", PODS)])
    ensemble: BaseRetriever = classic("EnsembleRetriever")(
        retrievers=[store.as_retriever() for store in stores], weights=[0.5, 0.5]
    )
    return ensemble


def named(model: str) -> TableEmbeddings:
    """The three subjects as a model by this name sees them."""
    found = topics()
    found.model = model
    return found


def test_of_two_models_none_is_chosen() -> None:
    """Where the wrapped retriever uses two models, saving is an error that names both; calls go on."""
    world, retriever = over(two_models(named("small"), named("large")))
    assert doc_ids(retriever.invoke(QUESTION)) == ["pods"]
    with pytest.raises(EmbeddingUnavailableError, match=r"several embedding models.*large.*small.*embedding_model="):
        retriever.accept_suggestion("pods")
    assert world.state("pods") is DocumentState.SURFACED
    assert world.record("pods").full_content is None


def test_two_models_without_a_name_are_two_models() -> None:
    """Two models of one class that nothing else tells apart, here of two widths, are not taken for one."""
    narrow, wide = DeterministicFakeEmbedding(size=8), DeterministicFakeEmbedding(size=16)
    world, retriever = over(two_models(narrow, wide))
    retriever.invoke(QUESTION)
    with pytest.raises(EmbeddingUnavailableError, match="embedding_model="):
        retriever.accept_suggestion("pods")
    assert world.state("pods") is DocumentState.SURFACED


def test_the_same_model_twice_is_one_model() -> None:
    """Two stores of one model, or of two objects for the same model, leave no doubt."""
    shared = named("small")
    for second in (shared, named("small")):
        _, retriever = over(two_models(shared, second))
        retriever.invoke(QUESTION)
        assert retriever.accept_suggestion("pods").user_state is DocumentState.CLAIMED
        assert texts(cached(retriever.invoke(QUESTION))) == [PODS]


@pytest.mark.parametrize("source", ["another's", "two models", "none"])
def test_the_model_given_always_wins(source: str) -> None:
    """The parameter decides, whatever is or is not in the wrapped retriever: no other model is asked by us."""
    given, inner, other = named("given"), named("inner"), named("other")
    found: Any = ListRetriever(documents=without_vectors())
    if source == "another's":
        store = in_memory(inner)
        store.add_documents(without_vectors())
        found = store.as_retriever()
    elif source == "two models":
        found = two_models(inner, other)
    _, retriever = over(found, embedding_model=given)
    retriever.invoke(QUESTION)
    for model in (given, inner, other):
        model.batches.clear()
        model.queries.clear()
    retriever.accept_suggestion("pods", full_content=PODS)
    assert texts(cached(retriever.invoke(QUESTION))) == [PODS]
    assert (given.batches, given.queries) == ([[PODS]], [QUESTION])
    assert (inner.batches, other.batches) == ([], [])
    assert retriever.calibrate().model.endswith(":given")


def test_a_model_that_comes_later_is_found() -> None:
    """A store that has its model only after we were built is looked at again."""
    source = Holding(documents=without_vectors())
    _, retriever = over(source)
    retriever.invoke(QUESTION)
    with pytest.raises(EmbeddingUnavailableError):
        retriever.accept_suggestion("pods")
    source.vectorstore = in_memory(topics())
    assert retriever.accept_suggestion("pods").user_state is DocumentState.CLAIMED
    assert texts(cached(retriever.invoke(QUESTION))) == [PODS]


class TooFarError(BaseException):
    """Raised so that nobody can swallow it."""


class Endless:
    """Has every attribute, and each is another such object, as mocks and remote proxies have them."""

    def __init__(self, asked: list[str]) -> None:
        self._asked = asked

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._asked.append(name)
        if len(self._asked) > 20_000:
            raise TooFarError
        return Endless(self._asked)


def test_the_search_for_a_model_ends() -> None:
    """In an object that has every attribute there is, the search gives up soon, and calls pass through."""
    world, retriever = over(Holding(documents=without_vectors(), vectorstore=Endless([])))
    for _ in range(3):
        assert texts(retriever.invoke(QUESTION)) == [PODS]
    assert world.state("pods") is DocumentState.SUGGESTED
    with pytest.raises(EmbeddingUnavailableError):
        retriever.accept_suggestion("pods")
