"""The tables on the console, and the one of the README."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from benchmarks.quality.bars import Judged, judge
from benchmarks.quality.measures import Estimate, Part, Summary
from benchmarks.quality.results import Experiment, Quality
from benchmarks.quality.systems import PLAIN, REFERENCE
from benchmarks.results import Failed

_MOST_MODELS = 2
"""Models side by side in the README's table."""
_README_PLAIN = ("plain k=1", "plain k=3", REFERENCE, "plain k=10")


def setup_line(quality: Quality) -> str:
    """What was asked of whom, in one line."""
    setup = quality.setup
    changes = "".join(f", {name}={value}" for name, value in setup["changes"].items())
    return (
        f"{setup['users']} users, {setup['questions']:,} questions in each language, order {setup['order']}, "
        f"{setup['chunks']:,} chunks in {', '.join(setup['collection'])}{changes}"
    )


def print_experiment(experiment: Experiment) -> None:
    """The tables of an experiment."""
    title = f"{experiment.model}, {experiment.language}"
    print(f"{title}\n{'=' * len(title)}")
    shown = {name: found for name, found in experiment.systems.items() if isinstance(found, Summary)}
    _print_table(_QUALITY, shown)
    around = {name: summary for name, summary in shown.items() if name not in PLAIN or name == REFERENCE}
    _print_table(_COPIES, around)
    _print_table(_COURSE, around)
    for name, found in experiment.systems.items():
        if isinstance(found, Failed):
            print(f"  {name} failed: {found.why}")
    judged = judge(experiment)
    if judged:
        print()
        _print_cells(
            ["bar of", "figure", "", "reached", "met"],
            [[item.system, item.figure, _bar(item), _reached(item), "yes" if item.met else "NO"] for item in judged],
        )


def verdict(experiments: Iterable[Experiment]) -> str:
    """How many bars are met, and which are not."""
    judged = [item for experiment in experiments for item in judge(experiment)]
    missed = [item for item in judged if not item.met]
    lines = [f"{len(judged) - len(missed)} of {len(judged)} bars met"]
    lines += [
        f"  missed  {item.model}, {item.language}: {item.system}, {item.figure}: {_reached(item)}, bar {_bar(item)}"
        for item in missed
    ]
    return "\n".join(lines)


def print_markdown(quality: Quality) -> None:
    """The README's table: a row for each system, up to two models side by side; one table for each language."""
    for language in quality.languages():
        experiments = quality.of_language(language)[:_MOST_MODELS]
        names = dict.fromkeys(name for experiment in experiments for name in experiment.systems)
        heads = [f"{experiment.model}: answer found" for experiment in experiments]
        print(f"Questions in `{language}`:\n")
        print("| | " + " | ".join(f"{head} | MRR | characters | asked" for head in heads) + " |")
        print("|---|" + "---:|" * (4 * len(experiments)))
        for name in names:
            summaries = [experiment.summary(name) for experiment in experiments]
            if (name in PLAIN and name not in _README_PLAIN) or not any(summaries):
                continue
            print(f"| {name} | " + " | ".join(cell for found in summaries for cell in _markdown_cells(found)) + " |")
        print()


def _markdown_cells(summary: Summary | None) -> list[str]:
    if summary is None:
        return ["–"] * 4
    asked = 1 - summary.whole.unasked
    return [
        f"{summary.recall.value:.1%}".replace("%", " %"),
        f"{summary.mrr.value:.3f}",
        f"{summary.characters.value:,.0f}",
        f"{asked:.0%}".replace("%", " %"),
    ]


# -- cells -----------------------------------------------------------------------------------------


def _estimate(estimate: Estimate) -> str:
    return f"{estimate.value:.3f} [{estimate.low:.3f}, {estimate.high:.3f}]"


def _gain(estimate: Estimate) -> str:
    return f"{estimate.value:+.3f} [{estimate.low:+.3f}, {estimate.high:+.3f}]"


def _size(estimate: Estimate) -> str:
    return f"{estimate.value:,.0f} [{estimate.low:,.0f}, {estimate.high:,.0f}]"


def _share(value: float) -> str:
    return f"{value:.1%}"


def _by_quarter(parts: Sequence[Part], figure: Callable[[Part], str]) -> str:
    return " → ".join(figure(part) for part in parts)


_Columns = dict[str, Callable[[Summary], str]]
_QUALITY: _Columns = {
    "recall [95 %]": lambda item: _estimate(item.recall),
    f"beyond {REFERENCE}": lambda item: _gain(item.recall_gain),
    "MRR [95 %]": lambda item: _estimate(item.mrr),
    f"MRR beyond {REFERENCE}": lambda item: _gain(item.mrr_gain),
    "characters [95 %]": lambda item: _size(item.characters),
    "pieces": lambda item: f"{item.pieces:.1f}",
}
_COPIES: _Columns = {
    "first from copy": lambda item: _share(item.first_from_cache),
    "false hits": lambda item: _share(item.false_hits),
    "from copies": lambda item: _share(item.whole.from_cache),
    "not asked": lambda item: _share(item.whole.unasked),
    "2nd half: not asked": lambda item: _share(item.second_half.unasked),
    "2nd half: recall": lambda item: f"{item.second_half.recall:.3f}",
    "2nd half: MRR": lambda item: f"{item.second_half.mrr:.3f}",
    "saved": lambda item: f"{item.saved:,}",
    "suggested": lambda item: f"{item.suggestions:,}",
    "let go": lambda item: f"{item.let_go:,}",
}
_COURSE: _Columns = {
    "recall, by quarter": lambda item: _by_quarter(item.quarters, lambda part: f"{part.recall:.3f}"),
    "MRR, by quarter": lambda item: _by_quarter(item.quarters, lambda part: f"{part.mrr:.3f}"),
    "characters, by quarter": lambda item: _by_quarter(item.quarters, lambda part: f"{part.characters:,.0f}"),
    "searches a question": lambda item: _by_quarter(item.quarters, lambda part: f"{part.searches:.2f}"),
}


def _bar(item: Judged) -> str:
    return f"{'≥' if item.target.at_least else '≤'} {_figure(item.target.limit)}"


def _reached(item: Judged) -> str:
    return "failed" if item.value is None else _figure(item.value)


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value > 1 else f"{value:.4f}"


def _print_table(columns: _Columns, systems: dict[str, Summary]) -> None:
    _print_cells(
        ["", *columns], [[name, *(cell(summary) for cell in columns.values())] for name, summary in systems.items()]
    )
    print()


def _print_cells(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(line[column]) for line in (heads, *rows)) for column in range(len(heads))]
    for number, line in enumerate((heads, *rows)):
        cells = [
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())
        if number == 0:
            print("  ".join("─" * width for width in widths))
