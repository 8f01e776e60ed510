"""The inverted index gives what a dense product and a full sort give, over several blocks, with ties and empty rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import csr_matrix, random_array

from components.indexing.sparse import BLOCK, QUERIES, SparseIndex, round_to_half


def brute_force(matrix: csr_matrix, ranks: np.ndarray, queries: csr_matrix, k: int) -> list[list[tuple[int, float]]]:
    scores = (matrix @ queries.T).toarray().T
    orders = (np.lexsort((ranks, -row))[:k] for row in scores)
    return [[(int(i), float(row[i])) for i in order if row[i] > 0] for row, order in zip(scores, orders, strict=True)]


def found(index: SparseIndex, queries: csr_matrix, k: int) -> list[list[tuple[int, float]]]:
    lists = index.search(queries.indptr.astype(np.int64), queries.indices.astype(np.int32), queries.data, k)
    assert all(scores.dtype == np.float32 for _, scores in lists)
    return [list(zip(rows.tolist(), scores.tolist(), strict=True)) for rows, scores in lists]


def whole_numbers(rng: np.random.Generator, shape: tuple[int, int], density: float, high: int) -> csr_matrix:
    """Weights that are whole numbers: every sum is exact, so scores can be compared for equality, and many tie."""
    matrix = csr_matrix(random_array(shape, density=density, rng=rng, dtype=np.float32))
    matrix.data = np.ceil(matrix.data * high)
    return matrix


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), documents=st.integers(0, 400), vocabulary=st.integers(1, 40), k=st.integers(1, 500))
def test_any_collection_equals_brute_force(seed: int, documents: int, vocabulary: int, k: int) -> None:
    rng = np.random.default_rng(seed)
    matrix = whole_numbers(rng, (documents, vocabulary), 0.2, 3)
    queries = whole_numbers(rng, (5, vocabulary), 0.3, 2)
    ranks = rng.permutation(documents).astype(np.int32)
    index = SparseIndex.build(round_to_half(matrix), ranks)
    assert found(index, queries, k) == brute_force(matrix, ranks, queries, k)


@pytest.mark.parametrize("k", [1, 10, 3000])
def test_several_blocks(tmp_path: Path, k: int) -> None:
    rng = np.random.default_rng(0)
    documents = 2 * BLOCK + 17
    matrix = whole_numbers(rng, (documents, 30), 0.05, 4)
    matrix.data[matrix.indptr[BLOCK] : matrix.indptr[2 * BLOCK]] *= (
        rng.random(matrix.indptr[2 * BLOCK] - matrix.indptr[BLOCK]) < 0.5
    )
    queries = whole_numbers(rng, (5, 30), 0.15, 2)
    ranks = rng.permutation(documents).astype(np.int32)
    SparseIndex.build(round_to_half(matrix), ranks).save(tmp_path)
    index = SparseIndex.open(tmp_path, ranks)
    assert found(index, queries, k) == brute_force(matrix, ranks, queries, k)


def test_more_queries_than_are_held_at_a_time() -> None:
    rng = np.random.default_rng(0)
    matrix, queries = whole_numbers(rng, (200, 30), 0.2, 4), whole_numbers(rng, (2 * QUERIES + 3, 30), 0.15, 2)
    ranks = rng.permutation(200).astype(np.int32)
    index = SparseIndex.build(round_to_half(matrix), ranks)
    assert found(index, queries, 10) == brute_force(matrix, ranks, queries, 10)


def test_a_posting_takes_four_bytes(tmp_path: Path) -> None:
    """Issue 7, bar 5: at most 4.1 bytes a non-zero once the blocks are full (V = 2,000, 64 terms a document)."""
    rng = np.random.default_rng(0)
    columns = np.sort(rng.integers(0, 2000, size=(BLOCK, 64)), axis=1).astype(np.int32)
    indptr = np.arange(BLOCK + 1) * 64
    matrix = csr_matrix((np.ones(columns.size, np.float32), columns.ravel(), indptr), shape=(BLOCK, 2000))
    matrix.sum_duplicates()
    index = SparseIndex.build(round_to_half(matrix), np.arange(BLOCK, dtype=np.int32))
    index.save(tmp_path)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 4.1 * index.nonzeros


def test_a_term_that_the_index_does_not_have_is_refused() -> None:
    index = SparseIndex.build(csr_matrix(np.eye(3, dtype=np.float32)), np.arange(3, dtype=np.int32))
    with pytest.raises(ValueError, match="term 3 but the index has 3 columns"):
        index.search(np.array([0, 1]), np.array([3], np.int32), np.array([1.0], np.float32), 10)
