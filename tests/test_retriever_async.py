"""Awaiting gives what blocking gives, holds nobody up, and mixes up nobody's answers."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from helpers import HandClock, ListRetriever, TableEmbeddings, document
from langchain_core.callbacks import AsyncCallbackManagerForRetrieverRun, CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnableConfig
from pydantic import PrivateAttr
from scenarios import (
    OTHER_QUESTION,
    POD_QUESTION,
    PODS,
    USER,
    Paragraphs,
    World,
    cached,
    chained,
    doc_ids,
    texts,
    topics,
)

from rag_wiki import (
    ConfigurationError,
    DecayConfig,
    DocumentState,
    MemoryStateStore,
    ProvenanceBlock,
    RagWikiRetriever,
    StateStore,
    SuggestionEvent,
    UserDocRecord,
)
from rag_wiki.storage.base import QueryStart

PATIENCE = 60.0
"""Seconds after which a wait is a failure; no test that passes waits for long."""
IMAGES = "Images are built in layers."


# -- the same script, twice


class Script:
    """Twenty-odd steps of a user's life, blocking or awaiting, and what came of each."""

    def __init__(self, world: World, user_id: str, awaiting: bool) -> None:
        self.world = world
        self.user_id = user_id
        self.awaiting = awaiting
        self.seen: list[Any] = []
        self.suggested: list[str] = []
        self.retriever = world.retriever(
            user_id,
            text_splitter=Paragraphs(),
            decay=DecayConfig(max_cache_miss_streak=4),
            on_suggestion=lambda event: self.suggested.append(event.doc_id),
        )

    async def do(self, action: str, *arguments: Any, **named: Any) -> Any:
        """Carry out one method, or its twin, and keep what it gave or raised."""
        try:
            if self.awaiting:
                result = await getattr(self.retriever, f"a{action}")(*arguments, **named)
            else:
                result = getattr(self.retriever, action)(*arguments, **named)
        except Exception as error:
            result = f"{type(error).__name__}: {error}"
        self.seen.append(self.comparable(result))
        return result

    async def ask(self, query: str, *documents: Document, **named: Any) -> None:
        """One query of which the source shows these documents."""
        self.world.shows(*documents)
        self.world.clock.turn(hours=1)
        await self.do("invoke_with_provenance", query, **named)

    def comparable(self, result: Any) -> Any:
        """The result without what differs between two users and two runs."""
        if isinstance(result, str):
            return result.replace(self.user_id, "USER")
        if isinstance(result, UserDocRecord):
            return replace(result, user_id="USER", copy_id=None)
        if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], ProvenanceBlock):
            return (result[0], {**result[1].to_dict(), "user_id": None, "timings": sorted(result[1].timings)})
        if isinstance(result, list):
            return [self.comparable(item) for item in result]
        if hasattr(result, "user_id"):
            return replace(result, user_id="USER")
        return result

    async def play(self) -> list[Any]:
        """The whole script."""
        pods, images = document("pods", PODS, chunk_index=0), document("images", IMAGES, author="kim")
        for _ in range(3):
            await self.ask(POD_QUESTION, pods, images)
        await self.do("accept_suggestion", "pods")
        await self.do("decline_suggestion", "images")
        await self.ask(POD_QUESTION, pods, images)
        await self.ask(OTHER_QUESTION, document("tax", "Tax is due in May."), k=1)
        await self.ask(POD_QUESTION, pods, document("pods", "Pods, a new part.", chunk_index=1))
        await self.do("refresh", "pods")
        await self.ask(POD_QUESTION)
        await self.do("thumbs_up", "pods")
        await self.do("set_always_full_doc", "pods")
        await self.ask(POD_QUESTION, document("nobody", "untracked").model_copy(update={"metadata": {}}))
        await self.do("force_pin", "images")
        await self.ask(OTHER_QUESTION)
        await self.do("unpin", "images")
        await self.do("run_decay")
        await self.ask("what are images?", document("images", "Images, rewritten.", chunk_index=0))
        await self.do("thumbs_down", "images")
        for _ in range(4):
            await self.ask(OTHER_QUESTION)
        await self.do("force_remove", "images")
        await self.do("accept_suggestion", "images")
        await self.do("unpin", "never met")
        await self.do("reindex")
        await self.do("documents")
        for doc_id in ("pods", "images", "tax"):
            await self.do("history", doc_id)
        await self.do("stats")
        self.seen.append(self.suggested)
        await self.do("forget_user")
        return self.seen


async def test_a_script_gives_the_same_blocking_and_awaiting(state_store: StateStore) -> None:
    """Documents, records, provenance, errors and histories of a whole script are identical in both ways."""
    played = []
    for user_id, awaiting in (("user-one", False), ("user-two", True)):
        world = World(state_store)
        played.append(await Script(world, user_id, awaiting).play())
    blocking, awaited = played
    assert len(blocking) == len(awaited)
    for ours, theirs in zip(blocking, awaited, strict=True):
        assert ours == theirs
    answered = [step[1]["mode"] for step in blocking if isinstance(step, tuple)]
    assert answered.count("semantic") > 8


ACTIONS = (
    "accept_suggestion",
    "decline_suggestion",
    "documents",
    "force_pin",
    "force_remove",
    "forget_user",
    "history",
    "invoke",
    "invoke_with_provenance",
    "refresh",
    "reindex",
    "run_decay",
    "set_always_full_doc",
    "stats",
    "thumbs_down",
    "thumbs_up",
    "unpin",
)


@pytest.mark.parametrize("action", ACTIONS)
def test_every_method_has_a_twin(action: str) -> None:
    """Each method that reaches a store has an awaitable twin with an `a` before its name."""
    assert callable(getattr(RagWikiRetriever, action))
    assert inspect.iscoroutinefunction(getattr(RagWikiRetriever, f"a{action}"))


# -- what the parts may be


class AsyncOnlyRetriever(BaseRetriever):
    """Can only be awaited."""

    documents: list[Document]

    def _get_relevant_documents(self, query: str, *, run_manager: CallbackManagerForRetrieverRun) -> list[Document]:
        raise NotImplementedError

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun
    ) -> list[Document]:
        return list(self.documents)


async def test_a_wrapped_retriever_that_can_only_be_awaited_is_awaited() -> None:
    """`ainvoke` uses the wrapped retriever's own async method."""
    world = World()
    retriever = world.retriever(global_retriever=AsyncOnlyRetriever(documents=[document("pods", PODS)]))
    assert doc_ids(await retriever.ainvoke(POD_QUESTION)) == ["pods"]
    assert world.record("pods").fetch_count == 1


async def test_a_wrapped_retriever_without_async_works_too() -> None:
    """`ainvoke` around a retriever that only blocks gives its documents."""
    world = World()
    world.shows(document("pods", PODS))
    assert doc_ids(await world.retriever().ainvoke(POD_QUESTION)) == ["pods"]


class AsyncOnlyEmbeddings(TableEmbeddings):
    """Can only be awaited."""

    def embed_query(self, text: str) -> list[float]:
        raise NotImplementedError

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        raise NotImplementedError

    async def aembed_query(self, text: str) -> list[float]:
        return self.vector(text)

    async def aembed_documents(self, texts: list[str]) -> list[list[float]]:
        return [self.vector(text) for text in texts]


async def test_the_models_own_async_methods_are_used() -> None:
    """A model that can only be awaited saves, answers and re-indexes in the async methods."""
    world = World(embeddings=AsyncOnlyEmbeddings(topics().table))
    world.shows(document("pods", PODS))
    retriever = world.retriever()
    await retriever.ainvoke(POD_QUESTION)
    await retriever.aaccept_suggestion("pods")
    assert doc_ids(cached(await retriever.ainvoke(POD_QUESTION))) == ["pods"]
    retriever.chunk_store.delete(USER, "pods")
    assert await retriever.areindex() == ["pods"]


async def test_async_callables_of_the_user_are_awaited() -> None:
    """`on_suggestion`, `document_loader` and `access_check` may be async; the suggestion comes once."""
    told: list[Any] = []

    async def on_suggestion(event: SuggestionEvent) -> None:
        await asyncio.sleep(0)
        told.append(("suggested", event.doc_id))

    async def load(record: UserDocRecord) -> str:
        await asyncio.sleep(0)
        told.append(("loaded", record.doc_id))
        return "Pods, from the loader."

    async def check(user_id: str, doc_id: str) -> bool:
        await asyncio.sleep(0)
        told.append(("checked", user_id, doc_id))
        return True

    world = World()
    world.shows(document("pods", PODS))
    retriever = world.retriever(on_suggestion=on_suggestion, document_loader=load, access_check=check)
    for _ in range(5):
        await retriever.ainvoke(POD_QUESTION)
    assert told == [("suggested", "pods")]
    record = await retriever.aaccept_suggestion("pods")
    assert (record.full_content, record.content_source) == ("Pods, from the loader.", "loader")
    world.shows()
    assert texts(await retriever.ainvoke(POD_QUESTION)) == ["Pods, from the loader."]
    assert told[1:] == [("loaded", "pods"), ("checked", USER, "pods")]


async def test_an_async_check_can_say_no() -> None:
    """An async `access_check` that gives `False` withholds the copy."""

    async def check(user_id: str, doc_id: str) -> bool:
        return False

    world = World()
    retriever = world.retriever(access_check=check)
    world.save(retriever, "pods", PODS)
    assert await retriever.ainvoke(POD_QUESTION) == []


def test_an_async_callable_in_a_blocking_call_is_never_taken_for_a_yes() -> None:
    """A coroutine nobody awaits grants no access and saves nothing: the copy is withheld, accepting says what to do."""

    async def check(user_id: str, doc_id: str) -> bool:
        return True

    async def load(record: UserDocRecord) -> str:
        return "text"

    world = World()
    world.save(world.retriever(), "pods", PODS)
    blocking = world.retriever(access_check=check, document_loader=load)
    try:
        found = blocking.invoke(POD_QUESTION)
    except ConfigurationError as error:
        assert "access_check" in str(error)  # noqa: PT017 - either is honest: an error, or a degraded answer
    else:
        assert found == []
        assert blocking.last_provenance is not None
        assert blocking.last_provenance.degraded
    world.shows(document("images", IMAGES))
    world.retriever().invoke(OTHER_QUESTION)
    with pytest.raises(ConfigurationError, match=r"document_loader.*async"):
        blocking.accept_suggestion("images")
    assert world.state("images") is DocumentState.SURFACED


# -- nobody is held up


class Gate:
    """A door that a test opens; whoever comes to it is seen to wait."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.open = threading.Event()

    def pass_through(self) -> None:
        """Wait until it is opened."""
        self.reached.set()
        assert self.open.wait(PATIENCE), "nobody opened the gate: its opener was held up"

    async def open_when_reached(self) -> None:
        """Open it from the event loop, which can only be done while the loop runs."""
        assert await asyncio.to_thread(self.reached.wait, PATIENCE)
        self.open.set()


class GatedEmbeddings(TableEmbeddings):
    """Waits at a gate before it answers."""

    gate: Gate | None = None

    def embed_query(self, text: str) -> list[float]:
        if self.gate is not None:
            self.gate.pass_through()
        return super().embed_query(text)

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        if self.gate is not None:
            self.gate.pass_through()
        return super().embed_documents(texts)


class GatedStore(MemoryStateStore):
    """Waits at a gate before it reads."""

    gate: Gate | None = None

    def begin_query(self, user_id: str, lapse_after: int, demote_after: int) -> QueryStart:
        if self.gate is not None:
            self.gate.pass_through()
        return super().begin_query(user_id, lapse_after, demote_after)

    def get(self, user_id: str, doc_id: str) -> UserDocRecord | None:
        if self.gate is not None:
            self.gate.pass_through()
        return super().get(user_id, doc_id)


class GatedRetriever(ListRetriever):
    """Waits at a gate before it answers."""

    _gate: Gate | None = PrivateAttr(default=None)

    def close(self, gate: Gate) -> None:
        """Put a gate there."""
        self._gate = gate

    def _get_relevant_documents(self, query: str, *, run_manager: CallbackManagerForRetrieverRun) -> list[Document]:
        if self._gate is not None:
            self._gate.pass_through()
        return super()._get_relevant_documents(query, run_manager=run_manager)


async def while_the_loop_runs(gate: Gate, call: Awaitable[Any]) -> Any:
    """Await a call that comes to a gate which only a running loop opens."""
    result, _ = await asyncio.wait_for(asyncio.gather(call, gate.open_when_reached()), PATIENCE)
    return result


async def test_the_loop_runs_while_a_query_is_embedded() -> None:
    """A model that only blocks does not block the loop."""
    model, gate = GatedEmbeddings(topics().table), Gate()
    world = World(embeddings=model)
    retriever = world.retriever()
    world.save(retriever, "pods", PODS)
    model.gate = gate
    assert doc_ids(await while_the_loop_runs(gate, retriever.ainvoke(POD_QUESTION))) == ["pods"]


async def test_the_loop_runs_while_a_document_is_embedded() -> None:
    """Saving does not block the loop."""
    model, gate = GatedEmbeddings(topics().table), Gate()
    world = World(embeddings=model)
    world.shows(document("pods", PODS))
    retriever = world.retriever()
    await retriever.ainvoke(POD_QUESTION)
    model.gate = gate
    record = await while_the_loop_runs(gate, retriever.aaccept_suggestion("pods"))
    assert record.user_state is DocumentState.CLAIMED


@pytest.mark.parametrize("action", ["ainvoke", "ahistory", "athumbs_up", "aforce_pin", "aaccept_suggestion"])
async def test_the_loop_runs_while_the_store_is_asked(action: str) -> None:
    """A slow state store does not block the loop, in a query or in an action."""
    store, gate = GatedStore(), Gate()
    world = World(store)
    retriever = world.retriever()
    world.save(retriever, "pods", PODS)
    store.gate = gate
    argument = POD_QUESTION if action == "ainvoke" else "pods"
    keywords: dict[str, Any] = {"full_content": PODS} if action == "aaccept_suggestion" else {}
    if action == "ahistory":
        argument = "never met"
        with pytest.raises(LookupError):
            await while_the_loop_runs(gate, retriever.ahistory(argument))
        return
    assert await while_the_loop_runs(gate, getattr(retriever, action)(argument, **keywords))


async def test_the_loop_runs_while_the_source_is_asked() -> None:
    """A wrapped retriever that only blocks does not block the loop."""
    source, gate = GatedRetriever(documents=[document("pods", PODS)]), Gate()
    source.close(gate)
    retriever = World(source=source).retriever()
    assert doc_ids(await while_the_loop_runs(gate, retriever.ainvoke(POD_QUESTION))) == ["pods"]


async def test_the_loop_runs_while_the_user_is_asked() -> None:
    """Plain `access_check`, `document_loader` and `on_suggestion` that block don't block the loop."""
    gates = {name: Gate() for name in ("access_check", "document_loader", "on_suggestion")}
    world = World()
    world.shows(document("pods", PODS))

    def check(user_id: str, doc_id: str) -> bool:
        gates["access_check"].pass_through()
        return True

    def load(record: UserDocRecord) -> str:
        gates["document_loader"].pass_through()
        return PODS

    def tell(event: SuggestionEvent) -> None:
        gates["on_suggestion"].pass_through()

    retriever = world.retriever(access_check=check, document_loader=load, on_suggestion=tell, fetch_threshold=1)
    await while_the_loop_runs(gates["on_suggestion"], retriever.ainvoke(POD_QUESTION))
    await while_the_loop_runs(gates["document_loader"], retriever.aaccept_suggestion("pods"))
    assert len(cached(await while_the_loop_runs(gates["access_check"], retriever.ainvoke(POD_QUESTION)))) == 1


class MeetingEmbeddings(TableEmbeddings):
    """Answers a query only when the source is being asked at the same time."""

    barrier: threading.Barrier | None = None

    def embed_query(self, text: str) -> list[float]:
        if self.barrier is not None:
            self.barrier.wait(PATIENCE)
        return super().embed_query(text)


class MeetingRetriever(ListRetriever):
    """Answers only when the query is being embedded at the same time."""

    _barrier: threading.Barrier | None = PrivateAttr(default=None)

    def meet(self, barrier: threading.Barrier) -> None:
        """Where to meet."""
        self._barrier = barrier

    def _get_relevant_documents(self, query: str, *, run_manager: CallbackManagerForRetrieverRun) -> list[Document]:
        if self._barrier is not None:
            self._barrier.wait(PATIENCE)
        return super()._get_relevant_documents(query, run_manager=run_manager)


@pytest.mark.parametrize("awaiting", [False, True], ids=["sync", "async"])
async def test_copies_and_source_are_searched_at_the_same_time(awaiting: bool) -> None:
    """The query is embedded while the wrapped retriever works, not before or after it."""
    model, source, barrier = MeetingEmbeddings(topics().table), MeetingRetriever(), threading.Barrier(2)
    world = World(embeddings=model, source=source)
    retriever = world.retriever()
    world.save(retriever, "pods", PODS)
    world.shows(document("images", IMAGES))
    model.barrier = barrier
    source.meet(barrier)
    found = await retriever.ainvoke(POD_QUESTION) if awaiting else retriever.invoke(POD_QUESTION)
    assert doc_ids(found) == ["pods", "images"]


async def test_a_blocking_call_inside_a_running_loop_works() -> None:
    """`invoke` in a notebook, where a loop runs, gives its documents and counts."""
    world = World()
    world.shows(document("pods", PODS))
    retriever = world.retriever()
    assert doc_ids(retriever.invoke(POD_QUESTION)) == ["pods"]
    retriever.accept_suggestion("pods")
    assert doc_ids(cached(retriever.invoke(POD_QUESTION))) == ["pods"]


# -- many at once


class EchoRetriever(BaseRetriever):
    """Returns one document, named by the query; lets others go first."""

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun
    ) -> list[Document]:
        for _ in range(len(query)):
            await asyncio.sleep(0)
        return [document(query, f"about {query}")]

    def _get_relevant_documents(self, query: str, *, run_manager: CallbackManagerForRetrieverRun) -> list[Document]:
        return [document(query, f"about {query}")]


def only_source(block: ProvenanceBlock | None) -> str | None:
    """The id of the one source of a block."""
    assert block is not None
    (source,) = block.sources
    return source.doc_id


async def test_twenty_calls_at_once_are_twenty_fetches(state_store: StateStore) -> None:
    """Concurrent calls lose no count and suggest once."""
    world = World(state_store)
    world.shows(document("pods", PODS))
    events: list[SuggestionEvent] = []
    retriever = world.retriever(on_suggestion=events.append)
    results = await asyncio.gather(*(retriever.ainvoke(POD_QUESTION) for _ in range(20)))
    assert [doc_ids(result) for result in results] == [["pods"]] * 20
    assert (world.record("pods").fetch_count, [event.fetch_count for event in events]) == (20, [3])


def test_eight_threads_lose_no_count(state_store: StateStore) -> None:
    """8 threads with 5 calls each are 40 fetches and one suggestion."""
    world = World(state_store)
    world.shows(document("pods", PODS))
    events: list[SuggestionEvent] = []
    retriever = world.retriever(on_suggestion=events.append)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: [retriever.invoke(POD_QUESTION) for _ in range(5)], range(8)))
    assert (world.record("pods").fetch_count, len(events)) == (40, 1)


async def test_calls_at_once_get_their_own_provenance() -> None:
    """Gathered calls, many times over, each return the block of their own documents."""
    retriever = World().retriever(global_retriever=EchoRetriever())
    queries = [f"q{'x' * (number % 5)}{number}" for number in range(40)]
    results = await asyncio.gather(*(retriever.ainvoke_with_provenance(query) for query in queries))
    assert [only_source(result.provenance) for result in results] == queries
    assert [doc_ids(result.documents) for result in results] == [[query] for query in queries]


async def provenance_by_task(
    retriever: RagWikiRetriever, call: Callable[[str], Awaitable[Any]]
) -> dict[str, str | None]:
    """What each of twelve tasks sees as the last provenance, when all have made their call: by query, the source."""
    everybody = asyncio.Event()
    queries = [f"query-{number}" for number in range(12)]
    arrived: list[str] = []

    async def ask(query: str) -> str | None:
        await call(query)
        arrived.append(query)
        if len(arrived) == len(queries):
            everybody.set()
        await asyncio.wait_for(everybody.wait(), PATIENCE)
        return only_source(retriever.last_provenance)

    return dict(zip(queries, await asyncio.gather(*map(ask, queries)), strict=True))


async def test_the_last_provenance_is_that_of_the_task() -> None:
    """In each of many tasks, `last_provenance` after a call is of that call, however others run in between."""
    retriever = World().retriever(global_retriever=EchoRetriever())
    seen = await provenance_by_task(retriever, retriever.ainvoke)
    assert seen == {query: query for query in seen}


async def test_a_retriever_for_a_user_knows_no_other_users_provenance() -> None:
    """A chain runs in tasks of its own; what `for_user` shows after it is of that user, whoever asks beside it."""
    shared = World().retriever(global_retriever=EchoRetriever())
    users = [f"user-{number}" for number in range(12)]
    everybody = asyncio.Event()
    arrived: list[str] = []

    async def ask(user: str) -> str | None:
        own = shared.for_user(user)
        await chained(own).ainvoke("query")
        arrived.append(user)
        if len(arrived) == len(users):
            everybody.set()
        await asyncio.wait_for(everybody.wait(), PATIENCE)
        return None if own.last_provenance is None else own.last_provenance.user_id

    seen = dict(zip(users, await asyncio.gather(*map(ask, users)), strict=True))
    assert seen == {user: user for user in users}


async def test_after_a_chain_the_last_provenance_is_of_it() -> None:
    """With nothing else running, `last_provenance` after an awaited chain is of the call in the chain."""
    retriever = World().retriever(global_retriever=EchoRetriever())
    chain = chained(retriever)
    for query in ("one", "two"):
        await chain.ainvoke(query)
        assert only_source(retriever.last_provenance) == query


def test_the_last_provenance_is_that_of_the_thread() -> None:
    """In each of many threads, `last_provenance` after a call, alone or in a chain, is of that call."""
    retriever = World().retriever(global_retriever=EchoRetriever())
    chain = chained(retriever)
    barrier = threading.Barrier(8)

    def ask(number: int) -> bool:
        query = f"query-{number}"
        (chain if number % 2 else retriever).invoke(query)
        barrier.wait(PATIENCE)
        return only_source(retriever.last_provenance) == query

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(ask, range(8)))


def test_elsewhere_the_last_provenance_is_the_newest() -> None:
    """A thread that made no call sees the newest provenance of all."""
    retriever = World().retriever(global_retriever=EchoRetriever())
    with ThreadPoolExecutor(1) as pool:
        pool.submit(retriever.invoke, "elsewhere").result()
    assert only_source(retriever.last_provenance) == "elsewhere"


def test_two_retrievers_keep_their_provenance_apart() -> None:
    """A call of one retriever is not the last call of another."""
    first, second = (World().retriever(global_retriever=EchoRetriever()) for _ in range(2))
    first.invoke("one")
    second.invoke("two")
    assert (only_source(first.last_provenance), only_source(second.last_provenance)) == ("one", "two")


async def test_a_batch_and_a_stream_can_be_awaited(state_store: StateStore) -> None:
    """`abatch` with a user per input and `astream` count like `ainvoke`."""
    world = World(state_store)
    world.shows(document("pods", PODS))
    retriever = world.retriever("alice")
    configs: list[RunnableConfig] = [{"configurable": {"user_id": user}} for user in ("bob", "carl")]
    results = await retriever.abatch(["one", "two"], configs)
    streamed = [chunk async for chunk in retriever.astream("three", configurable_user("bob"))]
    assert [doc_ids(result) for result in (*results, *streamed)] == [["pods"]] * 3
    assert [world.record("pods", user).fetch_count for user in ("bob", "carl")] == [2, 1]
    assert state_store.get("alice", "pods") is None


def configurable_user(user_id: str) -> RunnableConfig:
    """A configuration that names a user."""
    return {"configurable": {"user_id": user_id}}


@pytest.mark.parametrize("form", ["keyword", "configurable", "with_config", "chain"])
async def test_an_awaited_call_names_its_user(form: str) -> None:
    """However an awaited call names bob, it counts for bob only."""
    world = World()
    world.shows(document("pods", PODS))
    retriever = world.retriever("alice")
    if form == "keyword":
        await retriever.ainvoke(POD_QUESTION, user_id="bob")
    elif form == "configurable":
        await retriever.ainvoke(POD_QUESTION, configurable_user("bob"))
    elif form == "with_config":
        await retriever.with_config(configurable={"user_id": "bob"}).ainvoke(POD_QUESTION)
    else:
        await chained(retriever).ainvoke(POD_QUESTION, configurable_user("bob"))
    assert world.record("pods", "bob").fetch_count == 1
    assert world.store.get("alice", "pods") is None


async def test_a_call_that_is_given_up_harms_no_later_one() -> None:
    """A cancelled call ends as cancelled, counts nothing, and the next call answers."""
    world = World(clock=HandClock())
    reached, never = asyncio.Event(), asyncio.Event()

    class Waiting(AsyncOnlyRetriever):
        async def _aget_relevant_documents(
            self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun
        ) -> list[Document]:
            if query == "give up":
                reached.set()
                await never.wait()
            return list(self.documents)

    retriever = world.retriever(global_retriever=Waiting(documents=[document("pods", PODS)]))
    task = asyncio.create_task(retriever.ainvoke("give up"))
    await asyncio.wait_for(reached.wait(), PATIENCE)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert world.store.get(USER, "pods") is None
    assert doc_ids(await retriever.ainvoke(POD_QUESTION)) == ["pods"]
    assert world.record("pods").fetch_count == 1
