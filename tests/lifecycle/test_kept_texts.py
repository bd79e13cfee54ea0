"""Which of the kept retrieved texts are current, and what is kept when there is no more room."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
from helpers import START

from rag_wiki import UserDocRecord
from rag_wiki.lifecycle.kept_texts import current_texts, last_seen, source_version
from rag_wiki.lifecycle.query import FetchedDocument, QueryFindings, QueryRules, account_for_query
from rag_wiki.storage.records import Clocks, RetrievedText, UserView

RULES = QueryRules(fetch_threshold=100, reset_threshold=3, max_cache_miss_streak=10)
ONE, TWO = "Notice is 10 days.", "Notice is 20 days."
OTHER = "Nobody need give notice."


@dataclass(frozen=True)
class Shown:
    """A text as a query finds it."""

    text: str
    number: int | None = None
    version: object = None

    @property
    def digest(self) -> str:
        """What tells it from others."""
        return f"{self.text} {self.number} {self.version}"

    @property
    def length(self) -> int:
        """Its characters."""
        return len(self.text)

    @property
    def retrieved_text(self) -> RetrievedText:
        """It, as it is kept."""
        metadata = {} if self.version is None else {"version": self.version}
        return RetrievedText("pods", self.digest, self.text, self.number, metadata)


class Keeping:
    """A document and what a store keeps of it, over queries."""

    def __init__(self) -> None:
        self.record: UserDocRecord | None = None
        self.texts: dict[str, RetrievedText] = {}
        self.queries = 0

    def shows(self, *texts: Shown) -> Keeping:
        """A query finds these."""
        view = UserView("ada", Clocks(self.queries, 0), 1, {} if self.record is None else {"pods": self.record})
        found = QueryFindings(fetched={"pods": FetchedDocument("Pods", "pods.md", texts)})
        change = account_for_query(view, found, RULES, START)
        (self.record,) = change.records
        if change.clear_texts:
            self.texts.clear()
        self.texts |= {text.digest: text for text in change.texts}
        self.queries += 1
        assert list(self.texts) == list(self.record.retrieved) == list(last_seen(self.record))
        assert self.record.retrieved_chars == sum(len(text.text) for text in self.texts.values())
        return self

    def current(self) -> list[str]:
        """The texts that would be saved."""
        assert self.record is not None
        return [text.text for text in current_texts(self.record, list(self.texts.values()), "version")]


def numbered(*texts: str, version: object = None) -> list[Shown]:
    """Texts with their numbers."""
    return [Shown(text, number, version) for number, text in enumerate(texts)]


CHANGES: dict[str, tuple[list[list[Shown]], list[str]]] = {
    "a number's last": ([numbered(ONE, OTHER), numbered(TWO)], [TWO, OTHER]),
    "a number's first again": ([numbered(ONE), numbered(TWO), numbered(ONE)], [ONE]),
    "both under one number, still": (
        [numbered(ONE), [*numbered(TWO), *numbered(ONE)], numbered(TWO, OTHER)],
        [TWO, OTHER],
    ),
    "one text under two numbers": ([numbered(ONE, TWO, ONE)], [ONE, TWO, ONE]),
    "moved to another number": ([numbered(ONE, OTHER), numbered(TWO, ONE, OTHER)], [TWO, ONE, OTHER]),
    "alike, later": ([[Shown(ONE)], [Shown(TWO)]], [TWO]),
    "in its place": ([[Shown(ONE), Shown(OTHER)], [Shown(TWO)]], [TWO, OTHER]),
    "two in place of one another": (
        [[Shown(ONE)], [Shown(TWO)], [Shown("Notice is 30 days.")]],
        ["Notice is 30 days."],
    ),
    "alike, together": ([[Shown(ONE), Shown(TWO)], [Shown(TWO)]], [ONE, TWO]),
    "alike, in turn": ([[Shown(ONE)], [Shown(TWO)], [Shown(ONE)]], [ONE, TWO]),
    "alike, of one version": ([[Shown(ONE, version=1)], [Shown(TWO, version=1)]], [ONE, TWO]),
    "unlike": ([[Shown(ONE)], [Shown(OTHER)]], [ONE, OTHER]),
    "the newest version": ([numbered(ONE, OTHER, version=1), numbered(TWO, version=2)], [TWO]),
    "equal in the newest version": ([numbered(ONE, OTHER, version=1), numbered(TWO, OTHER, version=2)], [TWO, OTHER]),
    "a version again": ([numbered(ONE, version=2), numbered(TWO, version=1), numbered(ONE, version=2)], [ONE]),
    "two versions, still": (
        [
            [Shown(ONE, version=1)],
            [Shown(TWO, version=2), Shown(ONE, version=1)],
            [Shown(TWO, version=2), Shown(ONE, version=1)],
        ],
        [TWO],
    ),
    "a number where there was none": ([[Shown(ONE)], numbered(TWO)], [TWO]),
}


@pytest.mark.parametrize("case", CHANGES)
def test_what_changed_gives_way(case: str) -> None:
    """What the source showed, query by query, and what of that is current."""
    queries, expected = CHANGES[case]
    keeping = Keeping()
    for shown in queries:
        keeping.shows(*shown)
    assert keeping.current() == expected


def test_a_text_that_the_record_does_not_name_is_not_current() -> None:
    """What a record forgot when its document was let go is not saved, should a store have it still."""
    keeping = Keeping().shows(Shown(ONE))
    assert keeping.record is not None
    keeping.record = replace(keeping.record, retrieved=(), retrieved_seen=())
    assert keeping.current() == []


def test_what_is_seen_last_is_kept_in_any_case() -> None:
    """However often a document changed before it was saved, its last text is kept, and never more than the bounds."""
    keeping = Keeping()
    for edition in range(200):
        keeping.shows(Shown(f"Notice is {edition} days."), Shown("x" * 1_000 + f" {edition}"))
        assert f"Notice is {edition} days." in keeping.current()
        assert len(keeping.texts) <= 64
    keeping = Keeping()
    for edition in range(5):
        keeping.shows(Shown(str(edition) * 90_000, 0))
        assert keeping.current() == [str(edition) * 90_000]
        assert sum(len(text.text) for text in keeping.texts.values()) <= 200_000


def test_more_than_there_is_room_for_is_not_kept_anew_each_time() -> None:
    """A query that shows more than is kept at most leaves what is kept as it is when it is asked again."""
    many = [Shown(f"text {number}", number) for number in range(100)]
    keeping = Keeping().shows(*many)
    kept = dict(keeping.texts)
    assert keeping.shows(*many).texts == kept
    assert keeping.shows(Shown("x" * 200_001, 0), *many[:3]).texts == kept


@pytest.mark.parametrize(
    ("metadata", "version"), [({}, None), ({"v": None}, None), ({"v": 1}, "1"), ({"v": START}, START.isoformat())]
)
def test_a_version_is_told_as_it_is_stored(metadata: dict[str, Any], version: str | None) -> None:
    """A version that the source gives and one that was kept with a text are the same text."""
    assert source_version(metadata, "v") == version
    assert source_version(metadata, None) is None
