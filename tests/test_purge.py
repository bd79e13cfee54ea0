"""A document that was withdrawn goes for everybody; what a crash left behind goes with the decay job."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import document
from places import PlacedWorld, make_world
from scenarios import OTHER_QUESTION, POD_QUESTION, PODS, USER, cached, doc_ids, texts, topics

from rag_wiki import CorruptDataError, DocumentRemovedError, DocumentState, PurgedDocument
from rag_wiki.scheduler import DecayScheduler
from rag_wiki.storage.chunk_store import ChunkCopy

WITHDRAWN = "Pods of the confidential project Kingfisher."
_DAY_NS = 24 * 3600 * 10**9


def test_a_withdrawn_document_answers_nobody_any_more(world: PlacedWorld) -> None:
    """Saved, pinned, suggested or only met: after `purge` no user has a record, a copy or a retrieved text of it."""
    retriever = world.retriever(None)
    for user_id in ("ada", "bob"):
        world.save(retriever, "leak", WITHDRAWN, user_id=user_id)
        world.save(retriever, "pods", PODS, user_id=user_id)
    retriever.force_pin("leak", user_id="bob")
    world.shows(document("leak", WITHDRAWN))
    retriever.invoke(OTHER_QUESTION, user_id="carol")
    other_worker = world.reopened().retriever(None)
    assert "leak" in doc_ids(other_worker.invoke(POD_QUESTION, user_id="ada"))
    world.shows()

    purged = retriever.purge("leak")

    files = 2 if world.folder is not None else 0
    assert purged == PurgedDocument("leak", users=3, copies=2, files=files)
    for each in (retriever, other_worker, world.reopened().retriever(None)):
        for user_id in ("ada", "bob"):
            assert texts(each.invoke(POD_QUESTION, user_id=user_id)) == [PODS]
        assert each.invoke(POD_QUESTION, user_id="carol") == []
    for user_id in ("ada", "bob", "carol"):
        assert world.store.get(user_id, "leak") is None
        assert world.store.retrieved_texts(user_id, "leak") == []
        assert world.store.history(user_id, "leak") == []
    if world.folder is not None:
        held = [path for path in world.folder.rglob("*") if path.is_file() and b"Kingfisher" in path.read_bytes()]
        assert held == []
    assert retriever.purge("leak") == PurgedDocument("leak")


async def test_purging_works_without_blocking(world: PlacedWorld) -> None:
    """`apurge` does what `purge` does."""
    retriever = world.retriever()
    world.save(retriever, "leak", WITHDRAWN)
    purged = await retriever.apurge("leak")
    assert (purged.users, purged.copies) == (1, 1)
    assert await retriever.ainvoke(POD_QUESTION) == []


def test_a_withdrawal_wins_over_a_save_under_way(world: PlacedWorld) -> None:
    """A document that is purged while it is being embedded is not saved; the save says so, and leaves no copy."""
    table, embedding, purged = topics(), threading.Event(), threading.Event()
    embed = table.embed_documents

    def slowly(texts: list[str]) -> list[list[float]]:
        embedding.set()
        assert purged.wait(30)
        return embed(texts)

    table.embed_documents = slowly  # type: ignore[method-assign]
    retriever = world.retriever(embedding_model=table)
    world.shows(document("leak", WITHDRAWN))
    retriever.invoke(OTHER_QUESTION)
    world.shows()
    failures: list[BaseException] = []

    def save() -> None:
        try:
            retriever.accept_suggestion("leak")
        except DocumentRemovedError as error:
            failures.append(error)

    saving = threading.Thread(target=save)
    saving.start()
    assert embedding.wait(30)
    retriever.purge("leak")
    purged.set()
    saving.join(30)

    assert len(failures) == 1
    assert world.store.get(USER, "leak") is None
    assert retriever.chunk_store.place.copies(USER, "leak") == []
    assert retriever.invoke(POD_QUESTION) == []


def test_a_document_that_comes_back_is_a_new_one(world: PlacedWorld) -> None:
    """Who retrieves a purged document again meets it for the first time, and may save it."""
    retriever = world.retriever()
    for _ in range(3):
        world.save(retriever, "pods", PODS)
    retriever.purge("pods")
    world.save(retriever, "pods", "Pods, as published anew.")
    record = world.record("pods")
    assert (record.fetch_count, record.user_state) == (1, DocumentState.CLAIMED)
    assert texts(retriever.invoke(POD_QUESTION)) == ["Pods, as published anew."]


def left_behind(world: PlacedWorld, user_id: str, doc_id: str, days: float) -> str:
    """A copy that no record names, as a process leaves it that is killed while it saves; returns its id."""
    copy_id = f"{time.time_ns() - int(days * _DAY_NS):016x}" + "0" * 12
    copy = ChunkCopy(copy_id, (0,), (WITHDRAWN,), np.eye(1, 8, dtype=np.float32))
    world.retriever().chunk_store.save_copy(user_id, doc_id, copy)
    return copy_id


def test_the_decay_job_sweeps_what_crashes_left(world: PlacedWorld) -> None:
    """Copies that no record names go a day after the crash, also those of users who have nothing saved any more."""
    retriever = world.retriever(None)
    world.save(retriever, "pods", PODS, user_id="ada")
    world.save(retriever, "leak", WITHDRAWN, user_id="bob")
    retriever.force_remove("leak", user_id="bob")
    for user_id, doc_id in (("ada", "pods"), ("bob", "leak")):
        left_behind(world, user_id, doc_id, 2)
    young = left_behind(world, "bob", "leak", 0.5)
    foreign = left_behind(world, "bob", "never met", 9)

    scheduler = DecayScheduler(retriever.decay_engine, world.store, clock=world.clock)
    scheduler.run_all_users()

    place = retriever.chunk_store.place
    assert scheduler.failures == {}
    assert place.copies("ada", "pods") == [world.record("pods", "ada").copy_id]
    assert place.copies("bob", "leak") == [young]
    # Nothing is known of it here: another application may keep its copies in the same place.
    assert place.copies("bob", "never met") == [foreign]
    assert texts(cached(retriever.invoke(POD_QUESTION, user_id="ada"))) == [PODS]


def test_a_users_own_decay_run_sweeps_too(world: PlacedWorld) -> None:
    """`run_decay` removes what a crash left of the user's documents."""
    retriever = world.retriever()
    world.save(retriever, "pods", PODS)
    left_behind(world, USER, "pods", 2)
    retriever.run_decay()
    assert retriever.chunk_store.place.copies(USER, "pods") == [world.record("pods").copy_id]


def test_readable_copies_follow_the_records(tmp_path: Path, make_store: Any) -> None:
    """A readable copy that a crash left of a removed document goes; one that it kept from being written is written."""
    world = make_world("sqlite+disk", make_store, tmp_path)
    retriever = world.retriever()
    world.save(retriever, "pods", PODS)
    world.save(retriever, "leak", WITHDRAWN)
    documents = retriever.chunk_store.documents
    assert documents is not None
    assert documents.delete(USER, "pods") == 1
    retriever.force_remove("leak")
    documents.prepare(USER, "leak", "Leak", WITHDRAWN).finish()

    retriever.run_decay()

    assert set(documents.times(USER, ["pods", "leak"])) == {"pods"}
    (path,) = (tmp_path / "wiki").rglob("*.md")
    assert path.read_text() == PODS


def test_a_user_who_cannot_be_read_keeps_nobody_elses_document(tmp_path: Path, make_store: Any) -> None:
    """Where one user's id is torn, `purge` removes the document of all others, and then says that this one is left."""
    world = make_world("sqlite", make_store, tmp_path)
    retriever = world.retriever(None)
    for user_id in ("ada", "bob", "carol"):
        world.save(retriever, "leak", WITHDRAWN, user_id=user_id)
    with contextlib.closing(sqlite3.connect(tmp_path / "state.db")) as torn, torn:
        torn.execute("UPDATE rag_wiki_users SET user_id = 'torn' WHERE user_key = 'bob'")

    with pytest.raises(CorruptDataError, match="1 users"):
        retriever.purge("leak")

    assert [world.store.get(user_id, "leak") for user_id in ("ada", "carol")] == [None, None]
    assert retriever.chunk_store.place.owners() == []


def test_the_scores_of_a_run_are_told_where_leftovers_cannot_be_looked_for(
    tmp_path: Path, make_store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the chunks can't be listed, the job has scored everybody, and its results come."""
    world = make_world("sqlite+disk", make_store, tmp_path)
    retriever = world.retriever("ada")
    world.save(retriever, "pods", PODS)

    def away() -> list[str]:
        raise OSError("the folder is away")

    monkeypatch.setattr(retriever.chunk_store.place, "owners", away)
    results = DecayScheduler(retriever.decay_engine, world.store, clock=world.clock).run_all_users()
    assert [result.doc_id for result in results["ada"]] == ["pods"]
