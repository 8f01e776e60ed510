"""Online importance against a slow reference that stores every state; padding, batches, architectures, refusals."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

from components.pruning.architecture import layers_of
from components.pruning.importance import KINDS, score_sublayers


def slow_reference(model: PreTrainedModel, rows: list[list[int]]) -> dict[str, np.ndarray]:
    """Each row alone, all states stored, every sub-layer after the attention called by hand on them (spec 4.1)."""
    layers = list(layers_of(model))
    found: dict[str, list[list[float]]] = {kind: [[] for _ in layers] for kind in KINDS}
    states: dict[tuple[int, str], Tensor] = {}

    def keep(key: tuple[int, str]) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...] | None = None) -> None:
            states[key] = (inputs if output is None else output)[0].clone()

        return hook

    for index, layer in enumerate(layers):
        layer.input_layernorm.register_forward_pre_hook(keep((index, "in")))
        layer.self_attn.register_forward_hook(keep((index, "attention")))
    for row in rows:
        with torch.no_grad():
            model(input_ids=torch.tensor([row]), use_cache=False)
            for index, layer in enumerate(layers):
                sandwich = hasattr(layer, "pre_feedforward_layernorm")
                before, attended = states[index, "in"], states[index, "attention"]
                if sandwich:
                    attended = layer.post_attention_layernorm(attended)
                between = before + attended
                if sandwich:
                    added = layer.post_feedforward_layernorm(layer.mlp(layer.pre_feedforward_layernorm(between)))
                else:
                    added = layer.mlp(layer.post_attention_layernorm(between))
                after = between + added
                pairs = {"attention": (before, between), "mlp": (between, after), "block": (before, after)}
                for kind, pair in pairs.items():
                    left, right = (state[0].double() for state in pair)
                    cosine = (left * right).sum(-1) / (left.norm(dim=-1) * right.norm(dim=-1))
                    found[kind][index] += cosine.tolist()
    return {kind: np.asarray([np.mean(values) for values in layers]) for kind, layers in found.items()}


def test_scores_equal_a_slow_reference(any_model: PreTrainedModel, ids: Tensor) -> None:
    importance = score_sublayers(any_model, [(ids, None)])
    reference = slow_reference(any_model, ids.tolist())
    for kind in KINDS:
        np.testing.assert_allclose(importance.cosines[kind], reference[kind], atol=2e-6, err_msg=kind)
        np.testing.assert_allclose(importance.scores(kind), 1 - reference[kind], atol=2e-6)
    assert importance.tokens == ids.numel()
    assert not any(layer._forward_hooks for layer in any_model.base_model.layers), "hooks were left behind"


def test_batches_of_any_size_give_the_same_scores(llama: PreTrainedModel, ids: Tensor) -> None:
    """T-114's cause (spec trap 33): a hook that keeps only the first row of a batch."""
    one = score_sublayers(llama, [(row[None], None) for row in ids])
    four = score_sublayers(llama, [(ids[:4], None), (ids[4:], None)])
    assert one.tokens == four.tokens == ids.numel()
    for kind in KINDS:
        np.testing.assert_allclose(one.cosines[kind], four.cosines[kind], atol=1e-6)


@pytest.mark.parametrize("side", ["right", "left"])
def test_padding_is_left_out(llama: PreTrainedModel, side: str) -> None:
    rows = [[5, 6, 7, 8, 9], [10, 11, 12], [13, 14]]
    padded, mask = torch.zeros(3, 5, dtype=torch.int64), torch.zeros(3, 5, dtype=torch.int64)
    for index, row in enumerate(rows):
        places = slice(0, len(row)) if side == "right" else slice(5 - len(row), 5)
        padded[index, places], mask[index, places] = torch.tensor(row), 1
    together = score_sublayers(llama, [(padded, mask)])
    apart = score_sublayers(llama, [(torch.tensor([row]), None) for row in rows])
    assert together.tokens == apart.tokens == 10
    for kind in KINDS:
        # Left padding shifts positions; rotary attention depends on their differences only.
        np.testing.assert_allclose(together.cosines[kind], apart.cosines[kind], atol=2e-6)


def test_first_token_can_be_left_out(llama: PreTrainedModel, ids: Tensor) -> None:
    all_tokens = score_sublayers(llama, [(ids, None)])
    first = score_sublayers(llama, [(ids[:, :1], None)])
    rest = score_sublayers(llama, [(ids, None)], skip_first_token=True)
    assert rest.tokens == ids.numel() - len(ids)
    expected = (all_tokens.cosines["mlp"] * all_tokens.tokens - first.cosines["mlp"] * first.tokens) / rest.tokens
    np.testing.assert_allclose(rest.cosines["mlp"], expected, atol=2e-6)


def test_growth_is_the_largest_over_tokens_that_are_not_padding(any_model: PreTrainedModel, ids: Tensor) -> None:
    layer, seen = layers_of(any_model)[1], list[Tensor]()
    layer.register_forward_pre_hook(lambda m, i: seen.append(i[0].clone()))
    layer.register_forward_hook(lambda m, i, o: seen.append(o.clone()))
    mask = torch.ones_like(ids)
    mask[0, 5:] = 0
    whole = score_sublayers(any_model, [(ids, mask)], skip_first_token=True)
    ratio = (seen[1].norm(dim=-1) / seen[0].norm(dim=-1))[mask.bool()]
    assert whole.growth["block"][1] == pytest.approx(ratio.max().item(), rel=1e-5)
    parts = score_sublayers(any_model, [(ids[:2], mask[:2]), (ids[2:], mask[2:])])
    for kind in KINDS:
        np.testing.assert_allclose(parts.growth[kind], whole.growth[kind], rtol=1e-5)


def test_bfloat16_is_scored_in_fp32(llama: PreTrainedModel, ids: Tensor) -> None:
    exact = score_sublayers(llama, [(ids, None)])
    rounded = score_sublayers(llama.to(torch.bfloat16), [(ids, None)])
    np.testing.assert_allclose(rounded.cosines["mlp"], exact.cosines["mlp"], atol=0.02)
    assert rounded.cosines["mlp"].dtype == np.float64


def test_refusals_name_what_is_wrong(llama: PreTrainedModel, ids: Tensor) -> None:
    gpt2 = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=20))
    with pytest.raises(ValueError, match=r"gpt2.*known are llama, mistral, qwen2"):
        score_sublayers(gpt2, [(ids % 20, None)])
    with pytest.raises(ValueError, match="at least one token"):
        score_sublayers(llama, [(ids, torch.zeros_like(ids))])
    with torch.no_grad():
        llama.base_model.layers[1].mlp.down_proj.weight.fill_(float("nan"))
    with pytest.raises(ValueError, match=r"mlp of layer 1 is not finite"):
        score_sublayers(llama, [(ids, None)])
