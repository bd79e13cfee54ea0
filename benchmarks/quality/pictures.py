"""The pictures of the README, drawn from the results: one of each kind for each language of users."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.pictures import COLOURS, OLDER_COLOURS, save
from benchmarks.quality.measures import QUARTERS, Estimate, Part, Summary
from benchmarks.quality.older_release import NAME as OLDER
from benchmarks.quality.results import Experiment, Quality
from benchmarks.quality.systems import KEYWORD, OURS, PLAIN, REFERENCE, K
from benchmarks.results import Results

_WIDTH = 7.4
_FAR_BELOW = 0.12
"""What lies so far below the wrapped retriever is drawn at the edge, with its value: it would flatten the rest."""
_NAMED = {1: (15, -3), 2: (8, -9), 5: (10, -9), 10: (0, 4)}
"""The `k` that are written beside the curve of the wrapped retriever, and where, in points."""


@dataclass(frozen=True)
class _Style:
    """How a system is drawn; told apart by shape and by lightness too, not by hue alone."""

    colour: str
    marker: str
    size: float = 6
    filled: bool = True
    line: str = "-"
    width: float = 1.4

    @property
    def of_points(self) -> dict[str, Any]:
        """How a point of it looks."""
        return {
            "color": self.colour,
            "marker": self.marker,
            "markersize": self.size,
            "markerfacecolor": self.colour if self.filled else "none",
            "markeredgewidth": 1.4,
        }

    @property
    def of_lines(self) -> dict[str, Any]:
        """How a line of it looks."""
        return {**self.of_points, "linestyle": self.line, "linewidth": self.width}


# Where two often lie on one another, one is open or wide and the other is thin: both can be seen.
_PLAIN_CURVE = _Style(COLOURS["floor"], ".", size=5)
_STYLES = {
    REFERENCE: _Style("#c3c7cb", "", width=5),
    "default": _Style(OLDER_COLOURS[2], "s", size=8, filled=False),
    OLDER: _Style(OLDER_COLOURS[0], "x", line="--"),
    "auto": _Style("#3b78b8", "^"),
    "auto + on_miss": _Style("#3b78b8", "v", size=8, filled=False),
    "auto + focused": _Style(COLOURS["ours"], "o", size=8, filled=False, width=2.6),
    "auto + focused + on_miss": _Style("#0d2e22", "+", line=":"),
    "auto + focused + neighbours": _Style(COLOURS["ours"], "D"),
    KEYWORD: _Style("#5c5c5c", "*", size=8, filled=False),
}
_ON_THE_WAY = (REFERENCE, "default", OLDER, "auto + focused", "auto + focused + on_miss")


def draw_all(quality: Quality, folder: Path) -> list[Path]:
    """Draw what there are figures for; returns the files."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    folder.mkdir(parents=True, exist_ok=True)
    kinds: dict[str, Callable[[Sequence[Experiment], str], Any]] = {
        "quality_by_characters": _by_characters,
        "quality_on_the_way": _on_the_way,
    }
    results = Results({"machine": quality.facts})
    drawn = []
    for language in quality.languages():
        for kind, draw in kinds.items():
            figure = draw(quality.of_language(language), language)
            path = save(figure, folder / f"{kind}_{language}.png", results)
            drawn += [path] if path is not None else []
    return drawn


# -- recall and rank against size -------------------------------------------------------------------


def _by_characters(experiments: Sequence[Experiment], language: str) -> Any:
    figures: dict[str, Callable[[Summary], Estimate]] = {
        "answer found": lambda summary: summary.recall,
        "mean reciprocal rank": lambda summary: summary.mrr,
    }
    figure, panels, below = _panels(experiments, list(figures), 4.9)
    for column, experiment in enumerate(experiments):
        for row, estimate in enumerate(figures.values()):
            _draw_sizes(panels[row][column], experiment, estimate)
        panels[-1][column].set_xlabel("characters of context")
    shown = [name for name in _STYLES if name != REFERENCE and _takes_part(name, experiments)]
    styles = {"the wrapped retriever alone": _PLAIN_CURVE.of_lines}
    styles |= {_label(name): {**_STYLES[name].of_points, "linestyle": "none"} for name in shown}
    _legend(below, styles)
    title = "Is the answer in the context, how far up, and in how much text?"
    figure.suptitle(f"{title} (users of “{language}”, 95 % intervals)", fontsize=10, x=0.01, ha="left")
    return figure


def _draw_sizes(axes: Any, experiment: Experiment, estimate: Callable[[Summary], Estimate]) -> None:
    plain = {k: summary for k, name in enumerate(PLAIN, 1) if (summary := experiment.summary(name)) is not None}
    curve = {k: (summary.characters.value, estimate(summary).value) for k, summary in plain.items()}
    axes.plot(*zip(*curve.values(), strict=True), **_PLAIN_CURVE.of_lines)
    for k, offset in _NAMED.items():
        if k in curve:
            axes.annotate(
                f"k={k}", curve[k], offset, textcoords="offset points", fontsize=6.5, ha="center", color="#5f6469"
            )
    values = [value for _, value in curve.values()]
    edge = min(*values, values[-1] - _FAR_BELOW)
    far: list[tuple[float, _Style, float]] = []
    for name, style in _STYLES.items():
        summary = experiment.summary(name)
        if summary is None or name == REFERENCE:
            continue
        found, size = estimate(summary), summary.characters.value
        if found.value < edge:
            far.append((size, style, found.value))
            continue
        spread = [[found.value - found.low], [found.high - found.value]]
        axes.errorbar(size, found.value, spread, fmt="none", ecolor=style.colour, elinewidth=0.7)
        axes.plot(size, found.value, **style.of_points, zorder=4, clip_on=False)
    sizes = [item.characters.value for item in experiment.systems.values() if isinstance(item, Summary)]
    axes.set(xscale="log", xlim=(0.75 * min(sizes), 1.4 * max(sizes)))
    axes.set_xticks([tick for tick in _TICKS if 0.75 * min(sizes) <= tick <= 1.4 * max(sizes)])
    axes.xaxis.set_major_formatter(_thousands)
    axes.xaxis.set_minor_formatter("")
    axes.margins(y=0.09)
    _draw_far(axes, far)


_TICKS = (500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000)


def _thousands(value: float, _: object = None) -> str:
    return f"{value / 1000:g}k" if value else "0"


def _draw_far(axes: Any, far: Sequence[tuple[float, _Style, float]]) -> None:
    """What lies below the panel, at its lower edge."""
    low, high = axes.get_ylim()
    if far:
        axes.set_ylim(low - 0.15 * (high - low), high)
    for size, style, value in far:
        place = (size, low - 0.07 * (high - low))
        axes.plot(*place, **style.of_points, zorder=4)
        axes.annotate(
            f"↓ {value:.2f}",
            place,
            (-6, 0),
            textcoords="offset points",
            fontsize=7,
            ha="right",
            va="center",
            color=style.colour,
        )


# -- from the first to the last quarter -------------------------------------------------------------


def _on_the_way(experiments: Sequence[Experiment], language: str) -> Any:
    figures: dict[str, Callable[[Part], float]] = {
        "characters": lambda part: part.characters,
        "from saved copies": lambda part: part.from_cache,
        "mean reciprocal rank": lambda part: part.mrr,
    }
    figure, panels, below = _panels(experiments, list(figures), 5.9)
    quarters = range(1, QUARTERS + 1)
    shown = [name for name in _ON_THE_WAY if _takes_part(name, experiments)]
    for column, experiment in enumerate(experiments):
        for row, measure in enumerate(figures.values()):
            axes = panels[row][column]
            for name in shown:
                summary = experiment.summary(name)
                if summary is not None:
                    values = [measure(part) for part in summary.quarters]
                    axes.plot(quarters, values, **_STYLES[name].of_lines)
            axes.set_xticks(quarters)
            axes.set_xlim(0.8, QUARTERS + 0.2)
        panels[0][column].set_ylim(bottom=0)
        panels[0][column].yaxis.set_major_formatter(_thousands)
        panels[1][column].set_ylim(-0.05, 1.05)
        panels[1][column].yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        panels[-1][column].set_xlabel("quarter of the session")
    _legend(below, {_label(name): _STYLES[name].of_lines for name in shown})
    title = "From the first to the last quarter of what a user asks"
    figure.suptitle(f"{title} (users of “{language}”)", fontsize=10, x=0.01, ha="left")
    return figure


# -- what both share --------------------------------------------------------------------------------


def _panels(experiments: Sequence[Experiment], rows: Sequence[str], height: float) -> tuple[Any, list[list[Any]], Any]:
    """A figure, a panel for each figure and model, and the room below them."""
    import matplotlib.pyplot as plt

    figure = plt.figure(figsize=(_WIDTH, height), layout="constrained")
    grid = figure.add_gridspec(len(rows) + 1, len(experiments), height_ratios=[*([1.0] * len(rows)), 0.3])
    panels = [[figure.add_subplot(grid[row, column]) for column in range(len(experiments))] for row in range(len(rows))]
    for row, name in enumerate(rows):
        panels[row][0].set_ylabel(name)
    for column, experiment in enumerate(experiments):
        panels[0][column].set_title(experiment.model, fontsize=9)
    below = figure.add_subplot(grid[len(rows), :])
    below.set_axis_off()
    return figure, panels, below


def _takes_part(name: str, experiments: Sequence[Experiment]) -> bool:
    return any(experiment.summary(name) is not None for experiment in experiments)


def _label(name: str) -> str:
    if name == REFERENCE:
        return f"the wrapped retriever alone, k={K}"
    return f"ours: {name}" if name in OURS else name


def _legend(axes: Any, styles: dict[str, dict[str, Any]]) -> None:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], **style) for style in styles.values()]
    axes.legend(handles, list(styles), loc="center", ncols=3, frameon=False, fontsize=8)
