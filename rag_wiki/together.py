"""Questions of one user that are asked at once (`batch`, `abatch`): embedded side by side, compared together.

A matrix times 32 vectors costs less than 32 products: each row is fetched once.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from typing import Any

import numpy as np
from langchain_core.embeddings import Embeddings
from langchain_core.runnables import run_in_executor
from numpy.typing import NDArray

from rag_wiki.search.embedding import QueryVector, check_query_vector
from rag_wiki.search.index import DocumentHits, SearchLimits, UserIndex
from rag_wiki.steps import Step

__all__ = ["Together"]

_SLICE_BYTES = 1024 * 1024 * 1024
"""What is multiplied on the event loop at a time, questions times bytes of the index: some three milliseconds.

Not less: a product with few questions takes nearly as long as one with many.
"""
_SLICE_QUESTIONS = 64
"""And how many of them, however small the index: sorting out what each one found takes its time too."""
_QUICK_SECONDS = 0.001
"""A model that takes longer is asked in threads."""


class Together:
    """The questions of one user in one batch.

    Each of them is answered by a call of its own. The first one that needs a vector has all of them embedded, and
    each waits for all; the first one that searches searches for all. A question that could not be embedded fails
    for itself.

    Args:
        queries: The questions; equal ones are asked once.
        submit: Runs a function in a thread of the batch.
        most_at_once: Questions that are embedded at the same time at most, where they are awaited.
        quick: Whether calls took no time lately; then they are embedded here for as long as that takes none.
    """

    def __init__(
        self,
        queries: Iterable[str],
        submit: Callable[..., Future[Any]] | None,
        most_at_once: int | None,
        *,
        quick: bool = False,
    ) -> None:
        self._queries = list(dict.fromkeys(queries))
        self._submit = submit or _run_here
        self._quick = quick
        self._most_at_once = most_at_once
        self._lock = threading.Lock()
        self._embedding: dict[str, Future[QueryVector]] | None = None
        self._awaited: asyncio.Future[dict[str, QueryVector | Exception]] | None = None
        self._vectors: dict[str, QueryVector | Exception] | None = None
        self._index: UserIndex | None = None
        self._comparing: tuple[UserIndex, asyncio.Future[None]] | None = None
        self._hits: Mapping[str, list[DocumentHits]] = {}

    def __deepcopy__(self, memo: dict[int, object]) -> Together:
        # Whoever copies the arguments of a call still asks together with the others.
        return self

    def embed(self, model: Embeddings, query: str) -> Step[QueryVector]:
        """The vector of a question, when all of them are there."""
        return Step(lambda: self._embed(model, query), lambda: self._aembed(model, query))

    def _embed(self, model: Embeddings, query: str) -> QueryVector:
        with self._lock:
            if self._embedding is None:
                self._embedding = {text: self._begin(model, text) for text in self._queries}
        if self._vectors is None:
            self._vectors = {text: _outcome(future) for text, future in self._embedding.items()}
        return self._vector(query)

    def _begin(self, model: Embeddings, text: str) -> Future[QueryVector]:
        if not self._quick:
            return self._submit(_embed_one, model, text)
        start = time.perf_counter()
        done = _run_here(_embed_one, model, text)
        self._quick = time.perf_counter() - start < _QUICK_SECONDS
        return done

    async def _aembed(self, model: Embeddings, query: str) -> QueryVector:
        if self._awaited is None:
            self._awaited = asyncio.ensure_future(self._aembed_all(model))
        # A call that is cancelled must not take the others' vectors with it.
        self._vectors = await asyncio.shield(self._awaited)
        return self._vector(query)

    async def _aembed_all(self, model: Embeddings) -> dict[str, QueryVector | Exception]:
        turns = asyncio.Semaphore(self._most_at_once or len(self._queries))

        async def embed_one(text: str) -> QueryVector:
            async with turns:
                return check_query_vector(await model.aembed_query(text))

        found = await asyncio.gather(*map(embed_one, self._queries), return_exceptions=True)
        return {
            text: _as_exception(vector) if isinstance(vector, BaseException) else vector
            for text, vector in zip(self._queries, found, strict=True)
        }

    def _vector(self, query: str) -> QueryVector:
        own = (self._vectors or {})[query]
        if isinstance(own, Exception):
            raise own
        return own

    def compare(self, index: UserIndex, limits: SearchLimits) -> Step[None]:
        """Search the index for all questions, unless somebody has done so."""
        return Step(lambda: self._compare(index, limits), lambda: self._acompare(index, limits))

    async def _acompare(self, index: UserIndex, limits: SearchLimits) -> None:
        if self._comparing is None or self._comparing[0] is not index:
            self._comparing = index, asyncio.ensure_future(self._compare_in_slices(index, limits))
        await asyncio.shield(self._comparing[1])

    async def _compare_in_slices(self, index: UserIndex, limits: SearchLimits) -> None:
        """Search on the loop, some questions at a time: a thread of its own would begin with cold caches."""
        at_once = min(_SLICE_BYTES // max(index.nbytes, 1), _SLICE_QUESTIONS)
        if not at_once:
            await run_in_executor(None, self._compare, index, limits)
            return
        fitting, found = self._fitting(index), list[list[DocumentHits]]()
        rows = list(fitting.values())
        for first in range(0, len(rows), at_once):
            found += index.search_many(np.stack(rows[first : first + at_once]), limits)
            await asyncio.sleep(0)
        with self._lock:
            self._hits, self._index = dict(zip(fitting, found, strict=True)), index

    def search(self, index: UserIndex, query: str, limits: SearchLimits) -> list[DocumentHits]:
        """What the index has for a question."""
        self._compare(index, limits)
        return self._hits.get(query, [])

    def _compare(self, index: UserIndex, limits: SearchLimits) -> None:
        with self._lock:
            if self._index is not index:
                # Also again, when somebody saved meanwhile: who asks later sees what is saved by then.
                fitting = self._fitting(index)
                rows = np.stack(list(fitting.values())) if fitting else np.empty((0, index.width), dtype=np.float32)
                found = index.search_many(rows, limits)
                self._hits, self._index = dict(zip(fitting, found, strict=True)), index

    def _fitting(self, index: UserIndex) -> dict[str, NDArray[np.float32]]:
        """The vectors that can be compared with those of an index."""
        return {
            text: vector.unit
            for text, vector in (self._vectors or {}).items()
            if not isinstance(vector, Exception) and vector.unit.shape[0] == index.width
        }


def _embed_one(model: Embeddings, text: str) -> QueryVector:
    return check_query_vector(model.embed_query(text))


def _outcome(future: Future[QueryVector]) -> QueryVector | Exception:
    error = future.exception()
    return future.result() if error is None else _as_exception(error)


def _run_here(function: Callable[..., Any], *arguments: Any) -> Future[Any]:
    future: Future[Any] = Future()
    try:
        future.set_result(function(*arguments))
    except Exception as error:
        future.set_exception(error)
    return future


def _as_exception(error: BaseException) -> Exception:
    """An error that can be raised to a caller that has done nothing wrong."""
    return error if isinstance(error, Exception) else RuntimeError(f"embedding was ended by {type(error).__name__}")
