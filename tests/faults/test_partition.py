"""A user is a hard partition: nothing saved, retrieved or pinned by one is ever served to another."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import ListRetriever, document
from places import PlacedWorld
from scenarios import POD_QUESTION, World, cached, doc_ids, texts

from rag_wiki import DocumentState, ForgottenUser, MemoryStateStore, RagWikiRetriever
from rag_wiki.errors import UnknownDocumentError
from rag_wiki.storage.chunk_store import ChunkStore

PRIVATE = "Pods are alice's secret."
OTHERS = (
    "bob",
    "Alice",
    "ALICE",
    "alice ",
    " alice",
    "alic",
    "alice2",
    "alice/",
    "alice/../alice",
    "alice:pods",
    "{alice}",
    "*",
    "alic?",
    "al%",
    "a_ice",
    "alice\0",
    "alicé",
    "alice\u0301",
)
"""Users who are not alice, however much a store, a file system or a pattern may take them for her."""


def holding(folder: Path | None, text: str) -> list[Path]:
    """The files below a folder that hold a text."""
    files = folder.rglob("*") if folder is not None else ()
    return sorted(path for path in files if path.is_file() and text.encode() in path.read_bytes())


def folders_of(folder: Path | None) -> list[str]:
    """The names of what lies in a folder: one for each user who has something there."""
    return sorted(path.name for path in folder.iterdir()) if folder is not None else []


def everything_for(retriever: RagWikiRetriever, user: str) -> list[Any]:
    """All that a user can be shown, by the ways to ask for it."""
    named: Any = {"configurable": {"user_id": user}}
    documents, provenance = retriever.invoke_with_provenance(POD_QUESTION, user_id=user)
    shown: list[Any] = [*documents, *retriever.for_user(user).invoke(POD_QUESTION)]
    shown += [item for found in retriever.batch([POD_QUESTION, "pods"], named) for item in found]
    shown += [*provenance.sources, *provenance.suggestions, *provenance.withheld, *provenance.let_go]
    return [*shown, *retriever.documents(user_id=user)]


def test_the_same_question_of_another_user_finds_nothing(world: PlacedWorld) -> None:
    """Alice's copies, saved or pinned, answer her alone: others find nothing in results, provenance or files."""
    retriever = world.retriever("alice")
    world.save(retriever, "pods", PRIVATE)
    world.save(retriever, "pinned", "Always: alice's secret.")
    retriever.force_pin("pinned")
    retriever.set_always_full_doc("pinned")
    pods = holding(world.folder, PRIVATE)
    assert len(folders_of(world.folder)) == (world.folder is not None)
    for opened in (world, world.reopened()):
        shared = opened.retriever("alice")
        assert set(doc_ids(cached(shared.invoke(POD_QUESTION)))) == {"pods", "pinned"}
        assert {user: everything_for(shared, user) for user in OTHERS} == {user: [] for user in OTHERS}
        assert opened.store.list_active_users() == ["alice"]
        assert {sum(shared.stats(user_id=user).states.values()) for user in OTHERS} == {0}
        assert (len(folders_of(world.folder)), holding(world.folder, PRIVATE)) == (world.folder is not None, pods)
        assert [shared.forget_user(user) for user in OTHERS] == [ForgottenUser()] * len(OTHERS)
        assert PRIVATE in texts(shared.invoke(POD_QUESTION))


def test_two_users_of_one_document_keep_apart(world: PlacedWorld) -> None:
    """Each is answered from the own copy, also in one batch and after a restart; removing one leaves the other."""
    retriever = world.retriever(None)
    own = {user: f"Pods of {user!r}." for user in ("alice", "Alice", "alice ")}
    for user, text in own.items():
        world.save(retriever, "pods", text, user_id=user)
    configs: list[Any] = [{"configurable": {"user_id": user}} for user in own]
    for opened in (world, world.reopened()):
        everybody = opened.retriever(None)
        assert [texts(found) for found in everybody.batch([POD_QUESTION] * 3, configs)] == [[it] for it in own.values()]
        assert {user: texts(everybody.invoke(POD_QUESTION, user_id=user)) for user in own} == {
            user: [text] for user, text in own.items()
        }
    retriever.force_remove("pods", user_id="alice")
    assert holding(world.folder, own["alice"]) == []
    for opened in (world, world.reopened()):
        answers = opened.retriever(None).batch([POD_QUESTION] * 3, configs)
        assert [texts(found) for found in answers] == [[], [own["Alice"]], [own["alice "]]]


async def test_two_users_who_await_together_keep_apart(world: PlacedWorld) -> None:
    """In one awaited batch of two users' equal questions each gets the own copy only."""
    retriever = world.retriever(None)
    for user in ("alice", "bob"):
        world.save(retriever, "pods", f"Pods of {user}.", user_id=user)
    users = ["alice", "bob", "carol"] * 4
    configs: list[Any] = [{"configurable": {"user_id": user}} for user in users]
    answers = await retriever.abatch([POD_QUESTION] * len(users), configs)
    assert [texts(found) for found in answers] == [["Pods of alice."], ["Pods of bob."], []] * 4


def test_counts_and_retrieved_texts_belong_to_one_user(world: PlacedWorld) -> None:
    """Fetches of two users never add up, and saving without content takes what this user retrieved, nothing else."""
    retriever = world.retriever(None)
    world.shows(document("pods", PRIVATE))
    for _ in range(2):
        retriever.invoke(POD_QUESTION, user_id="alice")
    world.shows(document("pods", "Pods: for everybody."))
    assert retriever.invoke_with_provenance(POD_QUESTION, user_id="bob").provenance.suggestions == ()
    assert (world.record("pods", "alice").fetch_count, world.record("pods", "bob").fetch_count) == (2, 1)
    saved = retriever.accept_suggestion("pods", user_id="bob")
    assert (saved.user_id, saved.full_content) == ("bob", "Pods: for everybody.")
    assert world.state("pods", "alice") is DocumentState.SURFACED
    assert world.store.retrieved_texts("alice", "pods")[0].text == PRIVATE
    assert holding(world.folder, PRIVATE) == []


ACTIONS: list[Callable[[RagWikiRetriever], Any]] = [
    lambda retriever: retriever.accept_suggestion("pods"),
    lambda retriever: retriever.accept_suggestion("pods", full_content="mine"),
    lambda retriever: retriever.refresh("pods"),
    lambda retriever: retriever.decline_suggestion("pods"),
    lambda retriever: retriever.force_pin("pods"),
    lambda retriever: retriever.unpin("pods"),
    lambda retriever: retriever.thumbs_up("pods"),
    lambda retriever: retriever.thumbs_down("pods"),
    lambda retriever: retriever.set_always_full_doc("pods"),
    lambda retriever: retriever.force_remove("pods"),
    lambda retriever: retriever.history("pods"),
]


def test_nobody_acts_on_another_users_document(world: PlacedWorld) -> None:
    """Every action on a document that only alice knows is an error for bob, and leaves hers as it was."""
    world.save(world.retriever("alice"), "pods", PRIVATE)
    before, history = world.record("pods", "alice"), world.store.history("alice", "pods")
    bobs = world.retriever("bob")
    for action in ACTIONS:
        with pytest.raises(UnknownDocumentError, match="bob"):
            action(bobs)
    assert (bobs.run_decay(), bobs.reindex()) == ([], [])
    assert (world.record("pods", "alice"), world.store.history("alice", "pods")) == (before, history)
    assert world.store.get("bob", "pods") is None


@pytest.mark.parametrize("words", [False, True], ids=["by vector", "by words"])
def test_a_chunk_store_shared_by_hand_keeps_users_apart(words: bool) -> None:
    """Two retrievers over one cache object, each with its user, never meet, whichever way copies are searched."""
    world, chunks = World(), ChunkStore()
    world.save(world.retriever("alice", chunk_store=chunks), "pods", PRIVATE)
    if words:
        world.embeddings = None
    alices, bobs = (world.retriever(user, chunk_store=chunks) for user in ("alice", "bob"))
    assert (texts(alices.invoke(POD_QUESTION)), texts(bobs.invoke(POD_QUESTION))) == ([PRIVATE], [])
    world.shows(document("pods", "Pods are bob's."))
    bobs.invoke("an introduction")
    world.shows()
    world.embeddings = World().embeddings
    world.retriever("bob", chunk_store=chunks).accept_suggestion("pods")
    assert texts(bobs.invoke(POD_QUESTION)) == ["Pods are bob's."]
    assert texts(alices.invoke(POD_QUESTION)) == [PRIVATE]


def test_applications_that_share_a_folder_keep_apart(tmp_path: Path) -> None:
    """Two state stores over one folder of chunks: what one has saved never answers for the other, even under one name.

    All retrievers of a process that are given one folder share its chunk store, and with it what is kept in memory.
    """
    first, second = (World(MemoryStateStore(), source=ListRetriever()) for _ in range(2))
    ours, theirs = (each.retriever("alice", wiki_save_dir=tmp_path) for each in (first, second))
    assert ours.chunk_store is theirs.chunk_store
    first.save(ours, "pods", PRIVATE)
    assert (texts(ours.invoke(POD_QUESTION)), theirs.invoke(POD_QUESTION)) == ([PRIVATE], [])
    second.save(theirs, "pods", "Pods: of another application.")
    assert texts(theirs.invoke(POD_QUESTION)) == ["Pods: of another application."]
    assert texts(ours.invoke(POD_QUESTION)) == [PRIVATE]
    assert texts(first.retriever("alice", wiki_save_dir=tmp_path).invoke(POD_QUESTION)) == [PRIVATE]
