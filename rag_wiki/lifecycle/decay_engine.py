"""Scores of saved documents: who is promoted, who is let go, and the user's own say in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rag_wiki import events
from rag_wiki.clock import Clock, as_utc, days_between, later, utc_now
from rag_wiki.config import DecayConfig
from rag_wiki.errors import InvalidTransitionError
from rag_wiki.lifecycle.fetch_counter import Step, known
from rag_wiki.lifecycle.state_machine import NO_TEXTS, StateMachine, describe, move
from rag_wiki.observing import observations_of
from rag_wiki.storage.base import StateStore
from rag_wiki.storage.chunk_store import ChunkStore
from rag_wiki.storage.records import (
    NEW_LIFE,
    SAVED_STATES,
    DocumentState,
    UserChange,
    UserDocRecord,
    UserView,
    check_doc_id,
    check_user_id,
)

__all__ = [
    "DecayConfig",
    "DecayEngine",
    "DecayResult",
    "apply_decay",
    "decay_score",
    "demote",
    "pin",
    "remove",
    "unpin",
    "vote",
]

REMOVAL_QUIET = timedelta(days=30)
"""How long nothing is suggested about a document that the user removed."""


@dataclass(frozen=True, slots=True)
class DecayResult:
    """What a decay run made of one document."""

    doc_id: str
    old_state: DocumentState
    new_state: DocumentState
    old_score: float
    new_score: float
    transitioned: bool


def decay_score(record: UserDocRecord, hit_rate: float, config: DecayConfig, now: datetime) -> float:
    """How alive a document is, in [0, 1]: a pure function of its record, its chunk hit rate and `now`."""
    return float(decay_scores([record], [hit_rate], config, now)[0])


def decay_scores(
    records: Sequence[UserDocRecord], hit_rates: Sequence[float], config: DecayConfig, now: datetime
) -> NDArray[np.float64]:
    """`decay_score` of many documents, (n,) float64.

    The weighted mean of four parts, clamped: recency `exp(−λ · days since the last fetch)`, frequency
    `min(fetch_count / freq_cap, 1)`, the user's last vote in [−1, 1], and the fraction of chunks that ever
    answered.
    """
    count, last = len(records), [record.last_fetched_at or record.cached_at for record in records]
    days = np.array([0.0 if moment is None else days_between(moment, now) for moment in last])
    fetched = np.array([moment is not None for moment in last])
    fetches = np.fromiter((record.fetch_count for record in records), np.float64, count)
    votes = np.fromiter((record.explicit_signal for record in records), np.float64, count)
    total = config.w_recency + config.w_frequency + config.w_explicit + config.w_chunk_hit
    mean = (
        config.w_recency * np.exp(-config.decay_lambda * days) * fetched
        + config.w_frequency * np.minimum(fetches / config.freq_cap, 1.0)
        + config.w_explicit * votes
        + config.w_chunk_hit * np.asarray(hit_rates, np.float64)
    ) / total
    clamped: NDArray[np.float64] = np.clip(mean, 0.0, 1.0)
    return clamped


def apply_decay(record: UserDocRecord, hit_rate: float, config: DecayConfig, now: datetime) -> Step:
    """Score a saved document, and move it when its score has held long enough. Again is the same as once."""
    return apply_score(record, decay_score(record, hit_rate, config, now), config, now)


def apply_score(record: UserDocRecord, score: float, config: DecayConfig, now: datetime) -> Step:
    """What the score of a saved document brings about."""
    if record.pinned_by_user or not record.saved:
        return Step(record)
    scored = record.changed(decay_score=score)
    if config.max_idle_days is not None:
        idle = _idle_days(record, now)
        if idle >= config.max_idle_days:
            return demote(scored, f"not fetched for {idle:.1f} days, {config.max_idle_days:g} are the most", now)
    if scored.user_state is DocumentState.PINNED and score < config.pin_threshold:
        why = f"score {score:.2f} fell below the pin threshold {config.pin_threshold:g}"
        unpinned = move(scored, DocumentState.CLAIMED, now)
        # What that is worth is decided at once, so that a second run at the same time finds nothing left to do.
        further = apply_score(unpinned, score, config, now)
        return Step(further.record, (describe(scored, unpinned, "unpinned", why, now), *further.events))
    if scored.user_state is DocumentState.PINNED:
        return Step(scored)
    pins, sinks = score >= config.pin_threshold, score < config.demotion_threshold
    scored.pin_candidate_since = (record.pin_candidate_since or now) if pins else None
    scored.demotion_candidate_since = (record.demotion_candidate_since or now) if sinks else None
    if pins and _held(scored.pin_candidate_since, config.pin_hold_days, now):
        pinned = move(scored, DocumentState.PINNED, now)
        why = f"score {score:.2f} held at or above {config.pin_threshold:g} for {config.pin_hold_days:g} days"
        return Step(pinned, (describe(scored, pinned, "pinned", why, now),))
    if sinks and _held(scored.demotion_candidate_since, config.demotion_hold_days, now):
        why = f"score {score:.2f} held below {config.demotion_threshold:g} for {config.demotion_hold_days:g} days"
        return demote(scored, why, now)
    return Step(scored)


def _idle_days(record: UserDocRecord, now: datetime) -> float:
    """Days since the document was last fetched, or saved."""
    used = [moment for moment in (record.last_fetched_at, record.cached_at) if moment is not None]
    return days_between(max(used), now) if used else 0.0


def _held(since: datetime | None, hold_days: float, now: datetime) -> bool:
    return since is not None and days_between(since, now) >= hold_days


def demote(record: UserDocRecord, why: str, now: datetime) -> Step:
    """Let a saved document go."""
    after = move(record, DocumentState.DEMOTED, now)
    return Step(after, (describe(record, after, "demoted", why, now),))


def vote(record: UserDocRecord, signal: float, hit_rate: float, config: DecayConfig, now: datetime) -> Step:
    """Set the user's vote, +1 or −1; the last one counts, however often it is given."""
    after = record.changed(explicit_signal=signal)
    if after.saved:
        after.decay_score = decay_score(after, hit_rate, config, now)
    if record.explicit_signal == signal:
        # Said before: an event would only push an older one out of the history.
        return Step(after)
    why = "thumbs up" if signal > 0 else "thumbs down"
    return Step(after, (describe(record, after, "voted", why, now),))


def pin(record: UserDocRecord, now: datetime) -> Step:
    """Pin a saved document for the user: no decay and no miss streak touches it until `unpin` or removal.

    Raises:
        InvalidTransitionError: The document is not saved.
    """
    if not record.saved:
        msg = (
            f"document {record.doc_id!r} of user {record.user_id!r} is {record.user_state}: only a saved document "
            "can be pinned. RagWikiRetriever.force_pin saves it first."
        )
        raise InvalidTransitionError(msg)
    if record.pinned_by_user:
        return Step(record)
    after = move(record, DocumentState.PINNED, now).changed(pinned_by_user=True, cache_miss_streak=0)
    return Step(after, (describe(record, after, "pinned", "the user pinned it", now),))


def unpin(record: UserDocRecord, now: datetime) -> Step:
    """Take a pin away; the document stays saved.

    Raises:
        InvalidTransitionError: The document is not pinned.
    """
    if record.user_state is not DocumentState.PINNED:
        msg = (
            f"document {record.doc_id!r} of user {record.user_id!r} is {record.user_state}, not PINNED: "
            "there is no pin to take away"
        )
        raise InvalidTransitionError(msg)
    after = move(record, DocumentState.CLAIMED, now).changed(cache_miss_streak=0)
    return Step(after, (describe(record, after, "unpinned", "the user unpinned it", now),))


def remove(record: UserDocRecord, now: datetime) -> Step:
    """Remove a document for the user, whatever its state; nothing is suggested about it for 30 days."""
    until = later(now, REMOVAL_QUIET)
    after = move(record, DocumentState.DEMOTED, now).changed(no_resiluggest_until=until, life=NEW_LIFE, **NO_TEXTS)
    if record.user_state is DocumentState.DEMOTED:
        return Step(after)
    return Step(after, (describe(record, after, "removed", "the user removed it", now),))


class DecayEngine:
    """Runs the rules above over a store.

    Args:
        store: Where the records are.
        state_machine: Kept for compatibility; the table in `state_machine` rules.
        config: Weights, thresholds and hold days.
        chunk_store: Where the saved chunks are; by default beside the state. A retriever that keeps them
            elsewhere (`wiki_save_dir`) has it as `retriever.chunk_store`.
        clock: Tells the time where a call does not.
    """

    def __init__(
        self,
        store: StateStore,
        state_machine: StateMachine | None = None,
        config: DecayConfig | None = None,
        chunk_store: ChunkStore | None = None,
        *,
        clock: Clock = utc_now,
    ) -> None:
        self._store = store
        self._state_machine = state_machine or StateMachine(clock)
        self.config = config or DecayConfig()
        self._chunk_store = chunk_store or store.chunk_store
        self._clock = clock

    @property
    def clock(self) -> Clock:
        """Tells the time where a call does not."""
        return self._clock

    def run_for_user(self, user_id: str, now: datetime | None = None) -> list[DecayResult]:
        """Score all saved documents of a user and move those whose time has come.

        Documents are taken in pages, each in one atomic change, so whatever the user does meanwhile stands.
        Running it again at the same time changes nothing.

        Returns:
            A result per saved document, in the order of their ids.

        Raises:
            CorruptDataError: When all others are done: some records can't be read back.
        """
        results = [result for page in self.run_pages(user_id, now) for result in page]
        return sorted(results, key=lambda result: result.doc_id)

    def run_pages(self, user_id: str, now: datetime | None = None) -> Iterator[list[DecayResult]]:
        """`run_for_user` page by page: for a user with so many documents that their results need not be kept.

        Yields:
            The results of a page, when it is done.

        Raises:
            CorruptDataError: When all others are done: some records can't be read back.
        """
        documents = moved = 0
        with observations_of(self._store).working("decay") as run:
            for page in self._decay_pages(user_id, as_utc(now or self._clock())):
                documents += len(page)
                moved += sum(result.transitioned for result in page)
                yield page
        events.DECAY_RUN.log(
            "%d saved documents were scored, %d of them moved",
            documents,
            moved,
            user_id=user_id,
            documents=documents,
            moved=moved,
            duration_ms=round(run.milliseconds, 3),
        )

    def _decay_pages(self, user_id: str, moment: datetime) -> Iterator[list[DecayResult]]:
        pages = self._store.change_pages(
            user_id,
            SAVED_STATES,
            lambda page: self._hit_rates(user_id, page),
            lambda view, rates: _decay_page(view, rates, self.config, moment),
        )
        for change in pages:
            outcome: _PageOutcome = change.outcome
            observations_of(self._store).tell(user_id, change.events, "decay")
            for doc_id, copy_id in outcome.gone:
                # Copies go last: a sweep finds those for whom it has something to do by them.
                self._settle(user_id, doc_id)
                self._chunk_store.drop(user_id, doc_id, copy_id)
            yield outcome.results

    def sweep(self, user_id: str) -> int:
        """Remove what a crash left behind of a user's documents: copies that no record names, torn-off files.

        Only what is a day old and belongs to a document that the state store knows. Readable copies that do not fit
        their records are brought in line. Returns how many copies went.
        """
        gone = 0
        for page in self._store.pages(user_id):
            for doc_id in self._chunk_store.unsettled(user_id, page):
                self._settle(user_id, doc_id)
            # A saved record that names no copy was written by hand: which of its copies counts, it does not say.
            gone += self._chunk_store.sweep(
                user_id,
                {
                    record.doc_id: record.copy_id if record.saved else None
                    for record in page
                    if record.copy_id or not record.saved
                },
            )
        return gone

    def chunk_owners(self) -> list[str]:
        """The users for whom there may be something to sweep: those with a saved copy, named by a record or not."""
        return sorted(self._chunk_store.place.owners())

    def tidy(self) -> None:
        """Remove what a crash left half written: it says of nobody whose it is, so no user's `sweep` finds it."""
        self._chunk_store.tidy()

    def _hit_rates(self, user_id: str, page: Sequence[UserDocRecord]) -> dict[str, float]:
        named = {record.doc_id: (record.copy_id, record.chunk_count) for record in page if record.copy_id}
        # A record that was written by hand names no copy; its chunks, if any, are the newest ones.
        unnamed = [record.doc_id for record in page if record.copy_id is None]
        if unnamed:
            named |= self._chunk_store.newest_copies(user_id, unnamed)
        return self._chunk_store.hit_rates(user_id, named)

    def thumbs_up(self, user_id: str, doc_id: str, now: datetime | None = None) -> UserDocRecord:
        """Note the user's yes.

        Raises:
            UnknownDocumentError: The user never met the document.
        """
        return self._vote(user_id, doc_id, 1.0, now)

    def thumbs_down(self, user_id: str, doc_id: str, now: datetime | None = None) -> UserDocRecord:
        """Note the user's no. A pin of the user's own stays: a vote is not `unpin`.

        Raises:
            UnknownDocumentError: The user never met the document.
        """
        return self._vote(user_id, doc_id, -1.0, now)

    def force_pin(self, user_id: str, doc_id: str, now: datetime | None = None) -> UserDocRecord:
        """Pin a saved document for the user.

        Raises:
            UnknownDocumentError: The user never met the document.
            InvalidTransitionError: It is not saved.
        """
        return self._act(user_id, doc_id, now, pin)

    def unpin(self, user_id: str, doc_id: str, now: datetime | None = None) -> UserDocRecord:
        """Take a pin away; the document stays saved.

        Raises:
            UnknownDocumentError: The user never met the document.
            InvalidTransitionError: It is not pinned.
        """
        return self._act(user_id, doc_id, now, unpin)

    def force_remove(self, user_id: str, doc_id: str, now: datetime | None = None) -> UserDocRecord:
        """Remove a document for the user: copy, content and retrieved texts go, the history stays.

        It need not be readable: what is left of it is its id, and that it was removed.

        Raises:
            UnknownDocumentError: The user never met the document.
        """
        user_id, doc_id = check_user_id(user_id), check_doc_id(doc_id)
        # Named before the change: a copy that is saved after the removal is not ours to delete.
        gone = self._chunk_store.place.copies(user_id, doc_id)
        before, removed = self._act_on(user_id, doc_id, now, remove, gives_way=True)
        if before.copy_id is not None:
            gone.append(before.copy_id)
        # Also when it was removed before: an earlier try may have failed here.
        self._settle(user_id, doc_id)
        self._chunk_store.place.delete(user_id, doc_id, set(gone))
        return removed

    def _vote(self, user_id: str, doc_id: str, signal: float, now: datetime | None) -> UserDocRecord:
        record = self._store.get(user_id, doc_id)
        rate = self._hit_rates(user_id, [record]).get(doc_id, 0.0) if record is not None and record.saved else 0.0
        return self._act(user_id, doc_id, now, lambda record, moment: vote(record, signal, rate, self.config, moment))

    def _act(
        self,
        user_id: str,
        doc_id: str,
        now: datetime | None,
        rule: Callable[[UserDocRecord, datetime], Step],
    ) -> UserDocRecord:
        return self._act_on(user_id, doc_id, now, rule)[1]

    def _settle(self, user_id: str, doc_id: str) -> None:
        self._chunk_store.settle(user_id, doc_id, lambda: self._store.get(user_id, doc_id))

    def _act_on(
        self,
        user_id: str,
        doc_id: str,
        now: datetime | None,
        rule: Callable[[UserDocRecord, datetime], Step],
        *,
        gives_way: bool = False,
    ) -> tuple[UserDocRecord, UserDocRecord]:
        """Apply a rule to a record, which need not be readable if it gives way; the record before and after."""
        moment = as_utc(now or self._clock())

        def decide(view: UserView) -> UserChange:
            before = known(view, doc_id)
            step = rule(before, moment)
            # A vote on a document that was let go before leaves what is kept of it.
            gone = [doc_id] if step.record.life == NEW_LIFE else []
            return UserChange(
                records=[step.record],
                events=step.events,
                contents=dict.fromkeys(gone),
                clear_texts=gone,
                outcome=before,
            )

        if gives_way:
            change = self._store.overwrite(user_id, doc_id, decide)
        else:
            change = self._store.change(user_id, [doc_id], decide)
        observations_of(self._store).tell(user_id, change.events, "user")
        return change.outcome, change.records[0]


def _decay_page(view: UserView, rates: Mapping[str, float], config: DecayConfig, now: datetime) -> UserChange:
    """`apply_decay` to all records in view. Most scores mean nothing but themselves, which numpy sees at once."""
    before = [record for record in view.records.values() if record.saved]
    scores_of_all = decay_scores(before, [rates.get(record.doc_id, 0.0) for record in before], config, now)
    quiet = (scores_of_all >= config.demotion_threshold) & (scores_of_all < config.pin_threshold)
    if config.max_idle_days is not None:
        quiet &= np.array([_idle_days(record, now) < config.max_idle_days for record in before], dtype=bool)
    results: list[DecayResult] = []
    scores: dict[str, float] = {}
    steps: list[Step] = []
    gone: list[tuple[str, str | None]] = []
    for record, score, is_quiet in zip(before, scores_of_all.tolist(), quiet.tolist(), strict=True):
        candidate = record.pin_candidate_since is not None or record.demotion_candidate_since is not None
        if is_quiet and not candidate and record.user_state is DocumentState.CLAIMED:
            if score != record.decay_score:
                scores[record.doc_id] = score
            state = record.user_state
            results.append(DecayResult(record.doc_id, state, state, record.decay_score, score, transitioned=False))
            continue
        step = apply_score(record, score, config, now)
        if step.record != record:
            steps.append(step)
        if not step.record.saved:
            gone.append((record.doc_id, record.copy_id))
        results.append(_result(record, step.record))
    gone_ids = [doc_id for doc_id, _ in gone]
    return UserChange(
        records=[step.record for step in steps],
        scores=scores,
        contents=dict.fromkeys(gone_ids),
        clear_texts=gone_ids,
        events=[event for step in steps for event in step.events],
        outcome=_PageOutcome(results, gone),
    )


class _PageOutcome(NamedTuple):
    results: list[DecayResult]
    gone: Sequence[tuple[str, str | None]]
    """Documents that were let go, with the copies that are now nobody's."""


def _result(before: UserDocRecord, after: UserDocRecord) -> DecayResult:
    return DecayResult(
        doc_id=after.doc_id,
        old_state=before.user_state,
        new_state=after.user_state,
        old_score=before.decay_score,
        new_score=after.decay_score,
        transitioned=before.user_state != after.user_state,
    )
