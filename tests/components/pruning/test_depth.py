"""Dropped sub-layers: the function by hand (T-116), the parameters, the KV cache (T-115), LoRA (trap 40)."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import PreTrainedModel

from components.pruning.architecture import (
    PRUNING_KEY,
    family_of,
    layers_of,
    layout_of,
    mlp_parameters,
    parameter_count,
)
from components.pruning.depth import drop_attentions, drop_blocks, drop_mlps, order_of_dropping

HIDDEN, WIDTH = 32, 48


def layer_calls(model: PreTrainedModel, ids: Tensor) -> list[tuple[tuple, dict, Tensor]]:
    """Inputs and output of each decoder layer in one forward pass."""
    calls: list[tuple[tuple, dict, Tensor]] = []
    hooks = [
        layer.register_forward_hook(lambda m, i, k, o: calls.append((i, k, o)), with_kwargs=True)
        for layer in layers_of(model)
    ]
    with torch.no_grad():
        model(input_ids=ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    return calls


def test_layer_without_mlp_equals_attention_only_by_hand(any_model: PreTrainedModel, ids: Tensor) -> None:
    """T-116: no MLP, and no trace of its norm either."""
    original = copy.deepcopy(layers_of(any_model)[1])
    drop_mlps(any_model, [1])
    (hidden,), options, output = layer_calls(any_model, ids)[1]
    with torch.no_grad():
        attended, _ = original.self_attn(hidden_states=original.input_layernorm(hidden), **options)
        if hasattr(original, "pre_feedforward_layernorm"):
            attended = original.post_attention_layernorm(attended)
    torch.testing.assert_close(output, hidden + attended, rtol=0, atol=0)


def test_layer_without_attention_equals_mlp_only_by_hand(any_model: PreTrainedModel, ids: Tensor) -> None:
    original = copy.deepcopy(layers_of(any_model)[2])
    drop_attentions(any_model, [2])
    (hidden,), _, output = layer_calls(any_model, ids)[2]
    with torch.no_grad():
        if hasattr(original, "pre_feedforward_layernorm"):
            added = original.post_feedforward_layernorm(original.mlp(original.pre_feedforward_layernorm(hidden)))
        else:
            added = original.mlp(original.post_attention_layernorm(hidden))
    torch.testing.assert_close(output, hidden + added, rtol=0, atol=0)


def test_zero_weights_and_dropping_are_the_same_function(any_model: PreTrainedModel, ids: Tensor) -> None:
    """Spec invariant 9: zero-module form == skip form."""
    zeroed = copy.deepcopy(any_model)
    with torch.no_grad():
        for layer in (0, 3):
            for parameter in zeroed.base_model.layers[layer].mlp.down_proj.parameters():
                parameter.zero_()
        drop_mlps(any_model, [0, 3])
        torch.testing.assert_close(any_model(ids).logits, zeroed(ids).logits, rtol=0, atol=1e-6)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_parameters_are_gone_as_the_formula_says(any_model: PreTrainedModel, count: int) -> None:
    before = parameter_count(any_model)
    bias = layers_of(any_model)[0].mlp.down_proj.bias is not None
    norms = len(family_of(any_model).mlp_norms)
    drop_mlps(any_model, range(count))
    assert before - parameter_count(any_model) == count * mlp_parameters(HIDDEN, WIDTH, norms=norms, bias=bias)
    gone = [f"layers.{index}." for index in range(count)]
    names = [name for name in any_model.state_dict() if any(part in name for part in gone)]
    assert not [name for name in names if ".mlp." in name or "feedforward" in name]


def cached_logits(model: PreTrainedModel, ids: Tensor, cut: int) -> Tensor:
    """Logits with the prefix read from a KV cache, the rest token by token."""
    with torch.no_grad():
        out = model(ids[:, :cut], use_cache=True)
        parts = [out.logits]
        for step in range(cut, ids.shape[1]):
            cache = out.cache if hasattr(out, "cache") else out.past_key_values
            name = "cache" if hasattr(out, "cache") else "past_key_values"
            out = model(ids[:, step : step + 1], use_cache=True, **{name: cache})
            parts.append(out.logits)
    return torch.cat(parts, 1)


@pytest.mark.parametrize("part", ["mlp", "attention", "first_attention", "block", "first_block", "all"])
def test_kv_cache_on_and_off_agree(any_model: PreTrainedModel, ids: Tensor, part: str) -> None:
    """T-115: a cache keyed by layer number survives every kind of dropping, also of layer 0."""
    if part in ("block", "all"):
        drop_blocks(any_model, [1])
    if part == "first_block":
        drop_blocks(any_model, [0, 2])
    if part in ("mlp", "all"):
        drop_mlps(any_model, [1])
    if part in ("attention", "first_attention", "all"):
        drop_attentions(any_model, [0] if part == "first_attention" else [2])
    with torch.no_grad():
        plain = any_model(ids, use_cache=False).logits
    torch.testing.assert_close(cached_logits(any_model, ids, 4), plain, rtol=1e-4, atol=1e-4)


def test_layers_are_numbered_anew_after_dropping_blocks(any_model: PreTrainedModel, ids: Tensor) -> None:
    kept = copy.deepcopy([layers_of(any_model)[index] for index in (0, 2, 3)])
    types = getattr(any_model.config, "layer_types", None)
    drop_blocks(any_model, [1])
    config = any_model.config
    assert config.num_hidden_layers == len(layers_of(any_model)) == 3
    assert [layer.self_attn.layer_idx for layer in layers_of(any_model)] == [0, 1, 2]
    if types is not None:
        assert config.layer_types == [types[0], types[2], types[3]]
    calls = layer_calls(any_model, ids)
    for index, ((hidden,), options, output) in enumerate(calls):
        with torch.no_grad():
            torch.testing.assert_close(kept[index](hidden, **options), output)


def test_config_tells_the_layout(llama: PreTrainedModel) -> None:
    assert layout_of(llama).stock
    drop_blocks(llama, [3])
    assert not hasattr(llama.config, PRUNING_KEY), "whole layers are stock"
    drop_mlps(llama, [2, 0])
    drop_attentions(llama, [1])
    assert getattr(llama.config, PRUNING_KEY) == {
        "format_version": 1, "model_type": "llama", "dropped_mlps": [0, 2], "dropped_attentions": [1],
        "intermediate_sizes": [0, 48, 0],
    }  # fmt: skip


def test_lora_is_not_created_on_dropped_layers(llama: PreTrainedModel, ids: Tensor) -> None:
    """Spec trap 40, for `all-linear` and for names; after merging the model is plain again."""
    drop_mlps(llama, [1, 2])
    with torch.no_grad():
        before = llama(ids).logits
    for targets in ("all-linear", ["q_proj", "gate_proj", "up_proj", "down_proj"]):
        wrapped = get_peft_model(llama, LoraConfig(r=2, target_modules=targets))
        names = [name for name, parameter in wrapped.named_parameters() if parameter.requires_grad]
        assert names
        assert not [name for name in names if ".mlp." in name and (".layers.1." in name or ".layers.2." in name)]
        wrapped(input_ids=ids, labels=ids).loss.backward()
        llama = wrapped.merge_and_unload()
    family_of(llama)
    with torch.no_grad():
        torch.testing.assert_close(llama(ids).logits, before)


def test_gradients_pass_dropped_layers(any_model: PreTrainedModel, ids: Tensor) -> None:
    drop_mlps(any_model, [1])
    drop_attentions(any_model, [2])
    any_model.train()
    any_model.gradient_checkpointing_enable()
    any_model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    assert all(parameter.grad is not None for parameter in any_model.parameters())


def test_order_is_stable_and_refusals_name_the_layer(llama: PreTrainedModel) -> None:
    assert order_of_dropping(np.asarray([0.3, 0.1, 0.2, 0.1])) == [3, 1, 2, 0], "equal scores: the later one first"
    with pytest.raises(ValueError, match=r"layer 4 cannot be dropped: the model has layers 0 … 3"):
        drop_mlps(llama, [4])
    drop_mlps(llama, [1])
    with pytest.raises(ValueError, match="layer 1 was dropped before"):
        drop_mlps(llama, [1])
    with pytest.raises(ValueError, match="all 4 layers"):
        drop_blocks(llama, range(4))
    wrapped = get_peft_model(llama, LoraConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(TypeError, match="merge it"):
        drop_mlps(wrapped, [0])
