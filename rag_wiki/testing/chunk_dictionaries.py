"""What every chunk store promises about single chunks as dictionaries: adding, replacing, loading, hits, deleting."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime, timedelta, timezone
from typing import Any

import numpy as np
import pytest

from rag_wiki.errors import InvalidDocumentError, InvalidUserError
from rag_wiki.storage.chunk_store import ChunkStore
from rag_wiki.testing.awkward import AWKWARD_IDS, AWKWARD_TEXTS, NOON, in_threads

__all__ = ["DictionaryPromises"]

_KEYS = {"chunk_index", "text", "vector", "section", "hit_count", "last_hit_at"}
_THREADS, _ROUNDS = 8, 15


def _chunk(
    index: int, text: str = "some text", vector: Sequence[float] | None = (1.0, 0.0), **more: Any
) -> dict[str, Any]:
    return {"chunk_index": index, "text": text, "vector": vector, **more}


def _loaded(
    index: int, text: str = "some text", vector: Sequence[float] | None = (1.0, 0.0), **more: Any
) -> dict[str, Any]:
    """A chunk as `load_chunks` gives it."""
    vector = None if vector is None else list(vector)
    return {"section": None, "hit_count": 0, "last_hit_at": None, **_chunk(index, text, vector, **more)}


def _hits(store: ChunkStore, user_id: str = "alice", doc_id: str = "d") -> dict[int, tuple[int, datetime | None]]:
    """The hits of each chunk that ever answered."""
    return {
        chunk["chunk_index"]: (chunk["hit_count"], chunk["last_hit_at"])
        for chunk in store.load_chunks(user_id, doc_id)
        if chunk["hit_count"] or chunk["last_hit_at"]
    }


class DictionaryPromises:
    """`add_chunks`, `save_chunks`, `load_chunks`, `record_hits`, `get_hit_rate`, `delete` and `delete_user`."""

    def test_an_unknown_document_has_no_chunks(self, store: ChunkStore) -> None:
        """Without chunks there is an empty list and a hit rate of 0, also beside a document that has some."""
        store.add_chunks("alice", "other", [_chunk(0)])
        assert store.load_chunks("alice", "d") == []
        assert store.load_chunks("bob", "other") == []
        assert store.get_hit_rate("alice", "d") == 0.0

    def test_chunks_come_back_in_document_order(self, store: ChunkStore) -> None:
        """Chunks come back by ascending `chunk_index`, with gaps, however they were added."""
        store.add_chunks("alice", "d", [_chunk(100, "c"), _chunk(2, "a", section="Intro")])
        store.add_chunks("alice", "d", [_chunk(10**12, "d"), _chunk(5, "b")])
        assert store.load_chunks("alice", "d") == [
            _loaded(2, "a", section="Intro"),
            _loaded(5, "b"),
            _loaded(100, "c"),
            _loaded(10**12, "d"),
        ]

    def test_a_loaded_chunk_has_exactly_these_keys(self, store: ChunkStore) -> None:
        """A loaded chunk is a dictionary of the six documented keys; what else was given is not kept."""
        store.save_chunks("alice", "d", [_chunk(0, colour="green"), {"chunk_index": 1, "text": "no more than that"}])
        first, second = store.load_chunks("alice", "d")
        assert set(first) == set(second) == _KEYS
        assert second == _loaded(1, "no more than that", None)

    def test_vectors_are_exact(self, store: ChunkStore) -> None:
        """Vectors come back as the float32 values that they are: tiny, huge, negative zero, and rounded ones."""
        values = [0.1, -0.0, 1e-45, 3.4028235e38, -1 / 3, 1e-6, 1e6]
        store.add_chunks("alice", "d", [_chunk(0, vector=values), _chunk(1, vector=np.array(values)[::-1].tolist())])
        first, second = (chunk["vector"] for chunk in store.load_chunks("alice", "d"))
        assert first == np.array(values, dtype=np.float32).tolist()
        assert second == first[::-1]
        assert np.signbit(first[1])
        assert all(type(value) is float for value in first)

    def test_chunks_without_vector_keep_their_row(self, store: ChunkStore) -> None:
        """A chunk without vector comes back with `None`, and its row in the matrix is zeros."""
        given = [_chunk(0, vector=None), _chunk(1, vector=(3.0, 4.0)), _chunk(2, vector=None), _chunk(3, vector=(0, 0))]
        store.save_chunks("alice", "d", given)

        chunks = store.load_chunks("alice", "d")

        assert [chunk["vector"] for chunk in chunks] == [None, [3.0, 4.0], None, [0.0, 0.0]]
        matrix = store.build_matrix(chunks)
        assert matrix is not None
        assert matrix.tolist() == [[0, 0], [3, 4], [0, 0], [0, 0]]

    def test_a_document_without_any_vector(self, store: ChunkStore) -> None:
        """Chunks of which none has a vector come back with `None`, and make no matrix."""
        store.save_chunks("alice", "d", [_chunk(0, vector=None), _chunk(1, vector=None)])
        assert [chunk["vector"] for chunk in store.load_chunks("alice", "d")] == [None, None]
        assert store.build_matrix(store.load_chunks("alice", "d")) is None

    def test_awkward_texts_come_back(self, store: ChunkStore) -> None:
        """Texts and sections are the same strings afterwards, the empty one too."""
        chunks = [_chunk(number, text, section=text) for number, text in enumerate(AWKWARD_TEXTS)]
        store.add_chunks("alice", "d", chunks)
        expected = [_loaded(number, text, section=text) for number, text in enumerate(AWKWARD_TEXTS)]
        assert store.load_chunks("alice", "d") == expected

    # Adding and replacing

    def test_adding_counts_what_is_new(self, store: ChunkStore) -> None:
        """`add_chunks` tells how many had an index that the document lacked; the ones that are there stay."""
        assert store.add_chunks("alice", "d", [_chunk(0, "zero"), _chunk(1, "one")]) == 2
        assert store.add_chunks("alice", "d", [_chunk(1, "one anew"), _chunk(2, "two")]) == 1
        assert store.add_chunks("alice", "d", [_chunk(0, "zero anew")]) == 0
        assert store.add_chunks("alice", "d", []) == 0
        assert [chunk["text"] for chunk in store.load_chunks("alice", "d")] == ["zero", "one", "two"]

    def test_an_index_twice_in_one_call_counts_once(self, store: ChunkStore) -> None:
        """Of two chunks with one index in one call the first is added, and counted."""
        assert store.add_chunks("alice", "d", [_chunk(3, "first"), _chunk(3, "second"), _chunk(1, "x")]) == 2
        assert [chunk["text"] for chunk in store.load_chunks("alice", "d")] == ["x", "first"]

    def test_adding_keeps_hits(self, store: ChunkStore) -> None:
        """Chunks that were there keep their hits when others are added; the new ones have none."""
        store.add_chunks("alice", "d", [_chunk(0), _chunk(1)])
        for _ in range(3):
            store.record_hits("alice", "d", [1], NOON)
        store.record_hits("alice", "d", [0], NOON + timedelta(hours=1))

        store.add_chunks("alice", "d", [_chunk(2)])

        assert _hits(store) == {0: (1, NOON + timedelta(hours=1)), 1: (3, NOON)}

    def test_saving_replaces_everything(self, store: ChunkStore) -> None:
        """`save_chunks` leaves only what it was given: other texts, vectors of another width, no hits of before."""
        store.save_chunks("alice", "d", [_chunk(0, "old"), _chunk(1, "old"), _chunk(2, "old")])
        store.record_hits("alice", "d", [0, 1], NOON)

        store.save_chunks("alice", "d", [_chunk(1, "new", (1, 2, 3)), _chunk(7, "new", (4, 5, 6))])

        assert store.load_chunks("alice", "d") == [_loaded(1, "new", (1, 2, 3)), _loaded(7, "new", (4, 5, 6))]
        assert store.get_hit_rate("alice", "d") == 0.0

    def test_saving_takes_the_hits_of_the_chunks(self, store: ChunkStore) -> None:
        """Loaded chunks can be saved again as they are, hits included, however many those are."""
        store.save_chunks("alice", "d", [_chunk(0), _chunk(1), _chunk(2)])
        store.record_hits("alice", "d", [0, 2], NOON)
        store.record_hits("alice", "d", [2], NOON + timedelta(hours=1))
        chunks = store.load_chunks("alice", "d")
        chunks[1] = {**chunks[1], "hit_count": 12_345_678, "last_hit_at": NOON}

        store.save_chunks("bob", "e", chunks)

        assert store.load_chunks("bob", "e") == chunks

    def test_saving_an_index_twice_is_refused(self, store: ChunkStore) -> None:
        """`save_chunks` with one index twice is an `InvalidDocumentError`, and what was there stays."""
        store.save_chunks("alice", "d", [_chunk(0, "old")])
        with pytest.raises(InvalidDocumentError):
            store.save_chunks("alice", "d", [_chunk(1), _chunk(1)])
        assert store.load_chunks("alice", "d") == [_loaded(0, "old")]

    def test_vectors_of_two_widths_are_refused(self, store: ChunkStore) -> None:
        """Vectors of two widths in one document are a `ValueError`, and what was there stays."""
        store.save_chunks("alice", "d", [_chunk(0, vector=(1.0, 2.0))])
        with pytest.raises(ValueError, match="width"):
            store.add_chunks("alice", "d", [_chunk(1, vector=(1.0, 2.0, 3.0))])
        assert store.load_chunks("alice", "d") == [_loaded(0, vector=(1.0, 2.0))]

    def test_saving_no_chunks_leaves_none(self, store: ChunkStore) -> None:
        """`save_chunks` with an empty list leaves the document without chunks, so there are none to delete."""
        store.save_chunks("alice", "d", [_chunk(0)])
        store.save_chunks("alice", "d", [])
        assert store.load_chunks("alice", "d") == []
        assert store.delete("alice", "d") is False

    # Hits

    def test_hits_are_counted_by_chunk(self, store: ChunkStore) -> None:
        """Each call counts one hit for each of its chunks, and keeps when; twice in one call is once."""
        store.save_chunks("alice", "d", [_chunk(index) for index in range(4)])
        later = NOON + timedelta(seconds=1)

        store.record_hits("alice", "d", [2, 0, 2], NOON)
        store.record_hits("alice", "d", (index for index in [2]), later)
        store.record_hits("alice", "d", [], later)

        assert _hits(store) == {0: (1, NOON), 2: (2, later)}
        assert store.get_hit_rate("alice", "d") == 0.5

    def test_times_of_hits_are_aware(self, store: ChunkStore) -> None:
        """The time of a hit comes back aware and in UTC, whatever its zone was; a naive one is read as UTC."""
        store.save_chunks("alice", "d", [_chunk(index) for index in range(3)])
        store.record_hits("alice", "d", [0], NOON.astimezone(timezone(timedelta(hours=-8))))
        store.record_hits("alice", "d", [1], NOON.replace(tzinfo=None))
        before = datetime.now(timezone.utc)
        store.record_hits("alice", "d", [2])
        after = datetime.now(timezone.utc)

        moments = [last for _, last in _hits(store).values()]
        assert moments[:2] == [NOON, NOON]
        assert moments[2] is not None
        assert before <= moments[2] <= after
        assert [moment.utcoffset() for moment in moments if moment is not None] == [timedelta(0)] * 3

    def test_numbers_of_numpy_count_as_well(self, store: ChunkStore) -> None:
        """Chunk numbers that come out of numpy are numbers like others."""
        store.save_chunks("alice", "d", [_chunk(int(index)) for index in np.arange(3)])
        store.record_hits("alice", "d", np.array([0, 2]), NOON)
        store.record_hits("alice", "d", [np.int64(2)], NOON)
        assert _hits(store) == {0: (1, NOON), 2: (2, NOON)}

    def test_the_hit_rate_is_the_fraction_that_ever_answered(self, store: ChunkStore) -> None:
        """The hit rate counts chunks, not hits: 0, a third, two thirds, all."""
        store.save_chunks("alice", "d", [_chunk(index) for index in range(3)])
        rates = [store.get_hit_rate("alice", "d")]
        for index in (1, 1, 0, 2):
            store.record_hits("alice", "d", [index], NOON)
            rates.append(store.get_hit_rate("alice", "d"))
        assert rates == [0.0, 1 / 3, 1 / 3, 2 / 3, 1.0]

    def test_hits_of_an_unknown_document_are_harmless(self, store: ChunkStore) -> None:
        """Hits of what is not there make nothing: no chunk, no hit once there are chunks."""
        store.record_hits("alice", "d", [0, 1], NOON)
        store.record_hits("alice", "d", [0], NOON, copy_id="gone")
        assert store.load_chunks("alice", "d") == []
        assert store.delete("alice", "d") is False
        store.save_chunks("alice", "d", [_chunk(0)])
        assert _hits(store) == {}

    def test_hits_never_touch_the_copy(self, store: ChunkStore, monkeypatch: pytest.MonkeyPatch) -> None:
        """Recording hits writes no copy: the stored bytes are the same, and `write` is not called."""
        store.save_chunks("alice", "d", [_chunk(0), _chunk(1)])
        (copy_id,) = store.place.copies("alice", "d")
        before = store.place.read("alice", "d", copy_id, texts=True, vectors=True)

        def write(*_: object) -> None:
            pytest.fail("a copy was written")

        monkeypatch.setattr(store.place, "write", write)
        for _ in range(5):
            store.record_hits("alice", "d", [0, 1], NOON)

        assert store.place.copies("alice", "d") == [copy_id]
        assert store.place.read("alice", "d", copy_id, texts=True, vectors=True) == before
        assert _hits(store) == {0: (5, NOON), 1: (5, NOON)}

    def test_hits_are_exact_under_contention(self, store: ChunkStore) -> None:
        """8 threads that record 15 hits each make 120 of the shared chunk, and 15 of each one's own."""
        store.save_chunks("alice", "d", [_chunk(index) for index in range(_THREADS + 1)])

        def hit(number: int) -> None:
            for _ in range(_ROUNDS):
                store.record_hits("alice", "d", [number, _THREADS], NOON)

        in_threads(_THREADS, hit)

        own = dict.fromkeys(range(_THREADS), (_ROUNDS, NOON))
        assert _hits(store) == {**own, _THREADS: (_THREADS * _ROUNDS, NOON)}

    def test_adding_from_many_threads_loses_nothing(self, store: ChunkStore) -> None:
        """8 threads that add overlapping chunks through one store add each index once, and count it once."""

        def add(number: int) -> int:
            return sum(
                store.add_chunks("alice", "d", [_chunk(index, f"text {index}") for index in (at, at + number)])
                for at in range(5)
            )

        added = in_threads(_THREADS, add)

        expected = range(5 - 1 + _THREADS - 1 + 1)
        assert sum(added) == len(expected)
        assert store.load_chunks("alice", "d") == [_loaded(index, f"text {index}") for index in expected]

    def test_a_reader_never_finds_a_document_empty_that_is_being_replaced(self, store: ChunkStore) -> None:
        """While one thread saves a document's chunks anew, 7 others always find all chunks of one of the savings."""
        store.save_chunks("alice", "d", [_chunk(index, "0") for index in range(3)])

        def work(number: int) -> set[tuple[str, ...]]:
            if number == 0:
                for at in range(1, 10):
                    store.save_chunks("alice", "d", [_chunk(index, str(at)) for index in range(3)])
            return {tuple(chunk["text"] for chunk in store.load_chunks("alice", "d")) for _ in range(10)}

        found = set().union(*in_threads(_THREADS, work))
        assert found <= {(str(at),) * 3 for at in range(10)}

    # Deleting, users, ids

    def test_delete_removes_chunks_and_hits_and_tells(self, store: ChunkStore) -> None:
        """`delete` is `True` once, then `False`; chunks that come back later have no hits of before."""
        store.save_chunks("alice", "d", [_chunk(0), _chunk(1)])
        store.save_chunks("alice", "other", [_chunk(0, "other")])
        store.record_hits("alice", "d", [0], NOON)

        assert store.delete("alice", "d") is True
        assert store.delete("alice", "d") is False

        assert store.load_chunks("alice", "d") == []
        assert store.load_chunks("alice", "other") == [_loaded(0, "other")]
        assert store.add_chunks("alice", "d", [_chunk(0)]) == 1
        assert _hits(store) == {}

    def test_deleting_a_user_counts_chunks(self, store: ChunkStore) -> None:
        """`delete_user` tells how many chunks went, of all documents; the second time none."""
        store.save_chunks("alice", "d", [_chunk(index) for index in range(3)])
        store.save_chunks("alice", "e", [_chunk(index) for index in range(4)])
        store.save_chunks("bob", "d", [_chunk(0, "bob's")])
        store.record_hits("alice", "d", [0], NOON)
        store.record_hits("bob", "d", [0], NOON)

        assert store.delete_user("alice") == 7
        assert store.delete_user("alice") == 0

        assert store.load_chunks("alice", "d") == store.load_chunks("alice", "e") == []
        assert store.load_chunks("bob", "d") == [_loaded(0, "bob's", hit_count=1, last_hit_at=NOON)]
        store.save_chunks("alice", "d", [_chunk(0)])
        assert _hits(store) == {}

    def test_two_users_with_the_same_document_are_separate(self, store: ChunkStore) -> None:
        """Adding, hitting and deleting of one user never touch another user's chunks of the same document."""
        store.save_chunks("alice", "d", [_chunk(0, "alice's"), _chunk(1, "alice's")])
        assert store.load_chunks("bob", "d") == []
        assert store.add_chunks("bob", "d", [_chunk(0, "bob's")]) == 1
        store.record_hits("bob", "d", [0], NOON)
        assert store.get_hit_rate("alice", "d") == 0.0
        store.save_chunks("alice", "d", [_chunk(5, "alice's")])
        store.delete("alice", "d")
        assert store.load_chunks("bob", "d") == [_loaded(0, "bob's", hit_count=1, last_hit_at=NOON)]

    def test_awkward_document_ids_stay_apart(self, store: ChunkStore) -> None:
        """Each awkward document id has chunks and hits of its own, and deleting one deletes no other."""
        for doc_id in AWKWARD_IDS:
            store.save_chunks("alice", doc_id, [_chunk(0, doc_id), _chunk(1, doc_id)])
        for count, doc_id in enumerate(AWKWARD_IDS):
            store.record_hits("alice", doc_id, [count % 2], NOON)

        for count, doc_id in enumerate(AWKWARD_IDS):
            assert [chunk["text"] for chunk in store.load_chunks("alice", doc_id)] == [doc_id, doc_id]
            assert _hits(store, doc_id=doc_id) == {count % 2: (1, NOON)}
            assert store.delete("alice", doc_id) is True
        assert store.delete_user("alice") == 0

    def test_awkward_user_ids_stay_apart(self, store: ChunkStore) -> None:
        """Each awkward user id has chunks of its own, and deleting one user deletes no other."""
        for user_id in AWKWARD_IDS:
            store.save_chunks(user_id, "d", [_chunk(0, user_id)])
        for user_id in AWKWARD_IDS:
            assert store.load_chunks(user_id, "d") == [_loaded(0, user_id)]
            assert store.delete_user(user_id) == 1

    def test_user_and_document_id_are_not_joined(self, store: ChunkStore) -> None:
        """User `a` with document `b:c` is not user `a:b` with document `c`, with any separator."""
        pairs = [
            pair
            for joint in (":", "/", "|", "%3A", "\0", "-", ".")
            for pair in (("a", f"b{joint}c"), (f"a{joint}b", "c"))
        ]
        for user_id, doc_id in pairs:
            store.add_chunks(user_id, doc_id, [_chunk(0, f"{user_id!r} {doc_id!r}")])
        for user_id, doc_id in pairs:
            assert store.load_chunks(user_id, doc_id) == [_loaded(0, f"{user_id!r} {doc_id!r}")]

    def test_ids_that_name_nothing_are_refused(self, store: ChunkStore) -> None:
        """A blank or non-string user or document id is refused by name, and nothing is written or removed."""
        store.save_chunks("alice", "d", [_chunk(0)])
        asks: list[Callable[[Any, Any], object]] = [
            lambda user_id, doc_id: store.add_chunks(user_id, doc_id, [_chunk(0)]),
            lambda user_id, doc_id: store.save_chunks(user_id, doc_id, [_chunk(0)]),
            store.load_chunks,
            store.get_hit_rate,
            store.delete,
        ]
        nothing: tuple[object, ...] = ("", " \n", None, 7)
        for ask in asks:
            for name in nothing:
                with pytest.raises(InvalidUserError):
                    ask(name, "d")
                with pytest.raises(InvalidDocumentError):
                    ask("alice", name)
        delete_user: Callable[[Any], object] = store.delete_user
        for name in nothing:
            with pytest.raises(InvalidUserError):
                delete_user(name)
        assert store.delete_user("alice") == 1
