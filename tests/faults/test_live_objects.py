"""Objects that are handed in or out: changing them later changes nothing inside, nor what the caller has."""

from __future__ import annotations

import copy
from dataclasses import FrozenInstanceError, fields, is_dataclass
from typing import Any

import numpy as np
import pytest
from helpers import ListRetriever, TableEmbeddings, document
from langchain_core.documents import Document
from langchain_core.runnables import RunnableConfig
from places import PlacedWorld
from pydantic import Field
from scenarios import POD_QUESTION, PODS, World, cached, texts, topics

from rag_wiki import DocumentState, RagWikiRetriever, SuggestionEvent, UserDocRecord
from rag_wiki.storage.chunk_store import ChunkCopy

ONCE_EACH = ["memory+disk", "sqlite", "postgres", "valkey"]
"""Each store and each place for chunks, once."""


def spoil(value: Any) -> None:
    """Change everything about a value that can be changed, all the way down."""
    if isinstance(value, dict):
        for item in list(value.values()):
            spoil(item)
        value.clear()
        value["spoilt"] = True
    elif isinstance(value, list):
        for item in list(value):
            spoil(item)
        value[:] = ["spoilt"]
    elif isinstance(value, set):
        value.clear()
    elif isinstance(value, np.ndarray):
        if value.flags.writeable:
            value.fill(-1)
    elif isinstance(value, Document):
        spoil(value.metadata)
        value.page_content = "spoilt"
    elif isinstance(value, tuple):
        for item in value:
            spoil(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for item in fields(value):
            spoil(getattr(value, item.name))
            try:
                setattr(value, item.name, None)
            except FrozenInstanceError:
                continue


def rich(text: str = PODS) -> Document:
    """A document with metadata of several floors."""
    return document(
        "pods", text, tags=["a", {"deep": ["b"]}], author={"name": {"first": "Ada"}}, some={1, 2}, row=np.arange(3)
    )


@pytest.mark.parametrize("world", ONCE_EACH, indirect=True)
def test_the_sources_documents_stay_the_sources(world: PlacedWorld) -> None:
    """What a call returns shares nothing with what the source holds, in whichever way the caller changes it."""
    original = rich()
    as_it_was = copy.deepcopy(original)
    world.shows(original)
    retriever = world.retriever()
    for _ in range(3):
        found = retriever.invoke(POD_QUESTION)
        assert found[0].metadata["tags"] == ["a", {"deep": ["b"]}]
        spoil(found)
    assert original.page_content == as_it_was.page_content
    assert repr(original.metadata) == repr(as_it_was.metadata)
    assert world.record("pods").fetch_count == 3


@pytest.mark.parametrize("world", ONCE_EACH, indirect=True)
def test_what_the_source_changes_later_changes_nothing_kept(world: PlacedWorld) -> None:
    """What was retrieved is kept as it was shown, whatever the source does to its objects afterwards."""
    original = rich()
    world.shows(original)
    retriever = world.retriever()
    served = retriever.invoke(POD_QUESTION)
    spoil(original)
    assert served[0].metadata["author"] == {"name": {"first": "Ada"}}
    world.shows()
    assert retriever.accept_suggestion("pods").full_content == PODS
    (answer,) = retriever.invoke(POD_QUESTION)
    assert answer.metadata["tags"] == ["a", {"deep": ["b"]}]


@pytest.mark.parametrize("world", ONCE_EACH, indirect=True)
def test_answers_of_saved_copies_are_everybodys_own(world: PlacedWorld) -> None:
    """Whatever is done to an answer of a saved copy, the next one is as before."""
    world.shows(rich())
    retriever = world.retriever()
    retriever.invoke(POD_QUESTION)
    retriever.accept_suggestion("pods")
    world.shows()
    first = copy.deepcopy(retriever.invoke(POD_QUESTION))
    for _ in range(2):
        found, provenance = retriever.invoke_with_provenance(POD_QUESTION)
        assert found == first
        spoil(found)
        spoil(provenance.to_dict())
        spoil(provenance.timings)
        assert texts(cached(retriever.batch([POD_QUESTION, POD_QUESTION])[1])) == [PODS]
    assert world.reopened().retriever().invoke(POD_QUESTION) == first


@pytest.mark.parametrize("world", ONCE_EACH, indirect=True)
def test_records_are_copies(world: PlacedWorld) -> None:
    """A record that was handed in or out is the caller's own: changing it writes nothing."""
    retriever = world.retriever()
    given = UserDocRecord("ada", "other", "Other", "", fetch_count=2)
    world.store.upsert(given)
    spoil(given)
    saved = world.save(retriever, "pods", PODS)
    as_it_was = world.record("pods")
    handed_out = [
        saved,
        world.record("pods"),
        *retriever.documents(),
        *world.store.list_claimed("ada"),
        *world.store.list_for_decay("ada"),
        *retriever.history("pods"),
        *retriever.run_decay(),
        retriever.thumbs_up("pods"),
        retriever.set_always_full_doc("pods", False),
        retriever.stats(),
    ]
    as_it_was = world.record("pods")
    for value in handed_out:
        spoil(value)
    assert world.record("pods") == as_it_was
    other = world.record("other")
    assert (other.doc_title, other.fetch_count) == ("Other", 2)
    assert [event.what for event in retriever.history("pods")] == ["surfaced", "saved", "voted"]
    assert retriever.stats().states["CLAIMED"] == 1
    assert texts(retriever.invoke(POD_QUESTION)) == [PODS]


@pytest.mark.parametrize("world", ONCE_EACH, indirect=True)
def test_chunks_are_copies(world: PlacedWorld) -> None:
    """Chunks that were handed in or out are the caller's own, vectors and metadata too."""
    retriever = world.retriever()
    record = world.save(retriever, "pods", PODS)
    chunks = retriever.chunk_store
    vectors = np.eye(2, dtype=np.float32)
    metadata: dict[str, Any] = {"tags": ["a"]}
    mine = ChunkCopy("1", (0, 1), ("one", "two"), vectors, (None, None), "table", metadata)
    chunks.save_copy("ada", "other", mine)
    spoil(vectors)
    spoil(metadata)
    rows: list[dict[str, Any]] = [{"chunk_index": 0, "text": "row", "vector": [1.0, 0.0], "section": None}]
    chunks.save_chunks("ada", "rows", rows)
    spoil(rows)
    for _ in range(2):
        loaded = chunks.load_copy("ada", "other", "1")
        assert loaded is not None
        assert loaded.vectors is not None
        assert (loaded.vectors.tolist(), loaded.metadata) == ([[1, 0], [0, 1]], {"tags": ["a"]})
        spoil((loaded.vectors, loaded.metadata))
        assert [chunk["text"] for chunk in chunks.load_chunks("ada", "rows")] == ["row"]
        spoil(chunks.load_chunks("ada", "rows"))
        spoil(chunks.load_copy("ada", "pods", record.copy_id or ""))
    assert texts(retriever.invoke(POD_QUESTION)) == [PODS]


class ReusingEmbeddings(TableEmbeddings):
    """Answers with the same arrays each time, as a model with buffers of its own does."""

    def __init__(self) -> None:
        super().__init__(topics().table)
        self.query = np.zeros(8)
        self.rows = np.zeros((1, 8))

    def embed_query(self, text: str) -> list[float]:
        self.query[:] = super().embed_query(text)
        return self.query  # type: ignore[return-value]  # what such a model gives

    def embed_documents(self, given: list[str]) -> list[list[float]]:
        self.rows[:] = super().embed_documents(given)
        given[:] = ["spoilt"] * len(given)
        return self.rows  # type: ignore[return-value]  # what such a model gives


def test_a_model_may_use_its_arrays_again() -> None:
    """A model that fills the same buffers at each call, and spoils the list it is given, mixes nothing up."""
    world = World(embeddings=ReusingEmbeddings())
    retriever = world.retriever(embedding_batch_size=1, chunk_size=30, chunk_overlap=0)
    world.save(retriever, "pods", f"{PODS}\n\nImages are built of layers.")
    world.save(retriever, "images", "Images are layered.")
    assert [chunk["text"] for chunk in world.store.chunk_store.load_chunks("ada", "images")] == ["Images are layered."]
    assert sorted(retriever.invoke("images")[0].metadata["scores"]) == [1.0]
    assert [answer.metadata["doc_id"] for answer in retriever.invoke(POD_QUESTION)] == ["pods"]


class SpoilingRetriever(ListRetriever):
    """Changes the query's configuration and what it was given, and returns its own list each time."""

    def _get_relevant_documents(self, query: str, *, run_manager: Any, **given: Any) -> list[Document]:
        spoil(given)
        return self.documents


def test_what_a_caller_gives_a_call_stays_the_callers() -> None:
    """The configuration, the arguments and the lists of a call are the same after it, and its list is not ours."""
    world = World()
    world.shows(rich(), document("images", "Images"))
    retriever = world.retriever(global_retriever=SpoilingRetriever(documents=world.source.documents))
    config: RunnableConfig = {"configurable": {"user_id": "bob"}, "tags": ["one"], "metadata": {"a": 1}}
    configs, queries = [config, copy.deepcopy(config)], [POD_QUESTION, "two"]
    before = copy.deepcopy((configs, queries))
    retriever.invoke(POD_QUESTION, config)
    retriever.batch(queries, configs)
    assert (configs, queries) == before
    found = retriever.invoke(POD_QUESTION)
    found.clear()
    assert len(retriever.invoke(POD_QUESTION)) == 2


def test_callbacks_get_nothing_live() -> None:
    """A suggestion, and the record that a loader is given, are values: changing them changes nothing."""
    world = World()
    world.shows(document("pods", PODS))
    told: list[SuggestionEvent] = []

    def on_suggestion(event: SuggestionEvent) -> None:
        told.append(copy.copy(event))
        spoil(event)

    def load(record: UserDocRecord) -> str:
        spoil(record)
        return PODS

    retriever = world.retriever(fetch_threshold=1, on_suggestion=on_suggestion, document_loader=load)
    _, provenance = retriever.invoke_with_provenance(POD_QUESTION)
    assert told == list(provenance.suggestions)
    assert retriever.accept_suggestion("pods").doc_title == "Pods"
    assert world.state("pods") is DocumentState.CLAIMED


class Attached(Document):
    """A document with a field of its own that can be changed."""

    attachments: list[str] = Field(default_factory=list)


def test_fields_of_a_documents_own_class_are_copied_too() -> None:
    """What a subclass of Document adds comes with the copy, and is not shared with the source."""
    world = World()
    original = Attached(page_content=PODS, metadata={"doc_id": "pods"}, attachments=["a"])
    world.shows(original)
    (found,) = world.retriever().invoke(POD_QUESTION)
    assert isinstance(found, Attached)
    found.attachments.append("b")
    assert original.attachments == ["a"]


def test_settings_are_read_once() -> None:
    """Changing a list that was given as a setting changes no retriever."""
    world = World()
    roots: list[Any] = ["/nowhere"]
    retriever: RagWikiRetriever = world.retriever(document_roots=roots)
    roots.append("/")
    world.shows(document("pods", PODS, doc_path="/etc/hostname"))
    retriever.invoke(POD_QUESTION)
    assert retriever.accept_suggestion("pods").content_source == "retrieved"
