"""The report's drawings as PNG files, for slides and for the MLflow page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from components.storage import atomic_file

UP, DOWN, BAR, SOFT = "#2f7d4f", "#b4482f", "#35618f", "#6a6f76"


def gains_png(path: Path, differences: Sequence[float], title: str) -> None:
    """One bar a query, sorted from most gained to most lost."""
    figure, axes = _figure(title)
    ordered = sorted(differences, reverse=True)
    axes.bar(range(len(ordered)), ordered, width=0.85, color=[UP if value > 0 else DOWN for value in ordered])
    axes.axhline(0, color=SOFT, linewidth=0.8)
    axes.set_xlabel("queries, sorted")
    axes.set_ylabel("difference in nDCG@10")
    _save(figure, path)


def systems_png(path: Path, metrics: Mapping[str, Mapping[str, float]], names: Sequence[str], title: str) -> None:
    """A group of bars a measure, a bar a system."""
    figure, axes = _figure(title)
    colours = [SOFT, "#9bb7d4", "#5f8fbf", BAR, UP, DOWN]
    width = 0.8 / max(1, len(metrics))
    for i, (system, values) in enumerate(metrics.items()):
        places = [place + (i - (len(metrics) - 1) / 2) * width for place in range(len(names))]
        bars = axes.bar(places, [values[name] for name in names], width * 0.92, label=system, color=colours[i % 6])
        axes.bar_label(bars, fmt="%.3f", fontsize=7, color=SOFT, padding=1)
    axes.set_xticks(range(len(names)), names)
    axes.legend(frameon=False, ncols=max(1, len(metrics)), loc="upper left", bbox_to_anchor=(0, -0.08))
    _save(figure, path)


def shares_png(path: Path, curve: Sequence[tuple[float, float]], chosen: float, title: str) -> None:
    """nDCG@10 on dev pairs over the dense share, the chosen share marked."""
    figure, axes = _figure(title)
    axes.plot([share for share, _ in curve], [value for _, value in curve], color=BAR, marker="o")
    axes.axvline(chosen, color=UP, linestyle="--", linewidth=1)
    axes.set_xlabel("dense share")
    axes.set_ylabel("nDCG@10 on dev pairs")
    _save(figure, path)


def _figure(title: str):  # type: ignore[no-untyped-def]
    figure = Figure(figsize=(9, 4), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_title(title, loc="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _save(figure: Figure, path: Path) -> None:
    with atomic_file(path) as temporary:
        figure.savefig(temporary, format="png")
