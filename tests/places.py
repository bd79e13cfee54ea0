"""A world on every store with every place for chunks, which can be opened again as another process would."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from scenarios import World

from rag_wiki import RagWikiRetriever, StateStore
from rag_wiki.storage.chunk_store import ChunkStore

PLACES = ("memory", "memory+disk", "sqlite", "sqlite+disk", "postgres", "valkey", "valkey+disk")
"""Where state and chunks are kept; `+disk` has the chunks in files, the others beside the state."""
_STORES = {"memory": "memory", "sqlite": "sqlite-file", "postgres": "postgres", "valkey": "valkey"}


@dataclass
class PlacedWorld(World):
    """A world whose state and chunks are in a given place."""

    kind: str = "memory"
    folder: Path | None = None
    """The folder of chunks and readable copies, where there is one."""
    make: Callable[[], StateStore] | None = None
    _chunks: ChunkStore | None = field(default=None, repr=False)

    @property
    def survives(self) -> bool:
        """Whether the state outlives this process."""
        return not self.kind.startswith("memory")

    def retriever(self, user_id: str | None = "ada", **options: Any) -> RagWikiRetriever:
        """A retriever over this world; all of one world share one chunk store."""
        if self.folder is not None and "chunk_store" not in options:
            self._chunks = self._chunks or ChunkStore(self.folder)
            options["chunk_store"] = self._chunks
        return super().retriever(user_id, **options)

    def reopened(self) -> PlacedWorld:
        """The same data as another process sees it: a new client, no caches. State in memory stays what it is."""
        store = self.make() if self.survives and self.make is not None else self.store
        return replace(self, store=store, _chunks=None)


def make_world(kind: str, make_store: Callable[[str], StateStore], tmp_path: Path) -> PlacedWorld:
    """An empty world in a place by its name."""
    store, _, disk = kind.partition("+")
    folder = tmp_path / "wiki" if disk else None

    def make() -> StateStore:
        return make_store(_STORES[store])

    return PlacedWorld(store=make(), kind=kind, folder=folder, make=make)
