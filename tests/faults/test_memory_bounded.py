"""What a long-running process holds is bounded, and let go of with what it was held for."""

from __future__ import annotations

import asyncio
import gc
import threading
import tracemalloc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import START, TableEmbeddings, document
from langchain_core.documents import Document
from places import PlacedWorld
from scenarios import OTHER_QUESTION, POD_QUESTION, PODS, USER, World, cached, doc_ids, texts, topics

from rag_wiki import DecayConfig, DocumentState, RagWikiRetriever, StateStore, UserDocRecord
from rag_wiki.storage.chunk_store import ChunkCopy, ChunkStore, new_copy_id
from rag_wiki.storage.records import UserChange

CHUNKS = 20


def save_for(world: World, chunks: ChunkStore, user_id: str, width: int = 8) -> None:
    """Save one document of twenty chunks for a user, of which one is about pods; as fast as the stores go."""
    vectors = np.zeros((CHUNKS, width), dtype=np.float32)
    vectors[:, 1], vectors[7, :2] = 1.0, (1.0, 0.0)
    chunk_texts = tuple(f"Chunk {number} of {user_id}." for number in range(CHUNKS))
    copy = ChunkCopy(new_copy_id(), tuple(range(CHUNKS)), chunk_texts, vectors, embedding="table")
    chunks.save_copy(user_id, "d", copy)
    facts: dict[str, Any] = {"user_state": DocumentState.CLAIMED, "copy_id": copy.copy_id, "chunk_count": CHUNKS}
    record = UserDocRecord(user_id, "d", "D", "", cached_at=START, last_fetched_at=START, **facts)
    world.store.change(user_id, ["d"], lambda _: UserChange(records=[record]))


def answer_for(retriever: RagWikiRetriever, user_id: str) -> list[str]:
    """What a user's saved copy answers."""
    return texts(cached(retriever.invoke(POD_QUESTION, user_id=user_id)))


def held_by(retriever: RagWikiRetriever, users: list[str]) -> list[int]:
    """The bytes of each user's index in this process."""
    return [retriever.stats(user_id).index_bytes for user_id in users]


def test_two_thousand_users_take_the_room_of_a_hundred() -> None:
    """With room for a hundred indexes, what is held levels off there; whoever was dropped is answered as before."""
    world = World()
    users = [f"user {number}" for number in range(2_000)]
    options: dict[str, Any] = {"embedding_name": "table", "local_top_k": 1}
    save_for(world, world.store.chunk_store, users[0])
    probe = world.retriever(None, **options)
    answer_for(probe, users[0])
    (size,) = held_by(probe, users[:1])
    assert size >= CHUNKS * 8 * 4

    world = World()
    retriever = world.retriever(None, index_max_bytes=100 * size, **options)
    levels = []
    for number, user_id in enumerate(users, start=1):
        save_for(world, world.store.chunk_store, user_id)
        assert answer_for(retriever, user_id) == [f"Chunk 7 of {user_id}."]
        if number % 500 == 0:
            levels.append(sum(held_by(retriever, users)))
    assert levels == [100 * size] * 4
    assert [user_id for user_id, held in zip(users, held_by(retriever, users), strict=True) if held] == users[-100:]
    for user_id in users[::97]:
        assert answer_for(retriever, user_id) == [f"Chunk 7 of {user_id}."]
    assert sum(held_by(retriever, users)) == 100 * size
    # Who was asked last is kept, who was asked longest ago went.
    assert held_by(retriever, [users[-1], users[97 * 20], users[-99]]) == [size, size, 0]


def test_a_user_who_was_dropped_is_answered_from_wherever_the_chunks_are(world: PlacedWorld) -> None:
    """With room for one index, or for none, every user in turn is answered from the saved copy, in every place."""
    for room in (700, 1):
        retriever = world.retriever(None, index_max_bytes=room)
        users = [f"user {number} with room {room}" for number in range(4)]
        for user_id in users:
            world.save(retriever, "pods", f"Pods of {user_id}.", user_id=user_id)
        world.shows(document("tax", "Tax is due in May."))
        for _ in range(2):
            for user_id in users:
                assert answer_for(retriever, user_id) == [f"Pods of {user_id}."]
                held = held_by(retriever, users)
                # The cap of all retrievers over one place is the largest that any of them asked for.
                assert sum(held) <= 700
                assert sum(map(bool, held)) <= 1


@pytest.mark.parametrize(("kind", "awaiting"), [("sqlite-file", False), ("valkey", True)])
def test_users_that_come_and_go_leave_nothing_behind(
    make_store: Callable[[str], StateStore], kind: str, awaiting: bool
) -> None:
    """Where the state is elsewhere, hundreds of further users add next to nothing to what the process holds."""
    world = World(store=make_store(kind))
    world.shows(document("tax", "Tax is due in May. " * 50))
    retriever = world.retriever(None)

    def serve(numbers: range) -> int:
        if awaiting:

            async def ask_all() -> None:
                for first in range(0, len(numbers), 50):
                    asked = (retriever.ainvoke(POD_QUESTION, user_id=f"user {n}") for n in numbers[first : first + 50])
                    await asyncio.gather(*asked)

            asyncio.run(ask_all())
        else:
            for number in numbers:
                retriever.invoke(POD_QUESTION, user_id=f"user {number}")
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        # As many as are remembered at most, so that from here on each new one takes another's place.
        before = serve(range(550))
        after = serve(range(550, 750))
    finally:
        tracemalloc.stop()
    # A record kept for each would be some 2,000 bytes, the text of its document another 1,000.
    assert after - before < 200 * 500


def test_forgetting_a_user_frees_their_vectors(world: PlacedWorld) -> None:
    """`forget_user` leaves no index of the user in this process, and others' as they were."""
    retriever = world.retriever(None)
    for user_id in ("ada", "bob"):
        world.save(retriever, "pods", PODS, user_id=user_id)
        assert answer_for(retriever, user_id) == [PODS]
    before = held_by(retriever, ["ada", "bob"])
    assert min(before) > 0
    retriever.forget_user("ada")
    assert held_by(retriever, ["ada", "bob"]) == [0, before[1]]
    assert answer_for(retriever, "ada") == []
    assert held_by(retriever, ["ada"]) == [0]


def test_removing_one_of_two_frees_its_vectors(world: PlacedWorld) -> None:
    """After one of two documents is removed, the next query holds what one takes, in another worker too."""
    retriever, later = world.retriever(), world.reopened().retriever()
    world.save(retriever, "pods", PODS)
    answer_for(retriever, USER)
    (one,) = held_by(retriever, [USER])
    world.save(retriever, "more", "Pods again.")
    for worker in (retriever, later):
        assert sorted(answer_for(worker, USER)) == sorted([PODS, "Pods again."])
        assert held_by(worker, [USER])[0] > one
    retriever.force_remove("more")
    for worker in (retriever, later):
        assert answer_for(worker, USER) == [PODS]
        assert held_by(worker, [USER]) == [one]


def remove_here(retriever: RagWikiRetriever) -> None:
    """The user removes the document."""
    retriever.force_remove("pods")


def remove_elsewhere(retriever: RagWikiRetriever) -> None:
    """The user removes it through another retriever."""
    retriever.for_user("ada").model_copy(update={"k": 3}).force_remove("pods")


def decay(retriever: RagWikiRetriever) -> None:
    """It is let go by decay."""
    retriever.thumbs_down("pods")
    retriever.clock.turn(days=400)  # type: ignore[attr-defined]  # a clock turned by hand
    retriever.run_decay()


@pytest.mark.parametrize("let_go", [remove_here, remove_elsewhere, decay])
def test_removing_the_last_document_frees_its_vectors(let_go: Callable[[RagWikiRetriever], None]) -> None:
    """When nothing of a user is saved any more, the next query at the latest leaves no vector of theirs in memory."""
    world = World()
    retriever = world.retriever(decay=DecayConfig(demotion_hold_days=0))
    world.save(retriever, "pods", PODS)
    assert answer_for(retriever, USER) == [PODS]
    let_go(retriever)
    assert retriever.stats().chunks == 0
    assert answer_for(retriever, USER) == []
    assert held_by(retriever, [USER]) == [0]


class Kept(Document):
    """A document whose life can be watched."""


class Watched(TableEmbeddings):
    """A model whose life can be watched."""


def test_nothing_outlives_its_retriever(tmp_path: Path) -> None:
    """With the last retriever go the store, the chunks, the model, the indexes and what the source returned."""
    alive: dict[str, weakref.ref[Any]] = {}

    def use(folder: Path | None) -> None:
        world = World(embeddings=Watched(topics().table))
        retriever = world.retriever(wiki_save_dir=folder, context="focused", similarity_threshold="auto")
        world.save(retriever, "pods", PODS)
        world.shows(Kept(page_content="Tax is due in May.", metadata={"doc_id": "tax"}))
        answer = retriever.invoke(POD_QUESTION)
        assert "tax" in doc_ids(answer)
        asyncio.run(retriever.ainvoke(POD_QUESTION))
        retriever.batch([POD_QUESTION, OTHER_QUESTION])
        retriever.for_user("bob").invoke(POD_QUESTION)
        held: dict[str, Any] = {
            "retriever": retriever,
            "store": world.store,
            "chunks": retriever.chunk_store,
            "model": world.embeddings,
            "source": world.source,
            "returned": world.source.documents[0],
            "answer": next(item for item in answer if item.metadata["doc_id"] == "tax"),
        }
        alive.update({f"{name} of {folder}": weakref.ref(value) for name, value in held.items()})

    for folder in (None, tmp_path / "wiki"):
        use(folder)

    def left() -> list[str]:
        gc.collect()
        return [name for name, ref in alive.items() if ref() is not None]

    # A thread that searched may take a moment to let go of its work.
    assert any(left() == [] for _ in range(200))


def test_what_the_source_returned_is_not_held() -> None:
    """A retriever that lives on keeps no document that a call returned, neither the source's nor its own copy."""
    world = World()
    retriever = world.retriever()
    world.shows(Kept(page_content="Tax is due in May.", metadata={"doc_id": "tax"}))
    answer = retriever.invoke(POD_QUESTION)
    watched = [weakref.ref(world.source.documents[0]), weakref.ref(answer[0])]
    world.shows()
    del answer
    gc.collect()
    assert [ref() for ref in watched] == [None, None]


def test_lists_can_be_read_while_another_thread_saves(world: PlacedWorld) -> None:
    """Reading lists, pages, users, numbers and answers while documents are saved and removed raises nothing."""
    retriever, count = world.retriever(fetch_threshold=100, similarity_threshold=0.0), 12
    world.save(retriever, "first", PODS)
    world.shows(*(document(f"d{number}", f"Pods {number}.") for number in range(count)))
    retriever.invoke(OTHER_QUESTION)
    world.shows()
    errors: list[BaseException] = []
    other = World(store=world.store)

    def write() -> None:
        try:
            for number in range(count):
                retriever.accept_suggestion(f"d{number}")
                retriever.thumbs_up(f"d{number}")
                if number % 3 == 0:
                    retriever.force_remove(f"d{number}")
                other.save(other.retriever(f"user {number}", chunk_store=retriever.chunk_store), "d", PODS)
        except BaseException as error:
            errors.append(error)

    writing = threading.Thread(target=write)
    writing.start()
    seen = 0
    while writing.is_alive():
        listed = [record.doc_id for record in retriever.documents()]
        assert listed == sorted(listed)
        assert len(listed) == count + 1
        pages = [record.doc_id for page in world.store.pages(USER, size=3) for record in page]
        assert sorted(pages) == listed
        users = world.store.list_active_users()
        assert users == sorted(users)
        assert len(users) >= seen
        seen = len(users)
        retriever.stats()
        retriever.run_decay()
        assert "first" in doc_ids(retriever.invoke(POD_QUESTION))
    writing.join(20)
    assert errors == []
    kept = sorted(f"d{number}" for number in range(count) if number % 3)
    assert [record.doc_id for record in retriever.documents(DocumentState.CLAIMED)] == [*kept, "first"]
    assert len(world.store.list_active_users()) == 1 + count


def test_a_warning_comes_once_for_each_user_however_many(caplog: pytest.LogCaptureFixture) -> None:
    """What is told once a user is told the 1,100th user too, and not again while it is remembered."""
    world = World()
    retriever = world.retriever(None, embedding_name="another")
    users = [f"user {number}" for number in range(1_100)]
    for user_id in users:
        save_for(world, world.store.chunk_store, user_id)
        retriever.invoke(POD_QUESTION, user_id=user_id)
    assert len(caplog.records) == len(users)
    assert repr(users[-1]) in caplog.records[-1].getMessage()
    for user_id in users[-500:]:
        retriever.invoke(POD_QUESTION, user_id=user_id)
    assert len(caplog.records) == len(users)


class Interrupting(str):
    """The name of a model that lets another thread have its turn whenever it is looked at."""

    __slots__ = ()
    interrupt: Callable[[], None] | None = None

    def __eq__(self, other: object) -> bool:
        turn, Interrupting.interrupt = Interrupting.interrupt, None
        if turn is not None:
            turn()
        return str(self) == str(other)

    __hash__ = str.__hash__


def test_numbers_can_be_read_while_another_model_is_calibrated() -> None:
    """`stats` shows the threshold in use also when another thread calibrates a second model just then."""
    world = World()
    retriever = world.retriever(similarity_threshold="auto", embedding_name=Interrupting("first"))
    second = world.retriever(similarity_threshold="auto", embedding_name="second")
    threshold = retriever.calibrate().threshold

    def calibrate_second() -> None:
        other = threading.Thread(target=second.calibrate)
        other.start()
        # Where the two take turns, the other one waits for this thread, and this one must not wait for it.
        other.join(1)

    Interrupting.interrupt = calibrate_second
    world.retriever(similarity_threshold="auto", embedding_name="third").calibrate()
    assert retriever.stats().similarity_threshold == threshold
