"""An awaited call leaves the event loop to others while a model, a store or a source takes its time."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from helpers import ListRetriever, TableEmbeddings, document
from langchain_core.callbacks import CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_text_splitters import TextSplitter
from pydantic import PrivateAttr
from scenarios import OTHER_QUESTION, POD_QUESTION, PODS, USER, World, cached, chained, doc_ids, topics

from rag_wiki import DocumentState, MemoryStateStore, RagWikiRetriever, RagWikiRetrieverConfig
from rag_wiki.storage.chunk_places import DiskPlace
from rag_wiki.storage.chunk_store import ChunkStore

PATIENCE = 30.0
"""Seconds after which a wait is a failure; no test that passes waits for long."""


class Loop:
    """Ends waits on a tick of the event loop, so that who waits on the loop itself waits for ever."""

    def __init__(self) -> None:
        self.loop: asyncio.AbstractEventLoop | None = None
        self.waits: list[str] = []
        self._blocked = 0

    def starts(self) -> None:
        """From now on waits are for this loop."""
        self.loop = asyncio.get_running_loop()
        self.waits.clear()

    async def _tick(self, ticked: threading.Event) -> None:
        await asyncio.sleep(0)
        ticked.set()

    def wait(self, what: str) -> None:
        """Block until the loop has come round; at once while no test has started."""
        if self.loop is None:
            return
        self.waits.append(what)
        ticked = threading.Event()
        asyncio.run_coroutine_threadsafe(self._tick(ticked), self.loop)
        if not ticked.wait(0 if threading.current_thread() is threading.main_thread() else PATIENCE):
            self._blocked += 1

    def assert_ran(self, *what: str) -> None:
        """All waits ended, and these were among them."""
        assert self._blocked == 0, f"the loop stood still: {self.waits}"
        assert set(what) <= set(self.waits)


class SlowEmbeddings(TableEmbeddings):
    """Blocks until the loop has come round."""

    def __init__(self, loop: Loop) -> None:
        super().__init__(topics().table)
        self.loop = loop

    def embed_query(self, text: str) -> list[float]:
        self.loop.wait("embed a query")
        return super().embed_query(text)

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        self.loop.wait("embed documents")
        return super().embed_documents(texts)


def slow(kind: type[Any], names: tuple[str, ...]) -> type[Any]:
    """A kind of store of which these methods block until the loop has come round."""

    def method(name: str) -> Callable[..., Any]:
        original = getattr(kind, name)

        def waiting(self: Any, *arguments: Any, **named: Any) -> Any:
            self.loop.wait(name)
            return original(self, *arguments, **named)

        return waiting

    return type(f"Slow{kind.__name__}", (kind,), {name: method(name) for name in names})


STORE_HOOKS = (
    "_read_user",
    "_read_document",
    "_scan",
    "_read_start",
    "_read_revised",
    "_change",
    "_read_events",
    "_read_texts",
    "_forget",
    "_read_note",
    "_swap_note",
)
PLACE_HOOKS = ("write", "copies", "read", "delete", "delete_user", "add_hits", "hits", "hit_counts")
SlowStore: type[MemoryStateStore] = slow(MemoryStateStore, STORE_HOOKS)
SlowPlace: type[DiskPlace] = slow(DiskPlace, PLACE_HOOKS)


class SlowRetriever(ListRetriever):
    """Blocks until the loop has come round."""

    _loop: Loop = PrivateAttr(default_factory=Loop)

    def _get_relevant_documents(self, query: str, *, run_manager: CallbackManagerForRetrieverRun) -> list[Document]:
        self._loop.wait("retrieve")
        return super()._get_relevant_documents(query, run_manager=run_manager)


class SlowSplitter(TextSplitter):
    """Blocks until the loop has come round."""

    def __init__(self, loop: Loop) -> None:
        super().__init__()
        self._loop = loop

    def split_text(self, text: str) -> list[str]:
        self._loop.wait("split")
        return [text]


class SlowWorld(World):
    """A world of which all parts block until the loop has come round."""

    def __init__(self, folder: Path | None = None, *, quick_store: bool = False) -> None:
        self.loop = Loop()
        store, source = MemoryStateStore() if quick_store else SlowStore(), SlowRetriever()
        if not quick_store:
            store.loop = self.loop  # type: ignore[attr-defined]  # made by `slow`
        source._loop = self.loop
        self.chunks = store.chunk_store
        if folder is not None:
            place = SlowPlace(folder)
            place.loop = self.loop  # type: ignore[attr-defined]  # made by `slow`
            self.chunks = ChunkStore(folder, place=place)
        super().__init__(store=store, embeddings=SlowEmbeddings(self.loop), source=source)

    def retriever(self, user_id: str | None = USER, **options: Any) -> RagWikiRetriever:
        """A retriever all of whose parts wait."""
        return super().retriever(user_id, chunk_store=self.chunks, text_splitter=SlowSplitter(self.loop), **options)

    def slow_down(self, *_: Any) -> bool:
        """A plain function of the user's that waits, and says yes."""
        self.loop.wait("ask the user")
        return True


Call = Callable[[RagWikiRetriever], Awaitable[Any]]
ASKS = {"_read_start", "_change", "retrieve"}
SAVES = {"_read_document", "_change", "split", "embed documents", "write"}


async def _all(stream: Any) -> list[Any]:
    return [part async for part in stream]


CALLS: dict[str, tuple[Call, set[str]]] = {
    "ainvoke": (lambda w: w.ainvoke(POD_QUESTION), ASKS | {"embed a query", "read", "add_hits"}),
    "a miss": (lambda w: w.ainvoke(OTHER_QUESTION), ASKS | {"embed a query"}),
    "with provenance": (lambda w: w.ainvoke_with_provenance(POD_QUESTION), ASKS | {"embed a query"}),
    "abatch": (lambda w: w.abatch([POD_QUESTION, OTHER_QUESTION]), ASKS | {"embed a query"}),
    "astream": (lambda w: _all(w.astream(POD_QUESTION)), ASKS | {"embed a query"}),
    "in a chain": (lambda w: chained(w).ainvoke(POD_QUESTION), ASKS | {"embed a query"}),
    "accept": (lambda w: w.aaccept_suggestion("images", full_content="Images"), SAVES),
    "save again": (lambda w: w.aaccept_suggestion("pods", full_content="Pods"), SAVES | {"delete"}),
    "refresh": (lambda w: w.arefresh("pods", full_content="Pods"), SAVES),
    "pin": (lambda w: w.aforce_pin("pods"), {"_change"}),
    "pin and save": (lambda w: w.aforce_pin("images"), SAVES - {"split"}),
    "unpin": (lambda w: w.aunpin("pinned"), {"_change"}),
    "decline": (lambda w: w.adecline_suggestion("images"), {"_change"}),
    "thumbs up": (lambda w: w.athumbs_up("pods"), {"_change", "hit_counts"}),
    "thumbs down": (lambda w: w.athumbs_down("pods"), {"_change", "hit_counts"}),
    "remove": (lambda w: w.aforce_remove("pods"), {"_change", "delete"}),
    "full document": (lambda w: w.aset_always_full_doc("pods"), {"_change"}),
    "decay": (lambda w: w.arun_decay(), {"_scan", "_change", "hit_counts"}),
    "reindex": (lambda w: w.areindex(), {"_scan", "embed a query", "read"}),
    "calibrate": (lambda w: w.acalibrate(), {"_read_note", "_swap_note", "embed a query", "embed documents"}),
    "documents": (lambda w: w.adocuments(), {"_scan"}),
    "history": (lambda w: w.ahistory("pods"), {"_read_events"}),
    "stats": (lambda w: w.astats(), {"_scan"}),
    "forget": (lambda w: w.aforget_user(), {"_forget", "delete_user"}),
}
"""What is awaited, and which waits must be among those that it comes to."""


def lived_in(world: SlowWorld, **options: Any) -> RagWikiRetriever:
    """A retriever of a user with two saved documents, one of them pinned, and one that was met."""
    retriever = world.retriever(**options)
    world.save(retriever, "pods", PODS)
    world.save(retriever, "pinned", "Tax is due in May.")
    retriever.force_pin("pinned")
    world.shows(document("images", "Images"))
    retriever.invoke("an introduction")
    # Not before: what is found of a saved document is looked for in its copy, whose texts are at hand from then on.
    world.shows(document("images", "Images"), document("pods", PODS))
    return world.retriever(**options)


@pytest.mark.parametrize("name", CALLS)
async def test_the_loop_runs_whatever_is_awaited(name: str, tmp_path: Path) -> None:
    """Model, state store, chunk store, splitter and source all block, and no awaited call blocks the loop with them."""
    call, waits = CALLS[name]
    world = SlowWorld(tmp_path)
    retriever = lived_in(world)
    world.loop.starts()
    await asyncio.wait_for(call(retriever), PATIENCE)
    world.loop.assert_ran(*waits)


@pytest.mark.parametrize("config", [{"context": "focused"}, {"similarity_threshold": "auto"}, {"auto_save": True}])
async def test_the_loop_runs_whatever_the_settings(config: dict[str, Any], tmp_path: Path) -> None:
    """Calibrating, focusing and saving by itself wait beside the loop as well; so do plain functions of the user's."""
    world = SlowWorld(tmp_path)
    lived_in(world)
    retriever = world.retriever(
        **config, fetch_threshold=2, access_check=world.slow_down, on_suggestion=world.slow_down, document_loader=None
    )
    world.shows(document("images", "Images"))
    world.loop.starts()
    found = await asyncio.wait_for(retriever.ainvoke_with_provenance(POD_QUESTION), PATIENCE)
    assert found.provenance.degraded == ()
    assert [suggestion.doc_id for suggestion in found.provenance.suggestions] == ["images"]
    world.loop.assert_ran("ask the user", "embed a query", "retrieve")
    assert (world.state("images") is DocumentState.CLAIMED) is ("auto_save" in config)


@pytest.mark.parametrize("warm", [False, True])
async def test_the_loop_runs_where_only_the_chunks_are_slow(tmp_path: Path, warm: bool) -> None:
    """State in this process's memory is read on the loop; chunks in files beside it are not, nor are their hits."""
    world = SlowWorld(tmp_path, quick_store=True)
    retriever = lived_in(world)
    if warm:
        retriever.invoke(POD_QUESTION)
        retriever.set_always_full_doc("pods")
    world.loop.starts()
    found = await asyncio.wait_for(retriever.ainvoke_with_provenance(POD_QUESTION), PATIENCE)
    assert (doc_ids(cached(found.documents)), found.provenance.degraded) == (["pinned", "pods"], ())
    world.loop.assert_ran("add_hits", *([] if warm else ["read"]))


async def test_other_work_goes_on_all_the_time() -> None:
    """While a call waits for its model and its store, a coroutine beside it comes round again and again."""
    world = SlowWorld()
    retriever = lived_in(world)
    ticks, over = 0, asyncio.Event()

    async def tick() -> None:
        nonlocal ticks
        while not over.is_set():
            ticks += 1
            await asyncio.sleep(0)

    ticker = asyncio.ensure_future(tick())
    world.loop.starts()
    found = await asyncio.wait_for(retriever.ainvoke(POD_QUESTION), PATIENCE)
    over.set()
    await ticker
    assert doc_ids(cached(found)) == ["pinned", "pods"]
    assert ticks >= len(world.loop.waits) >= 4
    world.loop.assert_ran()


# -- many at once

MANY = 20


class AwaitedMeeting(Embeddings):
    """Embeds queries when so many are asking at the same time, and can only be awaited."""

    def __init__(self, many: int) -> None:
        self.many, self.inside, self.most = many, 0, 0
        self.all_here = asyncio.Event()

    def embed_query(self, text: str) -> list[float]:
        raise NotImplementedError

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        raise NotImplementedError

    async def aembed_documents(self, texts: list[str]) -> list[list[float]]:
        return topics().embed_documents(texts)

    async def aembed_query(self, text: str) -> list[float]:
        self.inside += 1
        self.most = max(self.most, self.inside)
        if self.inside == self.many:
            self.all_here.set()
        await asyncio.wait_for(self.all_here.wait(), PATIENCE)
        self.inside -= 1
        return topics().embed_query(text)


async def save_awaiting(world: World, retriever: RagWikiRetriever) -> None:
    """Save the document about pods."""
    world.shows(document("pods", PODS))
    await retriever.ainvoke("an introduction")
    world.shows()
    await retriever.aaccept_suggestion("pods", full_content=PODS)


@pytest.mark.parametrize("users", [1, MANY])
async def test_twenty_awaited_calls_are_all_in_the_model_at_once(users: int) -> None:
    """Twenty calls, of one user or of twenty, embed their queries at the same time by the model's async method."""
    model = AwaitedMeeting(MANY)
    world = World(embeddings=model)
    retriever = world.retriever()
    for number in range(users):
        await save_awaiting(world, retriever.for_user(f"user {number}"))
    calls = [retriever.ainvoke(POD_QUESTION, user_id=f"user {number % users}") for number in range(MANY)]
    found = await asyncio.wait_for(asyncio.gather(*calls), PATIENCE)
    assert [doc_ids(cached(documents)) for documents in found] == [["pods"]] * MANY
    assert model.most == MANY
    assert sum(world.record("pods", f"user {number}").fetch_count for number in range(users)) == MANY + users


class BlockingMeeting(TableEmbeddings):
    """Embeds queries when so many threads are asking at the same time."""

    def __init__(self, many: int) -> None:
        super().__init__(topics().table)
        self.all_here = threading.Barrier(many, timeout=PATIENCE)

    def embed_query(self, text: str) -> list[float]:
        self.all_here.wait()
        return super().embed_query(text)


async def test_twenty_calls_are_all_in_a_blocking_model_at_once() -> None:
    """A model without async methods is asked by as many calls at once as the loop's own threads are."""
    # Python's default are as many threads as processors and four; who has slow models gives the loop more.
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(MANY))
    world = World(embeddings=BlockingMeeting(MANY))
    retriever = world.retriever()
    world.save(retriever, "pods", PODS)
    calls = [retriever.ainvoke_with_provenance(POD_QUESTION) for _ in range(MANY)]
    found = await asyncio.wait_for(asyncio.gather(*calls), PATIENCE)
    assert [doc_ids(cached(result.documents)) for result in found] == [["pods"]] * MANY
    assert all(result.provenance.degraded == () for result in found)
    assert world.record("pods").fetch_count == MANY + 1


async def test_the_models_async_methods_are_used_where_there_are_some() -> None:
    """A model that can be awaited is awaited: to save, to answer, to embed anew, to calibrate."""
    world = World(embeddings=AwaitedMeeting(1))
    await save_awaiting(world, world.retriever())
    retriever = world.retriever(embedding_name="renamed", similarity_threshold="auto")
    assert await retriever.areindex() == ["pods"]
    found = await retriever.ainvoke_with_provenance(POD_QUESTION)
    assert (doc_ids(cached(found.documents)), found.provenance.degraded) == (["pods"], ())


# -- blocking calls where a loop runs


async def test_blocking_calls_work_where_a_loop_runs(tmp_path: Path) -> None:
    """In a notebook, whose cells run in a loop, every blocking method works: questions, batches and actions."""
    world = World()
    retriever = world.retriever(wiki_save_dir=tmp_path, similarity_threshold="auto", context="focused")
    world.shows(document("pods", PODS))
    for _ in range(3):
        documents = retriever.invoke(POD_QUESTION)
    assert doc_ids(documents) == ["pods"]
    assert world.state("pods") is DocumentState.SUGGESTED
    retriever.accept_suggestion("pods")
    assert doc_ids(cached(chained(retriever).invoke(POD_QUESTION))) == ["pods"]
    assert [doc_ids(found) for found in retriever.batch([POD_QUESTION] * 3)] == [["pods"]] * 3
    assert [doc_ids(found) for found in retriever.stream(POD_QUESTION)] == [["pods"]]
    assert retriever.calibrate().model == "helpers.TableEmbeddings:table"
    assert retriever.force_pin("pods").user_state is DocumentState.PINNED
    assert [result.doc_id for result in retriever.run_decay()] == ["pods"]
    assert retriever.force_remove("pods").user_state is DocumentState.DEMOTED


async def test_llamaindex_works_where_a_loop_runs_and_does_not_hold_it() -> None:
    """Around a LlamaIndex retriever that blocks, a blocking call works in a loop, and an awaited one leaves it free."""
    pytest.importorskip("llama_index.core")
    from llama_index.core.base.base_retriever import BaseRetriever as LlamaIndexRetriever
    from llama_index.core.schema import NodeRelationship, NodeWithScore, QueryBundle, RelatedNodeInfo, TextNode

    from rag_wiki.adapters.llamaindex import LlamaIndexRetrieverAdapter

    loop = Loop()

    class SlowNodes(LlamaIndexRetriever):
        def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
            loop.wait("retrieve")
            source = RelatedNodeInfo(node_id="pods")
            node = TextNode(text=PODS, relationships={NodeRelationship.SOURCE: source})
            return [NodeWithScore(node=node, score=0.5)]

    world = World()
    retriever = RagWikiRetriever(
        LlamaIndexRetrieverAdapter(llama_retriever=SlowNodes()),
        USER,
        world.store,
        RagWikiRetrieverConfig(),
        world.embeddings,
    )
    assert doc_ids(retriever.invoke(POD_QUESTION)) == ["pods"]
    loop.starts()
    assert doc_ids(await asyncio.wait_for(retriever.ainvoke(POD_QUESTION), PATIENCE)) == ["pods"]
    loop.assert_ran("retrieve")
    assert world.record("pods").fetch_count == 2
