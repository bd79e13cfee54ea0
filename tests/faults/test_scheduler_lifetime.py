"""The decay job's timer is its owner's: it keeps no process alive, ends when told, and can be started again."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Literal

import pytest
from helpers import START, HandClock

from rag_wiki import DecayEngine, DocumentState, MemoryStateStore, StateStore, UserDocRecord
from rag_wiki.lifecycle.decay_engine import DecayResult
from rag_wiki.scheduler import DecayScheduler

Backend = Literal["simple", "apscheduler"]
pytestmark = pytest.mark.parametrize("backend", ["simple", "apscheduler"])
TIMEOUT = 20
"""Seconds after which what should have happened long ago has failed."""

PROGRAM = """
import os, sys, threading
from rag_wiki import DecayEngine, DocumentState, MemoryStateStore, UserDocRecord
from rag_wiki.scheduler import DecayScheduler

backend, path = sys.argv[1:]
if path:
    from rag_wiki.storage.sqlite import SQLiteStateStore
    store = SQLiteStateStore(path)
else:
    store = MemoryStateStore()
for user_id in ("ada", "bob"):
    store.upsert(UserDocRecord(user_id, "d", "D", "", user_state=DocumentState.CLAIMED))

class Engine(DecayEngine):
    ran, go, seconds = threading.Event(), threading.Event(), 0.0

    def run_pages(self, user_id, now=None):
        self.ran.set()
        if self.seconds:
            self.go.wait(self.seconds)
            print("the run went on", flush=True)
        return super().run_pages(user_id, now)

engine = Engine(store)
scheduler = DecayScheduler(engine, store, backend=backend, interval_hours=24)
"""


def run_program(backend: Backend, program: str, path: str = "") -> tuple[int, str, str]:
    """Exit code, output and standard error of a program that has a scheduler over a store with two users."""
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM + program, backend, path],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return ended.returncode, ended.stdout, ended.stderr


def test_a_program_ends_although_a_day_is_left(backend: Backend, tmp_path: Path) -> None:
    """A program that ran the job once and waits for the next day ends with its main: code 0, nothing on stderr."""
    program = "scheduler.start()\nassert engine.ran.wait(20)\nprint('main is done')\n"
    assert run_program(backend, program, f"sqlite:///{tmp_path / 'state.db'}") == (0, "main is done\n", "")


def test_a_program_that_fails_ends_too(backend: Backend) -> None:
    """An exception in main ends the process with its own traceback and nothing else."""
    code, output, error = run_program(
        backend, "scheduler.start()\nassert engine.ran.wait(20)\nraise SystemExit('no')\n"
    )
    assert (code, output, error) == (1, "", "no\n")


def test_a_store_may_be_closed_before_the_end(backend: Backend, tmp_path: Path) -> None:
    """After `stop` the store can be closed and its file removed, and the program ends without a word."""
    program = (
        "scheduler.start()\nassert engine.ran.wait(20)\nscheduler.stop()\nstore.close()\n"
        "os.remove(path.removeprefix('sqlite:///'))\nprint('main is done')\n"
    )
    assert run_program(backend, program, f"sqlite:///{tmp_path / 'state.db'}") == (0, "main is done\n", "")
    assert list(tmp_path.iterdir()) == []


def test_a_run_under_way_does_not_keep_the_process(backend: Backend) -> None:
    """A program whose main ends in the middle of a run ends with it; the run is not waited for."""
    program = "engine.seconds = 2.0\nscheduler.start()\nassert engine.ran.wait(20)\nprint('main is done', flush=True)\n"
    assert run_program(backend, program) == (0, "main is done\n", "")


FORKED = """
import signal, warnings

# Python 3.12 warns of a fork beside threads.
warnings.simplefilter("ignore", DeprecationWarning)
engine.seconds = 60.0
scheduler.start()
assert engine.ran.wait(20)
child = os.fork()
if not child:
    print("running in the child:", scheduler.is_running)
    # Ends this process should it wait.
    signal.alarm(6)
    scheduler.stop(timeout=60)
    print("stopped:", not scheduler.is_running)
    scheduler.start()
    print("started:", scheduler.is_running)
    scheduler.stop()
    print("stopped again:", not scheduler.is_running, flush=True)
    os._exit(0)
print("child:", os.waitpid(child, 0)[1])
print("running in the parent:", scheduler.is_running)
engine.go.set()
scheduler.stop()
print("running in the end:", scheduler.is_running)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="this system has no fork")
def test_a_fork_has_no_timer_until_it_starts_one(backend: Backend) -> None:
    """Forked in the middle of a run, a process has no timer and nobody to wait for; started there, it has its own."""
    code, output, error = run_program(backend, FORKED)
    assert (code, error) == (0, "")
    assert output.splitlines() == [
        "running in the child: False",
        "stopped: True",
        "started: True",
        "stopped again: True",
        "child: 0",
        "running in the parent: True",
        "the run went on",
        "running in the end: False",
    ]


class HeldEngine(DecayEngine):
    """Stops at the first user until it is let go, and notes whom it ran for."""

    def __init__(self, store: StateStore) -> None:
        super().__init__(store)
        self.ran: list[str] = []
        self.begun, self.go = threading.Event(), threading.Event()

    def run_pages(self, user_id: str, now: datetime | None = None) -> Iterator[list[DecayResult]]:
        """Run for a user when it is let go."""
        self.ran.append(user_id)
        self.begun.set()
        assert self.go.wait(TIMEOUT)
        return super().run_pages(user_id, now)


def store_of_three() -> MemoryStateStore:
    """A store with three users who saved something."""
    store = MemoryStateStore()
    for user_id in ("ada", "bob", "eve"):
        store.upsert(UserDocRecord(user_id, "d", "D", "", user_state=DocumentState.CLAIMED, last_fetched_at=START))
    return store


def new_threads(before: list[threading.Thread]) -> list[threading.Thread]:
    """The threads that there are now and were not before."""
    return [thread for thread in threading.enumerate() if thread not in before]


def test_stopping_in_a_run_ends_it_after_the_user_it_is_at(backend: Backend) -> None:
    """`stop(timeout=0)` returns with the run under way; that ends with its user, and no thread is left."""
    before = threading.enumerate()
    store = store_of_three()
    engine = HeldEngine(store)
    scheduler = DecayScheduler(engine, store, backend=backend)
    scheduler.start()
    assert engine.begun.wait(TIMEOUT)
    scheduler.stop(timeout=0)
    # Had it waited for the run, it would be waiting still.
    assert (scheduler.is_running, engine.go.is_set()) == (False, False)
    engine.go.set()
    for thread in new_threads(before):
        thread.join(TIMEOUT)
    assert new_threads(before) == []
    assert engine.ran == ["ada"]


def test_stopping_from_within_a_run_waits_for_nobody(backend: Backend) -> None:
    """A run that stops its own scheduler (from a callback, say) goes on to its end; the scheduler runs no more."""
    before, stopped = threading.enumerate(), threading.Event()
    store = store_of_three()

    class Stopping(DecayEngine):
        def run_pages(self, user_id: str, now: datetime | None = None) -> Iterator[list[DecayResult]]:
            scheduler.stop(timeout=TIMEOUT)
            stopped.set()
            return super().run_pages(user_id, now)

    scheduler = DecayScheduler(Stopping(store), store, backend=backend)
    scheduler.start()
    assert stopped.wait(TIMEOUT / 2)
    assert not scheduler.is_running
    for thread in new_threads(before):
        thread.join(TIMEOUT)
    assert new_threads(before) == []


def test_starting_and_stopping_any_number_of_times(backend: Backend) -> None:
    """Stops in a row, starts in a row, starts from eight threads: one timer, one run, and none after a stop."""
    before = threading.enumerate()
    store = store_of_three()
    engine = HeldEngine(store)
    engine.go.set()
    scheduler = DecayScheduler(engine, store, backend=backend, clock=HandClock())
    scheduler.stop()
    scheduler.stop()
    assert not scheduler.is_running
    starting = [threading.Thread(target=scheduler.start) for _ in range(8)]
    for thread in starting:
        thread.start()
    for thread in starting:
        thread.join(TIMEOUT)
    scheduler.start()
    assert scheduler.is_running
    assert engine.begun.wait(TIMEOUT)
    assert sum(thread.name in ("rag_wiki-decay", "APScheduler") for thread in new_threads(before)) == 1
    scheduler.stop()
    scheduler.stop()
    assert not scheduler.is_running
    for thread in new_threads(before):
        thread.join(TIMEOUT)
    first = list(engine.ran)
    assert first == ["ada", "bob", "eve"][: len(first)]
    # The clock stands: the turn has been taken, and a second start finds nothing due.
    scheduler.start()
    assert scheduler.is_running
    scheduler.stop()
    assert engine.ran == first
    assert new_threads(before) == []


def test_a_block_starts_and_stops_also_when_it_fails(backend: Backend) -> None:
    """`with` runs the scheduler within its block, lets the block's exception through, and can be entered again."""
    store = store_of_three()
    engine = HeldEngine(store)
    engine.go.set()
    scheduler = DecayScheduler(engine, store, backend=backend)

    def fail_inside() -> None:
        with scheduler as entered:
            assert entered is scheduler
            assert scheduler.is_running
            raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        fail_inside()
    assert not scheduler.is_running
    with scheduler:
        assert scheduler.is_running
        assert [result.doc_id for result in scheduler.run_now("bob")] == ["d"]
        assert sorted(scheduler.run_all_users()) == ["ada", "bob", "eve"]
    assert not scheduler.is_running
