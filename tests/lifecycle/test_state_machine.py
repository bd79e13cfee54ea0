"""Which states a document can move between, pair by pair."""

from __future__ import annotations

from copy import deepcopy
from datetime import datetime, timezone
from itertools import product

import pytest
from helpers import START, HandClock

from rag_wiki import DocumentState, InvalidTransitionError, RagWikiError, StateMachine, UserDocRecord

GLOBAL, SURFACED, SUGGESTED = DocumentState.GLOBAL, DocumentState.SURFACED, DocumentState.SUGGESTED
CLAIMED, PINNED, DEMOTED = DocumentState.CLAIMED, DocumentState.PINNED, DocumentState.DEMOTED

ALLOWED = {
    (GLOBAL, SURFACED),
    (SURFACED, SUGGESTED),
    (SURFACED, CLAIMED),
    (SURFACED, DEMOTED),
    (SUGGESTED, SURFACED),
    (SUGGESTED, CLAIMED),
    (SUGGESTED, DEMOTED),
    (CLAIMED, PINNED),
    (CLAIMED, DEMOTED),
    (PINNED, CLAIMED),
    (PINNED, DEMOTED),
    (DEMOTED, SURFACED),
}
MOVES = [(came_from, to) for came_from, to in product(DocumentState, repeat=2) if came_from is not to]


def record_in(state: DocumentState) -> UserDocRecord:
    """A record with something in every field that a move may touch."""
    saved = state in (CLAIMED, PINNED)
    return UserDocRecord(
        user_id="ada",
        doc_id="pods",
        doc_title="Pods",
        doc_path="pods.md",
        user_state=state,
        fetch_count=7,
        last_fetched_at=datetime(2026, 2, 1, tzinfo=timezone.utc),
        suggestion_sent=state is SUGGESTED,
        explicit_signal=-1.0,
        decay_score=0.4,
        full_content="the text" if saved else None,
        copy_id="c1" if saved else None,
        chunk_count=4 if saved else 0,
        content_source="argument" if saved else None,
        next_suggest_at=0 if saved else 19,
        decline_count=0 if saved else 2,
    )


@pytest.mark.parametrize(("came_from", "to"), MOVES)
def test_a_move_is_made_or_refused_by_the_table(came_from: DocumentState, to: DocumentState) -> None:
    """Each pair of states is either a step, or an error that names the document, the user and both states."""
    machine, record = StateMachine(), record_in(came_from)
    assert machine.can_transition(record, to) is ((came_from, to) in ALLOWED)
    if (came_from, to) in ALLOWED:
        assert machine.transition(record, to, START).user_state is to
        return
    with pytest.raises(InvalidTransitionError) as caught:
        machine.transition(record, to, START)
    assert isinstance(caught.value, RagWikiError)
    assert isinstance(caught.value, ValueError)
    for part in ("'pods'", "'ada'", came_from.value, to.value):
        assert part in str(caught.value)


@pytest.mark.parametrize("state", list(DocumentState))
def test_staying_is_harmless(state: DocumentState) -> None:
    """Asking for the state that a record is in gives an equal record, and not the same object."""
    machine, record = StateMachine(), record_in(state)
    assert machine.can_transition(record, state)
    stayed = machine.transition(record, state, START)
    assert stayed == record
    assert stayed is not record


@pytest.mark.parametrize(("came_from", "to"), MOVES)
def test_the_record_given_stays_as_it_is(came_from: DocumentState, to: DocumentState) -> None:
    """A move, made or refused, changes nothing in the record that it was asked about."""
    record = record_in(came_from)
    before = deepcopy(record)
    if (came_from, to) in ALLOWED:
        StateMachine().transition(record, to, START)
    else:
        with pytest.raises(InvalidTransitionError):
            StateMachine().transition(record, to, START)
    assert record == before


@pytest.mark.parametrize(
    ("came_from", "to", "field"),
    [
        (SUGGESTED, CLAIMED, "cached_at"),
        (SURFACED, CLAIMED, "cached_at"),
        (CLAIMED, PINNED, "pinned_at"),
        (CLAIMED, DEMOTED, "demoted_at"),
        (PINNED, DEMOTED, "demoted_at"),
        (SURFACED, DEMOTED, "demoted_at"),
    ],
)
def test_since_when_is_the_moment_that_came_in(came_from: DocumentState, to: DocumentState, field: str) -> None:
    """A move notes the `now` that it was given; a naive one is read as UTC."""
    record = record_in(came_from)
    assert getattr(StateMachine().transition(record, to, START), field) == START
    assert getattr(StateMachine().transition(record, to, START.replace(tzinfo=None)), field) == START


def test_without_a_moment_the_clock_is_asked() -> None:
    """A machine with a clock of its own uses it where a call names no time."""
    clock = HandClock()
    clock.turn(days=2)
    assert StateMachine(clock).transition(record_in(CLAIMED), PINNED).pinned_at == clock.now


def test_a_suggestion_is_out_exactly_while_suggested() -> None:
    """`suggestion_sent` is set by SUGGESTED and taken back by every way out of it."""
    machine = StateMachine()
    suggested = machine.transition(record_in(SURFACED), SUGGESTED, START)
    assert suggested.suggestion_sent
    for to in (SURFACED, CLAIMED, DEMOTED):
        assert not machine.transition(suggested, to, START).suggestion_sent


@pytest.mark.parametrize("came_from", [CLAIMED, PINNED])
def test_a_demoted_document_has_no_copy_left(came_from: DocumentState) -> None:
    """Letting a saved document go leaves no content, copy, pin or count in its record."""
    gone = StateMachine().transition(record_in(came_from), DEMOTED, START)
    assert (gone.full_content, gone.copy_id, gone.chunk_count, gone.content_source) == (None, None, 0, None)
    assert (gone.fetch_count, gone.pinned_at, gone.pinned_by_user, gone.cached_at) == (0, None, False, None)


def test_a_document_that_comes_back_starts_afresh() -> None:
    """DEMOTED to SURFACED has no count, no earned gap, no vote and no demotion time."""
    gone = StateMachine().transition(record_in(CLAIMED), DEMOTED, START)
    back = StateMachine().transition(gone, SURFACED, START)
    assert (back.fetch_count, back.next_suggest_at, back.decline_count) == (0, 0, 0)
    assert (back.explicit_signal, back.decay_score, back.demoted_at) == (0.0, 1.0, None)


def test_unpinning_keeps_the_copy() -> None:
    """PINNED to CLAIMED takes only the pin away."""
    claimed = StateMachine().transition(record_in(PINNED), CLAIMED, START)
    assert (claimed.pinned_at, claimed.pinned_by_user) == (None, False)
    assert (claimed.copy_id, claimed.full_content, claimed.fetch_count) == ("c1", "the text", 7)


def test_a_first_meeting_is_surfaced_and_uncounted() -> None:
    """`make_surfaced` gives a SURFACED record with the ids and title given, and a count of zero."""
    record = StateMachine().make_surfaced("ada", "pods", "Pods", "pods.md")
    assert record == UserDocRecord("ada", "pods", "Pods", "pods.md", user_state=SURFACED)
    assert record.fetch_count == 0
