"""What is embedded, how often and by which method, and what a query reads: nothing that grows with what is saved."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from helpers import START, TableEmbeddings, document
from langchain_core.embeddings import Embeddings
from langchain_core.vectorstores import InMemoryVectorStore
from places import PlacedWorld
from scenarios import OTHER_QUESTION, POD_QUESTION, PODS, USER, Paragraphs, World, cached, doc_ids, texts, topics

from rag_wiki import DocumentState, RagWikiRetriever, UserDocRecord
from rag_wiki.errors import CorruptDataError
from rag_wiki.storage.chunk_store import ChunkCopy, ChunkPlace, StoredCopy, new_copy_id
from rag_wiki.storage.records import UserChange

SAVED, CHUNKS, WIDTH = 200, 3, 8
TAX = document("tax", "Tax is due in May.")


def save_many(world: PlacedWorld, retriever: RagWikiRetriever, count: int) -> None:
    """Save documents of three chunks, the first of which is about pods; as fast as the stores go."""
    records = []
    for number in range(count):
        doc_id = f"saved-{number:03}"
        vectors = np.zeros((CHUNKS, WIDTH), dtype=np.float32)
        vectors[:, 1 if number else 0] = 1.0
        chunk_texts = tuple(f"Chunk {index} of {doc_id}." for index in range(CHUNKS))
        copy = ChunkCopy(new_copy_id(), tuple(range(CHUNKS)), chunk_texts, vectors, embedding="table")
        retriever.chunk_store.save_copy(USER, doc_id, copy)
        facts: dict[str, Any] = {"user_state": DocumentState.CLAIMED, "copy_id": copy.copy_id, "chunk_count": CHUNKS}
        records.append(UserDocRecord(USER, doc_id, doc_id, "", cached_at=START, last_fetched_at=START, **facts))
    world.store.change(USER, [record.doc_id for record in records], lambda _: UserChange(records=records))


class Reads:
    """Counts the chunks that are read from a place, and the bytes of them."""

    def __init__(self, patch: pytest.MonkeyPatch, place: ChunkPlace) -> None:
        self.copies = self.vector_bytes = self.text_bytes = 0
        read_many, read = place.read_many, place.read

        def counted_many(*arguments: Any, **options: Any) -> Iterator[tuple[str, StoredCopy | CorruptDataError | None]]:
            for doc_id, found in read_many(*arguments, **options):
                # A place that reads one by one has been counted below.
                if isinstance(found, StoredCopy) and type(place).read_many is not ChunkPlace.read_many:
                    self.note(found)
                yield doc_id, found

        def counted(*arguments: Any, **options: Any) -> StoredCopy | None:
            found = read(*arguments, **options)
            if found is not None:
                self.note(found)
            return found

        patch.setattr(place, "read_many", counted_many)
        patch.setattr(place, "read", counted)

    def note(self, copy: StoredCopy) -> None:
        """Count what was read of a copy."""
        self.copies += 1
        self.vector_bytes += len(copy.vectors or b"")
        self.text_bytes += len(copy.texts or "")

    @property
    def told(self) -> tuple[int, int, bool]:
        """Copies and bytes of vectors read so far, and whether texts were; forgets them."""
        seen = self.copies, self.vector_bytes, self.text_bytes > 0
        self.copies = self.vector_bytes = self.text_bytes = 0
        return seen


def test_a_query_is_embedded_once_and_reads_nothing_twice(world: PlacedWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 200 saved documents: one `embed_query` a call, no `embed_documents`; vectors are read once only."""
    save_many(world, world.retriever(embedding_name="table"), SAVED)
    later = world.reopened()
    retriever = later.retriever(embedding_name="table")
    reads = Reads(monkeypatch, retriever.chunk_store.place)
    later.shows(TAX)
    answer = retriever.invoke(POD_QUESTION)
    assert doc_ids(answer) == ["saved-000", "tax"]
    assert texts(answer)[0] == "\n\n".join(f"Chunk {index} of saved-000." for index in range(CHUNKS))
    # The vectors of all, and the texts of the one that answers.
    assert reads.told == (SAVED + 1, SAVED * CHUNKS * WIDTH * 4, True)
    for _ in range(3):
        assert doc_ids(retriever.invoke(POD_QUESTION)) == ["saved-000", "tax"]
        assert doc_ids(later.retriever(embedding_name="table").invoke(POD_QUESTION)) == ["saved-000", "tax"]
    assert reads.told == (0, 0, False)
    assert later.table.queries == [POD_QUESTION] * 7
    assert later.table.batches == []
    # One more is saved: its vectors are read, and nobody else's.
    later.save(retriever, "pods", PODS)
    _ = reads.told
    assert "pods" in doc_ids(retriever.invoke(POD_QUESTION))
    assert reads.told == (2, WIDTH * 4, True)


@pytest.mark.parametrize("options", [{}, {"similarity_threshold": "auto"}, {"global_search": "on_miss"}], ids=str)
async def test_who_has_saved_nothing_embeds_nothing(world: PlacedWorld, options: dict[str, Any]) -> None:
    """Without a saved document no call embeds anything: not before the first, for another user, nor after the last."""
    retriever = world.retriever(**options)
    other = world.retriever("bob", **options)
    world.save(other, "pods", PODS)
    world.shows(document("pods", PODS), TAX)

    async def ask() -> None:
        answers = [
            retriever.invoke(POD_QUESTION),
            await retriever.ainvoke(POD_QUESTION),
            *retriever.batch([POD_QUESTION, OTHER_QUESTION]),
            *await retriever.abatch([POD_QUESTION, OTHER_QUESTION]),
        ]
        assert [doc_ids(answer) for answer in answers] == [["pods", "tax"]] * 6

    world.table.queries.clear()
    world.table.batches.clear()
    await ask()
    assert (world.table.queries, world.table.batches) == ([], [])
    world.save(retriever, "pods", PODS)
    retriever.force_remove("pods")
    world.shows(document("pods", PODS), TAX)
    world.table.queries.clear()
    world.table.batches.clear()
    await ask()
    assert (world.table.queries, world.table.batches) == ([], [])


class TwoRoles(TableEmbeddings):
    """A model whose vectors of queries and of passages lie apart: each text must be embedded as what it is."""

    def embed_query(self, text: str) -> list[float]:
        self.queries.append(text)
        return self._of(text)

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        self.batches.append(list(texts))
        # As passages, texts lie where those of the other subject lie as queries.
        return [[second, first] for first, second in map(self._of, texts)]

    def _of(self, text: str) -> list[float]:
        return [1.0, 0.0] if ("pods" in text) == text.endswith("?") else [0.0, 1.0]


@pytest.mark.parametrize("awaiting", [False, True], ids=["sync", "async"])
async def test_questions_and_passages_are_embedded_as_what_they_are(awaiting: bool) -> None:
    """With a model that treats them apart, the passage on pods answers the question about pods, also when made anew."""
    model = TwoRoles()
    world = World(embeddings=model)
    retriever = world.retriever()
    world.save(retriever, "pods", "The passage on pods.")
    world.save(retriever, "tax", "The passage on tax.")
    assert model.queries == ["an introduction"]
    assert model.batches == [["The passage on pods."], ["The passage on tax."]]

    async def ask(question: str) -> list[str | None]:
        answer = await retriever.ainvoke(question) if awaiting else retriever.invoke(question)
        return doc_ids(answer)

    assert await ask("what are pods?") == ["pods"]
    assert await ask("what is due?") == ["tax"]
    retriever.refresh("pods", full_content="The new passage on pods.")
    assert await ask("what are pods?") == ["pods"]
    model.model = "another"
    assert await ask("what are pods?") == []
    assert retriever.reindex() == ["pods", "tax"]
    assert await ask("what are pods?") == ["pods"]
    assert all(text.endswith("?") for text in model.queries if text not in ("an introduction", "width"))
    assert not any(text.endswith("?") for batch in model.batches for text in batch)


@pytest.mark.parametrize("awaiting", [False, True], ids=["sync", "async"])
async def test_a_query_that_cannot_be_embedded_costs_the_copies(
    world: PlacedWorld, caplog: pytest.LogCaptureFixture, awaiting: bool
) -> None:
    """The global documents come and count, with one warning; the copies have not missed, and answer afterwards."""
    retriever = world.retriever()
    world.save(retriever, "pods", PODS)
    world.shows(TAX)
    world.table.error = TimeoutError("no model today")
    ask: Callable[[], Any] = lambda: (  # noqa: E731 - a name for either way
        retriever.ainvoke_with_provenance(POD_QUESTION) if awaiting else retriever.invoke_with_provenance(POD_QUESTION)
    )
    documents, provenance = await ask() if awaiting else ask()
    assert doc_ids(documents) == ["tax"]
    assert provenance.mode == "none"
    assert list(provenance.degraded) == [
        "the query could not be embedded, saved copies were not searched (TimeoutError)"
    ]
    assert [item.levelname for item in caplog.records] == ["WARNING"]
    assert "no model today" in caplog.text
    assert world.record("tax").fetch_count == 1
    assert world.record("pods").cache_miss_streak == 0
    world.table.error = None
    documents, provenance = await ask() if awaiting else ask()
    assert doc_ids(documents) == ["pods", "tax"]
    assert list(provenance.degraded) == []


def test_pins_whole_documents_and_access_checks_embed_no_more() -> None:
    """A pin, a document that answers in full, checked access and neighbours: still one `embed_query`."""
    world = World()
    retriever = world.retriever(
        access_check=lambda user_id, doc_id: True, expand_neighbours=2, text_splitter=Paragraphs()
    )
    for number in range(10):
        world.save(retriever, f"d{number}", f"Pods {number}.\n\nMore.\n\nThe end.")
    retriever.force_pin("d3")
    retriever.set_always_full_doc("d4")
    world.table.queries.clear()
    world.table.batches.clear()
    assert sorted(str(doc_id) for doc_id in doc_ids(retriever.invoke(POD_QUESTION))) == [
        f"d{number}" for number in range(10)
    ]
    assert (world.table.queries, world.table.batches) == ([POD_QUESTION], [])


class Awaited(Embeddings):
    """A model that must be awaited where a call is."""

    def __init__(self, table: TableEmbeddings) -> None:
        self.table = table
        self.awaited: list[str] = []

    def embed_query(self, text: str) -> list[float]:
        """The vector of a query."""
        return self.table.embed_query(text)

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """The vectors of texts."""
        return self.table.embed_documents(texts)

    async def aembed_query(self, text: str) -> list[float]:
        self.awaited.append(text)
        return self.table.vector(text)

    async def aembed_documents(self, texts: list[str]) -> list[list[float]]:
        self.awaited += texts
        return [self.table.vector(text) for text in texts]


async def test_awaited_calls_use_the_awaited_methods() -> None:
    """`ainvoke`, `abatch` and the awaited save embed by the model's own async methods, once each, and by no other."""
    model = Awaited(topics())
    world = World(embeddings=model)
    retriever = world.retriever()
    world.shows(document("pods", PODS))
    await retriever.ainvoke("an introduction")
    await retriever.aaccept_suggestion("pods")
    world.shows()
    assert texts(cached(await retriever.ainvoke(POD_QUESTION))) == [PODS]
    # The same question asked twice at once is one question.
    await retriever.abatch([POD_QUESTION, OTHER_QUESTION, POD_QUESTION])
    assert sorted(model.awaited) == sorted([PODS, POD_QUESTION, POD_QUESTION, OTHER_QUESTION])
    assert (model.table.queries, model.table.batches) == ([], [])


def test_saving_embeds_each_chunk_once_in_batches() -> None:
    """Ten chunks in batches of four are three calls, in document order; saving again is three more, and a vote none."""
    world = World()
    retriever = world.retriever(embedding_batch_size=4, text_splitter=Paragraphs())
    chunks = [f"Pods, part {number}." for number in range(10)]
    world.save(retriever, "pods", "\n\n".join(chunks))
    batches = [chunks[:4], chunks[4:8], chunks[8:]]
    assert world.table.batches == batches
    retriever.thumbs_up("pods")
    retriever.force_pin("pods")
    retriever.run_decay()
    retriever.stats()
    assert world.table.batches == batches
    retriever.refresh("pods", full_content="\n\n".join(chunks))
    assert world.table.batches == batches * 2
    assert world.table.queries == []


class Spread(TableEmbeddings):
    """Puts texts in directions of their own, but for the words that they share."""

    def vector(self, text: str) -> list[float]:
        """The sum of the directions of the words."""
        total = np.zeros(64)
        for word in text.lower().split():
            total += np.random.default_rng(sum(map(ord, word))).normal(size=64)
        length = math.sqrt(float(total @ total)) or 1.0
        values: list[float] = (total / length).tolist()
        return values


def test_a_model_is_calibrated_once(world: PlacedWorld) -> None:
    """With an automatic threshold the model is shown the pairs once, by whatever call, retriever or worker."""
    world.embeddings = Spread()
    auto: dict[str, Any] = {"similarity_threshold": "auto", "embedding_name": "spread"}
    retriever = world.retriever(**auto)
    world.save(retriever, "pods", PODS)
    world.table.queries.clear()
    world.table.batches.clear()
    retriever.invoke(POD_QUESTION)
    shown = sum(map(len, world.table.batches))
    assert shown > 1
    assert len(world.table.queries) == 1 + shown
    world.table.queries.clear()
    world.table.batches.clear()
    later = world.reopened()
    for each in (retriever, world.retriever("ada", **auto), later.retriever(**auto)):
        for _ in range(2):
            each.invoke(POD_QUESTION)
    assert (world.table.queries, world.table.batches) == ([POD_QUESTION] * 6, [])


@pytest.mark.parametrize("awaiting", [False, True], ids=["sync", "async"])
async def test_one_embedding_serves_both_searches(awaiting: bool) -> None:
    """A focused retriever asks a vector store by the vector that it searches copies with: one embedding a question."""
    model = Spread()
    vectors = InMemoryVectorStore(model)
    vectors.add_documents([document(f"d{number}", f"Text {number} about pods and more.") for number in range(12)])
    world = World(embeddings=model)
    retriever = world.retriever(global_retriever=vectors.as_retriever(search_kwargs={"k": 4}), context="focused")
    for number in range(6):
        retriever.invoke(f"pods and text {number}")
    retriever.accept_suggestion("d1", full_content="Text 1 about pods and more.")
    retriever.invoke("pods and text 1")
    model.queries.clear()
    model.batches.clear()
    questions: Sequence[str] = [f"more about pods, text {number}" for number in range(3)]
    for question in questions:
        if awaiting:
            await retriever.ainvoke(question)
        else:
            retriever.invoke(question)
    assert (model.queries, model.batches) == (list(questions), [])
