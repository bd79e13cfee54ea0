"""What the cosines of an embedding model mean: how high unrelated texts score, and how high an answer does.

A cosine of 0.75 is a sure match with one model and nothing at all with another. So the model is shown questions with a
passage that answers each (`calibration_pairs`): a question with its own passage scores as a match does, with the other
passages of its language as unrelated texts do. Threshold, prior and margin follow from the two.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rag_wiki.errors import CorruptDataError, EmbeddingError
from rag_wiki.search.calibration_pairs import PAIRS
from rag_wiki.search.embedding import check_vectors
from rag_wiki.storage.chunk_store import unit_rows
from rag_wiki.storage.codec import dump_json, load_json

__all__ = ["PAIRS_ID", "Calibration", "Focus", "FocusShares", "ModelScores", "Spread"]

Matrix = NDArray[np.float32]

PAIRS_ID = hashlib.sha256(repr(PAIRS).encode()).hexdigest()[:8]
"""Which pairs these are: scores of others are not theirs."""
_LANGUAGES = tuple(pair.language for pair in PAIRS)
_AS_GOOD = 8
"""Own chunks that tell as much about a user's texts as the pairs do."""
_ALIKE = 2
"""Chunks that have one chance to be hit between them: neighbours share a subject, and some of their text."""
_MOST_APART = 128
"""Chances beyond which one more makes a hit no likelier: by then chunks are of the same documents and subjects."""
_KINDS = ("unrelated", "matching")
_REMEDY = "Nothing was kept; calibrating again is safe."
_WHAT = "the questions and passages that it is calibrated with"


class Spread(NamedTuple):
    """Scores of one kind, summed up."""

    mean: float
    std: float
    size: int
    """Scores."""


class FocusShares(NamedTuple):
    """How an answer keeps to what matters, in shares of the gap between unrelated and matching texts."""

    prior: float
    words: float
    margin: float


class Focus(NamedTuple):
    """How an answer keeps to what matters, in cosines."""

    prior: float
    """What a saved document is raised by."""
    words: float
    """What a text is raised by that holds all of the query's words."""
    margin: float
    """How far below the best piece another one may lie."""
    chance: float
    """A third of the way from unrelated to matching texts: what scores no more may be served, and was not wanted."""


@dataclass(frozen=True)
class Calibration:
    """What the cosines of an embedding model mean for a user's saved chunks."""

    model: str
    """The fingerprint of the model."""
    unrelated: Spread
    """Scores of questions with texts that have nothing to do with them."""
    matching: Spread
    """Scores of questions with the passage that answers them."""
    false_hit_rate: float
    """The share of questions, of those that nothing saved has to do with, that a saved copy may answer."""
    threshold: float
    """The cosine that `similarity_threshold="auto"` stands for."""
    focus: Focus | None
    """What `context="focused"` goes by; `None` where the model can't tell a match from an unrelated text."""
    chunks: int = 0
    """Saved chunks of the user that it was refined with."""

    @property
    def gap(self) -> float:
        """How much higher an answer scores than an unrelated text, on average."""
        return self.matching.mean - self.unrelated.mean

    @property
    def is_telling(self) -> bool:
        """Whether the model tells matches from unrelated texts at all."""
        return _is_telling(self.unrelated, self.matching)

    def problem_with(self, threshold: float) -> str | None:
        """What is wrong with a threshold for this model, in words; `None` when nothing is."""
        if threshold <= self.unrelated.mean:
            return (
                f"texts that have nothing to do with a question score {self.unrelated.mean:.2f}, so everything passes"
            )
        if threshold > self.matching.mean + 3 * self.matching.std:
            return f"passages that answer a question score {self.matching.mean:.2f}, so nothing passes"
        return None


@dataclass(frozen=True)
class ModelScores:
    """How a model scores the pairs, and its vectors of their questions."""

    model: str
    """Its fingerprint."""
    unrelated: Spread
    matching: Spread
    questions: Matrix = field(repr=False, compare=False)
    """(pairs, dim) unit rows."""

    @property
    def is_telling(self) -> bool:
        """Whether the model tells matches from unrelated texts at all."""
        return _is_telling(self.unrelated, self.matching)

    @classmethod
    def measure(cls, model: str, questions: Sequence[Any], passages: object) -> ModelScores:
        """The scores of what a model made of the pairs: a vector for each question and each passage.

        Languages in which it can't tell them apart say nothing about its scores where it can; they are left out.

        Raises:
            EmbeddingError: The vectors can't be used.
        """
        asked = unit_rows(check_vectors(questions, len(PAIRS), _WHAT, _REMEDY))
        told = unit_rows(check_vectors(passages, len(PAIRS), _WHAT, _REMEDY))
        if asked.shape[1] != told.shape[1]:
            msg = f"the embedding model returned vectors of the widths {asked.shape[1]} and {told.shape[1]} for {_WHAT}"
            raise EmbeddingError(msg)
        by_language = [_spreads(asked[rows] @ told[rows].T) for rows in _rows_by_language()]
        telling = [spreads for spreads in by_language if _is_telling(*spreads)] or by_language
        unrelated, matching = (_together(kind) for kind in zip(*telling, strict=True))
        return cls(model, unrelated, matching, asked)

    def unrelated_to(self, rows: Matrix) -> Spread:
        """The scores of (n, dim) unit rows, a user's chunks, with questions that have nothing to do with them.

        A text scores higher with questions of its own language; those of the language that it scores highest with
        are taken, since its real questions will mostly be in that.
        """
        scores = self.questions @ rows.T
        groups = [scores[group] for group in _rows_by_language()]
        nearest = np.argmax([group.mean(axis=0) for group in groups], axis=0)
        taken = np.concatenate([group[:, nearest == number].ravel() for number, group in enumerate(groups)])
        return Spread(float(taken.mean()), float(taken.std()), rows.shape[0])

    def calibrate(self, false_hit_rate: float, focus: FocusShares, own: Spread | None = None) -> Calibration:
        """What follows from the scores.

        The scores of unrelated texts are taken to be normally distributed, and every two of a user's chunks have a
        chance of their own to be hit (Bonferroni): the threshold is the `1 − rate / chances` quantile.

        Args:
            false_hit_rate: The share of questions, of those that nothing saved has to do with, that may be answered.
            focus: How an answer keeps to what matters, in shares of the gap.
            own: What `unrelated_to` said of a user's chunks; its size is their number.
        """
        # Imported where it is needed: its own imports take longer than all of this module.
        from statistics import NormalDist

        mean, std, chunks = self.unrelated.mean, self.unrelated.std, 0 if own is None else own.size
        if own is not None and own.size:
            weight = own.size / (own.size + _AS_GOOD)
            mean += weight * (own.mean - mean)
            std += weight * (own.std - std)
        quantile = NormalDist().inv_cdf(1 - false_hit_rate / min(max(chunks / _ALIKE, 1), _MOST_APART))
        gap = self.matching.mean - self.unrelated.mean
        return Calibration(
            model=self.model,
            unrelated=Spread(mean, std, self.unrelated.size),
            matching=self.matching,
            false_hit_rate=false_hit_rate,
            threshold=round(min(mean + quantile * std, 1.0), 4),
            focus=Focus(focus.prior * gap, focus.words * gap, focus.margin * gap, self.unrelated.mean + gap / 3)
            if self.is_telling
            else None,
            chunks=chunks,
        )

    def dump(self) -> str:
        """As text, for keeping beside the state; questions with half precision, which is ample for a mean."""
        vectors = base64.b64encode(self.questions.astype("<f2").tobytes()).decode("ascii")
        return dump_json({**dict(zip(_KINDS, (self.unrelated, self.matching), strict=True)), "questions": vectors})

    @classmethod
    def load(cls, model: str, text: str) -> ModelScores:
        """Of the text that `dump` gave.

        Raises:
            CorruptDataError: It is not such a text.
        """
        what = f"calibration of {model!r}"
        kept = load_json(text, what)
        try:
            unrelated, matching = (_as_spread(*kept[name]) for name in _KINDS)
            vectors = np.frombuffer(base64.b64decode(kept["questions"], validate=True), dtype="<f2")
            questions = unit_rows(vectors.reshape(len(PAIRS), -1).astype(np.float32))
        except (LookupError, TypeError, ValueError) as error:
            msg = f"stored {what} can't be read back: {error}. calibrate(anew=True) replaces it."
            raise CorruptDataError(msg) from error
        return cls(model, unrelated, matching, questions)


def _as_spread(mean: float, std: float, size: int) -> Spread:
    return Spread(float(mean), float(std), int(size))


def _rows_by_language() -> list[list[int]]:
    return [[row for row, own in enumerate(_LANGUAGES) if own == language] for language in dict.fromkeys(_LANGUAGES)]


def _spreads(scores: Matrix) -> tuple[Spread, Spread]:
    """Of the scores of questions (rows) with passages (columns): unrelated and matching ones."""
    own = np.eye(len(scores), dtype=bool)
    unrelated, matching = scores[~own], scores[own]
    return (
        Spread(float(unrelated.mean()), float(unrelated.std()), unrelated.size),
        Spread(float(matching.mean()), float(matching.std()), matching.size),
    )


def _together(spreads: Sequence[Spread]) -> Spread:
    """Spreads of equal counts as one: how scores differ within a language, not between languages."""
    mean = float(np.mean([spread.mean for spread in spreads]))
    std = float(np.sqrt(np.mean([spread.std**2 for spread in spreads])))
    return Spread(mean, std, sum(spread.size for spread in spreads))


def _is_telling(unrelated: Spread, matching: Spread) -> bool:
    """Whether matches lie more than one standard deviation above unrelated texts."""
    return matching.mean - unrelated.mean > unrelated.std
