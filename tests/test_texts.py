"""Comparing texts: which is in which, and which is much like which."""

from __future__ import annotations

import pytest

from rag_wiki.texts import are_alike, flat, holds, parts_with


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("Notice is 10 days.", "10 days"),
        ("Notice is 10 days.", "Notice is 10 days."),
        ("Notice is 10 days.", ""),
        ("Notice: (10 days).", "10 days"),
        ("110 days, then 10 days", "10 days"),
        ("first sentence.Second", "first sentence."),
        ("see example.com, it says", "example.com"),
        ("the 'big' one", "big"),
        ("請假須於10天前提出申請", "須於10天前"),
        ("แจ้งล่วงหน้าสิบวัน", "ล่วงหน้า"),
        ("第110条と第10条", "10条"),
        ("days 10", "10"),
    ],
)
def test_a_part_between_words_is_in_a_text(text: str, part: str) -> None:
    """White space, punctuation, the ends of the text, and any place in a script without spaces part words."""
    assert holds(text, part)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("Notice is 110 days.", "10 days"),
        ("10 days' notice", "10 day"),
        ("Notice is unpaid", "paid"),
        ("a non-refundable fee", "refundable fee"),
        ("it costs 10.50", "it costs 10"),
        ("it costs 10,000 a year", "it costs 10"),
        ("open 9:30", "30"),
        ("at -5 degrees", "5 degrees"),
        ("the author’s word", "the author"),
        ("snake_case", "snake"),
        ("cafe\u0301 au lait", "cafe"),
        ("किताबें", "किताब"),
        ("需提前二十天", "十天"),
        ("需提前110天", "10天"),
        ("Notice is 10 days.", "20 days"),
    ],
)
def test_a_part_of_a_word_or_number_is_not_in_a_text(text: str, part: str) -> None:
    """What begins or ends within a word or number says something else."""
    assert not holds(text, part)


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        ("Notice is 10 days.", "Notice is 20 days.", True),
        ("Notice is 10 days.", "Nobody need give notice.", False),
        ("Bolt 1.50 Nut 2.75 Washer 0.10", "Bolt 1.80 Nut 3.25 Washer 0.20", True),
        ("請假須於十天前提出申請", "請假須於廿天前提出申請", True),
        ("請假須於十天前提出申請", "辦公室週末不開放使用", False),
        ("", "", True),
        ("", "text", False),
    ],
)
def test_versions_of_a_text_are_alike(one: str, other: str, alike: bool) -> None:
    """A text of which most words stay is another version, in any script; a list with other figures too."""
    assert are_alike(one, other) is are_alike(other, one) is alike


def test_chunks_that_overlap_are_not_alike() -> None:
    """Neighbouring chunks that share half of their words are two parts."""
    words = [f"word{chr(97 + number % 26)}{chr(97 + number // 26)}" for number in range(150)]
    assert not are_alike(" ".join(words[:100]), " ".join(words[50:]))


def test_a_flat_text_has_no_layout() -> None:
    """Line ends, tabs and runs of blanks are one blank, and none at the ends."""
    assert flat(" Pods\n\thold  containers.\r\n") == "Pods hold containers."


LAW = ["Notice is 10 days.", "It begins on a Monday.", "Whoever is ill says so", "at once, by telephone."]


@pytest.mark.parametrize(
    ("text", "parts", "places"),
    [
        ("It begins on a Monday.", LAW, (1,)),
        ("begins on", LAW, (1,)),
        ("10 days", ["110 days", "10 days"], (1,)),
        ("10 days", ["in 10 days, not 20", "10 days", "10 days"], (1,)),
        ("10 days. It begins on a Monday. Whoever is", LAW, (0, 1, 2)),
        ("Whoever is ill says so at once, by telephone.", LAW, (2, 3)),
        ("is ill says so at once, by", LAW, (2, 3)),
        ("days. It begins on a Monday. Who", LAW, (0, 1, 2)),
        ("Of illness: whoever", LAW, ()),
        ("Staff only. It begins on a Monday. Nobody knows of what is not written.", LAW, (1,)),
        ("begins on a Monday. Nobody knows", LAW, (1,)),
        ("It is Monday. Whoever knows, and has known for long, is", ["Long before, and then: It is Monday.", *LAW], ()),
        ("Of illness: Whoever is ill says so at once, by", [*LAW[:3], f"{LAW[3]} Letters are no help."], (2, 3)),
        ("in the yard. Rule 2 says", ["Play in the yard. Rule", "1 says: play in the", "yard. Rule 2 says"], (1, 2)),
        ("is ill says so today, by fax.", LAW, (2,)),
        ("one two three", ["one two", "two", "two three"], (0, 2)),
        ("a note. a note. the end", ["a note.", "a note.", "the end"], (0, 1, 2)),
        ("請假須於10天前提出申請並附證明文件", ["請假須於10天前提出申請", "並附證明文件"], (0, 1)),
        ("", LAW, ()),
        ("nothing of it", [], ()),
    ],
)
def test_the_parts_that_hold_a_text(text: str, parts: list[str], places: tuple[int, ...]) -> None:
    """The shortest with all of it, else the fewest that have it together; less than half of either tells nothing."""
    assert parts_with(text, parts) == places
