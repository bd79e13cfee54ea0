"""What says "saved" and what is saved may part company; a saved document is found all the same, and it is said."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from helpers import document
from places import PlacedWorld, make_world
from scenarios import POD_QUESTION, PODS, USER, Paragraphs, World, cached, doc_ids, texts

from rag_wiki import ChunkStore, CorruptDataError, DocumentState, RagWikiRetriever, SchemaVersionError, StateStore
from rag_wiki.storage.sql import SQLStateStore
from rag_wiki.storage.sqlite import SQLiteStateStore

LOST = "copy lost"


def assert_found_and_said(world: World, retriever: RagWikiRetriever, *, awaited: Any = None) -> None:
    """The document comes from the source, is counted, and provenance says that the copy was lost and what helps."""
    documents, provenance = awaited or retriever.invoke_with_provenance(POD_QUESTION)
    assert texts(documents) == [PODS]
    assert cached(documents) == []
    (source,) = provenance.sources
    assert (source.doc_id, source.from_cache, source.user_state) == ("pods", False, DocumentState.CLAIMED)
    assert [(copy.doc_id, copy.reason) for copy in provenance.withheld] == [("pods", LOST)]
    (said,) = provenance.degraded
    assert LOST in said
    assert "reindex()" in said
    assert LOST in provenance.render()


def assert_answers(retriever: RagWikiRetriever) -> None:
    """The copy answers, and nothing is amiss."""
    documents, provenance = retriever.invoke_with_provenance(POD_QUESTION)
    assert texts(cached(documents)) == [PODS]
    assert (provenance.degraded, provenance.withheld) == ((), ())


@pytest.fixture(params=["sqlite", "postgres", "valkey"])
def lasting(request: pytest.FixtureRequest, make_store: Callable[[str], StateStore], tmp_path: Path) -> PlacedWorld:
    """A world whose state outlives the process; what the chunks do is up to the test."""
    return make_world(request.param, make_store, tmp_path)


def after_restart(lasting: PlacedWorld) -> tuple[PlacedWorld, Callable[..., RagWikiRetriever]]:
    """The world of a new process that keeps chunks in its own memory, and what makes retrievers there."""
    world, chunks = lasting.reopened(), ChunkStore()
    return world, lambda **options: world.retriever(chunk_store=chunks, **options)


@pytest.mark.parametrize("healing", ["reindex", "refresh", "accept"])
async def test_chunks_in_memory_are_lost_and_the_document_is_not(lasting: PlacedWorld, healing: str) -> None:
    """State outlives its chunks: after a restart the source answers, and one call brings the copy back."""
    lasting.save(lasting.retriever(chunk_store=ChunkStore()), "pods", PODS)
    world, make = after_restart(lasting)
    retriever = make()
    world.shows(document("pods", PODS))
    before = world.record("pods").fetch_count
    assert_found_and_said(world, retriever)
    assert_found_and_said(world, retriever, awaited=await retriever.ainvoke_with_provenance(POD_QUESTION))
    assert world.record("pods").fetch_count == before + 2

    if healing == "reindex":
        assert retriever.reindex() == ["pods"]
    elif healing == "refresh":
        retriever.refresh("pods")
    else:
        retriever.accept_suggestion("pods")
    assert_answers(retriever)
    world.shows()
    assert_answers(retriever)
    assert world.record("pods").full_content == PODS


def test_what_is_lost_does_not_keep_the_source_from_being_asked(lasting: PlacedWorld) -> None:
    """With `on_miss`, a pin, or the whole document wanted, a lost copy is no answer: the source is asked and serves."""
    first = lasting.retriever(chunk_store=ChunkStore())
    lasting.save(first, "pods", PODS)
    world, make = after_restart(lasting)
    world.shows(document("pods", PODS))
    asking = make(global_search="on_miss")
    assert asking.invoke_with_provenance(POD_QUESTION).provenance.asked
    assert_found_and_said(world, asking)
    assert texts(make(embedding_model=None).invoke("smallest unit?")) == [PODS]
    assert make().batch([POD_QUESTION] * 2) == [make().invoke(POD_QUESTION)] * 2

    first.force_pin("pods")
    documents, provenance = make().invoke_with_provenance("what about tax?")
    assert texts(documents) == [PODS]
    assert [copy.reason for copy in provenance.withheld] == [LOST]
    # Also when the source is silent, nobody can take it for an answer that there is nothing.
    world.shows()
    documents, provenance = make().invoke_with_provenance("what about tax?")
    assert documents == []
    assert [copy.reason for copy in provenance.withheld] == [LOST]
    assert LOST in provenance.degraded[0]


def test_a_loss_lets_nothing_go(lasting: PlacedWorld) -> None:
    """A copy that could not be searched has not missed: however often that happens, the document stays saved."""
    lasting.save(lasting.retriever(chunk_store=ChunkStore()), "pods", PODS)
    world, make = after_restart(lasting)
    retriever = make()
    for number in range(25):
        retriever.invoke(f"what about tax? {number}")
    assert world.state("pods") is DocumentState.CLAIMED
    assert world.record("pods").cache_miss_streak == 0
    assert retriever.reindex() == ["pods"]
    assert_answers(retriever)


def folder_of(world: PlacedWorld) -> Path:
    """The folder of a world that has one."""
    assert world.folder is not None
    return world.folder


@pytest.fixture(params=["memory+disk", "sqlite+disk", "valkey+disk"])
def on_disk(request: pytest.FixtureRequest, make_store: Callable[[str], StateStore], tmp_path: Path) -> PlacedWorld:
    """A world with its chunks in files, and one document saved."""
    world = make_world(request.param, make_store, tmp_path)
    world.save(world.retriever(), "pods", PODS)
    return world


@pytest.mark.parametrize("gone", ["everything", "the chunks", "one file"])
def test_a_folder_deleted_by_hand_heals(on_disk: PlacedWorld, gone: str) -> None:
    """After the folder, or a part of it, was deleted, the source answers, and re-indexing writes the copy anew."""
    folder = folder_of(on_disk)
    (chunks,) = folder.rglob("*.chunks")
    if gone == "everything":
        shutil.rmtree(folder)
    elif gone == "the chunks":
        shutil.rmtree(chunks.parent)
    else:
        chunks.unlink()
    world = on_disk.reopened()
    retriever = world.retriever()
    world.shows(document("pods", PODS))
    assert_found_and_said(world, retriever)
    assert retriever.reindex() == ["pods"]
    assert_answers(retriever)
    assert_answers(world.reopened().retriever())
    assert [path.read_text() for path in folder.rglob("*.md")] == [PODS]


def test_a_folder_that_vanishes_under_a_running_retriever_costs_no_answer(on_disk: PlacedWorld) -> None:
    """Deleted while the retriever runs, the copy answers from memory, or the source does; no call fails."""
    retriever = on_disk.retriever()
    on_disk.shows(document("pods", PODS))
    assert_answers(retriever)
    shutil.rmtree(folder_of(on_disk))
    for _ in range(2):
        assert texts(retriever.invoke(POD_QUESTION)) == [PODS]
    retriever.force_remove("pods")
    assert cached(retriever.invoke(POD_QUESTION)) == []


def test_a_folder_that_comes_back_answers_again(on_disk: PlacedWorld) -> None:
    """A folder that was away for a while (not mounted yet, say) is read again by a running retriever."""
    folder = folder_of(on_disk)
    away = folder.rename(folder.with_name("elsewhere"))
    world = on_disk.reopened()
    retriever = world.retriever()
    world.shows(document("pods", PODS))
    assert_found_and_said(world, retriever)
    away.rename(folder)
    assert_answers(retriever)


def test_another_worker_heals_it_for_all(on_disk: PlacedWorld) -> None:
    """When one worker brought a lost copy back, the others, which met the loss, answer from it."""
    shutil.rmtree(folder_of(on_disk))
    one, other = on_disk.reopened(), on_disk.reopened()
    one.shows(document("pods", PODS))
    here, there = one.retriever(), other.retriever()
    for world, retriever in ((one, here), (other, there)):
        assert_found_and_said(world, retriever)
    assert here.reindex() == ["pods"]
    assert_answers(here)
    assert_answers(there)


# -- databases of other releases ---------------------------------------------------------------------


def change_file(path: Path, *statements: str) -> list[Any]:
    """Change a database file behind the store's back; returns what the last statement tells."""
    with closing(sqlite3.connect(path)) as connection, connection:
        return [connection.execute(statement).fetchall() for statement in statements][-1]


@pytest.fixture
def database(make_store: Callable[[str], StateStore], tmp_path: Path) -> Path:
    """A SQLite file with one document saved."""
    store = make_store("sqlite-file")
    world = World(store)
    world.save(world.retriever(), "pods", PODS)
    store.close()
    return tmp_path / "state.db"


OTHER_RELEASES: dict[str, list[str]] = {
    "a column more": ["ALTER TABLE rag_wiki_documents ADD COLUMN mood TEXT DEFAULT 'fine'"],
    "a table more": ["CREATE TABLE rag_wiki_moods (user_key TEXT PRIMARY KEY)"],
    "a table less": ["DROP TABLE rag_wiki_notes"],
    "an index less": ["DROP INDEX rag_wiki_documents_by_state", "DROP INDEX rag_wiki_documents_by_revision"],
    "no version": ["DELETE FROM rag_wiki_schema"],
}


@pytest.mark.parametrize("statements", OTHER_RELEASES.values(), ids=OTHER_RELEASES)
def test_a_database_that_differs_a_little_opens(database: Path, statements: list[str]) -> None:
    """With a column or table too many, or one missing that can be made, a database opens and keeps its rows."""
    change_file(database, *statements)
    with SQLiteStateStore(f"sqlite:///{database}") as store:
        world = World(store)
        assert world.record("pods").full_content == PODS
        assert_answers(world.retriever())
        world.save(world.retriever(), "images", "Images are read only.")
        assert [record.doc_id for record in world.retriever().documents()] == ["images", "pods"]


FIELDS_OF_LATER = ["decline_count", "stale_since", "content_source", "pinned_by_user", "retrieved_chars"]
"""Fields that a record of an earlier release would not have had."""


def rewrite_record(path: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Rewrite the stored form of the one record."""
    with closing(sqlite3.connect(path)) as connection, connection:
        ((payload,),) = connection.execute("SELECT payload FROM rag_wiki_documents").fetchall()
        connection.execute("UPDATE rag_wiki_documents SET payload = ?", (json.dumps(change(json.loads(payload))),))


def test_a_record_without_later_fields_is_read(database: Path) -> None:
    """A record that was written before some fields existed has their defaults, and its copy answers."""

    def forget_fields(known: dict[str, Any]) -> dict[str, Any]:
        older = {name: value for name, value in known.items() if name not in FIELDS_OF_LATER}
        assert len(older) < len(known)
        return older

    rewrite_record(database, forget_fields)
    with SQLiteStateStore(f"sqlite:///{database}") as store:
        world = World(store)
        record = world.record("pods")
        assert (record.user_state, record.full_content) == (DocumentState.CLAIMED, PODS)
        assert (record.decline_count, record.stale_since, record.pinned_by_user) == (0, None, False)
        assert_answers(world.retriever())


def test_a_record_with_a_field_of_later_is_one_clear_message(database: Path) -> None:
    """A record with a field that this release does not know is an error that names it, and costs no answer."""
    rewrite_record(database, lambda known: {**known, "mood": "fine"})
    with SQLiteStateStore(f"sqlite:///{database}") as store:
        world = World(store)
        world.shows(document("pods", PODS))
        with pytest.raises(CorruptDataError, match="mood"):
            world.retriever().accept_suggestion("pods")
        documents, provenance = world.retriever().invoke_with_provenance(POD_QUESTION)
        assert texts(documents) == [PODS]
        assert "CorruptDataError" in "".join(provenance.degraded)


def test_a_missing_column_is_one_clear_message(database: Path) -> None:
    """A column that is not there is named by the error of an action, and by provenance; no row is lost."""
    change_file(
        database, "DROP INDEX rag_wiki_documents_by_revision", "ALTER TABLE rag_wiki_documents DROP COLUMN revised"
    )
    with SQLiteStateStore(f"sqlite:///{database}") as store:
        world = World(store)
        world.shows(document("pods", PODS))
        retriever = world.retriever()
        with pytest.raises(Exception, match="revised"):
            retriever.accept_suggestion("pods")
        documents, provenance = retriever.invoke_with_provenance(POD_QUESTION)
        assert texts(documents) == [PODS]
        assert len(provenance.degraded) == 1
    assert change_file(database, "SELECT count(*) FROM rag_wiki_documents") == [(1,)]


def test_a_database_of_a_later_release_is_one_clear_message(database: Path) -> None:
    """A later release's database is refused by an error that says so, changes nothing, and costs no answer."""
    change_file(database, "UPDATE rag_wiki_schema SET version = 99")
    with SQLiteStateStore(f"sqlite:///{database}") as store:
        world = World(store)
        world.shows(document("pods", PODS))
        with pytest.raises(SchemaVersionError, match=r"99.*upgrade langchain-rag-wiki"):
            world.retriever().accept_suggestion("pods")
        documents, provenance = world.retriever().invoke_with_provenance(POD_QUESTION)
        assert texts(documents) == [PODS]
        assert "SchemaVersionError" in provenance.degraded[0]
    assert change_file(database, "SELECT version FROM rag_wiki_schema") == [(99,)]
    assert change_file(database, "SELECT count(*) FROM rag_wiki_documents") == [(1,)]


OF_THE_OLDER_PACKAGE = """
CREATE TABLE user_document_state (
    user_id VARCHAR NOT NULL, doc_id VARCHAR NOT NULL, doc_title VARCHAR NOT NULL, doc_path VARCHAR NOT NULL,
    user_state VARCHAR NOT NULL, fetch_count INTEGER NOT NULL, last_fetched_at DATETIME,
    suggestion_sent BOOLEAN NOT NULL, decay_score FLOAT NOT NULL, explicit_signal FLOAT NOT NULL, full_content TEXT,
    cached_at DATETIME, pinned_at DATETIME, demoted_at DATETIME, no_resiluggest_until DATETIME,
    next_suggest_at INTEGER NOT NULL, queries_missed INTEGER NOT NULL, cache_miss_streak INTEGER NOT NULL{more},
    PRIMARY KEY (user_id, doc_id)
)
"""


@pytest.mark.parametrize("release", ["0.2.2", "0.2.4"])
def test_a_database_of_the_package_before_is_taken_over_or_named(
    tmp_path: Path, release: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A file that 0.2 wrote opens: what the user saved there is saved here, or one message says that it is not."""
    path = tmp_path / "rag_wiki.db"
    more, value = (", always_full_doc BOOLEAN NOT NULL", ", 0") if release == "0.2.4" else ("", "")
    row = (
        f"INSERT INTO user_document_state VALUES ('{USER}', 'pods', 'Pods', 'pods.md', 'CLAIMED', 4, "  # noqa: S608
        f"'2026-02-01 12:00:00.000000', 0, 0.7, 1.0, '{PODS}', '2026-02-01 12:00:00.000000', NULL, NULL, NULL, 0, 0, 0"
        f"{value})"
    )
    change_file(path, OF_THE_OLDER_PACKAGE.format(more=more), row)
    with SQLiteStateStore(f"sqlite:///{path}") as store:
        world = World(store)
        retriever = world.retriever()
        retriever.invoke(POD_QUESTION)
        record = store.get(USER, "pods")
        assert record is not None or "user_document_state" in caplog.text
        if record is not None:
            assert (record.user_state, record.full_content) == (DocumentState.CLAIMED, PODS)
            assert record.fetch_count >= 4
            assert retriever.reindex() == ["pods"]
            assert_answers(retriever)


@pytest.mark.parametrize("content", [b"", b"SQLite format 3\0 but not really", b"\0" * 4096, b"user,doc\nada,pods\n"])
def test_a_file_that_is_no_database_is_not_overwritten(tmp_path: Path, content: bytes) -> None:
    """A foreign file costs no answer, is named by an error of an action, and stays as it is; an empty one is used."""
    path = tmp_path / "state.db"
    path.write_bytes(content)
    with SQLiteStateStore(f"sqlite:///{path}") as store:
        world = World(store)
        world.shows(document("pods", PODS))
        retriever = world.retriever()
        documents, provenance = retriever.invoke_with_provenance(POD_QUESTION)
        assert texts(documents) == [PODS]
        if not content:
            assert provenance.degraded == ()
            assert retriever.accept_suggestion("pods").user_state is DocumentState.CLAIMED
            return
        assert len(provenance.degraded) == 1
        with pytest.raises(Exception, match="not a database"):
            retriever.accept_suggestion("pods")
    assert path.read_bytes() == content


def test_a_torn_copy_is_told_and_heals(on_disk: PlacedWorld) -> None:
    """A chunk file cut short by a crash is not served: it is named, the source answers, and re-indexing heals it."""
    (chunks,) = folder_of(on_disk).rglob("*.chunks")
    chunks.write_bytes(chunks.read_bytes()[:-7])
    world = on_disk.reopened()
    retriever = world.retriever()
    world.shows(document("pods", PODS))
    documents, provenance = retriever.invoke_with_provenance(POD_QUESTION)
    assert texts(documents) == [PODS]
    assert cached(documents) == []
    assert [copy.reason for copy in provenance.withheld] == ["copy unreadable"]
    with pytest.raises(CorruptDataError):
        retriever.chunk_store.load_chunks(USER, "pods")
    assert retriever.reindex() == ["pods"]
    assert_answers(retriever)


# -- many that open at once ----------------------------------------------------------------------------

OPENING = """
import os, sys, traceback
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.runnables import RunnableLambda
from rag_wiki import RagWikiRetriever
where, processes = sys.argv[1], int(sys.argv[2])
if where.startswith("sqlite"):
    from rag_wiki.storage.sqlite import SQLiteStateStore as Store
else:
    from rag_wiki.storage.sql import SQLStateStore as Store

def work(number):
    source = RunnableLambda(lambda query: [Document("Pods.", metadata={"doc_id": "pods"})])
    with Store(where) as store:
        retriever = RagWikiRetriever(source, "ada", store, embedding_model=DeterministicFakeEmbedding(size=8))
        for _ in range(5):
            assert retriever.invoke_with_provenance("pods?").provenance.degraded == ()
        retriever.invoke("mine", user_id=number)
        retriever.accept_suggestion("pods", user_id=number)
        (answer,) = retriever.invoke("Pods.", user_id=number)
        assert answer.metadata["from_cache"]

reading, go = os.pipe()
children = []
for number in range(processes):
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(go)
            os.read(reading, 1)
            work(str(number))
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    children.append(child)
os.close(go)
print([os.waitpid(child, 0)[1] for child in children])
"""
PROCESSES = 6


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_six_processes_open_a_fresh_database_at_once(request: pytest.FixtureRequest, tmp_path: Path, kind: str) -> None:
    """Six processes make the same new database at the same moment: all of them work, and every call is counted."""
    where = f"sqlite:///{tmp_path / 'state.db'}"
    if kind == "postgres":
        where = request.getfixturevalue("postgres_url")
        drop_tables(where)
    ended = subprocess.run(
        [sys.executable, "-c", OPENING, where, str(PROCESSES)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert ended.stdout == f"{[0] * PROCESSES}\n", ended.stderr
    with SQLiteStateStore(where) if kind == "sqlite" else SQLStateStore(where) as store:
        record = store.get("ada", "pods")
        assert record is not None
        assert record.fetch_count == PROCESSES * 5
        assert store.list_active_users() == [str(number) for number in range(PROCESSES)]


def drop_tables(url: str) -> None:
    """Leave a PostgreSQL database as it was before its first use."""
    engine = sa.create_engine(sa.engine.make_url(url).set(drivername="postgresql+psycopg"))
    with engine.begin() as connection:
        found = connection.execute(sa.text("SELECT tablename FROM pg_tables WHERE tablename LIKE 'rag\\_wiki\\_%'"))
        for name in found.scalars().all():
            connection.execute(sa.text(f'DROP TABLE "{name}"'))
    engine.dispose()


def test_everything_is_there_after_a_restart(lasting_world: PlacedWorld) -> None:
    """In every place that lasts, state, copy, hits, history, votes and suggestions are there in a new process."""
    retriever = lasting_world.retriever(text_splitter=Paragraphs())
    lasting_world.save(retriever, "pods", PODS)
    retriever.invoke(POD_QUESTION)
    retriever.thumbs_up("pods")
    lasting_world.shows(document("images", "Images are read only."))
    for number in range(3):
        retriever.invoke(f"images {number}?")
    lasting_world.shows()
    fresh = lasting_world.reopened()
    again = fresh.retriever()
    assert fresh.store.list_by_state(USER) == lasting_world.store.list_by_state(USER)
    assert fresh.state("images") is DocumentState.SUGGESTED
    assert again.history("pods") == retriever.history("pods")
    assert again.chunk_store.load_chunks(USER, "pods") == retriever.chunk_store.load_chunks(USER, "pods")
    assert again.stats().chunks == 1
    assert texts(again.invoke(POD_QUESTION)) == [PODS]
    assert again.accept_suggestion("images").content_source == "retrieved"
    assert doc_ids(cached(retriever.invoke("what about images?"))) == ["images"]
