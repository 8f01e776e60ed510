"""Pooling goes by mask index: padding side, pad == eos and empty rows never change a vector (T-001, T-002, T-005,
T-009)."""

from __future__ import annotations

import pytest
import torch

from components.models.pooling import (
    content_mask,
    dense_vectors,
    eos_pool,
    first_token_index,
    last_token_index,
    mean_pool,
    normalise,
    pad_batch,
    pool,
    positions_from_mask,
)

LEFT, RIGHT, NONE, EMPTY = [0, 0, 1, 1, 1], [1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0]


def test_last_and_first_token_index_for_any_padding_side() -> None:
    mask = torch.tensor([LEFT, RIGHT, NONE])
    assert last_token_index(mask).tolist() == [4, 2, 4]
    assert first_token_index(mask).tolist() == [2, 0, 0]


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, [[3], [1], [1, 2, 3], []]),
        ({"bos": False}, [[2, 3], [0, 1], [0, 1, 2, 3], []]),
        ({"eos": False}, [[3, 4], [1, 2], [1, 2, 3, 4], []]),
        ({"prompt_length": 1}, [[], [], [2, 3], []]),
        ({"bos": False, "eos": False}, [[2, 3, 4], [0, 1, 2], [0, 1, 2, 3, 4], []]),
    ],
)
def test_content_mask_drops_bos_prompt_and_eos_by_index(options: dict, wanted: list[list[int]]) -> None:
    found = content_mask(torch.tensor([LEFT, RIGHT, NONE, EMPTY]), **options)
    assert [row.nonzero()[:, 0].tolist() for row in found] == wanted


def test_the_mask_comes_from_lengths_so_a_real_eos_equal_to_pad_counts() -> None:
    ids, mask = pad_batch([[5, 2], [5, 6, 7, 2]], pad_id=2)
    assert ids.tolist() == [[5, 2, 2, 2], [5, 6, 7, 2]]
    assert mask.sum(dim=1).tolist() == [2, 4]
    assert last_token_index(mask).tolist() == [1, 3]


def test_pooling_takes_the_named_positions() -> None:
    hidden = torch.arange(20.0).reshape(2, 5, 2)
    mask = torch.tensor([LEFT, RIGHT])
    assert torch.equal(eos_pool(hidden, mask), torch.stack([hidden[0, 4], hidden[1, 2]]))
    content = content_mask(mask)
    assert torch.equal(mean_pool(hidden, content), torch.stack([hidden[0, 3], hidden[1, 1]]))


@pytest.mark.parametrize("pooling", ["eos", "mean"])
def test_a_row_without_content_is_zero_and_finite_even_if_its_states_are_nan(pooling: str) -> None:
    hidden = torch.ones(3, 5, 2)
    hidden[2] = float("nan")
    mask = torch.tensor([NONE, [1, 1, 0, 0, 0], EMPTY])
    hidden.requires_grad_()
    vectors = dense_vectors(pool(hidden, mask, content_mask(mask), pooling), torch.full((2,), 0.5))
    assert vectors[1:].abs().sum() == 0
    assert vectors[0].norm().item() == pytest.approx(1)
    vectors.sum().backward()
    assert torch.isfinite(hidden.grad).all()


def test_normalise_keeps_zero_rows_and_fp32() -> None:
    vectors = torch.tensor([[3.0, 4.0], [0.0, 0.0]], dtype=torch.bfloat16)
    assert torch.allclose(normalise(vectors), torch.tensor([[0.6, 0.8], [0.0, 0.0]]))
    assert normalise(vectors).dtype == torch.float32


def test_positions_count_valid_tokens_only() -> None:
    assert positions_from_mask(torch.tensor([LEFT, RIGHT])).tolist() == [[0, 0, 0, 1, 2], [0, 1, 2, 2, 2]]
