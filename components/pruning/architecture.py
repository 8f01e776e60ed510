"""The parts of a decoder layer by name, and the layout (what each layer has left) that a pruned one is rebuilt from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FORMAT_VERSION = 1
PRUNING_KEY = "almanac_pruning"
"""Attribute of the model's config, and key of config.json, that holds a layout stock transformers cannot express."""

ATTENTION, MLP = "self_attn", "mlp"
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Family:
    """Norms that belong to each sub-layer; the first one stands before it, a second one (Gemma 2 and 3) behind it."""

    attention_norms: tuple[str, ...]
    mlp_norms: tuple[str, ...]


_PRE_NORM = Family(("input_layernorm",), ("post_attention_layernorm",))
_SANDWICH = Family(
    ("input_layernorm", "post_attention_layernorm"), ("pre_feedforward_layernorm", "post_feedforward_layernorm")
)
FAMILIES = {
    "llama": _PRE_NORM,
    "mistral": _PRE_NORM,
    "qwen2": _PRE_NORM,
    "qwen3": _PRE_NORM,
    "gemma": _PRE_NORM,
    "gemma2": _SANDWICH,
    "gemma3_text": _SANDWICH,
}
"""Supported values of `model_type` (Qwen2.5 is qwen2)."""


class DroppedMLP(nn.Module):
    """Stands where an MLP was: contributes a scalar zero to the residual stream, which stays what it was."""

    def forward(self, hidden: Tensor) -> Tensor:
        """[]: zero of the dtype and device of `hidden`."""
        return hidden.new_zeros(())


class DroppedAttention(nn.Module):
    """Stands where an attention was: contributes a scalar zero.

    A KV cache takes its length from its first layer and its kind (full, sliding) from the layer's number, so a dropped
    attention keeps its number and stores one zero a token (T-115).
    """

    def __init__(self, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
        """([], None): a zero and no attention weights."""
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        if cache is not None:
            empty = hidden_states.new_zeros(hidden_states.shape[0], 1, hidden_states.shape[1], 1)
            cache.update(empty, empty, self.layer_idx)
        return hidden_states.new_zeros(()), None


@dataclass(frozen=True)
class Layout:
    """What is left of each layer: the width of its MLP (0: dropped) and whether it has an attention."""

    widths: tuple[int, ...]
    dropped_attentions: tuple[int, ...] = ()

    @property
    def dropped_mlps(self) -> tuple[int, ...]:
        """Numbers of the layers without MLP."""
        return tuple(layer for layer, width in enumerate(self.widths) if width == 0)

    @property
    def stock(self) -> bool:
        """Whether stock transformers can express it: every layer whole, all MLPs equally wide."""
        return not self.dropped_attentions and not self.dropped_mlps and len(set(self.widths)) == 1

    def to_json(self, model_type: str) -> dict[str, Any]:
        """The value of `almanac_pruning` in config.json."""
        return {
            "format_version": FORMAT_VERSION,
            "model_type": model_type,
            "intermediate_sizes": list(self.widths),
            "dropped_mlps": list(self.dropped_mlps),
            "dropped_attentions": list(self.dropped_attentions),
        }

    @classmethod
    def from_json(cls, state: dict[str, Any], layers: int, source: object) -> Layout:
        """The layout in config.json's `almanac_pruning`; a ValueError names the entry that does not fit."""
        version = state.get("format_version")
        if version != FORMAT_VERSION:
            raise ValueError(
                f"{source}: {PRUNING_KEY}.format_version is {version!r} but this version of the project reads "
                f"{FORMAT_VERSION}: prune the model again"
            )
        layout = cls(tuple(state["intermediate_sizes"]), tuple(sorted(state["dropped_attentions"])))
        if len(layout.widths) != layers:
            raise ValueError(
                f"{source}: {PRUNING_KEY}.intermediate_sizes has {len(layout.widths)} entries but num_hidden_layers "
                f"is {layers}"
            )
        if list(layout.dropped_mlps) != sorted(state["dropped_mlps"]):
            raise ValueError(
                f"{source}: {PRUNING_KEY}.dropped_mlps is {state['dropped_mlps']} but the zeros in intermediate_sizes "
                f"are at {list(layout.dropped_mlps)}"
            )
        if any(layer not in range(layers) for layer in layout.dropped_attentions):
            raise ValueError(
                f"{source}: {PRUNING_KEY}.dropped_attentions is {state['dropped_attentions']} but the model has layers "
                f"0 … {layers - 1}"
            )
        return layout


def family_of(model: PreTrainedModel) -> Family:
    """The family of a plain transformers model; a ValueError names an architecture whose layers are not known here."""
    if hasattr(model, "peft_config") or hasattr(model, "get_base_model"):
        raise TypeError(
            f"a {type(model).__name__} carries an adapter: merge it (merge_and_unload) before pruning (spec 4.3)"
        )
    return family(model.config.model_type)


def family(model_type: str) -> Family:
    """The family of a `model_type`; a ValueError when it is none of `FAMILIES`."""
    try:
        return FAMILIES[model_type]
    except KeyError:
        raise ValueError(
            f"model_type {model_type!r} cannot be pruned: known are {', '.join(FAMILIES)}. Set prune.enabled=false to "
            f"go on with the full model."
        ) from None


def layers_of(model: PreTrainedModel) -> Sequence[Any]:
    """The decoder layers, in order; refuses what `family_of` refuses."""
    family_of(model)
    decoder: Any = model.base_model
    return decoder.layers


def layout_of(model: PreTrainedModel) -> Layout:
    """The layout of the model as it stands, read from its modules."""
    layers = list(layers_of(model))
    widths = tuple(0 if isinstance(layer.mlp, DroppedMLP) else layer.mlp.down_proj.in_features for layer in layers)
    return Layout(widths, tuple(i for i, layer in enumerate(layers) if isinstance(layer.self_attn, DroppedAttention)))


def apply_layout(model: PreTrainedModel, layout: Layout) -> None:
    """Cut a full model, in place, down to the shapes of `layout`; the weights of narrowed MLPs are left unset."""
    for index, (layer, width) in enumerate(zip(layers_of(model), layout.widths, strict=True)):
        if width == 0:
            remove_mlp(model, index)
        elif width != layer.mlp.down_proj.in_features:
            for name in PROJECTIONS:
                old = getattr(layer.mlp, name)
                shape = (width, old.out_features) if name == "down_proj" else (old.in_features, width)
                new = nn.utils.skip_init(
                    nn.Linear, *shape, bias=old.bias is not None, device=old.weight.device, dtype=old.weight.dtype
                )
                setattr(layer.mlp, name, new)
            layer.mlp.intermediate_size = width
        if index in layout.dropped_attentions:
            remove_attention(model, index)
    record_layout(model)


def remove_mlp(model: PreTrainedModel, layer: int) -> None:
    """Replace the MLP of a layer and its norms, in place."""
    _replace(layers_of(model)[layer], MLP, DroppedMLP(), family_of(model).mlp_norms)


def remove_attention(model: PreTrainedModel, layer: int) -> None:
    """Replace the attention of a layer and its norms, in place."""
    _replace(layers_of(model)[layer], ATTENTION, DroppedAttention(layer), family_of(model).attention_norms)


def _replace(layer: nn.Module, name: str, stand_in: nn.Module, norms: Iterable[str]) -> None:
    setattr(layer, name, stand_in)
    for norm in norms:
        setattr(layer, norm, nn.Identity())


def record_layout(model: PreTrainedModel) -> None:
    """Bring the model's config in line with its modules: one width where it is uniform, else the layout itself."""
    layout = layout_of(model)
    if layout.stock:
        model.config.intermediate_size = layout.widths[0]
        if hasattr(model.config, PRUNING_KEY):
            delattr(model.config, PRUNING_KEY)
    else:
        setattr(model.config, PRUNING_KEY, layout.to_json(model.config.model_type))


def parameter_count(model: nn.Module) -> int:
    """Number of parameters, tied ones counted once."""
    return sum(parameter.numel() for parameter in model.parameters())


def mlp_parameters(hidden: int, width: int, *, norms: int = 1, bias: bool = False) -> int:
    """Parameters that dropping an MLP of `width` neurons and its norms saves: 3 H W + norms H (+ biases 2 W + H)."""
    return 3 * hidden * width + norms * hidden + (2 * width + hidden if bias else 0)


def model_device(model: nn.Module) -> torch.device:
    """The device of the model's first parameter."""
    return next(model.parameters()).device
