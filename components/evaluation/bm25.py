"""The baseline to beat: BM25 on stemmed English words, by bm25s."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

import bm25s
import numpy as np
import Stemmer

_BATCH = 4096


class Bm25:
    """A BM25 index (Lucene's variant) in memory; hits are ordered by score, then docid.

    The texts are streamed, but the word ids and postings of the whole corpus stay in memory while it is built: some
    2 KiB for a document of 200 words.
    """

    def __init__(self, docids: Sequence[str], index: bm25s.BM25 | None, words: _Words) -> None:
        self.docids = list(docids)
        self._index, self._words = index, words
        order = sorted(range(len(self.docids)), key=self.docids.__getitem__)
        self._rank = np.empty(len(order), dtype=np.int64)
        self._rank[order] = np.arange(len(order))

    @classmethod
    def build(cls, corpus: Iterable[tuple[str, str]], k1: float = 0.9, b: float = 0.4) -> Bm25:
        """The index of a stream of (docid, text)."""
        words = _Words()
        docids: list[str] = []
        documents: list[array[int]] = []
        stream = iter(corpus)
        while batch := list(islice(stream, _BATCH)):
            docids += [docid for docid, _ in batch]
            documents += words.learn([text for _, text in batch])
        if not words.ids:  # bm25s cannot index a corpus without any word
            return cls(docids, None, words)
        index = bm25s.BM25(k1=k1, b=b, method="lucene")
        # No empty token: bm25s would give it an id that is no column of its matrix (case T-108).
        index.index((documents, words.ids), create_empty_token=False, show_progress=False)
        return cls(docids, index, words)

    def search(self, queries: Sequence[str], k: int) -> list[list[tuple[str, float]]]:
        """Up to `k` (docid, score) a query, score > 0, best first, ties by docid; none for unknown words only."""
        return [self._search(known, k) for known in self._words.known(queries)]

    def _search(self, words: list[int], k: int) -> list[tuple[str, float]]:
        if not words or self._index is None:
            return []
        scores = self._index.get_scores_from_ids(words)
        found = np.flatnonzero(scores > 0)
        if len(found) > k:  # all ties of the k-th stay in, for the docids to decide between them
            floor = np.partition(scores[found], len(found) - k)[len(found) - k]
            found = found[scores[found] >= floor]
        best = found[np.lexsort((self._rank[found], -scores[found]))][:k]
        return [(self.docids[i], float(scores[i])) for i in best.tolist()]


class _Words:
    """The vocabulary: stemmed, lower-cased words without English stop words, numbered as they come."""

    def __init__(self) -> None:
        self.ids: dict[str, int] = {}
        self._stemmer = Stemmer.Stemmer("english")

    def learn(self, texts: Sequence[str]) -> Iterator[array[int]]:
        """The word ids of each text; new words get new ids."""
        for tokens in self._split(texts):
            yield array("i", [self.ids.setdefault(token, len(self.ids)) for token in tokens])

    def known(self, texts: Sequence[str]) -> list[list[int]]:
        """The word ids of each text, unknown words left out."""
        return [[self.ids[token] for token in tokens if token in self.ids] for tokens in self._split(texts)]

    def _split(self, texts: Sequence[str]) -> list[list[str]]:
        if not texts:
            return []
        tokens = bm25s.tokenize(
            list(texts), stopwords="en", stemmer=self._stemmer, return_ids=False, show_progress=False
        )
        assert isinstance(tokens, list)
        return tokens
