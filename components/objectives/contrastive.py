"""InfoNCE over all documents of the global batch, in fp32, with equal documents masked.

Letters in shapes: Q queries, G documents a query (its positive first), D = Q·G documents.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy


def scores_QD(queries: Tensor, documents: Tensor, temperature: float) -> Tensor:
    """fp32 [Q, D]: inner products over the temperature, whatever autocast is on (spec trap 8)."""
    with torch.autocast(queries.device.type, enabled=False):
        return queries.float() @ documents.float().T / temperature


def equal_document_mask(keys: Tensor, group: int) -> Tensor:
    """bool [Q, D]: columns that hold the same document as the row's positive but are not it (case T-021).

    `keys` int64 [D] identifies each document (a hash of its id). Such a column is no negative.
    """
    positives = keys[::group]
    equal = positives[:, None] == keys[None, :]
    rows = torch.arange(len(positives), device=keys.device)
    equal[rows, rows * group] = False
    return equal


def contrastive_loss(scores: Tensor, group: int, masked: Tensor | None = None) -> Tensor:
    """[]: mean cross-entropy with target column i·G for row i (LightRetriever eq. 2).

    ValueError: the scores are not [Q, Q·G].
    """
    queries, documents = scores.shape
    if documents != queries * group:
        raise ValueError(
            f"scores are [{queries}, {documents}], wanted [{queries}, {queries * group}] for {group} documents a query"
        )
    if masked is not None:
        scores = scores.masked_fill(masked, torch.finfo(scores.dtype).min)
    return cross_entropy(scores, torch.arange(queries, device=scores.device) * group)


def gather_with_gradient(local: Tensor) -> Tensor:
    """The rows of all ranks in rank order; the own slot keeps its gradient (LightRetriever 1.9). One process: `local`.

    Every rank then computes the same loss; multiply it by the world size, because DDP averages (case T-019).
    """
    if (
        not (torch.distributed.is_available() and torch.distributed.is_initialized())
        or torch.distributed.get_world_size() == 1
    ):
        return local
    parts = [torch.empty_like(local) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(parts, local.detach().contiguous())
    parts[torch.distributed.get_rank()] = local
    return torch.cat(parts)
