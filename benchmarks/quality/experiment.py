"""One experiment: every system goes through the same sessions, over the same collection and vectors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.older import Environment
from benchmarks.plan import progress
from benchmarks.quality.articles import Article
from benchmarks.quality.collection import Collection
from benchmarks.quality.measures import Resampling, summarise
from benchmarks.quality.models import Prepared
from benchmarks.quality.observations import Course
from benchmarks.quality.older_release import NAME, run_older
from benchmarks.quality.results import Experiment
from benchmarks.quality.sessions import make_sessions
from benchmarks.quality.systems import REFERENCE, Situation, run_ours, run_plain
from benchmarks.results import Failed


@dataclass(frozen=True)
class Plan:
    """What is asked of whom, and which systems take part."""

    order: str
    users: int
    longest: int | None
    """Questions of a user at most."""
    ours: Sequence[str]
    changes: Mapping[str, Any]
    """Settings of all of ours."""
    older: Environment | Failed | None = None


def run_experiment(
    model: str,
    language: str,
    articles: Sequence[Article],
    embeddings: Prepared,
    collection: Collection,
    plan: Plan,
) -> Experiment:
    """Let every system go through the sessions of a language's users; one that fails leaves the others alone."""
    own = [article for article in articles if article.language == language]
    sessions = make_sessions(own, plan.order, plan.users, plan.longest)
    embeddings.prepare("query", [question.text for session in sessions for question in session.questions])
    situation = Situation(sessions, {article.doc_id: article for article in articles}, embeddings, collection)
    resampling = Resampling([len(session.questions) for session in sessions])
    experiment, plain = Experiment(model, language), run_plain(situation)
    for name, course in plain.items():
        experiment.systems[name] = summarise(course, plain[REFERENCE], resampling)
    systems = _systems(situation, plan)
    for name in progress(list(systems), f"{model}, {language}"):
        found = _tried(systems[name])
        experiment.systems[name] = (
            found if isinstance(found, Failed) else summarise(found, plain[REFERENCE], resampling)
        )
        embeddings.keep()
    return experiment


def _systems(situation: Situation, plan: Plan) -> dict[str, Callable[[], Course | Failed]]:
    systems: dict[str, Callable[[], Course | Failed]] = {}
    if plan.older is not None:
        systems[NAME] = partial(_run_older, situation, plan.older)
    return systems | {name: partial(run_ours, situation, name, plan.changes) for name in plan.ours}


def _run_older(situation: Situation, environment: Environment | Failed) -> Course | Failed:
    return environment if isinstance(environment, Failed) else run_older(situation, environment)


def _tried(run: Callable[[], Course | Failed]) -> Course | Failed:
    try:
        return run()
    except Exception as error:  # whatever it is, the other systems can be measured
        return Failed(f"{type(error).__name__}: {error}"[:200])
