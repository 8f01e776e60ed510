"""One model, pruned as a `PruneConfig` says: score, drop, narrow; the result names everything by the original layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from components.pruning.architecture import layers_of, layout_of
from components.pruning.config import PruneConfig
from components.pruning.depth import drop, order_of_dropping
from components.pruning.importance import Batch, Importance, Kind, score_sublayers
from components.pruning.neurons import score_neurons
from components.pruning.width import rank_neurons, slice_widths

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Progress = Callable[[str], None]

SINK_GROWTH = 10.0
"""Dropping a sub-layer that grows a token's state this much is worth a warning."""


@dataclass(frozen=True)
class PruneResult:
    """What was measured and what was dropped. Layer numbers are those of the full model."""

    importance: Importance
    """Of the intact model."""
    scores: dict[Kind, np.ndarray]
    """float64 [L] a kind: what the order was made from (`prune.method`); equals the importance by default."""
    order: dict[Kind, list[int]]
    """All layers, least important first; the dropped ones in the order of dropping, then the others."""
    dropped: dict[Kind, list[int]]
    """In the order of dropping."""
    protected: dict[Kind, list[int]]
    """Never candidates, because of `prune.protect_growth`; last in the order."""
    kept_layers: list[int]
    """Full-model numbers of the layers that remain; position = number in the pruned model."""
    widths: list[int]
    """Neurons of each remaining layer's MLP; 0 where it was dropped."""
    neurons_removed: int


def batches_of(ids: np.ndarray | Tensor, size: int) -> list[Batch]:
    """Packed rows int [S, T] as batches of `size` rows without padding."""
    rows = torch.as_tensor(np.asarray(ids), dtype=torch.int64)
    return [(rows[start : start + size], None) for start in range(0, len(rows), size)]


def prune_model(
    model: PreTrainedModel, config: PruneConfig, ids: np.ndarray, *, progress: Progress = lambda message: None
) -> PruneResult:
    """Prune `model` in place by the packed calibration rows `ids` int [S, T]; `progress` is told each step in words.

    Importance is measured in one pass over the intact model (EffiR 4.1). Layers go first, then MLPs, then attentions,
    then neurons. Raises a ValueError before any work when the model cannot lose so many parts.
    """
    layers = len(layers_of(model))
    config.check_layers(layers)
    before = layout_of(model)
    if before.dropped_mlps or before.dropped_attentions:
        raise ValueError(
            f"the model was pruned before (no MLP in layers {list(before.dropped_mlps)}, no attention in layers "
            f"{list(before.dropped_attentions)}): prune the full model, or set prune.enabled=false"
        )
    batches = batches_of(ids, config.calibration.batch_size)
    importance = _score(model, batches, config, progress, "intact model")
    scores = {kind: _depth_scores(model, config, kind, importance) for kind in importance.cosines}
    protected = {kind: _protected(config, growth) for kind, growth in importance.growth.items()}
    order: dict[Kind, list[int]] = {
        kind: [*(layer for layer in order_of_dropping(values) if layer not in protected[kind]), *protected[kind]]
        for kind, values in scores.items()
    }
    kept, dropped = list(range(layers)), {kind: list[int]() for kind in order}
    for kind, number in _wanted(config):
        candidates = [layer for layer in kept if layer not in protected[kind]]
        if number > len(candidates):
            raise ValueError(
                f"prune.drop_{kind}s={number} but only {len(candidates)} of {len(kept)} may be dropped: "
                f"prune.protect_growth={config.protect_growth} keeps layers {protected[kind]}. "
                f"Lower the one or raise the other."
            )
        for _ in range(number if config.iterative else min(number, 1)):
            if config.iterative:
                first = not any(dropped.values())
                done = f"model with {sum(map(len, dropped.values()))} of {config.drops} parts dropped"
                current = importance if first else _score(model, batches, config, progress, done)
                ranked = [kept[place] for place in order_of_dropping(current.scores(kind))]
            else:
                ranked = order[kind]
            possible = [layer for layer in ranked if layer in candidates and layer not in dropped[kind]]
            step = possible[: 1 if config.iterative else number]
            drop(model, kind, [kept.index(layer) for layer in step])
            dropped[kind] += step
            if kind == "block":
                kept = [layer for layer in kept if layer not in step]
        order[kind] = [*dropped[kind], *(layer for layer in order[kind] if layer not in dropped[kind])]
        if number:
            progress(f"dropped {number} {kind}{'s' if number > 1 else ''}: {', '.join(map(str, dropped[kind]))}")
            _warn_of_sinks(kind, dropped[kind], importance.growth[kind], progress)
    removed = _narrow(model, config, batches, progress)
    return PruneResult(importance, scores, order, dropped, protected, kept, list(layout_of(model).widths), removed)


def _protected(config: PruneConfig, growth: np.ndarray) -> list[int]:
    if config.protect_growth is None:
        return []
    return [int(layer) for layer in np.flatnonzero(growth >= config.protect_growth)]


def _warn_of_sinks(kind: Kind, layers: list[int], growth: np.ndarray, progress: Progress) -> None:
    for layer in layers:
        if growth[layer] >= SINK_GROWTH:
            progress(
                f"warning: the {kind} of layer {layer} was dropped, but it made a token's state {growth[layer]:.0f} "
                f"times longer (an attention sink); models tend to break without. prune.protect_growth={SINK_GROWTH:g} "
                f"keeps it"
            )


def _wanted(config: PruneConfig) -> Sequence[tuple[Kind, int]]:
    return (("block", config.drop_blocks), ("mlp", config.drop_mlps), ("attention", config.drop_attentions))


def _score(
    model: PreTrainedModel, batches: list[Batch], config: PruneConfig, progress: Progress, what: str
) -> Importance:
    done, total = 0, sum(len(ids) for ids, _ in batches)

    def count(rows: int) -> None:
        nonlocal done
        done += rows
        if done == total or (done // rows) % max(1, len(batches) // 4) == 0:
            progress(f"scoring the {what}: {done} of {total} rows")

    return score_sublayers(model, batches, skip_first_token=config.calibration.skip_first_token, progress=count)


def _depth_scores(model: PreTrainedModel, config: PruneConfig, kind: Kind, importance: Importance) -> np.ndarray:
    layers = list(layers_of(model))
    if config.method == "importance":
        return importance.scores(kind)
    if config.method == "last":
        return -np.arange(len(layers), dtype=np.float64)
    if config.method == "random":
        salt = ("mlp", "attention", "block").index(kind)
        return np.random.default_rng([config.calibration.seed, salt]).random(len(layers))
    modules = [layer if kind == "block" else layer.mlp if kind == "mlp" else layer.self_attn for layer in layers]
    return np.asarray([_mean_magnitude(module) for module in modules])


def _mean_magnitude(module: torch.nn.Module) -> float:
    matrices = [parameter.detach() for parameter in module.parameters() if parameter.dim() == 2]
    return float(sum(matrix.double().abs().sum() for matrix in matrices) / sum(matrix.numel() for matrix in matrices))


def _narrow(model: PreTrainedModel, config: PruneConfig, batches: list[Batch], progress: Progress) -> int:
    if not config.width_fraction:
        return 0
    before = sum(layout_of(model).widths)
    scores = score_neurons(model, config.width_method, batches=batches, seed=config.calibration.seed)
    keep = rank_neurons(
        scores, config.width_fraction, min_width=config.min_width, round_to=config.round_to, scope=config.width_scope
    )
    slice_widths(model, keep)
    widths = layout_of(model).widths
    left = ", ".join(map(str, widths))
    progress(f"removed {before - sum(widths)} of {before} neurons by {config.width_method}: widths {left}")
    return before - sum(widths)
