"""Where release 0.2 kept its records: one table of an SQLite database, or hashes in Redis. Only read, never changed.

Nothing here believes what it reads: SQLite keeps values of any type in any column, and Redis whatever was put there.
"""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from rag_wiki.errors import ConfigurationError, MissingExtraError, StorageError

__all__ = ["Listed", "OlderRedis", "OlderSQLite", "OlderState", "Overwritten", "batches", "has_table", "redis_client"]

T = TypeVar("T")

_BATCH = 500
_TABLE = "user_document_state"
_ESSENTIAL = ("user_id", "doc_id", "user_state")
_PREFIX = "hkb:"
_MOST_NAMED = 8
"""Tables or keys that a message names."""


class Listed(NamedTuple):
    """A record as it is listed: where it lies, and whose and of what it says that it is."""

    place: int | str | bytes
    """A row id, or a key."""
    user_id: object
    doc_id: object


class Overwritten(NamedTuple):
    """A record of which only its name is left: another one has the same key."""

    user_id: str
    doc_id: str
    key: int | str | bytes


class OlderState(ABC):
    """The records of release 0.2 in one place."""

    shown: str
    """What to call the place, without passwords."""

    @abstractmethod
    def names(self) -> Iterator[Listed]:
        """All records, in any order; Redis may name one twice."""

    @abstractmethod
    def read(self, places: Sequence[int | str | bytes]) -> dict[int | str | bytes, Mapping[str, object]]:
        """The fields of some of them; those that went meanwhile are not in it."""

    def overwritten(self) -> Iterator[Overwritten]:
        """Documents that were listed as a user's, and the key where their record was; it may be there still."""
        return iter(())

    def close(self) -> None:  # noqa: B027 - nothing to close where a client was handed in
        """Close what was opened here."""


def batches(values: Iterable[T], size: int = _BATCH) -> Iterator[list[T]]:
    """The values in lists of at most `size`."""
    iterator = iter(values)
    while batch := list(islice(iterator, size)):
        yield batch


def _decoded(value: object) -> object:
    """UTF-8 bytes as text; anything else as it is."""
    if isinstance(value, bytes):
        with contextlib.suppress(UnicodeDecodeError):
            return value.decode()
    return value


class OlderSQLite(OlderState):
    """The table of an SQLite file, opened for reading alone.

    It is read in short steps, each for itself: whoever writes meanwhile waits for none that takes long.

    Args:
        path: The file.
        writes_here: It is where the records go to, too: somebody writes to it while it is read.

    Raises:
        ConfigurationError: There is no such file, or it is not of 0.2; the message says what it is.
        StorageError: It can't be read.
    """

    def __init__(self, path: Path, *, writes_here: bool = False) -> None:
        self.shown = f"sqlite:///{path}"
        self._path = path
        self._copied: tempfile.TemporaryDirectory[str] | None = None
        if not path.is_file():
            msg = f"there is no file {str(path)!r} to bring records from"
            raise ConfigurationError(msg)
        self._connection = self._open(writes_here)
        try:
            self._columns = self._check()
        except BaseException:
            self.close()
            raise

    def _open(self, writes_here: bool) -> sqlite3.Connection:
        log, shared = _beside(self._path, "-wal"), _beside(self._path, "-shm")
        if _has_bytes(log) and not shared.exists():
            # Left by a crash; reading it in place would make the file that is missing.
            return self._open_copy()
        # A log that nobody has open is empty or gone. To read the file as one that can't change makes none.
        fixed = _keeps_log(self._path) and not _has_bytes(log) and not writes_here
        connection = _connect(self._path, "mode=ro&immutable=1" if fixed else "mode=ro")
        try:
            connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        except sqlite3.DatabaseError as error:
            connection.close()
            if "readonly" in str(error) and _has_bytes(_beside(self._path, "-journal")):
                # A crash left a transaction half written. Undoing it would change the file: that is done to a copy.
                return self._open_copy()
            raise self._unreadable(error) from error
        return connection

    def _open_copy(self) -> sqlite3.Connection:
        self._copied = tempfile.TemporaryDirectory(prefix="rag_wiki-migrate-")
        copy = Path(self._copied.name) / "copy.db"
        for ending in ("", "-journal", "-wal"):
            if _beside(self._path, ending).exists():
                shutil.copyfile(_beside(self._path, ending), _beside(copy, ending))
        return _connect(copy, "mode=rw")

    def _unreadable(self, error: sqlite3.Error) -> StorageError:
        return StorageError(f"{str(self._path)!r} can't be read as an SQLite database: {error}")

    def _run(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        try:
            return [tuple(map(_decoded, row)) for row in self._connection.execute(statement, values).fetchall()]
        except sqlite3.Error as error:
            raise self._unreadable(error) from error

    def _check(self) -> list[str]:
        """The table's columns."""
        columns = [str(row[1]) for row in self._run(f"PRAGMA table_info({_TABLE})")]
        if columns and set(_ESSENTIAL) <= set(columns):
            return columns
        tables = [str(row[0]) for row in self._run("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name")]
        if columns:
            found = f"its table {_TABLE} has the columns {_named(columns)}, which are not those of 0.2"
        elif "rag_wiki_schema" in tables:
            found = "it holds data of this release, and none of 0.2: there is nothing to bring over"
        elif tables:
            found = f"it has the tables {_named(tables)}; 0.2 kept its records in {_TABLE}"
        else:
            found = "it is empty"
        msg = f"{str(self._path)!r} is no database of langchain-rag-wiki 0.2: {found}"
        raise ConfigurationError(msg)

    def names(self) -> Iterator[Listed]:
        """All rows, by their number."""
        after = -(2**63)
        query = f"SELECT rowid, user_id, doc_id FROM {_TABLE} WHERE rowid > ? ORDER BY rowid LIMIT {_BATCH}"  # noqa: S608
        while rows := self._run(query, after):
            for number, user_id, doc_id in rows:
                yield Listed(number, user_id, doc_id)
            after = rows[-1][0]

    def read(self, places: Sequence[int | str | bytes]) -> dict[int | str | bytes, Mapping[str, object]]:
        """The rows of these numbers."""
        found: dict[int | str | bytes, Mapping[str, object]] = {}
        names = ", ".join(f'"{name}"' for name in self._columns)
        for batch in batches(places):
            marks = ", ".join("?" * len(batch))
            query = f"SELECT rowid, {names} FROM {_TABLE} WHERE rowid IN ({marks})"  # noqa: S608 - names of its own
            for number, *values in self._run(query, *batch):
                found[number] = dict(zip(self._columns, values, strict=True))
        return found

    def close(self) -> None:
        """Close the file."""
        self._connection.close()
        if self._copied is not None:
            self._copied.cleanup()


def _beside(path: Path, ending: str) -> Path:
    return path.with_name(path.name + ending)


def _has_bytes(path: Path) -> bool:
    return path.is_file() and path.stat().st_size > 0


def _keeps_log(path: Path) -> bool:
    """Whether the file says that it has a write-ahead log (https://www.sqlite.org/fileformat2.html, offset 18)."""
    with path.open("rb") as file:
        return file.read(20)[18:20] == b"\x02\x02"


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
    """Whether a file is an SQLite database with a table of this name; nothing is made beside it."""
    fixed = not _has_bytes(_beside(path, "-wal"))
    connection = _connect(path, "mode=ro&immutable=1" if fixed else "mode=ro")
    try:
        return bool(connection.execute("SELECT count(*) FROM sqlite_master WHERE name = ?", (name,)).fetchone()[0])
    except sqlite3.Error as error:
        msg = f"{str(path)!r} can't be read as an SQLite database: {error}"
        raise StorageError(msg) from error
    finally:
        connection.close()


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more


class OlderRedis(OlderState):
    """The hashes of a Redis or Valkey, read by SCAN, HMGET, HGETALL and SSCAN alone.

    Release 0.2 joined user and document by a colon: user `a` with document `b:c` and user `a:b` with document `c` had
    one key, and the later record took the place of the earlier. A hash says whose it is; that decides.

    Raises:
        ConfigurationError: There is nothing of 0.2; the message says what there is. Or the client decodes bytes as
            text, and some are none.
    """

    def __init__(self, client: Any, shown: str, *, owned: bool = False) -> None:
        self.shown = shown
        self._client = client
        self._owned = owned
        try:
            if next(self._scan(f"{_PREFIX}*", "hash"), None) is None:
                found = [_decoded(key) for key in islice(self._client.scan_iter(count=_BATCH), _MOST_NAMED)]
                has = f"it has keys such as {', '.join(map(repr, found))}" if found else "it is empty"
                msg = f"{shown} holds nothing of langchain-rag-wiki 0.2, whose keys begin with {_PREFIX!r}: {has}"
                raise ConfigurationError(msg)
        except BaseException:
            self.close()
            raise

    def _scan(self, pattern: str, kind: str) -> Iterator[Any]:
        with self._decoding():
            yield from self._client.scan_iter(match=pattern, count=_BATCH, _type=kind)

    @contextlib.contextmanager
    def _decoding(self) -> Iterator[None]:
        try:
            yield
        except UnicodeDecodeError as error:
            msg = (
                f"{self.shown} holds bytes that are no text ({error}): give a client without decode_responses, or a URL"
            )
            raise ConfigurationError(msg) from error

    def _ask(self, name: str, keys: Sequence[Any], *arguments: Any) -> list[Any]:
        """One read command for each key, in one trip; what is no hash any more comes as its error."""
        pipeline = self._client.pipeline(transaction=False)
        for key in keys:
            getattr(pipeline, name)(key, *arguments)
        with self._decoding():
            answers: list[Any] = pipeline.execute(raise_on_error=False)
        return answers

    def names(self) -> Iterator[Listed]:
        """All hashes under 0.2's keys."""
        for keys in batches(self._scan(f"{_PREFIX}*", "hash")):
            for key, answer in zip(keys, self._ask("hmget", keys, ["user_id", "doc_id"]), strict=True):
                user_id, doc_id = answer if isinstance(answer, list) else (None, None)
                yield Listed(key, _decoded(user_id), _decoded(doc_id))

    def read(self, places: Sequence[int | str | bytes]) -> dict[int | str | bytes, Mapping[str, object]]:
        """The hashes under these keys."""
        answers = zip(places, self._ask("hgetall", places), strict=True)
        return {
            key: {str(_decoded(name)): _decoded(value) for name, value in answer.items()}
            for key, answer in answers
            if isinstance(answer, dict) and answer
        }

    def overwritten(self) -> Iterator[Overwritten]:
        """What the sets that 0.2 kept for each state name."""
        for key in self._scan(f"{_PREFIX}*:state:*", "set"):
            name = _decoded(key)
            if not isinstance(name, str):
                continue
            user_id = name[len(_PREFIX) :].rpartition(":state:")[0]
            with self._decoding():
                for member in self._client.sscan_iter(key, count=_BATCH):
                    doc_id = _decoded(member)
                    if isinstance(doc_id, str):
                        place = f"{_PREFIX}{user_id}:{doc_id}"
                        yield Overwritten(user_id, doc_id, place.encode() if isinstance(key, bytes) else place)

    def close(self) -> None:
        """Close the client, where it was made for this."""
        if self._owned:
            self._client.close()


def redis_client(url: str) -> Any:
    """A client of the Redis at a URL.

    Raises:
        MissingExtraError: redis-py is not installed.
        ConfigurationError: It is no URL of a Redis.
    """
    try:
        import redis
    except ImportError as error:
        raise MissingExtraError("rag_wiki.migrate", "redis") from error
    try:
        return redis.Redis.from_url(url)
    except ValueError as error:
        msg = f"not the URL of a Redis: {error}. It looks like redis://host:6379/0"
        raise ConfigurationError(msg) from error
