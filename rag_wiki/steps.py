"""Logic with input and output in between, written once and driven twice: with and without `await`.

A procedure is a generator. Where it needs something from outside, it yields a `Step` and is sent the
result, or thrown the exception. `run` and `arun` are the two drivers; they differ by one `await`.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import deque
from collections.abc import Awaitable, Callable, Generator, Hashable, Sequence
from functools import partial
from typing import Any, Generic, TypeAlias, TypeVar, cast

from langchain_core.runnables import run_in_executor

from rag_wiki.errors import ConfigurationError

__all__ = ["Convoy", "Procedure", "Step", "arun", "blocking", "call_user", "run"]

A = TypeVar("A")
T = TypeVar("T")
Procedure: TypeAlias = "Generator[Step[Any], Any, T]"
_LoopLane: TypeAlias = "tuple[asyncio.AbstractEventLoop, Hashable]"


class Step(Generic[T]):
    """Something from outside: how to get it while blocking, and how while awaiting.

    Args:
        now: Gets it, blocking.
        later: Gets it, awaiting; `None` for the same way, when it takes no time.
    """

    __slots__ = ("later", "now")

    def __init__(self, now: Callable[[], T], later: Callable[[], Awaitable[T]] | None) -> None:
        self.now, self.later = now, later


def blocking(function: Callable[..., T], *arguments: Any, waits: bool = True) -> Step[T]:
    """Work of our own that blocks (a store, numpy over many rows): off the event loop when awaited.

    Where it is known not to wait, nor to take longer than a switch of threads and back, it stays on the loop.
    """
    if not waits:
        return Step(lambda: function(*arguments), None)
    return Step(
        lambda: function(*arguments),
        lambda: run_in_executor(None, lambda: function(*arguments)),
    )


def call_user(function: Callable[..., T | Awaitable[T]], *arguments: Any, name: str) -> Step[T]:
    """A function of the user's, plain or async; a plain one runs off the event loop when awaited.

    Raises:
        ConfigurationError: An async one was given where nobody can await it.
    """

    def now() -> T:
        result = function(*arguments)
        if inspect.isawaitable(result):
            if inspect.iscoroutine(result):
                result.close()
            msg = f"{name} is async, and this call is not: use the async method (ainvoke, a…), or a plain function"
            raise ConfigurationError(msg)
        return result

    async def later() -> T:
        if inspect.iscoroutinefunction(function):
            return cast("T", await function(*arguments))
        result = await run_in_executor(None, lambda: function(*arguments))
        return cast("T", await result if inspect.isawaitable(result) else result)

    return Step(now, later)


class Convoy(Generic[A, T]):
    """Requests that are made on an event loop: while a job is in its thread, those that come wait for the next one.

    Two hundred calls at once then cost a handful of jobs, and not two hundred switches of threads.

    Args:
        carry: Carries out requests of one key, and returns a result for each; it must not raise but for all.
    """

    most_together = 8
    """Few enough that the thread gives way to the loop soon."""

    def __init__(self, carry: Callable[[Hashable, Sequence[A]], Sequence[T]]) -> None:
        self._carry = carry
        self._waiting: dict[_LoopLane, deque[tuple[A, asyncio.Future[T]]]] = {}
        self._drivers: set[asyncio.Task[None]] = set()

    async def ask(self, key: Hashable, item: A) -> T:
        """The result of a request."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        waiting = self._waiting.get((loop, key))
        if waiting is not None:
            waiting.append((item, future))
        else:
            self._waiting[loop, key] = deque([(item, future)])
            self._start((loop, key))
        return await future

    def _start(self, lane: _LoopLane) -> None:
        # A task of its own: whoever asks may be cancelled, and the others must not be.
        driver = lane[0].create_task(self._drive(lane))
        self._drivers.add(driver)
        driver.add_done_callback(partial(self._ended, lane))

    async def _drive(self, lane: _LoopLane) -> None:
        waiting = self._waiting[lane]
        while waiting:
            job = [waiting.popleft() for _ in range(min(len(waiting), self.most_together))]
            await self._run(lane[1], job)
        del self._waiting[lane]

    def _ended(self, lane: _LoopLane, driver: asyncio.Task[None]) -> None:
        """See that nobody waits for a driver that was cancelled, perhaps before its first step."""
        self._drivers.discard(driver)
        waiting = self._waiting.get(lane)
        if waiting is None or not driver.cancelled():
            return
        left = [item for item in waiting if not item[1].done()]
        waiting.clear()
        waiting.extend(left)
        if left:
            self._start(lane)
        else:
            del self._waiting[lane]

    async def _run(self, key: Hashable, job: Sequence[tuple[A, asyncio.Future[T]]]) -> None:
        try:
            results = await run_in_executor(None, self._carry, key, [item for item, _ in job])
        except BaseException as error:
            for _, future in job:
                if not future.done():
                    if isinstance(error, Exception):
                        future.set_exception(error)
                    else:
                        future.cancel()
            if not isinstance(error, Exception):
                raise
            return
        for (_, future), result in zip(job, results, strict=True):
            if not future.done():
                future.set_result(result)


def run(procedure: Procedure[T]) -> T:
    """Carry a procedure out, blocking."""
    try:
        step = next(procedure)
        while True:
            try:
                value = step.now()
            except Exception as error:
                step = procedure.throw(error)
            else:
                step = procedure.send(value)
    except StopIteration as end:
        result: T = end.value
        return result
    finally:
        # Interrupted in a step, it ends its own `with` blocks now, not when it is collected.
        procedure.close()


async def arun(procedure: Procedure[T]) -> T:
    """Carry a procedure out, awaiting."""
    try:
        step = next(procedure)
        while True:
            try:
                value = step.now() if step.later is None else await step.later()
            except Exception as error:
                step = procedure.throw(error)
            else:
                step = procedure.send(value)
    except StopIteration as end:
        result: T = end.value
        return result
    finally:
        procedure.close()
