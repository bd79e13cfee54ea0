"""The work that everybody does: the same documents, questions, wrapped retriever and embedding model.

This module runs in the environments of the older package too, so it needs langchain-core and numpy only.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from langchain_core.callbacks import AsyncCallbackManagerForRetrieverRun, CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.retrievers import BaseRetriever
from numpy.typing import NDArray

K = TypeVar("K")

USER = "ada"
WIDTH = 384
CHUNKS = 10
"""Chunks of a saved document."""
LONG = 500
"""Chunks of the long document that `save` saves."""
THRESHOLD = 0.75
NEVER = 10**9
"""A threshold that is not reached: while the clock runs nothing is suggested, saved or let go by itself."""
KINDS = ("hit", "miss", "mixed")

_CHARACTERS = 400
"""Of a chunk. Splitters that take 500 characters, as the older package's does, keep such paragraphs apart."""
_BACKGROUND = 12
"""Documents that the wrapped retriever returns and nobody saved."""
_ASKED = 16
"""Different questions of a kind."""
_FILLER = "the pump is checked every morning before the shift begins and its readings are written down by hand " * 5


def chunk_text(document: int, chunk: int) -> str:
    """The text of a chunk; it begins with its numbers."""
    return f"document {document:06d} chunk {chunk:03d}: {_FILLER}"[:_CHARACTERS]


def content(document: int, chunks: int = CHUNKS) -> str:
    """The text of a whole document: its chunks as paragraphs."""
    return "\n\n".join(chunk_text(document, chunk) for chunk in range(chunks))


def doc_id(document: int) -> str:
    """The id of a document."""
    return f"document-{document:06d}"


def retrieved(document: int, chunk: int, chunks: int = CHUNKS) -> Document:
    """A chunk as a vector store returns it."""
    metadata = {
        "doc_id": doc_id(document),
        "doc_title": f"Document {document}",
        "doc_path": f"/documents/{document:06d}.txt",
        "chunk_index": chunk,
        "total_chunks": chunks,
    }
    return Document(page_content=chunk_text(document, chunk), metadata=metadata)


@dataclass(frozen=True)
class Question:
    """A question, its vector, and what the wrapped retriever finds for it."""

    text: str
    vector: list[float]
    found: list[Document]


class Work:
    """So many saved documents of ten chunks each, and questions about them.

    Vectors are random unit vectors, so unrelated ones have a cosine near zero. A question that hits is a saved
    chunk's vector with a little noise (cosine about 0.95); the others are unrelated to everything. The wrapped
    retriever returns four chunks. In `hit` and `miss` three or all of them are always of the same unsaved
    documents; in `mixed`, half hits and half misses, they change from question to question, so that counts of
    documents begin and lapse all the time.

    Args:
        documents: How many are saved.
        seed: Of the random numbers.
        alike: The cosine of unrelated vectors, which some embedding models make as high as 0.7.
    """

    def __init__(self, documents: int, seed: int = 7, alike: float = 0.0) -> None:
        generator = np.random.default_rng(seed)
        rows = generator.standard_normal(((documents + _BACKGROUND) * CHUNKS, WIDTH), dtype=np.float32)
        rows /= np.sqrt(np.einsum("ij,ij->i", rows, rows))[:, None]
        if alike:
            common = np.asarray(_unit(generator.standard_normal(WIDTH, dtype=np.float32)), dtype=np.float32)
            rows = np.sqrt(np.float32(1 - alike)) * rows + np.sqrt(np.float32(alike)) * common
            rows /= np.sqrt(np.einsum("ij,ij->i", rows, rows))[:, None]
        self.documents = documents
        self.rows = rows
        self._generator = generator

    @property
    def matrix(self) -> NDArray[np.float32]:
        """The vectors of the saved documents, (documents × chunks, width)."""
        return self.rows[: self.documents * CHUNKS]

    def vectors(self, document: int) -> NDArray[np.float32]:
        """The vectors of one document's chunks."""
        return self.rows[document * CHUNKS : (document + 1) * CHUNKS]

    def questions(self, kind: str, count: int = _ASKED) -> list[Question]:
        """Questions of a kind: `hit`, `miss` or `mixed`."""
        return [self._question(kind, at, count) for at in range(count)]

    def _question(self, kind: str, at: int, count: int) -> Question:
        hits = kind == "hit" or (kind == "mixed" and at % 2 == 0)
        noise = self._generator.standard_normal(WIDTH, dtype=np.float32)
        first = 3 * at if kind == "mixed" else 0
        found = [retrieved(self.documents + (first + place) % _BACKGROUND, at % CHUNKS) for place in range(3)]
        if not hits:
            extra = retrieved(self.documents + (first + 3) % _BACKGROUND, at % CHUNKS)
            return Question(f"{kind} {at}: unrelated", _unit(noise), [*found, extra])
        document = at * self.documents // count
        row = document * CHUNKS + at % CHUNKS
        vector = _unit(self.rows[row] + 0.3 * np.asarray(_unit(noise), dtype=np.float32))
        return Question(f"{kind} {at}: related", vector, [retrieved(document, at % CHUNKS), *found])


def _unit(vector: NDArray[np.float32]) -> list[float]:
    values: list[float] = (vector / np.linalg.norm(vector)).astype(np.float32).tolist()
    return values


class TableEmbeddings(Embeddings):
    """Vectors looked up in tables, in microseconds; `delay` makes it a slow model. Adds up its own time."""

    def __init__(self, work: Work, questions: Sequence[Question] = (), delay: float = 0.0) -> None:
        self.rows = work.rows
        self.table = {question.text: question.vector for question in questions}
        self.delay = delay
        self.texts = 0
        self.seconds = 0.0

    def embed_query(self, text: str) -> list[float]:
        """The vector of a question."""
        if self.delay:
            time.sleep(self.delay)
        return self.table[text]

    async def aembed_query(self, text: str) -> list[float]:
        """The vector of a question, awaited."""
        await asyncio.sleep(self.delay)
        return self.table[text]

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """The vectors of chunks, by the numbers in their texts."""
        start = time.perf_counter()
        vectors: list[list[float]] = [self.rows[self._row(text)].tolist() for text in texts]
        self.texts += len(texts)
        self.seconds += time.perf_counter() - start
        return vectors

    def _row(self, text: str) -> int:
        # A piece of a chunk that lost its numbers gets some vector too.
        numbers = text[9:15] + text[22:25] if text.startswith("document ") else "0"
        row = int(numbers) if numbers.isdigit() else 0
        return (row // 1000 * CHUNKS + row % 1000) % len(self.rows)


class TableRetriever(BaseRetriever):
    """The wrapped retriever: looks up what a question finds, in microseconds; `delay` makes it a slow one."""

    table: Any
    delay: float = 0.0

    def _get_relevant_documents(
        self,
        query: str,
        *,
        run_manager: CallbackManagerForRetrieverRun,  # noqa: ARG002
    ) -> list[Document]:
        if self.delay:
            time.sleep(self.delay)
        return list(self.table.get(query, ()))

    async def _aget_relevant_documents(
        self,
        query: str,
        *,
        run_manager: AsyncCallbackManagerForRetrieverRun,  # noqa: ARG002
    ) -> list[Document]:
        await asyncio.sleep(self.delay)
        return list(self.table.get(query, ()))


def wrapped_retriever(questions: Sequence[Question], delay: float = 0.0) -> TableRetriever:
    """The wrapped retriever for these questions."""
    return TableRetriever(table={question.text: question.found for question in questions}, delay=delay)


@dataclass(frozen=True)
class Pace:
    """How often and how long something is measured."""

    repeats: int
    seconds: float
    """No further repeat after so long."""
    at_least: int = 3


def samples(step: Callable[[], object], pace: Pace) -> list[float]:
    """The seconds that a step takes, over and over."""
    taken: list[float] = []
    end = time.perf_counter() + pace.seconds
    while len(taken) < pace.repeats and (len(taken) < pace.at_least or time.perf_counter() < end):
        start = time.perf_counter()
        step()
        taken.append(time.perf_counter() - start)
    return taken


def samples_in_turns(steps: Mapping[K, Callable[[], object]], pace: Pace) -> dict[K, list[float]]:
    """The seconds that each of several steps takes, in turns: what slows the machine down slows all of them."""
    taken: dict[K, list[float]] = {name: [] for name in steps}

    def turn() -> None:
        for name, step in steps.items():
            taken[name] += samples(step, Pace(1, 0))

    samples(turn, pace)
    return taken


@dataclass(frozen=True)
class Added:
    """What questions take beyond the bare wrapped retriever, and what cannot be avoided, in seconds."""

    added: list[float]
    floor: list[float]


def added_seconds(
    ask: Callable[[str], object],
    bare: Callable[[str], object],
    questions: Sequence[Question],
    pace: Pace,
    floor: Callable[[], object] | None = None,
) -> Added:
    """Time warm questions, the bare wrapped retriever and the floor in turns of some each.

    So all three meet the same machine, whatever else it does meanwhile, and each finds its data where it left it.
    """
    _warm(ask, questions, pace.seconds / 2)
    asked: list[float] = []
    alone: list[float] = []
    unavoidable: list[float] = []
    turn = Pace(len(questions), 0.1)
    end = time.perf_counter() + pace.seconds

    def over() -> bool:
        return len(asked) >= pace.at_least and time.perf_counter() > end

    while len(asked) < pace.repeats and not over():
        if floor is not None:
            unavoidable += samples(floor, turn)
        alone += [_seconds(bare, question.text) for question in questions]
        for question in questions:
            asked.append(_seconds(ask, question.text))
            if over():
                break
    wrapped = float(np.median(alone))
    return Added([seconds - wrapped for seconds in asked], unavoidable)


def _warm(ask: Callable[[str], object], questions: Sequence[Question], seconds: float) -> None:
    end = time.perf_counter() + seconds
    for question in questions:
        ask(question.text)
        if time.perf_counter() > end:
            return


def _seconds(step: Callable[[str], object], text: str) -> float:
    start = time.perf_counter()
    step(text)
    return time.perf_counter() - start


class PeakMemory:
    """How far the resident memory of this process grew while it was watched, in bytes."""

    def __init__(self) -> None:
        self.growth = 0

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watch until the end of the block."""
        before, done = resident_bytes(), threading.Event()

        def watch() -> None:
            while not done.wait(0.01):
                self.growth = max(self.growth, resident_bytes() - before)

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self.growth = max(self.growth, resident_bytes() - before)
            done.set()
            thread.join()


def resident_bytes() -> int:
    """Resident memory of this process now; where the system does not tell, the highest so far."""
    try:
        import resource
    except ImportError:
        return 0
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
