"""Regularisers that keep sparse documents sparse, their ramp, and the alarm for a collapsed representation."""

from __future__ import annotations

from torch import Tensor


def flops(values: Tensor) -> Tensor:
    """[]: Σ_v (mean_i |d[i, v]|)² over documents [D, V] (LightRetriever eq. 7, SPLADE). Gather over ranks before (T-041)."""
    return values.abs().mean(dim=0).pow(2).sum()


def flops_estimate(sampled: Tensor, vocabulary_size: int) -> Tensor:
    """[]: an unbiased estimate of `flops` from S columns drawn uniformly: their sum times V / S."""
    return flops(sampled) * (vocabulary_size / sampled.shape[1])


def l1(values: Tensor) -> Tensor:
    """[]: mean over documents of Σ_v |d[v]| (Li-LSR)."""
    return values.abs().sum(dim=1).mean()


def ramp(step: int, ramp_steps: int) -> float:
    """(step / ramp_steps)², at most 1: 0 at the first step, a quarter half-way (spec invariant 6)."""
    return min(1.0, step / ramp_steps) ** 2


def collapse(active_terms: float, similarity: float) -> str | None:
    """Why a sparse representation is useless, or None: hardly a term alive, or all texts alike (cases T-037 … T-039).

    `active_terms`: mean terms a document; `similarity`: mean cosine between different documents.
    """
    if active_terms < 1:
        return f"documents have {active_terms:.2f} active terms on average: the regulariser has won, lower terms.flops"
    if similarity > 0.98:
        return f"different documents are alike (cosine {similarity:.3f}): look at pooling positions and special tokens"
    return None
