"""State and chunks in a SQL database, through SQLAlchemy Core.

`SQLStateStore` is for PostgreSQL; `SQLiteStateStore` in `rag_wiki.storage.sqlite` shares all of it but
the way connections are made and locked. The tables are in `sql_tables`.
"""

from __future__ import annotations

import json
import os
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import lru_cache
from itertools import islice
from typing import Any, ClassVar

from rag_wiki import events
from rag_wiki.clock import as_utc
from rag_wiki.errors import (
    ConfigurationError,
    CorruptDataError,
    MissingExtraError,
    SchemaVersionError,
    StorageError,
)
from rag_wiki.forks import in_each_process
from rag_wiki.storage.base import ForgottenUser, StateStore, UnreadableUser, read_user_id
from rag_wiki.storage.chunk_store import ChunkHits, ChunkPlace, ChunkStore, StoredCopy, owners_of, read_or_raise
from rag_wiki.storage.codec import (
    StoredChange,
    StoredDocument,
    StoredUser,
    decode_moment,
    decode_user,
    dump_json,
    storage_key,
)

try:
    import sqlalchemy as sa
    from sqlalchemy.dialects import postgresql
    from sqlalchemy.engine import URL, Connection, Engine, make_url
except ImportError as error:
    raise MissingExtraError("SQLStateStore", "postgres") from error

from rag_wiki.storage.sql_driver import DriverCursor, StatementTexts
from rag_wiki.storage.sql_tables import (
    chunks_table,
    documents_table,
    events_table,
    hits_table,
    metadata,
    notes_table,
    schema_table,
    texts_table,
    users_table,
)
from rag_wiki.turn import Turn

__all__ = ["SQLPlace", "SQLStateStore"]

_of_the_parent: list[object] = []
"""Pools that a fork copied. Kept, because the driver complains of a connection that is dropped and not closed."""
_OLDER_TABLE = "user_document_state"
"""Where release 0.2 kept its records."""

_OUR_DRIVERS = ("", "psycopg", "psycopg2")
"""Drivers of a PostgreSQL URL that stand for psycopg 3: `psycopg2` is what SQLAlchemy fills in for none."""

_MOST_BOUND_VALUES = 500
"""Ids in one IN list: SQLite's oldest limit is 999 bound values a statement."""


class SQLDatabase:
    """One database: its engine, its schema, and its transactions. State and chunks share one."""

    schema_version: ClassVar[int] = 1
    migrations: ClassVar[Mapping[int, Callable[[Connection], None]]] = {}
    """From version → what makes the next one of it. Runs inside the transaction that sets up the schema."""

    def __init__(self, url: str | URL | Engine) -> None:
        self._given = url if isinstance(url, Engine) else None
        self._url = url.url if isinstance(url, Engine) else _parse_url(url)
        self._engine: Engine | None = None
        self._end: weakref.finalize[[Engine, int], SQLDatabase] | None = None
        """Closes the connections of an engine of our own: told to, or when nobody has this object any more."""
        self._texts: StatementTexts | None = None
        self._process = os.getpid()
        in_each_process(self._make_turn)
        self.check_url(self._url)

    def _make_turn(self) -> None:
        self._setup = Turn()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({_shown(self._url)!r})"

    # -- what differs between databases ----------------------------------------------------------

    insert: Any = staticmethod(postgresql.insert)
    """The dialect's INSERT with ON CONFLICT."""

    reading_isolation: ClassVar[str | None] = "REPEATABLE READ"
    """What makes all statements of a reading transaction see one moment; `None` where they do anyway."""

    writing_isolation: ClassVar[str | None] = "READ COMMITTED"
    """What transactions that write run in, whatever the server or an engine prefers: who waited for a lock then goes on
    with what is there, and does not fail. `None` where there is nothing to choose."""

    def check_url(self, url: URL) -> None:
        """Raise `ConfigurationError` for a database that this class is not for."""
        if url.get_backend_name() == "sqlite":
            msg = f"SQLStateStore is for PostgreSQL; for {_shown(url)!r} use SQLiteStateStore"
            raise ConfigurationError(msg)
        if url.get_backend_name() != "postgresql":
            msg = f"SQLStateStore works on PostgreSQL, not on {url.get_backend_name()!r}"
            raise ConfigurationError(msg)
        if url.get_dialect().is_async:
            msg = f"SQLStateStore takes a blocking driver, not {url.drivername!r}: write postgresql+psycopg"
            raise ConfigurationError(msg)
        if url.get_driver_name() in _OUR_DRIVERS:
            try:
                import psycopg  # noqa: F401 - SQLAlchemy imports it at the first connection, which is late to say so
            except ImportError as error:
                raise MissingExtraError("SQLStateStore", "postgres") from error

    def create_engine(self) -> Engine:
        """Open the database."""
        url = self._url
        if url.get_driver_name() in _OUR_DRIVERS:
            url = url.set(drivername="postgresql+psycopg")
        # Parameters are people's texts, which belong in no error message and no log.
        return sa.create_engine(url, pool_pre_ping=True, hide_parameters=True, isolation_level=self.writing_isolation)

    def lock_schema(self, connection: Connection) -> None:
        """Let one process at a time set up the schema: PostgreSQL's IF NOT EXISTS alone is a race."""
        connection.execute(sa.select(sa.func.pg_advisory_xact_lock(0x7261675F77696B69)))

    def lock_user(self, cursor: DriverCursor, user_key: str) -> StoredUser:
        """Read a user's counters such that nobody else changes anything of this user until the end."""
        # Again until there is a row to lock: somebody may forget the user just after we, or others, made it.
        while not (rows := cursor.rows(_USER_LOCKED, user_key=user_key)):
            new = {"user_key": user_key, "user_id": dump_json(""), **dict.fromkeys(_COUNTERS, 0)}
            cursor.run(_new_user_statement(self.insert), [new])
        return decode_user(*rows[0])

    @contextmanager
    def begin(self, connection: Any, *, writes: bool) -> Iterator[None]:
        """Begin on a connection of the driver: a transaction that writes, or a single statement that reads."""
        driver = connection.driver_connection
        before = driver.autocommit
        # A statement alone sees one moment by itself; a transaction around it would be two more trips.
        driver.autocommit = not writes
        # Connections of our own engine have it from the start. The driver says it along with BEGIN.
        foreign = writes and self._given is not None and hasattr(driver, "isolation_level")
        isolation = driver.isolation_level if foreign else None
        try:
            if foreign:
                dialect: Any = self.engine.dialect
                dialect.set_isolation_level(driver, self.writing_isolation)
            yield
        finally:
            # Whoever has the connection next finds it as it was.
            if foreign:
                driver.isolation_level = isolation
            driver.autocommit = before

    def scrub(self) -> None:
        """Leave no byte of removed rows where this process can reach it. PostgreSQL's VACUUM is its operator's.

        The chunks do it, which go last when a user is forgotten or a document purged.
        """

    def pickled_url(self) -> str:
        """The URL to open this database by elsewhere.

        Raises:
            StorageError: An engine was handed in, or the database lives in this process.
        """
        if self._given is not None or getattr(self, "in_memory", False):
            msg = f"{self!r} can't be pickled: give the store the URL of a database that other processes can open"
            raise StorageError(msg)
        return self._url.render_as_string(hide_password=False)

    # -- what does not ---------------------------------------------------------------------------

    @property
    def engine(self) -> Engine:
        """The engine of this process; made, and the schema with it, at first use."""
        if self._engine is None or self._process != os.getpid():
            with self._setup.take():
                if self._engine is None or self._process != os.getpid():
                    if self._engine is not None:
                        # After a fork the parent's connections are not ours: leave them open for the parent.
                        _of_the_parent.append(self._engine.pool)
                        self._engine.dispose(close=False)
                        self._end = None
                    engine = self._given or self.create_engine()
                    try:
                        self.set_up(engine)
                    except BaseException:
                        # The next use makes another one.
                        if engine is not self._given:
                            engine.dispose()
                        raise
                    if engine is not self._given:
                        self._end = weakref.finalize(self, _dispose, engine, os.getpid())
                    self._engine, self._process = engine, os.getpid()
        return self._engine

    def set_up(self, engine: Engine) -> None:
        """Make the tables, or bring those of an older release up to date, in one transaction."""
        if self._is_set_up(engine):
            # Nobody waits for anybody then, and a database that can only be read is read.
            return
        with self.writing(engine) as connection:
            self.lock_schema(connection)
            metadata.create_all(connection)
            found = connection.execute(sa.select(schema_table.c.version)).scalar()
            if found is None:
                self._tell_of_older_release(connection)
                connection.execute(sa.insert(schema_table).values(id=1, version=self.schema_version))
                return
            if found > self.schema_version:
                msg = (
                    f"{self!r} holds schema version {found}, this release of langchain-rag-wiki knows "
                    f"{self.schema_version}: upgrade langchain-rag-wiki, or open another database"
                )
                raise SchemaVersionError(msg)
            for version in range(found, self.schema_version):
                self.migrations[version](connection)
            connection.execute(sa.update(schema_table).values(version=self.schema_version))

    def _tell_of_older_release(self, connection: Connection) -> None:
        """Say that what release 0.2 kept in the same database is not read: its users would wait for it."""
        if not sa.inspect(connection).has_table(_OLDER_TABLE):
            return
        count = connection.execute(sa.select(sa.func.count()).select_from(sa.table(_OLDER_TABLE))).scalar_one()
        if count:
            events.DATABASE_OLDER.log(
                "%r holds records of langchain-rag-wiki 0.2 (%d, in the table %s). They stay there and are not read: "
                "`python -m rag_wiki.migrate` brings them over.",
                self,
                count,
                _OLDER_TABLE,
                records=count,
            )

    def _is_set_up(self, engine: Engine) -> bool:
        with engine.connect() as connection:
            if not metadata.tables.keys() <= set(sa.inspect(connection).get_table_names()):
                return False
            return connection.execute(sa.select(schema_table.c.version)).scalar() == self.schema_version

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """A transaction that sees one moment of the database."""
        with self.engine.connect() as connection:
            if self.reading_isolation is not None:
                connection.execution_options(isolation_level=self.reading_isolation)
            with connection.begin():
                yield connection

    @contextmanager
    def writing(self, engine: Engine | None = None) -> Iterator[Connection]:
        """A transaction that writes: all of it, or nothing."""
        with (engine or self.engine).connect() as connection:
            if self.writing_isolation is not None:
                connection.execution_options(isolation_level=self.writing_isolation)
            with connection.begin():
                yield connection

    @contextmanager
    def driver(self, *, writes: bool) -> Iterator[DriverCursor]:
        """A cursor of the driver's: in a transaction that writes all or nothing, or for one statement that reads."""
        engine = self.engine
        connection = engine.raw_connection()
        try:
            with self.begin(connection, writes=writes):
                cursor = connection.cursor()
                try:
                    yield DriverCursor(cursor, self._texts_of(engine))
                    if writes:
                        connection.commit()
                except BaseException:
                    connection.rollback()
                    raise
                finally:
                    # sqlite3 hands one prepared statement to all cursors of a connection, and a cursor resets it when
                    # it goes: left to the caller's frame, it would do so in the middle of the next one's statement.
                    cursor.close()
        except engine.dialect.loaded_dbapi.Error:
            # A connection that broke, or could not be put right, is nobody's any more; and it was hardly the only one.
            if getattr(connection.driver_connection, "broken", False):
                connection.invalidate()
                engine.dispose()
            raise
        finally:
            connection.close()

    def _texts_of(self, engine: Engine) -> StatementTexts:
        if self._texts is None:
            self._texts = StatementTexts(engine.dialect)
        return self._texts

    def upsert(self, cursor: DriverCursor, table: sa.Table, rows: list[dict[str, Any]], *keep: str) -> None:
        """Insert rows, or overwrite all their columns but the key and `keep`."""
        cursor.run(_upsert_statement(self.insert, table, keep), rows)

    def close(self) -> None:
        """Close the connections that were opened here; an engine that was handed in stays open."""
        end, self._engine, self._end = self._end, None, None
        if end is not None:
            end()


def _dispose(engine: Engine, process: int) -> None:
    # In a forked process the connections are still its parent's.
    if process == os.getpid():
        engine.dispose()


def _parse_url(url: str | URL) -> URL:
    try:
        return make_url(url)
    except sa.exc.ArgumentError as error:
        # What was given is not shown: it may hold a password.
        msg = "not a SQLAlchemy URL; it looks like sqlite:///path/to/file.db or postgresql://user:password@host/name"
        raise ConfigurationError(msg) from error


def _shown(url: URL) -> str:
    """The URL without its password, which may also stand in its query."""
    query = {name: "***" if "password" in name.lower() else value for name, value in url.query.items()}
    return url.set(query=query).render_as_string(hide_password=True)


@lru_cache(maxsize=64)
def _upsert_statement(insert: Any, table: sa.Table, keep: tuple[str, ...]) -> Any:
    # Putting a statement together costs more than carrying it out: each is made once.
    statement = insert(table)
    names = [column.name for column in table.columns if not column.primary_key and column.name not in keep]
    values = {name: statement.excluded[name] for name in names}
    if "revised" in values:
        values["revised"] = sa.func.coalesce(values["revised"], table.c.revised)
    return statement.on_conflict_do_update(index_elements=list(table.primary_key), set_=values)


_COUNTERS = ("queries", "searches", "revision", "saved", "floor")
_MINE: sa.BindParameter[str] = sa.bindparam("user_key")
_USER = sa.select(users_table.c.user_id, *(users_table.c[name] for name in _COUNTERS)).where(
    users_table.c.user_key == _MINE
)
_USER_LOCKED = _USER.with_for_update()


@lru_cache(maxsize=4)
def _new_user_statement(insert: Any) -> Any:
    return insert(users_table).on_conflict_do_nothing()


def _read_counters(connection: Connection, user_key: str) -> StoredUser:
    row = connection.execute(_USER, {"user_key": user_key}).first()
    return StoredUser() if row is None else decode_user(*row)


def _of(table: sa.Table, user_key: str, doc_key: str | None = None) -> sa.ColumnElement[bool]:
    mine = table.c.user_key == user_key
    return mine if doc_key is None else sa.and_(mine, table.c.doc_key == doc_key)


_CHANGED_COLUMNS = tuple(
    documents_table.c[name] for name in ("doc_key", "state", "payload", "idle_seen", "idle_hit", "score")
)
"""In the order of the fields of `StoredDocument`."""
_COLUMNS = (*_CHANGED_COLUMNS, documents_table.c.content)
# The counters, and a row for each idle document. Two halves for those, each with its own index, rather than an OR that
# would read all of the user's rows.
_START = sa.union_all(
    sa.select(sa.null().label("doc_key"), *_USER.selected_columns).where(users_table.c.user_key == _MINE),
    *(
        sa.select(
            documents_table.c.doc_key, sa.null(), *(sa.cast(sa.null(), sa.BigInteger).label(name) for name in _COUNTERS)
        ).where(
            users_table.c.user_key == _MINE,
            documents_table.c.user_key == _MINE,
            column <= clock + 1 - after,
        )
        for column, clock, after in (
            (documents_table.c.idle_seen, users_table.c.queries, sa.bindparam("lapse_after", type_=sa.BigInteger)),
            (
                documents_table.c.idle_hit,
                users_table.c.searches,
                sa.bindparam("demote_after", type_=sa.BigInteger) * users_table.c.saved,
            ),
        )
    ),
)


def _mine(table: sa.Table) -> sa.ColumnElement[bool]:
    """The rows of one document of one user, bound when a statement is run."""
    return sa.and_(table.c.user_key == _MINE, table.c.doc_key == sa.bindparam("own_key"))


_DELETE = {table: sa.delete(table).where(_mine(table)) for table in (documents_table, events_table, texts_table)}
_DELETE_ALL = [
    sa.delete(table).where(table.c.user_key == _MINE)
    for table in (documents_table, events_table, texts_table, users_table)
]
_SET_CONTENT = sa.update(documents_table).where(_mine(documents_table)).values(content=sa.bindparam("new_content"))
# Columns that are not named keep their index entries.
_SET_PAYLOAD = (
    sa.update(documents_table)
    .where(_mine(documents_table))
    .values(payload=sa.bindparam("new_payload"), score=sa.bindparam("new_score"))
)
_SET_SCORE = sa.update(documents_table).where(_mine(documents_table)).values(score=sa.bindparam("new_score"))
_ADD_EVENT = sa.insert(events_table)
_DELETE_OLD_EVENTS = _DELETE[events_table].where(events_table.c.number <= sa.bindparam("last_number"))
_NUMBERED = (events_table, texts_table)
_LAST_NUMBER = {table: sa.select(sa.func.max(table.c.number)).where(_mine(table)) for table in _NUMBERED}
_COPY_LOCKED = (
    sa.select(chunks_table.c.copy_id)
    .where(_mine(chunks_table), chunks_table.c.copy_id == sa.bindparam("own_copy"))
    .with_for_update(read=True, key_share=True)
)


@lru_cache(maxsize=64)
def _rows_of(columns: tuple[sa.Column[Any], ...], count: int) -> sa.Select[Any]:
    """Columns of the user's rows of so many documents; their keys are bound as `key_0` and so on."""
    table: Any = columns[0].table
    keys: list[sa.BindParameter[str]] = [sa.bindparam(f"key_{at}") for at in range(count)]
    return sa.select(*columns).where(table.c.user_key == _MINE, table.c.doc_key.in_(keys))


def _read_rows(
    cursor: DriverCursor, columns: tuple[sa.Column[Any], ...], user_key: str, doc_keys: Sequence[str]
) -> list[Any]:
    """Those rows. There are statements for 1, 2, 4 and so on documents; the last key fills the places left."""
    if not doc_keys:
        return []
    count = 1 << (len(doc_keys) - 1).bit_length()
    keys = {f"key_{at}": doc_keys[min(at, len(doc_keys) - 1)] for at in range(count)}
    return cursor.rows(_rows_of(columns, count), user_key=user_key, **keys)


@lru_cache(maxsize=4)
def _hit_statement(insert: Any) -> Any:
    statement = insert(hits_table)
    return statement.on_conflict_do_update(
        index_elements=list(hits_table.primary_key),
        set_={
            "hit_count": hits_table.c.hit_count + statement.excluded.hit_count,
            "last_hit_at": statement.excluded.last_hit_at,
        },
    )


def _batches(values: Iterable[Any]) -> Iterator[list[Any]]:
    iterator = iter(values)
    while batch := list(islice(iterator, _MOST_BOUND_VALUES)):
        yield batch


class SQLStateStore(StateStore):
    """Keeps state, and the chunks beside it, in PostgreSQL: for any number of workers and hosts.

    Args:
        url: A SQLAlchemy URL such as `postgresql://user:password@host/database` (psycopg is the driver),
            or an `Engine`, which stays yours: `close` leaves it open.

    What every query runs goes to the driver directly (see `sql_driver`): SQLAlchemy's statement events, and
    whatever listens to them, do not see it.

    Raises:
        ConfigurationError: The URL names another kind of database.
        MissingExtraError: SQLAlchemy or psycopg is not installed.
    """

    _database_class: ClassVar[type[SQLDatabase]] = SQLDatabase

    def __init__(self, url: str | URL | Engine) -> None:
        self._database = self._database_class(url)
        self._chunks = ChunkStore(place=SQLPlace(self._database))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._database!r})"

    def __reduce__(self) -> tuple[type[SQLStateStore], tuple[str]]:
        # Another process opens the database anew; connections and locks stay here.
        return type(self), (self._database.pickled_url(),)

    @property
    def chunk_store(self) -> ChunkStore:
        """Chunks in the same database."""
        return self._chunks

    def close(self) -> None:
        """Close the connections that this store opened."""
        self._database.close()

    def _read_user(self, user_key: str) -> StoredUser:
        with self._database.reading() as connection:
            return _read_counters(connection, user_key)

    def _read_document(self, user_key: str, doc_key: str) -> tuple[StoredUser, StoredDocument | None]:
        with self._database.reading() as connection:
            user = _read_counters(connection, user_key)
            row = connection.execute(sa.select(*_COLUMNS).where(_of(documents_table, user_key, doc_key))).first()
        return user, None if row is None else StoredDocument(*row)

    def _scan(
        self,
        user_key: str,
        states: Sequence[str] | None,
        *,
        after: str | None = None,
        limit: int | None = None,
        content: bool = False,
    ) -> tuple[StoredUser, list[StoredDocument]]:
        columns = _COLUMNS if content else _CHANGED_COLUMNS
        query = sa.select(*columns).where(_of(documents_table, user_key)).order_by(documents_table.c.doc_key)
        if states is not None:
            query = query.where(documents_table.c.state.in_(states))
        if after is not None:
            query = query.where(documents_table.c.doc_key > after)
        with self._database.reading() as connection:
            user = _read_counters(connection, user_key)
            rows = connection.execute(query.limit(limit)).all()
        return user, [StoredDocument(*row) for row in rows]

    def _read_start(self, user_key: str, lapse_after: int, demote_after: int) -> tuple[StoredUser, Sequence[str]]:
        with self._database.driver(writes=False) as cursor:
            rows = cursor.rows(_START, user_key=user_key, lapse_after=lapse_after, demote_after=demote_after)
        user, idle = StoredUser(), []
        for doc_key, *counters in rows:
            if doc_key is None:
                user = decode_user(*counters)
            else:
                idle.append(doc_key)
        return user, idle

    def _read_revised(self, user_key: str, after: int) -> tuple[StoredUser, list[StoredDocument] | None]:
        query = sa.select(*_CHANGED_COLUMNS).where(_of(documents_table, user_key), documents_table.c.revised > after)
        with self._database.reading() as connection:
            return _read_counters(connection, user_key), [StoredDocument(*row) for row in connection.execute(query)]

    def _change(
        self,
        user_key: str,
        doc_keys: Sequence[str],
        step: Callable[[StoredUser, Mapping[str, StoredDocument]], StoredChange],
    ) -> None:
        with self._database.driver(writes=True) as cursor:
            user = self._database.lock_user(cursor, user_key)
            present: dict[str, StoredDocument] = {}
            for keys in _batches(doc_keys):
                for row in _read_rows(cursor, _CHANGED_COLUMNS, user_key, keys):
                    present[row[0]] = StoredDocument(*row)
            self._write(cursor, user_key, step(user, present))

    def _write(self, cursor: DriverCursor, user_key: str, change: StoredChange) -> None:
        upsert = self._database.upsert
        for table, statement in _DELETE.items():
            gone = [*change.deleted, *change.clear_texts] if table is texts_table else change.deleted
            cursor.run(statement, [{"user_key": user_key, "own_key": key} for key in gone])
        documents, payloads = list[dict[str, Any]](), list[dict[str, Any]]()
        for item in change.documents:
            if item.key in change.only_payload:
                values = {"new_payload": item.text, "new_score": item.score}
                payloads.append({"user_key": user_key, "own_key": item.key, **values})
            else:
                documents.append(
                    {
                        "user_key": user_key,
                        "doc_key": item.key,
                        "state": item.state,
                        "idle_seen": item.idle_seen,
                        "idle_hit": item.idle_hit,
                        "payload": item.text,
                        "score": item.score,
                        "content": None,
                        "revised": item.revised,
                    }
                )
        upsert(cursor, documents_table, documents, "content")
        cursor.run(_SET_PAYLOAD, payloads)
        scores = [{"user_key": user_key, "own_key": key, "new_score": score} for key, score in change.scores]
        cursor.run(_SET_SCORE, scores)
        contents = [
            {"user_key": user_key, "own_key": key, "new_content": content} for key, content in change.contents.items()
        ]
        cursor.run(_SET_CONTENT, contents)
        self._write_events(cursor, user_key, change.events)
        for key, digest, payload in change.texts:
            number = _next_number(cursor, texts_table, user_key, key)
            row = {"user_key": user_key, "doc_key": key, "digest": digest, "number": number, "payload": payload}
            upsert(cursor, texts_table, [row], "number")
        if change.hit_at is not None:
            hits = [(storage_key(doc_id), copy_id, indices) for doc_id, copy_id, indices in change.chunk_hits]
            _add_hits(self._database, cursor, user_key, hits, change.hit_at)
        counters = {name: getattr(change.user, name) for name in _COUNTERS}
        user = {"user_key": user_key, "user_id": dump_json(change.user.user_id), **counters}
        upsert(cursor, users_table, [user])

    def _write_events(self, cursor: DriverCursor, user_key: str, events: Sequence[tuple[str, str]]) -> None:
        for key, payload in events:
            number = _next_number(cursor, events_table, user_key, key)
            row = {"user_key": user_key, "doc_key": key, "number": number, "payload": payload}
            cursor.run(_ADD_EVENT, [row])
            if number > self.history_limit:
                old = {"user_key": user_key, "own_key": key, "last_number": number - self.history_limit}
                cursor.run(_DELETE_OLD_EVENTS, [old])

    def _read_events(self, user_key: str, doc_key: str) -> Sequence[str]:
        return self._payloads(events_table, user_key, doc_key)

    def _read_texts(self, user_key: str, doc_key: str) -> Sequence[str]:
        return self._payloads(texts_table, user_key, doc_key)

    def _payloads(self, table: sa.Table, user_key: str, doc_key: str) -> Sequence[str]:
        query = sa.select(table.c.payload).where(_of(table, user_key, doc_key)).order_by(table.c.number)
        with self._database.reading() as connection:
            return connection.execute(query).scalars().all()

    def _active_users(self) -> Iterable[str | UnreadableUser]:
        return self._users_where(users_table.c.saved > 0)

    def _all_users(self) -> Iterable[str | UnreadableUser]:
        return self._users_where(sa.true())

    def _users_with(self, doc_key: str) -> Iterable[str | UnreadableUser]:
        knows = sa.select(documents_table.c.user_key).where(documents_table.c.doc_key == doc_key)
        return self._users_where(users_table.c.user_key.in_(knows))

    def _users_where(self, condition: sa.ColumnElement[bool]) -> list[str | UnreadableUser]:
        query = sa.select(users_table.c.user_key, users_table.c.user_id).where(condition)
        with self._database.reading() as connection:
            return [read_user_id(user_key, user_id) for user_key, user_id in connection.execute(query)]

    def _forget(self, user_key: str) -> ForgottenUser:
        with self._database.driver(writes=True) as cursor:
            self._database.lock_user(cursor, user_key)
            gone = [cursor.run(statement, [{"user_key": user_key}]) for statement in _DELETE_ALL]
        return ForgottenUser(documents=gone[0], events=gone[1], retrieved_texts=gone[2])

    def _read_note(self, name: str) -> str | None:
        query = sa.select(notes_table.c.text).where(notes_table.c.name == storage_key(name))
        with self._database.reading() as connection:
            return connection.execute(query).scalar()

    def _swap_note(self, name: str, expected: str | None, text: str) -> bool:
        row = {"name": storage_key(name), "text": text}
        with self._database.writing() as connection:
            if expected is None:
                statement = self._database.insert(notes_table).values(row).on_conflict_do_nothing()
            else:
                same = sa.and_(notes_table.c.name == row["name"], notes_table.c.text == expected)
                statement = sa.update(notes_table).where(same).values(text=text)
            # An INSERT's row count is not kept unless one asks for it, and reads as -1 then.
            return connection.execute(statement, execution_options={"preserve_rowcount": True}).rowcount == 1


def _next_number(cursor: DriverCursor, table: sa.Table, user_key: str, doc_key: str) -> int:
    ((last,),) = cursor.rows(_LAST_NUMBER[table], user_key=user_key, own_key=doc_key)
    return int(last or 0) + 1


def _add_hits(
    database: SQLDatabase,
    cursor: DriverCursor,
    user_key: str,
    hits: Iterable[tuple[str, str, Sequence[int]]],
    now: datetime,
    count: int = 1,
) -> None:
    """Count hits by document key, copy id and chunk indices, of copies that are there and stay until the end."""
    # In one order for all, so that no two writers wait for each other's rows.
    for doc_key, copy_id, indices in sorted(hits):
        if not indices or not cursor.rows(_COPY_LOCKED, user_key=user_key, own_key=doc_key, own_copy=copy_id):
            continue
        key = {"user_key": user_key, "doc_key": doc_key, "copy_id": copy_id}
        moment = as_utc(now).isoformat()
        rows = [{**key, "chunk_index": index, "hit_count": count, "last_hit_at": moment} for index in sorted(indices)]
        cursor.run(_hit_statement(database.insert), rows)


def _stored_copy(copy_id: str, parts: Mapping[str, Any]) -> StoredCopy:
    vectors = parts.get("vectors")
    return StoredCopy(copy_id, parts["header"], parts.get("texts"), None if vectors is None else bytes(vectors))


class SQLPlace(ChunkPlace):
    """Chunks in the database of the state: one lifetime, seen by every worker."""

    def __init__(self, database: SQLDatabase) -> None:
        self._database = database

    def write(self, user_id: str, doc_id: str, copy: StoredCopy) -> None:
        """Keep a copy."""
        row = {
            "user_key": storage_key(user_id),
            "doc_key": storage_key(doc_id),
            "copy_id": copy.copy_id,
            "chunks": len(json.loads(copy.header)["indices"]),
            "header": copy.header,
            "texts": copy.texts or "[]",
            "vectors": copy.vectors or b"",
        }
        with self._database.driver(writes=True) as cursor:
            self._database.upsert(cursor, chunks_table, [row])

    def copies(self, user_id: str, doc_id: str) -> list[str]:
        """The ids of the document's copies."""
        mine = _of(chunks_table, storage_key(user_id), storage_key(doc_id))
        query = sa.select(chunks_table.c.copy_id).where(mine).order_by(chunks_table.c.copy_id)
        with self._database.reading() as connection:
            return list(connection.execute(query).scalars())

    def read(self, user_id: str, doc_id: str, copy_id: str, *, texts: bool, vectors: bool) -> StoredCopy | None:
        """The copy, or `None`."""
        _, stored = next(iter(self.read_many(user_id, [(doc_id, copy_id)], texts=texts, vectors=vectors)))
        return read_or_raise(stored)

    def read_many(
        self, user_id: str, wanted: Iterable[tuple[str, str]], *, texts: bool, vectors: bool
    ) -> Iterator[tuple[str, StoredCopy | CorruptDataError | None]]:
        """Many copies, some hundreds a statement."""
        names = ["doc_key", "copy_id", "header", *(["texts"] if texts else []), *(["vectors"] if vectors else [])]
        columns = tuple(chunks_table.c[name] for name in names)
        for batch in _batches(wanted):
            keys = [storage_key(doc_id) for doc_id, _ in batch]
            with self._database.driver(writes=False) as cursor:
                rows = _read_rows(cursor, columns, storage_key(user_id), keys)
            found = {row[:2]: dict(zip(names, row, strict=True)) for row in rows}
            for (doc_id, copy_id), key in zip(batch, keys, strict=True):
                parts = found.get((key, copy_id))
                yield doc_id, None if parts is None else _stored_copy(copy_id, parts)

    def list_copies(self, user_id: str, doc_ids: Iterable[str]) -> dict[str, list[str]]:
        """The ids of the copies of many documents, some hundreds of documents a statement."""
        columns, found = (chunks_table.c.doc_key, chunks_table.c.copy_id), defaultdict[str, list[str]](list)
        for batch in _batches(doc_ids):
            keys = {storage_key(doc_id): doc_id for doc_id in batch}
            with self._database.driver(writes=False) as cursor:
                rows = _read_rows(cursor, columns, storage_key(user_id), list(keys))
            for doc_key, copy_id in sorted(set(rows)):
                found[keys[doc_key]].append(copy_id)
        return dict(found)

    def owners(self) -> list[str]:
        """The users with a copy, by what their copies say."""
        query = sa.select(sa.func.min(chunks_table.c.header)).group_by(chunks_table.c.user_key)
        with self._database.reading() as connection:
            return owners_of(connection.execute(query).scalars())

    def purge(self, doc_id: str) -> int:
        """Remove all copies of a document, of all users, and their hits."""
        with self._database.writing() as connection:
            gone = [
                connection.execute(sa.delete(table).where(table.c.doc_key == storage_key(doc_id))).rowcount
                for table in (chunks_table, hits_table)
            ]
        self._database.scrub()
        return gone[0]

    def delete(self, user_id: str, doc_id: str, copy_ids: Collection[str] | None = None) -> int:
        """Remove copies and their hits."""
        removed = []
        with self._database.writing() as connection:
            for table in (chunks_table, hits_table):
                statement = sa.delete(table).where(_of(table, storage_key(user_id), storage_key(doc_id)))
                if copy_ids is not None:
                    statement = statement.where(table.c.copy_id.in_(list(copy_ids)))
                removed.append(connection.execute(statement).rowcount)
        return removed[0]

    def delete_user(self, user_id: str) -> int:
        """Remove all of the user's copies and hits."""
        key = storage_key(user_id)
        total = sa.select(sa.func.coalesce(sa.func.sum(chunks_table.c.chunks), 0)).where(_of(chunks_table, key))
        with self._database.writing() as connection:
            chunks = int(connection.execute(total).scalar_one())
            for table in (chunks_table, hits_table):
                connection.execute(sa.delete(table).where(_of(table, key)))
        self._database.scrub()
        return chunks

    def add_hits(
        self, user_id: str, doc_id: str, copy_id: str, indices: Sequence[int], now: datetime, count: int = 1
    ) -> None:
        """Count hits of each chunk."""
        with self._database.driver(writes=True) as cursor:
            hits = [(storage_key(doc_id), copy_id, indices)]
            _add_hits(self._database, cursor, storage_key(user_id), hits, now, count)

    def hits(self, user_id: str, doc_id: str, copy_id: str) -> dict[int, ChunkHits]:
        """The hits of a copy."""
        mine = _of(hits_table, storage_key(user_id), storage_key(doc_id))
        query = sa.select(hits_table).where(mine, hits_table.c.copy_id == copy_id)
        with self._database.reading() as connection:
            return {
                row.chunk_index: ChunkHits(row.hit_count, decode_moment(row.last_hit_at, "time of a hit"))
                for row in connection.execute(query)
            }

    def hit_counts(self, user_id: str, wanted: Iterable[tuple[str, str]]) -> dict[str, int]:
        """How many chunks of each copy ever answered, some hundreds of copies a statement."""
        columns, counts = (hits_table.c.doc_key, hits_table.c.copy_id), dict[str, int]()
        for batch in _batches(wanted):
            keys = {storage_key(doc_id): (doc_id, copy_id) for doc_id, copy_id in batch}
            with self._database.driver(writes=False) as cursor:
                rows = _read_rows(cursor, columns, storage_key(user_id), list(keys))
            for (doc_key, copy_id), hit in Counter(rows).items():
                if keys[doc_key][1] == copy_id:
                    counts[keys[doc_key][0]] = hit
        return counts
