"""A process of its own that works on a store; `Workers` starts some and lets them go at the same moment.

Run as `python store_worker.py TASK URL NUMBER`: it says `ready` when all is imported, waits for a line, and
does its task. What the task returns is its last line of output, as JSON.
"""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import Any

import sqlalchemy as sa
from typing_extensions import Self

from rag_wiki import StateStore, UserDocRecord
from rag_wiki.storage.records import UserChange, UserView
from rag_wiki.storage.sql import SQLStateStore
from rag_wiki.storage.sqlite import SQLiteStateStore

DRIVER = "postgresql+psycopg"

COUNTS = 30
"""Fetches that each thread of a `count` worker counts."""


def open_store(url: str) -> StateStore:
    """The SQL store for a URL."""
    return SQLiteStateStore(url) if url.startswith("sqlite") else SQLStateStore(url)


def count_one(view: UserView) -> UserChange:
    """Count one fetch of document `d`, and tell the new count."""
    before = view.records.get("d") or UserDocRecord(view.user_id, "d", "Title", "path")
    after = replace(before, fetch_count=before.fetch_count + 1)
    return UserChange(records=[after], queries=1, outcome=after.fetch_count)


def count(url: str, number: int) -> list[int]:
    """Open a store that may not exist yet, write a record, and count from two threads; tells the counts reached."""
    reached: list[int] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            reached.extend(store.change("alice", ["d"], count_one).outcome for _ in range(COUNTS))
        except BaseException as error:
            errors.append(error)

    with open_store(url) as store:
        store.upsert(UserDocRecord("alice", f"of {number}", "Title", "path"))
        threads = [threading.Thread(target=run) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]
    return reached


def fork(url: str, number: int) -> list[int]:
    """Count once, fork two children, and count from all three at once; tells the counts that the parent reached."""
    # An engine that does not look first whether its connections are still alive: they have to be.
    engine = None if url.startswith("sqlite") else sa.create_engine(sa.engine.make_url(url).set(drivername=DRIVER))
    with open_store(url) if engine is None else SQLStateStore(engine) as store:
        reached = [store.change("alice", ["d"], count_one).outcome]
        children = []
        for _ in range(2):
            child = os.fork()
            if child == 0:
                status = 1
                try:
                    for _ in range(COUNTS):
                        store.change("alice", ["d"], count_one)
                    store.close()
                    status = 0
                finally:
                    os._exit(status)
            children.append(child)
        reached.extend(store.change("alice", ["d"], count_one).outcome for _ in range(COUNTS))
        for child in children:
            _, status = os.waitpid(child, 0)
            if status != 0:
                msg = f"a child failed with status {status}"
                raise RuntimeError(msg)
        reached.append(store.change("alice", ["d"], count_one).outcome)
    if engine is not None:
        engine.dispose()
    return reached


def hold(path: str, number: int) -> None:
    """Hold the write lock of a SQLite file: say `locked`, and let go at the next line."""
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("BEGIN IMMEDIATE")
    print("locked", flush=True)  # noqa: T201 - this is how a worker talks
    sys.stdin.readline()
    connection.execute("COMMIT")
    connection.close()


TASKS: dict[str, Callable[[str, int], Any]] = {"count": count, "fork": fork, "hold": hold}


class Workers:
    """Worker processes that do the same task at the same moment; leaving the block ends them all."""

    def __init__(self, task: str, url: str, count: int = 1) -> None:
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-W", "error", __file__, task, url, str(number)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            )
            for number in range(count)
        ]

    def __enter__(self) -> Self:
        self.expect("ready")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()

    def expect(self, said: str) -> None:
        """Wait until each of them has said this."""
        for process in self._processes:
            assert process.stdout is not None
            line = process.stdout.readline()
            if line != said + "\n":
                raise AssertionError((line, process.communicate()))

    def go(self) -> None:
        """Let all of them go on."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()

    def results(self) -> list[Any]:
        """What each of them told, when all are done without an error."""
        told = [process.communicate(timeout=120) for process in self._processes]
        for process, (_, error) in zip(self._processes, told, strict=True):
            assert process.returncode == 0, error
        return [json.loads(output.splitlines()[-1]) for output, _ in told]


def main(task: str, url: str, number: str) -> None:
    """Do one task."""
    print("ready", flush=True)  # noqa: T201 - this is how a worker talks
    sys.stdin.readline()
    print(json.dumps(TASKS[task](url, int(number))), flush=True)  # noqa: T201 - this is how a worker talks


if __name__ == "__main__":
    main(*sys.argv[1:])
