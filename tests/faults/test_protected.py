"""What the user pinned is the user's: nothing automatic touches it, and it never crowds out more than was allowed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from helpers import TableEmbeddings, document
from places import PlacedWorld
from scenarios import (
    OTHER_QUESTION,
    POD_QUESTION,
    PODS,
    USER,
    World,
    cached,
    doc_ids,
    story,
    texts,
    topics,
)

from rag_wiki import (
    DecayConfig,
    DocumentState,
    EmbeddingError,
    InvalidTransitionError,
    RagWikiRetriever,
    UnknownDocumentError,
    UserDocRecord,
)

CLAIMED, DEMOTED, PINNED = DocumentState.CLAIMED, DocumentState.DEMOTED, DocumentState.PINNED
RECENCY_ALONE = DecayConfig(
    w_recency=1, w_frequency=0, w_explicit=0, w_chunk_hit=0, pin_hold_days=1, max_cache_miss_streak=5
)
"""The score is `exp(-days / 20)`: above the pin threshold for 3 days, below the demotion threshold after 38."""
IMAGES = "Images are built in layers."


@pytest.mark.parametrize("world", ["memory", "sqlite+disk", "postgres", "valkey"], indirect=True)
def test_a_years_decay_leaves_the_users_pin_and_takes_the_automatic_one(world: PlacedWorld) -> None:
    """Of two documents that nobody asks for, one pinned by the user and one by its score, only the user's stays."""
    retriever = world.retriever(decay=RECENCY_ALONE)
    world.save(retriever, "users", PODS)
    world.save(retriever, "automatic", IMAGES)
    retriever.force_pin("users")
    retriever.run_decay()
    world.clock.turn(days=1)
    retriever.run_decay()
    assert [(record.doc_id, record.pinned_by_user) for record in retriever.documents([PINNED])] == [
        ("automatic", False),
        ("users", True),
    ]
    pinned = world.record("users")
    for _ in range(365):
        world.clock.turn(days=1)
        retriever.run_decay()
    assert (world.state("users"), world.state("automatic")) == (PINNED, DEMOTED)
    assert world.record("users") == pinned
    assert [step[0] for step in story(retriever.history("users"))] == ["surfaced", "saved", "pinned"]
    assert [step[0] for step in story(retriever.history("automatic"))] == [
        "surfaced",
        "saved",
        "pinned",
        "unpinned",
        "demoted",
    ]
    for seen in (retriever, world.reopened().retriever(decay=RECENCY_ALONE)):
        assert texts(cached(seen.invoke(POD_QUESTION))) == [PODS]
        assert doc_ids(cached(seen.invoke(OTHER_QUESTION))) == ["users"]
        assert seen.chunk_store.load_chunks(USER, "automatic") == []


def test_searches_without_a_hit_leave_the_users_pin_and_take_the_automatic_one(world: PlacedWorld) -> None:
    """The streak of misses that lets an automatic pin go does not count for the user's, then or later."""
    retriever = world.retriever(decay=RECENCY_ALONE)
    world.save(retriever, "users", PODS)
    world.save(retriever, "automatic", IMAGES)
    retriever.run_decay()
    world.clock.turn(days=1)
    retriever.run_decay()
    retriever.force_pin("users")
    let_go: list[str] = []
    for _ in range(12):
        documents, provenance = retriever.invoke_with_provenance(OTHER_QUESTION)
        let_go += [kept.doc_id for kept in provenance.let_go]
        assert "users" in doc_ids(cached(documents))
    assert let_go == ["automatic"]
    retriever.unpin("users")
    assert (world.state("users"), world.record("users").cache_miss_streak) == (CLAIMED, 0)
    assert texts(cached(world.reopened().retriever().invoke(POD_QUESTION))) == [PODS]


def test_the_users_word_and_the_automatic_state_are_two_things(world: PlacedWorld) -> None:
    """A pin that came by itself becomes the user's when the user pins, and nobody's when the user unpins."""
    retriever = world.retriever(decay=RECENCY_ALONE)
    world.save(retriever, "pods", PODS)
    retriever.run_decay()
    world.clock.turn(days=1)
    retriever.run_decay()
    since = world.record("pods").pinned_at
    pinned = retriever.force_pin("pods")
    assert (pinned.user_state, pinned.pinned_by_user, pinned.pinned_at) == (PINNED, True, since)
    world.clock.turn(days=100)
    assert [(result.new_state, result.transitioned) for result in retriever.run_decay()] == [(PINNED, False)]
    unpinned = retriever.unpin("pods")
    assert (unpinned.user_state, unpinned.pinned_by_user, unpinned.pinned_at) == (CLAIMED, False, None)
    retriever.run_decay()
    world.clock.turn(days=3)
    retriever.run_decay()
    assert world.state("pods") is DEMOTED


@pytest.mark.parametrize("way", ["content given", "content retrieved"])
def test_pinning_what_was_never_saved_saves_it_wholly(world: PlacedWorld, way: str) -> None:
    """A document that the user has only met is saved by the pin: record, content and chunks are all there."""
    retriever = world.retriever(document_loader=(lambda record: IMAGES) if way == "content given" else None)
    world.shows(document("images", IMAGES))
    retriever.invoke(POD_QUESTION)
    world.shows()
    retriever.force_pin("images")
    for seen in (retriever, world.reopened().retriever()):
        record = seen.state_store.get(USER, "images")
        assert record is not None
        chunks = seen.chunk_store.load_chunks(USER, "images")
        assert (record.user_state, record.pinned_by_user, record.full_content) == (PINNED, True, IMAGES)
        assert [chunk["text"] for chunk in chunks] == [IMAGES]
        assert record.chunk_count == len(chunks)
        assert texts(cached(seen.invoke(OTHER_QUESTION))) == [IMAGES]


class FailingEmbeddings(TableEmbeddings):
    """Gives too few vectors."""

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return []


def test_a_pin_that_can_not_save_is_no_pin(world: PlacedWorld) -> None:
    """When saving fails, or the user never met the document, an error says so, and there is neither pin nor chunk."""
    world.embeddings = FailingEmbeddings(topics().table)
    world.shows(document("pods", PODS))
    retriever = world.retriever()
    retriever.invoke(POD_QUESTION)
    before = world.record("pods")
    with pytest.raises(EmbeddingError, match="'pods'"):
        retriever.force_pin("pods")
    with pytest.raises(UnknownDocumentError, match="'never met'"):
        retriever.force_pin("never met")
    with pytest.raises(InvalidTransitionError, match="SURFACED"):
        retriever.decay_engine.force_pin(USER, "pods")
    assert world.record("pods") == before
    assert world.store.get(USER, "never met") is None
    assert retriever.chunk_store.place.copies(USER, "pods") == []
    assert retriever.documents([PINNED]) == []


def test_a_vote_against_a_pinned_document_is_noted_and_does_not_unpin(world: PlacedWorld) -> None:
    """Thumbs down is a vote, and `unpin` is what takes a pin away; after it the vote tells."""
    decay = DecayConfig(w_recency=0, w_frequency=0, w_explicit=1, w_chunk_hit=0, demotion_hold_days=1)
    retriever = world.retriever(decay=decay)
    world.save(retriever, "pods", PODS)
    retriever.force_pin("pods")
    after = retriever.thumbs_down("pods")
    assert (after.user_state, after.pinned_by_user, after.explicit_signal) == (PINNED, True, -1.0)
    world.clock.turn(days=30)
    retriever.run_decay()
    assert doc_ids(cached(retriever.invoke(OTHER_QUESTION))) == ["pods"]
    retriever.unpin("pods")
    retriever.run_decay()
    world.clock.turn(days=1)
    retriever.run_decay()
    assert world.state("pods") is DEMOTED


CHANGES: dict[str, Callable[[RagWikiRetriever], UserDocRecord]] = {
    "saved again": lambda retriever: retriever.accept_suggestion("pods", full_content="Pods, anew."),
    "refreshed": lambda retriever: retriever.refresh("pods", full_content="Pods, anew."),
    "voted for": lambda retriever: retriever.thumbs_up("pods"),
    "served whole": lambda retriever: retriever.set_always_full_doc("pods"),
    "declined": lambda retriever: retriever.decline_suggestion("pods"),
    "pinned twice": lambda retriever: retriever.force_pin("pods"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_only_unpinning_and_removing_end_a_pin(change: str) -> None:
    """Whatever else the user does with a pinned document, its pin stays what it was."""
    world = World()
    retriever = world.retriever()
    world.save(retriever, "pods", PODS)
    pinned = retriever.force_pin("pods")
    world.clock.turn(days=1)
    after = CHANGES[change](retriever)
    assert (after.user_state, after.pinned_by_user, after.pinned_at) == (PINNED, True, pinned.pinned_at)
    assert doc_ids(cached(retriever.invoke(OTHER_QUESTION))) == ["pods"]
    assert retriever.force_remove("pods").pinned_by_user is False
    assert retriever.invoke(OTHER_QUESTION) == []


# -- fifty pins

SETTINGS: dict[str, dict[str, Any]] = {
    "all": {},
    "on a miss": {"global_search": "on_miss"},
    "focused": {"context": "focused"},
    "no room in memory": {"index_max_bytes": 0},
}


def fifty_pins(**settings: Any) -> tuple[World, RagWikiRetriever]:
    """A user with fifty pinned documents, of which the one about images is the last; the source shows two more."""
    world = World()
    retriever = world.retriever(**settings)
    for number in range(49):
        world.save(retriever, f"note {number:02}", f"Pods, note {number}.")
    world.save(retriever, "pictures", IMAGES)
    for record in retriever.documents():
        retriever.force_pin(record.doc_id)
    world.shows(document("tax", "Tax is due in May."), document("pictures", IMAGES))
    return world, retriever


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
async def test_fifty_pins_keep_to_the_limit(settings: dict[str, Any]) -> None:
    """With `k` at most so many documents come, the best pins first; what found no room is in no provenance."""
    _, retriever = fifty_pins(**settings)
    question = "what are images?"
    for documents, provenance in (
        retriever.invoke_with_provenance(question, k=5),
        await retriever.ainvoke_with_provenance(question, k=5),
    ):
        assert len(documents) == 5
        assert all(found.metadata["user_state"] == "PINNED" for found in documents)
        assert doc_ids(documents)[0] == "pictures"
        assert [source.doc_id for source in provenance.sources] == doc_ids(documents)
    assert [len(found) for found in retriever.batch([question, POD_QUESTION], k=5)] == [5, 5]


def test_fifty_pins_without_a_limit_all_come() -> None:
    """Without `k` there is no limit: every pin, once, and the source's documents after them."""
    _, retriever = fifty_pins()
    found = doc_ids(retriever.invoke(OTHER_QUESTION))
    assert (len(found), len(set(found))) == (51, 51)
    assert found[-1] == "tax"


def test_a_limit_of_the_retriever_holds_and_a_call_may_set_another() -> None:
    """`k` of the retriever caps every call, and `k` of a call goes before it."""
    _, retriever = fifty_pins(k=5)
    assert len(retriever.invoke(OTHER_QUESTION)) == 5
    assert len(retriever.invoke(OTHER_QUESTION, k=1)) == 1
    assert len(retriever.invoke(OTHER_QUESTION, k=51)) == 51
    assert len(retriever.for_user("bob").invoke(OTHER_QUESTION)) == 2


def test_pins_that_found_no_room_are_pins_still() -> None:
    """A pin that the limit left out is neither counted as fetched nor let go, however often that happens."""
    world, retriever = fifty_pins(decay=RECENCY_ALONE)
    before = {record.doc_id: record.fetch_count for record in retriever.documents([PINNED])}
    for _ in range(10):
        retriever.invoke(OTHER_QUESTION, k=5)
        world.clock.turn(days=30)
        retriever.run_decay()
    assert {record.doc_id: record.fetch_count for record in retriever.documents([PINNED])} == before
