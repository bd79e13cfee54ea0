"""The conformance suite for state stores."""

from __future__ import annotations

import pytest

from rag_wiki.storage.base import StateStore
from rag_wiki.testing.state_changes import ChangePromises
from rag_wiki.testing.state_queries import QueryPromises
from rag_wiki.testing.state_records import RecordPromises
from rag_wiki.testing.state_users import UserPromises

__all__ = ["StateStoreConformance"]


class StateStoreConformance(RecordPromises, ChangePromises, QueryPromises, UserPromises):
    """What every `StateStore` promises, as tests; run it on a backend of your own.

    Subclass `StateStore`, supply its hooks, and give this class an empty store for each test::

        from collections.abc import Iterator

        import pytest
        from rag_wiki.testing import StateStoreConformance

        from my_package import MyStateStore


        class TestMyStateStore(StateStoreConformance):
            @pytest.fixture
            def store(self) -> Iterator[MyStateStore]:
                with MyStateStore("a place that is empty") as store:
                    yield store

    That is the whole test file; what only your backend promises (what outlives a restart, who shares the
    data, what a broken connection gives) goes below the fixture.

    The tests hold the store to the docstrings of `StateStore` and its hooks:

    - `RecordPromises`: a record comes back equal and as a copy, its times aware; any two ids are different;
      lists are sorted and hold their states; pages cover everything; a deletion leaves no trace.
    - `ChangePromises`: `change` is all or nothing, and exact under 8 threads; content stays unless it is
      changed; history is bounded and in order; retrieved texts and hits of chunks are kept.
    - `QueryPromises`: misses grow with the user's clocks; what is idle is exact; the revision moves when
      an index of the saved copies must know, and never comes back.
    - `UserPromises`: who is active; a forgotten user is gone, alone, and counted; one worker gets a job's turn.

    They ask for no second connection, restart or process, since not every store has those.
    """

    @pytest.fixture
    def store(self) -> StateStore:
        """An empty store; the subclass supplies it."""
        msg = f"{type(self).__name__} needs a fixture named `store` that gives an empty StateStore"
        raise NotImplementedError(msg)
