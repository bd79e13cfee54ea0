"""The global collection that everybody searches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.vectorstores import InMemoryVectorStore

DEPTH = 10
"""Chunks that a search finds, of which the first `k` are taken."""


class Collection(InMemoryVectorStore):
    """A vector store that counts its searches, and answers a question that it knows from memory.

    What it finds does not depend on who asks: every system of an experiment asks the same questions.
    """

    def __init__(self, embeddings: Embeddings, chunks: Sequence[Document]) -> None:
        super().__init__(embeddings)
        self.searches = 0
        self._found: dict[bytes, list[tuple[Document, float]]] = {}
        self.add_documents(list(chunks))

    # All its searches for what is similar come here, by text and by vector.
    def similarity_search_with_score_by_vector(
        self,
        embedding: list[float],
        k: int = 4,
        filter: Callable[[Document], bool] | None = None,  # noqa: A002 - the name that LangChain gives it
        **kwargs: Any,
    ) -> list[tuple[Document, float]]:
        """The `k` best chunks with their cosines, in copies of their own."""
        self.searches += 1
        search = super().similarity_search_with_score_by_vector
        if k > DEPTH or filter is not None:
            return search(embedding, k, filter, **kwargs)
        key = np.asarray(embedding, dtype=np.float32).tobytes()
        if key not in self._found:
            self._found[key] = search(embedding, DEPTH)
        return [
            (chunk.model_copy(update={"metadata": dict(chunk.metadata)}), score)
            for chunk, score in self._found[key][:k]
        ]
