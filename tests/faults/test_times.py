"""A moment is the same moment wherever it is written, stored and read, whatever the zone of the machine."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import fields, replace
from datetime import datetime, timedelta, timezone, tzinfo
from pathlib import Path
from typing import Any

import pytest
from helpers import START, HandClock, document
from places import PlacedWorld
from scenarios import POD_QUESTION, PODS, USER, World

from rag_wiki import DecayConfig, DecayEngine, MemoryStateStore, StateStore, UserDocRecord

ONLY_RECENCY = DecayConfig(w_recency=1, w_frequency=0, w_explicit=0, w_chunk_hit=0)
TIMES = [item.name for item in fields(UserDocRecord) if "datetime" in str(item.type)]
PACIFIC = timezone(timedelta(hours=-8))
MOMENT = datetime(2026, 7, 1, 18, 30, 15, 123456, tzinfo=PACIFIC)
"""In another month for UTC and China than for California."""
NAIVE = datetime(2026, 7, 2, 2, 30, 15, 123456)  # noqa: DTZ001 - naive is what this is about
"""The same moment as old data has it: in UTC, and silent about it."""
ZONES = ["America/Los_Angeles", "Asia/Shanghai"]

ELSEWHERE = """
import json, sys, time
from datetime import datetime, timedelta, timezone
from rag_wiki import DecayConfig, MemoryStateStore, RagWikiRetriever, RagWikiRetrieverConfig, UserDocRecord
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.runnables import RunnableLambda

wheres = json.loads(sys.argv[1])
times = json.loads(sys.argv[2])
stores = [MemoryStateStore()]
if "sqlite" in wheres:
    from rag_wiki.storage.sqlite import SQLiteStateStore
    stores.append(SQLiteStateStore(wheres["sqlite"]))
if "postgres" in wheres:
    from rag_wiki.storage.sql import SQLStateStore
    stores.append(SQLStateStore(wheres["postgres"]))
if "valkey" in wheres:
    import redis
    from rag_wiki.storage.redis_store import RedisStateStore
    stores.append(RedisStateStore(redis.Redis(port=wheres["valkey"])))

pacific = datetime(2026, 7, 1, 18, 30, 15, 123456, tzinfo=timezone(timedelta(hours=-8)))
local = pacific.astimezone()
naive = datetime(2026, 7, 2, 2, 30, 15, 123456)
told = {"zone": time.tzname[0], "offset": local.utcoffset().total_seconds(), "stores": []}
config = RagWikiRetrieverConfig(
    decay=DecayConfig(w_recency=1, w_frequency=0, w_explicit=0, w_chunk_hit=0), fetch_threshold=1
)
for store in stores:
    # What another process wrote, if one did.
    earlier = [store.get("ada", name) for name in ("pacific", "local", "naive")]
    for name, moment in (("pacific", pacific), ("local", local), ("naive", naive)):
        store.upsert(UserDocRecord("ada", name, name, "", **dict.fromkeys(times, moment)))
    source = RunnableLambda(lambda query: [Document("Pods.", metadata={"doc_id": "pods"})])
    retriever = RagWikiRetriever(source, "bob", store, config, DeterministicFakeEmbedding(size=8))
    before = datetime.now(timezone.utc)
    documents, provenance = retriever.invoke_with_provenance("pods?")
    retriever.accept_suggestion("pods")
    retriever.invoke("Pods.")
    (result,) = retriever.run_decay()
    retriever.force_pin("pods")
    after = datetime.now(timezone.utc)
    record = store.get("bob", "pods")
    moments = [record.last_fetched_at, record.cached_at, record.pinned_at]
    moments += [event.at for event in retriever.history("pods")]
    read = [store.get("ada", name) for name in ("pacific", "local", "naive")]
    told["stores"].append({
        "earlier": [None if one is None else [getattr(one, name).isoformat() for name in times] for one in earlier],
        "read": [[getattr(one, name).isoformat() for name in times] for one in read],
        "score": result.new_score,
        "now": [before <= moment <= after for moment in moments],
        "aware": all(moment.utcoffset() == timedelta(0) for moment in moments),
    })
    store.forget_user("bob")
    store.close()
print(json.dumps(told))
"""


@pytest.fixture
def wheres(request: pytest.FixtureRequest, make_store: Callable[[str], StateStore], tmp_path: Path) -> dict[str, Any]:
    """Where another process finds an empty store of each kind."""
    found: dict[str, Any] = {"sqlite": f"sqlite:///{tmp_path / 'state.db'}"}
    for kind, fixture in (("postgres", "postgres_url"), ("valkey", "valkey_port")):
        make_store(kind).list_active_users()
        found[kind] = request.getfixturevalue(fixture)
    return found


def run_in(zone: str, wheres: dict[str, Any]) -> dict[str, Any]:
    """What the program above tells when it runs in a time zone."""
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", ELSEWHERE, json.dumps(wheres), json.dumps(TIMES)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "TZ": zone, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert (ended.stderr, ended.returncode) == ("", 0)
    told: dict[str, Any] = json.loads(ended.stdout)
    return told


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system takes no zone from its environment")
def test_machines_in_different_zones_agree(wheres: dict[str, Any]) -> None:
    """In Los Angeles and Shanghai, on every store, what was fetched now is new, and times are the same instants."""
    expected = [["2026-07-02T02:30:15.123456+00:00"] * len(TIMES)] * 3
    for turn, (zone, offset) in enumerate(zip(ZONES, (-7 * 3600, 8 * 3600), strict=True)):
        told = run_in(zone, wheres)
        assert told["offset"] == offset
        assert len(told["stores"]) == 4
        for number, store in enumerate(told["stores"]):
            assert store["read"] == expected
            # The second zone reads what the first one wrote; memory starts empty.
            assert store["earlier"] == (expected if turn and number else [None] * 3)
            assert store["score"] >= 0.999
            assert len(store["now"]) > 3
            assert all(store["now"])
            assert store["aware"]


def test_a_time_comes_back_as_the_same_instant(world: PlacedWorld) -> None:
    """On every store, times with an offset and naive ones come back equal, aware and in UTC, in all fields."""
    for name, moment in (("offset", MOMENT), ("naive", NAIVE), ("utc", MOMENT.astimezone(timezone.utc))):
        times: dict[str, Any] = dict.fromkeys(TIMES, moment)
        record = UserDocRecord(USER, name, name, "", **times)
        world.store.upsert(record)
        for store in (world.store, world.reopened().store):
            found = store.get(USER, name)
            assert found == record
            assert [getattr(found, field) for field in TIMES] == [MOMENT] * len(TIMES)
            assert {getattr(found, field).utcoffset() for field in TIMES} == {timedelta(0)}
    read = [replace(world.record(name), doc_id="one", doc_title="one") for name in ("offset", "naive", "utc")]
    assert read[0] == read[1] == read[2]
    assert len(TIMES) >= 8


def test_every_store_keeps_the_same_times(world: PlacedWorld) -> None:
    """The same life in another store leaves equal records, events and hits, down to the microsecond."""
    start = START + timedelta(microseconds=123_457)
    plain = World(MemoryStateStore())
    lives: list[list[Any]] = []
    for around in (world, plain):
        around.clock = HandClock(start)
        retriever = around.retriever(decay=DecayConfig(demotion_hold_days=0.5))
        around.save(retriever, "pods", PODS)
        around.clock.turn(hours=7, minutes=3)
        retriever.invoke(POD_QUESTION)
        retriever.force_pin("pods")
        around.save(retriever, "images", "Images are read only.")
        around.clock.turn(days=1.3)
        retriever.run_decay()
        retriever.force_remove("images")
        records = [vars(record) | {"copy_id": None, "life": None} for record in retriever.documents()]
        hits = [chunk["last_hit_at"] for chunk in retriever.chunk_store.load_chunks(USER, "pods")]
        lives.append([records, retriever.history("pods"), retriever.history("images"), hits])
    assert lives[0] == lives[1]
    assert lives[0][3] == [start + timedelta(hours=7, minutes=3)]


CLOCKS: dict[str, tzinfo | None] = {"naive": None, "offset": PACIFIC, "half an hour": timezone(timedelta(hours=5.5))}


@pytest.mark.parametrize("zone", CLOCKS.values(), ids=CLOCKS)
def test_a_clock_in_another_zone_is_put_right(world: PlacedWorld, zone: tzinfo | None) -> None:
    """A clock that tells aware times of any zone, or naive ones in UTC, breaks no job and shifts no age."""
    now = START

    def clock() -> datetime:
        return now.astimezone(zone) if zone is not None else now.replace(tzinfo=None)

    retriever = world.retriever(decay=replace(ONLY_RECENCY, demotion_hold_days=1)).model_copy(update={"clock": clock})
    world.shows(document("pods", PODS))
    retriever.invoke("an introduction")
    assert retriever.force_pin("pods").pinned_at == START
    assert retriever.unpin("pods").cached_at == START
    (result,) = retriever.run_decay()
    assert result.new_score == pytest.approx(1.0)
    now += timedelta(days=60)
    assert [result.transitioned for result in retriever.run_decay()] == [False]
    now += timedelta(days=1)
    assert [result.transitioned for result in retriever.run_decay()] == [True]
    assert world.record("pods").demoted_at == now
    assert retriever.force_remove("pods").no_resiluggest_until == now + timedelta(days=30)
    assert [event.at for event in retriever.history("pods")] == [START] * 4 + [now]
    assert {event.at.utcoffset() for event in retriever.history("pods")} == {timedelta(0)}


@pytest.mark.parametrize("now", [NAIVE, MOMENT, MOMENT.astimezone(timezone.utc)], ids=["naive", "offset", "utc"])
def test_the_engine_takes_now_in_any_form(now: datetime) -> None:
    """Where the caller says what time it is, naive means UTC, and another zone is the same instant."""
    store = MemoryStateStore()
    world = World(store, clock=HandClock(MOMENT))
    retriever = world.retriever()
    world.save(retriever, "pods", PODS)
    engine = DecayEngine(store, config=ONLY_RECENCY)
    (result,) = engine.run_for_user(USER, now)
    assert result.new_score == 1.0
    assert engine.force_pin(USER, "pods", now).pinned_at == MOMENT
    assert engine.force_remove(USER, "pods", now).demoted_at == MOMENT


def test_an_age_is_never_negative(world: PlacedWorld) -> None:
    """A record of a machine whose clock is ahead counts as new, and is neither an error nor better than new."""
    retriever = world.retriever(decay=ONLY_RECENCY)
    world.save(retriever, "pods", PODS)
    world.clock.turn(days=-3)
    (result,) = retriever.run_decay()
    assert (result.new_score, result.transitioned) == (1.0, False)


@pytest.mark.parametrize("form", ["naive", "with a space", "Z"])
def test_old_rows_without_an_offset_are_read(
    make_store: Callable[[str], StateStore], tmp_path: Path, form: str
) -> None:
    """Rows whose times say nothing of a zone, as other programs write them, are read as UTC; decay runs over them."""
    world = World(make_store("sqlite-file"))
    retriever = world.retriever(decay=ONLY_RECENCY)
    world.save(retriever, "pods", PODS)
    before, history = world.record("pods"), retriever.history("pods")
    old = {"naive": "", "with a space": "", "Z": "Z"}[form]
    with closing(sqlite3.connect(tmp_path / "state.db")) as connection, connection:
        for table in ("rag_wiki_documents", "rag_wiki_events"):
            connection.execute(f"UPDATE {table} SET payload = replace(payload, '+00:00', ?)", (old,))  # noqa: S608
            if form == "with a space":
                connection.execute(f"UPDATE {table} SET payload = replace(payload, '01T09', '01 09')")  # noqa: S608
        (changed,) = connection.execute("SELECT count(*) FROM rag_wiki_documents WHERE payload LIKE '%+00:00%'")
    assert changed == (0,)
    fresh = World(make_store("sqlite-file"), clock=world.clock)
    assert fresh.record("pods") == before
    assert fresh.retriever().history("pods") == history
    (result,) = fresh.retriever(decay=ONLY_RECENCY).run_decay()
    assert result.new_score == 1.0


def test_what_is_shown_carries_an_offset(world: PlacedWorld) -> None:
    """Every time that a record or event shows in ISO form says its offset; provenance has none that could lack it."""
    retriever = world.retriever()
    world.save(retriever, "pods", PODS)
    retriever.force_pin("pods")
    provenance = retriever.invoke_with_provenance(POD_QUESTION).provenance.to_dict()
    assert json.loads(json.dumps(provenance)) == provenance
    record = world.record("pods")
    shown = [getattr(record, name) for name in TIMES if getattr(record, name) is not None]
    shown += [event.at for event in retriever.history("pods")]
    assert len(shown) >= 6
    assert all(moment.isoformat().endswith("+00:00") for moment in shown)
