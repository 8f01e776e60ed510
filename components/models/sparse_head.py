"""The sparse document: for every term the largest LM-head output over the positions, without ever building [B, T, V].

Forward keeps a running maximum over chunks of positions and of the vocabulary; backward sends each term's gradient to
the one position that won (the first on a tie), exactly as autograd would through the full tensor (LightRetriever 1.7).
For the activations that are probabilities the log-sum-exp over the vocabulary is part of the same pass, and so is its
gradient.

Letters in shapes: B texts, T positions, H hidden size, V vocabulary, C columns asked for (V or fewer), N content
positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import embedding_bag

from components.models.config import RetrieverConfig

NORMALISED = frozenset({"probability_root", "log_probability"})
"""Activations of softmax probabilities; the others take raw logits."""


@dataclass(frozen=True)
class Chunks:
    """How much is worked on at once: `positions` × `columns` logits (and `positions` × V where probabilities are
    asked for)."""

    positions: int
    columns: int


def default_chunks(device: torch.device) -> Chunks:
    """Cache-sized on a CPU (measured: up to twice as fast as one product over V), launch-sized on a GPU."""
    return Chunks(128, 4096) if device.type == "cpu" else Chunks(1024, 16384)


def sparse_values(
    hidden: Tensor, content: Tensor, weight: Tensor, config: RetrieverConfig, producible: Tensor, *,
    bias: Tensor | None = None, columns: Tensor | None = None, chunks: Chunks | None = None,
) -> Tensor:  # fmt: skip
    """fp32 [B, C] ≥ 0: the sparse vectors of B texts, without the lexical prior.

    hidden [B, T, H]; content bool [B, T] (`content_mask`: no bos, prompt, eos, padding); weight [V, H] the LM head
    without phantom rows; producible bool [V]: other columns are zero; columns int64 [C]: only these columns, in this
    order (the probabilities are still over all of V). A text without content is all zeros and has no gradient.
    """
    largest = max_logits(
        hidden,
        content,
        weight,
        bias=bias,
        columns=columns,
        normalised=config.sparse_activation in NORMALISED,
        chunks=chunks,
    )
    kept = producible if columns is None else producible[columns]
    return activate(largest, config).masked_fill(~kept, 0.0)


def activate(largest: Tensor, config: RetrieverConfig) -> Tensor:
    """The activation of `RetrieverConfig.sparse_activation`; monotone, so it may follow the maximum over positions."""
    if config.sparse_activation == "log1p_relu":
        return largest.relu().log1p()
    if config.sparse_activation == "log1p_log1p_relu":
        return largest.relu().log1p().log1p()
    if config.sparse_activation == "probability_root":
        return (largest / 2).exp()
    return (largest + config.log_probability_shift).relu() / config.log_probability_shift


def max_logits(
    hidden: Tensor, content: Tensor, weight: Tensor, *, bias: Tensor | None = None, columns: Tensor | None = None,
    normalised: bool = False, chunks: Chunks | None = None,
) -> Tensor:  # fmt: skip
    """fp32 [B, C]: max over the content positions of the logit, or of the log-probability if `normalised`.

    A text without content gets finfo.min. Gradients reach hidden, weight and bias where they ask for one. fp64 stays
    fp64.
    """
    content = content.bool()
    rows = hidden[content]
    counts = content.sum(dim=1).tolist()
    wanted = (rows, weight, bias) if bias is not None else (rows, weight)
    learning = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in wanted)
    chunks = chunks or default_chunks(hidden.device)
    return _MaxLinear.apply(rows, weight, bias, columns, counts, normalised, learning, chunks)


class _MaxLinear(torch.autograd.Function):
    """rows [N, H] of texts with `counts` rows each → max [B, C]; see `max_logits`."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, columns: Tensor | None, counts: list[int],
        normalised: bool, learning: bool, chunks: Chunks,
    ) -> Tensor:  # fmt: skip
        exact = torch.float64 if rows.dtype == torch.float64 else torch.float32
        asked_weight = weight if columns is None else weight[columns]
        asked_bias = bias if bias is None or columns is None else bias[columns]
        shape = (len(counts), asked_weight.shape[0])
        best = rows.new_full(shape, torch.finfo(exact).min, dtype=exact)
        winner = torch.full(shape, -1, dtype=torch.int32, device=rows.device) if learning else None
        normaliser = rows.new_zeros(rows.shape[0], dtype=exact) if normalised else None
        for start, segments in _groups(counts, chunks.positions):
            part = rows[start : start + segments[-1][2]]
            blocks: list[Tensor] | None = None
            offset = None
            if normaliser is not None:
                offset, blocks = _log_sum_exp(part, weight, bias, exact, chunks.columns, keep=columns is None)
                normaliser[start : start + len(part)] = offset
            for number, first in enumerate(range(0, shape[1], chunks.columns)):
                span = slice(first, min(first + chunks.columns, shape[1]))
                block = blocks[number] if blocks is not None else _logits(part, asked_weight, asked_bias, span, exact)
                if offset is not None:
                    block.sub_(offset[:, None])
                _keep_largest(block, segments, span, start, best, winner)
        ctx.normalised, ctx.chunks = normalised, chunks
        ctx.save_for_backward(rows, weight, bias, columns, winner, normaliser)
        return best

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, bias, columns, winner, normaliser = ctx.saved_tensors
        want_rows, want_weight, want_bias = ctx.needs_input_grad[:3]
        exact = gradient.dtype
        gradient = gradient.masked_fill(winner < 0, 0.0)
        text, column = gradient.nonzero(as_tuple=True)
        value, position = gradient[text, column], winner[text, column].long()
        vocabulary = column if columns is None else columns[column]
        grad_rows = _weighted_sums(weight, vocabulary, value, position, rows.shape[0]) if want_rows else None
        grad_weight = _weighted_sums(rows, position, value, vocabulary, weight.shape[0]) if want_weight else None
        grad_bias = value.new_zeros(weight.shape[0]).index_add_(0, vocabulary, value) if want_bias else None
        if ctx.normalised:
            share = value.new_zeros(rows.shape[0]).index_add_(0, position, value)
            for at in share.nonzero()[:, 0].split(ctx.chunks.positions):
                part = rows[at]
                for first in range(0, weight.shape[0], ctx.chunks.columns):
                    span = slice(first, min(first + ctx.chunks.columns, weight.shape[0]))
                    block = (
                        _logits(part, weight, bias, span, exact).sub_(normaliser[at, None]).exp_().mul_(share[at, None])
                    )
                    if grad_rows is not None:
                        grad_rows[at] -= (block.to(weight.dtype) @ weight[span]).to(grad_rows.dtype)
                    if grad_weight is not None:
                        grad_weight[span] -= (block.to(rows.dtype).T @ part).to(grad_weight.dtype)
                    if grad_bias is not None:
                        grad_bias[span] -= block.sum(dim=0)
        return (
            None if grad_rows is None else grad_rows.to(rows.dtype),
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype), None, None, None, None, None,
        )  # fmt: skip


def _groups(counts: list[int], size: int) -> list[tuple[int, list[tuple[int, int, int]]]]:
    """Runs of at most `size` rows: (first row, [(text, first row in the run, end row in the run), …]); long texts
    are split."""
    groups: list[tuple[int, list[tuple[int, int, int]]]] = []
    segments: list[tuple[int, int, int]] = []
    row = start = 0
    for text, count in enumerate(counts):
        left = count
        while left:
            if row - start == size:
                groups.append((start, segments))
                start, segments = row, []
            take = min(left, size - (row - start))
            segments.append((text, row - start, row - start + take))
            row, left = row + take, left - take
    if segments:
        groups.append((start, segments))
    return groups


def _logits(rows: Tensor, weight: Tensor, bias: Tensor | None, span: slice, exact: torch.dtype) -> Tensor:
    logits = rows @ weight[span].T
    return (logits if bias is None else logits + bias[span]).to(exact)


def _log_sum_exp(
    rows: Tensor, weight: Tensor, bias: Tensor | None, exact: torch.dtype, size: int, *, keep: bool
) -> tuple[Tensor, list[Tensor] | None]:
    """The log-sum-exp [n] over the vocabulary, and the blocks of logits if they are to be kept."""
    blocks: list[Tensor] = []
    sums = []
    for first in range(0, weight.shape[0], size):
        block = _logits(rows, weight, bias, slice(first, min(first + size, weight.shape[0])), exact)
        sums.append(block.logsumexp(dim=1))
        if keep:
            blocks.append(block)
    return torch.stack(sums).logsumexp(dim=0), blocks if keep else None


def _keep_largest(
    block: Tensor, segments: list[tuple[int, int, int]], span: slice, start: int, best: Tensor, winner: Tensor | None
) -> None:
    """Update the running maximum (and its row, the first on ties) of each text with the logits of one block."""
    for text, first, end in segments:
        current = best[text, span]
        if winner is None:
            torch.maximum(current, block[first:end].amax(dim=0), out=current)
            continue
        value, index = block[first:end].max(dim=0)
        better = value > current
        current.copy_(torch.where(better, value, current))
        place = winner[text, span]
        place.copy_(torch.where(better, (index + (start + first)).to(torch.int32), place))


def _weighted_sums(matrix: Tensor, source: Tensor, value: Tensor, target: Tensor, size: int) -> Tensor:
    """[size, H]: row t is the sum of value · matrix[source] over the entries whose target is t, without an [entries,
    H] copy."""
    if not size:
        return value.new_zeros(0, matrix.shape[1])
    order = target.argsort(stable=True)
    ends = torch.bincount(target, minlength=size).cumsum(0)
    offsets = torch.cat([ends.new_zeros(1), ends[:-1]])
    weights = value[order].to(matrix.dtype)
    return embedding_bag(source[order], matrix, offsets, mode="sum", per_sample_weights=weights).to(value.dtype)
