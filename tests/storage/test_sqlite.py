"""What SQLite adds to the promises of every state store: files, processes, locks, schema versions."""

from __future__ import annotations

import os
import sqlite3
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from storage.store_worker import COUNTS, Workers, count_one

from rag_wiki import ConfigurationError, CorruptDataError, DocumentState, SchemaVersionError, UserDocRecord
from rag_wiki.storage.records import UserChange
from rag_wiki.storage.sqlite import SQLiteDatabase, SQLiteStateStore
from rag_wiki.testing.awkward import NOON, a_record, a_text, an_event, in_threads, just

ONE: sa.Select[Any] = sa.select(sa.literal_column("1"))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where a test keeps its database."""
    return tmp_path / "state.db"


@pytest.fixture
def url(path: Path) -> str:
    """The URL of that place."""
    return f"sqlite:///{path}"


@pytest.fixture
def store(url: str) -> Iterator[SQLiteStateStore]:
    """A store over a file that does not exist yet."""
    with SQLiteStateStore(url) as store:
        yield store


def query(path: Path, statement: str, *values: Any) -> list[Any]:
    """Ask or change the file behind the store's back."""
    with closing(sqlite3.connect(path)) as connection, connection:
        return connection.execute(statement, values).fetchall()


def dump(path: Path) -> list[str]:
    """All that is in the file."""
    with closing(sqlite3.connect(path)) as connection:
        return list(connection.iterdump())


class TestFiles:
    """Where the data lies, and for how long."""

    def test_the_log_is_written_ahead(self, store: SQLiteStateStore, path: Path) -> None:
        """The file is in WAL mode, so readers and the writer do not block each other."""
        store.upsert(a_record())
        assert query(path, "PRAGMA journal_mode") == [("wal",)]

    def test_a_missing_folder_is_made(self, tmp_path: Path) -> None:
        """A database in folders that do not exist is created with them."""
        path = tmp_path / "not" / "yet" / "state.db"
        with SQLiteStateStore(f"sqlite:///{path}") as store:
            store.upsert(a_record())
        assert path.is_file()

    def test_a_relative_path_is_relative_to_where_one_is(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The default URL makes `rag_wiki.db` in the working directory."""
        monkeypatch.chdir(tmp_path)
        with SQLiteStateStore() as store:
            store.upsert(a_record())
        assert (tmp_path / "rag_wiki.db").is_file()

    def test_data_survives_reopening(self, url: str) -> None:
        """Record, content, history, texts, clocks, revision, chunks, hits and job times outlive the store object."""
        record = a_record(user_state=DocumentState.CLAIMED, full_content="text", queries_missed=2)
        with SQLiteStateStore(url) as store:
            store.upsert(record)
            store.change("alice", ["d"], just(UserChange(events=[an_event()], texts=[a_text()], queries=3, searches=1)))
            store.chunk_store.save_chunks("alice", "d", [{"chunk_index": 0, "text": "chunk", "vector": [0.25]}])
            store.chunk_store.record_hits("alice", "d", [0], NOON)
            store.claim_job("decay", NOON, timedelta(days=1))
            start, chunks = store.begin_query("alice", 3, 10), store.chunk_store.load_chunks("alice", "d")

        with SQLiteStateStore(url) as store:
            got = store.get("alice", "d")
            assert got is not None
            assert (got.full_content, got.user_state, got.queries_missed) == ("text", DocumentState.CLAIMED, 5)
            assert store.history("alice", "d") == [an_event()]
            assert store.retrieved_texts("alice", "d") == [a_text()]
            assert store.begin_query("alice", 3, 10) == start
            assert store.chunk_store.load_chunks("alice", "d") == chunks
            assert (chunks[0]["text"], chunks[0]["vector"], chunks[0]["hit_count"]) == ("chunk", [0.25], 1)
            assert store.job_time("decay") == NOON

    def test_two_stores_share_a_file(self, store: SQLiteStateStore, url: str) -> None:
        """What one store writes, another one over the same file sees at once, and their counts add up."""
        with SQLiteStateStore(url) as other:
            for number in range(5):
                assert store.change("alice", ["d"], count_one).outcome == 2 * number + 1
                assert other.change("alice", ["d"], count_one).outcome == 2 * number + 2

    def test_closing_leaves_nothing_open(self, store: SQLiteStateStore, path: Path) -> None:
        """After `close` no connection is open: the log is gone with the last one. Twice is no error."""
        in_threads(4, lambda number: store.upsert(a_record(doc_id=f"d{number}")))
        log = path.with_name(path.name + "-wal")
        assert log.exists()
        store.close()
        store.close()
        assert not log.exists()

    def test_what_was_deleted_is_not_in_the_file(self, store: SQLiteStateStore, path: Path) -> None:
        """The bytes of a forgotten user's content, chunks and texts are overwritten, not just unlinked."""
        secret = "the quick brown secret"  # noqa: S105 - a text to look for
        record = a_record(user_state=DocumentState.CLAIMED, full_content=secret * 100, doc_title=secret)
        store.upsert(record)
        store.change("alice", ["d"], just(UserChange(texts=[a_text(text=secret)], events=[an_event(why=secret)])))
        store.chunk_store.save_chunks("alice", "d", [{"chunk_index": 0, "text": secret, "vector": None}])
        store.close()
        assert secret.encode() in path.read_bytes()

        store.forget_user("alice")
        store.close()

        assert secret.encode() not in path.read_bytes()
        assert b"alice" not in path.read_bytes()

    def test_forgetting_waits_for_a_checkpoint_of_somebody_else(
        self, store: SQLiteStateStore, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """SQLite refuses a checkpoint while another one is under way; what was removed leaves the log all the same."""
        secret = "the quick brown secret"  # noqa: S105 - a text to look for
        store.upsert(a_record(user_state=DocumentState.CLAIMED, full_content=secret))
        log = path.with_name(path.name + "-wal")
        assert secret.encode() in log.read_bytes()
        refusals, waits = [True, True], list[float]()

        class Cursor(sqlite3.Cursor):
            def execute(self, statement: str, *values: Any) -> Any:
                if "wal_checkpoint" in statement and refusals:
                    refusals.pop()
                    return super().execute("SELECT 1, -1, -1")
                return super().execute(statement, *values)

        raw = sa.Engine.raw_connection

        def raw_connection(engine: sa.Engine) -> Any:
            connection = raw(engine)
            driver: Any = connection.driver_connection
            monkeypatch.setattr(connection, "cursor", lambda: driver.cursor(Cursor), raising=False)
            return connection

        monkeypatch.setattr(sa.Engine, "raw_connection", raw_connection)
        monkeypatch.setattr("rag_wiki.storage.sqlite.time.sleep", waits.append)
        store.forget_user("alice")
        assert (refusals, len(waits)) == ([], 2)
        assert secret.encode() not in path.read_bytes()
        assert secret.encode() not in log.read_bytes()


class TestInMemory:
    """`:memory:` lives and dies with the store object."""

    @pytest.mark.parametrize("url", ["sqlite:///:memory:", "sqlite://"])
    def test_all_threads_see_the_same_data(self, url: str) -> None:
        """8 threads count exactly, and the thread that made the store sees all of it."""
        with SQLiteStateStore(url) as store:
            in_threads(8, lambda _: [store.change("alice", ["d"], count_one) for _ in range(20)])
            record = store.get("alice", "d")
            assert record is not None
            assert record.fetch_count == 160

    def test_a_thread_may_make_the_tables(self) -> None:
        """The first use may be in any thread, with many at once."""
        with SQLiteStateStore("sqlite:///:memory:") as store:
            in_threads(8, lambda number: store.upsert(a_record(doc_id=f"d{number}")))
            assert [record.doc_id for record in store.list_surfaced("alice")] == [f"d{number}" for number in range(8)]

    @pytest.mark.parametrize("kind", ["file", "memory"])
    def test_a_cursor_ends_with_its_transaction(self, kind: str, url: str) -> None:
        """Whoever keeps a cursor holds no statement: one that went later would reset what another thread is running."""
        database = SQLiteDatabase(url if kind == "file" else "sqlite:///:memory:")
        for writes in (False, True):
            with database.driver(writes=writes) as cursor:
                assert cursor.rows(ONE) == [(1,)]
            with pytest.raises(sqlite3.ProgrammingError, match="closed cursor"):
                cursor.rows(ONE)
        database.close()

    def test_two_stores_do_not_share_data(self) -> None:
        """Each in-memory store has a database of its own."""
        with SQLiteStateStore("sqlite:///:memory:") as one, SQLiteStateStore("sqlite:///:memory:") as two:
            one.upsert(a_record())
            assert two.get("alice", "d") is None
            two.upsert(a_record(fetch_count=2))
            assert one.get("alice", "d") == a_record()


class TestProcesses:
    """One file, many processes."""

    def test_six_processes_create_one_file_and_count_exactly(self, url: str, path: Path) -> None:
        """Six processes open one fresh file at the same moment, and count 2 × 30 fetches each: 360, each once."""
        with Workers("count", url, 6) as workers:
            workers.go()
            told = workers.results()
        total = 6 * 2 * COUNTS
        assert sorted(count for counts in told for count in counts) == list(range(1, total + 1))
        with SQLiteStateStore(url) as store:
            record, *others = store.list_surfaced("alice")
            assert (record.doc_id, record.fetch_count) == ("d", total)
            assert len({other.doc_id for other in others}) == 6
            assert store.begin_query("alice", 3, 10).clocks.queries == total
        assert query(path, "SELECT version FROM rag_wiki_schema") == [(SQLiteDatabase.schema_version,)]

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
    def test_a_store_works_on_after_a_fork(self, url: str) -> None:
        """A store that was used before a fork counts exactly in the parent and two children at once."""
        with Workers("fork", url) as workers:
            workers.go()
            (told,) = workers.results()
        assert sorted(told) == list(range(1, 3 * COUNTS + 3))

    def test_a_writer_waits_for_another_process(self, store: SQLiteStateStore, path: Path) -> None:
        """While another process holds the write lock, reading works and writing waits; then it succeeds."""
        store.upsert(a_record())
        asked = threading.Event()

        def notice(statement: str) -> None:
            if statement == "BEGIN IMMEDIATE":
                asked.set()

        def watch(connection: sqlite3.Connection, *_: object) -> None:
            connection.set_trace_callback(notice)

        with Workers("hold", str(path)) as workers:
            workers.go()
            workers.expect("locked")
            sa.event.listen(sa.pool.Pool, "checkout", watch)
            try:
                writer = threading.Thread(target=lambda: told.append(store.change("alice", ["d"], count_one).outcome))
                told: list[int] = []
                writer.start()
                assert asked.wait(timeout=60)
                for _ in range(50):
                    assert store.get("alice", "d") == a_record()
                assert writer.is_alive()
                assert told == []
                workers.go()
                writer.join(timeout=60)
            finally:
                sa.event.remove(sa.pool.Pool, "checkout", watch)
            workers.results()
        assert told == [1]
        assert store.get("alice", "d") == a_record(fetch_count=1)


def execute(statement: str) -> Callable[[sa.Connection], None]:
    """A migration of one statement."""

    def migrate(connection: sa.Connection) -> None:
        connection.exec_driver_sql(statement)

    return migrate


class _NewerDatabase(SQLiteDatabase):
    """A release from the future: version 3, in which every title is in capitals and jobs are forgotten."""

    schema_version = 3
    migrations = {  # noqa: RUF012 - a ClassVar in the base class
        1: execute("UPDATE rag_wiki_documents SET payload = replace(payload, 'A Title', 'A TITLE')"),
        2: execute("DELETE FROM rag_wiki_notes"),
    }


class _NewerStore(SQLiteStateStore):
    _database_class = _NewerDatabase


class _BrokenDatabase(_NewerDatabase):
    """One whose second step fails."""

    migrations = {  # noqa: RUF012 - a ClassVar in the base class
        1: _NewerDatabase.migrations[1],
        2: execute("DELETE FROM a_table_that_is_not_there"),
    }


class _BrokenStore(SQLiteStateStore):
    _database_class = _BrokenDatabase


class TestSchemaVersions:
    """Databases of older and newer releases."""

    def test_a_newer_database_is_refused(self, store: SQLiteStateStore, path: Path, url: str) -> None:
        """A database of a newer release is an error that names both versions, and is left as it is."""
        store.upsert(a_record())
        store.close()
        query(path, "UPDATE rag_wiki_schema SET version = 99")
        before = dump(path)

        with SQLiteStateStore(url) as older:
            for _ in range(2):
                with pytest.raises(SchemaVersionError, match=rf"\b99\b.*\b{SQLiteDatabase.schema_version}\b"):
                    older.get("alice", "d")

        assert dump(path) == before

    def test_an_older_database_is_brought_up(self, store: SQLiteStateStore, path: Path, url: str) -> None:
        """Each migration from the found version on runs once, and the data is there in its new form."""
        store.upsert(a_record(fetch_count=3))
        store.claim_job("decay", NOON, timedelta(days=1))
        store.close()

        for _ in range(2):
            with _NewerStore(url) as newer:
                assert newer.get("alice", "d") == a_record(fetch_count=3, doc_title="A TITLE")
                assert newer.job_time("decay") is None
                assert newer.claim_job("decay", NOON, timedelta(days=1)) is True
                query(path, "DELETE FROM rag_wiki_notes")
        assert query(path, "SELECT version FROM rag_wiki_schema") == [(3,)]

        with SQLiteStateStore(url) as older, pytest.raises(SchemaVersionError):
            older.get("alice", "d")

    def test_migrations_run_once(self, store: SQLiteStateStore, url: str) -> None:
        """A database that is of the present version is not migrated again."""
        store.upsert(a_record())
        store.close()
        with _NewerStore(url) as newer:
            newer.get("alice", "d")
            newer.upsert(a_record(doc_title="A Title"))
            newer.claim_job("decay", NOON, timedelta(days=1))
        with _NewerStore(url) as newer:
            assert newer.get("alice", "d") == a_record(doc_title="A Title")
            assert newer.job_time("decay") == NOON

    def test_a_migration_that_fails_changes_nothing(self, store: SQLiteStateStore, path: Path, url: str) -> None:
        """When a later step fails, the earlier ones are undone, and the database opens as before."""
        store.upsert(a_record())
        store.close()
        before = dump(path)

        with _BrokenStore(url) as broken, pytest.raises(sa.exc.OperationalError):
            broken.get("alice", "d")

        assert dump(path) == before
        assert store.get("alice", "d") == a_record()

    def test_a_missing_table_is_made(self, store: SQLiteStateStore, path: Path) -> None:
        """A database that lacks a table gets it, and keeps the others as they are."""
        store.upsert(a_record())
        store.close()
        query(path, "DROP TABLE rag_wiki_notes")
        assert store.claim_job("decay", NOON, timedelta(days=1)) is True
        assert store.get("alice", "d") == a_record()


class TestConfiguration:
    """What is not for this store."""

    @pytest.mark.parametrize(
        "wrong",
        [
            "postgresql://me:hunter2@localhost/x",
            "mysql://me:hunter2@localhost/x",
            "sqlite+aiosqlite:///x.db",
            "state.db",
            "C:\\data\\state.db",
            "",
        ],
    )
    def test_other_urls_are_refused(self, wrong: str) -> None:
        """A URL of another database, of an async driver, or none at all is a `ConfigurationError` without password."""
        with pytest.raises(ConfigurationError) as raised:
            SQLiteStateStore(wrong)
        assert "hunter2" not in str(raised.value)
        assert "sqlite:///" in str(raised.value)

    def test_an_engine_is_refused(self) -> None:
        """An engine is refused, since how its connections begin is this store's own matter."""
        engine: Any = sa.create_engine("sqlite://")
        with pytest.raises(ConfigurationError):
            SQLiteStateStore(engine)
        engine.dispose()

    def test_its_name_is_its_place(self, store: SQLiteStateStore, path: Path) -> None:
        """The repr says which class and which file."""
        assert "SQLiteStateStore" in repr(store)
        assert path.name in repr(store)


CORRUPT = [
    "UPDATE rag_wiki_documents SET payload = 'torn {'",
    "UPDATE rag_wiki_documents SET payload = '[]'",
    "UPDATE rag_wiki_documents SET payload = payload || ' {}'",
    "UPDATE rag_wiki_documents SET payload = '{}'",
    'UPDATE rag_wiki_documents SET payload = replace(payload, \'"fetch_count":1\', \'"fetch_count":1,"copy_id":1e\')',
    "UPDATE rag_wiki_documents SET state = 'NEVER HEARD OF'",
    "UPDATE rag_wiki_documents SET content = 'torn'",
    "UPDATE rag_wiki_documents SET content = '5'",
    "UPDATE rag_wiki_users SET user_id = 'torn'",
    "UPDATE rag_wiki_users SET user_id = '5'",
]


class TestCorruptData:
    """Bytes that can't be read back raise; they are never taken for absent."""

    @pytest.mark.parametrize("damage", CORRUPT)
    def test_a_corrupt_record_raises(self, store: SQLiteStateStore, path: Path, damage: str) -> None:
        """A damaged record or user is a `CorruptDataError` for every reader, and can be deleted or forgotten."""
        store.upsert(a_record(user_state=DocumentState.CLAIMED, fetch_count=1, full_content="text"))
        query(path, damage)
        with pytest.raises(CorruptDataError):
            store.get("alice", "d")
        with pytest.raises(CorruptDataError):
            store.list_by_state("alice")
        query(path, "UPDATE rag_wiki_users SET user_id = '\"alice\"'")
        assert store.forget_user("alice").documents == 1
        assert store.get("alice", "d") is None

    def test_a_corrupt_user_is_not_left_out_of_the_list(self, store: SQLiteStateStore, path: Path) -> None:
        """`list_active_users` raises rather than leave out a user whose id can't be read."""
        store.upsert(a_record(user_state=DocumentState.CLAIMED))
        query(path, "UPDATE rag_wiki_users SET user_id = 'torn'")
        with pytest.raises(CorruptDataError):
            store.list_active_users()

    def test_corrupt_events_texts_and_jobs_raise(self, store: SQLiteStateStore, path: Path) -> None:
        """A damaged event, retrieved text or job time is a `CorruptDataError`."""
        store.change("alice", ["d"], just(UserChange(records=[a_record()], events=[an_event()], texts=[a_text()])))
        store.claim_job("decay", NOON, timedelta(days=1))
        for payload in ("torn {", "{}", "[]", '{"at":"yesterday"}'):
            for table in ("events", "texts"):
                query(path, f"UPDATE rag_wiki_{table} SET payload = ?", payload)  # noqa: S608 - two known names
            with pytest.raises(CorruptDataError):
                store.history("alice", "d")
            with pytest.raises(CorruptDataError):
                store.retrieved_texts("alice", "d")
        query(path, "UPDATE rag_wiki_notes SET text = 'yesterday'")
        with pytest.raises(CorruptDataError, match="decay"):
            store.job_time("decay")
        with pytest.raises(CorruptDataError, match="decay"):
            store.claim_job("decay", NOON, timedelta(days=1))

    @pytest.mark.parametrize(
        "damage",
        [
            "header = 'torn'",
            "header = '{}'",
            "header = replace(header, '\"d\"', '\"e\"')",
            "texts = replace(texts, 'chunk', 'chank')",
            "vectors = x'00000000'",
            "vectors = x''",
        ],
    )
    def test_corrupt_chunks_raise(self, store: SQLiteStateStore, path: Path, damage: str) -> None:
        """A damaged copy is a `CorruptDataError`, an error among others in `load_copies`, and healed by saving anew."""
        chunks = store.chunk_store
        for doc_id in ("d", "sound"):
            chunks.save_chunks("alice", doc_id, [{"chunk_index": 0, "text": "chunk", "vector": [1.0, 2.0]}])
        (copy_id,), (sound,) = (chunks.place.copies("alice", doc_id) for doc_id in ("d", "sound"))
        query(path, f"UPDATE rag_wiki_chunks SET {damage} WHERE doc_key = 'd'")  # noqa: S608 - known words

        with pytest.raises(CorruptDataError):
            chunks.load_copy("alice", "d", copy_id)
        with pytest.raises(CorruptDataError):
            chunks.load_chunks("alice", "d")
        loaded = dict(chunks.load_copies("alice", [("d", copy_id), ("sound", sound)], texts=True))
        assert isinstance(loaded["d"], CorruptDataError)
        assert not isinstance(loaded["sound"], CorruptDataError)
        assert loaded["sound"] is not None

        chunks.save_chunks("alice", "d", [{"chunk_index": 0, "text": "anew", "vector": [1.0]}])
        assert chunks.load_chunks("alice", "d")[0]["text"] == "anew"


@pytest.mark.skipif(sys.platform == "win32", reason="paths of Windows have other rules")
def test_any_file_name_will_do(tmp_path: Path) -> None:
    """A file name with blanks and letters of any script is the file that is made."""
    path = tmp_path / "mein état 文档.db"
    with SQLiteStateStore(sa.URL.create("sqlite", database=str(path))) as store:
        store.upsert(UserDocRecord("alice", "d", "Title", "path"))
    assert path.is_file()
