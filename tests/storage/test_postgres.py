"""What PostgreSQL adds to the promises of every state store: many engines, many processes, one moment when reading."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from conftest import drop_postgres
from storage.store_worker import COUNTS, Workers, count_one

from rag_wiki import ConfigurationError, CorruptDataError, DocumentState, SchemaVersionError, StateStore
from rag_wiki.storage.records import UserChange
from rag_wiki.storage.sql import SQLStateStore
from rag_wiki.testing.awkward import NOON, a_record, a_text, an_event, in_threads, just


@pytest.fixture
def store(make_store: Callable[[str], StateStore], postgres_url: str) -> Iterator[StateStore]:
    """A store in a database without any table of ours; none is left for others either."""
    drop_postgres(postgres_url)
    yield make_store("postgres")
    drop_postgres(postgres_url)


@pytest.fixture
def engine(store: StateStore, postgres_url: str) -> Iterator[sa.Engine]:
    """An engine of ours over the same, empty database."""
    engine = sa.create_engine(sa.engine.make_url(postgres_url).set(drivername="postgresql+psycopg"))
    yield engine
    engine.dispose()


def execute(engine: sa.Engine, statement: str) -> None:
    """Change the database behind the store's back."""
    with engine.begin() as connection:
        connection.exec_driver_sql(statement)


def ask(engine: sa.Engine, statement: str) -> Any:
    """One value of the database."""
    with engine.begin() as connection:
        return connection.exec_driver_sql(statement).scalar()


class TestSharing:
    """One database, many engines and processes."""

    def test_two_engines_see_each_others_changes(self, store: StateStore, postgres_url: str) -> None:
        """Records, chunks, hits, revision and jobs of one engine are there for the other at once."""
        with SQLStateStore(postgres_url) as other:
            assert other.begin_query("alice", 3, 10).revision == 0
            store.upsert(a_record(user_state=DocumentState.CLAIMED, full_content="text"))
            store.chunk_store.save_chunks("alice", "d", [{"chunk_index": 0, "text": "chunk", "vector": [0.5]}])

            assert other.get("alice", "d") == a_record(user_state=DocumentState.CLAIMED, full_content="text")
            assert other.begin_query("alice", 3, 10) == store.begin_query("alice", 3, 10)
            other.chunk_store.record_hits("alice", "d", [0], NOON)
            (chunk,) = store.chunk_store.load_chunks("alice", "d")
            assert (chunk["text"], chunk["vector"], chunk["hit_count"]) == ("chunk", [0.5], 1)
            assert other.claim_job("decay", NOON, timedelta(days=1)) is True
            assert store.claim_job("decay", NOON, timedelta(days=1)) is False
            other.forget_user("alice")
            assert store.list_by_state("alice") == []

    def test_two_engines_count_exactly(self, store: StateStore, postgres_url: str) -> None:
        """Two engines × 4 threads × 20 counts of a document that is new make 160, every one of them once."""
        with SQLStateStore(postgres_url) as other:
            stores = [store, other]
            told = in_threads(8, lambda n: [stores[n % 2].change("alice", ["d"], count_one).outcome for _ in range(20)])
        assert sorted(count for counts in told for count in counts) == list(range(1, 161))

    def test_six_threads_set_up_the_schema(self, engine: sa.Engine, postgres_url: str) -> None:
        """Six stores that find no tables and start at the same moment all work."""
        with engine.begin() as connection:
            assert sa.inspect(connection).get_table_names() == []

        def create(number: int) -> None:
            with SQLStateStore(postgres_url) as store:
                store.upsert(a_record(doc_id=f"d{number}"))

        in_threads(6, create)

        assert ask(engine, "SELECT count(*) FROM rag_wiki_documents") == 6
        assert ask(engine, "SELECT count(*) FROM rag_wiki_schema") == 1

    def test_processes_create_and_count(self, engine: sa.Engine, postgres_url: str) -> None:
        """3 processes × 2 threads that find no tables count 30 each: 180, every one of them once."""
        with Workers("count", postgres_url, 3) as workers:
            workers.go()
            told = workers.results()
        assert sorted(count for counts in told for count in counts) == list(range(1, 3 * 2 * COUNTS + 1))
        assert ask(engine, "SELECT queries FROM rag_wiki_users") == 3 * 2 * COUNTS

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
    def test_a_store_works_on_after_a_fork(self, engine: sa.Engine, postgres_url: str) -> None:
        """A store that was used before a fork counts exactly in the parent and two children at once.

        The children leave the connections of the parent's engine alone.
        """
        with Workers("fork", postgres_url) as workers:
            workers.go()
            (told,) = workers.results()
        assert sorted(told) == list(range(1, 3 * COUNTS + 3))

    def test_a_reader_sees_one_moment(self, engine: sa.Engine, store: StateStore) -> None:
        """A change between the statements of a reading leaves what is read as before, not half of each."""
        before = a_record(queries_missed=5, fetch_count=1)
        store.change("alice", ["d"], just(UserChange(records=[before], queries=5)))
        interrupting = [UserChange(records=[a_record(queries_missed=3, fetch_count=2)], queries=1)]

        def interrupt(_c: object, _cursor: object, statement: str, *_: object) -> None:
            if interrupting and "FROM rag_wiki_users" in statement:
                store.change("alice", ["d"], just(interrupting.pop()))

        with SQLStateStore(engine) as reader:
            reader.list_active_users()
            sa.event.listen(engine, "after_cursor_execute", interrupt)
            assert reader.get("alice", "d") == before
            assert interrupting == []
            assert reader.get("alice", "d") == a_record(queries_missed=3, fetch_count=2)

    def test_connections_that_the_server_closed_are_replaced(self, engine: sa.Engine, store: StateStore) -> None:
        """After the server ended all connections, the next call works."""
        store.upsert(a_record())
        ended = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE pid <> pg_backend_pid()"
        assert ask(engine, f"{ended} AND backend_type = 'client backend'") >= 1
        assert store.get("alice", "d") == a_record()


class TestOwnership:
    """Who opens closes."""

    def test_an_engine_that_was_given_stays_open(self, engine: sa.Engine) -> None:
        """`close` leaves a given engine's connections alone, and the store can be used again."""
        with SQLStateStore(engine) as store:
            store.upsert(a_record())
            process = ask(engine, "SELECT pg_backend_pid()")
        assert ask(engine, "SELECT pg_backend_pid()") == process
        assert store.get("alice", "d") == a_record()

    def test_an_engine_that_was_made_is_closed(self, engine: sa.Engine, postgres_url: str) -> None:
        """`close` ends the connections that the store opened, and no others."""
        named = sa.engine.make_url(postgres_url).update_query_dict({"application_name": "a store to close"})
        with SQLStateStore(named) as store:
            in_threads(3, lambda number: store.upsert(a_record(doc_id=f"d{number}")))
            mine = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'a store to close'"
            assert ask(engine, mine) >= 1
        # The server may take a moment to notice; its own wait for it ends when the last one is gone.
        for _ in range(10_000):
            if ask(engine, mine) == 0:
                break
        assert ask(engine, mine) == 0

    def test_a_url_needs_no_driver(self, store: StateStore, postgres_url: str) -> None:
        """`postgresql://…` works as it is, and so does `postgresql+psycopg://…`."""
        assert postgres_url.startswith("postgresql://")
        store.upsert(a_record())
        with SQLStateStore(postgres_url.replace("postgresql://", "postgresql+psycopg://")) as other:
            assert other.get("alice", "d") == a_record()

    def test_a_newer_database_is_refused(self, engine: sa.Engine, postgres_url: str) -> None:
        """A database of a newer release is an error that names both versions, and gets no table added."""
        with SQLStateStore(engine) as store:
            store.upsert(a_record())
        execute(engine, "UPDATE rag_wiki_schema SET version = 99")
        execute(engine, "DROP TABLE rag_wiki_notes")
        with SQLStateStore(postgres_url) as store, pytest.raises(SchemaVersionError, match=r"\b99\b.*\b1\b"):
            store.get("alice", "d")
        with engine.connect() as connection:
            assert "rag_wiki_notes" not in sa.inspect(connection).get_table_names()


class TestConfiguration:
    """What is not for this store, and what is not for everybody's eyes."""

    @pytest.mark.parametrize(
        "url",
        [
            "postgresql://me:hunter2@localhost/x",
            "postgresql+psycopg://me:hunter2@localhost/x",
            "postgresql://me@localhost/x?password=hunter2&sslpassword=hunter2",
        ],
    )
    def test_the_password_is_never_shown(self, url: str) -> None:
        """Neither `repr` nor `str` of the store shows the password, wherever the URL holds it; the place they do."""
        store = SQLStateStore(url)
        for shown in (repr(store), str(store), f"{vars(store)}"):
            assert "hunter2" not in shown
            assert "localhost" in shown

    @pytest.mark.parametrize(
        "wrong",
        [
            "sqlite:///hunter2.db?password=hunter2",
            "mysql://me:hunter2@localhost/x",
            "postgresql+asyncpg://me:hunter2@localhost/x",
            "postgres//me:hunter2@localhost/x",
            "hunter2",
            "",
        ],
    )
    def test_other_urls_are_refused(self, wrong: str) -> None:
        """A URL of another database, of an async driver, or none at all is a `ConfigurationError` without password."""
        with pytest.raises(ConfigurationError) as raised:
            SQLStateStore(wrong)
        assert "hunter2" not in str(raised.value).replace("hunter2.db", "")

    def test_an_engine_of_another_database_is_refused(self) -> None:
        """An engine of SQLite is a `ConfigurationError` that names the right class."""
        engine = sa.create_engine("sqlite://")
        with pytest.raises(ConfigurationError, match="SQLiteStateStore"):
            SQLStateStore(engine)
        engine.dispose()


@pytest.mark.parametrize(
    "damage",
    [
        "rag_wiki_documents SET payload = 'torn {'",
        "rag_wiki_documents SET state = 'NEVER HEARD OF'",
        "rag_wiki_documents SET content = 'torn'",
        "rag_wiki_users SET user_id = 'torn'",
    ],
)
def test_corrupt_data_raises(engine: sa.Engine, store: StateStore, damage: str) -> None:
    """A damaged record or user is a `CorruptDataError`, never taken for absent."""
    store.upsert(a_record(user_state=DocumentState.CLAIMED, full_content="text"))
    execute(engine, f"UPDATE {damage}")
    with pytest.raises(CorruptDataError):
        store.get("alice", "d")
    with pytest.raises(CorruptDataError):
        store.list_by_state("alice")


def test_forgetting_leaves_no_row(engine: sa.Engine, store: StateStore) -> None:
    """After `forget_user` no table has a row of the user, whoever else is there."""
    for user_id in ("alice", "bob"):
        change = UserChange(records=[a_record(user_id)], events=[an_event()], texts=[a_text()])
        store.change(user_id, ["d"], just(change))
        store.chunk_store.save_chunks(user_id, "d", [{"chunk_index": 0, "text": "chunk", "vector": [0.5]}])
        store.chunk_store.record_hits(user_id, "d", [0], NOON)
    store.forget_user("alice")
    tables = ("users", "documents", "events", "texts", "chunks", "chunk_hits")
    for table in tables:
        rows = f"SELECT string_agg(user_key, ',') FROM rag_wiki_{table}"  # noqa: S608 - known names
        assert ask(engine, rows) == "bob", table


@pytest.mark.parametrize("isolation", [None, "AUTOCOMMIT"])
def test_a_shared_engine_finds_its_connections_as_they_were(
    engine: sa.Engine, store: StateStore, isolation: str | None
) -> None:
    """Whoever shares an engine with a store has transactions, or autocommit, as the engine says, after any call."""
    store.list_active_users()
    options = {} if isolation is None else {"isolation_level": isolation}
    shared = sa.create_engine(engine.url, pool_size=1, max_overflow=0, **options)
    ours = SQLStateStore(shared)
    execute(engine, "DROP TABLE IF EXISTS theirs")
    execute(engine, "CREATE TABLE theirs (number INTEGER)")

    def insert_and_fail() -> None:
        with shared.begin() as connection:
            connection.execute(sa.text("INSERT INTO theirs VALUES (1)"))
            raise ZeroDivisionError

    uses: list[Callable[[], object]] = [lambda: ours.begin_query("u", 3, 10), lambda: ours.upsert(a_record("u"))]
    for use in uses:
        use()
        with pytest.raises(ZeroDivisionError):
            insert_and_fail()

    assert ask(engine, "SELECT count(*) FROM theirs") == (0 if isolation is None else 2)
    assert ours.get("u", "d") == a_record("u")
    shared.dispose()
