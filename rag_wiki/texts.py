"""Comparing texts, and putting chunks of a text together again."""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from difflib import SequenceMatcher
from functools import cache
from operator import attrgetter
from typing import NamedTuple

from rag_wiki.storage.records import join_halves

__all__ = ["are_alike", "flat", "holds", "join_texts", "lack", "parts_with", "repeats", "shared_length"]

_ALIKE = 0.6
"""`difflib`'s own rule of thumb for a close match."""
_COMPARED_CHARS = 2_000
_TELLING_CHARS = 12
"""So many characters of a query tell something of it."""
_UNITS = r"[^\W\d_\u0e00-\U0010ffff]+|\S"
"""Words of the scripts that write spaces, most of which are below Thai; each character of what else there is."""
_SPACELESS = "[\u0e00-\u109f\u1780-\u17ff\u2e80-\u9fff\uf900-\ufaff\uff66-\uff9f\U00020000-\U0003ffff]"
"""Thai, Lao, Tibetan, Burmese, Khmer, Chinese, Japanese: words follow each other without a space."""
_JOINTS = "-\u2010\u2011'\u2019"
"""They join the parts of a word."""
_POINTS = ".,:/"
"""They join the parts of a number."""
_SIGNS = "+-\u2212\u00b1"

_SHORTEST_OVERLAP = 10
"""Characters that the end of a chunk and the start of the next have in common by chance at most."""


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    # When it is used first: tables of scripts take milliseconds that importing need not.
    return re.compile(pattern)


def shared_length(text: str, following: str) -> int:
    """How many characters at the end of a chunk are the start of the next; nothing where that may be chance."""
    last_line = text[text.rfind("\n") + 1 :]
    if last_line.strip() and f"{following}\n".startswith(f"{last_line}\n"):
        # A heading, say: splitters repeat it, however short it is.
        return len(last_line)
    start = following[:_SHORTEST_OVERLAP]
    if len(start) < _SHORTEST_OVERLAP:
        return 0
    at = text.find(start, max(len(text) - len(following), 0))
    while at >= 0:
        if following.startswith(text[at:]):
            return len(text) - at
        at = text.find(start, at + 1)
    return 0


def join_texts(texts: Sequence[str]) -> str:
    """Join neighbouring chunks, writing once what the end of one and the start of the next share."""
    joined = ""
    for text in texts:
        if not joined:
            joined = text
            continue
        shared = shared_length(joined, text)
        joined += text[shared:] if shared else "\n\n" + text
    return joined


def repeats(message: str, query: str) -> bool:
    """Whether an error's message holds a query, or a good part of it: some models say what they could not embed."""
    # Not by `difflib`: a message may be a whole page, and this is on a question's path.
    length = min(len(query), _TELLING_CHARS)
    parts = {query[at : at + length] for at in range(len(query) - length + 1)}
    return any(message[at : at + length] in parts for at in range(len(message) - length + 1))


def flat(text: str) -> str:
    """A text without regard to how its white space is laid out, or a character is written as two surrogates."""
    return " ".join(join_halves(text).split())


def are_alike(one: str, other: str) -> bool:
    """Whether a text is so much like another that it may be another version of it (`difflib` ratio of their words).

    Digits count one by one, so that a list with other figures stays the same list.
    """
    matcher = SequenceMatcher(
        None,
        _compiled(_UNITS).findall(one[:_COMPARED_CHARS]),
        _compiled(_UNITS).findall(other[:_COMPARED_CHARS]),
        autojunk=False,
    )
    return matcher.real_quick_ratio() >= _ALIKE and matcher.quick_ratio() >= _ALIKE and matcher.ratio() >= _ALIKE


def holds(text: str, part: str) -> bool:
    """Whether a text has another in it that neither begins nor ends within a word or number.

    "10 days" is not in "110 days". White space counts as it is: give both texts `flat`.
    """
    at = text.find(part)
    while at >= 0:
        if not _is_within_word(text, at) and not _is_within_word(text, at + len(part)):
            return True
        at = text.find(part, at + 1)
    return False


class _Covered(NamedTuple):
    """From where to where a text is in one of some parts."""

    start: int
    stop: int
    part: int
    """The part's place among them."""

    def goes_on_in(self, other: _Covered) -> bool:
        """Whether a part has what follows. A space may lie between the two."""
        return self.start < other.start <= self.stop + 1 and self.stop < other.stop


_STOP = attrgetter("stop")


def parts_with(text: str, parts: Sequence[str]) -> tuple[int, ...]:
    """Where the parts are that hold a text: the shortest with all of it, else those in a row that have it together.

    Where none in a row have all of it, some of it is in those that go on in each other, of which half is in it, or that
    hold half of it; less may be chance. White space counts as it is: give all texts `flat`.
    """
    whole = [at for at, part in enumerate(parts) if holds(part, text)] if text else []
    if whole:
        return (min(whole, key=lambda at: len(parts[at])),)
    rows = _rows(_covered(text, parts))
    bounded = ["", *parts, ""]
    for row in rows:
        first, last = row[0], row[-1]
        # What is left at an end is too short to be found anywhere but where the part before ends, or the next begins.
        head, tail = text[: first.start].rstrip(), text[last.stop :].lstrip()
        if bounded[first.part].endswith(head) and bounded[last.part + 2].startswith(tail):
            return tuple(range(first.part - bool(head), last.part + bool(tail) + 1))
    telling = [
        own
        for row in rows
        for own in row
        if len(row) > 1 or (own.stop - own.start) * 2 >= min(len(parts[own.part]), len(text))
    ]
    return tuple(sorted({own.part for own in _fewest(sorted(telling))}))


def lack(text: str, parts: Sequence[str], *, least_share: float = 0.0) -> bool:
    """Whether parts leave out something of a text that is worth telling: a dozen letters or digits in a row.

    Give all texts `flat`.

    Args:
        text: What is looked for.
        parts: What it may be in.
        least_share: The share of the text's letters and digits that must be left out in a row.
    """
    if any(text in part for part in parts):
        return False
    is_left = [character.isalnum() for character in text]
    least = max(least_share * sum(is_left), _TELLING_CHARS if parts else 1)
    for part in parts:
        at = text.find(part) if part else -1
        while at >= 0:
            is_left[at : at + len(part)] = [False] * len(part)
            at = text.find(part, at + 1)
        start, end = shared_length(part, text), len(text) - shared_length(text, part)
        is_left[:start] = [False] * start
        is_left[end:] = [False] * (len(text) - end)
    # What stands between two words that are left out separates them no more than it does in the text.
    longest = run = 0
    for character, left in zip(text, is_left, strict=True):
        run = run + left if left or not character.isalnum() else 0
        longest = max(longest, run)
    return longest >= least


def _rows(covered: Iterable[_Covered]) -> list[list[_Covered]]:
    """What is covered by parts in a row, each of which goes on in the next."""
    rows: list[list[_Covered]] = []
    for own in covered:
        row = next((row for row in rows if row[-1].part == own.part - 1 and row[-1].goes_on_in(own)), None)
        if row is None:
            rows.append([own])
        else:
            row.append(own)
    return rows


def _covered(text: str, parts: Sequence[str]) -> Iterator[_Covered]:
    """What of a text is in each part: all of the part, or the end of one that is the start of the other."""
    since = 0
    for at, part in enumerate(parts):
        start = text.find(part, since)
        if start < 0:
            start = text.find(part)
        if start >= 0:
            since = start + 1
            yield _Covered(start, start + len(part), at)
            continue
        shared = shared_length(part, text)
        if shared:
            yield _Covered(0, shared, at)
        shared = shared_length(text, part)
        if shared:
            yield _Covered(len(text) - shared, len(text), at)


def _fewest(covered: Sequence[_Covered]) -> list[_Covered]:
    """The fewest that cover what all of them cover, of those in the order of their starts."""
    chosen: list[_Covered] = []
    starts = [own.start for own in covered]
    reached = at = 0
    while at < len(covered):
        # Where more than a space is missing, it goes on with what comes next.
        end = bisect_right(starts, max(reached + 1, starts[at]), at)
        best = max(covered[at:end], key=_STOP)
        at = end
        if best.stop > reached:
            chosen.append(best)
            reached = best.stop
    return chosen


def _is_within_word(text: str, at: int) -> bool:
    """Whether the characters before and after a place in a text belong to one word or number."""
    if not 0 < at < len(text):
        return False
    left, right = text[at - 1], text[at]
    if left.isnumeric() and right.isnumeric():
        return True
    if _is_of_word(left) and _is_of_word(right):
        return _compiled(_SPACELESS).match(left) is None and _compiled(_SPACELESS).match(right) is None
    if left in _SIGNS and right.isnumeric():
        return True
    before, joint, after = text[at - 2 : at - 1], left, right
    if _is_of_word(left):
        before, joint, after = left, right, text[at + 1 : at + 2]
    if joint in _POINTS:
        return before.isnumeric() and after.isnumeric()
    return joint in _JOINTS and _is_of_word(before) and _is_of_word(after)


def _is_of_word(character: str) -> bool:
    # Marks are letters to those who write them: vowel signs, accents that stand by themselves.
    return character.isalnum() or character == "_" or (character != "" and unicodedata.category(character)[0] == "M")
