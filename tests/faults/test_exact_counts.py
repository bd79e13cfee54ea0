"""Counts are exact, "once" is once, and no late writer undoes what was done meanwhile, over threads and clients."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest
from helpers import TableEmbeddings, document
from places import PlacedWorld
from scenarios import POD_QUESTION, Paragraphs, cached, texts, topics

from rag_wiki import DocumentState, FetchCounter, RagWikiRetriever, SuggestionEvent, UserDocRecord
from rag_wiki.storage import chunk_places
from rag_wiki.storage.chunk_store import ChunkStore

T = TypeVar("T")
PATIENCE = 30
THREADS, EACH = 8, 25
CONTENT = "Pods, first.\n\nPods, second.\n\nPods, third."


def together(work: Callable[[int], T], threads: int = THREADS) -> list[T]:
    """What each of several threads gets that begin at the same time."""
    everybody = threading.Barrier(threads)

    def begin(number: int) -> T:
        everybody.wait(PATIENCE)
        return work(number)

    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(begin, range(threads)))


def clients(world: PlacedWorld, **options: Any) -> list[RagWikiRetriever]:
    """Two retrievers over the same data, each with a client, a chunk store and caches of its own."""
    return [world.retriever(**options), world.reopened().retriever(**options)]


def chunk_texts(retriever: RagWikiRetriever, doc_id: str = "pods") -> list[str]:
    """The texts of a saved document's chunks, as any process reads them."""
    return [chunk["text"] for chunk in retriever.chunk_store.load_chunks("ada", doc_id)]


def saved_events(retriever: RagWikiRetriever) -> list[str]:
    """What happened to the document, without what it takes to be surfaced."""
    return [event.what for event in retriever.history("pods") if event.what != "surfaced"]


def test_threads_of_two_clients_count_every_fetch_and_suggest_once(world: PlacedWorld) -> None:
    """Eight threads over two clients ask 25 times each: 200 fetches, one suggestion, one call of the callback."""
    told: list[SuggestionEvent] = []
    both = clients(world, on_suggestion=told.append)
    world.shows(document("pods", "Pods."), document("images", "Images."))

    def work(number: int) -> list[str]:
        blocks = [both[number % 2].invoke_with_provenance(POD_QUESTION).provenance for _ in range(EACH)]
        return [event.doc_id for block in blocks for event in block.suggestions]

    suggested = [doc_id for found in together(work) for doc_id in found]
    assert sorted(suggested) == sorted(event.doc_id for event in told) == ["images", "pods"]
    for doc_id in ("pods", "images"):
        record = world.record(doc_id)
        assert (record.fetch_count, record.user_state) == (THREADS * EACH, DocumentState.SUGGESTED)
        assert [event.what for event in both[1].history(doc_id)] == ["surfaced", "suggested"]


def test_threads_of_two_clients_count_every_hit(world: PlacedWorld) -> None:
    """Eight threads over two clients are answered by a copy 200 times: 200 fetches, and 200 hits of each chunk."""
    both = clients(world, text_splitter=Paragraphs())
    world.save(both[0], "pods", CONTENT)
    before = world.record("pods").fetch_count

    def work(number: int) -> int:
        return sum(len(cached(both[number % 2].invoke(POD_QUESTION))) for _ in range(EACH))

    assert together(work) == [EACH] * THREADS
    assert world.record("pods").fetch_count == before + THREADS * EACH
    hits = [chunk["hit_count"] for chunk in both[1].chunk_store.load_chunks("ada", "pods")]
    assert hits == [THREADS * EACH] * 3


async def test_awaited_calls_of_two_clients_count_every_fetch(world: PlacedWorld) -> None:
    """Forty calls of two clients that are awaited together are forty fetches and one suggestion."""
    both = clients(world)
    world.shows(document("pods", "Pods."))
    found = await asyncio.gather(
        *(both[number % 2].ainvoke_with_provenance(f"{POD_QUESTION} {number}") for number in range(40))
    )
    assert sum(len(block.suggestions) for _, block in found) == 1
    assert world.record("pods").fetch_count == 40


def test_who_counts_by_hand_counts_exactly(world: PlacedWorld) -> None:
    """`FetchCounter` over one store loses no fetch of eight threads, and suggests once."""
    counter = FetchCounter(world.store, clock=world.clock)

    def work(_number: int) -> list[SuggestionEvent | None]:
        return [counter.record_fetch("ada", "pods", "Pods", "") for _ in range(EACH)]

    events = [event for found in together(work) for event in found if event is not None]
    assert (len(events), world.record("pods").fetch_count) == (1, THREADS * EACH)


def test_a_suggestion_that_is_declined_by_many_is_declined_once(world: PlacedWorld) -> None:
    """Eight threads that decline one suggestion at the same time are one decline; the next one waits accordingly."""
    both = clients(world)
    world.shows(document("pods", "Pods."))
    for _ in range(3):
        both[0].invoke(POD_QUESTION)
    together(lambda number: both[number % 2].decline_suggestion("pods"))
    record = world.record("pods")
    assert (record.decline_count, record.next_suggest_at) == (1, 3 + 6)
    assert saved_events(both[0]) == ["suggested", "declined"]


def test_a_suggestion_that_saves_by_itself_saves_once(world: PlacedWorld) -> None:
    """With `auto_save`, threads of two clients that fetch together save the document once, whole."""
    both = clients(world, auto_save=True)
    world.shows(document("pods", "Pods."))
    together(lambda number: [both[number % 2].invoke(POD_QUESTION) for _ in range(5)])
    assert saved_events(both[0]) == ["suggested", "saved"]
    assert (world.state("pods"), chunk_texts(both[1])) == (DocumentState.CLAIMED, ["Pods."])


class MeetingEmbeddings(TableEmbeddings):
    """Embeds documents only when so many are being embedded."""

    def __init__(self, parties: int) -> None:
        super().__init__(topics().table)
        self.barrier = threading.Barrier(parties)

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        self.barrier.wait(PATIENCE)
        return super().embed_documents(texts)


def test_who_accept_together_save_one_set_of_chunks(world: PlacedWorld) -> None:
    """Four threads of two clients that accept at the same time leave one copy with each chunk once."""
    model = MeetingEmbeddings(4)
    world.embeddings = model
    both = clients(world, text_splitter=Paragraphs())
    world.shows(document("pods", "Pods."))
    both[0].invoke(POD_QUESTION)
    world.shows()
    records = together(lambda number: both[number % 2].accept_suggestion("pods", full_content=CONTENT), threads=4)
    assert {record.user_state for record in records} == {DocumentState.CLAIMED}
    for retriever in (*both, world.reopened().retriever()):
        assert (chunk_texts(retriever), len(retriever.documents())) == (CONTENT.split("\n\n"), 1)
        assert texts(retriever.invoke(POD_QUESTION)) == [CONTENT]
    assert (world.record("pods").chunk_count, both[0].stats().chunks) == (3, 3)
    assert len(both[0].chunk_store.place.copies("ada", "pods")) == 1
    if world.folder is not None:
        assert len(list(world.folder.rglob("*.chunks"))) == len(list(world.folder.rglob("*.md"))) == 1


def test_what_is_done_while_others_ask_stands(world: PlacedWorld) -> None:
    """While threads count fetches of a document, votes, a pin and a new text of it are neither lost nor undone."""
    asking, acting = clients(world)
    world.save(asking, "pods", "Pods, old.")

    def work(number: int) -> None:
        if number:
            for _ in range(EACH):
                asking.invoke(POD_QUESTION)
            return
        for _ in range(3):
            acting.thumbs_down("pods")
            acting.thumbs_up("pods")
        acting.force_pin("pods")
        acting.set_always_full_doc("pods")
        acting.refresh("pods", full_content="Pods, new.")

    before = world.record("pods").fetch_count
    together(work, threads=5)
    record = world.record("pods")
    assert (record.explicit_signal, record.pinned_by_user, record.always_full_doc) == (1.0, True, True)
    assert (record.full_content, chunk_texts(acting)) == ("Pods, new.", ["Pods, new."])
    # While the copy was replaced, a search could find that the one it knew is gone: it counts for nothing then.
    assert before < record.fetch_count <= before + 4 * EACH
    assert texts(asking.invoke(POD_QUESTION)) == ["Pods, new."]


def test_what_is_done_during_a_slow_decay_run_stands(world: PlacedWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """A decay run that read its records long ago undoes no vote, pin, save, removal or fetch that came since."""
    deciding, acting = clients(world)
    names = ("voted", "removed", "refreshed", "pinned", "asked")
    for name in names:
        world.save(deciding, name, f"Pods, {name}.")
    world.clock.turn(days=365)
    read, go_on = threading.Event(), threading.Event()
    hit_rates = deciding.chunk_store.hit_rates

    def slow(user_id: str, wanted: Mapping[str, tuple[str, int]]) -> dict[str, float]:
        read.set()
        assert go_on.wait(PATIENCE)
        return hit_rates(user_id, wanted)

    monkeypatch.setattr(deciding.chunk_store, "hit_rates", slow)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(deciding.run_decay)
        assert read.wait(PATIENCE)
        monkeypatch.setattr(deciding.chunk_store, "hit_rates", hit_rates)
        acting.thumbs_up("voted")
        acting.force_remove("removed")
        acting.refresh("refreshed", full_content="Pods, anew.")
        acting.force_pin("pinned")
        acting.invoke(POD_QUESTION)
        before = {name: world.record(name) for name in names}
        go_on.set()
        results = {result.doc_id: result for result in running.result(PATIENCE)}
    after = {name: world.record(name) for name in names}
    assert (after["voted"].explicit_signal, after["pinned"].pinned_by_user) == (1.0, True)
    assert (after["removed"].user_state, chunk_texts(acting, "removed")) == (DocumentState.DEMOTED, [])
    assert (after["refreshed"].full_content, chunk_texts(acting, "refreshed")) == ("Pods, anew.", ["Pods, anew."])
    facts = ("user_state", "fetch_count", "last_fetched_at", "explicit_signal", "copy_id", "pinned_by_user")
    assert all(getattr(after[name], fact) == getattr(before[name], fact) for name in names for fact in facts)
    assert "removed" not in results
    # What was asked meanwhile was fetched now, so the run scores it as such, and not as of a year ago.
    assert results["asked"].new_score > 0.4
    world.clock.turn(days=1)
    deciding.run_decay()
    assert world.record("voted").explicit_signal == 1.0


def test_hits_in_files_are_exact_over_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hit that one process records while another one sums up the file of hits is counted too."""
    one, other = ChunkStore(tmp_path), ChunkStore(tmp_path)
    one.save_chunks("ada", "pods", [{"chunk_index": index, "text": "Pods.", "vector": [1.0]} for index in range(3)])
    write_aside, summed = chunk_places.write_aside, list[Path]()

    def meanwhile(path: Path, content: bytes) -> None:
        summed.append(path)
        if len(summed) == 1:
            other.record_hits("ada", "pods", [1])
        write_aside(path, content)

    monkeypatch.setattr(chunk_places, "write_aside", meanwhile)
    recorded = 0
    while not summed:
        one.record_hits("ada", "pods", [0])
        recorded += 1
    hits = {chunk["chunk_index"]: chunk["hit_count"] for chunk in other.load_chunks("ada", "pods")}
    assert hits == {0: recorded, 1: 1, 2: 0}


def test_a_listing_while_others_save_is_whole(world: PlacedWorld) -> None:
    """Listing and counting while threads meet and save documents neither fails nor shows half of anything."""
    both = clients(world)

    def work(number: int) -> Sequence[int]:
        if number == 0:
            return [both[1].stats().chunks for _ in range(12)]
        for doc_id in (f"pods-{number}-{turn}" for turn in range(4)):
            met = UserDocRecord("ada", doc_id, doc_id.title(), "", fetch_count=1, last_fetched_at=world.clock())
            both[number % 2].state_store.upsert(met)
            both[number % 2].accept_suggestion(doc_id, full_content=f"Pods of {doc_id}.")
        return []

    seen = together(work, threads=4)[0]
    assert list(seen) == sorted(seen)
    assert {record.user_state for record in both[0].documents()} == {DocumentState.CLAIMED}
    assert (len(both[0].documents()), both[1].stats().chunks) == (12, 12)
    assert len(cached(both[0].invoke(POD_QUESTION))) == 12
