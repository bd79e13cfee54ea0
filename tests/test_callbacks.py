"""Runs, tags and events as a callback handler sees them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID, uuid4

import pytest
from helpers import document
from langchain_core.callbacks import AsyncCallbackHandler, BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.runnables import RunnableConfig
from scenarios import POD_QUESTION, PODS, USER, World, chained, doc_ids

from rag_wiki import RagWikiRetriever


@dataclass
class Run:
    """One run of a retriever."""

    name: str
    run_id: UUID
    parent: UUID | None
    tags: list[str]
    metadata: dict[str, Any]
    query: str
    documents: Sequence[Document] | None = None
    error: BaseException | None = None


@dataclass
class Custom:
    """One custom event."""

    name: str
    data: Any
    run_id: UUID
    tags: list[str]
    metadata: dict[str, Any]


@dataclass
class Recording:
    """The runs and custom events of retrievers, in the order of their starts."""

    runs: list[Run] = field(default_factory=list)
    events: list[Custom] = field(default_factory=list)

    def start(self, name: str, query: str, run_id: UUID, parent: UUID | None, **facts: Any) -> None:
        """Note a start."""
        assert run_id not in {run.run_id for run in self.runs}
        tags, metadata = list(facts.get("tags") or []), dict(facts.get("metadata") or {})
        self.runs.append(Run(name, run_id, parent, tags, metadata, query))

    def end(self, run_id: UUID, documents: Sequence[Document] | None, error: BaseException | None = None) -> None:
        """Note the one end of a run."""
        run = next(run for run in self.runs if run.run_id == run_id)
        assert run.documents is None
        assert run.error is None
        run.documents, run.error = documents, error

    @property
    def ours(self) -> list[Run]:
        """The runs of our retriever."""
        return [run for run in self.runs if run.name == "RagWikiRetriever"]

    @property
    def wrapped(self) -> list[Run]:
        """The runs of the wrapped one."""
        return [run for run in self.runs if run.name == "ListRetriever"]


class Handler(BaseCallbackHandler):
    """Records what a plain handler is told."""

    raise_error = True

    def __init__(self) -> None:
        self.seen = Recording()

    def on_retriever_start(
        self,
        serialized: dict[str, Any],
        query: str,
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        tags: list[str] | None = None,
        metadata: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.seen.start(kwargs["name"], query, run_id, parent_run_id, tags=tags, metadata=metadata)

    def on_retriever_end(
        self, documents: Sequence[Document], *, run_id: UUID, parent_run_id: UUID | None = None, **kwargs: Any
    ) -> None:
        self.seen.end(run_id, documents)

    def on_retriever_error(
        self, error: BaseException, *, run_id: UUID, parent_run_id: UUID | None = None, **kwargs: Any
    ) -> None:
        self.seen.end(run_id, None, error)

    def on_custom_event(
        self,
        name: str,
        data: Any,
        *,
        run_id: UUID,
        tags: list[str] | None = None,
        metadata: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.seen.events.append(Custom(name, data, run_id, list(tags or []), dict(metadata or {})))


class AsyncHandler(AsyncCallbackHandler):
    """Records what an async handler is told."""

    raise_error = True

    def __init__(self) -> None:
        self.seen = Recording()

    async def on_retriever_start(
        self,
        serialized: dict[str, Any],
        query: str,
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        tags: list[str] | None = None,
        metadata: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.seen.start(kwargs["name"], query, run_id, parent_run_id, tags=tags, metadata=metadata)

    async def on_retriever_end(
        self,
        documents: Sequence[Document],
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        tags: list[str] | None = None,
        **kwargs: Any,
    ) -> None:
        self.seen.end(run_id, documents)

    async def on_retriever_error(
        self,
        error: BaseException,
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        tags: list[str] | None = None,
        **kwargs: Any,
    ) -> None:
        self.seen.end(run_id, None, error)

    async def on_custom_event(
        self,
        name: str,
        data: Any,
        *,
        run_id: UUID,
        tags: list[str] | None = None,
        metadata: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.seen.events.append(Custom(name, data, run_id, list(tags or []), dict(metadata or {})))


async def call(retriever: RagWikiRetriever, awaiting: bool, config: RunnableConfig, **kwargs: Any) -> list[Document]:
    """One call, plain or awaited."""
    if awaiting:
        return await retriever.ainvoke(POD_QUESTION, config, **kwargs)
    return retriever.invoke(POD_QUESTION, config, **kwargs)


BOTH = pytest.mark.parametrize("awaiting", [False, True], ids=["sync", "async"])
HANDLERS = pytest.mark.parametrize(
    ("awaiting", "kind"),
    [(False, Handler), (True, Handler), (True, AsyncHandler)],
    ids=["sync", "async with a plain handler", "async"],
)


@HANDLERS
async def test_the_wrapped_run_is_a_child_of_ours(awaiting: bool, kind: type[Handler | AsyncHandler]) -> None:
    """One start and one end each: ours at the root with the result, the wrapped one below it."""
    world, handler = World(), kind()
    world.shows(document("pods", PODS), document("images", "Images are layered."))
    result = await call(world.retriever(), awaiting, {"callbacks": [handler]})
    (ours,), (wrapped,) = handler.seen.ours, handler.seen.wrapped
    assert (ours.parent, wrapped.parent) == (None, ours.run_id)
    assert (ours.query, wrapped.query) == (POD_QUESTION, POD_QUESTION)
    assert ours.documents == result
    assert wrapped.documents == world.source.documents
    assert len(handler.seen.runs) == 2


@HANDLERS
async def test_answering_from_the_copy_alone_is_one_run(awaiting: bool, kind: type[Handler | AsyncHandler]) -> None:
    """With `on_miss` and a hit, there is one run, ours, that ends with the saved document."""
    world, handler = World(), kind()
    retriever = world.retriever(global_search="on_miss")
    world.save(retriever, "pods", PODS)
    result = await call(retriever, awaiting, {"callbacks": [handler]})
    (ours,) = handler.seen.runs
    assert (ours.name, ours.documents) == ("RagWikiRetriever", result)
    assert doc_ids(result) == ["pods"]


@HANDLERS
async def test_an_error_of_the_wrapped_retriever_ends_both_runs(
    awaiting: bool, kind: type[Handler | AsyncHandler]
) -> None:
    """Both runs end with the very exception, which also reaches the caller, and nothing is counted."""
    world, handler = World(), kind()
    world.shows(document("pods", PODS))
    retriever = world.retriever()
    retriever.invoke(POD_QUESTION)
    failure = ConnectionError("the vector store is away")
    world.source.fail_with(failure)
    with pytest.raises(ConnectionError, match="is away"):
        await call(retriever, awaiting, {"callbacks": [handler]})
    assert [run.error for run in handler.seen.runs] == [failure, failure]
    assert handler.seen.events == []
    assert world.record("pods").fetch_count == 1


@BOTH
async def test_tags_and_metadata_reach_the_wrapped_retriever(awaiting: bool) -> None:
    """What the config of a call says about it is seen in both runs and in our event."""
    world, handler = World(), Handler()
    world.shows(document("pods", PODS))
    config: RunnableConfig = {"callbacks": [handler], "tags": ["chat"], "metadata": {"session": "s1"}}
    await call(world.retriever(), awaiting, config)
    (event,) = handler.seen.events
    assert all("chat" in tags for tags in (event.tags, *(run.tags for run in handler.seen.runs)))
    metadata = [event.metadata, *(run.metadata for run in handler.seen.runs)]
    assert [known["session"] for known in metadata] == ["s1"] * 3


@BOTH
async def test_a_run_has_the_name_and_id_that_were_asked_for(awaiting: bool) -> None:
    """`run_name` and `run_id` name our run, and only ours."""
    world, handler, run_id = World(), Handler(), uuid4()
    world.shows(document("pods", PODS))
    await call(world.retriever(), awaiting, {"callbacks": [handler], "run_name": "memory"}, run_id=run_id)
    ours, wrapped = handler.seen.runs
    assert (ours.name, ours.run_id) == ("memory", run_id)
    assert (wrapped.name, wrapped.parent) == ("ListRetriever", run_id)


@HANDLERS
async def test_an_event_carries_the_provenance_of_the_call(awaiting: bool, kind: type[Handler | AsyncHandler]) -> None:
    """One `rag_wiki_provenance` event per call, in our run, with the dictionary of this call's provenance."""
    world, handler = World(), kind()
    world.shows(document("pods", PODS))
    retriever = world.retriever()
    await call(retriever, awaiting, {"callbacks": [handler]})
    (event,), (ours,) = handler.seen.events, handler.seen.ours
    provenance = retriever.last_provenance
    assert provenance is not None
    assert (event.name, event.run_id) == ("rag_wiki_provenance", ours.run_id)
    assert event.data == provenance.to_dict()
    assert event.data["sources"][0]["doc_id"] == "pods"


async def test_streamed_events_tell_the_provenance() -> None:
    """`astream_events` shows the event in between our start and our end."""
    world = World()
    world.shows(document("pods", PODS))
    chain = chained(world.retriever())
    events = [event async for event in chain.astream_events(POD_QUESTION, version="v2")]
    names = [(event["event"], event["name"]) for event in events]
    assert names.count(("on_custom_event", "rag_wiki_provenance")) == 1
    at = names.index(("on_custom_event", "rag_wiki_provenance"))
    assert names.index(("on_retriever_start", "RagWikiRetriever")) < at
    assert at < names.index(("on_retriever_end", "RagWikiRetriever"))
    data: Any = events[at]["data"]
    assert (data["user_id"], data["sources"][0]["doc_id"]) == (USER, "pods")


@BOTH
async def test_a_batch_has_a_run_per_input(awaiting: bool) -> None:
    """Each input of a batch has a run of ours with one child, and an event."""
    world, handler = World(), Handler()
    world.shows(document("pods", PODS))
    retriever, queries = world.retriever(), ["one", "two", "three"]
    config: RunnableConfig = {"callbacks": [handler]}
    if awaiting:
        await retriever.abatch(list(queries), config)
    else:
        retriever.batch(list(queries), config)
    assert sorted(run.query for run in handler.seen.ours) == sorted(queries)
    parents = {run.run_id: run.query for run in handler.seen.ours}
    assert sorted(parents[run.parent] for run in handler.seen.wrapped if run.parent) == sorted(queries)
    assert {event.run_id for event in handler.seen.events} == set(parents)


@BOTH
async def test_in_a_chain_our_run_is_a_child_of_the_chain(awaiting: bool) -> None:
    """Inside a chain our run has a parent, and the wrapped one still is below ours."""
    world, handler = World(), Handler()
    world.shows(document("pods", PODS))
    chain = chained(world.retriever())
    config: RunnableConfig = {"callbacks": [handler]}
    if awaiting:
        await chain.ainvoke(POD_QUESTION, config)
    else:
        chain.invoke(POD_QUESTION, config)
    (ours,), (wrapped,) = handler.seen.ours, handler.seen.wrapped
    assert ours.parent is not None
    assert wrapped.parent == ours.run_id


@BOTH
async def test_a_suggestion_is_in_the_event(awaiting: bool) -> None:
    """The event of the third call carries the suggestion, that of the fourth does not."""
    world, handler = World(), Handler()
    world.shows(document("pods", PODS))
    retriever = world.retriever()
    for _ in range(4):
        await call(retriever, awaiting, {"callbacks": [handler]})
    suggested = [event.data["suggestion"] for event in handler.seen.events]
    assert [None if item is None else item["doc_id"] for item in suggested] == [None, None, "pods", None]
