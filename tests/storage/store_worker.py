"""A process of its own that works on a store; `Workers` starts some and lets them go at the same moment.

Run as `python store_worker.py TASK URL FORKS`: it says `ready` when all is imported, waits for a line, and
does its task. What the task returns, in each fork, is its last line of output, as a list in JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
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


class Child:
    """A fork of this process that runs a function, and tells what it returns."""

    def __init__(self, run: Callable[[], Any]) -> None:
        self._reading, writing = os.pipe()
        self._process = os.fork()
        if self._process == 0:
            status = 1
            try:
                os.write(writing, json.dumps(run()).encode())
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        os.close(writing)

    def result(self) -> Any:
        """What the function returned."""
        with os.fdopen(self._reading) as told:
            answer = told.read()
        _, status = os.waitpid(self._process, 0)
        if status != 0:
            msg = f"a child failed with status {status}"
            raise RuntimeError(msg)
        return json.loads(answer)


def together(count: int, run: Callable[[], Any]) -> list[Any]:
    """What a function returns in each of so many processes that begin at the same moment."""
    starting, go = os.pipe()

    def wait_and_run() -> Any:
        os.close(go)
        os.read(starting, 1)
        return run()

    children = [Child(wait_and_run) for _ in range(count)]
    # When its last writing end is closed, reading the pipe ends for all.
    os.close(go)
    os.close(starting)
    return [child.result() for child in children]


def count(url: str) -> list[int]:
    """Open a store that may not exist yet, write a record, and count from two threads; tells the counts reached."""
    reached: list[int] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            reached.extend(store.change("alice", ["d"], count_one).outcome for _ in range(COUNTS))
        except BaseException as error:
            errors.append(error)

    with open_store(url) as store:
        store.upsert(UserDocRecord("alice", f"of {os.getpid()}", "Title", "path"))
        threads = [threading.Thread(target=run) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]
    return reached


def fork(url: str) -> list[int]:
    """Count once, fork two children, count from all three at once, and once more; tells all counts reached."""
    # An engine that does not look first whether its connections are still alive: they have to be.
    engine = None if url.startswith("sqlite") else sa.create_engine(sa.engine.make_url(url).set(drivername=DRIVER))
    with open_store(url) if engine is None else SQLStateStore(engine) as store:

        def run() -> list[int]:
            return [store.change("alice", ["d"], count_one).outcome for _ in range(COUNTS)]

        def run_and_close() -> list[int]:
            with store:
                return run()

        reached = [store.change("alice", ["d"], count_one).outcome]
        children = [Child(run_and_close) for _ in range(2)]
        reached += run()
        for child in children:
            reached += child.result()
        reached.append(store.change("alice", ["d"], count_one).outcome)
    if engine is not None:
        engine.dispose()
    return reached


def hold(path: str) -> None:
    """Hold the write lock of a SQLite file: say `locked`, and let go at the next line."""
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("BEGIN IMMEDIATE")
    print("locked", flush=True)  # noqa: T201 - this is how a worker talks
    sys.stdin.readline()
    connection.execute("COMMIT")
    connection.close()


TASKS: dict[str, Callable[[str], Any]] = {"count": count, "fork": fork, "hold": hold}


class Workers:
    """Worker processes that do the same task at the same moment; leaving the block ends them.

    Where there is fork, one process imports all and forks the others: importing is what takes the time.
    """

    def __init__(self, task: str, url: str, count: int = 1) -> None:
        forks = count if hasattr(os, "fork") else 1
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-W", "error", __file__, task, url, str(forks)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            )
            for _ in range(count // forks)
        ]

    def __enter__(self) -> Self:
        self.expect("ready")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            if hasattr(os, "killpg"):
                # Its forks as well, should one of them hang.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
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
        return [result for output, _ in told for result in json.loads(output.splitlines()[-1])]


def main(task: str, url: str, forks: str) -> None:
    """Do a task, in forks of this process when there is to be more than one."""
    print("ready", flush=True)  # noqa: T201 - this is how a worker talks
    sys.stdin.readline()
    run = partial(TASKS[task], url)
    results = [run()] if forks == "1" else together(int(forks), run)
    print(json.dumps(results), flush=True)  # noqa: T201 - this is how a worker talks


if __name__ == "__main__":
    main(*sys.argv[1:])
