"""`documents()` is a list like any other, and prints as a table that no title can break."""

from __future__ import annotations

import copy
import html.parser
import json
import pickle
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from typing import Any

import pytest
from helpers import START, document
from places import PlacedWorld
from scenarios import OTHER_QUESTION, POD_QUESTION, PODS, USER, World

from rag_wiki import ConfigurationError, DecayConfig, DocumentState, RagWikiRetriever, UserDocRecord
from rag_wiki.storage.codec import decode_record, encode_record
from rag_wiki.storage.records import Clocks
from rag_wiki.tables import DocumentList, display_width, time_ago

IMAGES = "Images are built in layers."
SAVED, PINNED = DocumentState.CLAIMED, DocumentState.PINNED


def record(doc_id: str, title: str = "", **fields: Any) -> UserDocRecord:
    """A record of a document."""
    return UserDocRecord(USER, doc_id, title, "", **fields)


def lines(documents: DocumentList, **options: Any) -> list[str]:
    """The lines of a table."""
    return documents.render(**options).splitlines()


def lived_in() -> tuple[World, RagWikiRetriever]:
    """A user with a pinned, a saved, a suggested, a declined and a removed document."""
    world = World()
    retriever = world.retriever()
    world.shows(*(document(name, f"About {name}.") for name in ("declined", "removed", "suggested")))
    for _ in range(3):
        retriever.invoke(OTHER_QUESTION)
    retriever.decline_suggestion("declined")
    retriever.force_remove("removed")
    world.save(retriever, "images", IMAGES)
    world.save(retriever, "pods", PODS)
    retriever.force_pin("images")
    retriever.thumbs_up("pods")
    retriever.thumbs_down("images")
    world.clock.turn(days=3, hours=5)
    return world, retriever


TABLE = """\
Document   Id         State      Score  Why                                         Last use    Fetches  Vote  Notes
---------  ---------  ---------  -----  ------------------------------------------  ----------  -------  ----  ------------------
Declined   declined   SURFACED       –  declined; suggested again at 9 fetches      3 days ago        3
Images     images     PINNED      0.20  the user pinned it                          3 days ago        1    −1  pinned by the user
Pods       pods       CLAIMED     0.59  the user accepted; content from the caller  3 days ago        1    +1
Removed    removed    DEMOTED        –  the user removed it                         3 days ago        0
Suggested  suggested  SUGGESTED      –  fetched 3 times                             3 days ago        3
5 documents: 1 SURFACED, 1 SUGGESTED, 1 CLAIMED, 1 PINNED, 1 DEMOTED"""  # noqa: E501 - as wide as it is


def test_documents_print_as_a_table() -> None:
    """`print(documents)` shows each document with state, score, why, last use by the retriever's clock, and votes."""
    _, retriever = lived_in()
    assert str(retriever.documents()) == TABLE
    assert f"{retriever.documents()}" == TABLE


async def test_some_states_awaited_print_the_same() -> None:
    """A filtered list, and the awaited one, print as tables too; columns with nothing to say are left out."""
    _, retriever = lived_in()
    expected = """\
Document   Id         State      Score  Why              Last use    Fetches
---------  ---------  ---------  -----  ---------------  ----------  -------
Suggested  suggested  SUGGESTED      –  fetched 3 times  3 days ago        3
1 document: 1 SUGGESTED"""
    assert str(retriever.documents("SUGGESTED")) == expected
    assert str(await retriever.adocuments(["SUGGESTED"])) == expected
    assert str(retriever.documents(["GLOBAL"])) == "No documents."


def test_the_list_is_a_list() -> None:
    """It compares, slices, sorts, joins, copies, pickles and goes to JSON as the list of records that it is."""
    _, retriever = lived_in()
    documents: list[UserDocRecord] = retriever.documents()
    plain = list(documents)
    assert isinstance(documents, list)
    assert documents == plain
    assert plain == documents
    assert (documents[1], documents[-1], len(documents)) == (plain[1], plain[4], 5)
    assert documents[1:3] == plain[1:3]
    assert documents + documents[:1] == plain + plain[:1]
    assert sorted(documents, key=lambda item: item.doc_id) == plain
    assert repr(documents) == repr(plain)
    assert json.dumps([item.doc_id for item in documents]) == json.dumps([item.doc_id for item in plain])
    assert [asdict(item) for item in documents] == [asdict(item) for item in plain]
    for copied in (copy.copy(documents), copy.deepcopy(documents), pickle.loads(pickle.dumps(documents))):  # noqa: S301 - our own
        assert (copied, str(copied)) == (plain, TABLE)
    assert str(documents[2:3]) == str(retriever.documents([SAVED]))
    assert str(retriever.documents().copy()[:0]) == "No documents."


def test_why_is_kept_in_every_place(world: PlacedWorld) -> None:
    """In every store the record says why it stands where it does, as its history has it, without a trip for it."""
    retriever = world.retriever(decay=DecayConfig(demotion_hold_days=0, demotion_threshold=0.8))
    world.save(retriever, "pods", PODS)
    world.save(retriever, "images", IMAGES)
    retriever.thumbs_down("pods")  # a vote moves nothing
    retriever.force_pin("images")
    retriever.refresh("images", full_content=f"{IMAGES} Anew.")
    seen = {item.doc_id: item.why for item in world.reopened().retriever().documents()}
    assert seen == {"images": "the user pinned it", "pods": "the user accepted; content from the caller"}
    world.shows(document("pods", PODS))
    retriever.invoke(POD_QUESTION)
    world.shows(document("pods", f"{PODS} And more."))
    retriever.invoke(POD_QUESTION)
    retriever.refresh("pods")
    assert world.record("pods").why == "the user accepted; content from the retrieved chunks"
    retriever.reindex()
    assert world.record("pods").why == "the user accepted; content from the retrieved chunks"
    world.shows()
    world.clock.turn(days=30)
    retriever.run_decay()
    retriever.unpin("images")
    seen = {item.doc_id: item.why for item in world.reopened().retriever().documents()}
    assert seen["images"] == "the user unpinned it"
    assert seen["pods"].startswith("score 0.")
    assert seen["pods"] == retriever.history("pods")[-1].why
    world.shows(document("pods", PODS))
    retriever.invoke(POD_QUESTION)
    assert world.record("pods").why == "fetched again after it was let go"


@pytest.mark.parametrize("states", [5, ["SAVED"], "SAVED"])
def test_states_that_are_none_are_told(states: Any) -> None:
    """Which there are is said."""
    with pytest.raises(ConfigurationError, match="the states are GLOBAL, SURFACED, SUGGESTED"):
        World().retriever().documents(states)


@pytest.mark.parametrize("enabled", ["bob", "no", None])
def test_a_user_is_no_answer_to_whether(enabled: Any) -> None:
    """The id of a user in the place of yes or no changes nothing for another user."""
    world = World()
    retriever = world.retriever()
    world.save(retriever, "pods", PODS)
    with pytest.raises(ConfigurationError, match="'pods' answers in full is True or False, not"):
        retriever.set_always_full_doc("pods", enabled)
    assert not world.record("pods").always_full_doc


def test_a_count_that_begins_anew_says_why(world: PlacedWorld) -> None:
    """A document that turned up once and never again has no story, but its count of zero has a reason."""
    retriever = world.retriever()
    world.shows(document("pods", PODS))
    retriever.invoke(POD_QUESTION)
    world.shows(document("images", IMAGES))
    for _ in range(3):
        retriever.invoke(OTHER_QUESTION)
    record = world.record("pods")
    assert (record.fetch_count, record.why) == (0, "absent from 3 queries in a row; counted anew")
    assert [event.what for event in retriever.history("pods")] == ["surfaced"]


def test_a_record_of_before_has_no_why() -> None:
    """A record that was stored without a reason is read back, and the table says that there is none."""
    stored = encode_record(record("pods", why="x"), Clocks())
    payload = json.loads(stored.text)
    assert payload.pop("why") == "x"
    before = decode_record(stored._replace(payload=json.dumps(payload)), Clocks(), USER)
    assert before.why == ""
    assert lines(DocumentList([before], START))[2].split() == ["pods", "pods", "SURFACED", "–", "–", "never", "0"]


def test_wide_characters_and_emoji_keep_the_columns_straight() -> None:
    """East Asian characters and emoji take two cells, marks none; every column begins in the same cell of each row."""
    titles = [
        "Plain",
        "日本語の題名",
        "한국어",
        "ｆｕｌｌ",
        "e\N{COMBINING ACUTE ACCENT}tude",
        "❤️ heart",
        "👍🏽 thumb",
        "🇩🇪",
    ]
    documents = DocumentList([record(f"d{number}", title) for number, title in enumerate(titles)], START)
    rows = lines(documents)[2:-1]
    starts = {display_width(row[: row.index(f"d{number}")]) for number, row in enumerate(rows)}
    assert starts == {len("日本語の題名") * 2 + 2}
    assert [display_width(title) for title in titles] == [5, 12, 6, 8, 5, 8, 8, 2]


@pytest.mark.parametrize(
    "title",
    [
        "two\nlines\r\nand\ttabs",
        "\x1b[31mred\x1b[0m",
        "right\N{RIGHT-TO-LEFT OVERRIDE}to left",
        "a\N{LINE SEPARATOR}b",
        "nul\x00 and bell\x07",
        "\ud800 half",
    ],
)
def test_no_title_breaks_the_layout(title: str) -> None:
    """Line ends, escape codes and direction marks in titles, ids and reasons do nothing to the rows around them."""
    documents = DocumentList([record(f"id {title}", title, why=title), record("next", "Next")], START)
    text = str(documents)
    assert len(text.splitlines()) == 5
    assert not [char for char in text if char != "\n" and not char.isprintable()]
    assert "\x1b" not in documents._repr_html_()
    text.encode("utf-8")


def test_long_titles_are_cut_to_their_cells() -> None:
    """A title longer than its column is cut, by cells, and marked."""
    documents = DocumentList([record("a" * 60, "題" * 40), record("b", "t" * 36), record("c", "t" * 37)], START)
    first, whole, cut = lines(documents)[2:5]
    assert first.split()[:2] == ["題" * 17 + "…", "a" * 27 + "…"]
    assert whole.split()[0] == "t" * 36
    assert cut.split()[0] == "t" * 35 + "…"


def test_a_console_without_utf_8_gets_ascii() -> None:
    """`render(ascii=True)` is ASCII alone, in straight columns, whatever the titles are."""
    _, retriever = lived_in()
    table = retriever.documents().render(ascii=True)
    assert table == TABLE.replace("–", "-").replace("−", "-")
    strange = DocumentList([record("日本", "題" * 40), record("x", "é")], START).render(ascii=True)
    assert strange.isascii()
    assert [line.index("SURFACED") for line in strange.splitlines()[2:4]] == [36 + 2 + 2 + 2] * 2
    assert "?" * 35 + "~" in strange


class Cells(html.parser.HTMLParser):
    """The cells of a table, and every tag."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[tuple[str, str | None]]] = []
        self.tags: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append(("", dict(attrs).get("title")))

    def handle_data(self, data: str) -> None:
        if self.rows and self.rows[-1] and self.lasttag in ("td", "th"):
            text, title = self.rows[-1][-1]
            self.rows[-1][-1] = text + data, title


def test_a_notebook_gets_an_escaped_table() -> None:
    """The HTML table has whole titles and exact times, and markup in titles, ids and reasons stays text."""
    moment = START - timedelta(hours=2)
    evil = '"><script>alert("x")</script>'
    documents = DocumentList(
        [
            record(f"id {evil}", f"{evil} {'long ' * 10}", why=evil, last_fetched_at=moment, fetch_count=1_204),
            record("b", "B", user_state=PINNED, decay_score=0.914, stale_since=moment, explicit_signal=1.0),
        ],
        START,
    )
    shown = documents._repr_html_()
    cells = Cells(shown)
    assert cells.tags == {"div", "table", "thead", "tbody", "tr", "th", "td", "p"}
    names, first, second = cells.rows
    assert [name for name, _ in names] == [
        *("Document", "Id", "State", "Score", "Why", "Last use", "Fetches", "Vote", "Notes"),
    ]
    assert first[0] == (f"{evil} {'long ' * 10}".strip(), f"id {evil}")
    assert first[4:7] == [(evil, evil), ("2 hours ago", "2026-03-01 07:00:00 UTC"), ("1,204", None)]
    assert second[2:4] == [("PINNED", None), ("0.91", None)]
    assert second[7:] == [("+1", None), ("pinned by its score, stale", "2026-03-01 07:00:00 UTC")]
    assert shown.startswith('<div class="rag-wiki-documents"><table>')
    assert "<p>2 documents: 1 SURFACED, 1 PINNED</p>" in shown


def test_ten_thousand_documents_print_fifty() -> None:
    """A long list shows its first 50 documents and says how many more there are, as text and as HTML."""
    documents = DocumentList((record(f"doc-{number:05}", f"Title {number}") for number in range(10_000)), START)
    assert lines(documents)[51].split()[2] == "doc-00049"
    assert lines(documents)[52:] == ["… and 9,950 more. 10,000 documents: 10,000 SURFACED"]
    assert lines(documents, rows=2)[4:] == ["… and 9,998 more. 10,000 documents: 10,000 SURFACED"]
    assert lines(documents, ascii=True)[52].startswith("... and 9,950 more.")
    shown = Cells(documents._repr_html_())
    assert len(shown.rows) == 51
    assert "… and 9,950 more." in documents._repr_html_()


@pytest.mark.parametrize(
    ("ago", "words"),
    [
        (timedelta(seconds=-30), "just now"),
        (timedelta(seconds=59), "just now"),
        (timedelta(minutes=1), "1 minute ago"),
        (timedelta(minutes=59, seconds=59), "59 minutes ago"),
        (timedelta(hours=1), "1 hour ago"),
        (timedelta(hours=23, minutes=59), "23 hours ago"),
        (timedelta(days=1), "1 day ago"),
        (timedelta(days=30), "30 days ago"),
        (timedelta(days=31), "1 month ago"),
        (timedelta(days=365), "11 months ago"),
        (timedelta(days=800), "2 years ago"),
    ],
)
def test_times_are_told_in_the_largest_unit(ago: timedelta, words: str) -> None:
    """How long ago something was is told in whole units of the largest that fits; the future is just now."""
    assert time_ago(START - ago, START) == words


def test_notes_say_who_pinned_and_what_is_off() -> None:
    """The last column says who set a pin, that a copy is stale, and that a document answers whole."""
    pinned = record("a", user_state=PINNED, pinned_by_user=True, stale_since=START, always_full_doc=True)
    documents = DocumentList([pinned, replace(pinned, doc_id="b", pinned_by_user=False, stale_since=None)], START)
    assert [line.split("never")[1].split(maxsplit=1)[1] for line in lines(documents)[2:4]] == [
        "pinned by the user, stale, answers whole",
        "pinned by its score, answers whole",
    ]
