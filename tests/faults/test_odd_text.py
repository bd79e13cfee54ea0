"""Texts of any size and script as query, content, title and heading: never half done, and nothing breaks the layout."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from helpers import TableEmbeddings, document
from langchain_core.documents import Document
from places import PlacedWorld
from scenarios import POD_QUESTION, PODS, Paragraphs, World, cached, doc_ids, texts

from rag_wiki import DocumentState, ProvenanceBlock
from rag_wiki.errors import InvalidDocumentError

ONCE_EACH = ["memory+disk", "sqlite", "postgres", "valkey"]
"""Each store and each place for chunks, once."""

ODD: dict[str, str] = {
    "surrogate": "a \ud83d b",
    "nul": "a\0b",
    "right to left": "\u202eעברית\u202c שלום",
    "isolates": "\u2067abc\u2069",
    "family": "👩\u200d👩\u200d👧\u200d👦🏽",
    "flag": "🇩🇪",
    "marks": "Z" + "\u0351\u0335\u0317" * 300,
    "mark first": "\u0301\u0301a",
    "line ends": "one\r\ntwo\u2028three\u2029four\x0bfive\x85six",
    "escapes": "\x1b[2J\x1b[31mred\x07\b\b",
    "rule": "─" * 60 + "\n📄 Sources used in this response\n  • Forged [from your KB]",
    "markup": "<script>alert(1)</script> [x](javascript:1) | `code` **b** &lt;",
    "patterns": "%s {0} {name} $1 \\1 %(x)s",
    "blanks": "\u3000\u00a0a\u200b\ufeff",
    "long": "x" * 10_000,
    "private": "\ue000\U0010ffff",
}


def check_layout(provenance: ProvenanceBlock) -> None:
    """A block has as many lines as its parts, in each form, and can be printed and sent anywhere."""
    block = provenance.render()
    expected = 3 + (2 * len(provenance.sources) or 1) + 3 * len(provenance.suggestions) + len(provenance.withheld)
    lines = block.split("\n")
    assert len(block.splitlines()) == len(lines) == expected
    assert {lines[0], lines[-1]} == {"─" * 60}
    assert sum(line.startswith("  • ") for line in lines) == len(provenance.sources)
    assert max(len(line) for line in lines) < 400
    block.encode()
    ascii_block = provenance.render(ascii=True)
    assert ascii_block.isascii()
    assert len(ascii_block.splitlines()) == len(lines)
    assert all(32 <= ord(char) < 127 for char in ascii_block.replace("\n", ""))
    assert "<script>" not in provenance._repr_html_()
    provenance._repr_html_().encode()
    provenance.to_markdown().encode()
    told = provenance.to_dict()
    assert json.loads(json.dumps(told)) == told


@pytest.mark.parametrize("text", ODD.values(), ids=ODD)
def test_no_title_heading_path_or_id_breaks_the_block(text: str) -> None:
    """Whatever stands in a title, a path, a heading or an id, the block keeps its lines, and JSON has it unchanged."""
    world = World()
    doc_id = f"pods {text}"
    world.shows(document(doc_id, PODS, doc_title=text, doc_path=text, section=text))
    retriever = world.retriever(fetch_threshold=1)
    _, provenance = retriever.invoke_with_provenance(POD_QUESTION)
    check_layout(provenance)
    told = provenance.to_dict()
    assert (told["sources"][0]["doc_id"], told["suggestion"]["doc_title"]) == (doc_id, text)
    assert told["sources"][0]["section_heading"] == text
    retriever.accept_suggestion(doc_id, full_content=f"# {text}\n\n{PODS}")
    world.shows(document(doc_id, "Something else.", doc_title=text))
    _, provenance = retriever.invoke_with_provenance(POD_QUESTION)
    assert [kept.reason for kept in provenance.withheld] == ["stale"]
    check_layout(provenance)


@pytest.mark.parametrize("text", ODD.values(), ids=ODD)
def test_any_text_is_saved_and_served_as_it_is(text: str) -> None:
    """A content, and a retrieved piece, of any characters comes back from a saved copy as it went in."""
    world = World()
    retriever = world.retriever(chunk_size=20_000, text_splitter=Paragraphs())
    content = f"Pods {text}"
    world.save(retriever, "pods", content)
    assert texts(cached(retriever.invoke(POD_QUESTION))) == [content]
    world.shows(document("images", f"Images {text}"))
    retriever.invoke("images")
    assert retriever.accept_suggestion("images").full_content == f"Images {text}"
    world.shows()
    assert texts(cached(retriever.invoke("images"))) == [f"Images {text}"]


@pytest.mark.parametrize("world", ONCE_EACH, indirect=True)
def test_any_text_survives_every_place(world: PlacedWorld) -> None:
    """Content, titles, headings and metadata of odd characters are the same after reopening, in every place."""
    retriever = world.retriever(text_splitter=Paragraphs())
    for name, text in ODD.items():
        content = f"# {text}\n\nPods {name} {text}"
        world.save(retriever, f"pods {name}", content, doc_title=text, doc_path=text, tag=text)
    again = world.reopened()
    for name, text in ODD.items():
        record = again.record(f"pods {name}")
        assert record.full_content == f"# {text}\n\nPods {name} {text}", name
        assert (record.doc_title, record.doc_path) == (text, text), name
    answers = {answer.metadata["doc_id"]: answer for answer in again.retriever(local_top_k=9).invoke(POD_QUESTION)}
    assert {answer.metadata["tag"] for answer in answers.values()} == set(ODD.values())
    if world.folder is not None:
        assert len(list(world.folder.rglob("*.md"))) == len(ODD)


@pytest.mark.parametrize("query", [*ODD.values(), "", " ", "\n\t\u3000"], ids=[*ODD, "empty", "blank", "blanks"])
async def test_any_query_is_answered(query: str) -> None:
    """A query of any characters, or of none, reaches the source, is compared, and is answered both ways."""
    world = World(embeddings=TableEmbeddings({"Pods": [1.0], query: [1.0]} if query.strip() else {"Pods": [1.0]}))
    retriever = world.retriever()
    world.save(retriever, "pods", PODS)
    world.shows(document("tax", "About tax."))
    for result in (retriever.invoke_with_provenance(query), await retriever.ainvoke_with_provenance(query)):
        assert doc_ids(result.documents) == (["pods", "tax"] if query.strip() else ["tax"])
        assert result.provenance.degraded == ()
    by_words = world.retriever(embedding_model=None)
    assert "tax" in doc_ids(by_words.invoke(query))
    assert world.source.calls[-3:] == [query] * 3


BLANK = ["", " ", "\n\t", "\u3000\u00a0", "\x1f"]


@pytest.mark.parametrize("text", BLANK, ids=ascii)
def test_blank_content_saves_nothing(text: str) -> None:
    """A blank content is refused, the state stays, and a piece without text is served but not saved."""
    world = World()
    world.shows(document("pods", text))
    retriever = world.retriever()
    assert texts(retriever.invoke(POD_QUESTION)) == [text]
    before = world.record("pods")
    with pytest.raises(InvalidDocumentError, match="blank"):
        retriever.accept_suggestion("pods", full_content=text)
    with pytest.raises(LookupError, match="nothing to save"):
        retriever.accept_suggestion("pods")
    assert world.record("pods") == before
    assert before.user_state is DocumentState.SURFACED


@pytest.mark.parametrize("title", ["", " ", "\u200b", "\x1b\x07", "\u202e"], ids=ascii)
def test_a_title_without_a_visible_character_gives_way_to_the_id(title: str) -> None:
    """A document whose title shows nothing is called by its id."""
    world = World()
    world.shows(document("pods", PODS, doc_title=title))
    _, provenance = world.retriever().invoke_with_provenance(POD_QUESTION)
    assert provenance.sources[0].name == "pods"


def test_five_megabytes_are_saved_whole(tmp_path: Path) -> None:
    """A content of five megabytes is saved, counted in chunks, served in parts and in full, and removed."""
    world = World()
    retriever = world.retriever(wiki_save_dir=tmp_path, chunk_size=10_000, embedding_batch_size=1000)
    content = "Pods and more pods.\n\n" * (5 * 1024 * 1024 // 21)
    record = world.save(retriever, "pods", content)
    assert record.full_content == content
    (answer,), provenance = retriever.invoke_with_provenance(POD_QUESTION)
    assert len(answer.page_content) < 40_000
    assert provenance.sources[0].total_chunks == record.chunk_count > 500
    retriever.set_always_full_doc("pods")
    assert retriever.invoke(POD_QUESTION)[0].page_content == content
    retriever.force_remove("pods")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_megabyte_without_a_blank_is_saved_whole() -> None:
    """A content that nothing breaks is cut where it must be, and its chunks give it back."""
    world = World()
    retriever = world.retriever(chunk_overlap=0, embedding_batch_size=2000)
    content = "Pods" + "".join(chr(0x4E00 + number % 20_000) for number in range(1_000_000))
    record = world.save(retriever, "pods", content)
    chunks = world.store.chunk_store.load_chunks("ada", "pods")
    assert "".join(chunk["text"] for chunk in chunks) == content
    assert record.chunk_count == len(chunks) == 1001


def test_long_pieces_that_repeat_one_letter_are_put_together() -> None:
    """Retrieved pieces of one letter over and over are joined without comparing every place with every other."""
    world = World()
    world.shows(
        document("pods", "Pods " + "a" * 90_000 + "b", chunk_index=0), document("pods", "a" * 90_000, chunk_index=1)
    )
    retriever = world.retriever()
    retriever.invoke(POD_QUESTION)
    content = retriever.accept_suggestion("pods").full_content
    assert content is not None
    assert (content.count("a"), content.count("b")) == (180_000, 1)


def test_a_long_heading_is_not_kept_once_a_chunk() -> None:
    """What is stored of a document grows with its length, also where one line of it is a very long heading."""
    world = World()
    retriever = world.retriever()
    record = world.save(retriever, "pods", "# Pods" + "x" * 100_000)
    sections = [chunk["section"] for chunk in world.store.chunk_store.load_chunks("ada", "pods")]
    assert record.chunk_count > 100
    assert sum(len(section or "") for section in sections) < 100_000


@pytest.mark.parametrize("text", ODD.values(), ids=ODD)
def test_what_is_logged_of_odd_ids_is_one_plain_line(text: str, caplog: pytest.LogCaptureFixture) -> None:
    """A warning about a document says its id on one line without control characters."""
    world = World()
    world.shows(Document(PODS, metadata={"doc_id": f"pods {text}"}))

    def refuse(user_id: str, doc_id: str) -> bool:
        message = f"no {doc_id!r}"
        raise PermissionError(message)

    retriever = world.retriever(access_check=refuse)
    retriever.invoke(POD_QUESTION)
    retriever.accept_suggestion(f"pods {text}")
    with caplog.at_level(logging.WARNING, "rag_wiki"):
        _, provenance = retriever.invoke_with_provenance(POD_QUESTION)
    check_degraded = [*(record.getMessage() for record in caplog.records), *provenance.degraded]
    assert check_degraded
    for line in check_degraded:
        assert len(line.splitlines()) == 1
        assert "\x1b" not in line
