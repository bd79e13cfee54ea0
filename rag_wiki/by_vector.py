"""Asking a vector store by the query's vector: one embedding serves both searches, and scores can be compared.

Stores score in many ways: cosine, one minus it, squared distance, distance. What a store's scores are is not guessed
from its name: a few of its documents are embedded, and the conversion that gives their cosines is taken. Where none
does (another text was embedded than the one it returns, vectors are not of length one) its scores mean nothing here.
"""

from __future__ import annotations

import contextlib
import inspect
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from langchain_core.callbacks import AsyncCallbackManagerForRetrieverRun, CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import run_in_executor
from langchain_core.vectorstores import VectorStoreRetriever
from pydantic import PrivateAttr

from rag_wiki import events
from rag_wiki.search.embedding import QueryVector, check_vectors, fingerprint
from rag_wiki.storage.chunk_store import unit_rows

__all__ = ["Asked", "ByVectorRetriever", "find_by_vector"]

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
_NEARLY = 0.02
"""How far two scores of one document may be apart: a remote model embeds one text twice with small differences."""
_SAME = 0.01
"""How far the cosine of a converted score may be off: stores round, and some compress their vectors."""
_COMPARED = 4
"""Documents that are embedded to find out."""
_MOST_TRIES = 5
_PROVED = 2
"""First calls that are asked both ways: a store may search by vector otherwise than by text (hybrid modes, say).

Both the documents and their scores are compared: a hybrid search finds the same documents for most questions, and other
ones for just those that need it, but it scores by rank.
"""
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

    _original: VectorStoreRetriever = PrivateAttr()
    _method: str = PrivateAttr()
    _named: frozenset[str] = PrivateAttr()
    _conversion: str | None = PrivateAttr(default=None)
    _tries: int = PrivateAttr(default=0)
    _supported: bool = PrivateAttr(default=True)
    _to_prove: int = PrivateAttr(default=_PROVED)
    _failures: int = PrivateAttr(default=0)

    @classmethod
    def of(cls, original: VectorStoreRetriever, method: str) -> ByVectorRetriever:
        """The retriever's twin that searches by `method`."""
        twin = cls(name=original.get_name(), vectorstore=original.vectorstore)
        twin._original, twin._method = original, method
        twin._named = _named_parameters(getattr(original.vectorstore, method))
        return twin

    def follow(self) -> bool:
        """Take over how the original is set now; tells whether it can be asked by vector that way."""
        original = self._original
        self.search_kwargs, self.tags, self.metadata = original.search_kwargs, original.tags, original.metadata
        plain = original.search_type == "similarity" and self._named.issuperset(original.search_kwargs)
        return self._supported and plain

    def stands_for(self, retriever: object) -> bool:
        """Whether it is the twin of a retriever as it is now."""
        return retriever is self._original and self._original.vectorstore is self.vectorstore

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
            return self._could_not(asked, by_text, error)
        scored: Scored = ()
        with contextlib.suppress(Exception):  # many stores tell no scores by text; then the documents must do
            scored = self.vectorstore.similarity_search_with_score(query, **arguments)
        return self._compared(asked, by_text, scored)

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
            return self._could_not(asked, by_text, error)
        scored: Scored = ()
        with contextlib.suppress(Exception):  # many stores tell no scores by text; then the documents must do
            scored = await self.vectorstore.asimilarity_search_with_score(query, **arguments)
        return self._compared(asked, by_text, scored)

    async def _asearch(self, vector: list[float], arguments: Mapping[str, Any]) -> Scored:
        awaited: Callable[..., Awaitable[Scored]] | None = getattr(self.vectorstore, f"a{self._method}", None)
        if awaited is not None:
            return await awaited(vector, **arguments)
        search: Callable[..., Scored] = getattr(self.vectorstore, self._method)
        return await run_in_executor(None, lambda: search(vector, **arguments))

    def _compared(self, asked: Asked, by_text: list[Document], scored: Scored) -> list[Document]:
        """What was found, if by vector it is what it is by text; where not, it is not asked by vector again.

        Args:
            asked: What was found by vector.
            by_text: What was found by text.
            scored: The same with scores, where the store tells them.
        """
        texts, found = ([document.page_content for document in documents] for documents in (by_text, asked.found))
        most = max(len(texts), len(found))
        same = sum((Counter(texts) & Counter(found)).values())
        in_place = sum(one == other for one, other in zip(texts, found, strict=False))
        if same < _ALIKE * most or in_place < _IN_PLACE * most:
            return self._give_up(asked, by_text, "it finds other documents by vector than by text")
        if not _scores_agree(zip(asked.found, asked.scores or (), strict=False), scored):
            return self._give_up(asked, by_text, "it scores by text otherwise than by vector, as a hybrid search does")
        # One document, or none, is found in the same order by any search.
        if most > 1:
            self._to_prove = max(self._to_prove - 1, 0)
        return asked.found

    def _could_not(self, asked: Asked, by_text: list[Document], error: Exception) -> list[Document]:
        """Serve what was found by text, and ask by vector again where the error may pass."""
        asked.scores = None
        self._failures += 1
        if isinstance(error, (TypeError, NotImplementedError, AttributeError)) or self._failures >= _MOST_TRIES:
            return self._give_up(asked, by_text, f"it can't be asked by vector ({type(error).__name__}: {error})")
        return by_text

    def _give_up(self, asked: Asked, by_text: list[Document], why: str) -> list[Document]:
        """Ask by text from now on."""
        self._supported, asked.scores = False, None
        store = type(self.vectorstore).__name__
        events.SOURCE_BY_RANK.log(
            "context='focused' ranks the results of %s by their rank: %s", store, why, store=store
        )
        return by_text

    def asked(self, vector: QueryVector) -> Asked:
        """What a call by vector is given, and leaves its scores in."""
        return Asked(vector)

    def unknown_texts(self, asked: Asked, documents: Sequence[Document]) -> list[str]:
        """Texts whose vectors tell what the store's scores are; none when that is known, or can't be known now."""
        if self._conversion is not None or self._tries >= _MOST_TRIES or not self._fits(asked, documents):
            return []
        return [documents[at].page_content for at in _some(documents)]

    def learn(self, asked: Asked, documents: Sequence[Document], vectors: object) -> None:
        """Find out, by the vectors of `unknown_texts`, how a cosine follows from a score.

        Raises:
            EmbeddingError: The vectors can't be used.
        """
        some = _some(documents)
        rows = unit_rows(check_vectors(vectors, len(some), "the store's documents"))
        if rows.shape[1] != asked.vector.unit.shape[0] or asked.scores is None:
            return
        true, scores = rows @ asked.vector.unit, asked.scores
        self._tries += 1
        fitting = [
            name
            for name, convert in _CONVERSIONS.items()
            if all(abs(convert(float(scores[at])) - cosine) <= _SAME for at, cosine in zip(some, true, strict=True))
        ]
        if len(fitting) == 1:
            self._conversion = fitting[0]
        elif not fitting or self._tries >= _MOST_TRIES:
            self._tries = _MOST_TRIES
            store = type(self.vectorstore).__name__
            events.SOURCE_BY_RANK.log(
                "context='focused' ranks the results of %s by their rank: its scores are no cosines of the texts",
                store,
                store=store,
            )

    def cosines(self, asked: Asked, documents: Sequence[Document]) -> list[float] | None:
        """The cosine of each document to the query; `None` where the store's scores do not tell."""
        if self._conversion is None or asked.scores is None or not self._fits(asked, documents):
            return None
        convert = _CONVERSIONS[self._conversion]
        cosines = np.clip([convert(float(score)) for score in asked.scores], -1.0, 1.0)
        return [round(float(cosine), 6) for cosine in cosines] if np.isfinite(cosines).all() else None

    def _fits(self, asked: Asked, documents: Sequence[Document]) -> bool:
        """Whether each document has a score that is a number."""
        scores = asked.scores
        if not scores or len(scores) != len(documents):
            return False
        try:
            return bool(np.isfinite(np.asarray(scores, dtype=np.float64)).all())
        except (TypeError, ValueError):
            return False


def find_by_vector(
    retriever: object, embeddings: Embeddings | None, known: ByVectorRetriever | None = None
) -> ByVectorRetriever | None:
    """The twin of a retriever that can be asked by vector as it is set now, or `None`; `known` if that still is it.

    It can where it is a `VectorStoreRetriever` that searches by plain similarity, with nothing that the store's
    method by vector does not take, on a store that embeds with the same model.
    """
    if not isinstance(retriever, VectorStoreRetriever) or embeddings is None or not _is_plain(type(retriever)):
        return None
    if known is not None and known.stands_for(retriever):
        return known
    store = retriever.vectorstore
    own = store.embeddings if isinstance(store.embeddings, Embeddings) else getattr(store, "embedding", None)
    if not isinstance(own, Embeddings) or (own is not embeddings and fingerprint(own) != fingerprint(embeddings)):
        return None
    method = next((name for name in _METHODS if callable(getattr(store, name, None))), None)
    return None if method is None else ByVectorRetriever.of(retriever, method)


def _is_plain(kind: type[VectorStoreRetriever]) -> bool:
    """Whether a subclass searches as the class itself does."""
    return all(
        getattr(kind, name) is getattr(VectorStoreRetriever, name)
        for name in ("_get_relevant_documents", "_aget_relevant_documents")
    ) and (kind.invoke is BaseRetriever.invoke and kind.ainvoke is BaseRetriever.ainvoke)


def _some(documents: Sequence[Document]) -> list[int]:
    """First and last: the further apart their cosines, the less two conversions can agree by chance."""
    return sorted({*range(min(_COMPARED - 1, len(documents))), len(documents) - 1})


def _scores_agree(by_vector: Iterable[tuple[Document, float]], by_text: Scored) -> bool:
    """Whether documents have the same score by vector and by text, or the one is one minus the other.

    Where nothing can be compared nothing speaks against it.
    """
    known = {document.page_content: score for document, score in by_text}
    try:
        pairs = [
            (float(score), float(known[document.page_content]))
            for document, score in by_vector
            if document.page_content in known
        ]
    except (TypeError, ValueError):
        return True
    agree = [min(abs(one - other), abs(one + other - 1)) <= _NEARLY * max(1.0, abs(one)) for one, other in pairs]
    return sum(agree) >= _ALIKE * len(agree)


def _named_parameters(search: Callable[..., object]) -> frozenset[str]:
    """The arguments that a function takes by name, rather than among others that it may pass on."""
    try:
        named = inspect.signature(search).parameters
    except (TypeError, ValueError):
        return frozenset()
    return frozenset(name for name, parameter in named.items() if parameter.kind is not parameter.VAR_KEYWORD)
