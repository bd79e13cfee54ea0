"""Runs as a tracer sees them: each that starts ends once, below the run that asked for it, whatever happens."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias
from uuid import UUID

import pytest
from helpers import ListRetriever, TableEmbeddings, document
from langchain_core.callbacks import BaseCallbackHandler, CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.runnables import RunnableConfig, RunnableLambda
from langchain_core.vectorstores import InMemoryVectorStore
from scenarios import POD_QUESTION, PODS, World, chained, doc_ids, topics

from rag_wiki import RagWikiRetriever

TAX = document("tax", "Tax is due in May.")


@dataclass
class Run:
    """A run of a retriever or of anything else that is run."""

    name: str
    run_id: UUID
    parent_id: UUID | None
    tags: list[str]
    metadata: dict[str, Any]
    ends: list[object] = field(default_factory=list)
    """What it ended with: documents, or an exception."""


class Tracer(BaseCallbackHandler):
    """Keeps runs in the order of their starts, and what was told in its order."""

    raise_error = True

    def __init__(self) -> None:
        self.runs: dict[UUID, Run] = {}
        self.told: list[tuple[str, str]] = []

    def named(self, name: str) -> list[Run]:
        """The runs of this name."""
        return [run for run in self.runs.values() if run.name == name]

    def parent(self, run: Run) -> str | None:
        """The name of the run above."""
        return None if run.parent_id is None else self.runs[run.parent_id].name

    def _start(self, run_id: UUID, parent_run_id: UUID | None, facts: dict[str, Any]) -> None:
        assert run_id not in self.runs
        name = facts["name"]
        self.runs[run_id] = Run(
            name, run_id, parent_run_id, list(facts.get("tags") or []), dict(facts.get("metadata") or {})
        )
        self.told.append(("start", name))

    def _end(self, run_id: UUID, outcome: object) -> None:
        # A run that never started is a KeyError here.
        self.runs[run_id].ends.append(outcome)
        self.told.append(("end", self.runs[run_id].name))

    def on_retriever_start(
        self,
        serialized: dict[str, Any],
        query: str,
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        **facts: Any,
    ) -> None:
        self._start(run_id, parent_run_id, facts)

    def on_retriever_end(
        self, documents: Sequence[Document], *, run_id: UUID, parent_run_id: UUID | None = None, **facts: Any
    ) -> None:
        self._end(run_id, list(documents))

    def on_retriever_error(
        self, error: BaseException, *, run_id: UUID, parent_run_id: UUID | None = None, **facts: Any
    ) -> None:
        self._end(run_id, error)

    def on_chain_start(
        self,
        serialized: dict[str, Any],
        inputs: dict[str, Any],
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        **facts: Any,
    ) -> None:
        self._start(run_id, parent_run_id, facts)

    def on_chain_end(
        self, outputs: dict[str, Any], *, run_id: UUID, parent_run_id: UUID | None = None, **facts: Any
    ) -> None:
        self._end(run_id, outputs)

    def on_chain_error(
        self, error: BaseException, *, run_id: UUID, parent_run_id: UUID | None = None, **facts: Any
    ) -> None:
        self._end(run_id, error)


Way: TypeAlias = Callable[[RagWikiRetriever, RunnableConfig], Awaitable[list[Document]]]


async def _invoke(retriever: RagWikiRetriever, config: RunnableConfig) -> list[Document]:
    return retriever.invoke(POD_QUESTION, config)


async def _ainvoke(retriever: RagWikiRetriever, config: RunnableConfig) -> list[Document]:
    return await retriever.ainvoke(POD_QUESTION, config)


async def _batch(retriever: RagWikiRetriever, config: RunnableConfig) -> list[Document]:
    return retriever.batch([POD_QUESTION], config)[0]


async def _abatch(retriever: RagWikiRetriever, config: RunnableConfig) -> list[Document]:
    return (await retriever.abatch([POD_QUESTION], config))[0]


async def _stream(retriever: RagWikiRetriever, config: RunnableConfig) -> list[Document]:
    (answer,) = retriever.stream(POD_QUESTION, config)
    return answer


async def _astream(retriever: RagWikiRetriever, config: RunnableConfig) -> list[Document]:
    (answer,) = [part async for part in retriever.astream(POD_QUESTION, config)]
    return answer


async def _with_provenance(retriever: RagWikiRetriever, config: RunnableConfig) -> list[Document]:
    return retriever.invoke_with_provenance(POD_QUESTION, config).documents


async def _awith_provenance(retriever: RagWikiRetriever, config: RunnableConfig) -> list[Document]:
    return (await retriever.ainvoke_with_provenance(POD_QUESTION, config)).documents


async def _with_config(retriever: RagWikiRetriever, config: RunnableConfig) -> list[Document]:
    return retriever.with_config(config).invoke(POD_QUESTION)


async def _for_user(retriever: RagWikiRetriever, config: RunnableConfig) -> list[Document]:
    return retriever.for_user("ada").invoke(POD_QUESTION, config)


WAYS: list[Way] = [
    _invoke,
    _ainvoke,
    _batch,
    _abatch,
    _stream,
    _astream,
    _with_provenance,
    _awith_provenance,
    _with_config,
    _for_user,
]
EVERY_WAY = pytest.mark.parametrize("ask", WAYS, ids=lambda way: way.__name__.strip("_"))
BOTH = pytest.mark.parametrize("ask", [_invoke, _ainvoke], ids=["sync", "async"])


def config_of(tracer: Tracer) -> RunnableConfig:
    """A configuration that a call can be recognized by."""
    return {"callbacks": [tracer], "tags": ["chat"], "metadata": {"session": "s1"}}


def is_nested(told: Sequence[tuple[str, str]]) -> bool:
    """Whether each run ended before the one that had started it."""
    running: list[str] = []
    for what, name in told:
        if what == "start":
            running.append(name)
        elif not running or running.pop() != name:
            return False
    return not running


@EVERY_WAY
async def test_a_call_is_one_run_with_one_below_it(ask: Way) -> None:
    """However it is called: our run, in it the wrapped one's, each with one end; tags and metadata reach both."""
    world, tracer = World(), Tracer()
    world.save(world.retriever(), "pods", PODS)
    world.shows(TAX)
    answer = await ask(world.retriever(), config_of(tracer))
    assert doc_ids(answer) == ["pods", "tax"]
    ours, wrapped = tracer.runs.values()
    assert (ours.name, tracer.parent(ours)) == ("RagWikiRetriever", None)
    assert (wrapped.name, tracer.parent(wrapped)) == ("ListRetriever", "RagWikiRetriever")
    assert ours.ends == [answer]
    assert wrapped.ends == [[TAX]]
    assert is_nested(tracer.told)
    for run in (ours, wrapped):
        assert "chat" in run.tags
        assert run.metadata["session"] == "s1"


@EVERY_WAY
async def test_an_answer_of_the_copy_alone_is_one_run(ask: Way) -> None:
    """Where the saved copy answers and the source is not asked, one run starts and ends, with the saved documents."""
    world, tracer = World(), Tracer()
    retriever = world.retriever(global_search="on_miss")
    world.save(retriever, "pods", PODS)
    world.shows(TAX)
    answer = await ask(retriever, config_of(tracer))
    assert doc_ids(answer) == ["pods"]
    (ours,) = tracer.runs.values()
    assert (ours.name, ours.ends) == ("RagWikiRetriever", [answer])


@EVERY_WAY
async def test_a_source_that_raises_ends_both_runs_and_counts_nothing(ask: Way) -> None:
    """The very exception ends both runs and reaches the caller; counts and misses are what they were."""
    world, tracer = World(), Tracer()
    retriever = world.retriever()
    world.save(retriever, "pods", PODS)
    world.shows(TAX)
    retriever.invoke(POD_QUESTION)
    before = retriever.documents()
    failure = ConnectionError("the vector store is away")
    world.source.fail_with(failure)
    with pytest.raises(ConnectionError) as raised:
        await ask(retriever, config_of(tracer))
    assert raised.value is failure
    assert [run.ends for run in tracer.runs.values()] == [[failure], [failure]]
    assert is_nested(tracer.told)
    assert retriever.documents() == before


@EVERY_WAY
async def test_a_personal_layer_that_fails_is_no_error_of_the_run(ask: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the store, the callback or the query embedding failing, our run still ends once, and with documents."""

    def fail(*_: object, **__: object) -> Any:
        raise ConnectionError("down")

    for broken in ("begin_query", "change", "on_suggestion", "embed_query"):
        world, tracer = World(), Tracer()
        options: dict[str, Any] = {"on_suggestion": fail} if broken == "on_suggestion" else {}
        retriever = world.retriever(fetch_threshold=1, **options)
        if broken == "embed_query":
            world.save(retriever, "pods", PODS)
        world.shows(TAX)
        with monkeypatch.context() as patch:
            if broken != "on_suggestion":
                patch.setattr(world.table if broken == "embed_query" else world.store, broken, fail)
            if broken == "change":
                patch.setattr(world.store, "change_together", fail)
            answer = await ask(retriever, config_of(tracer))
        assert doc_ids(answer) == ["tax"]
        assert [run.ends for run in tracer.runs.values()] == [[answer], [[TAX]]]


@pytest.mark.parametrize("awaiting", [False, True], ids=["sync", "async"])
async def test_a_batch_has_a_run_for_each_input_failed_or_not(awaiting: bool) -> None:
    """Of three inputs one fails: three runs of ours with a child each, of which one pair ends with the exception."""

    class Choosy(ListRetriever):
        def _get_relevant_documents(self, query: str, *, run_manager: CallbackManagerForRetrieverRun) -> list[Document]:
            if query == "bad":
                raise ConnectionError(query)
            return super()._get_relevant_documents(query, run_manager=run_manager)

    world, tracer = World(source=Choosy()), Tracer()
    world.shows(TAX)
    retriever, queries = world.retriever(), ["good", "bad", "fine"]
    config: RunnableConfig = {**config_of(tracer), "max_concurrency": 1}
    if awaiting:
        answers = await retriever.abatch(list(queries), config, return_exceptions=True)
    else:
        answers = retriever.batch(list(queries), config, return_exceptions=True)
    assert [isinstance(answer, ConnectionError) for answer in answers] == [False, True, False]
    ours, wrapped = tracer.named("RagWikiRetriever"), tracer.named("Choosy")
    assert [run.ends for run in ours] == [[answer] for answer in answers]
    assert [run.parent_id for run in wrapped] == [run.run_id for run in ours]
    assert [len(run.ends) for run in wrapped] == [1, 1, 1]
    assert world.record("tax").fetch_count == 2


@pytest.mark.parametrize("awaiting", [False, True], ids=["sync", "async"])
async def test_in_a_chain_the_runs_hang_together(awaiting: bool) -> None:
    """Inside a chain: the chain above ours, ours above the wrapped one, all of them ended once."""
    world, tracer = World(), Tracer()
    world.shows(TAX)
    chain = chained(world.retriever())
    if awaiting:
        await chain.ainvoke(POD_QUESTION, config_of(tracer))
    else:
        chain.invoke(POD_QUESTION, config_of(tracer))
    (ours,), (wrapped,) = tracer.named("RagWikiRetriever"), tracer.named("ListRetriever")
    assert (tracer.parent(ours), tracer.parent(wrapped)) == ("RunnableSequence", "RagWikiRetriever")
    assert is_nested(tracer.told)
    assert all("chat" in run.tags for run in (ours, wrapped))
    assert [run.metadata["session"] for run in (ours, wrapped)] == ["s1", "s1"]


@BOTH
async def test_what_is_below_the_wrapped_retriever_is_below_its_run(ask: Way) -> None:
    """An ensemble's own retrievers are runs below the ensemble's, which is below ours; so is a function's."""
    classic = pytest.importorskip("langchain_classic.retrievers", reason="needs langchain-classic")
    world, tracer = World(), Tracer()
    world.shows(TAX)
    ensemble = classic.EnsembleRetriever(retrievers=[world.source, ListRetriever(documents=[TAX])], weights=[0.5, 0.5])
    await ask(world.retriever(global_retriever=ensemble), config_of(tracer))
    assert [tracer.parent(run) for run in tracer.named("ListRetriever")] == ["EnsembleRetriever"] * 2
    assert [tracer.parent(run) for run in tracer.named("EnsembleRetriever")] == ["RagWikiRetriever"]
    assert all(len(run.ends) == 1 for run in tracer.runs.values())

    tracer = Tracer()
    function: RunnableLambda[str, list[Document]] = RunnableLambda(world.source.invoke)
    await ask(world.retriever(global_retriever=function.with_config(run_name="source")), config_of(tracer))
    assert [tracer.parent(run) for run in tracer.named("source")] == ["RagWikiRetriever"]
    assert all(len(run.ends) == 1 for run in tracer.runs.values())


@BOTH
async def test_a_store_that_is_asked_by_vector_is_traced_as_before(ask: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked by the query's vector, a vector store's retriever keeps its run below ours, its end, and its error."""
    embeddings: TableEmbeddings = topics()
    vectors = InMemoryVectorStore(embeddings)
    vectors.add_documents([document("pods", PODS), document("images", "Images are layered.")])
    world = World(embeddings=embeddings)
    retriever = world.retriever(global_retriever=vectors.as_retriever(search_kwargs={"k": 1}), context="focused")
    for _ in range(4):
        tracer = Tracer()
        answer = await ask(retriever, config_of(tracer))
        ours, wrapped = tracer.runs.values()
        assert (ours.name, wrapped.name) == ("RagWikiRetriever", "VectorStoreRetriever")
        assert tracer.parent(wrapped) == "RagWikiRetriever"
        assert ours.ends == [answer]
        assert len(wrapped.ends) == 1
        assert wrapped.metadata["session"] == "s1"
        assert is_nested(tracer.told)
    tracer, before = Tracer(), retriever.documents()
    failure = ConnectionError("the vector store is away")

    def fail(*_: object, **__: object) -> Any:
        raise failure

    for name in ("similarity_search_with_score_by_vector", "similarity_search", "asimilarity_search"):
        monkeypatch.setattr(vectors, name, fail)
    with pytest.raises(ConnectionError, match="is away"):
        await ask(retriever, config_of(tracer))
    assert [run.ends for run in tracer.runs.values()] == [[failure], [failure]]
    assert retriever.documents() == before
