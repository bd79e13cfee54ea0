"""Real vector stores, bare and inside LangChain's wrappers, and one life of a document over each: the README's table.

`python tests/vector_stores.py` lives through all of it and prints the table.
"""

from __future__ import annotations

import asyncio
import importlib
import itertools
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from geometry import GeometryEmbeddings, low
from langchain_core.callbacks import CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.language_models import SimpleChatModel
from langchain_core.messages import BaseMessage
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable
from langchain_core.stores import InMemoryStore
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore
from langchain_text_splitters import RecursiveCharacterTextSplitter

from rag_wiki import DocumentState, RagWikiRetriever, RagWikiRetrieverConfig
from rag_wiki.errors import UnexpectedArgumentError
from rag_wiki.retriever import RetrievalResult
from rag_wiki.search.embedding import find_embeddings
from rag_wiki.storage.sqlite import SQLiteStateStore

Retriever = Runnable[str, list[Document]]
NEEDED = ("langchain_chroma", "langchain_qdrant", "langchain_community", "langchain_classic", "faiss")
"""What these stores and wrappers come in."""
USER = "ada"


# -- what is in the collections --------------------------------------------------------------------------


@dataclass(frozen=True)
class Source:
    """A document in a collection: whole, or in pieces that share its metadata and have some of their own."""

    doc_id: str
    paragraphs: tuple[str, ...]

    @property
    def shared(self) -> dict[str, Any]:
        """The metadata of all of its pieces, of each type that every store keeps."""
        return {
            "doc_id": self.doc_id,
            "doc_title": f"All about {self.doc_id}",
            "doc_path": f"/wiki/{self.doc_id}.md",
            "language": "en",
            "reviewed": True,
            "weight": 0.5,
            "year": 2026,
        }

    @property
    def pieces(self) -> list[Document]:
        """It as most collections hold it."""
        return [
            Document(
                id=piece_id(self.doc_id, number),
                page_content=text,
                metadata={**self.shared, "chunk_index": number, "page": number + 1},
            )
            for number, text in enumerate(self.paragraphs)
        ]

    @property
    def whole(self) -> Document:
        """It as a store of parent documents holds it."""
        return Document(page_content="\n\n".join(self.paragraphs), metadata=self.shared)


LOGS = Source("logs", ("logs are rotated every night at two.", "logs that are old are kept for thirty days."))
NEWER_LOGS = Source("logs", ("logs are rotated every morning at six.", "logs that are old are kept for ninety days."))
OTHERS = (
    Source("holidays", ("holidays are asked for two weeks ahead.", "holidays need a stand-in and the lead's word.")),
    Source("backups", ("backups go to another building each week.", "backups are read back once a quarter.")),
)
QUESTIONS = ("logs rotated at what hour?", "logs from last week, where?", "logs kept for how long?")
"""By its first word the model knows what a text is about."""
OTHER_QUESTION = "holidays for the whole of May?"


def piece_id(doc_id: str, number: int) -> str:
    """The id of a piece: of the kind that every store takes."""
    return f"00000000-0000-0000-{number:04}-{int.from_bytes(doc_id.encode()[:5], 'big'):012}"


# -- the vector stores -----------------------------------------------------------------------------------

_names = (f"collection-{number}" for number in itertools.count())


@contextmanager
def in_memory(model: Embeddings, width: int, metric: str) -> Iterator[VectorStore]:
    """LangChain's own store in memory."""
    yield InMemoryVectorStore(model)


@contextmanager
def chroma(model: Embeddings, width: int, metric: str) -> Iterator[VectorStore]:
    """Chroma, in this process."""
    module = importlib.import_module("langchain_chroma")
    store = module.Chroma(
        collection_name=next(_names), embedding_function=model, collection_metadata={"hnsw:space": metric}
    )
    yield store
    # Clients without a folder share one database.
    store.delete_collection()


@contextmanager
def faiss(model: Embeddings, width: int, metric: str) -> Iterator[VectorStore]:
    """FAISS, in LangChain's community package."""
    library = importlib.import_module("faiss")
    module = community("vectorstores.faiss")
    docstore = community("docstore.in_memory").InMemoryDocstore()
    if metric == "ip":
        index, strategy = library.IndexFlatIP(width), module.DistanceStrategy.MAX_INNER_PRODUCT
    else:
        index, strategy = library.IndexFlatL2(width), module.DistanceStrategy.EUCLIDEAN_DISTANCE
    yield module.FAISS(
        model, index, docstore, {}, normalize_L2=metric == "l2 of unit vectors", distance_strategy=strategy
    )


@contextmanager
def qdrant(model: Embeddings, width: int, metric: str) -> Iterator[VectorStore]:
    """Qdrant in local mode: its client is the database."""
    module = importlib.import_module("langchain_qdrant")
    client_module = importlib.import_module("qdrant_client")
    models, name = client_module.models, next(_names)
    client = client_module.QdrantClient(":memory:")
    distance = models.Distance[metric.upper()]
    client.create_collection(name, vectors_config=models.VectorParams(size=width, distance=distance))
    yield module.QdrantVectorStore(client, name, model, distance=distance)
    client.close()


def community(name: str) -> Any:
    """A module of langchain-community, whose first import warns that the package will not be developed further."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`langchain-community` is being sunset", DeprecationWarning)
        return importlib.import_module(f"langchain_community.{name}")


def _qdrant_filter(doc_id: str) -> Any:
    models = importlib.import_module("qdrant_client").models
    return models.Filter(must=[models.FieldCondition(key="metadata.doc_id", match=models.MatchValue(value=doc_id))])


@dataclass(frozen=True)
class StoreKind:
    """A kind of vector store."""

    label: str
    """What the README calls it."""
    make: Callable[[Embeddings, int, str], Any]
    metrics: tuple[str, ...]
    """The measures of distance that it may be made with; the first is its default."""
    only: Callable[[str], Any]
    """Its filter for the pieces of one document."""

    @contextmanager
    def opened(self, model: Embeddings, width: int, metric: str | None = None) -> Iterator[VectorStore]:
        """An empty store of this kind."""
        with self.make(model, width, metric or self.metrics[0]) as store:
            yield store


STORES: Mapping[str, StoreKind] = {
    "InMemory": StoreKind(
        "`InMemoryVectorStore`", in_memory, ("cosine",), lambda doc_id: lambda piece: piece.metadata["doc_id"] == doc_id
    ),
    "Chroma": StoreKind(
        "Chroma (`langchain-chroma`)", chroma, ("l2", "cosine", "ip"), lambda doc_id: {"doc_id": doc_id}
    ),
    "FAISS": StoreKind(
        "FAISS (`langchain-community`)", faiss, ("l2", "l2 of unit vectors", "ip"), lambda doc_id: {"doc_id": doc_id}
    ),
    "Qdrant": StoreKind("Qdrant (`langchain-qdrant`)", qdrant, ("cosine", "dot", "euclid"), _qdrant_filter),
}


# -- what may be around them -----------------------------------------------------------------------------


class Rephrasing(SimpleChatModel):
    """Asks the last line of what it is told in other words, as the model of a multi-query retriever does."""

    @property
    def _llm_type(self) -> str:
        return "rephrasing"

    def _call(self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **kwargs: Any) -> str:
        question = str(messages[-1].content).rpartition("Original question: ")[2]
        return f"{question} In other words?\n{question} To be exact?"


class Verbatim(SimpleChatModel):
    """Takes the first sentence out of a context, word for word, as an extracting model does."""

    @property
    def _llm_type(self) -> str:
        return "verbatim"

    def _call(self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **kwargs: Any) -> str:
        context = str(messages[-1].content).split(">>>")[1].strip()
        return f"{context.partition('.')[0]}."


class ByWords(BaseRetriever):
    """Finds by the words of a question, as BM25 does, in the pieces that it is given."""

    pieces: dict[str, Document]
    k: int = 2

    def _get_relevant_documents(self, query: str, *, run_manager: CallbackManagerForRetrieverRun) -> list[Document]:
        words = set(query.lower().split())
        return sorted(
            self.pieces.values(), key=lambda piece: -len(words & set(piece.page_content.lower().rstrip(".").split()))
        )[: self.k]


def classic(name: str, module: str = "retrievers") -> Any:
    """Something of `langchain_classic`."""
    return getattr(importlib.import_module(f"langchain_classic.{module}"), name)


class Collection:
    """A filled vector store and the retriever around it; `put` replaces what it holds of a document."""

    wrapped: Any

    def __init__(self, store: VectorStore, model: Embeddings, k: int = 4) -> None:
        self.store, self.model, self.k = store, model, k
        self.by_store: Any = store.as_retriever(search_kwargs={"k": k})
        self.ids: dict[str, list[str]] = {}
        self.wrapped = self.wrap()

    def wrap(self) -> Any:
        """The retriever that is given to ours."""
        return self.by_store

    def fill(self, sources: Iterable[Source]) -> None:
        """Put documents in for the first time."""
        for source in sources:
            self.ids[source.doc_id] = [str(piece.id) for piece in source.pieces]
            self.store.add_documents(source.pieces, ids=self.ids[source.doc_id])

    def put(self, source: Source) -> None:
        """Put another version of a document in the place of what is there."""
        self.store.delete(self.ids[source.doc_id])
        self.fill([source])

    def expected(self, source: Source) -> list[Document]:
        """What it holds of a document, as it was put in."""
        return source.pieces


class InEnsemble(Collection):
    """The store and a search by words, ranked together."""

    def wrap(self) -> Any:
        self.by_words = ByWords(pieces={})
        return classic("EnsembleRetriever")(retrievers=[self.by_store, self.by_words], weights=[0.5, 0.5])

    def fill(self, sources: Iterable[Source]) -> None:
        for source in sources:
            super().fill([source])
            self.by_words.pieces.update({str(piece.id): piece for piece in source.pieces})


class InMultiQuery(Collection):
    """The store, asked in several ways."""

    def wrap(self) -> Any:
        return classic("MultiQueryRetriever").from_llm(retriever=self.by_store, llm=Rephrasing(), include_original=True)


class InCompression(Collection):
    """The store, and a filter by embeddings behind it."""

    def wrap(self) -> Any:
        community("document_transformers.embeddings_redundant_filter")
        compressor = classic("EmbeddingsFilter", "retrievers.document_compressors")
        return classic("ContextualCompressionRetriever")(
            base_compressor=compressor(embeddings=self.model, k=3), base_retriever=self.by_store
        )


class InParentDocument(Collection):
    """The store for small parts, and whole documents beside it."""

    def wrap(self) -> Any:
        return classic("ParentDocumentRetriever")(
            vectorstore=self.store,
            docstore=InMemoryStore(),
            child_splitter=RecursiveCharacterTextSplitter(chunk_size=60, chunk_overlap=0),
            search_kwargs={"k": self.k},
        )

    def fill(self, sources: Iterable[Source]) -> None:
        self.wrapped.add_documents([source.whole for source in sources])

    def put(self, source: Source) -> None:
        keys: list[str] = list(self.wrapped.docstore.yield_keys())
        held = zip(keys, self.wrapped.docstore.mget(keys), strict=True)
        same = [key for key, whole in held if whole.metadata["doc_id"] == source.doc_id]
        self.wrapped.add_documents([source.whole], ids=same)

    def expected(self, source: Source) -> list[Document]:
        return [source.whole]


@dataclass(frozen=True)
class Shape:
    """How a store is wrapped."""

    label: str
    """What the README calls it."""
    collection: type[Collection]


SHAPES: Mapping[str, Shape] = {
    "bare": Shape("bare", Collection),
    "Ensemble": Shape("in Ensemble", InEnsemble),
    "MultiQuery": Shape("in MultiQuery", InMultiQuery),
    "ContextualCompression": Shape("in ContextualCompression", InCompression),
    "ParentDocument": Shape("in ParentDocument", InParentDocument),
}
WAYS = ("sync", "async")


@contextmanager
def filled(
    store: str, shape: str, model: Embeddings | None = None, width: int = 512, metric: str | None = None
) -> Iterator[Collection]:
    """A collection with all documents, in a store of a kind and in a wrapper; by default with a model of its own."""
    model = low() if model is None else model
    with STORES[store].opened(model, width, metric) as opened:
        collection = SHAPES[shape].collection(opened, model)
        collection.fill([LOGS, *OTHERS])
        yield collection


# -- a life over each of them ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """What was found out in living through it; what fails is an `AssertionError` instead."""

    store: str
    shape: str
    finds_model: bool
    """Whether the very model of the store is found."""
    by_vector: bool
    """Whether `context="focused"` asks the store by vector, so that its scores are compared."""
    takes_arguments: bool
    """Whether what a call says besides (a filter) reaches the store; else it is refused."""


class Life:
    """A user's retriever over a collection, called or awaited, with its state in a file."""

    def __init__(self, collection: Collection, way: str, path: Path, *, gives_model: bool, **settings: Any) -> None:
        self.way, self.path, self.gives_model = way, path, gives_model
        self.settings = {"similarity_threshold": "auto", **settings}
        self._loop = asyncio.new_event_loop()
        self._open = ExitStack()
        self.start(collection)

    def start(self, collection: Collection) -> None:
        """Begin as a new process does: nothing is known but what is in the file."""
        self._open.close()
        self.collection = collection
        self.store = SQLiteStateStore(f"sqlite:///{self.path}")
        self._open.callback(self.store.close)
        self.retriever = RagWikiRetriever(
            collection.wrapped,
            USER,
            self.store,
            RagWikiRetrieverConfig(**self.settings),
            embedding_model=collection.model if self.gives_model else None,
        )

    @property
    def model(self) -> GeometryEmbeddings:
        """The collection's model, where its cosines are known."""
        assert isinstance(self.collection.model, GeometryEmbeddings)
        return self.collection.model

    def ask(self, question: str, **arguments: Any) -> RetrievalResult:
        """Ask with provenance; nothing may have gone wrong unseen."""
        result: RetrievalResult = self.act("invoke_with_provenance", question, **arguments)
        equal("degraded", list(result.provenance.degraded), [])
        return result

    def act(self, action: str, *values: Any, **arguments: Any) -> Any:
        """Do something, or await it."""
        if self.way == "sync":
            return getattr(self.retriever, action)(*values, **arguments)
        return self._loop.run_until_complete(getattr(self.retriever, f"a{action}")(*values, **arguments))

    def close(self) -> None:
        """Let everything go."""
        self._open.close()
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()


@contextmanager
def lived(collection: Collection, way: str, *, gives_model: bool = False, **settings: Any) -> Iterator[Life]:
    """A life with its file in a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="rag_wiki-life-") as folder:
        life = Life(collection, way, Path(folder) / "state.db", gives_model=gives_model, **settings)
        try:
            yield life
        finally:
            life.close()


@cache
def run_cell(store: str, shape: str, way: str) -> Cell:
    """Live through everything once, over one store in one wrapper.

    Raises:
        AssertionError: Something is not as it is promised.
    """
    with ExitStack() as stack:
        # The second is what another process makes of the same: other objects, the same vectors.
        first, second = (stack.enter_context(filled(store, shape)) for _ in range(2))
        finds_model = find_embeddings(first.wrapped).model is first.model
        with lived(first, way, gives_model=not finds_model) as life:
            is_suggested_and_saved(life)
            answers_from_the_copy(life)
            is_pinned_and_unpinned(life)
            survives_a_restart(life, second)
            takes_arguments = obeys_or_refuses_a_filter(life, STORES[store].only)
            goes_stale_and_is_refreshed(life)
            is_let_go(life)
        with lived(first, way, gives_model=not finds_model, context="focused") as life:
            by_vector = is_focused(life)
        with lived(first, way, gives_model=not finds_model, context="focused", global_search="on_miss") as life:
            is_spared_on_a_hit(life)
    return Cell(store, shape, finds_model, by_vector, takes_arguments)


def is_suggested_and_saved(life: Life) -> None:
    """Three questions suggest it, and each shows what the collection holds as it is; accepted, it is saved."""
    own = life.collection.wrapped.invoke(QUESTIONS[0])
    before = [(piece.id, piece.page_content, dict(piece.metadata)) for piece in own]
    wanted = {piece.page_content: piece.metadata for piece in life.collection.expected(LOGS)}
    for number, question in enumerate(QUESTIONS, 1):
        documents, provenance = life.ask(question)
        shown = {piece.page_content: piece.metadata for piece in of(documents)}
        equal("texts of the document", shown.keys(), wanted.keys())
        for text, metadata in wanted.items():
            equal("metadata of a piece", within(shown[text], metadata), metadata)
            equal("whether a piece is a copy's", shown[text]["from_cache"], False)
        equal("whether it is suggested", "logs" in [each.doc_id for each in provenance.suggestions], number == 3)
    again = life.collection.wrapped.invoke(QUESTIONS[0])
    for what, pieces in (("the caller's documents", own), ("the collection's documents", again)):
        equal(what, [(piece.id, piece.page_content, piece.metadata) for piece in pieces], before)
    served = life.act("batch", list(QUESTIONS))
    equal("ids in a batch", [piece.id for piece in served[0]], [name for name, _, _ in before])
    life.model.told.clear()
    record = life.act("accept_suggestion", "logs")
    equal("saved", (record.user_state, record.content_source), (DocumentState.CLAIMED, "retrieved"))
    equal("what the collection's model embedded", "\n\n".join(life.model.told), LOGS.whole.page_content)


def answers_from_the_copy(life: Life) -> None:
    """The copy answers in the place of the collection's pieces, with cosines and with what all pieces share."""
    documents, provenance = life.ask(QUESTIONS[0])
    equal("copies that answered", from_copies(documents), ["logs"])
    (copied,) = of(documents)
    equal("text of the copy", copied.page_content, LOGS.whole.page_content)
    equal("metadata of the copy", within(copied.metadata, LOGS.shared), LOGS.shared)
    equal("what belongs to one piece", copied.metadata.get("page"), None)
    equal("state of the copy", copied.metadata["user_state"], "CLAIMED")
    (entry,) = [each for each in provenance.sources if each.doc_id == "logs"]
    equal("who found it", (provenance.mode, entry.origins), ("semantic", ("cache", "global")))
    held = [piece.page_content for piece in life.collection.expected(LOGS)]
    alike("scores of the copy", entry.scores, cosines(life, QUESTIONS[0], held))


def is_pinned_and_unpinned(life: Life) -> None:
    """Pinned, it is part of every answer, beside the collection's pieces; unpinned, it is not."""
    equal("pinned", life.act("force_pin", "logs").user_state, DocumentState.PINNED)
    documents, _ = life.ask(OTHER_QUESTION)
    equal("copies in any answer", from_copies(documents), ["logs"])
    equal("the collection's part in it", bool(of(documents, "holidays")), True)
    equal("unpinned", life.act("unpin", "logs").user_state, DocumentState.CLAIMED)
    documents, _ = life.ask(OTHER_QUESTION)
    equal("copies in the answer to another question", from_copies(documents), [])


def survives_a_restart(life: Life, collection: Collection) -> None:
    """Another process with the same file and collection answers from the copy, and embeds only the question."""
    before = life.model
    before.asked.clear()
    life.start(collection)
    life.model.told.clear()
    documents, _ = life.ask(QUESTIONS[1])
    equal("copies after a restart", from_copies(documents), ["logs"])
    equal("metadata after a restart", within(of(documents)[0].metadata, LOGS.shared), LOGS.shared)
    equal("texts embedded after a restart", LOGS.whole.page_content in life.model.told, False)
    equal("which model was asked", (before.asked, QUESTIONS[1] in life.model.asked), ([], True))


def obeys_or_refuses_a_filter(life: Life, only: Callable[[str], Any]) -> bool:
    """A call's filter reaches the store, and a copy that it rules out is silent; or the call is refused."""
    try:
        documents, _ = life.ask(QUESTIONS[0], filter=only("backups"))
    except UnexpectedArgumentError as error:
        equal("whether what is refused is named", "filter" in str(error), True)
        return False
    equal("what a filter lets pass", {piece.metadata["doc_id"] for piece in documents}, {"backups"})
    documents, _ = life.ask(QUESTIONS[0], filter=only("logs"))
    equal("copies that a filter lets pass", (from_copies(documents), len(documents)), (["logs"], 1))
    return True


def goes_stale_and_is_refreshed(life: Life) -> None:
    """When the source changes, its new text is served, and said to be newer; refreshed, the copy has it."""
    life.collection.put(NEWER_LOGS)
    wanted = {piece.page_content for piece in life.collection.expected(NEWER_LOGS)}
    documents, provenance = life.ask(QUESTIONS[0])
    equal("the new text", {piece.page_content for piece in of(documents)}, wanted)
    equal("copies that are stale", from_copies(documents), [])
    equal("stale", [each.stale for each in provenance.sources if each.doc_id == "logs"], [True])
    equal("withheld", [(each.doc_id, each.reason) for each in provenance.withheld], [("logs", "stale")])
    life.act("refresh", "logs")
    documents, provenance = life.ask(QUESTIONS[2])
    equal("copies that were refreshed", (from_copies(documents), list(provenance.withheld)), (["logs"], []))
    (copied,) = of(documents)
    equal("text of the new copy", copied.page_content, NEWER_LOGS.whole.page_content)
    equal("metadata of the new copy", within(copied.metadata, NEWER_LOGS.shared), NEWER_LOGS.shared)


def is_let_go(life: Life) -> None:
    """Let go, it is the collection's again; forgotten, nothing is left of the user."""
    equal("let go", life.act("force_remove", "logs").user_state, DocumentState.DEMOTED)
    documents, _ = life.ask(QUESTIONS[0])
    equal("copies that were let go", from_copies(documents), [])
    equal("whether the collection answers", bool(of(documents)), True)
    life.act("forget_user")
    equal("what is left", life.act("documents"), [])


def is_focused(life: Life) -> bool:
    """One ranking of saved and global pieces: asked by vector only what is close, else all; the copy comes first."""
    # In a collection that was updated there may be leftovers of what it replaced.
    life.collection.put(LOGS)
    for question in QUESTIONS:
        documents, provenance = life.ask(question)
    equal("metadata of a piece", within(of(documents)[0].metadata, LOGS.shared), LOGS.shared)
    by_vector = all(entry.scores for entry in provenance.sources)
    equal("whether what is far is left out", provenance.left_out > 0, by_vector)
    if by_vector:
        equal("what is close", {piece.metadata["doc_id"] for piece in documents}, {"logs"})
        alike(
            "cosines", provenance.sources[0].scores, cosines(life, question, [each.page_content for each in documents])
        )
    life.act("accept_suggestion", "logs")
    documents, provenance = life.ask(QUESTIONS[0])
    equal("copies in focus", (from_copies(documents), documents[0].metadata["doc_id"]), (["logs"], "logs"))
    equal("whether what is far is left out beside a copy", provenance.left_out > 0, by_vector)
    return by_vector


def is_spared_on_a_hit(life: Life) -> None:
    """With `on_miss` the collection is not asked where the copy answers: one question is embedded, once."""
    for question in QUESTIONS:
        life.ask(question)
    life.act("accept_suggestion", "logs")
    life.ask(QUESTIONS[1])
    life.model.asked.clear()
    documents, provenance = life.ask(QUESTIONS[0])
    equal("who was asked", (provenance.asked, from_copies(documents)), (False, ["logs"]))
    equal("questions embedded", life.model.asked, [QUESTIONS[0]])


def equal(what: str, seen: object, wanted: object) -> None:
    """Raises `AssertionError` where something is not what it must be; here, where pytest explains no `assert`."""
    if seen != wanted:
        msg = f"{what}: {seen!r}, and not {wanted!r}"
        raise AssertionError(msg)


def alike(what: str, seen: Sequence[float], wanted: Sequence[float]) -> None:
    """The same for cosines; stores compute with few digits."""
    if len(seen) != len(wanted) or any(abs(one - other) > 1e-4 for one, other in zip(seen, wanted, strict=True)):
        equal(what, list(seen), list(wanted))


def cosines(life: Life, question: str, texts: Sequence[str]) -> list[float]:
    """What the model says of texts."""
    return [float(life.model.vector(question) @ life.model.vector(text)) for text in texts]


def of(documents: Sequence[Document], doc_id: str = "logs") -> list[Document]:
    """The pieces of a document."""
    return [piece for piece in documents if piece.metadata["doc_id"] == doc_id]


def from_copies(documents: Sequence[Document]) -> list[str]:
    """The ids of the saved documents that answered."""
    return [piece.metadata["doc_id"] for piece in documents if piece.metadata["from_cache"]]


def within(metadata: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a document's metadata that was put in; stores add to it."""
    return {name: metadata.get(name) for name in wanted}


# -- the table -------------------------------------------------------------------------------------------


def table() -> str:
    """The README's table: what was found out in living through each cell, called and awaited."""
    lines = ["| | " + " | ".join(shape.label for shape in SHAPES.values()) + " |", "|---|" + "---|" * len(SHAPES)]
    for store, kind in STORES.items():
        lines.append(f"| {kind.label} | " + " | ".join(in_words(store, shape) for shape in SHAPES) + " |")
    return "\n".join(lines)


def in_words(store: str, shape: str) -> str:
    """A cell of the table."""
    called, awaited = (run_cell(store, shape, way) for way in WAYS)
    equal(f"{store} in {shape}, awaited", awaited, called)
    beside = ["vector"] if called.by_vector else []
    beside += ["filter"] if called.takes_arguments else []
    return " ".join(["✓" if called.finds_model else "✓ with `embedding_model`", ", ".join(beside)]).strip()


if __name__ == "__main__":
    # The table has signs that not every console's encoding knows.
    sys.stdout.buffer.write(f"{table()}\n".encode())
