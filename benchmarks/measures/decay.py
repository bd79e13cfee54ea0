"""Decay runs: records a second, and how far memory grows."""

from __future__ import annotations

import time
from datetime import datetime, timedelta, timezone

from benchmarks import ours
from benchmarks.plan import Bench, failing, isolated, outcome, progress
from benchmarks.results import Figure, Row, Target
from benchmarks.stores import Place, open_store
from benchmarks.work import PeakMemory
from rag_wiki import DecayEngine, UserDocRecord

_RATE = 25_000.0
_COMPARED = 1_000
"""Records that the older releases are given too."""
_MB = 1e-6


def run(bench: Bench) -> list[Row]:
    """One user with few and with very many records, and many users."""
    cases = [(kind, *size) for kind in bench.chosen("memory", "sqlite", "redis") for size in bench.sizes.decay]
    return [row for case in progress(cases, "decay") for row in _case(bench, *case)]


def _case(bench: Bench, kind: str, users: int, records: int) -> list[Row]:
    who = "one user" if users == 1 else f"{users:,} users"
    target = None if kind == "memory" else Target(_RATE, at_least=True)
    rate = Row("decay", f"{who}, rate", kind, users * records, "records/s", target=target, more_is_better=True)
    growth = Row("decay", f"{who}, memory growth", kind, users * records, "MB")
    with failing([rate, growth]), bench.servers.place(kind) as place:
        repeats = 3 if users * records <= _COMPARED else 1
        rates, grown = isolated(_measure, place, users, records, repeats, seconds=bench.sizes.ours_seconds)
        rate.ours, growth.ours = Figure.of(rates), Figure.one(grown * _MB)
    for version in bench.older if users * records == _COMPARED else ():
        with bench.servers.place(kind) as place:
            answer = bench.ask_older(version, place, task="decay", n=bench.sizes.older_decay, repeats=3)
        rate.older[version] = outcome(answer.of("rate"))
        growth.older[version] = outcome(answer.of("growth"), _MB)
    if bench.older and users * records == _COMPARED and bench.sizes.older_decay != _COMPARED:
        rate.note = f"the older releases were given {bench.sizes.older_decay}"
    return [rate, growth]


def _measure(place: Place, users: int, records: int, repeats: int) -> tuple[list[float], float]:
    """The rates of so many runs, a day apart so that each changes every score; and the largest growth in bytes.

    The records name a copy whose hits are looked up; there are none.
    """
    now = datetime.now(timezone.utc)
    memory, rates = PeakMemory(), []
    with open_store(place) as store:
        names = [f"user-{number:05d}" for number in range(users)]
        for name in names:
            ours.write_records(store, name, (_record(name, number, now) for number in range(records)))
        engine = DecayEngine(store)
        for run_number in range(repeats):
            moment = now + timedelta(days=run_number + 1)
            with memory.watched():
                start = time.perf_counter()
                scored = sum(len(page) for name in names for page in engine.run_pages(name, moment))
                rates.append(scored / (time.perf_counter() - start))
    return rates, memory.growth


def _record(user: str, number: int, now: datetime) -> UserDocRecord:
    fetched = now - timedelta(days=number % 60)
    return ours.saved_record(number, fetched, f"copy{number}", user, fetches=number % 25, full_content=False)
