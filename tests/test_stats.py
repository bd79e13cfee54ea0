"""What `stats()` tells: what is kept of a user, and what happened in this process, exactly and in bounded memory."""

from __future__ import annotations

import copy
import json
import os
import pickle
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import START, document
from langchain_core.documents import Document
from langchain_core.runnables import RunnableLambda
from scenarios import OTHER_QUESTION, POD_QUESTION, PODS, USER, World

from rag_wiki import DecayConfig, DecayEngine, DocumentState, MemoryStateStore, RagWikiRetriever, StateStore, UserStats
from rag_wiki.observing import ProcessStats, StageTimes, observations_of
from rag_wiki.storage.records import DocumentEvent

IMAGES = "Images are built in layers."
ZERO = ProcessStats(since=START)


def finds_nothing(_: str) -> list[Document]:
    """A wrapped retriever that can be copied and pickled."""
    return []


def counted(retriever: RagWikiRetriever) -> ProcessStats:
    """What was counted, without what differs from run to run."""
    return replace(retriever.process_stats(), since=START, stages={}, index_bytes=0)


def test_questions_are_hits_misses_failures_and_degraded_ones() -> None:
    """Each question is a hit, a miss or failed; degraded ones, and those that the wrapped retriever saw, are told."""
    world = World()
    retriever = world.retriever(global_search="on_miss")
    world.save(retriever, "pods", PODS)
    before = counted(retriever)
    assert before == replace(ZERO, calls=1, misses=1, asked=1, saves=1)
    retriever.invoke(POD_QUESTION)
    retriever.invoke(OTHER_QUESTION)
    world.source.fail_with(ConnectionError("the index is away"))
    with pytest.raises(ConnectionError):
        retriever.invoke(OTHER_QUESTION)
    world.source.fail_with(None)
    world.table.error = TimeoutError("the model is away")
    retriever.invoke(POD_QUESTION)
    stats = counted(retriever)
    assert stats == replace(before, calls=5, hits=1, misses=3, failed=1, degraded=1, asked=3)
    assert stats.calls == stats.hits + stats.misses + stats.failed
    assert stats.hit_rate == 0.25


def test_a_pinned_document_that_is_only_along_is_no_hit() -> None:
    """A question that no copy answers is a miss, although a pinned document came along; the one it answers is a hit."""
    world = World()
    retriever = world.retriever()
    world.save(retriever, "pods", PODS)
    retriever.force_pin("pods")
    assert [found.page_content for found in retriever.invoke(OTHER_QUESTION)] == [PODS]
    assert (counted(retriever).hits, counted(retriever).misses) == (0, 2)
    retriever.invoke(POD_QUESTION)
    assert (counted(retriever).hits, counted(retriever).misses) == (1, 2)


def test_what_happens_to_documents_is_counted_by_its_reason() -> None:
    """Suggestions, answers to them, saves by hand and by themselves, pins, votes and demotions by reason add up."""
    world = World()
    retriever = world.retriever(
        decay=DecayConfig(max_cache_miss_streak=2, demotion_hold_days=0, demotion_threshold=0.5)
    )
    world.shows(document("pods", PODS), document("images", IMAGES), document("tax", "Tax is due in May."))
    for _ in range(3):
        retriever.invoke("an introduction")
    assert counted(retriever).suggested == 3
    retriever.accept_suggestion("pods", full_content=PODS)
    retriever.decline_suggestion("images")
    retriever.decline_suggestion("images")  # nothing is pending any more
    retriever.accept_suggestion("images", full_content=IMAGES)  # its suggestion was declined
    retriever.accept_suggestion("tax")
    retriever.refresh("pods", full_content=PODS)
    retriever.thumbs_up("pods")
    retriever.thumbs_up("pods")  # said before
    retriever.force_pin("pods")
    retriever.unpin("pods")
    retriever.force_remove("tax")
    retriever.force_remove("tax")
    world.shows()
    for _ in range(4):
        retriever.invoke(OTHER_QUESTION)  # images and pods are missed twice for each that is saved
    world.save(retriever, "logs", "Logs are rotated.")
    world.clock.turn(days=90)
    retriever.run_decay()
    assert counted(retriever) == ProcessStats(
        since=START,
        calls=8,
        misses=8,
        asked=8,
        suggested=3,
        accepted=2,
        declined=1,
        saves=4,
        refreshes=1,
        pins=1,
        unpins=1,
        demotions={"score": 1, "misses": 2, "user": 1},
        votes=1,
        decay_runs=1,
    )


def test_saving_by_itself_is_no_accepted_suggestion() -> None:
    """With `auto_save` a save is counted as one, by itself, and the suggestion as made and not accepted."""
    world = World()
    retriever = world.retriever(auto_save=True, fetch_threshold=1)
    world.shows(document("pods", PODS))
    retriever.invoke(OTHER_QUESTION)
    assert counted(retriever) == replace(ZERO, calls=1, misses=1, asked=1, suggested=1, saves=1, auto_saves=1)
    other = world.retriever(embedding_name="another model")
    other.reindex()
    assert (counted(other).reindexed, counted(other).refreshes) == (1, 0)


def test_the_figures_of_a_user_are_kept_in_the_store(make_store: Callable[[str], StateStore]) -> None:
    """A user's questions and searches are read back by another process, which counts its own from zero."""
    pytest.importorskip("sqlalchemy", reason="needs the extra sqlite")
    world = World(store=make_store("sqlite-file"))
    retriever = world.retriever()
    world.save(retriever, "pods", PODS)
    for _ in range(3):
        retriever.invoke(POD_QUESTION)
    retriever.invoke(POD_QUESTION, user_id="bob")
    assert (retriever.stats().queries, retriever.stats().searches) == (4, 3)
    theirs = retriever.stats(user_id="bob")
    assert (theirs.queries, theirs.searches, theirs.process.calls) == (1, 0, 5)
    reopened = replace(world, store=make_store("sqlite-file")).retriever().stats()
    assert (reopened.queries, reopened.searches, reopened.process.calls) == (4, 3, 0)


def test_retrievers_over_one_store_count_together() -> None:
    """Copies, other settings, a retriever made for one request, and an engine of one's own count as one."""
    world = World()
    retriever = world.retriever(global_retriever=RunnableLambda(finds_nothing))
    copies: list[Any] = [
        retriever.for_user("bob"),
        retriever.with_config(configurable={"user_id": "carol"}),
        retriever.bind(k=1),
        retriever.model_copy(update={"config": replace(retriever.config, fetch_threshold=9)}),
        copy.deepcopy(retriever),
        world.retriever("dave"),
    ]
    for copied in copies:
        copied.invoke(OTHER_QUESTION)
    DecayEngine(world.store).run_for_user(USER)
    assert all(copied.process_stats() == retriever.process_stats() for copied in copies)
    assert (counted(retriever).calls, counted(retriever).decay_runs) == (6, 1)
    assert counted(World().retriever()) == ZERO


def test_counts_are_exact_over_threads() -> None:
    """Two thousand questions of eight threads, and events told by all of them, are two thousand questions."""
    world = World()
    retriever = world.retriever(decay=DecayConfig(max_cache_miss_streak=10_000))
    world.save(retriever, "pods", PODS)
    together, each = threading.Barrier(8), 250
    event = DocumentEvent("pods", START, "voted", "thumbs up", DocumentState.CLAIMED, DocumentState.CLAIMED, 1, 1.0)

    def ask(number: int) -> None:
        together.wait(timeout=60)
        for _ in range(each):
            retriever.invoke(POD_QUESTION if number % 2 else OTHER_QUESTION)
            observations_of(world.store).tell(USER, [event], "user")

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(ask, range(8)))
    stats = counted(retriever)
    assert (stats.calls, stats.hits, stats.misses, stats.votes) == (1 + 8 * each, 4 * each, 1 + 4 * each, 8 * each)


async def test_awaited_questions_are_counted_the_same() -> None:
    """`ainvoke`, `abatch` and `astream` count as their blocking twins do, and so does a question that fails."""
    world = World()
    retriever = world.retriever()
    world.save(retriever, "pods", PODS)
    await retriever.ainvoke(POD_QUESTION)
    await retriever.abatch([POD_QUESTION, OTHER_QUESTION])
    assert [part async for part in retriever.astream(OTHER_QUESTION)]
    world.source.fail_with(ConnectionError("the index is away"))
    with pytest.raises(ConnectionError):
        await retriever.ainvoke(POD_QUESTION)
    assert counted(retriever) == replace(ZERO, calls=6, hits=2, misses=3, failed=1, asked=5, saves=1)
    assert (await retriever.astats()).process.calls == 6


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process.*multi-threaded:DeprecationWarning")
def test_a_fork_begins_at_zero() -> None:
    """A forked worker has counted nothing yet, also where a thread of its parent was counting as it was forked."""
    world = World()
    retriever = world.retriever()
    world.save(retriever, "pods", PODS)
    read, write = os.pipe()
    lock = observations_of(world.store)._lock
    lock.acquire()  # as if another thread held it
    child = os.fork()
    if child == 0:
        try:
            signal.alarm(60)
            before = counted(retriever).calls
            retriever.invoke(POD_QUESTION)
            os.write(write, f"{before} {counted(retriever).calls} {counted(retriever).hits}".encode())
        finally:
            os._exit(0)
    lock.release()
    os.close(write)
    with os.fdopen(read) as told:
        assert told.read() == "0 1 1"
    os.waitpid(child, 0)
    assert counted(retriever).calls == 1


def test_a_pickled_retriever_leaves_its_counts_behind(tmp_path: Path) -> None:
    """A retriever that travels arrives with what its own store counted there: nothing yet."""
    sqlite = pytest.importorskip("rag_wiki.storage.sqlite", reason="needs the extra sqlite")
    with sqlite.SQLiteStateStore(f"sqlite:///{tmp_path / 'state.db'}") as store:
        retriever = RagWikiRetriever(RunnableLambda(finds_nothing), USER, store)
        retriever.invoke(OTHER_QUESTION)
        arrived: RagWikiRetriever = pickle.loads(pickle.dumps(retriever))  # noqa: S301 - our own
        assert (counted(retriever).calls, counted(arrived).calls) == (1, 0)
        arrived.invoke(OTHER_QUESTION)
        arrived.invoke(OTHER_QUESTION)
        assert (counted(retriever).calls, counted(arrived).calls) == (1, 2)
        arrived.state_store.close()


def test_stages_are_percentiles_of_the_latest_questions() -> None:
    """Percentiles are of the latest 1,024 questions, as numpy has them, and no more is held."""
    world = World()
    retriever = world.retriever()
    world.save(retriever, "pods", PODS)
    timings = []
    for _ in range(1_100):
        retriever.invoke(POD_QUESTION)
        provenance = retriever.last_provenance
        assert provenance is not None
        timings.append(dict(provenance.timings))
        provenance.timings.clear()  # type: ignore[attr-defined]  # the caller's own: it changes nothing
    stages = retriever.stats().process.stages
    assert list(stages) == ["begin", "embed", "search", "read", "global", "apply", "total", "save"]
    latest = [found["total"] for found in timings[-1_024:]]
    p50, p95, p99 = np.percentile(latest, [50, 95, 99])
    assert stages["total"].samples == 1_024
    assert (stages["total"].p50, stages["total"].p95, stages["total"].p99) == pytest.approx((p50, p95, p99), abs=1e-3)
    assert stages["save"].samples == 1
    assert 0 < stages["total"].p50 <= stages["total"].p95 <= stages["total"].p99


def test_figures_print_and_are_plain_json() -> None:
    """`print(stats)` shows both parts by name, and `to_dict()` comes back from JSON as it was."""
    process = ProcessStats(
        since=START, calls=1_204, hits=800, misses=400, failed=4, stages={"total": StageTimes(1_024, 0.5, 1.25, 2.0)}
    )
    states = dict.fromkeys((state.value for state in DocumentState), 0) | {"CLAIMED": 3}
    stats = UserStats("a\nda", states, 34, 1, 1_088, None, 1_204, 980, process)
    assert str(stats).splitlines() == [
        "User a da",
        "  3 documents (3 CLAIMED), 34 saved chunks, 1 stale copies",
        "  1,204 questions, 980 of them compared with saved copies",
        "  index 1,088 bytes in this process, similarity threshold not calibrated",
        "In this process, all users, since 2026-03-01 09:00 UTC",
        "  questions    1,204: 800 hits (67% of the answered), 400 misses, 4 failed",
        "               0 degraded; the wrapped retriever answered 0",
        "  suggestions  0: 0 accepted, 0 declined",
        "               0 counts lapsed",
        "  copies       0 saved (0 by auto_save), 0 refreshed",
        "               0 embedded anew, 0 seen to be stale",
        "               0 pinned, 0 unpinned, let go: 0 by score, 0 by misses, 0 by user",
        "  other        decay runs 0, votes 0, index 0 bytes",
        "  milliseconds       p50       p95       p99      of",
        "  total            0.500     1.250     2.000   1,024",
    ]
    plain = stats.to_dict()
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
    assert (plain["states"]["CLAIMED"], plain["process"]["hits"]) == (3, 800)
    assert plain["process"]["stages"] == {"total": {"samples": 1_024, "p50": 0.5, "p95": 1.25, "p99": 2.0}}
    assert plain["process"]["since"] == "2026-03-01T09:00:00+00:00"
    assert UserStats(USER, states, 0, 0, 0, 0.75).to_dict()["process"]["hit_rate"] is None


def test_figures_of_the_process_need_no_user_and_no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """`process_stats` works on a retriever without a user while the store is down; it names nobody."""
    world = World()
    retriever = world.retriever(None)
    retriever.invoke(OTHER_QUESTION, user_id=USER)

    def down(*_: object) -> None:
        raise ConnectionError("refused")

    monkeypatch.setattr(world.store, "_read_start", down)
    retriever.invoke(OTHER_QUESTION, user_id=USER)
    assert counted(retriever) == replace(ZERO, calls=2, misses=2, asked=2, degraded=1)
    assert USER not in str(retriever.process_stats())
    assert USER not in json.dumps(retriever.process_stats().to_dict())


def test_stores_that_are_equal_are_counted_apart() -> None:
    """A store of somebody's own may be a dataclass: it needs no hash, and equal ones don't share counts."""

    @dataclass
    class Named(MemoryStateStore):
        name: str = ""

        def __post_init__(self) -> None:
            MemoryStateStore.__init__(self)

    first, second = (RagWikiRetriever(World().source, USER, Named("one")) for _ in range(2))
    assert first.state_store == second.state_store
    first.invoke("what?")
    assert (first.process_stats().calls, second.process_stats().calls) == (1, 0)
