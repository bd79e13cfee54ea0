"""What was measured, as values, and the JSON that it is kept in."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.quality.measures import Estimate, Part, Summary
from benchmarks.results import Failed


@dataclass
class Experiment:
    """One embedding model, and users of one language."""

    model: str
    language: str
    systems: dict[str, Summary | Failed] = field(default_factory=dict)

    def summary(self, system: str) -> Summary | None:
        """The figures of a system, if there are any."""
        found = self.systems.get(system)
        return found if isinstance(found, Summary) else None


@dataclass
class Quality:
    """Everything of a run."""

    facts: dict[str, Any] = field(default_factory=dict)
    """The machine, and when it ran."""
    setup: dict[str, Any] = field(default_factory=dict)
    """What was asked of whom, and how: figures of different set-ups can't be compared."""
    experiments: list[Experiment] = field(default_factory=list)
    failed_models: dict[str, str] = field(default_factory=dict)
    """The models that could not be opened, and why."""

    def replace(self, experiment: Experiment) -> None:
        """Put an experiment in place of an earlier one of the same model and language."""
        for place, item in enumerate(self.experiments):
            if (item.model, item.language) == (experiment.model, experiment.language):
                self.experiments[place] = experiment
                return
        self.experiments.append(experiment)

    def models(self) -> list[str]:
        """The models that there are figures of."""
        return list(dict.fromkeys(item.model for item in self.experiments))

    def languages(self) -> list[str]:
        """The languages that there are figures of."""
        return list(dict.fromkeys(item.language for item in self.experiments))

    def of_language(self, language: str) -> list[Experiment]:
        """The experiments with users of a language, one for each model."""
        return [item for item in self.experiments if item.language == language]

    def write(self, path: Path) -> None:
        """Write the JSON file."""
        data = {
            "facts": self.facts,
            "setup": self.setup,
            "failed_models": self.failed_models,
            "experiments": [_experiment_to_json(item) for item in self.experiments],
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Quality:
        """Read the JSON file; nothing when there is none."""
        if not path.exists():
            return cls()
        data = json.loads(path.read_text(encoding="utf-8"))
        experiments = [_experiment_from_json(item) for item in data["experiments"]]
        return cls(data["facts"], data["setup"], experiments, data["failed_models"])


def _experiment_to_json(experiment: Experiment) -> dict[str, Any]:
    systems = {
        name: {"failed": found.why} if isinstance(found, Failed) else asdict(found)
        for name, found in experiment.systems.items()
    }
    return {"model": experiment.model, "language": experiment.language, "systems": systems}


def _experiment_from_json(data: Mapping[str, Any]) -> Experiment:
    systems = {name: _system_from_json(found) for name, found in data["systems"].items()}
    return Experiment(data["model"], data["language"], systems)


def _system_from_json(data: Mapping[str, Any]) -> Summary | Failed:
    if "failed" in data:
        return Failed(data["failed"])
    estimates = ("recall", "mrr", "characters", "recall_gain", "mrr_gain")
    read: dict[str, Any] = {
        **data,
        **{name: Estimate(**data[name]) for name in estimates},
        **{name: Part(**data[name]) for name in ("whole", "second_half")},
        "quarters": tuple(Part(**part) for part in data["quarters"]),
    }
    return Summary(**read)
