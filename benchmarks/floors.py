"""What cannot be avoided, measured in the same run: the arithmetic, a bare transaction, reading the bytes."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.stores import Place

Step = Callable[[], object]

_UPDATE = "UPDATE floor SET counter = counter + 1 WHERE name = 'ada'"
_PART = 500
"""Blobs that are read in one trip."""


def product(matrix: NDArray[np.float32], vector: Sequence[float]) -> Step:
    """One product of the matrix and a question's vector."""
    query = np.asarray(vector, dtype=np.float32)
    return lambda: matrix @ query


@contextmanager
def bare_write(place: Place, *, sqlalchemy: bool = False) -> Iterator[Step]:
    """What one counted query costs at least in a store of this kind: a bare transaction, or two round trips."""
    kind = place.kind.removesuffix("+disk")
    if kind == "sqlite":
        opened = _sqlalchemy_write(place.folder) if sqlalchemy else _sqlite_write(place.folder)
    else:
        opened = {"redis": _redis_write, "postgres": _postgres_write}.get(kind, _no_write)(place.address)
    with opened as step:
        yield step


@contextmanager
def _no_write(_: str) -> Iterator[Step]:
    yield lambda: None


@contextmanager
def _sqlite(folder: Path) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(folder / "floor.db", isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=NORMAL")
        yield connection


@contextmanager
def _sqlite_write(folder: Path) -> Iterator[Step]:
    with _sqlite(folder) as connection:
        connection.execute("CREATE TABLE IF NOT EXISTS floor (name TEXT PRIMARY KEY, counter INTEGER)")
        connection.execute("INSERT OR IGNORE INTO floor VALUES ('ada', 0)")

        def write() -> None:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute(_UPDATE)
            connection.execute("COMMIT")

        yield write


@contextmanager
def _sqlalchemy_write(folder: Path) -> Iterator[Step]:
    import sqlalchemy as sa

    with _sqlite_write(folder):
        pass  # makes the table
    engine = sa.create_engine(f"sqlite:///{folder / 'floor.db'}")
    sa.event.listen(engine, "connect", _configure)
    sa.event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN IMMEDIATE"))
    floor = sa.table("floor", sa.column("name"), sa.column("counter"))
    update = sa.update(floor).where(floor.c.name == "ada").values(counter=floor.c.counter + 1)

    def write() -> None:
        with engine.begin() as connection:
            connection.execute(update)

    try:
        yield write
    finally:
        engine.dispose()


def _configure(connection: Any, _record: object) -> None:
    connection.isolation_level = None
    connection.execute("PRAGMA synchronous=NORMAL")


@contextmanager
def _redis_write(port: str) -> Iterator[Step]:
    import redis

    with redis.Redis(host="127.0.0.1", port=int(port)) as client:

        def write() -> None:
            client.get("floor")
            client.set("floor", "1")

        yield write


@contextmanager
def _postgres_write(url: str) -> Iterator[Step]:
    import psycopg

    with psycopg.connect(url) as connection:
        connection.execute("CREATE TABLE IF NOT EXISTS floor (name TEXT PRIMARY KEY, counter INTEGER)")
        connection.execute("INSERT INTO floor VALUES ('ada', 0) ON CONFLICT DO NOTHING")
        connection.commit()

        def write() -> None:
            connection.execute(_UPDATE)
            connection.commit()

        yield write


@contextmanager
def bare_read(place: Place, blobs: Sequence[bytes]) -> Iterator[Step]:
    """Reading these blobs from a store of this kind, and nothing else."""
    if place.on_disk:
        opened = _disk_read(place.folder, blobs)
    elif place.kind == "redis":
        opened = _redis_read(place.address, blobs)
    else:
        opened = _sqlite_read(place.folder, blobs)
    with opened as step:
        yield step


@contextmanager
def _disk_read(folder: Path, blobs: Sequence[bytes]) -> Iterator[Step]:
    root = folder / "floor"
    root.mkdir(exist_ok=True)
    for number, blob in enumerate(blobs):
        (root / str(number)).write_bytes(blob)

    yield lambda: [path.read_bytes() for path in root.iterdir()]


@contextmanager
def _sqlite_read(folder: Path, blobs: Sequence[bytes]) -> Iterator[Step]:
    with _sqlite(folder) as connection:
        connection.execute("CREATE TABLE blobs (number INTEGER PRIMARY KEY, data BLOB)")
        connection.execute("BEGIN")
        connection.executemany("INSERT INTO blobs VALUES (?, ?)", list(enumerate(blobs)))
        connection.execute("COMMIT")

        yield lambda: connection.execute("SELECT data FROM blobs").fetchall()


@contextmanager
def _redis_read(port: str, blobs: Sequence[bytes]) -> Iterator[Step]:
    import redis

    with redis.Redis(host="127.0.0.1", port=int(port)) as client:
        names = [f"floor:{number}" for number in range(len(blobs))]
        for name, blob in zip(names, blobs, strict=True):
            client.set(name, blob)

        yield lambda: [client.mget(names[at : at + _PART]) for at in range(0, len(names), _PART)]
