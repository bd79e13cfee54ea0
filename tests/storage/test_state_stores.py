"""Every state store keeps the promises of `StateStore`."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime, timezone

import pytest
from conftest import BACKENDS

from rag_wiki import StateStore
from rag_wiki.storage.codec import storage_key
from rag_wiki.storage.records import UserChange
from rag_wiki.testing import StateStoreConformance
from rag_wiki.testing.awkward import a_record, an_event, just


class TestStateStores(StateStoreConformance):
    """All of the suite on each kind of store."""

    @pytest.fixture(params=BACKENDS)
    def store(self, request: pytest.FixtureRequest, make_store: Callable[[str], StateStore]) -> StateStore:
        """An empty store of each kind."""
        store = make_store(request.param)
        # fakeredis makes its database at the first command, and makes several when threads are first.
        store.list_active_users()
        return store

    @pytest.mark.skipif(not hasattr(time, "tzset"), reason="this system can't change its zone")
    def test_the_local_zone_does_not_matter(self, store: StateStore, monkeypatch: pytest.MonkeyPatch) -> None:
        """Times, aware and naive, are the same instants wherever the process that writes or reads them runs."""
        naive = datetime(2026, 7, 1, 2, 30)  # noqa: DTZ001 - naive is what this is about
        expected = naive.replace(tzinfo=timezone.utc)
        zones = ["America/Los_Angeles", "Asia/Shanghai", "UTC"]
        try:
            for writing, reading in zip(zones, [*zones[1:], zones[0]], strict=True):
                monkeypatch.setenv("TZ", writing)
                time.tzset()
                record = a_record(doc_id=writing, cached_at=expected.astimezone())
                record.last_fetched_at = naive
                event = an_event(writing, at=naive)
                store.change("alice", [writing], just(UserChange(records=[record], events=[event])))

                monkeypatch.setenv("TZ", reading)
                time.tzset()
                got = store.get("alice", writing)
                assert got is not None
                assert (got.last_fetched_at, got.cached_at) == (expected, expected)
                assert [event.at for event in store.history("alice", writing)] == [expected]
        finally:
            monkeypatch.undo()
            time.tzset()


def test_forgetting_remembers_no_id(state_store: StateStore) -> None:
    """What makes keys of ids keeps some of them at hand; not of who was forgotten."""
    state_store.upsert(a_record("somebody", "secret"))
    state_store.forget_user("somebody")
    assert storage_key.cache_info().currsize == 0
