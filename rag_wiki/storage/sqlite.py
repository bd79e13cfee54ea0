"""State and chunks in one SQLite file: persistent, for one host and any number of its processes."""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, ClassVar

from rag_wiki.errors import ConfigurationError, MissingExtraError
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

logger = logging.getLogger("rag_wiki")

_WAIT_SECONDS = 30.0
"""How long a writer waits for another one before it gives up."""


class SQLiteDatabase(SQLDatabase):
    """SQLite: write-ahead log, and writers that queue from their first statement on.

    A transaction that starts reading and then writes can't wait in SQLite; it fails at once when another
    writer was faster. So whoever will write says BEGIN IMMEDIATE.
    """

    insert: Any = staticmethod(sqlite_dialect.insert)
    reading_isolation: ClassVar[str | None] = None

    def __init__(self, url: str | URL | Engine) -> None:
        if isinstance(url, Engine):
            msg = "SQLiteStateStore takes a URL: how its connections begin and wait is its own matter"
            raise ConfigurationError(msg)
        super().__init__(url)
        name = self._url.database or ""
        self.in_memory = name in ("", ":memory:") or "mode=memory" in name or self._url.query.get("mode") == "memory"
        # One connection serves all threads of an in-memory database, one at a time.
        self._turn = threading.RLock() if self.in_memory else nullcontext()

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
            "connect_args": {"check_same_thread": False, "timeout": _WAIT_SECONDS},
            # Parameters are people's texts, which belong in no error message and no log.
            "hide_parameters": True,
        }
        if self.in_memory:
            arguments["poolclass"] = StaticPool
        elif not (self._url.database or "").startswith("file:"):
            Path(self._url.database or "").expanduser().parent.mkdir(parents=True, exist_ok=True)
        engine = sa.create_engine(self._url, **arguments)
        sa.event.listen(engine, "connect", _configure)
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
        connection = self.engine.raw_connection()
        try:
            busy, *_ = connection.cursor().execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        finally:
            connection.close()
        if busy:
            logger.warning(
                "%s-wal still holds what was removed: a reader was in its way for %.0f seconds. It goes with the next "
                "checkpoint; PRAGMA wal_checkpoint(TRUNCATE) makes one.",
                self._url.database,
                _WAIT_SECONDS,
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


def _configure(connection: sqlite3.Connection, _record: object) -> None:
    # The driver's own BEGIN would come too late and be a deferred one; `_begin` says it instead.
    connection.isolation_level = None
    deadline = time.monotonic() + _WAIT_SECONDS
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
            lives and dies with this object and is usable from every thread. A missing folder is made.

    Raises:
        ConfigurationError: The URL names another kind of database.
        MissingExtraError: SQLAlchemy is not installed.
    """

    _database_class: ClassVar[type[SQLDatabase]] = SQLiteDatabase

    def __init__(self, url: str | URL = "sqlite:///./rag_wiki.db") -> None:
        super().__init__(url)
