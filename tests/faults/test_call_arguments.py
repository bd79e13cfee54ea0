"""What a call says (its user, `k`, what the source is to be told) arrives, or the call fails; nothing is dropped."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from helpers import ListRetriever, document
from langchain_core.callbacks import AsyncCallbackManagerForRetrieverRun, CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import ConfigurableField, Runnable, RunnableLambda, RunnableParallel, RunnablePassthrough
from langchain_core.tools import create_retriever_tool
from langchain_core.vectorstores import InMemoryVectorStore, VectorStoreRetriever
from places import PlacedWorld
from scenarios import POD_QUESTION, World, cached, chained, doc_ids, texts, topics

from rag_wiki import RagWikiRetriever
from rag_wiki.errors import InvalidUserError, UnexpectedArgumentError

BOB: Any = {"configurable": {"user_id": "bob"}}
MOVED: Any = {"user_id": "bob"}
"""LangChain moves what it does not know of a configuration to where it belongs."""
CAROL: Any = {"configurable": {"user_id": "carol"}}
Source = Runnable[str, list[Document]]


def anything(runnable: Runnable[Any, Any]) -> Runnable[Any, Any]:
    """A step that hands on what it gets, before or after another."""
    return RunnableLambda(lambda value: value) | runnable


BLOCKING: dict[str, Callable[[RagWikiRetriever], Any]] = {
    "keyword": lambda alices: alices.invoke(POD_QUESTION, user_id="bob"),
    "configurable": lambda alices: alices.invoke(POD_QUESTION, config=BOB),
    "configurable by position": lambda alices: alices.invoke(POD_QUESTION, BOB),
    "a key of the configuration": lambda alices: alices.invoke(POD_QUESTION, MOVED),
    "with_config": lambda alices: alices.with_config(BOB).invoke(POD_QUESTION),
    "with_config and stream": lambda alices: list(alices.with_config(BOB).stream(POD_QUESTION)),
    "with_config and provenance": lambda alices: alices.with_config(BOB).invoke_with_provenance(POD_QUESTION),
    "with_config and batch": lambda alices: alices.with_config(BOB).batch([POD_QUESTION]),
    "bind": lambda alices: alices.bind(user_id="bob").invoke(POD_QUESTION),
    "chain": lambda alices: chained(alices).invoke(POD_QUESTION, BOB),
    "chain and stream": lambda alices: list(chained(alices).stream(POD_QUESTION, BOB)),
    "function in a chain": lambda alices: anything(RunnableLambda(lambda query: alices.invoke(query))).invoke(
        POD_QUESTION, BOB
    ),
    "parallel": lambda alices: RunnableParallel(found=alices, query=RunnablePassthrough()).invoke(POD_QUESTION, BOB),
    "batch": lambda alices: alices.batch([POD_QUESTION], BOB),
    "batch by keyword": lambda alices: alices.batch([POD_QUESTION], user_id="bob"),
    "batch as completed": lambda alices: list(alices.batch_as_completed([POD_QUESTION], BOB)),
    "retry": lambda alices: alices.with_retry().invoke(POD_QUESTION, BOB),
    "fallbacks": lambda alices: alices.with_fallbacks([alices]).invoke(POD_QUESTION, BOB),
    "tool": lambda alices: create_retriever_tool(alices, "search", "searches").invoke({"query": POD_QUESTION}, BOB),
    "another user's retriever": lambda alices: alices.for_user("carol").invoke(POD_QUESTION, BOB),
}
AWAITING: dict[str, Callable[[RagWikiRetriever], Awaitable[Any]]] = {
    "keyword": lambda alices: alices.ainvoke(POD_QUESTION, user_id="bob"),
    "configurable": lambda alices: alices.ainvoke(POD_QUESTION, BOB),
    "with_config": lambda alices: alices.with_config(BOB).ainvoke(POD_QUESTION),
    "chain": lambda alices: chained(alices).ainvoke(POD_QUESTION, BOB),
    "batch": lambda alices: alices.abatch([POD_QUESTION], BOB),
    "provenance": lambda alices: alices.ainvoke_with_provenance(POD_QUESTION, BOB),
}


def alices_world() -> tuple[World, RagWikiRetriever]:
    """A world in which alice has saved a document, and in which another one is found by everybody."""
    world = World()
    retriever = world.retriever("alice")
    world.save(retriever, "pods", "Pods of alice.")
    world.shows(document("images", "Images for everybody."))
    return world, retriever


def assert_counted_for_bob(world: World, found: object) -> None:
    """The call was bob's: it counts for him, and neither counts for alice nor shows what is hers."""
    assert world.record("images", "bob").fetch_count == 1
    assert [record.doc_id for record in world.store.list_by_state("alice")] == ["pods"]
    assert world.record("pods", "alice").fetch_count == 1
    assert "everybody" in str(found)
    assert "Pods of alice" not in str(found)
    assert world.store.list_by_state("carol") == []


@pytest.mark.parametrize("way", BLOCKING)
def test_a_user_named_by_a_call_is_its_user(way: str) -> None:
    """However bob is named, the call counts for him and shows him nothing of alice, whose retriever it is."""
    world, retriever = alices_world()
    assert_counted_for_bob(world, BLOCKING[way](retriever))


@pytest.mark.parametrize("way", AWAITING)
async def test_a_user_named_by_an_awaited_call_is_its_user(way: str) -> None:
    """Awaited, too, bob's call counts for him and shows him nothing of alice."""
    world, retriever = alices_world()
    assert_counted_for_bob(world, await AWAITING[way](retriever))


async def test_a_user_named_by_an_awaited_stream_is_its_user() -> None:
    """An awaited stream counts for the user whom its configuration names."""
    world, retriever = alices_world()
    assert_counted_for_bob(world, [chunk async for chunk in retriever.astream(POD_QUESTION, BOB)])


def test_a_user_bound_as_a_keyword_is_the_user_of_a_call_with_provenance() -> None:
    """`bind(user_id=...)` holds for `invoke_with_provenance` as it does for `invoke`."""
    world, retriever = alices_world()
    bound: Any = retriever.bind(user_id="bob")
    assert_counted_for_bob(world, bound.invoke_with_provenance(POD_QUESTION))


@pytest.mark.parametrize("bound", ["with_config", "bind"])
def test_an_action_on_a_bound_retriever_is_of_the_bound_user(bound: str) -> None:
    """What is done through a retriever that bob was bound to is done to his documents, never to alice's."""
    world, retriever = alices_world()
    world.shows(document("images", "Images for everybody."))
    for user in ("alice", "bob"):
        retriever.invoke(POD_QUESTION, user_id=user)
    bobs: Any = retriever.with_config(BOB) if bound == "with_config" else retriever.bind(user_id="bob")
    bobs.thumbs_up("images")
    signals = {user: world.record("images", user).explicit_signal for user in ("alice", "bob")}
    assert signals == {"alice": 0.0, "bob": 1.0}
    assert {record.user_id for record in bobs.documents()} == {"bob"}


def test_an_action_inside_a_run_is_of_its_user() -> None:
    """A function in a chain that is run for bob, and that acts without naming anybody, acts for bob."""
    world, retriever = alices_world()
    for user in ("alice", "bob"):
        retriever.invoke(POD_QUESTION, user_id=user)
    vote: Runnable[str, Any] = RunnableLambda(retriever.thumbs_up)
    vote.invoke("images", BOB)
    signals = {user: world.record("images", user).explicit_signal for user in ("alice", "bob")}
    assert signals == {"alice": 0.0, "bob": 1.0}


BOUND: dict[str, Callable[[RagWikiRetriever], Any]] = {
    "bind": lambda alices: alices.bind(user_id="bob"),
    "with_config": lambda alices: alices.with_config(BOB),
    "moved": lambda alices: alices.with_config(user_id="bob"),
    "bound again": lambda alices: alices.bind(k=3).with_config(tags=["bound"]).bind(user_id="bob"),
    "after listeners": lambda alices: alices.with_listeners(on_end=lambda _: None).bind(user_id="bob"),
    "after types": lambda alices: alices.with_types(input_type=str).with_config(BOB),
    "for_user": lambda alices: alices.bind(user_id="carol", k=3).for_user("bob"),
    "for_user, configured": lambda alices: alices.with_config(CAROL, user_id="carol").for_user("bob"),
}


@pytest.mark.parametrize("way", BOUND)
async def test_whoever_is_bound_is_the_user_of_everything(way: str) -> None:
    """Calls, actions of either kind, what is looked at and the last provenance are of the user who was bound."""
    world, retriever = alices_world()
    bobs = BOUND[way](retriever)
    retriever.invoke(POD_QUESTION)
    assert bobs.user_id == "bob"
    assert bobs.invoke_with_provenance(POD_QUESTION).provenance.user_id == "bob"
    assert (await bobs.ainvoke_with_provenance(POD_QUESTION)).provenance.user_id == "bob"
    assert bobs.last_provenance.user_id == "bob"
    assert (await bobs.athumbs_up("images")).user_id == "bob"
    assert bobs.accept_suggestion("images", "Images of bob.").user_id == "bob"
    assert [record.user_id for record in await bobs.adocuments()] == ["bob"]
    assert world.record("images", "bob").explicit_signal == 1.0
    assert world.record("images", "alice").explicit_signal == 0.0
    # Who is named by an action is meant, by position too.
    assert bobs.thumbs_down("images", "alice").user_id == "alice"
    assert bobs.stats(user_id="alice").user_id == "alice"


def test_a_bound_user_holds_inside_a_run_of_another_one() -> None:
    """A retriever that was bound to bob acts for bob, whoever the chain around it is run for."""
    world, retriever = alices_world()
    retriever.invoke(POD_QUESTION, user_id="bob")
    for bobs in (retriever.bind(user_id="bob"), retriever.with_config(BOB)):
        vote: Runnable[str, Any] = RunnableLambda(bobs.thumbs_up)
        assert vote.invoke("images", CAROL).user_id == "bob"
    assert world.store.list_by_state("carol") == []


def test_a_bound_filter_holds_for_a_call_with_provenance() -> None:
    """What was bound for the source reaches it by every kind of call."""
    retriever = World().retriever(global_retriever=shelf(k=6))
    bound = retriever.bind(filter=is_even).for_user("bob")
    for found in (bound.invoke(POD_QUESTION), bound.invoke_with_provenance(POD_QUESTION).documents):
        assert set(doc_ids(found)) == {"pods-0", "pods-2", "pods-4"}


def test_a_run_that_names_none_names_nobody() -> None:
    """`None` in a configuration, of somebody not logged in, say, is not the user whom the retriever was made for."""
    world, retriever = alices_world()
    nobody: Any = {"configurable": {"user_id": None}}
    act: Runnable[str, Any] = RunnableLambda(retriever.thumbs_up)
    for attempt in (
        lambda: retriever.invoke(POD_QUESTION, nobody),
        lambda: chained(retriever).invoke(POD_QUESTION, nobody),
        lambda: retriever.batch([POD_QUESTION] * 2, nobody),
        lambda: retriever.with_config(nobody).invoke(POD_QUESTION),
        lambda: retriever.with_config(nobody).thumbs_up("pods"),
        lambda: act.invoke("pods", nobody),
    ):
        with pytest.raises(InvalidUserError, match="no user is named"):
            attempt()
    assert world.record("pods", "alice").explicit_signal == 0.0
    assert retriever.with_config(nobody).invoke(POD_QUESTION, BOB)


def test_each_input_of_a_batch_has_its_own_user(world: PlacedWorld) -> None:
    """A batch with a configuration for each input counts, suggests and answers for each user alone."""
    alices = world.retriever("alice")
    world.save(alices, "pods", "Pods of bob.", user_id="bob")
    world.shows(document("images", "Images for everybody."))
    answers = alices.batch([POD_QUESTION] * 4, [BOB, CAROL, BOB, CAROL])
    assert [texts(cached(found)) for found in answers] == [["Pods of bob."], [], ["Pods of bob."], []]
    assert {user: world.record("images", user).fetch_count for user in ("bob", "carol")} == {"bob": 2, "carol": 2}
    assert world.store.list_by_state("alice") == []


@pytest.mark.parametrize("user", ["", "  ", 7, b"bob", ["bob"], False])
def test_a_user_who_is_nobody_stops_the_call(user: Any) -> None:
    """A call that names nobody in the place of a user fails before the source is asked, and is never alice's."""
    world, retriever = alices_world()
    asked = list(world.source.calls)
    for call in (
        lambda: retriever.invoke(POD_QUESTION, user_id=user),
        lambda: retriever.invoke(POD_QUESTION, {"configurable": {"user_id": user}}),
        lambda: chained(retriever).invoke(POD_QUESTION, {"configurable": {"user_id": user}}),
        lambda: retriever.batch([POD_QUESTION], {"configurable": {"user_id": user}}),
    ):
        with pytest.raises(InvalidUserError):
            call()
    assert (world.source.calls, [record.doc_id for record in world.store.list_by_state("alice")]) == (asked, ["pods"])


def test_a_misspelt_user_is_not_the_retrievers_own() -> None:
    """A keyword that only looks like the user's fails the call, instead of running it for the retriever's own user."""
    world, retriever = alices_world()
    asked = list(world.source.calls)
    for name in ("user", "userid", "user_ID", "tenant"):
        misspelt: dict[str, Any] = {name: "bob"}
        for call in (retriever.invoke, retriever.invoke_with_provenance):
            with pytest.raises(UnexpectedArgumentError, match=name):
                call(POD_QUESTION, **misspelt)
    assert (world.source.calls, world.record("pods", "alice").fetch_count) == (asked, 1)


@pytest.mark.parametrize("name", ["user", "userid", "userId", "user_ID", "username", "uid"])
def test_a_misspelt_user_fails_where_the_source_would_take_it_too(name: str) -> None:
    """A vector store takes any keyword and ignores most: one that means the user fails all the same."""
    retriever = RagWikiRetriever(shelf(), user_id="ada")
    with pytest.raises(UnexpectedArgumentError, match="it is user_id that names the user"):
        retriever.invoke(POD_QUESTION, None, **{name: "bob"})
    assert retriever.documents() == []


# -- what is meant for the source


def shelf(k: int = 4) -> VectorStoreRetriever:
    """A vector store with six documents, of which four are found."""
    store = InMemoryVectorStore(topics())
    store.add_documents([document(f"pods-{number}", f"Pods {number}", even=not number % 2) for number in range(6)])
    return store.as_retriever(search_kwargs={"k": k})


def is_even(found: Document) -> bool:
    """What is asked of the source by a filter."""
    return bool(found.metadata["even"])


class Deaf(BaseRetriever):
    """Takes nothing at call time."""

    def _get_relevant_documents(self, query: str, *, run_manager: CallbackManagerForRetrieverRun) -> list[Document]:
        return [document("pods", f"Pods {number}", even=not number % 2) for number in range(4)]


def keep(documents: list[Document]) -> list[Document]:
    """A step after a retriever."""
    return documents


def after_a_step(source: Source) -> Source:
    """A source that something goes before."""
    first: RunnablePassthrough[str] = RunnablePassthrough()
    return first | source


WRAPPED: dict[str, Callable[[Source], Source]] = {
    "bare": lambda source: source,
    "with_config": lambda source: source.with_config(tags=["source"]),
    "with_retry": lambda source: source.with_retry(),
    "bound twice": lambda source: source.with_retry().with_config(tags=["source"]),
    "before a step": lambda source: source | RunnableLambda(keep),
    "after a step": after_a_step,
    "with_fallbacks": lambda source: source.with_fallbacks([source]),
    "configurable": lambda source: source.configurable_alternatives(ConfigurableField(id="which"), other=source),  # type: ignore[attr-defined]  # every serializable has it
}


def said_or_raised(call: Callable[[], list[Document]], wanted: Callable[[list[Document]], bool]) -> bool:
    """Whether an argument had its effect, or the call failed for it."""
    try:
        return wanted(call())
    except TypeError:
        return True


@pytest.mark.parametrize("way", WRAPPED)
def test_search_arguments_reach_the_source_or_raise(way: str) -> None:
    """`search_kwargs`, and single ones, have their effect on a vector store however it is wrapped; or they raise."""
    retriever = World().retriever(global_retriever=WRAPPED[way](shelf()))
    assert len(retriever.invoke(POD_QUESTION)) == 4
    assert said_or_raised(lambda: retriever.invoke(POD_QUESTION, search_kwargs={"k": 2}), lambda found: len(found) == 2)
    assert said_or_raised(
        lambda: retriever.invoke(POD_QUESTION, filter=is_even),
        lambda found: all(map(is_even, found)) and len(found) > 2,
    )


@pytest.mark.parametrize("way", WRAPPED)
async def test_an_argument_that_the_source_drops_raises(way: str) -> None:
    """A source that takes nothing at call time is never handed something to ignore, in whatever it is wrapped."""
    world = World()
    retriever = world.retriever(global_retriever=WRAPPED[way](Deaf()))
    for arguments in ({"search_kwargs": {"k": 2}}, {"filter": is_even}):
        with pytest.raises(TypeError):
            retriever.invoke(POD_QUESTION, **arguments)
        with pytest.raises(TypeError):
            await retriever.ainvoke(POD_QUESTION, **arguments)
        with pytest.raises(TypeError):
            retriever.batch([POD_QUESTION], **arguments)
    assert world.store.list_by_state("ada") == []


class Reranking(BaseRetriever):
    """Asks another retriever, and tells it what it is told."""

    base_retriever: BaseRetriever

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, **kwargs: Any
    ) -> list[Document]:
        return self.base_retriever.invoke(query, **kwargs)[::-1]


def test_a_reranking_source_is_looked_through() -> None:
    """Arguments arrive behind a retriever that hands them on, or raise there."""
    retriever = World().retriever(global_retriever=Reranking(base_retriever=shelf()))
    assert len(retriever.invoke(POD_QUESTION, search_kwargs={"k": 2})) == 2
    with pytest.raises(UnexpectedArgumentError, match="Deaf"):
        World().retriever(global_retriever=Reranking(base_retriever=Deaf())).invoke(POD_QUESTION, k=1, filter=is_even)


def test_the_alternative_that_is_chosen_decides() -> None:
    """Arguments are for the alternative of this call: a vector store takes them, another one makes them an error."""
    source = shelf().configurable_alternatives(ConfigurableField(id="which"), deaf=lambda: Deaf())
    retriever = World().retriever(global_retriever=source.with_config(tags=["source"]))
    assert len(retriever.invoke(POD_QUESTION, search_kwargs={"k": 2})) == 2
    with pytest.raises(UnexpectedArgumentError, match="Deaf"):
        retriever.invoke(POD_QUESTION, {"configurable": {"which": "deaf"}}, search_kwargs={"k": 2})
    deaf = World().retriever(global_retriever=source.with_config(configurable={"which": "deaf"}))
    with pytest.raises(UnexpectedArgumentError, match="Deaf"):
        deaf.invoke(POD_QUESTION, filter=is_even)


def test_every_fallback_must_take_an_argument() -> None:
    """A filter is not lost when a source is away: whoever would answer instead takes it, or the call fails at once."""
    half = World().retriever(global_retriever=shelf().with_fallbacks([Deaf()]))
    with pytest.raises(UnexpectedArgumentError, match="Deaf"):
        half.invoke(POD_QUESTION, filter=is_even)
    mixed = World().retriever(global_retriever=shelf().with_fallbacks([Speaking()]))
    with pytest.raises(UnexpectedArgumentError, match="Speaking"):
        mixed.invoke(POD_QUESTION, search_kwargs={"k": 2})


class Speaking(BaseRetriever):
    """Takes a language, blocking as well as awaited."""

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, language: str = "en"
    ) -> list[Document]:
        return [document("pods", f"Pods in {language}")]

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun, language: str = "en"
    ) -> list[Document]:
        return [document("pods", f"Pods in {language}")]


class SpeakingOnce(BaseRetriever):
    """Takes a language, but not when it is awaited."""

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, language: str = "en"
    ) -> list[Document]:
        return [document("pods", f"Pods in {language}")]


async def test_arguments_of_its_own_reach_a_source_awaited_as_well() -> None:
    """What a source takes reaches it by every kind of call; one that does not take it awaited raises, and is told."""
    retriever = World().retriever(global_retriever=Speaking())
    answers = [
        retriever.invoke(POD_QUESTION, language="de"),
        await retriever.ainvoke(POD_QUESTION, language="de"),
        *retriever.batch([POD_QUESTION, POD_QUESTION], language="de"),
        *await retriever.abatch([POD_QUESTION], language="de"),
        *retriever.stream(POD_QUESTION, language="de"),
        retriever.invoke_with_provenance(POD_QUESTION, language="de").documents,
    ]
    assert [texts(found) for found in answers] == [["Pods in de"]] * 7
    once = World().retriever(global_retriever=SpeakingOnce())
    assert texts(once.invoke(POD_QUESTION, language="de")) == ["Pods in de"]
    with pytest.raises(TypeError, match="language"):
        await once.ainvoke(POD_QUESTION, language="de")


async def test_k_of_a_call_holds_for_every_kind_of_call() -> None:
    """`k` of a call caps what it returns, whether or not the retriever has one, and holds for no later call."""
    world = World()
    world.shows(*(document(f"pods-{number}", f"Pods {number}") for number in range(5)))
    retriever = world.retriever(k=4)
    counts = [
        len(retriever.invoke(POD_QUESTION, k=2)),
        len(await retriever.ainvoke(POD_QUESTION, k=2)),
        *map(len, retriever.batch([POD_QUESTION, "others"], k=2)),
        *map(len, await retriever.abatch([POD_QUESTION], k=2)),
        *map(len, retriever.stream(POD_QUESTION, k=2)),
        len(retriever.bind(k=2).invoke(POD_QUESTION)),
        len(chained(retriever.bind(k=2)).invoke(POD_QUESTION)),  # type: ignore[arg-type]  # a binding is a runnable too
    ]
    assert counts == [2] * 8
    assert len(retriever.invoke(POD_QUESTION)) == 4
    assert len(retriever.invoke(POD_QUESTION, k=9)) == 5


def test_a_copy_does_not_step_around_a_filter() -> None:
    """In a call with a filter a saved copy answers only for a document that the source found with it."""
    retriever = World().retriever(global_retriever=shelf(k=6))
    retriever.invoke(POD_QUESTION)
    retriever.accept_suggestion("pods-1", full_content="Pods 1")
    assert "pods-1" in doc_ids(cached(retriever.invoke(POD_QUESTION)))
    assert "pods-1" not in doc_ids(retriever.invoke(POD_QUESTION, filter=is_even))
    assert "pods-1" in doc_ids(cached(retriever.invoke(POD_QUESTION, filter=lambda found: not is_even(found))))


def test_one_user_and_k_for_each_of_many_sources() -> None:
    """Our own retriever as the source of another one is told the user of the call, and not its `k`."""
    world, inner = alices_world()
    outer = World().retriever("zoe", global_retriever=inner)
    assert_counted_for_bob(world, outer.invoke(POD_QUESTION, BOB))
    assert isinstance(world.source, ListRetriever)
    world.shows(document("images", "Images for everybody."), document("more", "More for everybody."))
    assert len(outer.invoke(POD_QUESTION, BOB, k=1)) == 1
    assert world.record("more", "bob").fetch_count == 1
