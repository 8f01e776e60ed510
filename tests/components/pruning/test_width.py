"""Gates, ranking, slicing and neuron scores: identity at the start, masked = sliced, stable and bounded rankings."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import PreTrainedModel

from components.pruning.architecture import layers_of, layout_of, parameter_count
from components.pruning.depth import drop_mlps
from components.pruning.neurons import magnitude_scores, random_scores, score_neurons, wanda_scores
from components.pruning.width import (
    attach_gates,
    detach_gates,
    gate_penalty,
    gate_scores,
    rank_neurons,
    slice_widths,
)

HIDDEN, WIDTH = 32, 48


def test_gates_are_the_identity_at_the_start_and_alone_trainable(any_model: PreTrainedModel, ids: Tensor) -> None:
    drop_mlps(any_model, [3])
    with torch.no_grad():
        before = any_model(ids).logits
        gates = attach_gates(any_model)
        torch.testing.assert_close(any_model(ids).logits, before, rtol=0, atol=0)
    assert gates[3] is None
    present = [gate for gate in gates if gate is not None]
    assert all(gate.dtype == torch.float32 and gate.shape == (WIDTH,) and bool((gate == 1).all()) for gate in present)
    trainable = [parameter for parameter in any_model.parameters() if parameter.requires_grad]
    assert len(trainable) == len(present) == 3
    any_model(input_ids=ids, labels=ids).loss.backward()
    assert all(gate.grad is not None and bool(gate.grad.abs().sum() > 0) for gate in present)
    detach_gates(any_model)
    with torch.no_grad():
        torch.testing.assert_close(any_model(ids).logits, before, rtol=0, atol=0)


def test_gates_stay_fp32_in_a_bf16_model(llama: PreTrainedModel, ids: Tensor) -> None:
    """Spec trap 39: 500 updates of 1e-4 must not be rounded away."""
    llama.to(torch.bfloat16)
    gates = [gate for gate in attach_gates(llama) if gate is not None]
    assert all(gate.dtype == torch.float32 for gate in gates)
    with torch.no_grad():
        for _ in range(500):
            gates[0] -= 1e-4
    assert gates[0][0].item() == pytest.approx(0.95, abs=1e-3)
    assert llama(ids).logits.dtype == torch.bfloat16


def test_penalty_is_the_formula_and_its_gradients_are_the_published_ones() -> None:
    """Spec 4.2: dR/dz = beta s (1 - s), 0.0332 at z = 1, 1.25 at z -> 0+, 0 below; R from n/2 to n."""
    z = torch.tensor([1.0, 1e-6, -0.5, 2.0], requires_grad=True)
    penalty = gate_penalty([z, None])
    expected = sum(1 / (1 + math.exp(-5 * max(value, 0.0))) for value in z.tolist())
    assert penalty.item() == pytest.approx(expected, rel=1e-6)
    penalty.backward()
    assert z.grad is not None
    assert z.grad.tolist() == pytest.approx([0.0332, 1.25, 0.0, 5 * 4.54e-5], rel=5e-3, abs=1e-9)
    assert gate_penalty([torch.zeros(10)]).item() == pytest.approx(5.0)
    with pytest.raises(ValueError, match="no gate"):
        gate_penalty([None])


def test_masked_equals_sliced(any_model: PreTrainedModel, ids: Tensor) -> None:
    """Spec invariant 9, with widths that differ by layer; biases of gate and up are sliced too."""
    drop_mlps(any_model, [1])
    scores = random_scores(any_model, seed=3)
    keep = rank_neurons(scores, 0.4, min_width=3)
    masked = copy.deepcopy(any_model)
    for gate, mask in zip(attach_gates(masked), keep, strict=True):
        if gate is not None and mask is not None:
            gate.data.copy_(mask.float())
    before = parameter_count(any_model)
    slice_widths(any_model, keep)
    with torch.no_grad():
        torch.testing.assert_close(any_model(ids).logits, masked(ids).logits, rtol=0, atol=1e-5)
    removed = sum(WIDTH - width for layer, width in enumerate(layout_of(any_model).widths) if layer != 1)
    bias = layers_of(any_model)[0].mlp.gate_proj.bias is not None
    assert removed == round(0.4 * 3 * WIDTH)
    assert before - parameter_count(any_model) == removed * (3 * HIDDEN + (2 if bias else 0))


def test_slicing_takes_gates_away_and_counts_the_rest_as_one(llama: PreTrainedModel, ids: Tensor) -> None:
    reference = copy.deepcopy(llama)
    gates = attach_gates(llama)
    for gate in gates:
        assert gate is not None
        gate.data.mul_(torch.linspace(0.2, 1.8, WIDTH))
    keep = rank_neurons(gate_scores(gates), 0.25)
    slice_widths(llama, keep)
    slice_widths(reference, keep)
    assert layout_of(llama).widths == (36, 36, 36, 36), "the same gates in each layer: the same widths"
    assert not any("gate" in name.split(".")[-1] for name in llama.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(llama(ids).logits, reference(ids).logits, rtol=0, atol=0)


def test_ranking_is_global_stable_and_keeps_a_minimum() -> None:
    """Spec trap 41."""
    low, high = torch.full((10,), 0.1), torch.full((10,), 0.9)
    keep = rank_neurons([low, None, high], 0.4, min_width=1)
    assert keep[1] is None
    assert keep[0] is not None
    assert keep[2] is not None
    assert (int(keep[0].sum()), int(keep[2].sum())) == (2, 10), "global: all from the layer with low scores"
    keep = rank_neurons([low, high], 0.5, min_width=3)
    assert [int(mask.sum()) for mask in keep if mask is not None] == [3, 7], "the minimum pushes the cut to the next"
    ties = rank_neurons([torch.ones(4), torch.ones(4)], 0.5)
    assert [mask.tolist() for mask in ties if mask is not None] == [[False] * 3 + [True], [False] + [True] * 3]
    even = rank_neurons([low, high], 0.3, scope="layer")
    assert [int(mask.sum()) for mask in even if mask is not None] == [7, 7]
    with pytest.raises(ValueError, match=r"removes 18 of 20 neurons but prune.min_width=3 leaves only 14"):
        rank_neurons([low, high], 0.9, min_width=3)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_ranking_properties(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 30), min_size=1, max_size=5))
    minimum, multiple = data.draw(st.integers(1, 6)), data.draw(st.sampled_from([1, 2, 8]))
    values = st.integers(0, 5)
    scores = [torch.tensor(data.draw(st.lists(values, min_size=n, max_size=n)), dtype=torch.float32) for n in sizes]
    total, removable = sum(sizes), sum(max(0, n - minimum) for n in sizes)
    wanted = data.draw(st.integers(0, min(removable, total - 1)))
    keep = rank_neurons(scores, wanted / total, min_width=minimum, round_to=multiple)
    exact = rank_neurons(scores, wanted / total, min_width=minimum)
    widths = [int(mask.sum()) for mask in keep if mask is not None]
    assert total - sum(int(mask.sum()) for mask in exact if mask is not None) == wanted
    for mask, without, n, width, layer_scores in zip(keep, exact, sizes, widths, scores, strict=True):
        assert mask is not None
        assert without is not None
        assert width >= min(minimum, n)
        assert width == n or width % multiple == 0
        assert bool((mask | ~without).all()), "rounding only takes neurons back"
        if width < n:
            assert layer_scores[~mask].max() <= layer_scores[mask].min() or width == int(without.sum()) == minimum


def test_wanda_equals_a_slow_reference_in_any_batching(llama: PreTrainedModel, ids: Tensor) -> None:
    drop_mlps(llama, [0])
    stored: dict[int, list[Tensor]] = {}
    hooks = [
        layer.mlp.down_proj.register_forward_pre_hook(
            lambda m, i, index=index: stored.setdefault(index, []).append(i[0].reshape(-1, WIDTH))
        )
        for index, layer in enumerate(layers_of(llama))
        if index
    ]
    with torch.no_grad():
        llama(ids)
    for hook in hooks:
        hook.remove()
    mask = torch.ones_like(ids)
    padded = torch.cat([ids, torch.zeros_like(ids[:, :2])], 1)
    mask = torch.cat([mask, torch.zeros_like(ids[:, :2])], 1)
    for batches in (
        [(ids, None)],
        [(row[None], None) for row in ids],
        [(padded[:2], mask[:2]), (padded[2:], mask[2:])],
    ):
        scores = wanda_scores(llama, batches)
        assert scores[0] is None
        for index in (1, 2, 3):
            activations = torch.cat(stored[index]).double()
            weight = layers_of(llama)[index].mlp.down_proj.weight.detach().double()
            expected = activations.square().mean(0).sqrt() * weight.norm(dim=0)
            torch.testing.assert_close(scores[index], expected, rtol=1e-5, atol=1e-8)
    with pytest.raises(ValueError, match="calibration text"):
        wanda_scores(llama, [])


def test_baselines_share_the_interface(llama: PreTrainedModel, ids: Tensor) -> None:
    drop_mlps(llama, [2])
    for method in ("wanda", "magnitude", "random"):
        scores = score_neurons(llama, method, batches=[(ids, None)], seed=1)
        assert [None if s is None else tuple(s.shape) for s in scores] == [(WIDTH,), (WIDTH,), None, (WIDTH,)]
        assert all(s.dtype == torch.float64 for s in scores if s is not None)
    again, other = random_scores(llama, 1)[0], random_scores(llama, 2)[0]
    torch.testing.assert_close(again, score_neurons(llama, "random", seed=1)[0])
    assert again is not None
    assert other is not None
    assert not torch.equal(again, other)
    mlp = layers_of(llama)[0].mlp
    parts = (mlp.gate_proj.weight[5], mlp.up_proj.weight[5], mlp.down_proj.weight[:, 5])
    magnitude = magnitude_scores(llama)[0]
    assert magnitude is not None
    assert magnitude[5].item() == pytest.approx(torch.cat(parts).norm().item(), rel=1e-6)


def test_slicing_refuses_masks_that_do_not_fit(llama: PreTrainedModel) -> None:
    whole = torch.ones(WIDTH, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"layer 1: wanted a mask of 48"):
        slice_widths(llama, [whole, whole[:3], whole, whole])
    with pytest.raises(ValueError, match=r"layer 2: wanted a mask of 48 neurons that keeps one"):
        slice_widths(llama, [whole, whole, ~whole, whole])
    with pytest.raises(ValueError, match="layer 3: a mask is needed"):
        slice_widths(llama, [whole, whole, whole, None])
