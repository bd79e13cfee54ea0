"""Small real-enough parts that tests share: a clock turned by hand, a retriever over a list, a table of vectors."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from typing import Any

from langchain_core.callbacks import CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.retrievers import BaseRetriever
from pydantic import Field, PrivateAttr

START = datetime(2026, 3, 1, 9, 0, tzinfo=timezone.utc)


class HandClock:
    """A clock that stands still until it is turned."""

    def __init__(self, now: datetime = START) -> None:
        self.now = now

    def __call__(self) -> datetime:
        return self.now

    def turn(self, *, days: float = 0, hours: float = 0, minutes: float = 0) -> datetime:
        """Move on by so much."""
        self.now += timedelta(days=days, hours=hours, minutes=minutes)
        return self.now


class ListRetriever(BaseRetriever):
    """Returns the documents that it is given, and counts its calls."""

    documents: list[Document] = Field(default_factory=list)
    _calls: list[str] = PrivateAttr(default_factory=list)
    _error: Exception | None = PrivateAttr(default=None)
    _lock: Any = PrivateAttr(default_factory=threading.Lock)

    @property
    def calls(self) -> list[str]:
        """The queries asked so far."""
        return self._calls

    def fail_with(self, error: Exception | None) -> None:
        """Raise this from now on; `None` ends it."""
        self._error = error

    def _get_relevant_documents(self, query: str, *, run_manager: CallbackManagerForRetrieverRun) -> list[Document]:
        with self._lock:
            self._calls.append(query)
        if self._error is not None:
            raise self._error
        return list(self.documents)


class TableEmbeddings(Embeddings):
    """Vectors from a table; texts that are not in it share a far-off direction. Counts its calls."""

    def __init__(self, table: dict[str, Sequence[float]] | None = None, width: int = 8, model: str = "table") -> None:
        self.table = dict(table or {})
        self.width = width
        self.model = model
        self.queries: list[str] = []
        self.batches: list[list[str]] = []
        self.error: Exception | None = None

    def vector(self, text: str) -> list[float]:
        """The vector of a text: the longest table entry that it contains decides."""
        found = max((key for key in self.table if key in text), key=len, default=None)
        values = [0.0] * (self.width - 1) + [1.0] if found is None else list(self.table[found])
        return values + [0.0] * (self.width - len(values))

    def embed_query(self, text: str) -> list[float]:
        """The vector of a query."""
        self.queries.append(text)
        if self.error is not None:
            raise self.error
        return self.vector(text)

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """The vectors of texts."""
        self.batches.append(list(texts))
        if self.error is not None:
            raise self.error
        return [self.vector(text) for text in texts]


def document(doc_id: str, text: str, **metadata: Any) -> Document:
    """A document with an id in its metadata."""
    return Document(page_content=text, metadata={"doc_id": doc_id, "doc_title": doc_id.title(), **metadata})
