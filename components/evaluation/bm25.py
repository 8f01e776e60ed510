"""The baseline to beat: BM25 on stemmed English words, by bm25s."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import bm25s
import numpy as np
import Stemmer


class Bm25:
    """A BM25 index (Lucene's variant) in memory; hits are ordered by score, then docid."""

    def __init__(self, docids: Sequence[str], texts: Iterable[str], k1: float = 0.9, b: float = 0.4) -> None:
        self._stemmer = Stemmer.Stemmer("english")
        self.docids = list(docids)
        order = np.argsort(np.asarray(self.docids, dtype=object), kind="stable")
        self._rank = np.empty(len(order), dtype=np.int64)
        self._rank[order] = np.arange(len(order))
        tokens = self._tokens(list(texts))
        self._has_words = any(tokens)
        self._index = bm25s.BM25(k1=k1, b=b, method="lucene")
        if self._has_words:
            self._index.index(tokens, show_progress=False)

    def _tokens(self, texts: list[str]) -> list[list[str]]:
        return bm25s.tokenize(texts, stopwords="en", stemmer=self._stemmer, return_ids=False, show_progress=False)  # type: ignore[return-value]

    def search(self, queries: Sequence[str], k: int) -> list[list[tuple[str, float]]]:
        """Up to `k` (docid, score) a query, score > 0, best first, ties by docid."""
        return [self._search(words, k) for words in self._tokens(list(queries))] if queries else []

    def _search(self, words: list[str], k: int) -> list[tuple[str, float]]:
        known = [word for word in words if self._has_words and word in self._index.vocab_dict]
        if not known:
            return []
        scores = self._index.get_scores(known)
        found = np.flatnonzero(scores > 0)
        best = found[np.lexsort((self._rank[found], -scores[found]))][:k]
        return [(self.docids[i], float(scores[i])) for i in best]
