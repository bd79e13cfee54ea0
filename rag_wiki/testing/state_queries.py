"""What every state store promises to a query: the user's clocks, what has been idle, and the revision."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

from rag_wiki.storage.base import StateStore
from rag_wiki.storage.records import Clocks, DocumentState, QueryStart, UserChange, UserDocRecord
from rag_wiki.testing.awkward import NOON, a_record, just

__all__ = ["QueryPromises"]

_NEVER = 10**6


def _counted(store: StateStore, doc_id: str) -> UserDocRecord:
    """The record with one more fetch, which no index need know."""
    record = store.get("alice", doc_id)
    assert record is not None
    return replace(record, fetch_count=record.fetch_count + 1)


def _pass_queries(store: StateStore, queries: int, searches: int) -> None:
    store.change("alice", [], just(UserChange(queries=queries, searches=searches)))


def _idle(store: StateStore, lapse_after: int, demote_after: int) -> list[str]:
    """The documents that `begin_query` names as idle, by id."""
    start = store.begin_query("alice", lapse_after, demote_after)
    view = store.change("alice", [], lambda view: UserChange(outcome=view), idle_keys=start.idle_keys).outcome
    assert len(set(start.idle_keys)) == len(start.idle_keys) == len(view.records)
    return sorted(view.records)


_MOVES: dict[str, Callable[[UserDocRecord], UserDocRecord]] = {
    "state": lambda record: replace(record, user_state=DocumentState.PINNED),
    "let go": lambda record: replace(record, user_state=DocumentState.DEMOTED),
    "copy": lambda record: replace(record, copy_id="another"),
    "title": lambda record: replace(record, doc_title="Another Title"),
    "path": lambda record: replace(record, doc_path="another/path"),
    "whole document": lambda record: replace(record, always_full_doc=True),
    "pinned by user": lambda record: replace(record, pinned_by_user=True),
    "stale": lambda record: replace(record, stale_since=NOON),
    "version": lambda record: replace(record, source_version="v2"),
    "content source": lambda record: replace(record, content_source="loader"),
}
"""Changes of a saved record that an index of the saved copies must hear of."""

_KEEPS: dict[str, Callable[[UserDocRecord], UserDocRecord]] = {
    "nothing": replace,
    "count": lambda record: replace(record, fetch_count=9, last_fetched_at=NOON),
    "score": lambda record: replace(record, decay_score=0.2, pin_candidate_since=NOON),
    "misses": lambda record: replace(record, queries_missed=4, cache_miss_streak=4),
    "vote": lambda record: replace(record, explicit_signal=1.0),
    "texts": lambda record: replace(record, retrieved=("digest",), retrieved_chars=5),
}
"""Changes of a saved record that such an index need not hear of."""


class QueryPromises:
    """Clocks, `begin_query`, the revision and the number of saved documents."""

    def test_a_new_user_starts_at_zero(self, store: StateStore) -> None:
        """A user that the store never met has clocks at zero, no revision, and nothing saved or idle."""
        assert store.begin_query("alice", 1, 1) == QueryStart(Clocks(0, 0), 0, 0, ())
        assert store.saved_count("alice") == 0

    def test_beginning_a_query_changes_nothing(self, store: StateStore) -> None:
        """`begin_query` reads: the clocks stand still until `change` moves them, each by itself."""
        _pass_queries(store, 3, 1)
        for _ in range(2):
            assert store.begin_query("alice", 1, 1).clocks == Clocks(3, 1)
        _pass_queries(store, 1, 0)
        _pass_queries(store, 0, 2)
        assert store.begin_query("alice", 1, 1).clocks == Clocks(4, 3)
        assert store.begin_query("bob", 1, 1).clocks == Clocks(0, 0)

    def test_misses_grow_with_the_clocks(self, store: StateStore) -> None:
        """Misses come back as they were written, and grow by one with each query or search that passes."""
        _pass_queries(store, 10, 10)
        saved = a_record(doc_id="saved", user_state=DocumentState.CLAIMED, queries_missed=2, cache_miss_streak=5)
        counted = a_record(doc_id="counted", fetch_count=1, queries_missed=0, cache_miss_streak=1)
        store.upsert(saved)
        store.upsert(counted)
        assert store.list_by_state("alice") == [counted, saved]

        _pass_queries(store, 1, 0)
        _pass_queries(store, 2, 4)

        expected = [
            replace(counted, queries_missed=3, cache_miss_streak=5),
            replace(saved, queries_missed=5, cache_miss_streak=9),
        ]
        assert store.list_by_state("alice") == expected
        assert [record for page in store.pages("alice") for record in page] == expected
        assert [store.get("alice", "counted"), store.get("alice", "saved")] == expected
        view = store.change("alice", ["saved", "counted"], lambda view: UserChange(outcome=view)).outcome
        assert [view.records["counted"], view.records["saved"]] == expected
        assert view.clocks == Clocks(13, 14)

    def test_misses_are_as_of_after_the_clocks_moved(self, store: StateStore) -> None:
        """A record written in the change that moves the clocks has the misses that it was written with."""
        record = a_record(fetch_count=1, queries_missed=0, cache_miss_streak=2)
        store.change("alice", ["d"], just(UserChange(records=[record], queries=1, searches=1)))
        assert store.get("alice", "d") == record

    def test_misses_are_never_negative(self, store: StateStore) -> None:
        """More misses than there were queries come back as they were written, and zero stays zero."""
        many, none = a_record(doc_id="many", queries_missed=50, cache_miss_streak=60), a_record(doc_id="none")
        store.upsert(many)
        store.upsert(none)
        assert store.list_surfaced("alice") == [many, none]

    def test_what_lapses_is_exact_at_the_boundary(self, store: StateStore) -> None:
        """A counted document is idle when this query, missing it, makes `lapse_after` misses in a row."""
        for missed in range(6):
            store.upsert(a_record(doc_id=f"d{missed}", fetch_count=1, queries_missed=missed))

        for passed in range(3):
            for lapse_after in range(1, 9):
                expected = [f"d{missed}" for missed in range(6) if missed + passed + 1 >= lapse_after]
                assert _idle(store, lapse_after, _NEVER) == expected
            _pass_queries(store, 1, 0)
        _pass_queries(store, 0, 50)
        assert _idle(store, _NEVER, 1) == []

    def test_what_is_let_go_is_exact_at_the_boundary(self, store: StateStore) -> None:
        """A saved document is idle when this search, missing it, makes `demote_after` misses for each saved one."""
        store.upsert(a_record(doc_id="not saved", fetch_count=0))
        for missed in range(6):
            state = DocumentState.PINNED if missed % 2 else DocumentState.CLAIMED
            store.upsert(a_record(doc_id=f"d{missed}", user_state=state, cache_miss_streak=6 * missed))

        for passed in range(8):
            for demote_after in range(1, 9):
                expected = [f"d{missed}" for missed in range(6) if 6 * missed + passed + 1 >= 6 * demote_after]
                assert _idle(store, _NEVER, demote_after) == expected
            _pass_queries(store, 0, 1)
        _pass_queries(store, 50, 0)
        assert _idle(store, 1, _NEVER) == []

    def test_only_what_absence_would_change_is_idle(self, store: StateStore) -> None:
        """Idle are counts and suggestions that can lapse and copies that can be let go, whatever else is there."""
        missed: dict[str, Any] = {"queries_missed": 100, "cache_miss_streak": 100}
        for record in (
            a_record(doc_id="a count", fetch_count=1, **missed),
            a_record(doc_id="a suggestion", user_state=DocumentState.SUGGESTED, suggestion_sent=True, **missed),
            a_record(doc_id="claimed", user_state=DocumentState.CLAIMED, **missed),
            a_record(doc_id="pinned", user_state=DocumentState.PINNED, **missed),
            a_record(doc_id="nothing to reset", fetch_count=0, **missed),
            a_record(doc_id="pinned by the user", user_state=DocumentState.PINNED, pinned_by_user=True, **missed),
            a_record(doc_id="demoted", user_state=DocumentState.DEMOTED, fetch_count=4, **missed),
            a_record("bob", "bob's", fetch_count=1, **missed),
        ):
            store.upsert(record)
        assert _idle(store, 3, 10) == ["a count", "a suggestion", "claimed", "pinned"]
        assert _idle(store, 3, _NEVER) == ["a count", "a suggestion"]
        assert _idle(store, _NEVER, 10) == ["claimed", "pinned"]

    def test_what_was_settled_is_no_longer_idle(self, store: StateStore) -> None:
        """Idle documents that a change resets, lets go, saves or deletes are not named again."""
        ids = ["deleted", "demoted", "hit", "left", "saved", "seen"]
        states = {"demoted": DocumentState.CLAIMED, "hit": DocumentState.CLAIMED}
        for doc_id in ids:
            state = states.get(doc_id, DocumentState.SURFACED)
            store.upsert(
                a_record(doc_id=doc_id, user_state=state, fetch_count=1, queries_missed=2, cache_miss_streak=19)
            )
        start = store.begin_query("alice", 3, 10)
        assert _idle(store, 3, 10) == ids

        settled = UserChange(
            records=[
                a_record(doc_id="demoted", user_state=DocumentState.DEMOTED),
                a_record(doc_id="hit", user_state=DocumentState.CLAIMED, cache_miss_streak=0),
                a_record(doc_id="saved", user_state=DocumentState.CLAIMED),
                a_record(doc_id="seen", fetch_count=2, queries_missed=0),
            ],
            deleted=["deleted"],
            queries=1,
            searches=1,
        )
        store.change("alice", [], just(settled), idle_keys=start.idle_keys)

        assert _idle(store, 3, 10) == ["left"]
        assert store.saved_count("alice") == 2

    def test_an_idle_key_of_a_deleted_document_is_harmless(self, store: StateStore) -> None:
        """A document that went between `begin_query` and `change` is simply not in the view."""
        store.upsert(a_record(fetch_count=1, queries_missed=5))
        start = store.begin_query("alice", 3, 10)
        store.delete("alice", "d")
        view = store.change("alice", ["d"], lambda view: UserChange(outcome=view), idle_keys=start.idle_keys).outcome
        assert dict(view.records) == {}

    def test_the_revision_moves_with_what_an_index_knows(self, store: StateStore) -> None:
        """The revision is another one after a change of a saved document that its index must hear of."""
        record = a_record(user_state=DocumentState.CLAIMED, copy_id="copy")
        for what, changed in _MOVES.items():
            store.upsert(record)
            before = store.begin_query("alice", 3, 10).revision

            store.change("alice", ["d"], just(UserChange(records=[changed(record)])))

            after = store.begin_query("alice", 3, 10).revision
            assert after != before, what
            assert store.change("alice", [], lambda view: UserChange(outcome=view.revision)).outcome == after

    def test_the_revision_stays_when_an_index_need_not_know(self, store: StateStore) -> None:
        """The revision stays with a change that no index of the saved copies has to hear of."""
        record = a_record(user_state=DocumentState.CLAIMED, copy_id="copy")
        store.upsert(record)
        before = store.begin_query("alice", 3, 10).revision
        for what, changed in _KEEPS.items():
            store.change("alice", ["d"], just(UserChange(records=[changed(record)], queries=1, searches=1)))
            assert store.begin_query("alice", 3, 10).revision == before, what

    def test_the_revision_is_about_saved_documents(self, store: StateStore) -> None:
        """Saving moves the revision, and so does the end of a life; another change of unsaved documents does not."""

        def revision() -> int:
            return store.begin_query("alice", 3, 10).revision

        assert revision() == 0
        store.upsert(a_record(doc_id="unsaved"))
        seen = [revision()]
        assert seen[0] > 0
        store.upsert(a_record(doc_id="unsaved", doc_title="Another Title", user_state=DocumentState.SUGGESTED))
        store.upsert(a_record(doc_id="another"))
        store.upsert(a_record("bob", user_state=DocumentState.CLAIMED))
        assert revision() == seen[0]

        for act in (
            lambda: store.delete("alice", "unsaved"),
            lambda: store.upsert(a_record(user_state=DocumentState.CLAIMED)),
            lambda: store.upsert(a_record(doc_id="e", user_state=DocumentState.CLAIMED)),
            lambda: store.delete("alice", "d"),
        ):
            act()
            assert revision() not in seen
            seen.append(revision())

    def test_a_revision_never_comes_back(self, store: StateStore) -> None:
        """A user who was forgotten and saves anew has no revision that an index of before may still carry."""
        seen: set[int] = set()
        for _ in range(3):
            for number in range(5):
                store.upsert(a_record(doc_id=f"d{number}", user_state=DocumentState.CLAIMED))
                revision = store.begin_query("alice", 3, 10).revision
                assert revision not in seen
                seen.add(revision)
            store.forget_user("alice")

    def test_what_changed_since_a_revision_is_told(self, store: StateStore) -> None:
        """`saved_since` names what was saved, moved or let go since a revision, or says that it can't tell."""
        for doc_id in ("kept", "moved", "gone"):
            store.upsert(a_record(doc_id=doc_id, user_state=DocumentState.CLAIMED, copy_id="copy", full_content="text"))
        store.upsert(a_record(doc_id="unsaved"))
        store.upsert(a_record("bob", user_state=DocumentState.CLAIMED))
        before = store.begin_query("alice", 3, 10).revision

        store.upsert(a_record(doc_id="moved", user_state=DocumentState.PINNED, copy_id="another"))
        store.upsert(a_record(doc_id="gone", user_state=DocumentState.DEMOTED))
        store.upsert(a_record(doc_id="new", user_state=DocumentState.CLAIMED))
        store.change("alice", ["kept"], just(UserChange(records=[_counted(store, "kept")], queries=1, searches=1)))

        now = store.begin_query("alice", 3, 10).revision
        told, nothing = store.saved_since("alice", before), store.saved_since("alice", now)
        if told is not None:
            assert sorted(record.doc_id for record in told.saved) == ["moved", "new"]
            assert {record.doc_id: (record.user_state, record.copy_id) for record in told.saved}["moved"] == (
                DocumentState.PINNED,
                "another",
            )
            assert {record.full_content for record in told.saved} == {None}
            assert list(told.gone) == ["gone"]
        if nothing is not None:
            assert (list(nothing.saved), list(nothing.gone)) == ([], [])

    def test_what_changed_is_not_told_across_a_gap(self, store: StateStore) -> None:
        """After a saved document was deleted, or the user forgotten, `saved_since` says that it can't tell."""
        store.upsert(a_record(doc_id="d", user_state=DocumentState.CLAIMED))
        store.upsert(a_record(doc_id="e", user_state=DocumentState.CLAIMED))
        before = store.begin_query("alice", 3, 10).revision
        store.delete("alice", "d")
        assert store.saved_since("alice", before) is None

        # The mark of what happened to a document goes with it, also when it was let go before.
        before = store.begin_query("alice", 3, 10).revision
        store.upsert(a_record(doc_id="e", user_state=DocumentState.DEMOTED))
        store.delete("alice", "e")
        assert store.saved_since("alice", before) is None

        before = store.begin_query("alice", 3, 10).revision
        store.forget_user("alice")
        assert store.saved_since("alice", before) is None
        store.upsert(a_record(doc_id="f", user_state=DocumentState.CLAIMED))
        assert store.saved_since("alice", before) is None
        assert store.saved_since("nobody", 0) is None

    def test_saved_documents_are_counted(self, store: StateStore) -> None:
        """`saved_count` follows each document as it is saved, pinned, let go, deleted and saved again."""
        steps = [
            ("d", DocumentState.SUGGESTED, 0),
            ("d", DocumentState.CLAIMED, 1),
            ("d", DocumentState.PINNED, 1),
            ("e", DocumentState.PINNED, 2),
            ("d", DocumentState.DEMOTED, 1),
            ("d", DocumentState.DEMOTED, 1),
            ("d", DocumentState.CLAIMED, 2),
            ("d", DocumentState.CLAIMED, 2),
        ]
        for doc_id, state, expected in steps:
            store.upsert(a_record(doc_id=doc_id, user_state=state))
            assert store.saved_count("alice") == expected
            assert store.begin_query("alice", 3, 10).saved == expected
        store.delete("alice", "d")
        store.delete("alice", "d")
        assert store.saved_count("alice") == 1
        assert store.saved_count("bob") == 0

    def test_times_between_users_do_not_mix(self, store: StateStore) -> None:
        """One user's queries age no other user's documents."""
        record = a_record("bob", fetch_count=1, queries_missed=1, last_fetched_at=NOON - timedelta(days=1))
        store.upsert(record)
        _pass_queries(store, 9, 9)
        assert store.get("bob", "d") == record
        assert store.begin_query("bob", 3, 10).idle_keys == ()
