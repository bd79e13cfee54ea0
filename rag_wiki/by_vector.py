"""Asking a vector store by the query's vector: one embedding serves both searches, and scores can be compared.

Stores score in many ways: cosine, one minus it, squared distance, distance. What a store's scores are is not guessed
from its name: a few of its documents are embedded, and the conversion that gives their cosines is taken. Where none
does (another text was embedded than the one it returns, vectors are not of length one) its scores mean nothing here.
"""

from __future__ import annotations

import inspect
import logging
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from langchain_core.callbacks import AsyncCallbackManagerForRetrieverRun, CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import run_in_executor
from langchain_core.vectorstores import VectorStoreRetriever
from pydantic import PrivateAttr

from rag_wiki.search.embedding import QueryVector, check_vectors, fingerprint
from rag_wiki.storage.chunk_store import unit_rows

__all__ = ["Asked", "ByVectorRetriever", "find_by_vector"]

logger = logging.getLogger("rag_wiki")

Scored: TypeAlias = Sequence[tuple[Document, float]]

_METHODS = (
    "similarity_search_with_score_by_vector",
    "similarity_search_by_vector_with_score",
    "similarity_search_by_vector_with_relevance_scores",
)
"""What stores call it; LangChain's own interface has no name for it."""
_CONVERSIONS: Mapping[str, Callable[[float], float]] = {
    "cosine": lambda score: score,
    "one minus cosine": lambda score: 1 - score,
    "squared distance": lambda score: 1 - score / 2,
    "distance": lambda score: 1 - score * score / 2,
}
"""From a score to the cosine, for vectors of length one."""
_SAME = 0.01
"""How far the cosine of a converted score may be off: stores round, and some compress their vectors."""
_COMPARED = 4
"""Documents that are embedded to find out."""
_MOST_TRIES = 5
_PROVED = 2
"""First calls that are asked both ways: a store may search by vector otherwise than by text (hybrid modes, say)."""
_ALIKE = 0.8
_IN_PLACE = 0.6
"""The shares of the documents that must be the same, and in the same place. A remote model embeds one text twice with
small differences, which may swap two documents that are equally close."""


class Asked:
    """A query as a vector, and what the store gave each document for it."""

    def __init__(self, vector: QueryVector) -> None:
        self.vector = vector
        self.found: list[Document] = []
        self.scores: list[float] | None = None

    def keep(self, scored: Scored) -> list[Document]:
        """Keep the scores; returns the documents."""
        self.scores = [score for _, score in scored]
        self.found = [document for document, _ in scored]
        return self.found


class ByVectorRetriever(VectorStoreRetriever):
    """A vector-store retriever, asked by vector. To callbacks it is the retriever that it stands for."""

    _method: str = PrivateAttr()
    _embeddings: Embeddings = PrivateAttr()
    _conversion: str | None = PrivateAttr(default=None)
    _tries: int = PrivateAttr(default=0)
    _supported: bool = PrivateAttr(default=True)
    _to_prove: int = PrivateAttr(default=_PROVED)
    _lock: threading.Lock = PrivateAttr(default_factory=threading.Lock)

    @classmethod
    def of(cls, retriever: VectorStoreRetriever, method: str, embeddings: Embeddings) -> ByVectorRetriever:
        """The retriever's twin that searches by `method`."""
        twin = cls(
            name=retriever.get_name(),
            vectorstore=retriever.vectorstore,
            search_kwargs=retriever.search_kwargs,
            tags=retriever.tags,
            metadata=retriever.metadata,
        )
        twin._method, twin._embeddings = method, embeddings
        return twin

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, asked: Asked | None = None, **kwargs: Any
    ) -> list[Document]:
        if asked is None or not self._supported:
            return super()._get_relevant_documents(query, run_manager=run_manager, **kwargs)
        search: Callable[..., Scored] = getattr(self.vectorstore, self._method)
        vector, arguments = list(asked.vector.raw), {**self.search_kwargs, **kwargs}
        if not self._to_prove:
            return asked.keep(search(vector, **arguments))
        by_text = super()._get_relevant_documents(query, run_manager=run_manager, **kwargs)
        try:
            asked.keep(search(vector, **arguments))
        except Exception as error:  # what a store raises for what it can't do is up to its class
            return self._give_up(asked, by_text, f"it can't be asked by vector ({error})")
        return self._compared(asked, by_text)

    async def _aget_relevant_documents(
        self,
        query: str,
        *,
        run_manager: AsyncCallbackManagerForRetrieverRun,
        asked: Asked | None = None,
        **kwargs: Any,
    ) -> list[Document]:
        if asked is None or not self._supported:
            return await super()._aget_relevant_documents(query, run_manager=run_manager, **kwargs)
        vector, arguments = list(asked.vector.raw), {**self.search_kwargs, **kwargs}
        if not self._to_prove:
            return asked.keep(await self._asearch(vector, arguments))
        by_text = await super()._aget_relevant_documents(query, run_manager=run_manager, **kwargs)
        try:
            asked.keep(await self._asearch(vector, arguments))
        except Exception as error:  # what a store raises for what it can't do is up to its class
            return self._give_up(asked, by_text, f"it can't be asked by vector ({error})")
        return self._compared(asked, by_text)

    async def _asearch(self, vector: list[float], arguments: Mapping[str, Any]) -> Scored:
        awaited: Callable[..., Awaitable[Scored]] | None = getattr(self.vectorstore, f"a{self._method}", None)
        if awaited is not None:
            return await awaited(vector, **arguments)
        search: Callable[..., Scored] = getattr(self.vectorstore, self._method)
        return await run_in_executor(None, lambda: search(vector, **arguments))

    def _compared(self, asked: Asked, by_text: list[Document]) -> list[Document]:
        """What was found, if by vector it is what it is by text; where not, it is not asked by vector again."""
        texts, found = ([document.page_content for document in documents] for documents in (by_text, asked.found))
        most = max(len(texts), len(found))
        same = sum((Counter(texts) & Counter(found)).values())
        in_place = sum(one == other for one, other in zip(texts, found, strict=False))
        if same < _ALIKE * most or in_place < _IN_PLACE * most:
            return self._give_up(asked, by_text, "it finds other documents by vector than by text")
        self._to_prove = max(self._to_prove - 1, 0)
        return asked.found

    def _give_up(self, asked: Asked, by_text: list[Document], why: str) -> list[Document]:
        """Ask by text from now on."""
        self._supported, asked.scores = False, None
        logger.info(
            "%s is asked by text, its results are ranked by their rank: %s", type(self.vectorstore).__name__, why
        )
        return by_text

    def asked(self, vector: QueryVector) -> Asked:
        """What a call by vector is given, and leaves its scores in."""
        return Asked(vector)

    @property
    def knows_scores(self) -> bool:
        """Whether it is known what the store's scores are, or that they mean nothing here."""
        return self._conversion is not None or self._tries >= _MOST_TRIES

    def cosines(self, asked: Asked, documents: Sequence[Document]) -> list[float] | None:
        """The cosine of each document to the query; `None` where the store's scores do not tell.

        Raises:
            Exception: What the embedding model raises, when it is asked what the scores are.
        """
        if not asked.scores or len(asked.scores) != len(documents):
            return None
        if not self.knows_scores:
            with self._lock:
                if not self.knows_scores:
                    self._find_out(asked, asked.scores, documents)
        if self._conversion is None:
            return None
        convert = _CONVERSIONS[self._conversion]
        cosines = np.clip([convert(float(score)) for score in asked.scores], -1.0, 1.0)
        return [round(float(cosine), 6) for cosine in cosines] if np.isfinite(cosines).all() else None

    def _find_out(self, asked: Asked, scores: Sequence[float], documents: Sequence[Document]) -> None:
        self._tries += 1
        # First and last: the further apart their cosines, the less two conversions can agree by chance.
        some = sorted({*range(min(_COMPARED - 1, len(documents))), len(documents) - 1})
        texts = [documents[at].page_content for at in some]
        rows = unit_rows(check_vectors(self._embeddings.embed_documents(texts), len(texts), "the store's documents"))
        true = rows @ asked.vector.unit
        fitting = [
            name
            for name, convert in _CONVERSIONS.items()
            if all(abs(convert(float(scores[at])) - cosine) <= _SAME for at, cosine in zip(some, true, strict=True))
        ]
        if len(fitting) == 1:
            self._conversion = fitting[0]
        elif not fitting or self._tries >= _MOST_TRIES:
            self._tries = _MOST_TRIES
            logger.info(
                "the scores of %s are no cosines of %s: its results are ranked by their rank",
                type(self.vectorstore).__name__,
                fingerprint(self._embeddings),
            )


def find_by_vector(retriever: object, embeddings: Embeddings | None) -> ByVectorRetriever | None:
    """The twin of a retriever that can be asked by vector, or `None`.

    It can where it is a `VectorStoreRetriever` that searches by plain similarity, with nothing that the store's
    method by vector does not take, on a store that embeds with the same model.
    """
    if not isinstance(retriever, VectorStoreRetriever) or embeddings is None or retriever.search_type != "similarity":
        return None
    if not _is_plain(type(retriever)):
        return None
    store = retriever.vectorstore
    own = store.embeddings if isinstance(store.embeddings, Embeddings) else getattr(store, "embedding", None)
    if not isinstance(own, Embeddings) or (own is not embeddings and fingerprint(own) != fingerprint(embeddings)):
        return None
    for method in _METHODS:
        search = getattr(store, method, None)
        if callable(search) and _takes(search, retriever.search_kwargs):
            return ByVectorRetriever.of(retriever, method, embeddings)
    return None


def _is_plain(kind: type[VectorStoreRetriever]) -> bool:
    """Whether a subclass searches as the class itself does."""
    return all(
        getattr(kind, name) is getattr(VectorStoreRetriever, name)
        for name in ("_get_relevant_documents", "_aget_relevant_documents")
    ) and (kind.invoke is BaseRetriever.invoke and kind.ainvoke is BaseRetriever.ainvoke)


def _takes(search: Callable[..., object], arguments: Mapping[str, Any]) -> bool:
    """Whether a function takes these arguments by name, rather than among others that it may pass on."""
    try:
        named = inspect.signature(search).parameters
    except (TypeError, ValueError):
        return False
    return set(arguments) <= {name for name, parameter in named.items() if parameter.kind is not parameter.VAR_KEYWORD}
