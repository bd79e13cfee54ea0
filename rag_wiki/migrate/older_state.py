"""Where release 0.2 kept its records: one table of an SQLite database, or hashes in Redis. Only read, never changed.

Nothing here believes what it reads: SQLite keeps values of any type in any column, and Redis whatever was put there.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar

from rag_wiki.errors import ConfigurationError, MissingExtraError, StorageError
from rag_wiki.migrate.sqlite_file import DamagedFileError, SQLiteFile
from rag_wiki.migrate.sqlite_file import decoded as _decoded

__all__ = [
    "Damaged",
    "Listed",
    "OlderRedis",
    "OlderSQLite",
    "OlderState",
    "Overwritten",
    "Place",
    "batches",
    "redis_client",
]

T = TypeVar("T")
Place: TypeAlias = "int | str | bytes"
"""A row number, or a key."""

_BATCH = 500
_TABLE = "user_document_state"
_ESSENTIAL = ("user_id", "doc_id", "user_state")
_PREFIX = "hkb:"
LOOKS = "it looks like redis://user:password@host:6379/0"
_MOST_NAMED = 8
"""Tables or keys that a message names."""
_ROW_NUMBERS = ("rowid", "_rowid_", "oid")
"""What SQLite calls the number of a row, where no column is called so."""
_FIRST_ROW = -(2**63)
_MOST_DAMAGED = 20_000
"""Ranges that are halved: numbers may lie far apart."""


class Listed(NamedTuple):
    """A record as it is listed: where it lies, and whose and of what it says that it is."""

    place: Place
    user_id: object
    doc_id: object
    problem: str = ""
    """Why not even that can be read."""
    fits: bool = True
    """It lies where 0.2 would have put it."""


class Damaged(NamedTuple):
    """What takes the place of a record that can't be read."""

    why: str


class Overwritten(NamedTuple):
    """A record of which only its name is left: another one has the same key."""

    user_id: str
    doc_id: str
    key: Place


class OlderState(ABC):
    """The records of release 0.2 in one place."""

    shown: str
    """What to call the place, without passwords."""

    @abstractmethod
    def names(self) -> Iterator[Listed]:
        """All records, in any order; Redis may name one twice."""

    @abstractmethod
    def read(self, places: Sequence[Place]) -> dict[Place, Mapping[str, object] | Damaged]:
        """The fields of some of them; those that went meanwhile are not in it."""

    def problems(self, listed: int) -> list[str]:  # noqa: ARG002 - for those that can count
        """What is to be said of the place as a whole, when all that was listed has been read."""
        return []

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


class OlderSQLite(OlderState):
    """The table of an SQLite file, opened for reading alone.

    Args:
        path: The file.
        shown: What to call it; the path when `None`.
        writes_here: It is where the records go to, too: this process writes to it while it is read.

    Raises:
        ConfigurationError: There is no such file, or it is not of 0.2; the message says what it is.
        StorageError: It can't be read.
    """

    def __init__(self, path: Path, shown: str | None = None, *, writes_here: bool = False) -> None:
        self.shown = shown or str(path)
        self._path = path
        if not path.is_file():
            msg = f"there is no file {str(path)!r} to bring records from"
            raise ConfigurationError(msg)
        self._file = SQLiteFile(path, writes_here=writes_here)
        self._table, self._problems = _quoted(_TABLE), list[str]()
        try:
            self._columns = self._check()
            self._number = self._row_number()
            self._figures = self._count_up() if writes_here else None
        except BaseException:
            self.close()
            raise

    def _check(self) -> list[str]:
        """The table's columns, but for those that hide the number of a row."""
        run = self._file.run
        kinds = [str(row[0]) for row in run("SELECT type FROM sqlite_master WHERE name = ? COLLATE NOCASE", _TABLE)]
        columns = [row[1] for row in run(f"PRAGMA table_info({_TABLE})") if isinstance(row[1], str)]
        if "table" in kinds and set(_ESSENTIAL) <= set(columns):
            return [name for name in columns if name.lower() not in _ROW_NUMBERS]
        tables = [str(row[0]) for row in run("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name")]
        if kinds and "table" not in kinds:
            found = f"its {_TABLE} is a {kinds[0]}, and 0.2 kept its records in a table"
        elif columns:
            found = f"its table {_TABLE} has the columns {_named(columns)}, which are not those of 0.2"
        elif "rag_wiki_schema" in tables:
            found = "it holds data of this release, and none of 0.2: there is nothing to bring over"
        elif tables:
            found = f"it has the tables {_named(tables)}; 0.2 kept its records in {_TABLE}"
        else:
            found = "it is empty"
        msg = f"{str(self._path)!r} is no database of langchain-rag-wiki 0.2: {found}"
        raise ConfigurationError(msg)

    def _row_number(self) -> str:
        """What the number of a row is called; a table whose rows have none is copied into one whose rows do."""
        hidden = {str(row[1]).lower() for row in self._file.run(f"PRAGMA table_info({_TABLE})")}
        for name in _ROW_NUMBERS:
            if name not in hidden:
                try:
                    self._file.run(f"SELECT {name} FROM {self._table} LIMIT 1")  # noqa: S608 - names of its own
                except DamagedFileError:
                    return name
                except StorageError:
                    break
                return name
        names = ", ".join(map(_quoted, self._columns))
        copy = f"CREATE TEMP TABLE rag_wiki_copy AS SELECT {names} FROM main.{self._table}"  # noqa: S608 - as above
        self._file.prepare(copy)
        self._table = "temp.rag_wiki_copy"
        return _ROW_NUMBERS[0]

    def _count_up(self) -> list[tuple[Any, ...]] | None:
        """Figures that any question to 0.2 changes."""
        counts = [f"total({name})" for name in ("fetch_count", "queries_missed") if name in self._columns]
        latest = [f"max({name})" for name in ("last_fetched_at", "cached_at") if name in self._columns]
        try:
            return self._file.run(f"SELECT {', '.join(['count(*)', *counts, *latest])} FROM {self._table}")  # noqa: S608
        except DamagedFileError:
            return None

    def _rows(self, which: str, *values: int) -> list[tuple[Any, ...]]:
        query = f"SELECT {self._number}, user_id, doc_id FROM {self._table} {which}"  # noqa: S608 - names of its own
        return self._file.run(query, *values)

    def names(self) -> Iterator[Listed]:
        """All rows, by their number; of those that can't be read, what there is."""
        after, number, limit = _FIRST_ROW, self._number, _BATCH
        while True:
            try:
                rows = self._rows(f"WHERE {number} > ? ORDER BY {number} LIMIT {limit}", after)
            except DamagedFileError as error:
                limit //= 2
                if limit:
                    continue
                yield from self._beyond(after, error)
                return
            if not rows:
                return
            yield from (Listed(*row) for row in rows)
            after = rows[-1][0]

    def _beyond(self, after: int, error: DamagedFileError) -> Iterator[Listed]:
        """The rows beyond a number, where the next ones are damaged."""
        for name in self._indices():
            # It has the names and numbers of all rows, on other pages.
            with contextlib.suppress(DamagedFileError):
                yield from (Listed(*row) for row in self._rows(f"INDEXED BY {_quoted(name)}"))
                return
        try:
            last = int(self._rows(f"ORDER BY {self._number} DESC LIMIT 1")[0][0])
        except DamagedFileError:
            self._problems.append(f"the rows of {self._path} beyond number {after} can't be listed: {error}")
            return
        yield from self._halves(after + 1, last, [_MOST_DAMAGED])

    def _indices(self) -> list[str]:
        """The indices that have the names of all rows."""
        found = list[str]()
        for _, name, _, _, partial, *_ in self._file.run(f"PRAGMA index_list({_TABLE})"):
            columns = {row[2] for row in self._file.run(f"PRAGMA index_info({_quoted(str(name))})")}
            if not partial and {"user_id", "doc_id"} <= columns:
                found.append(str(name))
        return found

    def _halves(self, first: int, last: int, budget: list[int]) -> Iterator[Listed]:
        """The rows from one number to another, halved until what can't be read is a single one."""
        if first > last:
            return
        try:
            yield from [Listed(*row) for row in self._rows(f"WHERE {self._number} BETWEEN ? AND ?", first, last)]
        except DamagedFileError as error:
            budget[0] -= 1
            if budget[0] < 0:
                self._problems.append(f"the rows of {self._path} from {first} to {last} can't be listed: {error}")
            elif first == last:
                yield Listed(first, None, None, f"row {first} can't be read: {error}")
            else:
                middle = (first + last) // 2
                yield from self._halves(first, middle, budget)
                yield from self._halves(middle + 1, last, budget)

    def read(self, places: Sequence[Place]) -> dict[Place, Mapping[str, object] | Damaged]:
        """The rows of these numbers; each that is damaged is found by halving."""
        found: dict[Place, Mapping[str, object] | Damaged] = {}
        for batch in batches(places):
            names, marks = ", ".join(map(_quoted, self._columns)), ", ".join("?" * len(batch))
            query = f"SELECT {self._number}, {names} FROM {self._table} WHERE {self._number} IN ({marks})"  # noqa: S608
            try:
                for number, *values in self._file.run(query, *batch):
                    found[number] = dict(zip(self._columns, values, strict=True))
            except DamagedFileError as error:
                if len(batch) == 1:
                    found[batch[0]] = Damaged(f"row {batch[0]!r} can't be read: {error}")
                else:
                    middle = len(batch) // 2
                    found |= self.read(batch[:middle])
                    found |= self.read(batch[middle:])
        return found

    def problems(self, listed: int) -> list[str]:
        """That it was changed meanwhile, that rows could not be listed, or that there are more or fewer than were."""
        written = self._file.was_changed or (self._figures is not None and self._figures != self._count_up())
        if written:
            msg = (
                f"{self._path} was written to while it was read: stop the application, and run this again with "
                "overwrite, for what it wrote"
            )
            return [*self._problems, msg]
        try:
            count = int(self._file.run(f"SELECT count(*) FROM {self._table} NOT INDEXED")[0][0])  # noqa: S608
        except DamagedFileError:
            return self._problems
        if count != listed:
            return [*self._problems, f"{self._path} says that it has {count:,} records, and {listed:,} could be listed"]
        return self._problems

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


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
                user_id, doc_id = _decoded(user_id), _decoded(doc_id)
                yield Listed(key, user_id, doc_id, fits=_decoded(key) == f"{_PREFIX}{user_id!s}:{doc_id!s}")

    def read(self, places: Sequence[Place]) -> dict[Place, Mapping[str, object] | Damaged]:
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


def redis_client(url: str, shown: str) -> Any:
    """A client of the Redis at a URL.

    Raises:
        MissingExtraError: redis-py is not installed.
        ConfigurationError: It is no URL of a Redis. What was wrong with it is not told in redis-py's words, which
            may hold a part of the password.
    """
    try:
        import redis
    except ImportError as error:
        raise MissingExtraError("rag_wiki.migrate", "redis") from error
    try:
        client = redis.Redis.from_url(url)
        pool = client.connection_pool
        # Made and thrown away: else the first command says what parameter is not known, and in its own words.
        pool.connection_class(**pool.connection_kwargs)
    except (TypeError, ValueError, AttributeError):
        msg = f"{shown} is not the URL of a Redis, or has parameters that redis-py doesn't know; {LOOKS}"
        raise ConfigurationError(msg) from None
    return client
