"""Clocks that are wrong, and times that are odd: order and counts hold, and no question or job raises."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import date, datetime, timedelta, timezone
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from helpers import START, HandClock, document
from places import PlacedWorld
from scenarios import POD_QUESTION, PODS, World, texts

from rag_wiki import DocumentState, UserDocRecord
from rag_wiki.errors import InvalidDocumentError

ONCE_EACH = ["memory+disk", "sqlite", "postgres", "valkey"]
"""Each store and each place for chunks, once."""

UTC = timezone.utc


@pytest.mark.parametrize("world", ONCE_EACH, indirect=True)
def test_a_clock_that_jumps_back_loses_nothing(world: PlacedWorld) -> None:
    """After a clock was years ahead and came back, documents count, save, decay and answer as before."""
    retriever = world.retriever(fetch_threshold=2)
    world.shows(document("pods", PODS))
    world.clock.turn(days=3650)
    retriever.invoke(POD_QUESTION)
    world.clock.now = START
    (suggestion,) = retriever.invoke_with_provenance(POD_QUESTION).provenance.suggestions
    assert suggestion.fetch_count == 2
    retriever.accept_suggestion("pods")
    (result,) = retriever.run_decay()
    assert 0 <= result.new_score <= 1
    assert retriever.run_decay()[0].new_score == result.new_score
    world.shows()
    again = world.reopened().retriever()
    assert texts(again.invoke(POD_QUESTION)) == [PODS]
    assert [event.what for event in again.history("pods")] == ["surfaced", "suggested", "saved"]
    assert world.record("pods").last_fetched_at == START


def test_a_future_fetch_is_as_recent_as_can_be() -> None:
    """A fetch that lies in the future, by a clock that was put right since, scores as one of this moment."""
    world = World()
    retriever = world.retriever()
    world.save(retriever, "pods", PODS)
    (now,) = retriever.run_decay()
    world.clock.turn(days=-400)
    (back,) = retriever.run_decay()
    assert back.new_score == now.new_score
    assert world.state("pods") is DocumentState.CLAIMED


def test_a_hold_that_began_in_the_future_ends_no_sooner_and_begins_again() -> None:
    """Days that a score must hold are not counted from a moment that has not come yet."""
    world = World()
    retriever = world.retriever()
    world.save(retriever, "pods", PODS)
    world.clock.turn(days=365)
    retriever.thumbs_down("pods")
    retriever.run_decay()
    assert world.record("pods").demotion_candidate_since == world.clock.now
    world.clock.turn(days=-200)
    retriever.run_decay()
    assert world.state("pods") is DocumentState.CLAIMED
    world.clock.turn(days=204)
    retriever.run_decay()
    assert world.state("pods") is DocumentState.DEMOTED


ZONES = {
    "half an hour off": timezone(timedelta(hours=5, minutes=30)),
    "three quarters": timezone(timedelta(hours=-9, minutes=-45)),
    "seconds": timezone(timedelta(hours=1, seconds=7)),
    "summer time": ZoneInfo("Europe/Berlin"),
    "the other side": timezone(timedelta(hours=14)),
}


@pytest.mark.parametrize("zone", ZONES.values(), ids=ZONES)
def test_a_clock_of_any_zone_tells_the_same_moment(zone: Any) -> None:
    """A clock that answers in a zone of its own, or without one, is read as the moment that it means."""
    world = World(clock=HandClock(START.astimezone(zone)))
    retriever = world.retriever()
    world.save(retriever, "pods", PODS)
    record = world.record("pods")
    assert (record.cached_at, record.last_fetched_at) == (START, START)
    assert record.cached_at is not None
    assert record.cached_at.utcoffset() == timedelta(0)
    assert {event.at.utcoffset() for event in retriever.history("pods")} == {timedelta(0)}
    world.clock.now = START.replace(tzinfo=None)
    (naive,) = retriever.run_decay()
    world.clock.now = START
    assert retriever.run_decay()[0].new_score == naive.new_score


@pytest.mark.parametrize("world", ONCE_EACH, indirect=True)
def test_the_hour_that_comes_twice_is_two_hours(world: PlacedWorld) -> None:
    """Two moments that a wall clock shows alike when summer time ends stay apart, in order, in every place."""
    berlin = ZoneInfo("Europe/Berlin")
    first = datetime(2026, 10, 25, 2, 30, tzinfo=berlin)
    second = first.replace(fold=1)
    world.store.upsert(UserDocRecord("ada", "pods", "", "", last_fetched_at=first, cached_at=second))
    record = world.reopened().record("pods")
    assert record.last_fetched_at is not None
    assert record.cached_at is not None
    assert record.cached_at - record.last_fetched_at == timedelta(hours=1)


EDGES = {"the first year": datetime(1, 1, 1, tzinfo=UTC), "the last year": datetime(9999, 12, 31, 23, tzinfo=UTC)}


@pytest.mark.parametrize("world", ONCE_EACH, indirect=True)
@pytest.mark.parametrize("moment", EDGES.values(), ids=EDGES)
def test_the_first_and_the_last_year_are_times(world: PlacedWorld, moment: datetime) -> None:
    """A clock at either end of the calendar counts, saves, decays, pins and answers, in every place."""
    world.clock.now = moment
    retriever = world.retriever()
    world.save(retriever, "pods", PODS)
    retriever.force_pin("pods")
    assert retriever.run_decay()[0].new_state is DocumentState.PINNED
    assert texts(world.reopened().retriever().invoke(POD_QUESTION)) == [PODS]
    assert world.reopened().record("pods").cached_at == moment
    assert str(retriever.history("pods")[-1])
    other = START if moment.year > 5000 else datetime(9999, 1, 1, tzinfo=UTC)
    world.clock.now = other
    assert 0 <= retriever.run_decay()[0].new_score <= 1


@pytest.mark.parametrize("moment", EDGES.values(), ids=EDGES)
def test_removing_works_at_either_end_of_the_calendar(moment: datetime) -> None:
    """A document can be removed whatever the clock says: what a user wants gone is gone."""
    world = World()
    retriever = world.retriever()
    world.save(retriever, "pods", PODS)
    world.clock.now = moment
    assert retriever.force_remove("pods").user_state is DocumentState.DEMOTED


@pytest.mark.parametrize(
    "moment",
    ["2026-01-01", date(2026, 1, 1), 1.5, datetime(1, 1, 1, tzinfo=ZONES["the other side"])],
    ids=["text", "day", "number", "before the first year"],
)
def test_what_is_no_time_is_refused(moment: Any) -> None:
    """A record whose time is none, or none that UTC has, is refused in the words that its class promises."""
    with pytest.raises(InvalidDocumentError, match="last_fetched_at"):
        UserDocRecord("ada", "pods", "", "", last_fetched_at=moment)


@pytest.mark.parametrize(("name", "value"), [("user_state", "x"), ("retrieved", 5), ("retrieved", [5])])
def test_what_is_no_state_and_no_digest_is_refused(name: str, value: Any) -> None:
    """A record whose state is none, or whose digests are no texts, is refused in the same words."""
    with pytest.raises(InvalidDocumentError, match=name):
        UserDocRecord("ada", "pods", "", "", **{name: value})


_SCRIPT = """
import sys, time
sys.path.insert(0, "tests")
from datetime import datetime, timezone
from helpers import document
from scenarios import World
from rag_wiki.clock import utc_now
world = World(clock=utc_now)
retriever = world.retriever()
world.save(retriever, "pods", "Pods")
(result,) = retriever.run_decay()
# Recency weighs 0.40 of 1.05, frequency a twentieth of 0.30.
print(round(result.new_score * 1.05, 3), abs(world.record("pods").cached_at - datetime.now(timezone.utc)).days)
"""


@pytest.mark.parametrize("zone", ["America/Los_Angeles", "Asia/Kolkata"])
def test_the_zone_of_the_machine_does_not_matter(zone: str) -> None:
    """On a machine of any zone what was fetched now is as recent as can be."""
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT],
        capture_output=True,
        text=True,
        check=False,
        cwd=root,
        env={**os.environ, "TZ": zone, "PYTHONPATH": str(root)},
        timeout=120,
    )
    assert (done.stdout.split(), done.stderr) == (["0.415", "0"], "")
