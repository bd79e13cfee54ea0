"""An SQLite file that is read and never changed, whatever a crash left of it and whoever writes to it meanwhile."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rag_wiki.errors import StorageError

__all__ = ["DamagedFileError", "SQLiteFile", "beside", "decoded", "has_table"]

_MOST_TRIES = 20
_STEP_SECONDS = 0.02
"""File systems tell the time of a write in steps, of at most so long where files are written often."""
_ENDINGS = ("", "-journal", "-wal")


class DamagedFileError(StorageError):
    """A part of the file can't be read; others may be."""


def decoded(value: object) -> object:
    """UTF-8 bytes as text; anything else as it is."""
    if isinstance(value, bytes):
        with contextlib.suppress(UnicodeDecodeError):
            return value.decode()
    return value


class SQLiteFile:
    """A connection that reads.

    It is read in short steps: whoever writes meanwhile waits for none that takes long. What one statement answers is
    always of one state of the file; `was_changed` tells whether somebody wrote between two of them.

    Args:
        path: The file.
        writes_here: This process writes to it, too.

    Raises:
        StorageError: It is no database, or is written to without a pause.
    """

    def __init__(self, path: Path, *, writes_here: bool = False) -> None:
        self.path = path
        self._writes_here = writes_here
        self._prepared: list[str] = []
        self._copied: tempfile.TemporaryDirectory[str] | None = None
        self._changed = False
        self._fixed: tuple[object, ...] | None = None
        """What the file looked like, where SQLite reads it as one that can't change."""
        self._connection = self._open()
        self._version = self._data_version()

    def run(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        """The rows that a statement gives, all of one state of the file; texts that are no UTF-8 as their bytes.

        Raises:
            DamagedFileError: Some of what it would read is damaged.
            StorageError: It can't be carried out.
        """
        for _ in range(_MOST_TRIES):
            problem: sqlite3.Error | None = None
            try:
                rows = [tuple(map(decoded, row)) for row in self._connection.execute(statement, values).fetchall()]
            except sqlite3.Error as error:
                problem = error
            # Looked at afterwards: what was read before the file changed is right, and nothing else is believed.
            if self._fixed is None or self._fixed == _looks(self.path):
                if problem is not None:
                    raise self._unreadable(problem) from problem
                return rows
            self._changed = True
            self._connection.close()
            self._connection = self._open()
            self._version = self._data_version()
        raise self._moving()

    def prepare(self, statement: str) -> None:
        """Carry out a statement that only concerns this connection, such as making a temporary table."""
        self.run(statement)
        self._prepared.append(statement)

    @property
    def was_changed(self) -> bool:
        """Whether somebody else has written to the file since it was opened; nobody knows where this process does."""
        if self._writes_here or self._changed:
            return self._changed
        if self._copied is not None:
            return self._copied_from != _looks_of_all(self.path)
        if self._fixed is not None:
            return self._fixed != _looks(self.path)
        return self._version != self._data_version()

    def close(self) -> None:
        """Close the file."""
        self._connection.close()
        if self._copied is not None:
            self._copied.cleanup()

    def _open(self) -> sqlite3.Connection:
        self._fixed = None
        if beside(self.path, "-shm").exists() or self._writes_here:
            # Somebody has its log open, who sees to it that it is read as of one moment.
            connection = _connect(self.path, "mode=ro")
        elif _has_bytes(beside(self.path, "-wal")):
            # Left by a crash; reading it in place would make the file that is missing.
            connection = self._open_copy()
        elif _keeps_log(self.path):
            # At rest. Read as a file that can't change, none is made beside it; `run` sees to it that it did not.
            self._fixed = self._settled()
            connection = _connect(self.path, "mode=ro&immutable=1")
        else:
            connection = _connect(self.path, "mode=ro")
        try:
            connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
            for statement in self._prepared:
                connection.execute(statement)
        except sqlite3.DatabaseError as error:
            connection.close()
            if "readonly" in str(error) and _has_bytes(beside(self.path, "-journal")):
                # A crash left a transaction half written. Undoing it would change the file: that is done to a copy.
                return self._open_copy()
            if self._fixed is None or self._fixed == _looks(self.path):
                raise self._unreadable(error) from error
            # It was written to at this moment: `run` finds that out.
            return _connect(self.path, "mode=ro&immutable=1")
        return connection

    def _settled(self) -> tuple[object, ...]:
        """What the file looks like, when its last write was so long ago that the next one has another time."""
        for _ in range(_MOST_TRIES):
            age = time.time() - self.path.stat().st_mtime
            if not 0 <= age < _STEP_SECONDS:
                return _looks(self.path)
            time.sleep(_STEP_SECONDS)
        raise self._moving()

    def _open_copy(self) -> sqlite3.Connection:
        self._copied = self._copied or tempfile.TemporaryDirectory(prefix="rag_wiki-migrate-")
        copy = Path(self._copied.name) / "copy.db"
        for _ in range(_MOST_TRIES):
            self._copied_from = _looks_of_all(self.path)
            try:
                for ending in _ENDINGS:
                    beside(copy, ending).unlink(missing_ok=True)
                    if beside(self.path, ending).exists():
                        shutil.copyfile(beside(self.path, ending), beside(copy, ending))
            except OSError as error:
                self._copied.cleanup()
                msg = f"{str(self.path)!r} was left by a crash, and can't be copied to be read: {error}"
                raise StorageError(msg) from error
            if self._copied_from == _looks_of_all(self.path):
                return _connect(copy, "mode=rw")
        self._copied.cleanup()
        raise self._moving()

    def _data_version(self) -> object:
        return self._connection.execute("PRAGMA data_version").fetchone()

    def _moving(self) -> StorageError:
        return StorageError(f"{str(self.path)!r} is being written to: stop the application, and run this again")

    def _unreadable(self, error: sqlite3.Error) -> StorageError:
        # SQLite's own names for damage come as no more special error than this.
        damaged = type(error) in (sqlite3.DatabaseError, sqlite3.DataError) or "disk I/O" in str(error)
        kind = DamagedFileError if damaged else StorageError
        return kind(f"{str(self.path)!r} can't be read as an SQLite database: {error}")


def beside(path: Path, ending: str) -> Path:
    """The file of this name and an ending."""
    return path.with_name(path.name + ending)


def _has_bytes(path: Path) -> bool:
    return path.is_file() and path.stat().st_size > 0


def _keeps_log(path: Path) -> bool:
    """Whether the file says that it has a write-ahead log (https://www.sqlite.org/fileformat2.html, offset 18)."""
    with path.open("rb") as file:
        return file.read(20)[18:20] == b"\x02\x02"


def _looks(path: Path) -> tuple[object, ...]:
    """What changes when a file is written to: its length and time, its header, and that it has a log."""
    try:
        with path.open("rb") as file:
            header, status = file.read(100), path.stat()
    except FileNotFoundError:
        return ()
    length = status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
    return *length, header, _has_bytes(beside(path, "-wal"))


def _looks_of_all(path: Path) -> list[tuple[object, ...]]:
    return [_looks(beside(path, ending)) for ending in _ENDINGS]


def _connect(path: Path, how: str) -> sqlite3.Connection:
    try:
        connection = sqlite3.connect(f"{path.resolve().as_uri()}?{how}", uri=True, timeout=30, isolation_level=None)
    except sqlite3.Error as error:
        msg = f"{str(path)!r} can't be opened: {error}"
        raise StorageError(msg) from error
    # Text that is no UTF-8 comes as its bytes: the other rows are to be read all the same.
    connection.text_factory = bytes
    return connection


def has_table(path: Path, name: str) -> bool:
    """Whether a file is an SQLite database with a table of this name; nothing is made beside it.

    Raises:
        StorageError: It is no database.
    """
    with contextlib.closing(SQLiteFile(path)) as file:
        rows: Sequence[tuple[Any, ...]] = file.run("SELECT count(*) FROM sqlite_master WHERE name = ?", name)
    return bool(rows[0][0])
