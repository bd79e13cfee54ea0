"""`using_user`: the user of everything that is called within a block."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from helpers import document
from langchain_core.runnables import RunnableConfig, RunnableLambda
from scenarios import POD_QUESTION, PODS, World

from rag_wiki import ConfigurationError, InvalidUserError, RagWikiRetriever, using_user


def asked_as(retriever: RagWikiRetriever, **named: Any) -> str | None:
    """The user of a call."""
    return retriever.invoke_with_provenance(POD_QUESTION, **named).provenance.user_id


@pytest.fixture
def world() -> World:
    """A source with one document."""
    world = World()
    world.shows(document("pods", PODS))
    return world


def test_calls_and_actions_within_are_the_users(world: World) -> None:
    """A suggestion that was made within a block is accepted within it for the same user, and nobody else's changes."""
    retriever = world.retriever(user_id="owner")
    for _ in range(3):
        retriever.invoke(POD_QUESTION)
    with using_user("zed"):
        for _ in range(3):
            retriever.invoke(POD_QUESTION)
        assert retriever.last_provenance is not None
        assert retriever.last_provenance.user_id == "zed"
        assert retriever.accept_suggestion("pods").user_id == "zed"
        assert [record.user_id for record in retriever.documents()] == ["zed"]
        assert retriever.stats().user_id == "zed"
    assert [str(record.user_state) for record in retriever.documents()] == ["SUGGESTED"]


def test_the_nearest_word_counts(world: World) -> None:
    """A call's own word goes before the innermost block or run, and both before the retriever's own user."""
    retriever = world.retriever(user_id="owner")
    step: RunnableLambda[object, str | None] = RunnableLambda(lambda _: asked_as(retriever))
    bob: RunnableConfig = {"configurable": {"user_id": "bob"}}

    def within(_: object) -> list[str | None]:
        with using_user("inner"):
            return [asked_as(retriever), step.invoke(None), step.invoke(None, {"configurable": {"user_id": "cleo"}})]

    assert asked_as(retriever) == "owner"
    with using_user("outer"):
        assert asked_as(retriever) == "outer"
        assert asked_as(retriever, user_id="named") == "named"
        assert retriever.invoke_with_provenance(POD_QUESTION, bob).provenance.user_id == "bob"
        assert step.invoke(None, bob) == "bob"
        with using_user("nested"):
            assert asked_as(retriever) == "nested"
        assert asked_as(retriever) == "outer"
    assert RunnableLambda(within).invoke(None, bob) == ["inner", "inner", "cleo"]
    with using_user("outer"), pytest.raises(InvalidUserError):
        retriever.invoke(POD_QUESTION, {"configurable": {"user_id": None}})


async def test_threads_and_tasks_have_their_own(world: World) -> None:
    """Blocks in threads and tasks at the same time don't meet, and the tools and twins follow them."""
    retriever = world.retriever(user_id="owner")

    async def awaited(user: str) -> str:
        with using_user(user):
            await asyncio.sleep(0)
            (await retriever.ainvoke_with_provenance(POD_QUESTION))
            found = await retriever.as_tools()[0].ainvoke(
                {"type": "tool_call", "id": "1", "name": "search_documents", "args": {"query": POD_QUESTION}}
            )
            return str(found.artifact["provenance"]["user_id"])

    def blocking(user: str) -> str | None:
        with using_user(user):
            return asked_as(retriever)

    users = [f"user-{number}" for number in range(8)]
    assert await asyncio.gather(*map(awaited, users)) == users
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(blocking, users)) == users
    assert asked_as(retriever) == "owner"


def test_around_a_yield_it_says_so(world: World) -> None:
    """Blocks that generators leave out of turn, or in another context, are an error with advice."""
    retriever = world.retriever(user_id="owner")

    def serve(user: str) -> Iterator[str | None]:
        with using_user(user):
            yield asked_as(retriever)

    def two() -> None:
        first, second = serve("alice"), serve("bob")
        assert (next(first), next(second)) == ("alice", "bob")
        with pytest.raises(ConfigurationError, match=r"stands around a `yield`.*for_user"):
            next(first)

    contextvars.copy_context().run(two)
    elsewhere = serve("alice")
    contextvars.copy_context().run(next, elsewhere)
    with pytest.raises(ConfigurationError, match=r"stands around a `yield`.*for_user"):
        next(elsewhere)
    assert asked_as(retriever) == "owner"


@pytest.mark.parametrize("wrong", ["", " ", None, 7])
def test_nobody_is_refused(wrong: str) -> None:
    """A user who is blank or no string is refused where the block is written."""
    with pytest.raises(InvalidUserError):
        using_user(wrong)
