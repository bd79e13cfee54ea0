"""Whose vectors are these? An embedding model, asked whether old ones are its own, and for new ones."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from langchain_core.embeddings import Embeddings
from numpy.typing import NDArray

from rag_wiki.config import RagWikiRetrieverConfig
from rag_wiki.errors import EmbeddingError
from rag_wiki.migrate.meaning import ChunkDraft
from rag_wiki.migrate.older_state import batches
from rag_wiki.search.embedding import check_vectors, fingerprint
from rag_wiki.storage.chunk_store import unit_rows

__all__ = ["Model"]

_SAME_MODEL = 0.99
"""The cosine from which a vector is taken for the model's own: what rounding and hardware change is far less, and what
another model gives for the same text is far off."""


class Model:
    """The embedding model that the retriever over the new place will have."""

    def __init__(self, model: Embeddings, config: RagWikiRetrieverConfig) -> None:
        self.name = fingerprint(model, config.embedding_name)
        self._model = model
        self._batch = config.embedding_batch_size
        self._width: int | None = None

    @property
    def width(self) -> int:
        """How wide its vectors are."""
        if self._width is None:
            self._width = int(self.embed(["width"], "a sample").shape[1])
        return self._width

    def embed(self, texts: Sequence[str], what: str) -> NDArray[np.float32]:
        """The vectors of texts.

        Raises:
            EmbeddingError: The model's answer can't be used.
        """
        found = [
            check_vectors(self._model.embed_documents(batch), len(batch), what, "What was brought over so far stays.")
            for batch in batches(texts, self._batch)
        ]
        widths = sorted({vectors.shape[1] for vectors in found})
        if len(widths) != 1:
            msg = f"the embedding model returned vectors of the widths {widths} for {what}"
            raise EmbeddingError(msg)
        return np.concatenate(found)

    def recognised(self, copies: Sequence[ChunkDraft]) -> list[bool]:
        """Of copies, whether their vectors are the model's own.

        Two chunks of each are embedded, the one that was kept first and the one that was kept last: release 0.2 went
        on adding chunks when the model was another one.
        """
        same = [copy.vectors is not None and copy.vectors.shape[1] == self.width for copy in copies]
        probes = [(at, chunk) for at, copy in enumerate(copies) if same[at] for chunk in copy.probes]
        if not probes:
            return same
        mine = unit_rows(self.embed([chunk.text for _, chunk in probes], "a sample of old chunks"))
        theirs = unit_rows(np.array([chunk.vector for _, chunk in probes], dtype=np.float64).astype(np.float32))
        cosines = np.einsum("ij,ij->i", mine, theirs)
        for (at, _), cosine in zip(probes, cosines.tolist(), strict=True):
            same[at] = same[at] and cosine > _SAME_MODEL
        return same
