"""What every state store promises about records: what goes in comes out, of the right user, in the right list."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, fields, replace
from datetime import datetime, timedelta, timezone
from typing import Any

import numpy as np
import pytest

from rag_wiki.errors import InvalidDocumentError, InvalidUserError
from rag_wiki.storage.base import StateStore
from rag_wiki.storage.records import DocumentState, UserChange, UserDocRecord
from rag_wiki.testing.awkward import AWKWARD_IDS, AWKWARD_TEXTS, NOON, a_record, a_text, an_event, just

__all__ = ["RecordPromises"]

_NOTHING: tuple[object, ...] = ("", " ", "\t\n", None, 7, b"d")
"""What names no user and no document."""

_ONE_IN_EACH_STATE = {state.value.lower(): state for state in DocumentState}


def _full_record() -> UserDocRecord:
    """A record in which no field has its default."""
    return a_record(
        user_state=DocumentState.PINNED,
        fetch_count=12,
        last_fetched_at=NOON,
        suggestion_sent=True,
        decay_score=0.1 + 0.2,
        explicit_signal=-1.0,
        full_content="the saved text",
        cached_at=NOON + timedelta(microseconds=1),
        pinned_at=NOON + timedelta(days=1),
        demoted_at=NOON - timedelta(days=1),
        no_resiluggest_until=NOON + timedelta(days=30),
        next_suggest_at=24,
        queries_missed=7,
        cache_miss_streak=3,
        always_full_doc=True,
        decline_count=2,
        pinned_by_user=True,
        pin_candidate_since=NOON - timedelta(hours=1),
        demotion_candidate_since=NOON - timedelta(hours=2),
        copy_id="0123456789abcdef",
        chunk_count=5,
        content_source="loader",
        source_version="v2",
        stale_since=NOON - timedelta(minutes=1),
        retrieved=("digest one", "digest two"),
        retrieved_seen=(7, 9),
        life=11,
        retrieved_chars=345,
        why="the user pinned it",
    )


def _by_id(record: UserDocRecord) -> str:
    return record.doc_id


class RecordPromises:
    """`get`, `upsert`, `delete`, the lists and `pages`."""

    def test_an_unknown_document_is_none(self, store: StateStore) -> None:
        """`get` of a document that was never written is `None`, also when others of the user are there."""
        assert store.get("alice", "d") is None
        store.upsert(a_record(doc_id="other"))
        assert store.get("alice", "d") is None

    def test_every_field_comes_back(self, store: StateStore) -> None:
        """A record comes back with every one of its fields, none of which has its default here."""
        record = _full_record()
        left_at_default = [
            item.name
            for item in fields(record)
            if item.default is not MISSING and getattr(record, item.name) == item.default
        ]
        assert left_at_default == []

        store.upsert(record)

        found = store.get("alice", "d")
        assert found == record
        assert store.list_pinned("alice") == [record]
        # The fields that are no part of what makes two records equal.
        assert found is not None
        assert (found.life, found.why) == (record.life, record.why)

    def test_defaults_come_back(self, store: StateStore) -> None:
        """A record of defaults comes back as it is."""
        record = UserDocRecord("alice", "d", "", "")
        store.upsert(record)
        assert store.get("alice", "d") == record

    def test_upsert_writes_in_place_of_the_one_before(self, store: StateStore) -> None:
        """The second `upsert` of a document replaces the first wholly, content and set fields included."""
        store.upsert(_full_record())
        plain = a_record(doc_title="Another Title")

        store.upsert(plain)

        assert store.get("alice", "d") == plain
        assert store.list_by_state("alice") == [plain]

    def test_upsert_leaves_history_and_texts(self, store: StateStore) -> None:
        """Writing a record anew touches neither its history nor its retrieved texts."""
        event, text = an_event(), a_text()
        store.change("alice", ["d"], just(UserChange(records=[a_record()], events=[event], texts=[text])))

        store.upsert(a_record(fetch_count=2))

        assert store.history("alice", "d") == [event]
        assert store.retrieved_texts("alice", "d") == [text]

    def test_a_returned_record_is_a_copy(self, store: StateStore) -> None:
        """Changing a record that the store returned, or that it was given, changes nothing in the store."""
        given = a_record(user_state=DocumentState.CLAIMED, fetch_count=1, full_content="text")
        store.upsert(given)
        expected = replace(given)
        given.fetch_count, given.full_content = 50, "changed after it was given"

        got = store.get("alice", "d")
        listed = store.list_claimed("alice")[0]
        assert got is not None
        assert (got, listed) == (expected, expected)
        got.fetch_count = listed.fetch_count = 99
        got.doc_title = listed.doc_title = "changed after it was returned"

        assert store.get("alice", "d") == expected
        assert store.list_claimed("alice") == [expected]

    def test_times_of_other_zones_come_back_aware_and_equal(self, store: StateStore) -> None:
        """A time of any zone comes back aware, in UTC, and the same instant to the microsecond."""
        for hours in (-8.0, 0.0, 5.75, 14.0):
            moment = NOON.astimezone(timezone(timedelta(hours=hours)))
            store.upsert(a_record(last_fetched_at=moment, stale_since=moment))

            got = store.get("alice", "d")

            assert got is not None
            assert got.last_fetched_at is not None
            assert (got.last_fetched_at, got.stale_since) == (moment, moment)
            assert got.last_fetched_at.utcoffset() == timedelta(0)
            assert got.last_fetched_at.microsecond == NOON.microsecond

    def test_a_naive_time_is_read_as_utc(self, store: StateStore) -> None:
        """A time without a zone is read as UTC, also one set on the record later; other zones are kept as instants."""
        record = a_record()
        record.last_fetched_at = datetime(2026, 3, 1, 12, 0)  # noqa: DTZ001 - naive is what this is about
        record.cached_at = NOON.astimezone(timezone(timedelta(hours=-8)))

        for write in (store.upsert, lambda record: store.change("alice", ["d"], just(UserChange(records=[record])))):
            store.delete("alice", "d")
            write(record)
            got = store.get("alice", "d")
            assert got is not None
            assert got.last_fetched_at == datetime(2026, 3, 1, 12, 0, tzinfo=timezone.utc)
            assert got.cached_at == NOON

    def test_awkward_texts_come_back(self, store: StateStore) -> None:
        """Title, path, version and content are the same strings afterwards, whatever they hold."""
        for text in AWKWARD_TEXTS:
            record = a_record(doc_title=text, doc_path=text, source_version=text, full_content=text)
            store.upsert(record)
            assert store.get("alice", "d") == record
            assert store.list_surfaced("alice") == [record]

    def test_scores_of_any_kind_of_number_come_back(self, store: StateStore) -> None:
        """A score is the same number afterwards, whether it was given as a float, an integer or a numpy value."""
        for score in (1.0, 0.1 + 0.2, 1e-300, 5e-324, 1, True, np.float64(0.5)):
            store.upsert(a_record(decay_score=score))
            (read,) = store.list_by_state("alice")
            assert (type(read.decay_score), read.decay_score) == (float, float(score))
            store.change("alice", ["d"], just(UserChange(scores={"d": np.float64(score) / 2})))
            got = store.get("alice", "d")
            assert got is not None
            assert got.decay_score == float(score) / 2

    def test_empty_content_is_not_absent_content(self, store: StateStore) -> None:
        """Content `""` comes back as `""`, and content `None` as `None`."""
        store.upsert(a_record(doc_id="empty", full_content=""))
        store.upsert(a_record(doc_id="absent", full_content=None))
        assert [record.full_content for record in store.list_surfaced("alice")] == [None, ""]

    def test_awkward_document_ids_stay_apart(self, store: StateStore) -> None:
        """Each awkward document id names a record of its own, and the lists are sorted by these ids."""
        expected = {
            doc_id: a_record(doc_id=doc_id, fetch_count=count, full_content=doc_id)
            for count, doc_id in enumerate(AWKWARD_IDS)
        }
        contents = dict(zip(AWKWARD_IDS, AWKWARD_IDS, strict=True))
        change = UserChange(records=list(expected.values()), contents=contents)
        store.change("alice", AWKWARD_IDS, just(change))

        for doc_id in AWKWARD_IDS:
            assert store.get("alice", doc_id) == expected[doc_id]
        assert store.list_surfaced("alice") == [expected[doc_id] for doc_id in sorted(AWKWARD_IDS)]

    def test_deleting_an_awkward_document_id_deletes_no_other(self, store: StateStore) -> None:
        """Each awkward document id can be deleted, and all others are still there then."""
        left = set(AWKWARD_IDS)
        records = [a_record(doc_id=doc_id) for doc_id in AWKWARD_IDS]
        store.change("alice", AWKWARD_IDS, just(UserChange(records=records)))

        for doc_id in AWKWARD_IDS:
            left.remove(doc_id)
            assert store.delete("alice", doc_id) is True
            assert {record.doc_id for page in store.pages("alice") for record in page} == left

    def test_awkward_user_ids_stay_apart(self, store: StateStore) -> None:
        """Each awkward user id has records of its own, and forgetting one forgets no other."""
        for count, user_id in enumerate(AWKWARD_IDS):
            store.upsert(a_record(user_id, fetch_count=count, user_state=DocumentState.CLAIMED))
        forgotten = set(AWKWARD_IDS[::2])

        for user_id in forgotten:
            store.forget_user(user_id)

        for count, user_id in enumerate(AWKWARD_IDS):
            expected = a_record(user_id, fetch_count=count, user_state=DocumentState.CLAIMED)
            assert store.list_claimed(user_id) == ([] if user_id in forgotten else [expected])
        assert store.list_active_users() == sorted(set(AWKWARD_IDS) - forgotten)

    def test_user_and_document_id_are_not_joined(self, store: StateStore) -> None:
        """User `a` with document `b:c` is not user `a:b` with document `c`, with any separator."""
        pairs = [
            pair
            for joint in (":", "/", "|", ",", "%3A", "\0", " ", "-", ".", "}")
            for pair in (("a", f"b{joint}c"), (f"a{joint}b", "c"))
        ]
        for count, (user_id, doc_id) in enumerate(pairs):
            store.upsert(a_record(user_id, doc_id, fetch_count=count))
        for count, (user_id, doc_id) in enumerate(pairs):
            assert store.get(user_id, doc_id) == a_record(user_id, doc_id, fetch_count=count)

    def test_nobody_is_refused(self, store: StateStore) -> None:
        """A user id that is blank or no string is an `InvalidUserError`, for reading and writing alike."""
        asks: list[Callable[[Any], object]] = [
            lambda nobody: store.get(nobody, "d"),
            lambda nobody: store.delete(nobody, "d"),
            store.list_claimed,
            store.saved_count,
            lambda nobody: store.begin_query(nobody, 3, 10),
            lambda nobody: store.change(nobody, ["d"], just(UserChange())),
            lambda nobody: store.history(nobody, "d"),
            store.forget_user,
        ]
        for nobody in _NOTHING:
            for ask in asks:
                with pytest.raises(InvalidUserError):
                    ask(nobody)
        assert store.list_active_users() == []

    def test_a_document_without_id_is_refused(self, store: StateStore) -> None:
        """A document id that is blank or no string is an `InvalidDocumentError`, and nothing is written then."""
        change = UserChange(records=[a_record()])
        asks: list[Callable[[Any], object]] = [
            lambda nothing: store.get("alice", nothing),
            lambda nothing: store.delete("alice", nothing),
            lambda nothing: store.change("alice", ["d", nothing], just(change)),
            lambda nothing: store.history("alice", nothing),
            lambda nothing: store.retrieved_texts("alice", nothing),
        ]
        for nothing in _NOTHING:
            for ask in asks:
                with pytest.raises(InvalidDocumentError):
                    ask(nothing)
        assert store.get("alice", "d") is None

    def test_delete_removes_every_trace_and_tells(self, store: StateStore) -> None:
        """`delete` is `True` once, then `False`; record, content, history and retrieved texts are gone."""
        record = a_record(user_state=DocumentState.CLAIMED, full_content="text")
        store.upsert(record)
        store.change("alice", ["d"], just(UserChange(events=[an_event()], texts=[a_text()])))

        assert store.delete("alice", "d") is True
        assert store.delete("alice", "d") is False

        assert store.get("alice", "d") is None
        assert store.list_by_state("alice") == []
        assert store.history("alice", "d") == []
        assert store.retrieved_texts("alice", "d") == []
        assert store.saved_count("alice") == 0

    def test_a_document_that_comes_back_starts_afresh(self, store: StateStore) -> None:
        """After a deletion a record of the same id has no content, history or texts of the one before."""
        store.upsert(a_record(full_content="text"))
        store.change("alice", ["d"], just(UserChange(events=[an_event()], texts=[a_text()])))
        store.delete("alice", "d")

        store.change("alice", ["d"], just(UserChange(records=[a_record()])))

        assert store.get("alice", "d") == a_record()
        assert store.history("alice", "d") == []
        assert store.retrieved_texts("alice", "d") == []

    def test_two_users_with_the_same_document_are_separate(self, store: StateStore) -> None:
        """What one user does to a document leaves the other user's record, content, history and texts alone."""
        bobs = a_record("bob", user_state=DocumentState.CLAIMED, full_content="bob's text", fetch_count=3)
        event, text = an_event(why="bob's"), a_text(text="bob's text")
        store.upsert(bobs)
        store.change("bob", ["d"], just(UserChange(events=[event], texts=[text])))
        before = store.begin_query("bob", 3, 10)

        store.upsert(a_record("alice", user_state=DocumentState.PINNED, full_content="alice's text"))
        store.change("alice", ["d"], just(UserChange(events=[an_event()], texts=[a_text()], queries=5, searches=5)))
        store.delete("alice", "d")

        assert store.get("bob", "d") == bobs
        assert store.history("bob", "d") == [event]
        assert store.retrieved_texts("bob", "d") == [text]
        assert store.begin_query("bob", 3, 10) == before

    def test_each_list_has_its_states(self, store: StateStore) -> None:
        """With a document in each state, each list holds exactly the documents that it is for."""
        for doc_id, state in _ONE_IN_EACH_STATE.items():
            store.upsert(a_record(doc_id=doc_id, user_state=state))

        def ids(records: list[UserDocRecord]) -> list[str]:
            return [record.doc_id for record in records]

        assert ids(store.list_claimed("alice")) == ["claimed"]
        assert ids(store.list_pinned("alice")) == ["pinned"]
        assert ids(store.list_surfaced("alice")) == ["suggested", "surfaced"]
        assert ids(store.list_for_decay("alice")) == ["claimed", "pinned"]
        saved, unreadable = store.list_saved("alice")
        assert (ids(saved), unreadable) == (["claimed", "pinned"], [])
        assert ids(store.list_by_state("alice")) == sorted(_ONE_IN_EACH_STATE)
        assert ids(store.list_by_state("alice", [DocumentState.DEMOTED])) == ["demoted"]
        assert ids(store.list_by_state("alice", [])) == []
        assert store.list_claimed("bob") == []

    def test_a_document_moves_from_list_to_list(self, store: StateStore) -> None:
        """A document is in the list of its present state, and in none of those before."""
        for state in (*DocumentState, DocumentState.SURFACED):
            store.upsert(a_record(user_state=state))
            found = {
                other: [record.user_state for record in store.list_by_state("alice", [other])]
                for other in DocumentState
            }
            assert found == {other: [state] if other is state else [] for other in DocumentState}

    def test_lists_are_sorted_by_document_id(self, store: StateStore) -> None:
        """The order of a list is that of the document ids, not of writing, and capitals come first."""
        ids = ["b", "a10", "C", "a2", "ä", "a", "B"]
        for doc_id in ids:
            store.upsert(a_record(doc_id=doc_id, user_state=DocumentState.CLAIMED))
        assert [record.doc_id for record in store.list_claimed("alice")] == ["B", "C", "a", "a10", "a2", "b", "ä"]

    def test_a_list_comes_with_content_or_without(self, store: StateStore) -> None:
        """`list_by_state` leaves the content out when asked to, and nothing else."""
        record = a_record(user_state=DocumentState.CLAIMED, full_content="text")
        store.upsert(record)
        assert store.list_by_state("alice", [DocumentState.CLAIMED]) == [record]
        assert store.list_by_state("alice", content=False) == [replace(record, full_content=None)]

    def test_pages_cover_everything_once(self, store: StateStore) -> None:
        """Pages of any size hold every record in the states asked for, once, without content."""
        expected = []
        for number in range(7):
            state = DocumentState.CLAIMED if number % 3 else DocumentState.SURFACED
            record = a_record(doc_id=f"d{number}", user_state=state, fetch_count=number)
            store.upsert(replace(record, full_content="text"))
            expected.append(record)

        for size in (1, 2, 7, 500):
            pages = list(store.pages("alice", size=size))
            claimed = list(store.pages("alice", [DocumentState.CLAIMED], size=size))

            assert sorted((record for page in pages for record in page), key=_by_id) == expected
            assert sorted(record.doc_id for page in claimed for record in page) == ["d1", "d2", "d4", "d5"]
            assert max(map(len, pages + claimed)) <= size
            assert list(store.pages("bob", size=size)) == []

    def test_pages_cover_everything_while_documents_go(self, store: StateStore) -> None:
        """Deleting what a page brought does not make a later page skip anything."""
        ids = [f"d{number}" for number in range(7)]
        records = [a_record(doc_id=doc_id) for doc_id in ids]
        for size in (1, 2, 500):
            store.change("alice", ids, just(UserChange(records=records)))
            seen = []
            for page in store.pages("alice", size=size):
                seen += [record.doc_id for record in page]
                store.change("alice", seen, just(UserChange(deleted=seen)))

            assert sorted(seen) == ids
            assert store.list_by_state("alice") == []

    def test_more_records_than_one_statement_holds(self, store: StateStore) -> None:
        """1,100 records written in one change are all there: in the list, in pages of 500, and by name."""
        states = (DocumentState.SURFACED, DocumentState.SURFACED, DocumentState.DEMOTED)
        records = [
            a_record(doc_id=f"d{number:04}", fetch_count=number, user_state=states[number % 3])
            for number in range(1100)
        ]
        demoted = records[2::3]
        ids = [record.doc_id for record in records]
        store.change("alice", ids, just(UserChange(records=records)))

        pages = list(store.pages("alice", size=500))
        seen = store.change("alice", ids, lambda view: UserChange(outcome=dict(view.records))).outcome

        assert store.list_by_state("alice") == records
        assert store.list_by_state("alice", [DocumentState.DEMOTED]) == demoted
        few = [record for page in store.pages("alice", [DocumentState.DEMOTED], size=200) for record in page]
        assert sorted(few, key=_by_id) == demoted
        assert [len(page) for page in pages] == [500, 500, 100]
        assert sorted((record for page in pages for record in page), key=_by_id) == records
        assert [seen[doc_id] for doc_id in ids] == records
