"""The light query: one vector a token, summed and normalised. Training, tables and tests all go through `token_rows`.

Letters in shapes: Q queries, N distinct ids, M tokens of all queries, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from components.models.attention import Packed, pack_tokens
from components.models.backbone import embedding_weight, head_weight, last_hidden, producible_mask
from components.models.config import RetrieverConfig
from components.models.pooling import normalise
from components.text import Text

BLOCKS = 128
"""Blocks in one sequence of the distinct form: more shares the prompt better, fewer keeps attention cheap."""


@dataclass(frozen=True)
class TokenBags:
    """A batch of queries as indices into its distinct ids, so the query side never becomes [Q, V] (T-045)."""

    ids: Tensor
    """int64 [N], ascending."""
    index: Tensor
    """int64 [M]: which of `ids` each token is."""
    query: Tensor
    """int64 [M]: which query each token belongs to."""
    counts: Tensor
    """int64 [Q]: tokens of each query."""


def token_bags(queries: Sequence[Sequence[int]], device: torch.device | str = "cpu") -> TokenBags:
    """The bags of a batch of queries given as token ids (from `Text.queries` or `Text.sparse_queries`)."""
    flat = torch.tensor([i for query in queries for i in query], dtype=torch.int64)
    counts = torch.tensor([len(query) for query in queries], dtype=torch.int64)
    ids, index = torch.unique(flat, return_inverse=True)
    query = torch.repeat_interleave(torch.arange(len(queries)), counts)
    return TokenBags(ids.to(device), index.to(device), query.to(device), counts.to(device))


def bag_vectors(rows: Tensor, bags: TokenBags) -> Tensor:
    """fp32 unit rows [Q, H]: the normalised mean of each query's token rows (LightRetriever 1.3); zero for an empty
    query."""
    total = rows.new_zeros((len(bags.counts), rows.shape[1]), dtype=torch.float32)
    total = total.index_add(0, bags.query, rows.float()[bags.index])
    return normalise(total / bags.counts.clamp(min=1)[:, None])


def token_rows(
    model: nn.Module, ids: Tensor, *, text: Text, config: RetrieverConfig, prompt: Sequence[int] = (),
    weights: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """fp32 [N, H]: the dense query vector of each id in `ids` (int64 [N]), by `config.query_dense`.

    `prompt` is `Text.prompt(instruction_prompt(task))` and matters to the packed form only. `weights` [V] scales each
    row (IDF); None means 1. Rows are raw: only their sum over a query is normalised. Differentiable in the model.
    """
    if config.query_dense == "packed":
        rows = packed_rows(model, ids, prompt, text)
    elif config.query_dense == "head":
        rows = static_rows(head_weight(model, text.vocabulary_size), ids, text, center=True)
    else:
        rows = static_rows(embedding_weight(model, text.vocabulary_size), ids, text, center=config.center)
    return rows if weights is None else rows * weights.to(rows)[ids][:, None]


def static_rows(matrix: Tensor, ids: Tensor, text: Text, *, center: bool) -> Tensor:
    """fp32 [N, H]: rows `ids` of `matrix` [V, H], minus the mean of the rows that plain text can produce if
    `center`."""
    rows = matrix[ids].float()
    return rows - matrix[producible_mask(text, matrix.device)].float().mean(dim=0) if center else rows


def packed_rows(
    model: nn.Module, ids: Tensor, prompt: Sequence[int], text: Text, *, blocks: int = BLOCKS, sequences: int = 8
) -> Tensor:
    """fp32 [N, H]: the last state of `[bos] instruction t eos` for each id t, each id computed once.

    The ids are laid out as blocks behind copies of the prompt, `blocks` to a sequence and `sequences` to a forward
    pass. Equals separate passes (spec invariant 1); several passes under gradient are checkpointed one by one.
    """
    if not len(ids):
        return torch.zeros(0, embedding_weight(model, 1).shape[1], device=ids.device)
    chunks = -(-len(ids) // blocks)
    blocks = -(-len(ids) // chunks)
    tokens = [ids[start : start + blocks].tolist() for start in range(0, len(ids), blocks)]
    groups = [tokens[start : start + sequences] for start in range(0, len(tokens), sequences)]
    again = torch.is_grad_enabled() and len(groups) > 1
    rows = []
    for group in groups:
        packed = _pack(model, group, prompt, text, ids.device)
        rows.append(checkpoint(_pooled, model, packed, use_reentrant=False) if again else _pooled(model, packed))
    return torch.cat(rows)


def packed_queries(model: nn.Module, queries: Sequence[Sequence[int]], prompt: Sequence[int], text: Text) -> TokenRows:
    """The published form: one packed sequence a query. The result has a row for every token of every query, in
    order."""
    device = embedding_weight(model, 1).device
    packed = _pack(model, queries, prompt, text, device)
    return TokenRows(_pooled(model, packed), [i for query in queries for i in query])


@dataclass(frozen=True)
class TokenRows:
    """Vectors fp32 [M, H] of the tokens `ids` (M of them), one each."""

    rows: Tensor
    ids: list[int]


def query_vectors(
    model: nn.Module, queries: Sequence[Sequence[int]], *, text: Text, config: RetrieverConfig,
    prompt: Sequence[int] = (), weights: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """fp32 unit rows [Q, H]: the asymmetric dense query `q_emb` of each query (ids from `Text.queries`); zero when
    empty."""
    device = embedding_weight(model, 1).device
    bags = token_bags(queries, device)
    if config.query_dense != "packed" or config.packed_form == "distinct":
        rows = token_rows(model, bags.ids, text=text, config=config, prompt=prompt, weights=weights)
        return bag_vectors(rows, bags)
    found = packed_queries(model, queries, prompt, text)
    rows = found.rows if weights is None else found.rows * weights.to(found.rows)[bags.ids[bags.index]][:, None]
    each = torch.arange(len(bags.index), device=device)
    return bag_vectors(rows, TokenBags(bags.ids, each, bags.query, bags.counts))


def _pack(
    model: nn.Module, tokens: Sequence[Sequence[int]], prompt: Sequence[int], text: Text, device: torch.device
) -> Packed:
    eos_id = text.eos_id if text.config.eos else None
    dtype = embedding_weight(model, 1).dtype
    return pack_tokens(tokens, prompt, eos_id=eos_id, pad_id=text.pad_id, dtype=dtype, device=device)


def _pooled(model: nn.Module, packed: Packed) -> Tensor:
    hidden = last_hidden(model, packed.ids, packed.mask, packed.positions)
    index = packed.pooled[:, :, None].expand(-1, -1, hidden.shape[2])
    return hidden.gather(1, index)[packed.valid].float()
