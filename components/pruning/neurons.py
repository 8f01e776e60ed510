"""Scores of MLP neurons without trained gates: weight norm, chance, and Wanda (activation × weight), on one interface.

All give what `width.rank_neurons` takes: float64 [n] a layer, None where the MLP is dropped; higher means keep.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from components.pruning.architecture import DroppedMLP, layers_of, model_device
from components.pruning.importance import Batch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Method = Literal["wanda", "magnitude", "random"]


def score_neurons(
    model: PreTrainedModel, method: Method, *, batches: Iterable[Batch] = (), seed: int = 0
) -> list[Tensor | None]:
    """The scores by `method`; only wanda reads `batches`, only random reads `seed`."""
    if method == "magnitude":
        return magnitude_scores(model)
    if method == "random":
        return random_scores(model, seed)
    return wanda_scores(model, batches)


def magnitude_scores(model: PreTrainedModel) -> list[Tensor | None]:
    """The L2 norm of all weights of a neuron: its rows of gate and up and its column of down."""
    return _each(model, lambda mlp: (_rows(mlp.gate_proj) + _rows(mlp.up_proj) + _columns(mlp.down_proj)).sqrt())


def random_scores(model: PreTrainedModel, seed: int) -> list[Tensor | None]:
    """Uniform random numbers, the same for the same seed and widths."""
    generator = torch.Generator().manual_seed(seed)
    return _each(model, lambda mlp: torch.rand(mlp.down_proj.in_features, generator=generator, dtype=torch.float64))


@torch.inference_mode()
def wanda_scores(model: PreTrainedModel, batches: Iterable[Batch]) -> list[Tensor | None]:
    """Root mean square of a neuron's activation times the L2 norm of its column of down, the structured form of Wanda
    (arXiv 2306.11695). Sums are kept online in fp64, padding is left out."""
    device = model_device(model)
    counted = torch.ones(0, dtype=torch.bool)
    sums: dict[int, Tensor] = {}
    tokens = 0

    def watch(index: int) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            squares = inputs[0][counted].double().square().sum(0)
            sums[index] = sums[index] + squares if index in sums else squares

        return hook

    handles = [
        layer.mlp.down_proj.register_forward_pre_hook(watch(index))
        for index, layer in enumerate(layers_of(model))
        if not isinstance(layer.mlp, DroppedMLP)
    ]
    was_training = model.training
    model.eval()
    try:
        for ids, mask in batches:
            counted = (torch.ones(ids.shape) if mask is None else mask).bool().to(device)
            model.base_model(
                input_ids=ids.to(device), attention_mask=None if mask is None else mask.to(device), use_cache=False
            )
            tokens += int(counted.sum())
    finally:
        model.train(was_training)
        for handle in handles:
            handle.remove()
    if not tokens:
        raise ValueError("Wanda scores need calibration text, and there is none")
    strengths = iter([(sums[index] / tokens).sqrt() for index in sorted(sums)])
    return _each(model, lambda mlp: next(strengths) * _columns(mlp.down_proj).sqrt())


def _each(model: PreTrainedModel, score: Callable[[Any], Tensor]) -> list[Tensor | None]:
    return [
        None if isinstance(layer.mlp, DroppedMLP) else score(layer.mlp).detach().cpu() for layer in layers_of(model)
    ]


def _rows(linear: nn.Linear) -> Tensor:
    return linear.weight.detach().double().square().sum(1)


def _columns(linear: nn.Linear) -> Tensor:
    return linear.weight.detach().double().square().sum(0)
