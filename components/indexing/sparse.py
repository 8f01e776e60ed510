"""The sparse side of a shard: an exact inverted index, column-major postings in blocks of 65,536 documents.

A posting is a 16-bit document number inside its block and a half-precision weight: 4 bytes, plus one 4-byte pointer a
block and term. A query walks the postings of its terms block by block, so the accumulators stay in the cache. Every
posting of the query's terms is read: the result is that of the full dot product.

A candidate is one integer, its score's bits above the complement of its docid's rank: positive floats order as their
bits do, so the larger integer is the better hit, ties going to the smaller docid.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from scipy.sparse import csr_matrix

from components.lookup.jit import kernel

BLOCK = 1 << 16
CHUNK = 64
"""Accumulators looked at together: most chunks hold nothing that reaches the k best and are left at once."""
QUERIES = 256
"""Queries whose candidates are held at a time."""
LOW = (1 << 32) - 1
FILES = ("sparse.pointers.npy", "sparse.bases.npy", "sparse.documents.npy", "sparse.weights.npy")
HALF = np.arange(1 << 15, dtype=np.uint16).view(np.float16).astype(np.float32)
"""Value of every half-precision number ≥ 0 by its bits."""


@kernel
def _keep_best(keys, size, k):  # type: ignore[no-untyped-def]
    """Move the k largest of `keys[:size]` to the front (quickselect) and return the smallest of them."""
    low, high = 0, size - 1
    while low < high:
        first, middle, last = keys[low], keys[(low + high) >> 1], keys[high]
        pivot = max(min(first, middle), min(max(first, middle), last))
        i, j = low, high
        while i <= j:
            while keys[i] > pivot:
                i += 1
            while keys[j] < pivot:
                j -= 1
            if i <= j:
                keys[i], keys[j] = keys[j], keys[i]
                i += 1
                j -= 1
        if k - 1 <= j:
            high = j
        elif k - 1 >= i:
            low = i
        else:
            break
    return keys[k - 1]


@kernel
def _search(pointers, bases, documents, weights, half, ranks, indptr, terms, values, sums, bits, keys, best):  # type: ignore[no-untyped-def]
    """Fill row q of `best` [Q, k] with the k best candidates of query q, in any order, 0 where there are fewer.

    `sums` float32 [a multiple of CHUNK] holds zeros, before and after; `bits` is the same memory as int32. `keys`
    int64, longer than k, is scratch.
    """
    width, k = len(sums), best.shape[1]
    for query in range(len(indptr) - 1):
        size, floor = 0, 1  # the least bits that are still a candidate: those of any number above 0
        for block in range(len(bases)):
            touched = False
            for t in range(indptr[query], indptr[query + 1]):
                term, value, base = terms[t], values[t], bases[block]
                start, stop = base + pointers[block, term], base + pointers[block, term + 1]
                touched = touched or stop > start
                for p in range(start, stop):
                    sums[documents[p]] += value * half[weights[p]]
            if not touched:
                continue
            for begin in range(0, width, CHUNK):
                reached = 0
                for i in range(begin, begin + CHUNK):
                    reached += bits[i] >= floor
                if reached == 0:
                    continue
                for i in range(begin, begin + CHUNK):
                    if bits[i] >= floor:
                        keys[size] = (np.int64(bits[i]) << 32) | (LOW - ranks[block * BLOCK + i])
                        size += 1
                        if size == len(keys):
                            floor = _keep_best(keys, size, k) >> 32
                            size = k
            sums[:] = 0
        if size > k:
            _keep_best(keys, size, k)
            size = k
        for i in range(k):
            best[query, i] = keys[i] if i < size else 0
    return 0


def round_to_half(matrix: csr_matrix) -> csr_matrix:
    """A CSR matrix of the float32 values that half precision holds of the given ones; what rounds to 0 is left out."""
    with np.errstate(over="ignore"):  # an infinity is refused by docid, later
        data = matrix.data.astype(np.float16).astype(np.float32)
    rounded = csr_matrix((data, matrix.indices, matrix.indptr), matrix.shape)
    rounded = rounded.copy() if (rounded.data == 0).any() else rounded  # dropping zeros works in place
    rounded.eliminate_zeros()
    return rounded


class SparseIndex:
    """Postings of a shard. `ranks` int32 [N] is each row's place in docid order, which settles ties."""

    def __init__(self, arrays: tuple[np.ndarray, ...], ranks: np.ndarray) -> None:
        self._pointers, self._bases, self._documents, self._weights = (np.asarray(array) for array in arrays)
        self._ranks = np.ascontiguousarray(ranks, dtype=np.int32)
        self._rows = np.argsort(self._ranks)

    @classmethod
    def build(cls, matrix: csr_matrix, ranks: np.ndarray) -> SparseIndex:
        """Index the rows of a CSR matrix [N, V] as `round_to_half` gives it: weights > 0 that half precision holds."""
        pointers, bases, documents, weights = [], [], [], []
        total = 0
        for start in range(0, matrix.shape[0], BLOCK):
            block = matrix[start : start + BLOCK].tocsc()
            block.sort_indices()
            pointers.append(block.indptr.astype(np.uint32))
            bases.append(total)
            documents.append(block.indices.astype(np.uint16))
            weights.append(block.data.astype(np.float16).view(np.uint16))
            total += block.nnz
        columns = matrix.shape[1] + 1
        arrays = (
            np.stack(pointers) if pointers else np.zeros((0, columns), np.uint32), np.asarray(bases, np.int64),
            np.concatenate(documents) if documents else np.zeros(0, np.uint16),
            np.concatenate(weights) if weights else np.zeros(0, np.uint16),
        )  # fmt: skip
        return cls(arrays, ranks)

    @classmethod
    def open(cls, folder: Path, ranks: np.ndarray) -> SparseIndex:
        """Map the files of a shard folder into memory (no pickles)."""
        return cls(tuple(np.load(folder / name, mmap_mode="r", allow_pickle=False) for name in FILES), ranks)

    def save(self, folder: Path) -> None:
        """Write the four files into a shard folder."""
        for name, array in zip(FILES, (self._pointers, self._bases, self._documents, self._weights), strict=True):
            np.save(folder / name, array, allow_pickle=False)

    @property
    def nonzeros(self) -> int:
        """Postings in all."""
        return len(self._documents)

    @property
    def vocabulary_size(self) -> int:
        """V."""
        return self._pointers.shape[1] - 1

    def search(
        self, indptr: np.ndarray, indices: np.ndarray, weights: np.ndarray, k: int
    ) -> list[tuple[np.ndarray, np.ndarray]]:  # fmt: skip
        """(rows int64, scores float32) of the best `k` documents of each query, best first, ties by docid.

        A score of 0 is no hit. Queries are CSR rows; scores are fp32 dot products with the stored weights.
        """
        if len(indices) and int(indices.max()) >= self.vocabulary_size:
            raise ValueError(
                f"a query has term {int(indices.max())} but the index has {self.vocabulary_size} columns: "
                "table and index are of different models"
            )
        count, k = len(indptr) - 1, max(1, min(k, len(self._ranks)))
        width = -(-min(BLOCK, len(self._ranks)) // CHUNK) * CHUNK
        sums, keys = np.zeros(width, np.float32), np.empty(2 * k + 4 * CHUNK, np.int64)
        best = np.empty((min(count, QUERIES), k), np.int64)
        found: list[tuple[np.ndarray, np.ndarray]] = []
        for first in range(0, count, QUERIES):
            part = indptr[first : first + QUERIES + 1]
            some = best[: len(part) - 1]
            _search(
                self._pointers, self._bases, self._documents, self._weights, HALF, self._ranks,
                part, indices, weights, sums, sums.view(np.int32), keys, some,
            )  # fmt: skip
            some.sort(axis=1)
            for row in some[:, ::-1]:
                filled = row[: np.count_nonzero(row)]
                found.append((self._rows[LOW - (filled & LOW)], (filled >> 32).astype(np.int32).view(np.float32)))
        return found

    def term_weights(self, rows: np.ndarray, terms: np.ndarray) -> np.ndarray:
        """float32 [rows, terms]: the stored weight of each term in each document, 0 where it has none."""
        result = np.zeros((len(rows), len(terms)), np.float32)
        for i, row in enumerate(rows.tolist()):
            block, local = divmod(row, BLOCK)
            for j, term in enumerate(terms.tolist()):
                start, stop = (int(self._bases[block]) + int(self._pointers[block, term + s]) for s in (0, 1))
                place = start + int(np.searchsorted(self._documents[start:stop], local))
                if place < stop and self._documents[place] == local:
                    result[i, j] = HALF[self._weights[place]]
        return result
