"""Events in the log: each has a name that stays, a level and attributes, and every one of them is seen here."""

from __future__ import annotations

import ast
import logging
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from geometry import GeometryEmbeddings, low
from helpers import document
from langchain_core.documents import Document
from langchain_core.vectorstores import InMemoryVectorStore
from scenarios import OTHER_QUESTION, POD_QUESTION, PODS, USER, Paragraphs, World

import rag_wiki
from rag_wiki import DecayConfig, DecayResult, DocumentState, UserDocRecord
from rag_wiki.events import EVENTS, logger
from rag_wiki.scheduler import DecayScheduler
from rag_wiki.storage.chunk_store import ChunkStore

Scene: TypeAlias = Callable[[Path], None]
SCENES: list[tuple[Scene, tuple[str, ...]]] = []
IMAGES = "Images are built in layers."
LONG_AGO = 3 * 86_400


@dataclass
class Refuses:
    """A store's hook that fails."""

    error: Exception

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise self.error


def shows(*names: str) -> Callable[[Scene], Scene]:
    """A scene in which these events are logged."""

    def note(scene: Scene) -> Scene:
        SCENES.append((scene, tuple(f"rag_wiki.{name}" for name in names)))
        return scene

    return note


def sqlite_world(folder: Path, options: str = "") -> World:
    """A world in a SQLite file."""
    sqlite = pytest.importorskip("rag_wiki.storage.sqlite", reason="needs the extra sqlite")
    return World(store=sqlite.SQLiteStateStore(f"sqlite:///{folder / 'state.db'}{options}"))


# -- scenes


@shows(
    "query.answered",
    *(f"document.{what}" for what in ("surfaced", "lapsed", "suggested", "declined", "saved", "refreshed")),
    *(f"document.{what}" for what in ("stale", "voted", "pinned", "unpinned", "demoted", "removed", "purged")),
    "decay.run",
    "user.forgotten",
)
def a_life(folder: Path) -> None:
    """A user meets, saves and loses documents."""
    world = World()
    retriever = world.retriever(decay=DecayConfig(demotion_hold_days=0, demotion_threshold=0.5))
    world.shows(document("pods", PODS), document("images", IMAGES), document("tax", "Tax is due in May."))
    for _ in range(3):
        retriever.invoke("an introduction")
    retriever.accept_suggestion("pods", full_content=PODS)
    retriever.decline_suggestion("images")
    world.shows(document("pods", "Pods are something else now."))
    for _ in range(3):
        retriever.invoke(POD_QUESTION)
    retriever.refresh("pods", full_content=PODS)
    retriever.thumbs_up("pods")
    retriever.force_pin("pods")
    retriever.unpin("pods")
    retriever.accept_suggestion("tax")
    retriever.force_remove("tax")
    world.clock.turn(days=90)
    retriever.run_decay()
    retriever.purge("images")
    retriever.forget_user()


@shows("query.failed", "query.degraded", "query.degraded_trace")
def failures(folder: Path) -> None:
    """The model is away, then the wrapped retriever."""
    world = World()
    retriever = world.retriever()
    world.save(retriever, "pods", PODS)
    world.table.error = TimeoutError("the model is away")
    retriever.invoke(POD_QUESTION)
    world.source.fail_with(ConnectionError("the index is away"))
    with pytest.raises(ConnectionError):
        retriever.invoke(POD_QUESTION)


@shows("document.unidentified", "model.missing")
def nothing_to_go_by(folder: Path) -> None:
    """A document without an id, and a suggestion without a model."""
    world = World(embeddings=None)
    world.shows(Document(page_content="Somebody's."), document("pods", PODS))
    world.retriever(fetch_threshold=1).invoke(OTHER_QUESTION)


@shows("file.unreadable", "file.ambiguous")
def files(folder: Path) -> None:
    """A document's path leads to a file that is no text, and to two that differ."""
    roots = [folder / "one", folder / "two"]
    for number, root in enumerate(roots):
        root.mkdir()
        (root / "pods.md").write_text(f"{PODS} {number}")
        (root / "images.md").write_bytes(b"\xff\xfe\xfa")
    world = World()
    retriever = world.retriever(document_roots=roots)
    world.shows(document("pods", PODS, doc_path="pods.md"), document("images", IMAGES, doc_path="images.md"))
    retriever.invoke(OTHER_QUESTION)
    for doc_id in ("pods", "images"):
        retriever.accept_suggestion(doc_id)


@shows("content.missing", "copy.unavailable")
def copies_without_a_text_or_of_another_model(folder: Path) -> None:
    """A record that was written by hand has no text, and a copy is of another model."""
    world = World()
    world.save(world.retriever(), "pods", PODS)
    world.store.upsert(UserDocRecord(USER, "tax", "Tax", "", user_state=DocumentState.CLAIMED))
    other = world.retriever(embedding_name="another")
    other.invoke(POD_QUESTION)
    other.reindex()


@shows("copy.unreadable")
def a_torn_copy(folder: Path) -> None:
    """The texts of a copy are not those that were written."""
    world = sqlite_world(folder)
    world.save(world.retriever(), "pods", PODS)
    world.store.close()
    with sqlite3.connect(folder / "state.db") as connection:
        connection.execute("UPDATE rag_wiki_chunks SET texts = '[\"Pods'")
    connection.close()
    world = sqlite_world(folder)
    world.retriever().invoke(POD_QUESTION)
    world.store.close()


@shows("save.not_tidied")
def a_copy_that_stays(folder: Path) -> None:
    """The copy that was replaced can't be removed."""
    world = World()
    chunks = ChunkStore(folder / "wiki")
    retriever = world.retriever(chunk_store=chunks)
    world.save(retriever, "pods", PODS)
    chunks.retire = Refuses(PermissionError("not yours"))  # type: ignore[method-assign]  # a folder that refuses
    retriever.refresh("pods", full_content=f"{PODS} Anew.")


@shows("hits.unreadable", "hits.not_summed", "leftover.kept")
def a_damaged_folder(folder: Path) -> None:
    """Folders lie where files of hits should, and what a crash left can't be removed."""
    place = folder / "wiki"
    world = World()
    retriever = world.retriever(chunk_store=ChunkStore(place))
    world.save(retriever, "pods", PODS)
    retriever.invoke(POD_QUESTION)
    (hits,) = place.rglob("*.hits")
    digest, copy_id, _, _ = hits.name.split(".")
    for writer in ("0" * 8, "1" * 8):
        (hits.parent / f"{digest}.{copy_id}.{writer}.hits").mkdir()
    left = hits.parent / ".writing-left"
    left.mkdir()
    (left / "held").write_text("x")
    os.utime(left, (time.time() - LONG_AGO,) * 2)
    retriever.chunk_store.place.tidy = with_nothing_removable(retriever.chunk_store.place.tidy)  # type: ignore[method-assign]  # as below
    retriever.run_decay()
    DecayScheduler(retriever.decay_engine, world.store).run_all_users()


def with_nothing_removable(act: Callable[..., None]) -> Callable[..., None]:
    """Act while folders can't be removed, as where another account made them."""

    def acting(*arguments: Any) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("shutil.rmtree", Refuses(PermissionError("not yours")))
            patch.setattr(Path, "unlink", Refuses(PermissionError("not yours")))
            act(*arguments)

    return acting


@shows("model.calibrated", "calibration.unreadable", "calibration.not_kept")
def calibrations(folder: Path) -> None:
    """A calibration is made, torn, and can't be kept."""
    world = World(embeddings=low())
    world.retriever().calibrate()
    notes = world.store._notes  # type: ignore[attr-defined]  # where memory has them
    (name,) = [key for key in notes if key.startswith("note:")]
    notes[name] = '"torn"'
    world.store._swap_note = Refuses(ConnectionError("away"))  # type: ignore[method-assign]  # a store that is down
    world.retriever(chunk_store=ChunkStore()).calibrate()


@shows("model.not_telling", "threshold.doubtful")
def scores_that_tell_nothing(folder: Path) -> None:
    """A model whose cosines tell nothing, and a threshold that everything passes."""
    world = World(embeddings=GeometryEmbeddings(0.3, 0.3))
    world.save(world.retriever(), "tides", "tides come and go.")
    world.retriever(similarity_threshold="auto").invoke("tides in general?")
    world.retriever(similarity_threshold=0.1).calibrate()


@shows("focus.silent")
def nothing_that_counts(folder: Path) -> None:
    """In focus, a source that finds nothing but what is unrelated."""
    model = low()
    store = InMemoryVectorStore(model)
    store.add_documents([document("tides", "tides come and go."), document("bees", "bees make honey.")])
    retriever = World(embeddings=model).retriever(global_retriever=store.as_retriever(), context="focused")
    for number in range(21):
        retriever.invoke(f"chess {number} in general?")


class OddScores(InMemoryVectorStore):
    """Its scores are no cosines, nor anything that one follows from."""

    def similarity_search_with_score_by_vector(self, *asked: Any, **more: Any) -> list[tuple[Document, float]]:
        found = super().similarity_search_with_score_by_vector(*asked, **more)
        return [(item, 100 - position) for position, (item, _) in enumerate(found)]


@shows("source.by_rank")
def a_store_with_scores_of_its_own(folder: Path) -> None:
    """A vector store whose scores say nothing of cosines, in focus."""
    model = low()
    store = OddScores(model)
    store.add_documents([document("tides", "tides come and go."), document("bees", "bees make honey.")])
    world = World(embeddings=model)
    retriever = world.retriever(global_retriever=store.as_retriever(), context="focused")
    for question in ("tides in general?", "bees in general?", "tides again?"):
        retriever.invoke(question)


@shows("decay.job.done", "decay.job.user_failed")
def a_job_that_fails_for_one(folder: Path) -> None:
    """The decay job fails for one user and is done for the other."""
    world = World()
    for user in (USER, "bob"):
        world.save(world.retriever(user), "pods", PODS)
    engine = world.retriever().decay_engine
    run_for_user = engine.run_for_user

    def fails_for_bob(user_id: str, now: datetime | None = None) -> list[DecayResult]:
        if user_id == "bob":
            raise ConnectionError("away")
        return run_for_user(user_id, now)

    engine.run_for_user = fails_for_bob  # type: ignore[method-assign]  # a user whose records can't be reached
    DecayScheduler(engine, world.store).run_all_users()


@shows("decay.job.failed")
def a_job_that_cannot_begin(folder: Path) -> None:
    """The store can't say when the job last ran, nor who there is, and leftovers can't be looked for."""
    world = World()
    world.save(world.retriever(), "pods", PODS)
    engine = world.retriever().decay_engine
    engine.tidy = Refuses(OSError("no folder"))  # type: ignore[method-assign]  # a folder that is away
    DecayScheduler(engine, world.store).run_all_users()
    world.store._read_note = Refuses(ConnectionError("away"))  # type: ignore[method-assign]  # a store that is down
    world.store._active_users = Refuses(ConnectionError("away"))  # type: ignore[method-assign]  # the same
    asked: list[float] = []

    def wait(stopping: Any, seconds: float) -> bool:
        asked.append(seconds)
        return True

    scheduler = DecayScheduler(engine, world.store, wait=wait)
    scheduler._tick()
    scheduler.start()
    scheduler.stop()
    assert asked == [60.0]


@shows("database.older", "database.replaced")
def databases(folder: Path) -> None:
    """A database has a table of release 0.2, and is replaced while it is open."""
    with sqlite3.connect(folder / "state.db") as connection:
        connection.execute("CREATE TABLE user_document_state (user_id TEXT)")
        connection.execute("INSERT INTO user_document_state VALUES ('ada')")
    connection.close()
    world = sqlite_world(folder)
    world.retriever().invoke(OTHER_QUESTION)
    for path in folder.glob("state.db*"):
        path.unlink()
    world.retriever().invoke(OTHER_QUESTION)
    world.store.close()


@shows("database.log_kept")
def a_reader_in_the_way(folder: Path) -> None:
    """A reader keeps SQLite's log from being emptied."""
    world = sqlite_world(folder, "?timeout=0.05")
    world.save(world.retriever(), "pods", PODS)
    reader = sqlite3.connect(folder / "state.db", isolation_level=None)
    reader.execute("BEGIN")
    reader.execute("SELECT count(*) FROM rag_wiki_users").fetchall()
    world.retriever().forget_user()
    reader.close()
    world.store.close()


# -- tests


class Kept(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@pytest.fixture
def kept() -> Iterator[Kept]:
    """What is logged by rag_wiki, at every level."""
    handler, level = Kept(), logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(level)


def told(record: logging.LogRecord) -> dict[str, Any]:
    """What a record tells, by the names in its event."""
    return {
        name.removeprefix("rag_wiki_"): value for name, value in vars(record).items() if name.startswith("rag_wiki_")
    }


@pytest.mark.parametrize(("scene", "names"), SCENES, ids=[scene.__name__ for scene, _ in SCENES])
def test_events_are_logged_with_their_name_level_and_attributes(
    scene: Scene, names: tuple[str, ...], kept: Kept, tmp_path: Path
) -> None:
    """Each scene logs its events; each record has its event's level, and just the attributes that it promises."""
    scene(tmp_path)
    seen = {vars(record)["event_name"] for record in kept.records}
    assert set(names) <= seen
    for record in kept.records:
        event = EVENTS[vars(record)["event_name"]]
        assert (record.name, record.levelno) == ("rag_wiki", event.level)
        assert set(told(record)) - {"user_id"} == set(event.tells)
        assert record.getMessage()
        # The line of whoever tells it, not of the event.
        assert record.filename != "events.py"


def test_every_event_has_a_scene() -> None:
    """The scenes together log every event that there is."""
    assert {name for _, names in SCENES for name in names} == set(EVENTS)


def test_nothing_is_logged_but_events() -> None:
    """No module but `events` has a logger or calls one, so nothing is logged without a name."""
    folder = Path(rag_wiki.__file__).parent
    found = [
        f"{path.relative_to(folder)}:{node.lineno}"
        for path in folder.rglob("*.py")
        if path != folder / "events.py"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr == "getLogger"
    ]
    assert found == []


def test_what_a_document_event_tells(kept: Kept) -> None:
    """A save tells which document, why, what brought it about, from where to where, at which count and score."""
    world = World()
    retriever = world.retriever(text_splitter=Paragraphs())
    world.save(retriever, "pods", PODS)
    (saved,) = [record for record in kept.records if vars(record)["event_name"] == "rag_wiki.document.saved"]
    assert saved.getMessage() == "document 'pods': saved (the user accepted; content from the caller)"
    assert told(saved) == {
        "user_id": USER,
        "doc_id": "pods",
        "why": "the user accepted; content from the caller",
        "cause": "user",
        "from_state": "SURFACED",
        "to_state": "CLAIMED",
        "fetch_count": 1,
        "score": 1.0,
    }
    kept.records.clear()
    retriever.invoke(POD_QUESTION)
    (answered,) = kept.records
    assert {**told(answered), "duration_ms": 0} == {
        "user_id": USER,
        "outcome": "hit",
        "mode": "semantic",
        "documents": 1,
        "from_copies": 1,
        "asked": True,
        "degraded": 0,
        "duration_ms": 0,
    }
    assert told(answered)["duration_ms"] > 0


def test_users_are_named_at_debug_alone(kept: Kept, tmp_path: Path) -> None:
    """At INFO no event, in its attributes or message, names the user; who was forgotten is named at no level."""
    a_life(tmp_path)
    named = {vars(record)["event_name"] for record in kept.records if "rag_wiki_user_id" in vars(record)}
    assert "rag_wiki.document.saved" in named
    assert "rag_wiki.user.forgotten" not in named
    kept.records.clear()
    logger.setLevel(logging.INFO)
    a_life(tmp_path)
    assert {record.levelno for record in kept.records} == {logging.INFO}
    assert not [record for record in kept.records if "rag_wiki_user_id" in vars(record) or USER in record.getMessage()]


def test_what_nobody_sees_is_not_put_together(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the level off, no record is made for a question."""
    world = World()
    retriever = world.retriever()
    world.save(retriever, "pods", PODS)
    logger.setLevel(logging.WARNING)
    monkeypatch.setattr(logger, "makeRecord", Refuses(AssertionError("a record was made")))
    retriever.invoke(POD_QUESTION)
    retriever.thumbs_up("pods")
    assert retriever.process_stats().hits == 1


@pytest.mark.parametrize(("message", "is_told"), [("the model is away", True), ("400: bad input: {query}", False)])
def test_a_model_that_repeats_the_query_is_quoted_at_debug_alone(
    message: str, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The warning has the model's own words, unless they repeat what was asked; at DEBUG they are told."""
    world = World()
    retriever = world.retriever()
    world.save(retriever, "pods", PODS)
    query = "what is my salary?"
    world.table.error = ValueError(message.format(query=query))
    with caplog.at_level(logging.DEBUG, "rag_wiki"):
        retriever.invoke(query)
    (warning,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert ("the model is away" in warning.getMessage()) == is_told
    assert query not in warning.getMessage()
    assert "ValueError" in warning.getMessage()
    (trace,) = [
        record for record in caplog.records if getattr(record, "event_name", "") == "rag_wiki.query.degraded_trace"
    ]
    assert trace.exc_info is not None
    assert str(trace.exc_info[1]) == message.format(query=query)
