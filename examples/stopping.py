"""What the examples share that start servers and processes: stopped by Ctrl-C or SIGTERM, they leave nothing behind.

SIGTERM ends a program where it stands: what it has started runs on, and what it has written stays. An application of
yours is stopped by its server, which has all of this already.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing.resource_tracker import ensure_running
from types import FrameType
from typing import Any, TypeVar

STOPPING = (signal.SIGINT, signal.SIGTERM)
Started = TypeVar("Started")


def stop_cleanly() -> None:
    """From now on, being stopped ends the program as `sys.exit` does: each `with` block is left."""
    for number in STOPPING:
        signal.signal(number, _stop)


def _stop(number: int, _: FrameType | None) -> None:
    for each in STOPPING:
        signal.signal(each, signal.SIG_IGN)  # once is enough: the cleaning up is under way
    raise SystemExit(128 + number)


@contextmanager
def running(start: Callable[[], Started], stop: Callable[[Started], object]) -> Iterator[Started]:
    """Something that is started, and stopped at the end.

    Neither is broken off half-way: nobody could stop what has half started. A signal is obeyed afterwards.
    """
    started: list[Started] = []
    try:
        with undisturbed():
            started.append(start())
        yield started[0]
    finally:
        with undisturbed():
            for each in started:
                stop(each)


@contextmanager
def undisturbed() -> Iterator[None]:
    """A block that is not broken off: a signal that comes meanwhile is obeyed afterwards."""
    came: list[int] = []
    before = {number: signal.signal(number, lambda which, _: came.append(which)) for number in STOPPING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])


@contextmanager
def worker_process(
    initializer: Callable[..., object] | None = None, initargs: tuple[Any, ...] = ()
) -> Iterator[ProcessPoolExecutor]:
    """A process that starts for the block and ends with it: at once, where the block is broken off."""
    # Spawned, not forked: as a server starts its workers, with nothing inherited.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer, initargs) as process:
        try:
            # Not broken off: the process reads what it is to do from this one, and would tell of a half in a traceback.
            with unheard(signal.SIGINT), undisturbed():
                process.submit(int)  # the process starts when there is something to do
            yield process
        except BaseException:
            for child in multiprocessing.active_children():
                child.terminate()
            raise


@contextmanager
def unheard(*signals: signal.Signals) -> Iterator[None]:
    """Programs that start here do not hear these signals; this one hears afterwards what came meanwhile.

    A terminal sends Ctrl-C to all of them. It is for who started them to end them.
    """
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    ensure_running()  # or else the first process would start this one, which lets signals through
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
