"""The block that tells where an answer came from: its four forms, and what no title can do to them."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest

from rag_wiki import DocumentState, ProvenanceBlock, SourceEntry, SuggestionEvent
from rag_wiki.transparency.provenance import WithheldCopy

SAMPLE = """\
────────────────────────────────────────────────────────────
📄 Sources used in this response
  • Kubernetes Pod Basics [from your KB]
    Chunks 0, 2 of 5  |  Saved to your KB
  • Docker Image Guide
    Full document  |  SURFACED (fetched 2×)

💡 "Docker Image Guide" has appeared in your queries 3 times.
   Would you like to save it to your personal knowledge base?
────────────────────────────────────────────────────────────"""

HOSTILE = {
    "line ends": "Pods\nSaved\r\n────\x0b\x0c\x1c\x85\u2028\u2029\t\x00end",
    "escapes": "\x1b[2J\x1b[31mred\x1b[0m \x9b31m \x07\x08\x7f",
    "direction": "\u202egnp.exe\u202c \u2066x\u2069 \u200f\u200b\ufeff\u00ad",
    "boxes": "─" * 60,
    "long": "very long " * 1_000,
    "html": "<script>alert(1)</script><img src=x onerror='a()'>&lt;td&gt;</td></tr></table>\"'",
    "markdown": "**bold** _x_ `code` [link](http://example.org) ![i](x) | # h\n- item\n> quote ~~s~~ <b>",
    "surrogate": "lone \ud800 surrogate \ue000 private",
    "columns": "Pods  |  Pinned in your KB",
    "blank": " \n\t ",
}


def entry(title: str = "Docker Image Guide", **values: Any) -> SourceEntry:
    """A source that a user met twice."""
    settings: dict[str, Any] = {
        "doc_id": "images",
        "doc_title": title,
        "doc_path": "images.md",
        "user_state": DocumentState.SURFACED,
        "fetch_count": 2,
    }
    return SourceEntry(**{**settings, **values})


def saved_entry(title: str = "Kubernetes Pod Basics", **values: Any) -> SourceEntry:
    """A source that a saved copy gave."""
    settings: dict[str, Any] = {
        "doc_id": "pods",
        "user_state": DocumentState.CLAIMED,
        "fetch_count": 5,
        "chunks_used": (0, 2),
        "total_chunks": 5,
        "from_cache": True,
        "scores": (0.91, 0.8),
    }
    return entry(title, **{**settings, **values})


def suggestion(title: str = "Docker Image Guide", count: int = 3) -> SuggestionEvent:
    """A suggestion."""
    return SuggestionEvent("ada", "images", title, "images.md", count)


def block_about(title: str) -> ProvenanceBlock:
    """A block in which a title stands in every place where one can."""
    return ProvenanceBlock(
        sources=[entry(title, section_heading=title), saved_entry(title, section_heading=title)],
        suggestions=[suggestion(title)],
        withheld=[WithheldCopy("old", title, "stale")],
        degraded=["the store did not answer"],
        user_id="ada",
    )


def test_the_block_of_the_sample_is_exact() -> None:
    """A saved source, a counted one and a suggestion give the promised text, to the letter."""
    block = ProvenanceBlock([saved_entry(), entry(full_document=True)], suggestion())
    assert block.render() == SAMPLE
    assert str(block) == SAMPLE


def test_the_block_can_be_ascii() -> None:
    """`render(ascii=True)` is the same block in characters that every console has."""
    block = ProvenanceBlock([saved_entry(), entry(full_document=True)], suggestion())
    plain = block.render(ascii=True)
    assert plain.encode("ascii").decode("ascii") == plain
    assert plain.count("\n") == SAMPLE.count("\n")
    for part in ("Kubernetes Pod Basics [from your KB]", "Chunks 0, 2 of 5  |  Saved", "(fetched 2x)", "-" * 60):
        assert part in plain


@pytest.mark.parametrize("title", HOSTILE.values(), ids=HOSTILE)
def test_any_title_renders_in_ascii(title: str) -> None:
    """Whatever a title holds, the ASCII block encodes and has as many lines as with a harmless one."""
    block = block_about(title + "é漢字🙂")
    block.render(ascii=True).encode("ascii")
    assert block.render(ascii=True).count("\n") == block_about("x").render().count("\n")


@pytest.mark.parametrize("title", HOSTILE.values(), ids=HOSTILE)
def test_no_title_breaks_the_block(title: str) -> None:
    """No title adds a line, a rule, a column, a control or direction character, or a line beyond reason."""
    text = block_about(title).render()
    lines, plain = text.splitlines(), block_about("x").render().splitlines()
    assert len(lines) == len(plain)
    assert [line for line in lines if re.fullmatch("─+", line)] == ["─" * 60] * 2
    assert all(line.count("  |  ") <= other.count("  |  ") for line, other in zip(lines, plain, strict=True))
    assert not re.search(
        r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]", text
    )
    assert max(map(len, lines)) < 400
    text.encode("utf-8")


@pytest.mark.parametrize("title", HOSTILE.values(), ids=HOSTILE)
def test_no_title_breaks_the_markdown(title: str) -> None:
    """In Markdown, every character of a title that could mark something up is escaped, and lines stay lines."""
    text = block_about(title).to_markdown()
    plain = block_about("x").to_markdown()
    assert text.count("\n") == plain.count("\n")
    specials = re.compile(r"[`*_\[\]<>#|~!]")
    assert specials.findall(re.sub(r"\\.", "", text)) == specials.findall(re.sub(r"\\.", "", plain))


class Tags(HTMLParser):
    """The tags of a page, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, str]] = []
        self.text = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, str(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.parametrize("title", HOSTILE.values(), ids=HOSTILE)
def test_no_title_breaks_the_notebook_table(title: str) -> None:
    """In HTML, a title is text and never a tag."""
    page = Tags(block_about(title)._repr_html_())
    assert page.tags == Tags(block_about("x")._repr_html_()).tags
    assert [tag for tag, _ in page.tags].count("tr") == 3


def test_people_see_the_same_in_every_form() -> None:
    """Markdown and HTML name each source, its extent and standing, what was withheld, degraded and suggested."""
    block = ProvenanceBlock(
        sources=[saved_entry(), entry(passages=1)],
        suggestions=[suggestion()],
        withheld=[WithheldCopy("old", "Old Guide", "stale")],
        degraded=["the store did not answer"],
    )
    markdown = re.sub(r"\\|\*\*", "", block.to_markdown())
    for text in (block.render(), markdown, Tags(block._repr_html_()).text):
        for part in (
            "Kubernetes Pod Basics [from your KB]",
            "Chunks 0, 2 of 5",
            "Saved to your KB",
            "Docker Image Guide",
            "1 passage",
            "SURFACED (fetched 2×)",
            "Old Guide",
            "stale",
            "the store did not answer",
            '"Docker Image Guide" has appeared in your queries 3 times',
        ):
            assert part in text


def test_one_time_is_not_plural_in_any_form() -> None:
    """A suggestion at the first fetch says "1 time" in the block, in Markdown and in HTML."""
    block = ProvenanceBlock([entry(fetch_count=1)], suggestion(count=1))
    for text in (block.render(), block.to_markdown(), block._repr_html_()):
        assert "in your queries 1 time." in text


@pytest.mark.parametrize(
    ("source", "detail"),
    [
        (saved_entry(user_state=DocumentState.PINNED), "Chunks 0, 2 of 5  |  Pinned in your KB"),
        (saved_entry(total_chunks=None), "Chunks 0, 2  |  Saved to your KB"),
        (saved_entry(full_document=True), "Full document  |  Saved to your KB"),
        (saved_entry(section_heading="Limits"), "Chunks 0, 2 of 5  |  Section: Limits  |  Saved to your KB"),
        (entry(passages=3, user_state=DocumentState.SUGGESTED), "3 passages  |  SUGGESTED (fetched 2×)"),
        (entry(passages=1, doc_id=None), "1 passage  |  not tracked (no document id)"),
    ],
)
def test_a_source_says_how_much_was_used_and_where_it_stands(source: SourceEntry, detail: str) -> None:
    """The second line of a source tells its extent, its section where known, and its standing for the user."""
    assert ProvenanceBlock([source]).render().splitlines()[3] == f"    {detail}"


def test_a_changed_source_is_marked() -> None:
    """A source whose saved copy is out of date says so beside its title."""
    line = ProvenanceBlock([entry(stale=True)]).render().splitlines()[2]
    assert line == "  • Docker Image Guide [changed since you saved it]"


def test_an_empty_block_claims_nothing() -> None:
    """Without sources the block says that there are none, and suggests nothing."""
    block = ProvenanceBlock()
    assert "(none)" in block.render()
    assert "💡" not in block.render()
    assert (block.to_dict()["sources"], block.to_dict()["suggestion"]) == ([], None)


def test_a_dictionary_has_the_promised_keys() -> None:
    """`to_dict()` has the keys of earlier releases and ours, all of them always."""
    data = ProvenanceBlock([saved_entry()], suggestion(), user_id="ada", mode="semantic", threshold=0.75).to_dict()
    assert set(data) == {
        "sources",
        "suggestion",
        "suggestions",
        "user_id",
        "mode",
        "threshold",
        "withheld",
        "let_go",
        "asked",
        "left_out",
        "degraded",
        "timings",
    }
    (source,) = data["sources"]
    promised = {
        "doc_id": "pods",
        "doc_title": "Kubernetes Pod Basics",
        "doc_path": "images.md",
        "user_state": "CLAIMED",
        "fetch_count": 5,
        "chunks_used": [0, 2],
        "total_chunks": 5,
        "section_heading": None,
        "from_cache": True,
    }
    assert {name: source[name] for name in promised} == promised
    assert (source["scores"], source["stale"], source["full_document"]) == ([0.91, 0.8], False, False)
    expected = {"doc_id": "images", "doc_title": "Docker Image Guide", "fetch_count": 3}
    assert {name: data["suggestion"][name] for name in expected} == expected
    assert data["suggestions"] == [data["suggestion"]]


def test_a_dictionary_is_plain_json() -> None:
    """Arrays, numpy numbers, NaN and infinity become JSON types, and NaN becomes nothing."""
    scores: Any = np.array([0.5, np.nan, np.inf], dtype=np.float32)
    source = saved_entry(chunks_used=np.array([1, 3]), scores=scores, total_chunks=9)
    data = ProvenanceBlock([source], timings={"begin": 0.25}).to_dict()
    back = json.loads(json.dumps(data, allow_nan=False))
    assert back == data
    assert (back["sources"][0]["chunks_used"], back["sources"][0]["scores"]) == ([1, 3], [0.5])


@pytest.mark.parametrize("title", HOSTILE.values(), ids=HOSTILE)
def test_a_dictionary_keeps_titles_as_they_are(title: str) -> None:
    """Programs get the title unchanged, as JSON."""
    data = json.loads(json.dumps(block_about(title).to_dict(), allow_nan=False))
    assert data["sources"][0]["doc_title"] == title


def test_several_suggestions_are_all_told() -> None:
    """Each suggestion has its two lines and its entry; the first one is also `suggestion`."""
    first, second = suggestion("One"), suggestion("Two", 9)
    block = ProvenanceBlock([entry()], suggestions=[first, second])
    assert block.suggestion == first
    assert [item["doc_title"] for item in block.to_dict()["suggestions"]] == ["One", "Two"]
    assert block.to_dict()["suggestion"] == block.to_dict()["suggestions"][0]
    assert block.render().count("Would you like to save it") == 2
    assert '"Two" has appeared in your queries 9 times.' in block.render()


def test_a_single_suggestion_is_also_in_the_list() -> None:
    """A block made the old way, with `suggestion`, lists it in `suggestions`."""
    assert list(ProvenanceBlock([entry()], suggestion()).suggestions) == [suggestion()]
