"""What `LlamaIndexRetrieverAdapter` promises, over the real llama-index-core and without a network."""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.runnables import RunnableLambda
from llama_index.core import Document as LlamaDocument
from llama_index.core import VectorStoreIndex
from llama_index.core.base.base_retriever import BaseRetriever as LlamaIndexRetriever
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.llms import MockLLM
from llama_index.core.node_parser import TokenTextSplitter
from llama_index.core.retrievers import QueryFusionRetriever
from llama_index.core.schema import (
    BaseNode,
    ImageNode,
    IndexNode,
    MediaResource,
    Node,
    NodeRelationship,
    NodeWithScore,
    QueryBundle,
    QueryType,
    RelatedNodeInfo,
    TextNode,
)
from llama_index.core.vector_stores.utils import metadata_dict_to_node, node_to_metadata_dict

from rag_wiki.adapters.llamaindex import LlamaIndexRetrieverAdapter, node_to_document
from rag_wiki.errors import ConfigurationError, MissingExtraError

# LlamaIndex looks whether LangChain's community package is there; where it is, that says that it has been retired.
pytestmark = pytest.mark.filterwarnings("ignore:.langchain-community. is being sunset:DeprecationWarning")

TOPICS = ("apple", "boat", "cloud")


class TopicEmbedding(BaseEmbedding):
    """A text's vector counts how often it names each topic."""

    def _vector(self, text: str) -> list[float]:
        return [text.lower().count(topic) + 0.01 for topic in TOPICS]

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._vector(query)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return self._vector(query)

    def _get_text_embedding(self, text: str) -> list[float]:
        return self._vector(text)


class ListRetriever(LlamaIndexRetriever):
    """Returns what `make` makes, and knows in which threads it was asked. It has no async code of its own."""

    def __init__(self, make: Callable[[], list[NodeWithScore]]) -> None:
        super().__init__()
        self.make = make
        self.queries: list[str] = []
        self.threads: list[int] = []

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        self.queries.append(query_bundle.query_str)
        self.threads.append(threading.get_ident())
        return self.make()


class AsyncListRetriever(ListRetriever):
    """The same with async code of its own."""

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        await asyncio.sleep(0)
        return self._retrieve(query_bundle)


class OwnAretrieve(ListRetriever):
    """Replaces the public async method instead of the hook behind it."""

    async def aretrieve(self, str_or_query_bundle: QueryType) -> list[NodeWithScore]:
        """Answer without the tracing around the hook."""
        await asyncio.sleep(0)
        return self._retrieve(QueryBundle(str(str_or_query_bundle)))


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any attempt to reach a host fails the test."""

    def refuse(*address: object) -> None:
        raise AssertionError(f"a test tried to reach {address!r}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture
def index() -> VectorStoreIndex:
    """Three documents with ids of their own, split by LlamaIndex into chunks of some sixty characters."""
    documents = [
        LlamaDocument(
            id_=f"doc-{topic}",
            text=f"The {topic} comes first here. " + f"More about the {topic} follows at once. " * 2,
            metadata={"file_name": f"{topic}.txt", "file_path": f"/library/{topic}.txt", "tags": [topic, "all"]},
            excluded_embed_metadata_keys=["file_name", "file_path", "tags"],
            excluded_llm_metadata_keys=["file_name", "file_path", "tags"],
        )
        for topic in TOPICS
    ]
    splitter = TokenTextSplitter(chunk_size=60, chunk_overlap=0, tokenizer=lambda text: list(text))
    return VectorStoreIndex.from_documents(documents, transformations=[splitter], embed_model=TopicEmbedding())


@pytest.fixture
def adapter(index: VectorStoreIndex) -> LlamaIndexRetrieverAdapter:
    """The adapter over the index, two results per query."""
    return LlamaIndexRetrieverAdapter(llama_retriever=index.as_retriever(similarity_top_k=2))


def document_of(node: BaseNode, score: float | None = None) -> Document:
    """The translation of one node."""
    return node_to_document(NodeWithScore(node=node, score=score))


def node_of(text: str, ref_doc_id: str | None = None, **metadata: Any) -> TextNode:
    """A text node with a random id, cut from `ref_doc_id` if one is given."""
    node = TextNode(text=text, metadata=metadata)
    if ref_doc_id is not None:
        node.relationships[NodeRelationship.SOURCE] = RelatedNodeInfo(node_id=ref_doc_id)
    return node


def hashed(text: str) -> str:
    """The id that a text without any other gets."""
    return "content-sha256:" + hashlib.sha256(text.encode()).hexdigest()


def test_chunks_of_an_index_carry_the_id_of_their_document(adapter: LlamaIndexRetrieverAdapter) -> None:
    """Both chunks found for a query name the one LlamaIndex document they were cut from, and their own node ids."""
    first, second = adapter.invoke("boat")

    assert [first.metadata["doc_id"], second.metadata["doc_id"]] == ["doc-boat", "doc-boat"]
    assert "boat" in first.page_content
    assert first.page_content != second.page_content
    assert first.id == first.metadata["node_id"]
    assert second.id == second.metadata["node_id"]
    assert first.id != second.id


def test_results_are_those_of_llamaindex_in_its_order(
    index: VectorStoreIndex, adapter: LlamaIndexRetrieverAdapter
) -> None:
    """Texts, ids and scores are the ones LlamaIndex returns, in its order."""
    expected = index.as_retriever(similarity_top_k=2).retrieve("apple and a cloud")

    found = adapter.invoke("apple and a cloud")

    assert [(doc.id, doc.page_content, doc.metadata["score"]) for doc in found] == [
        (result.node_id, result.text, result.score) for result in expected
    ]


def test_the_order_of_the_llamaindex_retriever_is_not_sorted_away() -> None:
    """Results whose scores rise, or are missing, come back in the order they were given."""
    nodes = [NodeWithScore(node=node_of(text), score=score) for text, score in [("c", 0.1), ("a", None), ("b", 0.9)]]

    found = LlamaIndexRetrieverAdapter(llama_retriever=ListRetriever(lambda: nodes)).invoke("q")

    assert [doc.page_content for doc in found] == ["c", "a", "b"]


def test_metadata_is_kept_and_title_and_path_are_filled_in(adapter: LlamaIndexRetrieverAdapter) -> None:
    """The node's own keys stay as they are; title and path come from the file's name and path."""
    metadata = adapter.invoke("cloud")[0].metadata

    assert metadata["file_name"] == "cloud.txt"
    assert metadata["file_path"] == "/library/cloud.txt"
    assert metadata["tags"] == ["cloud", "all"]
    assert metadata["doc_title"] == "cloud.txt"
    assert metadata["doc_path"] == "/library/cloud.txt"


@pytest.mark.parametrize(
    ("metadata", "doc_title", "doc_path"),
    [
        (
            {"doc_title": "Own", "title": "T", "file_name": "f", "doc_path": "own/", "file_path": "p", "source": "s"},
            "Own",
            "own/",
        ),
        ({"title": "T", "file_name": "f", "file_path": Path("a") / "f", "source": "s"}, "T", str(Path("a") / "f")),
        ({"file_name": "f", "source": "s", "url": "https://example.org/"}, "f", "s"),
        ({"title": " ", "url": "https://example.org/"}, None, "https://example.org/"),
        ({"title": ["not", "a", "title"], "doc_path": None, "file_path": "p"}, None, None),
        ({}, None, None),
    ],
)
def test_title_and_path_come_from_the_first_key_that_knows(
    metadata: dict[str, object], doc_title: str | None, doc_path: str | None
) -> None:
    """`doc_title` and `doc_path` that are there stay; else the first telling key is used; else there is none."""
    translated = document_of(node_of("text", "ref", **metadata)).metadata

    assert translated.get("doc_title") == doc_title
    assert translated.get("doc_path") == doc_path
    assert {key: translated[key] for key in metadata} == metadata


@pytest.mark.parametrize(
    ("metadata", "doc_id"),
    [
        ({"doc_id": "d", "document_id": "e", "source": "s"}, "d"),
        ({"document_id": "e", "source": "s"}, "e"),
        ({"source": "s", "doc_path": "p"}, "s"),
        ({"doc_path": "p", "file_path": "f"}, "p"),
        ({"file_path": Path("a") / "readme.md"}, str(Path("a") / "readme.md")),
        ({"document_id": 42}, "42"),
        ({"document_id": UUID(int=7)}, "00000000-0000-0000-0000-000000000007"),
        ({"doc_id": "None", "document_id": "None", "source": "s"}, "s"),
        ({"doc_id": " ", "source": None, "file_path": "f"}, "f"),
        ({"file_name": "readme.md"}, hashed("the text")),
        ({"doc_id": True, "document_id": ["x"]}, hashed("the text")),
        ({}, hashed("the text")),
    ],
)
def test_without_a_source_the_id_comes_from_metadata_and_else_from_the_text(
    metadata: dict[str, object], doc_id: str
) -> None:
    """The first metadata key that identifies wins; the text "None", blanks and file names identify nothing."""
    assert document_of(node_of("the text", None, **metadata)).metadata["doc_id"] == doc_id


def test_the_source_of_the_node_goes_before_its_metadata() -> None:
    """`ref_doc_id` is the document id, even where metadata names a source; that one stays where it was."""
    metadata = document_of(node_of("text", "the-ref", source="s", file_path="f")).metadata

    assert metadata["doc_id"] == "the-ref"
    assert (metadata["source"], metadata["file_path"]) == ("s", "f")
    assert "original_doc_id" not in metadata


def test_another_doc_id_in_metadata_is_kept_aside() -> None:
    """A `doc_id` that differs from the SOURCE is still there, as `original_doc_id`."""
    metadata = document_of(node_of("text", "the-ref", doc_id="mine")).metadata

    assert (metadata["doc_id"], metadata["original_doc_id"]) == ("the-ref", "mine")


def test_the_same_doc_id_in_metadata_is_not_doubled() -> None:
    """A `doc_id` that equals the SOURCE stays the only one."""
    metadata = document_of(node_of("text", "the-ref", doc_id="the-ref")).metadata

    assert metadata["doc_id"] == "the-ref"
    assert "original_doc_id" not in metadata


def test_a_doc_id_that_is_no_text_becomes_one() -> None:
    """A number under `doc_id` serves as text, and the number itself is kept aside."""
    metadata = document_of(node_of("text", None, doc_id=42)).metadata

    assert (metadata["doc_id"], metadata["original_doc_id"]) == ("42", 42)


def test_nothing_that_was_put_aside_before_is_lost() -> None:
    """When the name for the original is taken too, both values are kept."""
    metadata = document_of(node_of("text", "ref", doc_id="b", original_doc_id="a")).metadata

    assert metadata["doc_id"] == "ref"
    assert metadata["original_doc_id"] == "a"
    assert metadata["original_original_doc_id"] == "b"


def test_new_node_ids_on_each_call_give_the_same_document_id() -> None:
    """A retriever that makes new nodes for each call is still understood to return the same documents."""
    retriever = ListRetriever(
        lambda: [
            NodeWithScore(node=node_of("first text")),
            NodeWithScore(node=node_of("second text", source="s")),
            NodeWithScore(node=node_of("third text", "ref")),
        ]
    )
    adapter = LlamaIndexRetrieverAdapter(llama_retriever=retriever)

    calls = [adapter.invoke("q") for _ in range(3)]

    assert [[doc.metadata["doc_id"] for doc in found] for found in calls] == [[hashed("first text"), "s", "ref"]] * 3
    assert len({doc.id for found in calls for doc in found}) == 9


def test_same_file_name_in_two_folders_is_two_documents() -> None:
    """Two nodes without a SOURCE that share only a file name and a title have different document ids."""
    first, second = (
        document_of(node_of("same text", None, file_name="readme.md", title="Read me", file_path=f"{folder}/readme.md"))
        for folder in "ab"
    )

    assert (first.metadata["doc_id"], second.metadata["doc_id"]) == ("a/readme.md", "b/readme.md")


def test_a_node_that_came_back_from_a_vector_store_has_no_none_id() -> None:
    """The placeholder "None" that LlamaIndex stores for a missing SOURCE joins no unrelated documents."""
    stored = node_to_metadata_dict(node_of("a"))
    assert stored["doc_id"] == "None"
    first = document_of(TextNode(text="a", metadata=stored))
    second = document_of(metadata_dict_to_node(node_to_metadata_dict(node_of("b"))))

    assert (first.metadata["doc_id"], second.metadata["doc_id"]) == (hashed("a"), hashed("b"))


def test_a_score_is_kept_as_a_float() -> None:
    """The retriever's score is there as a float, zero and negative ones included."""
    for score in (0.25, 0.0, -1.5, 3):
        kept = document_of(node_of("text"), score).metadata["score"]
        assert kept == score
        assert type(kept) is float


@pytest.mark.parametrize("score", [None, float("nan")])
def test_a_missing_score_stays_missing(score: float | None) -> None:
    """No score, or one that is not a number, is no key at all: never 0.0."""
    assert "score" not in document_of(node_of("text"), score).metadata


@pytest.mark.parametrize(
    ("score", "expected"), [(0.5, {"score": 0.5, "original_score": "A+"}), (None, {"original_score": "A+"})]
)
def test_a_score_in_the_nodes_own_metadata_is_kept_aside(score: float | None, expected: dict[str, object]) -> None:
    """`score` is always the retriever's; what the node itself calls its score is `original_score`."""
    metadata = document_of(node_of("text", score="A+"), score).metadata

    assert {key: value for key, value in metadata.items() if "score" in key} == expected


def test_changing_a_document_changes_nothing_in_llamaindex(index: VectorStoreIndex) -> None:
    """Metadata is copied with all that is nested in it: what a caller does to a result stays with the caller."""
    adapter = LlamaIndexRetrieverAdapter(llama_retriever=index.as_retriever(similarity_top_k=1))
    first = adapter.invoke("apple")[0]
    first.metadata["tags"].append("changed")
    first.metadata["file_name"] = "changed"
    first.metadata.clear()

    again = adapter.invoke("apple")[0]

    assert again.metadata["tags"] == ["apple", "all"]
    assert again.metadata["file_name"] == "apple.txt"


def test_nested_metadata_is_not_shared() -> None:
    """Dicts and lists inside the metadata are the Document's own, and the node is not changed by translating it."""
    node = node_of("text", None, doc_id=1, score=2, deep={"list": [{"x": 1}]})
    before = node.model_dump()

    document_of(node, 0.5).metadata["deep"]["list"][0]["x"] = 2

    assert node.model_dump() == before
    assert node.metadata == {"doc_id": 1, "score": 2, "deep": {"list": [{"x": 1}]}}


def test_page_and_section_and_an_own_node_id_stay() -> None:
    """Keys that the adapter has no use for pass unchanged, and so does a `node_id` of the caller's."""
    node = node_of("text", "ref", page_label="7", header_path="/Intro/", node_id="mine")

    document = document_of(node)

    assert document.metadata == {
        "page_label": "7",
        "header_path": "/Intro/",
        "node_id": "mine",
        "doc_id": "ref",
    }
    assert document.id == node.node_id


def test_the_text_is_without_the_metadata_header() -> None:
    """`page_content` is the text alone, not the form with metadata that LlamaIndex puts into prompts."""
    assert document_of(node_of("only this", "ref", title="T")).page_content == "only this"


@pytest.mark.parametrize(
    "node",
    [
        ImageNode(image_path="a.png"),
        ImageNode(image_url="https://example.org/a.png"),
        IndexNode(text="", index_id="other-index"),
        Node(image_resource=MediaResource(url="https://example.org/a.png")),  # type: ignore[arg-type]  # pydantic parses it
        TextNode(text=" "),
    ],
)
def test_nodes_without_text_are_returned_without_a_made_up_id(node: BaseNode) -> None:
    """An image or a reference with no text is a Document with no text; nothing identifies it, so it has no `doc_id`."""
    document = document_of(node, 0.5)

    assert document.page_content.strip() == ""
    assert document.metadata == {"node_id": node.node_id, "score": 0.5}


def test_an_image_with_a_source_has_its_document_id() -> None:
    """A node without text is identified by its SOURCE or its metadata like any other."""
    image = ImageNode(image_path="a.png", metadata={"file_path": "album/a.png"})
    assert document_of(image).metadata["doc_id"] == "album/a.png"

    image.relationships[NodeRelationship.SOURCE] = RelatedNodeInfo(node_id="album")
    assert document_of(image).metadata["doc_id"] == "album"


def test_text_with_a_lone_surrogate_is_hashed() -> None:
    """Text that is not valid Unicode has a stable id as well."""
    first, second = (document_of(node_of("broken \ud83d")).metadata["doc_id"] for _ in range(2))

    assert first == second
    assert first.startswith("content-sha256:")


async def test_async_gives_what_sync_gives(adapter: LlamaIndexRetrieverAdapter) -> None:
    """`ainvoke` and `abatch` return the same Documents as `invoke`, also when called in a running loop."""
    expected = adapter.invoke("boat on a cloud")

    assert len(expected) == 2
    assert await adapter.ainvoke("boat on a cloud") == expected
    assert await adapter.abatch(["boat on a cloud", "apple"]) == [expected, adapter.invoke("apple")]


def test_batch_keeps_the_order_of_the_queries(adapter: LlamaIndexRetrieverAdapter) -> None:
    """`batch` gives one list of Documents per query, in their order."""
    found = adapter.batch(["apple", "boat", "cloud"])

    assert [[doc.metadata["doc_id"] for doc in docs] for docs in found] == [[f"doc-{topic}"] * 2 for topic in TOPICS]
    assert all(isinstance(doc, Document) for docs in found for doc in docs)


@pytest.mark.parametrize("kind", [AsyncListRetriever, OwnAretrieve])
async def test_a_retriever_with_async_code_is_awaited_on_the_loop(kind: type[ListRetriever]) -> None:
    """Where LlamaIndex has a truly asynchronous retriever, no thread is used."""
    retriever = kind(lambda: [NodeWithScore(node=node_of("text"), score=0.5)])

    found = await LlamaIndexRetrieverAdapter(llama_retriever=retriever).ainvoke("the question")

    assert [doc.page_content for doc in found] == ["text"]
    assert retriever.queries == ["the question"]
    assert retriever.threads == [threading.get_ident()]


async def test_a_retriever_without_async_code_does_not_block_the_loop() -> None:
    """Where LlamaIndex would run blocking code on the event loop, the adapter runs it in another thread."""
    loop_can_turn = threading.Event()

    def wait_for_the_loop() -> list[NodeWithScore]:
        assert loop_can_turn.wait(timeout=30)
        return [NodeWithScore(node=node_of("text"))]

    retriever = ListRetriever(wait_for_the_loop)
    asyncio.get_running_loop().call_soon(lambda: asyncio.get_running_loop().call_soon(loop_can_turn.set))

    found = await LlamaIndexRetrieverAdapter(llama_retriever=retriever).ainvoke("q")

    assert [doc.page_content for doc in found] == ["text"]
    assert retriever.threads != [threading.get_ident()]


async def test_sync_invoke_inside_a_running_loop(index: VectorStoreIndex) -> None:
    """In a notebook `invoke` works, even over a LlamaIndex retriever that runs its parts asynchronously."""
    fusion = QueryFusionRetriever(
        [index.as_retriever(similarity_top_k=1), index.as_retriever(similarity_top_k=2)],
        llm=MockLLM(),
        similarity_top_k=2,
        num_queries=1,
        use_async=True,
    )

    found = LlamaIndexRetrieverAdapter(llama_retriever=fusion).invoke("boat")

    assert [doc.metadata["doc_id"] for doc in found] == ["doc-boat", "doc-boat"]


def test_an_object_that_only_retrieves_is_enough() -> None:
    """Something that looks like a LlamaIndex retriever is accepted, with and without an async method."""

    class Plain:
        def retrieve(self, query: str) -> list[NodeWithScore]:
            return [NodeWithScore(node=node_of(f"sync {query}", "ref"))]

    class WithAsync(Plain):
        async def aretrieve(self, query: str) -> list[NodeWithScore]:
            await asyncio.sleep(0)
            return [NodeWithScore(node=node_of(f"async {query}", "ref"))]

    async def texts(retriever: Any) -> list[str]:
        adapter = LlamaIndexRetrieverAdapter(llama_retriever=retriever)
        return [adapter.invoke("q")[0].page_content, (await adapter.ainvoke("q"))[0].page_content]

    assert asyncio.run(texts(Plain())) == ["sync q", "sync q"]
    assert asyncio.run(texts(WithAsync())) == ["sync q", "async q"]


async def test_a_failure_of_the_llamaindex_retriever_is_not_hidden() -> None:
    """What LlamaIndex raises reaches the caller as it is, sync and async."""

    def fail() -> list[NodeWithScore]:
        raise ConnectionError("the vector store is away")

    for retriever in (ListRetriever(fail), AsyncListRetriever(fail)):
        adapter = LlamaIndexRetrieverAdapter(llama_retriever=retriever)
        with pytest.raises(ConnectionError, match="the vector store is away"):
            adapter.invoke("q")
        with pytest.raises(ConnectionError, match="the vector store is away"):
            await adapter.ainvoke("q")


def test_callbacks_see_the_run_and_a_chain_can_hold_the_adapter(adapter: LlamaIndexRetrieverAdapter) -> None:
    """In a chain, a callback handler sees one retriever run with the query and the Documents."""
    seen: list[object] = []

    class Recorder(BaseCallbackHandler):
        def on_retriever_start(self, serialized: dict[str, Any], query: str, **kwargs: Any) -> None:
            seen.append(query)

        def on_retriever_end(self, documents: Any, **kwargs: Any) -> None:
            seen.append(documents)

    def doc_ids(documents: list[Document]) -> list[str]:
        return [document.metadata["doc_id"] for document in documents]

    chain = adapter | RunnableLambda(doc_ids)

    assert chain.invoke("cloud", config={"callbacks": [Recorder()]}) == ["doc-cloud", "doc-cloud"]
    assert seen == ["cloud", adapter.invoke("cloud")]


def test_langchain_settings_of_a_retriever_are_taken(index: VectorStoreIndex) -> None:
    """`tags`, `metadata` and `name` mean what they mean for every LangChain retriever."""
    adapter = LlamaIndexRetrieverAdapter(
        llama_retriever=index.as_retriever(), tags=["t"], metadata={"team": "docs"}, name="library"
    )

    assert (adapter.tags, adapter.metadata, adapter.get_name()) == (["t"], {"team": "docs"}, "library")
    assert adapter.with_config(tags=["more"]).invoke("apple")[0].metadata["doc_id"] == "doc-apple"


@pytest.mark.parametrize(
    ("wrong", "named"),
    [(None, "NoneType"), ("index", "str"), (object(), "object"), (ListRetriever, "the class ListRetriever")],
)
def test_what_cannot_retrieve_is_refused_by_name(wrong: Any, named: str) -> None:
    """The error is ours, not pydantic's, and names the parameter and what was passed."""
    with pytest.raises(ConfigurationError, match="llama_retriever") as raised:
        LlamaIndexRetrieverAdapter(llama_retriever=wrong)

    assert str(raised.value).endswith(f"got {named}")


def test_an_index_is_refused_with_the_call_that_makes_its_retriever(index: VectorStoreIndex) -> None:
    """Passing the index, the likeliest slip, is answered with what to pass instead."""
    with pytest.raises(ConfigurationError, match=r"index\.as_retriever\(\); got VectorStoreIndex"):
        LlamaIndexRetrieverAdapter(llama_retriever=index)  # type: ignore[arg-type]  # the caller's mistake is the point


def test_without_llamaindex_the_import_names_the_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing the adapter without llama-index-core says which extra to install, with the cause attached."""
    for name in [name for name in sys.modules if name.split(".")[0] == "llama_index"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "rag_wiki.adapters.llamaindex")
    monkeypatch.setitem(sys.modules, "llama_index", None)

    with pytest.raises(MissingExtraError) as raised:
        importlib.import_module("rag_wiki.adapters.llamaindex")

    assert "LlamaIndexRetrieverAdapter" in str(raised.value)
    assert "pip install 'langchain-rag-wiki[llama]'" in str(raised.value)
    assert isinstance(raised.value.__cause__, ImportError)


def test_the_package_of_adapters_imports_nothing_optional() -> None:
    """`import rag_wiki.adapters` alone doesn't load LlamaIndex."""
    code = "import sys, rag_wiki.adapters; print([name for name in sys.modules if name.startswith('llama_index')])"
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)

    assert finished.stdout.strip() == "[]"
