"""An embedding model whose scores are known: so much for unrelated texts, and so much for a question and its answer."""

from __future__ import annotations

import hashlib
import math

import numpy as np
from langchain_core.embeddings import Embeddings
from numpy.typing import NDArray

from rag_wiki.search.calibration_pairs import PAIRS

_WIDTH = 512
_SUBJECT = {text: f"pair {number}" for number, pair in enumerate(PAIRS) for text in (pair.question, pair.passage)}


class GeometryEmbeddings(Embeddings):
    """Texts of one subject are `matching` alike, others `unrelated`, give or take what chance does in many dimensions.

    The subject of a text is its first word; a text may say `a/0.5` to be half about that subject.
    """

    def __init__(self, unrelated: float, matching: float, model: str = "geometry") -> None:
        self.unrelated, self.matching, self.model = unrelated, matching, model
        self.asked: list[str] = []
        self.told: list[str] = []
        self.error: Exception | None = None

    def embed_query(self, text: str) -> list[float]:
        """The vector of a question."""
        if self.error is not None:
            raise self.error
        self.asked.append(text)
        return [float(value) for value in self.vector(text)]

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """The vectors of texts."""
        if self.error is not None:
            raise self.error
        self.told += texts
        return [[float(value) for value in self.vector(text)] for text in texts]

    def vector(self, text: str) -> NDArray[np.float64]:
        """What all texts share, what its subject has, and what is its own: a unit vector."""
        subject, _, share = _SUBJECT.get(text, text.split()[0].lower()).partition("/")
        about = math.sqrt(self.matching - self.unrelated) * float(share or 1)
        own = math.sqrt(max(1 - self.unrelated - about**2, 0.0))
        vector = math.sqrt(self.unrelated) * _direction("all") + about * _direction(subject) + own * _direction(text)
        return _unit(vector)


def _direction(name: str) -> NDArray[np.float64]:
    """A unit vector of its own for each name; two of them are nearly at right angles."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
    return _unit(np.random.default_rng(seed).standard_normal(_WIDTH))


def _unit(vector: NDArray[np.float64]) -> NDArray[np.float64]:
    unit: NDArray[np.float64] = vector / np.linalg.norm(vector)
    return unit


def high() -> GeometryEmbeddings:
    """A model whose unrelated texts score higher than the answers of others: 0.78, and 0.92 for an answer."""
    return GeometryEmbeddings(0.78, 0.92)


def low() -> GeometryEmbeddings:
    """A model whose answers score lower than the unrelated texts of others: 0.4, and 0.02 for those."""
    return GeometryEmbeddings(0.02, 0.4)
