"""Ids that collide, match by pattern, or name a file elsewhere: kept apart everywhere, nothing written outside."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import document
from places import PlacedWorld
from scenarios import POD_QUESTION, PODS, World, cached, doc_ids, texts

from rag_wiki import FetchCounter, StateMachine
from rag_wiki.errors import InvalidDocumentError, InvalidUserError
from rag_wiki.testing.awkward import AWKWARD_IDS

ONCE_EACH = ["memory+disk", "sqlite", "postgres", "valkey"]
"""Each store and each place for chunks, once."""

LONG = "n" * 10_000
IDS: tuple[str, ...] = (
    *("A", "a", "ä", "Ä", "a\u0308", "A\u0308", "ß", "ss", "ẞ", "ı", "i", "İ", "ſ", "s", "K", "\u212a"),
    *("文档", "דוק", "وثيقة", "Ω", "\u2126", "🦜", "🦜\ufe0f", "\ud800", "\udc00"),
    *(LONG, LONG[:-1] + "m", LONG + "n", "N" + LONG[1:]),
    *("CON", "con", "NUL", "nul.txt", "COM1", "aux.", "LPT1:"),
    *(".", "..", "...", "../a", "..\\a", "/etc/passwd", "/etc/passwd/", "C:\\a", "\\\\host\\a", "~root", "file:///a"),
    *(
        "a\x00b",
        "a",
        "a\x00",
        "\x00",
        "\x01",
        "\x7f",
        "\x1b[2J",
        "a\r",
        "a\n",
        "a\r\n",
        "a\u2028",
        "\ufeffa",
        "\u200ba",
    ),
    *("*", "?", "[a-z]*", "[a]", "a*", "{user}", "{ada}", "}{", "%", "%%", "a%", "_", "__", "%_", "\\%", "a_"),
    *("\u200ba", "a.", "a..", "a ", "a  ", " a", ".a", "a\t", "a\u00a0", "a\u3000"),
    *("a:b", "a::b", "b", "a/b", "a|b", "a,b", "a~b", "%7Ea", "~a", "a%20", "a+", "0", "00", "0.0", "null"),
    *("user", "docs", "saved", "chunks:a", "hits:a:b", "rag_wiki:users", "rag_wiki", "state"),
    *("' OR 1=1 --", '"; DROP TABLE rag_wiki_users; --', "$$", "${a}", "$(a)", "`a`", "-rf", "--"),
)
IDS = tuple(dict.fromkeys(IDS))


def outside(folder: Path, root: Path) -> set[str]:
    """The files and folders below a folder that are not below another, and not a database's."""
    return {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if not path.is_relative_to(root) and not path.name.startswith("state.db")
    }


@pytest.mark.parametrize("world", ONCE_EACH, indirect=True)
def test_pairs_of_documents_stay_apart(world: PlacedWorld, tmp_path: Path) -> None:
    """In every place documents of ids that look, fold, match or sort alike keep their own texts, also after reopening.

    Nothing of them is written outside the folder, and removing some leaves the others.
    """
    retriever = world.retriever(local_top_k=1)
    world.shows(*(document(doc_id, f"Pods number {at}", doc_title=doc_id) for at, doc_id in enumerate(IDS)))
    retriever.invoke(POD_QUESTION)
    world.shows()
    for at, doc_id in enumerate(IDS):
        retriever.accept_suggestion(doc_id, full_content=f"Pods number {at}")
    again = world.reopened()
    assert [record.doc_id for record in again.retriever().documents()] == sorted(IDS)
    assert outside(tmp_path, world.folder or tmp_path) <= {"wiki"}
    answers = {answer.metadata["doc_id"]: answer for answer in again.retriever().invoke(POD_QUESTION)}
    assert answers.keys() == set(IDS)
    for at, doc_id in enumerate(IDS):
        assert answers[doc_id].page_content == f"Pods number {at}"
        assert answers[doc_id].metadata["doc_title"] == doc_id
    if world.folder is not None:
        assert len(list(world.folder.rglob("*.md"))) == len(IDS)
        names = [path.name for path in world.folder.rglob("*")]
        assert all(name.isascii() and len(name) <= 100 for name in names)
        assert len({unicodedata.normalize("NFKC", name).casefold().rstrip(". ") for name in names}) == len(names)

    gone, kept = IDS[::2], IDS[1::2]
    for doc_id in gone:
        again.retriever().force_remove(doc_id)
        again.store.delete("ada", doc_id)
    last = again.reopened()
    found = {answer.metadata["doc_id"]: answer.page_content for answer in last.retriever().invoke(POD_QUESTION)}
    assert found == {doc_id: f"Pods number {at}" for at, doc_id in enumerate(IDS) if doc_id in kept}
    assert [record.doc_id for record in last.retriever().documents()] == sorted(kept)
    assert [last.store.chunk_store.load_chunks("ada", doc_id) for doc_id in gone] == [[]] * len(gone)


USERS = IDS[:: max(len(IDS) // 20, 1)]


@pytest.mark.parametrize("world", ONCE_EACH, indirect=True)
def test_pairs_of_users_stay_apart(world: PlacedWorld, tmp_path: Path) -> None:
    """In every place users of ids that look alike see their own copy alone, and forgetting one forgets no other."""
    users = tuple(
        dict.fromkeys([*USERS, "A", "a", "ä", "a\u0308", "*", "a*", "{ada}", LONG, LONG[:-1] + "m", "..", "."])
    )
    for at, user in enumerate(users):
        world.save(world.retriever(user), "pods", f"Pods number {at}")
    again = world.reopened()
    assert again.store.list_active_users() == sorted(users)
    for at, user in enumerate(users):
        assert texts(again.retriever(user).invoke(POD_QUESTION)) == [f"Pods number {at}"]
    assert outside(tmp_path, world.folder or tmp_path) <= {"wiki"}
    for user in users[::2]:
        assert again.retriever(user).forget_user().documents == 1
    last = again.reopened()
    assert last.store.list_active_users() == sorted(users[1::2])
    for at, user in enumerate(users):
        expected = [f"Pods number {at}"] if user in users[1::2] else []
        assert texts(last.retriever(user).invoke(POD_QUESTION)) == expected
    if world.folder is not None:
        assert len(list(world.folder.iterdir())) == len(users[1::2])


@pytest.mark.parametrize("world", ONCE_EACH, indirect=True)
def test_user_and_document_are_not_joined(world: PlacedWorld) -> None:
    """Two pairs of user and document that read alike when they are put together are two."""
    pairs = [
        ("a", "b:c"),
        ("a:b", "c"),
        ("a/b", "c"),
        ("a", "b/c"),
        ("{a", "}b"),
        ("{a}", "b"),
        ("a\x00", "b"),
        ("a", "\x00b"),
    ]
    for at, (user, doc_id) in enumerate(pairs):
        world.save(world.retriever(user), doc_id, f"Pods number {at}")
    again = world.reopened()
    for at, (user, doc_id) in enumerate(pairs):
        record = again.store.get(user, doc_id)
        assert record is not None
        assert record.full_content == f"Pods number {at}"
        assert f"Pods number {at}" in texts(again.retriever(user).invoke(POD_QUESTION))


@pytest.mark.parametrize("doc_id", ["/etc/passwd", "../../etc/passwd", "file:///etc/passwd", "passwd"])
def test_an_id_opens_no_file(tmp_path: Path, doc_id: str) -> None:
    """An id or a path that names a file is no permission to read it, and no way out of the folders that are allowed."""
    allowed = tmp_path / "allowed"
    allowed.mkdir()
    (allowed / "passwd").symlink_to("/etc/passwd")
    world = World()
    for path in (doc_id, f"{allowed}/../..{doc_id}", str(allowed / "passwd")):
        world.shows(document(doc_id, PODS, doc_path=path, source=path))
        retriever = world.retriever(document_roots=(allowed,))
        retriever.invoke(POD_QUESTION)
        saved = retriever.accept_suggestion(doc_id)
        assert (saved.content_source, saved.full_content) == ("retrieved", PODS)
        retriever.forget_user()


REFUSED: list[Any] = ["", " ", "\t\n", "\u3000\u2003", None, 5, b"a", True, ["a"], float("nan"), "a".encode, object()]


@pytest.mark.parametrize("wrong", REFUSED, ids=lambda wrong: f"{type(wrong).__name__} {wrong!a:.20}"[:20])
def test_what_names_nothing_is_refused_before_anything_is_touched(tmp_path: Path, wrong: Any) -> None:
    """An id that names nobody or nothing is a clear error, and no store, source, model or folder is asked."""
    world = World()
    retriever = world.retriever(wiki_save_dir=tmp_path / "wiki")
    for call in (
        lambda: retriever.accept_suggestion(wrong, full_content=PODS),
        lambda: retriever.force_remove(wrong),
        lambda: retriever.set_always_full_doc(wrong),
        lambda: retriever.history(wrong),
        lambda: world.store.get("ada", wrong),
        lambda: world.store.chunk_store.load_chunks("ada", wrong),
    ):
        with pytest.raises(InvalidDocumentError, match="doc_id"):
            call()
    by_user: list[Callable[[], Any]] = [
        lambda: retriever.for_user(wrong),
        lambda: world.store.get(wrong, "pods"),
        lambda: world.store.chunk_store.load_chunks(wrong, "pods"),
    ]
    if wrong is not None:
        by_user.append(lambda: retriever.invoke(POD_QUESTION, user_id=wrong))
    for named in by_user:
        with pytest.raises(InvalidUserError, match="user_id"):
            named()
    assert (world.source.calls, world.table.queries, world.store.list_active_users()) == ([], [], [])
    assert not (tmp_path / "wiki").exists()


@pytest.mark.parametrize("world", ONCE_EACH, indirect=True)
def test_halves_of_a_character_are_one_id_or_two(world: PlacedWorld) -> None:
    """A record says the id under which it is found: an id of two surrogates is not read back as another one."""
    halves = "\ud83e\udd9c"
    world.save(world.retriever(), halves, PODS)
    (record,) = world.reopened().retriever().documents()
    assert world.reopened().store.get("ada", record.doc_id) == world.store.get("ada", halves)
    assert doc_ids(world.retriever().invoke(POD_QUESTION)) == [record.doc_id]
    assert world.retriever().force_pin(halves).pinned_by_user
    assert world.retriever().force_remove(halves).doc_id == record.doc_id
    assert world.store.chunk_store.load_chunks("ada", record.doc_id) == []
    assert world.store.delete("ada", halves)
    counter = FetchCounter(world.store, StateMachine())
    for _ in range(2):
        counter.record_fetch("ada", halves, "", "")
    assert world.record(record.doc_id).fetch_count == 2


def test_forms_of_one_word_are_documents_of_their_own() -> None:
    """An id in composed and in decomposed letters, of a source that mixes them, are counted apart."""
    world = World()
    composed, decomposed = unicodedata.normalize("NFC", "Größe"), unicodedata.normalize("NFD", "Größe")
    world.shows(document(composed, PODS), document(decomposed, PODS), document(composed, "Pods again."))
    retriever = world.retriever()
    retriever.invoke(POD_QUESTION)
    assert [(record.doc_id, record.fetch_count) for record in retriever.documents()] == [(decomposed, 1), (composed, 1)]


def test_every_awkward_id_goes_through_a_question(tmp_path: Path) -> None:
    """The ids that are hard on stores are suggested, saved with a folder, answered and removed by a retriever too."""
    world = World()
    retriever = world.retriever(wiki_save_dir=tmp_path / "wiki", fetch_threshold=1)
    world.shows(*(document(doc_id, "Pods.", doc_path=doc_id) for doc_id in AWKWARD_IDS))
    _, provenance = retriever.invoke_with_provenance(POD_QUESTION)
    assert [suggestion.doc_id for suggestion in provenance.suggestions] == list(AWKWARD_IDS)
    for doc_id in AWKWARD_IDS:
        retriever.accept_suggestion(doc_id)
    assert set(doc_ids(cached(retriever.invoke(POD_QUESTION)))) == set(AWKWARD_IDS)
    assert outside(tmp_path, tmp_path / "wiki") == set()
    assert retriever.forget_user().files == len(AWKWARD_IDS)
    assert list((tmp_path / "wiki").iterdir()) == []
