"""What every chunk store promises about whole copies, which saving and the index use."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest

from rag_wiki.errors import InvalidDocumentError, InvalidUserError
from rag_wiki.storage.chunk_store import ChunkCopy, ChunkStore, new_copy_id
from rag_wiki.testing.awkward import AWKWARD_IDS, AWKWARD_TEXTS, NOON, in_threads

__all__ = ["CopyPromises"]

_DAY = 24 * 3600 * 10**9
"""Nanoseconds."""


def _copy(text: str = "some text", copy_id: str | None = None, chunks: int = 2) -> ChunkCopy:
    vectors = np.arange(chunks * 3, dtype=np.float32).reshape(chunks, 3)
    texts = tuple(f"{text} {number}" for number in range(chunks))
    return ChunkCopy(copy_id or new_copy_id(), tuple(range(chunks)), texts, vectors)


def _same(left: object, right: object) -> bool:
    """Whether two copies are equal, their vectors bit by bit."""
    if not (isinstance(left, ChunkCopy) and isinstance(right, ChunkCopy)):
        return left == right
    if (left.vectors is None) != (right.vectors is None):
        return False
    if left.vectors is not None and right.vectors is not None:
        alike = left.vectors.dtype == right.vectors.dtype and left.vectors.shape == right.vectors.shape
        if not alike or left.vectors.tobytes() != right.vectors.tobytes():
            return False
    return replace(left, vectors=None) == replace(right, vectors=None)


class CopyPromises:
    """`save_copy`, `load_copy`, `load_copies`, `retire`, `drop` and `hit_rates`."""

    def test_every_field_of_a_copy_comes_back(self, store: ChunkStore) -> None:
        """A copy comes back with all of its fields, none of which is at its default here."""
        copy = ChunkCopy(
            copy_id=new_copy_id(),
            indices=(4, 7, 9),
            texts=("one", "", "three"),
            vectors=np.array([[0.1, -2.5], [0, 0], [1e-45, 3e38]], dtype=np.float32),
            sections=("Intro", None, "文档"),
            embedding="Class/model name/2",
            metadata={"page": 3, "nested": {"list": [1, None, True, "\ud800"]}, "": "", "half": 0.5},
            without_vector=(1,),
            chunk_metadata=({"page": 1}, {}, {"page": "iii", "box": [0.5, {"x": None}]}),
        )
        store.save_copy("alice", "d", copy)
        assert _same(store.load_copy("alice", "d", copy.copy_id), copy)

    def test_single_chunks_that_are_added_leave_what_is_said_of_the_others(self, store: ChunkStore) -> None:
        """What a copy knows of a chunk alone stays with it while its text does."""
        copy = replace(_copy(), chunk_metadata=({"page": 1}, {"page": 2}))
        store.save_copy("alice", "d", copy)
        store.add_chunks("alice", "d", [{"chunk_index": 7, "text": "another", "vector": None}])
        (added,) = store.place.copies("alice", "d")
        loaded = store.load_copy("alice", "d", added)
        assert loaded is not None
        assert loaded.chunk_metadata == ({"page": 1}, {"page": 2}, {})

        chunks = store.load_chunks("alice", "d")
        store.save_chunks("alice", "d", [chunks[1], {**chunks[0], "text": "not as it was"}])
        (saved,) = store.place.copies("alice", "d")
        loaded = store.load_copy("alice", "d", saved)
        assert loaded is not None
        assert loaded.chunk_metadata == ({}, {"page": 2})

    def test_a_large_copy_is_exact(self, store: ChunkStore) -> None:
        """500 vectors of 384 numbers, and their texts, come back bit by bit."""
        vectors = np.random.default_rng(20260301).standard_normal((500, 384)).astype(np.float32)
        vectors[0, :3] = np.array([0x00000001, 0x80000000, 0x7F7FFFFF], dtype=np.uint32).view(np.float32)
        texts = tuple(f"text {number} " * 50 for number in range(500))
        copy = ChunkCopy(new_copy_id(), tuple(range(500)), texts, vectors)
        store.save_copy("alice", "d", copy)
        assert _same(store.load_copy("alice", "d", copy.copy_id), copy)

    def test_vectors_of_any_layout_are_kept_by_value(self, store: ChunkStore) -> None:
        """Vectors that are a transposed or strided view come back as the values they show."""
        base = np.arange(24, dtype=np.float32).reshape(4, 6)
        for vectors in (base.T, base[::2, ::3], np.asfortranarray(base), base.astype(">f4")):
            copy = replace(_copy(chunks=len(vectors)), copy_id=new_copy_id(), vectors=vectors)
            store.save_copy("alice", "d", copy)
            got = store.load_copy("alice", "d", copy.copy_id)
            assert got is not None
            assert got.vectors is not None
            assert got.vectors.tolist() == vectors.tolist()
            assert got.vectors.dtype == np.float32

    def test_only_the_parts_asked_for_are_read(self, store: ChunkStore) -> None:
        """Texts and vectors that were not asked for are `None`; everything else is there."""
        copy = _copy()
        store.save_copy("alice", "d", copy)
        for texts, vectors in ((True, False), (False, True), (False, False)):
            expected = replace(copy, texts=copy.texts if texts else None, vectors=copy.vectors if vectors else None)
            assert _same(store.load_copy("alice", "d", copy.copy_id, texts=texts, vectors=vectors), expected)

    def test_awkward_texts_of_copies_come_back(self, store: ChunkStore) -> None:
        """Texts, sections, metadata and fingerprint hold any string."""
        for text in AWKWARD_TEXTS:
            copy = replace(_copy(), texts=(text, "x"), sections=(text, None), embedding=text, metadata={text[:9]: text})
            store.save_copy("alice", "d", copy)
            assert _same(store.load_copy("alice", "d", copy.copy_id), copy)

    def test_what_is_not_there_is_none(self, store: ChunkStore) -> None:
        """Another copy, document or user gives `None`, not what is nearest."""
        copy = _copy()
        store.save_copy("alice", "d", copy)
        assert store.load_copy("alice", "d", new_copy_id()) is None
        assert store.load_copy("alice", "other", copy.copy_id) is None
        assert store.load_copy("bob", "d", copy.copy_id) is None
        assert store.load_copy("Alice", "d", copy.copy_id) is None

    def test_a_copy_of_one_document_is_never_that_of_another(self, store: ChunkStore) -> None:
        """Documents and users whose copies share an id each get their own."""
        copy_id = new_copy_id()
        owners = [("alice", "d"), ("alice", "e"), ("bob", "d"), ("bob", "e")]
        for user_id, doc_id in owners:
            store.save_copy(user_id, doc_id, _copy(f"{user_id} {doc_id}", copy_id))
        for user_id, doc_id in owners:
            assert _same(store.load_copy(user_id, doc_id, copy_id), _copy(f"{user_id} {doc_id}", copy_id))
        loaded = dict(store.load_copies("bob", [("d", copy_id), ("e", copy_id)], texts=True))
        assert _same(loaded["d"], _copy("bob d", copy_id))
        assert _same(loaded["e"], _copy("bob e", copy_id))
        store.drop("alice", "d", copy_id)
        assert [store.load_copy(*owner, copy_id) is None for owner in owners] == [True, False, False, False]

    def test_copies_under_awkward_ids_stay_apart(self, store: ChunkStore) -> None:
        """Copies under awkward document ids are found one by one and all together, each with its own text."""
        copies = {doc_id: _copy(ascii(doc_id)) for doc_id in AWKWARD_IDS}
        for doc_id, copy in copies.items():
            store.save_copy("alice", doc_id, copy)
        wanted = [(doc_id, copy.copy_id) for doc_id, copy in copies.items()]
        loaded = dict(store.load_copies("alice", wanted, texts=True))
        assert set(loaded) == set(copies)
        for doc_id, copy in copies.items():
            assert _same(loaded[doc_id], copy)
            assert _same(store.load_copy("alice", doc_id, copy.copy_id), copy)

    def test_a_copy_id_is_letters_and_digits(self, store: ChunkStore) -> None:
        """A copy id that could be part of a path or pattern is a `ValueError`, for writing and reading."""
        for copy_id in ("", "../x", "a:b", "a.b", "a b", "é", "x" * 65):
            with pytest.raises(ValueError, match="copy id"):
                store.save_copy("alice", "d", replace(_copy(), copy_id=copy_id))
            with pytest.raises(ValueError, match="copy id"):
                store.load_copy("alice", "d", copy_id)

    def test_nobody_owns_a_copy(self, store: ChunkStore) -> None:
        """A copy of a blank user or document is refused."""
        with pytest.raises(InvalidUserError):
            store.save_copy(" ", "d", _copy())
        with pytest.raises(InvalidDocumentError):
            store.save_copy("alice", "", _copy())

    def test_the_newest_copy_is_the_one_of_the_dictionaries(self, store: ChunkStore) -> None:
        """Copies lie side by side; `load_chunks` and `record_hits` mean the newest unless one is named."""
        old, new = _copy("old"), _copy("new")
        assert old.copy_id < new.copy_id
        for copy in (new, old):
            store.save_copy("alice", "d", copy)

        store.record_hits("alice", "d", [0], NOON)
        store.record_hits("alice", "d", [0, 1], NOON, copy_id=old.copy_id)

        chunks = store.load_chunks("alice", "d")
        assert [(chunk["text"], chunk["hit_count"]) for chunk in chunks] == [("new 0", 1), ("new 1", 0)]
        assert store.place.copies("alice", "d") == [old.copy_id, new.copy_id]
        assert store.hit_rates("alice", {"d": (old.copy_id, 2)}) == {"d": 1.0}
        assert store.delete("alice", "d") is True
        assert store.place.copies("alice", "d") == []

    # Many

    def test_many_copies_come_in_one_go(self, store: ChunkStore) -> None:
        """`load_copies` and `hit_rates` tell of each of 520 copies, and that one is not there."""
        copies = {f"d{number}": _copy(f"text {number}", chunks=1) for number in range(520)}
        for doc_id, copy in copies.items():
            store.save_copy("alice", doc_id, copy)
        gone = [("d0", new_copy_id()), ("never there", new_copy_id())]
        wanted = [(doc_id, copy.copy_id) for doc_id, copy in copies.items() if doc_id != "d0"]

        loaded = dict(store.load_copies("alice", [*wanted, *gone], texts=True))

        for number, (doc_id, copy_id) in enumerate(wanted):
            store.record_hits("alice", doc_id, range(number % 2), NOON, copy_id=copy_id)

        assert loaded.pop("d0", "nothing told") is None
        assert loaded.pop("never there", "nothing told") is None
        assert sorted(loaded) == sorted(doc_id for doc_id, _ in wanted)
        assert [doc_id for doc_id, copy in loaded.items() if not _same(copy, copies[doc_id])] == []
        assert list(store.load_copies("alice", [])) == []
        rates = store.hit_rates("alice", {doc_id: (copy_id, 1) for doc_id, copy_id in wanted})
        assert rates == {doc_id: float(number % 2) for number, (doc_id, _) in enumerate(wanted)}

    def test_many_copies_come_without_texts(self, store: ChunkStore) -> None:
        """`load_copies` reads vectors and no texts unless told otherwise."""
        copy = _copy()
        store.save_copy("alice", "d", copy)
        wanted = [("d", copy.copy_id)]
        assert _same(dict(store.load_copies("alice", wanted))["d"], replace(copy, texts=None))
        keywords = dict(store.load_copies("alice", wanted, texts=True, vectors=False))
        assert _same(keywords["d"], replace(copy, vectors=None))

    def test_copies_are_whole_when_many_threads_write(self, store: ChunkStore) -> None:
        """8 threads that write copies of one document while others read never meet half of one."""

        def write(number: int) -> list[ChunkCopy]:
            written = []
            for at in range(5):
                copy = _copy(f"{number} {at}", chunks=5)
                store.save_copy("alice", "d", copy)
                newest = store.load_chunks("alice", "d")
                assert len({chunk["text"].rsplit(" ", 1)[0] for chunk in newest}) == 1
                assert [chunk["chunk_index"] for chunk in newest] == list(range(5))
                written.append(copy)
            return written

        written = [copy for copies in in_threads(8, write) for copy in copies]

        assert len(written) == 40
        assert [copy for copy in written if not _same(store.load_copy("alice", "d", copy.copy_id), copy)] == []
        assert store.place.copies("alice", "d") == sorted(copy.copy_id for copy in written)

    # Letting go

    def test_retiring_removes_the_copy_that_was_replaced(self, store: ChunkStore) -> None:
        """`retire` removes the copy that no record names any more, its hits too; the kept one stays as it is."""
        old, new = _copy("old"), _copy("new")
        for copy in (old, new):
            store.save_copy("alice", "d", copy)
            store.record_hits("alice", "d", [0], NOON, copy_id=copy.copy_id)

        store.retire("alice", "d", old.copy_id, keep=new.copy_id)

        assert store.load_copy("alice", "d", old.copy_id) is None
        assert _same(store.load_copy("alice", "d", new.copy_id), new)
        rates = [store.hit_rates("alice", {"d": (copy.copy_id, 2)})["d"] for copy in (old, new)]
        assert rates == [0.0, 0.5]
        store.retire("alice", "d", old.copy_id, keep=new.copy_id)
        store.retire("alice", "never there", None, keep=None)

    def test_retiring_leaves_copies_that_somebody_may_be_about_to_name(self, store: ChunkStore) -> None:
        """A young copy that no record names stays; one that a crash left behind a day ago goes."""
        crashed = _copy("crashed", f"{time.time_ns() - 2 * _DAY:016x}" + "0" * 12)
        kept_old = _copy("kept", f"{time.time_ns() - 3 * _DAY:016x}" + "0" * 12)
        young = _copy("young")
        for copy in (crashed, kept_old, young):
            store.save_copy("alice", "d", copy)

        store.retire("alice", "d", None, keep=kept_old.copy_id)

        assert store.place.copies("alice", "d") == [kept_old.copy_id, young.copy_id]

    def test_dropping_removes_the_copy_that_was_let_go(self, store: ChunkStore) -> None:
        """`drop` removes the named copy and leaves a newer one; without a name all copies go."""
        old, new, other = _copy("old"), _copy("new"), _copy("other")
        for copy in (old, new):
            store.save_copy("alice", "d", copy)
        store.save_copy("alice", "other", other)

        store.drop("alice", "d", old.copy_id)
        assert store.place.copies("alice", "d") == [new.copy_id]
        store.drop("alice", "d", old.copy_id)
        assert store.place.copies("alice", "d") == [new.copy_id]
        store.drop("alice", "d", None)
        assert store.place.copies("alice", "d") == []
        store.drop("alice", "d", None)
        assert _same(store.load_copy("alice", "other", other.copy_id), other)

    def test_a_sweep_removes_what_no_record_names(self, store: ChunkStore) -> None:
        """Old copies other than the named one go; young ones, and those of documents nobody spoke of, stay."""
        named, crashed, young, removed, foreign = (
            _copy(copy_id=f"{time.time_ns() - days * _DAY:016x}" + "0" * 12) for days in (3, 2, 0, 5, 9)
        )
        for copy in (named, crashed, young):
            store.save_copy("alice", "d", copy)
        store.save_copy("alice", "removed", removed)
        store.save_copy("alice", "foreign", foreign)
        store.save_copy("bob", "d", crashed)
        store.record_hits("alice", "d", [0], NOON, copy_id=crashed.copy_id)

        assert store.sweep("alice", {"d": named.copy_id, "removed": None, "never there": None}) == 2

        assert store.place.copies("alice", "d") == [named.copy_id, young.copy_id]
        assert store.place.copies("alice", "removed") == []
        assert store.place.copies("alice", "foreign") == [foreign.copy_id]
        assert store.place.copies("bob", "d") == [crashed.copy_id]
        assert store.hit_rates("alice", {"d": (crashed.copy_id, 2)}) == {"d": 0.0}
        assert store.sweep("alice", {"d": named.copy_id, "removed": None}) == 0

    def test_copies_of_many_documents_are_listed(self, store: ChunkStore) -> None:
        """`list_copies` gives the copies of each of 520 documents, oldest first, and leaves out those without."""
        copies = [_copy(chunks=1) for _ in range(2)]
        for number in range(520):
            for copy in copies[: 1 + number % 2]:
                store.save_copy("alice", f"d{number}", copy)
        listed = store.place.list_copies("alice", ["never there", *(f"d{number}" for number in range(520))])
        ids = [copy.copy_id for copy in copies]
        assert listed == {f"d{number}": ids[: 1 + number % 2] for number in range(520)}
        assert store.place.list_copies("bob", ["d1"]) == store.place.list_copies("alice", []) == {}

    def test_owners_are_named_as_they_are(self, store: ChunkStore) -> None:
        """Everybody with a copy is an owner, by the id as it was given; who was forgotten is none."""
        assert store.place.owners() == []
        for user_id in AWKWARD_IDS:
            store.save_copy(user_id, "d", _copy())
        assert sorted(store.place.owners()) == sorted(AWKWARD_IDS)
        for user_id in AWKWARD_IDS[1:]:
            store.delete_user(user_id)
        assert store.place.owners() == [AWKWARD_IDS[0]]

    def test_purging_removes_a_document_of_everybody(self, store: ChunkStore) -> None:
        """`purge` removes all copies of one document, of all users, with their hits; others stay."""
        copies = {user_id: _copy() for user_id in AWKWARD_IDS}
        for user_id, copy in copies.items():
            for doc_id in ("d", "d2", "D"):
                store.save_copy(user_id, doc_id, copy)
                store.record_hits(user_id, doc_id, [0], NOON)

        assert store.purge("d").copies == len(AWKWARD_IDS)

        for user_id, copy in copies.items():
            assert store.place.copies(user_id, "d") == []
            assert store.place.hits(user_id, "d", copy.copy_id) == {}
            assert store.place.copies(user_id, "d2") == store.place.copies(user_id, "D") == [copy.copy_id]
        assert store.purge("d").copies == store.purge("never there").copies == 0

    # Hit rates

    def test_hit_rates_are_of_the_copies_asked_for(self, store: ChunkStore) -> None:
        """`hit_rates` tells the fraction of chunks that ever answered, by document, of just that copy."""
        copies = {doc_id: _copy(chunks=4) for doc_id in ("none", "one", "all")}
        before = _copy("before", chunks=4)
        store.save_copy("alice", "none", before)
        store.record_hits("alice", "none", [0, 1], NOON)
        for doc_id, copy in copies.items():
            store.save_copy("alice", doc_id, copy)
        for _ in range(3):
            store.record_hits("alice", "one", [2], NOON)
        store.record_hits("alice", "all", range(4), NOON)
        store.save_copy("bob", "none", replace(_copy(chunks=4), copy_id=copies["none"].copy_id))
        store.record_hits("bob", "none", [3], NOON)

        wanted = {doc_id: (copy.copy_id, 4) for doc_id, copy in copies.items()}
        wanted |= {"never there": (new_copy_id(), 4), "empty": (new_copy_id(), 0)}
        expected = {"none": 0.0, "one": 0.25, "all": 1.0, "never there": 0.0, "empty": 0.0}
        assert store.hit_rates("alice", wanted) == expected
        assert store.hit_rates("alice", {}) == {}
