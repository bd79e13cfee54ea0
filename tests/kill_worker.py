"""A process that works on a store until it is killed; `Victims` starts and kills many of them.

Run as `python kill_worker.py`: it says `ready` when all is imported. For each line of `URL FOLDER SEED` in JSON, it
forks a child; when that is no more, it says `gone`. The child says `pid` and its number, then `begin` and what it is
about to do, and `done` when that is done, without end.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from types import TracebackType

from load_worker import CHURNED, DECLINED, KEPT, STEADY, Place, content, open_retriever, open_store
from typing_extensions import Self

from rag_wiki import InvalidTransitionError, RagWikiRetriever, UnknownDocumentError

PARTS = 24
"""Chunks of a document."""
TARGETS = (*(("ada", doc_id) for doc_id in (*CHURNED, STEADY)), ("bob", DECLINED), ("bob", KEPT))
"""The documents that are worked on, of two users; only the second one is ever forgotten."""
_MOST_LINES = 24
_LONGEST_WAIT = 0.03


def actions(retriever: RagWikiRetriever, user: str, doc_id: str, version: int) -> dict[str, Callable[[], object]]:
    """What can be done with a document, by name."""
    text = content(doc_id, version, PARTS)
    return {
        "fetch": lambda: retriever.invoke(doc_id, user_id=user),
        "save": lambda: retriever.accept_suggestion(doc_id, text, user_id=user),
        "refresh": lambda: retriever.refresh(doc_id, text, user_id=user),
        "remove": lambda: retriever.force_remove(doc_id, user_id=user),
        "pin": lambda: retriever.force_pin(doc_id, user_id=user),
        "unpin": lambda: retriever.unpin(doc_id, user_id=user),
        "up": lambda: retriever.thumbs_up(doc_id, user_id=user),
        "down": lambda: retriever.thumbs_down(doc_id, user_id=user),
        "decay": lambda: retriever.run_decay(user),
        "forget": lambda: retriever.forget_user(user),
    }


_OFTEN = ("fetch", "save", "fetch", "save", "refresh", "refresh", "remove", "pin", "unpin", "up", "down", "decay")


class _Telling(logging.Handler):
    """Says what the log warns of."""

    def emit(self, record: logging.LogRecord) -> None:
        _say("warned", record.getMessage())


def _say(*words: object) -> None:
    # One small write: all of the line is in the pipe, or nothing.
    os.write(1, (" ".join(map(str, words)).replace("\n", " | ")[:2000] + "\n").encode())


def live(place: Place, seed: int) -> None:
    """Do one thing after the other, and tell of each."""
    chance = random.Random(seed)
    logging.getLogger("rag_wiki").addHandler(_Telling(logging.WARNING))
    version = seed * 10_000
    retriever = open_retriever(
        open_store(place.url), place.folder, load=lambda record: content(record.doc_id, version, PARTS), parts=PARTS
    )
    while True:
        version += 1
        user, doc_id = chance.choice(TARGETS)
        name = chance.choice((*_OFTEN, "forget") if user == "bob" else _OFTEN)
        _say("begin", name, user, doc_id, version)
        with contextlib.suppress(InvalidTransitionError, UnknownDocumentError):
            actions(retriever, user, doc_id, version)[name]()
        _say("done")


class Victims:
    """A process that has imported all, and forks those that are killed; leaving the block ends it."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-W", "error", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            # A process with threads, be it those of a matrix product, should not fork.
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OPENBLAS_NUM_THREADS": "1"},
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._orders, self._told = self._process.stdin, self._process.stdout.fileno()
        self._rest = b""

    def __enter__(self) -> Self:
        assert next(self._lines()) == ["ready"]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Its forks as well.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()

    def kill_one(self, place: Place, seed: int) -> list[list[str]]:
        """Let a process begin, and kill it at a random moment; tells what it said, in words."""
        chance = random.Random(seed)
        self._orders.write(json.dumps([place.url, place.folder, seed]).encode() + b"\n")
        self._orders.flush()
        lines = self._lines()
        (_, pid), said = next(lines), list[list[str]]()
        for _ in range(chance.randint(0, _MOST_LINES)):
            said.append(next(lines))
            if said[-1][0] == "failed":
                break
        # Somewhere between two lines: what it does just then takes less than this.
        end = time.monotonic() + chance.uniform(0, _LONGEST_WAIT)
        while (left := end - time.monotonic()) > 0 and select.select([self._told], [], [], left)[0]:
            self._read()
        os.kill(int(pid), signal.SIGKILL)
        for line in lines:
            if line == ["gone"]:
                break
            said.append(line)
        return said

    def _lines(self) -> Iterator[list[str]]:
        while True:
            while b"\n" not in self._rest:
                self._read()
            line, _, self._rest = self._rest.partition(b"\n")
            yield line.decode().split(" ")

    def _read(self) -> None:
        read = os.read(self._told, 65536)
        assert read, "the process that forks has ended"
        self._rest += read


def main() -> None:
    """Fork a child for each line."""
    _say("ready")
    for line in sys.stdin:
        url, folder, seed = json.loads(line)
        child = os.fork()
        if child == 0:
            _say("pid", os.getpid())
            try:
                live(Place(url, folder), seed)
            except BaseException:
                _say("failed", traceback.format_exc()[-1500:])
            finally:
                # Alive until it is killed, whatever happens.
                signal.pause()
        os.waitpid(child, 0)
        _say("gone")


if __name__ == "__main__":
    main()
