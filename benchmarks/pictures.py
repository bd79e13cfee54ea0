"""The pictures of the README, drawn from the results."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import facts_line, number
from benchmarks.results import Failed, Figure, Outcome, Results, Row

COLOURS = {"floor": "#9aa0a6", "ours": "#1a7f5a"}
OLDER_COLOURS = ("#d9863d", "#b5442e", "#7a4a9c")
_BAR_STORES = ("memory", "memory+disk", "sqlite+disk", "redis")


def draw_all(results: Results, versions: Sequence[str], folder: Path) -> list[Path]:
    """Draw what there are figures for; returns the files."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    folder.mkdir(parents=True, exist_ok=True)
    pictures: dict[str, Callable[[Results, Sequence[str]], Any]] = {
        "query_by_store.png": _query_by_store,
        "query_by_size.png": _query_by_size,
        "decay_rate.png": _decay_rate,
    }
    return [path for name, draw in pictures.items() if (path := save(draw(results, versions), folder / name, results))]


def save(figure: Any, path: Path, results: Results) -> Path | None:
    """Write a picture with the facts of the run at its foot; nothing where there is no figure."""
    if figure is None:
        return None
    import matplotlib.pyplot as plt

    caption = "\n".join(textwrap.wrap(facts_line(results.facts.get("machine", {})), 100))
    figure.get_layout_engine().set(rect=(0, 0.045, 1, 0.955))  # room for the caption
    figure.text(0.01, 0.005, caption, fontsize=6, color="#666666")
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def _colours(versions: Sequence[str]) -> dict[str, str]:
    return {**dict(zip(versions, OLDER_COLOURS, strict=False)), **COLOURS}


def _outcome(row: Row, series: str) -> Outcome | None:
    return {"floor": row.floor, "ours": row.ours}.get(series) if series in COLOURS else row.older.get(series)


def _name(series: str) -> str:
    return {"floor": "floor", "ours": "this package"}.get(series, f"older {series}")


def _plain_numbers(axis: Any) -> None:
    axis.set_major_formatter("{x:,g}")
    axis.set_minor_formatter("")


def _short(value: float) -> str:
    return f"{value / 1000:,.3g}k" if value >= 10_000 else number(value)


def _query_by_store(results: Results, versions: Sequence[str]) -> Any:
    rows = {row.store: row for row in results.of("query") if row.case == "hit" and row.n == 100}
    chosen = [rows[store] for store in _BAR_STORES if store in rows]
    title = "Added to a warm query, 100 saved documents × 10 chunks (median, ms)"
    return _bars(chosen, [*versions, "floor", "ours"], [row.store for row in chosen], title, _colours(versions))


def _decay_rate(results: Results, versions: Sequence[str]) -> Any:
    rows = [row for row in results.of("decay") if row.case == "one user, rate"]
    titles = [
        f"{row.store}\n{row.n // 1_000_000} million" if row.n >= 1_000_000 else f"{row.store}\n{row.n:,}"
        for row in rows
    ]
    return _bars(
        rows,
        [*versions, "ours"],
        titles,
        "Decay run of one user, by saved documents (records a second)",
        _colours(versions),
    )


def _bars(
    rows: Sequence[Row], series: Sequence[str], labels: Sequence[str], title: str, colours: dict[str, str]
) -> Any:
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    if not rows:
        return None
    figure, axes = plt.subplots(figsize=(6.8, 3.4), layout="constrained")
    width = 0.8 / len(series)
    missing: list[tuple[float, str]] = []
    for place, name in enumerate(series):
        for group, row in enumerate(rows):
            outcome = _outcome(row, name)
            if isinstance(outcome, Figure) and outcome.p50 > 0:
                at = group + (place - (len(series) - 1) / 2) * width
                axes.bar(at, outcome.p50, width * 0.92, color=colours[name])
                axes.annotate(_short(outcome.p50), (at, outcome.p50), ha="center", va="bottom", fontsize=6.5)
            elif isinstance(outcome, Failed) and outcome.why.startswith("over "):
                missing.append((group + (place - (len(series) - 1) / 2) * width, outcome.why))
    handles = [Patch(color=colours[name]) for name in series]
    axes.legend(
        handles,
        [_name(name) for name in series],
        frameon=False,
        fontsize=8,
        ncols=len(series),
        loc="lower left",
        bbox_to_anchor=(0, 1),
    )
    axes.set_yscale("log")
    axes.margins(y=0.12)
    _plain_numbers(axes.yaxis)
    axes.set_ylim(bottom=axes.get_ylim()[0] / 2)
    for at, why in missing:
        axes.annotate(why, (at, axes.get_ylim()[0] * 1.2), ha="center", va="bottom", fontsize=6.5, rotation=90)
    axes.set_xticks(range(len(rows)), labels, fontsize=8)
    axes.tick_params(axis="x", length=0)
    figure.suptitle(title, fontsize=10, x=0.01, ha="left")
    return figure


def _query_by_size(results: Results, versions: Sequence[str]) -> Any:
    import matplotlib.pyplot as plt

    rows = [row for row in results.of("query") if row.case == "hit"]
    stores = [store for store in ("memory", "sqlite+disk") if len({row.n for row in rows if row.store == store}) > 1]
    if not stores:
        return None
    figure, panels = plt.subplots(1, len(stores), figsize=(6.8, 3.4), layout="constrained", sharey=True, squeeze=False)
    colours = _colours(versions)
    for axes, store in zip(panels[0], stores, strict=True):
        for name in (*versions, "floor", "ours"):
            points = [
                (row.n, found.p50)
                for row in rows
                if row.store == store and isinstance(found := _outcome(row, name), Figure)
            ]
            axes.plot(
                *zip(*sorted(points), strict=True) if points else ((), ()),
                "o-",
                ms=3.5,
                color=colours[name],
                label=_name(name),
            )
        axes.set(xscale="log", yscale="log", xlabel="saved documents")
        _plain_numbers(axes.xaxis)
        _plain_numbers(axes.yaxis)
        axes.set_title(store, fontsize=9)
    panels[0][0].legend(frameon=False, fontsize=8)
    figure.suptitle("Added to a warm query by what is saved (median, ms)", fontsize=10, x=0.01, ha="left")
    return figure
