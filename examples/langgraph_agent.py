"""An agent with a memory of each of its users: LangChain's `create_agent`, one graph, two users.

    python examples/langgraph_agent.py                            a stand-in for the language model: no key, no network
    python examples/langgraph_agent.py --model openai:gpt-5-mini  any model that `init_chat_model` knows

Ada asks about Docker images until saving the guide is suggested, and says yes. From then on her own copy answers her.
Bob asks the same agent the same question; he has saved nothing. Who asks is said in the configuration of each run.

Needs: pip install langchain 'langchain-rag-wiki[local]', and the package of your model's provider
"""

from __future__ import annotations

import argparse
import io
import json
import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.runnables import Runnable, RunnableConfig

from rag_wiki import RagWikiRetriever

if TYPE_CHECKING:
    from examples.corpus import open_collection
else:  # a script finds its neighbours by their bare names
    from corpus import open_collection

try:
    from langchain.agents import create_agent
    from langchain.chat_models import init_chat_model
    from langgraph.checkpoint.memory import InMemorySaver
except ImportError as missing:
    print(f"This example needs LangChain's agents: pip install langchain ({missing.name} is not installed).")
    raise SystemExit(0) from None

PROMPT = """You answer questions about Docker and Git from the user's documents.
Search before you answer, keep it to a few sentences, and name the titles that you used. When a search comes with a
suggestion to save a document, end your answer by asking whether you should."""

CONVERSATION = (
    ("ada", "How do I make a Docker image smaller?"),
    ("ada", "How should I order a Dockerfile to use the build cache?"),
    ("ada", "How do I pass a secret to docker build?"),
    ("ada", "Yes, please save the guide."),
    ("ada", "How do I make a Docker image smaller?"),
    ("bob", "How do I make a Docker image smaller?"),
    ("ada", "Which documents have I saved?"),
    ("bob", "Which documents have I saved?"),
)


def main() -> None:
    """Let two users talk to one agent."""
    parser = argparse.ArgumentParser(description="An agent with a memory of each of its users.")
    parser.add_argument(
        "--model", help="a chat model, as init_chat_model takes it: openai:gpt-5-mini, ollama:qwen3 ..."
    )
    chosen = parser.parse_args().model
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # what a model says, every console can show somehow
    model = StandIn() if chosen is None else init_chat_model(chosen)
    if chosen is None:
        print("A stand-in of a few rules plays the language model; --model openai:gpt-5-mini (say) takes a real one.")
    agent = make_agent(model)
    for user_id, question in CONVERSATION:
        ask(agent, user_id, question)


def make_agent(model: BaseChatModel) -> Runnable[Any, Any]:
    """One agent for everybody. Its retriever has no user of its own: a run that names none is an error."""
    collection = open_collection("docker", "git")
    print(f"The documents are embedded with {collection.model}.")
    retriever = RagWikiRetriever(collection.retriever, config=collection.config)
    tools = retriever.as_tools(about="guides to Docker and Git")
    agent: Runnable[Any, Any] = create_agent(model, tools, system_prompt=PROMPT, checkpointer=InMemorySaver())
    return agent


def ask(agent: Runnable[Any, Any], user_id: str, question: str) -> None:
    """Ask as a user, and show what the agent did, what it said, and where that came from."""
    print(f"\n{user_id.title()}: {question}")
    # Your application sets both from who is logged in, never from what a user or a model writes.
    config: RunnableConfig = {"configurable": {"user_id": user_id, "thread_id": f"chat of {user_id}"}}
    messages = agent.invoke({"messages": [HumanMessage(question)]}, config)["messages"]
    for message in since_the_question(messages):
        if isinstance(message, ToolMessage):
            for line in sources(message):
                print(f"    {line}")
        elif isinstance(message, AIMessage):
            for call in message.tool_calls:
                print(f"  -> {call['name']}({', '.join(f'{name}={value!r}' for name, value in call['args'].items())})")
            if message.text:
                print(f"Agent: {message.text}")


def since_the_question(messages: Sequence[BaseMessage]) -> Sequence[BaseMessage]:
    """What came after the last thing that the user said: the checkpointer keeps the conversation before it too."""
    last = max(at for at, message in enumerate(messages) if isinstance(message, HumanMessage))
    return messages[last + 1 :]


def sources(message: ToolMessage) -> list[str]:
    """Where a search found what it found, by the provenance in its artifact: what a page shows beside an answer."""
    if not isinstance(message.artifact, dict) or "provenance" not in message.artifact:
        return []
    provenance = message.artifact["provenance"]
    found = [
        f"{source['doc_title']}, from {'the saved copy' if source['from_cache'] else 'the shared collection'}"
        for source in provenance["sources"]
    ]
    return found + [f"suggestion: save {event['doc_title']!r}" for event in provenance["suggestions"]]


class StandIn(BaseChatModel):
    """Plays the language model by a few rules, so that the example runs anywhere. It sees what a real one would see."""

    @property
    def _llm_type(self) -> str:
        return "stand-in"

    def bind_tools(self, tools: Sequence[Any], **kwargs: Any) -> Runnable[Any, AIMessage]:  # noqa: ARG002 - a model's way
        """Its rules know the tools."""
        return self

    def _generate(self, messages: list[BaseMessage], *args: Any, **kwargs: Any) -> ChatResult:  # noqa: ARG002
        last, said = messages[-1], str(messages[-1].content)
        suggested = re.findall(r'^Suggestion: ".*" \(doc_id (".*")\)', _last_search(messages), re.MULTILINE)
        if isinstance(last, ToolMessage):
            answer = _quote(said) if last.name == "search_documents" else said
            offer = " Shall I save it for you?" if last.name == "search_documents" and suggested else ""
            reply = AIMessage(answer + offer)
        elif said.startswith("Yes") and suggested:
            reply = _call("save_document", doc_id=json.loads(suggested[0]))
        elif said.startswith("No") and suggested:
            reply = _call("decline_suggestion", doc_id=json.loads(suggested[0]))
        elif "have I saved" in said:
            reply = _call("list_documents", which="saved")
        else:
            reply = _call("search_documents", query=said)
        return ChatResult(generations=[ChatGeneration(message=reply)])


def _call(name: str, **arguments: str) -> AIMessage:
    return AIMessage("", tool_calls=[{"name": name, "args": arguments, "id": f"call of {name}", "type": "tool_call"}])


def _last_search(messages: Sequence[BaseMessage]) -> str:
    found = [message for message in messages if isinstance(message, ToolMessage) and message.name == "search_documents"]
    return str(found[-1].content) if found else ""


def _quote(found: str) -> str:
    """The first document that a search shows, and how it begins."""
    document = re.search(r'<document .*?title="([^"]*)".*?>\n(.*?)\n</document>', found, re.DOTALL)
    if document is None:
        return "I found nothing about that."
    return f'"{document[1]}" says: {" ".join(document[2].split())[:100]} ...'


if __name__ == "__main__":
    main()
