"""A SQLite database in memory is one database for all threads of its store, and for nobody else."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from helpers import document
from scenarios import POD_QUESTION, PODS, USER, World, cached, doc_ids

from rag_wiki import DecayConfig, DocumentState, MemoryStateStore, RagWikiRetriever
from rag_wiki.scheduler import DecayScheduler
from rag_wiki.storage.sqlite import SQLiteStateStore

URLS = ["sqlite:///:memory:", "sqlite://", "sqlite:///file:wiki?mode=memory&uri=true"]
THREADS, CALLS = 8, 20


@pytest.fixture(params=URLS)
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """A world on an empty database in memory."""
    with SQLiteStateStore(request.param) as store:
        yield World(store)


def in_thread(run: Callable[[], Any]) -> Any:
    """What a function returns in a thread of its own."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(run()))
    thread.start()
    thread.join(timeout=60)
    assert len(results) == 1, "the thread failed, or did not end"
    return results[0]


async def test_every_way_of_calling_sees_one_record(world: World) -> None:
    """Plain, awaited and batched calls, and a thread's, count on one record, and a decay run in a thread scores it."""
    retriever = world.retriever(fetch_threshold=100)
    world.shows(document("pods", PODS))
    retriever.invoke("one")
    await retriever.ainvoke("two")
    retriever.batch(["three", "four", "five"])
    await retriever.abatch(["six", "seven"])
    await asyncio.gather(*(retriever.ainvoke(str(number)) for number in range(5)))
    in_thread(lambda: retriever.invoke("thirteen"))
    assert world.record("pods").fetch_count == 13
    assert in_thread(lambda: world.record("pods")) == world.record("pods")

    in_thread(lambda: retriever.accept_suggestion("pods"))
    world.clock.turn(days=10)
    scheduler = DecayScheduler(retriever.decay_engine, world.store)
    (result,) = in_thread(lambda: scheduler.run_now(USER))
    assert (result.doc_id, result.transitioned) == ("pods", False)
    assert world.record("pods").decay_score == result.new_score < 1.0
    for answer in (retriever.invoke(POD_QUESTION), await retriever.ainvoke(POD_QUESTION)):
        assert doc_ids(cached(answer)) == ["pods"]
    assert [doc_ids(cached(answer)) for answer in retriever.batch([POD_QUESTION] * 3)] == [["pods"]] * 3
    in_thread(lambda: retriever.force_remove("pods"))
    assert world.state("pods") is DocumentState.DEMOTED


def test_a_thread_may_be_the_first_to_use_it(world: World) -> None:
    """Where threads make the first calls, all at once, the tables are made once and each call is counted."""
    retriever = world.retriever(fetch_threshold=1000)
    world.shows(document("pods", PODS))
    together = threading.Barrier(THREADS)
    failures: list[BaseException] = []

    def work() -> None:
        together.wait(timeout=60)
        try:
            for number in range(CALLS):
                assert retriever.invoke_with_provenance(str(number)).provenance.degraded == ()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert not any(thread.is_alive() for thread in threads)
    assert failures == []
    assert world.record("pods").fetch_count == THREADS * CALLS
    assert len(world.source.calls) == THREADS * CALLS


def test_saving_beside_queries_is_whole(world: World) -> None:
    """While some threads ask, others save, vote, remove and run decay on the same database, and nothing fails."""
    retriever = world.retriever(decay=DecayConfig(max_cache_miss_streak=10_000), reset_threshold=10_000)
    numbers = range(4)
    world.shows(*(document(f"pods {number}", f"{PODS} {number}") for number in numbers))
    retriever.invoke("an introduction")
    together = threading.Barrier(THREADS)
    failures: list[BaseException] = []

    def keep(number: int) -> None:
        for _ in range(5):
            retriever.accept_suggestion(f"pods {number}", full_content=f"{PODS} {number}")
            retriever.thumbs_up(f"pods {number}")
            retriever.force_remove(f"pods {number}")
            retriever.invoke("again")
        retriever.force_pin(f"pods {number}")

    def ask(_: int) -> None:
        for _ in range(10):
            told = retriever.invoke_with_provenance(POD_QUESTION).provenance.degraded
            # A copy that is removed while it is read may be missed; the database itself never fails.
            assert [sentence for sentence in told if "saved cop" not in sentence or "could not" in sentence] == []
            retriever.run_decay()

    def work(task: Callable[[int], None], number: int) -> None:
        together.wait(timeout=60)
        try:
            task(number)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(task, number)) for task in (keep, ask) for number in numbers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert not any(thread.is_alive() for thread in threads)
    assert failures == []
    world.shows()
    assert sorted(map(str, doc_ids(retriever.invoke(POD_QUESTION)))) == [f"pods {number}" for number in numbers]
    assert retriever.stats().chunks == len(numbers)


@pytest.mark.parametrize("url", ["sqlite:///:memory:", "sqlite://"])
def test_two_stores_share_nothing(url: str) -> None:
    """Each store in memory has a database of its own: no count, copy or user of one is in the other."""
    with SQLiteStateStore(url) as one, SQLiteStateStore(url) as other:
        here, there = World(one), World(other)
        asking = here.retriever()
        here.save(asking, "pods", PODS)
        assert there.retriever().invoke(POD_QUESTION) == []
        assert there.store.get(USER, "pods") is None
        assert there.store.list_active_users() == []
        there.save(there.retriever(), "pods", "Pods are something else there.")
        assert [item.page_content for item in asking.invoke(POD_QUESTION)] == [PODS]


def test_closing_ends_it() -> None:
    """What was in memory lives as long as its store: closed and used again, the store is an empty one."""
    store = SQLiteStateStore("sqlite:///:memory:")
    world = World(store)
    world.save(world.retriever(), "pods", PODS)
    store.close()
    assert store.get(USER, "pods") is None
    assert world.retriever().invoke(POD_QUESTION) == []
    store.close()


async def test_it_answers_as_the_plain_memory_does(world: World) -> None:
    """The same calls leave the same records as with the store that is no database."""
    plain = World(MemoryStateStore())

    async def live(retriever: RagWikiRetriever, around: World) -> list[Any]:
        around.shows(document("pods", PODS), document("images", "Images are read only."))
        for number in range(3):
            await retriever.ainvoke(str(number))
        around.shows()
        retriever.accept_suggestion("pods")
        retriever.decline_suggestion("images")
        answers = [await retriever.ainvoke(POD_QUESTION), retriever.invoke("what about tax?")]
        records = [vars(record) | {"copy_id": None, "life": None} for record in retriever.documents()]
        return [*answers, records, retriever.history("pods"), retriever.history("images")]

    assert await live(world.retriever(), world) == await live(plain.retriever(), plain)
