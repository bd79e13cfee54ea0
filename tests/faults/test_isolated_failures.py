"""What is wrong with one user, document or question costs nobody else anything, and is told."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Literal

import pytest
from helpers import START, HandClock, TableEmbeddings, document
from places import PlacedWorld
from scenarios import OTHER_QUESTION, POD_QUESTION, PODS, USER, World, cached, doc_ids, topics

from rag_wiki import (
    CorruptDataError,
    DecayConfig,
    DecayEngine,
    DocumentState,
    EmbeddingError,
    MemoryStateStore,
    RagWikiRetriever,
    StateStore,
    UserDocRecord,
)
from rag_wiki import scheduler as scheduler_module
from rag_wiki.lifecycle.decay_engine import DecayResult
from rag_wiki.scheduler import DecayScheduler
from rag_wiki.storage.sqlite import SQLiteStateStore

CLAIMED, DEMOTED = DocumentState.CLAIMED, DocumentState.DEMOTED
PATIENCE = 30.0
"""Seconds after which a wait is a failure; no test that passes waits for long."""
RECENCY_ALONE = DecayConfig(w_recency=1, w_frequency=0, w_explicit=0, w_chunk_hit=0, demotion_hold_days=0.5)
USERS = ("u1", "u2", "u3")


def failing_for(store: StateStore, *users: str) -> Callable[..., Iterator[Any]]:
    """The store's `change_pages`, which fails for some users."""
    change_pages = store.change_pages

    def change(user_id: str, *arguments: Any, **named: Any) -> Iterator[Any]:
        if user_id in users:
            message = f"the data of {user_id} can't be read"
            raise OSError(message)
        return change_pages(user_id, *arguments, **named)

    return change


def test_one_users_bad_data_stops_nobody_elses_run(
    world: PlacedWorld, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The store fails for the second of three users: it is named, the others are done, and the next run makes up."""
    for user_id in USERS:
        world.save(world.retriever(user_id), "pods", PODS)
    engine = world.retriever("u1", decay=RECENCY_ALONE).decay_engine
    scheduler = DecayScheduler(engine, world.store, clock=world.clock)
    world.clock.turn(days=100)
    with monkeypatch.context() as patched:
        patched.setattr(world.store, "change_pages", failing_for(world.store, "u2"))
        for _ in range(2):
            assert sorted(scheduler.run_all_users()) == ["u1", "u3"]
            assert {user_id: str(error) for user_id, error in scheduler.failures.items()} == {
                "u2": "the data of u2 can't be read"
            }
            world.clock.turn(days=1)
    assert [world.state("pods", user_id) for user_id in USERS] == [DEMOTED, CLAIMED, DEMOTED]
    told = [record for record in caplog.records if "'u2'" in record.getMessage()]
    assert len(told) == 2
    assert all(record.exc_info is not None and "the data of u2" in str(record.exc_info[1]) for record in told)
    assert sorted(scheduler.run_all_users()) == ["u2"]
    assert scheduler.failures == {}
    world.clock.turn(days=1)
    scheduler.run_all_users()
    assert world.state("pods", "u2") is DEMOTED
    assert doc_ids(cached(world.reopened().retriever("u2").invoke(POD_QUESTION))) == []


class Unsteady(MemoryStateStore):
    """Is down for the first run."""

    _is_down = True

    def active_users(self) -> tuple[list[str], dict[str, CorruptDataError]]:
        if self._is_down:
            self._is_down = False
            message = "the store is down"
            raise ConnectionError(message)
        return super().active_users()


class Telling(DecayEngine):
    """Says for whom it ran; the test waits for the last one."""

    ran: list[str]
    last_one: threading.Event

    def run_pages(self, user_id: str, now: datetime | None = None) -> Iterator[list[DecayResult]]:
        self.ran.append(user_id)
        if user_id == USERS[-1]:
            self.last_one.set()
        if user_id == "u2":
            message = "the data of u2 can't be read"
            raise OSError(message)
        return super().run_pages(user_id, now)


@pytest.mark.parametrize("backend", ["simple", "apscheduler"])
def test_a_run_that_fails_wholly_is_followed_by_the_next(
    backend: Literal["simple", "apscheduler"], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first scheduled run can't even list the users: the timer lives on, and tries again a little later."""
    monkeypatch.setattr(scheduler_module, "_RETRY_SECONDS", 0.005)
    clock, store = HandClock(), Unsteady()
    for user_id in USERS:
        store.upsert(UserDocRecord(user_id, "pods", "Pods", "", user_state=CLAIMED, last_fetched_at=START))
    engine = Telling(store, clock=clock)
    engine.ran, engine.last_one = [], threading.Event()
    with DecayScheduler(engine, store, backend=backend, clock=clock) as scheduler:
        assert engine.last_one.wait(PATIENCE)
        assert scheduler.is_running
    assert engine.ran == list(USERS)
    assert "the store is down" in caplog.text
    assert sorted(scheduler.failures) == ["u2"]


def torn_sqlite(path: Path, statement: str) -> None:
    """Damage a database file, as a bad disk or another program would."""
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        assert connection.execute(statement).rowcount == 1


@pytest.fixture
def torn(tmp_path: Path) -> Iterator[Callable[[str], World]]:
    """A world in a SQLite file that a statement has damaged: three documents of three users each."""
    path = tmp_path / "torn.db"
    url = f"sqlite:///{path}"
    with SQLiteStateStore(url) as store:
        world = World(store)
        for user_id in USERS:
            for doc_id in ("a", "pods", "z"):
                world.save(world.retriever(user_id, decay=RECENCY_ALONE), doc_id, f"Pods of {doc_id}")
    opened: list[SQLiteStateStore] = []

    def damage(statement: str) -> World:
        torn_sqlite(path, statement)
        opened.append(SQLiteStateStore(url))
        return World(opened[-1], clock=HandClock(START + timedelta(days=100)))

    yield damage
    for store in opened:
        store.close()


ONE_RECORD = """
    UPDATE rag_wiki_documents SET payload = 'torn' WHERE rowid = (
        SELECT d.rowid FROM rag_wiki_documents AS d JOIN rag_wiki_users AS u USING (user_key)
        WHERE u.user_id = '"u2"' AND d.payload LIKE '%Pods"%'
    )
"""
ONE_USER = """UPDATE rag_wiki_users SET user_id = 'torn' WHERE user_id = '"u2"'"""


def scheduled(world: World) -> DecayScheduler:
    """The decay job over a world."""
    return DecayScheduler(
        DecayEngine(world.store, config=RECENCY_ALONE, clock=world.clock), world.store, clock=world.clock
    )


def test_a_torn_record_is_its_users_failure_alone(torn: Callable[[str], World]) -> None:
    """A record that can't be read back fails its user's run, by name, and costs that user alone its answers."""
    world = torn(ONE_RECORD)
    scheduler = scheduled(world)
    assert sorted(scheduler.run_all_users()) == ["u1", "u3"]
    assert {user_id: type(error) for user_id, error in scheduler.failures.items()} == {"u2": CorruptDataError}
    world.shows(document("tax", "Tax is due in May."))
    documents, provenance = world.retriever("u2").invoke_with_provenance(POD_QUESTION)
    assert "tax" in doc_ids(documents)
    assert len(provenance.degraded) == 1
    found, provenance = world.retriever("u3").invoke_with_provenance(POD_QUESTION)
    assert (doc_ids(cached(found)), provenance.degraded) == (["a", "pods", "z"], ())


def test_a_torn_user_is_one_failure_among_others(torn: Callable[[str], World]) -> None:
    """A user whose own row can't be read back is a failure that is told; the users around it are done."""
    world = torn(ONE_USER)
    scheduler = scheduled(world)
    assert sorted(scheduler.run_all_users()) == ["u1", "u3"]
    assert {user_id: type(error) for user_id, error in scheduler.failures.items()} == {"u2": CorruptDataError}


def test_a_torn_record_keeps_no_other_document_from_decay(torn: Callable[[str], World]) -> None:
    """Of a user with a torn record the other documents are scored and move as if it were not there."""
    world = torn(ONE_RECORD)
    scheduler = scheduled(world)
    scheduler.run_all_users()
    world.clock.turn(days=1)
    scheduler.run_all_users()
    assert [world.state(doc_id, "u2") for doc_id in ("a", "z")] == [DEMOTED, DEMOTED]
    assert "u2" in scheduler.failures


def test_a_torn_record_hides_no_other_copy(torn: Callable[[str], World]) -> None:
    """Of a user with a torn record the other copies answer, and provenance says that one does not."""
    world = torn(ONE_RECORD)
    found, provenance = world.retriever("u2").invoke_with_provenance(POD_QUESTION)
    assert doc_ids(cached(found)) == ["a", "z"]
    assert len(provenance.degraded) == 1


@pytest.mark.parametrize("remedy", ["delete", "upsert", "remove"])
def test_a_torn_record_can_be_deleted_or_replaced(torn: Callable[[str], World], remedy: str) -> None:
    """What the error advises works: the record is deleted, or written anew, and the user's other copies answer."""
    world = torn(ONE_RECORD)
    if remedy == "delete":
        assert world.store.delete("u2", "pods")
    elif remedy == "remove":
        assert world.retriever("u2").force_remove("pods").user_state is DEMOTED
    else:
        world.store.upsert(UserDocRecord("u2", "pods", "Pods", "", user_state=DEMOTED))
    assert world.store.saved_count("u2") == 2
    found, provenance = world.retriever("u2").invoke_with_provenance(POD_QUESTION)
    assert (doc_ids(cached(found)), provenance.degraded) == (["a", "z"], ())


def test_a_torn_copy_is_that_documents_matter_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A chunk file that can't be read back answers nothing; the other copies do, decay goes on, `reindex` heals it."""
    world = World()
    retriever = world.retriever(wiki_save_dir=tmp_path)
    world.save(retriever, "a", "Pods of a")
    files = set(tmp_path.rglob("*.chunks"))
    world.save(retriever, "torn", "Pods that are torn")
    (torn_file,) = set(tmp_path.rglob("*.chunks")) - files
    world.save(retriever, "z", "Pods of z")
    torn_file.write_bytes(torn_file.read_bytes()[:-3])
    found, provenance = retriever.invoke_with_provenance(POD_QUESTION)
    assert sorted(str(doc_id) for doc_id in doc_ids(cached(found))) == ["a", "z"]
    assert [(kept.doc_id, kept.reason) for kept in provenance.withheld] == [("torn", "copy unreadable")]
    assert "torn" in caplog.text
    assert [result.doc_id for result in retriever.run_decay()] == ["a", "torn", "z"]
    assert retriever.reindex() == ["torn"]
    assert len(cached(retriever.invoke(POD_QUESTION))) == 3


class Picky(TableEmbeddings):
    """Refuses one text, as a service with a filter or a limit does."""

    refused = "nothing yet"

    def embed_query(self, text: str) -> list[float]:
        if self.refused in text:
            message = "this text is refused"
            raise ValueError(message)
        return super().embed_query(text)

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        if any(self.refused in text for text in texts):
            message = "this text is refused"
            raise ValueError(message)
        return super().embed_documents(texts)


@pytest.mark.parametrize("awaiting", [False, True])
async def test_a_document_that_the_model_refuses_keeps_no_other_from_being_embedded_anew(awaiting: bool) -> None:
    """After a change of the model all documents but the refused one answer again, whatever `reindex` then tells."""
    model = Picky(topics().table)
    world = World(embeddings=model)
    for doc_id in ("a", "bad", "c", "d"):
        world.save(world.retriever(), doc_id, f"Pods of {doc_id}")
    model.refused = "Pods of bad"
    retriever = world.retriever(embedding_name="the next model")
    with pytest.raises(EmbeddingError, match=r"^1 of 4 .*'bad' \(ValueError: this text is refused\).*'a', 'c', 'd'"):
        await retriever.areindex() if awaiting else retriever.reindex()
    assert doc_ids(cached(retriever.invoke(POD_QUESTION))) == ["a", "c", "d"]


@pytest.mark.parametrize("awaiting", [False, True])
async def test_a_question_that_the_model_refuses_costs_no_other_question_of_a_batch(awaiting: bool) -> None:
    """Of a batch the refused question gets the source's documents, and the others their copies."""
    model = Picky(topics().table)
    world = World(embeddings=model)
    retriever = world.retriever()
    world.save(retriever, "pods", PODS)
    world.shows(document("tax", "Tax is due in May."))
    model.refused = "tax"
    asked = [POD_QUESTION, OTHER_QUESTION, POD_QUESTION]
    found = await retriever.abatch(asked) if awaiting else retriever.batch(asked)
    assert [doc_ids(documents) for documents in found] == [["pods", "tax"], ["tax"], ["pods", "tax"]]


@pytest.mark.parametrize("awaiting", [False, True])
async def test_a_suggestion_whose_callback_fails_costs_no_other(awaiting: bool) -> None:
    """Two documents are suggested at once, and the callback fails for the first: the second is told of and saved."""
    told: list[str] = []

    def tell(event: Any) -> None:
        told.append(event.doc_id)
        if event.doc_id == "bad":
            message = "no thanks"
            raise RuntimeError(message)

    model = Picky(topics().table)
    model.refused = "Pods of bad"
    world = World(embeddings=model)
    world.shows(document("bad", "Pods of bad"), document("good", "Pods of good"))
    retriever: RagWikiRetriever = world.retriever(on_suggestion=tell, auto_save=True, fetch_threshold=1)
    if awaiting:
        _, provenance = await retriever.ainvoke_with_provenance(POD_QUESTION)
    else:
        _, provenance = retriever.invoke_with_provenance(POD_QUESTION)
    assert told == ["bad", "good"]
    assert provenance.degraded == (
        "on_suggestion failed (RuntimeError)",
        "document 'bad' could not be saved (ValueError)",
    )
    assert (world.state("bad"), world.state("good")) == (DocumentState.SUGGESTED, CLAIMED)
    assert world.store.list_claimed(USER)[0].doc_id == "good"
