"""Documents that look alike (one file name in two folders, ids that differ in a character) are never one document."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers import document
from langchain_core.documents import Document
from places import PlacedWorld
from scenarios import World, cached, doc_ids, texts

from rag_wiki import DocumentState, RagWikiRetriever, SuggestionEvent

FIRST, SECOND = "a/readme.md", "b/readme.md"
TEXT_OF = {FIRST: "Pods are described in folder a.", SECOND: "Images are described in folder b."}
ALIKE = (
    "a/readme.md",
    "A/readme.md",
    "a/README.md",
    "a/readme.md ",
    "a//readme.md",
    "./a/readme.md",
    "a\\readme.md",
    "a/re:adme.md",
    "a:re/adme.md",
    "a/readm\u00e9.md",
    "a/readme\u0301.md",
    "a%2Freadme.md",
    "readme.md",
)
"""Sources that a careless key, file name or collation would take for each other."""


def sourced(source: str, text: str | None = None, title: str = "Readme", **metadata: Any) -> Document:
    """A document as a directory loader gives it: nothing but its source and a title identify it."""
    content = TEXT_OF.get(source, source) if text is None else text
    return Document(page_content=content, metadata={"source": source, "title": title, **metadata})


def fetch(world: World, retriever: RagWikiRetriever, *sources: str, title: str = "Readme") -> list[Document]:
    """One query for which the wrapped retriever finds these."""
    world.shows(*(sourced(source, title=title) for source in sources))
    return retriever.invoke("something unrelated")


def test_files_of_one_name_are_counted_and_saved_apart(world: PlacedWorld) -> None:
    """Two files called alike: two fetches of each suggest nothing, three do, and saving one saves no other."""
    suggested: list[SuggestionEvent] = []
    retriever = world.retriever(on_suggestion=suggested.append)
    for source in (FIRST, SECOND, FIRST, SECOND):
        fetch(world, retriever, source)
    assert suggested == []
    assert [(record.doc_id, record.doc_title, record.fetch_count) for record in retriever.documents()] == [
        (FIRST, "Readme", 2),
        (SECOND, "Readme", 2),
    ]
    fetch(world, retriever, FIRST, SECOND, FIRST)
    assert [event.doc_id for event in suggested] == [FIRST, SECOND]
    assert [world.record(source).fetch_count for source in (FIRST, SECOND)] == [3, 3]

    saved = retriever.accept_suggestion(FIRST)
    assert (saved.doc_path, saved.content_source, saved.chunk_count) == (FIRST, "retrieved", 1)
    assert world.record(FIRST).full_content == TEXT_OF[FIRST]

    later = world.reopened()
    assert [later.state(source) for source in (FIRST, SECOND)] == [DocumentState.CLAIMED, DocumentState.SUGGESTED]
    retriever = later.retriever()
    later.shows(sourced(FIRST), sourced(SECOND))
    answer, provenance = retriever.invoke_with_provenance("what are pods?")
    told = [(item.metadata["doc_id"], item.metadata["from_cache"], item.page_content) for item in answer]
    assert told == [(FIRST, True, TEXT_OF[FIRST]), (SECOND, False, TEXT_OF[SECOND])]
    sources = [(source.doc_id, source.doc_path, source.doc_title, source.from_cache) for source in provenance.sources]
    assert sources == [(FIRST, FIRST, "Readme", True), (SECOND, SECOND, "Readme", False)]


def test_a_new_title_keeps_the_count(world: PlacedWorld) -> None:
    """A source that is shown under another title goes on counting, and the record has the title of now."""
    retriever = world.retriever()
    fetch(world, retriever, FIRST)
    fetch(world, retriever, FIRST, title="Read Me First")
    fetch(world, retriever, FIRST, title="The Readme")
    provenance = retriever.last_provenance
    assert provenance is not None
    (suggestion,) = provenance.suggestions
    assert (suggestion.doc_id, suggestion.doc_title, suggestion.fetch_count) == (FIRST, "The Readme", 3)
    assert [(item.doc_id, item.doc_title) for item in retriever.documents()] == [(FIRST, "The Readme")]


def test_sources_that_look_alike_are_kept_apart(world: PlacedWorld) -> None:
    """Sources that differ in case, white space, slashes or accents are saved, served and removed for themselves."""
    retriever = world.retriever(similarity_threshold=0.0)
    world.shows(*(sourced(source, f"Pods of <{source}>.") for source in ALIKE))
    retriever.invoke("an introduction")
    for source in ALIKE:
        retriever.accept_suggestion(source)
    later = world.reopened()
    later.shows()
    retriever = later.retriever(similarity_threshold=0.0)
    served = {item.metadata["doc_id"]: item.page_content for item in retriever.invoke("what are pods?")}
    assert served == {source: f"Pods of <{source}>." for source in ALIKE}
    if world.folder is not None:
        readable = [path.read_text(encoding="utf-8") for path in world.folder.rglob("*.md")]
        assert sorted(readable) == sorted(served.values())

    retriever.force_remove(ALIKE[0])
    left = retriever.invoke("what are pods?")
    assert sorted(str(doc_id) for doc_id in doc_ids(left)) == sorted(ALIKE[1:])
    if world.folder is not None:
        assert len(list(world.folder.rglob("*.md"))) == len(ALIKE) - 1


def test_a_loader_is_asked_for_the_document_that_is_saved() -> None:
    """A loader is given the record of the very document, so each gets the text at its own path."""
    world, asked = World(), list[str]()

    def load(record: Any) -> str:
        asked.append(record.doc_path)
        return TEXT_OF[record.doc_path]

    retriever = world.retriever(document_loader=load)
    fetch(world, retriever, FIRST, SECOND)
    for source in (SECOND, FIRST):
        retriever.accept_suggestion(source)
    assert asked == [SECOND, FIRST]
    assert {source: world.record(source).full_content for source in TEXT_OF} == TEXT_OF


def test_files_of_one_name_below_two_roots_are_told_by_their_path(tmp_path: Path) -> None:
    """An absolute path names one file, however many roots have a file of that name."""
    paths = [tmp_path / root / "readme.md" for root in ("a", "b")]
    for path in paths:
        path.parent.mkdir()
        path.write_text(f"Pods of {path.parent.name}.", encoding="utf-8")
    world = World()
    retriever = world.retriever(document_roots=[path.parent for path in paths])
    world.shows(*(sourced(str(path), f"of {path.parent.name}") for path in paths))
    retriever.invoke("an introduction")
    saved = [retriever.accept_suggestion(str(path)) for path in reversed(paths)]
    assert [record.content_source for record in saved] == ["file", "file"]
    assert [world.record(str(path)).full_content for path in paths] == ["Pods of a.", "Pods of b."]


def test_a_relative_path_is_not_taken_for_a_file_of_that_name_further_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`docs/readme.md` is never saved with the text of `docs/docs/readme.md`, whatever the path counts from."""
    monkeypatch.chdir(tmp_path)
    for folder in ("docs", "docs/docs"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "readme.md").write_text(f"Pods of {folder}.", encoding="utf-8")
    world = World()
    retriever = world.retriever(document_roots=["docs"])
    sources = ["docs/readme.md", "docs/docs/readme.md"]
    # What a loader over `docs` gives: paths as they are seen from where the process runs.
    world.shows(*(sourced(source, f"Pods of {Path(source).parent}.") for source in sources))
    retriever.invoke("an introduction")
    for source in sources:
        retriever.accept_suggestion(source)
    assert [world.record(source).full_content for source in sources] == ["Pods of docs.", "Pods of docs/docs."]


def test_a_relative_path_that_two_roots_have_is_not_guessed(tmp_path: Path) -> None:
    """Where two roots have a file at a relative path, a document is not saved with the text of the other one."""
    for root in ("a", "b"):
        (tmp_path / root).mkdir()
        (tmp_path / root / "readme.md").write_text(f"Pods of {root}.", encoding="utf-8")
    world = World()
    retriever = world.retriever(document_roots=[tmp_path / "a", tmp_path / "b"])
    world.shows(*(document(f"of {root}", f"Pods of {root}.", doc_path="readme.md") for root in ("a", "b")))
    retriever.invoke("an introduction")
    for root in ("a", "b"):
        retriever.accept_suggestion(f"of {root}")
    assert [world.record(f"of {root}").full_content for root in ("a", "b")] == ["Pods of a.", "Pods of b."]


def test_llamaindex_nodes_of_one_file_name_are_counted_apart() -> None:
    """LlamaIndex nodes without a source document, whose files have one name, count by the path of each."""
    pytest.importorskip("llama_index.core", reason="needs the extra llama")
    from llama_index.core.base.base_retriever import BaseRetriever
    from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode

    from rag_wiki.adapters.llamaindex import LlamaIndexRetrieverAdapter

    class Nodes(BaseRetriever):
        def __init__(self) -> None:
            super().__init__()
            self.path = FIRST

        def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
            metadata = {"file_name": "readme.md", "file_path": self.path}
            return [NodeWithScore(node=TextNode(text=TEXT_OF[self.path], metadata=metadata), score=0.5)]

    nodes, world = Nodes(), World()
    retriever = world.retriever(global_retriever=LlamaIndexRetrieverAdapter(llama_retriever=nodes))
    for path in (FIRST, SECOND, FIRST, SECOND):
        nodes.path = path
        retriever.invoke("something unrelated")
    counted = [(item.doc_id, item.doc_title, item.fetch_count) for item in retriever.documents()]
    assert counted == [(FIRST, "readme.md", 2), (SECOND, "readme.md", 2)]
    retriever.accept_suggestion(FIRST)
    answer = retriever.invoke("what are pods?")
    assert texts(cached(answer)) == [TEXT_OF[FIRST]]
    assert texts(answer) == [TEXT_OF[FIRST], TEXT_OF[SECOND]]
    assert world.state(SECOND) is DocumentState.SUGGESTED
