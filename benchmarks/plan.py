"""How much is measured: the quick run and the full one; and what a measure is given to work with."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from tqdm import tqdm  # type: ignore[import-untyped]  # it ships without type hints

from benchmarks.older import Answer, Environment, ask
from benchmarks.results import Failed, Figure, Outcome, Row
from benchmarks.stores import Place, Servers
from benchmarks.work import KINDS, Pace

T = TypeVar("T")


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    documents: tuple[int, ...]
    """Saved documents for `query`, each with ten chunks."""
    memory_documents: tuple[int, ...]
    """Further ones, in memory only."""
    older_documents: tuple[int, ...]
    """For the older releases."""
    older_stores: tuple[str, ...]
    older_kinds: tuple[str, ...]
    older_decay: int
    """Records that they score."""
    older_saves: int
    large: int
    """Saved documents for `restart` and the comparison with the bare product."""
    pace: Pace
    older_seconds: float
    """Each case of an older release, set-up included, at most."""
    older_kind_seconds: float
    ours_seconds: float
    """Each case of ours that runs in a process of its own, at most."""
    decay: tuple[tuple[int, int], ...]
    """Users, and records of each."""
    saves: int
    starts: int
    batches: Pace
    batch_stores: tuple[str, ...]
    users: int
    """For the cap of the index."""
    questions: int
    """For throughput, by each thread."""
    tasks: int
    """Calls awaited at once."""


QUICK = Sizes(
    documents=(100,),
    memory_documents=(1_600,),
    older_documents=(100,),
    older_stores=("memory", "sqlite+disk", "redis"),
    older_kinds=("hit",),
    older_decay=200,
    older_saves=0,
    large=1_600,
    pace=Pace(200, 0.3),
    older_seconds=12,
    older_kind_seconds=1.0,
    ours_seconds=30,
    decay=((1, 1_000), (1, 20_000)),
    saves=3,
    starts=2,
    batches=Pace(5, 2),
    batch_stores=("memory",),
    users=400,
    questions=40,
    tasks=200,
)
FULL = Sizes(
    documents=(25, 100, 400, 1_600, 10_000),
    memory_documents=(),
    older_documents=(25, 100, 400, 1_600),
    older_stores=("memory", "memory+disk", "sqlite", "sqlite+disk", "redis"),
    older_kinds=KINDS,
    older_decay=1_000,
    older_saves=3,
    large=1_600,
    pace=Pace(1_000, 3),
    older_seconds=60,
    older_kind_seconds=4,
    ours_seconds=900,
    decay=((1, 1_000), (1, 1_000_000), (1_000, 1_000)),
    saves=11,
    starts=9,
    batches=Pace(60, 20),
    batch_stores=("memory", "redis"),
    users=2_000,
    questions=1_000,
    tasks=200,
)


@dataclass
class Bench:
    """What a measure is given: sizes, stores, servers, and the older releases."""

    sizes: Sizes
    stores: tuple[str, ...]
    servers: Servers
    older: Mapping[str, Environment | Failed] = field(default_factory=dict)
    _too_slow: set[tuple[str, str, str]] = field(default_factory=set)

    def chosen(self, *kinds: str) -> list[str]:
        """Those of the kinds of store that are wanted."""
        return [kind for kind in kinds if kind in self.stores]

    def ask_older(self, version: str, place: Place, **task: Any) -> Answer:
        """Let an older release do a task at a place. One that took too long is not asked for more of the same."""
        key = (version, place.kind, str(task["task"]))
        limit = self.sizes.older_seconds
        if key in self._too_slow:
            return Answer([], Failed(f"over {limit:.0f} s with less"))
        whole = {"store": place.kind, "folder": str(place.folder), "address": place.address, **task}
        answer = ask(self.older[version], whole, limit, place.folder)
        if answer.failed is not None and answer.failed.why.startswith("over "):
            self._too_slow.add(key)
        return answer


def progress(items: Sequence[T], what: str) -> Iterator[T]:
    """The items, with a bar on the terminal."""
    with tqdm(total=len(items), desc=what, file=sys.stderr, leave=False, unit="case") as bar:
        for item in items:
            bar.set_postfix_str(str(item)[:40])
            yield item
            bar.update()


@contextmanager
def failing(rows: Iterable[Row]) -> Iterator[None]:
    """Note what goes wrong in the rows that it concerns; the rest of the run goes on."""
    try:
        yield
    except Exception as error:  # whatever it is, the other cases can be measured
        for row in rows:
            row.ours = row.ours or Failed(f"{type(error).__name__}: {error}"[:200])


def isolated(function: Callable[..., T], *arguments: object, seconds: float) -> T:
    """Call a function in a fresh process, for so long at most.

    Raises:
        TimeoutError: It took longer.
        RuntimeError: It failed; the message says how.
    """
    return together(function, [arguments], seconds=seconds)[0]


def together(function: Callable[..., T], calls: Sequence[Sequence[object]], *, seconds: float) -> list[T]:
    """Call a function in fresh processes at the same time; otherwise as `isolated`."""
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe(duplex=False) for _ in calls]
    processes = [
        context.Process(target=_answer, args=(sender, function, arguments), daemon=True)
        for (_, sender), arguments in zip(pipes, calls, strict=True)
    ]
    for process, (_, sender) in zip(processes, pipes, strict=True):
        process.start()
        sender.close()  # so that a process that dies is noticed at once
    try:
        return [_receive(receiver, seconds) for receiver, _ in pipes]
    finally:
        for process in processes:
            process.kill()
            process.join()


def _answer(sender: Connection, function: Callable[..., Any], arguments: Sequence[object]) -> None:
    try:
        sender.send((True, function(*arguments)))
    except Exception as error:
        sender.send((False, f"{type(error).__name__}: {error}"[:200]))


def _receive(receiver: Connection, seconds: float) -> Any:
    if not receiver.poll(seconds):
        msg = f"over {seconds:.0f} s"
        raise TimeoutError(msg)
    try:
        done, value = receiver.recv()
    except EOFError:
        msg = "the process ended without an answer"
        raise RuntimeError(msg) from None
    if not done:
        raise RuntimeError(value)
    return value


def outcome(samples: Sequence[float] | Failed, scale: float = 1.0) -> Outcome:
    """A figure of samples, or why there are none."""
    return samples if isinstance(samples, Failed) else Figure.of(samples, scale)
