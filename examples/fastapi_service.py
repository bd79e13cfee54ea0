"""A web service in which each user has a memory of their own: FastAPI, several users, one retriever.

    python examples/fastapi_service.py --demo    starts it, lets two users talk to it, and stops
    python examples/fastapi_service.py           serves until Ctrl-C; http://127.0.0.1:8000/docs shows the endpoints

RAG_WIKI_STORE names where the memory is kept: sqlite:///./wiki/state.db, postgresql://user:password@host/database or
redis://host:6379/0. Without it, it is a temporary SQLite file, which goes when the service stops. Several workers
(`uvicorn fastapi_service:app --app-dir examples --workers 4`) share one store; name it then.

Needs: pip install fastapi uvicorn 'langchain-rag-wiki[sqlite,local]'
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import tempfile
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, contextmanager
from datetime import datetime
from functools import partial
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal
from urllib.error import HTTPError
from urllib.parse import quote
from urllib.request import Request as ClientRequest
from urllib.request import urlopen

from langchain_core.documents import Document

from rag_wiki import (
    ContentNotFoundError,
    DocumentRemovedError,
    DocumentState,
    ForgottenUser,
    InvalidDocumentError,
    InvalidTransitionError,
    InvalidUserError,
    ProvenanceBlock,
    RagWikiError,
    RagWikiRetriever,
    StateStore,
    UnknownDocumentError,
    UserDocRecord,
)
from rag_wiki.scheduler import DecayScheduler

if TYPE_CHECKING:
    from examples.corpus import Collection, open_collection
    from examples.stopping import running, stop_cleanly, unheard
else:  # a script finds its neighbours by their bare names
    from corpus import Collection, open_collection
    from stopping import running, stop_cleanly, unheard

try:
    import uvicorn
    from fastapi import APIRouter, Depends, FastAPI, Header, HTTPException, Request
    from fastapi.concurrency import run_in_threadpool
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import JSONResponse
    from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
    from starlette.convertors import Convertor, register_url_convertor
except ImportError as missing:
    print(f"This example needs FastAPI and uvicorn: pip install fastapi uvicorn ({missing.name} is not installed).")
    raise SystemExit(0) from None


# -- what the service holds while it runs ------------------------------------------------------------------------------


@asynccontextmanager
async def lifespan(_: FastAPI) -> AsyncIterator[dict[str, RagWikiRetriever]]:
    """Open the store, make the one retriever that serves all users, let the decay job run; close in reverse order.

    The retriever has no user: a request that forgot to name one is then an error, not somebody else's memory. Each
    worker may start the scheduler: those that share a store take turns.
    """
    with ExitStack() as closing:
        store = closing.enter_context(opened_store(os.environ.get("RAG_WIKI_STORE")))
        collection = your_collection()
        retriever = RagWikiRetriever(collection.retriever, state_store=store, config=collection.config)
        if collection.config.similarity_threshold == "auto":
            # Measured once for each model, and kept in the store: better now than during somebody's question.
            await retriever.acalibrate()
        closing.enter_context(DecayScheduler(retriever.decay_engine, store))
        yield {"retriever": retriever}


def your_collection() -> Collection:
    """The retriever that you have already, and the settings that fit it. Put yours here."""
    return open_collection("docker")


@contextmanager
def opened_store(url: str | None) -> Iterator[StateStore]:
    """The store that a URL names; it and what it uses are closed at the end."""
    with ExitStack() as closing:
        if url is None:
            folder = closing.enter_context(tempfile.TemporaryDirectory(prefix="rag_wiki-service-"))
            url = f"sqlite:///{Path(folder, 'state.db').as_posix()}"
        if url.startswith("sqlite"):
            from rag_wiki.storage.sqlite import SQLiteStateStore

            yield closing.enter_context(SQLiteStateStore(url))
        elif url.startswith(("redis://", "rediss://", "unix://")):
            import redis

            from rag_wiki.storage.redis_store import RedisStateStore

            client = redis.Redis.from_url(url)
            closing.callback(client.close)
            yield closing.enter_context(RedisStateStore(client))
        else:
            from rag_wiki.storage.sql import SQLStateStore

            yield closing.enter_context(SQLStateStore(url))


# -- what comes in and goes out ----------------------------------------------------------------------------------------


def sendable(text: str) -> str:
    """The text as JSON goes out: half a character, which some loaders leave, becomes the one that stands for such."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def sendable_parts(value: Any) -> Any:
    """A value in JSON types, all its texts `sendable`."""
    if isinstance(value, dict):
        return {name: sendable_parts(part) for name, part in value.items()}
    if isinstance(value, list):
        return [sendable_parts(part) for part in value]
    return sendable(value) if isinstance(value, str) else value


Text = Annotated[str, BeforeValidator(sendable)]


class Question(BaseModel):
    """What a user asks."""

    question: str = Field(min_length=1, max_length=4000, examples=["How do I make a Docker image smaller?"])
    k: int | None = Field(default=None, ge=1, le=50, description="Pieces in the answer at most.")


class Piece(BaseModel):
    """A piece of the answer: give these to your language model."""

    text: str
    doc_id: str | None = Field(description="`null` for a document that nothing identifies; it is not tracked.")
    doc_title: str
    from_cache: bool = Field(description="From the user's saved copy, and not from the shared collection.")


class Suggestion(BaseModel):
    """A document that keeps coming back: ask the user whether to save it, then call `save` or `decline`."""

    doc_id: str
    doc_title: str
    doc_path: str
    fetch_count: int


class Source(BaseModel):
    """A document that the answer used."""

    model_config = ConfigDict(extra="allow")  # what a later release adds goes through

    doc_id: str | None
    doc_title: str
    doc_path: str
    user_state: DocumentState
    fetch_count: int
    chunks_used: list[int]
    total_chunks: int | None
    from_cache: bool
    scores: list[float]
    stale: bool = Field(description="The saved copy differs from its source; `save` replaces it.")


class Provenance(BaseModel):
    """Where the answer came from."""

    model_config = ConfigDict(extra="allow")

    sources: list[Source]
    suggestions: list[Suggestion]
    mode: str = Field(description="How saved copies were searched: `semantic`, `keyword`, or `none`.")
    degraded: list[str] = Field(description="What could not be done, a sentence each; empty when all is well.")
    timings: dict[str, float] = Field(description="Milliseconds by stage.")


class Answer(BaseModel):
    """What `/ask` gives."""

    pieces: list[Piece]
    suggestions: list[Suggestion]
    provenance: Provenance


class SavedDocument(BaseModel):
    """What is known about a document for this user."""

    model_config = ConfigDict(from_attributes=True)

    doc_id: Text
    doc_title: Text
    doc_path: Text
    user_state: DocumentState
    fetch_count: int
    decay_score: float = Field(description="The score of the last decay run, from 0 to 1.")
    explicit_signal: float = Field(description="The user's last vote: 1, -1, or 0 for none.")
    chunk_count: int
    content_source: str | None
    last_fetched_at: datetime | None
    cached_at: datetime | None
    stale_since: datetime | None


class Content(BaseModel):
    """The text to save, where it shall not be the one that was found."""

    content: str | None = Field(default=None, max_length=1_000_000)


class Vote(BaseModel):
    """A thumb."""

    vote: Literal["up", "down"]


class Forgotten(BaseModel):
    """What was removed, counted."""

    model_config = ConfigDict(from_attributes=True)

    documents: int
    events: int
    retrieved_texts: int
    chunks: int
    files: int


class Health(BaseModel):
    """Whether the store answers, and when the decay job last began."""

    status: Literal["ok", "degraded"]
    decay_ran_at: datetime | None


class Problem(BaseModel):
    """What went wrong, and which error of rag_wiki says so."""

    error: str
    detail: str


# -- who asks, and what goes wrong -------------------------------------------------------------------------------------


def current_user(x_user: Annotated[str | None, Header(description="Who asks.")] = None) -> str:
    """Who asks.

    Anybody can send a header. Authentication is yours: return the id that your session or token proves, here.
    """
    if x_user is None or not x_user.strip():
        raise HTTPException(401, "Say who you are in the header X-User.")
    return x_user


def the_retriever(request: Request) -> RagWikiRetriever:
    """The retriever that `lifespan` made."""
    retriever: RagWikiRetriever = request.state.retriever
    return retriever


User = Annotated[str, Depends(current_user)]
Retriever = Annotated[RagWikiRetriever, Depends(the_retriever)]

STATUS: dict[type[RagWikiError], int] = {
    UnknownDocumentError: 404,  # this user never met the document
    InvalidTransitionError: 409,  # the document's state does not allow it: there is no pin to take away, say
    DocumentRemovedError: 409,  # removed while it was being saved
    ContentNotFoundError: 409,  # nothing to save: retrieve it again, or send the content
    InvalidDocumentError: 422,
    InvalidUserError: 422,
}
"""Errors that the one who asks can do something about. All others are the service's own: 500, and a line in the log."""


async def tell(_: Request, error: Exception) -> JSONResponse:
    """An error of rag_wiki's as JSON: its message says what happened and what to do."""
    status = next(STATUS[kind] for kind in type(error).__mro__ if kind in STATUS)
    return JSONResponse({"error": type(error).__name__, "detail": sendable(str(error))}, status)


async def tell_what_is_invalid(_: Request, error: RequestValidationError) -> JSONResponse:
    """What is wrong with a request, and where.

    FastAPI's own answer repeats the input, however long, and fails where JSON or UTF-8 has no words for it.
    """
    wrong = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()]
    return JSONResponse({"error": type(error).__name__, "detail": sendable("; ".join(wrong))}, 422)


class DocumentIdConvertor(Convertor[str]):
    """Any document id in a path: `path` allows slashes, this one line ends as well. Clients quote the id."""

    regex = "(?s:.+)"

    def convert(self, value: str) -> str:
        """The id as it is."""
        return value

    def to_string(self, value: str) -> str:
        """The id as it is."""
        return value


register_url_convertor("doc_id", DocumentIdConvertor())
app = FastAPI(title="Retrieval with a memory of its user", lifespan=lifespan)
for expected_error in STATUS:
    app.add_exception_handler(expected_error, tell)
app.add_exception_handler(RequestValidationError, tell_what_is_invalid)  # type: ignore[arg-type]  # it gets these only
INVALID: dict[int | str, dict[str, Any]] = {422: {"model": Problem}}
documents = APIRouter(
    prefix="/documents", tags=["documents"], responses={**INVALID, 404: {"model": Problem}, 409: {"model": Problem}}
)


# -- the endpoints -----------------------------------------------------------------------------------------------------


@app.post("/ask", tags=["questions"], response_model=Answer, responses=INVALID)
async def ask(body: Question, user: User, retriever: Retriever) -> dict[str, Any]:
    """Answer a question: the pieces for a language model, where they came from, and what to suggest to the user."""
    found, provenance = await retriever.ainvoke_with_provenance(body.question, user_id=user, k=body.k)
    told = provenance.to_dict()
    pieces = [describe_piece(piece, provenance, retriever) for piece in found]
    answer: dict[str, Any] = sendable_parts({"pieces": pieces, "suggestions": told["suggestions"], "provenance": told})
    return answer


def describe_piece(piece: Document, provenance: ProvenanceBlock, retriever: RagWikiRetriever) -> dict[str, Any]:
    """A piece, with the id that the endpoints below take."""
    doc_id = retriever.doc_id_of(piece)
    titles = {source.doc_id: source.doc_title for source in provenance.sources if source.doc_id is not None}
    # What is in the metadata is the source's own, of any type.
    own_title = str(piece.metadata.get("doc_title") or piece.metadata.get("title") or "")
    return {
        "text": piece.page_content,
        "doc_id": doc_id,
        "doc_title": titles.get(doc_id or "") or own_title,
        "from_cache": piece.metadata.get("from_cache") is True,
    }


@documents.get("", response_model=list[SavedDocument])
async def list_documents(user: User, retriever: Retriever, state: DocumentState | None = None) -> list[UserDocRecord]:
    """The user's documents, in one state or in all."""
    return await retriever.adocuments(state, user_id=user)


@documents.post("/{doc_id:doc_id}/save", response_model=SavedDocument)
async def save(doc_id: str, user: User, retriever: Retriever, body: Content | None = None) -> UserDocRecord:
    """Accept a suggestion; again, with other content or after the source changed, replaces the copy."""
    return await retriever.aaccept_suggestion(doc_id, body.content if body else None, user_id=user)


@documents.post("/{doc_id:doc_id}/decline", response_model=SavedDocument)
async def decline(doc_id: str, user: User, retriever: Retriever) -> UserDocRecord:
    """Decline a suggestion; the next one comes after twice as many fetches."""
    return await retriever.adecline_suggestion(doc_id, user_id=user)


@documents.post("/{doc_id:doc_id}/pin", response_model=SavedDocument)
async def pin(doc_id: str, user: User, retriever: Retriever) -> UserDocRecord:
    """Make a document part of every answer; saves it first if need be."""
    return await retriever.aforce_pin(doc_id, user_id=user)


@documents.post("/{doc_id:doc_id}/unpin", response_model=SavedDocument)
async def unpin(doc_id: str, user: User, retriever: Retriever) -> UserDocRecord:
    """Take a pin away; the document stays saved."""
    return await retriever.aunpin(doc_id, user_id=user)


@documents.post("/{doc_id:doc_id}/vote", response_model=SavedDocument)
async def vote(doc_id: str, body: Vote, user: User, retriever: Retriever) -> UserDocRecord:
    """Thumbs up or down; the last vote counts."""
    cast = retriever.athumbs_up if body.vote == "up" else retriever.athumbs_down
    return await cast(doc_id, user_id=user)


@documents.delete("/{doc_id:doc_id}", response_model=SavedDocument)
async def remove(doc_id: str, user: User, retriever: Retriever) -> UserDocRecord:
    """Remove a document from the user's knowledge base. Twice is no error."""
    return await retriever.aforce_remove(doc_id, user_id=user)


@app.delete("/me", tags=["users"], response_model=Forgotten, responses=INVALID)
async def forget_me(user: User, retriever: Retriever) -> ForgottenUser:
    """Remove every trace of the user."""
    return await retriever.aforget_user(user_id=user)


@app.get("/health", tags=["service"], response_model=Health, responses={503: {"model": Health}})
async def health(retriever: Retriever) -> Any:
    """Whether the store answers. While it does not, questions are still answered, without memory."""
    try:
        ran_at = await run_in_threadpool(retriever.state_store.job_time, "decay")
    except Exception:  # whatever the store's client raises, it is not there
        return JSONResponse({"status": "degraded", "decay_ran_at": None}, 503)
    return {"status": "ok", "decay_ran_at": ran_at}


app.include_router(documents)


# -- a demonstration; yours does without -------------------------------------------------------------------------------


class Client:
    """Somebody's browser."""

    def __init__(self, url: str, user: str) -> None:
        self._url, self._user = url, user

    def send(self, method: str, path: str, body: object = None) -> Any:
        """Send a request; what came back, also where that is an error."""
        request = ClientRequest(  # noqa: S310 - the http:// address of our own server
            self._url + path,
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"X-User": self._user, "Content-Type": "application/json"},
        )
        try:
            with urlopen(request, timeout=300) as response:  # noqa: S310 - the same
                return json.load(response)
        except HTTPError as error:
            with error:
                return {"status": error.code, **json.load(error)}

    def ask(self, question: str) -> Any:
        """Ask a question, and print where the answer came from."""
        answer = self.send("POST", "/ask", {"question": question})
        (source, *_) = answer["provenance"]["sources"]
        lines = [f"  {self._user} asks: {question}"]
        lines.append(f"    from {'the saved' if source['from_cache'] else 'the shared'} {source['doc_title']}")
        lines += [
            f"    suggestion for {self._user}: save {event['doc_title']}, it came back {event['fetch_count']} times"
            for event in answer["suggestions"]
        ]
        print("\n".join(lines), flush=True)
        return answer

    def act(self, method: str, doc_id: str, action: str = "", body: object = None) -> Any:
        """Do something to a document. Its id is quoted: it may hold slashes, question marks, anything."""
        path = f"/documents/{quote(doc_id, safe='')}{action}"
        done = self.send(method, path, body)
        outcome = done["user_state"] if "user_state" in done else f"{done['status']}: {done['detail']}"
        print(f"  {self._user}: {method} {path}\n    {outcome}")
        return done


def demonstrate() -> None:
    """Start the service on a free port, let Ada and Bob talk to it at the same time, and stop it."""
    stop_cleanly()
    with tempfile.TemporaryDirectory(prefix="rag_wiki-service-") as folder:
        # A store of yours is nothing to play with.
        os.environ["RAG_WIKI_STORE"] = f"sqlite:///{Path(folder, 'state.db').as_posix()}"
        # It listens before the service has started: requests wait until there is somebody to answer them.
        listening = socket.create_server(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        with running(partial(start_service, listening), stop_service) as service:
            print(f"The service starts at {url} and embeds its documents ...", flush=True)
            try:
                tell_story(Client(url, "ada"), Client(url, "bob"))
            except OSError as error:
                raise SystemExit(f"The service is not there ({error}); what it printed above says why.") from error
            except BaseException:
                service.kill()  # it may be embedding for long yet, and nothing that it has is to be kept
                raise
    print("\nThe service has stopped, and its temporary store is gone.")


def start_service(listening: socket.socket) -> SpawnProcess:
    """The service in a process of its own, which alone listens from then on."""
    service = SpawnProcess(target=serve, args=(listening,))
    with listening, unheard(signal.SIGINT):
        service.start()
    return service


def serve(listening: socket.socket) -> None:
    """What that process does."""
    uvicorn.Server(uvicorn.Config(app, log_level="warning", ws="none")).run(sockets=[listening])


def stop_service(service: SpawnProcess) -> None:
    """Let the service finish what it is at, and end."""
    service.terminate()
    service.join()


def tell_story(ada: Client, bob: Client) -> None:
    """What two users do."""
    image, network = "docker/image-guide.md", "docker/networking.md"
    print(f"It is there: {ada.send('GET', '/health')['status']}. Ada and Bob ask at the same time:")
    about_images = [
        "How do I make a Docker image smaller?",
        "How should I order a Dockerfile to use the build cache?",
        "How do I pass a secret to docker build?",
    ]
    about_networks = [
        "How do two containers talk to each other?",
        "Which port does my container publish?",
        "How does a container find another one by its name?",
    ]
    at_once = ThreadPoolExecutor()
    try:
        for asked in [
            at_once.submit(lambda: [ada.ask(question) for question in about_images]),
            at_once.submit(lambda: [bob.ask(question) for question in about_networks]),
        ]:
            asked.result()
    finally:
        at_once.shutdown(wait=False)  # who stops the story does not wait for answers

    print("\nAda accepts, Bob declines:")
    ada.act("POST", image, "/save")
    bob.act("POST", network, "/decline")
    ada.act("POST", image, "/vote", {"vote": "up"})

    print("\nThe same question from both. Ada's own copy answers her; what she saved is nothing to Bob:")
    ada.ask(about_images[0])
    bob.ask(about_images[0])

    print("\nWhat can't be done is said, with a status that a program understands:")
    bob.act("POST", "kubernetes/pod-basics.md", "/pin")
    ada.act("POST", image, "/unpin")

    print("\nAda's documents:")
    for document in ada.send("GET", "/documents"):
        print(f"  {document['doc_title']}: {document['user_state']}, score {document['decay_score']:.2f}")
    print("\nBob leaves, and takes every trace along:")
    print(f"  bob: DELETE /me -> {bob.send('DELETE', '/me')}")
    print(f"  bob: GET /documents -> {bob.send('GET', '/documents')}")


def main() -> None:
    """Serve, or demonstrate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--demo", action="store_true", help="let two users talk to it, and stop")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    given = parser.parse_args()
    if given.demo:
        demonstrate()
        return
    print(f"http://{given.host}:{given.port}/docs shows the endpoints; each wants the header X-User. Ctrl-C stops.")
    uvicorn.run(app, host=given.host, port=given.port, ws="none")


if __name__ == "__main__":
    main()
