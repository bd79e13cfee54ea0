"""What every state store promises about users and jobs: who is active, forgetting, and turns that one worker takes."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from functools import partial

import numpy as np

from rag_wiki.storage.base import StateStore
from rag_wiki.storage.chunk_store import ChunkCopy, new_copy_id
from rag_wiki.storage.records import Clocks, DocumentState, ForgottenUser, PurgedDocument, UserChange
from rag_wiki.testing.awkward import AWKWARD_IDS, NOON, a_record, a_text, an_event, in_threads, just

__all__ = ["UserPromises"]

_DAY = timedelta(days=1)


def _save_something(store: StateStore, user_id: str) -> None:
    """Give a user two records, one of them saved with content and 3 chunks, 3 events and 2 retrieved texts."""
    copy = ChunkCopy(new_copy_id(), (0, 1, 2), ("one", "two", "three"), np.eye(3, dtype=np.float32))
    store.chunk_store.save_copy(user_id, "saved", copy)
    change = UserChange(
        records=[
            a_record(user_id, "saved", user_state=DocumentState.CLAIMED, copy_id=copy.copy_id, chunk_count=3),
            a_record(user_id, "counted", fetch_count=1, queries_missed=5),
        ],
        contents={"saved": "one two three"},
        events=[an_event("saved"), an_event("saved", "saved"), an_event("counted")],
        texts=[a_text("counted", "one"), a_text("counted", "two")],
        chunk_hits={"saved": (copy.copy_id, (1,))},
        hit_at=NOON,
        queries=3,
        searches=2,
    )
    store.change(user_id, ["saved", "counted"], just(change))


def _claim(store: StateStore, now: datetime, _worker: int) -> bool:
    return store.claim_job("decay", now, _DAY)


class UserPromises:
    """`list_active_users`, `all_users`, `forget_user`, `purge`, `job_time` and `claim_job`."""

    def test_active_users_have_a_saved_document(self, store: StateStore) -> None:
        """Active are the users with a CLAIMED or PINNED document now, sorted, each once."""
        assert store.list_active_users() == []
        for user_id, state in (
            ("zoe", DocumentState.CLAIMED),
            ("bob", DocumentState.PINNED),
            ("Zoe", DocumentState.CLAIMED),
            ("surfaced", DocumentState.SURFACED),
            ("suggested", DocumentState.SUGGESTED),
            ("demoted", DocumentState.CLAIMED),
            ("deleted", DocumentState.CLAIMED),
            ("forgotten", DocumentState.CLAIMED),
        ):
            store.upsert(a_record(user_id, user_state=state))
        store.upsert(a_record("bob", "another", user_state=DocumentState.CLAIMED))
        assert store.list_active_users() == ["Zoe", "bob", "deleted", "demoted", "forgotten", "zoe"]

        store.upsert(a_record("demoted", user_state=DocumentState.DEMOTED))
        store.delete("deleted", "d")
        store.forget_user("forgotten")
        assert store.list_active_users() == ["Zoe", "bob", "zoe"]

        store.upsert(a_record("forgotten", user_state=DocumentState.PINNED))
        assert store.list_active_users() == ["Zoe", "bob", "forgotten", "zoe"]
        assert store.active_users() == (["Zoe", "bob", "forgotten", "zoe"], {})

    def test_all_users_are_those_of_whom_something_is_kept(self, store: StateStore) -> None:
        """Saved or only met, sorted, each once; who was forgotten is not among them."""
        assert store.all_users() == ([], {})
        for user_id, state in (
            ("zoe", DocumentState.CLAIMED),
            ("met", DocumentState.SURFACED),
            ("left", DocumentState.DEMOTED),
            ("forgotten", DocumentState.PINNED),
            ("unmet", DocumentState.SUGGESTED),
        ):
            store.upsert(a_record(user_id, user_state=state))
        store.upsert(a_record("met", "another"))
        store.forget_user("forgotten")
        store.forget_user("unmet")
        assert store.all_users() == (["left", "met", "zoe"], {})

        for user_id in AWKWARD_IDS:
            store.upsert(a_record(user_id))
        assert store.all_users() == (sorted({*AWKWARD_IDS, "left", "met", "zoe"}), {})

    def test_awkward_active_users_are_named_as_they_are(self, store: StateStore) -> None:
        """The ids of active users come back as they were given, whatever they hold."""
        for user_id in AWKWARD_IDS:
            store.upsert(a_record(user_id, user_state=DocumentState.CLAIMED))
        assert store.list_active_users() == sorted(AWKWARD_IDS)

    def test_forgetting_counts_what_went(self, store: StateStore) -> None:
        """`forget_user` tells how many records, events, retrieved texts and chunks there were; then none are."""
        _save_something(store, "alice")
        assert store.forget_user("alice") == ForgottenUser(documents=2, events=3, retrieved_texts=2, chunks=3)
        assert store.forget_user("alice") == ForgottenUser()
        assert store.forget_user("never met") == ForgottenUser()

    def test_forgetting_leaves_nothing_of_the_user(self, store: StateStore) -> None:
        """After `forget_user` there is no record, event, text, chunk, hit, clock or list with the user in it."""
        _save_something(store, "alice")
        (copy_id,) = store.chunk_store.place.copies("alice", "saved")

        store.forget_user("alice")

        for doc_id in ("saved", "counted"):
            assert store.get("alice", doc_id) is None
            assert store.history("alice", doc_id) == []
            assert store.retrieved_texts("alice", doc_id) == []
            assert store.chunk_store.load_chunks("alice", doc_id) == []
        assert store.list_by_state("alice") == []
        assert list(store.pages("alice")) == []
        assert store.list_active_users() == []
        assert store.chunk_store.load_copy("alice", "saved", copy_id) is None
        assert store.chunk_store.hit_rates("alice", {"saved": (copy_id, 3)}) == {"saved": 0.0}
        start = store.begin_query("alice", 1, 1)
        assert (start.clocks, start.saved, start.idle_keys) == (Clocks(0, 0), 0, ())

    def test_forgetting_leaves_other_users_alone(self, store: StateStore) -> None:
        """`forget_user` touches nothing of a user with the same documents, or with a name that is near."""
        others = ["bob", "alice ", "Alice", "alice:saved", "alic", "*"]
        for user_id in ("alice", *others):
            _save_something(store, user_id)

        def everything(user_id: str) -> tuple[object, ...]:
            return (
                store.list_by_state(user_id),
                [store.history(user_id, doc_id) for doc_id in ("saved", "counted")],
                store.retrieved_texts(user_id, "counted"),
                store.chunk_store.load_chunks(user_id, "saved"),
                store.begin_query(user_id, 1, 1),
            )

        before = [everything(user_id) for user_id in others]
        store.forget_user("alice")
        assert [everything(user_id) for user_id in others] == before
        assert store.list_active_users() == sorted(others)

    def test_a_purged_document_is_gone_for_everybody(self, store: StateStore) -> None:
        """Who met a document that is purged, saved or not, has no record, event, text or chunk of it; others stay."""
        for user_id in AWKWARD_IDS:
            _save_something(store, user_id)
        store.upsert(a_record("only met it", "saved"))
        others = [store.get(user_id, "counted") for user_id in AWKWARD_IDS]

        purged = store.purge("saved")

        assert purged == PurgedDocument("saved", users=len(AWKWARD_IDS) + 1, copies=len(AWKWARD_IDS))
        assert [store.get(user_id, "counted") for user_id in AWKWARD_IDS] == others
        for user_id in (*AWKWARD_IDS, "only met it"):
            assert store.get(user_id, "saved") is None
            assert (store.history(user_id, "saved"), store.retrieved_texts(user_id, "saved")) == ([], [])
            assert store.chunk_store.load_chunks(user_id, "saved") == []
        assert store.list_active_users() == []
        assert store.purge("saved") == PurgedDocument("saved")
        assert store.purge("never met") == PurgedDocument("never met")

    def test_purging_is_exact(self, store: StateStore) -> None:
        """Of documents whose ids are alike, only the one that is named goes."""
        for doc_id in AWKWARD_IDS:
            store.upsert(a_record(doc_id=doc_id))
        for doc_id in AWKWARD_IDS[::2]:
            assert store.purge(doc_id).users == 1
        assert [record.doc_id for record in store.list_by_state("alice")] == sorted(AWKWARD_IDS[1::2])

    def test_a_forgotten_user_starts_anew(self, store: StateStore) -> None:
        """A user who comes back after being forgotten is a new one, with nothing of before."""
        _save_something(store, "alice")
        store.forget_user("alice")

        store.change("alice", ["saved"], just(UserChange(records=[a_record(doc_id="saved")], queries=1)))

        assert store.list_by_state("alice") == [a_record(doc_id="saved")]
        assert store.history("alice", "saved") == []
        assert store.begin_query("alice", 3, 10).clocks == Clocks(1, 0)

    def test_a_job_has_one_turn_for_all(self, store: StateStore) -> None:
        """Of 8 threads that want the same turn of a job, one gets it; the next turn too."""
        for turn in range(3):
            now = NOON + turn * _DAY
            assert sum(in_threads(8, partial(_claim, store, now))) == 1
            assert store.job_time("decay") == now

    def test_a_note_is_swapped_only_from_what_was_expected(self, store: StateStore) -> None:
        """The hook `_swap_note` stores a text if the stored one is as expected, and tells whether it did."""
        first, second, third = (f"2026-03-0{day}T00:00:00+00:00" for day in (1, 2, 3))
        assert store._swap_note("decay", first, second) is False
        assert store._read_note("decay") is None
        assert store._swap_note("decay", None, first) is True
        assert store._swap_note("decay", None, second) is False
        assert store._swap_note("decay", first, second) is True
        assert store._swap_note("decay", first, third) is False
        assert store._read_note("decay") == second

    def test_the_first_note_counts(self, store: StateStore) -> None:
        """Of texts for one name the first is kept and given to all; only `replace_note` puts another one there."""
        assert store.note("model") is None
        assert store.keep_note("model", "first é\0\ud800") == "first é\0\ud800"
        assert store.keep_note("model", "second") == "first é\0\ud800"
        store.replace_note("model", "x" * 1_000_000)
        assert store.note("model") == "x" * 1_000_000
        assert len(set(in_threads(8, lambda number: store.keep_note("other", str(number))))) == 1

    def test_notes_jobs_and_users_do_not_meet(self, store: StateStore) -> None:
        """A note and a job of one name are two things; notes outlive the users."""
        for name in AWKWARD_IDS:
            store.keep_note(name, f"note {name}")
            store.claim_job(name, NOON, _DAY)
        store.forget_user("a")
        assert [store.note(name) for name in AWKWARD_IDS] == [f"note {name}" for name in AWKWARD_IDS]
        assert {store.job_time(name) for name in AWKWARD_IDS} == {NOON}

    def test_a_turn_comes_when_the_interval_is_over(self, store: StateStore) -> None:
        """A job's next turn is given exactly when its interval has passed, and not a moment before."""
        moment = timedelta(microseconds=1)
        assert store.job_time("decay") is None
        assert store.claim_job("decay", NOON, _DAY) is True
        assert store.claim_job("decay", NOON, _DAY) is False
        assert store.claim_job("decay", NOON + _DAY - moment, _DAY) is False
        assert store.job_time("decay") == NOON
        assert store.claim_job("decay", NOON + _DAY, _DAY) is True
        assert store.claim_job("decay", NOON + _DAY + moment, timedelta(0)) is True
        assert store.job_time("decay") == NOON + _DAY + moment

    def test_a_turn_far_in_the_future_holds_nobody_back(self, store: StateStore) -> None:
        """A turn that a wrong clock took more than an interval ahead of now does not count; a nearer one does."""
        assert store.claim_job("decay", NOON + 400 * _DAY, _DAY) is True
        assert store.claim_job("decay", NOON, _DAY) is True
        assert store.job_time("decay") == NOON
        assert store.claim_job("decay", NOON - _DAY, _DAY) is False
        assert store.claim_job("decay", NOON - _DAY - timedelta(microseconds=1), _DAY) is True

    def test_job_times_are_aware(self, store: StateStore) -> None:
        """A job's time comes back aware and in UTC; a naive one given in is read as UTC."""
        elsewhere = timezone(timedelta(hours=-8))
        store.claim_job("decay", NOON.astimezone(elsewhere), _DAY)
        told = store.job_time("decay")
        assert told == NOON
        assert told is not None
        assert told.utcoffset() == timedelta(0)
        naive = datetime(2026, 3, 1, 12, 0)  # noqa: DTZ001 - naive is what this is about
        assert store.claim_job("other", naive, _DAY) is True
        assert store.job_time("other") == datetime(2026, 3, 1, 12, 0, tzinfo=timezone.utc)

    def test_jobs_of_different_names_are_separate(self, store: StateStore) -> None:
        """Each job has turns of its own, whatever its name holds; users' data and jobs do not meet."""
        for number, name in enumerate(AWKWARD_IDS):
            assert store.claim_job(name, NOON + number * _DAY, _DAY) is True
        for number, name in enumerate(AWKWARD_IDS):
            assert store.job_time(name) == NOON + number * _DAY
        assert store.list_active_users() == []
        store.forget_user("a")
        assert store.job_time("a") == NOON
