"""Search time on 100,000 documents, one thread, medians of five rounds in one process: sparse, dense, hybrid.

Sparse documents have 128 terms drawn with the term frequencies of the Cranfield abstracts, so posting lists are as uneven as
real ones; queries are the Cranfield queries. Dense vectors are random and clustered.
"""

from __future__ import annotations

import os

for _name in ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.sparse import csr_matrix

from components.data.sources import load_ir_dataset
from components.indexing import HybridIndex, write_shard
from components.indexing.dense import set_threads

DOCUMENTS, TERMS, HIDDEN, K, ROUNDS = 100_000, 128, 576, 10, 5


@dataclass
class Batch:
    """Encoded queries."""

    dense: np.ndarray
    indptr: np.ndarray
    indices: np.ndarray
    weights: np.ndarray


def collection() -> tuple[np.ndarray, csr_matrix, Batch]:
    """(dense, sparse documents, queries)."""
    random = np.random.default_rng(0)
    dataset = load_ir_dataset("cranfield")
    words = [document.text.split() for document in dataset.docs_iter()]
    vocabulary = {word: i for i, word in enumerate(sorted({word for text in words for word in text}))}
    counts = np.zeros(len(vocabulary))
    for text in words:
        np.add.at(counts, [vocabulary[word] for word in set(text)], 1)
    share = counts / counts.sum()
    columns = np.sort(random.choice(len(vocabulary), size=(DOCUMENTS, TERMS * 2), p=share), axis=1)
    rows = np.repeat(np.arange(DOCUMENTS), TERMS * 2)
    sparse = csr_matrix((np.ones(len(rows), np.float32), (rows, columns.ravel())), shape=(DOCUMENTS, len(vocabulary)))
    sparse.data = random.random(sparse.nnz, dtype=np.float32) + 0.1
    centres = random.normal(size=(500, HIDDEN)).astype(np.float32)
    dense = centres[random.integers(0, 500, DOCUMENTS)] + random.normal(size=(DOCUMENTS, HIDDEN)).astype(np.float32)
    dense /= np.linalg.norm(dense, axis=1, keepdims=True)
    lists = [sorted({vocabulary[w] for w in query.text.split() if w in vocabulary}) for query in dataset.queries_iter()]
    indptr = np.concatenate([[0], np.cumsum([len(row) for row in lists])]).astype(np.int64)
    indices = np.concatenate(lists).astype(np.int32)
    vectors = dense[random.integers(0, DOCUMENTS, len(lists))]
    return dense, sparse, Batch(vectors, indptr, indices, np.ones(len(indices), np.float32))


def milliseconds(action: Callable[[], object], queries: int) -> float:
    """Median over the rounds of the time a query."""
    action()
    rounds = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        action()
        rounds.append((time.perf_counter() - started) / queries * 1000)
    return statistics.median(rounds)


def main() -> None:
    """Measure and print a Markdown table."""
    set_threads(1)
    dense, sparse, queries = collection()
    count = len(queries.indptr) - 1
    with tempfile.TemporaryDirectory() as folder:
        write_shard(Path(folder) / "shard-00000", [f"d{i:06d}" for i in range(DOCUMENTS)], dense, sparse, model_fingerprint="b")
        index = HybridIndex.open(folder)
        size = sum(path.stat().st_size for path in (Path(folder) / "shard-00000").glob("sparse.*"))
        matrix = csr_matrix((queries.weights, queries.indices, queries.indptr), shape=(count, sparse.shape[1]))

        def scipy_search() -> None:
            for row in range(count):
                scores = (sparse @ matrix[row].T).toarray().ravel()
                best = np.argpartition(-scores, K)[:K]
                best[np.argsort(-scores[best])]

        reference = milliseconds(scipy_search, count)
        rows = [("scipy CSR · q and partial sort", reference)]
        for mode in ("sparse", "dense", "hybrid"):
            rows.append((f"{mode}, batch", milliseconds(lambda mode=mode: index.search(queries, K, mode), count)))  # type: ignore[misc]
        singles = [
            Batch(queries.dense[i : i + 1], np.array([0, e - s]), queries.indices[s:e], queries.weights[s:e])
            for i, (s, e) in enumerate(zip(queries.indptr[:50], queries.indptr[1:51], strict=True))
        ]
        rows.append(("hybrid, one at a time", milliseconds(lambda: [index.search(one, K) for one in singles], len(singles))))
    print(f"{DOCUMENTS:,} documents, {sparse.nnz / DOCUMENTS:.0f} terms each, {len(queries.indices) / count:.1f} query terms, k = {K}")
    print(f"sparse files: {size / sparse.nnz:.2f} bytes a non-zero\n\n| search | ms a query | against scipy |\n|---|---:|---:|")
    for name, value in rows:
        print(f"| {name} | {value:.3f} | {reference / value:.1f}× |")


if __name__ == "__main__":
    main()
