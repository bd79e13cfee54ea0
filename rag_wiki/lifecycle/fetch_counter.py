"""Counting fetches, and when they become a suggestion."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

from rag_wiki.clock import Clock, as_utc, utc_now
from rag_wiki.config import RagWikiRetrieverConfig
from rag_wiki.errors import InvalidDocumentError, InvalidTransitionError, UnknownDocumentError
from rag_wiki.lifecycle.state_machine import StateMachine, describe, move
from rag_wiki.observing import Cause, observations_of
from rag_wiki.storage.base import StateStore
from rag_wiki.storage.records import (
    DocumentEvent,
    DocumentState,
    UserChange,
    UserDocRecord,
    UserView,
    check_doc_id,
    join_halves,
)

__all__ = ["FetchCounter", "Step", "SuggestionEvent", "count_fetch", "count_miss", "decline", "known"]

_LONGEST_GAP_EXPONENT = 30


@dataclass(frozen=True)
class SuggestionEvent:
    """A document came back often enough: ask the user whether to save it."""

    user_id: str
    doc_id: str
    doc_title: str
    doc_path: str
    fetch_count: int


class Step(NamedTuple):
    """What a rule made of one record."""

    record: UserDocRecord
    events: tuple[DocumentEvent, ...] = ()
    suggestion: SuggestionEvent | None = None


def known(view: UserView, doc_id: str) -> UserDocRecord:
    """The record that a user's action is about.

    Raises:
        UnknownDocumentError: There is none.
    """
    record = view.records.get(join_halves(doc_id))
    if record is None:
        raise UnknownDocumentError(view.user_id, doc_id)
    return record


def gap(fetch_threshold: int, declines: int) -> int:
    """Fetches from one suggestion to the next after so many declines: the threshold, ×2, ×4, ×8 and so on."""
    return fetch_threshold << min(declines, _LONGEST_GAP_EXPONENT)


def count_fetch(record: UserDocRecord, *, fetch_threshold: int, reset_threshold: int, now: datetime) -> Step:
    """A query fetched this document, which is not saved: count it, and suggest saving when it is time."""
    before = record
    events: list[DocumentEvent] = []
    first_time = record.fetch_count == 0 and record.last_fetched_at is None
    came_back = record.user_state in (DocumentState.GLOBAL, DocumentState.DEMOTED)
    if came_back:
        record = move(record, DocumentState.SURFACED, now)
    elif record.queries_missed >= reset_threshold and record.counting:
        lapsed = lapse(record, fetch_threshold, now)
        record, events = lapsed.record, [*lapsed.events]
    record = record.changed(**one_more_fetch(record, now))
    if came_back or first_time:
        why = "fetched again after it was let go" if came_back else "fetched for the first time"
        events.append(describe(before, record, "surfaced", why, now))
    if not suggestion_due(record, fetch_threshold, now):
        return Step(record, tuple(events))
    before, record = record, move(record, DocumentState.SUGGESTED, now)
    why = f"fetched {record.fetch_count} times"
    events.append(describe(before, record, "suggested", why, now))
    suggestion = SuggestionEvent(record.user_id, record.doc_id, record.doc_title, record.doc_path, record.fetch_count)
    return Step(record, tuple(events), suggestion)


def one_more_fetch(record: UserDocRecord, now: datetime) -> dict[str, Any]:
    """What one more fetch changes in a record."""
    return {"fetch_count": record.fetch_count + 1, "last_fetched_at": now, "queries_missed": 0}


def suggestion_due(record: UserDocRecord, fetch_threshold: int, now: datetime) -> bool:
    """Whether saving this document should be suggested now."""
    return (
        record.user_state is DocumentState.SURFACED
        and record.fetch_count >= (record.next_suggest_at or fetch_threshold)
        and (record.no_resiluggest_until is None or now >= record.no_resiluggest_until)
    )


def count_miss(record: UserDocRecord, *, fetch_threshold: int, reset_threshold: int, now: datetime) -> Step:
    """A query did not fetch this document; after `reset_threshold` of them its count starts again."""
    record = record.changed(queries_missed=record.queries_missed + 1)
    if record.counting and record.queries_missed >= reset_threshold:
        return lapse(record, fetch_threshold, now)
    return Step(record)


def lapse(record: UserDocRecord, fetch_threshold: int, now: datetime) -> Step:
    """Start a count again at zero, and let a pending suggestion go; the gap earned by declines stays."""
    why = f"absent from {record.queries_missed} queries in a row; counted anew"
    after = move(record, DocumentState.SURFACED, now).changed(
        fetch_count=0,
        next_suggest_at=gap(fetch_threshold, record.decline_count) if record.decline_count else 0,
        why=why,
    )
    if record.fetch_count < 2 and not record.suggestion_sent:
        # Most documents turn up once and never again: that is no story to keep.
        return Step(after)
    return Step(after, (describe(record, after, "lapsed", why, now),))


def decline(record: UserDocRecord, fetch_threshold: int, now: datetime) -> Step:
    """The user does not want it saved: the next suggestion waits, twice as long after each decline.

    Where no suggestion is pending nothing happens: it lapsed, or was answered, perhaps on another screen.

    Raises:
        InvalidTransitionError: The document was let go.
    """
    if record.saved or record.user_state is DocumentState.SURFACED:
        return Step(record)
    if record.user_state is not DocumentState.SUGGESTED:
        msg = (
            f"document {record.doc_id!r} of user {record.user_id!r} is {record.user_state}: there is no suggestion "
            "to decline. It can be suggested again after it was fetched again."
        )
        raise InvalidTransitionError(msg)
    declines = record.decline_count + 1
    after = move(record, DocumentState.SURFACED, now).changed(
        suggestion_sent=False,
        decline_count=declines,
        next_suggest_at=record.fetch_count + gap(fetch_threshold, declines),
    )
    why = f"declined; suggested again at {after.next_suggest_at} fetches"
    return Step(after, (describe(record, after, "declined", why, now),))


class FetchCounter:
    """Counts fetches in a store, one document at a time.

    The retriever counts a whole query at once; this is for those who count themselves.

    Args:
        store: Where the records are.
        state_machine: Kept for compatibility; the table in `state_machine` rules.
        fetch_threshold: Fetches after which saving is suggested.
        reset_threshold: Misses in a row after which the count starts again.
        no_resiluggest_days: Deprecated and without effect.
        clock: Tells the time where a call does not.
    """

    def __init__(
        self,
        store: StateStore,
        state_machine: StateMachine | None = None,
        fetch_threshold: int = 3,
        reset_threshold: int = 3,
        no_resiluggest_days: int = 30,
        *,
        clock: Clock = utc_now,
    ) -> None:
        # The retriever's configuration owns the checks of these settings.
        RagWikiRetrieverConfig(
            fetch_threshold=fetch_threshold,
            reset_threshold=reset_threshold,
            no_resiluggest_days=no_resiluggest_days,
        )
        self._store = store
        self._state_machine = state_machine or StateMachine(clock)
        self._fetch_threshold = fetch_threshold
        self._reset_threshold = reset_threshold
        self._clock = clock

    def record_fetch(
        self, user_id: str, doc_id: str, doc_title: str, doc_path: str, now: datetime | None = None
    ) -> SuggestionEvent | None:
        """Count one fetch; the suggestion that it brings about, once, or `None`.

        A saved document only grows its count.
        """
        doc_id, moment = check_doc_id(doc_id), as_utc(now or self._clock())

        def decide(view: UserView) -> UserChange:
            record = view.records.get(doc_id) or self._state_machine.make_surfaced(user_id, doc_id, doc_title, doc_path)
            if record.saved:
                return UserChange(records=[record.changed(**one_more_fetch(record, moment))])
            step = count_fetch(
                record, fetch_threshold=self._fetch_threshold, reset_threshold=self._reset_threshold, now=moment
            )
            return UserChange(records=[step.record], events=step.events, outcome=step.suggestion)

        suggestion = self._change(user_id, doc_id, decide, "query").outcome
        return suggestion if isinstance(suggestion, SuggestionEvent) else None

    def record_miss(self, user_id: str, doc_id: str, now: datetime | None = None) -> None:
        """Note that a query did not fetch the document; an unknown document is no error."""
        doc_id, moment = check_doc_id(doc_id), as_utc(now or self._clock())

        def decide(view: UserView) -> UserChange:
            if doc_id not in view.records:
                return UserChange()
            step = count_miss(
                view.records[doc_id],
                fetch_threshold=self._fetch_threshold,
                reset_threshold=self._reset_threshold,
                now=moment,
            )
            return UserChange(records=[step.record], events=step.events)

        self._change(user_id, doc_id, decide, "query")

    def accept_suggestion(
        self, user_id: str, doc_id: str, full_content: str, now: datetime | None = None
    ) -> UserDocRecord:
        """Mark the document as saved with this content; chunks are the retriever's matter.

        Raises:
            UnknownDocumentError: The user never met the document.
            InvalidDocumentError: The content is blank or not a string.
            InvalidTransitionError: The document was let go.
        """
        if not isinstance(full_content, str) or not full_content.strip():
            msg = f"the content of document {doc_id!r} for user {user_id!r} must be a string that is not blank"
            raise InvalidDocumentError(msg)
        moment = as_utc(now or self._clock())

        def decide(view: UserView) -> UserChange:
            before = known(view, doc_id)
            after = before.changed() if before.saved else move(before, DocumentState.CLAIMED, moment)
            after.content_source = "argument"
            event = describe(before, after, "saved", "the user accepted", moment)
            return UserChange(records=[after], contents={doc_id: full_content}, events=[event])

        saved = self._change(user_id, doc_id, decide, "user").records[0]
        return saved.changed(full_content=full_content)

    def decline_suggestion(self, user_id: str, doc_id: str, now: datetime | None = None) -> UserDocRecord:
        """Note that the user does not want it saved; without a pending suggestion nothing happens.

        Raises:
            UnknownDocumentError: The user never met the document.
            InvalidTransitionError: The document was let go.
        """
        moment = as_utc(now or self._clock())

        def decide(view: UserView) -> UserChange:
            step = decline(known(view, doc_id), self._fetch_threshold, moment)
            return UserChange(records=[step.record], events=step.events)

        return self._change(user_id, doc_id, decide, "user").records[0]

    def _change(self, user_id: str, doc_id: str, decide: Callable[[UserView], UserChange], cause: Cause) -> UserChange:
        change = self._store.change(user_id, [doc_id], decide)
        observations_of(self._store).tell(user_id, change.events, cause)
        return change
