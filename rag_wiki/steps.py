"""Logic with input and output in between, written once and driven twice: with and without `await`.

A procedure is a generator. Where it needs something from outside, it yields a `Step` and is sent the
result, or thrown the exception. `run` and `arun` are the two drivers; they differ by one `await`.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar, cast

from langchain_core.runnables import run_in_executor

from rag_wiki.errors import ConfigurationError

__all__ = ["Procedure", "Step", "arun", "blocking", "call_user", "run"]

T = TypeVar("T")
Procedure: TypeAlias = "Generator[Step[Any], Any, T]"


@dataclass(frozen=True)
class Step(Generic[T]):
    """Something from outside: how to get it while blocking, and how while awaiting."""

    now: Callable[[], T]
    later: Callable[[], Awaitable[T]] | None
    """`None`: the same way, it takes no time."""


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
        return cast("T", end.value)


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
        return cast("T", end.value)
