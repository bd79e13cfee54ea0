"""A store that fails costs the personal layer and nothing else; connections are few, and closed by who opened them."""

from __future__ import annotations

import gc
import inspect
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import redis
import sqlalchemy as sa
from helpers import document
from places import PlacedWorld
from scenarios import OTHER_QUESTION, POD_QUESTION, PODS, USER, World, cached, doc_ids, texts

from rag_wiki import RagWikiRetriever, StateStore
from rag_wiki.storage.redis_store import RedisStateStore
from rag_wiki.storage.sql import SQLStateStore
from rag_wiki.storage.sqlite import SQLiteStateStore

TAX = "Tax is due in May."
IMAGES = "Images are layered."

# -- a store that raises


READING = ("begin_query",)
WRITING = ("change", "change_together")
EVERYTHING = tuple(
    name
    for name, _ in inspect.getmembers(StateStore, inspect.isfunction)
    if not name.startswith("_") and name not in ("close", "request_change")
)


def break_store(patch: pytest.MonkeyPatch, store: StateStore, names: tuple[str, ...], error: Exception) -> None:
    """Let these methods of a store raise."""

    def fail(*arguments: Any, **options: Any) -> Any:
        raise error

    for name in names:
        patch.setattr(store, name, fail)


async def ask(retriever: RagWikiRetriever, awaiting: bool) -> tuple[list[str], list[bool], list[str]]:
    """The texts of an answer, whether each is from a saved copy, and what provenance says was missing."""
    if awaiting:
        documents, provenance = await retriever.ainvoke_with_provenance(POD_QUESTION)
    else:
        documents, provenance = retriever.invoke_with_provenance(POD_QUESTION)
    return texts(documents), [item.metadata["from_cache"] for item in documents], list(provenance.degraded)


def saved_pods(world: World) -> RagWikiRetriever:
    """A retriever whose user saved one document, and whose source has another."""
    retriever = world.retriever()
    world.save(retriever, "pods", PODS)
    world.shows(document("tax", TAX))
    return retriever


@pytest.mark.parametrize(
    ("awaiting", "error"), [(False, ConnectionError("gone")), (True, TimeoutError("late"))], ids=["sync", "async"]
)
async def test_a_store_that_cannot_be_read_costs_the_copies(
    world: PlacedWorld,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    awaiting: bool,
    error: Exception,
) -> None:
    """The global documents come, with one warning and a word in provenance; nothing is counted, and it passes."""
    retriever = saved_pods(world)
    before = retriever.documents()
    with monkeypatch.context() as broken:
        break_store(broken, world.store, READING, error)
        told = await ask(retriever, awaiting)
    assert told == ([TAX], [False], [f"the state store did not answer, nothing is counted ({type(error).__name__})"])
    assert [(item.levelname, str(error) in item.getMessage()) for item in caplog.records] == [("WARNING", True)]
    assert retriever.documents() == before
    assert await ask(retriever, awaiting) == ([PODS, TAX], [True, False], [])
    assert world.record("tax").fetch_count == 1


@pytest.mark.parametrize("awaiting", [False, True], ids=["sync", "async"])
async def test_a_store_that_cannot_be_written_costs_the_counting(
    world: PlacedWorld, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, awaiting: bool
) -> None:
    """The whole answer comes, saved copies too, with one warning; what it would have counted is not counted."""
    retriever = saved_pods(world)
    before = retriever.documents()
    with monkeypatch.context() as broken:
        break_store(broken, world.store, WRITING, ConnectionError("gone"))
        told = await ask(retriever, awaiting)
    missing = ["the state store did not answer, this query may not be counted (ConnectionError)"]
    assert told == ([PODS, TAX], [True, False], missing)
    assert [item.levelname for item in caplog.records] == ["WARNING"]
    assert retriever.documents() == before
    assert await ask(retriever, awaiting) == ([PODS, TAX], [True, False], [])
    counts = {record.doc_id: record.fetch_count for record in retriever.documents()}
    assert counts == {"pods": before[0].fetch_count + 1, "tax": 1}


@pytest.mark.parametrize("awaiting", [False, True], ids=["sync", "async"])
async def test_copies_that_cannot_be_read_cost_the_copies_alone(
    world: PlacedWorld, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, awaiting: bool
) -> None:
    """Where only the saved copies can't be read, the global documents come and are counted; the copies did not miss."""
    retriever = saved_pods(world)
    with monkeypatch.context() as broken:
        # Nobody has asked since the document was saved, so its copy is still to be read.
        break_store(broken, world.store, ("list_saved", "saved_since"), ConnectionError("gone"))
        told = await ask(retriever, awaiting)
    assert told == ([TAX], [False], ["saved copies could not be searched (ConnectionError)"])
    assert [item.levelname for item in caplog.records] == ["WARNING"]
    assert world.record("tax").fetch_count == 1
    assert world.record("pods").cache_miss_streak == 0
    assert await ask(retriever, awaiting) == ([PODS, TAX], [True, False], [])


ACTIONS: dict[str, tuple[Any, ...]] = {
    "accept_suggestion": ("tax", TAX),
    "refresh": ("pods", PODS),
    "force_pin": ("pods",),
    "unpin": ("pods",),
    "decline_suggestion": ("tax",),
    "thumbs_up": ("pods",),
    "thumbs_down": ("pods",),
    "force_remove": ("pods",),
    "set_always_full_doc": ("pods",),
    "run_decay": (),
    "reindex": (),
    "documents": (),
    "history": ("pods",),
    "stats": (),
    "forget_user": (),
}


async def act(retriever: RagWikiRetriever, name: str, awaiting: bool, *arguments: Any) -> Any:
    """Carry out an action, or its awaited twin."""
    if awaiting:
        return await getattr(retriever, f"a{name}")(*arguments)
    return getattr(retriever, name)(*arguments)


@pytest.mark.parametrize("awaiting", [False, True], ids=["sync", "async"])
async def test_what_a_user_does_raises(world: PlacedWorld, monkeypatch: pytest.MonkeyPatch, awaiting: bool) -> None:
    """Every action raises what the store raised, and leaves records and copies as they were."""
    retriever = saved_pods(world)
    retriever.invoke(POD_QUESTION)
    before, chunks = retriever.documents(), retriever.chunk_store.load_chunks(USER, "pods")
    error = ConnectionError("gone")
    with monkeypatch.context() as broken:
        # Pinning a saved document twice, and the like, must meet the store as well.
        break_store(broken, world.store, EVERYTHING, error)
        for name, arguments in ACTIONS.items():
            with pytest.raises(ConnectionError) as raised:
                await act(retriever, name, awaiting, *arguments)
            assert raised.value is error
    assert retriever.documents() == before
    assert len(chunks) == 1
    after = retriever.chunk_store.load_chunks(USER, "pods")
    assert [chunk["text"] for chunk in after] == [chunk["text"] for chunk in chunks]
    assert retriever.accept_suggestion("tax", TAX).saved


# -- how many connections


RETRIEVERS, CALLS, THREADS = 200, 1_000, 8


def use_up(stores: list[StateStore]) -> None:
    """Let 200 retrievers over these stores (each retriever takes its turn) answer 1,000 calls in 8 threads."""
    world = World(store=stores[0])
    world.shows(document("tax", TAX))
    world.save(world.retriever("user 0"), "pods", PODS)
    retrievers = []
    for number in range(RETRIEVERS):
        world.store = stores[number % len(stores)]
        retrievers.append(world.retriever(f"user {number % 10}"))
    world.shows(document("tax", TAX))
    with ThreadPoolExecutor(THREADS) as threads:
        answers = list(threads.map(lambda number: retrievers[number % RETRIEVERS].invoke(POD_QUESTION), range(CALLS)))
    assert [len(cached(answer)) for answer in answers[:10]] == [1] + [0] * 9
    counts = [world.record("tax", f"user {number}").fetch_count for number in range(10)]
    assert counts == [CALLS // 10] * 10


@pytest.fixture
def postgres_engine(postgres_url: str, make_store: Callable[[str], StateStore]) -> Iterator[sa.Engine]:
    """An engine of the application's own with room for three connections, on an empty database."""
    make_store("postgres")
    url = sa.engine.make_url(postgres_url).set(drivername="postgresql+psycopg")
    named = url.update_query_dict({"application_name": "the application"})
    engine = sa.create_engine(named, pool_size=2, max_overflow=1, pool_timeout=30)
    yield engine
    engine.dispose()


@pytest.fixture
def ask_postgres(postgres_url: str) -> Iterator[Callable[[str], int]]:
    """Count the connections of an application, by a connection of another name."""
    engine = sa.create_engine(sa.engine.make_url(postgres_url).set(drivername="postgresql+psycopg"))
    counting = sa.text("SELECT count(*) FROM pg_stat_activity WHERE application_name = :name")

    def count(name: str) -> int:
        with engine.connect() as connection:
            return int(connection.execute(counting, {"name": name}).scalar_one())

    yield count
    engine.dispose()


@pytest.mark.parametrize("stores", [1, RETRIEVERS], ids=["one store", "a store for each"])
def test_retrievers_on_one_engine_share_its_connections(
    postgres_engine: sa.Engine, ask_postgres: Callable[[str], int], stores: int
) -> None:
    """1,000 calls of 200 retrievers on one engine take at most the connections that its pool allows."""
    use_up([SQLStateStore(postgres_engine) for _ in range(stores)])
    assert 1 <= ask_postgres("the application") <= 3


def test_a_store_of_a_url_has_few_connections(
    postgres_url: str, make_store: Callable[[str], StateStore], ask_postgres: Callable[[str], int]
) -> None:
    """A store that makes its own engine has one pool for all retrievers, and none left after `close`."""
    make_store("postgres")
    url = sa.engine.make_url(postgres_url).update_query_dict({"application_name": "a store's own"})
    with SQLStateStore(url) as store:
        use_up([store])
        assert 1 <= ask_postgres("a store's own") <= THREADS + 2
    # The server may take a moment to notice.
    assert any(ask_postgres("a store's own") == 0 for _ in range(10_000))


@pytest.fixture
def valkey_admin(valkey_port: int) -> Iterator[redis.Redis]:
    """A client that looks at the others, on an empty server."""
    with redis.Redis(host="127.0.0.1", port=valkey_port, decode_responses=True) as client:
        client.flushall()
        yield client


def valkey_client(port: int, most: int) -> redis.Redis:
    """The application's own client with a pool of so many connections."""
    pool: Any = redis.BlockingConnectionPool(  # type: ignore[no-untyped-call]  # redis-py has no types here
        host="127.0.0.1", port=port, client_name="the-application", max_connections=most, timeout=30
    )
    return redis.Redis(connection_pool=pool)


def clients_of(admin: redis.Redis) -> list[str]:
    """The ids of the application's connections, as the server lists them."""
    listed: Any = admin.client_list()
    return [client["id"] for client in listed if client["name"] == "the-application"]


@pytest.mark.parametrize("stores", [1, RETRIEVERS], ids=["one store", "a store for each"])
def test_retrievers_on_one_client_share_its_connections(
    valkey_port: int, valkey_admin: redis.Redis, stores: int
) -> None:
    """1,000 calls of 200 retrievers on one client take at most the connections that its pool allows."""
    client = valkey_client(valkey_port, 3)
    use_up([RedisStateStore(client) for _ in range(stores)])
    assert 1 <= len(clients_of(valkey_admin)) <= 3
    client.connection_pool.disconnect()


class Connections:
    """Counts what SQLAlchemy opens and closes, of any engine."""

    def __init__(self) -> None:
        self.opened = self.closed = 0
        self._lock = threading.Lock()

    def open(self, *_: object) -> None:
        """One was opened."""
        with self._lock:
            self.opened += 1

    def close(self, *_: object) -> None:
        """One was closed."""
        with self._lock:
            self.closed += 1


@pytest.fixture
def connections() -> Iterator[Connections]:
    """The connections of SQLAlchemy's pools from now on."""
    counted = Connections()
    sa.event.listen(sa.pool.Pool, "connect", counted.open)
    sa.event.listen(sa.pool.Pool, "close", counted.close)
    yield counted
    sa.event.remove(sa.pool.Pool, "connect", counted.open)
    sa.event.remove(sa.pool.Pool, "close", counted.close)


def test_retrievers_on_one_file_share_its_connections(tmp_path: Path, connections: Connections) -> None:
    """1,000 calls of 200 retrievers on one SQLite store keep no more open than threads ask; `close` closes all."""
    with SQLiteStateStore(f"sqlite:///{tmp_path / 'state.db'}") as store:
        use_up([store])
        assert 1 <= connections.opened - connections.closed <= THREADS + 2
    assert connections.opened == connections.closed
    assert sorted(path.name for path in tmp_path.iterdir()) == ["state.db"]


def live(world: World, user_id: str) -> None:
    """All that a user can do, also what is refused."""
    retriever = world.retriever(user_id)
    world.save(retriever, "pods", PODS)
    world.save(retriever, "images", IMAGES)
    for act in (retriever.thumbs_up, retriever.thumbs_down, retriever.force_pin, retriever.unpin):
        act("pods")
    retriever.set_always_full_doc("pods")
    assert [len(cached(answer)) for answer in retriever.batch([POD_QUESTION, OTHER_QUESTION] * 4)] == [1, 0] * 4
    retriever.refresh("pods", full_content=PODS)
    retriever.run_decay()
    retriever.reindex()
    assert len(retriever.documents()) == 2
    assert retriever.history("pods")[-1].what == "refreshed"
    assert retriever.stats().chunks == 2
    for refused in (retriever.thumbs_up, retriever.force_pin, retriever.force_remove, retriever.accept_suggestion):
        for _ in range(3):
            with pytest.raises(LookupError, match="no record"):
                refused("nothing")
    retriever.force_remove("images")
    assert retriever.forget_user().documents == 2


def live_together(store: StateStore) -> None:
    """Four users at once, each with a source of its own."""
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda number: live(World(store=store), f"user {number}"), range(4)))


def test_one_connection_is_enough_for_postgres(postgres_url: str, make_store: Callable[[str], StateStore]) -> None:
    """With a pool of one connection everything works from four threads: none waits for a second, none is lost."""
    make_store("postgres")
    url = sa.engine.make_url(postgres_url).set(drivername="postgresql+psycopg")
    engine = sa.create_engine(url, pool_size=1, max_overflow=0, pool_timeout=20)
    with SQLStateStore(engine) as store:
        live_together(store)
    engine.dispose()


def test_one_connection_is_enough_for_valkey(valkey_port: int, valkey_admin: redis.Redis) -> None:
    """With a pool of one connection everything works from four threads: none waits for a second, none is lost."""
    client = valkey_client(valkey_port, 1)
    live_together(RedisStateStore(client))
    assert len(clients_of(valkey_admin)) == 1
    client.connection_pool.disconnect()


# -- whose connections


def test_a_client_that_was_given_stays_open(valkey_port: int, valkey_admin: redis.Redis) -> None:
    """Closing a store, and dropping it with its retrievers, leaves the client's very connection open and in use."""
    client = valkey_client(valkey_port, 1)
    with RedisStateStore(client) as store:
        saved_pods(World(store=store)).invoke(POD_QUESTION)
    before = clients_of(valkey_admin)
    del store
    gc.collect()
    assert clients_of(valkey_admin) == before == [str(client.client_id())]
    assert World(store=RedisStateStore(client)).state("pods").value == "CLAIMED"
    client.connection_pool.disconnect()


def test_an_engine_that_was_given_stays_open(postgres_engine: sa.Engine, ask_postgres: Callable[[str], int]) -> None:
    """Closing a store, and dropping it with its retrievers, leaves the engine's connections open and in use."""

    def process() -> int:
        with postgres_engine.connect() as connection:
            return int(connection.execute(sa.text("SELECT pg_backend_pid()")).scalar_one())

    before = process()
    with SQLStateStore(postgres_engine) as store:
        saved_pods(World(store=store)).invoke(POD_QUESTION)
    opened = ask_postgres("the application")
    del store
    gc.collect()
    assert ask_postgres("the application") == opened
    assert process() == before
    assert World(store=SQLStateStore(postgres_engine)).state("pods").value == "CLAIMED"


def test_a_store_that_is_dropped_keeps_no_connection(
    postgres_url: str, make_store: Callable[[str], StateStore], ask_postgres: Callable[[str], int]
) -> None:
    """A store that nobody closed, and nobody has any more, has no connection open either."""
    make_store("postgres")
    url = sa.engine.make_url(postgres_url).update_query_dict({"application_name": "dropped"})
    store = SQLStateStore(url)
    saved_pods(World(store=store)).invoke(POD_QUESTION)
    assert ask_postgres("dropped") >= 1
    del store
    gc.collect()
    assert any(ask_postgres("dropped") == 0 for _ in range(10_000))


def test_a_closed_store_opens_again_when_it_is_used(lasting_world: PlacedWorld) -> None:
    """`close` twice is no error, and a retriever over a closed store answers and counts as before."""
    retriever = saved_pods(lasting_world)
    lasting_world.store.close()
    lasting_world.store.close()
    assert doc_ids(retriever.invoke(POD_QUESTION)) == ["pods", "tax"]
    assert lasting_world.record("tax").fetch_count == 1


# -- after a fork


FORKING = """
import json, os, sys, threading, warnings
from pathlib import Path
from helpers import document
from scenarios import POD_QUESTION, PODS, World, cached, texts
from rag_wiki import MemoryStateStore, StateStore
from rag_wiki.storage.chunk_store import ChunkStore

# Python 3.12 warns of a fork beside threads; that it works beside ours is what is tried here.
warnings.simplefilter("ignore", DeprecationWarning)

def open_store(url):
    if url.startswith("sqlite"):
        from rag_wiki.storage.sqlite import SQLiteStateStore
        return SQLiteStateStore(url)
    if url.startswith("postgres"):
        from rag_wiki.storage.sql import SQLStateStore
        return SQLStateStore(url)
    if url.startswith("valkey"):
        import redis
        from rag_wiki.storage.redis_store import RedisStateStore
        return RedisStateStore(redis.Redis(port=int(url.rpartition(":")[2])))
    return MemoryStateStore()

def forked(run):
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        run()
        status = 0
    finally:
        sys.stdout.flush()
        os._exit(status)
"""

WORKERS = """
world = World(store=open_store(sys.argv[1]))
options = {"chunk_store": ChunkStore(sys.argv[2])} if sys.argv[2:] else {}
retriever = world.retriever(fetch_threshold=1000, reset_threshold=1000, **options)
world.save(retriever, "pods", PODS)
world.shows(document("tax", "Tax is due in May."))
retriever.invoke(POD_QUESTION)

def work():
    for _ in range(20):
        answer = retriever.invoke(POD_QUESTION)
        assert texts(cached(answer)) == [PODS], texts(answer)
    assert len(retriever.batch([POD_QUESTION] * 5)) == 5
    retriever.thumbs_up("pods")

children = [forked(work) for _ in range(2)]
work()
print([os.waitpid(child, 0)[1] for child in children])
print(world.record("tax").fetch_count, world.record("pods").fetch_count)
if not isinstance(world.store, MemoryStateStore):
    world.store.close()
"""


def run_program(program: str, *arguments: str) -> list[str]:
    """The lines that a program prints, which must end well and without a word on standard error."""
    path = os.pathsep.join([str(Path(__file__).parent.parent), *sys.path])
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", FORKING + program, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    return ended.stdout.splitlines()


FORKS = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")


@FORKS
@pytest.mark.parametrize("place", ["memory", "sqlite+disk", "postgres", "valkey"])
def test_a_retriever_works_on_after_a_fork(request: pytest.FixtureRequest, tmp_path: Path, place: str) -> None:
    """A retriever that was used before a fork answers in parent and children at once, and each call is counted."""
    urls: dict[str, Callable[[], str]] = {
        "memory": lambda: "memory",
        "sqlite": lambda: f"sqlite:///{tmp_path / 'state.db'}",
        "postgres": lambda: str(request.getfixturevalue("postgres_url")),
        "valkey": lambda: f"valkey:{request.getfixturevalue('valkey_port')}",
    }
    store, _, disk = place.partition("+")
    if store in ("postgres", "valkey"):
        request.getfixturevalue("make_store")(store)
    printed = run_program(WORKERS, urls[store](), *([str(tmp_path / "wiki")] if disk else []))
    # In memory each process counts for itself; else the introduction is one, and each of three asked 25 times.
    asked = 1 + 25 if store == "memory" else 1 + 3 * 25
    assert printed == ["[0, 0]", f"{asked} {asked + 1}"]


BUSY = """
class Gated(MemoryStateStore):
    "Holds up whoever reads all records in another thread."

    entered, gate, parent = threading.Event(), threading.Event(), os.getpid()

    def list_saved(self, *arguments, **options):
        if os.getpid() == self.parent and threading.current_thread().name == "busy":
            self.entered.set()
            self.gate.wait(60)
        return super().list_saved(*arguments, **options)

world = World(store=Gated())
retriever = world.retriever(global_search="on_miss")
world.save(retriever, "pods", PODS)
busy = threading.Thread(target=retriever.invoke, args=[POD_QUESTION], name="busy")
busy.start()
world.store.entered.wait(60)

def ask():
    answering = threading.Thread(target=lambda: print(texts(retriever.invoke(POD_QUESTION))), daemon=True)
    answering.start()
    answering.join(3)

child = forked(ask)
os.waitpid(child, 0)
world.store.gate.set()
busy.join()
"""


@FORKS
def test_a_fork_while_another_thread_reads_copies_can_answer() -> None:
    """A process that is forked while a thread of its parent builds an index answers; nobody waits for that thread."""
    assert run_program(BUSY) == [f"[{PODS!r}]"]
