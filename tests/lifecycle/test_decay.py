"""Scores, hold days, pins and votes; the arithmetic by hand, the engine over every store."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from copy import deepcopy
from dataclasses import fields
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from helpers import START, HandClock

from rag_wiki import (
    ChunkStore,
    DecayConfig,
    DecayEngine,
    DecayResult,
    DocumentState,
    FetchCounter,
    InvalidTransitionError,
    MemoryStateStore,
    StateMachine,
    StateStore,
    UnknownDocumentError,
    UserDocRecord,
)
from rag_wiki.lifecycle.decay_engine import apply_decay, decay_score

CHUNKS = [{"chunk_index": index, "text": f"chunk {index}", "vector": [1.0, float(index)]} for index in range(4)]
MOMENT = timedelta(microseconds=1)
LONG_AGO = START - timedelta(days=11)


def saved(doc_id: str = "pods", **values: Any) -> UserDocRecord:
    """A record of a saved document."""
    settings: dict[str, Any] = {
        "user_id": "ada",
        "doc_id": doc_id,
        "doc_title": "Pods",
        "doc_path": "pods.md",
        "user_state": DocumentState.CLAIMED,
        "fetch_count": 20,
        "last_fetched_at": START,
        "cached_at": START,
        "full_content": "the whole text",
    }
    return UserDocRecord(**{**settings, **values})


def dying(doc_id: str = "pods", **values: Any) -> UserDocRecord:
    """A saved document whose score is zero."""
    return saved(
        doc_id,
        **{"fetch_count": 0, "explicit_signal": -1.0, "last_fetched_at": START - timedelta(days=400), **values},
    )


class Decaying:
    """An engine over a store, with chunks beside the state and a clock turned by hand."""

    def __init__(self, store: StateStore, config: DecayConfig | None = None) -> None:
        self.store = store
        self.clock = HandClock()
        self.engine = DecayEngine(store, StateMachine(), config, clock=self.clock)

    def keep(self, record: UserDocRecord, hits: Collection[int] = (0, 1, 2, 3)) -> None:
        """Store a record with four chunks, of which some have answered."""
        self.store.upsert(record)
        self.store.chunk_store.save_chunks(record.user_id, record.doc_id, CHUNKS)
        self.store.chunk_store.record_hits(record.user_id, record.doc_id, hits, START)

    def run(self) -> DecayResult:
        """Run for the user, who has one document; its result."""
        (result,) = self.engine.run_for_user("ada")
        return result

    def record(self, doc_id: str = "pods", user_id: str = "ada") -> UserDocRecord:
        """The stored record."""
        record = self.store.get(user_id, doc_id)
        assert record is not None
        return record

    def chunk_texts(self, doc_id: str = "pods", user_id: str = "ada") -> list[str]:
        """The texts of the stored chunks."""
        return [chunk["text"] for chunk in self.store.chunk_store.load_chunks(user_id, doc_id)]


@pytest.fixture
def decaying(state_store: StateStore) -> Decaying:
    """An engine over each kind of store."""
    return Decaying(state_store)


# -- the formula


@pytest.mark.parametrize(
    ("days", "count", "vote", "hit_rate", "score"),
    [
        # (.40 · e^−.525 + .30 · 5/20 + .20 · 1 + .15 · .25) / 1.05
        (10.5, 5, 1.0, 0.25, 0.5229735),
        # (.40 · e^−.1 + .30 · 4/20) / 1.05
        (2.0, 4, 0.0, 0.0, 0.4018428),
        # (.40 · e^−.025 + .30 − .20 + .15) / 1.05
        (0.5, 20, -1.0, 1.0, 0.6096419),
        # (.40 + .30 + .20 + .15) / 1.05
        (0.0, 20, 1.0, 1.0, 1.0),
        # frequency counts in full from the cap on: 1 000 fetches are worth 20
        (0.0, 1000, 1.0, 1.0, 1.0),
        # a fetch in the future, by another host's clock, is a fetch now: (.40 + .30 · 1/20) / 1.05
        (-3.0, 1, 0.0, 0.0, 0.3952381),
        # (.40 · e^−20 + 0 − .20) / 1.05 is below zero
        (400.0, 0, -1.0, 0.0, 0.0),
    ],
)
def test_the_score_is_the_weighted_mean(days: float, count: int, vote: float, hit_rate: float, score: float) -> None:
    """Recency, frequency, vote and hit rate by their weights, over the sum of the weights, within [0, 1]."""
    record = saved(fetch_count=count, explicit_signal=vote, last_fetched_at=START - timedelta(days=days))
    assert decay_score(record, hit_rate, DecayConfig(), START) == pytest.approx(score, abs=1e-6)


def test_weights_need_not_sum_to_one() -> None:
    """The mean is over the sum of the weights, so only their proportions matter."""
    record = saved(fetch_count=5, last_fetched_at=START - timedelta(days=10))
    one = DecayConfig(w_recency=0.4, w_frequency=0.3, w_explicit=0.2, w_chunk_hit=0.1)
    ten = DecayConfig(w_recency=4, w_frequency=3, w_explicit=2, w_chunk_hit=1)
    assert decay_score(record, 0.5, one, START) == pytest.approx(decay_score(record, 0.5, ten, START))


def test_a_vote_of_no_never_gives_a_negative_score() -> None:
    """With the vote as the only weight, the score of −1 is 0 and that of +1 is 1."""
    config = DecayConfig(w_recency=0, w_frequency=0, w_explicit=1, w_chunk_hit=0)
    assert decay_score(saved(explicit_signal=-1.0), 1.0, config, START) == 0.0
    assert decay_score(saved(explicit_signal=1.0), 0.0, config, START) == 1.0


def test_a_naive_time_is_read_as_utc() -> None:
    """A record with a naive time of its last fetch scores as the same time in UTC does."""
    naive = saved(last_fetched_at=datetime(2026, 2, 27, 9, 0))  # noqa: DTZ001 - that is the test
    aware = saved(last_fetched_at=datetime(2026, 2, 27, 9, 0, tzinfo=timezone.utc))
    west = saved(last_fetched_at=datetime(2026, 2, 27, 1, 0, tzinfo=timezone(timedelta(hours=-8))))
    scores = {decay_score(record, 0.0, DecayConfig(), START) for record in (naive, aware, west)}
    assert len(scores) == 1


def test_the_rule_leaves_the_record_given_alone() -> None:
    """`apply_decay` returns a new record."""
    record = dying(demotion_candidate_since=START - timedelta(days=9))
    before = deepcopy(record)
    step = apply_decay(record, 0.0, DecayConfig(), START)
    assert record == before
    assert step.record.user_state is DocumentState.DEMOTED


# -- the engine


def test_the_engine_scores_with_the_stored_hit_rate(decaying: Decaying) -> None:
    """One of four chunks ever answered: the stored score is the formula's with 0.25."""
    record = saved(fetch_count=5, explicit_signal=1.0, last_fetched_at=START - timedelta(days=10.5))
    decaying.keep(record, hits=[2])
    result = decaying.run()
    assert result.new_score == pytest.approx(0.5229735, abs=1e-6)
    assert decaying.record().decay_score == result.new_score


def test_a_result_tells_the_document_states_and_scores(decaying: Decaying) -> None:
    """`DecayResult` has the six fields of earlier releases, with what was and what is."""
    decaying.keep(dying(decay_score=0.3, demotion_candidate_since=START - timedelta(days=3)), hits=[])
    assert [item.name for item in fields(DecayResult)] == [
        "doc_id",
        "old_state",
        "new_state",
        "old_score",
        "new_score",
        "transitioned",
    ]
    assert decaying.run() == DecayResult("pods", DocumentState.CLAIMED, DocumentState.DEMOTED, 0.3, 0.0, True)


def test_running_again_at_the_same_time_changes_nothing(decaying: Decaying) -> None:
    """The second run at the same moment finds the scores that are there, and moves nothing."""
    decaying.keep(saved(fetch_count=3, last_fetched_at=START - timedelta(days=4)))
    first = decaying.run()
    record, history = decaying.record(), decaying.store.history("ada", "pods")
    second = decaying.run()
    assert (second.old_score, second.new_score, second.transitioned) == (first.new_score, first.new_score, False)
    assert (decaying.record(), decaying.store.history("ada", "pods")) == (record, history)


def test_only_saved_documents_are_scored(decaying: Decaying) -> None:
    """A run gives a result for each CLAIMED and PINNED document of the user, sorted by id, and for no other."""
    for doc_id, state in [
        ("z", DocumentState.CLAIMED),
        ("b", DocumentState.PINNED),
        ("s", DocumentState.SURFACED),
        ("d", DocumentState.DEMOTED),
        ("a", DocumentState.CLAIMED),
    ]:
        decaying.keep(saved(doc_id, user_state=state))
    decaying.keep(saved("c", user_id="bob", decay_score=0.123))
    assert [result.doc_id for result in decaying.engine.run_for_user("ada")] == ["a", "b", "z"]
    assert decaying.record("c", "bob").decay_score == 0.123
    assert decaying.engine.run_for_user("nobody") == []


def test_a_pin_comes_when_the_score_held_for_seven_days(decaying: Decaying) -> None:
    """CLAIMED becomes PINNED at exactly seven days above the threshold, not a moment before."""
    decaying.keep(saved(explicit_signal=1.0))
    assert not decaying.run().transitioned
    decaying.clock.now = START + timedelta(days=7) - MOMENT
    assert decaying.run().new_state is DocumentState.CLAIMED
    decaying.clock.now = START + timedelta(days=7)
    result = decaying.run()
    assert (result.new_state, result.transitioned) == (DocumentState.PINNED, True)
    record = decaying.record()
    assert (record.pinned_at, record.pinned_by_user) == (START + timedelta(days=7), False)
    assert [event.what for event in decaying.store.history("ada", "pods")] == ["pinned"]


def test_a_pin_keeps_the_copy(decaying: Decaying) -> None:
    """Promotion leaves content, chunks and their hits as they are."""
    decaying.keep(saved(explicit_signal=1.0, pin_candidate_since=START - timedelta(days=7)))
    before = decaying.store.chunk_store.load_chunks("ada", "pods")
    assert decaying.run().new_state is DocumentState.PINNED
    assert decaying.store.chunk_store.load_chunks("ada", "pods") == before
    assert len(before) == 4
    assert decaying.record().full_content == "the whole text"


def test_days_count_and_not_runs(decaying: Decaying) -> None:
    """Twenty runs within one day neither pin nor demote."""
    decaying.keep(saved("up", explicit_signal=1.0))
    decaying.keep(dying("down"), hits=[])
    for _ in range(20):
        decaying.clock.turn(hours=1)
        results = decaying.engine.run_for_user("ada")
        assert [result.new_state for result in results] == [DocumentState.CLAIMED] * 2


def test_a_dip_starts_the_hold_again(decaying: Decaying) -> None:
    """A score that fell below the pin threshold in between has to hold for seven days anew."""
    decaying.keep(saved(explicit_signal=1.0))
    decaying.run()
    decaying.clock.turn(days=4)
    decaying.engine.thumbs_down("ada", "pods")
    decaying.run()
    decaying.clock.turn(hours=1)
    decaying.engine.thumbs_up("ada", "pods")
    decaying.store.upsert(_fetched(decaying.record(), decaying.clock.now))
    decaying.run()
    decaying.clock.turn(days=7)
    decaying.clock.now -= MOMENT
    assert decaying.run().new_state is DocumentState.CLAIMED
    decaying.clock.now += MOMENT
    assert decaying.run().new_state is DocumentState.PINNED


def _fetched(record: UserDocRecord, now: datetime) -> UserDocRecord:
    record.last_fetched_at = now
    return record


def test_a_demotion_comes_when_the_score_held_for_three_days(decaying: Decaying) -> None:
    """CLAIMED becomes DEMOTED at exactly three days below the threshold; chunks and content go with it."""
    decaying.keep(dying(), hits=[])
    assert not decaying.run().transitioned
    decaying.clock.now = START + timedelta(days=3) - MOMENT
    assert decaying.run().new_state is DocumentState.CLAIMED
    assert len(decaying.chunk_texts()) == 4
    decaying.clock.now = START + timedelta(days=3)
    assert decaying.run().new_state is DocumentState.DEMOTED
    assert decaying.chunk_texts() == []
    record = decaying.record()
    assert (record.full_content, record.demoted_at) == (None, START + timedelta(days=3))
    assert [event.what for event in decaying.store.history("ada", "pods")] == ["demoted"]
    assert decaying.engine.run_for_user("ada") == []


def test_hold_days_are_settings(decaying: Decaying) -> None:
    """With hold days of zero, one run pins and demotes."""
    engine = DecayEngine(decaying.store, None, DecayConfig(pin_hold_days=0, demotion_hold_days=0), clock=decaying.clock)
    decaying.keep(saved("up", explicit_signal=1.0))
    decaying.keep(dying("down"), hits=[])
    states = {result.doc_id: result.new_state for result in engine.run_for_user("ada")}
    assert states == {"up": DocumentState.PINNED, "down": DocumentState.DEMOTED}


def test_what_rested_too_long_goes_however_often_it_was_used(state_store: StateStore) -> None:
    """`max_idle_days` lets go of a document that its score would keep for ever; the history says so."""
    decaying = Decaying(state_store, DecayConfig(max_idle_days=90))
    decaying.keep(saved(explicit_signal=1.0))

    decaying.clock.now = START + timedelta(days=90) - MOMENT
    assert decaying.run().new_state is DocumentState.CLAIMED
    decaying.clock.now += MOMENT
    result = decaying.run()

    assert (result.old_state, result.new_state) == (DocumentState.CLAIMED, DocumentState.DEMOTED)
    assert result.new_score > 0.5
    assert decaying.chunk_texts() == []
    assert decaying.record().full_content is None
    (event,) = state_store.history("ada", "pods")
    assert (event.what, event.why) == ("demoted", "not fetched for 90.0 days, 90 are the most")


@pytest.mark.parametrize(
    ("values", "state"),
    [
        ({"last_fetched_at": LONG_AGO}, DocumentState.CLAIMED),
        ({"cached_at": LONG_AGO}, DocumentState.CLAIMED),
        ({"last_fetched_at": LONG_AGO, "cached_at": LONG_AGO}, DocumentState.DEMOTED),
        ({"last_fetched_at": None, "cached_at": LONG_AGO}, DocumentState.DEMOTED),
        ({"last_fetched_at": None, "cached_at": None}, DocumentState.CLAIMED),
        (
            {"last_fetched_at": LONG_AGO, "cached_at": LONG_AGO, "user_state": DocumentState.PINNED},
            DocumentState.DEMOTED,
        ),
        (
            {
                "last_fetched_at": LONG_AGO,
                "cached_at": LONG_AGO,
                "user_state": DocumentState.PINNED,
                "pinned_by_user": True,
            },
            DocumentState.PINNED,
        ),
    ],
    ids=["saved lately", "fetched lately", "neither", "never fetched", "nobody knows", "pinned", "pinned by the user"],
)
def test_a_save_is_use_and_a_pin_of_the_users_rests_as_long_as_it_likes(
    decaying: Decaying, values: dict[str, Any], state: DocumentState
) -> None:
    """Days are counted from the last fetch or save; nothing that the user pinned goes by itself."""
    engine = DecayEngine(decaying.store, config=DecayConfig(max_idle_days=10), clock=decaying.clock)
    decaying.keep(saved(explicit_signal=1.0, **values))

    (result,) = engine.run_for_user("ada")

    assert result.new_state is state
    again = apply_decay(decaying.record(), 0.0, engine.config, decaying.clock())
    assert again.events == ()


def test_the_thresholds_themselves_count(decaying: Decaying) -> None:
    """A score equal to `pin_threshold` is on its way up; one equal to `demotion_threshold` is not on its way out."""
    only_votes = {"w_recency": 0, "w_frequency": 1, "w_explicit": 0, "w_chunk_hit": 0, "freq_cap": 4}
    config = DecayConfig(
        **only_votes, pin_threshold=0.75, demotion_threshold=0.25, pin_hold_days=0, demotion_hold_days=0
    )
    engine = DecayEngine(decaying.store, None, config, clock=decaying.clock)
    decaying.keep(saved("at pin", fetch_count=3))
    decaying.keep(saved("at demotion", fetch_count=1))
    states = {result.doc_id: result.new_state for result in engine.run_for_user("ada")}
    assert states == {"at pin": DocumentState.PINNED, "at demotion": DocumentState.CLAIMED}


def test_an_automatic_pin_falls_with_its_score(decaying: Decaying) -> None:
    """PINNED by score goes back to CLAIMED below the pin threshold, and keeps its chunks."""
    decaying.keep(saved(user_state=DocumentState.PINNED, pinned_at=START))
    decaying.clock.turn(days=60)
    result = decaying.run()
    assert (result.old_state, result.new_state) == (DocumentState.PINNED, DocumentState.CLAIMED)
    assert len(decaying.chunk_texts()) == 4
    assert decaying.record().pinned_at is None


def test_an_automatic_pin_is_not_demoted_in_one_leap(decaying: Decaying) -> None:
    """A PINNED document with a score of zero is CLAIMED first, and demoted three days later."""
    decaying.keep(dying(user_state=DocumentState.PINNED, pinned_at=START), hits=[])
    assert decaying.run().new_state is DocumentState.CLAIMED
    decaying.clock.turn(days=3)
    assert decaying.run().new_state is DocumentState.DEMOTED


def test_a_pin_by_the_user_outlives_a_year_of_runs(decaying: Decaying) -> None:
    """365 daily runs without a single fetch leave a document that the user pinned as it is, its chunks too."""
    decaying.keep(saved(explicit_signal=-1.0, fetch_count=0))
    decaying.engine.force_pin("ada", "pods")
    before = decaying.record()
    for _ in range(365):
        decaying.clock.turn(days=1)
        result = decaying.run()
        assert (result.new_state, result.transitioned) == (DocumentState.PINNED, False)
    assert decaying.record() == before
    assert len(decaying.chunk_texts()) == 4


def test_unpinning_hands_a_document_back_to_decay(decaying: Decaying) -> None:
    """After `unpin` the document is CLAIMED, and decays like any other."""
    decaying.keep(dying(), hits=[])
    decaying.engine.force_pin("ada", "pods")
    decaying.clock.turn(days=30)
    assert decaying.engine.unpin("ada", "pods").user_state is DocumentState.CLAIMED
    decaying.run()
    decaying.clock.turn(days=3)
    assert decaying.run().new_state is DocumentState.DEMOTED


def test_the_last_vote_counts_however_often(decaying: Decaying) -> None:
    """Fifty thumbs up are one; up and then down is down; each changes the score at once."""
    decaying.keep(saved(fetch_count=0, explicit_signal=0.0))
    once = decaying.engine.thumbs_up("ada", "pods")
    assert once.explicit_signal == 1.0
    assert once.decay_score == pytest.approx((0.40 + 0.20 + 0.15) / 1.05)
    for _ in range(49):
        decaying.engine.thumbs_up("ada", "pods")
    assert decaying.record().explicit_signal == 1.0
    assert decaying.record().decay_score == once.decay_score
    down = decaying.engine.thumbs_down("ada", "pods")
    assert down.explicit_signal == -1.0
    assert down.decay_score == pytest.approx((0.40 - 0.20 + 0.15) / 1.05)
    assert decaying.record().decay_score == down.decay_score


def test_a_vote_against_leaves_the_users_pin(decaying: Decaying) -> None:
    """A thumb down is not `unpin`."""
    decaying.keep(saved())
    decaying.engine.force_pin("ada", "pods")
    decaying.engine.thumbs_down("ada", "pods")
    assert (decaying.record().user_state, decaying.record().pinned_by_user) == (DocumentState.PINNED, True)


def test_removing_takes_the_copy_at_once(decaying: Decaying) -> None:
    """`force_remove` leaves no content and no chunk, for this user only; twice is no error."""
    decaying.keep(saved())
    decaying.keep(saved(user_id="bob"))
    for _ in range(2):
        removed = decaying.engine.force_remove("ada", "pods")
        assert removed.user_state is DocumentState.DEMOTED
    assert (decaying.record().full_content, decaying.chunk_texts()) == (None, [])
    assert (decaying.record("pods", "bob").full_content, len(decaying.chunk_texts("pods", "bob"))) == (
        "the whole text",
        4,
    )


def test_an_unsaved_document_can_not_be_pinned_by_the_engine(decaying: Decaying) -> None:
    """The engine has no content to save: pinning an unsaved document is refused, and changes nothing."""
    FetchCounter(decaying.store, clock=decaying.clock).record_fetch("ada", "pods", "Pods", "pods.md")
    before = decaying.record()
    with pytest.raises(InvalidTransitionError, match=r"'pods'.*'ada'.*SURFACED"):
        decaying.engine.force_pin("ada", "pods")
    assert decaying.record() == before


def test_a_document_without_a_pin_can_not_be_unpinned(decaying: Decaying) -> None:
    """`unpin` of a CLAIMED document is refused, and changes nothing."""
    decaying.keep(saved())
    before = decaying.record()
    with pytest.raises(InvalidTransitionError, match=r"'pods'.*'ada'.*CLAIMED"):
        decaying.engine.unpin("ada", "pods")
    assert decaying.record() == before


@pytest.mark.parametrize("action", ["thumbs_up", "thumbs_down", "force_pin", "unpin", "force_remove"])
def test_an_unknown_document_is_named(decaying: Decaying, action: str) -> None:
    """Each action on a document that the user never met is a LookupError with both ids, and makes no record."""
    with pytest.raises(UnknownDocumentError, match=r"'ada'.*'never met'") as caught:
        getattr(decaying.engine, action)("ada", "never met")
    assert isinstance(caught.value, LookupError)
    assert decaying.store.get("ada", "never met") is None


def test_a_pin_that_sinks_is_settled_in_one_run(decaying: Decaying) -> None:
    """With no hold days a pin whose score fell below both thresholds goes at once; the same run again finds nothing."""
    config = DecayConfig(demotion_hold_days=0)
    sunk = saved(user_state=DocumentState.PINNED, fetch_count=0, last_fetched_at=START - timedelta(days=300))
    decaying.keep(sunk, hits=[])
    engine = DecayEngine(decaying.store, config=config, clock=HandClock())

    (result,) = engine.run_for_user("ada")

    assert (result.old_state, result.new_state) == (DocumentState.PINNED, DocumentState.DEMOTED)
    assert [event.what for event in decaying.store.history("ada", "pods")] == ["unpinned", "demoted"]
    assert engine.run_for_user("ada") == []


class VotingChunks(ChunkStore):
    """Chunks during whose reading the user votes."""

    engine: DecayEngine

    def hit_rates(self, user_id: str, wanted: Mapping[str, tuple[str, int]]) -> dict[str, float]:
        self.engine.thumbs_up(user_id, "pods")
        return super().hit_rates(user_id, wanted)


def test_what_the_user_does_during_a_run_stands(state_store: StateStore) -> None:
    """A thumb up that comes between reading and writing of a run is still there afterwards, and counts in it."""
    chunks = VotingChunks()
    chunks.engine = DecayEngine(state_store, clock=HandClock())
    state_store.upsert(saved(fetch_count=0))
    (result,) = DecayEngine(state_store, None, None, chunks, clock=HandClock()).run_for_user("ada")
    record = state_store.get("ada", "pods")
    assert record is not None
    assert (record.explicit_signal, record.decay_score) == (1.0, result.new_score)
    assert result.new_score == pytest.approx((0.40 + 0.20) / 1.05)


def test_many_documents_are_all_scored(decaying: Decaying) -> None:
    """A user with more documents than one page holds gets a result for each."""
    for number in range(620):
        decaying.store.upsert(saved(f"doc-{number:04}", fetch_count=number % 20))
    results = decaying.engine.run_for_user("ada")
    assert [result.doc_id for result in results] == [f"doc-{number:04}" for number in range(620)]
    assert results[10].new_score == pytest.approx((0.40 + 0.30 * 0.5) / 1.05)


def test_an_engine_is_made_as_in_earlier_releases() -> None:
    """Store, machine, configuration and chunk store are positional; `run_for_user` takes the time."""
    store, chunks = MemoryStateStore(), ChunkStore()
    store.upsert(dying(demotion_candidate_since=START))
    chunks.save_chunks("ada", "pods", CHUNKS)
    engine = DecayEngine(store, StateMachine(), DecayConfig(), chunks)
    (result,) = engine.run_for_user("ada", now=START + timedelta(days=3))
    assert result.new_state is DocumentState.DEMOTED
    assert chunks.load_chunks("ada", "pods") == []
