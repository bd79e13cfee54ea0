"""What a user says lasts, counts once however often it is said, and is seen."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from helpers import document
from places import PlacedWorld
from scenarios import OTHER_QUESTION, POD_QUESTION, PODS, USER, World, cached, doc_ids, story

from rag_wiki import (
    DecayConfig,
    DocumentState,
    InvalidTransitionError,
    RagWikiRetriever,
    SuggestionEvent,
    UnknownDocumentError,
    UserDocRecord,
)

TAX = document("tax", "Tax is due in May.")


class Listener:
    """Hears the suggestions of retrievers, also of several at once."""

    def __init__(self) -> None:
        self.heard: list[SuggestionEvent] = []
        self._lock = threading.Lock()

    def __call__(self, event: SuggestionEvent) -> None:
        with self._lock:
            self.heard.append(event)

    @property
    def counts(self) -> list[int]:
        """At which counts saving was suggested."""
        return [event.fetch_count for event in self.heard]


def fetch(retriever: RagWikiRetriever, times: int = 1) -> None:
    """Ask something that no saved copy answers."""
    for _ in range(times):
        retriever.invoke(OTHER_QUESTION)


def fetch_at_once(retrievers: list[RagWikiRetriever]) -> None:
    """Ask with all of these at the same moment."""
    together = threading.Barrier(len(retrievers))

    def run(retriever: RagWikiRetriever) -> None:
        together.wait(20)
        fetch(retriever)

    with ThreadPoolExecutor(len(retrievers)) as threads:
        list(threads.map(run, retrievers))


def test_a_declined_suggestion_stays_declined(world: PlacedWorld) -> None:
    """A worker that starts later asks no more for five fetches, nor for being asked much later; then once, for two."""
    heard = Listener()
    world.shows(TAX)
    retriever = world.retriever(on_suggestion=heard)
    fetch(retriever, 3)
    retriever.decline_suggestion("tax")
    assert heard.counts == [3]

    later = world.reopened()
    retrievers = [later.retriever(on_suggestion=heard), later.reopened().retriever(on_suggestion=heard)]
    for _ in range(5):
        world.clock.turn(days=5)
        fetch(retrievers[0])
    assert heard.counts == [3]
    record = later.record("tax")
    assert (record.user_state, record.fetch_count, record.next_suggest_at) == (DocumentState.SURFACED, 8, 9)
    world.clock.turn(days=6)
    # 31 days after the no, and as many fetches later as it was worth: two queries at once, one suggestion.
    fetch_at_once(retrievers)
    assert heard.counts == [3, 9]
    assert later.record("tax").fetch_count == 10


def test_a_suggestion_that_nobody_answers_is_not_repeated(world: PlacedWorld) -> None:
    """A suggestion is told once, to one of two workers, and in no later query of either, nor after a restart."""
    heard = Listener()
    world.shows(TAX)
    retrievers = [world.retriever(on_suggestion=heard), world.reopened().retriever(on_suggestion=heard)]
    fetch_at_once(retrievers * 2)
    for retriever in (*retrievers, world.reopened().retriever(on_suggestion=heard)):
        fetch(retriever, 3)
        provenance = retriever.last_provenance
        assert provenance is not None
        assert provenance.suggestions == ()
        assert provenance.to_dict()["suggestion"] is None
        assert [source.user_state for source in provenance.sources] == [DocumentState.SUGGESTED]
    assert heard.counts == [3]


def test_a_removed_document_is_left_alone_for_thirty_days(world: PlacedWorld) -> None:
    """After a removal fetches are counted afresh; on the day that ends the quiet, two queries at once suggest once."""
    heard = Listener()
    retriever = world.retriever(on_suggestion=heard)
    world.save(retriever, "tax", TAX.page_content)
    retriever.force_remove("tax")
    later = world.reopened()
    later.shows(TAX)
    retrievers = [later.retriever(on_suggestion=heard), later.reopened().retriever(on_suggestion=heard)]
    fetch(retrievers[0], 4)
    world.clock.turn(days=30, minutes=-1)
    fetch(retrievers[1])
    assert heard.counts == []
    assert (later.state("tax"), later.record("tax").fetch_count) == (DocumentState.SURFACED, 5)
    world.clock.turn(minutes=1)
    fetch_at_once(retrievers)
    assert heard.counts == [6]


def test_a_document_that_was_let_go_is_suggested_after_a_fresh_threshold(world: PlacedWorld) -> None:
    """Let go by decay, a document starts at one again: two fetches suggest nothing, the third does."""
    heard = Listener()
    retriever = world.retriever(on_suggestion=heard, decay=DecayConfig(demotion_hold_days=0))
    world.save(retriever, "tax", TAX.page_content)
    world.clock.turn(days=400)
    assert [result.new_state for result in retriever.run_decay()] == [DocumentState.DEMOTED]
    world.shows(TAX)
    fetch(retriever, 2)
    assert (heard.counts, world.record("tax").fetch_count) == ([], 2)
    fetch(world.reopened().retriever(on_suggestion=heard))
    assert heard.counts == [3]


def test_a_no_said_twice_is_said_once(world: PlacedWorld) -> None:
    """A double click, or two at once on two workers, waits no longer than one no does."""
    world.shows(TAX)
    fetch(world.retriever(), 3)
    retrievers = [world.retriever(), world.reopened().retriever()]
    together = threading.Barrier(2)

    def decline(retriever: RagWikiRetriever) -> UserDocRecord:
        together.wait(20)
        return retriever.decline_suggestion("tax")

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(decline, retrievers))
    retrievers[0].decline_suggestion("tax")
    record = world.record("tax")
    assert (record.decline_count, record.next_suggest_at) == (1, 9)
    assert [event.what for event in world.store.history(USER, "tax")].count("declined") == 1


def test_each_further_no_waits_twice_as_long(world: PlacedWorld) -> None:
    """Declined again and again, saving is suggested at 3 fetches, then 6, 12 and 24 further ones."""
    heard = Listener()
    world.shows(TAX)
    retriever = world.retriever(on_suggestion=heard)
    for _ in range(45):
        fetch(retriever)
        if world.record("tax").suggestion_sent:
            retriever.decline_suggestion("tax")
    assert heard.counts == [3, 3 + 6, 3 + 6 + 12, 3 + 6 + 12 + 24]


def test_votes_do_not_add_up(world: PlacedWorld) -> None:
    """Fifty votes are worth one, the last one counts, and the score stays between 0 and 1."""
    saved: dict[str, UserDocRecord] = {}
    retriever = world.retriever()
    for doc_id, votes in (("once", "+"), ("often", "+" * 50), ("down", "-"), ("both", "+-"), ("back", "--+")):
        world.save(retriever, doc_id, f"Pods of {doc_id}.")
        for vote in votes:
            voted = retriever.thumbs_up(doc_id) if vote == "+" else retriever.thumbs_down(doc_id)
        saved[doc_id] = world.reopened().record(doc_id)
        assert voted.explicit_signal == saved[doc_id].explicit_signal
        assert 0.0 <= saved[doc_id].decay_score <= 1.0
    signals = {doc_id: record.explicit_signal for doc_id, record in saved.items()}
    assert signals == {"once": 1.0, "often": 1.0, "down": -1.0, "both": -1.0, "back": 1.0}
    scores = {doc_id: record.decay_score for doc_id, record in saved.items()}
    assert scores["once"] == scores["often"] == scores["back"] > scores["down"] == scores["both"]
    assert {result.doc_id: result.new_score for result in retriever.run_decay()} == pytest.approx(scores)


def test_a_vote_said_again_takes_no_history_away() -> None:
    """Clicking sixty times on one thumb leaves the story of the document: found, saved, voted for."""
    world = World()
    retriever = world.retriever()
    world.save(retriever, "pods", PODS)
    before = story(retriever.history("pods"))
    for _ in range(60):
        retriever.thumbs_up("pods")
    after = story(retriever.history("pods"))
    assert after[: len(before)] == before
    assert [what for what, _, _ in after[len(before) :]] == ["voted"]


def served(retriever: RagWikiRetriever) -> dict[str, Any]:
    """What provenance tells of the saved document; nothing when it was not served."""
    _, provenance = retriever.invoke_with_provenance(POD_QUESTION)
    sources: list[dict[str, Any]] = provenance.to_dict()["sources"]
    return sources[0] if sources else {}


def test_each_signal_is_seen(world: PlacedWorld) -> None:
    """Every signal changes the stored record, is told by the history, and, where it bears on answers, by provenance."""
    world.shows(document("pods", PODS))
    retriever = world.retriever()
    fetch(retriever, 3)
    assert world.state("pods") is DocumentState.SUGGESTED
    retriever.decline_suggestion("pods")
    assert world.state("pods") is DocumentState.SURFACED
    assert served(retriever)["user_state"] == "SURFACED"
    retriever.accept_suggestion("pods")
    assert (served(retriever)["from_cache"], served(retriever)["user_state"]) == (True, "CLAIMED")

    unvoted = retriever.run_decay()[0].new_score
    up = retriever.thumbs_up("pods")
    assert up == replace(world.record("pods"), full_content=up.full_content)
    down = retriever.thumbs_down("pods")
    assert (up.explicit_signal, down.explicit_signal) == (1.0, -1.0)
    assert down.decay_score < unvoted < up.decay_score
    assert world.record("pods").decay_score == down.decay_score

    retriever.force_pin("pods")
    assert (world.record("pods").pinned_by_user, served(retriever)["user_state"]) == (True, "PINNED")
    assert doc_ids(cached(retriever.invoke(OTHER_QUESTION))) == ["pods"]
    retriever.unpin("pods")
    assert (world.record("pods").pinned_by_user, served(retriever)["user_state"]) == (False, "CLAIMED")
    assert served(retriever)["full_document"] is False
    retriever.set_always_full_doc("pods")
    assert (world.record("pods").always_full_doc, served(retriever)["full_document"]) == (True, True)
    retriever.force_remove("pods")
    assert world.state("pods") is DocumentState.DEMOTED
    world.shows()
    assert served(world.reopened().retriever()) == {}
    told = [event.what for event in retriever.history("pods")]
    assert told == ["surfaced", "suggested", "declined", "saved", "voted", "voted", "pinned", "unpinned", "removed"]


def test_a_vote_before_saving_counts_after_it(world: PlacedWorld) -> None:
    """A vote for a document that is not saved is kept, and part of its first score once it is."""
    scores = {}
    for user_id, vote in (("ada", True), ("bob", False)):
        retriever = world.retriever(user_id)
        world.shows(document("pods", PODS))
        retriever.invoke(OTHER_QUESTION)
        voted = retriever.thumbs_up("pods") if vote else retriever.thumbs_down("pods")
        assert voted.user_state is DocumentState.SURFACED
        retriever.accept_suggestion("pods")
        (result,) = world.reopened().retriever(user_id).run_decay()
        scores[user_id] = result.new_score
    assert scores["ada"] > scores["bob"]


ABOUT_A_DOCUMENT: dict[str, Callable[[RagWikiRetriever], object]] = {
    "accept_suggestion": lambda retriever: retriever.accept_suggestion("nothing", PODS),
    "refresh": lambda retriever: retriever.refresh("nothing", PODS),
    "decline_suggestion": lambda retriever: retriever.decline_suggestion("nothing"),
    "thumbs_up": lambda retriever: retriever.thumbs_up("nothing"),
    "thumbs_down": lambda retriever: retriever.thumbs_down("nothing"),
    "force_pin": lambda retriever: retriever.force_pin("nothing"),
    "unpin": lambda retriever: retriever.unpin("nothing"),
    "force_remove": lambda retriever: retriever.force_remove("nothing"),
    "set_always_full_doc": lambda retriever: retriever.set_always_full_doc("nothing"),
    "history": lambda retriever: retriever.history("nothing"),
}


async def test_a_signal_about_an_unknown_document_is_one_error(world: PlacedWorld) -> None:
    """In every store each action on a document that the user never met names user and document, and leaves no trace."""
    world.save(world.retriever("bob"), "nothing", "Bob met it.")
    retriever = world.retriever()
    for name, act in ABOUT_A_DOCUMENT.items():
        with pytest.raises(UnknownDocumentError, match="'ada' has no record of document 'nothing'"):
            act(retriever)
        arguments = ("nothing", PODS) if name in ("accept_suggestion", "refresh") else ("nothing",)
        with pytest.raises(UnknownDocumentError, match="'ada' has no record of document 'nothing'"):
            await getattr(retriever, f"a{name}")(*arguments)
    assert retriever.documents() == []
    assert world.store.history(USER, "nothing") == []
    assert retriever.chunk_store.load_chunks(USER, "nothing") == []
    assert [(record.doc_id, record.explicit_signal) for record in world.retriever("bob").documents()] == [
        ("nothing", 0.0)
    ]


def test_a_signal_that_has_no_place_is_refused_or_harmless(world: PlacedWorld) -> None:
    """Declining what is saved changes nothing; declining, unpinning and refreshing what was let go is refused."""
    retriever = world.retriever()
    saved = world.save(retriever, "pods", PODS)
    assert retriever.decline_suggestion("pods").user_state is DocumentState.CLAIMED
    assert world.record("pods") == replace(saved, full_content=PODS)
    retriever.force_remove("pods")
    before = world.record("pods")
    for refused in (retriever.decline_suggestion, retriever.unpin, retriever.refresh, retriever.accept_suggestion):
        with pytest.raises(InvalidTransitionError, match="'pods' of user 'ada'"):
            refused("pods")
    assert world.record("pods") == before
