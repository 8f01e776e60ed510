"""trec_eval's measures and BM25 written out slowly from their definitions, sharing no code with what they check."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence


def reference_measures(documents: Sequence[str], grades: Mapping[str, int]) -> dict[str, float]:
    """Measures of one ranking, best first, on one query's judgements."""
    relevant = {docid for docid, grade in grades.items() if grade >= 1}
    ideal = sorted((grade for grade in grades.values() if grade > 0), reverse=True)
    gained = sum(max(0, grades.get(docid, 0)) / math.log2(rank + 2) for rank, docid in enumerate(documents[:10]))
    best = sum(grade / math.log2(rank + 2) for rank, grade in enumerate(ideal[:10]))
    found = [rank for rank, docid in enumerate(documents, 1) if docid in relevant]
    precisions = [(i + 1) / rank for i, rank in enumerate(found) if rank <= 1000]

    def recall(depth: int) -> float:
        return sum(rank <= depth for rank in found) / len(relevant) if relevant else 0.0

    return {
        "nDCG@10": gained / best if best else 0.0,
        "MRR@10": 1 / found[0] if found and found[0] <= 10 else 0.0,
        "R@20": recall(20), "R@50": recall(50), "R@100": recall(100), "R@1000": recall(1000),
        "MAP@1000": sum(precisions) / len(relevant) if relevant else 0.0,
        "Success@1": float(bool(found) and found[0] == 1),
    }  # fmt: skip


def reference_bm25(documents: Sequence[Sequence[str]], query: Sequence[str], k1: float, b: float) -> list[float]:
    """Lucene's BM25 (no factor k1 + 1 in the numerator, as bm25s has it) of each document of words."""
    average = sum(map(len, documents)) / len(documents) or 1
    scores = []
    for words in documents:
        counts = Counter(words)
        score = 0.0
        for word in query:
            holding = sum(word in other for other in documents)
            idf = math.log(1 + (len(documents) - holding + 0.5) / (holding + 0.5))
            score += idf * counts[word] / (counts[word] + k1 * (1 - b + b * len(words) / average))
        scores.append(score)
    return scores
