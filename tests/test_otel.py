"""OpenTelemetry, with its real SDK: spans that nest, errors, users side by side, metrics, and off when it is off."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from helpers import TableEmbeddings, document
from langchain_core.callbacks import AsyncCallbackManagerForRetrieverRun, CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnableLambda
from pydantic import PrivateAttr
from scenarios import OTHER_QUESTION, POD_QUESTION, PODS, USER, World, chained, topics

from rag_wiki import DecayConfig, RagWikiRetriever

pytest.importorskip("opentelemetry.sdk", reason="needs opentelemetry-sdk")

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import HistogramDataPoint, InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import SpanKind, StatusCode, get_current_span

from rag_wiki.otel import instrument, uninstrument


@dataclass
class Telemetry:
    """What was traced and measured."""

    tracers: TracerProvider
    meters: MeterProvider
    exporter: InMemorySpanExporter
    reader: InMemoryMetricReader

    def spans(self, name: str | None = None) -> list[ReadableSpan]:
        """The spans that ended, by name."""
        return [span for span in self.exporter.get_finished_spans() if name in (None, span.name)]

    def tree(self) -> dict[str, set[str]]:
        """The names of the spans that lie directly below those of each name; below `""` those that lie below none."""
        names = {span.context.span_id: span.name for span in self.spans()}
        found: dict[str, set[str]] = {}
        for span in self.spans():
            parent = "" if span.parent is None else names[span.parent.span_id]
            found.setdefault(parent, set()).add(span.name)
        return found

    def points(self, name: str) -> list[tuple[dict[str, Any], Any]]:
        """The data points of a metric: attributes, and the sum or (for a histogram) the count."""
        data = self.reader.get_metrics_data()
        found = []
        for resource in data.resource_metrics if data is not None else ():
            for scope in resource.scope_metrics:
                for metric in scope.metrics:
                    if metric.name == name:
                        for point in metric.data.data_points:
                            value = point.count if isinstance(point, HistogramDataPoint) else point.value  # type: ignore[union-attr]  # a sum has one
                            found.append((dict(point.attributes or {}), value))
        return found

    def units(self) -> dict[str, str]:
        """The unit of each metric that was recorded."""
        data = self.reader.get_metrics_data()
        return {
            metric.name: str(metric.unit)
            for resource in (data.resource_metrics if data is not None else ())
            for scope in resource.scope_metrics
            for metric in scope.metrics
        }


@pytest.fixture
def telemetry() -> Iterator[Telemetry]:
    """The SDK, keeping all in memory; what is on ends with the test."""
    exporter, reader = InMemorySpanExporter(), InMemoryMetricReader()
    tracers, meters = TracerProvider(), MeterProvider([reader])
    tracers.add_span_processor(SimpleSpanProcessor(exporter))
    yield Telemetry(tracers, meters, exporter, reader)
    uninstrument()
    tracers.shutdown()
    meters.shutdown()


class TracedRetriever(BaseRetriever):
    """A vector store's client that makes spans of its own, below whatever is current where it runs."""

    documents: list[Document]
    tracers: Any
    _error: Exception | None = PrivateAttr(default=None)
    _entered: Any = PrivateAttr(default=None)

    def fail_with(self, error: Exception) -> None:
        """Raise this from now on."""
        self._error = error

    def wait_for_others(self, count: int) -> None:
        """Let so many calls be under way at once before any of them goes on."""
        self._entered = threading.Barrier(count)

    def _get_relevant_documents(self, query: str, *, run_manager: CallbackManagerForRetrieverRun) -> list[Document]:
        with self.tracers.get_tracer("theirs").start_as_current_span("their search") as span:
            span.set_attribute("query", query)
            if self._entered is not None:
                self._entered.wait(timeout=30)
            if self._error is not None:
                raise self._error
            return list(self.documents)

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun
    ) -> list[Document]:
        with self.tracers.get_tracer("theirs").start_as_current_span("their search") as span:
            span.set_attribute("query", query)
            await asyncio.sleep(0)
            if self._error is not None:
                raise self._error
            return list(self.documents)


class TracedEmbeddings(TableEmbeddings):
    """A model whose client makes spans of its own."""

    def __init__(self, tracers: TracerProvider) -> None:
        super().__init__(topics().table)
        self.tracer = tracers.get_tracer("theirs")

    def embed_query(self, text: str) -> list[float]:
        with self.tracer.start_as_current_span("their embedding"):
            return super().embed_query(text)

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        with self.tracer.start_as_current_span("their embedding of documents"):
            return super().embed_documents(texts)


def traced_world(telemetry: Telemetry, **options: Any) -> tuple[World, TracedRetriever, RagWikiRetriever]:
    """A user with a saved document; the wrapped retriever and the model make spans of their own."""
    world = World(embeddings=TracedEmbeddings(telemetry.tracers))
    source = TracedRetriever(documents=[], tracers=telemetry.tracers)
    world.save(world.retriever(), "pods", PODS)
    telemetry.exporter.clear()
    return world, source, world.retriever(global_retriever=source, **options)


def attributes(span: ReadableSpan) -> dict[str, Any]:
    """The attributes of a span."""
    return dict(span.attributes or {})


NESTED = {
    "": {"retrieval"},
    "retrieval": {
        "rag_wiki.begin",
        "rag_wiki.embed",
        "rag_wiki.search",
        "rag_wiki.read",
        "rag_wiki.global",
        "rag_wiki.apply",
    },
    "rag_wiki.embed": {"their embedding"},
    "rag_wiki.global": {"their search"},
}


def test_a_question_is_a_span_and_its_stages_lie_below_it(telemetry: Telemetry) -> None:
    """A question is one `retrieval` span by the conventions, with what came of it; other libraries' spans nest."""
    _, source, retriever = traced_world(telemetry, k=4)
    source.documents = [document("images", "Images are layers.")]
    instrument(telemetry.tracers, telemetry.meters)
    retriever.invoke(POD_QUESTION)
    assert telemetry.tree() == NESTED
    (span,) = telemetry.spans("retrieval")
    assert (span.kind, span.status.status_code) == (SpanKind.INTERNAL, StatusCode.UNSET)
    assert attributes(span) == {
        "gen_ai.operation.name": "retrieval",
        "gen_ai.retrieval.top_k": 4,
        "rag_wiki.outcome": "hit",
        "rag_wiki.mode": "semantic",
        "rag_wiki.asked": True,
        "rag_wiki.documents": 2,
        "rag_wiki.documents.from_copies": 1,
        "rag_wiki.suggestions": 0,
        "rag_wiki.let_go": 0,
        "rag_wiki.degraded": (),
    }
    assert span.instrumentation_scope is not None
    assert span.instrumentation_scope.name == "rag_wiki"
    assert not get_current_span().get_span_context().is_valid


@pytest.mark.parametrize("way", ["ainvoke", "in a chain", "astream"])
async def test_awaited_questions_nest_the_same(telemetry: Telemetry, way: str) -> None:
    """Awaited, in a chain and streamed, the spans nest as they do for a call that blocks."""
    _, _, retriever = traced_world(telemetry)
    instrument(telemetry.tracers, telemetry.meters)
    with telemetry.tracers.get_tracer("app").start_as_current_span("request"):
        if way == "ainvoke":
            await retriever.ainvoke(POD_QUESTION)
        elif way == "in a chain":
            await chained(retriever).ainvoke(POD_QUESTION)
        else:
            assert [part async for part in retriever.astream(POD_QUESTION)]
    assert telemetry.tree() == {**NESTED, "": {"request"}, "request": {"retrieval"}}


def test_each_question_of_a_batch_is_a_span_of_its_own(telemetry: Telemetry) -> None:
    """Three questions at once, on threads, are three `retrieval` spans, each with its own search below it."""
    _, source, retriever = traced_world(telemetry)
    source.wait_for_others(3)
    instrument(telemetry.tracers, telemetry.meters, record_queries=True)
    questions = [f"what are pods? {number}" for number in range(3)]
    with telemetry.tracers.get_tracer("app").start_as_current_span("request"):
        retriever.batch(questions)
    assert telemetry.tree()["request"] == {"retrieval"}
    assert_own_searches(telemetry, questions)


async def test_awaited_batches_too(telemetry: Telemetry) -> None:
    """The same for questions that are awaited together."""
    _, _, retriever = traced_world(telemetry)
    instrument(telemetry.tracers, telemetry.meters, record_queries=True)
    questions = [f"what are pods? {number}" for number in range(3)]
    await retriever.abatch(questions)
    assert_own_searches(telemetry, questions)


def assert_own_searches(telemetry: Telemetry, questions: Sequence[str]) -> None:
    """Each `retrieval` span has the wrapped retriever's search for its own question below it."""
    by_id = {span.context.span_id: span for span in telemetry.spans()}
    found = []
    for search in telemetry.spans("their search"):
        assert search.parent is not None
        stage = by_id[search.parent.span_id]
        assert stage.parent is not None
        question = by_id[stage.parent.span_id]
        assert attributes(question)["gen_ai.retrieval.query.text"] == attributes(search)["query"]
        found.append(attributes(search)["query"])
    assert sorted(found) == sorted(questions)


async def test_two_users_side_by_side_have_two_traces(telemetry: Telemetry) -> None:
    """Questions of two users at the same time are two traces; the user is named only where that was asked for."""
    _, _, retriever = traced_world(telemetry)
    instrument(telemetry.tracers, telemetry.meters, record_users=True)
    await asyncio.gather(*(retriever.ainvoke(POD_QUESTION, user_id=user) for user in (USER, "bob")))
    spans = telemetry.spans("retrieval")
    assert {attributes(span)["user.id"]: attributes(span)["rag_wiki.outcome"] for span in spans} == {
        USER: "hit",
        "bob": "miss",
    }
    traces = {span.context.trace_id: attributes(span)["user.id"] for span in spans}
    assert len(traces) == 2
    # Bob has nothing saved, so nothing was embedded for him.
    assert [traces[span.context.trace_id] for span in telemetry.spans("rag_wiki.embed")] == [USER]
    telemetry.exporter.clear()
    instrument(telemetry.tracers, telemetry.meters)
    await retriever.ainvoke(POD_QUESTION)
    shown = [value for span in telemetry.spans("retrieval") for value in attributes(span).values()]
    assert USER not in shown
    assert POD_QUESTION not in shown


@pytest.mark.parametrize("awaited", [False, True])
async def test_a_failing_source_ends_the_span_with_its_error(telemetry: Telemetry, awaited: bool) -> None:
    """The wrapped retriever's exception is recorded on its stage and on the question, which ends as an error."""
    _, source, retriever = traced_world(telemetry)
    source.fail_with(ConnectionError("the index is away"))
    instrument(telemetry.tracers, telemetry.meters)

    async def ask() -> list[Document]:
        return await retriever.ainvoke(POD_QUESTION) if awaited else retriever.invoke(POD_QUESTION)

    with pytest.raises(ConnectionError):
        await ask()
    for name in ("retrieval", "rag_wiki.global"):
        (span,) = telemetry.spans(name)
        assert span.status.status_code is StatusCode.ERROR
        assert span.status.description == "the index is away"
        assert attributes(span)["error.type"] == "ConnectionError"
        assert [event.name for event in span.events] == ["exception"]
    assert telemetry.points("rag_wiki.retrievals") == [
        ({"rag_wiki.outcome": "error", "error.type": "ConnectionError"}, 1)
    ]
    assert telemetry.points("gen_ai.retrieval.duration") == [
        ({"gen_ai.operation.name": "retrieval", "error.type": "ConnectionError"}, 1)
    ]
    assert not get_current_span().get_span_context().is_valid


def test_a_failing_model_is_an_error_of_its_stage_alone(telemetry: Telemetry) -> None:
    """What degrades an answer is recorded where it happened; the question is answered, and says so."""
    world, _, retriever = traced_world(telemetry)
    world.table.error = TimeoutError("no answer")
    instrument(telemetry.tracers, telemetry.meters)
    retriever.invoke(POD_QUESTION)
    (embed,), (question,) = telemetry.spans("rag_wiki.embed"), telemetry.spans("retrieval")
    assert (embed.status.status_code, attributes(embed)["error.type"]) == (StatusCode.ERROR, "TimeoutError")
    assert question.status.status_code is StatusCode.UNSET
    assert attributes(question)["rag_wiki.degraded"] == (
        "the query could not be embedded, saved copies were not searched (TimeoutError)",
    )
    assert telemetry.points("rag_wiki.retrievals") == [
        ({"rag_wiki.outcome": "miss", "rag_wiki.mode": "none", "rag_wiki.degraded": True}, 1)
    ]


def test_a_failing_store_is_an_error_of_its_stage_alone(telemetry: Telemetry, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the state store down the answer comes, its span says that it is degraded, and the stage has the error."""
    world, _, retriever = traced_world(telemetry)

    def down(*_: object) -> None:
        raise ConnectionError("refused")

    monkeypatch.setattr(world.store, "_read_start", down)
    instrument(telemetry.tracers, telemetry.meters)
    retriever.invoke(POD_QUESTION)
    (begin,), (question,) = telemetry.spans("rag_wiki.begin"), telemetry.spans("retrieval")
    assert (begin.status.status_code, question.status.status_code) == (StatusCode.ERROR, StatusCode.UNSET)
    assert attributes(question)["rag_wiki.degraded"] == (
        "the state store did not answer, nothing is counted (ConnectionError)",
    )


async def test_a_cancelled_question_leaves_no_span_behind(telemetry: Telemetry) -> None:
    """A question that is cancelled ends its span as cancelled, and what comes after it is not below it."""
    _, source, retriever = traced_world(telemetry)
    asked = asyncio.Event()

    async def hang(*_: Any, **__: Any) -> list[Document]:
        asked.set()
        await asyncio.Event().wait()
        return []

    object.__setattr__(source, "_aget_relevant_documents", hang)
    instrument(telemetry.tracers, telemetry.meters)

    async def request() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await retriever.ainvoke(POD_QUESTION)
        assert not get_current_span().get_span_context().is_valid

    task = asyncio.ensure_future(request())
    await asked.wait()
    task.cancel()
    await task
    (question,) = telemetry.spans("retrieval")
    assert attributes(question)["error.type"] == "CancelledError"


def test_saving_and_decay_are_spans_and_counted(telemetry: Telemetry) -> None:
    """A save is a span with the model's own below it, a decay run one too; what happens to documents is counted."""
    world, source, retriever = traced_world(telemetry, decay=DecayConfig(demotion_hold_days=0, demotion_threshold=0.5))
    instrument(telemetry.tracers, telemetry.meters)
    source.documents = [document("images", "Images are layers.")]
    for _ in range(3):
        retriever.invoke(OTHER_QUESTION)
    telemetry.exporter.clear()
    retriever.accept_suggestion("images")
    world.clock.turn(days=60)
    retriever.run_decay()
    assert telemetry.tree() == {
        "": {"rag_wiki.save", "rag_wiki.decay"},
        "rag_wiki.save": {"their embedding of documents"},
    }
    counted = {(point["rag_wiki.event"], point["rag_wiki.cause"]): count for point, count in events_of(telemetry)}
    assert counted == {
        ("surfaced", "query"): 1,
        ("suggested", "query"): 1,
        ("saved", "user"): 1,
        ("demoted", "decay"): 2,
    }
    for name in ("rag_wiki.save.duration", "rag_wiki.decay.duration"):
        assert telemetry.points(name) == [({}, 1)]
    with pytest.raises(ValueError, match="blank"):
        retriever.accept_suggestion("images", full_content=" ")
    assert ({"error.type": "InvalidDocumentError"}, 1) in telemetry.points("rag_wiki.save.duration")


def events_of(telemetry: Telemetry) -> list[tuple[dict[str, Any], Any]]:
    """What happened to documents, counted."""
    return telemetry.points("rag_wiki.document.events")


def test_metrics_count_hits_misses_stages_and_bytes(telemetry: Telemetry) -> None:
    """Two hits and a miss are counted by outcome, with units by the conventions and the bytes of the index."""
    world, _, retriever = traced_world(telemetry)
    instrument(telemetry.tracers, telemetry.meters)
    for question in (POD_QUESTION, OTHER_QUESTION, POD_QUESTION):
        retriever.invoke(question)
    told = {"rag_wiki.mode": "semantic", "rag_wiki.degraded": False}
    assert telemetry.points("rag_wiki.retrievals") == [
        ({"rag_wiki.outcome": "hit", **told}, 2),
        ({"rag_wiki.outcome": "miss", **told}, 1),
    ]
    assert telemetry.points("gen_ai.retrieval.duration") == [
        ({"gen_ai.operation.name": "retrieval", "rag_wiki.outcome": "hit"}, 2),
        ({"gen_ai.operation.name": "retrieval", "rag_wiki.outcome": "miss"}, 1),
    ]
    stages = {point["rag_wiki.stage"]: count for point, count in telemetry.points("rag_wiki.stage.duration")}
    assert stages == dict.fromkeys(("begin", "embed", "search", "read", "global", "apply"), 3)
    ((_, size),) = telemetry.points("rag_wiki.index.size")
    assert size >= world.retriever().stats().index_bytes > 0
    assert telemetry.units() == {
        "gen_ai.retrieval.duration": "s",
        "rag_wiki.stage.duration": "s",
        "rag_wiki.retrievals": "{retrieval}",
        "rag_wiki.index.size": "By",
    }


def test_off_is_off_and_on_again_is_once(telemetry: Telemetry) -> None:
    """Nothing is traced before `instrument` and after `uninstrument`; called twice it traces and measures once."""
    _, _, retriever = traced_world(telemetry)
    retriever.invoke(POD_QUESTION)
    instrument(telemetry.tracers, telemetry.meters)
    instrument(telemetry.tracers, telemetry.meters)
    retriever.invoke(POD_QUESTION)
    assert len(telemetry.spans("retrieval")) == 1
    assert len(telemetry.points("rag_wiki.index.size")) == 1
    uninstrument()
    uninstrument()
    retriever.invoke(POD_QUESTION)
    assert len(telemetry.spans("retrieval")) == 1
    assert telemetry.points("rag_wiki.index.size") == []


def test_a_question_that_is_not_sampled_has_no_stages(telemetry: Telemetry) -> None:
    """Where the sampler leaves a question out, there are no spans for its stages either, and metrics still count."""
    exporter = InMemorySpanExporter()
    tracers = TracerProvider(sampler=ALWAYS_OFF)
    tracers.add_span_processor(SimpleSpanProcessor(exporter))
    _, _, retriever = traced_world(telemetry)
    instrument(tracers, telemetry.meters)
    retriever.invoke(POD_QUESTION)
    assert exporter.get_finished_spans() == ()
    assert [count for _, count in telemetry.points("rag_wiki.retrievals")] == [1]


def test_importing_rag_wiki_loads_none_of_it() -> None:
    """`import rag_wiki` and a question load no `rag_wiki.otel`: it costs nothing where it is not wanted."""
    program = """
import sys
from langchain_core.runnables import RunnableLambda
from rag_wiki import RagWikiRetriever
RagWikiRetriever(RunnableLambda(lambda _: []), "ada").invoke("what are pods?")
print("rag_wiki.otel" in sys.modules)
"""
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=120, check=True
    )
    assert ended.stdout == "False\n"


class UnspeakableError(RuntimeError):
    """An error whose text can't be had."""

    def __str__(self) -> str:
        raise ValueError("no text")


@pytest.mark.parametrize(
    ("error", "description"),
    [
        (RuntimeError(f"can't search for {POD_QUESTION}"), None),
        (UnspeakableError(), None),
        (RuntimeError("away"), "away"),
    ],
    ids=["repeats the query", "without a text", "plain"],
)
def test_a_message_that_repeats_the_query_is_left_out(
    telemetry: Telemetry, error: RuntimeError, description: str | None
) -> None:
    """The caller gets the source's own error; spans have its type, and its words unless they repeat the query."""

    def fails(query: str) -> list[Document]:
        raise error

    retriever = World().retriever(global_retriever=RunnableLambda(fails))
    instrument(telemetry.tracers, telemetry.meters)
    with pytest.raises(type(error)) as raised:
        retriever.invoke(POD_QUESTION)
    assert raised.value is error
    for name in ("retrieval", "rag_wiki.global"):
        (span,) = telemetry.spans(name)
        assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, description)
        assert attributes(span)["error.type"] == type(error).__qualname__
        assert len(span.events) == (description is not None)
