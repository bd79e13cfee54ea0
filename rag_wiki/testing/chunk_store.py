"""The conformance suite for places where chunks are kept."""

from __future__ import annotations

import pytest

from rag_wiki.storage.chunk_store import ChunkStore
from rag_wiki.testing.chunk_copies import CopyPromises
from rag_wiki.testing.chunk_dictionaries import DictionaryPromises

__all__ = ["ChunkStoreConformance"]


class ChunkStoreConformance(DictionaryPromises, CopyPromises):
    """What a `ChunkStore` promises wherever its chunks lie, as tests; run it on a place of your own.

    Subclass `ChunkPlace`, supply its hooks, and give this class a `ChunkStore` over an empty place for
    each test::

        from collections.abc import Iterator

        import pytest
        from rag_wiki import ChunkStore
        from rag_wiki.testing import ChunkStoreConformance

        from my_package import MyPlace


        class TestMyPlace(ChunkStoreConformance):
            @pytest.fixture
            def store(self) -> Iterator[ChunkStore]:
                store = ChunkStore(place=MyPlace("a folder or address that is empty"))
                yield store
                store.close()

    That is the whole test file; what only your place promises goes below the fixture.

    The tests hold the store to the docstrings of `ChunkStore` and `ChunkPlace`:

    - `DictionaryPromises`: chunks come back in document order with exact float32 vectors; adding counts what
      is new; replacing replaces hits too; hits are exact under 8 threads and never touch the copy; users and
      documents are separate, whatever their ids hold.
    - `CopyPromises`: a copy is there wholly or not at all, and is never that of another document; only the
      parts asked for are read; `retire` and `drop` remove what no record names, and no more; hit rates.

    They ask for no second connection, restart or process, since not every place has those.
    """

    @pytest.fixture
    def store(self) -> ChunkStore:
        """A chunk store over an empty place; the subclass supplies it."""
        msg = f"{type(self).__name__} needs a fixture named `store` that gives a ChunkStore over an empty place"
        raise NotImplementedError(msg)
