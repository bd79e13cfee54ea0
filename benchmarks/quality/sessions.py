"""Who asks what, and in which order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from benchmarks.quality.articles import Article, Question

ORDERS = ("runs", "shuffled")
USERS = 8
ARTICLES_EACH = 6
RUN = 5
"""About so many questions in a row are about one article."""
_SEED = 20


@dataclass(frozen=True)
class Session:
    """A user, and the questions that they ask, in order."""

    user_id: str
    questions: tuple[Question, ...]


def make_sessions(
    articles: Sequence[Article], order: str = "runs", users: int = USERS, longest: int | None = None
) -> list[Session]:
    """Deal the articles to users, and put the questions of each user in an order.

    By the same numbers always: the same users get the same articles, in each language.

    Args:
        articles: Those of one language.
        order: `shuffled`: all questions of a user at random. `runs`: a user stays with an article for about five
            questions, then goes on to another, and comes back to it later.
        users: So many, with six articles each; fewer where there are not as many articles.
        longest: Questions of a user at most.
    """
    dealt = np.random.default_rng(_SEED).permutation(len(articles))
    sessions = []
    for user in range(users):
        own = [articles[at] for at in dealt[user * ARTICLES_EACH : (user + 1) * ARTICLES_EACH]]
        if own:
            questions = _in_order(own, order, np.random.default_rng((_SEED, user)))
            sessions.append(Session(f"user-{user + 1}", tuple(questions[:longest])))
    return sessions


def _in_order(articles: Sequence[Article], order: str, generator: np.random.Generator) -> list[Question]:
    size = 1 if order == "shuffled" else RUN
    runs = [run for article in articles for run in _cut(article.questions, size)]
    return [question for at in generator.permutation(len(runs)) for question in runs[at]]


def _cut(questions: Sequence[Question], size: int) -> list[Sequence[Question]]:
    """Cut questions into runs of about a size, none of them much shorter than the others."""
    count = max(round(len(questions) / size), 1)
    edges = [len(questions) * at // count for at in range(count + 1)]
    return [questions[start:stop] for start, stop in pairwise(edges)]
