"""From observations to figures. Pure: observations in, values out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from benchmarks.quality.observations import Course, Observation

Values: TypeAlias = NDArray[np.float64]
"""One for each question, in the order of the sessions."""

QUARTERS = 4
_RESAMPLES = 2_000
_SEED = 95
_INTERVAL = (2.5, 97.5)


@dataclass(frozen=True)
class Estimate:
    """A mean over all questions, with its 95 % bootstrap interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Part:
    """Means over a part of every session."""

    recall: float
    mrr: float
    characters: float
    from_cache: float
    """Share of answers with something from a saved copy."""
    unasked: float
    """Share of questions for which the wrapped retriever was not asked."""
    searches: float
    """Searches of the wrapped retriever, for each question."""


@dataclass(frozen=True)
class Summary:
    """What a system did with all questions."""

    questions: int
    recall: Estimate
    """Share of questions for which a piece of the right document holds an answer."""
    mrr: Estimate
    """Mean reciprocal rank of the first such piece; zero where there is none."""
    characters: Estimate
    """Of all pieces of an answer together."""
    recall_gain: Estimate
    """Beyond the reference, question by question."""
    mrr_gain: Estimate
    pieces: float
    first_from_cache: float
    """Share of answers whose first piece is of a saved copy."""
    false_hits: float
    """Share of questions about a document that is not saved for which a copy of another one answered."""
    whole: Part
    second_half: Part
    quarters: tuple[Part, ...]
    """From the first to the last of every session."""
    saved: int
    suggestions: int
    let_go: int


class Resampling:
    """Bootstrap intervals: each user's questions are drawn anew, as many as they were, with replacement.

    The same draws serve every system, so differences are paired.

    Args:
        lengths: Questions of each user.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        generator = np.random.default_rng(_SEED)
        drawn = [generator.multinomial(length, np.full(length, 1 / length), _RESAMPLES) for length in lengths]
        self._shares = np.hstack(drawn) / sum(lengths)

    def estimate(self, values: Values) -> Estimate:
        """The mean of values, and the interval of the means of the draws."""
        low, high = np.percentile(self._shares @ values, _INTERVAL)
        return Estimate(float(values.mean()), float(low), float(high))


def summarise(course: Course, reference: Course, resampling: Resampling) -> Summary:
    """The figures of a system, and its gain over another that was asked the same questions."""
    recall, mrr = _each(course, _found), _each(course, _reciprocal_rank)
    return Summary(
        questions=len(recall),
        recall=resampling.estimate(recall),
        mrr=resampling.estimate(mrr),
        characters=resampling.estimate(_each(course, lambda item: item.characters)),
        recall_gain=resampling.estimate(recall - _each(reference, _found)),
        mrr_gain=resampling.estimate(mrr - _each(reference, _reciprocal_rank)),
        pieces=float(_each(course, lambda item: item.pieces).mean()),
        first_from_cache=float(_each(course, lambda item: item.first_from_cache).mean()),
        false_hits=_false_hits(course),
        whole=_part(course, 0, 1),
        second_half=_part(course, 1, 2),
        quarters=tuple(_part(course, quarter, QUARTERS) for quarter in range(QUARTERS)),
        saved=course.saved,
        suggestions=course.suggestions,
        let_go=course.let_go,
    )


def _each(course: Course, figure: Callable[[Observation], float]) -> Values:
    return np.array([figure(item) for own in course.sessions for item in own], dtype=np.float64)


def _found(item: Observation) -> float:
    return float(item.rank > 0)


def _reciprocal_rank(item: Observation) -> float:
    return 1 / item.rank if item.rank else 0.0


def _false_hits(course: Course) -> float:
    answered = [item.from_cache for own in course.sessions for item in own if item.about_unsaved]
    return sum(answered) / len(answered) if answered else 0.0


def _part(course: Course, part: int, parts: int) -> Part:
    """The means over one of so many equal parts of every session."""
    cut = Course([own[len(own) * part // parts : len(own) * (part + 1) // parts] for own in course.sessions])
    return Part(
        recall=float(_each(cut, _found).mean()),
        mrr=float(_each(cut, _reciprocal_rank).mean()),
        characters=float(_each(cut, lambda item: item.characters).mean()),
        from_cache=float(_each(cut, lambda item: item.from_cache).mean()),
        unasked=float(_each(cut, lambda item: item.searches == 0).mean()),
        searches=float(_each(cut, lambda item: item.searches).mean()),
    )
