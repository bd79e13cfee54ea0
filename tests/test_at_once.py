"""Many queries at once: batches, calls awaited together, threads; and what a save costs the query after it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
from helpers import ListRetriever, TableEmbeddings, document
from langchain_core.callbacks import CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.runnables import RunnableConfig
from pydantic import PrivateAttr
from scenarios import OTHER_QUESTION, POD_QUESTION, USER, Paragraphs, World, cached, doc_ids, texts

from rag_wiki import InvalidUserError, RagWikiRetriever, StateStore
from rag_wiki.search.embedding import fingerprint
from rag_wiki.storage.records import DocumentState, UserDocRecord

Batch = Callable[..., Any]
T = TypeVar("T")
QUESTIONS = ["pods?", "images?", "nothing?", "pods and more?", "pods?"]


@pytest.fixture
def world(state_store: StateStore) -> World:
    """A user with a saved document about pods and one about images, of three chunks each."""
    world = World(store=state_store)
    retriever = world.retriever(text_splitter=Paragraphs())
    for subject in ("pods", "images"):
        world.save(retriever, subject, "\n\n".join(f"{subject} in part {part}" for part in range(3)))
    world.shows(document("found", "found by the source"))
    return world


def told(results: Iterable[Sequence[Any]]) -> list[list[tuple[Any, Any, Any]]]:
    """Results in short: what answered, with which chunks and scores."""
    keys = ("doc_id", "chunks_used", "scores")
    return [[tuple(item.metadata.get(key) for key in keys) for item in found] for found in results]


@pytest.fixture(params=["batch", "abatch", "a quick batch"])
def ask(request: pytest.FixtureRequest) -> Batch:
    """Asks in one of the ways; a retriever whose calls wait for nothing takes the last one by itself."""

    def run(retriever: RagWikiRetriever, inputs: Sequence[Any], config: Any = None, **kwargs: Any) -> Any:
        if request.param == "abatch":
            return asyncio.run(retriever.abatch(list(inputs), config, **kwargs))
        if request.param == "a quick batch":
            for _ in range(16):
                retriever._recall.call_pace.note(0.01)
        return retriever.batch(list(inputs), config, **kwargs)

    return run


def test_a_batch_answers_as_single_calls_do(world: World, ask: Batch) -> None:
    """Each question of a batch gets what it gets alone, in its place; equal ones too."""
    retriever = world.retriever(local_top_k=2)
    alone = [retriever.invoke(question) for question in QUESTIONS]

    together = ask(retriever, QUESTIONS)

    assert told(together) == told(alone)
    assert [doc_ids(cached(found)) for found in together] == [["pods"], ["images"], [], ["pods"], ["pods"]]


def test_a_batch_embeds_each_question_once(world: World, ask: Batch) -> None:
    """Questions are embedded once each, equal ones together; and not at all for a user with nothing saved."""
    retriever = world.retriever()
    world.table.queries.clear()
    ask(retriever, QUESTIONS)
    assert sorted(world.table.queries) == sorted(set(QUESTIONS))

    world.table.queries.clear()
    ask(retriever, QUESTIONS, user_id="bob")
    assert world.table.queries == []


def test_a_batch_counts_every_question(world: World, ask: Batch) -> None:
    """A document that six questions of a batch fetch has six fetches more, and is suggested once."""
    suggested: list[str] = []
    retriever = world.retriever(on_suggestion=lambda event: suggested.append(event.doc_id))
    ask(retriever, [f"nothing {number}" for number in range(6)])
    assert world.record("found").fetch_count == 6
    assert suggested == ["found"]
    ask(retriever, ["pods?"] * 4)
    assert world.record("pods").fetch_count == 1 + 4


def test_a_batch_of_several_users_stays_apart(world: World, ask: Batch) -> None:
    """Questions of a batch are answered from the copies of the user that each of them names."""
    retriever = world.retriever()
    world.save(retriever, "bobs-pods", "pods that are Bob's", user_id="bob")
    configs: list[RunnableConfig] = [{"configurable": {"user_id": name}} for name in (USER, "bob", "carol", "bob")]

    found = ask(retriever, ["pods?"] * 4, configs)

    assert [doc_ids(cached(each)) for each in found] == [["pods"], ["bobs-pods"], [], ["bobs-pods"]]


class PickyEmbeddings(TableEmbeddings):
    """Can't embed questions about tax."""

    def embed_query(self, text: str) -> list[float]:
        """The vector of a query."""
        if text == OTHER_QUESTION:
            message = "no tax here"
            raise ValueError(message)
        return super().embed_query(text)


def test_a_question_that_cannot_be_embedded_fails_for_itself(world: World, ask: Batch) -> None:
    """The others of its batch are answered from the copies; it gets the global results, and says why."""
    name = fingerprint(world.table)
    world.embeddings = PickyEmbeddings(world.table.table)
    retriever = world.retriever(embedding_name=name)

    found = ask(retriever, [POD_QUESTION, OTHER_QUESTION, "images?"])

    assert [doc_ids(each)[0] for each in found] == ["pods", "found", "images"]
    alone = retriever.invoke_with_provenance(OTHER_QUESTION)
    assert doc_ids(alone.documents) == ["found"]
    assert "could not be embedded" in alone.provenance.degraded[0]


def test_what_is_wrong_with_one_call_is_told_by_it(world: World, ask: Batch) -> None:
    """With `return_exceptions` a call without a user is its error, and the others are answered; without, it raises."""
    retriever = world.retriever(user_id=None)
    configs: list[RunnableConfig] = [{"configurable": {"user_id": USER}}, {}, {"configurable": {"user_id": USER}}]

    found = ask(retriever, ["pods?", "pods?", "images?"], configs, return_exceptions=True)

    assert [doc_ids(found[at])[0] for at in (0, 2)] == ["pods", "images"]
    assert isinstance(found[1], InvalidUserError)
    with pytest.raises(InvalidUserError):
        ask(retriever, ["pods?"] * 3, configs)


def test_a_batch_keeps_to_its_concurrency(world: World, ask: Batch) -> None:
    """With `max_concurrency` no more questions than that are embedded, or asked, at the same time."""
    watched = Watched(world)
    retriever = world.retriever(global_retriever=watched.source)
    ask(retriever, [f"pods {number}" for number in range(6)], {"max_concurrency": 2})
    assert watched.most_embedding <= 2
    assert watched.most_asking <= 2


class Watched:
    """A source and a model that note how many ask them at the same time."""

    def __init__(self, world: World) -> None:
        self.lock = threading.Lock()
        self.now = {"embedding": 0, "asking": 0}
        self.most = {"embedding": 0, "asking": 0}
        watch = self

        class Model(TableEmbeddings):
            def embed_query(self, text: str) -> list[float]:
                return watch.during("embedding", lambda: super(Model, self).embed_query(text))

        class Source(ListRetriever):
            def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Any]:
                return watch.during(
                    "asking", lambda: super(Source, self)._get_relevant_documents(query, run_manager=run_manager)
                )

        world.embeddings = Model(world.table.table)
        self.source = Source(documents=world.source.documents)

    def during(self, what: str, work: Callable[[], T]) -> T:
        """Do something that is counted."""
        with self.lock:
            self.now[what] += 1
            self.most[what] = max(self.most[what], self.now[what])
        try:
            return work()
        finally:
            with self.lock:
                self.now[what] -= 1

    @property
    def most_embedding(self) -> int:
        """Questions that were embedded at the same time."""
        return self.most["embedding"]

    @property
    def most_asking(self) -> int:
        """Questions that the source was asked at the same time."""
        return self.most["asking"]


async def test_calls_awaited_together_are_all_counted(world: World) -> None:
    """Sixty calls of two users at once: each is answered, each is counted, and the store is asked far fewer times."""
    retriever = world.retriever()
    world.save(retriever, "pods", "pods that are Bob's", user_id="bob")
    world.shows(document("found", "found by the source"))
    counting = Counting(world.store)

    found = await asyncio.gather(
        *(retriever.ainvoke(f"pods {number}", user_id=(USER, "bob")[number % 2]) for number in range(60))
    )

    assert [doc_ids(each) for each in found] == [["pods", "found"]] * 60
    assert [world.record("found", name).fetch_count for name in (USER, "bob")] == [30, 30]
    assert world.record("pods").fetch_count == 1 + 30
    if world.store.waits:
        assert counting.asked < 40
    counting.stop()


class Counting:
    """Counts what a store is asked to begin and to change."""

    names = ("_read_start", "_change")

    def __init__(self, store: StateStore) -> None:
        self.asked = 0
        self._store = store
        self._lock = threading.Lock()
        for name in self.names:
            setattr(store, name, self._counted(getattr(store, name)))

    def _counted(self, ask: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            with self._lock:
                self.asked += 1
            return ask(*arguments)

        return run

    def stop(self) -> None:
        """Count no more."""
        for name in self.names:
            delattr(self._store, name)


async def test_a_cancelled_call_takes_no_other_with_it(world: World) -> None:
    """Of calls that go together some are cancelled: the others are answered and counted."""
    retriever = world.retriever()
    calls = [asyncio.ensure_future(retriever.ainvoke(f"pods {number}")) for number in range(12)]
    await asyncio.sleep(0)
    for call in calls[::3]:
        call.cancel()

    found = await asyncio.gather(*calls, return_exceptions=True)

    kept = [each for at, each in enumerate(found) if at % 3]
    assert all(isinstance(each, asyncio.CancelledError) for each in found[::3])
    assert [doc_ids(each) for each in kept if isinstance(each, list)] == [["pods", "found"]] * 8
    assert world.record("found").fetch_count >= 8
    assert doc_ids(await retriever.ainvoke("pods?")) == ["pods", "found"]


async def test_a_loop_that_is_shut_down_leaves_nobody_waiting(world: World) -> None:
    """When every task is cancelled, at whatever moment, the next call of the same user on that loop is answered."""
    retriever = world.retriever()
    for steps in range(6):
        calls = [asyncio.ensure_future(retriever.ainvoke("pods?")) for _ in range(3)]
        for _ in range(steps):
            await asyncio.sleep(0)
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        assert doc_ids(await asyncio.wait_for(retriever.ainvoke("pods?"), timeout=60)) == ["pods", "found"]


class TurningSlow(ListRetriever):
    """Says that its call took long, and from then on waits until two calls are there at the same time."""

    _meeting: threading.Barrier = PrivateAttr(default_factory=lambda: threading.Barrier(2, timeout=60))
    _owner: RagWikiRetriever | None = PrivateAttr(default=None)

    def _get_relevant_documents(self, query: str, *, run_manager: CallbackManagerForRetrieverRun) -> list[Document]:
        assert self._owner is not None
        if self.calls:
            self._meeting.wait()
        else:
            for _ in range(16):
                self._owner._recall.call_pace.note(1000)
        return super()._get_relevant_documents(query, run_manager=run_manager)


@pytest.mark.parametrize(
    ("total", "worked", "is_quick"), [(8.0, 7.5, True), (1.0, 0.0, True), (8.0, 1.0, False), (40.0, 40.0, False)]
)
def test_calls_that_wait_go_in_threads(world: World, total: float, worked: float, is_quick: bool) -> None:
    """Milliseconds of a call, and how many of them it worked: who waits, or works in native code, takes threads."""
    recall = world.retriever()._recall
    for _ in range(16):
        recall.note_pace(SimpleNamespace(timings={"total": total}), worked)  # type: ignore[arg-type]
    assert recall.call_pace.is_quick is is_quick


def test_a_batch_whose_calls_turn_slow_goes_on_in_threads(world: World) -> None:
    """A batch that began without threads, because calls took no time, takes them when one does."""
    source = TurningSlow(documents=world.source.documents)
    retriever = world.retriever(global_retriever=source)
    source._owner = retriever
    for _ in range(16):
        retriever._recall.call_pace.note(0.01)
    assert [doc_ids(each) for each in retriever.batch(["pods?"] * 5)] == [["pods", "found"]] * 5


async def test_a_store_that_fails_fails_each_call_for_itself(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls that go together meet a store that is down: each has its global results and says so; later all is well."""
    retriever = world.retriever()

    def down(*_: Any) -> Any:
        message = "the store is down"
        raise ConnectionError(message)

    with monkeypatch.context() as broken:
        broken.setattr(world.store, "_change", down)
        told = await asyncio.gather(*(retriever.ainvoke_with_provenance(f"pods {number}") for number in range(8)))
    assert [doc_ids(each.documents) for each in told] == [["pods", "found"]] * 8
    assert all("may not be counted" in each.provenance.degraded[0] for each in told)
    assert world.store.get(USER, "found") is None
    await retriever.ainvoke("pods?")
    assert world.record("found").fetch_count == 1


def test_threads_of_one_user_count_exactly(world: World) -> None:
    """Eight threads that ask for one user at once leave exact counts, and one suggestion."""
    suggested: list[str] = []
    retriever = world.retriever(on_suggestion=lambda event: suggested.append(event.doc_id))
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda number: retriever.invoke(f"pods {number}"), range(80)))
    assert [doc_ids(each) for each in found] == [["pods", "found"]] * 80
    assert world.record("found").fetch_count == 80
    assert suggested == ["found"]


class Recording:
    """Notes the documents whose records or copies are read."""

    def __init__(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        self.copies: list[str] = []
        self.lists = 0
        store, chunks = world.store, world.store.chunk_store
        read_many, scan = chunks.place.read_many, store._scan

        def noting_copies(user_id: str, wanted: Iterable[tuple[str, str]], **parts: bool) -> Any:
            asked = list(wanted)
            self.copies += [doc_id for doc_id, _ in asked]
            return read_many(user_id, asked, **parts)

        def noting_lists(*arguments: Any, **options: Any) -> Any:
            self.lists += 1
            return scan(*arguments, **options)

        monkeypatch.setattr(chunks.place, "read_many", noting_copies)
        monkeypatch.setattr(store, "_scan", noting_lists)


def test_a_save_costs_the_next_query_that_document_only(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a save, a pin or a removal the next query reads what changed, and lists nothing."""
    retriever = world.retriever()
    retriever.invoke("nothing?")
    world.save(retriever, "tax", "nothing about tax")
    reading = Recording(world, monkeypatch)

    assert doc_ids(retriever.invoke("tax?")) == ["tax"]
    assert (set(reading.copies), reading.lists) == ({"tax"}, 0)

    retriever.force_pin("images")
    reading.copies.clear()
    assert doc_ids(retriever.invoke("tax?")) == ["images", "tax"]
    retriever.force_remove("images")
    reading.copies.clear()
    assert doc_ids(retriever.invoke("images?")) == []
    assert (reading.copies, reading.lists) == ([], 0)


def test_a_change_that_cannot_be_told_is_read_in_full(world: World) -> None:
    """A saved document that somebody deletes from the store answers no more; one written by hand does."""
    retriever = world.retriever()
    retriever.invoke("pods?")
    world.shows()
    world.store.delete(USER, "pods")
    assert doc_ids(retriever.invoke("pods?")) == []
    chunk = {"chunk_index": 0, "text": "pods by hand", "vector": world.table.vector("pods"), "section": None}
    record = UserDocRecord(USER, "hand", "By Hand", "", user_state=DocumentState.CLAIMED)
    world.store.chunk_store.save_chunks(USER, "hand", [chunk])
    copy_id = world.store.chunk_store.place.copies(USER, "hand")[-1]
    world.store.upsert(record.changed(copy_id=copy_id, chunk_count=1))
    other_model = retriever.invoke_with_provenance("pods?")
    assert texts(other_model.documents) == []
    assert other_model.provenance.degraded == (
        "1 saved copy can't answer (other embedding model); reindex() embeds them anew",
    )
