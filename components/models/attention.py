"""The packed query of LightRetriever (1.3): one prompt, then a block `[token, eos]` a token that sees the prompt and
itself only.

Letters in shapes: B sequences, L positions, P prompt length, n blocks, w block width (2 with eos, else 1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Packed:
    """Inputs of one packed forward pass and where its token vectors are."""

    ids: Tensor
    """int64 [B, L]."""
    positions: Tensor
    """int64 [B, L]: every block restarts at P."""
    mask: Tensor
    """float [B or 1, 1, L, L]: 0 where a query row may look, a very negative finite number elsewhere."""
    pooled: Tensor
    """int64 [B, n]: the index of each block's last position, where its token vector is read."""
    valid: Tensor
    """bool [B, n]: False for blocks that only fill up the batch."""


def packed_visible(prompt_length: int, blocks: int, width: int, device: torch.device | str = "cpu") -> Tensor:
    """bool [L, L], L = P + n·w: True where row q may attend to column k (LightRetriever A.7 eq. 9).

    Causal inside the prompt; every block sees the whole prompt; causal inside a block; nothing else.
    """
    index = torch.arange(prompt_length + blocks * width, device=device)
    causal = index[None, :] <= index[:, None]
    block = torch.where(index < prompt_length, -1, (index - prompt_length) // width)
    return causal & ((block[None, :] == -1) | (block[None, :] == block[:, None]))


def additive_mask(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """float [B, 1, L, L] of a bool [B, L, L] mask: 0 or half of finfo.min, which stays finite when autocast narrows it.

    Additive because eager attention adds the mask; SDPA takes either. Finite because -inf in a wholly masked row gives
    NaN, which then poisons every pooled sum (spec trap 6). transformers 5 passes 4-D masks through untouched.
    """
    blocked = torch.finfo(dtype).min / 2
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, blocked)[:, None]


def pack_tokens(
    tokens: Sequence[Sequence[int]], prompt: Sequence[int], *, eos_id: int | None, pad_id: int, dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> Packed:  # fmt: skip
    """One packed sequence a row of `tokens`: `prompt t0 eos t1 eos …`, right-padded to the longest row.

    `eos_id` None means blocks of one token, for models trained without eos. Padding positions attend to themselves
    only.
    """
    width = 1 if eos_id is None else 2
    prompt_length, blocks = len(prompt), max(1, max((len(row) for row in tokens), default=1))
    length = prompt_length + blocks * width
    counts = torch.tensor([len(row) for row in tokens], dtype=torch.int64)
    ids = torch.full((len(tokens), length), pad_id, dtype=torch.int64)
    ids[:, :prompt_length] = torch.as_tensor(list(prompt), dtype=torch.int64)
    for row, values in enumerate(tokens):
        end = prompt_length + len(values) * width
        ids[row, prompt_length:end:width] = torch.as_tensor(values, dtype=torch.int64)
        if eos_id is not None:
            ids[row, prompt_length + 1 : end : 2] = eos_id
    index = torch.arange(length)
    positions = torch.where(index < prompt_length, index, prompt_length + (index - prompt_length) % width)
    real = index[None, :] < (prompt_length + counts * width)[:, None]
    visible = packed_visible(prompt_length, blocks, width)[None] & real[:, None, :] & real[:, :, None]
    visible = visible | torch.eye(length, dtype=torch.bool)[None]
    block = torch.arange(blocks)
    pooled = (prompt_length + block * width + width - 1).expand(len(tokens), -1)
    return Packed(
        ids=ids.to(device), positions=positions.expand(len(tokens), -1).to(device),
        mask=additive_mask(visible.to(device), dtype), pooled=pooled.to(device),
        valid=(block[None, :] < counts[:, None]).to(device),
    )  # fmt: skip
