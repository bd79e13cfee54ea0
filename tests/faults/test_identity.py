"""What identifies a document: what many back ends give, and what they leave out or fill with something else."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from helpers import document
from langchain_core.documents import Document
from llama_index.core.base.base_retriever import BaseRetriever as LlamaIndexRetriever
from llama_index.core.schema import NodeRelationship, NodeWithScore, QueryBundle, RelatedNodeInfo, TextNode
from llama_index.core.vector_stores.utils import node_to_metadata_dict
from places import PlacedWorld
from scenarios import POD_QUESTION, World, cached, texts

from rag_wiki import ProvenanceBlock, RagWikiRetriever
from rag_wiki.adapters.llamaindex import LlamaIndexRetrieverAdapter

PODS = ("Pods are small.", "Pods are many.")


def asked(retriever: RagWikiRetriever, times: int = 3) -> list[ProvenanceBlock]:
    """The provenance of each of several calls."""
    return [retriever.invoke_with_provenance(POD_QUESTION).provenance for _ in range(times)]


def suggested(blocks: Sequence[ProvenanceBlock]) -> list[list[str]]:
    """What was suggested by each call."""
    return [sorted(event.doc_id for event in block.suggestions) for block in blocks]


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the log warned of."""
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


IDENTIFIED: dict[str, tuple[dict[str, Any], str]] = {
    "doc_id": ({"doc_id": "pods", "source": "library/pods.md"}, "pods"),
    "source": ({"source": "library/pods.md"}, "library/pods.md"),
    "doc_path": ({"doc_path": "/library/pods.md"}, "/library/pods.md"),
    "a number": ({"doc_id": 42}, "42"),
    "doc_id is None": ({"doc_id": None, "source": "library/pods.md"}, "library/pods.md"),
    "doc_id is blank": ({"doc_id": "  ", "source": "library/pods.md"}, "library/pods.md"),
    "an id of the chunk besides": ({"doc_id": "pods", "_id": "6f1c", "chunk_id": 7}, "pods"),
}


@pytest.mark.parametrize("kind", IDENTIFIED)
def test_what_names_its_source_is_suggested_at_the_third_fetch(kind: str) -> None:
    """Chunks that name their source document, with chunk ids that differ on each call, are one document to count."""
    metadata, doc_id = IDENTIFIED[kind]
    world = World()
    retriever = world.retriever()
    found = []
    for turn in range(3):
        world.shows(*(Document(id=f"{turn}-{text}", page_content=text, metadata=dict(metadata)) for text in PODS))
        found += asked(retriever, 1)
    assert suggested(found) == [[], [], [doc_id]]
    assert world.record(doc_id).fetch_count == 3
    retriever.accept_suggestion(doc_id)
    assert {item.metadata["doc_id"] for item in cached(retriever.invoke(POD_QUESTION))} == {doc_id}


def test_ids_are_kept_as_they_are_in_every_place(world: PlacedWorld) -> None:
    """Ids that differ in case, white space or separators only are different documents, saved, found and read back."""
    ids = [
        "pods",
        "Pods",
        " pods",
        "pods ",
        "a/pods",
        "a:pods",
        "a\\pods",
        "../pods",
        "pods\n",
        "pod%",
        "pöds",
        "po\u0308ds",
    ]
    world.shows(*(document(doc_id, f"Pods of {doc_id!r}.") for doc_id in ids))
    retriever = world.retriever()
    assert suggested(asked(retriever)) == [[], [], sorted(ids)]
    for doc_id in ids:
        retriever.accept_suggestion(doc_id)
    world.shows()
    for opened in (retriever, world.reopened().retriever()):
        found = {item.metadata["doc_id"]: item.page_content for item in opened.invoke(POD_QUESTION)}
        assert found == {doc_id: f"Pods of {doc_id!r}." for doc_id in ids}


UNIDENTIFIED: dict[str, Callable[[int, str], Document]] = {
    "a chunk id only": lambda turn, text: Document(id=f"{turn}-{text}", page_content=text),
    "nothing": lambda turn, text: Document(page_content=text),
    "a point of a store": lambda turn, text: Document(
        page_content=text, metadata={"_id": f"{turn}-{text}", "_collection_name": "library"}
    ),
    "None": lambda turn, text: Document(page_content=text, metadata={"doc_id": None, "source": None}),
    "blank": lambda turn, text: Document(page_content=text, metadata={"doc_id": "", "source": "\t", "doc_path": " "}),
    "not a number": lambda turn, text: Document(page_content=text, metadata={"doc_id": math.nan, "source": True}),
    "a title": lambda turn, text: Document(page_content=text, metadata={"title": "Pods", "file_name": "pods.md"}),
}


@pytest.mark.parametrize("kind", UNIDENTIFIED)
def test_what_nothing_identifies_passes_through_with_one_warning(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """Documents that name no source are returned as they are and not counted, and one warning names the keys."""
    world = World()
    retriever = world.retriever()
    blocks = []
    for turn in range(3):
        world.shows(*(UNIDENTIFIED[kind](turn, text) for text in PODS))
        documents, provenance = retriever.invoke_with_provenance(POD_QUESTION)
        assert documents == world.source.documents
        blocks.append(provenance)
    assert suggested(blocks) == [[], [], []]
    assert [(source.doc_id, source.fetch_count) for source in blocks[-1].sources] == [(None, 0)] * 2
    assert world.store.list_by_state("ada") == []
    (warning,) = warnings(caplog)
    assert "doc_id, source or doc_path" in warning


def test_a_setting_names_what_identifies(caplog: pytest.LogCaptureFixture) -> None:
    """`document_id` makes a key, or what a function finds, the id of documents that no usual key identifies."""
    shown = [Document(page_content=text, metadata={"_id": "point-1", "book": {"isbn": 3}}) for text in PODS]
    for setting, doc_id in (("_id", "point-1"), (lambda found: found.metadata["book"]["isbn"], "3")):
        world = World()
        world.shows(*shown)
        assert suggested(asked(world.retriever(document_id=setting))) == [[], [], [doc_id]]
    assert warnings(caplog) == []


def test_the_word_none_is_no_id() -> None:
    """Unrelated documents whose store wrote the absence of an id as the text "None" are not one document."""
    world = World()
    retriever = world.retriever()
    blocks = []
    for text in ("Pods are small.", "Images are large.", "Tax is due."):
        world.shows(Document(page_content=text, metadata={"doc_id": "None", "source": "None"}))
        blocks += asked(retriever, 1)
    assert suggested(blocks) == [[], [], []]
    assert world.store.get("ada", "None") is None


# -- LlamaIndex


class NodeRetriever(LlamaIndexRetriever):
    """Returns nodes that are made anew for each call."""

    def __init__(self, make: Callable[[], list[NodeWithScore]]) -> None:
        super().__init__()
        self.make = make

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return self.make()


def node(text: str, source: str | None = None, score: float | None = None, **metadata: Any) -> NodeWithScore:
    """A result with a new random node id, cut from `source` where one is given."""
    made = TextNode(text=text, metadata=metadata)
    if source is not None:
        made.relationships[NodeRelationship.SOURCE] = RelatedNodeInfo(node_id=source)
    return NodeWithScore(node=made, score=score)


def over_nodes(world: World, make: Callable[[], list[NodeWithScore]]) -> RagWikiRetriever:
    """A retriever over LlamaIndex nodes."""
    return world.retriever(global_retriever=LlamaIndexRetrieverAdapter(llama_retriever=NodeRetriever(make)))


@pytest.mark.parametrize("source", ["pods", None], ids=["with a source", "without a source"])
async def test_nodes_are_suggested_at_the_third_fetch(source: str | None) -> None:
    """Nodes count for their source; without one, new node ids on each call still are one document, told by its text."""
    world = World()
    retriever = over_nodes(world, lambda: [node("Pods are small.", source), node("Images are large.", "images")])
    blocks = [*asked(retriever, 2), (await retriever.ainvoke_with_provenance(POD_QUESTION)).provenance]
    (doc_id,) = {record.doc_id for record in world.store.list_by_state("ada")} - {"images"}
    assert source is None or doc_id == source
    assert suggested(blocks) == [[], [], sorted(["images", doc_id])]
    retriever.accept_suggestion(doc_id)
    assert "Pods are small." in texts(cached(retriever.invoke(POD_QUESTION)))


def test_nodes_without_a_source_are_not_one_document() -> None:
    """Unrelated nodes that have no source are documents of their own, also where a store wrote "None" for it."""
    world = World()
    retriever = over_nodes(
        world, lambda: [node("Pods are small.", doc_id="None"), node("Tax is due.", "None"), node("Images are large.")]
    )
    blocks = asked(retriever)
    ids = [record.doc_id for record in world.store.list_by_state("ada")]
    assert (len(ids), suggested(blocks)) == (3, [[], [], ids])
    assert "None" not in ids


def test_nodes_without_text_and_source_pass_through(caplog: pytest.LogCaptureFixture) -> None:
    """A node that has neither a source nor a text is returned, untracked, with one warning."""
    world = World()
    retriever = over_nodes(world, lambda: [node("")])
    assert [source.doc_id for block in asked(retriever) for source in block.sources] == [None] * 3
    assert (world.store.list_by_state("ada"), len(warnings(caplog))) == ([], 1)


async def test_nodes_keep_text_metadata_and_score() -> None:
    """Text, metadata and score of a node arrive as they are, a score of zero too; a missing one stays missing."""
    shared = {"page": 3, "tags": ["a"]}
    nodes = [
        node("Pods are small.", "pods", 0.75, **shared),
        node("Images are large.", "images", 0.0, **shared),
        node("Tax is due.", "tax", None, **shared),
        node("Nobody knows.", "nobody", math.nan, **shared),
    ]
    retriever = over_nodes(World(), lambda: nodes)
    for documents, provenance in (
        retriever.invoke_with_provenance(POD_QUESTION),
        await retriever.ainvoke_with_provenance(POD_QUESTION),
    ):
        assert texts(documents) == [item.text for item in nodes]
        assert [item.metadata.get("score", "missing") for item in documents] == [0.75, 0.0, "missing", "missing"]
        assert [tuple(source.scores) for source in provenance.sources] == [(0.75,), (0.0,), (), ()]
        assert [(item.metadata["page"], item.metadata["tags"]) for item in documents] == [(3, ["a"])] * 4
        documents[0].metadata["tags"].append("scribbled")
        documents[0].metadata["page"] = 4
    assert [item.node.metadata for item in nodes] == [shared] * 4
    assert shared == {"page": 3, "tags": ["a"]}


def test_a_collection_that_llamaindex_filled_is_read_without_it() -> None:
    """What LlamaIndex writes into vector stores, read by a LangChain retriever, joins no unrelated documents."""
    world = World()
    world.shows(
        *(
            Document(page_content=text, metadata=node_to_metadata_dict(node(text).node, flat_metadata=True))
            for text in ("Pods are small.", "Tax is due.")
        )
    )
    asked(world.retriever())
    assert [record.doc_id for record in world.store.list_by_state("ada")] != ["None"]
