"""Vectors of texts in a file. The older release's environment reads this too: numpy is all that it needs."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

Matrix: TypeAlias = NDArray[np.float32]
Kind: TypeAlias = Literal["query", "document"]
"""Some models embed a question otherwise than a text."""
KINDS: tuple[Kind, ...] = ("query", "document")
Vectors: TypeAlias = dict[Kind, dict[str, Matrix]]
"""By kind and by `key`: the vector of a text."""


def key(text: str) -> str:
    """What a text's vector is kept under."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def no_vectors() -> Vectors:
    """An empty table."""
    return {kind: {} for kind in KINDS}


def write_vectors(path: Path, model: str, vectors: Mapping[Kind, Mapping[str, Matrix]]) -> None:
    """Write vectors of a model; the file is there in whole or not at all."""
    arrays: dict[str, NDArray[np.generic]] = {"model": np.array(model)}
    for kind, own in vectors.items():
        arrays[f"{kind}_keys"] = np.array(list(own), dtype="U64")
        arrays[f"{kind}_vectors"] = np.array(list(own.values()), dtype=np.float32)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished.npz")
    np.savez(unfinished, **arrays)  # type: ignore[arg-type]  # its stub takes the arrays for the flag `allow_pickle`
    unfinished.replace(path)


def read_vectors(path: Path, model: str) -> Vectors:
    """Read vectors of a model; nothing when there are none, or those of another model."""
    vectors = no_vectors()
    try:
        with np.load(path) as arrays:
            if str(arrays["model"]) == model:
                for kind in KINDS:
                    vectors[kind] = dict(zip(arrays[f"{kind}_keys"].tolist(), arrays[f"{kind}_vectors"], strict=True))
    except FileNotFoundError:
        return no_vectors()
    except (OSError, KeyError, ValueError, zipfile.BadZipFile):
        # A file that is not ours or is broken: it only saves time, and is written anew.
        return no_vectors()
    return vectors
