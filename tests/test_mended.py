"""Faults that were found by attacking the whole, each as the fact that it is mended."""

from __future__ import annotations

import asyncio
import copy
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from helpers import START, TableEmbeddings, document
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnableLambda
from langchain_text_splitters import RecursiveCharacterTextSplitter
from scenarios import OTHER_QUESTION, POD_QUESTION, PODS, USER, World, cached, direction, doc_ids, texts, topics

from rag_wiki import DecayConfig, DocumentState, MemoryStateStore, RagWikiRetriever, StateStore, UserDocRecord
from rag_wiki.lifecycle.decay_engine import DecayEngine
from rag_wiki.saving import split_sections
from rag_wiki.storage.base import UserChange, UserView
from rag_wiki.storage.chunk_places import PendingFile

CLAIMED, DEMOTED = DocumentState.CLAIMED, DocumentState.DEMOTED


class Meddler(BaseCallbackHandler):
    """Asks something for another user just before a call returns."""

    def __init__(self, retriever: RagWikiRetriever) -> None:
        self.retriever = retriever
        self.busy = False

    def on_retriever_end(self, documents: Any, **kwargs: Any) -> None:
        if not self.busy:
            self.busy = True
            self.retriever.invoke("something else", user_id="bob")
            self.busy = False


def test_the_provenance_returned_is_of_this_call_whatever_else_is_asked() -> None:
    """A call that is made inside another one, for another user, does not change what the outer one returns."""
    world = World()
    world.shows(document("pods", PODS))
    retriever = world.retriever()
    config: Any = {"callbacks": [Meddler(retriever)]}
    assert retriever.invoke_with_provenance(POD_QUESTION, config).provenance.user_id == USER
    found = asyncio.run(retriever.ainvoke_with_provenance(POD_QUESTION, config))
    assert found.provenance.user_id == USER


async def test_tasks_beside_a_call_do_not_change_its_provenance() -> None:
    """Of calls that overlap in tasks of one caller, each returns its own provenance."""
    world = World()
    world.shows(document("pods", PODS))
    retriever = world.retriever()
    await retriever.ainvoke("first", user_id="parent")
    for _ in range(20):
        beside = [asyncio.create_task(retriever.ainvoke("beside", user_id="child")) for _ in range(4)]
        found = await retriever.ainvoke_with_provenance("mine", user_id="parent")
        assert found.provenance.user_id == "parent"
        await asyncio.gather(*beside)


def test_a_query_without_a_direction_is_no_search(state_store: StateStore) -> None:
    """A query whose vector is all zeros demotes nothing, finds nothing, and brings pinned documents along."""
    world = World(state_store, embeddings=TableEmbeddings({"": [0.0], "Pods": [1.0], "images": [0.0, 1.0]}))
    retriever = world.retriever(decay=DecayConfig(max_cache_miss_streak=2))
    world.save(retriever, "pods", PODS)
    world.save(retriever, "images", "images are built in layers")
    retriever.force_pin("images")
    for _ in range(5):
        documents, provenance = retriever.invoke_with_provenance("?")
    assert doc_ids(documents) == ["images"]
    assert provenance.mode == "none"
    assert (world.state("pods"), world.record("pods").cache_miss_streak) == (CLAIMED, 0)


class TestCopiesAndAssignment:
    """Changing a field changes what the retriever does."""

    def test_an_access_check_given_later_is_asked(self) -> None:
        """Whether by `model_copy` or by assignment, a new access check decides from the next call on."""
        world = World()
        retriever = world.retriever()
        world.save(retriever, "pods", PODS)

        def nobody(user_id: str, doc_id: str) -> bool:
            return False

        assert doc_ids(retriever.invoke(POD_QUESTION)) == ["pods"]
        assert retriever.model_copy(update={"access_check": nobody}).invoke(POD_QUESTION) == []
        assert doc_ids(retriever.invoke(POD_QUESTION)) == ["pods"]
        retriever.access_check = nobody
        assert retriever.invoke(POD_QUESTION) == []

    def test_a_store_given_later_is_used(self) -> None:
        """A copy with another state store counts there, and keeps its chunks beside that state."""
        world = World()
        world.shows(document("pods", PODS))
        retriever, other = world.retriever(), MemoryStateStore()
        moved = retriever.model_copy(update={"state_store": other})
        moved.invoke(POD_QUESTION)
        assert world.store.get(USER, "pods") is None
        record = other.get(USER, "pods")
        assert record is not None
        assert record.fetch_count == 1
        assert moved.chunk_store is other.chunk_store

    def test_deep_copies_share_the_memory(self, state_store: StateStore) -> None:
        """A deep copy of a retriever works, on the same store: what one saves the other answers."""
        world = World(state_store)
        retriever = world.retriever(global_retriever=RunnableLambda(lambda query: world.source.invoke(query)))
        for copied in (copy.deepcopy(retriever), retriever.model_copy(deep=True)):
            assert copied.state_store is state_store
        world.save(copied, "pods", PODS)
        assert doc_ids(cached(retriever.invoke(POD_QUESTION))) == ["pods"]


class SlowToAnswer(MemoryStateStore):
    """Does what it is asked, and then loses the connection when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.lose_next_answer = False

    def change(self, *arguments: Any, **named: Any) -> UserChange:
        done = super().change(*arguments, **named)
        if self.lose_next_answer:
            self.lose_next_answer = False
            message = "connection reset"
            raise ConnectionError(message)
        return done


def test_a_save_whose_answer_was_lost_is_a_save() -> None:
    """When the store moved the record and its answer got lost, the copy stays and answers."""
    store = SlowToAnswer()
    world = World(store)
    retriever = world.retriever()
    world.shows(document("pods", PODS))
    retriever.invoke(POD_QUESTION)
    store.lose_next_answer = True
    assert retriever.accept_suggestion("pods").user_state is CLAIMED
    assert doc_ids(cached(retriever.invoke(POD_QUESTION))) == ["pods"]


def test_removing_leaves_a_copy_that_was_saved_after_it(
    state_store: StateStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A document that is fetched and saved again while its removal finishes keeps its new copy."""
    world = World(state_store)
    retriever = world.retriever()
    world.save(retriever, "pods", PODS)
    act = DecayEngine._act_on

    def act_and_be_overtaken(self: DecayEngine, *arguments: Any, **options: Any) -> Any:
        done = act(self, *arguments, **options)
        monkeypatch.setattr(DecayEngine, "_act_on", act)
        world.save(retriever, "pods", PODS)
        return done

    monkeypatch.setattr(DecayEngine, "_act_on", act_and_be_overtaken)
    retriever.force_remove("pods")
    assert world.state("pods") is CLAIMED
    world.shows()
    assert texts(retriever.invoke(POD_QUESTION)) == [PODS]


def test_a_removal_while_a_readable_copy_is_put_in_place_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When a removal comes between a save's change and its file, no file is left."""
    world = World()
    retriever = world.retriever(wiki_save_dir=tmp_path)
    world.shows(document("pods", PODS))
    retriever.invoke(POD_QUESTION)
    finish = PendingFile.finish

    def finish_too_late(self: PendingFile) -> None:
        monkeypatch.setattr(PendingFile, "finish", finish)
        retriever.force_remove("pods")
        finish(self)

    monkeypatch.setattr(PendingFile, "finish", finish_too_late)
    retriever.accept_suggestion("pods")
    assert world.state("pods") is DEMOTED
    assert not any(PODS.encode() in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())


def test_a_copy_that_was_refreshed_meanwhile_is_not_stale(
    state_store: StateStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a query saw of an older copy says nothing about the one that replaced it before it was written down."""
    world = World(state_store)
    retriever = world.retriever()
    world.save(retriever, "pods", PODS)
    new = "Pods: all of it was written anew."
    world.shows(document("pods", new))
    change = type(state_store).change

    def refresh_first(self: StateStore, user_id: str, doc_ids: Any, decide: Any, **named: Any) -> UserChange:
        monkeypatch.setattr(type(state_store), "change", change)
        retriever.refresh("pods", full_content=new)
        return change(self, user_id, doc_ids, decide, **named)

    monkeypatch.setattr(type(state_store), "change", refresh_first)
    retriever.invoke(POD_QUESTION)
    assert world.record("pods").stale_since is None
    assert texts(cached(retriever.invoke(POD_QUESTION))) == [new]


def test_another_part_of_a_partial_copy_is_no_change(state_store: StateStore) -> None:
    """Chunks without numbers: a text unlike any saved one is another part, one much like it is its new version."""
    world = World(state_store)
    retriever = world.retriever()
    first = "Pods hold containers that share an address and are scheduled together on one machine."
    second = "To see why one restarts, read the log of its last run; Pods keep the reason of the exit."
    changed = "Pods hold containers that share an address and are scheduled together on two machines."
    for _ in range(3):
        world.shows(document("pods", first))
        retriever.invoke(POD_QUESTION)
    retriever.accept_suggestion("pods")
    world.shows(document("pods", second))
    assert sorted(texts(retriever.invoke(POD_QUESTION))) == sorted([first, second])
    assert world.record("pods").stale_since is None
    content = retriever.refresh("pods").full_content
    assert content is not None
    assert first in content
    assert second in content
    world.shows(document("pods", changed))
    assert texts(retriever.invoke(POD_QUESTION)) == [changed]
    assert world.record("pods").stale_since == START


MANUAL = (
    "Pods hold containers that share an address. They are scheduled together on one machine. To see why a pod "
    "restarts, read the log of its last run; Pods keep the reason of the exit. A pod that is evicted is not started "
    "again by itself, but whoever made it makes another one, perhaps elsewhere."
)
REWRITTEN_MANUAL = (
    "Since May nobody starts Pods by hand: what runs, and where, is written in the plan of each team, and a service of "
    "the platform carries it out at night. Questions about single pods go to the platform, with the name of the plan."
)


def cut(text: str, **metadata: Any) -> list[Document]:
    """A text as LangChain's splitter cuts it."""
    splitter = RecursiveCharacterTextSplitter(chunk_size=90, chunk_overlap=30, add_start_index=True)
    return splitter.split_documents([document("pods", text, **metadata)])


def test_where_passages_begin_tells_parts_from_changes(state_store: StateStore) -> None:
    """`start_index` orders what was retrieved; the next passage is another part, a rewritten one a change."""
    world = World(state_store)
    retriever = world.retriever()
    passages = cut(MANUAL)
    assert len(passages) == 5
    world.shows(passages[2], passages[0])
    for _ in range(3):
        retriever.invoke(POD_QUESTION)
    saved = retriever.accept_suggestion("pods")
    assert saved.full_content == f"{passages[0].page_content}\n\n{passages[2].page_content}"
    # The one between them shares a part of its text with both.
    world.shows(passages[1], passages[3])
    assert len(texts(retriever.invoke(POD_QUESTION))) == 3
    assert world.record("pods").stale_since is None

    rewritten = cut(REWRITTEN_MANUAL)[0]
    world.shows(rewritten)
    assert texts(retriever.invoke(POD_QUESTION)) == [rewritten.page_content]
    assert world.record("pods").stale_since == START
    assert retriever.refresh("pods").full_content == rewritten.page_content


@pytest.mark.parametrize(
    "first",
    [
        [(MANUAL[:70], 10), (MANUAL[80:160], 11), (MANUAL[170:250], None)],
        [(MANUAL[:70], 10), (MANUAL[170:250], 10), (MANUAL[80:160], 11)],
        [(MANUAL[:70], 0), (MANUAL[170:250], 0), (MANUAL[80:160], 1)],
    ],
)
def test_numbers_of_the_source_are_no_numbers_of_the_copy(
    state_store: StateStore, first: list[tuple[str, int | None]]
) -> None:
    """Where a piece had no number, or several had one, the copy counts by itself; changes are told by the source's."""
    world = World(state_store)
    retriever = world.retriever()
    world.shows(*(document("pods", text, **({} if at is None else {"chunk_index": at})) for text, at in first))
    retriever.invoke(POD_QUESTION)
    retriever.accept_suggestion("pods")
    retriever.force_pin("pods")
    world.shows(document("pods", "The canteen opens at noon and serves soup.", chunk_index=2))
    assert len(retriever.invoke(POD_QUESTION)) == 2
    assert world.record("pods").stale_since is None
    number = first[1][1] if first[1][1] == 11 else first[2][1]
    world.shows(document("pods", REWRITTEN_MANUAL, chunk_index=number))
    assert texts(retriever.invoke(POD_QUESTION)) == [REWRITTEN_MANUAL]
    assert world.record("pods").stale_since == START


def test_equal_chunks_have_their_own_numbers(state_store: StateStore) -> None:
    """A paragraph that comes twice does not make the copy's numbers others: an alike one that it lacks is no change."""
    world = World(state_store)
    retriever = world.retriever()
    row = "Pods of team {} start at eight and end at noon, every day but Sunday."
    world.shows(*(document("pods", row.format("one"), chunk_index=at) for at in (3, 7)))
    retriever.invoke(POD_QUESTION)
    retriever.accept_suggestion("pods")
    world.shows(document("pods", row.format("two"), chunk_index=9))
    assert row.format("two") in texts(retriever.invoke(POD_QUESTION))
    assert world.record("pods").stale_since is None


def test_pages_count_each_for_itself(state_store: StateStore) -> None:
    """On another page, a passage that begins at the same place is another part; and pages have an order."""
    world = World(state_store)
    retriever = world.retriever()
    (second, *_), (first, *_) = cut(MANUAL, page=2), cut(REWRITTEN_MANUAL, page=1)
    world.shows(second)
    for _ in range(3):
        retriever.invoke(POD_QUESTION)
    retriever.accept_suggestion("pods")
    world.shows(first)
    assert sorted(texts(retriever.invoke(POD_QUESTION))) == sorted([first.page_content, second.page_content])
    assert world.record("pods").stale_since is None
    assert retriever.refresh("pods").full_content == f"{first.page_content}\n\n{second.page_content}"


def cyclic() -> dict[str, Any]:
    """Metadata that contains itself."""
    metadata: dict[str, Any] = {"doc_id": "odd"}
    metadata["self"] = metadata
    return metadata


class Mute:
    """Can't say what it is."""

    def __str__(self) -> str:
        message = "no"
        raise RuntimeError(message)

    __repr__ = __str__


def deep() -> dict[str, Any]:
    """Metadata of five thousand floors."""
    floor: dict[str, Any] = {}
    for _ in range(5000):
        floor = {"below": floor}
    return {"doc_id": "odd", "deep": floor}


ODD: dict[str, dict[Any, Any]] = {
    "cyclic": cyclic(),
    "deep": deep(),
    "mute": {"doc_id": "odd", "mute": Mute()},
    "huge number": {"doc_id": "odd", "huge": 10**5000, "score": 10**400},
    "not a number": {"doc_id": "odd", "score": float("nan"), "nan": float("nan")},
    "lock": {"doc_id": "odd", "lock": threading.Lock()},
    "bytes and sets": {"doc_id": "odd", "raw": b"\xff", "some": {1, 2}, 3: "a number as key"},
}


@pytest.mark.parametrize("metadata", ODD.values(), ids=ODD)
def test_odd_metadata_passes_through_and_is_counted(state_store: StateStore, metadata: dict[Any, Any]) -> None:
    """Whatever a document's metadata hold, the document is returned, counted, and can be saved."""
    world = World(state_store)
    odd = Document("Pods, oddly.")
    odd.metadata = metadata
    world.shows(odd)
    retriever = world.retriever(fetch_threshold=1)
    documents, provenance = retriever.invoke_with_provenance(POD_QUESTION)
    assert texts(documents) == ["Pods, oddly."]
    assert provenance.degraded == ()
    assert [suggestion.doc_id for suggestion in provenance.suggestions] == ["odd"]
    retriever.accept_suggestion("odd")
    assert texts(cached(retriever.invoke(POD_QUESTION))) == ["Pods, oddly."]


@pytest.mark.parametrize("doc_id", [float("nan"), 1.5, b"raw", True, ["a"], "  "])
def test_what_identifies_nothing_is_no_id(doc_id: object) -> None:
    """Two files with `nan` as their id are two documents, told apart by their source."""
    world = World()
    world.shows(
        Document("Pods a", metadata={"doc_id": doc_id, "source": "a.md"}),
        Document("Pods b", metadata={"doc_id": doc_id, "source": "b.md"}),
    )
    retriever = world.retriever()
    retriever.invoke(POD_QUESTION)
    assert [record.doc_id for record in retriever.documents()] == ["a.md", "b.md"]


def test_a_function_that_finds_no_id_leaves_the_document_untracked() -> None:
    """A `document_id` function that looks up a missing key is an answer: there is no id."""
    world = World()
    world.shows(Document("Pods", metadata={"source": "a.md"}))
    retriever = world.retriever(document_id=lambda found: found.metadata["key"])
    assert texts(retriever.invoke(POD_QUESTION)) == ["Pods"]
    assert retriever.documents() == []


def test_lost_copies_are_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """When chunk files are gone, the log and the provenance say so and what helps; a lost pin is named."""
    world = World()
    retriever = world.retriever(wiki_save_dir=tmp_path)
    world.save(retriever, "pods", PODS)
    retriever.force_pin("pods")
    for path in tmp_path.rglob("*.chunks"):
        path.unlink()
    _, provenance = retriever.invoke_with_provenance(OTHER_QUESTION)
    assert provenance.degraded == ("1 saved copy can't answer (copy lost); reindex() or refresh() makes them anew",)
    assert [(kept.doc_id, kept.reason) for kept in provenance.withheld] == [("pods", "copy lost")]
    assert "reindex()" in caplog.text
    assert retriever.reindex() == ["pods"]
    assert doc_ids(cached(retriever.invoke(OTHER_QUESTION))) == ["pods"]


def test_searches_that_wait_for_searches_do_not_wait_for_ever() -> None:
    """Many threads whose access check asks a retriever of its own all come to an end."""
    inner_world, world = World(), World()
    inner = inner_world.retriever()
    inner_world.save(inner, "rights", "Pods: everybody may read.")
    threads = 40
    everybody = threading.Barrier(threads, timeout=20)

    def check(user_id: str, doc_id: str) -> bool:
        return doc_ids(inner.invoke(POD_QUESTION)) == ["rights"]

    retriever = world.retriever(access_check=check)
    world.save(retriever, "pods", PODS)

    def ask(_: int) -> list[str | None]:
        everybody.wait()
        return doc_ids(retriever.invoke(POD_QUESTION))

    with ThreadPoolExecutor(threads) as pool:
        assert list(pool.map(ask, range(threads), timeout=60)) == [["pods"]] * threads


def test_a_new_retriever_shows_nothing_of_one_that_is_gone() -> None:
    """A retriever that may have the address of a dead one shows none of its calls."""
    world = World()
    world.shows(document("pods", PODS))
    for _ in range(50):
        gone = world.retriever("alice")
        gone.invoke(POD_QUESTION)
        del gone
        assert world.retriever("bob").last_provenance is None


def test_a_wrong_clock_does_not_hold_the_job_back(state_store: StateStore) -> None:
    """A turn that was taken in the far future by mistake counts as long ago."""
    from datetime import timedelta

    interval = timedelta(hours=24)
    assert state_store.claim_job("decay", START + timedelta(days=36_500), interval)
    assert state_store.claim_job("decay", START, interval)
    assert state_store.job_time("decay") == START


def test_declining_twice_is_declining_once(state_store: StateStore) -> None:
    """A double click does not double the gap twice."""
    world = World(state_store)
    world.shows(document("pods", PODS))
    retriever = world.retriever()
    for _ in range(3):
        retriever.invoke(POD_QUESTION)
    assert retriever.decline_suggestion("pods").next_suggest_at == 9
    assert retriever.decline_suggestion("pods").next_suggest_at == 9


def test_batches_that_only_add_up_are_refused() -> None:
    """A short batch and a long one give the right number of vectors for the wrong texts: that is an error."""

    class Shifted(TableEmbeddings):
        def embed_documents(self, texts: list[str]) -> list[list[float]]:
            vectors = super().embed_documents(texts)
            return vectors[:-1] if len(self.batches) == 1 else [*vectors, vectors[-1]]

    from rag_wiki import EmbeddingError

    world = World(embeddings=Shifted({"Pods": direction(1.0)}))
    retriever = world.retriever(embedding_batch_size=2, chunk_size=20, chunk_overlap=0)
    world.shows(document("pods", "Pods one two three. Pods four five six. Pods seven eight nine. Pods ten."))
    retriever.invoke(POD_QUESTION)
    with pytest.raises(EmbeddingError, match="vectors for"):
        retriever.accept_suggestion("pods")
    assert world.state("pods") is DocumentState.SURFACED


def test_headings_are_found_whatever_the_line_holds() -> None:
    """Closing marks and blanks are no part of a heading; a line full of them is read like another."""
    content = (
        "# One ##  \ntext a\n#" + " " * 200_000 + "x\ntext b\n## " + "#" * 200_000 + "\ntext c\n#No heading\ntext d"
    )
    assert split_sections(content, ("text a", "text b", "text c", "text d")) == ("One", "x", "x", "x")


class OneDocument(BaseRetriever):
    """Returns one document; can be pickled."""

    def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
        return [document("pods", PODS)]


def test_a_retriever_on_a_file_can_be_pickled(make_store: Callable[[str], StateStore]) -> None:
    """A retriever over a SQLite file travels to another process by pickle, and finds its memory there."""
    world = World(make_store("sqlite-file"), embeddings=topics())
    retriever = RagWikiRetriever(OneDocument(), USER, world.store, embedding_model=topics())
    arrived = pickle.loads(pickle.dumps(retriever))  # noqa: S301 - our own bytes
    retriever.invoke(POD_QUESTION)
    retriever.accept_suggestion("pods")
    assert doc_ids(cached(arrived.invoke(POD_QUESTION))) == ["pods"]
    arrived.state_store.close()


def test_upserting_by_hand_is_seen_by_rules(state_store: StateStore) -> None:
    """A record that an application writes itself is what rules see next."""
    state_store.upsert(UserDocRecord(USER, "pods", "Pods", "", user_state=CLAIMED, fetch_count=7))

    def decide(view: UserView) -> UserChange:
        return UserChange(outcome=view.records["pods"].fetch_count)

    assert state_store.change(USER, ["pods"], decide).outcome == 7


def test_a_list_in_a_record_stays_the_callers(state_store: StateStore) -> None:
    """A rule that puts a list where a tuple belongs can't change what is stored by it later."""
    state_store.upsert(UserDocRecord(USER, "pods", "Pods", ""))
    digests = ["a", "b"]

    def decide(view: UserView) -> UserChange:
        record = view.records["pods"]
        record.retrieved = digests  # type: ignore[assignment]  # what is wrong about it
        return UserChange(records=[record])

    state_store.change(USER, ["pods"], decide)
    digests.append("c")
    record = state_store.get(USER, "pods")
    assert record is not None
    assert record.retrieved == ("a", "b")
