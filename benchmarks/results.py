"""What was measured, as values: rows of figures, their targets, and the JSON they are kept in."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Figure:
    """Samples of one thing, summarised."""

    p50: float
    p90: float
    count: int

    @classmethod
    def of(cls, samples: Sequence[float], scale: float = 1.0) -> Figure:
        """The summary of samples, each times `scale`."""
        ordered = sorted(sample * scale for sample in samples)
        ninetieth = ordered[min(len(ordered) - 1, round(0.9 * (len(ordered) - 1)))]
        return cls(statistics.median(ordered), ninetieth, len(ordered))

    @classmethod
    def one(cls, value: float) -> Figure:
        """A single value."""
        return cls(value, value, 1)


@dataclass(frozen=True)
class Failed:
    """Why there is no figure."""

    why: str


Outcome = Figure | Failed


@dataclass(frozen=True)
class Target:
    """What a figure should stay under, or reach."""

    limit: float
    at_least: bool = False

    def met_by(self, value: float) -> bool:
        """Whether the value keeps it."""
        return value >= self.limit if self.at_least else value <= self.limit


@dataclass
class Row:
    """One case: what the older package, the floor and ours took for it."""

    measure: str
    case: str
    store: str
    n: int
    unit: str = "ms"
    ours: Outcome | None = None
    older: dict[str, Outcome] = field(default_factory=dict)
    floor: Outcome | None = None
    target: Target | None = None
    more_is_better: bool = False
    note: str = ""

    def ratio_to_older(self, version: str) -> float | None:
        """How many times better ours is than a release of the older package."""
        older, ours = self.older.get(version), self.ours
        if not isinstance(older, Figure) or not isinstance(ours, Figure) or min(older.p50, ours.p50) <= 0:
            return None
        return ours.p50 / older.p50 if self.more_is_better else older.p50 / ours.p50

    def ratio_to_floor(self) -> float | None:
        """How many times the floor ours is."""
        if not isinstance(self.floor, Figure) or not isinstance(self.ours, Figure) or self.floor.p50 <= 0:
            return None
        return self.ours.p50 / self.floor.p50

    def met(self) -> bool | None:
        """Whether ours keeps the target; `None` where there is none."""
        if self.target is None or self.ours is None:
            return None
        return isinstance(self.ours, Figure) and self.target.met_by(self.ours.p50)


@dataclass
class Results:
    """Everything of a run."""

    facts: dict[str, Any] = field(default_factory=dict)
    """The machine, the versions, when and how it ran; by measure where that differs."""
    rows: list[Row] = field(default_factory=list)

    def replace(self, measure: str, rows: Iterable[Row]) -> None:
        """Put a measure's rows in place of those of an earlier run."""
        self.rows = [row for row in self.rows if row.measure != measure] + list(rows)

    def of(self, measure: str) -> list[Row]:
        """The rows of a measure."""
        return [row for row in self.rows if row.measure == measure]

    def write(self, path: Path) -> None:
        """Write the JSON file."""
        data = {"facts": self.facts, "rows": [_row_to_json(row) for row in self.rows]}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Results:
        """Read the JSON file; nothing when there is none."""
        if not path.exists():
            return cls()
        data = json.loads(path.read_text(encoding="utf-8"))
        return cls(data["facts"], [_row_from_json(row) for row in data["rows"]])


def _row_to_json(row: Row) -> dict[str, Any]:
    return {
        **{name: getattr(row, name) for name in ("measure", "case", "store", "n", "unit", "more_is_better", "note")},
        "ours": _outcome_to_json(row.ours),
        "floor": _outcome_to_json(row.floor),
        "older": {version: _outcome_to_json(outcome) for version, outcome in row.older.items()},
        "target": None if row.target is None else vars(row.target),
        "met": row.met(),
    }


def _row_from_json(data: Mapping[str, Any]) -> Row:
    row = Row(**{name: data[name] for name in ("measure", "case", "store", "n", "unit", "more_is_better", "note")})
    row.ours, row.floor = _outcome_from_json(data["ours"]), _outcome_from_json(data["floor"])
    older = {version: _outcome_from_json(outcome) for version, outcome in data["older"].items()}
    row.older = {version: outcome for version, outcome in older.items() if outcome is not None}
    row.target = None if data["target"] is None else Target(**data["target"])
    return row


def _outcome_to_json(outcome: Outcome | None) -> dict[str, Any] | None:
    if outcome is None:
        return None
    return {"failed": outcome.why} if isinstance(outcome, Failed) else vars(outcome)


def _outcome_from_json(data: Mapping[str, Any] | None) -> Outcome | None:
    if data is None:
        return None
    return Failed(data["failed"]) if "failed" in data else Figure(**data)
