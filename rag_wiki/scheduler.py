"""The decay job, run by itself once per interval, by one worker of however many there are.

The job is `DecayEngine.run_for_user` for every user with saved documents, and then `DecayEngine.sweep` for every
user with chunks. When it last began is kept in the state store: a worker that starts late catches up at once, and
workers that share a store take turns.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Protocol

from rag_wiki import events
from rag_wiki.clock import Clock, as_utc, utc_now
from rag_wiki.errors import ConfigurationError, MissingExtraError
from rag_wiki.lifecycle.decay_engine import DecayEngine, DecayResult
from rag_wiki.storage.base import StateStore

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["DecayScheduler"]

_JOB = "decay"
_FAILED = "the decay job failed for user %r; the other users are not affected"
_RETRY_SECONDS = 60.0
"""How long to wait when the store could not say whether the job is due."""
_LONGEST_WAIT_SECONDS = 3600.0
"""Clocks are set and machines sleep: how long a timer trusts one look at the time."""


class _Timer(Protocol):
    """Calls the job each time that it is due, until it is stopped."""

    @property
    def running(self) -> bool: ...

    def stop(self, timeout: float) -> None: ...


class DecayScheduler:
    """Runs the decay job for all users, once per interval.

    Args:
        engine: Does the work for one user.
        store: Knows the users, and when the job last began.
        backend: `"simple"` is a thread of the standard library; `"apscheduler"` uses APScheduler's
            `BackgroundScheduler`. Both are daemons: they never keep a process alive.
        interval_hours: Hours between runs.
        clock: Tells the time; the engine's by default.
        wait: Waits so many seconds, or until the event is set, and tells whether it was set; for tests.

    Raises:
        ConfigurationError: An unknown backend, or an interval that is not a positive number.
        MissingExtraError: APScheduler is not installed.
    """

    def __init__(
        self,
        engine: DecayEngine,
        store: StateStore,
        backend: Literal["simple", "apscheduler"] = "simple",
        interval_hours: float = 24,
        *,
        clock: Clock | None = None,
        wait: Callable[[threading.Event, float], bool] = threading.Event.wait,
    ) -> None:
        if backend not in ("simple", "apscheduler"):
            msg = f"DecayScheduler.backend must be 'simple' or 'apscheduler', got {backend!r}"
            raise ConfigurationError(msg)
        hours_ok = isinstance(interval_hours, (int, float)) and not isinstance(interval_hours, bool)
        if not hours_ok or not math.isfinite(interval_hours) or interval_hours <= 0:
            msg = f"DecayScheduler.interval_hours must be a positive number of hours, got {interval_hours!r}"
            raise ConfigurationError(msg)
        if backend == "apscheduler":
            _apscheduler()
        self.backend = backend
        self.interval = timedelta(hours=interval_hours)
        self.failures: dict[str, Exception] = {}
        """The users whose last run failed, and how."""
        self._engine = engine
        self._store = store
        self._clock = engine.clock if clock is None else clock
        self._wait = wait
        self._stopping = threading.Event()
        self._turn = threading.Lock()
        self._timer: _Timer | None = None
        self._uncertain: datetime | None = None
        """When a turn was asked for, while it is not known whether it was given."""

    @property
    def is_running(self) -> bool:
        """Whether runs are being scheduled in this process."""
        return self._timer is not None and self._timer.running

    def start(self) -> None:
        """Begin to schedule; a second start changes nothing. A run that is overdue begins at once."""
        with self._turn:
            if self.is_running:
                return
            self._stopping = threading.Event()
            if self.backend == "simple":
                self._timer = _ThreadTimer(self._seconds_to_wait, self._tick, self._stopping, self._wait)
            else:
                self._timer = _APSchedulerTimer(self._seconds_to_wait, self._tick, self._stopping)

    def stop(self, timeout: float = 5.0) -> None:
        """Schedule no more. A run under way ends after the user it is at; returns within `timeout` seconds."""
        with self._turn:
            timer, self._timer = self._timer, None
            self._stopping.set()
        if timer is not None:
            timer.stop(timeout)

    def run_now(self, user_id: str) -> list[DecayResult]:
        """Run the job for one user, now."""
        return self._engine.run_for_user(user_id, self._clock())

    def run_all_users(self) -> dict[str, list[DecayResult]]:
        """Run the job for every user with saved documents, now.

        One user's failure does not stop the next: it is logged and kept in `failures`, and the user is not in
        the result. A document that can't be read back is such a failure; the user's others are done all the same.
        """
        self._store.claim_job(_JOB, self._clock(), timedelta(0))
        results: dict[str, list[DecayResult]] = {}

        def run_and_keep(user_id: str, now: datetime) -> None:
            results[user_id] = self._engine.run_for_user(user_id, now)

        self._run(self._store.active_users(), threading.Event(), run_and_keep)
        return results

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _seconds_to_wait(self) -> float:
        """Seconds until the next run is due; none when one is overdue."""
        now = self._clock()
        try:
            last = self._store.job_time(_JOB)
        except Exception as error:  # a store that is down for a while must not end the schedule
            _log_failure("the state store could not tell when the decay job last began", "ask when it is due", error)
            return _RETRY_SECONDS
        if last is None or last == self._uncertain:
            return 0.0
        return max((last + self.interval - now).total_seconds(), 0.0)

    def _tick(self) -> None:
        """Run the job if no other worker has taken this turn. Never raises: the next turn must come."""
        now = self._clock()
        try:
            # Listed first: a turn that was taken and could not be used would be lost.
            users = self._store.active_users()
            if self._takes_turn(now):
                self._run(users, self._stopping, self._run_user)
        except Exception as error:
            _log_failure("the decay job could not begin; it is tried again", "begin", error)

    def _takes_turn(self, now: datetime) -> bool:
        if self._uncertain is not None and self._store.job_time(_JOB) == self._uncertain:
            # The turn was taken, and the answer that said so got lost.
            self._uncertain = None
            return True
        self._uncertain = as_utc(now)
        taken = self._store.claim_job(_JOB, now, self.interval)
        self._uncertain = None
        return taken

    def _run_user(self, user_id: str, now: datetime) -> None:
        """Run the job for a user, and keep no results: nobody asked for them, and there may be very many."""
        for _ in self._engine.run_pages(user_id, now):
            pass

    def _run(
        self,
        found: tuple[Iterable[str], Mapping[str, Exception]],
        stopping: threading.Event,
        run_user: Callable[[str, datetime], None],
    ) -> None:
        users, unreadable = list(found[0]), found[1]
        for user_id, error in unreadable.items():
            _log_failed_user(user_id, error)
        failures = {**unreadable, **self._for_each(users, stopping, run_user)}
        self.failures = failures
        if stopping.is_set():
            return
        try:
            self._engine.tidy()
            owners = self._engine.chunk_owners()
        except Exception as error:
            # What was scored is scored; what crashes left waits for the next run.
            _log_failure("what crashes left could not be looked for", "look for leftovers", error)
            return
        self.failures = failures | self._for_each(owners, stopping, self._sweep)
        if not stopping.is_set():
            events.DECAY_JOB_DONE.log(
                "the decay job ran; users: %d, of them failed: %d",
                len(users) + len(unreadable),
                len(self.failures),
                users=len(users) + len(unreadable),
                failed=len(self.failures),
            )

    def _sweep(self, user_id: str, _: datetime) -> None:
        self._engine.sweep(user_id)

    def _for_each(
        self, users: Iterable[str], stopping: threading.Event, act: Callable[[str, datetime], None]
    ) -> dict[str, Exception]:
        """Act for every user; those for whom it failed, and how."""
        failures: dict[str, Exception] = {}
        for user_id in users:
            if stopping.is_set():
                break
            try:
                act(user_id, self._clock())
            except Exception as error:
                _log_failed_user(user_id, error)
                failures[user_id] = error
        return failures


class _ThreadTimer:
    """One daemon thread that waits until the job is due."""

    def __init__(
        self,
        seconds_to_wait: Callable[[], float],
        tick: Callable[[], None],
        stopping: threading.Event,
        wait: Callable[[threading.Event, float], bool],
    ) -> None:
        self._seconds_to_wait = seconds_to_wait
        self._tick = tick
        self._stopping = stopping
        self._wait = wait
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._loop, name="rag_wiki-decay", daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        # A fork copies this object but not the thread.
        return self._process == os.getpid() and self._thread.is_alive()

    def stop(self, timeout: float) -> None:
        if self._process == os.getpid() and self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def _loop(self) -> None:
        overdue = 0
        while not self._stopping.is_set():
            seconds = self._seconds_to_wait()
            if seconds <= 0 and overdue < 1:
                overdue += 1
                self._tick()
                continue
            # Overdue twice in a row: the turn could not be taken. Asking without a pause would not help.
            overdue = 0
            if self._wait(self._stopping, min(seconds or _RETRY_SECONDS, _LONGEST_WAIT_SECONDS)):
                return


class _APSchedulerTimer:
    """A job of APScheduler's, set anew after each run: the time that the store knows counts, not a rhythm."""

    def __init__(
        self, seconds_to_wait: Callable[[], float], tick: Callable[[], None], stopping: threading.Event
    ) -> None:
        self._scheduler = _apscheduler()(daemon=True, timezone="UTC")
        self._seconds_to_wait = seconds_to_wait
        self._tick = tick
        self._stopping = stopping
        self._at_work = threading.Lock()
        self._running_in: int | None = None
        self._process = os.getpid()
        # A recurring job, although each run sets the next: APScheduler removes a job that has no further run,
        # and a shutdown at that moment fails in its thread.
        self._job = self._scheduler.add_job(
            self._fire,
            "interval",
            seconds=_LONGEST_WAIT_SECONDS,
            next_run_time=self._moment(self._seconds_to_wait()),
            misfire_grace_time=None,
            coalesce=True,
        )
        self._scheduler.start()

    @property
    def running(self) -> bool:
        return self._process == os.getpid() and bool(self._scheduler.running)

    def stop(self, timeout: float) -> None:
        if self._process != os.getpid():
            # The locks may have been copied while a thread of the parent held them.
            return
        if self._scheduler.running:
            self._scheduler.shutdown(wait=False)
        # APScheduler itself waits for ever or not at all; whoever stops will close the store next.
        if self._running_in != threading.get_ident() and self._at_work.acquire(timeout=timeout):
            self._at_work.release()

    def _fire(self) -> None:
        # APScheduler's own threads are waited for when Python ends; a run is not.
        try:
            threading.Thread(target=self._work, name="rag_wiki-decay-run", daemon=True).start()
        except RuntimeError as error:
            # Python 3.12 and later begin no threads while they end; the next process will see to it.
            if "interpreter shutdown" not in str(error):
                raise

    def _work(self) -> None:
        if not self._at_work.acquire(blocking=False):
            # A run that takes longer than the longest wait sets the next one when it is done.
            return
        try:
            self._running_in = threading.get_ident()
            if self._stopping.is_set():
                return
            if self._seconds_to_wait() <= 0:
                self._tick()
            seconds = self._seconds_to_wait() or _RETRY_SECONDS
        finally:
            self._running_in = None
            self._at_work.release()
        # Stopped meanwhile, the job is not there any more, which is just right.
        with contextlib.suppress(LookupError):
            self._job.modify(next_run_time=self._moment(seconds))

    @staticmethod
    def _moment(seconds: float) -> datetime:
        return utc_now() + timedelta(seconds=min(seconds, _LONGEST_WAIT_SECONDS))


def _log_failed_user(user_id: str, error: Exception) -> None:
    events.DECAY_JOB_USER_FAILED.log(_FAILED, user_id, user_id=user_id, error=error, error_type=type(error).__name__)


def _log_failure(message: str, step: str, error: Exception) -> None:
    events.DECAY_JOB_FAILED.log(message, error=error, step=step, error_type=type(error).__name__)


def _apscheduler() -> Any:
    try:
        from apscheduler.schedulers.background import BackgroundScheduler
    except ImportError as error:
        raise MissingExtraError("DecayScheduler(backend='apscheduler')", "scheduler") from error
    return BackgroundScheduler
