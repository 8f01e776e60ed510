"""Narrowing the remaining MLPs: gates that learn which neurons matter, one ranking of all, slicing (EffiR 4.2).

MLP(x) = W_down( ReLU(z) * Act(W_gate x) * (W_up x) ),   R = sum of sigmoid(beta |ReLU(z)|)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from components.pruning.architecture import DroppedMLP, layers_of, record_layout

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BETA = 5.0
"""EffiR's slope of the sigmoid relaxation."""


class GatedDown(nn.Module):
    """A down projection behind gates: `linear(ReLU(gate) * neurons)`.

    The gates are fp32 whatever the weights are (in bf16, steps of 2^-8 around 1 round small updates away: spec trap
    39); do not cast the model after attaching them. Train them without weight decay (trap 38).
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear
        self.gate = nn.Parameter(torch.ones(linear.in_features, dtype=torch.float32, device=linear.weight.device))

    @property
    def in_features(self) -> int:
        """The number of neurons."""
        return self.linear.in_features

    def forward(self, neurons: Tensor) -> Tensor:
        """[..., H] from neurons [..., n]."""
        return self.linear(neurons * self.gate.relu().to(neurons.dtype))


def attach_gates(model: PreTrainedModel) -> list[nn.Parameter | None]:
    """The gates [n] put on each layer's MLP neurons, None where the MLP is dropped; everything else is frozen.

    All start at 1, so the model's function does not change.
    """
    layers = layers_of(model)
    model.requires_grad_(False)
    gates: list[nn.Parameter | None] = []
    for layer in layers:
        if isinstance(layer.mlp, DroppedMLP):
            gates.append(None)
            continue
        layer.mlp.down_proj = GatedDown(layer.mlp.down_proj)
        gates.append(layer.mlp.down_proj.gate)
    return gates


def detach_gates(model: PreTrainedModel) -> None:
    """Take the gates off again. Their values are thrown away: kept neurons count 1 (spec 4.2)."""
    for layer in layers_of(model):
        if isinstance(getattr(layer.mlp, "down_proj", None), GatedDown):
            layer.mlp.down_proj = layer.mlp.down_proj.linear


def gate_penalty(gates: Sequence[Tensor | None], beta: float = BETA) -> Tensor:
    """[]: R, the sum over all layers and neurons of sigmoid(beta |ReLU(z)|), in fp32; from n/2 (all closed) to n."""
    terms = [torch.sigmoid(beta * gate.relu().abs()).sum() for gate in gates if gate is not None]
    if not terms:
        raise ValueError("there is no gate: every MLP is dropped")
    return torch.stack(terms).sum()


def gate_scores(gates: Sequence[Tensor | None]) -> list[Tensor | None]:
    """ReLU(z) of each layer, detached: the scores that `rank_neurons` takes after gate training."""
    return [None if gate is None else gate.detach().relu() for gate in gates]


def rank_neurons(
    scores: Sequence[Tensor | None], fraction: float, *, min_width: int = 1, round_to: int = 1, scope: str = "global"
) -> list[Tensor | None]:
    """bool [n] a layer (None where there is no MLP): the neurons to keep.

    The lowest `fraction` of all neurons goes (`scope="layer"`: of each layer), equal scores by layer and number (a
    stable sort, spec trap 41). A layer keeps `min_width` neurons, or all it has. Widths are rounded up to a multiple of
    `round_to` by taking the best removed neurons back. Raises a ValueError when the minimum widths leave less than
    `fraction` to remove.
    """
    if scope == "layer":
        return [
            None if s is None else _rank([s], fraction, min_width, round_to, f" of layer {layer}")[0]
            for layer, s in enumerate(scores)
        ]
    present = [layer_scores for layer_scores in scores if layer_scores is not None]
    kept = iter(_rank(present, fraction, min_width, round_to, ""))
    return [None if layer_scores is None else next(kept) for layer_scores in scores]


def _rank(scores: list[Tensor], fraction: float, min_width: int, round_to: int, where: str) -> list[Tensor]:
    flat = [layer_scores.detach().double().cpu() for layer_scores in scores]
    total = sum(len(layer_scores) for layer_scores in flat)
    wanted = round(fraction * total)
    removable = sum(max(0, len(layer_scores) - min_width) for layer_scores in flat)
    if wanted > removable:
        raise ValueError(
            f"prune.width_fraction={fraction} removes {wanted} of {total} neurons{where} but "
            f"prune.min_width={min_width} leaves only {removable} to remove: lower one of them"
        )
    guarded = []
    for layer_scores in flat:
        order = torch.argsort(layer_scores, stable=True)
        protected = layer_scores.clone()
        protected[order[max(0, len(order) - min_width) :]] = torch.inf
        guarded.append(protected)
    keep_all = torch.ones(total, dtype=torch.bool)
    if total:
        keep_all[torch.argsort(torch.cat(guarded), stable=True)[:wanted]] = False
    kept = list(keep_all.split([len(layer_scores) for layer_scores in flat]))
    return [_rounded_up(keep, layer_scores, round_to) for keep, layer_scores in zip(kept, flat, strict=True)]


def _rounded_up(keep: Tensor, scores: Tensor, multiple: int) -> Tensor:
    width = int(keep.sum())
    target = min(-(-width // multiple) * multiple, len(keep))
    keep = keep.clone()
    removed = torch.where(~keep)[0]
    best = removed[torch.argsort(scores[removed], stable=True)]
    keep[best[len(best) - (target - width) :]] = True
    return keep


def slice_widths(model: PreTrainedModel, keep: Sequence[Tensor | None]) -> None:
    """Remove the neurons that `keep` (bool [n] a layer) marks False, in place, and any gates with them.

    Rows of gate and up (and of their biases) and columns of down go. Equal to setting their gates to 0 and all others
    to 1: a removed neuron contributed exactly 0. Merge LoRA before (spec 4.3).
    """
    detach_gates(model)
    for index, (layer, mask) in enumerate(zip(layers_of(model), keep, strict=True)):
        if (mask is None) != isinstance(layer.mlp, DroppedMLP):
            raise ValueError(f"layer {index}: a mask is needed exactly where there is an MLP")
        if mask is None:
            continue
        width = layer.mlp.down_proj.in_features
        if mask.shape != (width,) or not mask.any():
            raise ValueError(
                f"layer {index}: wanted a mask of {width} neurons that keeps one or more, found {tuple(mask.shape)}"
            )
        rows = torch.where(mask)[0].to(layer.mlp.down_proj.weight.device)
        for name in ("gate_proj", "up_proj"):
            _slice(getattr(layer.mlp, name), rows, outputs=True)
        _slice(layer.mlp.down_proj, rows, outputs=False)
        layer.mlp.intermediate_size = len(rows)
    record_layout(model)


def _slice(linear: nn.Linear, index: Tensor, *, outputs: bool) -> None:
    weight, trainable = linear.weight.detach(), linear.weight.requires_grad
    linear.weight = nn.Parameter(weight.index_select(0 if outputs else 1, index).contiguous(), requires_grad=trainable)
    if outputs:
        linear.out_features = len(index)
        if linear.bias is not None:
            bias = linear.bias.detach().index_select(0, index)
            linear.bias = nn.Parameter(bias, requires_grad=linear.bias.requires_grad)
    else:
        linear.in_features = len(index)
