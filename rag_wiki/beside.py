"""Running a procedure beside a caller that blocks: saved copies are searched while the wrapped retriever is asked."""

from __future__ import annotations

import contextvars
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

from rag_wiki.forks import in_each_process
from rag_wiki.steps import Procedure, run

__all__ = ["Beside"]

T = TypeVar("T")

_THREADS = 32


class _Threads:
    """The threads, begun when they are needed, and how many of them are free. They don't survive a fork."""

    def __init__(self) -> None:
        in_each_process(self._make)

    def _make(self) -> None:
        self.pool = ThreadPoolExecutor(max_workers=_THREADS, thread_name_prefix="rag_wiki")
        self.free = threading.BoundedSemaphore(_THREADS)


_threads = _Threads()


class Beside(Generic[T]):
    """A procedure that has begun beside its caller.

    What no thread has begun by the time of `result` runs there. So it does when all threads are taken: nobody
    queues behind a search that may itself (in an embedder, an access check) wait for another one.
    """

    def __init__(self, procedure: Procedure[T]) -> None:
        self._procedure = procedure
        self._context = contextvars.copy_context()
        self._free = _threads.free
        self._begun: Future[T] | None = None
        if self._free.acquire(blocking=False):
            self._begun = _threads.pool.submit(self._work)

    def result(self) -> T:
        """What the procedure returns; runs it here if nobody has begun it."""
        if self._begun is None:
            return run(self._procedure)
        return self._work() if self._begun.cancel() else self._begun.result()

    def abandon(self) -> None:
        """Do without the result: what has begun is waited for, what has not never runs."""
        if self._begun is None:
            self._procedure.close()
        elif self._begun.cancel():
            self._free.release()
            self._procedure.close()
        else:
            self._begun.result()

    def _work(self) -> T:
        try:
            return self._context.run(run, self._procedure)
        finally:
            self._free.release()
