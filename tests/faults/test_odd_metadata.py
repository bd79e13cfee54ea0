"""Metadata of any Python type, from the source to the answer, the saved copy and provenance, in every place."""

from __future__ import annotations

import enum
import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from pathlib import Path, PurePosixPath
from typing import Any
from uuid import UUID

import numpy as np
import pytest
from helpers import document
from langchain_core.documents import Document
from places import PLACES, PlacedWorld, make_world
from pydantic import BaseModel
from scenarios import POD_QUESTION, PODS, World, cached, texts

from rag_wiki import StateStore

ONCE_EACH = ["memory+disk", "sqlite", "postgres", "valkey"]
"""Each store and each place for chunks, once."""


class Shade(str, enum.Enum):
    """An enumeration of texts."""

    DARK = "dark"


class Level(enum.IntEnum):
    """An enumeration of numbers."""

    HIGH = 3


@dataclass(frozen=True)
class Page:
    """A value of the caller's own class."""

    number: int


class Author(BaseModel):
    """A model of the caller's own."""

    name: str


class Mute:
    """Can't say what it is."""

    def __str__(self) -> str:
        message = "no"
        raise RuntimeError(message)

    __repr__ = __str__


NOON = datetime(2026, 1, 1, 12, tzinfo=timezone(timedelta(hours=5, minutes=30)))
ODD: dict[str, Any] = {
    "moment": NOON,
    "naive": datetime(2026, 1, 1, 12),  # noqa: DTZ001 - what a caller may have
    "day": date(2026, 1, 1),
    "time": time(12, 30),
    "span": timedelta(days=1.5),
    "decimal": Decimal("1.10"),
    "complex": 1 + 2j,
    "numpy integer": np.int64(7),
    "numpy float": np.float32(0.1),
    "numpy truth": np.bool_(True),
    "numpy text": np.str_("text"),
    "numpy moment": np.datetime64("2026-01-01T12:00:00.000000001"),
    "no moment": np.datetime64("NaT", "s"),
    "long double": np.longdouble("1.5"),
    "array": np.arange(6).reshape(2, 3),
    "raw": b"\xff\x00",
    "set": {"b", "a"},
    "frozen set": frozenset({1, 2}),
    "tuple": (1, ("two", 3.0)),
    "nested": {"a": [{"b": {"c": (1, {2})}}], 5: "five", None: 1, (1, 2): "pair"},
    "huge": 10**5000,
    "big": -(2**80),
    "not a number": float("nan"),
    "endless": float("-inf"),
    "enumerated": Shade.DARK,
    "level": Level.HIGH,
    "dataclass": Page(3),
    "model": Author(name="Ada"),
    "object": object(),
    "mute": Mute(),
    "function": len,
    "class": Mute,
    "path": PurePosixPath("a/b"),
    "uuid": UUID(int=5),
    "surrogate": "\ud800",
    "nul": "a\0b",
}


def odd_document(text: str = PODS, **metadata: Any) -> Document:
    """A document that carries all of it, under a key of each kind too."""
    found = document("pods", text)
    others: dict[Any, Any] = {7: "a number as key", None: "no key", ("a", 1): "a pair as key"}
    found.metadata.update({**ODD, **others, **metadata})
    return found


@pytest.mark.parametrize("world", ONCE_EACH, indirect=True)
def test_any_metadata_goes_all_the_way(world: PlacedWorld) -> None:
    """In every place a document with metadata of all types is served as it is, counted, saved, and told of in JSON."""
    shown = odd_document()
    world.shows(shown)
    retriever = world.retriever(fetch_threshold=1)
    found, provenance = retriever.invoke_with_provenance(POD_QUESTION)
    for name, value in ODD.items():
        served = found[0].metadata[name]
        assert type(served) is type(value), name
        assert np.array_equal(served, value) if name == "array" else (repr_of(served) == repr_of(value)), name
    assert [suggestion.doc_id for suggestion in provenance.suggestions] == ["pods"]
    assert provenance.degraded == ()
    retriever.accept_suggestion("pods")
    world.shows()
    for opened in (world, world.reopened()):
        (answer,), provenance = opened.retriever().invoke_with_provenance(POD_QUESTION)
        assert answer.metadata["from_cache"]
        kept = {name: answer.metadata[name] for name in ODD}
        assert json.loads(json.dumps(kept, allow_nan=False)) == kept
        assert kept["moment"] == NOON.isoformat()
        assert (kept["decimal"], kept["numpy integer"], kept["set"] in (["a", "b"], ["b", "a"])) == ("1.10", 7, True)
        assert kept["nested"]["a"] == [{"b": {"c": [1, [2]]}}]
        assert (kept["surrogate"], kept["nul"], kept["huge"]) == ("\ud800", "a\0b", hex(10**5000))
        told = provenance.to_dict()
        assert json.loads(json.dumps(told, allow_nan=False)) == told


def repr_of(value: Any) -> str:
    """What a value says of itself, where it can; what it is, where its address would tell them apart."""
    return type(value).__name__ if isinstance(value, Mute) or type(value) is object else repr_or_hex(value)


def repr_or_hex(value: Any) -> str:
    """`repr`, which Python refuses for numbers of some thousand digits."""
    return hex(value) if isinstance(value, int) and not isinstance(value, enum.Enum) else repr(value)


VERSIONS: dict[str, Any] = {
    "text": "1.0",
    "number": 3,
    "truth": True,
    "decimal": Decimal("1.10"),
    "array": np.arange(3),
    "day": date(2026, 1, 1),
}
ODD_VERSIONS = {
    name: ODD[name]
    for name in (
        "moment",
        "numpy float",
        "numpy moment",
        "set",
        "nested",
        "tuple",
        "enumerated",
        "not a number",
        "mute",
        "huge",
    )
}


@pytest.mark.parametrize(
    "version",
    [pytest.param(version, id=name) for name, version in {**VERSIONS, **ODD_VERSIONS}.items()],
)
def test_the_same_version_is_the_same(version: Any) -> None:
    """A copy saved at a version of any type answers as long as the source shows that very version."""
    world = World()
    retriever = world.retriever(version_key="version")
    world.shows(document("pods", PODS, version=version))
    retriever.invoke(POD_QUESTION)
    retriever.accept_suggestion("pods")
    found, provenance = retriever.invoke_with_provenance(POD_QUESTION)
    assert texts(cached(found)) == [PODS]
    assert (provenance.withheld, provenance.degraded) == ((), ())


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(int, id="Python's"),
        *(pytest.param(kind, id=kind.__name__) for kind in (np.int64, np.uint8)),
    ],
)
def test_chunk_numbers_of_any_integer_type_put_chunks_in_order(number: Callable[[int], Any]) -> None:
    """Chunks that came in another order are saved in that of their numbers, and shown by them."""
    world = World()
    retriever = world.retriever()
    pieces = ("Pods first.", "Pods second.", "Pods third.")
    world.shows(
        *(document("pods", pieces[at], chunk_index=number(at), total_chunks=number(3)) for at in (2, 0, 1)),
    )
    _, provenance = retriever.invoke_with_provenance(POD_QUESTION)
    assert (provenance.sources[0].chunks_used, provenance.sources[0].total_chunks) == ((0, 1, 2), 3)
    assert retriever.accept_suggestion("pods").full_content == "\n\n".join(pieces)


@pytest.mark.parametrize(
    ("kind", "number"),
    [
        *((kind, number) for kind in PLACES for number in (-1, 2**40)),
        *((kind, 2**70) for kind in (*ONCE_EACH, "memory", "valkey+disk")),
        ("memory", 10**5000),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{value.bit_length()} bits",
)
def test_odd_chunk_numbers_cost_nothing(
    make_store: Callable[[str], StateStore], tmp_path: Path, kind: str, number: int
) -> None:
    """A chunk number of any size is no reason not to count, save, answer, credit and render."""
    world = make_world(kind, make_store, tmp_path)
    world.shows(document("pods", PODS, chunk_index=number, total_chunks=number))
    retriever = world.retriever(fetch_threshold=1)
    _, provenance = retriever.invoke_with_provenance(POD_QUESTION)
    assert provenance.degraded == ()
    retriever.accept_suggestion("pods")
    world.shows()
    found, provenance = retriever.invoke_with_provenance(POD_QUESTION)
    assert (texts(found), provenance.degraded) == ([PODS], ())
    json.dumps([provenance.to_dict(), provenance.render()])


def doubling(floors: int) -> list[Any]:
    """A value whose every floor names the one below twice: small in memory, endless when written out."""
    value: list[Any] = [0]
    for _ in range(floors):
        value = [value, value]
    return value


def test_metadata_that_share_parts_are_not_written_out_without_end() -> None:
    """What is kept of a value stays small, however often its parts name each other."""
    world = World()
    world.shows(document("pods", PODS, grown=doubling(16)))
    world.retriever().invoke(POD_QUESTION)
    (kept,) = world.store.retrieved_texts("ada", "pods")
    # Each floor more doubles it: with thirty of them a question would never be answered.
    assert len(json.dumps(kept.metadata["grown"])) < 2**16


def test_equal_sets_are_alike() -> None:
    """Chunks that carry equal sets have them in common, in whatever order they were made."""
    world = World()
    world.shows(
        document("pods", "Pods a", chunk_index=0, tags={0, 8}), document("pods", "Pods b", chunk_index=1, tags={8, 0})
    )
    retriever = world.retriever()
    retriever.invoke(POD_QUESTION)
    retriever.accept_suggestion("pods")
    world.shows()
    assert sorted(retriever.invoke(POD_QUESTION)[0].metadata["tags"]) == [0, 8]
