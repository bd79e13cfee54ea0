"""However many workers there are, the decay job is done once: each step of a document, each event, each turn."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from datetime import datetime, timedelta
from typing import Any, Literal

import pytest
from helpers import START, HandClock
from places import PlacedWorld
from scenarios import story

from rag_wiki import DecayConfig, DecayEngine, DocumentState, MemoryStateStore, StateStore, UserDocRecord
from rag_wiki.lifecycle.decay_engine import DecayResult
from rag_wiki.scheduler import DecayScheduler

CLAIMED, DEMOTED, PINNED = DocumentState.CLAIMED, DocumentState.DEMOTED, DocumentState.PINNED
PATIENCE = 60.0
"""Seconds after which a wait is a failure; no test that passes waits for long."""
USERS = ("ada", "bob", "cleo", "dan")


def days(count: float) -> datetime:
    """So many days before the start."""
    return START - timedelta(days=count)


def records(user_id: str) -> list[UserDocRecord]:
    """Documents of a user to which a run at the start does all that it can do."""
    saved: dict[str, Any] = {"doc_title": "T", "doc_path": "", "user_state": CLAIMED, "cached_at": days(300)}
    old, used = {"last_fetched_at": days(200)}, {"last_fetched_at": START, "fetch_count": 20, "explicit_signal": 1.0}
    documents: dict[str, dict[str, Any]] = {
        "begins to sink": old,
        "sinks": {**old, "demotion_candidate_since": days(3)},
        "sinks, a day to go": {**old, "demotion_candidate_since": days(2)},
        "rises": {**used, "pin_candidate_since": days(7)},
        "rises, a day to go": {**used, "pin_candidate_since": days(6)},
        "recovers": {**used, "demotion_candidate_since": days(5)},
        "falls": {**old, "user_state": PINNED, "pinned_at": days(100)},
        "the user's": {**old, "user_state": PINNED, "pinned_at": days(100), "pinned_by_user": True},
        "is as it was": {"last_fetched_at": days(10), "fetch_count": 5},
    }
    return [UserDocRecord(user_id, doc_id, **{**saved, **fields}) for doc_id, fields in documents.items()]


AFTERWARDS = {
    "begins to sink": CLAIMED,
    "sinks": DEMOTED,
    "sinks, a day to go": CLAIMED,
    "rises": PINNED,
    "rises, a day to go": CLAIMED,
    "recovers": CLAIMED,
    "falls": CLAIMED,
    "the user's": PINNED,
    "is as it was": CLAIMED,
}
MOVED = {"sinks", "rises", "falls"}
CONFIG = DecayConfig(w_chunk_hit=0)


def fill(store: StateStore) -> None:
    """Keep the documents of all users."""
    for user_id in USERS:
        for record in records(user_id):
            store.upsert(record)


def standing(store: StateStore) -> dict[str, Any]:
    """All records and histories."""
    return {
        user_id: [
            (asdict(replace(record, life=0)), store.history(user_id, record.doc_id))
            for record in store.list_by_state(user_id, content=False)
        ]
        for user_id in USERS
    }


def after_one_run() -> dict[str, Any]:
    """What a single run leaves."""
    store = MemoryStateStore()
    fill(store)
    DecayScheduler(DecayEngine(store, config=CONFIG), store, clock=HandClock()).run_all_users()
    return standing(store)


def transitions(results: dict[str, list[DecayResult]]) -> list[tuple[str, str]]:
    """The documents that moved."""
    return [(user_id, result.doc_id) for user_id, own in results.items() for result in own if result.transitioned]


WORKER = """
import json, sys
from datetime import datetime
from rag_wiki import DecayConfig, DecayEngine
from rag_wiki.scheduler import DecayScheduler

kind, place, now = sys.argv[1:]
now = datetime.fromisoformat(now)
if kind == "valkey":
    import redis
    from rag_wiki.storage.redis_store import RedisStateStore
    store = RedisStateStore(redis.Redis(host="127.0.0.1", port=int(place)))
elif kind == "sqlite":
    from rag_wiki.storage.sqlite import SQLiteStateStore
    store = SQLiteStateStore(place)
else:
    from rag_wiki.storage.sql import SQLStateStore
    store = SQLStateStore(place)
scheduler = DecayScheduler(DecayEngine(store, config=DecayConfig(w_chunk_hit=0)), store, clock=lambda: now)
print("ready", flush=True)
sys.stdin.readline()
moved = []
for _ in range(2):
    for user, results in scheduler.run_all_users().items():
        moved += [(user, result.doc_id) for result in results if result.transitioned]
print(json.dumps([moved, sorted(scheduler.failures)]), flush=True)
store.close()
"""


@pytest.mark.parametrize("kind", ["sqlite", "postgres", "valkey"])
def test_two_processes_at_once_do_what_one_does(
    kind: str, make_store: Callable[[str], StateStore], request: pytest.FixtureRequest, tmp_path: Any
) -> None:
    """Two workers run the job for all at once, and each again right after: every step and event is there once."""
    store = make_store({"sqlite": "sqlite-file"}.get(kind, kind))
    fill(store)
    if kind == "sqlite":
        place = f"sqlite:///{tmp_path / 'state.db'}"
    else:
        place = str(request.getfixturevalue({"postgres": "postgres_url", "valkey": "valkey_port"}[kind]))
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    command = [sys.executable, "-c", WORKER, kind, place, START.isoformat()]
    workers = [subprocess.Popen(command, text=True, **pipes) for _ in range(2)]
    try:
        for worker in workers:
            assert worker.stdout is not None
            assert worker.stdout.readline() == "ready\n"
        for worker in workers:
            assert worker.stdin is not None
            worker.stdin.write("go\n")
            worker.stdin.flush()
        told = [worker.communicate(timeout=PATIENCE) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    assert [errors for _, errors in told] == ["", ""]
    answers = [json.loads(answer) for answer, _ in told]
    assert [failures for _, failures in answers] == [[], []]
    moved = [tuple(step) for steps, _ in answers for step in steps]
    assert sorted(moved) == sorted((user_id, doc_id) for user_id in USERS for doc_id in MOVED)
    assert standing(store) == after_one_run()


def test_two_workers_and_a_third_time_do_what_one_does(world: PlacedWorld) -> None:
    """In every place: two workers at once, and one of them once more, leave records and histories of a single run."""
    stores = [world.store, world.reopened().store]
    fill(stores[0])
    engines = [DecayEngine(store, config=CONFIG, chunk_store=world.retriever().chunk_store) for store in stores]
    schedulers = [
        DecayScheduler(engine, store, clock=world.clock) for engine, store in zip(engines, stores, strict=True)
    ]
    begin = threading.Barrier(2, timeout=PATIENCE)

    def run(scheduler: DecayScheduler) -> dict[str, list[DecayResult]]:
        begin.wait()
        return scheduler.run_all_users()

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(run, schedulers))
    results.append(schedulers[0].run_all_users())
    assert transitions(results[2]) == []
    moved = [step for result in results for step in transitions(result)]
    assert sorted(moved) == sorted((user_id, doc_id) for user_id in USERS for doc_id in MOVED)
    assert standing(stores[0]) == after_one_run()
    states = {record.doc_id: record.user_state for record in stores[0].list_by_state("ada")}
    assert states == AFTERWARDS


@pytest.mark.parametrize("runs_a_day", [1, 5])
def test_hold_days_are_days_and_not_runs(world: PlacedWorld, runs_a_day: int) -> None:
    """However often two workers run the job, a document sinks for three days and rises for seven before it moves."""
    stores = [world.store, world.reopened().store]
    config = DecayConfig(w_chunk_hit=0, w_frequency=0, w_explicit=0, decay_lambda=0.01)
    store = stores[0]
    # Its recency holds above the pin threshold for sixteen days.
    store.upsert(UserDocRecord("ada", "rises", "T", "", user_state=CLAIMED, last_fetched_at=START))
    store.upsert(UserDocRecord("ada", "sinks", "T", "", user_state=CLAIMED, last_fetched_at=days(400)))
    schedulers = [DecayScheduler(DecayEngine(one, config=config), one, clock=world.clock) for one in stores]
    moved: dict[str, float] = {}
    for step in range(8 * runs_a_day):
        for scheduler in schedulers:
            for _, doc_id in transitions(scheduler.run_all_users()):
                assert doc_id not in moved
                moved[doc_id] = step / runs_a_day
        world.clock.now = START + timedelta(days=(step + 1) / runs_a_day)
    assert moved == {"sinks": 3.0, "rises": 7.0}
    assert story(store.history("ada", "sinks")) == [("demoted", "CLAIMED", "DEMOTED")]
    assert story(store.history("ada", "rises")) == [("pinned", "CLAIMED", "PINNED")]


def test_clocks_that_differ_do_not_shorten_the_hold(world: PlacedWorld) -> None:
    """Of two workers whose clocks are an hour apart, the first to see a document sink says since when."""
    store = world.store
    store.upsert(UserDocRecord("ada", "sinks", "T", "", user_state=CLAIMED, last_fetched_at=days(400)))
    late = HandClock(START + timedelta(hours=1))
    workers = [DecayScheduler(DecayEngine(store), store, clock=clock) for clock in (world.clock, late)]
    for worker in workers:
        worker.run_all_users()
    assert world.record("sinks").demotion_candidate_since == START
    for clock in (world.clock, late):
        clock.turn(days=3)
    assert [transitions(worker.run_all_users()) for worker in workers] == [[("ada", "sinks")], []]


# -- turns


class Turns:
    """A `wait` that tells when a worker has nothing to do, and lets it go on."""

    def __init__(self) -> None:
        self.asked: queue.Queue[float] = queue.Queue()
        self.go: queue.Queue[bool] = queue.Queue()

    def __call__(self, stopping: threading.Event, seconds: float) -> bool:
        self.asked.put(seconds)
        self.go.get(timeout=PATIENCE)
        return stopping.is_set()


class CountingEngine(DecayEngine):
    """Notes for whom it ran."""

    ran: list[str]

    def run_pages(self, user_id: str, now: datetime | None = None) -> Iterator[list[DecayResult]]:
        self.ran.append(user_id)
        return super().run_pages(user_id, now)


def test_of_all_workers_one_takes_each_turn(lasting_world: PlacedWorld) -> None:
    """Four workers over one store are due at the same moment, three times: the job runs three times."""
    world = lasting_world
    world.store.upsert(records("ada")[0])
    stores = [world.store, *(world.reopened().store for _ in range(3))]
    engines, waits = [CountingEngine(store, clock=world.clock) for store in stores], [Turns() for _ in stores]
    workers = []
    for engine, store, wait in zip(engines, stores, waits, strict=True):
        engine.ran = []
        workers.append(DecayScheduler(engine, store, clock=world.clock, wait=wait))
    for worker in workers:
        worker.start()
    for turn in (1, 2, 3):
        for wait in waits:
            assert wait.asked.get(timeout=PATIENCE) > 0
        assert [user_id for engine in engines for user_id in engine.ran] == ["ada"] * turn
        world.clock.turn(hours=24)
        if turn == 3:
            for worker in workers:
                worker.stop(timeout=0)
        for wait in waits:
            wait.go.put(True)
    for worker in workers:
        worker.stop(timeout=PATIENCE)


def test_a_worker_that_died_does_not_keep_the_turn(world: PlacedWorld) -> None:
    """A worker takes the turn and dies in the middle: the others have the next one, and lose nothing by it."""
    fill(world.store)
    half = DecayEngine(world.store, config=CONFIG)
    assert world.store.claim_job("decay", START, timedelta(hours=24))
    for user_id in USERS[:2]:
        half.run_for_user(user_id, START)
    assert not world.store.claim_job("decay", START + timedelta(hours=23), timedelta(hours=24))
    later = HandClock(START + timedelta(hours=24))
    assert world.store.claim_job("decay", later(), timedelta(hours=24))
    results = DecayScheduler(DecayEngine(world.store, config=CONFIG), world.store, clock=later).run_all_users()
    # What was due for the first two was done; the day to go is over for all.
    over = {"sinks, a day to go", "rises, a day to go"}
    assert {user_id: {doc_id for who, doc_id in transitions(results) if who == user_id} for user_id in USERS} == {
        **dict.fromkeys(USERS[:2], over),
        **dict.fromkeys(USERS[2:], MOVED | over),
    }


FORKED = """
import os, sys
from rag_wiki import DecayEngine, DocumentState, MemoryStateStore, UserDocRecord
from rag_wiki.scheduler import DecayScheduler

class Telling(DecayEngine):
    def run_pages(self, user_id, now=None):
        os.write(writing, f"{user_id} in {'parent' if os.getpid() == parent else 'child'}\\n".encode())
        return super().run_pages(user_id, now)

parent, (reading, writing) = os.getpid(), os.pipe()
store = MemoryStateStore()
store.upsert(UserDocRecord("ada", "d", "D", "", user_state=DocumentState.CLAIMED))
scheduler = DecayScheduler(Telling(store), store, backend=sys.argv[1], interval_hours=1e-5)
scheduler.start()
lines = os.fdopen(reading)
assert lines.readline() == "ada in parent\\n"
child = os.fork()
if child == 0:
    before = scheduler.is_running
    scheduler.start()
    while lines.readline() != "ada in child\\n":
        pass  # the parent goes on
    running = scheduler.is_running
    scheduler.stop()
    print(before, running, scheduler.is_running, flush=True)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
print(scheduler.is_running)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.parametrize("backend", ["simple", "apscheduler"])
def test_a_forked_worker_knows_that_it_does_not_run(backend: Literal["simple", "apscheduler"]) -> None:
    """A fork copies no threads: the child says that its scheduler does not run, and can start it."""
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORKED, backend]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert (ended.stdout, ended.stderr, ended.returncode) == ("False True False\nTrue\n", "", 0)


def test_a_single_run_does_all_that_these_tests_count_on() -> None:
    """The documents above are such that a run moves some, marks some, and leaves some alone."""
    before = {record.doc_id: record for record in records("ada")}
    for record, history in after_one_run()["ada"]:
        doc_id = record["doc_id"]
        moved = record["user_state"] is not before[doc_id].user_state
        assert (moved, len(history)) == (doc_id in MOVED, int(doc_id in MOVED))
