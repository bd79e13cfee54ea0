"""Agents of LangChain and LangGraph with our tools, driven by a scripted chat model; and the example that shows it."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from helpers import document
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.runnables import Runnable, RunnableConfig
from pydantic import SkipValidation
from scenarios import POD_QUESTION, PODS, World
from test_packaging import BLOCK_EXTRAS

from rag_wiki import DocumentState, InvalidUserError, MemoryStateStore, RagWikiRetriever

pytest.importorskip("langgraph", reason="needs langchain's agents")

from langchain.agents import create_agent
from langchain.agents.middleware import HumanInTheLoopMiddleware
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.runtime import get_runtime
from langgraph.types import Command

ROOT = Path(__file__).parent.parent
BOTH = pytest.mark.parametrize("awaiting", [False, True], ids=["sync", "async"])
Script: TypeAlias = Callable[[Sequence[BaseMessage]], AIMessage]


class ScriptedModel(BaseChatModel):
    """A chat model that says what a function of the conversation says, and keeps what it was shown."""

    script: SkipValidation[Script]
    shown: SkipValidation[list[str]]

    @property
    def _llm_type(self) -> str:
        return "scripted"

    def bind_tools(self, tools: Sequence[Any], **kwargs: Any) -> Runnable[Any, AIMessage]:
        return self

    def _generate(self, messages: list[BaseMessage], *args: Any, **kwargs: Any) -> ChatResult:
        self.shown.append(str(messages[-1].content))
        return ChatResult(generations=[ChatGeneration(message=self.script(messages))])


def call(name: str, **arguments: Any) -> AIMessage:
    """A message that calls a tool."""
    return AIMessage("", tool_calls=[{"name": name, "args": arguments, "id": f"call {name}", "type": "tool_call"}])


def obey(messages: Sequence[BaseMessage]) -> AIMessage:
    """Do what the user says: `tool {"argument": ...}` calls it; then repeat what it gave. Anything else is searched."""
    last = messages[-1]
    if isinstance(last, ToolMessage):
        return AIMessage(f"done: {last.content}")
    name, _, arguments = str(last.content).partition(" ")
    if arguments.startswith("{"):
        return call(name, **json.loads(arguments))
    return call("search_documents", query=str(last.content))


def agent_of(retriever: RagWikiRetriever, **options: Any) -> tuple[Any, ScriptedModel]:
    """An agent with all tools, and its model."""
    model = ScriptedModel(script=obey, shown=[])
    tools = retriever.as_tools(options.pop("user_id", None))
    return create_agent(model, tools, **options), model


def of(user_id: str, thread_id: str | None = None) -> RunnableConfig:
    """The configuration of a user's run."""
    return {"configurable": {"user_id": user_id, "thread_id": thread_id or user_id}}


async def tell(agent: Any, awaiting: bool, said: str, config: RunnableConfig, **options: Any) -> ToolMessage:
    """Say something to the agent; what its tool answered."""
    asked = {"messages": [HumanMessage(said)]}
    state = await agent.ainvoke(asked, config, **options) if awaiting else agent.invoke(asked, config, **options)
    message = [message for message in state["messages"] if isinstance(message, ToolMessage)][-1]
    assert isinstance(message, ToolMessage)
    return message


@BOTH
async def test_the_agent_hears_a_suggestion_saves_and_answers_from_the_copy(awaiting: bool) -> None:
    """Search, search, search: a suggestion; the user says yes; then the artifact says that the saved copy answers."""
    world = World()
    world.shows(document("pods", PODS))
    agent, model = agent_of(world.retriever(None), checkpointer=InMemorySaver())
    for _ in range(2):
        heard = await tell(agent, awaiting, POD_QUESTION, of("bob"))
        assert "Suggestion" not in str(heard.content)
    heard = await tell(agent, awaiting, POD_QUESTION, of("bob"))
    assert 'Suggestion: "Pods" (doc_id "pods") has come up in 3 searches' in str(heard.content)
    assert heard.artifact["provenance"]["suggestion"]["doc_id"] == "pods"
    assert world.state("pods", "bob") is DocumentState.SUGGESTED
    saved = await tell(agent, awaiting, 'save_document {"doc_id": "pods"}', of("bob"))
    assert (saved.status, saved.artifact["document"]["user_state"]) == ("success", "CLAIMED")
    heard = await tell(agent, awaiting, POD_QUESTION, of("bob"))
    (source,) = heard.artifact["provenance"]["sources"]
    assert (source["from_cache"], source["user_state"], source["fetch_count"]) == (True, "CLAIMED", 4)
    assert heard.artifact["documents"][0]["page_content"] == PODS
    assert "the user's saved copy" in model.shown[-1]
    assert world.store.get("ada", "pods") is None


def of_many(number: int) -> tuple[str, str]:
    """A user and a thread of their own."""
    return ("ada" if number % 2 else "bob"), f"thread {number}"


@BOTH
async def test_users_of_one_graph_at_the_same_time_do_not_mix(awaiting: bool) -> None:
    """Forty runs of two users at once: each is answered from the memory of its own user."""
    world = World()
    retriever = world.retriever(None)
    world.save(retriever, "pods", "Pods of Ada.", user_id="ada")
    world.save(retriever, "images", "Pods of Bob.", user_id="bob")
    agent, _ = agent_of(retriever, checkpointer=InMemorySaver())

    async def asked(number: int) -> ToolMessage:
        return await tell(agent, True, POD_QUESTION, of(*of_many(number)))

    if awaiting:
        heard = await asyncio.gather(*(asked(number) for number in range(40)))
    else:

        def ask(number: int) -> ToolMessage:
            state = agent.invoke({"messages": [HumanMessage(POD_QUESTION)]}, of(*of_many(number)))
            found: ToolMessage = state["messages"][-2]
            return found

        with ThreadPoolExecutor(8) as pool:
            heard = list(pool.map(ask, range(40)))
    for number, message in enumerate(heard):
        user, doc_id = ("ada", "pods") if number % 2 else ("bob", "images")
        assert message.artifact["provenance"]["user_id"] == user
        assert [source["doc_id"] for source in message.artifact["provenance"]["sources"]] == [doc_id]
    assert {world.record("pods", "ada").fetch_count, world.record("images", "bob").fetch_count} == {21}


@BOTH
async def test_a_run_that_names_nobody_is_an_error_of_the_application(awaiting: bool) -> None:
    """Without a user the run ends with `InvalidUserError`; nothing is asked, and the model is told nothing of it."""
    world = World()
    world.shows(document("pods", PODS))
    agent, model = agent_of(world.retriever(None))
    with pytest.raises(InvalidUserError, match="no user is named"):
        await tell(agent, awaiting, POD_QUESTION, {})
    assert world.source.calls == []
    assert model.shown == [POD_QUESTION]


@BOTH
async def test_a_model_can_name_no_other_user(awaiting: bool) -> None:
    """A `user_id`, `config` or `callbacks` that a model makes up among the arguments changes nothing."""
    world = World()
    retriever = world.retriever(None)
    world.save(retriever, "pods", PODS, user_id="ada")
    agent, _ = agent_of(retriever)
    named: dict[str, Any] = {"user_id": "ada", "config": of("ada"), "callbacks": [], "run_manager": None}
    for name in ("search_documents", "list_documents", "remove_document"):
        arguments = json.dumps({**named, "query": POD_QUESTION, "doc_id": "pods"})
        heard = await tell(agent, awaiting, f"{name} {arguments}", of("bob"))
        assert PODS not in str(heard.content)
        assert "Pods" not in str(heard.content)
    assert world.state("pods", "ada") is DocumentState.CLAIMED


@BOTH
async def test_what_a_model_can_mend_it_is_told_and_the_run_goes_on(awaiting: bool) -> None:
    """An unknown id, or arguments of the wrong kind, come back as a tool message with status `error`."""
    agent, model = agent_of(World().retriever(None))
    for said, told in (
        ('save_document {"doc_id": "nothing"}', 'Nothing is known of a document with the doc_id "nothing"'),
        ('vote_document {"doc_id": "nothing", "vote": "sideways"}', "'up' or 'down'"),
    ):
        heard = await tell(agent, awaiting, said, of("bob"))
        assert heard.status == "error"
        assert told in str(heard.content)
        assert told in model.shown[-1]


class FailingStore(MemoryStateStore):
    """A store that is away when told."""

    away = False

    def get(self, user_id: str, doc_id: str) -> Any:
        if self.away:
            message = "the store is away"
            raise ConnectionError(message)
        return super().get(user_id, doc_id)


@BOTH
async def test_a_store_that_is_away_is_raised(awaiting: bool) -> None:
    """What no model can mend ends the run with the store's own error."""
    store = FailingStore()
    agent, _ = agent_of(World(store).retriever(None))
    store.away = True
    with pytest.raises(ConnectionError, match="the store is away"):
        await tell(agent, awaiting, 'save_document {"doc_id": "pods"}', of("bob"))


@BOTH
async def test_a_checkpointer_keeps_the_artifacts(awaiting: bool) -> None:
    """What the checkpointer gives back, whatever the documents' metadata hold, is equal, and plain JSON."""
    world = World()
    odd = {"at": datetime(2026, 1, 1, tzinfo=timezone.utc), "what": object(), "tags": {"b", "a"}, "path": Path("x.md")}
    world.shows(document("pods", PODS, **odd))
    agent, _ = agent_of(world.retriever(None), checkpointer=InMemorySaver())
    heard = await tell(agent, awaiting, POD_QUESTION, of("bob", "a thread"))
    state = await agent.aget_state(of("bob", "a thread")) if awaiting else agent.get_state(of("bob", "a thread"))
    (kept,) = [message for message in state.values["messages"] if isinstance(message, ToolMessage)]
    assert kept == heard
    assert json.loads(json.dumps(kept.artifact, allow_nan=False)) == kept.artifact
    metadata = kept.artifact["documents"][0]["metadata"]
    assert (metadata["at"], metadata["tags"], metadata["path"]) == ("2026-01-01T00:00:00+00:00", ["a", "b"], "x.md")


async def test_every_way_of_streaming_shows_the_artifact() -> None:
    """`updates`, `values` and `messages`, plain and awaited, carry the tool's message with the provenance."""
    world = World()
    world.shows(document("pods", PODS))
    agent, _ = agent_of(world.retriever(None))
    asked = {"messages": [HumanMessage(POD_QUESTION)]}
    for awaiting in (False, True):
        for mode in ("updates", "values", "messages"):
            if awaiting:
                parts = [part async for part in agent.astream(asked, of("bob"), stream_mode=mode)]
            else:
                parts = list(agent.stream(asked, of("bob"), stream_mode=mode))
            found = [message for part in parts for message in messages_in(part) if isinstance(message, ToolMessage)]
            assert found, mode
            assert {message.artifact["provenance"]["user_id"] for message in found} == {"bob"}


def messages_in(part: Any) -> list[Any]:
    """The messages in what a stream gives, whichever mode it has."""
    if isinstance(part, tuple):
        return [part[0]]
    if "messages" in part:
        return list(part["messages"])
    return [message for update in part.values() for message in update["messages"]]


async def test_streamed_events_of_an_agent_tell_the_provenance() -> None:
    """`astream_events` shows one event per search, below the tool's run, with the user and the provenance."""
    world = World()
    world.shows(document("pods", PODS))
    agent, _ = agent_of(world.retriever(None))
    asked = {"messages": [HumanMessage(POD_QUESTION)]}
    events = [event async for event in agent.astream_events(asked, of("bob"), version="v2")]
    (told,) = [event for event in events if event["event"] == "on_custom_event"]
    assert (told["name"], told["data"]["user_id"]) == ("rag_wiki_provenance", "bob")
    assert told["data"]["sources"][0]["doc_id"] == "pods"
    started = {event["name"]: event for event in events if event["event"].endswith("_start")}
    assert told["run_id"] == started["RagWikiRetriever"]["run_id"]
    tool_run = started["search_documents"]["run_id"]
    assert started["RagWikiRetriever"]["parent_ids"][-1] == tool_run
    assert started["ListRetriever"]["parent_ids"][-2:] == [tool_run, started["RagWikiRetriever"]["run_id"]]
    assert started["RagWikiRetriever"]["metadata"]["user_id"] == "bob"


@pytest.mark.parametrize(
    "awaiting",
    [
        False,
        pytest.param(
            True,
            marks=pytest.mark.skipif(
                sys.version_info < (3, 11), reason="LangGraph interrupts no awaited run before Python 3.11"
            ),
        ),
    ],
    ids=["sync", "async"],
)
async def test_a_person_confirms_a_removal(awaiting: bool) -> None:
    """With LangChain's middleware nothing is removed until a person approves, and never when they reject."""
    world = World()
    retriever = world.retriever(None)
    world.save(retriever, "pods", PODS, user_id="bob")
    agent, _ = agent_of(
        retriever,
        checkpointer=InMemorySaver(),
        middleware=[HumanInTheLoopMiddleware(interrupt_on={"remove_document": True})],
    )
    asked: Any = {"messages": [HumanMessage('remove_document {"doc_id": "pods"}')]}
    answer: Any
    for decision, thread, after in (("reject", "1", DocumentState.CLAIMED), ("approve", "2", DocumentState.DEMOTED)):
        answer = Command(resume={"decisions": [{"type": decision}]})
        for given in (asked, answer):
            assert world.state("pods", "bob") is DocumentState.CLAIMED
            config = of("bob", thread)
            state = await agent.ainvoke(given, config) if awaiting else agent.invoke(given, config)
            assert ("__interrupt__" in state) is (given is asked)
        assert world.state("pods", "bob") is after


@dataclass
class Context:
    """What an application says of a run in LangGraph's context."""

    user: str


@BOTH
async def test_the_user_can_be_in_the_context(awaiting: bool) -> None:
    """A function finds the user in LangGraph's context, whoever the configuration or the retriever names."""
    world = World()
    retriever = world.retriever("ada")
    world.save(retriever, "pods", PODS, user_id="carol")
    agent, _ = agent_of(retriever, user_id=lambda config: get_runtime(Context).context.user, context_schema=Context)
    heard = await tell(agent, awaiting, POD_QUESTION, of("bob"), context=Context("carol"))
    assert heard.artifact["provenance"]["user_id"] == "carol"
    assert heard.artifact["provenance"]["sources"][0]["from_cache"]


@BOTH
async def test_nothing_depends_on_the_context_of_a_task(awaiting: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where an awaited tool does not find its configuration in the context (Python 3.10), user and runs are right."""
    import langchain_core.tools.base as tools_base

    async def as_before_python_3_11(coroutine: Any, context: Any, *, create_task: bool = False) -> Any:
        return await coroutine

    monkeypatch.setattr(tools_base, "coro_with_context", as_before_python_3_11)
    world = World()
    world.shows(document("pods", PODS))
    for name in ("search_documents", "save_document", "pin_document", "vote_document", "list_documents"):
        (tool,) = world.retriever("ada").as_tools(include=[name])
        arguments = {"query": POD_QUESTION, "doc_id": "pods", "vote": "up"}
        config = of("bob")
        _ = await tool.ainvoke(arguments, config) if awaiting else tool.invoke(arguments, config)
    record = world.record("pods", "bob")
    assert (record.user_state, record.pinned_by_user, record.explicit_signal) == (DocumentState.PINNED, True, 1.0)
    assert world.store.get("ada", "pods") is None


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_the_example_tells_its_story(encoding: str) -> None:
    """The example runs without a key or an extra, on any console, and shows calls, answers and sources of two users."""
    path = ROOT / "examples" / "langgraph_agent.py"
    program = f"import runpy, sys; sys.argv = ['x']; sys.path.insert(0, {str(path.parent)!r})\n"
    program += f"runpy.run_path({str(path)!r}, run_name='__main__')"
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", BLOCK_EXTRAS + program],
        capture_output=True,
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONIOENCODING": encoding,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        },
        timeout=300,
        check=False,
    )
    assert ended.stderr.decode() == ""
    assert ended.returncode == 0
    printed = ended.stdout.decode(encoding)
    assert printed.startswith("A stand-in of a few rules plays the language model; --model")
    told = printed.split("\n\n")[1:]
    assert [part.partition(":")[0] for part in told] == ["Ada"] * 5 + ["Bob", "Ada", "Bob"]
    assert "-> search_documents(query='How do I make a Docker image smaller?')" in told[0]
    assert "Docker Image Guide, from the shared collection" in told[0]
    assert "suggestion: save 'Docker Image Guide'" in told[2]
    assert told[2].endswith("Shall I save it for you?")
    assert "-> save_document(doc_id='docker/image-guide.md')" in told[3]
    assert "Docker Image Guide, from the saved copy" in told[4]
    assert "Docker Image Guide, from the shared collection" in told[5]
    assert '"Docker Image Guide" (doc_id "docker/image-guide.md"): saved' in told[6]
    assert told[7].rstrip().endswith("Agent: The user has no saved documents.")
