"""A fetch is one query that found a document: however many chunks, by whichever kind of call; looking is none."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from helpers import ListRetriever, document
from langchain_core.callbacks import AsyncCallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.runnables import RunnableParallel
from places import PlacedWorld
from pydantic import PrivateAttr
from scenarios import OTHER_QUESTION, POD_QUESTION, Paragraphs, World, cached, chained, texts

from rag_wiki import DocumentState, RagWikiRetriever

CONTENT = "Pods, first.\n\nPods, second.\n\nPods, third."
Way = Callable[[RagWikiRetriever, str], Awaitable[Any]]


async def streamed(retriever: RagWikiRetriever, query: str) -> list[Any]:
    """An awaited stream, to its end."""
    return [chunk async for chunk in retriever.astream(query)]


async def events_of(retriever: RagWikiRetriever, query: str) -> list[Any]:
    """A stream of events, to its end."""
    return [event async for event in retriever.astream_events(query)]


async def blocking(value: object) -> object:
    """What a blocking call gave, for where calls are awaited."""
    return value


WAYS: dict[str, Way] = {
    "invoke": lambda retriever, query: blocking(retriever.invoke(query)),
    "invoke_with_provenance": lambda retriever, query: blocking(retriever.invoke_with_provenance(query)),
    "batch": lambda retriever, query: blocking(retriever.batch([query])),
    "batch_as_completed": lambda retriever, query: blocking(list(retriever.batch_as_completed([query]))),
    "stream": lambda retriever, query: blocking(list(retriever.stream(query))),
    "transform": lambda retriever, query: blocking(list(retriever.transform(iter([query])))),
    "chain": lambda retriever, query: blocking(chained(retriever).invoke(query)),
    "stream of a chain": lambda retriever, query: blocking(list(chained(retriever).stream(query))),
    "parallel": lambda retriever, query: blocking(RunnableParallel(found=retriever).invoke(query)),
    "ainvoke": lambda retriever, query: retriever.ainvoke(query),
    "ainvoke_with_provenance": lambda retriever, query: retriever.ainvoke_with_provenance(query),
    "abatch": lambda retriever, query: retriever.abatch([query]),
    "astream": streamed,
    "astream_events": events_of,
    "awaited chain": lambda retriever, query: chained(retriever).ainvoke(query),
}


def chunks(doc_id: str = "pods", number: int = 3) -> list[Document]:
    """Several chunks of one document."""
    return [
        Document(
            id=f"{doc_id}-{index}",
            page_content=f"Pods, part {index}.",
            metadata={"doc_id": doc_id, "doc_title": doc_id.title(), "chunk_index": index},
        )
        for index in range(number)
    ]


@pytest.mark.parametrize("way", WAYS)
async def test_three_chunks_by_any_call_are_one_fetch(way: str) -> None:
    """Whatever kind of call finds three chunks of a document, it is one fetch; the third such call suggests it."""
    world = World()
    world.shows(*chunks())
    retriever = world.retriever()
    counts = []
    for _ in range(4):
        await WAYS[way](retriever, POD_QUESTION)
        record = world.record("pods")
        counts.append((record.fetch_count, record.user_state.value))
    assert counts == [(1, "SURFACED"), (2, "SURFACED"), (3, "SUGGESTED"), (4, "SUGGESTED")]
    assert [event.what for event in retriever.history("pods")] == ["surfaced", "suggested"]


async def test_calls_of_all_kinds_add_up_in_every_place(world: PlacedWorld) -> None:
    """One call of each kind is one fetch each, for a document that is met as for one that is saved."""
    retriever = world.retriever(text_splitter=Paragraphs())
    world.save(retriever, "pods", CONTENT)
    world.shows(*chunks("images"), *chunks("images"), document("tax", "Tax."))
    for way in WAYS.values():
        await way(retriever, POD_QUESTION)
    for opened in (world, world.reopened()):
        counts = {doc_id: opened.record(doc_id).fetch_count for doc_id in ("pods", "images", "tax")}
        assert counts == {"pods": 1 + len(WAYS), "images": len(WAYS), "tax": len(WAYS)}


async def test_each_input_of_a_batch_is_a_query(world: PlacedWorld) -> None:
    """Equal and different inputs of a batch are as many fetches, and suggest once in all."""
    world.shows(*chunks())
    retriever = world.retriever()
    assert [len(found) for found in retriever.batch([POD_QUESTION, POD_QUESTION, "others"])] == [3] * 3
    await retriever.abatch([POD_QUESTION, "others"])
    assert (world.record("pods").fetch_count, world.state("pods")) == (5, DocumentState.SUGGESTED)
    assert [event.what for event in retriever.history("pods")] == ["surfaced", "suggested"]


@pytest.mark.parametrize("way", WAYS)
async def test_a_source_that_fails_is_no_query(way: str) -> None:
    """A call whose source raises raises that, and counts nothing: no fetch, no miss, neither of met nor saved ones."""
    world = World()
    retriever = world.retriever(reset_threshold=2)
    world.save(retriever, "pods", "Pods.")
    world.shows(*chunks("images"))
    retriever.invoke(OTHER_QUESTION)
    before = world.store.list_by_state("ada")
    clocks = world.store.begin_query("ada", 1, 1).clocks
    world.source.fail_with(ConnectionError("no source"))
    for _ in range(3):
        with pytest.raises(ConnectionError, match="no source"):
            await WAYS[way](retriever, POD_QUESTION)
    assert world.store.list_by_state("ada") == before
    assert world.store.begin_query("ada", 1, 1).clocks == clocks


async def test_of_a_batch_those_that_fail_are_no_query(world: PlacedWorld) -> None:
    """In a batch that returns exceptions, the calls that worked are counted, and only those."""

    class Picky(ListRetriever):
        def _get_relevant_documents(self, query: str, **_: Any) -> list[Document]:
            if "fail" in query:
                raise ConnectionError(query)
            return chunks()

    retriever = world.retriever(global_retriever=Picky())
    queries = ["one", "fail", "two", "fail again"]
    for found in (
        retriever.batch(queries, return_exceptions=True),
        await retriever.abatch(queries, return_exceptions=True),
    ):
        assert [type(answer) for answer in found] == [list, ConnectionError, list, ConnectionError]
    assert world.record("pods").fetch_count == 4


class Waiting(ListRetriever):
    """Tells when it is asked, and never answers."""

    _asked: asyncio.Event = PrivateAttr(default_factory=asyncio.Event)

    async def is_asked(self) -> None:
        """Wait until somebody asks."""
        await self._asked.wait()

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun
    ) -> list[Document]:
        self._asked.set()
        await asyncio.Event().wait()
        return []


async def test_a_call_that_is_given_up_is_no_query() -> None:
    """A call that is cancelled before its source answered, and a stream that nobody reads, count nothing."""
    world = World()
    retriever = world.retriever()
    world.save(retriever, "pods", "Pods.")
    before = world.store.list_by_state("ada")
    source = Waiting()
    call = asyncio.create_task(world.retriever(global_retriever=source).ainvoke(POD_QUESTION))
    await source.is_asked()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    retriever.stream(POD_QUESTION)
    await retriever.astream(POD_QUESTION).aclose()  # type: ignore[attr-defined]  # it is a generator
    assert world.store.list_by_state("ada") == before


def test_looking_is_no_fetch(world: PlacedWorld) -> None:
    """Reading provenance, lists, figures, histories and records changes no record and no clock."""
    retriever = world.retriever()
    world.save(retriever, "pods", CONTENT)
    world.shows(*chunks("images"))
    provenance = retriever.invoke_with_provenance(POD_QUESTION).provenance
    before, clocks = world.store.list_by_state("ada"), world.store.begin_query("ada", 1, 1).clocks
    for opened in (retriever, world.reopened().retriever()):
        for _ in range(4):
            block = opened.last_provenance or provenance
            assert all((block.render(), block.render(ascii=True), block.to_markdown(), block._repr_html_()))
            assert block.to_dict()["sources"]
            assert (len(opened.documents()), opened.stats().states["CLAIMED"], len(opened.history("pods"))) == (2, 1, 2)
            store = opened.state_store
            assert [record.doc_id for record in store.list_claimed("ada")] == ["pods"]
            assert [record.doc_id for record in store.list_surfaced("ada")] == ["images"]
            assert store.list_for_decay("ada")[0].full_content == CONTENT
            assert len(store.retrieved_texts("ada", "images")) == 3
            assert opened.chunk_store.get_hit_rate("ada", "pods") == 1.0
    assert world.store.list_by_state("ada") == before
    assert world.store.begin_query("ada", 1, 1).clocks == clocks


def test_what_the_user_does_is_no_fetch(world: PlacedWorld) -> None:
    """Votes, saving, pinning, refreshing, re-indexing and decay leave the count of fetches alone."""
    retriever = world.retriever()
    world.shows(*chunks())
    for _ in range(3):
        retriever.invoke(POD_QUESTION)
    fetched = world.record("pods").last_fetched_at
    world.clock.turn(hours=1)
    retriever.thumbs_up("pods")
    retriever.decline_suggestion("pods")
    retriever.accept_suggestion("pods")
    retriever.set_always_full_doc("pods")
    retriever.force_pin("pods")
    retriever.unpin("pods")
    retriever.refresh("pods", full_content=CONTENT)
    retriever.thumbs_down("pods")
    retriever.reindex()
    retriever.run_decay()
    assert (world.record("pods").fetch_count, world.record("pods").last_fetched_at) == (3, fetched)


def test_a_copy_that_answers_is_one_fetch(world: PlacedWorld) -> None:
    """A copy that answers with three chunks, which the source finds too, is one fetch, and one hit of each chunk."""
    retriever = world.retriever(text_splitter=Paragraphs())
    world.save(retriever, "pods", CONTENT)
    counts = [world.record("pods").fetch_count]
    world.shows(*(document("pods", text, chunk_index=at) for at, text in enumerate(CONTENT.split("\n\n"))))
    assert texts(retriever.invoke(POD_QUESTION)) == [CONTENT]
    counts.append(world.record("pods").fetch_count)
    world.shows()
    assert texts(cached(retriever.invoke(POD_QUESTION))) == [CONTENT]
    counts.append(world.record("pods").fetch_count)
    assert cached(retriever.invoke(OTHER_QUESTION)) == []
    counts.append(world.record("pods").fetch_count)
    world.shows(document("pods", "Pods, changed."), document("pods", "Pods, changed again."))
    assert len(retriever.invoke(POD_QUESTION)) == 2
    counts.append(world.record("pods").fetch_count)
    assert counts == [1, 2, 3, 3, 4]
    assert [chunk["hit_count"] for chunk in retriever.chunk_store.load_chunks("ada", "pods")] == [2, 2, 2]


def test_a_copy_with_no_room_is_no_fetch_and_no_miss() -> None:
    """A copy that would have answered beyond `k` is not counted, and neither does its streak of misses grow."""
    world = World()
    retriever = world.retriever()
    for doc_id in ("pods", "more"):
        world.save(retriever, doc_id, f"Pods of {doc_id}.")
    counted = {doc_id: world.record(doc_id).fetch_count for doc_id in ("pods", "more")}
    for _ in range(3):
        (served,) = cached(retriever.invoke(POD_QUESTION, k=1))
    left = next(doc_id for doc_id in counted if doc_id != served.metadata["doc_id"])
    assert world.record(served.metadata["doc_id"]).fetch_count == counted[served.metadata["doc_id"]] + 3
    assert (world.record(left).fetch_count, world.record(left).cache_miss_streak) == (counted[left], 0)
