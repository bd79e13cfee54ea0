"""Privacy: nothing is left of who was forgotten, logs hold no texts, and secrets are never shown."""

from __future__ import annotations

import logging
import os
import pickle
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import document
from places import PlacedWorld
from scenarios import OTHER_QUESTION, PODS, cached

from rag_wiki import ConfigurationError, RagWikiError
from rag_wiki.storage.sql import SQLStateStore
from rag_wiki.storage.sqlite import SQLiteStateStore

USER = "zenobia-quartz"
TITLE = "Marmalade Ledger"
TEXT = "Pods hold the umbrella figures of the harbour office."
DOC_ID = "vault/thimble.md"
QUERY = "what are pods, asks the lighthouse?"
TRACES = ("zenobia", "quartz", "Marmalade", "umbrella", "thimble", "lighthouse")
"""A word of each thing that must leave no trace."""


def everything(world: PlacedWorld, request: pytest.FixtureRequest, tmp_path: Path) -> bytes:
    """Every byte that is kept: all files, names included, and all that a server holds."""
    held = b""
    for path in tmp_path.rglob("*"):
        held += os.fsencode(path) + (path.read_bytes() if path.is_file() else b"")
    if world.kind.startswith("valkey"):
        held += b"".join(valkey_dump(request.getfixturevalue("valkey_port")))
    if world.kind == "postgres":
        held += b"".join(postgres_dump(request.getfixturevalue("postgres_url")))
    if world.kind.startswith("memory"):
        users = {name: value for name, value in vars(world.store).items() if name in ("_users", "_notes")}
        place = world.retriever(None).chunk_store.place
        held += repr(users).encode() + repr({**vars(place)}).encode()
    return held


def valkey_dump(port: int) -> Iterator[bytes]:
    """Every key of the server with its value."""
    import redis

    with redis.Redis(host="127.0.0.1", port=port) as client:
        for key in client.scan_iter(count=1000):
            yield key
            kind = client.type(key)
            read: Any = {
                b"hash": client.hgetall,
                b"zset": lambda name: client.zrange(name, 0, -1),
                b"list": lambda name: client.lrange(name, 0, -1),
                b"set": client.smembers,
                b"string": client.get,
            }[kind]
            yield repr(read(key)).encode()


def postgres_dump(url: str) -> Iterator[bytes]:
    """Every row of every table of ours."""
    import psycopg

    with psycopg.connect(url) as connection:
        tables = connection.execute(
            "SELECT tablename FROM pg_tables WHERE tablename LIKE 'rag\\_wiki\\_%'"  # all of them, however named
        ).fetchall()
        assert len(tables) >= 7
        for (table,) in tables:
            with connection.cursor().copy(f'COPY "{table}" TO STDOUT') as rows:
                yield from map(bytes, rows)


def lead_a_life(world: PlacedWorld, user_id: str) -> None:
    """Everything that leaves a trace: queries, saves, votes, pins, removals, decay, retrieved texts."""
    retriever = world.retriever(user_id, false_hit_rate=0.02)
    world.save(retriever, DOC_ID, TEXT, doc_title=TITLE)
    world.save(retriever, "other " + DOC_ID, TEXT, doc_title=TITLE)
    world.shows(document("met " + DOC_ID, "umbrella pods", doc_title=TITLE))
    for _ in range(4):
        retriever.invoke(QUERY)
    world.shows()
    assert cached(retriever.invoke(QUERY))
    retriever.thumbs_up(DOC_ID)
    retriever.force_pin(DOC_ID)
    retriever.refresh(DOC_ID, full_content=TEXT + " Again: umbrella.")
    retriever.force_remove("other " + DOC_ID)
    retriever.run_decay()


def found(held: bytes) -> list[str]:
    """The traces in it."""
    return [word for word in TRACES if word.encode() in held]


def test_forgetting_leaves_no_byte_of_the_user(
    world: PlacedWorld, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """After `forget_user` no file, row or key holds a word of the user: id, titles, ids, texts; others' things stay."""
    world.save(world.retriever("bob"), "pods", PODS)
    lead_a_life(world, USER)
    assert {"zenobia", "thimble", "umbrella", "Marmalade"} <= set(found(everything(world, request, tmp_path)))

    forgotten = world.retriever(USER).forget_user()

    assert forgotten.documents == 3
    assert forgotten.chunks > 0
    assert found(everything(world, request, tmp_path)) == []
    assert [item.page_content for item in world.retriever("bob").invoke("what are pods?")] == [PODS]


def test_forgetting_reaches_through_an_open_reader(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Where a reader keeps SQLite's log from being emptied, that is said; the next forgetting empties it."""
    path = tmp_path / "state.db"
    store = SQLiteStateStore(f"sqlite:///{path}?timeout=0.05")
    world = PlacedWorld(store=store, kind="sqlite")
    lead_a_life(world, USER)
    reader = sqlite3.connect(path, isolation_level=None)
    reader.execute("BEGIN")
    reader.execute("SELECT count(*) FROM rag_wiki_users").fetchall()

    with caplog.at_level(logging.WARNING, logger="rag_wiki"):
        world.retriever(USER).forget_user()
    assert any("wal_checkpoint" in record.getMessage() for record in caplog.records)

    reader.close()
    world.retriever("bob").forget_user()
    assert found(b"".join(item.read_bytes() for item in tmp_path.iterdir())) == []
    store.close()


def test_a_withdrawn_document_leaves_no_byte(
    world: PlacedWorld, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """After `purge` no file, row or key holds a word of the document."""
    for user_id in ("ada", "bob"):
        world.save(world.retriever(user_id), DOC_ID, TEXT, doc_title=TITLE)
    assert {"umbrella", "thimble"} <= set(found(everything(world, request, tmp_path)))
    world.retriever("ada").purge(DOC_ID)
    assert found(everything(world, request, tmp_path)) == []


def test_logs_hold_no_text_and_no_query(world: PlacedWorld, caplog: pytest.LogCaptureFixture) -> None:
    """Not even at DEBUG is there a word of a document's text or of a query in the logs, whatever fails."""
    with caplog.at_level(logging.DEBUG):
        lead_a_life(world, USER)
        retriever = world.retriever(USER)
        world.table.error = RuntimeError("the model is away")
        retriever.invoke(QUERY)
        world.table.error = None
        world.source.fail_with(ConnectionError("the index is away"))
        with pytest.raises(ConnectionError):
            retriever.invoke(QUERY)
        world.source.fail_with(None)
        with pytest.raises(RagWikiError):
            retriever.accept_suggestion("never met")
    logged = "\n".join(record.getMessage() + str(record.exc_info or "") for record in caplog.records)
    assert not [word for word in ("umbrella", "lighthouse", "harbour") if word in logged]


PASSWORD = "hunter2-swordfish"  # noqa: S105 - it is what must not be shown


@pytest.mark.parametrize(
    "url",
    [
        f"postgresql://ada:{PASSWORD}@127.0.0.1:9/wiki?connect_timeout=2",
        f"postgresql://127.0.0.1:9/wiki?user=ada&password={PASSWORD}&connect_timeout=2",
        f"postgresql+psycopg://ada:{PASSWORD}@127.0.0.1:9/wiki?connect_timeout=2",
    ],
)
def test_a_password_in_a_url_is_never_shown(url: str, caplog: pytest.LogCaptureFixture) -> None:
    """The password of a store's URL is in no `repr`, error message, warning, provenance or log."""
    store = SQLStateStore(url)
    world = PlacedWorld(store=store, kind="postgres")
    retriever = world.retriever("ada")
    with caplog.at_level(logging.DEBUG):
        _, provenance = retriever.invoke_with_provenance(OTHER_QUESTION)
        with pytest.raises(Exception) as failure:  # noqa: PT011 - whichever the driver raises
            retriever.force_pin("pods")
    shown = [repr(store), repr(retriever), str(retriever), str(provenance.to_dict()), provenance.render()]
    error: BaseException | None = failure.value
    while error is not None:
        shown += [str(error), repr(error)]
        error = error.__cause__ or error.__context__
    shown += [record.getMessage() + str(record.exc_info or "") + str(record.exc_text) for record in caplog.records]
    assert provenance.degraded
    assert not [text for text in shown if PASSWORD in text]


@pytest.mark.parametrize("url", [f"mysql://ada:{PASSWORD}@host/x", f":{PASSWORD}:"])
def test_a_refused_url_is_not_shown_whole(url: str) -> None:
    """A URL that no store takes is refused without its password."""
    for store in (SQLStateStore, SQLiteStateStore):
        with pytest.raises(ConfigurationError) as refused:
            store(url)
        assert PASSWORD not in str(refused.value)


def test_a_database_error_shows_no_parameters(tmp_path: Path) -> None:
    """What the database refuses is told without the texts that were to be written."""
    store = SQLiteStateStore(f"sqlite:///{tmp_path / 'state.db'}")
    world = PlacedWorld(store=store, kind="sqlite")
    retriever = world.retriever(USER)
    world.save(retriever, DOC_ID, TEXT)
    with sqlite3.connect(tmp_path / "state.db") as other:
        for table in ("documents", "chunks"):
            other.execute(
                f"CREATE TRIGGER full_{table} BEFORE UPDATE ON rag_wiki_{table} BEGIN SELECT RAISE(ABORT, 'full'); END"
            )
    other.close()
    with pytest.raises(Exception) as failure:  # noqa: PT011 - the driver's or SQLAlchemy's
        retriever.refresh(DOC_ID, full_content=TEXT)
    assert "full" in str(failure.value)
    assert "umbrella" not in str(failure.value)
    store.close()


def test_a_pickled_store_holds_its_url_and_nothing_else(tmp_path: Path) -> None:
    """A pickled store is its class and URL; that it holds the password is what opening it elsewhere needs."""
    store = SQLStateStore(f"postgresql://ada:{PASSWORD}@127.0.0.1:9/wiki")
    again = pickle.loads(pickle.dumps(store))  # noqa: S301 - our own
    assert repr(again) == repr(store)
    assert PASSWORD not in repr(again)
