"""The lexical prior of a sparse document: its own words, saturated as in BM25 (numpy only).

An untrained LM head plus this prior is level with BM25 on Cranfield; LightRetriever has no such term. With stem groups
a word also weighs on its other forms.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from components.lookup.stems import group_members, stem_groups
from components.models.config import RetrieverConfig
from components.text import Text


class LexicalPrior:
    """Computes the prior of documents given as the ids of their whole, untruncated text."""

    def __init__(self, text: Text, config: RetrieverConfig, average_length: float) -> None:
        self._producible, self._config, self._average = text.producible, config, average_length
        self._groups = stem_groups(text, config.lexical_stems) if config.lexical_stems else None
        self._members = None if self._groups is None else group_members(self._groups)

    def weights(self, ids: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """The distinct ids (int64, ascending) and tf·(k1+1) / (tf + k1·(1 − b + b·length/average)) (float32) of a
        document.

        Ids that plain text cannot produce (specials) are left out and do not count towards the length. With stem groups
        tf is that of the group, and every member of the group is listed.
        """
        tokens = np.asarray(ids, dtype=np.int64)
        tokens = tokens[self._producible[tokens]]
        distinct, frequency = np.unique(tokens if self._groups is None else self._groups[tokens], return_counts=True)
        k1, b = self._config.lexical_k1, self._config.lexical_b
        norm = k1 * (1 - b + b * len(tokens) / self._average)
        values = (frequency * (k1 + 1) / (frequency + norm)).astype(np.float32)
        if self._members is None:
            return distinct, values
        indptr, members = self._members
        counts = indptr[distinct + 1] - indptr[distinct]
        listed = np.concatenate([members[indptr[g] : indptr[g + 1]] for g in distinct] or [np.zeros(0, np.int32)])
        order = np.argsort(listed)
        return listed[order].astype(np.int64), np.repeat(values, counts)[order]

    def add_to(self, values: np.ndarray, documents: Sequence[Sequence[int]]) -> None:
        """Add `lexical_weight` × the prior of each document to its row of `values` (float32 [B, V]), in place."""
        for row, ids in zip(values, documents, strict=True):
            terms, weights = self.weights(ids)
            row[terms] += self._config.lexical_weight * weights
