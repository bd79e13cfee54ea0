"""The decay scheduler: turns, failures, threads that nobody has to clean up."""

from __future__ import annotations

import math
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from typing import Literal

import pytest
from helpers import START, HandClock

from rag_wiki import (
    ConfigurationError,
    CorruptDataError,
    DecayEngine,
    DocumentState,
    MemoryStateStore,
    StateStore,
    UserDocRecord,
)
from rag_wiki.lifecycle.decay_engine import DecayResult
from rag_wiki.scheduler import DecayScheduler

TIMEOUT = 20
"""Seconds after which a test that should have ended long ago fails."""


class Turns:
    """A `wait` that a test steps: `ask` tells how long the scheduler wants to wait, `go` lets it go on."""

    def __init__(self, clock: HandClock) -> None:
        self._clock = clock
        self._asked: queue.Queue[float] = queue.Queue()
        self._go: queue.Queue[bool] = queue.Queue()

    def __call__(self, stopping: threading.Event, seconds: float) -> bool:
        self._asked.put(seconds)
        self._go.get(timeout=TIMEOUT)
        return stopping.is_set()

    def ask(self) -> float:
        """The next wait that the scheduler asks for, in seconds."""
        return self._asked.get(timeout=TIMEOUT)

    def go(self, *, hours: float = 0) -> None:
        """Turn the clock and end the wait."""
        self._clock.turn(hours=hours)
        self._go.put(True)


class RecordingEngine(DecayEngine):
    """Notes whom it ran for, and fails for some."""

    def __init__(self, store: StateStore, clock: HandClock, failing: tuple[str, ...] = ()) -> None:
        super().__init__(store, clock=clock)
        self.ran: list[tuple[str, datetime | None]] = []
        self.failing = failing
        self.ran_once = threading.Event()

    def run_pages(self, user_id: str, now: datetime | None = None) -> Iterator[list[DecayResult]]:
        self.ran.append((user_id, now))
        self.ran_once.set()
        if user_id in self.failing:
            message = f"no data for {user_id}"
            raise RuntimeError(message)
        return super().run_pages(user_id, now)


def saved(user_id: str, doc_id: str = "d", **fields: object) -> UserDocRecord:
    """The record of a saved document that was fetched at the start."""
    values: dict[str, object] = {"user_state": DocumentState.CLAIMED, "last_fetched_at": START, **fields}
    return UserDocRecord(user_id, doc_id, "D", "", **values)  # type: ignore[arg-type]  # fields by name


@pytest.fixture
def clock() -> HandClock:
    """A clock turned by hand."""
    return HandClock()


def test_it_goes_by_the_clock_of_its_engine(clock: HandClock) -> None:
    """A retriever's clock that is turned by hand is the job's, too: what a run scores is as of then."""
    store = MemoryStateStore()
    scheduler = DecayScheduler(DecayEngine(store, clock=clock), store)
    store.upsert(saved("ada"))
    clock.turn(days=30)
    (result,) = scheduler.run_now("ada")
    assert result.new_score == pytest.approx(0.40 * math.exp(-0.05 * 30) / 1.05)


def test_runs_for_every_active_user_and_returns_their_results(state_store: StateStore, clock: HandClock) -> None:
    """`run_all_users` scores each user with saved documents, and nobody else."""
    state_store.upsert(saved("ada"))
    state_store.upsert(saved("bob"))
    state_store.upsert(UserDocRecord("eve", "d", "D", ""))
    scheduler = DecayScheduler(DecayEngine(state_store, clock=clock), state_store, clock=clock)
    results = scheduler.run_all_users()
    assert {user: [result.doc_id for result in rows] for user, rows in results.items()} == {"ada": ["d"], "bob": ["d"]}
    assert results["ada"][0].new_score == pytest.approx(0.40 / 1.05)
    assert state_store.job_time("decay") == START


def test_one_users_failure_does_not_stop_the_next(
    state_store: StateStore, clock: HandClock, caplog: pytest.LogCaptureFixture
) -> None:
    """A user whose data fails is named in the log and in `failures`; the users after it are done."""
    for user in ("u1", "u2", "u3"):
        state_store.upsert(saved(user))
    engine = RecordingEngine(state_store, clock, failing=("u2",))
    scheduler = DecayScheduler(engine, state_store, clock=clock)
    assert sorted(scheduler.run_all_users()) == ["u1", "u3"]
    assert [user for user, _ in engine.ran] == ["u1", "u2", "u3"]
    assert str(scheduler.failures["u2"]) == "no data for u2"
    assert "u2" in caplog.text


def test_run_now_runs_one_user(state_store: StateStore, clock: HandClock) -> None:
    """`run_now` scores the documents of the user it names."""
    state_store.upsert(saved("ada"))
    state_store.upsert(saved("bob"))
    engine = RecordingEngine(state_store, clock)
    results = DecayScheduler(engine, state_store, clock=clock).run_now("bob")
    assert [result.doc_id for result in results] == ["d"]
    assert engine.ran == [("bob", START)]


def test_a_late_start_runs_at_once_and_then_waits_for_what_is_left(clock: HandClock) -> None:
    """An overdue run begins at once; after it the scheduler waits until the interval is over."""
    store, turns = MemoryStateStore(), Turns(clock)
    store.upsert(saved("ada"))
    store.claim_job("decay", START - timedelta(hours=25), timedelta(0))
    engine = RecordingEngine(store, clock)
    scheduler = DecayScheduler(engine, store, interval_hours=1, clock=clock, wait=turns)
    scheduler.start()
    assert turns.ask() == 3600
    assert engine.ran == [("ada", START)]
    turns.go(hours=1)
    assert turns.ask() == 3600
    assert [now for _, now in engine.ran] == [START, START + timedelta(hours=1)]
    scheduler.stop(timeout=0)
    turns.go()
    assert not scheduler.is_running


def test_a_start_within_the_interval_waits_for_the_rest(clock: HandClock) -> None:
    """A run that another process began lately is not repeated: the rest of the interval is waited for."""
    store, turns = MemoryStateStore(), Turns(clock)
    store.upsert(saved("ada"))
    store.claim_job("decay", START - timedelta(minutes=20), timedelta(0))
    engine = RecordingEngine(store, clock)
    scheduler = DecayScheduler(engine, store, interval_hours=1, clock=clock, wait=turns)
    scheduler.start()
    assert turns.ask() == 40 * 60
    assert engine.ran == []
    scheduler.stop(timeout=0)
    turns.go()


def test_two_schedulers_take_one_turn(clock: HandClock) -> None:
    """Of two workers that share a store one runs the job, and the other waits for the next turn."""
    store = MemoryStateStore()
    store.upsert(saved("ada"))
    engines = [RecordingEngine(store, clock) for _ in range(2)]
    turns = [Turns(clock) for _ in range(2)]
    schedulers = [
        DecayScheduler(engine, store, clock=clock, wait=own) for engine, own in zip(engines, turns, strict=True)
    ]
    for scheduler in schedulers:
        scheduler.start()
    assert [own.ask() for own in turns] == [3600, 3600]
    assert sum(len(engine.ran) for engine in engines) == 1
    for scheduler, own in zip(schedulers, turns, strict=True):
        scheduler.stop(timeout=0)
        own.go()


def test_running_twice_is_running_once(state_store: StateStore, clock: HandClock) -> None:
    """Two runs at one time leave the records and the history that one run leaves."""
    state_store.upsert(saved("ada", last_fetched_at=START - timedelta(days=400)))
    scheduler = DecayScheduler(DecayEngine(state_store, clock=clock), state_store, clock=clock)
    scheduler.run_all_users()
    clock.turn(days=3)
    scheduler.run_all_users()
    once = (state_store.get("ada", "d"), state_store.history("ada", "d"))
    scheduler.run_all_users()
    assert (state_store.get("ada", "d"), state_store.history("ada", "d")) == once
    assert once[0] is not None
    assert once[0].user_state is DocumentState.DEMOTED
    assert [event.what for event in once[1]] == ["demoted"]


def test_a_run_that_fails_as_a_whole_is_followed_by_the_next(
    clock: HandClock, caplog: pytest.LogCaptureFixture
) -> None:
    """A store that is down when a run begins does not end the schedule."""

    class Failing(MemoryStateStore):
        down = True

        def active_users(self) -> tuple[list[str], dict[str, CorruptDataError]]:
            if self.down:
                message = "store is down"
                raise ConnectionError(message)
            return super().active_users()

    store, turns = Failing(), Turns(clock)
    store.upsert(saved("ada"))
    engine = RecordingEngine(store, clock)
    scheduler = DecayScheduler(engine, store, interval_hours=1, clock=clock, wait=turns)
    scheduler.start()
    turns.ask()
    assert engine.ran == []
    assert "store is down" in caplog.text
    store.down = False
    turns.go(hours=1)
    turns.ask()
    assert [user for user, _ in engine.ran] == ["ada"]
    scheduler.stop(timeout=0)
    turns.go()


@pytest.mark.parametrize("backend", ["simple", "apscheduler"])
class TestBothBackends:
    """What holds for either timer."""

    def test_start_and_stop_are_idempotent(self, backend: Literal["simple", "apscheduler"], clock: HandClock) -> None:
        """Starting twice is one timer; stopping twice, or before any start, is no error."""
        store, before = MemoryStateStore(), threading.enumerate()
        scheduler = DecayScheduler(DecayEngine(store), store, backend=backend)
        scheduler.stop()
        store.claim_job("decay", datetime.now(START.tzinfo), timedelta(0))
        scheduler.start()
        scheduler.start()
        assert scheduler.is_running
        names = {"rag_wiki-decay", "APScheduler"}
        timers = [thread for thread in threading.enumerate() if thread.name in names and thread not in before]
        assert len(timers) == 1
        scheduler.stop()
        scheduler.stop()
        assert not scheduler.is_running

    def test_the_context_manager_starts_and_stops(self, backend: Literal["simple", "apscheduler"]) -> None:
        """In a `with` block the scheduler runs; after it, it does not."""
        store = MemoryStateStore()
        with DecayScheduler(DecayEngine(store), store, backend=backend) as scheduler:
            assert scheduler.is_running
        assert not scheduler.is_running

    def test_an_overdue_run_begins_by_itself(
        self, backend: Literal["simple", "apscheduler"], make_store: Callable[[str], StateStore]
    ) -> None:
        """Started with a run overdue, either timer runs it without being told."""
        store = make_store("sqlite-file")
        store.upsert(saved("ada"))
        engine = RecordingEngine(store, HandClock())
        with DecayScheduler(engine, store, backend=backend):
            assert engine.ran_once.wait(TIMEOUT)
        assert engine.ran[0][0] == "ada"

    def test_stop_waits_for_the_run_under_way(self, backend: Literal["simple", "apscheduler"]) -> None:
        """When stop has returned, nothing of the scheduler uses the store any more: it may be closed."""
        store = MemoryStateStore()
        store.upsert(saved("ada"))
        begun, returned = threading.Event(), threading.Event()
        seen_returned: list[bool] = []

        class LongRun(DecayEngine):
            def run_pages(self, user_id: str, now: datetime | None = None) -> Iterator[list[DecayResult]]:
                begun.set()
                seen_returned.append(returned.wait(0.3))
                return super().run_pages(user_id, now)

        with DecayScheduler(LongRun(store), store, backend=backend):
            assert begun.wait(TIMEOUT)
        returned.set()
        assert seen_returned == [False]

    def test_a_scheduler_does_not_keep_the_process_alive(self, backend: str) -> None:
        """A program that starts a scheduler and ends, ends: exit code 0, nothing on standard error."""
        program = (
            "from rag_wiki import DecayEngine, MemoryStateStore\n"
            "from rag_wiki.scheduler import DecayScheduler\n"
            "store = MemoryStateStore()\n"
            f"DecayScheduler(DecayEngine(store), store, backend={backend!r}).start()\n"
            "print('main is done')\n"
        )
        ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
        assert (ended.returncode, ended.stdout, ended.stderr) == (0, "main is done\n", "")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"backend": "cron"}, "backend"),
        ({"interval_hours": 0}, "interval_hours"),
        ({"interval_hours": float("nan")}, "interval_hours"),
        ({"interval_hours": "daily"}, "interval_hours"),
    ],
)
def test_wrong_settings_are_refused(arguments: dict[str, object], named: str) -> None:
    """A setting that can't work is an error that names it."""
    store = MemoryStateStore()
    with pytest.raises(ConfigurationError, match=named):
        DecayScheduler(DecayEngine(store), store, **arguments)  # type: ignore[arg-type]  # that is the point


def test_a_missing_apscheduler_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without APScheduler the error says what to install."""
    monkeypatch.setitem(sys.modules, "apscheduler.schedulers.background", None)
    store = MemoryStateStore()
    with pytest.raises(ImportError, match=r"langchain-rag-wiki\[scheduler\]"):
        DecayScheduler(DecayEngine(store), store, backend="apscheduler")
