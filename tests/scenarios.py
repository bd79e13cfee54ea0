"""What tests of the whole retriever share: a user, a source, an embedding table and a clock, set up in a line."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from helpers import HandClock, ListRetriever, TableEmbeddings, document
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.runnables import Runnable, RunnablePassthrough
from langchain_text_splitters import TextSplitter

from rag_wiki import (
    DocumentEvent,
    DocumentState,
    MemoryStateStore,
    RagWikiRetriever,
    RagWikiRetrieverConfig,
    StateStore,
    UserDocRecord,
)

USER = "ada"
PODS = "Pods are the smallest unit that can be deployed."
POD_QUESTION = "what are pods?"
OTHER_QUESTION = "what about tax?"


def direction(cosine: float) -> list[float]:
    """A unit vector with this cosine to `[1, 0]`."""
    return [cosine, math.sqrt(max(1.0 - cosine * cosine, 0.0))]


def topics() -> TableEmbeddings:
    """Three subjects at right angles, told apart by a word of each text."""
    return TableEmbeddings({"pods": [1, 0, 0], "Pods": [1, 0, 0], "images": [0, 1, 0], "Images": [0, 1, 0]})


@dataclass
class World:
    """Everything around the retrievers of a test; `retriever` makes one of any user."""

    store: StateStore = field(default_factory=MemoryStateStore)
    embeddings: Embeddings | None = field(default_factory=topics)
    clock: HandClock = field(default_factory=HandClock)
    source: ListRetriever = field(default_factory=ListRetriever)

    @property
    def table(self) -> TableEmbeddings:
        """The embedding model, where it is the table."""
        assert isinstance(self.embeddings, TableEmbeddings)
        return self.embeddings

    def retriever(self, user_id: str | None = USER, **options: Any) -> RagWikiRetriever:
        """A retriever over this world; settings by name go to its configuration."""
        constructor = ("on_suggestion", "chunk_store", "document_loader", "access_check", "k")
        arguments = {name: options.pop(name) for name in constructor if name in options}
        arguments.setdefault("embedding_model", options.pop("embedding_model", self.embeddings))
        return RagWikiRetriever(
            global_retriever=options.pop("global_retriever", self.source),
            user_id=user_id,
            state_store=self.store,
            config=RagWikiRetrieverConfig(**options),
            clock=self.clock,
            **arguments,
        )

    def shows(self, *documents: Document) -> None:
        """What the wrapped retriever returns from now on."""
        self.source.documents = list(documents)

    def record(self, doc_id: str, user_id: str = USER) -> UserDocRecord:
        """The stored record."""
        record = self.store.get(user_id, doc_id)
        assert record is not None
        return record

    def state(self, doc_id: str, user_id: str = USER) -> DocumentState:
        """The stored state."""
        return self.record(doc_id, user_id).user_state

    def save(
        self, retriever: RagWikiRetriever, doc_id: str, text: str, *, user_id: str | None = None, **metadata: Any
    ) -> UserDocRecord:
        """Retrieve a document once and save it; the source shows nothing afterwards."""
        self.shows(document(doc_id, text, **metadata))
        retriever.invoke("an introduction", user_id=user_id)
        self.shows()
        return retriever.accept_suggestion(doc_id, full_content=text, user_id=user_id)


def chained(retriever: RagWikiRetriever) -> Runnable[str, list[Document]]:
    """The retriever as a step of a chain."""
    first: RunnablePassthrough[str] = RunnablePassthrough()
    return first | retriever


def texts(documents: Sequence[Document]) -> list[str]:
    """The texts of documents, in order."""
    return [item.page_content for item in documents]


def doc_ids(documents: Sequence[Document]) -> list[str | None]:
    """The ids of documents, in order."""
    return [item.metadata.get("doc_id") for item in documents]


def cached(documents: Sequence[Document]) -> list[Document]:
    """The documents that saved copies gave."""
    return [item for item in documents if item.metadata.get("from_cache")]


def story(events: Sequence[DocumentEvent]) -> list[tuple[str, str, str]]:
    """A history in short: what happened, from which state to which."""
    return [(event.what, event.from_state.value, event.to_state.value) for event in events]


class Paragraphs(TextSplitter):
    """Splits a text where it has an empty line."""

    def split_text(self, text: str) -> list[str]:
        return text.split("\n\n")
