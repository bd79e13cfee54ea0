"""A toy embedder for the examples: nothing to download, and the same vectors on every machine."""

import hashlib
import math
import re
from collections import Counter

import numpy as np
from langchain_core.embeddings import Embeddings
from numpy.typing import NDArray

_WORD = re.compile(r"\w+")

_STOP_WORDS = frozenset(
    _WORD.findall("""
    a about after all also an and any are as at be because been before but by can could did do does for from get had
    has have how i if in into is it its just me my no not of on one only or our out over s should so some such t than
    that the their them then there these they this those to too under up was we were what when where which while who
    why will with would you your
    """)
)


class WordHashEmbeddings(Embeddings):
    """Embeds a text by hashing its words, for examples and tests that must run without a model.

    It matches words, not meaning: two texts are close when they share words, after a crude stripping of English
    endings, and unrelated when they say the same thing in different words. Different words may also fall on the same
    dimension, the more often the smaller the width. Use a real model for real documents.

    Vectors depend on the text and the width alone, so they can be stored and compared with those of another process.

    Attributes:
        width: How many dimensions each vector has.
    """

    def __init__(self, width: int = 512) -> None:
        if width < 1:
            raise ValueError(f"width is {width}; a vector needs at least one dimension")
        self.width = width

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """Embed several texts, each just as `embed_query` would.

        Args:
            texts: The texts, in any number.

        Returns:
            One vector of `width` numbers for each text, in the same order.
        """
        return [self.embed_query(text) for text in texts]

    def embed_query(self, text: str) -> list[float]:
        """Embed one text.

        Args:
            text: A question or a passage; the two are treated alike.

        Returns:
            A vector of `width` numbers and length one, or the zero vector if the text has no words apart from
            stop words.
        """
        vector = np.zeros(self.width, dtype=np.float64)
        for stem, count in Counter(_stems(text)).items():
            dimension, sign = _place(stem, self.width)
            vector[dimension] += sign * (1.0 + math.log(count))
        return _unit(vector)


def _stems(text: str) -> list[str]:
    return [_stem(word) for word in _WORD.findall(text.lower()) if word not in _STOP_WORDS]


def _stem(word: str) -> str:
    """Bring the common forms of an English word together: `indexes`, `indexed` and `indexing` with `index`."""
    if word.endswith("ies") and len(word) > 4:
        word = word[:-3] + "y"
    elif word.endswith("s") and not word.endswith(("ss", "us", "is")) and len(word) > 3:
        word = word[:-1]
    for ending in ("ing", "ed"):
        if word.endswith(ending) and len(word) >= len(ending) + 4:
            word = _undoubled(word.removesuffix(ending))
            break
    return word[:-1] if word.endswith("e") and len(word) > 3 else word


def _undoubled(stem: str) -> str:
    """Undo the doubling before an ending, as in `dropped`, where English does not double for itself, as in `rolled`."""
    doubled = len(stem) > 3 and stem[-1] == stem[-2] and stem[-1] not in "aeioulsz"
    return stem[:-1] if doubled else stem


def _place(stem: str, width: int) -> tuple[int, float]:
    """Choose the dimension and the sign of a stem. The built-in `hash` differs from one process to the next."""
    digest = hashlib.blake2b(stem.encode("utf-8", errors="surrogatepass"), digest_size=9).digest()
    return int.from_bytes(digest[:8], "big") % width, 1.0 if digest[8] & 1 else -1.0


def _unit(vector: NDArray[np.float64]) -> list[float]:
    length = float(np.linalg.norm(vector))
    scaled: list[float] = (vector / length if length else vector).tolist()
    return scaled
