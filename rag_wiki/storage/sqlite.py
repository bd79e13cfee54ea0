"""State and chunks in one SQLite file: persistent, for one host and any number of its processes."""

from __future__ import annotations

import math
import os
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from rag_wiki import events
from rag_wiki.errors import ConfigurationError, MissingExtraError
from rag_wiki.forks import in_each_process
from rag_wiki.storage.codec import StoredUser, decode_user

try:
    import sqlalchemy as sa
    from sqlalchemy.dialects import sqlite as sqlite_dialect
    from sqlalchemy.engine import URL, Connection, Engine
    from sqlalchemy.pool import StaticPool
except ImportError as error:
    raise MissingExtraError("SQLiteStateStore", "sqlite") from error

from rag_wiki.storage.sql import _USER, SQLDatabase, SQLStateStore, _shown
from rag_wiki.storage.sql_driver import DriverCursor

__all__ = ["SQLiteStateStore"]

_WAIT_SECONDS = 30.0
"""How long a writer waits for another one before it gives up, unless the URL says `?timeout=` seconds."""


class SQLiteDatabase(SQLDatabase):
    """SQLite: write-ahead log, and writers that queue from their first statement on.

    A transaction that starts reading and then writes can't wait in SQLite; it fails at once when another
    writer was faster. So whoever will write says BEGIN IMMEDIATE.
    """

    insert: Any = staticmethod(sqlite_dialect.insert)
    reading_isolation: ClassVar[str | None] = None
    writing_isolation: ClassVar[str | None] = None

    def __init__(self, url: str | URL | Engine) -> None:
        if isinstance(url, Engine):
            msg = "SQLiteStateStore takes a URL: how its connections begin and wait is its own matter"
            raise ConfigurationError(msg)
        super().__init__(url)
        name = self._url.database or ""
        self._patience = self._timeout_of(self._url)
        self._opened: tuple[int, int] | None = None
        self.in_memory = name in ("", ":memory:") or "mode=memory" in name or self._url.query.get("mode") == "memory"
        in_each_process(self._make_queue)

    def _make_queue(self) -> None:
        # One connection serves all threads of an in-memory database, one at a time.
        self._turn = threading.RLock() if self.in_memory else nullcontext()

    @staticmethod
    def _timeout_of(url: URL) -> float:
        given = url.query.get("timeout", _WAIT_SECONDS)
        try:
            seconds = float(given) if isinstance(given, (str, float)) else math.nan
        except ValueError:
            seconds = math.nan
        if not 0 <= seconds < math.inf:
            msg = f"timeout in the URL {_shown(url)!r} must be a number of seconds, got {given!r}"
            raise ConfigurationError(msg)
        return seconds

    @property
    def engine(self) -> Engine:
        """The engine of this process, for the file that is at the path now."""
        if self._engine is None:
            self._opened = None
        elif self._opened is not None and self._file_at_path() != self._opened:
            self._open_anew(self._engine)
        engine = super().engine
        if self._opened is None:
            self._opened = self._file_at_path()
        return engine

    def _file_at_path(self) -> tuple[int, int] | None:
        """What tells the file from another one of the same name; `None` where it is no plain path."""
        name = self._url.database or ""
        if self.in_memory or name.startswith("file:"):
            return None
        try:
            found = os.stat(name)  # noqa: PTH116 - twice for each question, and a Path takes ten times as long
        except OSError:
            return 0, 0
        return found.st_dev, found.st_ino

    def _open_anew(self, engine: Engine) -> None:
        """Let go of a file that was deleted or replaced: what is written into it, nobody ever reads."""
        with self._setup.take():
            if self._engine is engine:
                events.DATABASE_REPLACED.log(
                    "%s was deleted or replaced; what is there now is used from here on", self._url.database
                )
                self._opened = None
                self.close()

    def check_url(self, url: URL) -> None:
        """Raise `ConfigurationError` unless the URL is SQLite's."""
        if url.get_backend_name() != "sqlite":
            msg = f"SQLiteStateStore takes a sqlite:/// URL, got {_shown(url)!r}; for PostgreSQL use SQLStateStore"
            raise ConfigurationError(msg)
        if url.get_dialect().is_async:
            msg = f"SQLiteStateStore takes a blocking driver, not {url.drivername!r}: write sqlite:///"
            raise ConfigurationError(msg)

    def create_engine(self) -> Engine:
        """Open the file, making its folder when that is missing."""
        arguments: dict[str, Any] = {
            # What is given here counts more than what the URL says.
            "connect_args": {"check_same_thread": False, "timeout": self._patience},
            # Parameters are people's texts, which belong in no error message and no log.
            "hide_parameters": True,
        }
        if self.in_memory:
            arguments["poolclass"] = StaticPool
        elif not (self._url.database or "").startswith("file:"):
            Path(self._url.database or "").expanduser().parent.mkdir(parents=True, exist_ok=True)
        engine = sa.create_engine(self._url, **arguments)
        sa.event.listen(engine, "connect", partial(_configure, self._patience))
        sa.event.listen(engine, "begin", _begin)
        return engine

    def lock_schema(self, connection: Connection) -> None:
        """BEGIN IMMEDIATE has locked it already."""

    def lock_user(self, cursor: DriverCursor, user_key: str) -> StoredUser:
        """Read a user's counters; BEGIN IMMEDIATE has locked them already."""
        rows = cursor.rows(_USER, user_key=user_key)
        return decode_user(*rows[0]) if rows else StoredUser()

    @contextmanager
    def begin(self, connection: Any, *, writes: bool) -> Iterator[None]:
        """Begin on a connection of the driver; a single statement that reads needs nothing."""
        if writes:
            connection.driver_connection.execute("BEGIN IMMEDIATE")
        yield

    def scrub(self) -> None:
        """Move the write-ahead log into the file, where removed rows are overwritten, and empty it."""
        if self.in_memory:
            return
        deadline = time.monotonic() + self._patience
        connection = self.engine.raw_connection()
        try:
            while True:
                busy, *_ = connection.cursor().execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
                # SQLite waits for readers by itself, and not at all for another checkpoint.
                if not busy or time.monotonic() > deadline:
                    break
                time.sleep(0.01)
        finally:
            connection.close()
        if busy:
            events.DATABASE_LOG_KEPT.log(
                "%s-wal still holds what was removed: others were in its way for %.0f seconds. It goes with the next "
                "checkpoint; PRAGMA wal_checkpoint(TRUNCATE) makes one.",
                self._url.database,
                self._patience,
            )

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """A transaction that sees one moment of the database; it waits for nobody."""
        # Made first, in whatever method: who makes it waits for the turn, and must not hold what the turn waits for.
        _ = self.engine
        with self._turn, super().reading() as connection:
            yield connection

    @contextmanager
    def driver(self, *, writes: bool) -> Iterator[DriverCursor]:
        """A cursor of the driver's; one that writes waits for its turn."""
        _ = self.engine
        with self._turn, super().driver(writes=writes) as cursor:
            yield cursor

    @contextmanager
    def writing(self, engine: Engine | None = None) -> Iterator[Connection]:
        """A transaction that writes; it waits for its turn."""
        writer = (engine or self.engine).execution_options(rag_wiki_writes=True)
        with self._turn, super().writing(writer) as connection:
            yield connection


def _configure(patience: float, connection: sqlite3.Connection, _record: object) -> None:
    # The driver's own BEGIN would come too late and be a deferred one; `_begin` says it instead.
    connection.isolation_level = None
    deadline = time.monotonic() + patience
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            break
        except sqlite3.OperationalError as error:
            if "readonly" in str(error):
                # It is read as it is; what would write says so.
                break
            # Turning the log on needs the file alone, and SQLite does not wait for that by itself.
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.01)
    connection.execute("PRAGMA synchronous=NORMAL")
    connection.execute("PRAGMA secure_delete=ON")


def _begin(connection: Connection) -> None:
    writes = connection.get_execution_options().get("rag_wiki_writes", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


class SQLiteStateStore(SQLStateStore):
    """Keeps state, and the chunks beside it, in one SQLite file.

    Args:
        url: `sqlite:///relative/path.db`, `sqlite:////absolute/path.db`, or `sqlite:///:memory:`, which
            lives and dies with this object and is usable from every thread. A missing folder is made. With
            `?timeout=5` a writer waits five seconds for another one, instead of thirty.

    Raises:
        ConfigurationError: The URL names another kind of database.
        MissingExtraError: SQLAlchemy is not installed.
    """

    _database_class: ClassVar[type[SQLDatabase]] = SQLiteDatabase

    def __init__(self, url: str | URL = "sqlite:///./rag_wiki.db") -> None:
        super().__init__(url)
