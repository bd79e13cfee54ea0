"""Which of the kept retrieved texts are current, and what is kept when there is no more room."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
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
    place: Mapping[str, Any] = field(default_factory=dict)
    """The rest of its metadata."""

    @property
    def digest(self) -> str:
        """What tells it from others."""
        return f"{self.text} {self.number} {self.version} {self.place}"

    @property
    def length(self) -> int:
        """Its characters."""
        return len(self.text)

    @property
    def retrieved_text(self) -> RetrievedText:
        """It, as it is kept."""
        metadata = {**self.place, **({} if self.version is None else {"version": self.version})}
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


def cut(text: str, *starts: int, size: int = 20, **place: Any) -> list[Shown]:
    """Passages of a text, as a splitter cuts them."""
    return [Shown(text[start : start + size], place={"start_index": start, **place}) for start in starts]


LONG = "The first part, then the second one, and at last the third, which ends."
LONGER = "The very first part, then the second one, and at last the third, which ends."
REWRITTEN = "Nobody has any parts these days: what there was has gone, for good, to the museum."

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
    "by where they begin": (
        [cut(LONG, 40, 0), cut(LONG, 20)],
        [LONG[0:20], LONG[20:40], LONG[40:60]],
    ),
    "as floats": (
        [[replace(shown, place={"start_index": float(shown.place["start_index"])}) for shown in cut(LONG, 40, 0)]],
        [LONG[0:20], LONG[40:60]],
    ),
    "by page, then by where they begin": (
        [cut(LONG, 20, 0, page=2), cut(LONG, 40, page=1)],
        [LONG[40:60], LONG[0:20], LONG[20:40]],
    ),
    "by page alone": (
        [[Shown(ONE, place={"page": 2}), Shown(OTHER, place={"page": 1})]],
        [OTHER, ONE],
    ),
    "of two headings": (
        # Each is counted from: which of them comes first nobody knows.
        [cut(LONG, 20, heading="B"), cut(LONG, 0, heading="A"), cut(REWRITTEN, 0, heading="B")],
        [LONG[20:40], LONG[0:20], REWRITTEN[0:20]],
    ),
    "some don't say where": ([[*cut(LONG, 20, 0), Shown(OTHER)]], [LONG[20:40], LONG[0:20], OTHER]),
    "nowhere": ([[Shown(ONE, place={"start_index": -1}), *cut(LONG, 0)]], [ONE, LONG[0:20]]),
    "overlapping": ([cut(LONG, 0), cut(LONG, 10), cut(LONG, 20)], [LONG[0:20], LONG[10:30], LONG[20:40]]),
    "rewritten": ([cut(LONG, 0, 20), cut(REWRITTEN, 5)], [REWRITTEN[5:25]]),
    "rewritten in one place": ([cut(LONG, 0, 40), cut(REWRITTEN, 0)], [REWRITTEN[0:20], LONG[40:60]]),
    "moved on": ([cut(LONG, 0, 20), cut(LONGER, 5, 25)], [LONGER[5:25], LONGER[25:45]]),
    "of another day": (
        # Where they begin can't be compared; what they say can.
        [[Shown(ONE, place={"start_index": 0, "edited": 1})], [Shown(TWO, place={"start_index": 0, "edited": 2})]],
        [TWO],
    ),
    "a number where there was a place": ([[Shown(ONE, place={"start_index": 0})], numbered(TWO)], [TWO]),
    "cut by a compressor": (
        [[*cut("Pods restart.", 0), *cut("Images are pulled.", 0)], cut("Nodes drain.", 0)],
        ["Pods restart.", "Images are pulled.", "Nodes drain."],
    ),
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
