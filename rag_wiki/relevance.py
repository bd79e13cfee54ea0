"""What counts as relevant: the threshold, the focus, and how the wrapped retriever is asked for comparable scores."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from langchain_core.embeddings import Embeddings
from langchain_core.runnables import run_in_executor

from rag_wiki import events
from rag_wiki.clock import Clock
from rag_wiki.config import RagWikiRetrieverConfig
from rag_wiki.errors import CorruptDataError, EmbeddingError
from rag_wiki.forks import in_each_process
from rag_wiki.search.calibration import PAIRS_ID, Calibration, Focus, FocusShares, ModelScores
from rag_wiki.search.calibration_pairs import PAIRS
from rag_wiki.search.embedding import check_vectors
from rag_wiki.search.index import IndexCache, SearchLimits, UserIndex
from rag_wiki.steps import Procedure, Step, arun, run
from rag_wiki.storage.base import StateStore

if TYPE_CHECKING:
    from rag_wiki.by_vector import ByVectorRetriever

__all__ = ["FocusWatch", "ModelGauge", "Relevance", "ThresholdWatch"]

_ModelKey: TypeAlias = tuple[str, int]

_MOST_CHUNKS = 8
"""Chunks of a document that are looked at for a focused answer, which takes some of them."""
_BACK_OFF = timedelta(seconds=10)
"""How long a model that could not be measured is not asked again: 48 texts are much to fail with on each call."""
_AT_ONCE = 8
"""Questions that are embedded at the same time where they are awaited."""
_ENOUGH_SEARCHES = 20
_ENOUGH_DOCUMENTS = 4
_NEARLY_ALL = 0.75
"""The share of saved documents that answer, over so many searches in so many documents, of which one is told."""
_ENOUGH_IN_VAIN = 20
"""Questions in a row of whose results nothing counted, of which one is told."""
_ENOUGH_CHANCES = 20
_ENOUGH_CHANCED = 3
"""Searches without a hit although the wrapped retriever found a saved document, one of so many."""


class ModelGauge:
    """Measures what the cosines of embedding models mean: once for each, for all workers on a store.

    Args:
        store: Keeps what was measured.
        cache: Keeps it in this process.
        batch_size: Texts that are embedded in one call.
        clock: Tells the time.
    """

    def __init__(self, store: StateStore, cache: IndexCache, batch_size: int, clock: Clock) -> None:
        self._store = store
        self._cache = cache
        self._batch_size = batch_size
        self._clock = clock
        in_each_process(self._make_lock)
        self._awaited: dict[tuple[asyncio.AbstractEventLoop, str], asyncio.Task[ModelScores]] = {}
        self._failed: dict[str, tuple[datetime, Exception]] = {}
        self._torn: set[_ModelKey] = set()

    def _make_lock(self) -> None:
        self._measuring = threading.Lock()

    def scores(self, model: Embeddings, name: str, width: int, *, anew: bool = False) -> Step[ModelScores]:
        """How a model of a width scores: known here, kept in the store, or measured now and kept.

        Several that ask at the same time wait for one measurement.

        Raises:
            EmbeddingError: The model's vectors can't be used.
            Exception: What the model raises; again for some seconds, without asking it, unless it is to be anew.
        """
        return Step(lambda: self._scores(model, name, width, anew), lambda: self._ascores(model, name, width, anew))

    def _scores(self, model: Embeddings, name: str, width: int, anew: bool) -> ModelScores:
        with self._measuring:
            known = self._known_before(name, width, anew)
            if known is None:
                try:
                    measured = run(self._measure(model, name, width))
                except Exception as error:
                    self._failed[name] = self._clock(), error
                    raise
                known = self._keep(measured, anew)
            return known

    async def _ascores(self, model: Embeddings, name: str, width: int, anew: bool) -> ModelScores:
        key = asyncio.get_running_loop(), f"{width} {anew} {name}"
        task = self._awaited.get(key)
        if task is None:
            task = self._awaited[key] = asyncio.ensure_future(self._ascores_alone(model, name, width, anew))
            task.add_done_callback(partial(self._forget_task, key))
        # Whoever is cancelled must not take the others' measurement along.
        return await asyncio.shield(task)

    def _forget_task(self, key: tuple[asyncio.AbstractEventLoop, str], task: asyncio.Task[ModelScores]) -> None:
        self._awaited.pop(key, None)
        if not task.cancelled():
            # Looked at, for where nobody waits any more.
            task.exception()

    async def _ascores_alone(self, model: Embeddings, name: str, width: int, anew: bool) -> ModelScores:
        known = await run_in_executor(None, self._known_before, name, width, anew)
        if known is None:
            try:
                measured = await arun(self._measure(model, name, width))
            except Exception as error:
                self._failed[name] = self._clock(), error
                raise
            known = await run_in_executor(None, self._keep, measured, anew)
        return known

    def _known_before(self, name: str, width: int, anew: bool) -> ModelScores | None:
        """What is known already; raises what measuring raised a moment ago."""
        if anew:
            return None
        known = self._cache.model_scores(name, width) or self.kept(name, width)
        when, error = self._failed.get(name, (None, None))
        if known is None and when is not None and error is not None and abs(self._clock() - when) < _BACK_OFF:
            raise error
        return known

    def kept(self, name: str, width: int) -> ModelScores | None:
        """What the store has; nothing where it does not answer, which must not keep a model from being measured."""
        try:
            text = self._store.note(_note_of(name, width))
            known = None if text is None else ModelScores.load(name, text)
        except CorruptDataError as error:
            self._torn.add((name, width))
            events.CALIBRATION_UNREADABLE.log("%s", error, model=name)
            return None
        except Exception as error:  # what a store raises is up to its class
            kind = type(error).__name__
            events.CALIBRATION_UNREADABLE.log(
                "the calibration of %s could not be read: %s: %s", name, kind, error, model=name
            )
            return None
        if known is not None:
            self._cache.keep_model_scores(known)
        return known

    def _measure(self, model: Embeddings, name: str, width: int) -> Procedure[ModelScores]:
        questions = yield Step(
            lambda: [model.embed_query(pair.question) for pair in PAIRS], partial(_aembed_questions, model)
        )
        passages: list[object] = []
        for first in range(0, len(PAIRS), self._batch_size):
            texts = [pair.passage for pair in PAIRS[first : first + self._batch_size]]
            vectors = yield Step(partial(model.embed_documents, texts), partial(model.aembed_documents, texts))
            passages.extend(check_vectors(vectors, len(texts), "the calibration", "Calibrating again is safe."))
        measured = ModelScores.measure(name, questions, passages)
        if measured.questions.shape[1] != width:
            msg = f"the model {name} gave vectors of the widths {width} and {measured.questions.shape[1]}"
            raise EmbeddingError(msg)
        return measured

    def _keep(self, measured: ModelScores, anew: bool) -> ModelScores:
        """Keep it here and in the store; of several workers' the first counts, until it is made anew."""
        name, width, text = measured.model, measured.questions.shape[1], measured.dump()
        try:
            if anew or (name, width) in self._torn:
                self._store.replace_note(_note_of(name, width), text)
                self._torn.discard((name, width))
            else:
                text = self._store.keep_note(_note_of(name, width), text)
        except Exception as error:  # measured is measured
            kind = type(error).__name__
            events.CALIBRATION_NOT_KEPT.log(
                "the calibration of %s could not be kept: %s: %s", name, kind, error, model=name
            )
        known = ModelScores.load(name, text)
        self._cache.keep_model_scores(known)
        self._failed.pop(name, None)
        events.MODEL_CALIBRATED.log("calibrated %s: %s", name, known, model=name)
        return known


async def _aembed_questions(model: Embeddings) -> Sequence[object]:
    turns = asyncio.Semaphore(_AT_ONCE)

    async def embed_one(question: str) -> object:
        async with turns:
            return await model.aembed_query(question)

    return await asyncio.gather(*(embed_one(pair.question) for pair in PAIRS))


def _note_of(name: str, width: int) -> str:
    return f"calibration {PAIRS_ID} {width} {name}"


class Relevance:
    """Threshold and focus of a retriever."""

    def __init__(
        self,
        store: StateStore,
        cache: IndexCache,
        config: RagWikiRetrieverConfig,
        global_retriever: object,
        clock: Clock,
    ) -> None:
        self._cache = cache
        self._config = config
        self._global_retriever = global_retriever
        self._by_vector: tuple[Embeddings, ByVectorRetriever | None] | None = None
        self.gauge = ModelGauge(store, cache, config.embedding_batch_size, clock)
        self.watch = ThresholdWatch()
        self.focus_watch = FocusWatch()

    @property
    def needs_scores(self) -> bool:
        """Whether it must be known what the model's cosines mean."""
        return self._config.similarity_threshold == "auto" or self._config.context == "focused"

    def can_judge(self, scores: ModelScores | None) -> bool:
        """Whether it can be said what is a hit."""
        return scores is not None or self._config.similarity_threshold != "auto"

    def known(self, name: str, width: int | None = None) -> ModelScores | None:
        """How the model scores, if that is known in this process; of the width asked about last, where none is said."""
        return self._cache.model_scores(name, width)

    def calibrate(self, scores: ModelScores, index: UserIndex | None) -> Calibration:
        """What the scores mean for a user's saved chunks."""
        config = self._config
        own = None if index is None else index.unrelated_to(scores)
        focus = FocusShares(config.focus_prior, config.focus_words, config.focus_margin)
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
        """The wrapped retriever, if it can be asked by the query's vector as it is set now, where that is wanted."""
        if self._config.context != "focused" or model is None:
            return None
        # A class of pydantic's takes some milliseconds to make, which only a focused retriever should pay.
        from rag_wiki.by_vector import find_by_vector

        known = self._by_vector[1] if self._by_vector is not None and self._by_vector[0] is model else None
        twin = find_by_vector(self._global_retriever, model, known)
        self._by_vector = model, twin
        return twin if twin is not None and twin.follow() else None

    def focus(self, scores: ModelScores) -> Focus | None:
        """How close to the best an answer keeps."""
        return self.calibrate(scores, None).focus


class ThresholdWatch:
    """Notices a threshold that seems to say nothing with the model in use: everything passes it, or nothing does."""

    def __init__(self) -> None:
        self._searches = self._compared = self._passed = self._chances = 0
        self._chanced: set[str] = set()
        self._some_passed = False

    def note(self, compared: int, passed: int, found: frozenset[str]) -> str | None:
        """Note a search; returns what seems to be wrong with the threshold, when that is clear.

        Args:
            compared: Saved documents that were compared.
            passed: How many of them passed.
            found: Which of them the wrapped retriever found.
        """
        if compared >= _ENOUGH_DOCUMENTS:
            self._searches += 1
            self._compared += compared
            self._passed += passed
        self._some_passed = self._some_passed or passed > 0
        if found and not self._some_passed and self._chances < _ENOUGH_CHANCES:
            self._chances += 1
            self._chanced |= found
        if self._searches >= _ENOUGH_SEARCHES and self._passed >= _NEARLY_ALL * self._compared:
            return "most saved documents pass it on most questions"
        enough = self._chances >= _ENOUGH_CHANCES and len(self._chanced) >= _ENOUGH_CHANCED
        if enough and not self._some_passed:
            return "no saved document ever passed it, not even those that the wrapped retriever found"
        return None


class FocusWatch:
    """Notices that with `context="focused"` nothing of what the wrapped retriever finds ever counts."""

    def __init__(self) -> None:
        self._in_vain = 0

    def note(self, found: int, counted: int) -> bool:
        """Note a question; tells whether nothing has counted for long.

        Args:
            found: Pieces that the wrapped retriever found.
            counted: How many of them score more than unrelated texts do.
        """
        if found:
            self._in_vain = 0 if counted else self._in_vain + 1
        return self._in_vain >= _ENOUGH_IN_VAIN
