"""What was removed stays removed, whatever was under way at the time."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from helpers import START, ListRetriever, TableEmbeddings, document
from langchain_core.callbacks import CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from places import PlacedWorld
from pydantic import PrivateAttr
from scenarios import OTHER_QUESTION, POD_QUESTION, PODS, USER, World, cached, story, texts, topics

from rag_wiki import DecayConfig, DocumentRemovedError, DocumentState, RagWikiRetriever

CLAIMED, DEMOTED, PINNED, SURFACED = (
    DocumentState.CLAIMED,
    DocumentState.DEMOTED,
    DocumentState.PINNED,
    DocumentState.SURFACED,
)
EACH_STORE = ("memory", "sqlite", "postgres", "valkey")
"""Places where it matters how the state is kept, and not where the chunks lie."""
PATIENCE = 30.0
"""Seconds after which a wait is a failure; no test that passes waits for long."""
LATE = "Pods, as somebody was still saving them."
NEWER = "Pods, as they were saved afterwards."


class SlowEmbeddings(TableEmbeddings):
    """Takes its time over one text: until it is told to go on."""

    def __init__(self, slow_text: str = LATE) -> None:
        super().__init__(topics().table)
        self.slow_text = slow_text
        self.begun, self.go_on = threading.Event(), threading.Event()

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        if self.slow_text in texts:
            self.begun.set()
            assert self.go_on.wait(PATIENCE), "nobody let the model go on"
        return super().embed_documents(texts)


@contextmanager
def under_way(model: SlowEmbeddings, save: Callable[[], Any]) -> Iterator[Callable[[], Any]]:
    """A save that is embedding while the block runs; what is given ends it, and returns what it came to."""
    with ThreadPoolExecutor(1) as pool:
        saving = pool.submit(save)
        try:
            assert model.begun.wait(PATIENCE)

            def finish() -> Any:
                model.go_on.set()
                return saving.result(PATIENCE)

            yield finish
        finally:
            model.go_on.set()


def met(world: World, **settings: Any) -> RagWikiRetriever:
    """A retriever whose user met the document about pods."""
    retriever = world.retriever(**settings)
    world.shows(document("pods", PODS))
    retriever.invoke(POD_QUESTION)
    world.shows()
    return retriever


def written(folder: Path | None) -> bytes:
    """All that is in files below a folder."""
    return b"" if folder is None else b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


def assert_gone(world: PlacedWorld, retriever: RagWikiRetriever, *, state: DocumentState = DEMOTED) -> None:
    """Nothing of the document is saved or served, here and in a process that comes later."""
    for seen in (retriever, world.reopened().retriever()):
        record = seen.state_store.get(USER, "pods")
        assert record is not None
        assert (record.user_state, record.full_content, record.copy_id) == (state, None, None)
        assert seen.chunk_store.load_chunks(USER, "pods") == []
        assert seen.chunk_store.place.copies(USER, "pods") == []
        assert seen.invoke(POD_QUESTION) == []
    assert LATE.encode() not in written(world.folder)


@pytest.mark.parametrize("before", ["met", "saved"])
def test_a_save_that_ends_after_the_removal_saves_nothing(world: PlacedWorld, before: str) -> None:
    """Another worker removes the document while its text is embedded: the save fails and says why, nothing is left."""
    model = SlowEmbeddings()
    world.embeddings = model
    retriever = met(world)
    if before == "saved":
        retriever.accept_suggestion("pods", full_content=PODS)
    with under_way(model, lambda: retriever.accept_suggestion("pods", full_content=LATE)) as finish:
        world.reopened().retriever().force_remove("pods")
        with pytest.raises(DocumentRemovedError, match=r"'pods'.*'ada'"):
            finish()
    assert_gone(world, retriever)
    removed = ("removed", before == "saved")
    assert (retriever.history("pods")[-1].what, retriever.history("pods")[-1].from_state is CLAIMED) == removed


SAVES: dict[str, Callable[[RagWikiRetriever], Any]] = {
    "accept": lambda retriever: retriever.accept_suggestion("pods"),
    "accept, awaited": lambda retriever: asyncio.run(retriever.aaccept_suggestion("pods")),
    "pin": lambda retriever: retriever.force_pin("pods"),
    "refresh": lambda retriever: retriever.refresh("pods"),
    "embed anew": lambda retriever: retriever.reindex(),
}


@pytest.mark.parametrize("way", SAVES)
def test_whatever_saves_gives_way_to_a_removal(way: str) -> None:
    """Accepting, pinning, refreshing and embedding anew all leave the document removed."""
    model = SlowEmbeddings()
    world = World(embeddings=model)
    retriever = met(world, document_loader=lambda record: LATE)
    if way in ("refresh", "embed anew"):
        model.go_on.set()
        retriever.accept_suggestion("pods", full_content=LATE)
        model.go_on.clear()
        model.begun.clear()
    if way == "embed anew":
        retriever = world.retriever(embedding_name="another model")
    with under_way(model, lambda: SAVES[way](retriever)) as finish:
        retriever.force_remove("pods")
        if way == "embed anew":
            # It is about all saved documents: one that is not saved any more ends nothing.
            assert finish() == []
        else:
            with pytest.raises(DocumentRemovedError):
                finish()
    assert world.state("pods") is DEMOTED
    assert retriever.chunk_store.place.copies(USER, "pods") == []
    assert retriever.invoke(POD_QUESTION) == []


def test_saving_by_itself_gives_way_to_a_removal() -> None:
    """With `auto_save` the query that saves still answers, and the document stays removed."""
    model = SlowEmbeddings(PODS)
    world = World(embeddings=model)
    world.shows(document("pods", PODS))
    retriever = world.retriever(auto_save=True, fetch_threshold=1)
    with under_way(model, lambda: retriever.invoke_with_provenance(POD_QUESTION)) as finish:
        retriever.force_remove("pods")
        documents, provenance = finish()
    assert texts(documents) == [PODS]
    assert provenance.degraded == ("document 'pods' could not be saved (DocumentRemovedError)",)
    assert world.state("pods") is DEMOTED
    assert retriever.chunk_store.place.copies(USER, "pods") == []


@pytest.mark.parametrize("turn", ["pins", "demotes", "scores"])
def test_a_decay_run_that_ends_after_the_removal_changes_nothing(
    world: PlacedWorld, monkeypatch: pytest.MonkeyPatch, turn: str
) -> None:
    """A run read the document as saved, and writes after it was removed: it stays removed."""
    decay = DecayConfig(
        w_recency=1, w_frequency=0, w_explicit=0, w_chunk_hit=0, pin_hold_days=0.001, demotion_hold_days=0.001
    )
    retriever = met(world, decay=decay)
    retriever.accept_suggestion("pods", full_content=LATE)
    world.clock.turn(days={"pins": 0, "demotes": 100, "scores": 10}[turn])
    retriever.run_decay()
    world.clock.turn(hours=1)
    read = retriever.chunk_store.hit_rates

    def removed_meanwhile(*arguments: Any) -> dict[str, float]:
        monkeypatch.undo()
        rates = read(*arguments)
        world.reopened().retriever(decay=decay).force_remove("pods")
        return rates

    # The run has read its page by then, and decides afterwards.
    monkeypatch.setattr(retriever.chunk_store, "hit_rates", removed_meanwhile)
    assert retriever.run_decay() == []
    assert_gone(world, retriever)
    assert story(retriever.history("pods"))[-1] == ("removed", "CLAIMED", "DEMOTED")


class RemovingRetriever(ListRetriever):
    """Does something to the user's documents while it is asked."""

    _meanwhile: list[Callable[[], Any]] = PrivateAttr(default_factory=list)

    def next_time(self, action: Callable[[], Any]) -> None:
        """Do this the next time."""
        self._meanwhile.append(action)

    def _get_relevant_documents(self, query: str, *, run_manager: CallbackManagerForRetrieverRun) -> list[Document]:
        while self._meanwhile:
            self._meanwhile.pop()()
        return super()._get_relevant_documents(query, run_manager=run_manager)


@pytest.mark.parametrize("awaiting", [False, True])
async def test_a_query_that_ends_after_the_removal_does_not_bring_it_back(world: PlacedWorld, awaiting: bool) -> None:
    """A query that began before a removal, and whose copy may still answer it, counts nothing for the removed copy."""
    source = RemovingRetriever()
    world.source = source
    retriever = met(world)
    retriever.accept_suggestion("pods", full_content=LATE)
    retriever.invoke(POD_QUESTION)
    source.next_time(lambda: world.reopened().retriever().force_remove("pods"))
    if awaiting:
        await retriever.ainvoke(POD_QUESTION)
    else:
        retriever.invoke(POD_QUESTION)
    assert_gone(world, retriever)
    assert world.record("pods").fetch_count == 0
    assert story(retriever.history("pods"))[-1] == ("removed", "CLAIMED", "DEMOTED")


@pytest.mark.parametrize("awaiting", [False, True])
@pytest.mark.parametrize("world", EACH_STORE, indirect=True)
async def test_a_query_that_ends_after_its_user_was_forgotten_leaves_no_trace(
    world: PlacedWorld, awaiting: bool
) -> None:
    """Forgotten while a query is being answered, the user has no record, no history and no retrieved text after it."""
    source = RemovingRetriever()
    world.source = source
    retriever = met(world)
    world.shows(document("pods", PODS))
    source.next_time(lambda: world.reopened().retriever().forget_user())
    if awaiting:
        assert texts(await retriever.ainvoke(POD_QUESTION)) == [PODS]
    else:
        assert texts(retriever.invoke(POD_QUESTION)) == [PODS]
    assert retriever.documents() == []
    assert world.store.history(USER, "pods") == []
    assert world.store.retrieved_texts(USER, "pods") == []
    assert retriever.forget_user().documents == 0


@pytest.mark.parametrize("world", EACH_STORE, indirect=True)
def test_a_query_that_began_before_the_removal_is_no_fetch_after_it(world: PlacedWorld) -> None:
    """The source found the document before it was removed: that does not bring back its count or its text."""
    source = RemovingRetriever()
    world.source = source
    retriever = met(world)
    world.shows(document("pods", PODS))

    def remove() -> None:
        world.clock.turn(minutes=1)
        world.reopened().retriever().force_remove("pods")

    source.next_time(remove)
    assert texts(retriever.invoke(POD_QUESTION)) == [PODS]
    assert (world.state("pods"), world.record("pods").fetch_count) == (DEMOTED, 0)
    assert world.store.retrieved_texts(USER, "pods") == []
    # A question that is asked afterwards is another matter.
    world.clock.turn(minutes=1)
    retriever.invoke(POD_QUESTION)
    assert (world.state("pods"), world.record("pods").fetch_count) == (SURFACED, 1)


def test_a_vote_that_ends_after_the_removal_does_not_bring_it_back(
    world: PlacedWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A vote read the document as saved, and is written after it was removed: it is noted, and nothing more."""
    retriever = met(world)
    retriever.accept_suggestion("pods", full_content=LATE)
    read = retriever.chunk_store.hit_rates

    def removed_meanwhile(*arguments: Any) -> dict[str, float]:
        monkeypatch.undo()
        rates = read(*arguments)
        world.reopened().retriever().force_remove("pods")
        return rates

    monkeypatch.setattr(retriever.chunk_store, "hit_rates", removed_meanwhile)
    assert retriever.thumbs_up("pods").explicit_signal == 1.0
    assert_gone(world, retriever)


def test_a_removal_whose_write_fails_has_removed_nothing(world: PlacedWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store fails while the record is moved: the caller is told, and record and copy are both still there."""
    retriever = met(world)
    retriever.accept_suggestion("pods", full_content=LATE)

    def fail(*arguments: Any, **named: Any) -> Any:
        message = "the store is down"
        raise ConnectionError(message)

    with monkeypatch.context() as patched:
        patched.setattr(world.store, "change", fail)
        with pytest.raises(ConnectionError, match="the store is down"):
            retriever.force_remove("pods")
    for seen in (retriever, world.reopened().retriever()):
        assert world.state("pods") is CLAIMED
        assert texts(cached(seen.invoke(POD_QUESTION))) == [LATE]
    retriever.force_remove("pods")
    assert_gone(world, retriever)


def test_a_removal_that_leaves_chunks_behind_says_so_and_serves_none(
    world: PlacedWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The chunks can't be deleted: the caller is told, none of them answers, and removing again removes them."""
    retriever = met(world)
    retriever.accept_suggestion("pods", full_content=LATE)

    def fail(*arguments: Any, **named: Any) -> Any:
        message = "the disk is read-only"
        raise OSError(message)

    with monkeypatch.context() as patched:
        patched.setattr(retriever.chunk_store.place, "delete", fail)
        with pytest.raises(OSError, match="the disk is read-only"):
            retriever.force_remove("pods")
    for seen in (retriever, world.reopened().retriever()):
        assert (world.state("pods"), world.record("pods").copy_id) == (DEMOTED, None)
        assert seen.invoke(POD_QUESTION) == []
    retriever.force_remove("pods")
    assert_gone(world, retriever)


def test_removing_while_others_save_and_score_ends_in_one_of_two_states(world: PlacedWorld) -> None:
    """Of saves, decay runs and a removal all at once the removal wins, or a save that began after it, wholly."""
    retriever = met(world)
    retriever.accept_suggestion("pods", full_content=PODS)
    begin = threading.Barrier(4, timeout=PATIENCE)

    def save() -> None:
        begin.wait()
        for _ in range(3):
            try:
                retriever.refresh("pods", full_content=NEWER)
            except (DocumentRemovedError, ValueError):
                return

    def score() -> None:
        begin.wait()
        for _ in range(3):
            retriever.run_decay()

    def remove() -> None:
        begin.wait()
        retriever.force_remove("pods")

    with ThreadPoolExecutor(4) as pool:
        for job in [pool.submit(task) for task in (save, save, score, remove)]:
            job.result(PATIENCE)
    # Refreshing needs a saved document, so nothing can follow the removal.
    assert_gone(world, retriever)


# -- the document lives again when a save from its former life ends


def fetched_again(world: World, retriever: RagWikiRetriever) -> None:
    """A query fetches the document some minutes later."""
    world.clock.turn(minutes=5)
    world.shows(document("pods", PODS))
    retriever.invoke(POD_QUESTION)
    world.shows()


def test_a_document_fetched_again_after_its_removal_is_not_saved_by_an_old_save(world: PlacedWorld) -> None:
    """Removed and fetched again while its text is embedded, the document counts anew and is not saved."""
    model = SlowEmbeddings()
    world.embeddings = model
    retriever = met(world)
    with under_way(model, lambda: retriever.accept_suggestion("pods", full_content=LATE)) as finish:
        retriever.force_remove("pods")
        fetched_again(world, retriever)
        with pytest.raises(DocumentRemovedError):
            finish()
    assert_gone(world, retriever, state=SURFACED)
    assert world.record("pods").fetch_count == 1


@pytest.mark.parametrize("under_way_is", ["a save", "a decay run"])
def test_a_user_who_was_forgotten_stays_forgotten(
    world: PlacedWorld, monkeypatch: pytest.MonkeyPatch, under_way_is: str
) -> None:
    """Forgotten while a text is embedded, or a decay run is under way, a user leaves no record, chunk or file."""
    model = SlowEmbeddings()
    world.embeddings = model
    retriever = met(world)
    retriever.accept_suggestion("pods", full_content=PODS)

    def forget() -> None:
        world.reopened().retriever().forget_user()

    if under_way_is == "a save":
        with under_way(model, lambda: retriever.refresh("pods", full_content=LATE)) as finish:
            forget()
            with pytest.raises(DocumentRemovedError):
                finish()
    else:
        world.clock.turn(days=100)
        read = retriever.chunk_store.hit_rates

        def forgotten_meanwhile(*arguments: Any) -> dict[str, float]:
            monkeypatch.undo()
            rates = read(*arguments)
            forget()
            return rates

        monkeypatch.setattr(retriever.chunk_store, "hit_rates", forgotten_meanwhile)
        assert retriever.run_decay() == []
    for seen in (retriever, world.reopened().retriever()):
        assert seen.documents() == []
        assert seen.state_store.history(USER, "pods") == []
        assert seen.state_store.list_active_users() == []
        assert seen.chunk_store.place.copies(USER, "pods") == []
    assert written(world.folder) == b""


@pytest.mark.parametrize("way", ["forget the user", "delete the record"])
@pytest.mark.parametrize("world", EACH_STORE, indirect=True)
def test_a_user_who_was_forgotten_gets_no_copy_from_an_old_save(world: PlacedWorld, way: str) -> None:
    """Forgotten while a text is embedded, a user whose next query fetches the document has nothing saved."""
    model = SlowEmbeddings()
    world.embeddings = model
    retriever = met(world)
    with under_way(model, lambda: retriever.accept_suggestion("pods", full_content=LATE)) as finish:
        if way == "forget the user":
            retriever.forget_user()
        else:
            world.store.delete(USER, "pods")
        fetched_again(world, retriever)
        with pytest.raises(DocumentRemovedError):
            finish()
    assert_gone(world, retriever, state=SURFACED)


@pytest.mark.parametrize("world", EACH_STORE, indirect=True)
def test_an_old_save_does_not_replace_what_was_saved_after_the_removal(world: PlacedWorld) -> None:
    """Removed and saved anew while an older save is embedding, the document keeps the newer text."""
    model = SlowEmbeddings()
    world.embeddings = model
    retriever = met(world)
    retriever.accept_suggestion("pods", full_content=PODS)
    with under_way(model, lambda: retriever.refresh("pods", full_content=LATE)) as finish:
        retriever.force_remove("pods")
        fetched_again(world, retriever)
        retriever.accept_suggestion("pods", full_content=NEWER)
        with pytest.raises(DocumentRemovedError):
            finish()
    assert texts(cached(retriever.invoke(POD_QUESTION))) == [NEWER]


@pytest.mark.parametrize("world", EACH_STORE, indirect=True)
def test_of_two_saves_the_one_that_began_last_counts(world: PlacedWorld) -> None:
    """A refresh with an old text that takes long does not replace the copy of one that began after it."""
    model = SlowEmbeddings()
    world.embeddings = model
    retriever = met(world)
    retriever.accept_suggestion("pods", full_content=PODS)
    with under_way(model, lambda: retriever.refresh("pods", full_content=LATE)) as finish:
        retriever.refresh("pods", full_content=NEWER)
        try:
            finish()
        except DocumentRemovedError:
            pytest.fail("nobody removed it")
    assert texts(cached(retriever.invoke(POD_QUESTION))) == [NEWER]


class MeetingEmbeddings(TableEmbeddings):
    """Embeds documents when two are asking for it."""

    def __init__(self) -> None:
        super().__init__(topics().table)
        self.both = threading.Barrier(2, timeout=PATIENCE)

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        self.both.wait()
        return super().embed_documents(texts)


@pytest.mark.parametrize("way", ["accept", "pin"])
def test_saving_twice_at_once_after_a_removal_long_ago_is_no_removal(way: str) -> None:
    """A double click on a document that was removed before saves it, and neither click is told of a removal."""
    world = World(embeddings=MeetingEmbeddings())
    retriever = met(world, document_loader=lambda record: NEWER)
    retriever.force_remove("pods")
    world.clock.turn(days=40)
    if way == "accept":
        fetched_again(world, retriever)
    save = retriever.accept_suggestion if way == "accept" else retriever.force_pin
    with ThreadPoolExecutor(2) as pool:
        records = list(pool.map(save, ["pods", "pods"]))
    assert [record.user_state for record in records] == [CLAIMED if way == "accept" else PINNED] * 2
    assert len(retriever.chunk_store.place.copies(USER, "pods")) == 1


def test_removing_again_and_again_is_no_error(world: PlacedWorld) -> None:
    """A second removal, also by another worker and after a decay run, leaves one `removed` in the history."""
    retriever = met(world)
    retriever.accept_suggestion("pods", full_content=LATE)
    first = retriever.force_remove("pods")
    retriever.run_decay()
    second = world.reopened().retriever().force_remove("pods")
    assert (first.user_state, second.user_state) == (DEMOTED, DEMOTED)
    assert first.demoted_at == second.demoted_at == START
    retriever.invoke(OTHER_QUESTION)
    assert_gone(world, retriever)
    assert [event.what for event in retriever.history("pods")].count("removed") == 1
