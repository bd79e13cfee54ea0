"""What counts as relevant: the threshold, the focus, and how the wrapped retriever is asked for comparable scores."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from langchain_core.embeddings import Embeddings

from rag_wiki.config import RagWikiRetrieverConfig
from rag_wiki.errors import CorruptDataError
from rag_wiki.search.calibration import Calibration, Focus, ModelScores
from rag_wiki.search.calibration_pairs import PAIRS
from rag_wiki.search.index import IndexCache, SearchLimits, UserIndex
from rag_wiki.storage.base import StateStore

if TYPE_CHECKING:
    from rag_wiki.by_vector import ByVectorRetriever

__all__ = ["Relevance"]

logger = logging.getLogger("rag_wiki")

_MOST_CHUNKS = 8
"""Chunks of a document that are looked at for a focused answer, which takes some of them."""
_ENOUGH_SEARCHES = 20
_ENOUGH_DOCUMENTS = 4
_NEARLY_ALL = 0.95
"""The share of saved documents that answer, over so many searches in so many documents, of which one is told."""
_ENOUGH_CHANCES = 20
"""Searches without a hit although the wrapped retriever found a saved document, of which one is told."""


class Relevance:
    """Threshold and focus of a retriever, and what is known of its embedding model."""

    def __init__(
        self,
        store: StateStore,
        cache: IndexCache,
        config: RagWikiRetrieverConfig,
        global_retriever: object,
    ) -> None:
        self._store = store
        self._cache = cache
        self._config = config
        self._global_retriever = global_retriever
        self._measuring = threading.Lock()
        self._by_vector: tuple[Embeddings, ByVectorRetriever | None] | None = None
        self.watch = ThresholdWatch()

    @property
    def needs_scores(self) -> bool:
        """Whether it must be known what the model's cosines mean."""
        return self._config.similarity_threshold == "auto" or self._config.context == "focused"

    def can_judge(self, scores: ModelScores | None) -> bool:
        """Whether it can be said what is a hit."""
        return scores is not None or self._config.similarity_threshold != "auto"

    def known(self, name: str) -> ModelScores | None:
        """How the model scores, if that is known in this process."""
        return self._cache.peek_model_scores(name)

    def scores(self, model: Embeddings, name: str, *, anew: bool = False) -> ModelScores:
        """How the model scores: known here, kept in the store, or measured now and kept.

        Raises:
            EmbeddingError: The model's vectors can't be used.
            Exception: What the model or the store raises.
        """
        with self._measuring:
            try:
                known = None if anew else self._cache.model_scores(self._store, name)
            except CorruptDataError as error:
                logger.warning("%s", error)
                known, anew = None, True
            if known is None:
                measured = self._measure(model, name)
                known = self._cache.keep_model_scores(self._store, measured, anew=anew)
                logger.info("calibrated %s: %s", name, known)
            return known

    def _measure(self, model: Embeddings, name: str) -> ModelScores:
        questions = [model.embed_query(pair.question) for pair in PAIRS]
        passages: list[list[float]] = []
        for first in range(0, len(PAIRS), self._config.embedding_batch_size):
            batch = PAIRS[first : first + self._config.embedding_batch_size]
            passages += model.embed_documents([pair.passage for pair in batch])
        return ModelScores.measure(name, questions, passages)

    def calibrate(self, scores: ModelScores, index: UserIndex | None) -> Calibration:
        """What the scores mean for a user's saved chunks."""
        config = self._config
        own = None if index is None else index.unrelated_to(scores)
        focus = Focus(config.focus_prior, config.focus_words, config.focus_margin)
        return scores.calibrate(config.false_hit_rate, focus, own)

    def limits(self, index: UserIndex, scores: ModelScores | None) -> SearchLimits:
        """What a search in a user's chunks asks for; `scores` may be missing where the threshold is a number."""
        config, threshold = self._config, self._config.similarity_threshold
        slack, top_k, neighbours = 0.0, config.local_top_k, config.expand_neighbours
        if scores is not None:
            calibration = self.calibrate(scores, index)
            threshold = calibration.threshold if threshold == "auto" else threshold
            # Once a document is a hit, its chunks are chosen by how close they are to the best piece of all.
            if config.context == "focused" and calibration.focus is not None:
                slack = calibration.focus.words + calibration.focus.margin
                top_k, neighbours = max(top_k, _MOST_CHUNKS), max(neighbours, 1)
        if threshold == "auto":
            msg = "similarity_threshold='auto' needs the scores of the model"
            raise ValueError(msg)
        return SearchLimits(threshold, top_k, neighbours, slack)

    def by_vector(self, model: Embeddings | None) -> ByVectorRetriever | None:
        """The wrapped retriever, if it can be asked by the query's vector, where that is wanted."""
        if self._config.context != "focused" or model is None:
            return None
        if self._by_vector is None or self._by_vector[0] is not model:
            # A class of pydantic's takes some milliseconds to make, which only a focused retriever should pay.
            from rag_wiki.by_vector import find_by_vector

            self._by_vector = model, find_by_vector(self._global_retriever, model)
        return self._by_vector[1]

    def focus(self, scores: ModelScores) -> Focus | None:
        """How close to the best an answer keeps."""
        return self.calibrate(scores, None).focus


class ThresholdWatch:
    """Notices a threshold that says nothing with the model in use: everything passes it, or nothing does."""

    def __init__(self) -> None:
        self._searches = self._compared = self._passed = self._chances = 0

    def note(self, compared: int, passed: int, *, had_chance: bool) -> str | None:
        """Note a search; returns what is wrong with the threshold, when that is clear.

        Args:
            compared: Saved documents that were compared.
            passed: How many of them passed.
            had_chance: Whether the wrapped retriever found one of them.
        """
        if compared >= _ENOUGH_DOCUMENTS:
            self._searches += 1
            self._compared += compared
            self._passed += passed
        if passed:
            self._chances = -1
        elif had_chance and self._chances >= 0:
            self._chances += 1
        if self._searches >= _ENOUGH_SEARCHES and self._passed >= _NEARLY_ALL * self._compared:
            return "nearly every saved document passes it on nearly every question"
        if self._chances >= _ENOUGH_CHANCES:
            return "no saved document ever passed it, not even those that the wrapped retriever found"
        return None
