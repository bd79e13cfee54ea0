"""Measure what the layer costs, beside the older releases and beside what cannot be avoided.

python -m benchmarks --quick          # everything, small: about two minutes
python -m benchmarks                  # everything
python -m benchmarks query --no-older
python -m benchmarks report           # tables and pictures once more, from the JSON file
python -m benchmarks --markdown --pictures benchmarks/pictures   # what the README shows
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

for _name in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE"):
    # They choose another kernel than the one that the library takes by itself. Before numpy is loaded, and both:
    # one without the other is worse than none.
    os.environ.pop(_name, None)

MEASURES = ("query", "batch", "save", "restart", "decay", "import", "memory", "concurrency")
STORES = ("memory", "memory+disk", "sqlite", "sqlite+disk", "redis", "postgres")
_MODULES = {"import": "imports"}
_OUT = Path(__file__).with_name("out")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "measure", nargs="*", default=["all"], metavar="measure", help=f"{', '.join(MEASURES)}, all, report"
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="fewer sizes, fewer repeats: about two minutes")
    size.add_argument("--full", action="store_true", help="everything (the default)")
    parser.add_argument("--out", type=Path, default=_OUT, help="folder of results.json (default: benchmarks/out)")
    parser.add_argument("--pictures", type=Path, help="folder of the pictures (default: the one of --out)")
    parser.add_argument("--markdown", action="store_true", help="print the README's table as well")
    parser.add_argument("--older", default="0.2.2,0.2.4", help="older releases to compare with")
    parser.add_argument("--no-older", action="store_true", help="without them")
    parser.add_argument(
        "--environments", type=Path, help="keep the older releases' environments here (default: removed)"
    )
    parser.add_argument("--stores", default=",".join(STORES), help=f"of {', '.join(STORES)}")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    named = tuple(name for name in options.measure if name not in ("all", "report"))
    wanted = MEASURES if "all" in options.measure else named
    stores = tuple(options.stores.split(","))
    for name in (*(set(options.measure) - {*MEASURES, "all", "report"}), *(set(stores) - set(STORES))):
        parser.error(f"there is no {name}")
    versions = () if options.no_older else tuple(options.older.split(","))
    # Asked to end, it still stops its servers and processes.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if "report" not in options.measure:
        _measure(wanted, stores, versions, options)
    return _report(wanted, options)


def _measure(
    wanted: Sequence[str], stores: tuple[str, ...], versions: Sequence[str], options: argparse.Namespace
) -> None:
    from benchmarks import report
    from benchmarks.older import install_all
    from benchmarks.plan import FULL, QUICK, Bench
    from benchmarks.results import Failed, Results
    from benchmarks.stores import Servers

    path = options.out / "results.json"
    results = Results.read(path)
    with ExitStack() as closing:
        servers = closing.enter_context(Servers())
        root = options.environments or Path(
            closing.enter_context(tempfile.TemporaryDirectory(prefix="rag_wiki-older-"))
        )
        if versions:
            report.say(f"installing langchain-rag-wiki {', '.join(versions)}, each in an environment of its own")
        older = install_all(versions, root)
        for version, installed in older.items():
            if isinstance(installed, Failed):
                report.say(f"{version}: {installed.why}")
        bench = Bench(QUICK if options.quick else FULL, stores, servers, older)
        facts = {"quick": options.quick, "older": report.environments_facts(older.values())}
        results.facts.update(
            machine=report.machine_facts(), versions=list(versions) or results.facts.get("versions", [])
        )
        for name in wanted:
            module = importlib.import_module(f"benchmarks.measures.{_MODULES.get(name, name)}")
            results.replace(name, module.run(bench))
            results.facts.setdefault("measures", {})[name] = {**facts, "at": results.facts["machine"]["at"]}
            results.write(path)


def _report(wanted: Sequence[str], options: argparse.Namespace) -> int:
    from benchmarks import pictures, report
    from benchmarks.results import Results

    path = options.out / "results.json"
    results = Results.read(path)
    if not results.rows:
        report.say(f"there are no results in {path}")
        return 1
    versions = results.facts.get("versions", [])
    measures = wanted or MEASURES
    print(report.facts_line(results.facts["machine"]) + "\n")
    report.print_results(results, versions, measures)
    print(report.verdict([row for name in measures for row in results.of(name)]))
    if options.markdown:
        print()
        report.print_markdown(results, versions)
    drawn = pictures.draw_all(results, versions, options.pictures or options.out)
    report.say(f"results in {path}, pictures: {', '.join(item.name for item in drawn) or 'none'}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
