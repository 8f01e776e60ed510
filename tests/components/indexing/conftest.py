"""Small random vectors and encoded queries for the index tests."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from scipy.sparse import csr_matrix, random_array


@dataclass
class Batch:
    """What the index needs of encoded queries."""

    dense: np.ndarray
    indptr: np.ndarray
    indices: np.ndarray
    weights: np.ndarray


@dataclass
class Collection:
    """Documents with vectors, and queries."""

    docids: list[str]
    dense: np.ndarray
    sparse: csr_matrix
    queries: Batch


def make_collection(
    seed: int, documents: int = 300, vocabulary: int = 60, hidden: int = 8, coarse: bool = False
) -> Collection:
    """Random vectors; `coarse` rounds weights so that many scores tie. Of some documents one side or both are empty."""
    rng = np.random.default_rng(seed)
    dense = rng.normal(size=(documents, hidden)).astype(np.float32)
    if coarse:
        dense = np.round(dense)
        dense[np.abs(dense).sum(axis=1) == 0, 0] = 1
    dense /= np.linalg.norm(dense, axis=1, keepdims=True)
    sparse = csr_matrix(random_array((documents, vocabulary), density=0.1, rng=rng, dtype=np.float32))
    sparse.data = np.ceil(sparse.data * (3 if coarse else 1000)).astype(np.float16).astype(np.float32)
    dense[rng.random(documents) < 0.1] = 0
    queries = csr_matrix(random_array((6, vocabulary), density=0.08, rng=rng, dtype=np.float32))
    queries.data = np.ceil(queries.data * 3)
    queries.sort_indices()
    vectors = rng.normal(size=(6, hidden)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    docids = [f"d{i}" for i in rng.permutation(documents)]
    batch = Batch(vectors, queries.indptr.astype(np.int64), queries.indices.astype(np.int32), queries.data)
    return Collection(docids, dense, sparse, batch)


@pytest.fixture
def collection() -> Collection:
    """300 documents, 6 queries."""
    return make_collection(0)
