"""The lexical prior of a sparse document: its own tokens, saturated as in BM25 (numpy only).

An untrained LM head plus this prior is level with BM25 on Cranfield (`measured.md`); LightRetriever has no such term.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from components.models.config import RetrieverConfig


def lexical_weights(
    ids: Sequence[int], *, k1: float, b: float, average_length: float, producible: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The distinct ids (int64, ascending) of one document and tf·(k1+1) / (tf + k1·(1 − b + b·length/average)) (float32).

    `ids` are those of the whole, untruncated document; ids that plain text cannot produce (specials) are left out and do
    not count towards the length.
    """
    tokens = np.asarray(ids, dtype=np.int64)
    tokens = tokens[producible[tokens]]
    distinct, frequency = np.unique(tokens, return_counts=True)
    norm = k1 * (1 - b + b * len(tokens) / average_length)
    return distinct, (frequency * (k1 + 1) / (frequency + norm)).astype(np.float32)


def lexical_matrix(
    documents: Sequence[Sequence[int]], config: RetrieverConfig, *, average_length: float, producible: np.ndarray
) -> np.ndarray:
    """float32 [B, V]: `lexical_weights` of each document by the settings of `config`, not yet times `lexical_weight`."""
    matrix = np.zeros((len(documents), len(producible)), dtype=np.float32)
    for row, ids in zip(matrix, documents, strict=True):
        terms, weights = lexical_weights(
            ids, k1=config.lexical_k1, b=config.lexical_b, average_length=average_length, producible=producible
        )
        row[terms] = weights
    return matrix
