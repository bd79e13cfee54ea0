"""Many threads and processes on one store: everything adds up, nothing is undone, nobody waits for ever."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from helpers import TableEmbeddings, document
from load_worker import (
    CHURNED,
    DECLINED,
    DOCUMENTS,
    KEPT,
    PARTS,
    PATIENCE,
    STEADY,
    USERS,
    LoadProcesses,
    Place,
    content,
    make_place,
    open_retriever,
    open_store,
    prepare,
    versions_in,
    work,
)
from scenarios import POD_QUESTION, USER, World, cached, texts, topics

from rag_wiki import DocumentRemovedError, DocumentState, RagWikiRetriever, StateStore
from rag_wiki.storage.chunk_places import DocumentFolder, PendingFile

PROCESSES = 4


@pytest.fixture(params=["sqlite", "postgres", "valkey", "valkey+disk"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """An empty place of each kind that several processes can share."""
    return make_place(request.param, request, tmp_path)


@pytest.fixture
def store(place: Place) -> Iterator[StateStore]:
    """A store over the place, as one more process has it."""
    with open_store(place.url) as store:
        yield store


@pytest.fixture(scope="module")
def processes() -> Iterator[LoadProcesses]:
    """Starts processes that work at the same moment."""
    if not hasattr(os, "fork"):
        pytest.skip("its processes are forks")
    with LoadProcesses() as processes:
        yield processes


# -- everything at once --------------------------------------------------------------------------------


Run = Callable[[Place], list[dict[str, Any]]]


@pytest.fixture(params=["threads", "processes"])
def run(request: pytest.FixtureRequest) -> Run:
    """Works on a place in eight threads, of this process or of four others; tells the tallies."""
    if request.param == "threads":
        return lambda place: [work(place.url, place.folder, threads=8, seed=1)]
    processes: LoadProcesses = request.getfixturevalue("processes")

    def run_in_processes(place: Place) -> list[dict[str, Any]]:
        processes.go("work", place.url, place.folder, PROCESSES)
        return processes.results()

    return run_in_processes


def test_everything_adds_up(place: Place, run: Run) -> None:
    """Counts are exact, histories without a gap, suggestions come once, and copies are whole or not there."""
    prepare(place.url, place.folder)

    tallies = run(place)

    assert [error for tally in tallies for error in tally["errors"]] == []
    did = sum((Counter(tally["counts"]) for tally in tallies), Counter[str]())
    # It was not the quiet of a run that did nothing.
    assert all(did[f"done {name}"] for name in ("accept", "remove", "pin", "decline", "up", "down"))
    assert did["decay"]
    with open_store(place.url) as store:
        for user in USERS:
            check_counts(store, user, did)
            check_records(store, place, user, did)


def check_counts(store: StateStore, user: str, did: Counter[str]) -> None:
    """Every query was counted once, for every document that it returned."""
    # Each user had met everything once before.
    assert store.begin_query(user, 10**6, 10**6).clocks.queries == did[f"queries {user}"] + 1
    records = {doc_id: store.get(user, doc_id) for doc_id in DOCUMENTS}
    for doc_id in (STEADY, DECLINED, KEPT):
        record = records[doc_id]
        assert record is not None
        assert record.fetch_count == did[f"returned {user} {doc_id}"] + 1
    declined = records[DECLINED]
    assert declined is not None
    pending = declined.user_state is DocumentState.SUGGESTED
    assert did[f"suggested {user} {STEADY}"] == 1
    assert did[f"suggested {user} {DECLINED}"] == declined.decline_count + pending


def check_records(store: StateStore, place: Place, user: str, did: Counter[str]) -> None:
    """Each step began where the one before it ended, and copies are those that the records name."""
    retriever = open_retriever(store, place.folder)
    chunks = retriever.chunk_store
    saved = []
    for doc_id in DOCUMENTS:
        record, history = store.get(user, doc_id), store.history(user, doc_id)
        assert record is not None
        assert [event.from_state for event in history[1:]] == [event.to_state for event in history[:-1]]
        assert history[-1].to_state is record.user_state
        assert sum(event.what == "suggested" for event in history) == did[f"suggested {user} {doc_id}"]
        copies = chunks.place.copies(user, doc_id)
        found = cached(retriever.invoke(doc_id, user_id=user))
        answers = [item.page_content for item in found if item.metadata["doc_id"] == doc_id]
        if record.saved:
            assert record.full_content is not None
            (version,) = versions_in(record.full_content)
            assert record.full_content == content(doc_id, version)
            assert (answers, copies) == ([content(doc_id, version)], [record.copy_id])
            saved.append(record.full_content)
        else:
            assert (record.full_content, answers, copies) == (None, [], [])
    if place.folder:
        assert place.readable(user) == sorted(saved)
    hits = {chunk["hit_count"] for chunk in chunks.load_chunks(user, KEPT)}
    # And once more just now.
    assert hits == {did[f"answered {user} {KEPT}"] + 1}


# -- removals stand ------------------------------------------------------------------------------------


def test_a_removal_wins_over_saves_in_other_processes(
    place: Place, store: StateStore, processes: LoadProcesses, tmp_path: Path
) -> None:
    """Removed while four processes embed it for saving or pinning, a document stays removed, with all of its text."""
    prepare(place.url, place.folder)
    user, removed = USERS[0], CHURNED[:2]
    retriever = open_retriever(store, place.folder)
    gate = str(tmp_path / "gate")
    os.mkfifo(gate)
    processes.go("save_late", place.url, place.folder, PROCESSES, gate)
    for _ in range(PROCESSES * len(removed)):
        processes.expect("embedding")
    for doc_id in removed:
        retriever.force_remove(doc_id, user_id=user)
    opened = os.open(gate, os.O_WRONLY)
    told = processes.results()
    os.close(opened)

    assert told == [["DocumentRemovedError"] * len(removed)] * PROCESSES
    for doc_id in removed:
        record = store.get(user, doc_id)
        assert record is not None
        assert (record.user_state, record.full_content) == (DocumentState.DEMOTED, None)
        assert retriever.chunk_store.place.copies(user, doc_id) == []
    assert cached(retriever.invoke(" ".join(removed), user_id=user)) == []
    assert place.readable(user) == ([content(KEPT, 0)] if place.folder else [])


class Gate(TableEmbeddings):
    """Holds up whoever embeds a text that begins with `late`."""

    def __init__(self) -> None:
        super().__init__(topics().table)
        self.reached, self.open = threading.Event(), threading.Event()

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """The vectors of texts."""
        if texts[0].startswith("late"):
            self.reached.set()
            assert self.open.wait(PATIENCE)
        return super().embed_documents(texts)


def test_no_readable_copy_outlives_its_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two saves and a removal overlap at the moment when files are put in place: the removed text is in no file."""
    world = World()
    retriever = world.retriever(wiki_save_dir=tmp_path)
    world.shows(document("pods", "Pods"))
    retriever.invoke(POD_QUESTION)
    finish, finished = PendingFile.finish, list[PendingFile]()

    def finish_late(pending: PendingFile) -> None:
        finished.append(pending)
        if len(finished) == 1:
            retriever.refresh("pods", "Pods, refreshed")
        elif len(finished) == 3:
            # The first save saw that it was overtaken, and is about to write what the second one saved.
            retriever.force_remove("pods")
        finish(pending)

    monkeypatch.setattr(PendingFile, "finish", finish_late)
    retriever.accept_suggestion("pods", "Pods")
    assert world.state("pods") is DocumentState.DEMOTED
    assert DocumentFolder(tmp_path).count(USER) == 0


def test_a_save_that_comes_too_late_leaves_no_folder(tmp_path: Path) -> None:
    """A user who is forgotten during a save leaves nothing in the folder: its folders are named after the user."""
    model = Gate()
    world = World(embeddings=model)
    world.shows(document("pods", "Pods"))
    retriever = world.retriever(wiki_save_dir=tmp_path)
    retriever.invoke(POD_QUESTION)
    with ThreadPoolExecutor(1) as pool:
        saving = pool.submit(retriever.accept_suggestion, "pods", "late: what was known of Pods")
        assert model.reached.wait(PATIENCE)
        retriever.forget_user()
        model.open.set()
        with pytest.raises(DocumentRemovedError):
            saving.result(PATIENCE)
    assert list(tmp_path.rglob("*")) == []


# -- queries beside saves ------------------------------------------------------------------------------


def test_two_retrievers_see_each_others_work(place: Place, store: StateStore) -> None:
    """What one saves, refreshes, pins or removes, the next query of the other goes by, both with warm indexes."""
    prepare(place.url, place.folder)
    user, doc_id = USERS[0], CHURNED[0]
    with open_store(place.url) as other:
        pair = [open_retriever(each, place.folder) for each in (store, other)]

        def answers(retriever: RagWikiRetriever, question: str = doc_id) -> list[str]:
            found = retriever.invoke_with_provenance(question, user_id=user)
            assert found.provenance.degraded == ()
            return sorted(texts(cached(found.documents)))

        for number in range(6):
            one, two = pair if number % 2 else pair[::-1]
            one.accept_suggestion(doc_id, content(doc_id, number), user_id=user)
            assert answers(two) == answers(one) == [content(doc_id, number)]
            two.refresh(doc_id, content(doc_id, 100 + number), user_id=user)
            assert answers(one) == answers(two) == [content(doc_id, 100 + number)]
            two.force_pin(doc_id, user_id=user)
            assert len(answers(one, KEPT)) == len(answers(two, KEPT)) == 2
            one.force_remove(doc_id, user_id=user)
            assert answers(two) == answers(one) == []
        assert answers(pair[0], KEPT) == [content(KEPT, 0)]
        assert content(KEPT, 0).count("part") == PARTS
