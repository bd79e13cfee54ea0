"""A passage is in an answer once, and in the store once, however often it was saved or found."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from helpers import TableEmbeddings, document
from langchain_core.documents import Document
from places import PlacedWorld
from scenarios import OTHER_QUESTION, POD_QUESTION, PODS, USER, Paragraphs, World, cached, doc_ids, texts, topics

from rag_wiki import DocumentState, ProvenanceBlock, RagWikiRetriever

CLAIMED, PINNED = DocumentState.CLAIMED, DocumentState.PINNED
PARTS = ("Pods one.", "Pods two.", "Pods three.")
WHOLE = "\n\n".join(PARTS)
PATIENCE = 30.0
"""Seconds after which a wait is a failure; no test that passes waits for long."""


def chunks(retriever: RagWikiRetriever, doc_id: str = "pods") -> list[str]:
    """The texts of the chunks that are kept of a document, of all its copies."""
    store, found = retriever.chunk_store, list[str]()
    for copy_id in store.place.copies(USER, doc_id):
        copy = store.load_copy(USER, doc_id, copy_id)
        assert copy is not None
        found += copy.texts or ()
    return found


def in_files(folder: Path | None, text: str) -> bool:
    """Whether a text is in a file below a folder."""
    files = [] if folder is None else [path for path in folder.rglob("*") if path.is_file()]
    return any(text.encode() in path.read_bytes() for path in files)


def found_by(provenance: ProvenanceBlock) -> list[tuple[str | None, tuple[str, ...]]]:
    """The sources of an answer, each with where it was found."""
    return [(source.doc_id, source.origins) for source in provenance.sources]


# -- saving again


def test_saving_twice_is_saving_once(world: PlacedWorld) -> None:
    """Saved again and refreshed with the same content, here and elsewhere, a document has one set of chunks."""
    retriever = world.retriever(text_splitter=Paragraphs(), local_top_k=10)
    world.save(retriever, "pods", WHOLE)
    (first,) = retriever.invoke(POD_QUESTION)
    retriever.accept_suggestion("pods", full_content=WHOLE)
    world.reopened().retriever(text_splitter=Paragraphs()).accept_suggestion("pods", full_content=WHOLE)
    retriever.refresh("pods", full_content=WHOLE)
    retriever.force_pin("pods")
    for seen in (retriever, world.reopened().retriever(local_top_k=10)):
        assert chunks(seen) == list(PARTS)
        (found,) = seen.invoke(POD_QUESTION)
        assert (found.page_content, found.metadata["scores"]) == (first.page_content, first.metadata["scores"])
        assert found.metadata["chunks_used"] == [0, 1, 2]
    assert world.record("pods").chunk_count == 3
    assert retriever.stats().chunks == 3


def test_other_content_takes_the_place_of_the_old(world: PlacedWorld) -> None:
    """Saved with another text, and split in another way, a document has the new chunks and nothing of the old."""
    retriever = world.retriever(text_splitter=Paragraphs(), local_top_k=10)
    world.save(retriever, "pods", WHOLE)
    retriever.accept_suggestion("pods", full_content="Pods four.")
    for seen in (retriever, world.reopened().retriever()):
        assert chunks(seen) == ["Pods four."]
        assert texts(seen.invoke(POD_QUESTION)) == ["Pods four."]
    assert not any(in_files(world.folder, part) for part in PARTS)
    other = world.retriever(chunk_size=12, chunk_overlap=0, local_top_k=10)
    other.accept_suggestion("pods", full_content="Pods four. Pods five. Pods six.")
    for seen in (retriever, other, world.reopened().retriever(local_top_k=10)):
        assert [text.rstrip(".") for text in chunks(seen)] == ["Pods four", "Pods five", "Pods six"]
        (found,) = seen.invoke(POD_QUESTION)
        assert found.page_content.count("Pods") == 3


class MeetingEmbeddings(TableEmbeddings):
    """Embeds documents when two are asking for it."""

    def __init__(self) -> None:
        super().__init__(topics().table)
        self.both = threading.Barrier(2, timeout=PATIENCE)

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        self.both.wait()
        return super().embed_documents(texts)


def test_two_workers_that_save_at_once_leave_one_set(world: PlacedWorld) -> None:
    """Two workers save the same suggestion at the same moment, with unlike texts: one of them is kept, wholly."""
    world.embeddings = MeetingEmbeddings()
    world.shows(document("pods", PODS))
    workers = [world.retriever(text_splitter=Paragraphs()), world.reopened().retriever(text_splitter=Paragraphs())]
    workers[0].invoke(POD_QUESTION)
    world.shows()
    contents = (WHOLE, WHOLE.replace("Pods", "The Pods"))
    with ThreadPoolExecutor(2) as pool:
        saving = [
            pool.submit(worker.accept_suggestion, "pods", full_content=content)
            for worker, content in zip(workers, contents, strict=True)
        ]
        assert [job.result(PATIENCE).user_state for job in saving] == [CLAIMED, CLAIMED]
    kept = world.record("pods").full_content
    assert kept in contents
    for seen in (*workers, world.reopened().retriever()):
        assert "\n\n".join(chunks(seen)) == kept
        assert len(seen.invoke(POD_QUESTION)) == 1


def test_what_was_retrieved_many_times_is_saved_once(world: PlacedWorld) -> None:
    """The same passages in every answer, with numbers or without, make a copy that has each of them once."""
    retriever = world.retriever(local_top_k=10)
    for _ in range(3):
        world.shows(
            *(document("numbered", text, chunk_index=number) for number, text in enumerate(PARTS)),
            document("numbered", PARTS[0], chunk_index=0),
            *(document("plain", text) for text in (*PARTS, PARTS[0])),
        )
        retriever.invoke(POD_QUESTION)
    for doc_id in ("numbered", "plain"):
        assert retriever.accept_suggestion(doc_id).full_content == WHOLE
        assert chunks(retriever, doc_id) == list(PARTS)
    found = retriever.invoke(POD_QUESTION)
    assert (sorted(map(str, doc_ids(found))), texts(found)) == (["numbered", "plain"], [WHOLE, WHOLE])


def test_a_passage_laid_out_anew_is_saved_once() -> None:
    """A passage that the source showed with other line ends or blanks is the same passage, in the copy too."""
    world = World()
    retriever = world.retriever()
    for text in ("Pods hold\ncontainers.", "Pods hold containers.", "Pods hold  containers.\n"):
        world.shows(document("pods", text))
        retriever.invoke(POD_QUESTION)
    retriever.accept_suggestion("pods")
    assert [" ".join(text.split()) for text in chunks(retriever)] == ["Pods hold containers."]


# -- the same passage from copy and source


@pytest.mark.parametrize("context", ["all", "focused"])
def test_what_copy_and_source_both_have_comes_once(world: PlacedWorld, context: str) -> None:
    """The source finds the very passages that the copy answers with: each is there once, and both are named."""
    retriever = world.retriever(text_splitter=Paragraphs(), local_top_k=10, context=context)
    world.save(retriever, "pods", WHOLE)
    world.shows(
        *(document("pods", text, chunk_index=number) for number, text in enumerate(PARTS)),
        document("pods", "Pods one.\nPods   two."),
        document("pods", WHOLE),
    )
    for seen in (retriever, world.reopened().retriever(local_top_k=10, context=context)):
        (found,), provenance = seen.invoke_with_provenance(POD_QUESTION)
        assert found.metadata["from_cache"] is True
        assert [found.page_content.count(part) for part in PARTS] == [1, 1, 1]
        assert found_by(provenance) == [("pods", ("cache", "global"))]
        assert provenance.to_dict()["sources"][0]["origins"] == ["cache", "global"]


def test_what_only_one_of_them_has_names_that_one(world: PlacedWorld) -> None:
    """A copy whose document the source did not find names the cache alone, a document without copy the source alone."""
    retriever = world.retriever()
    world.save(retriever, "pods", PODS)
    world.shows(document("tax", "Tax is due in May."))
    _, provenance = retriever.invoke_with_provenance(POD_QUESTION)
    assert found_by(provenance) == [("pods", ("cache",)), ("tax", ("global",))]
    world.shows(document("pods", PODS))
    _, provenance = retriever.invoke_with_provenance(OTHER_QUESTION)
    assert found_by(provenance) == [("pods", ("global",))]


def test_a_new_part_beside_an_incomplete_copy_comes_once(world: PlacedWorld) -> None:
    """A copy made of retrieved passages, and the source with those and a new one: each is in the answer once."""
    retriever = world.retriever(local_top_k=10)
    world.shows(*(document("pods", text, chunk_index=number) for number, text in enumerate(PARTS[:2])))
    retriever.invoke(POD_QUESTION)
    retriever.accept_suggestion("pods")
    world.shows(*(document("pods", text, chunk_index=number) for number, text in enumerate(PARTS)))
    for _ in range(2):
        found = retriever.invoke(POD_QUESTION)
        assert sorted(texts(found)) == sorted(["\n\n".join(PARTS[:2]), PARTS[2]])
    retriever.refresh("pods")
    assert texts(retriever.invoke(POD_QUESTION)) == [WHOLE]
    assert chunks(retriever) == list(PARTS)


def test_a_whole_document_stands_for_all_of_its_passages(world: PlacedWorld) -> None:
    """A copy that answers with the whole document takes the place of every passage of it that the source shows."""
    retriever = world.retriever(text_splitter=Paragraphs(), local_top_k=1)
    world.save(retriever, "pods", WHOLE)
    retriever.set_always_full_doc("pods")
    world.shows(*(document("pods", text) for text in PARTS))
    (found,), provenance = retriever.invoke_with_provenance(POD_QUESTION)
    assert (found.page_content, found.metadata["full_doc_injected"]) == (WHOLE, True)
    assert found_by(provenance) == [("pods", ("cache", "global"))]


@pytest.mark.parametrize("saved", [(), ("first",), ("first", "second")])
@pytest.mark.parametrize("context", ["all", "focused"])
def test_equal_texts_of_two_documents_are_both_cited(saved: tuple[str, ...], context: str) -> None:
    """Two documents say the same: both are in the answer and in its provenance, saved or not."""
    world = World()
    retriever = world.retriever(context=context)
    for doc_id in saved:
        world.save(retriever, doc_id, PODS)
    world.shows(document("first", PODS), document("second", PODS))
    found, provenance = retriever.invoke_with_provenance(POD_QUESTION)
    assert texts(found) == [PODS, PODS]
    assert doc_ids(cached(found)) == list(saved)
    assert sorted(str(source.doc_id) for source in provenance.sources) == ["first", "second"]


# -- pinned, saved and global together


def crowded(world: World, **settings: Any) -> RagWikiRetriever:
    """Two pinned, two saved and two other documents; the source finds five of them, some more than once."""
    retriever = world.retriever(**settings)
    for doc_id in ("pin a", "pin b", "copy a", "copy b"):
        world.save(retriever, doc_id, f"Pods of {doc_id}.")
    retriever.force_pin("pin a")
    retriever.force_pin("pin b")
    shown = ["copy b", "other a", "pin a", "copy a", "other b", "copy b", "pin a"]
    world.shows(*(document(doc_id, f"Pods of {doc_id}.") for doc_id in shown))
    return retriever


def ids_of(found: list[Document]) -> list[str]:
    """The ids of documents, in order."""
    return [str(doc_id) for doc_id in doc_ids(found)]


def test_pinned_saved_and_global_together_come_once_each(world: PlacedWorld) -> None:
    """No document of a crowded answer is there twice, and every limit is kept: pins, then copies and source in turn."""
    retriever = crowded(world)
    found, provenance = retriever.invoke_with_provenance(POD_QUESTION)
    whole = ids_of(found)
    assert sorted(whole) == ["copy a", "copy b", "other a", "other b", "pin a", "pin b"]
    assert sorted(whole[:2]) == ["pin a", "pin b"]
    assert (sorted([whole[2], whole[4]]), [whole[3], whole[5]]) == (["copy a", "copy b"], ["other a", "other b"])
    assert dict(found_by(provenance)) == {
        "pin a": ("cache", "global"),
        "pin b": ("cache",),
        "copy a": ("cache", "global"),
        "copy b": ("cache", "global"),
        "other a": ("global",),
        "other b": ("global",),
    }
    for k in range(1, 8):
        some, told = retriever.invoke_with_provenance(POD_QUESTION, k=k)
        assert ids_of(some) == whole[:k]
        assert [source.doc_id for source in told.sources] == whole[:k]
        assert len(set(texts(some))) == len(some)


@pytest.mark.parametrize("settings", [{"context": "focused"}, {"expand_neighbours": 1}, {"global_search": "on_miss"}])
@pytest.mark.parametrize("k", [1, 3, 5, 20])
async def test_no_setting_lets_a_document_in_twice(settings: dict[str, Any], k: int) -> None:
    """Focused, with neighbours, or asking the source on a miss only: each document once, `k` at most, either way."""
    retriever = crowded(World(), **settings)
    blocking = retriever.invoke(POD_QUESTION, k=k)
    awaited = await retriever.ainvoke(POD_QUESTION, k=k)
    (batched, _) = retriever.batch([POD_QUESTION, POD_QUESTION], k=k)
    for found in (blocking, awaited, batched):
        assert ids_of(found) == ids_of(blocking)
        assert len(set(ids_of(found))) == len(found) <= k
        assert {"pin a", "pin b"} & set(ids_of(found))


def test_a_document_that_comes_once_counts_once(world: PlacedWorld) -> None:
    """Found as pin, as copy and several times by the source, a document has one more fetch after one question."""
    retriever = crowded(world)
    before = {record.doc_id: record.fetch_count for record in retriever.documents()}
    retriever.invoke(POD_QUESTION)
    after = {record.doc_id: record.fetch_count - before.get(record.doc_id, 0) for record in retriever.documents()}
    assert after == dict.fromkeys(["copy a", "copy b", "other a", "other b", "pin a", "pin b"], 1)
    assert {record.doc_id for record in retriever.documents([PINNED])} == {"pin a", "pin b"}


# -- one passage, cut in two


@pytest.mark.parametrize("settings", [{"expand_neighbours": 1}, {"context": "focused"}])
def test_what_neighbouring_chunks_share_comes_once(settings: dict[str, Any]) -> None:
    """Chunks overlap where they were cut; joined, with neighbours or in focus, they say what they share once."""
    content = " ".join(f"Pods {number:03}." for number in range(60))
    world = World()
    retriever = world.retriever(chunk_size=120, chunk_overlap=40, local_top_k=20, **settings)
    world.save(retriever, "pods", content)
    assert len(chunks(retriever)) > 4
    found = " ".join(texts(retriever.invoke(POD_QUESTION)))
    assert [number for number in range(60) if found.count(f"Pods {number:03}.") > 1] == []


def test_what_neighbouring_chunks_share_comes_once_by_default() -> None:
    """So they do with the default settings: no sentence of a document is in its answer twice."""
    content = " ".join(f"Pods {number:03}." for number in range(60))
    world = World()
    retriever = world.retriever(chunk_size=120, chunk_overlap=40)
    world.save(retriever, "pods", content)
    (found,) = retriever.invoke(POD_QUESTION)
    assert [number for number in range(60) if found.page_content.count(f"Pods {number:03}.") > 1] == []
