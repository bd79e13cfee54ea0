"""What one query does to a user's records, as a pure function."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import pytest
from helpers import START

from rag_wiki import DocumentState, SuggestionEvent, UserDocRecord
from rag_wiki.lifecycle.query import FetchedDocument, QueryFindings, QueryRules, account_for_query
from rag_wiki.storage.records import Clocks, RetrievedText, UserChange, UserView

RULES = QueryRules(fetch_threshold=3, reset_threshold=3, max_cache_miss_streak=10)
BEFORE = START - timedelta(days=1)


def known(doc_id: str = "pods", state: DocumentState = DocumentState.SURFACED, **values: Any) -> UserDocRecord:
    """A record that was fetched before."""
    settings: dict[str, Any] = {"fetch_count": 1, "last_fetched_at": BEFORE, **values}
    return UserDocRecord("ada", doc_id, doc_id.title(), f"{doc_id}.md", user_state=state, **settings)


def saved(doc_id: str = "pods", **values: Any) -> UserDocRecord:
    """A record of a saved document."""
    settings: dict[str, Any] = {
        "copy_id": f"copy-of-{doc_id}",
        "chunk_count": 4,
        "content_source": "argument",
        **values,
    }
    return known(doc_id, settings.pop("state", DocumentState.CLAIMED), **settings)


@dataclass(frozen=True)
class Shown:
    """A text as the wrapped retriever showed it."""

    retrieved_text: RetrievedText

    @property
    def digest(self) -> str:
        """What tells it from others."""
        return self.retrieved_text.digest

    @property
    def length(self) -> int:
        """Its characters."""
        return len(self.retrieved_text.text)


def fetched(*doc_ids: str, texts: Mapping[str, tuple[str, ...]] | None = None) -> Any:
    """Documents as the wrapped retriever showed them."""
    return {
        doc_id: FetchedDocument(
            doc_id.title(),
            f"{doc_id}.md",
            tuple(Shown(RetrievedText(doc_id, text, text)) for text in (texts or {}).get(doc_id, ())),
        )
        for doc_id in doc_ids
    }


def account(*records: UserDocRecord, found: QueryFindings | None = None, rules: QueryRules = RULES) -> UserChange:
    """Account for a query of a user with these records in view."""
    view = UserView("ada", Clocks(5, 5), 1, {record.doc_id: record for record in records})
    return account_for_query(view, found or QueryFindings(), rules, START)


def only(change: UserChange) -> UserDocRecord:
    """The one record of a change."""
    (record,) = change.records
    return record


def told(change: UserChange) -> list[tuple[str, str]]:
    """The events of a change in short."""
    return [(event.doc_id, event.what) for event in change.events]


def test_a_first_fetch_surfaces_a_document() -> None:
    """A document without a record gets one: SURFACED, count 1, its title and path."""
    change = account(found=QueryFindings(fetched=fetched("pods")))
    record = only(change)
    assert (record.user_state, record.fetch_count, record.last_fetched_at) == (DocumentState.SURFACED, 1, START)
    assert (record.doc_title, record.doc_path) == ("Pods", "pods.md")
    assert told(change) == [("pods", "surfaced")]


@pytest.mark.parametrize(
    ("before", "state", "count", "suggested"),
    [
        (known(fetch_count=1), DocumentState.SURFACED, 2, False),
        (known(fetch_count=2), DocumentState.SUGGESTED, 3, True),
        (known(fetch_count=3, state=DocumentState.SUGGESTED, suggestion_sent=True), DocumentState.SUGGESTED, 4, False),
        (known(fetch_count=7, next_suggest_at=9, decline_count=1), DocumentState.SURFACED, 8, False),
        (known(fetch_count=8, next_suggest_at=9, decline_count=1), DocumentState.SUGGESTED, 9, True),
        (known(fetch_count=2, no_resiluggest_until=START + timedelta(seconds=1)), DocumentState.SURFACED, 3, False),
        (known(fetch_count=2, no_resiluggest_until=START), DocumentState.SUGGESTED, 3, True),
        (known(fetch_count=9, state=DocumentState.DEMOTED), DocumentState.SURFACED, 1, False),
        (known(fetch_count=2, queries_missed=2), DocumentState.SUGGESTED, 3, True),
        (known(fetch_count=2, queries_missed=3), DocumentState.SURFACED, 1, False),
        (known(fetch_count=0, state=DocumentState.GLOBAL), DocumentState.SURFACED, 1, False),
    ],
)
def test_a_fetch_counts_towards_a_suggestion(
    before: UserDocRecord, state: DocumentState, count: int, suggested: bool
) -> None:
    """State, count and suggestion after one more fetch, from each standing of an unsaved document."""
    change = account(before, found=QueryFindings(fetched=fetched("pods")))
    record = only(change)
    assert (record.user_state, record.fetch_count, record.queries_missed) == (state, count, 0)
    expected = [SuggestionEvent("ada", "pods", "Pods", "pods.md", count)] if suggested else []
    assert list(change.outcome.suggestions) == expected


def test_one_query_may_suggest_several() -> None:
    """Two documents that reach the threshold in one query are both suggested, in the order of the records."""
    change = account(
        known("a", fetch_count=2), known("b", fetch_count=2), found=QueryFindings(fetched=fetched("b", "a", "c"))
    )
    assert sorted(event.doc_id for event in change.outcome.suggestions) == ["a", "b"]


@pytest.mark.parametrize(
    ("before", "lapses"),
    [
        (known(fetch_count=2, queries_missed=1), False),
        (known(fetch_count=2, queries_missed=2), True),
        (known(fetch_count=3, state=DocumentState.SUGGESTED, suggestion_sent=True, queries_missed=2), True),
        (known(fetch_count=0, queries_missed=7), False),
        (known(fetch_count=4, state=DocumentState.DEMOTED, queries_missed=7), False),
        (saved(fetch_count=4, queries_missed=7), False),
    ],
)
def test_absence_lapses_a_count(before: UserDocRecord, lapses: bool) -> None:
    """The third query in a row without an unsaved, counted document starts it again at zero; others are left alone."""
    change = account(before)
    if not lapses:
        assert list(change.records) == []
        return
    record = only(change)
    assert (record.user_state, record.fetch_count, record.suggestion_sent) == (DocumentState.SURFACED, 0, False)
    assert told(change) == [("pods", "lapsed")]


def test_a_lapse_keeps_the_earned_gap() -> None:
    """After one decline the next suggestion after a lapse waits for six fetches from zero."""
    record = only(account(known(fetch_count=4, next_suggest_at=9, decline_count=1, queries_missed=2)))
    assert (record.fetch_count, record.next_suggest_at) == (0, 6)


def test_a_saved_copy_that_answered_is_a_fetch() -> None:
    """Answering from the copy counts once, notes the time, ends the streak, and names the chunks that hit."""
    found = QueryFindings(
        answered={"pods": ("copy-of-pods", (0, 2))}, matched=frozenset({"pods"}), searched=frozenset({"pods"})
    )
    change = account(saved(fetch_count=4, cache_miss_streak=6), found=found)
    record = only(change)
    assert (record.fetch_count, record.last_fetched_at, record.cache_miss_streak) == (5, START, 0)
    assert change.chunk_hits == {"pods": ("copy-of-pods", (0, 2))}
    assert change.hit_at == START


def test_a_match_without_room_is_a_hit_and_no_fetch() -> None:
    """A copy that matched and was cut off by `k` ends its streak, and its count stays."""
    found = QueryFindings(matched=frozenset({"pods"}), searched=frozenset({"pods"}))
    change = account(saved(fetch_count=4, cache_miss_streak=9), found=found)
    assert (only(change).fetch_count, only(change).cache_miss_streak) == (4, 0)
    assert change.chunk_hits == {}


def test_a_saved_document_that_the_source_shows_is_in_use() -> None:
    """The source's own text of a saved document is a fetch and no miss, whether or not its copy had an answer."""
    found = QueryFindings(fetched=fetched("pods"), searched=frozenset({"pods"}))
    change = account(saved(fetch_count=4, cache_miss_streak=9), found=found)
    after = only(change)
    assert (after.user_state, after.fetch_count, after.last_fetched_at) == (DocumentState.CLAIMED, 5, START)
    assert (after.cache_miss_streak, after.queries_missed) == (0, 0)


@pytest.mark.parametrize("state", [DocumentState.CLAIMED, DocumentState.PINNED])
def test_a_long_streak_of_misses_demotes(state: DocumentState) -> None:
    """The tenth semantic search in a row without a hit lets a document go, with its copy named for removal."""
    found = QueryFindings(searched=frozenset({"pods"}))
    assert list(account(saved(state=state, cache_miss_streak=8), found=found).records) == []
    change = account(saved(state=state, cache_miss_streak=9), found=found)
    assert (only(change).user_state, only(change).copy_id) == (DocumentState.DEMOTED, None)
    assert list(change.outcome.dropped) == [("pods", "copy-of-pods")]
    assert change.contents == {"pods": None}
    assert told(change) == [("pods", "demoted")]
    assert "10 searches" in change.events[0].why


def test_a_search_that_did_not_run_is_no_miss() -> None:
    """Without a semantic search the search clock stands still and nobody is demoted."""
    change = account(saved(cache_miss_streak=9), found=QueryFindings(searched=None))
    assert (list(change.records), change.queries, change.searches) == ([], 1, 0)
    ran = account(saved(cache_miss_streak=0), found=QueryFindings(searched=frozenset({"pods"})))
    assert (ran.queries, ran.searches) == (1, 1)


def test_a_document_that_could_not_be_compared_has_not_missed() -> None:
    """A copy of another model was not searched: however long its streak, it is not demoted."""
    change = account(saved(cache_miss_streak=9), found=QueryFindings(searched=frozenset({"others"})))
    assert all(record.user_state is DocumentState.CLAIMED for record in change.records)


def test_a_pin_by_the_user_has_no_streak() -> None:
    """Documents that the user pinned are never demoted by misses."""
    pinned = saved(state=DocumentState.PINNED, pinned_by_user=True, cache_miss_streak=400)
    assert list(account(pinned, found=QueryFindings(searched=frozenset({"pods"}))).records) == []


def test_a_copy_seen_to_differ_becomes_stale_once() -> None:
    """The first sight of a change is noted with its reason and time; the second changes neither."""
    found = QueryFindings(fetched=fetched("pods"), stale={"pods": ("copy-of-pods", "the text changed")})
    change = account(saved(), found=found)
    assert only(change).stale_since == START
    assert [(event.what, event.why) for event in change.events] == [("stale", "the text changed")]
    again = account(saved(stale_since=BEFORE), found=found)
    assert only(again).stale_since == BEFORE
    assert list(again.events) == []


def test_texts_of_an_unsaved_document_are_kept_once() -> None:
    """New retrieved texts are kept for saving; one that is kept already, or twice in the answer, is not added again."""
    found = QueryFindings(fetched=fetched("pods", texts={"pods": ("one", "two", "two", "three")}))
    change = account(known(retrieved=("one",), retrieved_chars=3), found=found)
    assert [text.text for text in change.texts] == ["two", "three"]
    assert only(change).retrieved == ("one", "two", "three")
    assert only(change).retrieved_chars == 11


def test_what_is_kept_for_saving_is_bounded() -> None:
    """At most 64 texts and 200 000 characters are kept of a document that nobody saved."""
    many = tuple(f"text {number}" for number in range(100))
    change = account(found=QueryFindings(fetched=fetched("pods", texts={"pods": many})))
    assert len(change.texts) == 64
    long = tuple(str(number) * 60_000 for number in range(5))
    change = account(found=QueryFindings(fetched=fetched("pods", texts={"pods": long})))
    assert sum(len(text.text) for text in change.texts) == 180_000


def test_a_whole_copy_keeps_no_retrieved_texts() -> None:
    """A saved, current copy of a given content needs no retrieved texts; a stale one starts to collect them anew."""
    shown = fetched("pods", texts={"pods": ("fresh",)})
    assert list(account(saved(), found=QueryFindings(fetched=shown)).texts) == []
    seen = {"pods": ("copy-of-pods", "changed")}
    change = account(saved(retrieved=("old",)), found=QueryFindings(fetched=shown, stale=seen))
    assert only(change).retrieved == ("fresh",)
    assert [text.text for text in change.texts] == ["fresh"]
    assert list(change.clear_texts) == ["pods"]


def test_the_view_stays_as_it_is_and_the_answer_the_same() -> None:
    """The function changes nothing that it is given: asked twice, it answers alike."""
    records = [known("a", fetch_count=2), saved("b", cache_miss_streak=9), known("c", queries_missed=2, fetch_count=2)]
    view = UserView("ada", Clocks(9, 9), 3, {record.doc_id: record for record in records})
    found = QueryFindings(fetched=fetched("a", "new", texts={"a": ("text",)}), searched=frozenset({"b"}))
    before = deepcopy(view)
    first = account_for_query(view, found, RULES, START)
    assert view == before
    assert account_for_query(view, found, RULES, START) == first
    assert {record.doc_id: record.user_state.value for record in first.records} == {
        "a": "SUGGESTED",
        "b": "DEMOTED",
        "c": "SURFACED",
        "new": "SURFACED",
    }


def test_untouched_records_are_not_written() -> None:
    """A query writes only the documents that it touched, whatever else is in view."""
    bystanders = [known("a"), saved("b"), known("c", state=DocumentState.DEMOTED)]
    change = account(*bystanders, found=QueryFindings(fetched=fetched("new"), searched=frozenset({"b"})))
    assert [record.doc_id for record in change.records] == ["new"]
    assert set(change.outcome.records) == {"a", "b", "c", "new"}
    assert change.outcome.records["b"] == replace(bystanders[1])
