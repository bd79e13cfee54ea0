"""Matching by words, for saved copies when there is no embedding model."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence

__all__ = ["KeywordIndex", "words"]

_WORD = re.compile(r"\w+")
_LEAST_SHARE = 0.5
"""The share of a query's weight that a chunk must hold to answer."""


def words(text: str) -> list[str]:
    """The words of a text, case-folded."""
    return _WORD.findall(text.casefold())


class KeywordIndex:
    """The words of a user's saved chunks.

    A chunk's score is the weight of the query's words that it holds, as a share of the weight of all of
    them, in [0, 1]. A word weighs `ln(1 + N / n)`, where n of the N chunks hold it (n at least 1): rare
    words say more about a chunk than common ones. This is inverse document frequency (Spärck Jones, 1972).
    """

    def __init__(self, texts: Mapping[str, Sequence[str]]) -> None:
        self._chunks = {doc_id: [frozenset(words(text)) for text in own] for doc_id, own in texts.items()}
        self._total = sum(map(len, self._chunks.values()))
        self._holders = Counter(word for own in self._chunks.values() for chunk in own for word in chunk)
        self.nbytes = 64 * sum(self._holders.values())

    def search(self, query: str, top_k: int) -> dict[str, list[tuple[int, float]]]:
        """Document id → (position, score) of its best `top_k` chunks that answer, best first."""
        weights = {word: math.log(1 + self._total / max(self._holders[word], 1)) for word in set(words(query))}
        total = sum(weights.values())
        found: dict[str, list[tuple[int, float]]] = {}
        if not total:
            return found
        for doc_id, chunks in self._chunks.items():
            scored = [
                (position, sum(weights[word] for word in weights if word in chunk) / total)
                for position, chunk in enumerate(chunks)
            ]
            best = sorted((item for item in scored if item[1] >= _LEAST_SHARE), key=lambda item: -item[1])
            if best:
                found[doc_id] = best[:top_k]
        return found
