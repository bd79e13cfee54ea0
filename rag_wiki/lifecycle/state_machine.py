"""Which states a document can move between, and what a move does to its record.

Everything that moves a state is in this file. It does not know why somebody wants the move.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from rag_wiki.clock import Clock, as_utc, utc_now
from rag_wiki.errors import InvalidTransitionError
from rag_wiki.storage.records import NEW_LIFE, DocumentEvent, DocumentState, UserDocRecord

__all__ = ["TRANSITIONS", "InvalidTransitionError", "StateMachine", "describe", "move"]

TRANSITIONS: Mapping[DocumentState, frozenset[DocumentState]] = {
    DocumentState.GLOBAL: frozenset({DocumentState.SURFACED}),
    DocumentState.SURFACED: frozenset({DocumentState.SUGGESTED, DocumentState.CLAIMED, DocumentState.DEMOTED}),
    DocumentState.SUGGESTED: frozenset({DocumentState.SURFACED, DocumentState.CLAIMED, DocumentState.DEMOTED}),
    DocumentState.CLAIMED: frozenset({DocumentState.PINNED, DocumentState.DEMOTED}),
    DocumentState.PINNED: frozenset({DocumentState.CLAIMED, DocumentState.DEMOTED}),
    DocumentState.DEMOTED: frozenset({DocumentState.SURFACED}),
}
"""From each state, the states it can move to. Staying where one is is always harmless."""

NO_TEXTS: dict[str, Any] = {"retrieved": (), "retrieved_seen": (), "retrieved_chars": 0}
"""What a record says of retrieved texts when none are kept: these go together with the texts."""
_FRESH_COUNT: dict[str, Any] = {
    "fetch_count": 0,
    "suggestion_sent": False,
    "next_suggest_at": 0,
    "decline_count": 0,
    **NO_TEXTS,
}
_NO_CANDIDATE: dict[str, Any] = {"pin_candidate_since": None, "demotion_candidate_since": None}
_NO_PIN: dict[str, Any] = {"pinned_at": None, "pinned_by_user": False}
_NO_COPY: dict[str, Any] = {
    "full_content": None,
    "cached_at": None,
    "copy_id": None,
    "chunk_count": 0,
    "content_source": None,
    "source_version": None,
    "stale_since": None,
    "always_full_doc": False,
}


def move(record: UserDocRecord, to: DocumentState, now: datetime) -> UserDocRecord:
    """The record in another state, with the fields that the move touches.

    Raises:
        InvalidTransitionError: The table has no such step.
    """
    came_from = record.user_state
    if to == came_from:
        return record.changed()
    if to not in TRANSITIONS[came_from]:
        allowed = ", ".join(sorted(TRANSITIONS[came_from])) or "none"
        msg = (
            f"document {record.doc_id!r} of user {record.user_id!r} is {came_from} and can't become {to}; "
            f"from {came_from} it can become: {allowed}"
        )
        raise InvalidTransitionError(msg)
    fields: dict[str, Any] = {}
    if to is DocumentState.SURFACED:
        fields = {"suggestion_sent": False}
        if came_from is DocumentState.DEMOTED:
            fields = {**_FRESH_COUNT, "demoted_at": None, "decay_score": 1.0, "explicit_signal": 0.0}
    elif to is DocumentState.SUGGESTED:
        fields = {"suggestion_sent": True}
    elif to is DocumentState.CLAIMED and came_from is DocumentState.PINNED:
        fields = {**_NO_PIN, **_NO_CANDIDATE}
    elif to is DocumentState.CLAIMED:
        fields = {
            "suggestion_sent": False,
            "next_suggest_at": 0,
            "decline_count": 0,
            "no_resiluggest_until": None,
            "cached_at": now,
            "cache_miss_streak": 0,
            **_NO_CANDIDATE,
        }
    elif to is DocumentState.PINNED:
        fields = {"pinned_at": now, **_NO_CANDIDATE}
    elif to is DocumentState.DEMOTED:
        fields = {**_FRESH_COUNT, **_NO_PIN, **_NO_CANDIDATE, **_NO_COPY, "demoted_at": now, "life": NEW_LIFE}
    return record.changed(user_state=to, **fields)


def describe(before: UserDocRecord, after: UserDocRecord, what: str, why: str, now: datetime) -> DocumentEvent:
    """The event that tells of a step, at the count and score that it was taken at."""
    return DocumentEvent(
        doc_id=after.doc_id,
        at=now,
        what=what,
        why=why,
        from_state=before.user_state,
        to_state=after.user_state,
        # A step that starts the count afresh is told at the count that it ended.
        fetch_count=after.fetch_count or before.fetch_count,
        decay_score=after.decay_score,
    )


class StateMachine:
    """The lifecycle as an object, for those who move records themselves."""

    def __init__(self, clock: Clock = utc_now) -> None:
        self._clock = clock

    def can_transition(self, record: UserDocRecord, to: DocumentState) -> bool:
        """Whether the record can move to a state, or is in it already."""
        return to == record.user_state or to in TRANSITIONS[record.user_state]

    def transition(self, record: UserDocRecord, to: DocumentState, now: datetime | None = None) -> UserDocRecord:
        """A new record in the state `to`; the one given stays as it is.

        Raises:
            InvalidTransitionError: There is no such step; `TRANSITIONS` lists them.
        """
        return move(record, DocumentState(to), as_utc(now or self._clock()))

    @staticmethod
    def make_surfaced(user_id: str, doc_id: str, doc_title: str, doc_path: str) -> UserDocRecord:
        """The record of a document that a user meets for the first time."""
        return UserDocRecord(user_id=user_id, doc_id=doc_id, doc_title=doc_title, doc_path=doc_path)
