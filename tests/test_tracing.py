"""What LangSmith receives: nested runs, with the user and the provenance as metadata of ours."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from helpers import document
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.runnables import RunnableConfig, RunnableLambda
from langchain_core.tracers import LangChainTracer
from langchain_core.tracers.run_collector import RunCollectorCallbackHandler
from langsmith import Client
from scenarios import OTHER_QUESTION, POD_QUESTION, PODS, World, chained

TEXT = "Pods are weighed in umbrellas."
INFO = {
    "version": "1",
    "batch_ingest_config": {
        "use_multipart_endpoint": False,
        "scale_up_qsize_trigger": 1000,
        "scale_up_nthreads_limit": 1,
        "scale_down_nempty_trigger": 4,
        "size_limit": 100,
        "size_limit_bytes": 20_000_000,
    },
}
"""What the server says of itself: it takes plain JSON."""
BOTH = pytest.mark.parametrize("awaiting", [False, True], ids=["sync", "async"])


class LangSmith:
    """A server on this machine that takes what LangSmith's client sends, and keeps it."""

    def __init__(self) -> None:
        self.runs: dict[str, dict[str, Any]] = {}
        """By id, each as it is when all that was sent about it is put together."""
        self._lock = threading.Lock()
        kept = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer(INFO)

            def do_POST(self) -> None:
                kept.keep(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self._answer({})

            def _answer(self, body: Any) -> None:
                written = json.dumps(body).encode()
                self.send_response(202)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(written)))
                self.end_headers()
                self.wfile.write(written)

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.client = Client(
            f"http://127.0.0.1:{self._server.server_address[1]}", api_key="none", auto_batch_tracing=True
        )

    def keep(self, sent: dict[str, list[dict[str, Any]]]) -> None:
        """Put what was sent to what is known."""
        with self._lock:
            for run in (*sent.get("post", []), *sent.get("patch", [])):
                known = self.runs.setdefault(run["id"], {})
                known.update({name: value for name, value in run.items() if value is not None})

    def received(self) -> list[dict[str, Any]]:
        """All runs, in the order of their starts, when everything has arrived."""
        self.client.flush(timeout=30)
        return sorted(self.runs.values(), key=lambda run: str(run["dotted_order"]))

    def named(self, name: str) -> dict[str, Any]:
        """The one run of this name."""
        (found,) = [run for run in self.received() if run["name"] == name]
        return found

    def close(self) -> None:
        """End the client's thread and the server."""
        self.client.cleanup()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def langsmith(monkeypatch: pytest.MonkeyPatch) -> Iterator[LangSmith]:
    """LangSmith on this machine."""
    for name in ("LANGSMITH_TRACING", "LANGCHAIN_TRACING_V2", "LANGSMITH_ENDPOINT", "LANGSMITH_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    server = LangSmith()
    yield server
    server.close()


def traced(langsmith: LangSmith, **configurable: Any) -> RunnableConfig:
    """A configuration that traces to it."""
    return {"callbacks": [LangChainTracer(client=langsmith.client)], "configurable": configurable}


def metadata(run: dict[str, Any]) -> dict[str, Any]:
    """The metadata of a run."""
    found: dict[str, Any] = run["extra"]["metadata"]
    return found


async def carry_out(runnable: Any, awaiting: bool, argument: Any, config: RunnableConfig) -> Any:
    """A call, plain or awaited."""
    return await runnable.ainvoke(argument, config) if awaiting else runnable.invoke(argument, config)


@BOTH
async def test_langsmith_gets_nested_runs_with_user_and_provenance(langsmith: LangSmith, awaiting: bool) -> None:
    """Chain, tool, our retriever and the wrapped one are nested in this order; ours has user and provenance."""
    world = World()
    world.shows(document("pods", PODS))
    search = world.retriever(None).as_tools(include=["search_documents"])[0]

    def ask(question: str, config: RunnableConfig) -> Any:
        return search.invoke({"name": search.name, "args": {"query": question}, "id": "1", "type": "tool_call"}, config)

    async def aask(question: str, config: RunnableConfig) -> Any:
        asked = {"name": search.name, "args": {"query": question}, "id": "1", "type": "tool_call"}
        return await search.ainvoke(asked, config)

    agent = RunnableLambda(ask, aask).with_config(run_name="agent")
    message = await carry_out(agent, awaiting, POD_QUESTION, traced(langsmith, user_id="bob"))
    runs = langsmith.received()
    assert [(run["name"], run["run_type"]) for run in runs] == [
        ("agent", "chain"),
        ("search_documents", "tool"),
        ("RagWikiRetriever", "retriever"),
        ("ListRetriever", "retriever"),
    ]
    assert [run.get("parent_run_id") for run in runs] == [None, *(run["id"] for run in runs[:-1])]
    assert {run["trace_id"] for run in runs} == {runs[0]["id"]}
    ours = runs[2]
    assert [metadata(run)["user_id"] for run in runs] == ["bob"] * 4
    assert metadata(ours)["rag_wiki_provenance"] == message.artifact["provenance"]
    assert metadata(ours)["rag_wiki_provenance"]["sources"][0]["doc_id"] == "pods"
    assert ours["outputs"]["documents"][0]["metadata"]["doc_id"] == "pods"


@BOTH
async def test_provenance_is_that_of_the_run(langsmith: LangSmith, awaiting: bool) -> None:
    """Of four questions, each run has its own provenance: fetches count up, then the copy answers."""
    world = World()
    world.shows(document("pods", PODS))
    retriever = world.retriever(None)
    for _ in range(3):
        await carry_out(retriever, awaiting, POD_QUESTION, traced(langsmith, user_id="bob"))
    retriever.accept_suggestion("pods", user_id="bob")
    await carry_out(retriever, awaiting, POD_QUESTION, traced(langsmith, user_id="bob"))
    told = [metadata(run)["rag_wiki_provenance"] for run in langsmith.received() if run["name"] == "RagWikiRetriever"]
    assert [(kept["sources"][0]["fetch_count"], kept["sources"][0]["from_cache"]) for kept in told] == [
        (1, False),
        (2, False),
        (3, False),
        (4, True),
    ]
    assert [kept["suggestion"] and kept["suggestion"]["doc_id"] for kept in told] == [None, None, "pods", None]


@BOTH
async def test_the_wrapped_run_has_the_user_and_not_the_provenance(langsmith: LangSmith, awaiting: bool) -> None:
    """The user is in the metadata of both runs, of the retriever's own user too; provenance is only in ours."""
    world = World()
    world.shows(document("pods", PODS))
    await carry_out(chained(world.retriever("ada")), awaiting, POD_QUESTION, traced(langsmith))
    ours, wrapped = metadata(langsmith.named("RagWikiRetriever")), metadata(langsmith.named("ListRetriever"))
    assert (ours["user_id"], wrapped["user_id"]) == ("ada", "ada")
    assert "rag_wiki_provenance" in ours
    assert "rag_wiki_provenance" not in wrapped


@BOTH
async def test_what_the_caller_calls_the_user_stands(langsmith: LangSmith, awaiting: bool) -> None:
    """A `user_id` in the caller's own metadata is not overwritten; the provenance says whose memory it was."""
    world = World()
    config: RunnableConfig = {**traced(langsmith), "metadata": {"user_id": "account 7", "team": "blue"}}
    await carry_out(world.retriever("ada"), awaiting, POD_QUESTION, config)
    kept = metadata(langsmith.named("RagWikiRetriever"))
    assert (kept["user_id"], kept["team"], kept["rag_wiki_provenance"]["user_id"]) == ("account 7", "blue", "ada")
    assert config["metadata"] == {"user_id": "account 7", "team": "blue"}


@BOTH
async def test_an_error_is_traced_with_the_user(langsmith: LangSmith, awaiting: bool) -> None:
    """When the wrapped retriever fails, our run has its error and the user, and no provenance."""
    world = World()
    world.source.fail_with(ConnectionError("the vector store is away"))
    with pytest.raises(ConnectionError):
        await carry_out(world.retriever("ada"), awaiting, POD_QUESTION, traced(langsmith))
    ours = langsmith.named("RagWikiRetriever")
    assert "the vector store is away" in ours["error"]
    assert metadata(ours)["user_id"] == "ada"
    assert "rag_wiki_provenance" not in metadata(ours)


async def test_metadata_holds_no_text_of_a_document(langsmith: LangSmith) -> None:
    """Saved or not, withheld as stale or served: no word of a document's text is in the metadata of any run."""
    world = World()
    retriever = world.retriever("ada")
    world.save(retriever, "pods", TEXT)
    config = traced(langsmith)
    retriever.invoke(POD_QUESTION, config)
    world.shows(document("pods", "Pods are weighed in other umbrellas."))
    retriever.invoke(POD_QUESTION, config)
    retriever.invoke(OTHER_QUESTION, config)
    runs = langsmith.received()
    assert any("umbrellas" in json.dumps(run["outputs"]) for run in runs)
    assert [name for run in runs for name in [run["name"]] if "umbrellas" in json.dumps(run["extra"])] == []
    assert any(metadata(run).get("rag_wiki_provenance", {}).get("withheld") for run in runs)


def test_other_tracers_see_the_same() -> None:
    """Whatever is built on LangChain's tracer has the provenance in the run that it is handed at the end."""
    world, collector = World(), RunCollectorCallbackHandler()
    world.shows(document("pods", PODS))
    world.retriever("ada").invoke(POD_QUESTION, {"callbacks": [collector]})
    (root,) = collector.traced_runs
    assert root.extra["metadata"]["rag_wiki_provenance"]["sources"][0]["doc_id"] == "pods"
    assert [child.name for child in root.child_runs] == ["ListRetriever"]
    assert "rag_wiki_provenance" not in root.child_runs[0].extra["metadata"]


class Keeper(BaseCallbackHandler):
    """Keeps the metadata that it is handed, the very dictionaries."""

    def __init__(self) -> None:
        self.kept: list[dict[str, Any]] = []

    def on_retriever_start(self, *args: Any, metadata: dict[str, Any] | None = None, **kwargs: Any) -> None:
        self.kept.append(metadata or {})


def test_what_other_handlers_hold_stays_as_it_was() -> None:
    """The metadata that a plain handler was given at the start does not grow a provenance under its hands."""
    world, keeper = World(), Keeper()
    world.retriever("ada").invoke(POD_QUESTION, {"callbacks": [RunCollectorCallbackHandler(), keeper]})
    assert [held["user_id"] for held in keeper.kept] == ["ada", "ada"]
    assert [name for held in keeper.kept for name in held if name == "rag_wiki_provenance"] == []
