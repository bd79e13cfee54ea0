"""Where releases 0.2.2 and 0.2.4 kept chunks: a folder per document, with a file of one JSON object per line."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from rag_wiki.errors import ConfigurationError, StorageError
from rag_wiki.migrate.values import moment_of, whole_of
from rag_wiki.storage.codec import UNREADABLE
from rag_wiki.storage.records import join_halves

__all__ = ["ChunkFile", "OlderChunk", "OlderChunks", "file_of"]

_FILE = "chunks.jsonl"


@dataclass(frozen=True)
class OlderChunk:
    """A chunk as it was kept."""

    index: int
    """Its number in the source; where the source had none, a checksum of the text, or its number in a split."""
    text: str
    vector: Sequence[float] | None = None
    section: str | None = None
    hit_count: int = 0
    last_hit_at: datetime | None = None


@dataclass(frozen=True)
class ChunkFile:
    """The chunks of a document, in the order in which they were added."""

    chunks: tuple[OlderChunk, ...] = ()
    unreadable: int = 0
    """Lines that hold no chunk."""
    problem: str | None = None
    """Why the file is not read."""
    unread: bool = False
    """It may hold chunks: another run, which is let, would bring them."""


def file_of(user_id: str, doc_id: str) -> str:
    """The path of a document's chunks in the folder.

    Different ids may lead to one file: all but letters, digits and `-_.` became `_`.
    """
    return os.path.normpath(os.path.join(_plain(user_id), _plain(doc_id), _FILE))  # noqa: PTH118 - `..` is to be resolved


def _plain(name: str) -> str:
    return "".join(character if character.isalnum() or character in "-_." else "_" for character in name)


class OlderChunks:
    """The folder of chunks.

    Raises:
        ConfigurationError: There is no such folder.
        StorageError: It can't be read.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if not self.folder.is_dir():
            msg = f"there is no folder {str(folder)!r} to bring chunks from"
            raise ConfigurationError(msg)
        try:
            next(self.folder.iterdir(), None)
        except OSError as error:
            msg = f"the folder {str(folder)!r} can't be read, to bring chunks from: {error}"
            raise StorageError(msg) from error
        turned = self.folder.resolve()
        turned = turned.with_name(turned.name.swapcase())
        self.ignores_case = turned.name != self.folder.resolve().name and turned.exists()
        """Whether names that differ in case alone are one file there."""

    def read(self, user_id: str, doc_id: str) -> ChunkFile | None:
        """The chunks of a document; `None` where there are none."""
        name = file_of(user_id, doc_id)
        if name.startswith(os.pardir):
            return ChunkFile(problem="its name leads out of the folder")
        try:
            content = (self.folder / name).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            # A name that is longer than the file system takes could not be written either.
            return None if len(name.encode()) > 255 else ChunkFile(problem=str(error), unread=True)
        lines = [line for line in content.split(b"\n") if line.strip()]
        chunks = [_chunk(line) for line in lines]
        found = tuple(chunk for chunk in chunks if chunk is not None)
        return ChunkFile(found, len(lines) - len(found))


def _chunk(line: bytes) -> OlderChunk | None:
    try:
        value = json.loads(line)
        index, text = whole_of(value["chunk_index"]), value["text"]
    except UNREADABLE:
        return None
    if index is None or not isinstance(text, str) or not text.strip():
        return None
    section = value.get("section")
    return OlderChunk(
        index=index,
        text=join_halves(text),
        vector=_vector(value.get("vector")),
        section=section if isinstance(section, str) and section.strip() else None,
        hit_count=max(whole_of(value.get("hit_count")) or 0, 0),
        last_hit_at=moment_of(value.get("last_hit_at")),
    )


def _vector(value: Any) -> Sequence[float] | None:
    """The numbers of a vector; `None` for what is none, or can't be compared."""
    if not isinstance(value, list) or not value or not {*map(type, value)} <= {int, float}:
        return None
    try:
        return value if math.isfinite(math.fsum(value)) else None
    except (OverflowError, ValueError):
        return None
