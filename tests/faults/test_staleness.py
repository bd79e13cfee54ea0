"""A saved copy does not outlive a change, a deletion or a withdrawn permission of its source unnoticed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import TableEmbeddings, document
from langchain_core.documents import Document
from places import PlacedWorld
from scenarios import POD_QUESTION, World, cached, doc_ids, texts

from rag_wiki import DocumentState, ProvenanceBlock, RagWikiRetriever
from rag_wiki.errors import ContentNotFoundError, RagWikiError, UnknownDocumentError

OLD = "Notice is 10 days."
NEW = "Notice is 20 days."
OTHER = "Nobody need give notice."
QUESTION = "how long is notice?"
ASIDE = "what about tax?"


def notices() -> TableEmbeddings:
    """Everything about notice in one direction."""
    return TableEmbeddings({"otice": [1, 0, 0]})


@pytest.fixture
def placed(world: PlacedWorld) -> PlacedWorld:
    """A world in each place, whose model knows about notice."""
    world.embeddings = notices()
    return world


@pytest.fixture
def placed_and_lasting(lasting_world: PlacedWorld) -> PlacedWorld:
    """The same, where the data outlives a process."""
    lasting_world.embeddings = notices()
    return lasting_world


def plain_world() -> World:
    """The same in memory."""
    return World(embeddings=notices())


def shown(text: str, **metadata: Any) -> Document:
    """The document as its source has it."""
    return document("notice", text, **metadata)


def stale(provenance: ProvenanceBlock) -> list[tuple[bool, bool]]:
    """Of each source: whether it is from the copy, and whether the copy is out of date."""
    return [(source.from_cache, source.stale) for source in provenance.sources]


def reasons(provenance: ProvenanceBlock) -> list[tuple[str, str]]:
    """The copies that were kept back, and why."""
    return [(kept.doc_id, kept.reason) for kept in provenance.withheld]


def holding(folder: Path | None, text: str) -> list[Path]:
    """The files below a folder that hold a text."""
    files = folder.rglob("*") if folder is not None else ()
    return [path for path in files if path.is_file() and text.encode() in path.read_bytes()]


def assert_gone(world: PlacedWorld, retriever: RagWikiRetriever, text: str, user: str = "ada") -> None:
    """No chunk, file, content or answer of the user has the text, here or in a process that opens the data now."""
    assert holding(world.folder, text) == []
    for opened in (retriever, world.reopened().retriever(None)):
        assert text not in texts(opened.invoke(QUESTION, user_id=user))
        assert text not in [chunk["text"] for chunk in opened.chunk_store.load_chunks(user, "notice")]
        record = opened.state_store.get(user, "notice")
        assert text not in ((record.full_content if record else None) or "")


# -- changed


def test_a_text_that_changed_is_not_served_as_it_was(placed: PlacedWorld) -> None:
    """When the source shows another text, that is served, the copy is kept back for good, and a refresh replaces it."""
    retriever = placed.retriever()
    placed.save(retriever, "notice", OLD)
    placed.shows(shown(NEW))
    found, provenance = retriever.invoke_with_provenance(QUESTION)
    assert (texts(found), stale(provenance), reasons(provenance)) == ([NEW], [(False, True)], [("notice", "stale")])
    placed.shows()
    for opened in (retriever, placed.reopened().retriever()):
        found, provenance = opened.invoke_with_provenance(QUESTION)
        assert (found, opened.stats().stale, placed.record("notice").stale_since is not None) == ([], 1, True)
    retriever.refresh("notice")
    found, provenance = retriever.invoke_with_provenance(QUESTION)
    assert (texts(cached(found)), stale(provenance), reasons(provenance)) == ([NEW], [(True, False)], [])
    assert retriever.stats().stale == 0
    assert_gone(placed, retriever, OLD)


REFRESHES: dict[str, Callable[[RagWikiRetriever], Awaitable[Any]]] = {
    "with the text": lambda retriever: retriever.arefresh("notice", full_content=NEW),
    "saved anew": lambda retriever: retriever.aaccept_suggestion("notice", full_content=NEW),
    "by the loader": lambda retriever: retriever.arefresh("notice"),
}


@pytest.mark.parametrize("way", REFRESHES)
async def test_an_application_may_tell_of_a_change(placed: PlacedWorld, way: str) -> None:
    """An application that knows of a change replaces the copy before any search met the new text."""

    def load(_record: object) -> str:
        return NEW

    retriever = placed.retriever(document_loader=load)
    placed.save(retriever, "notice", OLD)
    await REFRESHES[way](retriever)
    found, provenance = await retriever.ainvoke_with_provenance(QUESTION)
    assert (texts(cached(found)), stale(provenance)) == ([NEW], [(True, False)])
    placed.shows(shown(NEW))
    found, provenance = await retriever.ainvoke_with_provenance(QUESTION)
    assert (texts(cached(found)), stale(provenance)) == ([NEW], [(True, False)])
    assert_gone(placed, retriever, OLD)


def test_a_change_back_is_a_change_too(placed: PlacedWorld) -> None:
    """A copy of the new text is out of date when its source goes back to the old one."""
    retriever = placed.retriever()
    placed.save(retriever, "notice", OLD)
    placed.shows(shown(NEW))
    retriever.invoke(QUESTION)
    retriever.refresh("notice")
    placed.shows(shown(OLD))
    found, provenance = retriever.invoke_with_provenance(QUESTION)
    assert (texts(found), stale(provenance)) == ([OLD], [(False, True)])


@pytest.mark.parametrize("options", [{}, {"pin": True}, {"full": True}, {"words": True}, {"focused": True}], ids=str)
def test_however_a_copy_is_served_it_is_kept_back(options: dict[str, bool]) -> None:
    """Pinned, answering with its whole text, or matched by words: a copy that is out of date is not served."""
    world = plain_world()
    retriever = world.retriever()
    world.save(retriever, "notice", OLD)
    if options.get("pin"):
        retriever.force_pin("notice")
    if options.get("full"):
        retriever.set_always_full_doc("notice")
    if options.get("words"):
        world.embeddings = None
        retriever = world.retriever()
    if options.get("focused"):
        retriever = world.retriever(context="focused")
    question = "notice of 10 days"
    assert texts(cached(retriever.invoke(question))) == [OLD]
    world.shows(shown(NEW))
    found, provenance = retriever.invoke_with_provenance(question)
    assert (texts(found), stale(provenance)) == ([NEW], [(False, True)])
    world.shows(document("tax", "Tax is due."))
    assert doc_ids(retriever.invoke(question)) == ["tax"]


def test_a_source_that_is_not_asked_cannot_tell(placed: PlacedWorld) -> None:
    """With `global_search="on_miss"` nobody sees a change while copies answer; provenance says nobody was asked."""
    # The setting promises to leave the source in peace; `refresh` and `access_check` are what keeps such copies right.
    retriever = placed.retriever(global_search="on_miss")
    placed.save(retriever, "notice", OLD)
    placed.shows(shown(NEW))
    found, provenance = retriever.invoke_with_provenance(QUESTION)
    assert (texts(found), provenance.asked) == ([OLD], False)
    retriever.refresh("notice", full_content=NEW)
    assert texts(retriever.invoke(QUESTION)) == [NEW]


def test_each_users_copy_is_judged_for_itself(placed: PlacedWorld) -> None:
    """Alice's refresh makes neither bob's old copy right, nor hers wrong."""
    retriever = placed.retriever(None)
    for user in ("alice", "bob"):
        placed.save(retriever, "notice", OLD, user_id=user)
    retriever.refresh("notice", full_content=NEW, user_id="alice")
    placed.shows(shown(NEW))
    told = {user: retriever.invoke_with_provenance(QUESTION, user_id=user) for user in ("alice", "bob")}
    assert {user: (texts(found), stale(said)) for user, (found, said) in told.items()} == {
        "alice": ([NEW], [(True, False)]),
        "bob": ([NEW], [(False, True)]),
    }


def test_a_version_tells_what_the_text_does_not() -> None:
    """With `version_key`, another version of an equal text is a change, and a shorter text of it is no part of it."""
    world = plain_world()
    retriever = world.retriever(version_key="version")
    world.save(retriever, "notice", f"{OLD} Managers: 30 days' notice.", version=1)
    world.shows(shown(OLD, version=2))
    found, provenance = retriever.invoke_with_provenance(QUESTION)
    assert (texts(found), stale(provenance)) == ([OLD], [(False, True)])
    retriever.refresh("notice")
    assert texts(cached(retriever.invoke(QUESTION))) == [OLD]


def test_a_refresh_with_a_text_is_not_of_the_version_before() -> None:
    """A copy that was brought up to date by hand answers when the source shows the same text with its new version."""
    world = plain_world()
    retriever = world.retriever(version_key="version")
    world.save(retriever, "notice", OLD, version=1)
    retriever.refresh("notice", full_content=NEW)
    world.shows(shown(NEW, version=2))
    found, provenance = retriever.invoke_with_provenance(QUESTION)
    assert (texts(cached(found)), stale(provenance)) == ([NEW], [(True, False)])


@pytest.mark.parametrize(
    ("saved", "now"),
    [("Notice: 110 days", "10 days"), ("10 days' notice", "10 day"), ("Notice is unpaid", "paid")],
)
def test_a_part_of_a_word_is_no_part_of_the_text(saved: str, now: str) -> None:
    """A text that the copy holds only across the middle of its words is another text."""
    world = plain_world()
    retriever = world.retriever()
    world.save(retriever, "notice", saved)
    world.shows(shown(now))
    found, provenance = retriever.invoke_with_provenance(QUESTION)
    assert (texts(found), stale(provenance)) == ([now], [(False, True)])


# -- changed before it was saved


@pytest.mark.parametrize(
    "told",
    [
        pytest.param({}, id="by nothing"),
        pytest.param({"chunk_index": 0}, id="by number"),
        pytest.param({"version": True}, id="by version"),
    ],
)
def test_what_changed_before_it_was_saved_is_saved_as_it_is_now(told: dict[str, Any]) -> None:
    """A document that changed while its fetches were counted is saved without the text that it had before."""
    world = plain_world()
    retriever = world.retriever(version_key="version")
    for text in (OLD, NEW, NEW):
        world.shows(shown(text, **(told if "version" not in told else {"version": text})))
        retriever.invoke(QUESTION)
    saved = retriever.accept_suggestion("notice")
    world.shows()
    assert (saved.full_content, texts(retriever.invoke(QUESTION))) == (NEW, [NEW])


def test_a_document_that_became_shorter_is_saved_without_its_old_end() -> None:
    """Where a version tells, pieces of an earlier version are not saved beside those of the newest."""
    world = plain_world()
    retriever = world.retriever(version_key="version")
    world.shows(shown(OLD, version=1, chunk_index=0), shown("Old end of notice.", version=1, chunk_index=1))
    retriever.invoke(QUESTION)
    world.shows(shown(NEW, version=2, chunk_index=0))
    retriever.invoke(QUESTION)
    saved = retriever.accept_suggestion("notice")
    assert (saved.full_content, saved.source_version) == (NEW, "2")


def test_a_change_back_before_saving_is_followed() -> None:
    """A document whose source went back to its old text before it was saved, is saved with that text."""
    world = plain_world()
    retriever = world.retriever()
    for text in (OLD, NEW, OLD):
        world.shows(shown(text, chunk_index=0))
        retriever.invoke(QUESTION)
    assert retriever.accept_suggestion("notice").full_content == OLD


def test_a_change_back_after_saving_is_seen() -> None:
    """A text that was retrieved once, but is not in the copy, tells that the copy is out of date."""
    world = plain_world()
    retriever = world.retriever()
    for text in (OLD, NEW, NEW):
        world.shows(shown(text, chunk_index=0))
        retriever.invoke(QUESTION)
    assert retriever.accept_suggestion("notice").full_content == NEW
    world.shows(shown(OLD, chunk_index=0))
    found, provenance = retriever.invoke_with_provenance(QUESTION)
    assert (texts(found), stale(provenance)) == ([OLD], [(False, True)])


def test_a_part_that_the_copy_lacks_stays_in_the_answer(placed: PlacedWorld) -> None:
    """A part that an incomplete copy lacks is served beside it again and again."""
    retriever = placed.retriever()
    placed.shows(shown(OLD, chunk_index=0))
    retriever.invoke(QUESTION)
    retriever.accept_suggestion("notice")
    placed.shows(shown(OTHER, chunk_index=1))
    for _ in range(3):
        found, provenance = retriever.invoke_with_provenance(QUESTION)
        assert (texts(found), stale(provenance)) == ([OLD, OTHER], [(True, False), (False, False)])


def test_a_part_that_the_copy_lacks_stays_in_the_answer_after_a_pin() -> None:
    """A part that an incomplete copy lacks is served as before when the copy was pinned after it was first seen."""
    world = plain_world()
    retriever = world.retriever()
    world.shows(shown(OLD, chunk_index=0))
    retriever.invoke(QUESTION)
    retriever.accept_suggestion("notice")
    world.shows(shown(OTHER, chunk_index=1))
    retriever.invoke(QUESTION)
    retriever.force_pin("notice")
    assert texts(world.retriever().invoke(QUESTION)) == [OLD, OTHER]


def test_a_part_that_the_copy_lacks_stays_in_the_answer_after_a_restart(placed_and_lasting: PlacedWorld) -> None:
    """A part that an incomplete copy lacks is served by a process that opens the data after it was first seen."""
    world = placed_and_lasting
    retriever = world.retriever()
    world.shows(shown(OLD, chunk_index=0))
    retriever.invoke(QUESTION)
    retriever.accept_suggestion("notice")
    world.shows(shown(OTHER, chunk_index=1))
    assert texts(retriever.invoke(QUESTION)) == [OLD, OTHER]
    assert texts(world.reopened().retriever().invoke(QUESTION)) == [OLD, OTHER]


def test_a_refresh_after_two_changes_holds_the_last_text_only() -> None:
    """A copy that is refreshed from what was retrieved is not made of every text that was retrieved meanwhile."""
    world = plain_world()
    retriever = world.retriever()
    world.save(retriever, "notice", OLD)
    for text in (NEW, "Notice is 30 days."):
        world.shows(shown(text))
        retriever.invoke(QUESTION)
    assert retriever.refresh("notice").full_content == "Notice is 30 days."


# -- deleted, and its id used again


def test_a_document_deleted_at_its_source_goes_from_every_user(placed: PlacedWorld) -> None:
    """An application that is told of a deletion removes copies, contents and retrieved texts of all its users."""
    retriever = placed.retriever(None)
    saved, met = ("alice", "bob"), "carol"
    for user in saved:
        placed.save(retriever, "notice", OLD, user_id=user)
    placed.shows(shown(OLD))
    retriever.invoke(QUESTION, user_id=met)
    placed.shows()
    placed.save(retriever, "tax", "Notice the tax.", user_id="bob")
    # Who has saved something the store knows; whom the application serves besides, it knows itself.
    assert placed.store.list_active_users() == ["alice", "bob"]
    for user in (*placed.store.list_active_users(), met, "dora"):
        try:
            retriever.force_remove("notice", user_id=user)
        except UnknownDocumentError:
            assert user == "dora"
    for user in (*saved, met):
        assert_gone(placed, retriever, OLD, user)
        assert placed.store.retrieved_texts(user, "notice") == []
        assert retriever.documents(DocumentState.CLAIMED, user_id=user) == (
            [] if user != "bob" else [placed.store.list_by_state("bob", [DocumentState.CLAIMED], content=False)[0]]
        )
        with pytest.raises(RagWikiError):
            retriever.refresh("notice", user_id=user)
        with pytest.raises(ContentNotFoundError):
            retriever.force_pin("notice", user_id=user)
    assert texts(cached(retriever.invoke(QUESTION, user_id="bob"))) == ["Notice the tax."]


@pytest.mark.parametrize("numbered", [False, True], ids=["content given", "retrieved by number"])
def test_an_id_that_is_used_again_is_another_document(placed: PlacedWorld, numbered: bool) -> None:
    """A new document under the id of a saved one: the old chunks answer no more, and a refresh leaves none of them."""
    # A copy made of retrieved pieces without numbers may lack a part, so there a text that is like none of it stands
    # beside the copy; a `version_key` or numbers tell the two cases apart.
    told = {"chunk_index": 0} if numbered else {}
    retriever = placed.retriever()
    placed.shows(shown(OLD, **told))
    retriever.invoke("an introduction")
    retriever.accept_suggestion("notice", full_content=None if numbered else OLD)
    placed.shows(shown(OTHER, **told))
    found, provenance = retriever.invoke_with_provenance(QUESTION)
    assert (texts(found), stale(provenance)) == ([OTHER], [(False, True)])
    placed.shows()
    assert placed.reopened().retriever().invoke(QUESTION) == []
    retriever.refresh("notice")
    assert [chunk["text"] for chunk in retriever.chunk_store.load_chunks("ada", "notice")] == [OTHER]
    assert texts(cached(retriever.invoke(QUESTION))) == [OTHER]
    assert_gone(placed, retriever, OLD)


# -- no longer permitted


@pytest.mark.parametrize("options", [{}, {"pin": True}, {"full": True}, {"words": True}, {"on_miss": True}], ids=str)
async def test_a_permission_is_asked_for_at_every_call(options: dict[str, bool]) -> None:
    """A copy is served while access is granted, not after it was withdrawn, and again when it is given back."""
    permitted = {("ada", "notice")}
    asked: list[tuple[str, str]] = []

    def check(user_id: str, doc_id: str) -> bool:
        asked.append((user_id, doc_id))
        return (user_id, doc_id) in permitted

    world = plain_world()
    world.save(world.retriever(), "notice", OLD)
    if options.get("pin"):
        world.retriever().force_pin("notice")
    if options.get("full"):
        world.retriever().set_always_full_doc("notice")
    if options.get("words"):
        world.embeddings = None
    search = "on_miss" if options.get("on_miss") else "always"
    retriever = world.retriever(access_check=check, global_search=search)
    question = "notice of 10 days"
    assert texts(retriever.invoke(question)) == [OLD]
    permitted.clear()
    for found, provenance in (
        retriever.invoke_with_provenance(question),
        await retriever.ainvoke_with_provenance(question),
    ):
        assert (found, provenance.sources, reasons(provenance)) == ([], (), [("notice", "access denied")])
        assert OLD not in str(provenance.to_dict())
    assert retriever.batch([question, question]) == [[], []]
    permitted.add(("ada", "notice"))
    assert texts(await retriever.ainvoke(question)) == [OLD]
    assert set(asked) == {("ada", "notice")}
    assert len(asked) == 6


def test_a_permission_that_nobody_can_confirm_is_none() -> None:
    """Where the check fails, the copy is kept back, the source's results are served, and provenance says so."""

    def check(_user_id: str, _doc_id: str) -> bool:
        raise ConnectionError("the directory is down")

    world = plain_world()
    world.save(world.retriever(), "notice", OLD)
    world.shows(document("tax", "Tax is due."))
    found, provenance = world.retriever(access_check=check).invoke_with_provenance(QUESTION)
    assert (doc_ids(found), reasons(provenance)) == (["tax"], [("notice", "access could not be checked")])
    assert any("ConnectionError" in said for said in provenance.degraded)


def test_what_the_source_shows_the_source_permits(placed: PlacedWorld) -> None:
    """A check keeps back the saved copy; what the source itself finds for this user it decides itself."""
    placed.save(placed.retriever(), "notice", OLD)
    placed.shows(shown(OLD))
    found, provenance = placed.retriever(access_check=lambda _user, _doc: False).invoke_with_provenance(QUESTION)
    assert (texts(found), cached(found)) == ([OLD], [])
    assert reasons(provenance) == [("notice", "access denied")]
    assert texts(cached(placed.reopened().retriever().invoke(QUESTION))) == [OLD]


def test_a_character_written_as_two_surrogates_is_no_change() -> None:
    """A copy is current when the source writes a character as two halves, which storing joins."""
    world = World()
    retriever = world.retriever()
    text = "Logs \ud83d\ude00 are rotated."
    world.shows(document("logs", text))
    for _ in range(3):
        retriever.invoke(POD_QUESTION)
    retriever.accept_suggestion("logs")
    provenance = retriever.invoke_with_provenance(POD_QUESTION).provenance
    assert provenance.withheld == ()
    assert retriever.documents()[0].stale_since is None
