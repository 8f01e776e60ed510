"""Joins two result lists: min-max normalised and weighted, or by reciprocal ranks (LightRetriever 1.12)."""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import Field, model_validator

from components.section import Section


class FusionConfig(Section):
    """How dense and sparse lists become one. The defaults are those of LightRetriever's code."""

    method: Literal["minmax", "rrf"] = "minmax"
    dense_weight: float = Field(0.7, ge=0)
    sparse_weight: float = Field(0.3, ge=0)
    candidates: int = Field(1000, ge=1)
    """Depth of each list; its own minimum and maximum normalise it, and what is in neither list is not found."""
    rrf_k: int = Field(60, ge=1)

    @model_validator(mode="after")
    def _some_weight(self) -> FusionConfig:
        if self.dense_weight + self.sparse_weight <= 0:
            raise ValueError("dense_weight and sparse_weight are both 0: nothing would be ranked")
        return self


def list_contributions(scores: np.ndarray, config: FusionConfig) -> np.ndarray:
    """float64: what each entry of one list (scores best first) adds to a fused score, before the list's weight.

    minmax: (s − min) / (max − min + 1e-8) over this list, so its last entry counts as much as an absent one: 0.
    rrf: 1 / (rrf_k + rank).
    """
    if config.method == "rrf":
        return 1.0 / (config.rrf_k + np.arange(1, len(scores) + 1))
    if len(scores) == 0:
        return np.zeros(0)
    values = scores.astype(np.float64)
    return (values - values.min()) / (values.max() - values.min() + 1e-8)


def fuse(
    dense_rows: np.ndarray,
    dense_scores: np.ndarray,
    sparse_rows: np.ndarray,
    sparse_scores: np.ndarray,
    config: FusionConfig,
) -> tuple[np.ndarray, np.ndarray]:
    """(rows int64, fused scores float64) of the union of two lists of document rows, rows ascending.

    Each list is best first. A document that a list lacks gets 0 from it.
    """
    rows = np.concatenate([dense_rows, sparse_rows]).astype(np.int64)
    parts = np.concatenate(
        [
            config.dense_weight * list_contributions(dense_scores, config),
            config.sparse_weight * list_contributions(sparse_scores, config),
        ]
    )
    union, place = np.unique(rows, return_inverse=True)
    return union, np.bincount(place, weights=parts, minlength=len(union))


def best_first(scores: np.ndarray, ranks: np.ndarray, k: int) -> np.ndarray:
    """Places of the k best scores, descending, ties by rank ascending; only what can be among them is sorted."""
    places = np.arange(len(scores))
    if k < len(scores):
        places = np.flatnonzero(scores >= np.partition(scores, len(scores) - k)[len(scores) - k])
    return places[np.lexsort((ranks[places], -scores[places]))[:k]]
