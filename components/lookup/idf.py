"""How often tokens occur in a corpus, as numbers that add up over its parts, and the IDF made of them (numpy only)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class TokenStatistics:
    """Counts over some documents; `a + b` are the counts over both."""

    frequencies: np.ndarray
    """int64 [V]: documents that contain the token."""
    documents: int
    """Documents with at least one counted token."""
    tokens: int
    """Counted tokens in all documents."""

    def __add__(self, other: TokenStatistics) -> TokenStatistics:
        return TokenStatistics(
            self.frequencies + other.frequencies, self.documents + other.documents, self.tokens + other.tokens
        )

    @property
    def average_length(self) -> float:
        """Mean counted tokens of a document that has any; 0.0 without documents."""
        return self.tokens / self.documents if self.documents else 0.0


def token_statistics(
    documents: Iterable[Sequence[int]], producible: np.ndarray, groups: np.ndarray | None = None
) -> TokenStatistics:  # fmt: skip
    """Counts over documents given as untruncated token ids; ids outside `producible` (bool [V], no specials) do not
    count.

    With `groups` (`stem_groups`) a document counts for a token when it has any member of the token's group.
    """
    frequencies = np.zeros(len(producible), dtype=np.int64)
    count = tokens = 0
    for ids in documents:
        found = np.asarray(ids, dtype=np.int64)
        found = found[producible[found]]
        frequencies[np.unique(found if groups is None else groups[found])] += 1
        count += len(found) > 0
        tokens += len(found)
    return TokenStatistics(frequencies if groups is None else frequencies[groups], count, tokens)


def inverse_document_frequencies(statistics: TokenStatistics, producible: np.ndarray) -> np.ndarray:
    """float32 [V]: ln(1 + (N − df + 0.5) / (df + 0.5)) (Geng et al., 2411.04403), > 0; 0 outside `producible`.

    N is the number of documents with at least one token; a token that no document contains gets the largest value.
    """
    df = statistics.frequencies.astype(np.float64)
    idf = np.log1p((statistics.documents - df + 0.5) / (df + 0.5))
    return np.where(producible, idf, 0.0).astype(np.float32)
