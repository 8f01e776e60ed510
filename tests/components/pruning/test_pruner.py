"""PruneConfig and prune_model: what is chosen, in whose numbering, by every method; impossible wishes with numbers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from components.pruning import PruneConfig
from components.pruning.architecture import layers_of, layout_of, parameter_count
from components.pruning.depth import drop_blocks, drop_mlps
from components.pruning.importance import score_sublayers
from components.pruning.plot import plot_importance
from components.pruning.pruner import batches_of, prune_model
from components.pruning.speed import tokens_per_second


def prune(model: PreTrainedModel, ids: Tensor, **keys: Any) -> Any:
    return prune_model(model, PruneConfig(**keys), ids.numpy())


def test_default_is_to_leave_the_model_alone() -> None:
    config = PruneConfig()
    assert not config.active
    assert not PruneConfig(drop_mlps=3, enabled=False).active
    assert PruneConfig(drop_mlps=3).active
    assert PruneConfig(width_fraction=0.3).active
    assert (config.calibration.samples, config.calibration.tokens) == (16, 128)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"iterative": True, "drop_mlps": 1, "method": "random"}, "method='random' does not depend on"),
        ({"iterative": True}, "nothing is dropped"),
        ({"width_scope": "layer"}, "width_fraction=0 removes no neuron"),
        ({"width_fraction": 1.0}, "less than 1"),
        ({"drop_mlps": -1}, "greater than or equal to 0"),
        ({"method": "wanda"}, "'importance', 'magnitude', 'random' or 'last'"),
        ({"drop_mlp": 1}, "Extra inputs"),
    ],
)
def test_impossible_configs_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PruneConfig(**keys)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"drop_mlps": 5}, "prune.drop_mlps=5 but the model has 4 of them: lower it to at most 4"),
        ({"drop_blocks": 4}, "prune.drop_blocks=4 but the model has 4 layers"),
        ({"drop_blocks": 2, "drop_attentions": 3}, "drop_attentions=3 but the model has 2 of them after drop_blocks=2"),
        ({"drop_mlps": 4, "width_fraction": 0.3}, "leaves no MLP to narrow"),
        ({"width_fraction": 0.9, "min_width": 40}, r"removes 173 of 192 neurons but prune.min_width=40 leaves only 32"),
    ],
)
def test_more_than_the_model_has_is_refused_with_numbers(
    llama: PreTrainedModel, ids: Tensor, keys: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        prune(llama, ids, **keys)


def test_lowest_importance_goes_and_equals_dropping_by_hand(any_model: PreTrainedModel, ids: Tensor) -> None:
    by_hand = copy.deepcopy(any_model)
    scores = score_sublayers(any_model, [(ids, None)]).scores("mlp")
    result = prune(any_model, ids, drop_mlps=2)
    assert result.dropped["mlp"] == np.argsort(scores, kind="stable")[:2].tolist()
    assert result.order["mlp"] == np.argsort(scores, kind="stable").tolist()
    np.testing.assert_allclose(result.importance.scores("mlp"), scores, atol=1e-6)
    drop_mlps(by_hand, result.dropped["mlp"])
    with torch.no_grad():
        torch.testing.assert_close(any_model(ids).logits, by_hand(ids).logits, rtol=0, atol=0)


def test_numbers_are_those_of_the_full_model_after_blocks_are_gone(llama: PreTrainedModel, ids: Tensor) -> None:
    by_hand = copy.deepcopy(llama)
    result = prune(llama, ids, drop_blocks=1, drop_mlps=1, drop_attentions=1)
    (block,), (mlp,), (attention,) = (result.dropped[kind] for kind in ("block", "mlp", "attention"))
    assert block == result.order["block"][0]
    assert mlp == next(layer for layer in result.order["mlp"] if layer != block)
    assert result.kept_layers == [layer for layer in range(4) if layer != block]
    assert [result.kept_layers[place] for place in layout_of(llama).dropped_mlps] == [mlp]
    assert [result.kept_layers[place] for place in layout_of(llama).dropped_attentions] == [attention]
    drop_blocks(by_hand, [block])
    drop_mlps(by_hand, [result.kept_layers.index(mlp)])
    assert parameter_count(llama) < parameter_count(by_hand)


def test_iterative_scores_again_after_every_drop(llama: PreTrainedModel, ids: Tensor) -> None:
    by_hand = copy.deepcopy(llama)
    expected: list[int] = []
    for _ in range(3):
        scores = score_sublayers(by_hand, [(ids, None)]).scores("mlp")
        scores[expected] = np.inf
        expected.append(int(scores.argmin()))
        drop_mlps(by_hand, expected[-1:])
    assert prune(copy.deepcopy(llama), ids, drop_mlps=3, iterative=True).dropped["mlp"] == expected
    blocks = prune(llama, ids, drop_blocks=3, iterative=True)
    assert len(blocks.kept_layers) == len(layers_of(llama)) == 1
    assert sorted([*blocks.dropped["block"], *blocks.kept_layers]) == [0, 1, 2, 3]


@pytest.mark.parametrize("method", ["magnitude", "random", "last"])
def test_baselines_choose_on_the_same_interface(llama: PreTrainedModel, ids: Tensor, method: str) -> None:
    with torch.no_grad():
        for parameter in layers_of(llama)[1].mlp.parameters():
            parameter.mul_(0.1)
    first = prune(copy.deepcopy(llama), ids, drop_mlps=2, method=method)
    assert first.dropped == prune(llama, ids, drop_mlps=2, method=method).dropped, "the same seed, the same choice"
    if method == "magnitude":
        assert first.dropped["mlp"][0] == 1
    if method == "last":
        assert first.dropped["mlp"] == [3, 2]
    assert len(layout_of(llama).dropped_mlps) == 2


def test_depth_and_width_together(llama: PreTrainedModel, ids: Tensor) -> None:
    said: list[str] = []
    config = PruneConfig(drop_mlps=1, width_fraction=0.5, min_width=8, round_to=4)
    result = prune_model(llama, config, ids.numpy(), progress=said.append)
    assert sorted(result.widths)[0] == 0
    assert all(width % 4 == 0 for width in result.widths)
    assert result.neurons_removed == 3 * 48 - sum(result.widths)
    assert 66 <= result.neurons_removed <= 72
    assert [message.split()[0] for message in said][-2:] == ["dropped", "removed"]
    even = prune(llama_again(), ids, width_fraction=0.25, width_scope="layer", width_method="magnitude")
    assert even.widths == [36] * 4


def llama_again() -> PreTrainedModel:
    """A fresh Llama of 4 layers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, vocab_size=50)
    )


def write_a_sink(model: PreTrainedModel, layer: int) -> None:
    """Give token 1 a dimension of its own and make an MLP whose only work is to lengthen it: cosines stay near 1."""
    with torch.no_grad():
        embedding = model.get_input_embeddings().weight
        embedding[:, -1], embedding[1] = 0, 0
        embedding[1, -1] = 10
        for block in layers_of(model):
            block.self_attn.o_proj.weight[-1] = 0
            block.mlp.down_proj.weight[-1] = 0
        mlp = layers_of(model)[layer].mlp
        for projection in (mlp.gate_proj, mlp.up_proj, mlp.down_proj):
            projection.weight.zero_()
        mlp.gate_proj.weight[0, -1] = mlp.up_proj.weight[0, -1] = 2
        mlp.down_proj.weight[-1, 0] = 40


@pytest.mark.parametrize("iterative", [False, True])
def test_attention_sinks_are_kept_if_asked_and_warned_of_if_not(
    llama: PreTrainedModel, ids: Tensor, iterative: bool
) -> None:
    write_a_sink(llama, 2)
    rows = torch.cat([torch.ones(len(ids), 1, dtype=torch.int64), ids], 1)
    growth = score_sublayers(llama, batches_of(rows.numpy(), 4)).growth["mlp"]
    assert growth.argmax() == 2
    limit = float(growth[2] - 1e-3)
    assert limit > 10
    said: list[str] = []
    published = PruneConfig(drop_mlps=1, iterative=iterative)
    unguarded = prune_model(copy.deepcopy(llama), published, rows.numpy(), progress=said.append)
    assert unguarded.dropped["mlp"] == [2], "the cosine does not see it"
    assert any("the mlp of layer 2 was dropped, but" in message for message in said)
    guarded = prune(copy.deepcopy(llama), rows, drop_mlps=3, protect_growth=limit, iterative=iterative)
    assert sorted(guarded.dropped["mlp"]) == [0, 1, 3]
    assert guarded.protected["mlp"] == [2]
    assert guarded.order["mlp"][-1] == 2
    with pytest.raises(ValueError, match=r"prune.drop_mlps=4 but only 3 of 4 may be dropped: .* keeps layers \[2\]"):
        prune(llama, rows, drop_mlps=4, protect_growth=limit, iterative=iterative)


def test_pruning_twice_is_refused(llama: PreTrainedModel, ids: Tensor) -> None:
    prune(llama, ids, drop_mlps=1)
    with pytest.raises(ValueError, match="pruned before"):
        prune(llama, ids, drop_mlps=1)


def test_batches_cover_all_rows(ids: Tensor) -> None:
    batches = batches_of(ids.numpy(), 2)
    assert [len(rows) for rows, _ in batches] == [2, 2, 1]
    torch.testing.assert_close(torch.cat([rows for rows, _ in batches]), ids)


def test_speed_is_measured_by_turns(llama: PreTrainedModel, ids: Tensor) -> None:
    turns: list[str] = []
    other = llama_again()
    for name, model in (("one", llama), ("two", other)):
        model.base_model.register_forward_pre_hook(lambda m, i, name=name: turns.append(name))
    rates = tokens_per_second({"one": llama, "two": other}, ids, rounds=2)
    assert turns == ["one", "two", "one", "two", "two", "one"]
    assert all(rate > 0 for rate in rates.values())


def test_plot_is_written(llama: PreTrainedModel, ids: Tensor, tmp_path: Path) -> None:
    plot_importance(prune(llama, ids, drop_mlps=2), tmp_path / "importance.png", "a title")
    assert (tmp_path / "importance.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["importance.png"]
