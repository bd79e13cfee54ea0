"""OpenTelemetry: a span for each question, save and decay run, and metrics.

    from rag_wiki.otel import instrument

    instrument()

Nothing of it is loaded, and nothing costs anything, before that. Names follow the conventions for GenAI retrieval
(<https://github.com/open-telemetry/semantic-conventions-genai>, release 0.1); what these have no name for begins with
`rag_wiki.`. Spans hold no text and no query, and no user unless that is asked for.

Spans:

- `retrieval`, of a question: `gen_ai.operation.name`, `gen_ai.retrieval.top_k`, `error.type`, `rag_wiki.outcome` (`hit`
  or `miss`), `rag_wiki.mode`, `rag_wiki.asked`, `rag_wiki.documents`, `rag_wiki.documents.from_copies`,
  `rag_wiki.suggestions`, `rag_wiki.let_go`, `rag_wiki.degraded` (the sentences that provenance has). Below it
  `rag_wiki.begin`, `.embed`, `.search`, `.read`, `.global`, `.apply` and `.calibrate`, the stages by the names that
  provenance has for them; each is the current span while it runs, so that what the wrapped retriever, the embedding
  model and the database client trace lies below it.
- `rag_wiki.save` (what the embedding model traces lies below it) and `rag_wiki.decay`.

Metrics:

- `gen_ai.retrieval.duration` (`s`), by `rag_wiki.outcome` and `error.type`
- `rag_wiki.retrievals` (`{retrieval}`), by `rag_wiki.outcome` (`hit`, `miss`, `error`), `rag_wiki.mode`,
  `rag_wiki.degraded`
- `rag_wiki.stage.duration` (`s`), by `rag_wiki.stage`
- `rag_wiki.document.events` (`{event}`), by `rag_wiki.event` (`saved`, `suggested`, `demoted` and the other words of a
  document's history) and `rag_wiki.cause` (`query`, `user`, `auto_save`, `reindex`, `decay`)
- `rag_wiki.save.duration`, `rag_wiki.decay.duration` (`s`), by `error.type`
- `rag_wiki.index.size` (`By`)
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any
from weakref import WeakSet, ref

from rag_wiki import __version__, observing
from rag_wiki.errors import MissingExtraError, RagWikiError
from rag_wiki.observing import Cause, Work
from rag_wiki.texts import repeats

try:
    from opentelemetry import context, metrics, trace
    from opentelemetry.metrics import CallbackOptions, Histogram, MeterProvider, Observation
    from opentelemetry.trace import Span, SpanKind, Status, StatusCode, TracerProvider
except ImportError as error:
    raise MissingExtraError("rag_wiki.otel", "otel") from error

if TYPE_CHECKING:
    from contextvars import Token

    from rag_wiki.recall import Call

__all__ = ["instrument", "uninstrument"]

_RETRIEVAL = {"gen_ai.operation.name": "retrieval"}
_SECONDS = [0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48]
"""The conventions' boundaries for GenAI, and finer ones below them: a question takes half a millisecond here."""


def instrument(
    tracer_provider: TracerProvider | None = None,
    meter_provider: MeterProvider | None = None,
    *,
    record_users: bool = False,
    record_queries: bool = False,
) -> None:
    """Trace and measure all retrievers of this process from now on. Called again, the last call counts.

    Args:
        tracer_provider: Where spans go; OpenTelemetry's global one by default.
        meter_provider: Where metrics go; likewise.
        record_users: Spans name the user, as `user.id`. Metrics never do: each user would be a series of its own.
        record_queries: Spans have the question, as `gen_ai.retrieval.query.text`, and messages of exceptions also
            where they repeat it.

    Raises:
        MissingExtraError: On import of this module: OpenTelemetry's API is not installed.
    """
    observing.set_instrumentation(
        _OpenTelemetry(tracer_provider, meter_provider, record_users=record_users, record_queries=record_queries)
    )


def uninstrument() -> None:
    """Trace and measure nothing any more; without effect where nothing was."""
    observing.set_instrumentation(None)


class _OpenTelemetry:
    """What `rag_wiki.observing` passes on to."""

    def __init__(
        self,
        tracer_provider: TracerProvider | None,
        meter_provider: MeterProvider | None,
        *,
        record_users: bool,
        record_queries: bool,
    ) -> None:
        self.tracer = trace.get_tracer("rag_wiki", __version__, tracer_provider)
        meter = metrics.get_meter("rag_wiki", __version__, meter_provider)
        self._record_users, self.record_queries = record_users, record_queries

        def seconds(name: str, of: str) -> Histogram:
            return meter.create_histogram(
                name, unit="s", description=f"Duration of {of}.", explicit_bucket_boundaries_advisory=_SECONDS
            )

        self.durations = seconds("gen_ai.retrieval.duration", "a retrieval")
        self.stages = seconds("rag_wiki.stage.duration", "a stage of a retrieval")
        self.works = {
            "save": seconds("rag_wiki.save.duration", "saving a document"),
            "decay": seconds("rag_wiki.decay.duration", "scoring a user's saved documents"),
        }
        self.retrievals = meter.create_counter(
            "rag_wiki.retrievals", unit="{retrieval}", description="Questions, by whether a saved copy answered."
        )
        self._happened = meter.create_counter(
            "rag_wiki.document.events", unit="{event}", description="What happened to documents of users."
        )
        self._provider = metrics.get_meter_provider() if meter_provider is None else meter_provider
        if self._provider not in _watched:
            # Once: a meter keeps its callbacks for ever, and takes no second instrument of a name.
            _watched.add(self._provider)
            meter.create_observable_up_down_counter(
                "rag_wiki.index.size",
                [partial(_index_size, ref(self._provider))],
                unit="By",
                description="Bytes of indexes held in this process.",
            )

    def measures_with(self, provider: MeterProvider | None) -> bool:
        """Whether metrics go there."""
        return self._provider is provider

    def begin_call(self, call: Call) -> _CallTrace:
        attributes: dict[str, Any] = dict(_RETRIEVAL)
        if call.k is not None:
            attributes["gen_ai.retrieval.top_k"] = call.k
        if self._record_users:
            attributes["user.id"] = call.user_id
        if self.record_queries:
            attributes["gen_ai.retrieval.query.text"] = call.query
        return _CallTrace(self, attributes, call.query)

    def begin_work(self, name: Work) -> _WorkTrace:
        return _WorkTrace(self, name)

    def fail(self, span: Span, error: BaseException, query: str | None) -> None:
        """Say on a span why it failed, with the error's own words unless they may repeat a query or a text.

        Args:
            span: The span.
            error: Why.
            query: What was asked; `None` for a save or a decay run.
        """
        if not span.is_recording():
            return
        span.set_attribute("error.type", _kind(error))
        span.set_status(Status(StatusCode.ERROR))
        # An exception whose text can't be had must not be replaced by the one that says so.
        with contextlib.suppress(Exception):
            message = str(error)
            ours = isinstance(error, RagWikiError) if query is None else not repeats(message, query)
            if self.record_queries or ours:
                span.set_status(Status(StatusCode.ERROR, message))
                span.record_exception(error)

    def count(self, what: str, cause: Cause) -> None:
        self._happened.add(1, {"rag_wiki.event": what, "rag_wiki.cause": cause})


_watched: WeakSet[MeterProvider] = WeakSet()
"""The providers that ask for the bytes of indexes."""


def _index_size(provider: ref[MeterProvider], _: CallbackOptions) -> Iterable[Observation]:
    on = observing.instrumentation()
    is_asked = isinstance(on, _OpenTelemetry) and on.measures_with(provider())
    return [Observation(observing.index_bytes())] if is_asked else []


class _Current:
    """A span that is the current one until it ends."""

    __slots__ = ("_before", "_query", "_telemetry", "_token", "span")

    def __init__(
        self,
        telemetry: _OpenTelemetry,
        name: str,
        attributes: dict[str, Any] | None = None,
        *,
        query: str | None = None,
    ) -> None:
        self._telemetry, self._query = telemetry, query
        self.span = telemetry.tracer.start_span(name, kind=SpanKind.INTERNAL, attributes=attributes)
        self._before = context.get_current()
        self._token: Token[Any] = context.attach(trace.set_span_in_context(self.span))

    def end(self, error: BaseException | None) -> None:
        if error is not None and not isinstance(error, GeneratorExit):
            self._telemetry.fail(self.span, error, self._query)
        self.span.end()
        if not isinstance(error, GeneratorExit):
            context.detach(self._token)
        elif trace.get_current_span() is self.span:
            # Given up without a word, when or where nobody can say: the token may be of another context.
            context.attach(self._before)


class _CallTrace:
    """The trace of a question."""

    __slots__ = ("_current", "_is_recording", "_query", "_start", "_telemetry")

    def __init__(self, telemetry: _OpenTelemetry, attributes: dict[str, Any], query: str) -> None:
        self._start = time.perf_counter()
        self._telemetry, self._query = telemetry, query
        self._current = _Current(telemetry, "retrieval", attributes, query=query)
        self._is_recording = self._current.span.is_recording()

    def stage(self, name: str, timings: dict[str, float]) -> _StageTrace:
        return _StageTrace(self._telemetry, name, timings, query=self._query, is_recording=self._is_recording)

    def end(self, call: Call, error: BaseException | None) -> None:
        provenance = call.provenance
        outcome: dict[str, str] = {}
        if error is not None or provenance is None:
            kind = _kind(error)
            outcome = {"error.type": kind}
            counted: dict[str, Any] = {"rag_wiki.outcome": "error", "error.type": kind}
        else:
            outcome = {"rag_wiki.outcome": "hit" if call.is_hit else "miss"}
            counted = {**outcome, "rag_wiki.mode": provenance.mode, "rag_wiki.degraded": bool(provenance.degraded)}
            if self._is_recording:
                self._current.span.set_attributes(
                    {
                        **outcome,
                        "rag_wiki.mode": provenance.mode,
                        "rag_wiki.asked": provenance.asked,
                        "rag_wiki.documents": len(provenance.sources),
                        "rag_wiki.documents.from_copies": sum(source.from_cache for source in provenance.sources),
                        "rag_wiki.suggestions": len(provenance.suggestions),
                        "rag_wiki.let_go": len(provenance.let_go),
                        "rag_wiki.degraded": list(provenance.degraded),
                    }
                )
        # Within the span, so that a metric's example leads to it.
        self._telemetry.durations.record(time.perf_counter() - self._start, {**_RETRIEVAL, **outcome})
        self._telemetry.retrievals.add(1, counted)
        self._current.end(error)


class _StageTrace:
    """A stage of a question."""

    __slots__ = ("_current", "_is_recording", "_name", "_query", "_start", "_telemetry", "_timings")

    def __init__(
        self, telemetry: _OpenTelemetry, name: str, timings: dict[str, float], *, query: str, is_recording: bool
    ) -> None:
        self._telemetry, self._name, self._timings, self._query = telemetry, name, timings, query
        self._is_recording = is_recording
        self._current: _Current | None = None

    def __enter__(self) -> None:
        self._start = time.perf_counter()
        if self._is_recording:
            self._current = _Current(self._telemetry, f"rag_wiki.{self._name}", query=self._query)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        seconds = time.perf_counter() - self._start
        self._timings[self._name] = seconds * 1000
        self._telemetry.stages.record(seconds, {"rag_wiki.stage": self._name})
        if self._current is not None:
            self._current.end(error)


class _WorkTrace:
    """The trace of a save or a decay run."""

    __slots__ = ("_current", "_name", "_span", "_start", "_telemetry")

    def __init__(self, telemetry: _OpenTelemetry, name: Work) -> None:
        self._start = time.perf_counter()
        self._telemetry, self._name = telemetry, name
        self._current: _Current | None = None
        if name == "save":
            self._current = _Current(telemetry, "rag_wiki.save")
            self._span = self._current.span
        else:
            # Never the current one: whoever takes the pages of a run one by one does other things between them.
            self._span = telemetry.tracer.start_span(f"rag_wiki.{name}", kind=SpanKind.INTERNAL)

    def end(self, error: BaseException | None) -> None:
        attributes = {} if error is None else {"error.type": _kind(error)}
        self._telemetry.works[self._name].record(time.perf_counter() - self._start, attributes)
        if self._current is not None:
            self._current.end(error)
            return
        if error is not None and not isinstance(error, GeneratorExit):
            self._telemetry.fail(self._span, error, None)
        self._span.end()


def _kind(error: BaseException | None) -> str:
    return "_OTHER" if error is None else type(error).__qualname__
