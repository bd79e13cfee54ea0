"""Awaited or not, the same calls give the same: documents, order, counts, states, suggestions, provenance."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from helpers import ListRetriever, document
from langchain_core.callbacks import AsyncCallbackManagerForRetrieverRun, BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from places import PlacedWorld
from scenarios import OTHER_QUESTION, POD_QUESTION, PODS, Paragraphs, World, doc_ids

from rag_wiki import DecayConfig, DocumentState, ProvenanceBlock, RagWikiRetriever, UserDocRecord

IMAGES = "Images are built in layers."
IMAGE_QUESTION = "what are images?"


class AwaitedOnly(ListRetriever):
    """A list that can only be awaited."""

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun
    ) -> list[Document]:
        self.calls.append(query)
        if self._error is not None:
            raise self._error
        return list(self.documents)

    def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
        message = "this retriever can only be awaited"
        raise NotImplementedError(message)


class Provenances(BaseCallbackHandler):
    """Keeps the provenance that calls tell of."""

    def __init__(self) -> None:
        self.told: list[dict[str, Any]] = []

    def on_custom_event(self, name: str, data: Any, **named: Any) -> None:
        """Keep it."""
        self.told.append(data)


class Life:
    """A user's twenty queries and what is done between them, blocking or awaiting, and all that came of it."""

    def __init__(self, world: World, user_id: str, *, awaiting: bool, **settings: Any) -> None:
        self.world, self.user_id, self.awaiting = world, user_id, awaiting
        self.seen: list[Any] = []
        self.suggested: list[tuple[str, int]] = []
        self.events = Provenances()
        self.retriever = world.retriever(
            user_id,
            text_splitter=Paragraphs(),
            decay=DecayConfig(max_cache_miss_streak=3),
            on_suggestion=lambda event: self.suggested.append((event.doc_id, event.fetch_count)),
            **settings,
        )

    def plain(self, result: Any) -> Any:
        """A result without what must differ: the user, the names of copies, how long things took."""
        if isinstance(result, str):
            return result.replace(self.user_id, "USER")
        if isinstance(result, ProvenanceBlock):
            return self.plain(result.to_dict())
        if isinstance(result, UserDocRecord):
            return replace(result, user_id="USER", copy_id=None)
        if isinstance(result, dict) and "timings" in result:
            return {**result, "user_id": "USER", "timings": sorted(result["timings"])}
        if isinstance(result, (list, tuple)):
            return [self.plain(item) for item in result]
        return replace(result, user_id="USER") if hasattr(result, "user_id") else result

    async def do(self, action: str, *arguments: Any, **named: Any) -> None:
        """One method or its twin, with what it gave or raised, and all records after it."""
        self.world.clock.turn(hours=1)
        try:
            if self.awaiting:
                result = await getattr(self.retriever, f"a{action}")(*arguments, **named)
            else:
                result = getattr(self.retriever, action)(*arguments, **named)
        except Exception as error:
            result = f"{type(error).__name__}: {error}"
        self.seen += [(action, arguments[:1]), self.plain(result), self.plain(self.retriever.documents())]

    async def ask(self, query: str, *shown: Document, **named: Any) -> None:
        """One query; the source shows these documents."""
        self.world.shows(*shown)
        await self.do("invoke_with_provenance", query, {"callbacks": [self.events]}, **named)

    async def stream(self, query: str) -> None:
        """One query as a stream."""
        if self.awaiting:
            self.seen.append([part async for part in self.retriever.astream(query)])
        else:
            self.seen.append(list(self.retriever.stream(query)))

    async def live(self) -> list[Any]:
        """All of it."""
        pods, images = document("pods", PODS, chunk_index=0), document("images", IMAGES, author="kim")
        tax = document("tax", "Tax is due in May.")
        for _ in range(3):
            await self.ask(POD_QUESTION, images, pods)
        await self.do("decline_suggestion", "images")
        await self.do("accept_suggestion", "pods")
        for _ in range(2):
            await self.ask(POD_QUESTION, images, pods, k=1)
        await self.do("thumbs_up", "pods")
        await self.ask(IMAGE_QUESTION, images, images, document("pods", "Pods, another part.", chunk_index=1))
        # One at a time: streaks of misses depend on the order in which threads have their turn.
        await self.do("batch", [POD_QUESTION, IMAGE_QUESTION, POD_QUESTION], {"max_concurrency": 1})
        await self.stream(POD_QUESTION)
        await self.do("refresh", "pods", full_content=f"{PODS}\n\nPods can restart.")
        await self.do("set_always_full_doc", "pods")
        await self.ask(POD_QUESTION)
        await self.do("force_pin", "images")
        await self.ask(OTHER_QUESTION, tax, k=2)
        await self.do("thumbs_down", "images")
        await self.ask(OTHER_QUESTION, Document("nobody's", metadata={}))
        self.world.source.fail_with(ConnectionError("the source is down"))
        await self.ask(POD_QUESTION)
        self.world.source.fail_with(None)
        await self.do("unpin", "images")
        await self.do("run_decay")
        for _ in range(7):
            await self.ask(OTHER_QUESTION, tax)
        await self.do("accept_suggestion", "never met")
        await self.do("decline_suggestion", "tax")
        await self.do("force_remove", "images")
        await self.ask(IMAGE_QUESTION, images)
        await self.do("reindex")
        for doc_id in ("pods", "images", "tax", "never met"):
            await self.do("history", doc_id)
        await self.do("stats")
        self.seen += [self.suggested, self.plain(self.events.told)]
        await self.do("forget_user")
        return self.seen


async def both(world: World, other: World, **settings: Any) -> tuple[list[Any], int]:
    """The same life blocking and awaiting, of which neither finds anything else; and the queries in it."""
    start = world.clock.now
    blocking = await Life(world, "first user", awaiting=False, **settings).live()
    asked = len(world.source.calls)
    other.clock.now = start
    awaited = await Life(other, "other user", awaiting=True, **settings).live()
    for ours, theirs in zip(blocking, awaited, strict=True):
        assert theirs == ours
    return blocking, asked


async def test_a_life_is_the_same_in_every_place(world: PlacedWorld) -> None:
    """Wherever state and chunks are kept, twenty queries with all actions between them give the same both ways."""
    seen, asked = await both(world, world)
    assert asked >= 20
    answers = [step for step in seen if isinstance(step, list) and len(step) == 2 and isinstance(step[1], dict)]
    assert {answer[1]["mode"] for answer in answers} == {"none", "semantic"}
    assert seen[-5][:2] == [("images", 3), ("pods", 3)]
    assert any(answer[1]["let_go"] for answer in answers)


SETTINGS: dict[str, dict[str, Any]] = {
    "asked on a miss only": {"global_search": "on_miss"},
    "measured threshold": {"similarity_threshold": "auto"},
    "focused": {"context": "focused", "expand_neighbours": 1},
    "saves by itself": {"auto_save": True},
    "few": {"k": 2},
    "someone says no": {"access_check": lambda user_id, doc_id: doc_id != "images"},
    "a loader": {"document_loader": lambda record: f"{record.doc_id} Pods\n\nImages"},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
async def test_a_life_is_the_same_with_every_setting(settings: dict[str, Any]) -> None:
    """No setting makes one of the two ways find, count or say something else."""
    await both(World(), World(), **settings)


async def test_a_life_is_the_same_without_a_model() -> None:
    """Without an embedding model both ways match by words, and refuse to save in the same words."""
    seen, _ = await both(World(embeddings=None), World(embeddings=None), document_loader=lambda record: PODS)
    assert any(isinstance(step, str) and step.startswith("EmbeddingUnavailableError") for step in seen)


async def test_a_source_that_can_only_be_awaited_gives_what_a_blocking_one_gives() -> None:
    """A life around a source with async methods alone is that around a source with blocking methods alone."""
    source = AwaitedOnly()
    _, asked = await both(World(), World(source=source))
    assert len(source.calls) == asked


async def test_a_source_that_can_only_be_awaited_says_so_to_a_blocking_call() -> None:
    """Asked in the way it can't answer, such a source raises its own error, and nothing is counted."""
    world = World(source=AwaitedOnly(documents=[document("pods", PODS)]))
    retriever = world.retriever()
    with pytest.raises(NotImplementedError, match="can only be awaited"):
        retriever.invoke(POD_QUESTION)
    assert retriever.documents() == []
    assert doc_ids(await retriever.ainvoke(POD_QUESTION)) == ["pods"]
    assert world.state("pods") is DocumentState.SURFACED


def public_methods() -> dict[str, Callable[..., Any]]:
    """The public methods that are the retriever's own."""
    return {
        name: found
        for name, found in vars(RagWikiRetriever).items()
        if not name.startswith("_") and inspect.isfunction(found)
    }


BINDING = {"bind", "with_config", "with_listeners", "with_alisteners", "with_types"}
NO_TWIN_NEEDED = {"as_tools", "for_user", "process_stats", "model_copy", "model_post_init", *BINDING}
"""They touch no store and ask nobody."""


def test_every_method_and_its_twin_take_the_same() -> None:
    """No public method lacks an awaitable twin, and none of the twins takes other arguments or defaults."""
    methods = public_methods()
    blocking = {name for name, found in methods.items() if not inspect.iscoroutinefunction(found)} - NO_TWIN_NEEDED
    assert {f"a{name}" for name in blocking} == {
        name for name, found in methods.items() if inspect.iscoroutinefunction(found)
    }
    for name in blocking:
        ours, theirs = inspect.signature(methods[name]), inspect.signature(methods[f"a{name}"])
        assert (name, list(theirs.parameters.values())) == (name, list(ours.parameters.values()))
        assert theirs.return_annotation == ours.return_annotation


class BothWays(BaseRetriever):
    """Tells in which way it was asked."""

    def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
        return [document("blocking", "Pods")]

    async def _aget_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
        return [document("awaited", "Pods")]


@pytest.mark.parametrize("context", ["all", "focused"])
async def test_each_way_asks_the_source_in_its_own_way(context: str) -> None:
    """A blocking call uses the source's blocking method, an awaited one its async method, in batches too."""
    retriever = World().retriever(global_retriever=BothWays(), context=context)
    assert doc_ids(retriever.invoke(POD_QUESTION)) == ["blocking"]
    assert doc_ids(await retriever.ainvoke(POD_QUESTION)) == ["awaited"]
    assert [doc_ids(found) for found in retriever.batch([POD_QUESTION] * 2)] == [["blocking"]] * 2
    assert [doc_ids(found) for found in await retriever.abatch([POD_QUESTION] * 2)] == [["awaited"]] * 2
    counts = {record.doc_id: record.fetch_count for record in retriever.documents()}
    assert counts == {"awaited": 3, "blocking": 3}
