"""Counting fetches until they become a suggestion, over every store."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from copy import deepcopy
from datetime import timedelta

import pytest
from helpers import START, HandClock

from rag_wiki import (
    ConfigurationError,
    DecayEngine,
    DocumentState,
    FetchCounter,
    InvalidDocumentError,
    InvalidTransitionError,
    MemoryStateStore,
    StateMachine,
    StateStore,
    SuggestionEvent,
    UnknownDocumentError,
    UserDocRecord,
)
from rag_wiki.lifecycle.fetch_counter import count_fetch, count_miss

PODS = ("ada", "pods", "Pods", "pods.md")


class Counting:
    """A counter with its store and clock, about one document."""

    def __init__(self, store: StateStore, fetch_threshold: int = 3, reset_threshold: int = 3) -> None:
        self.store = store
        self.clock = HandClock()
        self.counter = FetchCounter(
            store,
            StateMachine(),
            fetch_threshold=fetch_threshold,
            reset_threshold=reset_threshold,
            clock=self.clock,
        )

    def fetch(self, times: int = 1) -> list[int]:
        """Fetch so often; the counts at which saving was suggested."""
        events = [self.counter.record_fetch(*PODS) for _ in range(times)]
        return [event.fetch_count for event in events if event is not None]

    def miss(self, times: int) -> None:
        """Miss so often."""
        for _ in range(times):
            self.counter.record_miss("ada", "pods")

    def decline(self) -> UserDocRecord:
        """Decline the suggestion."""
        return self.counter.decline_suggestion("ada", "pods")

    @property
    def record(self) -> UserDocRecord:
        """The stored record."""
        record = self.store.get("ada", "pods")
        assert record is not None
        return record


@pytest.fixture
def counting(state_store: StateStore) -> Counting:
    """A counter over each kind of store."""
    return Counting(state_store)


def test_names_and_defaults_are_those_of_earlier_releases() -> None:
    """`FetchCounter` takes the arguments that it always took, in their order, with their defaults."""
    parameters = inspect.signature(FetchCounter).parameters
    assert list(parameters)[:5] == [
        "store",
        "state_machine",
        "fetch_threshold",
        "reset_threshold",
        "no_resiluggest_days",
    ]
    defaults = {name: parameters[name].default for name in list(parameters)[2:5]}
    assert defaults == {"fetch_threshold": 3, "reset_threshold": 3, "no_resiluggest_days": 30}
    counter = FetchCounter(MemoryStateStore(), StateMachine(), 2, 3, 30)
    assert [counter.record_fetch(*PODS) is not None for _ in range(3)] == [False, True, False]


def test_the_suggestion_comes_once_at_the_threshold(counting: Counting) -> None:
    """The third fetch suggests saving; the fourth and later ones don't repeat it."""
    events = [counting.counter.record_fetch(*PODS) for _ in range(6)]
    assert events == [None, None, SuggestionEvent("ada", "pods", "Pods", "pods.md", 3), None, None, None]
    assert counting.record.user_state is DocumentState.SUGGESTED
    assert counting.record.suggestion_sent
    assert counting.record.fetch_count == 6


def test_a_first_fetch_makes_a_surfaced_record(counting: Counting) -> None:
    """Before the threshold the document is SURFACED, with its count and the time of the fetch."""
    counting.fetch()
    assert counting.record.user_state is DocumentState.SURFACED
    assert (counting.record.fetch_count, counting.record.last_fetched_at) == (1, START)
    later = counting.clock.turn(days=1)
    counting.fetch()
    assert (counting.record.fetch_count, counting.record.last_fetched_at) == (2, later)


def test_each_decline_doubles_the_gap(counting: Counting) -> None:
    """With a threshold of 3, declining each time, suggestions come at 3, then 6, 12 and 24 fetches later."""
    suggested = []
    for _ in range(50):
        for count in counting.fetch():
            suggested.append(count)
            counting.decline()
    assert suggested == [3, 9, 21, 45]


def test_the_gap_counts_from_the_moment_of_the_decline(counting: Counting) -> None:
    """Declined at the fifth fetch, the next suggestion comes at the eleventh."""
    counting.fetch(5)
    assert counting.decline().next_suggest_at == 11
    assert counting.record.user_state is DocumentState.SURFACED
    assert counting.fetch(10) == [11]


def test_declining_is_kept_by_the_store(counting: Counting) -> None:
    """A counter made later over the same store knows of the decline."""
    counting.fetch(3)
    counting.decline()
    again = Counting(counting.store)
    assert again.fetch(20) == [9]


def test_absence_starts_the_count_again(counting: Counting) -> None:
    """After three misses in a row the count is zero; after two it still stands."""
    counting.fetch(2)
    counting.miss(2)
    assert (counting.record.fetch_count, counting.record.queries_missed) == (2, 2)
    counting.miss(1)
    assert counting.record.fetch_count == 0
    assert counting.fetch(3) == [3]


def test_a_fetch_ends_a_row_of_misses(counting: Counting) -> None:
    """Misses count in a row only: two, a fetch, and two more reset nothing."""
    counting.fetch()
    counting.miss(2)
    counting.fetch()
    counting.miss(2)
    assert counting.record.fetch_count == 2
    assert counting.fetch() == [3]


def test_a_reset_keeps_the_gap_that_was_earned(counting: Counting) -> None:
    """Declined once and then absent, a document is suggested at 6 fetches, not at 3; declined twice, at 12."""
    counting.fetch(3)
    counting.decline()
    counting.miss(3)
    assert counting.record.fetch_count == 0
    assert counting.fetch(6) == [6]
    counting.decline()
    counting.miss(3)
    assert counting.fetch(20) == [12]


def test_a_pending_suggestion_lapses(counting: Counting) -> None:
    """A suggested document that stays away is SURFACED again, and is suggested anew by three more fetches."""
    counting.fetch(3)
    counting.miss(3)
    record = counting.record
    assert (record.user_state, record.suggestion_sent, record.fetch_count) == (DocumentState.SURFACED, False, 0)
    assert counting.fetch(3) == [3]


def test_a_lapsed_suggestion_can_still_be_accepted(counting: Counting) -> None:
    """The button is still on somebody's screen: accepting after the lapse saves the document."""
    counting.fetch(3)
    counting.miss(3)
    accepted = counting.counter.accept_suggestion("ada", "pods", "the whole text")
    assert accepted.user_state is DocumentState.CLAIMED
    assert (counting.record.user_state, counting.record.full_content) == (DocumentState.CLAIMED, "the whole text")
    assert counting.record.cached_at == START


def test_a_saved_document_only_grows_its_count(counting: Counting) -> None:
    """Fetches of a saved document count, and never suggest."""
    counting.fetch(3)
    counting.counter.accept_suggestion("ada", "pods", "the whole text")
    assert counting.fetch(5) == []
    assert (counting.record.user_state, counting.record.fetch_count) == (DocumentState.CLAIMED, 8)
    counting.miss(5)
    assert (counting.record.user_state, counting.record.fetch_count) == (DocumentState.CLAIMED, 8)


def test_a_demoted_document_comes_back_with_a_fresh_count(counting: Counting) -> None:
    """Fetched again after demotion it is SURFACED with count 1, and suggested at the third fetch."""
    counting.store.upsert(
        UserDocRecord(
            *PODS,
            user_state=DocumentState.DEMOTED,
            fetch_count=17,
            decline_count=2,
            next_suggest_at=40,
            demoted_at=START,
        )
    )
    assert counting.fetch() == []
    assert (counting.record.user_state, counting.record.fetch_count) == (DocumentState.SURFACED, 1)
    assert counting.record.demoted_at is None
    assert counting.fetch(2) == [3]


def test_after_a_removal_nothing_is_suggested_for_thirty_days(counting: Counting) -> None:
    """A removed document is counted again, and suggested once, not a moment before 30 days have passed."""
    counting.fetch(3)
    counting.counter.accept_suggestion("ada", "pods", "the whole text")
    DecayEngine(counting.store, clock=counting.clock).force_remove("ada", "pods")
    assert counting.fetch(10) == []
    counting.clock.now = START + timedelta(days=30) - timedelta(microseconds=1)
    assert counting.fetch() == []
    counting.clock.now = START + timedelta(days=30)
    assert counting.fetch(3) == [12]


def test_another_users_count_is_their_own(counting: Counting) -> None:
    """Two users who fetch the same document have a count each."""
    counting.fetch(2)
    assert counting.counter.record_fetch("bob", *PODS[1:]) is None
    assert counting.fetch() == [3]
    bobs = counting.store.get("bob", "pods")
    assert bobs is not None
    assert bobs.fetch_count == 1


def test_each_step_is_told_by_the_history(counting: Counting) -> None:
    """Surfaced, suggested, declined, lapsed, suggested, saved: each is an event with its time, states and count."""
    counting.fetch(3)
    counting.clock.turn(days=1)
    counting.decline()
    counting.miss(3)
    counting.fetch(6)
    counting.counter.accept_suggestion("ada", "pods", "text")
    events = counting.store.history("ada", "pods")
    assert [(event.what, event.to_state.value, event.fetch_count) for event in events] == [
        ("surfaced", "SURFACED", 1),
        ("suggested", "SUGGESTED", 3),
        ("declined", "SURFACED", 3),
        ("lapsed", "SURFACED", 3),
        ("suggested", "SUGGESTED", 6),
        ("saved", "CLAIMED", 6),
    ]
    assert [event.at for event in events[:3]] == [START, START, START + timedelta(days=1)]


def test_missing_an_unknown_document_is_no_error(counting: Counting) -> None:
    """A miss of a document without a record makes none."""
    counting.counter.record_miss("ada", "never met")
    assert counting.store.get("ada", "never met") is None


def test_actions_on_an_unknown_document_say_so(counting: Counting) -> None:
    """Accepting or declining what the user never met is a LookupError that names both, and makes no record."""
    actions: list[Callable[[], UserDocRecord]] = [
        lambda: counting.counter.accept_suggestion("ada", "never met", "text"),
        lambda: counting.counter.decline_suggestion("ada", "never met"),
    ]
    for act in actions:
        with pytest.raises(UnknownDocumentError, match=r"'ada'.*'never met'") as caught:
            act()
        assert isinstance(caught.value, LookupError)
    assert counting.store.get("ada", "never met") is None


@pytest.mark.parametrize("state", [DocumentState.CLAIMED, DocumentState.PINNED])
def test_declining_what_is_saved_leaves_it_saved(state_store: StateStore, state: DocumentState) -> None:
    """A decline that comes after the save, from another screen perhaps, changes nothing and tells nothing."""
    state_store.upsert(UserDocRecord(*PODS, user_state=state, fetch_count=4, full_content="text"))
    before = state_store.get("ada", "pods")
    assert FetchCounter(state_store).decline_suggestion("ada", "pods").user_state is state
    assert (state_store.get("ada", "pods"), state_store.history("ada", "pods")) == (before, [])


def test_a_demoted_document_can_not_be_declined(state_store: StateStore) -> None:
    """Declining a demoted document is refused, and leaves it as it was."""
    state_store.upsert(UserDocRecord(*PODS, user_state=DocumentState.DEMOTED))
    before = state_store.get("ada", "pods")
    with pytest.raises(InvalidTransitionError, match=r"'pods'.*'ada'.*DEMOTED"):
        FetchCounter(state_store).decline_suggestion("ada", "pods")
    assert state_store.get("ada", "pods") == before


def test_a_demoted_document_can_not_be_accepted() -> None:
    """Accepting a demoted document is refused: it has to be fetched again first."""
    store = MemoryStateStore()
    store.upsert(UserDocRecord(*PODS, user_state=DocumentState.DEMOTED))
    with pytest.raises(InvalidTransitionError, match=r"'pods'.*'ada'.*DEMOTED.*CLAIMED"):
        FetchCounter(store).accept_suggestion("ada", "pods", "text")


@pytest.mark.parametrize("content", ["", " \n\t ", None, 7, b"bytes"])
def test_blank_content_is_refused(content: object) -> None:
    """Accepting with no text is a ValueError that names the ids, and the document stays SUGGESTED."""
    counting = Counting(MemoryStateStore())
    counting.fetch(3)
    with pytest.raises(InvalidDocumentError, match=r"'pods'.*'ada'"):
        counting.counter.accept_suggestion("ada", "pods", content)  # type: ignore[arg-type]  # that is the test
    assert counting.record.user_state is DocumentState.SUGGESTED


@pytest.mark.parametrize("name", ["fetch_threshold", "reset_threshold"])
@pytest.mark.parametrize("value", [0, -1, True, 2.5, "3"])
def test_impossible_settings_are_refused(name: str, value: object) -> None:
    """A threshold below 1, or not a whole number, is a ValueError that names it."""
    with pytest.raises(ConfigurationError, match=name):
        FetchCounter(MemoryStateStore(), **{name: value})  # type: ignore[arg-type]  # that is the test


def test_the_setting_without_effect_warns() -> None:
    """`no_resiluggest_days` still is accepted, with a DeprecationWarning."""
    with pytest.warns(DeprecationWarning, match="no_resiluggest_days"):
        FetchCounter(MemoryStateStore(), no_resiluggest_days=7)


def test_the_rules_return_new_records() -> None:
    """Counting a fetch or a miss leaves the record that it was given alone."""
    record = UserDocRecord(*PODS, fetch_count=2, last_fetched_at=START, queries_missed=2)
    before = deepcopy(record)
    fetched = count_fetch(record, fetch_threshold=3, reset_threshold=3, now=START)
    missed = count_miss(record, fetch_threshold=3, reset_threshold=3, now=START)
    assert record == before
    assert (fetched.record.fetch_count, fetched.record.queries_missed) == (3, 0)
    assert (missed.record.fetch_count, missed.record.queries_missed) == (0, 3)
