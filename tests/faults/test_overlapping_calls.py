"""Calls that overlap on one retriever: documents, provenance and suggestions are each call's own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import UUID

import pytest
from helpers import TableEmbeddings, document
from langchain_core.callbacks import BaseCallbackHandler, CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from places import PlacedWorld
from pydantic import PrivateAttr
from scenarios import World, cached, chained, doc_ids, texts

from rag_wiki import ProvenanceBlock, RagWikiRetriever, SuggestionEvent

PATIENCE = 30
ROUNDS = 50
TOPICS = ("apples", "bears")


class MeetingEmbeddings(TableEmbeddings):
    """Answers queries in pairs: both have come before one is answered, and the slow one is answered last."""

    def __init__(self) -> None:
        super().__init__(table().table)
        self.slow: str | None = None
        self._meeting = threading.Barrier(2)
        self._quick_one_is_done = threading.Event()

    def meet(self, slow: str | None) -> None:
        """Hold the next two queries until both are there, and this one until the other was answered."""
        self.slow = slow
        self._quick_one_is_done.clear()

    def quick_one_is_done(self) -> None:
        """The call that need not wait has ended."""
        self._quick_one_is_done.set()

    def embed_query(self, text: str) -> list[float]:
        if self.slow is not None:
            self._meeting.wait(PATIENCE)
            if text == self.slow:
                assert self._quick_one_is_done.wait(PATIENCE)
        return super().embed_query(text)


class EchoRetriever(BaseRetriever):
    """Finds one document for each query, named after it."""

    def _get_relevant_documents(self, query: str, *, run_manager: CallbackManagerForRetrieverRun) -> list[Document]:
        return [document(f"news of {query}", f"Today: {query}")]


class ByRun(BaseCallbackHandler):
    """The query and the provenance of each run, as a handler is told of them."""

    def __init__(self) -> None:
        self.queries: dict[UUID, str] = {}
        self.sources: dict[str, list[str]] = {}

    def on_retriever_start(self, serialized: Any, query: str, *, run_id: UUID, **facts: Any) -> None:
        self.queries[run_id] = query

    def on_custom_event(self, name: str, data: Any, *, run_id: UUID, **facts: Any) -> None:
        # The event is dispatched as a child of the run, or in it.
        self.sources.setdefault(str(facts.get("parent_run_id") or run_id), []).extend(
            source["doc_id"] for source in data["sources"]
        )


def saved_topics(world: World) -> RagWikiRetriever:
    """A retriever whose user has saved a document of each topic, over a source that echoes."""
    filling = world.retriever()
    for topic in TOPICS:
        world.save(filling, topic, f"All about {topic}.")
    return world.retriever(global_retriever=EchoRetriever())


def table() -> TableEmbeddings:
    """The topics at right angles."""
    return TableEmbeddings({"apples": [1, 0, 0], "bears": [0, 1, 0]})


def own_sources(query: str) -> list[str]:
    """What a question about a topic is answered with: the saved copy, and what the source finds."""
    return [next(topic for topic in TOPICS if topic in query), f"news of {query}"]


def sources(provenance: ProvenanceBlock | None) -> list[str | None]:
    """The documents that a provenance names."""
    assert provenance is not None
    return [source.doc_id for source in provenance.sources]


async def test_two_awaited_calls_are_each_told_of_their_own() -> None:
    """Of two awaited calls, whichever ends first, each gets its own documents, provenance and `last_provenance`."""
    model = MeetingEmbeddings()
    retriever = saved_topics(World(embeddings=model))

    async def ask(topic: str, *, with_provenance: bool) -> tuple[list[Any], list[Any]]:
        if with_provenance:
            documents, provenance = await retriever.ainvoke_with_provenance(topic)
        else:
            documents = await retriever.ainvoke(topic)
            assert retriever.last_provenance is not None
            provenance = retriever.last_provenance
        if topic != model.slow:
            model.quick_one_is_done()
        return doc_ids(documents), sources(provenance)

    for turn in range(ROUNDS):
        model.meet(slow=TOPICS[turn % 2])
        answers = await asyncio.gather(*(ask(topic, with_provenance=turn % 4 < 2) for topic in TOPICS))
        assert answers == [(own_sources(topic), own_sources(topic)) for topic in TOPICS]


def test_two_calls_in_threads_are_each_told_of_their_own() -> None:
    """Of two calls in threads, whichever ends first, each gets its own documents, provenance and `last_provenance`."""
    model = MeetingEmbeddings()
    retriever = saved_topics(World(embeddings=model))

    def ask(topic: str) -> tuple[list[Any], list[Any], list[Any]]:
        documents, provenance = retriever.invoke_with_provenance(topic)
        latest = retriever.last_provenance
        if topic != model.slow:
            model.quick_one_is_done()
        return doc_ids(documents), sources(provenance), sources(latest)

    with ThreadPoolExecutor(2) as pool:
        for turn in range(ROUNDS):
            model.meet(slow=TOPICS[turn % 2])
            assert list(pool.map(ask, TOPICS)) == [(own_sources(topic),) * 3 for topic in TOPICS]


@pytest.mark.parametrize("through_a_chain", [False, True], ids=["alone", "in a chain"])
def test_eight_threads_are_each_told_of_their_own(through_a_chain: bool) -> None:
    """Eight threads with questions and users of their own: nobody's last provenance is ever of another call."""
    world = World(embeddings=table())
    retriever = saved_topics(world)
    asked = chained(retriever) if through_a_chain else retriever
    everybody = threading.Barrier(8)
    wrong: list[Any] = []

    def work(number: int) -> None:
        user = f"user-{number}" if number % 2 else "ada"
        everybody.wait(PATIENCE)
        for turn in range(25):
            query = f"{TOPICS[turn % 2]} {number} {turn}"
            found = asked.invoke(query, {"configurable": {"user_id": user}})
            wanted = own_sources(query) if user == "ada" else [f"news of {query}"]
            latest = retriever.last_provenance
            told = (doc_ids(found), sources(latest), latest.user_id if latest else None)
            if told != (wanted, wanted, user):
                wrong.append((query, told))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert wrong == []
    assert world.record("apples").fetch_count == 1 + 4 * 13


BATCHES: dict[str, Callable[[RagWikiRetriever, list[str], Any], Awaitable[list[list[Document]]]]] = {
    "batch": lambda retriever, queries, config: asyncio.to_thread(retriever.batch, queries, config),
    "abatch": lambda retriever, queries, config: retriever.abatch(queries, config),
    "gather": lambda retriever, queries, config: asyncio.gather(
        *(retriever.ainvoke(query, config) for query in queries)
    ),
}


async def test_each_run_of_a_batch_is_told_of_its_own(world: PlacedWorld) -> None:
    """Of many questions at once each gets its own documents, and its run's event names the sources of that one only."""
    world.embeddings = table()
    retriever = saved_topics(world)
    for way, ask in BATCHES.items():
        heard = ByRun()
        queries = [f"{topic} {number} by {way}" for number in range(10) for topic in TOPICS]
        answers = await ask(retriever, queries, {"callbacks": [heard]})
        assert [doc_ids(found) for found in answers] == [own_sources(query) for query in queries]
        told = {query: heard.sources[str(run)] for run, query in heard.queries.items() if str(run) in heard.sources}
        assert told == {query: own_sources(query) for query in queries}


def test_suggestions_of_overlapping_calls_are_their_users_own() -> None:
    """Threads of many users on one retriever: each suggestion is told to the call and the callback of its user."""
    told: list[SuggestionEvent] = []
    world = World()
    retriever = world.retriever(None, global_retriever=EchoRetriever(), on_suggestion=told.append)

    def work(number: int) -> list[tuple[str, str]]:
        blocks = [retriever.invoke_with_provenance(f"q{number}", user_id=f"user-{number}") for _ in range(4)]
        return [(event.user_id, event.doc_id) for block in blocks for event in block.provenance.suggestions]

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(work, range(24)))
    assert found == [[(f"user-{number}", f"news of q{number}")] for number in range(24)]
    assert sorted((event.user_id, event.doc_id) for event in told) == sorted(own for (own,) in found)


class AskingRetriever(BaseRetriever):
    """A source that asks the retriever around it, for somebody else, while that one is being asked."""

    _around: RagWikiRetriever | None = PrivateAttr(default=None)

    def is_inside(self, around: RagWikiRetriever) -> None:
        """Name the retriever around it."""
        self._around = around

    def _get_relevant_documents(self, query: str, *, run_manager: CallbackManagerForRetrieverRun) -> list[Document]:
        if self._around is not None and query != "inner":
            self._around.invoke("inner", user_id="bob")
        return [document(f"news of {query}", f"Today: {query}")]


async def test_a_call_within_a_call_leaves_the_outer_one_alone() -> None:
    """A call made for another user while a call is under way changes neither its documents nor its provenance."""
    source = AskingRetriever()
    retriever = World().retriever(global_retriever=source)
    source.is_inside(retriever)
    for documents, provenance in (
        retriever.invoke_with_provenance("outer"),
        await retriever.ainvoke_with_provenance("outer"),
    ):
        assert (doc_ids(documents), sources(provenance), provenance.user_id) == (
            ["news of outer"],
            ["news of outer"],
            "ada",
        )
    retriever.invoke("outer")
    assert (sources(retriever.last_provenance), retriever.documents(user_id="bob")[0].fetch_count) == (
        ["news of outer"],
        3,
    )


def test_a_thread_that_made_no_call_is_shown_no_other_users() -> None:
    """Where no call was made, `last_provenance` is of the retriever's own user or nothing, whoever asked elsewhere."""
    retriever = World().retriever("alice", global_retriever=EchoRetriever())
    shared = retriever.model_copy(update={"user_id": None})
    retriever.invoke("apples", user_id="bob")
    shared.invoke("apples", user_id="bob")
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(lambda: (retriever.last_provenance, shared.last_provenance)).result() == (None, None)
    assert retriever.for_user("alice").last_provenance is None
    retriever.invoke("apples")
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(lambda: sources(retriever.last_provenance)).result() == ["news of apples"]


def test_after_a_call_that_failed_the_last_provenance_is_not_of_another_one() -> None:
    """Where bob's call failed, `last_provenance` does not show what a call for alice on that thread had found."""
    world = World()
    world.shows(document("apples", "Apples of alice."))
    retriever = world.retriever(None)
    retriever.invoke("apples", user_id="alice")
    world.source.fail_with(ConnectionError("no source"))
    with pytest.raises(ConnectionError):
        retriever.invoke("apples", user_id="bob")
    latest = retriever.last_provenance
    assert latest is None or latest.user_id == "bob"


def test_what_one_call_returned_is_nobody_elses() -> None:
    """Changing the documents of one call changes neither those of another, nor what is saved, nor its provenance."""
    retriever = saved_topics(World(embeddings=table()))
    first, provenance = retriever.invoke_with_provenance("apples")
    before = (texts(first), sources(provenance), provenance.to_dict()["sources"])
    for found in first:
        found.page_content = "scribbled over"
        for value in found.metadata.values():
            if isinstance(value, list):
                value.clear()
        found.metadata["doc_id"] = "scribbled over"
    again, later = retriever.invoke_with_provenance("apples")
    assert (texts(again), sources(later)) == before[:2]
    assert cached(again)[0].metadata["chunks_used"] == [0]
    assert provenance.to_dict()["sources"] == before[2]
