"""What happened in this process: one owner to whom calls, changes of documents, saves and decay runs are told.

It counts them, keeps the latest durations of each stage, logs them (see `rag_wiki.events`), and passes them on to
OpenTelemetry where `rag_wiki.otel.instrument` was called. Counts are of all users of a state store together: nothing is
kept of one user, and a process that lives for a year holds no more than one that lives for a minute.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias
from weakref import WeakSet

import numpy as np

from rag_wiki import events
from rag_wiki.by_identity import ByIdentity
from rag_wiki.clock import utc_now
from rag_wiki.forks import in_each_process
from rag_wiki.storage.records import DocumentEvent, DocumentState

if TYPE_CHECKING:
    from typing_extensions import Self

    from rag_wiki.recall import Call
    from rag_wiki.storage.base import StateStore

__all__ = [
    "CallTrace",
    "Cause",
    "Instrumentation",
    "Observations",
    "ProcessStats",
    "StageTimes",
    "Work",
    "WorkTrace",
    "index_bytes",
    "instrumentation",
    "observations_of",
    "set_instrumentation",
]

Cause: TypeAlias = Literal["query", "user", "auto_save", "reindex", "decay"]
"""What brought a change about."""
Work: TypeAlias = Literal["save", "decay"]
"""What is timed besides questions."""

_MOST_SAMPLES = 1_024
"""Durations that are kept of each stage: the latest ones."""
_PERCENTILES = (50, 95, 99)
_STAGES = ("begin", "embed", "calibrate", "search", "read", "global", "apply", "total", "save", "decay")
"""In the order in which they are shown."""


@dataclass(frozen=True)
class StageTimes:
    """How long a stage took lately, in milliseconds."""

    samples: int
    """Durations that this is of: those among the latest 1,024 questions (or saves, or decay runs)."""
    p50: float
    p95: float
    p99: float


@dataclass(frozen=True)
class ProcessStats:
    """What happened in this process to all users of a state store, since its first retriever was made or it was forked.

    `calls == hits + misses + failed`. What a store carried out although its answer got lost is not in it.
    """

    since: datetime = field(default_factory=utc_now)
    calls: int = 0
    """Questions asked."""
    hits: int = 0
    """Questions that a saved copy answered; a pinned document that was only along does not make one."""
    misses: int = 0
    """Questions that none did."""
    failed: int = 0
    """Questions that ended in an error or were cancelled: the wrapped retriever failed, mostly."""
    degraded: int = 0
    """Questions (answered ones) for which part of the personal layer could not do its work."""
    asked: int = 0
    """Questions for which the wrapped retriever was asked and answered."""
    suggested: int = 0
    """Suggestions to save a document."""
    accepted: int = 0
    """Suggested documents that their user saved."""
    declined: int = 0
    lapsed: int = 0
    """Counts that began again because a document came back no more, with or without a suggestion."""
    saves: int = 0
    """Documents saved, by their user or by `auto_save`."""
    auto_saves: int = 0
    """Those of them that `auto_save` saved."""
    refreshes: int = 0
    """Copies replaced."""
    reindexed: int = 0
    """Copies embedded anew."""
    stale: int = 0
    """Copies that were seen to differ from their source."""
    pins: int = 0
    unpins: int = 0
    demotions: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("score", "misses", "user"), 0))
    """Saved copies let go by their score (decay), by misses in a row, and documents that their user removed."""
    votes: int = 0
    decay_runs: int = 0
    """Users whose saved documents were scored."""
    index_bytes: int = 0
    """Bytes of the indexes that this process holds now."""
    stages: dict[str, StageTimes] = field(default_factory=dict)
    """How long stages took lately: those of a question by the names that provenance has for them, `save`, `decay`."""

    @property
    def hit_rate(self) -> float | None:
        """The share of answered questions that a saved copy answered; `None` before there was one."""
        answered = self.hits + self.misses
        return self.hits / answered if answered else None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {**asdict(self), "since": self.since.isoformat(), "hit_rate": self.hit_rate}

    def __str__(self) -> str:
        rate = "" if self.hit_rate is None else f" ({self.hit_rate:.0%} of the answered)"
        let_go = ", ".join(f"{count:,} by {reason}" for reason, count in self.demotions.items())
        lines = [
            f"In this process, all users, since {self.since:%Y-%m-%d %H:%M} UTC",
            f"  questions    {self.calls:,}: {self.hits:,} hits{rate}, {self.misses:,} misses, {self.failed:,} failed",
            f"               {self.degraded:,} degraded; the wrapped retriever answered {self.asked:,}",
            f"  suggestions  {self.suggested:,}: {self.accepted:,} accepted, {self.declined:,} declined",
            f"               {self.lapsed:,} counts lapsed",
            f"  copies       {self.saves:,} saved ({self.auto_saves:,} by auto_save), {self.refreshes:,} refreshed",
            f"               {self.reindexed:,} embedded anew, {self.stale:,} seen to be stale",
            f"               {self.pins:,} pinned, {self.unpins:,} unpinned, let go: {let_go}",
            f"  other        decay runs {self.decay_runs:,}, votes {self.votes:,}, index {self.index_bytes:,} bytes",
        ]
        if self.stages:
            lines.append(f"  {'milliseconds':<13}{'p50':>9}{'p95':>10}{'p99':>10}{'of':>8}")
            lines += [
                f"  {stage:<13}{times.p50:>9.3f}{times.p95:>10.3f}{times.p99:>10.3f}{times.samples:>8,}"
                for stage, times in self.stages.items()
            ]
        return "\n".join(lines)


class Index(Protocol):
    """Indexes of saved copies."""

    def nbytes(self) -> int:
        """The bytes that they take."""


class CallTrace(Protocol):
    """A question in somebody's traces."""

    def stage(self, name: str, timings: dict[str, float]) -> AbstractContextManager[None]:
        """A stage of it, current while it runs; notes its milliseconds."""

    def end(self, call: Call, error: BaseException | None) -> None:
        """The question is answered, or ended in an error."""


class WorkTrace(Protocol):
    """A save or a decay run in somebody's traces."""

    def end(self, error: BaseException | None) -> None:
        """It is done, or ended in an error."""


class Instrumentation(Protocol):
    """What `Observations` passes on to."""

    def begin_call(self, call: Call) -> CallTrace:
        """A question begins; what it does from now on belongs to it."""

    def begin_work(self, name: Work) -> WorkTrace:
        """A save or a decay run begins."""

    def count(self, what: str, cause: Cause) -> None:
        """Something happened to a document, by the words of its history."""


_instrumentation: Instrumentation | None = None


def set_instrumentation(instrumentation: Instrumentation | None) -> None:
    """Pass everything on from now on, or nothing any more."""
    global _instrumentation
    _instrumentation = instrumentation


def instrumentation() -> Instrumentation | None:
    """What everything is passed on to."""
    return _instrumentation


class Observations:
    """What happened to the users of one state store in this process. Counts are exact over threads."""

    def __init__(self) -> None:
        self._indexes: WeakSet[Index] = WeakSet()
        in_each_process(self._begin)

    def _begin(self) -> None:
        """Begin at zero: a fork has done nothing yet."""
        self._lock = threading.Lock()
        self._since = utc_now()
        self._counts: Counter[str] = Counter()
        self._changes: Counter[tuple[str, Cause]] = Counter()
        self._timings: deque[Mapping[str, float]] = deque(maxlen=_MOST_SAMPLES)
        self._works: dict[Work, deque[float]] = {
            "save": deque(maxlen=_MOST_SAMPLES),
            "decay": deque(maxlen=_MOST_SAMPLES),
        }

    def holds(self, index: Index) -> None:
        """Say where the indexes of this store are kept."""
        with self._lock:
            self._indexes.add(index)

    def index_bytes(self) -> int:
        """Bytes of the indexes that this process holds."""
        with self._lock:
            indexes = list(self._indexes)
        return sum(index.nbytes() for index in indexes)

    def watch(self, call: Call) -> _Watch:
        """A `with` block around a question."""
        return _Watch(self, call)

    def working(self, name: Work) -> _Working:
        """A `with` block around a save or a decay run."""
        return _Working(self, name)

    def tell(self, user_id: str, happened: Sequence[DocumentEvent], cause: Cause) -> None:
        """A change of a user's documents was carried out."""
        for event in happened:
            accepted = event.what == "saved" and cause == "user" and event.from_state is DocumentState.SUGGESTED
            with self._lock:
                self._changes[event.what, cause] += 1
                if accepted:
                    self._changes["accepted", cause] += 1
            if _instrumentation is not None:
                _instrumentation.count(event.what, cause)
            _log_change(user_id, event, cause)

    def end_call(self, call: Call, error: BaseException | None) -> None:
        """A question is answered, or ended in an error."""
        provenance = None if error is not None else call.provenance
        counts = self._counts
        with self._lock:
            counts["calls"] += 1
            if provenance is None:
                counts["failed"] += 1
            else:
                counts["hits" if call.is_hit else "misses"] += 1
                if provenance.degraded:
                    counts["degraded"] += 1
                if provenance.asked:
                    counts["asked"] += 1
                # Whole: to take them apart is for whoever reads them. Not provenance's, which are the caller's.
                self._timings.append(call.timings)
        if events.QUERY_ANSWERED.is_on:
            _log_call(call, error)

    def end_work(self, name: Work, milliseconds: float) -> None:
        """A save or a decay run is done."""
        with self._lock:
            self._counts[name] += 1
            self._works[name].append(milliseconds)

    def read(self) -> ProcessStats:
        """What was counted so far, all at one moment."""
        with self._lock:
            since, counts, changes = self._since, Counter(self._counts), Counter(self._changes)
            timings = list(self._timings)
            latest: dict[str, list[float]] = {name: list(durations) for name, durations in self._works.items()}
        for of_a_call in timings:
            for stage, milliseconds in of_a_call.items():
                latest.setdefault(stage, []).append(milliseconds)

        def of(what: str, *causes: Cause) -> int:
            return sum(count for (name, cause), count in changes.items() if name == what and cause in causes)

        def every(what: str) -> int:
            return sum(count for (name, _), count in changes.items() if name == what)

        return ProcessStats(
            since=since,
            calls=counts["calls"],
            hits=counts["hits"],
            misses=counts["misses"],
            failed=counts["failed"],
            degraded=counts["degraded"],
            asked=counts["asked"],
            suggested=every("suggested"),
            accepted=every("accepted"),
            declined=every("declined"),
            lapsed=every("lapsed"),
            saves=every("saved"),
            auto_saves=of("saved", "auto_save"),
            refreshes=of("refreshed", "user", "auto_save"),
            reindexed=of("refreshed", "reindex"),
            stale=every("stale"),
            pins=every("pinned"),
            unpins=every("unpinned"),
            demotions={"score": of("demoted", "decay"), "misses": of("demoted", "query"), "user": every("removed")},
            votes=every("voted"),
            decay_runs=counts["decay"],
            index_bytes=self.index_bytes(),
            stages={stage: _times_of(latest[stage]) for stage in sorted(latest, key=_place_of) if latest[stage]},
        )


class _Watch:
    """A `with` block around a question. Not a generator: it would cost more than all the counting."""

    __slots__ = ("_call", "_observations")

    def __init__(self, observations: Observations, call: Call) -> None:
        self._observations, self._call = observations, call

    def __enter__(self) -> None:
        if _instrumentation is not None:
            self._call.trace = _instrumentation.begin_call(self._call)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._observations.end_call(self._call, error)
        if self._call.trace is not None:
            self._call.trace.end(self._call, error)


class _Working:
    """A `with` block around a save or a decay run; one that fails is traced, and not among the durations."""

    __slots__ = ("_name", "_observations", "_start", "_trace", "milliseconds")

    def __init__(self, observations: Observations, name: Work) -> None:
        self._observations, self._name = observations, name
        self._trace: WorkTrace | None = None

    def __enter__(self) -> Self:
        if _instrumentation is not None:
            self._trace = _instrumentation.begin_work(self._name)
        self._start = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.milliseconds = (time.perf_counter() - self._start) * 1000
        if error is None:
            self._observations.end_work(self._name, self.milliseconds)
        if self._trace is not None:
            self._trace.end(error)


class _Registry:
    """The observations of each state store: a retriever made for one request counts with those before it."""

    def __init__(self) -> None:
        self._of: ByIdentity[StateStore, Observations] = ByIdentity()
        in_each_process(self._make_lock)

    def _make_lock(self) -> None:
        self._lock = threading.Lock()

    def of(self, store: StateStore) -> Observations:
        with self._lock:
            return self._of.get_or_make(store, Observations)

    def all(self) -> list[Observations]:
        with self._lock:
            return [observations for _, observations in self._of.items()]


_registry = _Registry()
observations_of = _registry.of
"""The one owner for all retrievers and engines over a state store in this process."""


def index_bytes() -> int:
    """Bytes of all indexes that this process holds."""
    return sum(observations.index_bytes() for observations in _registry.all())


def _place_of(stage: str) -> int:
    return _STAGES.index(stage) if stage in _STAGES else len(_STAGES)


def _times_of(durations: Sequence[float]) -> StageTimes:
    p50, p95, p99 = (round(float(value), 4) for value in np.percentile(durations, _PERCENTILES))
    return StageTimes(len(durations), p50, p95, p99)


def _log_call(call: Call, error: BaseException | None) -> None:
    provenance = call.provenance
    if error is not None or provenance is None:
        kind = type(error).__name__
        events.QUERY_FAILED.log("a question ended in %s", kind, user_id=call.user_id, error_type=kind)
        return
    outcome = "hit" if call.is_hit else "miss"
    copies = sum(source.from_cache for source in provenance.sources)
    milliseconds = round(provenance.timings.get("total", 0.0), 3)
    events.QUERY_ANSWERED.log(
        "%s: %d documents, %d of them from saved copies, in %.3f ms",
        outcome,
        len(provenance.sources),
        copies,
        milliseconds,
        user_id=call.user_id,
        outcome=outcome,
        mode=provenance.mode,
        documents=len(provenance.sources),
        from_copies=copies,
        asked=provenance.asked,
        degraded=len(provenance.degraded),
        duration_ms=milliseconds,
    )


def _log_change(user_id: str, event: DocumentEvent, cause: Cause) -> None:
    known = events.DOCUMENT_EVENTS.get(event.what)
    if known is not None and known.is_on:
        known.log(
            "document %r: %s (%s)",
            event.doc_id,
            event.what,
            event.why,
            user_id=user_id,
            doc_id=event.doc_id,
            why=event.why,
            cause=cause,
            from_state=event.from_state.value,
            to_state=event.to_state.value,
            fetch_count=event.fetch_count,
            score=round(event.decay_score, 6),
        )
