"""Changing the store: users go from one to another as they are, and go on there as if nothing had happened."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from helpers import document
from scenarios import OTHER_QUESTION, POD_QUESTION, PODS, World

from rag_wiki import (
    ConfigurationError,
    DocumentState,
    MemoryStateStore,
    StateStore,
    UserDocRecord,
)
from rag_wiki.errors import InvalidUserError, StorageError
from rag_wiki.migrate import copy_users
from rag_wiki.migrate.__main__ import main
from rag_wiki.migrate.carry import MismatchError
from rag_wiki.storage.chunk_store import ChunkStore
from rag_wiki.storage.codec import StoredChange, StoredDocument, StoredUser
from rag_wiki.storage.records import UserChange

PAIRS = [
    ("memory", "sqlite-file"),
    ("sqlite-file", "postgres"),
    ("sqlite-file", "valkey"),
    ("postgres", "valkey"),
    ("postgres", "memory"),
    ("valkey", "sqlite-file"),
    ("valkey-decoding", "postgres"),
]
IMAGES = "Images are built once and kept in a registry."
TAX = "Tax is due in spring."


def lived_in(store: StateStore, **options: Any) -> World:
    """A world with two users: what ada saved, pinned, removed and declined; and bob, who met it all once."""
    world = World(store=store)
    world.source.documents = [
        document("pods", PODS, author="Ada"),
        document("images", IMAGES),
        document("tax", TAX),
    ]
    ada = world.retriever(fetch_threshold=2, **options)
    for _ in range(3):
        ada.invoke(OTHER_QUESTION)
        world.clock.turn(hours=1)
    ada.accept_suggestion("pods")
    ada.accept_suggestion("images")
    ada.force_pin("images")
    ada.decline_suggestion("tax")
    ada.invoke(POD_QUESTION)
    ada.thumbs_up("pods")
    world.source.documents.append(document("gone", "Left alone."))
    for _ in range(2):
        ada.invoke(POD_QUESTION)
        world.clock.turn(days=1)
    ada.accept_suggestion("gone")
    ada.force_remove("gone")
    ada.run_decay()
    world.retriever("bob", **options).invoke(OTHER_QUESTION)
    return world


def told(store: StateStore, chunks: ChunkStore, user_id: str) -> dict[str, object]:
    """All that a store tells of a user, but for the ids of copies, which are each place's own."""
    records = store.list_by_state(user_id)
    return {
        "records": [replace(record, copy_id=record.copy_id and "a copy") for record in records],
        "why": [record.why for record in records],
        "history": {record.doc_id: store.history(user_id, record.doc_id) for record in records},
        "texts": {record.doc_id: store.retrieved_texts(user_id, record.doc_id) for record in records},
        "chunks": {record.doc_id: chunks.load_chunks(user_id, record.doc_id) for record in records},
        "clocks": store.begin_query(user_id, 100, 100).clocks,
        "saved": store.saved_count(user_id),
    }


@pytest.mark.parametrize(("old", "new"), PAIRS, ids=["-to-".join(pair) for pair in PAIRS])
def test_everybody_is_there_and_goes_on(make_store: Callable[[str], StateStore], old: str, new: str) -> None:
    """Records, history, texts, chunks, hits and counters are equal, and so is the answer to the next question."""
    world = lived_in(make_store(old))
    target = make_store(new)
    before = {user: told(world.store, world.store.chunk_store, user) for user in ("ada", "bob")}

    report = copy_users(world.store, target)

    assert (report.users, report.found, report.verified, report.written) == (2, 8, 8, 8)
    assert report.brought == {"CLAIMED": 1, "PINNED": 1, "SURFACED": 5, "DEMOTED": 1}
    assert (report.is_whole, report.kept, report.lost) == (True, [], [])
    for user in ("ada", "bob"):
        assert told(target, target.chunk_store, user) == before[user]
        assert told(world.store, world.store.chunk_store, user) == before[user]
    answers = []
    for store in (world.store, target):
        retriever = replace(world, store=store).retriever(fetch_threshold=2)
        documents, provenance = retriever.invoke_with_provenance(POD_QUESTION)
        answers.append((documents, provenance.sources, provenance.mode, provenance.degraded))
    assert answers[0] == answers[1]
    assert answers[1][1][0].from_cache
    assert told(target, target.chunk_store, "ada") == told(world.store, world.store.chunk_store, "ada")


def test_chunks_in_folders_come_along(make_store: Callable[[str], StateStore], tmp_path: Path) -> None:
    """`wiki_save_dir` on either side; the readable copies are there, too."""
    world = lived_in(make_store("sqlite-file"), wiki_save_dir=tmp_path / "old")
    target = make_store("valkey")

    report = copy_users(world.store, target, old_chunks=tmp_path / "old", new_chunks=tmp_path / "new")

    assert (report.chunks, report.verified) == (2, 8)
    old, new = ChunkStore(tmp_path / "old"), ChunkStore(tmp_path / "new")
    assert told(target, new, "ada") == told(world.store, old, "ada")
    readable = {path.name: path.read_text() for path in (tmp_path / "old").rglob("*.md")}
    assert readable
    assert {path.name: path.read_text() for path in (tmp_path / "new").rglob("*.md")} == readable


class Failing(MemoryStateStore):
    """Fails at a change of its choice, counted from one."""

    fails_at = 0

    def _change(
        self,
        user_key: str,
        doc_keys: Sequence[str],
        step: Callable[[StoredUser, Mapping[str, StoredDocument]], StoredChange],
    ) -> None:
        self.fails_at -= 1
        if self.fails_at == 0:
            msg = "the disk is full"
            raise OSError(msg)
        super()._change(user_key, doc_keys, step)


def test_old_and_new_chunks_may_be_in_one_folder(make_store: Callable[[str], StateStore], tmp_path: Path) -> None:
    """`wiki_save_dir` stays and the state moves: the old store's copies and hits are as they were."""
    world = lived_in(make_store("sqlite-file"), wiki_save_dir=tmp_path / "wiki")
    before = told(world.store, ChunkStore(tmp_path / "wiki"), "ada")
    copies = {record.doc_id: record.copy_id for record in world.store.list_for_decay("ada")}
    target = MemoryStateStore()

    report = copy_users(world.store, target, old_chunks=tmp_path / "wiki", new_chunks=tmp_path / "wiki")

    chunks = ChunkStore(tmp_path / "wiki")
    assert (report.verified, report.is_whole) == (8, True)
    assert told(target, chunks, "ada") == before
    for record in world.store.list_for_decay("ada"):
        assert chunks.load_copy("ada", record.doc_id, copies[record.doc_id] or "") is not None
    hits = chunks.place.hits("ada", "pods", copies["pods"] or "")
    assert {index: found.count for index, found in hits.items()} == {0: 3}


def test_chunks_that_were_forgotten_come_with_the_next_run(
    make_store: Callable[[str], StateStore], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without the folder it is said that chunks are missing, and the run is not whole; with it they are added."""
    world = lived_in(make_store("sqlite-file"), wiki_save_dir=tmp_path / "wiki")
    old, new = f"sqlite:///{tmp_path / 'state.db'}", f"sqlite:///{tmp_path / 'new.db'}"
    assert main([old, new, "--this-release", "--quiet"]) == 3
    assert "name it (old_chunks, --chunks)" in capsys.readouterr().out

    report = copy_users(old, new, old_chunks=tmp_path / "wiki")

    assert (report.completed, report.there, report.chunks, report.is_whole) == (2, 6, 2, True)
    from rag_wiki.storage.sqlite import SQLiteStateStore

    with SQLiteStateStore(new) as target:
        expected = told(world.store, ChunkStore(tmp_path / "wiki"), "ada")
        assert told(target, target.chunk_store, "ada") == expected


def test_a_user_whom_nobody_knows_is_named() -> None:
    """Who is asked for by name, and not there, is told of; the others come."""
    target = MemoryStateStore()
    report = copy_users(lived_in(MemoryStateStore()).store, target, users=["bob", "Bob"])
    assert [(note.user_id, note.text) for note in report.skipped] == [
        ("Bob", "the old place knows nothing of this user")
    ]
    assert (report.users, report.is_whole, target.all_users()) == (1, False, (["bob"], {}))


class Terse(MemoryStateStore):
    """Keeps little history."""

    history_limit = 2


def test_of_a_long_history_the_newest_part_comes() -> None:
    """The new store keeps as much as it keeps of anybody's; a second run finds nothing to do."""
    world, target = lived_in(MemoryStateStore()), Terse()
    for _ in range(2):
        report = copy_users(world.store, target)
        assert report.is_whole
    assert (report.there, report.kept) == (8, [])
    assert target.history("ada", "images") == world.store.history("ada", "images")[-2:]


class Forgetting(MemoryStateStore):
    """Forgets a user right after the first change of their documents."""

    has_forgotten = False

    def change(self, user_id: str, *rest: Any, **more: Any) -> UserChange:
        changed = super().change(user_id, *rest, **more)
        if user_id == "ada" and not self.has_forgotten:
            self.has_forgotten = True
            self.forget_user("ada")
        return changed


def test_who_is_forgotten_meanwhile_does_not_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody forgets the user in the new place between two pages: the others of their documents stay away."""
    monkeypatch.setattr("rag_wiki.migrate.copying._AT_ONCE", 1)
    world, target = lived_in(MemoryStateStore()), Forgetting()

    report = copy_users(world.store, target)

    assert target.all_users() == (["bob"], {})
    assert [note.doc_id for note in report.changed_meanwhile] == ["gone"]
    assert [note.doc_id for note in report.kept] == ["images", "pods", "tax"]


def test_who_never_asked_does_not_come_back_either(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counters at zero tell nothing of who was forgotten meanwhile: the user's revision does."""
    monkeypatch.setattr("rag_wiki.migrate.copying._AT_ONCE", 1)
    store, target = MemoryStateStore(), Forgetting()
    for doc_id in ("one", "two"):
        store.upsert(UserDocRecord("ada", doc_id, doc_id, doc_id))
    copy_users(store, target)
    assert target.all_users() == ([], {})


def test_counters_that_can_not_be_read_stop_nobody_else(
    make_store: Callable[[str], StateStore], tmp_path: Path
) -> None:
    """A user whose counters are torn is named, and the others are copied."""
    lived_in(make_store("sqlite-file"))
    with closing(sqlite3.connect(tmp_path / "state.db")) as connection:
        connection.execute("UPDATE rag_wiki_users SET queries = 'torn' WHERE user_key = 'ada'")
        connection.commit()
    target = MemoryStateStore()

    report = copy_users(make_store("sqlite-file"), target)

    assert [(note.user_id, note.doc_id) for note in report.skipped] == [("ada", "*")]
    assert target.all_users() == (["bob"], {})


@pytest.mark.parametrize("at", [1, 2, 3, 4, 6])
def test_what_broke_goes_on_where_it_was(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """A run that broke in the middle left whole documents; the next one copies the others, and all is as it was."""
    monkeypatch.setattr("rag_wiki.migrate.copying._AT_ONCE", 1)
    world, target = lived_in(MemoryStateStore()), Failing()
    target.fails_at = at
    with pytest.raises(StorageError, match="user '(ada|bob)' could not be copied from .*: the disk is full") as broke:
        copy_users(world.store, target)
    assert isinstance(broke.value.__cause__, OSError)
    done = [record for user in ("ada", "bob") for record in target.list_by_state(user)]
    assert len(done) == at - 1
    expected = [record for user in ("ada", "bob") for record in world.store.list_by_state(user)][: at - 1]
    assert [record.doc_id for record in done] == [record.doc_id for record in expected]

    report = copy_users(world.store, target)

    assert (report.written, report.there, report.is_whole) == (8 - len(done), len(done), True)
    for user in ("ada", "bob"):
        assert told(target, target.chunk_store, user) == told(world.store, world.store.chunk_store, user)


class Killed(MemoryStateStore):
    """A place to which nothing can be written any more after so many changes, by whomever: the process is gone."""

    changes_left = 3

    def _change(self, *arguments: Any) -> None:
        self._live()
        super()._change(*arguments)
        self.changes_left -= 1

    def _swap_note(self, *arguments: Any) -> bool:
        self._live()
        return super()._swap_note(*arguments)

    def _live(self) -> None:
        if self.changes_left <= 0 and not self.changes_left < -100:
            raise KeyboardInterrupt


def test_who_is_forgotten_after_a_kill_stays_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a run brought is noted as it goes: after a kill, too, what is removed there does not come back."""
    monkeypatch.setattr("rag_wiki.migrate.copying._AT_ONCE", 1)
    world, target = lived_in(MemoryStateStore()), Killed()
    with pytest.raises(KeyboardInterrupt):
        copy_users(world.store, target)
    assert [record.doc_id for record in target.list_by_state("ada")] == ["gone", "images", "pods"]
    target.changes_left = -1000
    target.forget_user("ada")

    report = copy_users(world.store, target)

    # Of the last one a kill at that very moment leaves no note.
    assert {note.doc_id for note in report.removed} >= {"gone", "images"}
    assert {record.doc_id for record in target.list_by_state("ada")} <= {"pods", "tax"}


def test_many_documents_are_noted_in_several_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many were brought, each page writes little; and each of them is known."""
    monkeypatch.setattr("rag_wiki.migrate.brought._MOST_IN_A_NOTE", 3)
    monkeypatch.setattr("rag_wiki.migrate.copying._AT_ONCE", 2)
    world, target = lived_in(MemoryStateStore()), MemoryStateStore()
    assert copy_users(world.store, target).written == 8
    for user in ("ada", "bob"):
        target.forget_user(user)
    report = copy_users(world.store, target)
    assert (report.written, len(report.removed)) == (0, 8)


def test_one_server_by_two_names_is_one_place(
    make_store: Callable[[str], StateStore], valkey_port: int, tmp_path: Path
) -> None:
    """Whatever a server is called, what is written there is read there: it is told, and nothing changes."""
    store, chunks = make_store("valkey"), ChunkStore(tmp_path / "wiki")
    lived_in(store, chunk_store=chunks)
    before = told(store, chunks, "ada")
    url = f"redis://127.0.0.1:{valkey_port}/0"
    for one, other in ((url, f"redis://localhost:{valkey_port}/0"), (url, store), (store, f"{url}?socket_timeout=5")):
        with pytest.raises(ConfigurationError, match="is the old and the new place"):
            copy_users(one, other, old_chunks=tmp_path / "wiki")
    assert told(store, chunks, "ada") == before


def test_a_server_with_nobody_is_the_wrong_one(valkey_port: int, tmp_path: Path) -> None:
    """Another number of a Redis database holds nobody: that is no success."""
    with pytest.raises(ConfigurationError, match="nobody is in redis://127.0.0.1:.*/7: is it the right server"):
        copy_users(f"redis://127.0.0.1:{valkey_port}/7", tmp_path / "new.db")


def test_a_server_that_is_down_is_told_in_our_words(tmp_path: Path) -> None:
    """The old place, like the new one, is named with what is wrong."""
    with pytest.raises(StorageError, match="redis://127.0.0.1:1/0 can't be used"):
        copy_users("redis://127.0.0.1:1/0", tmp_path / "new.db")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("folder", ["", "  ", 5])
@pytest.mark.parametrize("name", ["old_chunks", "new_chunks"])
def test_a_folder_has_a_name(name: str, folder: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A blank one (a variable that was not set) is not the working directory."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError, match="chunks are in a folder that has a name"):
        copy_users(lived_in(MemoryStateStore()).store, MemoryStateStore(), **{name: folder})
    assert list(tmp_path.iterdir()) == []


def test_one_text_is_not_several_users() -> None:
    """Its letters are nobody's ids."""
    target = MemoryStateStore()
    with pytest.raises(ConfigurationError, match=r"give \['ada'\]"):
        copy_users(lived_in(MemoryStateStore()).store, target, users="ada")
    assert target.all_users() == ([], {})


def test_running_again_changes_nothing(state_store: StateStore) -> None:
    """All of it is there already."""
    world = lived_in(MemoryStateStore())
    copy_users(world.store, state_store)
    before = told(state_store, state_store.chunk_store, "ada")

    report = copy_users(world.store, state_store)

    assert (report.found, report.there, report.written) == (8, 8, 0)
    assert told(state_store, state_store.chunk_store, "ada") == before


def test_who_was_active_there_is_left_alone(state_store: StateStore) -> None:
    """A user with counters of their own in the new place keeps them; the others come."""
    world = lived_in(MemoryStateStore())
    there = replace(world, store=state_store)
    there.retriever().invoke(POD_QUESTION)
    before = told(state_store, state_store.chunk_store, "ada")

    report = copy_users(world.store, state_store)

    assert told(state_store, state_store.chunk_store, "ada") == before
    assert [(note.user_id, note.doc_id) for note in report.kept] == [("ada", "*")]
    assert "forget_user" in report.kept[0].text
    # She counts as found, and what she has there is not what the old place has.
    assert (report.users, report.found, report.written, report.is_whole) == (2, 8, 4, False)
    assert told(state_store, state_store.chunk_store, "bob") == told(world.store, world.store.chunk_store, "bob")


def test_what_was_removed_there_stays_away(state_store: StateStore) -> None:
    """Who was forgotten, and what was purged, does not come back with the next run, unless it is asked for."""
    world = lived_in(MemoryStateStore())
    copy_users(world.store, state_store)
    state_store.forget_user("bob")
    state_store.purge("images")

    report = copy_users(world.store, state_store)

    assert report.written == 0
    assert {(note.user_id, note.doc_id) for note in report.removed} == {
        ("ada", "images"),
        *(("bob", doc_id) for doc_id in ("gone", "images", "pods", "tax")),
    }
    assert state_store.all_users() == (["ada"], {})
    again = copy_users(world.store, state_store, users=["bob"], bring_back=True)
    assert (again.users, again.written) == (1, 4)
    assert told(state_store, state_store.chunk_store, "bob") == told(world.store, world.store.chunk_store, "bob")


def test_a_dry_run_only_tells(tmp_path: Path) -> None:
    """The figures of what would be done; no file is made."""
    world = lived_in(MemoryStateStore())
    target = MemoryStateStore()

    report = copy_users(world.store, tmp_path / "new.db", dry_run=True)
    assert (report.written, report.chunks, report.verified) == (8, 2, 0)
    assert list(tmp_path.iterdir()) == []
    copy_users(world.store, target, dry_run=True)
    assert target.all_users() == ([], {})


def test_what_can_not_be_read_costs_itself_alone(make_store: Callable[[str], StateStore], tmp_path: Path) -> None:
    """A record and a copy that are torn are named; all the others come over."""
    lived_in(make_store("sqlite-file"))
    with closing(sqlite3.connect(tmp_path / "state.db")) as connection:
        connection.execute("UPDATE rag_wiki_documents SET payload = '{' WHERE doc_key = 'tax' AND user_key = 'ada'")
        connection.execute("UPDATE rag_wiki_chunks SET header = '{' WHERE doc_key = 'pods'")
        connection.commit()
    target = MemoryStateStore()

    report = copy_users(make_store("sqlite-file"), target)

    assert not report.is_whole
    assert [(note.user_id, note.doc_id) for note in report.skipped] == [("ada", "pods"), ("ada", "*")]
    assert "'tax'" in report.skipped[1].text
    assert [record.doc_id for record in target.list_by_state("ada")] == ["gone", "images"]
    assert len(target.list_by_state("bob")) == 4


class Renaming(MemoryStateStore):
    """Gives one document another title."""

    def get(self, user_id: str, doc_id: str) -> UserDocRecord | None:
        found = super().get(user_id, doc_id)
        return replace(found, doc_title="Something else") if found is not None and doc_id == "pods" else found


def test_what_is_read_back_otherwise_is_told() -> None:
    """A new store that does not keep what it was given: an error that names the documents and what differs."""
    with pytest.raises(MismatchError, match=r"'ada', 'pods': doc_title") as caught:
        copy_users(lived_in(MemoryStateStore()).store, Renaming())
    assert caught.value.report.verified == 6


def test_wrong_places_are_refused(tmp_path: Path) -> None:
    """The same place twice, a place without a store, no place at all: nothing is made, and the message says why."""
    store = MemoryStateStore()
    with pytest.raises(ConfigurationError, match="is the old and the new place"):
        copy_users(store, store)
    with pytest.raises(ConfigurationError, match="no store of this release in .*missing"):
        copy_users(tmp_path / "missing.db", store)
    with closing(sqlite3.connect(tmp_path / "other.db")) as connection:
        connection.execute("CREATE TABLE notes (text)")
    with pytest.raises(ConfigurationError, match="no store of this release"):
        copy_users(f"sqlite:///{tmp_path / 'other.db'}", store)
    with pytest.raises(ConfigurationError, match="there is no store for"):
        copy_users(store, "mysql://there/db")
    with pytest.raises(InvalidUserError):
        copy_users(store, MemoryStateStore(), users=[""])
    assert [path.name for path in tmp_path.iterdir()] == ["other.db"]


def test_one_file_by_two_names_is_one_place(make_store: Callable[[str], StateStore], tmp_path: Path) -> None:
    """A store and the path of its file, or a link to it."""
    store = lived_in(make_store("sqlite-file")).store
    (tmp_path / "link.db").symlink_to(tmp_path / "state.db")
    for name in (tmp_path / "state.db", f"sqlite:///{tmp_path / 'state.db'}", str(tmp_path / "link.db")):
        with pytest.raises(ConfigurationError, match="is the old and the new place"):
            copy_users(store, name)


def test_from_the_command_line(
    make_store: Callable[[str], StateStore], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--this-release`: the same, with a report and an exit code."""
    world = lived_in(make_store("sqlite-file"))
    old, new = f"sqlite:///{tmp_path / 'state.db'}", f"sqlite:///{tmp_path / 'new.db'}"

    assert main([old, new, "--this-release", "--json", "--quiet"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["written"], report["verified"], report["users"]) == (8, 8, 2)
    assert main([old, new, "--this-release"]) == 0
    printed = capsys.readouterr()
    assert "records there already, as they were brought" in printed.out
    assert "Nothing in the old place was changed" in printed.out
    from rag_wiki.storage.sqlite import SQLiteStateStore

    with SQLiteStateStore(new) as target:
        assert told(target, target.chunk_store, "ada") == told(world.store, world.store.chunk_store, "ada")
        replace(world, store=target).retriever().invoke(POD_QUESTION)
    # Somebody who went on there has not all of what the old place has, and nobody is told so.
    assert main([old, new, "--this-release", "--quiet"]) == 3
    told_of = capsys.readouterr().out
    assert "found  8 records of 2 users" in told_of
    assert "Left alone, because the new place has them in another form:" in told_of
    assert "All of it is in the new place" not in told_of
    assert "--overwrite" not in told_of
    for wrong in (["--overwrite"], ["--embeddings", "local"], ["--embedding-name", "x"]):
        with pytest.raises(SystemExit) as ended:
            main([old, new, "--this-release", *wrong])
        assert ended.value.code == 2
        assert "has no meaning with --this-release" in capsys.readouterr().err
    assert main([str(tmp_path / "none.db"), new, "--this-release"]) == 1
    assert "no store of this release" in capsys.readouterr().err


def test_a_pending_suggestion_is_accepted_there(state_store: StateStore) -> None:
    """What was kept of a document for saving it is there: the user answers after the move."""
    world = World()
    world.source.documents = [document("pods", PODS)]
    old = world.retriever(fetch_threshold=2)
    old.invoke(POD_QUESTION)
    world.clock.turn(hours=1)
    old.invoke(POD_QUESTION)
    copy_users(world.store, state_store)

    moved = replace(world, store=state_store).retriever()
    record = moved.accept_suggestion("pods")

    assert (record.user_state, record.full_content) == (DocumentState.CLAIMED, PODS)
    assert [event.what for event in moved.history("pods")] == ["surfaced", "suggested", "saved"]
    assert moved.clock() == world.clock.now
    assert record.last_fetched_at == world.clock.now
    assert timedelta(0) == world.clock.now - record.last_fetched_at


def test_a_closed_old_store_is_named(tmp_path: Path) -> None:
    """A place that can't be opened is an error of ours, without a password."""
    with pytest.raises(StorageError, match="can't be used") as caught:
        copy_users("postgresql://app:secret@127.0.0.1:1/db", tmp_path / "new.db")
    assert "secret" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []
