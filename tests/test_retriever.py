"""The retriever from the first fetch to forgetting, over every store."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from helpers import START, HandClock, ListRetriever, TableEmbeddings, document
from langchain_core.callbacks import CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import ConfigurableField, RunnableConfig, RunnableLambda
from langchain_core.vectorstores import InMemoryVectorStore
from scenarios import (
    OTHER_QUESTION,
    POD_QUESTION,
    PODS,
    USER,
    Paragraphs,
    World,
    cached,
    chained,
    direction,
    doc_ids,
    story,
    texts,
    topics,
)

from rag_wiki import (
    ConfigurationError,
    DecayConfig,
    DocumentState,
    InvalidTransitionError,
    MemoryStateStore,
    ProvenanceBlock,
    RagWikiRetriever,
    RagWikiRetrieverConfig,
    StateStore,
    SuggestionEvent,
    UnexpectedArgumentError,
    UnknownDocumentError,
)
from rag_wiki.pieces import read_global

CLAIMED, PINNED, DEMOTED = DocumentState.CLAIMED, DocumentState.PINNED, DocumentState.DEMOTED
IMAGES = "Images are built in layers."
PERSISTENT = ("sqlite-file", "postgres", "valkey", "valkey-decoding", "fakeredis")


@pytest.fixture
def world(state_store: StateStore) -> World:
    """A world over each kind of store."""
    return World(state_store)


def provenance(retriever: RagWikiRetriever) -> ProvenanceBlock:
    """The provenance of the last call."""
    block = retriever.last_provenance
    assert block is not None
    json.dumps(block.to_dict(), allow_nan=False)
    return block


def suggested(retriever: RagWikiRetriever) -> list[str]:
    """What the last call suggested."""
    return [event.doc_id for event in provenance(retriever).suggestions]


def by_cosine(**cosines: float) -> TableEmbeddings:
    """Texts by their cosine to a question that has the word "question" in it."""
    return TableEmbeddings({"question": [1.0, 0.0], **{word: direction(cosine) for word, cosine in cosines.items()}})


# -- counting


def test_the_third_fetch_suggests_saving_and_no_later_one(world: World) -> None:
    """Count, state and suggestion after each of four queries that return the document."""
    world.shows(document("pods", PODS, doc_path="pods.md"))
    retriever = world.retriever()
    seen = []
    for _ in range(4):
        retriever.invoke(POD_QUESTION)
        record = world.record("pods")
        seen.append((record.fetch_count, record.user_state.value, suggested(retriever)))
    assert seen == [(1, "SURFACED", []), (2, "SURFACED", []), (3, "SUGGESTED", ["pods"]), (4, "SUGGESTED", [])]
    assert (world.record("pods").doc_title, world.record("pods").doc_path) == ("Pods", "pods.md")


def test_several_chunks_of_a_document_are_one_fetch(world: World) -> None:
    """Three chunks of one document in a call count once, and are all in the result."""
    chunks = [document("pods", f"part {number}", chunk_index=number) for number in range(3)]
    world.shows(*chunks)
    retriever = world.retriever()
    assert texts(retriever.invoke(POD_QUESTION)) == ["part 0", "part 1", "part 2"]
    assert world.record("pods").fetch_count == 1
    (source,) = provenance(retriever).sources
    assert (source.fetch_count, list(source.chunks_used)) == (1, [0, 1, 2])
    retriever.invoke(POD_QUESTION)
    assert suggested(retriever) == []
    retriever.invoke(POD_QUESTION)
    assert suggested(retriever) == ["pods"]


def test_the_suggestion_callback_is_called_once(world: World) -> None:
    """`on_suggestion` gets the event of the third fetch, and no other."""
    events: list[SuggestionEvent] = []
    world.shows(document("pods", PODS, doc_path="pods.md"))
    retriever = world.retriever(on_suggestion=events.append)
    for _ in range(6):
        retriever.invoke(POD_QUESTION)
    assert events == [SuggestionEvent(USER, "pods", "Pods", "pods.md", 3)]


def test_a_failing_callback_costs_no_answer() -> None:
    """When `on_suggestion` raises, the documents come, provenance says so, and the count stands."""
    world = World()
    world.shows(document("pods", PODS))

    def fail(_: SuggestionEvent) -> None:
        raise RuntimeError

    retriever = world.retriever(on_suggestion=fail, fetch_threshold=1)
    assert doc_ids(retriever.invoke(POD_QUESTION)) == ["pods"]
    assert "on_suggestion failed" in " ".join(provenance(retriever).degraded)
    assert world.state("pods") is DocumentState.SUGGESTED


def test_a_decline_waits_and_comes_back(world: World) -> None:
    """Declined at three fetches, the next suggestions come at nine and, declined again, at twenty-one."""
    world.shows(document("pods", PODS))
    retriever = world.retriever()
    at = []
    for number in range(1, 24):
        retriever.invoke(POD_QUESTION)
        if suggested(retriever):
            at.append(number)
            retriever.decline_suggestion("pods")
    assert at == [3, 9, 21]


def test_absence_resets_and_accepting_still_works(world: World) -> None:
    """Three queries without the document let its suggestion lapse; the button pressed late still saves it."""
    world.shows(document("pods", PODS))
    retriever = world.retriever()
    for _ in range(3):
        retriever.invoke(POD_QUESTION)
    world.shows(document("images", IMAGES))
    for _ in range(2):
        retriever.invoke(OTHER_QUESTION)
    assert (world.state("pods"), world.record("pods").queries_missed) == (DocumentState.SUGGESTED, 2)
    retriever.invoke(OTHER_QUESTION)
    assert (world.state("pods"), world.record("pods").fetch_count) == (DocumentState.SURFACED, 0)
    assert retriever.accept_suggestion("pods").user_state is CLAIMED
    assert world.record("pods").full_content == PODS


def test_documents_with_one_name_in_two_folders_are_two(world: World) -> None:
    """Without `doc_id` the source path tells documents apart, whatever their titles."""
    for folder in ("a", "b", "a", "b"):
        world.shows(Document(f"the text of {folder}", metadata={"source": f"{folder}/readme.md", "title": "Readme"}))
        world.retriever().invoke(POD_QUESTION)
    assert [(record.doc_id, record.fetch_count) for record in world.retriever().documents()] == [
        ("a/readme.md", 2),
        ("b/readme.md", 2),
    ]
    world.retriever().accept_suggestion("a/readme.md")
    assert world.state("b/readme.md") is DocumentState.SURFACED


# -- what is saved


def test_content_given_is_saved(world: World) -> None:
    """`accept_suggestion(doc_id, full_content=...)` saves that content and says so."""
    retriever = world.retriever()
    record = world.save(retriever, "pods", PODS)
    assert (record.user_state, record.full_content, record.content_source) == (CLAIMED, PODS, "argument")
    assert world.record("pods") == record
    assert record.cached_at == world.clock.now
    assert [chunk["text"] for chunk in retriever.chunk_store.load_chunks(USER, "pods")] == [PODS]


@pytest.mark.parametrize(
    "loaded", ["Pods, from the loader.", Document("Pods, from the loader.")], ids=["text", "document"]
)
def test_the_loader_is_asked_next(loaded: str | Document) -> None:
    """Without content, `document_loader` gets the record and gives the text, or a document with it."""
    world = World()
    world.shows(document("pods", PODS))
    asked: list[str] = []

    def load(record: Any) -> str | Document:
        asked.append(record.doc_id)
        return loaded

    retriever = world.retriever(document_loader=load)
    retriever.invoke(POD_QUESTION)
    record = retriever.accept_suggestion("pods")
    assert (asked, record.full_content, record.content_source) == (["pods"], "Pods, from the loader.", "loader")


def test_a_loader_that_has_nothing_is_passed_over() -> None:
    """A loader that gives `None` leaves it to the retrieved chunks."""
    world = World()
    world.shows(document("pods", PODS))
    retriever = world.retriever(document_loader=lambda _: None)
    retriever.invoke(POD_QUESTION)
    assert retriever.accept_suggestion("pods").content_source == "retrieved"


@pytest.mark.parametrize("form", ["relative", "absolute"])
def test_a_file_inside_the_roots_is_read(tmp_path: Path, form: str) -> None:
    """The file at `doc_path` below one of `document_roots` is the content."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "pods.md").write_text("Pods, from the file.", encoding="utf-8")
    world = World()
    path = "pods.md" if form == "relative" else str(tmp_path / "docs" / "pods.md")
    world.shows(document("pods", PODS, doc_path=path))
    retriever = world.retriever(document_roots=[tmp_path / "nowhere", tmp_path / "docs"])
    retriever.invoke(POD_QUESTION)
    record = retriever.accept_suggestion("pods")
    assert (record.full_content, record.content_source) == ("Pods, from the file.", "file")


@pytest.mark.parametrize("form", ["dots", "absolute", "link", "linked folder", "no roots", "NUL", "folder"])
def test_a_file_outside_the_roots_is_not_read(tmp_path: Path, form: str) -> None:
    """Dots, an absolute path, a link out of the root, no roots at all: the retrieved text is saved instead."""
    root = tmp_path / "docs"
    root.mkdir()
    secret = tmp_path / "secret.md"
    secret.write_text("the secret", encoding="utf-8")
    (root / "link.md").symlink_to(secret)
    (root / "linked").symlink_to(tmp_path)
    (root / "own.md").write_text("the secret", encoding="utf-8")
    path = {
        "dots": "../secret.md",
        "absolute": str(secret),
        "link": "link.md",
        "linked folder": "linked/secret.md",
        "no roots": str(root / "own.md"),
        "NUL": "own.md\0",
        "folder": ".",
    }[form]
    world = World()
    world.shows(document("pods", PODS, doc_path=path))
    retriever = world.retriever(document_roots=[] if form == "no roots" else [root])
    retriever.invoke(POD_QUESTION)
    record = retriever.accept_suggestion("pods")
    assert (record.full_content, record.content_source) == (PODS, "retrieved")


def test_retrieved_chunks_are_joined_without_their_overlap(world: World) -> None:
    """Chunks of several queries, kept in the store, make the document: in order, what they share written once."""
    whole = "Pods are the smallest unit. " + "They share a network and storage. " + "Each has an address of its own."
    first, second = whole[:62], whole[30:]
    world.shows(document("pods", second, chunk_index=1, total_chunks=2))
    world.retriever().invoke(POD_QUESTION)
    world.shows(document("pods", first, chunk_index=0, total_chunks=2))
    world.retriever().invoke(POD_QUESTION)
    record = world.retriever().accept_suggestion("pods")
    assert (record.full_content, record.content_source, record.chunk_count) == (whole, "retrieved", 2)


# -- answering from saved copies


def test_the_same_query_is_answered_from_the_copy(world: World) -> None:
    """After saving, the document comes from the copy, with the promised metadata and the source's own."""
    retriever = world.retriever()
    world.save(retriever, "pods", PODS, doc_path="pods.md", author="kim", chunk_index=7)
    (found,) = retriever.invoke(POD_QUESTION)
    assert found.page_content == PODS
    promised = {
        "doc_id": "pods",
        "doc_title": "Pods",
        "doc_path": "pods.md",
        "from_cache": True,
        "user_state": "CLAIMED",
        "chunks_used": [0],
        "scores": [1.0],
        "full_doc_injected": False,
        "author": "kim",
    }
    assert {name: found.metadata.get(name) for name in promised} == promised
    block = provenance(retriever)
    (source,) = block.sources
    assert (block.mode, block.user_id, block.threshold) == ("semantic", USER, 0.75)
    assert (source.from_cache, source.user_state, source.fetch_count) == (True, CLAIMED, 2)
    assert (list(source.chunks_used), source.total_chunks, list(source.scores)) == ([0], 1, [1.0])
    assert source.content_source == "argument"
    assert {"begin", "embed", "search", "global", "apply", "total"} <= set(block.timings)


def test_a_hit_counts_once_and_records_the_chunk(world: World) -> None:
    """Answering counts one fetch at its time, and one hit of each chunk used."""
    retriever = world.retriever(text_splitter=Paragraphs())
    world.save(retriever, "pods", f"{PODS}\n\nImages are something else.")
    later = world.clock.turn(days=1)
    retriever.invoke(POD_QUESTION)
    record = world.record("pods")
    assert (record.fetch_count, record.last_fetched_at, record.cache_miss_streak) == (2, later, 0)
    chunks = retriever.chunk_store.load_chunks(USER, "pods")
    assert [(chunk["hit_count"], chunk["last_hit_at"]) for chunk in chunks] == [(1, later), (0, None)]


def test_looking_counts_nothing(world: World) -> None:
    """Reading provenance, lists, history and figures changes no record."""
    retriever = world.retriever()
    world.save(retriever, "pods", PODS)
    retriever.invoke(POD_QUESTION)
    before = world.record("pods")
    provenance(retriever)
    retriever.documents()
    retriever.history("pods")
    retriever.stats()
    assert world.record("pods") == before


def test_the_query_is_embedded_once_however_much_is_saved(world: World) -> None:
    """With 200 saved documents a call embeds one query and no document; with none it embeds nothing."""
    retriever = world.retriever()
    world.shows(*(document(f"doc-{number:03}", f"text {number}") for number in range(200)))
    retriever.invoke(POD_QUESTION)
    assert world.table.queries == []
    for number in range(200):
        retriever.accept_suggestion(f"doc-{number:03}")
    world.shows()
    world.table.batches.clear()
    retriever.invoke(POD_QUESTION)
    retriever.invoke(OTHER_QUESTION)
    assert (world.table.queries, world.table.batches) == ([POD_QUESTION, OTHER_QUESTION], [])


def test_the_threshold_decides_and_an_equal_cosine_is_in(state_store: StateStore) -> None:
    """At 0.75, chunks at 0.76 and 0.75 answer, and one at 0.74 does not."""
    world = World(state_store, by_cosine(above=0.76, equal=0.75, below=0.74))
    retriever = world.retriever()
    for word in ("above", "equal", "below"):
        world.save(retriever, word, word)
    found = retriever.invoke("the question")
    assert doc_ids(found) == ["above", "equal"]
    assert [item.metadata["scores"][0] for item in found] == [pytest.approx(0.76), pytest.approx(0.75)]


def test_a_threshold_of_one_means_the_same_direction() -> None:
    """At 1.0 only the same direction answers."""
    world = World(embeddings=by_cosine(same=1.0, near=0.9999))
    retriever = world.retriever(similarity_threshold=1.0)
    world.save(retriever, "same", "same")
    world.save(retriever, "near", "near")
    assert doc_ids(retriever.invoke("the question")) == ["same"]


def test_a_query_without_a_direction_matches_nothing() -> None:
    """A query vector of zeros has no hit, and the global results come without a complaint."""
    world = World(embeddings=TableEmbeddings({"pods": [0.0], "Pods": [1.0]}))
    retriever = world.retriever()
    world.save(retriever, "pods", PODS)
    world.shows(document("images", IMAGES))
    assert doc_ids(retriever.invoke(POD_QUESTION)) == ["images"]


def test_the_length_of_vectors_does_not_matter() -> None:
    """Vectors of length a million and a millionth score by their direction."""
    table = TableEmbeddings({"question": [1e6, 0.0], "long": [1e6, 1e5], "short": [1e-6, 1e-7]})
    world = World(embeddings=table)
    retriever = world.retriever()
    world.save(retriever, "long", "long")
    world.save(retriever, "short", "short")
    scores = [item.metadata["scores"][0] for item in retriever.invoke("the question")]
    assert scores == [pytest.approx(0.995037, abs=1e-5)] * 2


def test_the_best_chunks_are_joined_in_document_order(world: World) -> None:
    """Of four chunks the best two, by cosine, come in the order of the document, with number and score of each."""
    world.embeddings = by_cosine(alpha=0.8, beta=0.95, gamma=0.9, delta=0.99)
    retriever = world.retriever(local_top_k=2, text_splitter=Paragraphs())
    world.save(retriever, "greek", "alpha\n\nbeta\n\ngamma\n\ndelta")
    (found,) = retriever.invoke("the question")
    assert found.page_content == "beta\n\ndelta"
    assert found.metadata["chunks_used"] == [1, 3]
    assert found.metadata["scores"] == [pytest.approx(0.95), pytest.approx(0.99)]
    assert found.metadata["total_chunks"] == 4


def test_the_best_document_comes_first(world: World) -> None:
    """Documents from copies are in the order of their best cosine."""
    world.embeddings = by_cosine(fair=0.8, good=0.9, best=0.99)
    retriever = world.retriever()
    for word in ("fair", "best", "good"):
        world.save(retriever, word, word)
    assert doc_ids(retriever.invoke("the question")) == ["best", "good", "fair"]


def test_a_pinned_document_is_always_in_the_answer(world: World) -> None:
    """Below the threshold a pinned document gives its single best chunk, which is no fetch and no hit."""
    world.embeddings = by_cosine(alpha=0.1, beta=0.3, gamma=0.2)
    retriever = world.retriever(text_splitter=Paragraphs())
    world.save(retriever, "greek", "alpha\n\nbeta\n\ngamma")
    retriever.force_pin("greek")
    before = world.record("greek")
    (found,) = retriever.invoke("the question")
    assert (found.page_content, found.metadata["chunks_used"], found.metadata["user_state"]) == ("beta", [1], "PINNED")
    assert found.metadata["scores"] == [pytest.approx(0.3)]
    after = world.record("greek")
    assert (after.fetch_count, after.last_fetched_at) == (before.fetch_count, before.last_fetched_at)
    assert all(chunk["hit_count"] == 0 for chunk in retriever.chunk_store.load_chunks(USER, "greek"))
    assert [source.user_state for source in provenance(retriever).sources] == [PINNED]


def test_a_pinned_document_above_the_threshold_counts(world: World) -> None:
    """A pinned document that matches gives its matching chunks, and the answer is a fetch."""
    world.embeddings = by_cosine(alpha=0.1, beta=0.9, gamma=0.8)
    retriever = world.retriever(text_splitter=Paragraphs())
    world.save(retriever, "greek", "alpha\n\nbeta\n\ngamma")
    retriever.force_pin("greek")
    (found,) = retriever.invoke("the question")
    assert found.page_content == "beta\n\ngamma"
    assert world.record("greek").fetch_count == 2


def mixed(world: World) -> RagWikiRetriever:
    """One pinned and two claimed documents, and three in the source."""
    world.embeddings = by_cosine(pin=0.2, first=0.95, second=0.9)
    retriever = world.retriever()
    for word in ("first", "second", "pin"):
        world.save(retriever, word, word)
    retriever.force_pin("pin")
    world.shows(*(document(f"g{number}", f"global {number}") for number in (1, 2, 3)))
    return retriever


def test_pinned_come_first_then_copies_and_global_in_turn(world: World) -> None:
    """Without `k` everything comes: the pinned one, then saved and global ones by rank in turn."""
    assert doc_ids(mixed(world).invoke("the question")) == ["pin", "first", "g1", "second", "g2", "g3"]


@pytest.mark.parametrize("k", [1, 2, 3, 4, 6, 50])
def test_k_caps_the_whole_result(k: int) -> None:
    """`k`, of a call or of the retriever, keeps so many of the mixed result; the call's word wins."""
    world = World()
    retriever = mixed(world)
    expected = ["pin", "first", "g1", "second", "g2", "g3"][:k]
    assert doc_ids(retriever.invoke("the question", k=k)) == expected
    assert [source.doc_id for source in provenance(retriever).sources] == expected
    assert doc_ids(world.retriever(k=k).invoke("the question")) == expected
    assert doc_ids(world.retriever(k=1).invoke("the question", k=k)) == expected


def test_more_pins_than_k_stay_within_k() -> None:
    """Fifty pinned documents and `k=5` give five."""
    world = World()
    retriever = world.retriever(k=5)
    world.shows(*(document(f"doc-{number}", f"Pods {number}") for number in range(50)))
    retriever.invoke(POD_QUESTION)
    for number in range(50):
        retriever.force_pin(f"doc-{number}")
    assert len(retriever.invoke(POD_QUESTION)) == 5


def test_a_copy_cut_off_by_k_is_no_fetch(world: World) -> None:
    """A saved document that matched and found no room keeps its count, and has not missed either."""
    retriever = mixed(world)
    before = world.record("second")
    retriever.invoke("the question", k=2)
    after = world.record("second")
    assert (after.fetch_count, after.cache_miss_streak) == (before.fetch_count, 0)


# -- global results


def test_global_results_are_copies(world: World) -> None:
    """What the source returned is not changed, nested values included, whatever is done to the result."""
    original = document("pods", PODS, tags=["a", {"b": 1}])
    before = deepcopy(original)
    world.shows(original)
    (found,) = world.retriever().invoke(POD_QUESTION)
    assert original == before
    found.metadata["tags"][1]["b"] = 2
    found.metadata["doc_id"] = "changed"
    assert original == before


def test_global_results_keep_their_metadata_and_get_what_is_missing(world: World) -> None:
    """The caller's metadata, id and order stay; missing ids are filled in; `from_cache` is `False`."""
    world.shows(
        Document("one", id="chunk-1", metadata={"source": "docs/pods.md", "page": 3}),
        Document("two", metadata={"doc_id": "images", "doc_title": "Images", "doc_path": "i.md", "source": "x"}),
    )
    first, second = world.retriever().invoke(OTHER_QUESTION)
    assert (first.page_content, first.id) == ("one", "chunk-1")
    assert first.metadata == {
        "source": "docs/pods.md",
        "page": 3,
        "doc_id": "docs/pods.md",
        "doc_title": "pods.md",
        "doc_path": "docs/pods.md",
        "from_cache": False,
    }
    assert second.metadata == {
        "doc_id": "images",
        "doc_title": "Images",
        "doc_path": "i.md",
        "source": "x",
        "from_cache": False,
    }


def test_an_id_that_is_none_is_missing(world: World) -> None:
    """A `None` in `doc_id`, `doc_title` or `doc_path` is filled in like a missing one."""
    world.shows(Document("one", metadata={"doc_id": None, "doc_title": None, "doc_path": None, "source": "a/pods.md"}))
    (found,) = world.retriever().invoke(POD_QUESTION)
    filled = {name: found.metadata[name] for name in ("doc_id", "doc_title", "doc_path")}
    assert filled == {"doc_id": "a/pods.md", "doc_title": "pods.md", "doc_path": "a/pods.md"}
    assert world.record("a/pods.md").fetch_count == 1


def test_the_id_of_a_document_in_an_answer_is_what_actions_take(world: World) -> None:
    """Ids that are numbers, UUIDs or under another key, of pieces and of saved copies; `None` where there is none."""
    number = UUID("00000000-0000-0000-0000-000000000003")
    world.shows(
        Document(PODS, metadata={"sku": 3.0, "doc_id": "other"}),
        Document("two", metadata={"sku": number}),
        Document("three", metadata={"doc_id": "other"}),
    )
    retriever = world.retriever(document_id="sku")
    found = retriever.invoke(OTHER_QUESTION)
    assert [retriever.doc_id_of(item) for item in found] == ["3", str(number), None]

    retriever.accept_suggestion("3")
    (saved, *_) = retriever.invoke(POD_QUESTION)
    assert (saved.metadata["from_cache"], retriever.doc_id_of(saved)) == (True, "3")
    assert retriever.doc_id_of(Document("never shown", metadata={"sku": " "})) is None
    assert retriever.doc_id_of(Document("a copy", metadata={"from_cache": True, "doc_id": "3"})) == "3"


def test_pieces_are_told_apart_by_text_number_and_version() -> None:
    """However often they were seen: the same piece has one digest, in whatever way its text is laid out."""
    config = RagWikiRetrieverConfig(version_key="version")
    pieces = [("a text", 0, 1), ("a text", 0, 2), ("a text", 1, 1), ("another", 0, 1)]

    def digests(layout: str) -> list[str]:
        return [
            read_global(
                Document(
                    text.replace(" ", layout), metadata={"doc_id": "d", "chunk_index": number, "version": version}
                ),
                config,
            ).digest
            for text, number, version in pieces
        ]

    assert len(set(digests(" "))) == len(pieces)
    assert digests(" ") == digests(" ") == digests(" \n ")


def test_a_document_that_nothing_identifies_passes_through(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """Without any id documents come as they are, untracked, and one warning names the missing fields."""
    world.shows(Document("one", id="chunk-1", metadata={"page": 1}), Document("two", metadata={"_id": "x"}))
    retriever = world.retriever()
    with caplog.at_level(logging.WARNING, logger="rag_wiki"):
        for _ in range(4):
            assert retriever.invoke(POD_QUESTION) == world.source.documents
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 1
    assert "doc_id" in warnings[0]
    assert "source" in warnings[0]
    assert retriever.documents() == []
    assert [source.doc_id for source in provenance(retriever).sources] == [None, None]
    assert "not tracked" in provenance(retriever).render()


def test_the_id_may_be_another_key() -> None:
    """`document_id="sku"` counts by that key, and fills `doc_id` in."""
    world = World()
    world.shows(Document("one", metadata={"sku": "A-1", "source": "shelf"}))
    retriever = world.retriever(document_id="sku")
    (found,) = retriever.invoke(POD_QUESTION)
    assert found.metadata["doc_id"] == "A-1"
    assert [record.doc_id for record in retriever.documents()] == ["A-1"]


def test_the_id_may_be_a_function() -> None:
    """`document_id` may be a function of the document; where it gives `None` the document is untracked."""
    world = World()
    world.shows(Document("one", metadata={"url": "http://host/p?x=1"}), Document("two", metadata={}))
    retriever = world.retriever(document_id=_page)
    retriever.invoke(POD_QUESTION)
    assert [record.doc_id for record in retriever.documents()] == ["http://host/p"]


def _page(found: Document) -> str | None:
    url = found.metadata.get("url")
    return None if url is None else str(url).partition("?")[0]


def test_chunks_of_a_served_document_give_way_to_its_copy(world: World) -> None:
    """When the copy answers, the source's chunks of the same document are left out, and both origins are told."""
    retriever = world.retriever()
    world.save(retriever, "pods", PODS)
    world.shows(document("pods", PODS), document("images", IMAGES))
    found = retriever.invoke(POD_QUESTION)
    assert [(item.metadata["doc_id"], item.metadata["from_cache"]) for item in found] == [
        ("pods", True),
        ("images", False),
    ]
    assert [source.origins for source in provenance(retriever).sources] == [("cache", "global"), ("global",)]
    assert world.record("pods").fetch_count == 2


def test_a_saved_document_that_does_not_match_still_comes_from_global(world: World) -> None:
    """A saved document below the threshold that the source shows is served from the source: a fetch, and no miss."""
    retriever = world.retriever()
    world.save(retriever, "pods", PODS)
    world.shows(document("pods", PODS))
    (found,) = retriever.invoke(OTHER_QUESTION)
    assert found.metadata["from_cache"] is False
    record = world.record("pods")
    assert (record.user_state, record.fetch_count, record.cache_miss_streak) == (CLAIMED, 2, 0)


def test_on_miss_the_source_is_asked_only_when_no_copy_answered(world: World) -> None:
    """With `global_search="on_miss"` a hit spares the wrapped retriever, a miss does not."""
    retriever = world.retriever(global_search="on_miss")
    world.save(retriever, "pods", PODS)
    world.shows(document("images", IMAGES))
    world.source.calls.clear()
    assert doc_ids(retriever.invoke(POD_QUESTION)) == ["pods"]
    assert world.source.calls == []
    assert doc_ids(retriever.invoke(OTHER_QUESTION)) == ["images"]
    assert world.source.calls == [OTHER_QUESTION]


def test_on_miss_a_pin_beside_the_matter_is_no_answer(world: World) -> None:
    """With `on_miss`, a pinned document that is included though it does not match does not spare the source."""
    retriever = world.retriever(global_search="on_miss")
    world.save(retriever, "pods", PODS)
    retriever.force_pin("pods")
    world.shows(document("images", IMAGES))
    assert doc_ids(retriever.invoke("what are images?")) == ["pods", "images"]


def test_a_source_that_was_not_asked_missed_nothing(world: World) -> None:
    """With `on_miss`, queries that a copy answered are no absence of the documents that only the source knows."""
    retriever = world.retriever(global_search="on_miss")
    world.save(retriever, "pods", PODS)
    world.shows(document("images", IMAGES))
    retriever.invoke(OTHER_QUESTION)
    retriever.invoke(OTHER_QUESTION)
    for _ in range(5):
        retriever.invoke(POD_QUESTION)
    assert world.record("images").fetch_count == 2
    retriever.invoke(OTHER_QUESTION)
    assert suggested(retriever) == ["images"]


def test_auto_save_saves_what_would_be_suggested(world: World) -> None:
    """With `auto_save`, the third fetch saves the retrieved text, and the fourth is answered from it."""
    world.shows(document("pods", PODS))
    retriever = world.retriever(auto_save=True)
    for _ in range(3):
        assert cached(retriever.invoke(POD_QUESTION)) == []
    assert (world.state("pods"), world.record("pods").full_content) == (CLAIMED, PODS)
    assert texts(cached(retriever.invoke(POD_QUESTION))) == [PODS]


def test_an_auto_save_that_fails_costs_no_answer(world: World) -> None:
    """When the embedding model fails, the documents come, provenance says so, and the suggestion is still out."""
    world.shows(document("pods", PODS))
    world.table.error = ConnectionError("down")
    retriever = world.retriever(auto_save=True, fetch_threshold=1)
    assert doc_ids(retriever.invoke(POD_QUESTION)) == ["pods"]
    assert any("could not be saved" in sentence for sentence in provenance(retriever).degraded)
    assert world.state("pods") is DocumentState.SUGGESTED


def test_the_whole_document_may_be_the_answer(world: World) -> None:
    """With `set_always_full_doc` the copy answers in full, and says so; switched off, in chunks again."""
    whole = f"{PODS}\n\nImages are something else."
    retriever = world.retriever(text_splitter=Paragraphs())
    world.save(retriever, "pods", whole)
    retriever.set_always_full_doc("pods")
    (found,) = retriever.invoke(POD_QUESTION)
    assert (found.page_content, found.metadata["full_doc_injected"]) == (whole, True)
    assert [source.extent for source in provenance(retriever).sources] == ["Full document"]
    retriever.set_always_full_doc("pods", False)
    (found,) = retriever.invoke(POD_QUESTION)
    assert (found.page_content, found.metadata["full_doc_injected"]) == (PODS, False)


def test_without_a_model_words_are_matched(world: World) -> None:
    """A retriever that has no embedding model answers from the same copies by their words."""
    world.save(world.retriever(), "pods", PODS)
    world.save(world.retriever(), "images", IMAGES)
    world.embeddings = None
    retriever = world.retriever()
    found = retriever.invoke("the smallest unit deployed?")
    assert [(item.metadata["doc_id"], item.metadata["from_cache"]) for item in found] == [("pods", True)]
    assert (provenance(retriever).mode, provenance(retriever).threshold) == ("keyword", None)
    assert retriever.invoke("nothing of the kind") == []


def test_without_a_model_a_pinned_document_is_always_in_the_answer(world: World) -> None:
    """Matching by words, a pinned document is in every answer too, and its presence is no fetch."""
    retriever = world.retriever()
    world.save(retriever, "pods", PODS)
    retriever.force_pin("pods")
    world.embeddings = None
    assert doc_ids(world.retriever().invoke("nothing of the kind")) == ["pods"]
    assert world.record("pods").fetch_count == 1


# -- misses


def test_a_streak_of_misses_lets_a_copy_go(world: World) -> None:
    """The third semantic search in a row without a hit demotes the document and removes its chunks and content."""
    retriever = world.retriever(decay=DecayConfig(max_cache_miss_streak=3))
    world.save(retriever, "pods", PODS)
    for missed in (1, 2):
        retriever.invoke(OTHER_QUESTION)
        assert (world.state("pods"), world.record("pods").cache_miss_streak) == (CLAIMED, missed)
    retriever.invoke(OTHER_QUESTION)
    record = world.record("pods")
    assert (record.user_state, record.full_content, record.demoted_at) == (DEMOTED, None, START)
    assert retriever.chunk_store.load_chunks(USER, "pods") == []
    assert retriever.invoke(POD_QUESTION) == []
    last = retriever.history("pods")[-1]
    assert (last.what, "3 searches" in last.why) == ("demoted", True)


def test_a_hit_ends_the_streak(world: World) -> None:
    """Misses count in a row only."""
    retriever = world.retriever(decay=DecayConfig(max_cache_miss_streak=3))
    world.save(retriever, "pods", PODS)
    for question in (OTHER_QUESTION, OTHER_QUESTION, POD_QUESTION, OTHER_QUESTION, OTHER_QUESTION):
        retriever.invoke(question)
    assert (world.state("pods"), world.record("pods").cache_miss_streak) == (CLAIMED, 2)


def test_a_search_that_could_not_run_is_no_miss(world: World) -> None:
    """While the query can't be embedded, or words are matched instead, no streak grows."""
    settings: dict[str, Any] = {"decay": DecayConfig(max_cache_miss_streak=3)}
    retriever = world.retriever(**settings)
    world.save(retriever, "pods", PODS)
    world.table.error = ConnectionError("down")
    for _ in range(5):
        retriever.invoke(OTHER_QUESTION)
    assert world.record("pods").cache_miss_streak == 0
    world.embeddings = None
    for _ in range(5):
        world.retriever(**settings).invoke(OTHER_QUESTION)
    assert (world.state("pods"), world.record("pods").cache_miss_streak) == (CLAIMED, 0)


def test_a_pin_by_the_user_outlives_every_miss(world: World) -> None:
    """A document that the user pinned is not demoted by misses, until it is unpinned."""
    retriever = world.retriever(decay=DecayConfig(max_cache_miss_streak=2))
    world.save(retriever, "pods", PODS)
    retriever.force_pin("pods")
    for _ in range(6):
        retriever.invoke(OTHER_QUESTION)
    assert world.state("pods") is PINNED
    retriever.unpin("pods")
    retriever.invoke(OTHER_QUESTION)
    assert world.state("pods") is CLAIMED
    retriever.invoke(OTHER_QUESTION)
    assert world.state("pods") is DEMOTED


# -- copies that are out of date


def test_a_changed_text_is_served_fresh(world: World) -> None:
    """When the source shows a text that the copy does not have, the fresh text comes, and provenance says why."""
    retriever = world.retriever()
    world.save(retriever, "leave", "Pods may rest: ten days.")
    world.shows(document("leave", "Pods may rest: twenty days."))
    for _ in range(2):
        (found,) = retriever.invoke(POD_QUESTION)
        assert (found.page_content, found.metadata["from_cache"]) == ("Pods may rest: twenty days.", False)
        block = provenance(retriever)
        assert [(source.doc_id, source.stale) for source in block.sources] == [("leave", True)]
        assert [(copy.doc_id, copy.reason) for copy in block.withheld] == [("leave", "stale")]
        assert "changed since you saved it" in block.render()
    assert world.record("leave").stale_since == START
    assert world.record("leave").fetch_count == 3
    assert [event.what for event in retriever.history("leave")].count("stale") == 1
    assert retriever.stats().stale == 1


def test_a_stale_copy_does_not_answer_when_the_source_is_silent(world: World) -> None:
    """Once seen to be out of date, a copy is not served as current, even when the source shows nothing."""
    retriever = world.retriever()
    world.save(retriever, "leave", "Pods may rest: ten days.")
    world.shows(document("leave", "Pods may rest: twenty days."))
    retriever.invoke(POD_QUESTION)
    world.shows()
    assert retriever.invoke(POD_QUESTION) == []


def test_refreshing_replaces_a_stale_copy(world: World) -> None:
    """`refresh` saves the text that the source showed since; the old one is gone, and copies answer again."""
    retriever = world.retriever()
    world.save(retriever, "leave", "Pods may rest: ten days.")
    world.shows(document("leave", "Pods may rest: twenty days."))
    retriever.invoke(POD_QUESTION)
    record = retriever.refresh("leave")
    assert (record.full_content, record.stale_since) == ("Pods may rest: twenty days.", None)
    (found,) = retriever.invoke(POD_QUESTION)
    assert (found.page_content, found.metadata["from_cache"]) == ("Pods may rest: twenty days.", True)
    chunks = retriever.chunk_store.load_chunks(USER, "leave")
    assert [chunk["text"] for chunk in chunks] == ["Pods may rest: twenty days."]
    assert "refreshed" in [event.what for event in retriever.history("leave")]


def test_the_layout_of_white_space_is_no_change(world: World) -> None:
    """A chunk whose lines are broken elsewhere is the same text."""
    retriever = world.retriever()
    world.save(retriever, "pods", "Pods are small.\n\nThey share storage.")
    world.shows(document("pods", "Pods are small. They\nshare storage."))
    assert len(cached(retriever.invoke(POD_QUESTION))) == 1
    assert world.record("pods").stale_since is None


def test_a_version_key_decides(world: World) -> None:
    """With `version_key`, another version is a change though the text is the same, and the same version is none."""
    retriever = world.retriever(version_key="etag")
    world.save(retriever, "pods", PODS, etag="v1")
    world.shows(document("pods", "Pods, in other words.", etag="v1"))
    assert len(cached(retriever.invoke(POD_QUESTION))) == 1
    world.shows(document("pods", PODS, etag="v2"))
    assert cached(retriever.invoke(POD_QUESTION)) == []
    assert world.record("pods").stale_since is not None
    assert "v2" in retriever.history("pods")[-1].why
    assert retriever.refresh("pods").source_version == "v2"
    assert len(cached(retriever.invoke(POD_QUESTION))) == 1


def test_another_text_under_the_same_number_is_a_change(world: World) -> None:
    """A copy made of retrieved chunks is stale when a chunk comes back with its number and another text."""
    world.shows(document("pods", "Pods, the first edition.", chunk_index=0))
    retriever = world.retriever()
    retriever.invoke(POD_QUESTION)
    retriever.accept_suggestion("pods")
    world.shows(document("pods", "Pods, the second edition.", chunk_index=0))
    assert texts(retriever.invoke(POD_QUESTION)) == ["Pods, the second edition."]
    assert world.record("pods").stale_since is not None
    assert retriever.refresh("pods").full_content == "Pods, the second edition."


def test_a_new_piece_stands_beside_an_incomplete_copy(world: World) -> None:
    """A copy of retrieved chunks is no lie about chunks it never had: a new one is served beside it, and kept."""
    world.shows(document("pods", "Pods, part one.", chunk_index=0))
    retriever = world.retriever()
    retriever.invoke(POD_QUESTION)
    retriever.accept_suggestion("pods")
    world.shows(document("pods", "Pods, part one.", chunk_index=0), document("pods", "Pods, part two.", chunk_index=1))
    found = retriever.invoke(POD_QUESTION)
    assert [(item.page_content, item.metadata["from_cache"]) for item in found] == [
        ("Pods, part one.", True),
        ("Pods, part two.", False),
    ]
    assert world.record("pods").stale_since is None
    assert retriever.refresh("pods").full_content == "Pods, part one.\n\nPods, part two."
    assert [item.metadata["from_cache"] for item in retriever.invoke(POD_QUESTION)] == [True]


# -- copies that may not or can't answer


def test_access_denied_withholds_the_copy(world: World) -> None:
    """`access_check` is asked for this user and document; `False` withholds the copy, and provenance says so."""
    asked: list[tuple[str, str]] = []
    allowed = {"images"}

    def check(user_id: str, doc_id: str) -> bool:
        asked.append((user_id, doc_id))
        return doc_id in allowed

    retriever = world.retriever(access_check=check)
    world.save(retriever, "pods", PODS)
    assert retriever.invoke(POD_QUESTION) == []
    assert asked == [(USER, "pods")]
    assert [(copy.doc_id, copy.reason) for copy in provenance(retriever).withheld] == [("pods", "access denied")]
    assert world.record("pods").fetch_count == 1
    allowed.add("pods")
    assert doc_ids(retriever.invoke(POD_QUESTION)) == ["pods"]


def test_a_check_that_fails_is_a_no(world: World) -> None:
    """When `access_check` raises, the copy is withheld, the other documents come, and provenance says why."""

    def check(user_id: str, doc_id: str) -> bool:
        raise TimeoutError

    retriever = world.retriever(access_check=check)
    world.save(retriever, "pods", PODS)
    world.shows(document("images", IMAGES))
    assert doc_ids(retriever.invoke(POD_QUESTION)) == ["images"]
    block = provenance(retriever)
    assert [copy.doc_id for copy in block.withheld] == ["pods"]
    assert any("'pods'" in sentence for sentence in block.degraded)


def test_a_denied_pin_is_not_served(world: World) -> None:
    """A pinned document is asked for too."""
    retriever = world.retriever(access_check=lambda *_: False)
    world.save(retriever, "pods", PODS)
    retriever.force_pin("pods")
    assert retriever.invoke(OTHER_QUESTION) == []


def test_vectors_of_another_model_are_not_compared(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """Under another model the copy does not answer, one warning names `reindex()`, and `reindex()` restores it."""
    world.save(world.retriever(), "pods", PODS)
    world.embeddings = topics()
    world.table.model = "another"
    retriever = world.retriever()
    world.shows(document("pods", PODS))
    with caplog.at_level(logging.WARNING, logger="rag_wiki"):
        for _ in range(3):
            assert cached(retriever.invoke(POD_QUESTION)) == []
    assert [record.getMessage().count("reindex()") for record in caplog.records] == [1]
    assert any("reindex()" in sentence for sentence in provenance(retriever).degraded)
    assert [copy.reason for copy in provenance(retriever).withheld] == ["other embedding model"]
    assert retriever.reindex() == ["pods"]
    assert doc_ids(cached(retriever.invoke(POD_QUESTION))) == ["pods"]
    assert world.record("pods").content_source == "argument"
    assert retriever.reindex() == []


def test_a_model_that_changed_its_width_is_another_model(world: World) -> None:
    """The same class and name with wider vectors: no error, no hit, and `reindex()` restores it."""
    world.save(world.retriever(), "pods", PODS)
    world.embeddings = TableEmbeddings(topics().table, width=16)
    retriever = world.retriever()
    world.shows(document("pods", PODS))
    assert cached(retriever.invoke(POD_QUESTION)) == []
    assert any("reindex()" in sentence for sentence in provenance(retriever).degraded)
    assert retriever.reindex() == ["pods"]
    assert doc_ids(cached(retriever.invoke(POD_QUESTION))) == ["pods"]


def test_a_named_model_is_that_model() -> None:
    """With `embedding_name`, the name alone tells models apart."""
    world = World()
    world.save(world.retriever(embedding_name="house model"), "pods", PODS)
    world.embeddings = topics()
    world.table.model = "a new build"
    assert doc_ids(world.retriever(embedding_name="house model").invoke(POD_QUESTION)) == ["pods"]
    assert world.retriever(embedding_name="another").invoke(POD_QUESTION) == []


def test_a_lost_copy_is_served_from_global_and_heals(world: World) -> None:
    """Chunks deleted behind our back: the source answers, provenance says so, and `refresh` heals it."""
    retriever = world.retriever()
    world.save(retriever, "pods", PODS)
    retriever.chunk_store.delete(USER, "pods")
    world.shows(document("pods", PODS))
    found = retriever.invoke(POD_QUESTION)
    assert [(item.page_content, item.metadata["from_cache"]) for item in found] == [(PODS, False)]
    assert [(copy.doc_id, copy.reason) for copy in provenance(retriever).withheld] == [("pods", "copy lost")]
    assert (world.state("pods"), world.record("pods").fetch_count) == (CLAIMED, 2)
    assert retriever.refresh("pods").full_content == PODS
    assert doc_ids(cached(retriever.invoke(POD_QUESTION))) == ["pods"]


def test_a_lost_copy_is_rebuilt_by_reindex(world: World) -> None:
    """`reindex()` makes a lost copy anew from the content in the state store."""
    retriever = world.retriever()
    world.save(retriever, "pods", PODS)
    retriever.chunk_store.delete(USER, "pods")
    assert retriever.invoke(POD_QUESTION) == []
    assert retriever.reindex() == ["pods"]
    assert doc_ids(retriever.invoke(POD_QUESTION)) == ["pods"]


# -- users


@pytest.mark.parametrize("other", ["bob", "Alice", "alice ", " alice", "alice\u0301", "alice/../alice"])
def test_a_saved_copy_is_for_its_user_alone(state_store: StateStore, other: str) -> None:
    """What alice saved never answers somebody else, however alike the name; nor is it listed for them."""
    world = World(state_store)
    retriever = world.retriever("alice")
    world.save(retriever, "pods", "Pods: alice's secret.")
    for theirs in (world.retriever(other), retriever.for_user(other)):
        assert theirs.invoke(POD_QUESTION) == []
        assert provenance(theirs).to_dict()["sources"] == []
        assert (theirs.documents(), theirs.stats().chunks) == ([], 0)
    assert retriever.invoke(POD_QUESTION, user_id=other) == []
    assert texts(retriever.invoke(POD_QUESTION)) == ["Pods: alice's secret."]


def test_two_users_keep_a_copy_each(world: World) -> None:
    """Each user is answered from their own copy, and removing one leaves the other."""
    retriever = world.retriever("alice")
    world.save(retriever, "pods", "Pods for alice.")
    world.save(retriever, "pods", "Pods for bob.", user_id="bob")
    bobs = retriever.for_user("bob")
    assert (texts(retriever.invoke(POD_QUESTION)), texts(bobs.invoke(POD_QUESTION))) == (
        ["Pods for alice."],
        ["Pods for bob."],
    )
    retriever.force_remove("pods")
    assert (retriever.invoke(POD_QUESTION), texts(bobs.invoke(POD_QUESTION))) == ([], ["Pods for bob."])


def by_keyword(retriever: RagWikiRetriever) -> Any:
    """By a keyword of the call."""
    return retriever.invoke(POD_QUESTION, user_id="bob")


def by_configurable(retriever: RagWikiRetriever) -> Any:
    """By the configuration of the call."""
    return retriever.invoke(POD_QUESTION, {"configurable": {"user_id": "bob"}})


def by_with_config(retriever: RagWikiRetriever) -> Any:
    """By a configuration bound before."""
    return retriever.with_config(configurable={"user_id": "bob"}).invoke(POD_QUESTION)


def by_chain(retriever: RagWikiRetriever) -> Any:
    """By the configuration of a chain around it."""
    return chained(retriever).invoke(POD_QUESTION, {"configurable": {"user_id": "bob"}})


def by_lambda(retriever: RagWikiRetriever) -> Any:
    """By the configuration of a function that calls it."""
    step: RunnableLambda[str, list[Document]] = RunnableLambda(lambda query: retriever.invoke(query))
    return step.invoke(POD_QUESTION, {"configurable": {"user_id": "bob"}})


def by_bind(retriever: RagWikiRetriever) -> Any:
    """By a keyword bound before."""
    return retriever.bind(user_id="bob").invoke(POD_QUESTION)


def by_stream(retriever: RagWikiRetriever) -> Any:
    """By the configuration of a stream."""
    return list(retriever.stream(POD_QUESTION, {"configurable": {"user_id": "bob"}}))


def by_provenance(retriever: RagWikiRetriever) -> Any:
    """By a keyword of the call that returns provenance."""
    return retriever.invoke_with_provenance(POD_QUESTION, user_id="bob")


@pytest.mark.parametrize(
    "call", [by_keyword, by_configurable, by_with_config, by_chain, by_lambda, by_bind, by_stream, by_provenance]
)
@pytest.mark.parametrize("owner", ["alice", None])
def test_a_call_names_its_user(call: Callable[[RagWikiRetriever], Any], owner: str | None) -> None:
    """However a call names bob, it counts for bob, never for the retriever's own user."""
    world = World()
    world.shows(document("pods", PODS))
    retriever = world.retriever(owner)
    call(retriever)
    assert world.record("pods", "bob").fetch_count == 1
    assert world.store.get("alice", "pods") is None
    assert provenance(retriever).user_id == "bob"


def test_a_batch_names_a_user_per_input(world: World) -> None:
    """A batch with two configurations counts each input for its own user."""
    world.shows(document("pods", PODS))
    retriever = world.retriever("alice")
    configs: list[RunnableConfig] = [{"configurable": {"user_id": "bob"}}, {"configurable": {"user_id": "carl"}}]
    results = retriever.batch([POD_QUESTION, POD_QUESTION], configs)
    assert [doc_ids(result) for result in results] == [["pods"], ["pods"]]
    assert (world.record("pods", "bob").fetch_count, world.record("pods", "carl").fetch_count) == (1, 1)
    assert world.store.get("alice", "pods") is None


def test_the_word_of_the_call_wins() -> None:
    """A keyword beats the configuration, and the configuration beats the constructor."""
    world = World()
    world.shows(document("pods", PODS))
    retriever = world.retriever("alice")
    retriever.invoke(POD_QUESTION, {"configurable": {"user_id": "bob"}}, user_id="carl")
    assert [user for user in ("alice", "bob", "carl") if world.store.get(user, "pods")] == ["carl"]


def test_a_retriever_for_another_user_shares_everything_else(world: World) -> None:
    """`for_user` gives the same retriever with another user; the first one keeps its own."""
    world.shows(document("pods", PODS))
    retriever = world.retriever("alice", k=1)
    bobs = retriever.for_user("bob")
    bobs.invoke(POD_QUESTION)
    assert (bobs.user_id, retriever.user_id, bobs.k) == ("bob", "alice", 1)
    assert bobs.state_store is retriever.state_store
    assert (world.record("pods", "bob").fetch_count, world.store.get("alice", "pods")) == (1, None)


def test_actions_take_a_user(world: World) -> None:
    """Every action by the user can name another one, and leaves the retriever's own alone."""
    retriever = world.retriever("alice")
    world.shows(document("pods", PODS))
    for _ in range(3):
        retriever.invoke(POD_QUESTION, user_id="bob")
    retriever.decline_suggestion("pods", user_id="bob")
    retriever.accept_suggestion("pods", user_id="bob")
    retriever.thumbs_down("pods", user_id="bob")
    retriever.thumbs_up("pods", user_id="bob")
    retriever.force_pin("pods", user_id="bob")
    retriever.unpin("pods", user_id="bob")
    retriever.set_always_full_doc("pods", user_id="bob")
    retriever.refresh("pods", full_content="Pods, anew.", user_id="bob")
    assert [result.doc_id for result in retriever.run_decay(user_id="bob")] == ["pods"]
    assert retriever.reindex(user_id="bob") == []
    assert [record.doc_id for record in retriever.documents(user_id="bob")] == ["pods"]
    assert retriever.stats(user_id="bob").user_id == "bob"
    assert len(retriever.history("pods", user_id="bob")) > 5
    retriever.force_remove("pods", user_id="bob")
    assert retriever.forget_user(user_id="bob").documents == 1
    assert retriever.documents() == []


# -- as LangChain's runnables are used


def test_fields_can_be_configurable() -> None:
    """`configurable_fields` sets the user and `k` of a call."""
    world = World()
    world.shows(document("pods", PODS), document("images", IMAGES))
    retriever = world.retriever("alice").configurable_fields(
        k=ConfigurableField(id="how_many"), user_id=ConfigurableField(id="who")
    )
    found = retriever.invoke(POD_QUESTION, {"configurable": {"how_many": 1, "who": "bob"}})
    assert doc_ids(found) == ["pods"]
    assert world.record("pods", "bob").fetch_count == 1
    assert world.store.get("alice", "pods") is None


def test_batch_and_stream_count_like_invoke(world: World) -> None:
    """A batch of two and a stream are three fetches, and give what `invoke` gives."""
    world.shows(document("pods", PODS))
    retriever = world.retriever()
    assert [doc_ids(result) for result in retriever.batch(["one", "two"])] == [["pods"], ["pods"]]
    assert [doc_ids(chunk) for chunk in retriever.stream("three")] == [["pods"]]
    assert (world.record("pods").fetch_count, world.state("pods")) == (3, DocumentState.SUGGESTED)


def test_search_arguments_reach_a_vector_store() -> None:
    """Call-time `search_kwargs`, and single search arguments, reach the wrapped vector store retriever."""
    world = World()
    store = InMemoryVectorStore(topics())
    store.add_documents([document(f"doc-{number}", f"Pods {number}", shelf=number % 2) for number in range(6)])
    retriever = world.retriever(global_retriever=store.as_retriever(search_kwargs={"k": 4}))
    assert len(retriever.invoke(POD_QUESTION)) == 4
    assert len(retriever.invoke(POD_QUESTION, search_kwargs={"k": 2})) == 2

    def on_shelf(found: Document) -> bool:
        return bool(found.metadata["shelf"] == 1)

    found = retriever.invoke(POD_QUESTION, filter=on_shelf)
    assert {item.metadata["shelf"] for item in found} == {1}
    assert len(retriever.invoke(POD_QUESTION, search_kwargs={"k": 5}, k=1)) == 1


class TakingRetriever(BaseRetriever):
    """Takes an argument of its own at call time."""

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, language: str = "en"
    ) -> list[Document]:
        return [document("pods", f"{query} in {language}")]


def test_other_arguments_reach_a_retriever_that_takes_them() -> None:
    """An argument that the wrapped retriever takes is handed to it."""
    retriever = World().retriever(global_retriever=TakingRetriever())
    assert texts(retriever.invoke("pods", language="de")) == ["pods in de"]
    assert texts(retriever.invoke("pods")) == ["pods in en"]


def test_an_argument_that_nobody_takes_is_an_error(world: World) -> None:
    """An argument that would be dropped without a word is a TypeError that names it, before anything is counted."""
    world.shows(document("pods", PODS))
    retriever = world.retriever()
    with pytest.raises(UnexpectedArgumentError, match="search_kwargs") as caught:
        retriever.invoke(POD_QUESTION, search_kwargs={"k": 2})
    assert isinstance(caught.value, TypeError)
    assert (world.source.calls, world.store.get(USER, "pods")) == ([], None)


def test_any_runnable_can_be_wrapped() -> None:
    """A plain function as a runnable is a retriever too."""
    world = World()
    source: RunnableLambda[str, list[Document]] = RunnableLambda(lambda query: [document("pods", f"about {query}")])
    assert texts(world.retriever(global_retriever=source).invoke("pods")) == ["about pods"]
    assert world.record("pods").fetch_count == 1


def test_the_model_of_the_wrapped_retriever_is_found() -> None:
    """Without `embedding_model`, the vector store's own is used for saving and answering."""
    world = World(embeddings=None)
    store = InMemoryVectorStore(topics())
    store.add_documents([document("pods", PODS)])
    retriever = world.retriever(global_retriever=store.as_retriever())
    retriever.invoke(POD_QUESTION)
    retriever.accept_suggestion("pods")
    assert [item.metadata["from_cache"] for item in retriever.invoke(POD_QUESTION)] == [True]
    assert provenance(retriever).mode == "semantic"


# -- telling and forgetting


def test_the_history_tells_each_step_and_why(world: World) -> None:
    """From the first fetch to the removal, every step is told with its time, reason, count and states."""
    world.shows(document("pods", PODS))
    retriever = world.retriever()
    for _ in range(3):
        retriever.invoke(POD_QUESTION)
    retriever.decline_suggestion("pods")
    world.clock.turn(days=1)
    retriever.accept_suggestion("pods")
    retriever.thumbs_up("pods")
    retriever.force_pin("pods")
    retriever.unpin("pods")
    retriever.refresh("pods", full_content="Pods, anew.")
    retriever.force_remove("pods")
    events = retriever.history("pods")
    assert story(events) == [
        ("surfaced", "SURFACED", "SURFACED"),
        ("suggested", "SURFACED", "SUGGESTED"),
        ("declined", "SUGGESTED", "SURFACED"),
        ("saved", "SURFACED", "CLAIMED"),
        ("voted", "CLAIMED", "CLAIMED"),
        ("pinned", "CLAIMED", "PINNED"),
        ("unpinned", "PINNED", "CLAIMED"),
        ("refreshed", "CLAIMED", "CLAIMED"),
        ("removed", "CLAIMED", "DEMOTED"),
    ]
    assert all(event.why for event in events)
    assert [event.at for event in events] == [START] * 3 + [world.clock.now] * 6
    assert [event.fetch_count for event in events] == [1] + [3] * 8
    assert "retrieved" in events[3].why
    assert "9 fetches" in events[2].why


def test_the_history_is_bounded(world: World) -> None:
    """The newest events of a document are kept, the oldest go."""
    retriever = world.retriever()
    world.save(retriever, "pods", PODS)
    for _ in range(30):
        retriever.thumbs_up("pods")
        retriever.thumbs_down("pods")
    events = retriever.history("pods")
    assert len(events) == world.store.history_limit
    assert {event.what for event in events} == {"voted"}


def test_a_history_of_nothing_is_an_error(world: World) -> None:
    """Asking for the history of a document that the user never met names both."""
    with pytest.raises(UnknownDocumentError, match=r"'ada'.*'never met'"):
        world.retriever().history("never met")


def test_the_documents_of_a_user_are_listed(world: World) -> None:
    """`documents()` lists records sorted by id, all or those in given states, without their content."""
    retriever = world.retriever()
    for doc_id in ("b", "a"):
        world.save(retriever, doc_id, f"Pods {doc_id}")
    retriever.force_pin("b")
    world.shows(document("c", "Pods c"))
    retriever.invoke(OTHER_QUESTION)
    assert [(record.doc_id, record.user_state.value) for record in retriever.documents()] == [
        ("a", "CLAIMED"),
        ("b", "PINNED"),
        ("c", "SURFACED"),
    ]
    assert [record.doc_id for record in retriever.documents([PINNED, "SURFACED"])] == ["b", "c"]
    assert all(record.full_content is None for record in retriever.documents())


def test_the_figures_of_a_user_add_up(world: World) -> None:
    """`stats()` counts documents by state, chunks and the bytes of the index, and names the threshold."""
    retriever = world.retriever(text_splitter=Paragraphs())
    world.save(retriever, "pods", "Pods one\n\nPods two\n\nPods three")
    world.shows(document("images", IMAGES))
    retriever.invoke(POD_QUESTION)
    stats = retriever.stats()
    assert stats.states == {"GLOBAL": 0, "SURFACED": 1, "SUGGESTED": 0, "CLAIMED": 1, "PINNED": 0, "DEMOTED": 0}
    assert (stats.user_id, stats.chunks, stats.stale, stats.similarity_threshold) == (USER, 3, 0, 0.75)
    assert stats.index_bytes > 0


def test_forgetting_a_user_leaves_nothing_and_nobody_else_touched(world: World) -> None:
    """`forget_user` removes and counts all that is kept of one user, and spares the other."""
    retriever = world.retriever("alice", text_splitter=Paragraphs())
    for user in ("alice", "bob"):
        world.save(retriever, "pods", "Pods one\n\nPods two", user_id=user)
    world.shows(document("images", IMAGES))
    retriever.invoke(OTHER_QUESTION)
    events = sum(len(retriever.history(doc_id)) for doc_id in ("pods", "images"))
    gone = retriever.forget_user()
    assert (gone.documents, gone.events, gone.retrieved_texts, gone.chunks) == (2, events, 1, 2)
    world.shows()
    assert (retriever.documents(), retriever.invoke(POD_QUESTION), retriever.stats().chunks) == ([], [], 0)
    assert world.store.history("alice", "pods") == []
    assert world.store.retrieved_texts("alice", "images") == []
    assert retriever.chunk_store.load_chunks("alice", "pods") == []
    assert world.store.list_active_users() == ["bob"]
    assert texts(retriever.invoke(POD_QUESTION, user_id="bob")) == ["Pods one\n\nPods two"]
    assert retriever.forget_user().documents == 0


def test_a_removed_document_does_not_answer_and_is_not_suggested(world: World) -> None:
    """After `force_remove` nothing of the copy is left, and 30 days pass before the next suggestion."""
    retriever = world.retriever()
    world.save(retriever, "pods", PODS)
    assert retriever.force_remove("pods").user_state is DEMOTED
    assert (retriever.invoke(POD_QUESTION), world.record("pods").full_content) == ([], None)
    world.shows(document("pods", PODS))
    for _ in range(5):
        retriever.invoke(POD_QUESTION)
        assert suggested(retriever) == []
    assert world.record("pods").fetch_count == 5
    world.clock.turn(days=30)
    retriever.invoke(POD_QUESTION)
    assert suggested(retriever) == ["pods"]


def test_pinning_saves_an_unsaved_document_first(world: World) -> None:
    """`force_pin` on a retrieved document saves and pins it; on a removed one too, once retrieved again."""
    retriever = world.retriever()
    world.shows(document("pods", PODS))
    retriever.invoke(POD_QUESTION)
    record = retriever.force_pin("pods")
    assert (record.user_state, record.pinned_by_user, record.full_content) == (PINNED, True, PODS)
    assert [event.what for event in retriever.history("pods")] == ["surfaced", "saved", "pinned"]
    world.shows()
    assert doc_ids(cached(retriever.invoke(OTHER_QUESTION))) == ["pods"]
    retriever.force_remove("pods")
    world.shows(document("pods", PODS))
    retriever.invoke(POD_QUESTION)
    assert retriever.force_pin("pods").user_state is PINNED


def test_decay_runs_on_the_retrievers_own_stores(world: World) -> None:
    """`run_decay` scores by the clock: weeks of silence let a document go, and its copy with it."""
    retriever = world.retriever()
    world.save(retriever, "pods", PODS)
    retriever.thumbs_down("pods")
    assert [result.transitioned for result in retriever.run_decay()] == [False]
    world.clock.turn(days=40)
    assert [result.new_state for result in retriever.run_decay()] == [CLAIMED]
    world.clock.turn(days=3)
    assert [result.new_state for result in retriever.run_decay()] == [DEMOTED]
    assert retriever.invoke(POD_QUESTION) == []
    assert retriever.chunk_store.load_chunks(USER, "pods") == []


def test_a_signal_can_not_be_given_to_an_unsaved_copy(world: World) -> None:
    """`refresh` of a document that is not saved is refused and changes nothing."""
    world.shows(document("pods", PODS))
    retriever = world.retriever()
    retriever.invoke(POD_QUESTION)
    before = world.record("pods")
    with pytest.raises(InvalidTransitionError, match=r"'pods'.*'ada'.*SURFACED"):
        retriever.refresh("pods")
    assert world.record("pods") == before


@pytest.mark.parametrize("kind", PERSISTENT)
def test_everything_is_there_after_a_restart(kind: str, make_store: Callable[[str], StateStore]) -> None:
    """A new retriever over the reopened store knows copies, counts, pins, votes, declines and history."""
    before = World(make_store(kind))
    retriever = before.retriever()
    before.save(retriever, "pods", PODS, author="kim")
    before.save(retriever, "images", IMAGES)
    retriever.force_pin("images")
    retriever.thumbs_up("pods")
    before.shows(document("volumes", "Volumes keep data."))
    for _ in range(3):
        retriever.invoke(OTHER_QUESTION)
    retriever.decline_suggestion("volumes")
    records = [before.record(doc_id) for doc_id in ("images", "pods", "volumes")]
    histories = [retriever.history(record.doc_id) for record in records]

    after = World(make_store(kind), clock=before.clock)
    again = after.retriever()
    assert after.store is not before.store
    assert [after.record(record.doc_id) for record in records] == records
    assert [again.history(record.doc_id) for record in records] == histories
    found = again.invoke(POD_QUESTION)
    assert [(item.page_content, item.metadata["user_state"]) for item in found] == [
        (IMAGES, "PINNED"),
        (PODS, "CLAIMED"),
    ]
    assert found[1].metadata["author"] == "kim"
    assert after.table.batches == []


def test_a_second_worker_sees_what_the_first_one_does(make_store: Callable[[str], StateStore]) -> None:
    """Over one database file, what one retriever saves, pins or removes is seen by the next call of the other."""
    one, two = World(make_store("sqlite-file")), World(make_store("sqlite-file"))
    first, second = one.retriever(), two.retriever()
    one.save(first, "pods", PODS)
    assert doc_ids(second.invoke(POD_QUESTION)) == ["pods"]
    one.save(first, "images", IMAGES)
    first.force_pin("images")
    assert doc_ids(second.invoke(POD_QUESTION)) == ["images", "pods"]
    second.force_remove("pods")
    assert doc_ids(first.invoke(POD_QUESTION)) == ["images"]


@pytest.mark.parametrize("kind", PERSISTENT)
def test_a_forgotten_user_is_forgotten_by_every_worker(kind: str, make_store: Callable[[str], StateStore]) -> None:
    """What one worker forgot is not served by another that answered with it before, whatever is saved since."""
    one, two = World(make_store(kind)), World(make_store(kind))
    one.save(one.retriever(), "pods", "Pods: the secret.")
    assert texts(two.retriever().invoke(POD_QUESTION)) == ["Pods: the secret."]
    one.retriever().forget_user()
    assert two.retriever().invoke(POD_QUESTION) == []
    one.save(one.retriever(), "images", IMAGES)
    assert two.retriever().invoke(POD_QUESTION) == []
    assert doc_ids(two.retriever().invoke("what are images?")) == ["images"]


@pytest.mark.parametrize("kind", PERSISTENT)
def test_a_user_who_starts_anew_gets_the_new_copy(kind: str, make_store: Callable[[str], StateStore]) -> None:
    """Forgotten and saved again with other content, the new content answers in every worker."""
    one, two = World(make_store(kind)), World(make_store(kind))
    one.save(one.retriever(), "pods", "Pods: the old text.")
    assert texts(two.retriever().invoke(POD_QUESTION)) == ["Pods: the old text."]
    one.retriever().forget_user()
    one.save(one.retriever(), "pods", "Pods: the new text.")
    assert texts(two.retriever().invoke(POD_QUESTION)) == ["Pods: the new text."]


def test_provenance_belongs_to_the_call(world: World) -> None:
    """`invoke_with_provenance` returns the block of this very call beside its documents."""
    world.shows(document("pods", PODS))
    retriever = world.retriever()
    result = retriever.invoke_with_provenance(POD_QUESTION)
    assert doc_ids(result.documents) == ["pods"]
    assert [source.doc_id for source in result.provenance.sources] == ["pods"]
    assert retriever.last_provenance == result.provenance
    assert world.retriever().last_provenance is None


def test_defaults_are_enough() -> None:
    """A wrapped retriever and a user are all that is needed; everything else has a default."""
    source = ListRetriever(documents=[document("pods", PODS)])
    retriever = RagWikiRetriever(source, "ada")
    retriever.invoke(POD_QUESTION)
    assert isinstance(retriever.state_store, MemoryStateStore)
    assert [record.fetch_count for record in retriever.documents()] == [1]


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("global_retriever", "a retriever"),
        ("global_retriever", None),
        ("state_store", {}),
        ("config", {"fetch_threshold": 3}),
        ("embedding_model", "text-embedding"),
        ("chunk_store", {}),
        ("document_loader", "loader"),
        ("access_check", True),
        ("on_suggestion", "callback"),
        ("k", 0),
    ],
)
def test_a_wrong_part_is_refused_at_once(name: str, wrong: Any) -> None:
    """Something that is no retriever, store, configuration or model is a ValueError of ours that names the argument."""
    arguments: dict[str, Any] = {"global_retriever": ListRetriever(), "user_id": USER, name: wrong}
    with pytest.raises(ConfigurationError, match=name) as caught:
        RagWikiRetriever(**arguments)
    assert isinstance(caught.value, ValueError)


def test_a_hand_clock_rules_every_time(world: World) -> None:
    """All times in records and events come from the retriever's clock."""
    world.clock = HandClock(START.replace(year=2031))
    retriever = world.retriever()
    record = world.save(retriever, "pods", PODS)
    assert {record.last_fetched_at, record.cached_at} == {world.clock.now}
    assert {event.at for event in retriever.history("pods")} == {world.clock.now}
