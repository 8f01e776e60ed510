"""From hidden states to one vector a text. Pooling goes by mask index, so the padding side does not matter (T-001,
T-002).

Letters in shapes: B texts, T positions, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def pad_batch(ids: Sequence[Sequence[int]], pad_id: int, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """Right-padded ids int64 [B, T] and mask bool [B, T]. The mask comes from the lengths, never from `ids != pad`
    (T-005)."""
    lengths = torch.tensor([len(row) for row in ids], dtype=torch.int64)
    width = max(1, int(lengths.max()) if len(ids) else 1)
    batch = torch.full((len(ids), width), pad_id, dtype=torch.int64)
    for row, values in enumerate(ids):
        batch[row, : len(values)] = torch.as_tensor(values, dtype=torch.int64)
    mask = torch.arange(width)[None, :] < lengths[:, None]
    return batch.to(device), mask.to(device)


def first_token_index(mask: Tensor) -> Tensor:
    """int64 [B]: the index of the first 1 in each row of a [B, T] mask; 0 for a row without one."""
    return mask.to(torch.int8).argmax(dim=1)


def last_token_index(mask: Tensor) -> Tensor:
    """int64 [B]: the index of the last 1 in each row of a [B, T] mask, whatever side is padded; T - 1 for a row
    without one."""
    return mask.shape[1] - 1 - mask.to(torch.int8).flip(1).argmax(dim=1)


def content_mask(mask: Tensor, *, bos: bool = True, eos: bool = True, prompt_length: int = 0) -> Tensor:
    """bool [B, T]: the positions that the sparse max and the mean may use: `mask` minus bos, prompt and eos.

    bos is the first valid position of a row, the prompt the `prompt_length` positions after it, eos the last valid one
    (LightRetriever 1.7). Set `bos` or `eos` to False for texts that were built without them: nothing real is dropped
    then.
    """
    rank = mask.to(torch.int64).cumsum(dim=1)
    allowed = mask.bool() & (rank > int(bos) + prompt_length)
    return allowed & (rank < rank[:, -1:]) if eos else allowed


def positions_from_mask(mask: Tensor) -> Tensor:
    """int64 [B, T]: position ids that count valid tokens from 0, so that left padding shifts nothing."""
    return (mask.to(torch.int64).cumsum(dim=1) - 1).clamp(min=0)


def eos_pool(hidden: Tensor, mask: Tensor) -> Tensor:
    """[B, H]: the state at the last valid position of each row; zeros for a row without one."""
    rows = torch.arange(hidden.shape[0], device=hidden.device)
    return _zero_empty(hidden[rows, last_token_index(mask)], mask)


def mean_pool(hidden: Tensor, content: Tensor) -> Tensor:
    """[B, H] fp32: the mean state over the positions of `content` (bool [B, T]); zeros for a row without one."""
    kept = hidden.float().masked_fill(~content[:, :, None], 0.0)
    return kept.sum(dim=1) / content.sum(dim=1, keepdim=True).clamp(min=1)


def pool(hidden: Tensor, mask: Tensor, content: Tensor, pooling: str) -> Tensor:
    """[B, H] fp32: the raw dense vector by `RetrieverConfig.pooling`; zeros for a text without content positions."""
    pooled = mean_pool(hidden, content) if pooling == "mean" else eos_pool(hidden, mask).float()
    return _zero_empty(pooled, content)


def normalise(vectors: Tensor) -> Tensor:
    """Unit rows in fp32; a zero row stays zero and has a finite gradient."""
    vectors = vectors if vectors.dtype == torch.float64 else vectors.float()
    return vectors / vectors.pow(2).sum(dim=-1, keepdim=True).clamp(min=1e-24).sqrt()


def dense_vectors(pooled: Tensor, center: Tensor | None = None) -> Tensor:
    """fp32 unit rows [B, H] of pooled vectors minus `center` [H]; a zero row (no content) stays zero."""
    if center is None:
        return normalise(pooled)
    empty = (pooled == 0).all(dim=-1, keepdim=True)
    return normalise((pooled.float() - center.float()).masked_fill(empty, 0.0))


def _zero_empty(pooled: Tensor, mask: Tensor) -> Tensor:
    return pooled.masked_fill(~mask.bool().any(dim=1, keepdim=True), 0.0)
