"""A save happens wholly or not at all, whatever fails on the way, and can be done again."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import TableEmbeddings, document
from places import PlacedWorld, make_world
from scenarios import POD_QUESTION, USER, Paragraphs, World, cached, doc_ids, story, texts, topics

from rag_wiki import (
    ChunkStore,
    DocumentState,
    EmbeddingError,
    MemoryStateStore,
    RagWikiRetriever,
    StateStore,
    UserDocRecord,
)
from rag_wiki.storage.chunk_places import MemoryPlace

FIVE = [f"Pods, part {number}" for number in range(5)]
CONTENT = "\n\n".join(FIVE)


class Faulty(TableEmbeddings):
    """Spoils the answer to one batch, by its number, or fails there."""

    def __init__(self) -> None:
        super().__init__(topics().table)
        self.spoil: Callable[[list[list[float]]], list[list[float]]] | None = None
        self.at = 0
        self._batch = 0

    def broken_at(self, batch: int, spoil: Callable[[list[list[float]]], list[list[float]]] | None) -> None:
        """Spoil the answer to this batch from now on; `None` ends it."""
        self._batch, self.at, self.spoil = 0, batch, spoil

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        vectors = super().embed_documents(texts)
        self._batch += 1
        if self.spoil is not None and self._batch == self.at:
            return self.spoil(vectors)
        return vectors


def too_many_requests(_: list[list[float]]) -> list[list[float]]:
    """As a service with a rate limit."""
    raise ConnectionError("429: slow down")


def stop(_: list[list[float]]) -> list[list[float]]:
    """As somebody who presses Ctrl-C."""
    raise KeyboardInterrupt


FAILURES: dict[str, tuple[int, Callable[[Any], Any], type[BaseException]]] = {
    "raises on the second batch": (2, too_many_requests, ConnectionError),
    "one vector short": (2, lambda vectors: vectors[:-1], EmbeddingError),
    "of unequal width": (1, lambda vectors: [vectors[0], vectors[1][:-1]], EmbeddingError),
    "a batch of another width": (3, lambda vectors: [vector[:-1] for vector in vectors], EmbeddingError),
    "is interrupted": (2, stop, KeyboardInterrupt),
}

SAVES: dict[str, Callable[[RagWikiRetriever], Any]] = {
    "accept": lambda retriever: retriever.accept_suggestion("pods", full_content=CONTENT),
    "pin": lambda retriever: retriever.force_pin("pods"),
}


def suggested(world: World, **options: Any) -> RagWikiRetriever:
    """A retriever whose user was just asked about a document; five chunks are embedded two by two."""
    options = {"text_splitter": Paragraphs(), "embedding_batch_size": 2, **options}
    retriever = world.retriever(**options)
    world.shows(*(document("pods", text, chunk_index=number) for number, text in enumerate(FIVE)))
    for _ in range(3):
        retriever.invoke("an introduction")
    world.shows()
    assert world.state("pods") is DocumentState.SUGGESTED
    return retriever


def copies(retriever: RagWikiRetriever, user_id: str = USER) -> list[str]:
    """All stored copies of the document."""
    return retriever.chunk_store.place.copies(user_id, "pods")


def files(world: PlacedWorld) -> list[str]:
    """All files of chunks and readable copies."""
    return [] if world.folder is None else sorted(path.name for path in world.folder.rglob("*") if path.is_file())


def assert_unsaved(world: PlacedWorld, retriever: RagWikiRetriever) -> None:
    """Nothing of the document is saved, seen from here and from another process, and nothing of it answers."""
    assert world.state("pods") is DocumentState.SUGGESTED
    assert world.record("pods").full_content is None
    assert files(world) == []
    for asked in (retriever, world.reopened().retriever(reset_threshold=100)):
        assert copies(asked) == []
        assert asked.invoke(POD_QUESTION) == []
        assert asked.stats().chunks == 0
    assert story(retriever.history("pods"))[-1][0] == "suggested"


def assert_saved_whole(world: PlacedWorld, retriever: RagWikiRetriever, content: str = CONTENT) -> None:
    """The document is saved once, with all of its chunks, seen from here and from another process."""
    assert world.record("pods").saved
    for asked in (retriever, world.reopened().retriever(local_top_k=5)):
        assert [chunk["text"] for chunk in asked.chunk_store.load_chunks(USER, "pods")] == content.split("\n\n")
        assert len(copies(asked)) == 1
        assert doc_ids(cached(asked.invoke(POD_QUESTION))) == ["pods"]


@pytest.mark.parametrize("failure", FAILURES)
def test_a_model_that_fails_saves_nothing(world: PlacedWorld, failure: str) -> None:
    """Whatever the model does, the suggestion stands, no chunk exists or answers, and accepting again works."""
    model = Faulty()
    world.embeddings = model
    retriever = suggested(world, reset_threshold=100)
    at, spoil, error = FAILURES[failure]
    for save in SAVES.values():
        model.broken_at(at, spoil)
        with pytest.raises(error):
            save(retriever)
        model.broken_at(0, None)
        assert_unsaved(world, retriever)
    retriever.accept_suggestion("pods", full_content=CONTENT)
    assert_saved_whole(world, retriever)


@pytest.mark.parametrize("failure", [name for name in FAILURES if name != "is interrupted"])
async def test_an_awaited_save_that_fails_saves_nothing(failure: str) -> None:
    """Awaited, a save that fails leaves the same nothing, and can be done again."""
    model = Faulty()
    world = PlacedWorld(embeddings=model)
    retriever = suggested(world, reset_threshold=100)
    at, spoil, error = FAILURES[failure]
    model.broken_at(at, spoil)
    with pytest.raises(error):
        await retriever.aaccept_suggestion("pods", full_content=CONTENT)
    model.broken_at(0, None)
    assert_unsaved(world, retriever)
    await retriever.aaccept_suggestion("pods", full_content=CONTENT)
    assert_saved_whole(world, retriever)


class LostError(Exception):
    """What a store or a disk raises in these tests."""


def fail(*_: Any, **__: Any) -> Any:
    """Stand in for a part of a store that is away."""
    raise LostError


def failing_once(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method of a store that is away for a moment. While it is, nobody could say whether a save happened."""
    failed: list[None] = []

    def fail_first(*arguments: Any, **options: Any) -> Any:
        if not failed:
            failed.append(None)
            raise LostError
        return method(*arguments, **options)

    return fail_first


@pytest.mark.parametrize("part", ["chunks", "state"])
@pytest.mark.parametrize("save", SAVES)
def test_a_store_that_fails_saves_nothing(
    world: PlacedWorld, monkeypatch: pytest.MonkeyPatch, part: str, save: str
) -> None:
    """When chunks or state can't be written after embedding, no chunk is left over or served, and again works."""
    retriever = suggested(world, reset_threshold=100)
    with monkeypatch.context() as patch:
        if part == "chunks":
            patch.setattr(retriever.chunk_store.place, "write", fail)
        else:
            patch.setattr(world.store, "change", failing_once(world.store.change))
        with pytest.raises(LostError):
            SAVES[save](retriever)
    assert_unsaved(world, retriever)
    SAVES[save](retriever)
    assert_saved_whole(world, retriever)


def test_a_store_that_stays_away_leaves_nothing_that_answers(
    world: PlacedWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nobody knows whether the state moved, chunks may stay, but never answer, and removal takes them."""
    retriever = suggested(world, reset_threshold=100)
    with monkeypatch.context() as patch:
        patch.setattr(world.store, "change", fail)
        with pytest.raises(LostError):
            retriever.accept_suggestion("pods", full_content=CONTENT)
    assert world.state("pods") is DocumentState.SUGGESTED
    for asked in (retriever, world.reopened().retriever(reset_threshold=100)):
        assert asked.invoke(POD_QUESTION) == []
        assert asked.stats().chunks == 0
    retriever.force_remove("pods")
    assert copies(retriever) == []
    assert files(world) == []


def test_a_store_that_fails_within_its_transaction_saves_nothing(
    world: PlacedWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the store gives up just before it commits, all of the change is undone, and the chunks go too."""
    retriever = suggested(world, reset_threshold=100)
    change, called = world.store.change, list[None]()

    def break_off(user_id: str, doc_ids: Any, decide: Any, **options: Any) -> Any:
        called.append(None)
        first = len(called) == 1

        def decide_and_fail(view: Any) -> Any:
            decided = decide(view)
            if first:
                raise LostError
            return decided

        return change(user_id, doc_ids, decide_and_fail, **options)

    with monkeypatch.context() as patch:
        patch.setattr(world.store, "change", break_off)
        with pytest.raises(LostError):
            retriever.accept_suggestion("pods", full_content=CONTENT)
    assert_unsaved(world, retriever)
    retriever.accept_suggestion("pods", full_content=CONTENT)
    assert_saved_whole(world, retriever)


@pytest.mark.parametrize("failure", ["raises on the second batch", "one vector short", "a batch of another width"])
def test_a_refresh_that_fails_keeps_the_copy_as_it_was(world: PlacedWorld, failure: str) -> None:
    """While its new text can't be embedded, or the state can't be moved, the old copy is whole and answers."""
    model = Faulty()
    world.embeddings = model
    retriever = suggested(world)
    retriever.accept_suggestion("pods", full_content=CONTENT)
    before, kept, named = world.record("pods"), files(world), copies(retriever)
    at, spoil, error = FAILURES[failure]
    model.broken_at(at, spoil)
    with pytest.raises(error):
        retriever.refresh("pods", full_content=CONTENT.replace("part", "piece"))
    model.broken_at(0, None)
    assert (world.record("pods"), files(world), copies(retriever)) == (before, kept, named)
    assert_saved_whole(world, retriever)
    retriever.refresh("pods", full_content=CONTENT.replace("part", "piece"))
    assert_saved_whole(world, retriever, CONTENT.replace("part", "piece"))


def test_embedding_anew_that_fails_loses_no_copy(world: PlacedWorld) -> None:
    """What `reindex` could not embed keeps its copy, and doing it again finishes the rest."""
    retriever = suggested(world)
    world.save(retriever, "images", "Images are read only.")
    retriever.accept_suggestion("pods", full_content=CONTENT)
    other = Faulty()
    other.model = "another"
    moved = world.retriever(embedding_model=other, text_splitter=Paragraphs(), embedding_batch_size=2)
    other.broken_at(3, too_many_requests)
    with pytest.raises(EmbeddingError, match=r"'pods' \(ConnectionError: 429") as told:
        moved.reindex()
    assert isinstance(told.value.__cause__, ConnectionError)
    other.broken_at(0, None)
    assert doc_ids(cached(moved.invoke("what about images?"))) == ["images"]
    assert doc_ids(cached(retriever.invoke(POD_QUESTION))) == ["pods"]
    assert moved.reindex() == ["pods"]
    assert doc_ids(cached(moved.invoke(POD_QUESTION))) == ["pods"]
    assert len(copies(moved)) == 1


def test_a_save_by_itself_that_fails_leaves_the_suggestion(world: PlacedWorld) -> None:
    """With `auto_save`, a failure costs no answer, is told, and leaves the document for the user to accept."""
    model = Faulty()
    world.embeddings = model
    retriever = world.retriever(auto_save=True, text_splitter=Paragraphs(), embedding_batch_size=2, reset_threshold=9)
    world.shows(*(document("pods", text, chunk_index=number) for number, text in enumerate(FIVE)))
    model.broken_at(2, too_many_requests)
    answers = [retriever.invoke_with_provenance("an introduction") for _ in range(3)]
    model.broken_at(0, None)
    assert texts(answers[-1].documents) == FIVE
    assert "'pods' could not be saved" in answers[-1].provenance.degraded[0]
    world.shows()
    assert_unsaved(world, retriever)
    retriever.accept_suggestion("pods")
    assert_saved_whole(world, retriever)


CRASHING = """
import os, sys
kind, where, moment = sys.argv[1:]
sys.path.insert(0, {tests!r})
from scenarios import World, Paragraphs, topics
from rag_wiki import ChunkStore

if kind.startswith("sqlite"):
    from rag_wiki.storage.sqlite import SQLiteStateStore
    store = SQLiteStateStore(where)
elif kind.startswith("postgres"):
    from rag_wiki.storage.sql import SQLStateStore
    store = SQLStateStore(where)
else:
    import redis
    from rag_wiki.storage.redis_store import RedisStateStore
    store = RedisStateStore(redis.Redis(port=int(where)))
model = topics()
world = World(store, model)
folder = {folder!r}
chunks = ChunkStore(folder) if folder else store.chunk_store
retriever = world.retriever(text_splitter=Paragraphs(), embedding_batch_size=2, chunk_store=chunks)

def die(*_, **__):
    os._exit(9)

if moment == "embedding":
    real, seen = model.embed_documents, []
    model.embed_documents = lambda texts: die() if seen else (seen.append(1), real(texts))[1]
else:
    store.change = die
retriever.accept_suggestion("pods", full_content={content!r})
"""


def where_of(world: PlacedWorld, request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """How another process finds the store of a world."""
    if world.kind.startswith("sqlite"):
        return f"sqlite:///{tmp_path / 'state.db'}"
    if world.kind.startswith("postgres"):
        return str(request.getfixturevalue("postgres_url"))
    return str(request.getfixturevalue("valkey_port"))


@pytest.mark.parametrize(
    ("kind", "moment"),
    [
        ("sqlite", "embedding"),
        ("sqlite+disk", "moving the state"),
        ("postgres", "moving the state"),
        ("valkey", "moving the state"),
    ],
)
def test_a_process_that_dies_while_saving_saved_nothing(
    request: pytest.FixtureRequest,
    make_store: Callable[[str], StateStore],
    tmp_path: Path,
    kind: str,
    moment: str,
) -> None:
    """After a crash in the middle of a save, the suggestion stands, nothing of it answers, and accepting works."""
    world = make_world(kind, make_store, tmp_path)
    retriever = suggested(world)
    tests = Path(__file__).parents[1]
    program = CRASHING.format(tests=str(tests), folder=str(world.folder or ""), content=CONTENT)
    ended = subprocess.run(
        [sys.executable, "-c", program, kind, where_of(world, request, tmp_path), moment],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": str(tests.parent)},
    )
    assert (ended.returncode, ended.stderr) == (9, "")
    # A copy that nobody names may lie there for a day, in case somebody is about to name it; it is never served.
    assert world.state("pods") is DocumentState.SUGGESTED
    assert retriever.invoke(POD_QUESTION) == []
    assert world.reopened().retriever().invoke(POD_QUESTION) == []
    assert retriever.stats().chunks == 0
    retriever.accept_suggestion("pods", full_content=CONTENT)
    documents = world.reopened().retriever(local_top_k=5).invoke(POD_QUESTION)
    assert texts(documents) == [CONTENT]
    retriever.force_remove("pods")
    assert copies(retriever) == []
    assert [name for name in files(world) if name.endswith((".chunks", ".hits", ".md"))] == []


class HalfPlace(MemoryPlace):
    """A place that keeps what it was given, and then says that it failed."""

    def write(self, user_id: str, doc_id: str, copy: Any) -> None:
        super().write(user_id, doc_id, copy)
        raise LostError


def test_chunks_that_were_written_with_an_error_are_not_left() -> None:
    """When a place fails after it wrote, what it wrote is removed and never answers."""
    world = World(MemoryStateStore())
    place = HalfPlace()
    retriever = suggested(world, chunk_store=ChunkStore(place=place))
    with pytest.raises(LostError):
        retriever.accept_suggestion("pods", full_content=CONTENT)
    assert place.copies(USER, "pods") == []
    assert retriever.invoke(POD_QUESTION) == []
    assert world.state("pods") is DocumentState.SUGGESTED


def test_a_failed_save_of_one_user_leaves_anothers_copy(world: PlacedWorld) -> None:
    """What fails for one user takes nothing from another, or from that user's other documents."""
    model = Faulty()
    world.embeddings = model
    retriever = suggested(world)
    world.save(retriever, "pods", CONTENT, user_id="bob")
    world.save(retriever, "images", "Images are read only.")
    model.broken_at(2, too_many_requests)
    with pytest.raises(ConnectionError):
        retriever.accept_suggestion("pods", full_content=CONTENT)
    assert copies(retriever) == []
    assert len(copies(retriever, "bob")) == 1
    assert doc_ids(cached(retriever.invoke(POD_QUESTION, user_id="bob"))) == ["pods"]
    assert doc_ids(cached(retriever.invoke("what about images?"))) == ["images"]


def test_the_returned_record_is_what_is_stored(world: PlacedWorld) -> None:
    """A save that returns has happened: the record it returns is the stored one, chunks and content included."""
    retriever = suggested(world)
    returned: UserDocRecord = retriever.accept_suggestion("pods", full_content=CONTENT)
    assert returned == world.record("pods")
    assert (returned.user_state, returned.chunk_count, returned.full_content) == (DocumentState.CLAIMED, 5, CONTENT)
    assert copies(retriever) == [returned.copy_id]
