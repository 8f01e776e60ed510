"""A picture of the importance of every sub-layer, the dropped ones marked."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from components.pruning.importance import KINDS
from components.pruning.pruner import PruneResult
from components.storage import atomic_file


def plot_importance(result: PruneResult, path: Path, title: str = "") -> None:
    """Write a PNG: bars of 1 - cosine (log scale) by layer for MLPs, attentions and whole layers."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    layers = len(result.scores["mlp"])
    figure = Figure(figsize=(max(6.0, 0.28 * layers + 2), 7.0), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(3, 1, sharex=True)
    names = {"mlp": "MLP", "attention": "attention", "block": "whole layer"}
    for axis, kind in zip(axes, KINDS, strict=True):
        values = np.maximum(result.importance.scores(kind), 1e-6)
        gone = np.isin(np.arange(layers), result.dropped[kind])
        axis.bar(np.arange(layers)[~gone], values[~gone], color="#30638e", label="kept")
        if gone.any():
            axis.bar(np.arange(layers)[gone], values[gone], color="#d1495b", label="dropped")
            axis.legend(frameon=False)
        axis.set_yscale("log")
        axis.set_ylabel("1 − mean cosine")
        axis.set_title(names[kind], loc="left", fontsize=10)
        axis.grid(axis="y", alpha=0.3)
    axes[-1].set_xlabel("layer")
    if title:
        figure.suptitle(title, fontsize=11)
    with atomic_file(path) as temporary:
        figure.savefig(temporary, dpi=110, format="png")
