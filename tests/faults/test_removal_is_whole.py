"""Removing takes every trace of one document of one user, wherever it lies, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from helpers import document
from places import PlacedWorld, make_world
from scenarios import POD_QUESTION, PODS, USER, Paragraphs, World, cached, doc_ids, texts

from rag_wiki import DecayConfig, DocumentState, RagWikiRetriever, StateStore

MANY = 150
RECIPE = "Pods keep the recipe for walnut bread."
"""Nothing but the removed copy holds these words."""


def files_with(folder: Path | None, text: str) -> list[str]:
    """The files below a folder that hold a text in whatever form."""
    if folder is None:
        return []
    needles = {text.encode(), json.dumps(text)[1:-1].encode()}
    found = [path for path in folder.rglob("*") if path.is_file()]
    return sorted(path.name for path in found if any(needle in path.read_bytes() for needle in needles))


def stored(world: PlacedWorld, retriever: RagWikiRetriever, doc_id: str, user_id: str = USER) -> list[object]:
    """Everything that is kept of a document's text."""
    store, chunks = world.store, retriever.chunk_store
    record = store.get(user_id, doc_id)
    return [
        *([] if record is None or record.full_content is None else [record.full_content]),
        *store.retrieved_texts(user_id, doc_id),
        *chunks.place.copies(user_id, doc_id),
        *chunks.load_chunks(user_id, doc_id),
    ]


def removed_everywhere(world: PlacedWorld, *retrievers: RagWikiRetriever) -> None:
    """The document is in no answer, list, file or store, by any of these retrievers or a new process."""
    fresh = world.reopened().retriever()
    for asked in (*retrievers, fresh):
        documents, provenance = asked.invoke_with_provenance(POD_QUESTION)
        assert RECIPE not in "".join(texts(documents))
        assert "pods" not in doc_ids(documents)
        assert "pods" not in [source.doc_id for source in provenance.sources]
        saved = asked.documents([DocumentState.CLAIMED, DocumentState.PINNED])
        assert "pods" not in [record.doc_id for record in saved]
        assert stored(world, asked, "pods") == []
    assert files_with(world.folder, RECIPE) == []


def after_much_use(retriever: RagWikiRetriever) -> object:
    """Removal through the engine that a scheduler has, of a document that was refreshed, pinned and read whole."""
    retriever.refresh("pods", full_content=f"{RECIPE} For {USER}.\n\nPods again")
    retriever.set_always_full_doc("pods")
    retriever.force_pin("pods")
    retriever.thumbs_up("pods")
    assert len(retriever.invoke(POD_QUESTION)) == 1
    return retriever.decay_engine.force_remove(USER, "pods")


REMOVALS: dict[str, Callable[[RagWikiRetriever], object]] = {
    "by the user": lambda retriever: retriever.force_remove("pods"),
    "by the engine after much use": after_much_use,
}


@pytest.mark.parametrize("removal", REMOVALS)
def test_removing_takes_every_copy_of_the_text(world: PlacedWorld, removal: str) -> None:
    """After removal the text is in no result, list, folder or store, here, in a running retriever, or after restart."""
    retriever, other_worker = world.retriever(text_splitter=Paragraphs()), world.reopened().retriever()
    for user_id in (USER, "bob"):
        world.save(retriever, "pods", f"{RECIPE} For {user_id}.", user_id=user_id)
        world.save(retriever, "images", "Images are read only.", user_id=user_id)
    for asked in (retriever, other_worker):
        assert texts(asked.invoke(POD_QUESTION)) == [f"{RECIPE} For {USER}."]
    bobs = (world.store.get("bob", "pods"), retriever.chunk_store.load_chunks("bob", "pods"))
    assert len(files_with(world.folder, f"{RECIPE} For bob.")) == (2 if world.folder else 0)

    REMOVALS[removal](retriever)

    assert world.state("pods") is DocumentState.DEMOTED
    for asked in (retriever, other_worker, world.reopened().retriever()):
        assert asked.invoke(POD_QUESTION) == []
        assert doc_ids(cached(asked.invoke("what about images?"))) == ["images"]
        assert [record.doc_id for record in asked.documents(DocumentState.CLAIMED)] == ["images"]
        assert stored(world, asked, "pods") == []
    assert files_with(world.folder, f"{RECIPE} For {USER}.") == []
    # And nothing of bob's.
    assert (world.store.get("bob", "pods"), retriever.chunk_store.load_chunks("bob", "pods")) == bobs
    assert len(files_with(world.folder, f"{RECIPE} For bob.")) == (2 if world.folder else 0)
    for asked in (retriever, other_worker, world.reopened().retriever()):
        assert texts(asked.invoke(POD_QUESTION, user_id="bob")) == [f"{RECIPE} For bob."]


def test_removing_what_was_only_suggested_takes_its_retrieved_texts(world: PlacedWorld) -> None:
    """A document that was never saved leaves no retrieved text behind, and cannot be saved from one."""
    retriever = world.retriever()
    world.shows(document("pods", RECIPE))
    for _ in range(3):
        retriever.invoke(POD_QUESTION)
    assert [text.text for text in world.store.retrieved_texts(USER, "pods")] == [RECIPE]
    world.shows()
    retriever.force_remove("pods")
    removed_everywhere(world, retriever)
    assert world.record("pods").retrieved_chars == 0
    with pytest.raises(LookupError):
        retriever.force_pin("pods")
    removed_everywhere(world, retriever)


def test_removing_twice_is_no_error(world: PlacedWorld) -> None:
    """Again, also by another worker, removing changes nothing more."""
    retriever, other_worker = world.retriever(), world.reopened().retriever()
    world.save(retriever, "pods", RECIPE)
    assert doc_ids(other_worker.invoke(POD_QUESTION)) == ["pods"]
    once = retriever.force_remove("pods")
    history = retriever.history("pods")
    assert retriever.force_remove("pods").user_state is DocumentState.DEMOTED
    assert other_worker.force_remove("pods").user_state is DocumentState.DEMOTED
    assert world.record("pods") == once
    assert retriever.history("pods") == history
    removed_everywhere(world, retriever, other_worker)


def test_letting_go_takes_the_text_as_well(world: PlacedWorld) -> None:
    """What decay, or too many misses, lets go is gone from everywhere as if the user had removed it."""
    config = DecayConfig(demotion_hold_days=0, demotion_threshold=0.5, max_cache_miss_streak=2)
    retriever, other_worker = world.retriever(decay=config), world.reopened().retriever(decay=config)
    world.save(retriever, "pods", RECIPE)
    assert doc_ids(other_worker.invoke(POD_QUESTION)) == ["pods"]
    world.clock.turn(days=200)
    assert [result.transitioned for result in other_worker.run_decay()] == [True]
    removed_everywhere(world, retriever, other_worker)

    world.save(retriever, "pods", RECIPE)
    assert doc_ids(other_worker.invoke(POD_QUESTION)) == ["pods"]
    for _ in range(3):
        other_worker.invoke("what about tax?")
    assert world.state("pods") is DocumentState.DEMOTED
    removed_everywhere(world, retriever, other_worker)


@pytest.mark.parametrize("kind", ["memory+disk", "sqlite", "valkey"])
def test_all_of_very_many_go_at_once(make_store: Callable[[str], StateStore], tmp_path: Path, kind: str) -> None:
    """Of 150 saved documents, all are removed in one go and none is left; another user keeps theirs."""
    world = make_world(kind, make_store, tmp_path)
    retriever, other_worker = world.retriever(), world.reopened().retriever()
    world.shows(*(document(f"pods {number}", f"{RECIPE} {number}") for number in range(MANY)))
    retriever.invoke("an introduction")
    world.shows()
    for number in range(MANY):
        retriever.accept_suggestion(f"pods {number}")
    world.save(retriever, "pods 1", PODS, user_id="bob")
    assert len(other_worker.invoke(POD_QUESTION)) == MANY

    saved = [record.doc_id for record in retriever.documents(DocumentState.CLAIMED)]
    assert len(saved) == MANY
    for doc_id in saved:
        retriever.force_remove(doc_id)

    for asked in (retriever, other_worker, world.reopened().retriever()):
        assert asked.invoke(POD_QUESTION) == []
        assert asked.documents([DocumentState.CLAIMED, DocumentState.PINNED]) == []
        assert asked.stats().states["DEMOTED"] == MANY
        assert asked.stats().chunks == 0
        assert texts(asked.invoke(POD_QUESTION, user_id="bob")) == [PODS]
    assert files_with(world.folder, RECIPE) == []
    assert world.store.list_active_users() == ["bob"]


def test_forgetting_a_user_takes_all_of_theirs_and_no_more(world: PlacedWorld) -> None:
    """`forget_user` leaves no record, history, text, chunk or file of the user, in any worker, and counts them."""
    retriever, other_worker = world.retriever(), world.reopened().retriever()
    for user_id in (USER, "bob"):
        for number in range(12):
            world.save(retriever, f"pods {number}", f"{RECIPE} {number} {user_id}", user_id=user_id)
    world.shows(document("new", f"{RECIPE} {USER}"))
    retriever.invoke("an introduction")
    world.shows()
    assert len(other_worker.invoke(POD_QUESTION)) == 12

    forgotten = retriever.forget_user()

    assert (forgotten.documents, forgotten.chunks, forgotten.retrieved_texts) == (13, 12, 1)
    assert forgotten.files == (12 if world.folder else 0)
    for asked in (retriever, other_worker, world.reopened().retriever()):
        assert asked.invoke(POD_QUESTION) == []
        assert asked.documents() == []
        assert len(asked.invoke(POD_QUESTION, user_id="bob")) == 12
    assert files_with(world.folder, f" {USER}") == []
    assert len(files_with(world.folder, " bob")) == (24 if world.folder else 0)
    assert retriever.forget_user().documents == 0


HOSTILE = ["pods", "Pods", "pods*", "pods?", "[a-z]ods", "pods%", "p_ds", "pods/../pods", "pods:pods", "pods\0"]


def test_an_id_is_no_pattern(world: PlacedWorld) -> None:
    """Removing one of many ids that look like patterns of each other removes that one alone."""
    retriever = world.retriever()
    left = list(HOSTILE)
    for doc_id in HOSTILE:
        world.save(retriever, doc_id, f"Pods by the name of {doc_id!r}.")
    for doc_id in ("pods*", "pods%", "[a-z]ods", "p_ds", "pods"):
        retriever.force_remove(doc_id)
        left.remove(doc_id)
        for asked in (retriever, world.reopened().retriever()):
            assert sorted(str(found) for found in doc_ids(asked.invoke(POD_QUESTION))) == sorted(left)


def test_a_removed_document_may_come_back_as_another() -> None:
    """Saved again with other text after its removal, a document answers with the new text alone."""
    world = World()
    retriever = world.retriever(text_splitter=Paragraphs())
    world.save(retriever, "pods", f"{RECIPE}\n\nPods two\n\nPods three")
    retriever.force_remove("pods")
    world.save(retriever, "pods", PODS)
    assert texts(retriever.invoke(POD_QUESTION)) == [PODS]
    assert retriever.stats().chunks == 1
    assert len(retriever.chunk_store.place.copies(USER, "pods")) == 1


READS = {"vectors": False, "texts": True}
"""What of the copies is read, and the keyword that asks for it."""


@pytest.mark.parametrize("read", READS)
def test_what_is_removed_while_it_is_read_is_not_called_lost(
    world: PlacedWorld, monkeypatch: pytest.MonkeyPatch, read: str
) -> None:
    """A query that overlaps with a removal by another worker finds nothing, and says nothing of a loss."""
    world.save(world.retriever(), "pods", RECIPE)
    here, there = world.reopened().retriever(), world.retriever()
    with acting_before_reading(monkeypatch, here, read, lambda: there.force_remove("pods")):
        documents, provenance = here.invoke_with_provenance(POD_QUESTION)
    assert world.state("pods") is DocumentState.DEMOTED
    assert documents == []
    assert (provenance.degraded, provenance.withheld) == ((), ())


@pytest.mark.parametrize("read", READS)
def test_what_is_replaced_while_it_is_read_answers(
    world: PlacedWorld, monkeypatch: pytest.MonkeyPatch, read: str
) -> None:
    """A query that overlaps with a refresh by another worker is answered by the old copy or the new one."""
    world.save(world.retriever(), "pods", RECIPE)
    here, there = world.reopened().retriever(), world.retriever()
    with acting_before_reading(monkeypatch, here, read, lambda: there.refresh("pods", full_content=PODS)):
        documents, provenance = here.invoke_with_provenance(POD_QUESTION)
    assert texts(documents) in ([RECIPE], [PODS])
    assert (provenance.degraded, provenance.withheld) == ((), ())


@contextmanager
def acting_before_reading(
    monkeypatch: pytest.MonkeyPatch, reader: RagWikiRetriever, read: str, act: Callable[[], object]
) -> Iterator[None]:
    """Do something just after the reader learned what is saved, and before it reads this of it."""
    chunks, done = reader.chunk_store, list[object]()
    load = chunks.load_copies

    def act_first(*arguments: Any, **options: Any) -> Any:
        if not done and options.get("texts", False) is READS[read]:
            done.append(None)
            act()
        return load(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(chunks, "load_copies", act_first)
        yield
    assert done
