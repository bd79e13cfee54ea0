"""What a query does to a user's records: one function of what is known, what was found, and now."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any, NamedTuple, Protocol

from rag_wiki.lifecycle.decay_engine import demote
from rag_wiki.lifecycle.fetch_counter import Step, SuggestionEvent, count_fetch, lapse, one_more_fetch
from rag_wiki.lifecycle.kept_texts import last_seen
from rag_wiki.lifecycle.state_machine import StateMachine, describe
from rag_wiki.storage.records import (
    NOTHING,
    DocumentEvent,
    DocumentState,
    RetrievedText,
    UserChange,
    UserDocRecord,
    UserView,
)

__all__ = ["FetchedDocument", "FoundText", "QueryFindings", "QueryOutcome", "QueryRules", "account_for_query"]

MOST_TEXTS = 64
MOST_TEXT_CHARS = 200_000
"""Bounds of what is kept of an unsaved document for saving it."""


class QueryRules(NamedTuple):
    """The settings that counting goes by."""

    fetch_threshold: int
    reset_threshold: int
    max_cache_miss_streak: int
    """For each saved document: of many, each is hit the more seldom."""


class FoundText(Protocol):
    """A text among the global results. Most were seen before; only what is new to keep is put into its stored form."""

    @property
    def digest(self) -> str:
        """What tells it from other texts."""

    @property
    def length(self) -> int:
        """Its characters."""

    @property
    def retrieved_text(self) -> RetrievedText:
        """It, as it is kept for saving."""


class FetchedDocument(NamedTuple):
    """A document in the global results of a query."""

    doc_title: str
    doc_path: str
    texts: Sequence[FoundText] = ()
    is_shown: bool = True
    """Whether there was room for a piece or copy of it in the answer."""


class QueryFindings(NamedTuple):
    """What a query found."""

    fetched: Mapping[str, FetchedDocument] = NOTHING
    answered: Mapping[str, tuple[str, tuple[int, ...]]] = NOTHING
    """Saved documents whose copy answered: document id → (copy id, chunk indices)."""
    matched: Collection[str] = frozenset()
    """Saved documents with a chunk at or above the threshold, whether or not there was room for them."""
    stale: Mapping[str, tuple[str, str]] = NOTHING
    """Saved documents whose source was seen to differ: document id → (copy id, what was seen)."""
    searched: Collection[str] | None = None
    """Saved documents that a semantic search compared; `None` when none ran."""
    asked: bool = True
    """Whether the wrapped retriever was asked: where it was not, absence from its results means nothing."""
    began_at: int = 0
    """The user's revision when the query began."""


class QueryOutcome(NamedTuple):
    """What came of it, for whoever asked."""

    records: Mapping[str, UserDocRecord]
    """The records of all documents concerned, as they are now."""
    suggestions: Sequence[SuggestionEvent] = ()
    dropped: Sequence[tuple[str, str | None]] = ()
    """Documents that were let go, with the copies that are now nobody's: (document id, copy id)."""


def account_for_query(view: UserView, found: QueryFindings, rules: QueryRules, now: datetime) -> UserChange:
    """Count what was fetched, credit what answered, let lapse and demote what was missed too often.

    Records in the change are as of after the clocks moved. A document that is not in the view and was
    not fetched is none of this query's business: its misses are the movement of the clocks.
    """
    after: dict[str, UserDocRecord] = {}
    events: list[DocumentEvent] = []
    suggestions: list[SuggestionEvent] = []
    texts: list[RetrievedText] = []
    clear: list[str] = []
    gone: list[tuple[str, str | None]] = []
    for doc_id in {**view.records, **found.fetched}:
        record = view.records.get(doc_id)
        step = _account_for_document(record, doc_id, view, found, rules, now)
        if step is None:
            continue
        kept = step.record
        fresh, anew = _note_texts(record, kept, found, doc_id, view.clocks.queries + 1)
        if record is not None:
            if _is_missed_only(record, kept, found):
                continue
            anew = anew or (len(record.retrieved) > 0 and _is_back(record, kept))
            if record.saved and not kept.saved:
                gone.append((doc_id, record.copy_id))
        if anew:
            clear.append(doc_id)
        events += step.events
        if step.suggestion is not None:
            suggestions.append(step.suggestion)
        texts += fresh
        after[doc_id] = kept
    return UserChange(
        records=list(after.values()),
        contents={doc_id: None for doc_id, _ in gone},
        events=events,
        texts=texts,
        clear_texts=[*clear, *(doc_id for doc_id, _ in gone)],
        chunk_hits={
            doc_id: hits
            for doc_id, hits in found.answered.items()
            if hits[1] and doc_id in after and _is_of(after[doc_id], found.answered)
        },
        hit_at=now,
        queries=1 if found.asked else 0,
        searches=0 if found.searched is None else 1,
        outcome=QueryOutcome({**view.records, **after}, suggestions, gone),
        own=True,
    )


def _is_of(record: UserDocRecord, found: Mapping[str, tuple[str, object]]) -> bool:
    """Whether a finding is about the copy that the record names now: it may have been replaced meanwhile."""
    return record.doc_id in found and found[record.doc_id][0] == (record.copy_id or "")


def _is_missed_only(before: UserDocRecord, record: UserDocRecord, found: QueryFindings) -> bool:
    """Whether nothing happened to a saved document but one more miss, which the movement of the clocks tells."""
    missed, streak = before.queries_missed, before.cache_miss_streak
    if record.queries_missed != missed + found.asked or not (before.saved and record.saved):
        return False
    counts = found.searched is not None and before.streak_counts
    if record.cache_miss_streak != streak + counts:
        return False
    return record.changed(queries_missed=missed, cache_miss_streak=streak) == before


def _is_back(before: UserDocRecord, record: UserDocRecord) -> bool:
    return before.user_state is DocumentState.DEMOTED and record.user_state is not DocumentState.DEMOTED


def _account_for_document(
    record: UserDocRecord | None,
    doc_id: str,
    view: UserView,
    found: QueryFindings,
    rules: QueryRules,
    now: datetime,
) -> Step | None:
    fetched = found.fetched.get(doc_id)
    if record is None or not record.saved:
        if record is not None and record.user_state is DocumentState.DEMOTED and 0 < found.began_at < record.life:
            # Let go since the query began: what was found before the removal does not undo it.
            return None
        if fetched is not None:
            named = record or StateMachine.make_surfaced(view.user_id, doc_id, fetched.doc_title, fetched.doc_path)
            if (named.doc_title, named.doc_path) != (fetched.doc_title, fetched.doc_path):
                named = named.changed(doc_title=fetched.doc_title, doc_path=fetched.doc_path)
            return count_fetch(
                named, fetch_threshold=rules.fetch_threshold, reset_threshold=rules.reset_threshold, now=now
            )
        missed = record is not None and record.counting and found.asked
        if record is not None and missed and record.queries_missed + 1 >= rules.reset_threshold:
            return lapse(record.changed(queries_missed=record.queries_missed + 1), rules.fetch_threshold, now)
        return None
    return _account_for_saved(record, fetched, found, rules.max_cache_miss_streak * max(view.saved, 1), now)


def _account_for_saved(
    record: UserDocRecord,
    fetched: FetchedDocument | None,
    found: QueryFindings,
    most_misses: int,
    now: datetime,
) -> Step | None:
    doc_id = record.doc_id
    events: tuple[DocumentEvent, ...] = ()
    # Found by the source and shown, it is in use, whether or not its copy had an answer: a threshold that is too high
    # for the model would else let go of what the user asks about all the time, to suggest it again.
    shown = fetched is not None and fetched.is_shown
    is_hit = doc_id in found.matched or shown
    values: dict[str, Any] = {}
    if shown or _is_of(record, found.answered):
        values = one_more_fetch(record, now)
    elif found.asked:
        values["queries_missed"] = record.queries_missed + 1
    if record.stale_since is None and _is_of(record, found.stale):
        values["stale_since"] = now
        events = (describe(record, record.changed(**values), "stale", found.stale[doc_id][1], now),)
    if is_hit:
        return Step(record.changed(**values, cache_miss_streak=0), events)
    if found.searched is not None and record.streak_counts:
        # Where its vectors could not be compared this time, that is no miss.
        streak = values["cache_miss_streak"] = record.cache_miss_streak + 1 if doc_id in found.searched else 0
        if streak >= most_misses:
            gone = demote(record.changed(**values), f"no hit in {streak} searches in a row", now)
            return Step(gone.record, (*events, *gone.events))
    return Step(record.changed(**values), events) if values else None


def _note_texts(
    before: UserDocRecord | None, record: UserDocRecord, found: QueryFindings, doc_id: str, query: int
) -> tuple[Sequence[RetrievedText], bool]:
    """Note in a step's own record which texts were seen; the new ones to keep for saving, and whether that starts anew.

    For a saved document texts are kept only while they can serve a refresh: when its copy is stale, or was
    made of retrieved texts and may be incomplete. What is kept is bounded, and holds what was seen last: where
    that finds no room beside what was seen before, it is kept in its place.
    """
    fetched = found.fetched.get(doc_id)
    wanted = not record.saved or record.stale_since is not None or record.content_source == "retrieved"
    anew = record.stale_since is not None and before is not None and before.stale_since is None
    if not anew and (fetched is None or not wanted):
        return (), False
    texts = fetched.texts if fetched is not None else ()
    digests = {text.digest for text in texts}
    if not anew and digests.issubset(record.retrieved):
        # Nearly always: all of them were seen before.
        times = zip(record.retrieved, record.retrieved_seen, strict=False)
        record.retrieved_seen = tuple([query if text in digests else at for text, at in times])
        return (), False
    shown = {text.digest: text for text in texts if text.length <= MOST_TEXT_CHARS}
    known, chars = ({}, 0) if anew else (last_seen(record), record.retrieved_chars)
    fresh = _with_room([text for digest, text in shown.items() if digest not in known], len(known), chars)
    if len(fresh) < len(shown.keys() - known.keys()) and not known.keys() <= shown.keys():
        anew, known, chars = True, {}, 0
        fresh = _with_room(shown.values(), 0, 0)
    seen = {digest: query if digest in shown else at for digest, at in known.items()}
    seen |= dict.fromkeys((text.digest for text in fresh), query)
    record.retrieved, record.retrieved_seen = tuple(seen), tuple(seen.values())
    record.retrieved_chars = chars + sum(text.length for text in fresh)
    return [replace(text.retrieved_text, first_seen=query) for text in fresh], anew


def _with_room(texts: Iterable[FoundText], kept: int, chars: int) -> list[FoundText]:
    """Those texts that find room beside what is kept, in their order."""
    fitting: list[FoundText] = []
    for text in texts:
        if kept + len(fitting) < MOST_TEXTS and chars + text.length <= MOST_TEXT_CHARS:
            fitting.append(text)
            chars += text.length
    return fitting
