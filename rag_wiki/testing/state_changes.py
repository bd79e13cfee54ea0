"""What every state store promises about `change`: one atomic step, and what it keeps beside the records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta, timezone

import pytest

from rag_wiki.storage.base import StateStore
from rag_wiki.storage.records import DocumentState, UserChange, UserDocRecord, UserView
from rag_wiki.testing.awkward import AWKWARD_IDS, AWKWARD_TEXTS, NOON, a_record, a_text, an_event, in_threads, just

__all__ = ["ChangePromises"]

_THREADS, _ROUNDS = 8, 25


class _RefusedError(Exception):
    """A rule's own exception."""


def _fetch(view: UserView, doc_id: str = "d") -> UserChange:
    """Count one fetch of a document, say so in its history, and tell the new count."""
    before = view.records.get(doc_id) or a_record(view.user_id, doc_id)
    after = replace(before, fetch_count=before.fetch_count + 1)
    event = an_event(doc_id, fetch_count=after.fetch_count)
    return UserChange(records=[after], events=[event], queries=1, searches=1, outcome=after.fetch_count)


class ChangePromises:
    """`change`, contents, history, retrieved texts, and hits of the chunks beside the state."""

    def test_a_rule_sees_the_records_it_named(self, store: StateStore) -> None:
        """The view holds the named documents that exist, without their content, and no others."""
        first, second = a_record(doc_id="one", full_content="text"), a_record(doc_id="two", fetch_count=2)
        for record in (first, second, a_record(doc_id="three"), a_record("bob", "missing")):
            store.upsert(record)

        view: UserView = store.change(
            "alice", ["two", "missing", "one", "two"], lambda v: UserChange(outcome=v)
        ).outcome

        assert view.user_id == "alice"
        assert dict(view.records) == {"one": replace(first, full_content=None), "two": second}

    def test_the_change_that_was_carried_out_is_returned(self, store: StateStore) -> None:
        """`change` returns what the rule returned."""
        wanted = UserChange(records=[a_record()], outcome={"told": "the caller"})
        assert store.change("alice", ["d"], just(wanted)) is wanted
        assert store.get("alice", "d") == a_record()

    def test_a_change_of_nothing_changes_nothing(self, store: StateStore) -> None:
        """An empty change leaves records, clocks and revision as they were."""
        store.upsert(a_record(user_state=DocumentState.CLAIMED, full_content="text"))
        before = store.begin_query("alice", 3, 10), store.list_by_state("alice")
        store.change("alice", ["d", "other"], just(UserChange()))
        assert (store.begin_query("alice", 3, 10), store.list_by_state("alice")) == before

    def test_all_parts_of_a_change_are_written(self, store: StateStore) -> None:
        """Records, contents, deletions, events, texts and clocks of one change are all there afterwards."""
        store.upsert(a_record(doc_id="old"))
        one, two = a_record(doc_id="one", fetch_count=1), a_record(doc_id="two", user_state=DocumentState.PINNED)
        change = UserChange(
            records=[one, two],
            contents={"two": "text of two"},
            deleted=["old"],
            events=[an_event("one"), an_event("two")],
            texts=[a_text("one", "x")],
            queries=2,
            searches=1,
        )

        store.change("alice", ["old", "one", "two"], just(change))

        # Their misses were zero when the clocks had moved.
        assert store.list_by_state("alice") == [one, replace(two, full_content="text of two")]
        assert store.history("alice", "one") == [an_event("one")]
        assert store.history("alice", "two") == [an_event("two")]
        assert store.retrieved_texts("alice", "one") == [a_text("one", "x")]
        start = store.begin_query("alice", 3, 10)
        assert (start.clocks.queries, start.clocks.searches, start.saved) == (2, 1, 1)

    def test_deletions_come_first(self, store: StateStore) -> None:
        """A change that deletes a document and writes it leaves the new one, with nothing of the old."""
        store.upsert(a_record(user_state=DocumentState.CLAIMED, full_content="old text"))
        store.change("alice", ["d"], just(UserChange(events=[an_event()], texts=[a_text(digest="old")])))

        fresh = UserChange(
            deleted=["d"], records=[a_record()], events=[an_event(what="removed")], texts=[a_text(digest="new")]
        )
        store.change("alice", ["d"], just(fresh))

        assert store.get("alice", "d") == a_record()
        assert store.history("alice", "d") == [an_event(what="removed")]
        assert store.retrieved_texts("alice", "d") == [a_text(digest="new")]
        assert store.saved_count("alice") == 0

    def test_deleting_what_is_not_there_is_no_error(self, store: StateStore) -> None:
        """A change may delete a document that does not exist; the others are written all the same."""
        store.change("alice", ["d", "ghost"], just(UserChange(deleted=["ghost"], records=[a_record()])))
        assert store.list_by_state("alice") == [a_record()]
        assert store.saved_count("alice") == 0

    def test_a_score_changes_alone(self, store: StateStore) -> None:
        """A change of scores sets them and leaves all else; a document that is not there gets no record by it."""
        record = a_record(user_state=DocumentState.CLAIMED, fetch_count=3, copy_id="copy", full_content="text")
        other = a_record(doc_id="e", user_state=DocumentState.PINNED, decay_score=0.7)
        for each in (record, other):
            store.upsert(each)
        before = store.begin_query("alice", 3, 10)

        store.change("alice", ["d", "ghost"], just(UserChange(scores={"d": 0.1 + 0.2, "ghost": 0.5})))

        scored = replace(record, decay_score=0.1 + 0.2)
        assert store.list_by_state("alice") == [scored, other]
        assert store.begin_query("alice", 3, 10) == before
        counted = replace(scored, fetch_count=4, full_content=None)
        store.change("alice", ["d"], lambda view: UserChange(records=[replace(view.records["d"], fetch_count=4)]))
        assert store.get("alice", "d") == replace(counted, full_content="text")
        store.change("alice", ["d"], just(UserChange(scores={"d": 0.5})))
        assert store.change("alice", ["d"], lambda view: UserChange(outcome=view)).outcome.records == {
            "d": replace(counted, decay_score=0.5)
        }

    # Many at once

    def test_changes_together_follow_each_other(self, store: StateStore) -> None:
        """`change_together` is as one `change` after the other: each sees what those before it did."""
        store.upsert(a_record(doc_id="saved", user_state=DocumentState.CLAIMED, cache_miss_streak=1))
        requests = [store.request_change(["d", "saved"], _fetch) for _ in range(3)]
        requests.append(store.request_change(["e"], lambda view: _fetch(view, "e")))

        store.change_together("alice", requests)

        assert [request.result().outcome for request in requests] == [1, 2, 3, 1]
        # One query passed since the last of the three.
        assert store.get("alice", "d") == a_record(fetch_count=3, queries_missed=1, cache_miss_streak=1)
        assert store.get("alice", "e") == a_record(doc_id="e", fetch_count=1)
        saved = store.get("alice", "saved")
        assert saved is not None
        assert (saved.queries_missed, saved.cache_miss_streak) == (4, 5)
        assert [event.fetch_count for event in store.history("alice", "d")] == [1, 2, 3]
        start = store.begin_query("alice", 3, 10)
        assert (start.clocks.queries, start.clocks.searches, start.saved) == (4, 4, 1)

    def test_changes_together_write_all_their_parts(self, store: StateStore) -> None:
        """Contents, texts and states of changes that go together are those of the last one that speaks of them."""
        claimed = a_record(user_state=DocumentState.CLAIMED, copy_id="copy")
        store.upsert(a_record())
        wanted = [
            UserChange(records=[a_record(fetch_count=1)], texts=[a_text(digest="old")]),
            UserChange(records=[claimed], contents={"d": "first"}, clear_texts=["d"], texts=[a_text(digest="new")]),
            UserChange(records=[replace(claimed, fetch_count=7)], contents={"d": "second"}),
            UserChange(records=[a_record(doc_id="e", user_state=DocumentState.PINNED)]),
        ]
        before = store.begin_query("alice", 3, 10).revision

        requests = [store.request_change(["d", "e"], just(change)) for change in wanted]
        store.change_together("alice", requests)

        assert [request.result() for request in requests] == wanted
        assert store.get("alice", "d") == replace(claimed, fetch_count=7, full_content="second")
        assert store.retrieved_texts("alice", "d") == [a_text(digest="new")]
        assert [record.doc_id for record in store.list_for_decay("alice")] == ["d", "e"]
        start = store.begin_query("alice", 3, 10)
        assert start.saved == 2
        assert start.revision != before

    def test_one_refusal_does_not_stop_the_others(self, store: StateStore) -> None:
        """Of changes that go together, the one that a rule refuses raises for itself; a deletion goes along as well."""
        store.upsert(a_record(doc_id="old"))
        refusal = _RefusedError("no")

        def refuse(_: UserView) -> UserChange:
            raise refusal

        requests = [
            store.request_change(["d"], _fetch),
            store.request_change(["d"], refuse),
            store.request_change(["old"], just(UserChange(deleted=["old"]))),
            store.request_change(["d"], _fetch),
        ]
        store.change_together("alice", requests)

        assert [requests[at].result().outcome for at in (0, 3)] == [1, 2]
        with pytest.raises(_RefusedError) as raised:
            requests[1].result()
        assert raised.value is refusal
        assert store.list_by_state("alice") == [a_record(fetch_count=2)]

    def test_pages_are_changed_one_by_one(self, store: StateStore) -> None:
        """`change_pages` comes to every record in the states once, and to no other, in pages of the size asked for."""
        saved = [f"s{number:02}" for number in range(7)]
        for doc_id in saved:
            store.upsert(a_record(doc_id=doc_id, user_state=DocumentState.CLAIMED, full_content="text"))
        store.upsert(a_record(doc_id="s00a"))
        store.upsert(a_record("bob", user_state=DocumentState.CLAIMED))
        pages: list[list[str]] = []

        def gather(page: Sequence[UserDocRecord]) -> float:
            pages.append([record.doc_id for record in page])
            return 0.5

        def decide(view: UserView, score: float) -> UserChange:
            return UserChange(records=[replace(record, decay_score=score) for record in view.records.values()])

        done = list(store.change_pages("alice", [DocumentState.CLAIMED], gather, decide, size=3))

        assert [len(change.records) for change in done] == [3, 3, 1]
        assert sorted(doc_id for page in pages for doc_id in page) == saved
        assert [record.decay_score for record in store.list_claimed("alice")] == [0.5] * 7
        assert {record.full_content for record in store.list_claimed("alice")} == {"text"}
        assert store.get("alice", "s00a") == a_record(doc_id="s00a")
        assert [record.decay_score for record in store.list_claimed("bob")] == [1.0]

    def test_a_page_is_changed_as_it_is_by_then(self, store: StateStore) -> None:
        """What happens to a record between reading its page and changing it is seen by the rule, and stays."""
        for doc_id in ("a", "b", "c"):
            store.upsert(a_record(doc_id=doc_id, user_state=DocumentState.CLAIMED))
        states: dict[str, DocumentState] = {}

        def meanwhile(_: Sequence[UserDocRecord]) -> None:
            store.upsert(a_record(doc_id="a", user_state=DocumentState.DEMOTED))
            store.delete("alice", "b")
            store.change("alice", ["c"], just(UserChange(queries=2)))

        def decide(view: UserView, _: None) -> UserChange:
            states.update({doc_id: record.user_state for doc_id, record in view.records.items()})
            return UserChange(records=[replace(record, explicit_signal=1.0) for record in view.records.values()])

        list(store.change_pages("alice", [DocumentState.CLAIMED], meanwhile, decide))

        assert states == {"a": DocumentState.DEMOTED, "c": DocumentState.CLAIMED}
        assert store.list_by_state("alice") == [
            a_record(doc_id="a", user_state=DocumentState.DEMOTED, explicit_signal=1.0, queries_missed=2),
            a_record(doc_id="c", user_state=DocumentState.CLAIMED, explicit_signal=1.0, queries_missed=2),
        ]

    # What a rule raises

    def test_an_exception_of_a_rule_leaves_everything_as_it_was(self, store: StateStore) -> None:
        """The exception reaches the caller as it is, nothing is written, and the store works on."""
        store.upsert(a_record(user_state=DocumentState.CLAIMED, full_content="text", queries_missed=1))
        store.change("alice", ["d"], just(UserChange(events=[an_event()], texts=[a_text()], queries=1)))

        def everything() -> tuple[object, ...]:
            return (
                store.list_by_state("alice"),
                store.history("alice", "d"),
                store.retrieved_texts("alice", "d"),
                store.begin_query("alice", 1, 1),
                store.list_active_users(),
            )

        before, refusal = everything(), _RefusedError("no")

        def refuse(_: UserView) -> UserChange:
            raise refusal

        with pytest.raises(_RefusedError) as raised:
            store.change("alice", ["d", "new"], refuse)
        assert raised.value is refusal
        with pytest.raises(_RefusedError):
            store.change("carol", ["d"], refuse)
        assert everything() == before
        assert store.list_by_state("carol") == []

        assert store.change("alice", ["d"], _fetch).outcome == 1

    def test_an_interrupt_in_a_rule_leaves_the_user_free(self, store: StateStore) -> None:
        """What ends a rule from outside (Ctrl-C) reaches the caller, nothing is written, and others can change on."""
        store.upsert(a_record())

        def interrupted(_: UserView) -> UserChange:
            raise KeyboardInterrupt

        for _ in range(3):
            with pytest.raises(KeyboardInterrupt):
                store.change("alice", ["d"], interrupted)
        assert store.change("alice", ["d"], _fetch).outcome == 1

    # Contents

    def test_a_change_without_contents_keeps_the_content(self, store: StateStore) -> None:
        """Writing a record in a change leaves its content, whatever the record itself holds."""
        store.upsert(a_record(full_content="text"))
        for full_content in (None, "not to be written"):
            record = a_record(fetch_count=5, full_content=full_content)
            store.change("alice", ["d"], just(UserChange(records=[record])))
            assert store.get("alice", "d") == a_record(fetch_count=5, full_content="text")

    def test_contents_replace_and_remove(self, store: StateStore) -> None:
        """`contents` sets the text of a document, `""` too, and `None` removes it; other documents keep theirs."""
        store.upsert(a_record(full_content="text"))
        store.upsert(a_record(doc_id="other", full_content="other text"))
        for content in ("new text", "", None, "newer text", None, None):
            store.change("alice", ["d"], just(UserChange(contents={"d": content})))
            got = store.get("alice", "d")
            assert got is not None
            assert got.full_content == content
        assert store.get("alice", "other") == a_record(doc_id="other", full_content="other text")

    # Threads

    def test_counts_are_exact_under_contention(self, store: StateStore) -> None:
        """8 threads that count 25 fetches each make 200: every one of them once, in record, clocks and history."""
        told = in_threads(_THREADS, lambda _: [store.change("alice", ["d"], _fetch).outcome for _ in range(_ROUNDS)])

        total = _THREADS * _ROUNDS
        record, start = store.get("alice", "d"), store.begin_query("alice", 3, 10)
        assert record is not None
        assert record.fetch_count == total
        assert sorted(count for counts in told for count in counts) == list(range(1, total + 1))
        assert (start.clocks.queries, start.clocks.searches) == (total, total)
        counted = [event.fetch_count for event in store.history("alice", "d")]
        assert counted == list(range(total - store.history_limit + 1, total + 1))

    def test_once_is_once(self, store: StateStore) -> None:
        """Of 8 threads that do something only if nobody did it yet, exactly one does it, round after round."""

        def suggest_once(view: UserView, doc_id: str) -> UserChange:
            before = view.records.get(doc_id) or a_record(doc_id=doc_id)
            if before.suggestion_sent:
                return UserChange(outcome=False)
            return UserChange(records=[replace(before, suggestion_sent=True)], outcome=True)

        def ask(doc_id: str) -> bool:
            return bool(store.change("alice", [doc_id], lambda view: suggest_once(view, doc_id)).outcome)

        ids = [f"d{number}" for number in range(5)]
        told = in_threads(_THREADS, lambda _: [ask(doc_id) for doc_id in ids])
        assert [sum(answers) for answers in zip(*told, strict=True)] == [1] * len(ids)

    def test_changes_of_different_documents_add_up(self, store: StateStore) -> None:
        """8 threads that save 5 documents each leave 40 saved ones, counted and listed."""

        def save(number: int) -> None:
            for at in range(5):
                doc_id = f"d{number}-{at}"
                record = a_record(doc_id=doc_id, user_state=DocumentState.CLAIMED)
                store.change(
                    "alice",
                    [doc_id],
                    just(UserChange(records=[record], contents={record.doc_id: record.doc_id})),
                )

        in_threads(_THREADS, save)

        ids = sorted(f"d{number}-{at}" for number in range(_THREADS) for at in range(5))
        assert [(record.doc_id, record.full_content) for record in store.list_claimed("alice")] == list(
            zip(ids, ids, strict=True)
        )
        assert store.saved_count("alice") == 40
        assert store.list_active_users() == ["alice"]

    def test_a_change_of_many_documents_is_one_step_too(self, store: StateStore) -> None:
        """3 threads that count 2 fetches each of the same 520 documents make 6 of every single one."""
        ids = [f"d{number:03}" for number in range(520)]

        def fetch_all(view: UserView) -> UserChange:
            known = [view.records.get(doc_id) or a_record(doc_id=doc_id) for doc_id in ids]
            return UserChange(records=[replace(record, fetch_count=record.fetch_count + 1) for record in known])

        in_threads(3, lambda _: [store.change("alice", ids, fetch_all) for _ in range(2)])

        assert {record.doc_id: record.fetch_count for record in store.list_surfaced("alice")} == dict.fromkeys(ids, 6)

    def test_users_do_not_wait_in_each_others_counts(self, store: StateStore) -> None:
        """8 threads of 8 users that share a document id count 5 fetches each, for themselves alone."""
        in_threads(_THREADS, lambda number: [store.change(f"user{number}", ["d"], _fetch) for _ in range(5)])
        for number in range(_THREADS):
            record = store.get(f"user{number}", "d")
            assert record is not None
            assert (record.user_id, record.fetch_count) == (f"user{number}", 5)

    # History

    def test_history_is_in_order_and_complete(self, store: StateStore) -> None:
        """Events come back oldest first, with every field, and their times aware and equal."""
        elsewhere = timezone(timedelta(hours=-8))
        first = an_event(what="surfaced", why="", at=NOON.astimezone(elsewhere))
        second = an_event(
            what="saved",
            why="\ud83d a\0b 🦜",
            at=NOON - timedelta(days=1),
            from_state=DocumentState.SUGGESTED,
            to_state=DocumentState.CLAIMED,
            fetch_count=7,
            decay_score=0.1 + 0.2,
        )
        third = an_event(what="pinned", at=NOON + timedelta(days=1))
        store.change("alice", ["d"], just(UserChange(records=[a_record()], events=[first, second])))
        store.change("alice", ["d"], just(UserChange(events=[third])))

        assert store.history("alice", "d") == [first, second, third]
        assert [event.at.utcoffset() for event in store.history("alice", "d")] == [timedelta(0)] * 3
        assert store.history("alice", "other") == []
        assert store.history("bob", "d") == []

    def test_history_is_bounded(self, store: StateStore) -> None:
        """Of more events than `history_limit` the newest are kept, in order, of each document by itself."""
        limit = store.history_limit
        store.change(
            "alice", ["other"], just(UserChange(records=[a_record(doc_id="other")], events=[an_event("other")]))
        )
        many = [an_event(fetch_count=number) for number in range(limit + 5)]
        store.change("alice", ["d"], just(UserChange(records=[a_record()], events=many)))
        for number in range(limit + 5, limit + 8):
            event = an_event(fetch_count=number)
            store.change("alice", ["d"], just(UserChange(events=[event])))

        counted = [event.fetch_count for event in store.history("alice", "d")]
        assert counted == list(range(8, limit + 8))
        assert store.history("alice", "other") == [an_event("other")]

    def test_the_history_limit_can_be_set(self, store: StateStore) -> None:
        """`history_limit` bounds the history at any number, 0 included."""
        for limit in (0, 1, 3):
            store.history_limit = limit
            doc_id = f"at most {limit}"
            for number in range(5):
                event = an_event(doc_id, fetch_count=number)
                store.change("alice", [doc_id], just(UserChange(records=[a_record(doc_id=doc_id)], events=[event])))
            assert [event.fetch_count for event in store.history("alice", doc_id)] == list(range(5))[5 - limit :]

    # Retrieved texts

    def test_retrieved_texts_come_back_in_the_order_first_seen(self, store: StateStore) -> None:
        """Texts come back in the order in which they were first seen; one seen again keeps its place."""
        one = a_text(digest="z", text="first", chunk_index=4, metadata={"page": 1, "nested": {"a": [None, True]}})
        two = a_text(digest="a", text="second")
        again = a_text(digest="z", text="first", chunk_index=4, metadata={"page": 2})
        three = a_text(digest="m", text="third", chunk_index=0)
        store.change("alice", ["d"], just(UserChange(records=[a_record()], texts=[one, two])))
        assert store.retrieved_texts("alice", "d") == [one, two]

        store.change("alice", ["d"], just(UserChange(texts=[again, three])))

        assert store.retrieved_texts("alice", "d") == [again, two, three]
        assert store.retrieved_texts("alice", "other") == []
        assert store.retrieved_texts("bob", "d") == []

    def test_awkward_retrieved_texts_come_back(self, store: StateStore) -> None:
        """Retrieved texts and their metadata hold any string, for documents of any id."""
        texts = [
            a_text(doc_id, f"digest {number}", text, metadata={text[:20]: text})
            for doc_id in AWKWARD_IDS[:8]
            for number, text in enumerate(AWKWARD_TEXTS[:-1])
        ]
        records = [a_record(doc_id=doc_id) for doc_id in AWKWARD_IDS[:8]]
        store.change("alice", AWKWARD_IDS[:8], just(UserChange(records=records, texts=texts)))
        for doc_id in AWKWARD_IDS[:8]:
            assert store.retrieved_texts("alice", doc_id) == [text for text in texts if text.doc_id == doc_id]

    def test_clearing_texts_keeps_those_of_the_same_change(self, store: StateStore) -> None:
        """`clear_texts` removes a document's texts so far; texts in the same change stay, others' texts too."""
        old, other, new = a_text(digest="old"), a_text("other"), a_text(digest="new")
        records = [a_record(), a_record(doc_id="other")]
        store.change("alice", ["d", "other"], just(UserChange(records=records, texts=[old, other])))

        store.change("alice", ["d"], just(UserChange(clear_texts=["d"], texts=[new])))
        assert store.retrieved_texts("alice", "d") == [new]
        store.change("alice", ["d"], just(UserChange(clear_texts=["d", "ghost"])))
        assert store.retrieved_texts("alice", "d") == []
        assert store.retrieved_texts("alice", "other") == [other]

    # Chunks beside the state

    def test_hits_of_a_change_reach_the_chunks_beside_the_state(self, store: StateStore) -> None:
        """A change counts the chunks that answered, in the step that counts the fetch."""
        chunks = store.chunk_store
        chunks.save_chunks("alice", "d", [{"chunk_index": number, "text": "t", "vector": [1.0]} for number in range(3)])
        (copy_id,) = chunks.place.copies("alice", "d")
        store.upsert(a_record(user_state=DocumentState.CLAIMED, copy_id=copy_id, chunk_count=3))

        for at, hit in enumerate([(0, 2), (2,)]):
            moment = NOON + timedelta(hours=at)
            store.change(
                "alice",
                ["d"],
                just(UserChange(chunk_hits={"d": (copy_id, hit)}, hit_at=moment)),
            )

        hits = [(chunk["hit_count"], chunk["last_hit_at"]) for chunk in chunks.load_chunks("alice", "d")]
        assert hits == [(1, NOON), (0, None), (2, NOON + timedelta(hours=1))]

    def test_hits_of_a_copy_that_is_gone_are_not_kept(self, store: StateStore) -> None:
        """A change may still name a copy that was removed meanwhile; nothing of it is written."""
        store.upsert(a_record(user_state=DocumentState.CLAIMED, copy_id="gone", chunk_count=1))
        store.change("alice", ["d"], just(UserChange(chunk_hits={"d": ("gone", (0,))}, hit_at=NOON, queries=1)))
        assert store.begin_query("alice", 3, 10).clocks.queries == 1
        assert store.chunk_store.hit_rates("alice", {"d": ("gone", 1)}) == {"d": 0.0}
