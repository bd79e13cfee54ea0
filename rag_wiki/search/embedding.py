"""Which embedding model to use, what to call it, and whether to believe its answer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from langchain_core.embeddings import Embeddings
from numpy.typing import ArrayLike, NDArray

from rag_wiki.errors import EmbeddingError

__all__ = ["FoundEmbeddings", "QueryVector", "check_query_vector", "check_vectors", "find_embeddings", "fingerprint"]

_MODEL_ATTRIBUTES = (
    "model",
    "model_name",
    "model_id",
    "deployment",
    "azure_deployment",
    "deployment_name",
    "repo_id",
    "model_path",
    "endpoint_name",
)
_EMBEDDING_ATTRIBUTES = ("embeddings", "embedding", "embedding_model", "embedding_function")
_INNER_ATTRIBUTES = (
    "vectorstore",
    "retriever",
    "base_retriever",
    "retrievers",
    "bound",
    "default",
    "steps",
    "embed_models",
)
"""Public places where LangChain's own wrappers keep what they wrap, and ours the models of another library's."""
_MOST_LEVELS, _MOST_HOLDERS = 12, 400
"""How far and how wide a model is looked for."""


class FoundEmbeddings(NamedTuple):
    """The embedding model found in a retriever, or why there is none."""

    model: Embeddings | None
    reason: str = ""


def find_embeddings(retriever: object) -> FoundEmbeddings:
    """The embedding model of a retriever, looked for in public attributes of it and of what it wraps.

    Two different models are a choice that nobody made; then none is taken.
    """
    found: dict[object, Embeddings] = {}
    for model in _embeddings_in(retriever):
        # Without a name of its own, a model is the same as another one only if it is that one.
        found.setdefault(fingerprint(model) if _names_model(model) else id(model), model)
    if len(found) > 1:
        names = ", ".join(sorted({fingerprint(model) for model in found.values()}))
        return FoundEmbeddings(None, f"the global retriever uses several embedding models: {names}")
    if not found:
        return FoundEmbeddings(None, f"no embedding model was found in {type(retriever).__name__}")
    return FoundEmbeddings(next(iter(found.values())))


def _embeddings_in(retriever: object) -> Iterator[Embeddings]:
    """The models in a retriever and in what it wraps, the nearest first.

    Bounded: an object that has every attribute there is (a mock, a proxy) would lead on without end.
    """
    seen: dict[int, object] = {}
    level: list[object] = [retriever]
    for _ in range(_MOST_LEVELS):
        following: list[object] = []
        for holder in level:
            if holder is None or id(holder) in seen or isinstance(holder, (str, bytes, int, float)):
                continue
            if len(seen) >= _MOST_HOLDERS:
                return
            # Kept, so that no other object gets the same id meanwhile.
            seen[id(holder)] = holder
            if isinstance(holder, Embeddings):
                yield holder
            elif isinstance(holder, (list, tuple)):
                following += holder
            else:
                models = (_attribute(holder, name) for name in _EMBEDDING_ATTRIBUTES)
                following += [model for model in models if isinstance(model, Embeddings)]
                following += [_attribute(holder, name) for name in _INNER_ATTRIBUTES]
        level = following


def _attribute(holder: object, name: str) -> object:
    try:
        return getattr(holder, name, None)
    except Exception:
        # A property of somebody else's class may raise anything; then it has no model to offer.
        return None


def fingerprint(model: Embeddings, name: str | None = None) -> str:
    """What identifies the vectors of a model: its class and model name, or the name given."""
    if name:
        return name
    inner = _attribute(model, "underlying_embeddings")
    if isinstance(inner, Embeddings):
        # A cache in front of a model gives the model's own vectors.
        return fingerprint(inner)
    kind = f"{type(model).__module__.partition('.')[0]}.{type(model).__qualname__}"
    own = _own_name(model)
    return f"{kind}:{own}" if own else kind


def _own_name(model: Embeddings) -> str:
    """What a model is called beside its class."""
    named = (_attribute(model, attribute) for attribute in _MODEL_ATTRIBUTES)
    return next((value for value in named if isinstance(value, str) and value), "")


def _names_model(model: Embeddings) -> bool:
    inner = _attribute(model, "underlying_embeddings")
    return _names_model(inner) if isinstance(inner, Embeddings) else bool(_own_name(model))


def check_vectors(
    vectors: object, wanted: int, what: str, remedy: str = "Nothing was saved; saving again is safe."
) -> NDArray[np.float32]:
    """The model's answer to `wanted` texts as (wanted, dim) float32. `remedy` ends the message of an error.

    Raises:
        EmbeddingError: Too few or too many vectors, of unequal width, empty, or not finite.
    """
    if not isinstance(vectors, Sequence) and not isinstance(vectors, np.ndarray):
        msg = f"the embedding model returned {type(vectors).__name__} for {wanted} texts of {what}. {remedy}"
        raise EmbeddingError(msg)
    if len(vectors) != wanted:
        msg = f"the embedding model returned {len(vectors)} vectors for {wanted} texts of {what}. {remedy}"
        raise EmbeddingError(msg)
    try:
        rows = [_as_row(vector) for vector in vectors]
    except (OverflowError, TypeError, ValueError) as error:
        msg = f"the embedding model returned something that is not a vector for {what}: {error}. {remedy}"
        raise EmbeddingError(msg) from error
    widths = sorted({row.shape[0] for row in rows})
    if len(widths) != 1 or widths[0] == 0:
        msg = f"the embedding model returned vectors of the widths {widths} for {what}. {remedy}"
        raise EmbeddingError(msg)
    matrix = np.stack(rows)
    if not np.isfinite(matrix).all():
        chunk = int(np.argmin(np.isfinite(matrix).all(axis=1)))
        msg = f"the embedding model returned NaN or infinity for chunk {chunk} of {what}. {remedy}"
        raise EmbeddingError(msg)
    return matrix


class QueryVector(NamedTuple):
    """A query's vector."""

    unit: NDArray[np.float32]
    """(dim,), of length one; zeros when it has no direction."""
    raw: Sequence[float]
    """As the model gave it."""
    has_direction: bool
    """Whether it can be compared with anything."""


def check_query_vector(vector: ArrayLike) -> QueryVector:
    """The model's answer to a query, and the unit vector of it.

    Raises:
        EmbeddingError: It is empty or not finite.
    """
    try:
        # As `unit_rows` does, for one: in float64, where no float32 is too long or too short to be squared.
        exact = _as_real(vector).astype(np.float64, copy=False).reshape(-1)
    except (OverflowError, TypeError, ValueError) as error:
        msg = f"the embedding model returned something that is not a vector for the query: {error}"
        raise EmbeddingError(msg) from error
    length = math.sqrt(exact @ exact)
    if exact.shape[0] == 0 or not math.isfinite(length):
        msg = f"the embedding model returned an empty or non-finite vector of width {exact.shape[0]} for the query"
        raise EmbeddingError(msg)
    unit: NDArray[np.float32] = (exact / (length or 1.0)).astype(np.float32)
    return QueryVector(unit, vector if isinstance(vector, list) else exact.tolist(), length > 0)


def _as_row(vector: ArrayLike) -> NDArray[np.float32]:
    """A vector of any float type as (dim,) float32; what that can't hold becomes infinity, and is refused as such."""
    with np.errstate(over="ignore"):
        return _as_real(vector).astype(np.float32, copy=False).reshape(-1)


def _as_real(vector: ArrayLike) -> NDArray[Any]:
    """A vector as an array; what is none is refused where numpy would make one of it, or drop half of its numbers."""
    given = np.asarray(vector)
    if given.ndim == 0:
        msg = f"it is {type(vector).__name__}"
        raise TypeError(msg)
    if given.dtype.kind not in "biufO":
        msg = f"its numbers are of the type {given.dtype}"
        raise TypeError(msg)
    if given.size != given.shape[-1]:
        msg = f"its shape is {given.shape}"
        raise ValueError(msg)
    return given
