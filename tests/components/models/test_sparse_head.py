"""The chunked sparse head equals the naive [B, T, V] one: values, gradients, masks, ties, empty texts (spec
invariant 4)."""

from __future__ import annotations

import pytest
import torch

from components.models.config import RetrieverConfig
from components.models.sparse_head import Chunks, max_logits, sparse_values

B, T, H, V = 3, 7, 5, 23
ACTIVATIONS = ["log1p_relu", "log1p_log1p_relu", "probability_root", "log_probability"]
SIZES = [Chunks(128, 2048), Chunks(2, 4), Chunks(1, 23), Chunks(5, 1)]


def naive(
    hidden: torch.Tensor, content: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None,
    config: RetrieverConfig, producible: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """The formulas of `RetrieverConfig.sparse_activation` on the whole [B, T, V] tensor, activation before the
    maximum."""
    logits = hidden @ weight.T
    logits = logits if bias is None else logits + bias
    shift = config.log_probability_shift
    values = {
        "log1p_relu": lambda: torch.log1p(logits.relu()),
        "log1p_log1p_relu": lambda: torch.log1p(torch.log1p(logits.relu())),
        "probability_root": lambda: logits.softmax(dim=-1).sqrt(),
        "log_probability": lambda: (logits.log_softmax(dim=-1) + shift).relu() / shift,
    }[config.sparse_activation]()
    return torch.where(content[:, :, None] & producible, values, 0.0).amax(dim=1)


@pytest.fixture
def case() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    content = torch.tensor([[0, 1, 1, 1, 1, 1, 0], [0, 1, 1, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0]], dtype=torch.bool)
    producible = torch.ones(V, dtype=torch.bool)
    producible[[0, 1, 20]] = False
    return {
        "hidden": torch.randn(B, T, H, dtype=torch.float64, generator=generator),
        "weight": torch.randn(V, H, dtype=torch.float64, generator=generator),
        "bias": torch.randn(V, dtype=torch.float64, generator=generator),
        "content": content,
        "producible": producible,
    }


@pytest.mark.parametrize("chunks", SIZES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("columns", [None, [3, 17, 0, 9]])
def test_values_and_gradients_equal_the_naive_head(
    case: dict[str, torch.Tensor], activation: str, chunks: Chunks, with_bias: bool, columns: list[int] | None
) -> None:
    config = RetrieverConfig(sparse_activation=activation, log_probability_shift=4.0)
    tensors = [case["hidden"], case["weight"], *([case["bias"]] if with_bias else [])]
    mine = [tensor.clone().requires_grad_() for tensor in tensors]
    theirs = [tensor.clone().requires_grad_() for tensor in tensors]
    asked = None if columns is None else torch.tensor(columns)
    found = sparse_values(
        mine[0], case["content"], mine[1], config, case["producible"], bias=mine[2] if with_bias else None,
        columns=asked, chunks=chunks,
    )  # fmt: skip
    wanted = naive(theirs[0], case["content"], theirs[1], theirs[2] if with_bias else None, config, case["producible"])
    wanted = wanted if asked is None else wanted[:, asked]
    assert torch.allclose(found, wanted, atol=1e-12)
    assert (found > 0).any()
    slope = torch.randn(found.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    (found * slope).sum().backward()
    (wanted * slope).sum().backward()
    for ours, reference in zip(mine, theirs, strict=True):
        assert torch.allclose(ours.grad, reference.grad, atol=1e-12)
    with torch.no_grad():
        without = sparse_values(
            mine[0], case["content"], mine[1], config, case["producible"], bias=mine[2] if with_bias else None,
            columns=asked, chunks=chunks,
        )  # fmt: skip
    assert torch.equal(without, found)


@pytest.mark.parametrize("normalised", [True, False])
def test_gradcheck(case: dict[str, torch.Tensor], normalised: bool) -> None:
    hidden, weight, bias = (case[name].clone().requires_grad_() for name in ("hidden", "weight", "bias"))

    def function(*tensors: torch.Tensor) -> torch.Tensor:
        return max_logits(
            tensors[0], case["content"], tensors[1], bias=tensors[2], normalised=normalised, chunks=Chunks(3, 4)
        )[:2]

    assert torch.autograd.gradcheck(function, (hidden, weight, bias))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_text_without_content_is_zero_with_zero_gradient(case: dict[str, torch.Tensor], activation: str) -> None:
    hidden = case["hidden"].float().requires_grad_()
    config = RetrieverConfig(sparse_activation=activation)
    found = sparse_values(hidden, case["content"], case["weight"].float(), config, case["producible"])
    assert found.dtype == torch.float32
    assert found[2].abs().sum() == 0
    found.sum().backward()
    assert hidden.grad[2].abs().sum() == 0
    assert torch.isfinite(hidden.grad).all()
    nothing = sparse_values(hidden, torch.zeros(B, T), case["weight"].float(), config, case["producible"])
    assert nothing.shape == (B, V)
    assert nothing.abs().sum() == 0
    nothing.sum().backward()


@pytest.mark.parametrize("chunks", SIZES)
def test_the_first_position_wins_a_tie(chunks: Chunks) -> None:
    hidden = torch.ones(1, 6, 2, requires_grad=True)
    content = torch.tensor([[False, False, True, True, True, False]])
    max_logits(hidden, content, torch.ones(4, 2), chunks=chunks).sum().backward()
    assert hidden.grad[0, :, 0].tolist() == [0, 0, 4, 0, 0, 0]


def test_masked_positions_never_reach_the_maximum_or_the_gradient(case: dict[str, torch.Tensor]) -> None:
    """T-037: a bos, eos or prompt state, however large, does not decide the vector."""
    config = RetrieverConfig()
    hidden = case["hidden"].float()
    loud = hidden.clone()
    loud[~case["content"]] = 1e6
    loud.requires_grad_()
    weight = case["weight"].float()
    found = sparse_values(loud, case["content"], weight, config, case["producible"])
    assert torch.equal(found, sparse_values(hidden, case["content"], weight, config, case["producible"]))
    found.sum().backward()
    assert loud.grad[~case["content"]].abs().sum() == 0


def test_a_frozen_head_gets_no_gradient_and_costs_none(case: dict[str, torch.Tensor]) -> None:
    hidden, weight = case["hidden"].clone().requires_grad_(), case["weight"]
    max_logits(hidden, case["content"], weight, normalised=True).sum().backward()
    assert weight.grad is None
    assert hidden.grad is not None


def test_bfloat16_gives_fp32_values_and_bfloat16_gradients(case: dict[str, torch.Tensor]) -> None:
    hidden = case["hidden"].bfloat16().requires_grad_()
    weight = case["weight"].bfloat16().requires_grad_()
    for normalised in (True, False):
        found = max_logits(hidden, case["content"], weight, normalised=normalised)
        assert found.dtype == torch.float32
        exact = max_logits(case["hidden"], case["content"], case["weight"], normalised=normalised)
        assert torch.allclose(found[:2].double(), exact[:2], atol=0.1)
        found[:2].sum().backward()
    assert hidden.grad.dtype == weight.grad.dtype == torch.bfloat16


def test_the_naive_tensor_is_never_allocated() -> None:
    """T-047: the largest tensor made, forward and backward, is far below [B, T, V]."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_flatten

    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            for value in tree_flatten(result)[0]:
                if isinstance(value, torch.Tensor):
                    largest = max(largest, value.numel())
            return result

    texts, length, hidden_size, vocabulary = 4, 128, 8, 5000
    hidden = torch.randn(texts, length, hidden_size, requires_grad=True)
    content = torch.ones(texts, length, dtype=torch.bool)
    weight = torch.randn(vocabulary, hidden_size)
    for normalised in (False, True):
        largest = 0
        with Watch():
            max_logits(hidden, content, weight, normalised=normalised, chunks=Chunks(16, 500)).sum().backward()
        assert largest <= max(texts * vocabulary, vocabulary * hidden_size)
