"""Saving is all or nothing: what is written, what is left when something fails, and who wins when two act at once."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import TableEmbeddings, document
from scenarios import OTHER_QUESTION, POD_QUESTION, PODS, USER, Paragraphs, World, cached, doc_ids, texts, topics

from rag_wiki import (
    ChunkStore,
    ContentNotFoundError,
    DocumentRemovedError,
    DocumentState,
    EmbeddingError,
    FetchCounter,
    InvalidDocumentError,
    MemoryStateStore,
    RagWikiRetriever,
    StateStore,
    UserDocRecord,
)
from rag_wiki.storage.chunk_places import MemoryPlace
from rag_wiki.storage.chunk_store import StoredCopy

PATIENCE = 60.0
FIVE = [f"Pods, part {number}." for number in range(5)]
CONTENT = "\n\n".join(FIVE)


class FaultyEmbeddings(TableEmbeddings):
    """Answers a batch with whatever a test wants."""

    answer: Callable[[list[list[float]]], Any] | None = None

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        vectors = super().embed_documents(texts)
        return vectors if self.answer is None else self.answer(vectors)


class GatedEmbeddings(TableEmbeddings):
    """Waits before it answers until a test says so."""

    def __init__(self) -> None:
        super().__init__(topics().table)
        self.reached = threading.Event()
        self.open = threading.Event()

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        self.reached.set()
        assert self.open.wait(PATIENCE)
        return super().embed_documents(texts)


def suggested(world: World, **options: Any) -> RagWikiRetriever:
    """A retriever for whose user saving "pods" has been suggested."""
    retriever = world.retriever(**{"text_splitter": Paragraphs(), "embedding_batch_size": 2, **options})
    world.shows(document("pods", FIVE[0]))
    for _ in range(3):
        retriever.invoke(POD_QUESTION)
    world.shows()
    assert world.state("pods") is DocumentState.SUGGESTED
    return retriever


def chunk_texts(retriever: RagWikiRetriever, doc_id: str = "pods", user_id: str = USER) -> list[str]:
    """The texts of the stored chunks."""
    return [chunk["text"] for chunk in retriever.chunk_store.load_chunks(user_id, doc_id)]


def copies(retriever: RagWikiRetriever, doc_id: str = "pods", user_id: str = USER) -> list[str]:
    """All copies that lie in the chunk store, named by a record or not."""
    return retriever.chunk_store.place.copies(user_id, doc_id)


class Standing:
    """What is kept of a document, to compare before and after."""

    def __init__(self, world: World, retriever: RagWikiRetriever) -> None:
        self.record = world.record("pods")
        self.history = retriever.history("pods")
        self.retrieved = world.store.retrieved_texts(USER, "pods")
        self.copies = copies(retriever)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Standing) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]  # a value to compare

    def __repr__(self) -> str:
        return repr(vars(self))


# -- what is written


def test_a_document_is_split_embedded_in_batches_and_kept(state_store: StateStore) -> None:
    """Five chunks in batches of two: each chunk is kept once, in order, with its number and vector."""
    world = World(state_store)
    retriever = suggested(world)
    record = retriever.accept_suggestion("pods", full_content=CONTENT)
    assert [len(batch) for batch in world.table.batches] == [2, 2, 1]
    assert (record.user_state, record.full_content, record.chunk_count) == (DocumentState.CLAIMED, CONTENT, 5)
    chunks = retriever.chunk_store.load_chunks(USER, "pods")
    assert [(chunk["chunk_index"], chunk["text"]) for chunk in chunks] == list(enumerate(FIVE))
    assert [chunk["vector"] for chunk in chunks] == [world.table.vector(text) for text in FIVE]


def test_the_default_splitter_keeps_its_sizes() -> None:
    """Without a splitter of one's own, chunks have at most `chunk_size` characters and together hold the content."""
    world = World()
    retriever = suggested(world, text_splitter=None, chunk_size=80, chunk_overlap=20)
    content = " ".join(f"Sentence number {number} speaks of pods." for number in range(40))
    retriever.accept_suggestion("pods", full_content=content)
    chunks = chunk_texts(retriever)
    assert len(chunks) > 10
    assert max(map(len, chunks)) <= 80
    assert all(chunk in content for chunk in chunks)
    assert all(f"number {number} " in " ".join(chunks) for number in range(40))


def test_blank_chunks_are_dropped(state_store: StateStore) -> None:
    """A splitter that gives blank pieces: they are neither embedded nor kept, and numbers have no gaps."""
    world = World(state_store)
    retriever = suggested(world)
    retriever.accept_suggestion("pods", full_content="Pods one\n\n \t\n\n\n\nPods two\n\n")
    assert chunk_texts(retriever) == ["Pods one", "Pods two"]
    assert world.record("pods").chunk_count == 2
    assert not any(not text.strip() for batch in world.table.batches for text in batch)


def test_chunks_know_their_heading(state_store: StateStore) -> None:
    """Chunks of Markdown carry the heading that they stand under, and provenance names it."""
    world = World(state_store)
    retriever = suggested(world)
    content = "Pods before.\n\n# Basics\n\nPods share a network.\n\n## Limits ##\n\nImages are not limited.\n\nAn end."
    retriever.accept_suggestion("pods", full_content=content)
    sections = [chunk["section"] for chunk in retriever.chunk_store.load_chunks(USER, "pods")]
    assert sections == [None, "Basics", "Basics", "Limits", "Limits", "Limits"]
    retriever.invoke("what are images?")
    assert retriever.last_provenance is not None
    assert [source.section_heading for source in retriever.last_provenance.sources] == ["Limits"]


@pytest.mark.parametrize(
    "convert",
    [
        lambda vectors: np.array(vectors, dtype=np.float64),
        lambda vectors: np.array(vectors, dtype=np.float16),
        lambda vectors: [np.array(vector, dtype=np.float32) for vector in vectors],
        lambda vectors: [tuple(map(int, vector)) for vector in vectors],
    ],
    ids=["float64 matrix", "float16 matrix", "float32 rows", "tuples of integers"],
)
def test_vectors_of_any_number_type_are_taken(convert: Callable[[Any], Any]) -> None:
    """Arrays and sequences of any number type can be saved and answer."""
    model = FaultyEmbeddings(topics().table)
    model.answer = convert
    retriever = suggested(World(embeddings=model))
    retriever.accept_suggestion("pods", full_content=CONTENT)
    assert doc_ids(cached(retriever.invoke(POD_QUESTION))) == ["pods"]


def test_saving_twice_keeps_one_set_of_chunks(state_store: StateStore) -> None:
    """The same content again gives the same chunks, once, in one copy."""
    world = World(state_store)
    retriever = suggested(world)
    for _ in range(2):
        retriever.accept_suggestion("pods", full_content=CONTENT)
    assert chunk_texts(retriever) == FIVE
    assert len(copies(retriever)) == 1
    assert retriever.stats().chunks == 5


def test_other_content_replaces_the_copy(state_store: StateStore) -> None:
    """Saved again with other content, only the new chunks are left, and only they answer."""
    world = World(state_store)
    retriever = suggested(world)
    retriever.accept_suggestion("pods", full_content=CONTENT)
    assert len(retriever.invoke(POD_QUESTION)) == 1
    record = retriever.accept_suggestion("pods", full_content="Pods, rewritten.")
    assert (record.full_content, record.chunk_count) == ("Pods, rewritten.", 1)
    assert (chunk_texts(retriever), len(copies(retriever))) == (["Pods, rewritten."], 1)
    assert texts(retriever.invoke(POD_QUESTION)) == ["Pods, rewritten."]


def test_a_removed_document_can_be_saved_anew(state_store: StateStore) -> None:
    """Removed, retrieved again and accepted, it has only its new chunks."""
    world = World(state_store)
    retriever = suggested(world)
    retriever.accept_suggestion("pods", full_content=CONTENT)
    retriever.force_remove("pods")
    assert copies(retriever) == []
    world.save(retriever, "pods", "Pods, once more.")
    assert chunk_texts(retriever) == ["Pods, once more."]
    assert texts(retriever.invoke(POD_QUESTION)) == ["Pods, once more."]


# -- what is left when something fails


BAD_ANSWERS: dict[str, Callable[[list[list[float]]], Any]] = {
    "too few": lambda vectors: vectors[:-1],
    "too many": lambda vectors: [*vectors, vectors[0]],
    "none": lambda _: [],
    "unequal widths": lambda vectors: [vectors[0], *(vector[:-1] for vector in vectors[1:])],
    "NaN": lambda vectors: [*vectors[:-1], [float("nan"), *vectors[-1][1:]]],
    "infinite": lambda vectors: [*vectors[:-1], [float("inf"), *vectors[-1][1:]]],
    "beyond float32": lambda vectors: [*vectors[:-1], [1e300, *vectors[-1][1:]]],
    "empty vectors": lambda vectors: [[] for _ in vectors],
    "words": lambda vectors: [["a", "b"] for _ in vectors],
    "None": lambda vectors: [None for _ in vectors],
}


@pytest.mark.parametrize("answer", BAD_ANSWERS.values(), ids=BAD_ANSWERS)
def test_a_bad_answer_of_the_model_saves_nothing(answer: Callable[[Any], Any]) -> None:
    """Too few, unequal, non-finite or senseless vectors: an EmbeddingError with the ids, and all is as before."""
    model = FaultyEmbeddings(topics().table)
    world = World(embeddings=model)
    retriever = suggested(world)
    before = Standing(world, retriever)
    model.answer = answer
    with pytest.raises(EmbeddingError, match=r"'pods'.*'ada'") as caught:
        retriever.accept_suggestion("pods", full_content=CONTENT)
    assert isinstance(caught.value, ValueError)
    assert Standing(world, retriever) == before
    assert retriever.invoke(POD_QUESTION) == []
    model.answer = None
    assert retriever.accept_suggestion("pods", full_content=CONTENT).user_state is DocumentState.CLAIMED
    assert doc_ids(cached(retriever.invoke(POD_QUESTION))) == ["pods"]


def test_a_batch_of_another_width_saves_nothing() -> None:
    """When a later batch comes in another width, nothing is saved."""
    model = FaultyEmbeddings(topics().table)
    world = World(embeddings=model)
    retriever = suggested(world)
    before = Standing(world, retriever)
    model.answer = lambda vectors: vectors if len(vectors) == 2 else [[*vector, 0.0] for vector in vectors]
    with pytest.raises(EmbeddingError, match="width"):
        retriever.accept_suggestion("pods", full_content=CONTENT)
    assert Standing(world, retriever) == before


class FailingLater(TableEmbeddings):
    """Fails on a batch by its number, as a service with a rate limit does."""

    fails_at: int | None = None

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        if self.fails_at is not None and len(self.batches) == self.fails_at:
            self.fails_at = None
            raise ConnectionError("429: slow down")
        return super().embed_documents(texts)


async def accept(retriever: RagWikiRetriever, awaiting: bool) -> UserDocRecord:
    """Accept the five chunks, plain or awaited."""
    if awaiting:
        return await retriever.aaccept_suggestion("pods", full_content=CONTENT)
    return retriever.accept_suggestion("pods", full_content=CONTENT)


@pytest.mark.parametrize("awaiting", [False, True], ids=["sync", "async"])
async def test_a_model_that_fails_midway_saves_nothing(state_store: StateStore, awaiting: bool) -> None:
    """The second batch raises: its exception comes out, all is as before, and accepting again works."""
    model = FailingLater(topics().table)
    model.fails_at = 1
    world = World(state_store, model)
    retriever = suggested(world)
    before = Standing(world, retriever)
    with pytest.raises(ConnectionError, match="429"):
        await accept(retriever, awaiting)
    assert Standing(world, retriever) == before
    assert copies(retriever) == []
    assert retriever.accept_suggestion("pods", full_content=CONTENT).chunk_count == 5
    assert chunk_texts(retriever) == FIVE


def test_a_refresh_that_fails_leaves_the_old_copy(state_store: StateStore) -> None:
    """While a new copy can't be embedded, the old one stays and answers."""
    model = FailingLater(topics().table)
    world = World(state_store, model)
    retriever = suggested(world)
    retriever.accept_suggestion("pods", full_content=PODS)
    before = Standing(world, retriever)
    model.fails_at = len(model.batches) + 1
    with pytest.raises(ConnectionError):
        retriever.refresh("pods", full_content=CONTENT)
    assert Standing(world, retriever) == before
    assert texts(retriever.invoke(POD_QUESTION)) == [PODS]


def test_pinning_that_can_not_save_pins_nothing(state_store: StateStore) -> None:
    """`force_pin` on an unsaved document whose embedding fails leaves it unsaved and unpinned."""
    model = FailingLater(topics().table)
    model.fails_at = 0
    world = World(state_store, model)
    retriever = suggested(world)
    before = Standing(world, retriever)
    with pytest.raises(ConnectionError):
        retriever.force_pin("pods")
    assert Standing(world, retriever) == before
    assert retriever.force_pin("pods").user_state is DocumentState.PINNED


class FullPlace(MemoryPlace):
    """A place for chunks that is full."""

    full = True

    def write(self, user_id: str, doc_id: str, copy: StoredCopy) -> None:
        if self.full:
            raise OSError(28, "No space left on device")
        super().write(user_id, doc_id, copy)


def test_a_full_chunk_store_saves_nothing(state_store: StateStore) -> None:
    """When chunks can't be written, the error comes out, the state is as before, and later it works."""
    place = FullPlace()
    world = World(state_store)
    retriever = suggested(world, chunk_store=ChunkStore(place=place))
    before = Standing(world, retriever)
    with pytest.raises(OSError, match="No space left"):
        retriever.accept_suggestion("pods", full_content=CONTENT)
    assert Standing(world, retriever) == before
    place.full = False
    retriever.accept_suggestion("pods", full_content=CONTENT)
    assert doc_ids(cached(retriever.invoke(POD_QUESTION))) == ["pods"]


def test_chunks_without_a_record_do_not_stay_or_answer(
    state_store: StateStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the state can't be written after the chunks, no chunk of them is left and none answers.

    While the store stays away, nobody can say whether the write is still on its way to it: the chunks stay then, and
    are swept (`tests/test_purge.py`).
    """
    world = World(state_store)
    retriever = suggested(world)
    before = Standing(world, retriever)
    with monkeypatch.context() as patch:
        patch.setattr(state_store, "change", _fail_once(state_store.change))
        with pytest.raises(ConnectionError, match="the database is away"):
            retriever.accept_suggestion("pods", full_content=CONTENT)
    assert Standing(world, retriever) == before
    assert copies(retriever) == []
    assert retriever.invoke(POD_QUESTION) == []


def _fail_once(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which fails the first time."""
    calls = itertools.count()
    return lambda *args, **kwargs: function(*args, **kwargs) if next(calls) else _fail()


def _fail(*_: Any, **__: Any) -> Any:
    raise ConnectionError("the database is away")


def test_a_removal_that_fails_can_be_repeated(state_store: StateStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """When chunks can't be deleted during `force_remove`, the error comes out, nothing answers, and again cleans up."""
    world = World(state_store)
    retriever = suggested(world)
    retriever.accept_suggestion("pods", full_content=CONTENT)
    with monkeypatch.context() as patch:
        patch.setattr(retriever.chunk_store.place, "delete", _fail)
        with pytest.raises(ConnectionError):
            retriever.force_remove("pods")
    assert retriever.invoke(POD_QUESTION) == []
    retriever.force_remove("pods")
    assert copies(retriever) == []


def test_content_that_splits_into_nothing_is_refused() -> None:
    """A splitter that gives only blank pieces is a ValueError with the ids, and all is as before."""

    class Blank(Paragraphs):
        def split_text(self, text: str) -> list[str]:
            return ["", " "]

    world = World()
    retriever = suggested(world, text_splitter=Blank())
    before = Standing(world, retriever)
    with pytest.raises(InvalidDocumentError, match=r"'pods'.*'ada'"):
        retriever.accept_suggestion("pods", full_content=CONTENT)
    assert Standing(world, retriever) == before


def test_a_loader_that_fails_saves_nothing(state_store: StateStore) -> None:
    """The loader's exception comes out, and all is as before."""
    world = World(state_store)
    retriever = suggested(world, document_loader=_fail)
    before = Standing(world, retriever)
    with pytest.raises(ConnectionError):
        retriever.accept_suggestion("pods")
    assert Standing(world, retriever) == before


@pytest.mark.parametrize("loaded", ["", " \n", 7, b"bytes", ["text"]])
def test_a_loader_that_gives_no_text_is_an_error(loaded: Any) -> None:
    """A blank or mistyped answer of the loader is a ValueError with the ids, not a reason to save something else."""
    world = World()
    retriever = suggested(world, document_loader=lambda _: loaded)
    before = Standing(world, retriever)
    with pytest.raises(InvalidDocumentError, match=r"'pods'.*'ada'"):
        retriever.accept_suggestion("pods")
    assert Standing(world, retriever) == before


def test_nothing_to_save_is_an_error(state_store: StateStore) -> None:
    """Counted by hand, with no text anywhere: a LookupError with the ids and what to pass; the state is as before."""
    world = World(state_store)
    counter = FetchCounter(state_store, clock=world.clock)
    for _ in range(3):
        counter.record_fetch(USER, "pods", "Pods", "pods.md")
    retriever = world.retriever()
    before = Standing(world, retriever)
    with pytest.raises(ContentNotFoundError, match=r"'pods'.*'ada'.*full_content") as caught:
        retriever.accept_suggestion("pods")
    assert isinstance(caught.value, LookupError)
    assert Standing(world, retriever) == before


# -- who wins


@pytest.mark.parametrize("state", ["suggested", "saved"])
def test_a_removal_wins_over_a_save_under_way(state_store: StateStore, state: str) -> None:
    """Removed while its content is being embedded, the document stays removed, and no chunk is left."""
    model = GatedEmbeddings()
    world = World(state_store, model)
    retriever = suggested(world)
    if state == "saved":
        model.open.set()
        retriever.accept_suggestion("pods", full_content=PODS)
        model.open.clear()
        model.reached.clear()
    with ThreadPoolExecutor(1) as pool:
        saving = pool.submit(retriever.accept_suggestion, "pods", CONTENT)
        assert model.reached.wait(PATIENCE)
        retriever.force_remove("pods")
        model.open.set()
        with pytest.raises(DocumentRemovedError, match=r"'pods'.*'ada'.*removed") as caught:
            saving.result(PATIENCE)
    assert isinstance(caught.value, RuntimeError)
    record = world.record("pods")
    assert (record.user_state, record.full_content, copies(retriever)) == (DocumentState.DEMOTED, None, [])
    assert retriever.invoke(POD_QUESTION) == []


def test_forgetting_wins_over_a_save_under_way(state_store: StateStore) -> None:
    """A user who is forgotten while a document is being embedded stays forgotten."""
    model = GatedEmbeddings()
    world = World(state_store, model)
    retriever = suggested(world)
    with ThreadPoolExecutor(1) as pool:
        saving = pool.submit(retriever.accept_suggestion, "pods", CONTENT)
        assert model.reached.wait(PATIENCE)
        retriever.forget_user()
        model.open.set()
        with pytest.raises(DocumentRemovedError):
            saving.result(PATIENCE)
    assert (state_store.get(USER, "pods"), copies(retriever)) == (None, [])


def test_fetches_and_votes_during_a_save_stand(state_store: StateStore) -> None:
    """What the user does while a document is being embedded is there afterwards."""
    model = GatedEmbeddings()
    world = World(state_store, model)
    retriever = suggested(world)
    with ThreadPoolExecutor(1) as pool:
        saving = pool.submit(retriever.accept_suggestion, "pods", CONTENT)
        assert model.reached.wait(PATIENCE)
        retriever.thumbs_up("pods")
        world.shows(document("pods", FIVE[0]))
        retriever.invoke(POD_QUESTION)
        model.open.set()
        saving.result(PATIENCE)
    record = world.record("pods")
    assert (record.user_state, record.explicit_signal, record.fetch_count) == (DocumentState.CLAIMED, 1.0, 4)


class MeetingEmbeddings(TableEmbeddings):
    """Answers only when two are asking."""

    def __init__(self) -> None:
        super().__init__(topics().table)
        self.barrier = threading.Barrier(2)

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        self.barrier.wait(PATIENCE)
        return super().embed_documents(texts)


def test_two_who_accept_together_save_one_set_of_chunks(state_store: StateStore) -> None:
    """Two threads that accept at the same time leave one copy, whole, and the document saved."""
    world = World(state_store, MeetingEmbeddings())
    retriever = suggested(world, embedding_batch_size=64)
    with ThreadPoolExecutor(2) as pool:
        records = list(pool.map(lambda _: retriever.accept_suggestion("pods", full_content=CONTENT), range(2)))
    assert [record.user_state for record in records] == [DocumentState.CLAIMED] * 2
    assert (len(copies(retriever)), chunk_texts(retriever)) == (1, FIVE)
    (found,) = retriever.invoke(POD_QUESTION)
    assert found.metadata["chunks_used"] == [0, 1, 2]


# -- metadata

PAGES = [
    document("pods", "Pods run containers.", page=1, author="Ada", chunk_index=0),
    document("pods", "Pods share a network.", page=2, author="Ada", chunk_index=1),
    document("pods", "Pods share it all.", page=2, author="Ada", chunk_index=2, embedded=[0.25] * 384),
]
"""What a loader of a book shows of it; a filter left a vector in the last one."""


class Directions(TableEmbeddings):
    """One question matches the first page, another the second one's passages, a third all there is."""

    def __init__(self) -> None:
        tables: dict[str, Sequence[float]] = {
            "containers": [1, 0, 0],
            "share": [0, 1, 0],
            "all pods": [1, 1, 1],
            "Pods, in": [0, 0, 1],
        }
        super().__init__(tables)


def shelved(world: World, **options: Any) -> RagWikiRetriever:
    """A retriever whose user met the pages; the source shows nothing from then on."""
    retriever = world.retriever(similarity_threshold=0.5, local_top_k=4, **options)
    world.shows(*PAGES)
    retriever.invoke("an introduction")
    world.shows()
    return retriever


def test_a_chunk_keeps_its_page(state_store: StateStore) -> None:
    """What all chunks used share is in the metadata as in the source's; where they differ, each one's is in a list."""
    retriever = shelved(World(state_store, Directions()))
    retriever.accept_suggestion("pods")

    (first,) = retriever.invoke("containers?")
    (second,) = retriever.invoke("who has to share?")
    (both,) = retriever.invoke("all pods?")

    assert (first.metadata["page"], first.metadata["author"]) == (1, "Ada")
    assert (second.metadata["chunks_used"], second.metadata["page"]) == ([1, 2], 2)
    assert both.metadata["chunks_used"] == [0, 1, 2]
    assert both.metadata["chunk_metadata"] == [{"page": 1}, {"page": 2}, {"page": 2}]
    assert "page" not in both.metadata
    assert both.metadata["author"] == "Ada"
    assert not {"chunk_metadata", "embedded"} & (first.metadata.keys() | second.metadata.keys())
    first.metadata["page"] = both.metadata["chunk_metadata"][0]["page"] = 99
    assert retriever.invoke("containers?")[0].metadata["page"] == 1


def test_a_text_of_ones_own_finds_its_pages(state_store: StateStore) -> None:
    """Chunks of a text that was given have the page of the passage that they lie in, also after `reindex()`."""
    world = World(state_store, Directions())
    retriever = shelved(world, text_splitter=Paragraphs())
    text = "\n\n".join(["Pods, in short.", *(page.page_content for page in PAGES)])
    retriever.accept_suggestion("pods", full_content=text)
    assert retriever.invoke("containers?")[0].metadata["page"] == 1

    other = Directions()
    other.model = "another"
    later = world.retriever(similarity_threshold=0.5, embedding_model=other, text_splitter=Paragraphs())
    assert later.reindex() == ["pods"]

    (found,) = later.invoke("containers?")
    (whole,) = later.invoke("all pods?")
    assert (found.metadata["page"], found.metadata["author"]) == (1, "Ada")
    assert whole.metadata["chunk_metadata"][:2] == [{}, {"page": 1}]


def test_one_page_does_not_speak_for_a_whole_book(state_store: StateStore) -> None:
    """A text of which one passage was retrieved: its page is that passage's; what else it says is the document's."""
    world = World(state_store, Directions())
    retriever = world.retriever(similarity_threshold=0.5, local_top_k=4, text_splitter=Paragraphs())
    world.shows(PAGES[0])
    retriever.invoke("an introduction")
    world.shows()
    retriever.accept_suggestion("pods", full_content="\n\n".join(page.page_content for page in PAGES))
    (first,) = retriever.invoke("containers?")
    (second,) = retriever.invoke("who has to share?")
    assert (first.metadata["page"], first.metadata["author"]) == (1, "Ada")
    assert ("page" in second.metadata, second.metadata["author"]) == (False, "Ada")


def test_a_heading_is_of_its_page_and_not_of_the_list_of_contents(state_store: StateStore) -> None:
    """Of passages that hold a chunk the shortest one says where it stands."""
    world = World(state_store, Directions())
    retriever = world.retriever(similarity_threshold=0.5, text_splitter=Paragraphs())
    world.shows(document("pods", "Contents: containers. Networks.", page=1), document("pods", "containers.", page=9))
    retriever.invoke("an introduction")
    world.shows()
    retriever.accept_suggestion("pods", full_content="containers.\n\nNetworks.")
    assert retriever.invoke("containers?")[0].metadata["page"] == 9


def test_what_a_search_says_is_not_kept(state_store: StateStore) -> None:
    """Scores and their like are another with the next search; a vector that a filter left is nobody's page."""
    world = World(state_store, Directions())
    world.source.documents = [
        document("pods", text, page=page, rerank_score=0.1 * page, distance=page, **{"@search.score": page})
        for page, text in enumerate(["Pods run containers.", "Pods share a network."], 1)
    ]
    retriever = world.retriever(similarity_threshold=0.5)
    retriever.invoke("an introduction")
    world.shows()
    retriever.accept_suggestion("pods")
    (found,) = retriever.invoke("containers?")
    assert found.metadata["page"] == 1
    assert not {"rerank_score", "distance", "@search.score"} & found.metadata.keys()


def test_a_refresh_keeps_the_pages_of_what_did_not_change(state_store: StateStore) -> None:
    """The source shows one new passage; the chunks that are as they were keep their pages."""
    world = World(state_store, Directions())
    retriever = shelved(world, text_splitter=Paragraphs())
    text = "\n\n".join(page.page_content for page in PAGES)
    retriever.accept_suggestion("pods", full_content=text)
    world.shows(document("pods", "Pods share a network and volumes.", page=3, author="Bob", chunk_index=1))
    retriever.invoke("an introduction")
    world.shows()
    retriever.refresh("pods", full_content=text.replace("a network", "a network and volumes"))
    (first,) = retriever.invoke("containers?")
    (both,) = retriever.invoke("who has to share?")
    assert first.metadata["page"] == 1
    assert [own["page"] for own in both.metadata["chunk_metadata"]] == [3, 2]


def test_a_document_that_answers_with_all_of_it_has_no_page(state_store: StateStore) -> None:
    """The whole text is of no single page."""
    retriever = shelved(World(state_store, Directions()))
    retriever.accept_suggestion("pods")
    retriever.set_always_full_doc("pods", True)
    (found,) = retriever.invoke("containers?")
    assert found.metadata["full_doc_injected"]
    assert not {"page", "chunk_metadata"} & found.metadata.keys()


# -- readable copies


def files(folder: Path) -> list[Path]:
    """All files below a folder."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def readable(folder: Path) -> list[str]:
    """The readable copies below a folder."""
    return [path.read_text(encoding="utf-8") for path in files(folder) if path.suffix == ".md"]


def test_a_readable_copy_comes_and_goes_with_the_document(state_store: StateStore, tmp_path: Path) -> None:
    """With `wiki_save_dir` the text is written as one file, replaced by a refresh, and removed with the document."""
    world, wiki = World(state_store), tmp_path / "wiki"
    retriever = suggested(world, wiki_save_dir=wiki)
    assert readable(wiki) == []
    retriever.accept_suggestion("pods", full_content=CONTENT)
    assert readable(wiki) == [CONTENT]
    retriever.refresh("pods", full_content="Pods, rewritten: é漢.")
    assert readable(wiki) == ["Pods, rewritten: é漢."]
    assert texts(retriever.invoke(POD_QUESTION)) == ["Pods, rewritten: é漢."]
    retriever.force_remove("pods")
    assert files(wiki) == []


def test_a_copy_on_disk_answers_after_a_restart(tmp_path: Path, make_store: Callable[[str], StateStore]) -> None:
    """State in SQLite and chunks in a folder: a new retriever over both answers without embedding anew."""
    settings: dict[str, Any] = {"wiki_save_dir": tmp_path / "wiki"}
    before = World(make_store("sqlite-file"))
    before.save(before.retriever(**settings), "pods", PODS)
    after = World(make_store("sqlite-file"))
    assert doc_ids(after.retriever(**settings).invoke(POD_QUESTION)) == ["pods"]
    assert after.table.batches == []


def test_demotion_removes_the_readable_copy(state_store: StateStore, tmp_path: Path) -> None:
    """A document that decay lets go leaves no file behind, and no passage of it anywhere in the folder."""
    world, wiki = World(state_store), tmp_path / "wiki"
    retriever = suggested(world, wiki_save_dir=wiki)
    retriever.accept_suggestion("pods", full_content=CONTENT)
    retriever.thumbs_down("pods")
    world.clock.turn(days=60)
    retriever.run_decay()
    world.clock.turn(days=3)
    assert [result.new_state for result in retriever.run_decay()] == [DocumentState.DEMOTED]
    assert files(wiki) == []


def test_a_failed_save_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the model, the state or the disk fails: no file is left, or the one from before stays as it was."""
    model = FailingLater(topics().table)
    world = World(MemoryStateStore(), model)
    retriever = suggested(world, wiki_save_dir=tmp_path / "wiki")
    model.fails_at = 1
    with pytest.raises(ConnectionError):
        retriever.accept_suggestion("pods", full_content=CONTENT)
    assert files(tmp_path) == []
    with monkeypatch.context() as patch:
        patch.setattr(world.store, "change", _fail_once(world.store.change))
        with pytest.raises(ConnectionError):
            retriever.accept_suggestion("pods", full_content=CONTENT)
    assert files(tmp_path) == []
    retriever.accept_suggestion("pods", full_content=CONTENT)
    before = files(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(world.store, "change", _fail_once(world.store.change))
        with pytest.raises(ConnectionError):
            retriever.refresh("pods", full_content="Pods, rewritten.")
    assert (files(tmp_path), readable(tmp_path)) == (before, [CONTENT])


def test_a_folder_that_can_not_be_one_saves_nothing(tmp_path: Path) -> None:
    """A file where the folder should be: the error comes out, and the state is as before."""
    (tmp_path / "wiki").write_text("a file", encoding="utf-8")
    world = World()
    retriever = suggested(world, wiki_save_dir=tmp_path / "wiki")
    before = Standing(world, retriever)
    with pytest.raises(OSError, match="wiki"):
        retriever.accept_suggestion("pods", full_content=CONTENT)
    assert Standing(world, retriever) == before


HOSTILE_IDS: Sequence[str] = (
    "../../etc/passwd",
    "/etc/passwd",
    "a\\b:c|d",
    "CON",
    "x" * 500,
    "Ünï/漢\n",
    ".",
    "a*?[b]",
)


@pytest.mark.parametrize("doc_id", HOSTILE_IDS)
def test_no_id_or_title_leads_out_of_the_folder(tmp_path: Path, doc_id: str) -> None:
    """Whatever user, document and title are called, every file stays below the folder, and the document answers."""
    world = World()
    retriever = world.retriever(doc_id, wiki_save_dir=tmp_path / "deep" / "wiki")
    world.save(retriever, doc_id, PODS, user_id=doc_id, doc_title=doc_id)
    assert doc_ids(retriever.invoke(POD_QUESTION)) == [doc_id]
    assert readable(tmp_path / "deep" / "wiki") == [PODS]
    assert files(tmp_path) == files(tmp_path / "deep" / "wiki")
    retriever.force_remove(doc_id)
    assert files(tmp_path) == []


def test_ids_that_differ_in_case_have_files_of_their_own(tmp_path: Path) -> None:
    """Documents "a" and "A" with one title are two files, and removing one leaves the other."""
    world = World()
    retriever = world.retriever(wiki_save_dir=tmp_path)
    for doc_id in ("a", "A"):
        world.save(retriever, doc_id, f"Pods {doc_id}", doc_title="Title")
    assert sorted(readable(tmp_path)) == ["Pods A", "Pods a"]
    retriever.force_remove("a")
    assert readable(tmp_path) == ["Pods A"]


def test_a_new_title_moves_the_readable_copy(tmp_path: Path) -> None:
    """When the title changed in between, a refresh leaves one file."""
    world = World()
    retriever = suggested(world, wiki_save_dir=tmp_path)
    retriever.accept_suggestion("pods", full_content=PODS)
    record = world.record("pods")
    record.doc_title = "All about pods"
    world.store.upsert(record)
    retriever.refresh("pods", full_content="Pods, rewritten.")
    assert readable(tmp_path) == ["Pods, rewritten."]


def test_an_explicit_chunk_store_gets_readable_copies_too(tmp_path: Path) -> None:
    """With both, chunks lie in the store given, and the readable copy in the folder."""
    chunks = ChunkStore()
    world = World()
    retriever = suggested(world, wiki_save_dir=tmp_path, chunk_store=chunks)
    retriever.accept_suggestion("pods", full_content=CONTENT)
    assert [chunk["text"] for chunk in chunks.load_chunks(USER, "pods")] == FIVE
    assert [path.suffix for path in files(tmp_path)] == [".md"]


def test_forgetting_counts_and_removes_files(state_store: StateStore, tmp_path: Path) -> None:
    """`forget_user` removes one user's chunks and files, counts them, and leaves the other user's."""
    world, wiki = World(state_store), tmp_path / "wiki"
    retriever = world.retriever("alice", wiki_save_dir=wiki, text_splitter=Paragraphs())
    for user in ("alice", "bob"):
        for doc_id in ("one", "two"):
            world.save(retriever, doc_id, f"Pods {doc_id} of {user}\n\nmore", user_id=user)
    gone = retriever.forget_user()
    assert (gone.documents, gone.chunks, gone.files) == (2, 4, 2)
    assert sorted(readable(wiki)) == ["Pods one of bob\n\nmore", "Pods two of bob\n\nmore"]
    assert not any(b"alice" in path.read_bytes() for path in files(wiki))
    assert len(retriever.invoke(POD_QUESTION, user_id="bob")) == 2


def test_a_torn_file_is_reported_and_healed(tmp_path: Path) -> None:
    """A chunk file cut short is a miss that provenance tells of; other copies answer, and `refresh` heals it."""
    world = World()
    retriever = world.retriever(wiki_save_dir=tmp_path)
    world.save(retriever, "torn", PODS)
    (torn,) = [path for path in files(tmp_path) if path.suffix != ".md"]
    world.save(retriever, "whole", "Pods, in other words.")
    torn.write_bytes(torn.read_bytes()[:-7])
    world.shows(document("torn", PODS))
    retriever = world.retriever(wiki_save_dir=tmp_path)
    found = retriever.invoke(POD_QUESTION)
    assert [(item.metadata["doc_id"], item.metadata["from_cache"]) for item in found] == [
        ("whole", True),
        ("torn", False),
    ]
    assert retriever.last_provenance is not None
    assert [copy.reason for copy in retriever.last_provenance.withheld] == ["copy unreadable"]
    retriever.refresh("torn", full_content=PODS)
    assert len(cached(retriever.invoke(POD_QUESTION))) == 2


def test_a_foreign_file_is_not_served(tmp_path: Path) -> None:
    """A chunk file of another document in the place of ours is reported, and its text never served."""
    world = World()
    retriever = world.retriever(wiki_save_dir=tmp_path)
    world.save(retriever, "ours", PODS)
    (ours,) = [path for path in files(tmp_path) if path.suffix != ".md"]
    world.save(retriever, "theirs", "Pods, and a secret.", user_id="bob")
    (theirs,) = [path for path in files(tmp_path) if path.suffix != ".md" and path != ours]
    ours.write_bytes(theirs.read_bytes())
    world.shows(document("ours", PODS))
    assert texts(retriever.invoke(POD_QUESTION)) == [PODS]
    assert retriever.last_provenance is not None
    assert [copy.reason for copy in retriever.last_provenance.withheld] == ["copy unreadable"]


def test_a_deleted_folder_heals(tmp_path: Path) -> None:
    """A save folder deleted by hand: the source answers, and `reindex()` writes chunks and readable copy anew."""
    world = World()
    folder = tmp_path / "wiki"
    retriever = world.retriever(wiki_save_dir=folder)
    world.save(retriever, "pods", PODS)
    folder.rename(tmp_path / "moved")
    world.shows(document("pods", PODS))
    assert [item.metadata["from_cache"] for item in retriever.invoke(POD_QUESTION)] == [False]
    assert retriever.reindex() == ["pods"]
    assert [item.metadata["from_cache"] for item in retriever.invoke(POD_QUESTION)] == [True]
    assert readable(folder) == [PODS]


def test_a_save_does_not_touch_other_documents(state_store: StateStore) -> None:
    """Saving one document leaves record, chunks and hits of another as they were."""
    world = World(state_store)
    retriever = world.retriever()
    world.save(retriever, "pods", PODS)
    retriever.invoke(POD_QUESTION)
    before = _without_clocks(world.record("pods"))
    chunks = retriever.chunk_store.load_chunks(USER, "pods")
    world.shows(document("images", "Images are layered."))
    retriever.invoke(OTHER_QUESTION)
    retriever.accept_suggestion("images")
    assert _without_clocks(world.record("pods")) == before
    assert retriever.chunk_store.load_chunks(USER, "pods") == chunks


def _without_clocks(record: UserDocRecord) -> UserDocRecord:
    record.queries_missed = record.cache_miss_streak = 0
    return record
