"""Conformance suites for stores, ours and other people's; they need pytest.

`StateStoreConformance` is for a subclass of `StateStore`, `ChunkStoreConformance` for a `ChunkPlace`. Each is a
test class with one fixture, `store`, that a subclass supplies.
"""

try:
    import pytest
except ImportError as error:
    msg = "rag_wiki.testing needs pytest: pip install pytest"
    raise ImportError(msg) from error

# Before the suites are imported, so that their failed assertions show the values compared.
pytest.register_assert_rewrite(
    "rag_wiki.testing.chunk_copies",
    "rag_wiki.testing.chunk_dictionaries",
    "rag_wiki.testing.state_changes",
    "rag_wiki.testing.state_queries",
    "rag_wiki.testing.state_records",
    "rag_wiki.testing.state_users",
)

from rag_wiki.testing.chunk_store import ChunkStoreConformance  # noqa: E402 - see above
from rag_wiki.testing.state_store import StateStoreConformance  # noqa: E402 - see above

__all__ = ["ChunkStoreConformance", "StateStoreConformance"]
