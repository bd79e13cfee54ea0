"""Another process that keeps a SQLite file to itself costs a query its count at most, never its answer."""

from __future__ import annotations

import logging
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from helpers import document
from places import PlacedWorld, make_world
from scenarios import POD_QUESTION, PODS, USER, cached, doc_ids

from rag_wiki import DecayConfig, DocumentState, RagWikiRetriever, StateStore
from rag_wiki.scheduler import DecayScheduler
from rag_wiki.storage.sqlite import SQLiteStateStore

PATIENCE_MS = 20
HOLDER = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
for _ in sys.stdin:
    connection.execute("BEGIN IMMEDIATE")
    print("locked", flush=True)
    sys.stdin.readline()
    connection.execute("ROLLBACK")
    print("released", flush=True)
"""


class Holder:
    """Another process, which takes a file's write lock and lets it go when it is told to."""

    def __init__(self, path: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def take(self) -> None:
        """Take the lock."""
        assert self._tell() == "locked\n"

    def release(self) -> None:
        """Let it go."""
        assert self._tell() == "released\n"

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Hold it for a while."""
        self.take()
        try:
            yield
        finally:
            self.release()

    def _tell(self) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self._process.stdout.readline()

    def end(self) -> None:
        """End the process."""
        self._process.communicate(timeout=60)


@pytest.fixture
def impatient() -> Iterator[None]:
    """Connections that give up soon. The store waits half a minute, which no test should."""

    def be_quick(connection: sqlite3.Connection, _record: object) -> None:
        connection.execute(f"PRAGMA busy_timeout={PATIENCE_MS}")

    sa.event.listen(sa.pool.Pool, "connect", be_quick)
    yield
    sa.event.remove(sa.pool.Pool, "connect", be_quick)


@pytest.fixture(params=["sqlite", "sqlite+disk"])
def world(request: pytest.FixtureRequest, make_store: Callable[[str], StateStore], tmp_path: Path) -> PlacedWorld:
    """A world on a SQLite file, with one document saved and one that comes from the source."""
    world = make_world(request.param, make_store, tmp_path)
    world.save(keeper(world), "pods", PODS)
    world.shows(document("images", "Images are read only."))
    return world


@pytest.fixture
def holder(world: PlacedWorld, tmp_path: Path) -> Iterator[Holder]:
    """Another process that can hold the write lock of the world's file."""
    holder = Holder(tmp_path / "state.db")
    yield holder
    holder.end()


def keeper(world: PlacedWorld) -> RagWikiRetriever:
    """A retriever that neither suggests nor lets go on its own."""
    return world.retriever(fetch_threshold=1000, reset_threshold=1000, decay=DecayConfig(max_cache_miss_streak=100_000))


def fetches(world: PlacedWorld) -> list[int]:
    """What was counted of the saved document, and of the other one."""
    found = [world.store.get(USER, doc_id) for doc_id in ("pods", "images")]
    return [0 if record is None else record.fetch_count for record in found]


async def test_a_query_answers_while_another_process_holds_the_lock(
    impatient: None, world: PlacedWorld, holder: Holder, caplog: pytest.LogCaptureFixture
) -> None:
    """While the lock is held, every way of asking serves copy and source, warns, says so, and counts nothing."""
    retriever = keeper(world)
    retriever.invoke(POD_QUESTION)
    before = fetches(world)
    with holder.holding(), caplog.at_level(logging.WARNING, logger="rag_wiki"):
        documents, provenance = retriever.invoke_with_provenance(POD_QUESTION)
        awaited = await retriever.ainvoke_with_provenance(POD_QUESTION)
        batched = retriever.batch([POD_QUESTION] * 3) + await retriever.abatch([POD_QUESTION] * 3)
        for answer in (documents, awaited.documents, *batched):
            assert doc_ids(answer) == ["pods", "images"]
            assert doc_ids(cached(answer)) == ["pods"]
        for told in (provenance, awaited.provenance):
            (degraded,) = told.degraded
            assert "counted" in degraded
            assert told.suggestions == ()
            assert "counted" in told.render()
        assert any("locked" in record.getMessage() for record in caplog.records)
        # Reading waits for nobody.
        assert fetches(world) == before
        assert [record.doc_id for record in retriever.documents()] == ["images", "pods"]
        assert retriever.stats().chunks == 1
        assert retriever.history("pods")[-1].what == "saved"
    documents, provenance = retriever.invoke_with_provenance(POD_QUESTION)
    assert provenance.degraded == ()
    assert fetches(world) == [count + 1 for count in before]


def test_an_action_of_the_user_says_that_it_failed(impatient: None, world: PlacedWorld, holder: Holder) -> None:
    """While the lock is held, what the user does raises and changes nothing; afterwards it works."""
    retriever = keeper(world)
    retriever.invoke(POD_QUESTION)
    records = [world.record(doc_id) for doc_id in ("pods", "images")]
    actions: list[Callable[[], Any]] = [
        lambda: retriever.accept_suggestion("images"),
        lambda: retriever.refresh("pods", full_content="Pods again."),
        lambda: retriever.thumbs_up("pods"),
        lambda: retriever.force_pin("pods"),
        lambda: retriever.force_remove("pods"),
        lambda: retriever.decline_suggestion("images"),
        lambda: retriever.run_decay(),
        lambda: retriever.forget_user(),
    ]
    with holder.holding():
        for act in actions:
            with pytest.raises(Exception, match="locked"):
                act()
        assert [world.record(doc_id) for doc_id in ("pods", "images")] == records
        assert doc_ids(cached(retriever.invoke(POD_QUESTION))) == ["pods"]
    for act in actions:
        act()
    assert retriever.documents() == []


def test_threads_all_answer_while_the_lock_is_held(impatient: None, world: PlacedWorld, holder: Holder) -> None:
    """Eight threads of three users ask while the lock is held: no call fails; then each call counts once."""
    retriever = keeper(world)
    users = [USER, "bob", "cy"]
    for user_id in users:
        world.save(retriever, "pods", PODS, user_id=user_id)
    world.shows(document("images", "Images are read only."))
    answers: list[list[str | None]] = []
    degraded: list[tuple[str, ...]] = []

    def ask(number: int) -> None:
        for _ in range(3):
            found = retriever.invoke_with_provenance(POD_QUESTION, user_id=users[number % 3])
            answers.append(doc_ids(found.documents))
            degraded.append(tuple(found.provenance.degraded))

    def ask_together() -> None:
        threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=120)
        assert not any(thread.is_alive() for thread in threads)

    with holder.holding():
        ask_together()
    assert answers == [["pods", "images"]] * 24
    assert all(len(told) == 1 and "counted" in told[0] for told in degraded)
    assert [world.store.get(user_id, "images") for user_id in users] == [None] * 3
    answers.clear()
    degraded.clear()
    sa.event.listen(sa.pool.Pool, "checkout", _be_patient)
    try:
        ask_together()
    finally:
        sa.event.remove(sa.pool.Pool, "checkout", _be_patient)
    assert answers == [["pods", "images"]] * 24
    assert degraded == [()] * 24
    assert [world.record("images", user_id).fetch_count for user_id in users] == [9, 9, 6]


def _be_patient(connection: sqlite3.Connection, *_: object) -> None:
    connection.execute("PRAGMA busy_timeout=30000")


def test_a_count_may_come_late(world: PlacedWorld, holder: Holder) -> None:
    """A lock that is let go in time costs nothing: the query that waited for it is counted, and nothing is degraded."""
    retriever = keeper(world)
    retriever.invoke(POD_QUESTION)
    before = fetches(world)
    waits = threading.Event()

    def notice(statement: str) -> None:
        if statement == "BEGIN IMMEDIATE":
            waits.set()

    def watch(connection: sqlite3.Connection, *_: object) -> None:
        connection.set_trace_callback(notice)

    results: list[Any] = []
    asking = threading.Thread(target=lambda: results.append(retriever.invoke_with_provenance(POD_QUESTION)))
    holder.take()
    sa.event.listen(sa.pool.Pool, "checkout", watch)
    try:
        asking.start()
        assert waits.wait(timeout=60)
        assert asking.is_alive()
    finally:
        sa.event.remove(sa.pool.Pool, "checkout", watch)
        holder.release()
    asking.join(timeout=60)
    ((documents, provenance),) = results
    assert doc_ids(documents) == ["pods", "images"]
    assert provenance.degraded == ()
    assert fetches(world) == [count + 1 for count in before]


def test_the_decay_job_outlives_a_lock(
    impatient: None, world: PlacedWorld, holder: Holder, caplog: pytest.LogCaptureFixture
) -> None:
    """A run that meets the lock is logged and the schedule goes on: the next run does its work."""
    retriever = keeper(world)
    turns = [threading.Event() for _ in range(2)]
    waiting: list[int] = []
    go_on = threading.Event()

    def wait(_stopping: threading.Event, _seconds: float) -> bool:
        turn = len(waiting)
        waiting.append(turn)
        if turn < len(turns):
            turns[turn].set()
        go_on.wait(timeout=60)
        go_on.clear()
        return turn >= 1

    scheduler = DecayScheduler(retriever.decay_engine, world.store, clock=world.clock, wait=wait)
    world.clock.turn(days=10)
    holder.take()
    with caplog.at_level(logging.ERROR, logger="rag_wiki"):
        scheduler.start()
        assert turns[0].wait(timeout=60)
    assert "could not begin" in caplog.text
    assert world.record("pods").decay_score == 1.0
    holder.release()
    go_on.set()
    assert turns[1].wait(timeout=60)
    go_on.set()
    scheduler.stop()
    assert world.record("pods").decay_score < 1.0


def test_a_file_can_be_opened_while_it_is_held(impatient: None, world: PlacedWorld, holder: Holder) -> None:
    """A process that starts while another one writes reads what is saved at once: its copies answer."""
    fresh = world.reopened()
    with holder.holding():
        documents, provenance = keeper(fresh).invoke_with_provenance(POD_QUESTION)
        assert doc_ids(cached(documents)) == ["pods"]
        assert ["counted" in told for told in provenance.degraded] == [True]
        assert fresh.state("pods") is DocumentState.CLAIMED


def test_patience_can_be_set_in_the_url(tmp_path: Path) -> None:
    """`?timeout=` of a SQLite URL, which SQLAlchemy documents, decides how long a connection waits for a lock."""
    told: list[int] = []

    def look(connection: sqlite3.Connection, *_: object) -> None:
        told.extend(connection.execute("PRAGMA busy_timeout").fetchone())

    sa.event.listen(sa.pool.Pool, "checkout", look)
    try:
        with SQLiteStateStore(f"sqlite:///{tmp_path / 'quick.db'}?timeout=0.5") as store:
            store.list_active_users()
    finally:
        sa.event.remove(sa.pool.Pool, "checkout", look)
    assert set(told) == {500}
