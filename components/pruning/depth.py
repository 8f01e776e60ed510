"""Dropping whole MLPs, attentions and layers, in place and for good: their parameters are gone (EffiR 4.1)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
from torch import nn

from components.pruning.architecture import (
    DroppedAttention,
    DroppedMLP,
    layers_of,
    record_layout,
    remove_attention,
    remove_mlp,
)
from components.pruning.importance import Kind

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def order_of_dropping(scores: np.ndarray) -> list[int]:
    """Layer numbers from the least important to the most; equal scores: the later layer goes first."""
    scores = np.asarray(scores, dtype=np.float64)
    return [int(layer) for layer in np.lexsort((-np.arange(len(scores)), scores))]


def drop(model: PreTrainedModel, kind: Kind, layers: Iterable[int]) -> None:
    """Drop the named sub-layers (or whole layers), in place; the config then says so too."""
    {"mlp": drop_mlps, "attention": drop_attentions, "block": drop_blocks}[kind](model, layers)


def drop_mlps(model: PreTrainedModel, layers: Iterable[int]) -> None:
    """Drop MLPs with their norms: the output of such a layer is the residual stream after its attention (T-116)."""
    for layer in _checked(model, layers, "mlp", DroppedMLP):
        remove_mlp(model, layer)
    record_layout(model)


def drop_attentions(model: PreTrainedModel, layers: Iterable[int]) -> None:
    """Drop attentions with their norms."""
    for layer in _checked(model, layers, "self_attn", DroppedAttention):
        remove_attention(model, layer)
    record_layout(model)


def drop_blocks(model: PreTrainedModel, layers: Iterable[int]) -> None:
    """Drop whole layers; those left are numbered anew, so that a KV cache has no gaps (T-115)."""
    gone = set(_checked(model, layers, "", ()))
    old = layers_of(model)
    if len(gone) == len(old):
        raise ValueError(f"all {len(old)} layers are to be dropped: keep at least one")
    kept = [index for index in range(len(old)) if index not in gone]
    for new, index in enumerate(kept):
        for module in (old[index], old[index].self_attn):
            if hasattr(module, "layer_idx"):
                module.layer_idx = new
    model.base_model.layers = nn.ModuleList(old[index] for index in kept)
    config = model.config
    layer_types = getattr(config, "layer_types", None)
    if layer_types is not None:
        config.layer_types = [layer_types[index] for index in kept]
    config.num_hidden_layers = len(kept)
    record_layout(model)


def _checked(model: PreTrainedModel, layers: Iterable[int], part: str, dropped: type | tuple[()]) -> list[int]:
    found, wanted = layers_of(model), sorted(set(layers))
    for layer in wanted:
        if layer not in range(len(found)):
            raise ValueError(f"layer {layer} cannot be dropped: the model has layers 0 … {len(found) - 1}")
        if part and isinstance(getattr(found[layer], part), dropped):
            raise ValueError(f"the {part} of layer {layer} was dropped before")
    return wanted
