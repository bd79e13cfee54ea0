"""Measure what the personal layer does to the quality of the context.

python -m benchmarks.quality xquad.en.json xquad.de.json xquad.es.json
python -m benchmarks.quality xquad.*.json --users 2 --questions 40 --no-older    # a quick look
python -m benchmarks.quality xquad.*.json --languages de,es --no-older --set false_hit_rate=0.02 --out out/tried.json
python -m benchmarks.quality report --markdown --pictures benchmarks/pictures    # once more, from the JSON file

The files are in the layout of XQuAD (https://github.com/google-deepmind/xquad); a file's language is the part of its
name before `.json`. All paragraphs of all files are one collection; users ask in one language, so that what the others
say about the same things is in the way. The first run embeds every text with every model, which takes some minutes; the
vectors are kept beside the results, may be deleted at any time, and are made again where a text has none.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.older import Environment
    from benchmarks.quality.articles import Article
    from benchmarks.results import Failed

_OUT = Path(__file__).parents[1] / "out" / "quality.json"
_REPORT = "report"
_FEWEST = 4
"""Questions of a session that can be cut into quarters."""


def _parser() -> argparse.ArgumentParser:
    from benchmarks.quality.models import MODELS
    from benchmarks.quality.sessions import ARTICLES_EACH, ORDERS, USERS
    from benchmarks.quality.systems import OURS

    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.quality", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("paths", nargs="+", metavar="path", help="files like xquad.en.json; or `report`")
    parser.add_argument("--models", type=_names, default=MODELS, help=f"of {', '.join(MODELS)}")
    parser.add_argument("--languages", type=_names, help="whose users ask (default: those of all files)")
    parser.add_argument("--systems", type=_names, default=tuple(OURS), help=f"of ours: {', '.join(OURS)}")
    parser.add_argument("--users", type=int, default=USERS, help=f"with {ARTICLES_EACH} articles each")
    parser.add_argument("--questions", type=int, help="of a user at most (default: all)")
    parser.add_argument("--order", choices=ORDERS, default=ORDERS[0], help="of the questions of a user")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        type=_setting,
        metavar="NAME=VALUE",
        help="a setting of all of ours, also decay.NAME; NAME= alone leaves it to the package",
    )
    parser.add_argument(
        "--out", type=Path, default=_OUT, help="the JSON file of the results; vectors are kept in its folder"
    )
    parser.add_argument("--pictures", type=Path, help="folder of the pictures (default: the one of --out)")
    parser.add_argument("--markdown", action="store_true", help="print the README's tables as well")
    parser.add_argument("--no-older", action="store_true", help="without the older release")
    parser.add_argument(
        "--environments", type=Path, help="keep the older release's environment here (default: removed)"
    )
    return parser


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(","))


def _setting(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        msg = f"{text!r} is not NAME=VALUE"
        raise argparse.ArgumentTypeError(msg)
    try:
        return name, json.loads(value) if value else None
    except ValueError:
        return name, value


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    # Asked to end, it still stops the older release.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if options.out.is_dir():
        parser.error(f"--out is a file, and {options.out} is a folder")
    if options.paths != [_REPORT]:
        _check(parser, options)
        articles = _read(parser, options)
        _measure(articles, options)
    return _report(options)


def _check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    from benchmarks.quality.models import MODELS
    from benchmarks.quality.systems import OURS

    for name in (*(set(options.models) - set(MODELS)), *(set(options.systems) - set(OURS))):
        parser.error(f"there is no {name}")
    if options.users < 1 or (options.questions is not None and options.questions < _FEWEST):
        parser.error(f"at least one user and {_FEWEST} questions are needed")


def _read(parser: argparse.ArgumentParser, options: argparse.Namespace) -> list[Article]:
    from benchmarks.quality.articles import language_of, read_articles

    paths = [Path(path) for path in options.paths]
    languages = [language_of(path) for path in paths]
    options.languages = options.languages or tuple(languages)
    if len(set(languages)) < len(languages):
        parser.error(f"two files of one language: {', '.join(languages)}")
    for language in set(options.languages) - set(languages):
        parser.error(f"there is no file of the language {language}")
    try:
        return [article for path in paths for article in read_articles(path)]
    except (OSError, ValueError) as error:
        parser.error(str(error))


def _measure(articles: Sequence[Article], options: argparse.Namespace) -> None:
    from benchmarks.quality.articles import chunks_of
    from benchmarks.quality.collection import Collection
    from benchmarks.quality.experiment import Plan, run_experiment
    from benchmarks.quality.models import Models
    from benchmarks.quality.results import Quality
    from benchmarks.report import machine_facts, say

    chunks = chunks_of(articles)
    models = Models(options.out.parent, [chunk.page_content for chunk in chunks])
    quality = Quality.read(options.out)
    setup = _setup(articles, options)
    if quality.setup != setup:
        if quality.experiments:
            say(f"{options.out} is of another set-up and will be replaced")
        quality = Quality(setup=setup)
    quality.facts = machine_facts()
    with ExitStack() as closing:
        older = None if options.no_older else _older(options, closing)
        changes = dict(options.set)
        plan = Plan(options.order, options.users, options.questions, options.systems, changes, older)
        for model in options.models:
            quality.failed_models.pop(model, None)
            try:
                embeddings = models.get(model)
            except (ImportError, OSError) as error:
                quality.failed_models[model] = str(error)
                say(f"{model}: {error}")
                continue
            collection = Collection(embeddings, chunks)
            for language in options.languages:
                quality.replace(run_experiment(model, language, articles, embeddings, collection, plan))
                quality.write(options.out)
    quality.write(options.out)


def _setup(articles: Sequence[Article], options: argparse.Namespace) -> dict[str, Any]:
    from benchmarks.quality.sessions import make_sessions

    first = [article for article in articles if article.language == options.languages[0]]
    sessions = make_sessions(first, options.order, options.users, options.questions)
    return {
        "collection": sorted({article.language for article in articles}),
        "chunks": sum(len(article.paragraphs) for article in articles),
        "users": len(sessions),
        "questions": sum(len(session.questions) for session in sessions),
        "order": options.order,
        "changes": dict(options.set),
    }


def _older(options: argparse.Namespace, closing: ExitStack) -> Environment | Failed:
    from benchmarks.older import install_all
    from benchmarks.quality.older_release import VERSION
    from benchmarks.report import say

    root = options.environments or Path(closing.enter_context(tempfile.TemporaryDirectory(prefix="rag_wiki-older-")))
    say(f"installing langchain-rag-wiki {VERSION} in an environment of its own")
    return install_all([VERSION], root)[VERSION]


def _report(options: argparse.Namespace) -> int:
    from benchmarks.quality import pictures, report
    from benchmarks.quality.results import Quality
    from benchmarks.report import facts_line, say

    quality = Quality.read(options.out)
    if not quality.experiments:
        say(f"there are no results in {options.out}")
        return 1
    print(f"{facts_line(quality.facts)}\n{report.setup_line(quality)}\n")
    for experiment in quality.experiments:
        report.print_experiment(experiment)
        print()
    for model, why in quality.failed_models.items():
        print(f"{model} failed: {why}")
    print(report.verdict(quality.experiments))
    if options.markdown:
        print()
        report.print_markdown(quality)
    drawn = pictures.draw_all(quality, options.pictures or options.out.parent)
    say(f"results in {options.out}, pictures: {', '.join(item.name for item in drawn) or 'none'}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
