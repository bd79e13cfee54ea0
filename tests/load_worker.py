"""Work of several threads on one store, in this process or in others; `LoadProcesses` starts those.

Run as `python load_worker.py`: it says `ready` when all is imported, reads lines of `TASK URL FOLDER FORKS GATE` in
JSON, and does each task in so many forks that begin at the same moment. What the task tells, in each fork, is a line
of output, as a list in JSON.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import re
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import redis
from helpers import document
from langchain_core.callbacks import CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.retrievers import BaseRetriever
from scenarios import Paragraphs
from storage.store_worker import together
from typing_extensions import Self

from rag_wiki import (
    DecayConfig,
    DocumentRemovedError,
    InvalidTransitionError,
    RagWikiRetriever,
    RagWikiRetrieverConfig,
    StateStore,
    SuggestionEvent,
    UserDocRecord,
)
from rag_wiki.scheduler import DecayScheduler
from rag_wiki.storage.chunk_places import user_folder
from rag_wiki.storage.chunk_store import ChunkStore
from rag_wiki.storage.redis_store import RedisStateStore
from rag_wiki.storage.sql import SQLStateStore
from rag_wiki.storage.sqlite import SQLiteStateStore

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import pytest

USERS = ("ada", "bob")
STEADY, DECLINED, KEPT = "steady", "declined", "kept"
"""A document that is only fetched, one that is only declined, and one that is saved and then only asked for."""
CHURNED = ("churned0", "churned1", "churned2")
"""Documents that are saved, removed, pinned, refreshed and voted for all the time."""
DOCUMENTS = (STEADY, DECLINED, KEPT, *CHURNED)
PARTS = 3
THRESHOLD = 3
ROUNDS = int(os.environ.get("RAG_WIKI_ROUNDS", "30"))
"""Things that each thread does."""
PATIENCE = 120.0
"""Seconds after which waiting is given up."""
NEVER = 10**6


@dataclass(frozen=True)
class Place:
    """Where state and chunks are, as any process can open it."""

    url: str
    folder: str
    """The folder of chunks and readable copies; empty where the chunks are beside the state."""

    def readable(self, user: str) -> list[str]:
        """The readable copies of a user, sorted."""
        files = (user_folder(Path(self.folder), user) / "documents").glob("*.md") if self.folder else ()
        return sorted(path.read_text(encoding="utf-8") for path in files)


def make_place(kind: str, request: pytest.FixtureRequest | None, tmp_path: Path) -> Place:
    """An empty place by the name of its kind."""
    from conftest import clear_postgres

    store, _, disk = kind.partition("+")
    folder = str(tmp_path / "wiki") if disk else ""
    if store == "sqlite":
        return Place(f"sqlite:///{tmp_path / 'state.db'}", folder)
    assert request is not None, "a server comes by a fixture"
    if store == "postgres":
        url = request.getfixturevalue("postgres_url")
        clear_postgres(url)
        return Place(url, folder)
    url = f"redis://127.0.0.1:{request.getfixturevalue('valkey_port')}/0"
    with redis.Redis.from_url(url) as client:
        client.flushall()
    return Place(url, folder)


def content(doc_id: str, version: int, parts: int = PARTS) -> str:
    """A text of a document, which tells its version in each of its parts."""
    return "\n\n".join(f"{doc_id} in version {version}, part {part}" for part in range(parts))


def versions_in(text: str) -> set[int]:
    """The versions that a text is made of."""
    return {int(number) for number in re.findall(r"in version (\d+), part \d", text)}


class NamedSource(BaseRetriever):
    """Returns the documents that a query names, without the text that saved copies have."""

    def _get_relevant_documents(self, query: str, *, run_manager: CallbackManagerForRetrieverRun) -> list[Document]:
        names = query.split()
        return [document(name, name, chunk_index=99) for name in DOCUMENTS if name in names]


class NameEmbeddings(Embeddings):
    """A direction for each document; a text has those of all that it names."""

    model = "names"

    def embed_query(self, text: str) -> list[float]:
        """The vector of a query."""
        named = [float(name in text) for name in DOCUMENTS]
        return [*named, 0.0 if any(named) else 1.0]

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """The vectors of texts."""
        return [self.embed_query(text) for text in texts]


class GatedEmbeddings(NameEmbeddings):
    """Says `embedding` when it is to embed a document, and does it when the other end of a named pipe is opened."""

    def __init__(self, gate: str) -> None:
        self._gate = gate

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """The vectors of texts."""
        os.write(1, b"embedding\n")
        os.close(os.open(self._gate, os.O_RDONLY))
        return super().embed_documents(texts)


def open_store(url: str) -> StateStore:
    """The store of a URL."""
    if url.startswith("redis"):
        store: StateStore = RedisStateStore(redis.Redis.from_url(url))
    else:
        store = SQLiteStateStore(url) if url.startswith("sqlite") else SQLStateStore(url)
    # The whole story is to be told afterwards.
    store.history_limit = NEVER
    return store


def open_retriever(
    store: StateStore,
    folder: str,
    embeddings: Embeddings | None = None,
    on_suggestion: Callable[[SuggestionEvent], None] | None = None,
    load: Callable[[UserDocRecord], str] = lambda record: content(record.doc_id, 0),
    parts: int = PARTS,
) -> RagWikiRetriever:
    """A retriever over a store, with the chunks in a folder where there is one.

    Its decay job pins at once what was voted for, and lets go at once what was voted against.
    """
    return RagWikiRetriever(
        global_retriever=NamedSource(),
        state_store=store,
        embedding_model=embeddings or NameEmbeddings(),
        on_suggestion=on_suggestion,
        document_loader=load,
        # One of its own, as another process has it.
        chunk_store=ChunkStore(folder) if folder else None,
        config=RagWikiRetrieverConfig(
            fetch_threshold=THRESHOLD,
            reset_threshold=NEVER,
            similarity_threshold=0.3,
            local_top_k=parts,
            text_splitter=Paragraphs(),
            embedding_name="names",
            decay=DecayConfig(
                w_recency=0.5,
                w_frequency=0,
                w_explicit=0.5,
                w_chunk_hit=0,
                decay_lambda=0,
                pin_hold_days=0,
                demotion_hold_days=0,
                max_cache_miss_streak=NEVER,
            ),
        ),
    )


def prepare(url: str, folder: str) -> None:
    """Every user has met every document once, and saved the one that is kept."""
    with open_store(url) as store:
        retriever = open_retriever(store, folder)
        for user in USERS:
            retriever.invoke(" ".join(DOCUMENTS), user_id=user)
            retriever.accept_suggestion(KEPT, content(KEPT, 0), user_id=user)


class Tally:
    """What a process did, counted."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.counts: Counter[str] = Counter()
        self.errors: list[str] = []

    def add(self, *what: str) -> None:
        """Count one of something."""
        with self._lock:
            self.counts[" ".join(what)] += 1

    def suggested(self, event: SuggestionEvent) -> None:
        """Count a suggestion."""
        self.add("suggested", event.user_id, event.doc_id)

    @contextmanager
    def told(self) -> Iterator[None]:
        """Keep an error for whoever looks at the tally."""
        try:
            yield
        except Exception as error:
            self.errors.append(f"{type(error).__name__}: {error}")
            logging.getLogger(__name__).debug("unexpected", exc_info=error)


class _Warnings(logging.Handler):
    """Keeps what the log warns of as errors."""

    def __init__(self, tally: Tally) -> None:
        super().__init__(logging.WARNING)
        self._tally = tally

    def emit(self, record: logging.LogRecord) -> None:
        self._tally.errors.append(f"logged: {record.getMessage()}")


def ask(retriever: RagWikiRetriever, tally: Tally, user: str, names: Sequence[str]) -> None:
    """Ask for documents, and count which were returned."""
    found = retriever.invoke_with_provenance(" ".join(names), user_id=user)
    tally.add("queries", user)
    returned = {item.metadata["doc_id"]: item for item in found.documents}
    for doc_id, item in returned.items():
        tally.add("returned", user, doc_id)
        if item.metadata["from_cache"]:
            tally.add("answered", user, doc_id)
            # A pinned document that was not asked for answers with one part.
            parts = PARTS if doc_id in names else len(item.metadata["chunks_used"])
            if len(versions_in(item.page_content)) != 1 or item.page_content.count("part") != parts:
                tally.errors.append(f"torn: {item.page_content!r}")
    tally.errors += [f"degraded: {text}" for text in found.provenance.degraded]
    tally.errors += [f"missing: {name} of {names}" for name in names if name not in returned and name not in CHURNED]


def act(retriever: RagWikiRetriever, tally: Tally, user: str, chance: random.Random) -> None:
    """Do something to a document that somebody else is doing something to."""
    doc_id, version = chance.choice(CHURNED), chance.randrange(1, NEVER)
    actions: list[tuple[str, Callable[[], object]]] = [
        ("accept", lambda: retriever.accept_suggestion(doc_id, content(doc_id, version), user_id=user)),
        ("refresh", lambda: retriever.refresh(doc_id, content(doc_id, version), user_id=user)),
        ("remove", lambda: retriever.force_remove(doc_id, user_id=user)),
        ("pin", lambda: retriever.force_pin(doc_id, user_id=user)),
        ("unpin", lambda: retriever.unpin(doc_id, user_id=user)),
        ("up", lambda: retriever.thumbs_up(doc_id, user_id=user)),
        ("down", lambda: retriever.thumbs_down(doc_id, user_id=user)),
        ("decline", lambda: retriever.decline_suggestion(doc_id, user_id=user)),
        ("decline", lambda: retriever.decline_suggestion(DECLINED, user_id=user)),
    ]
    name, action = chance.choice(actions)
    try:
        action()
    except (InvalidTransitionError, DocumentRemovedError):
        # The documented refusals: it is not saved, not pinned, was let go, or was removed meanwhile.
        if name in ("remove", "up", "down"):
            raise
        tally.add("refused", name)
    else:
        tally.add("done", name)


def work(url: str, folder: str, threads: int, seed: int) -> dict[str, Any]:
    """Queries and actions of several threads, with a decay job that never rests; tells the tally."""
    tally, done = Tally(), threading.Event()
    handler = _Warnings(tally)
    logging.getLogger("rag_wiki").addHandler(handler)
    with open_store(url) as store:
        retriever = open_retriever(store, folder, on_suggestion=tally.suggested)
        starting = threading.Barrier(threads)

        def run(number: int) -> None:
            chance = random.Random(seed * 100 + number)
            with tally.told():
                starting.wait(PATIENCE)
                for _ in range(ROUNDS):
                    user = chance.choice(USERS)
                    if chance.random() < 0.5:
                        ask(retriever, tally, user, chance.sample(DOCUMENTS, chance.randint(1, 3)))
                    else:
                        act(retriever, tally, user, chance)

        def decay() -> None:
            scheduler = DecayScheduler(retriever.decay_engine, store)
            with tally.told():
                while not done.is_set():
                    scheduler.run_all_users()
                    retriever.run_decay(USERS[0])
                    tally.errors += [f"decay: {error!r}" for error in scheduler.failures.values()]
                    tally.add("decay")

        workers = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(threads)]
        job = threading.Thread(target=decay, daemon=True)
        for thread in (*workers, job):
            thread.start()
        for thread in workers:
            thread.join(PATIENCE)
        done.set()
        job.join(PATIENCE)
        if any(thread.is_alive() for thread in (*workers, job)):
            tally.errors.append("some threads never came to an end")
    logging.getLogger("rag_wiki").removeHandler(handler)
    return {"counts": tally.counts, "errors": tally.errors}


def save_late(url: str, folder: str, gate: str) -> list[str]:
    """Save and pin the same documents from two threads, which the embedding model holds up; tells what came of it."""
    told: list[str] = []
    with open_store(url) as store:
        retriever = open_retriever(store, folder, GatedEmbeddings(gate))

        def tell(save: Callable[[], object]) -> None:
            try:
                save()
                told.append("saved")
            except Exception as error:
                told.append(type(error).__name__)

        text = content(CHURNED[0], 7)
        saves = [
            partial(retriever.accept_suggestion, CHURNED[0], text, user_id=USERS[0]),
            partial(retriever.force_pin, CHURNED[1], user_id=USERS[0]),
        ]
        threads = [threading.Thread(target=tell, args=(save,)) for save in saves]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
    return told


class LoadProcesses:
    """A process that has imported all, and forks others for each task; leaving the block ends them."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-W", "error", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            # A process with threads, be it those of a matrix product, should not fork.
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OPENBLAS_NUM_THREADS": "1"},
        )

    def __enter__(self) -> Self:
        self.expect("ready")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Its forks as well, should one of them hang.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()

    def go(self, task: str, url: str, folder: str, forks: int, gate: str = "") -> None:
        """Let so many processes do a task."""
        assert self._process.stdin is not None
        print(json.dumps([task, url, folder, forks, gate]), file=self._process.stdin, flush=True)

    def expect(self, said: str) -> None:
        """Wait until it says this."""
        assert self._line() == said + "\n"

    def results(self) -> list[Any]:
        """What each of the processes tells, when all are done without an error."""
        told: list[Any] = json.loads(self._line())
        return told

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise AssertionError(self._process.communicate())
        return line


def do(task: str, url: str, folder: str, gate: str) -> Any:
    """Do a task in this process."""
    return save_late(url, folder, gate) if task == "save_late" else work(url, folder, 2, os.getpid())


def main() -> None:
    """Do tasks in forks of this process."""
    print("ready", flush=True)  # noqa: T201 - this is how a worker talks
    for line in sys.stdin:
        task, url, folder, forks, gate = json.loads(line)
        print(json.dumps(together(forks, partial(do, task, url, folder, gate))), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
