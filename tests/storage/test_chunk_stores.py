"""Chunks keep the promises of `ChunkStore` wherever they lie."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import BACKENDS

from rag_wiki import ChunkStore, StateStore
from rag_wiki.testing import ChunkStoreConformance


class TestChunksBesideTheState(ChunkStoreConformance):
    """All of the suite, on the chunks beside each kind of store."""

    @pytest.fixture(params=BACKENDS)
    def store(self, request: pytest.FixtureRequest, make_store: Callable[[str], StateStore]) -> ChunkStore:
        """The chunk store of an empty state store of each kind."""
        store = make_store(request.param)
        # fakeredis makes its database at the first command, and makes several when threads are first.
        store.list_active_users()
        return store.chunk_store


class TestChunksOnDisk(ChunkStoreConformance):
    """All of the suite, on a folder."""

    @pytest.fixture
    def store(self, tmp_path: Path) -> ChunkStore:
        """A chunk store over a folder that does not exist yet."""
        return ChunkStore(tmp_path / "wiki")
