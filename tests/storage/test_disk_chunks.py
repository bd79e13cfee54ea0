"""What the disk adds to the promises of every chunk store: damaged files, names, leftovers, readable copies."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rag_wiki import ChunkStore, CorruptDataError, DocumentState, UserDocRecord
from rag_wiki.storage.chunk_places import DocumentFolder, user_folder
from rag_wiki.storage.chunk_store import ChunkCopy, copy_time, new_copy_id
from rag_wiki.testing.awkward import AWKWARD_IDS, NOON, a_record, in_threads

DAY = 24 * 3600


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder that does not exist yet."""
    return tmp_path / "wiki"


@pytest.fixture
def store(root: Path) -> ChunkStore:
    """A chunk store in that folder."""
    return ChunkStore(root)


def a_copy(text: str = "chunk") -> ChunkCopy:
    """A copy of two chunks."""
    vectors = np.array([[1, 2], [3, 4]], dtype=np.float32)
    metadata = {"author": "somebody"}
    return ChunkCopy(new_copy_id(), (0, 1), (f"{text} 0", f"{text} 1"), vectors, ("Intro", None), "model", metadata)


def read(store: ChunkStore, copy_id: str, user_id: str = "alice", doc_id: str = "d") -> object:
    """All of a copy in comparable form; `None` when it is not there, `CorruptDataError` when it is damaged."""
    try:
        copy = store.load_copy(user_id, doc_id, copy_id)
    except CorruptDataError:
        return CorruptDataError
    if copy is None:
        return None
    vectors = None if copy.vectors is None else copy.vectors.tolist()
    return (copy.copy_id, copy.indices, copy.texts, vectors, copy.sections, copy.embedding, dict(copy.metadata))


def get(record: UserDocRecord | None) -> UserDocRecord | None:
    """Read a record."""
    return record


def files(root: Path, pattern: str = "*") -> list[Path]:
    """All files below a folder."""
    return sorted(path for path in root.rglob(pattern) if path.is_file())


def grep(root: Path, text: str) -> list[Path]:
    """The files that hold a text, or bear it in their path."""
    return [path for path in files(root) if text.encode() in path.read_bytes() or text in str(path.relative_to(root))]


def damage_end(path: Path) -> None:
    """Cut the last bytes off."""
    path.write_bytes(path.read_bytes()[:-3])


def damage_empty(path: Path) -> None:
    """Leave an empty file."""
    path.write_bytes(b"")


def damage_foreign(path: Path) -> None:
    """Put somebody else's file there."""
    path.write_bytes(b"PK\x03\x04 this is a zip file, or whatever" * 100)


def damage_longer(path: Path) -> None:
    """Append something."""
    path.write_bytes(path.read_bytes() + b"\0")


def damage_pickle(path: Path) -> None:
    """Put a pickle there that would make a file when loaded."""
    path.write_bytes(b"cposix\nsystem\n(S'touch pwned'\ntR.")


class TestDamage:
    """Never wrong data: what can't be read back is an error, what is gone is not there."""

    @pytest.mark.parametrize("damage", [damage_end, damage_empty, damage_foreign, damage_longer, damage_pickle])
    def test_a_damaged_file_is_an_error(
        self, store: ChunkStore, root: Path, damage: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A torn, empty or foreign file is a `CorruptDataError`; other documents answer, and saving anew heals."""
        monkeypatch.chdir(root.parent)
        bad, good = a_copy("bad"), a_copy("good")
        store.save_copy("alice", "d", bad)
        (path,) = files(root, "*.chunks")
        store.save_copy("alice", "sound", good)
        damage(path)

        assert read(store, bad.copy_id) is CorruptDataError
        with pytest.raises(CorruptDataError, match=path.name):
            store.load_chunks("alice", "d")
        loaded = dict(store.load_copies("alice", [("d", bad.copy_id), ("sound", good.copy_id)], texts=True))
        assert isinstance(loaded["d"], CorruptDataError)
        assert isinstance(loaded["sound"], ChunkCopy)
        assert loaded["sound"].texts == good.texts
        assert not (root.parent / "pwned").exists()

        store.save_chunks("alice", "d", [{"chunk_index": 0, "text": "anew", "vector": None}])
        assert [chunk["text"] for chunk in store.load_chunks("alice", "d")] == ["anew"]
        assert not path.exists()

    def test_every_torn_length_is_an_error(self, store: ChunkStore, root: Path) -> None:
        """A file that was cut at any byte is a `CorruptDataError`."""
        copy = a_copy()
        store.save_copy("alice", "d", copy)
        (path,) = files(root, "*.chunks")
        whole = path.read_bytes()
        for size in range(len(whole)):
            path.write_bytes(whole[:size])
            assert read(store, copy.copy_id) is CorruptDataError, size

    def test_no_flipped_bit_gives_wrong_data(self, store: ChunkStore, root: Path) -> None:
        """A file in which any one bit is turned is a `CorruptDataError`, never another text, vector or number."""
        copy = a_copy()
        store.save_copy("alice", "d", copy)
        (path,) = files(root, "*.chunks")
        whole = path.read_bytes()
        for at in range(len(whole)):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << at % 8)]) + whole[at + 1 :])
            assert read(store, copy.copy_id) is CorruptDataError, at

    def test_a_file_of_another_document_is_an_error(self, store: ChunkStore, root: Path) -> None:
        """A file that was swapped with one of another document, user or copy is an error, not that one's text."""
        mine, newer = a_copy("mine"), a_copy("newer")
        owners = {("alice", "e"): a_copy("of e"), ("bob", "d"): a_copy("of bob"), ("alice", "d"): newer}
        store.save_copy("alice", "d", mine)
        (path,) = files(root, "*.chunks")
        for (user_id, doc_id), copy in owners.items():
            store.save_copy(user_id, doc_id, copy)
        for copy in owners.values():
            (other,) = files(root, f"*.{copy.copy_id}.chunks")
            shutil.copyfile(other, path)
            assert read(store, mine.copy_id) is CorruptDataError
        assert read(store, newer.copy_id) is not CorruptDataError

    def test_a_file_deleted_by_hand_is_not_there(self, store: ChunkStore, root: Path) -> None:
        """A copy whose file, or whose whole folder, somebody deleted gives `None`, and can be saved again."""
        copy = a_copy()
        store.save_copy("alice", "d", copy)
        (path,) = files(root, "*.chunks")
        path.unlink()
        assert read(store, copy.copy_id) is None
        assert dict(store.load_copies("alice", [("d", copy.copy_id)])) == {"d": None}
        assert store.load_chunks("alice", "d") == []
        store.record_hits("alice", "d", [0], NOON, copy_id=copy.copy_id)

        shutil.rmtree(root)
        assert read(store, copy.copy_id) is None
        assert store.delete("alice", "d") is False
        assert store.delete_user("alice") == 0
        store.save_copy("alice", "d", copy)
        assert read(store, copy.copy_id) is not None

    def test_a_torn_line_of_hits_costs_itself_only(self, store: ChunkStore, root: Path) -> None:
        """A crash in the middle of a line of hits loses that hit, not the ones before and after it."""
        store.save_chunks("alice", "d", [{"chunk_index": n, "text": "t", "vector": None} for n in range(3)])
        store.record_hits("alice", "d", [0], NOON)
        (path,) = files(root, "*.hits")
        with path.open("ab") as file:
            file.write(b"1 1 2026-03-\n\xff\xfe garbage\n2 1\n2 1 0001-01-01T00:00:00+14:00\n")
        store.record_hits("alice", "d", [0], NOON)
        hits = [(chunk["hit_count"], chunk["last_hit_at"]) for chunk in store.load_chunks("alice", "d")]
        assert hits == [(2, NOON), (0, None), (0, None)]

    def test_many_hits_are_summed_up(self, store: ChunkStore, root: Path) -> None:
        """However many hits there are, their file stays small, and the counts are exact."""
        store.save_chunks("alice", "d", [{"chunk_index": n, "text": "t", "vector": None} for n in range(50)])
        for _ in range(100):
            store.record_hits("alice", "d", range(50), NOON)
        assert {chunk["hit_count"] for chunk in store.load_chunks("alice", "d")} == {100}
        (path,) = files(root, "*.hits")
        assert path.stat().st_size < 100_000

    def test_hits_of_processes_that_are_gone_are_summed_up(self, store: ChunkStore, root: Path) -> None:
        """Of however many processes there were, a sweep or two leave few files, and the counts are exact all along."""
        store.save_chunks("alice", "d", [{"chunk_index": n, "text": "t", "vector": None} for n in range(3)])
        (copy_id,) = store.place.copies("alice", "d")
        expected = dict.fromkeys(range(3), 0)

        def check(*, at_most: int) -> None:
            for seen in (store, ChunkStore(root)):
                hits = {chunk["chunk_index"]: chunk["hit_count"] for chunk in seen.load_chunks("alice", "d")}
                assert hits == expected
                assert seen.place.hit_counts("alice", [("d", copy_id)]) == {"d": sum(map(bool, expected.values()))}
            assert len(files(root, "*.hits")) <= at_most

        for number in range(12):
            ChunkStore(root).record_hits("alice", "d", [number % 2], NOON)
            store.record_hits("alice", "d", [0], NOON)
            expected[number % 2] += 1
            expected[0] += 1
            check(at_most=number + 2)
            store.tidy("alice")
        check(at_most=13)
        for at_most in (13, 1, 1):
            for path in files(root, "*.hits"):
                os.utime(path, (time.time() - 2 * DAY,) * 2)
            store.tidy("alice")
            check(at_most=at_most)
        store.record_hits("alice", "d", [2], NOON)
        expected[2] += 1
        check(at_most=2)
        store.delete("alice", "d")
        assert files(root) == []

    def test_a_crash_while_hits_are_summed_up_counts_none_twice(
        self, store: ChunkStore, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Where files that were summed up could not be removed, they count no more, and go with the next sweep."""
        store.save_chunks("alice", "d", [{"chunk_index": 0, "text": "t", "vector": None}])
        for _ in range(3):
            ChunkStore(root).record_hits("alice", "d", [0], NOON)

        def sweep() -> None:
            for path in files(root, "*.hits"):
                os.utime(path, (time.time() - 2 * DAY,) * 2)
            store.tidy("alice")

        def crash(*_: object, **__: object) -> None:
            raise OSError(5, "crashed")

        sweep()
        with monkeypatch.context() as patch:
            patch.setattr(Path, "unlink", crash)
            sweep()
        assert len(files(root, "*.hits")) == 4
        for _ in range(3):
            assert [chunk["hit_count"] for chunk in store.load_chunks("alice", "d")] == [3]
            sweep()
        assert len(files(root, "*.hits")) == 1

    @pytest.mark.parametrize(
        "remove", [lambda store: store.delete("alice", "d"), lambda store: store.delete_user("alice")]
    )
    @pytest.mark.parametrize(("owner", "name"), [(Path, "lstat"), (Path, "rename"), (tempfile, "mkstemp")])
    def test_a_copy_that_goes_while_its_hits_are_summed_up_leaves_nothing(
        self,
        root: Path,
        remove: Callable[[ChunkStore], object],
        owner: Any,
        name: str,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        """When another process removes the copy in the middle of a sweep, no file, no folder and no warning is left."""
        act, steps = getattr(owner, name), range(1, 7)
        reached = 0
        for step in steps:
            store = ChunkStore(root)
            store.save_chunks("alice", "d", [{"chunk_index": 0, "text": "t", "vector": None}])
            for _ in range(3):
                ChunkStore(root).record_hits("alice", "d", [0], NOON)
            left = [step]

            def remove_then_act(*arguments: Any, left: list[int] = left, **named: Any) -> Any:
                left[0] -= 1
                if left[0] == 0:
                    remove(ChunkStore(root))
                return act(*arguments, **named)

            for _ in range(2):
                for path in files(root, "*.hits"):
                    os.utime(path, (time.time() - 2 * DAY,) * 2)
                with monkeypatch.context() as patch:
                    patch.setattr(owner, name, remove_then_act)
                    store.tidy("alice")
            reached += left[0] <= 0
            assert caplog.records == []
            if left[0] <= 0:
                assert list(root.rglob("*")) == []
            remove(store)
        assert reached >= 1

    def test_foreign_files_in_the_folder_are_left_alone(self, store: ChunkStore, root: Path) -> None:
        """Files that are not ours make no copies, whatever they are called."""
        copy = a_copy()
        store.save_copy("alice", "d", copy)
        (path,) = files(root, "*.chunks")
        digest = path.name.split(".")[0]
        for name in (f"{digest}.zz.yy.chunks", f"{digest}..chunks", f"{digest}.chunks", "notes.txt", "x.chunks"):
            (path.parent / name).write_text("not ours")
        assert store.place.copies("alice", "d") == [copy.copy_id]
        assert [chunk["text"] for chunk in store.load_chunks("alice", "d")] == ["chunk 0", "chunk 1"]
        assert store.delete("alice", "d") is True
        assert not path.exists()
        assert (path.parent / "notes.txt").read_text() == "not ours"


class TestOthers:
    """Whoever else is at work in a user's folder at the same moment."""

    def test_a_folder_that_goes_while_a_copy_is_written_is_made_again(
        self, store: ChunkStore, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Somebody forgets the user between the writing of a file and its renaming: the file is there all the same."""
        assert store.documents is not None
        replace_file, left = Path.replace, [3]

        def forget_then_replace(path: Path, target: Path) -> Path:
            left[0] -= 1
            if left[0] >= 0:
                ChunkStore(root).delete_user("alice")
            return replace_file(path, target)

        monkeypatch.setattr(Path, "replace", forget_then_replace)
        copy = a_copy()
        store.save_copy("alice", "d", copy)
        assert read(store, copy.copy_id) is not None
        left[0] = 1
        store.documents.prepare("alice", "d", "Title", "The text.", copy.copy_id).finish()
        assert [path.read_text() for path in files(root, "*.md")] == ["The text."]
        assert store.documents.times("alice", ["d"]) == {"d": copy_time(copy.copy_id)}

    @pytest.mark.parametrize("name", ["unlink", "rmdir"])
    def test_forgetting_beside_others_leaves_nothing(
        self, name: str, store: ChunkStore, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Others remove or add files while a user's folder is removed: all of it goes, without an error."""
        store.save_copy("alice", "d", a_copy())
        store.save_copy("alice", "e", a_copy())
        folder = next(root.glob("*/chunks"))
        act, met = getattr(os, name), list[Any]()

        def meddle(path: Any, **named: Any) -> None:
            if not met and (name == "unlink" or Path(path) == folder):
                met.append(path)
                if name == "unlink":
                    act(path, **named)
                else:
                    (folder / "added").write_text("just now")
            act(path, **named)

        with monkeypatch.context() as patch:
            patch.setattr(os, name, meddle)
            store.delete_user("alice")
        assert met
        assert list(root.rglob("*")) == []


class TestNames:
    """Where files are put."""

    def test_forgetting_remembers_no_user(self, store: ChunkStore) -> None:
        """The folders of users are kept at hand; not of who was forgotten."""
        store.save_copy("somebody", "d", a_copy())
        assert user_folder.cache_info().currsize > 0
        store.delete_user("somebody")
        assert user_folder.cache_info().currsize == 0

    def test_all_files_stay_inside_the_folder(self, tmp_path: Path) -> None:
        """Whatever user and document ids hold, every file lies below the folder that was given."""
        root = tmp_path / "deep" / "down" / "wiki"
        store = ChunkStore(root)
        assert store.documents is not None
        for doc_id in AWKWARD_IDS:
            for user_id in {"alice", "..", "../../alice", "/tmp/alice", doc_id}:  # noqa: S108 - an id
                store.save_copy(user_id, doc_id, a_copy())
                store.documents.prepare(user_id, doc_id, doc_id, "text").finish()
        resolved = root.resolve()
        assert all(path.resolve().is_relative_to(resolved) for path in files(tmp_path))
        assert len(files(root, "*.chunks")) == len(files(root, "*.md")) >= 4 * len(AWKWARD_IDS)

    def test_names_are_plain_and_short(self, store: ChunkStore, root: Path) -> None:
        """File and folder names are lower-case ASCII of bounded length, so any file system keeps them apart."""
        assert store.documents is not None
        for doc_id in AWKWARD_IDS:
            store.save_copy(doc_id, doc_id, a_copy())
            store.documents.prepare(doc_id, doc_id, doc_id, "text").finish()
        for path in root.rglob("*"):
            assert path.name.isascii()
            assert path.name == path.name.lower()
            assert set(path.name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-.")
            assert len(path.name) <= 100
            assert not path.name.startswith((".", "-"))
        assert len(list(root.iterdir())) == len(AWKWARD_IDS)

    def test_data_survives_reopening(self, store: ChunkStore, root: Path) -> None:
        """Another store over the same folder, given as a string, finds chunks and hits."""
        store.save_chunks("alice", "d", [{"chunk_index": 0, "text": "chunk", "vector": [0.1], "section": "Intro"}])
        store.record_hits("alice", "d", [0], NOON)
        assert ChunkStore(str(root)).load_chunks("alice", "d") == store.load_chunks("alice", "d") != []

    def test_nothing_is_made_by_reading(self, store: ChunkStore, root: Path) -> None:
        """Reading, hitting and deleting what is not there makes no folder."""
        store.load_chunks("alice", "d")
        store.record_hits("alice", "d", [0], NOON)
        store.delete("alice", "d")
        store.delete_user("alice")
        assert store.documents is not None
        assert store.documents.count("alice") == 0
        assert not root.exists()


class TestDeleting:
    """What was deleted is not on the disk any more."""

    def test_deleting_a_document_leaves_no_text_of_it(self, store: ChunkStore, root: Path) -> None:
        """After `delete` no file holds the document's text or title; the other document's files are as before."""
        assert store.documents is not None
        for doc_id in ("secret", "other"):
            store.save_copy("alice", doc_id, a_copy(f"text of {doc_id}"))
            store.record_hits("alice", doc_id, [0], NOON)
            store.documents.prepare("alice", doc_id, f"title-of-{doc_id}", f"text of {doc_id}").finish()
        others = {path: path.read_bytes() for path in grep(root, "other")}
        assert len(grep(root, "text of secret")) == 2

        assert store.delete("alice", "secret") is True

        assert grep(root, "secret") == []
        assert {path: path.read_bytes() for path in grep(root, "other")} == others
        # Copy and readable copy of the other document, and its hits.
        assert len(files(root)) == len(others) + 1 == 3

    def test_deleting_a_user_leaves_no_file(self, store: ChunkStore, root: Path) -> None:
        """After `delete_user` the user's folder is gone, unfinished files included; another user's is as before."""
        assert store.documents is not None
        for user_id in ("alice", "alice2"):
            for doc_id in ("d", "e"):
                store.save_copy(user_id, doc_id, a_copy())
                store.record_hits(user_id, doc_id, [0], NOON)
                store.documents.prepare(user_id, doc_id, "Title", "text").finish()
        store.documents.prepare("alice", "f", "Title", "never finished")
        before = {path: path.read_bytes() for path in files(root) if "alice2" in str(path)}
        assert len(before) == 6

        assert store.delete_user("alice") == 4

        assert {path: path.read_bytes() for path in files(root)} == before
        assert [path.name.split("-")[0] for path in root.iterdir()] == ["alice2"]

    def test_the_readable_copy_follows_the_record(self, store: ChunkStore, root: Path) -> None:
        """`settle` leaves the file that fits the record: of its title and text, and none when it is not saved."""
        saved = a_record(user_state=DocumentState.CLAIMED, full_content="text")
        let_go = replace(saved, user_state=DocumentState.DEMOTED)
        nameless = replace(saved, doc_title="")
        others = [("alice", "other", "other text"), ("bob", "d", "bob's text")]
        for user_id, doc_id, text in others:
            other = replace(saved, user_id=user_id, doc_id=doc_id, full_content=text)
            store.settle(user_id, doc_id, partial(get, other))
        steps: list[tuple[UserDocRecord | None, str | None]] = [
            (saved, "text"),
            (replace(saved, full_content="newer", doc_title="Another"), "newer"),
            (let_go, None),
            (replace(saved, user_state=DocumentState.PINNED, full_content=""), ""),
            (None, None),
            (nameless, "text"),
            (replace(saved, full_content=None), None),
        ]
        for record, expected in steps:
            store.settle("alice", "d", partial(get, record))
            texts = [path.read_text() for path in files(root)]
            assert sorted(texts) == sorted([text for *_, text in others] + ([] if expected is None else [expected]))

    def test_what_does_not_fit_its_record_is_found_and_mended(self, store: ChunkStore, root: Path) -> None:
        """A readable copy that is of another copy, changed, there twice, no file, missing or too much is unsettled."""
        saved = a_record(user_state=DocumentState.CLAIMED, full_content="text", copy_id=new_copy_id())
        names = ("fits", "old", "changed", "twice", "folder", "missing", "removed")
        records = {name: replace(saved, user_id="alice", doc_id=name, doc_title=name) for name in names}
        records["by hand"] = replace(records["fits"], doc_id="by hand", doc_title="by hand", copy_id=None)
        for name, record in records.items():
            store.settle("alice", name, partial(get, record))
        assert store.unsettled("alice", list(records.values())) == []

        paths = {path.stem[:-25]: path for path in files(root)}
        records["old"] = replace(records["old"], copy_id=new_copy_id(), full_content="newer text")
        records["removed"] = replace(records["removed"], user_state=DocumentState.DEMOTED, full_content=None)
        paths["changed"].write_text("changed by hand")
        shutil.copy2(paths["twice"], paths["twice"].with_name(f"former-{paths['twice'].name}"))
        for name in ("folder", "missing"):
            paths[name].unlink()
        paths["folder"].mkdir()

        unsettled = store.unsettled("alice", list(records.values()))
        assert unsettled == ["old", "changed", "twice", "folder", "missing", "removed"]
        for name in unsettled:
            store.settle("alice", name, partial(get, records[name]))
        assert store.unsettled("alice", list(records.values())) == []
        held = {path.stem[:-25]: path.read_text() for path in files(root)}
        assert held == {**dict.fromkeys(sorted(records.keys() - {"removed", "by hand"}), "text"), "by-hand": "text"} | {
            "old": "newer text"
        }

    def test_a_torn_copy_can_be_deleted(self, store: ChunkStore, root: Path) -> None:
        """Damaged files go like others, and count as no chunks."""
        for doc_id in ("d", "e", "f", "sound"):
            store.save_copy("alice", doc_id, a_copy())
        for path, damage in zip(files(root, "*.chunks"), (damage_end, damage_empty, damage_foreign), strict=False):
            if read(store, path.name.split(".")[1], doc_id="sound") is None:
                damage(path)
        store.delete("alice", "d")
        assert 2 <= store.delete_user("alice") <= 6
        assert files(root) == []

    def test_leftovers_of_a_crash_go_with_the_next_deletion(self, store: ChunkStore, root: Path) -> None:
        """A file that was not put in its place for more than a day goes when the user deletes something."""
        assert store.documents is not None
        store.save_copy("alice", "d", a_copy())
        (path,) = files(root)
        crashed, young = path.parent / ".writing-crashed", path.parent / ".writing-young"
        readable = store.documents.prepare("alice", "d", "Title", "text").temporary
        for leftover in (crashed, young):
            leftover.write_text("half of a secret")
        for leftover in (crashed, readable):
            os.utime(leftover, (time.time() - 2 * DAY,) * 2)

        assert store.place.copies("alice", "d") == [path.name.split(".")[1]]
        store.delete("alice", "d")

        assert files(root) == [young]
        store.delete_user("alice")
        assert files(root) == []

    def test_leftovers_go_whoever_they_are_of(self, store: ChunkStore, root: Path) -> None:
        """`tidy` needs no user's id; it leaves no empty folder of a user, and folders that are not ours as they are."""
        assert store.documents is not None
        old = store.documents.prepare("alice", "d", "Title", "half of a secret").temporary
        young = store.documents.prepare("bob", "d", "Title", "text").temporary
        others = root / "somebody" / "documents" / ".writing-theirs"
        others.parent.mkdir(parents=True)
        others.write_text("theirs")
        (root / "empty" / "chunks").mkdir(parents=True)
        for leftover in (old, others):
            os.utime(leftover, (time.time() - 2 * DAY,) * 2)

        store.tidy()

        assert files(root) == sorted([young, others])
        assert sorted(root.iterdir()) == sorted([root / "empty", root / "somebody", young.parent.parent])
        assert (root / "empty" / "chunks").is_dir()

    def test_the_last_file_takes_its_folders_with_it(self, store: ChunkStore, root: Path) -> None:
        """Folders bear a user's name: they go with the last document, and with a file that came to nothing."""
        assert store.documents is not None
        store.save_copy("alice", "d", a_copy())
        store.documents.prepare("alice", "d", "Title", "text").finish()
        store.delete("alice", "d")
        store.documents.prepare("bob", "d", "Title", "text").abandon()
        store.save_copy("carol", "d", a_copy())
        store.documents.prepare("carol", "d", "Title", "text").finish()
        store.purge("d")
        assert list(root.iterdir()) == []

    def test_saves_and_deletions_do_not_disturb_each_other(self, store: ChunkStore, root: Path) -> None:
        """8 threads that save and delete a user's only document raise nothing, although each removes the folders."""
        assert store.documents is not None
        documents = store.documents

        def work(number: int) -> None:
            for _ in range(20):
                if number % 2:
                    store.save_copy("alice", f"d{number}", a_copy())
                    documents.prepare("alice", f"d{number}", "Title", "text").finish()
                store.delete("alice", f"d{number}")

        in_threads(8, work)

        assert list(root.iterdir()) == []

    def test_hits_and_deletions_do_not_disturb_each_other(self, store: ChunkStore, root: Path) -> None:
        """8 threads that save, hit and delete the same document raise nothing, and leave no hits without their copy."""

        def work(number: int) -> None:
            for _ in range(20):
                if number < 2:
                    store.save_copy("alice", "d", a_copy())
                elif number < 4:
                    store.delete("alice", "d")
                else:
                    store.record_hits("alice", "d", [0, 1], NOON)

        in_threads(8, work)

        copies = {path.stem for path in files(root, "*.chunks")}
        assert [path for path in files(root, "*.hits") if path.name.rsplit(".", 2)[0] not in copies] == []
        store.delete("alice", "d")
        assert files(root) == []

    @pytest.mark.parametrize("everything", [False, True])
    def test_a_copy_that_goes_while_it_is_hit_leaves_nothing(
        self, store: ChunkStore, root: Path, monkeypatch: pytest.MonkeyPatch, everything: bool
    ) -> None:
        """When another process removes the copy in the middle of recording a hit, no file of hits is left."""
        copy, exists = a_copy(), Path.exists
        store.save_copy("alice", "d", copy)
        other = ChunkStore(root)
        removals: list[Callable[[], object]] = [
            lambda: other.delete_user("alice") if everything else other.delete("alice", "d")
        ]

        def look_then_remove(path: Path) -> bool:
            there = exists(path)
            if removals and path.suffix == ".chunks":
                removals.pop()()
            return there

        monkeypatch.setattr(Path, "exists", look_then_remove)
        store.record_hits("alice", "d", [0], NOON, copy_id=copy.copy_id)

        assert removals == []
        assert files(root) == []

    @pytest.mark.skipif(sys.platform == "win32", reason="permissions of Windows have other rules")
    def test_files_are_for_their_owner_only(self, store: ChunkStore, root: Path) -> None:
        """Nobody but the owner may read the files."""
        assert store.documents is not None
        store.save_copy("alice", "d", a_copy())
        store.documents.prepare("alice", "d", "Title", "text").finish()
        assert {path.stat().st_mode & 0o077 for path in files(root)} == {0}


class TestWriting:
    """A file is there wholly or not at all."""

    @pytest.mark.parametrize("step", ["fsync", "replace"])
    def test_a_failure_leaves_what_was_there(
        self, store: ChunkStore, root: Path, monkeypatch: pytest.MonkeyPatch, step: str
    ) -> None:
        """A full disk is the caller's `OSError`; the copy of before answers, and no piece of the new one is left."""
        store.save_chunks("alice", "d", [{"chunk_index": 0, "text": "old", "vector": None}])
        before = {path: path.read_bytes() for path in files(root)}

        def fail(*_: object) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            if step == "fsync":
                patch.setattr(os, "fsync", fail)
            else:
                patch.setattr(Path, "replace", fail)
            with pytest.raises(OSError, match="No space"):
                store.save_chunks("alice", "d", [{"chunk_index": 0, "text": "new", "vector": None}])

        assert {path: path.read_bytes() for path in files(root)} == before
        assert [chunk["text"] for chunk in store.load_chunks("alice", "d")] == ["old"]


class TestReadableCopies:
    """`DocumentFolder`: one text file per document, for people."""

    def test_a_document_is_a_text_file(self, root: Path) -> None:
        """The file holds the content as UTF-8, and its name begins with the title."""
        folder = DocumentFolder(root)
        folder.prepare("alice", "d", "Über die Pods: 文档!", "Größe 文档\n").finish()
        (path,) = files(root)
        assert path.read_text(encoding="utf-8") == "Größe 文档\n"
        assert path.name.startswith("ber-die-pods-")
        assert path.suffix == ".md"
        assert folder.count("alice") == 1

    def test_any_text_can_be_written(self, root: Path) -> None:
        """A text with NUL and lone surrogates is written rather than refused."""
        DocumentFolder(root).prepare("alice", "d", "", "a\0\ud800b").finish()
        (path,) = files(root)
        assert path.read_bytes() == b"a\0\xed\xa0\x80b"

    def test_saving_again_replaces(self, root: Path) -> None:
        """The second file of a document takes the place of the first, under another title too; others stay."""
        folder = DocumentFolder(root)
        folder.prepare("alice", "other", "Old Title", "other text").finish()
        for title, text in (("Old Title", "first"), ("Old Title", "second"), ("New Title", "third")):
            folder.prepare("alice", "d", title, text).finish()
            assert sorted(path.read_text() for path in files(root)) == sorted(["other text", text])
        assert folder.count("alice") == 2
        assert folder.delete("alice", "d") == 1
        assert folder.delete("alice", "d") == 0
        assert [path.read_text() for path in files(root)] == ["other text"]

    def test_what_is_prepared_is_not_there_yet(self, root: Path) -> None:
        """Until `finish` the file of before stands; `abandon` leaves it, and nothing of the new one."""
        folder = DocumentFolder(root)
        folder.prepare("alice", "d", "Title", "first").finish()
        pending = folder.prepare("alice", "d", "Title", "second")
        assert folder.count("alice") == 1
        assert [path.read_text() for path in files(root, "*.md")] == ["first"]
        pending.abandon()
        assert [path.read_text() for path in files(root)] == ["first"]

    def test_users_are_separate(self, root: Path) -> None:
        """Users whose names look the same to a file system have folders of their own."""
        folder = DocumentFolder(root)
        users = ("alice", "Alice", "alice ", "a-lice", "alice/", "文", "档")
        for user_id in users:
            folder.prepare(user_id, "d", "Title", user_id).finish()
        assert sorted(path.read_text() for path in files(root)) == sorted(users)
        assert folder.delete_user("Alice") == 1
        assert folder.delete_user("Alice") == 0
        assert sorted(path.read_text() for path in files(root)) == sorted(set(users) - {"Alice"})
