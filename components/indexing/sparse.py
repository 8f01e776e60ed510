"""Our own exact inverted index: impact-weighted postings, column-major in blocks of 65,536 documents.

A posting is a 16-bit document number inside its block and a half-precision weight: 4 bytes, plus one 4-byte pointer a block
and term. A query walks the postings of its terms block by block, so the accumulators stay in the processor's cache, and
keeps the best k in a heap. Every posting of the query's terms is read: the result is that of the full dot product.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from scipy.sparse import csr_matrix

from components.lookup.jit import kernel

BLOCK = 1 << 16
FILES = ("sparse.pointers.npy", "sparse.bases.npy", "sparse.documents.npy", "sparse.weights.npy")
HALF = np.arange(1 << 15, dtype=np.uint16).view(np.float16).astype(np.float32)
"""Value of every half-precision number ≥ 0 by its bits."""


@kernel
def _sift_up(scores, rows, ranks, place):  # type: ignore[no-untyped-def]
    """Move heap entry `place` up: the root is the worst (lowest score, then largest docid rank)."""
    while place > 0:
        parent = (place - 1) >> 1
        if scores[place] < scores[parent] or (
            scores[place] == scores[parent] and ranks[rows[place]] > ranks[rows[parent]]
        ):
            scores[place], scores[parent] = scores[parent], scores[place]
            rows[place], rows[parent] = rows[parent], rows[place]
            place = parent
        else:
            return 0
    return 0


@kernel
def _sift_down(scores, rows, ranks, size):  # type: ignore[no-untyped-def]
    """Move the heap's root down to where it belongs."""
    place = 0
    while True:
        worst, child = place, 2 * place + 1
        for candidate in (child, child + 1):
            if candidate < size and (
                scores[candidate] < scores[worst]
                or (scores[candidate] == scores[worst] and ranks[rows[candidate]] > ranks[rows[worst]])
            ):
                worst = candidate
        if worst == place:
            return 0
        scores[place], scores[worst] = scores[worst], scores[place]
        rows[place], rows[worst] = rows[worst], rows[place]
        place = worst


@kernel
def _search(pointers, bases, documents, weights, half, ranks, terms, values, count, sums, k, scores, rows):  # type: ignore[no-untyped-def]
    """Fill `scores` and `rows` with the best k documents of a query of `count` terms (as a heap) and return how many."""
    size = 0
    for block in range(len(bases)):
        width = min(len(sums), len(ranks) - block * len(sums))
        for i in range(width):
            sums[i] = 0.0
        touched = False
        for t in range(count):
            term, value, base = terms[t], values[t], bases[block]
            start, stop = base + pointers[block, term], base + pointers[block, term + 1]
            if stop > start:
                touched = True
            for p in range(start, stop):
                sums[documents[p]] += value * half[weights[p]]
        if not touched:
            continue
        for i in range(width):
            score = sums[i]
            if score <= 0.0 or (size == k and score < scores[0]):
                continue
            row = block * len(sums) + i
            if size < k:
                scores[size], rows[size] = score, row
                size += 1
                _sift_up(scores, rows, ranks, size - 1)
            elif score > scores[0] or ranks[row] < ranks[rows[0]]:
                scores[0], rows[0] = score, row
                _sift_down(scores, rows, ranks, size)
    return size


class SparseIndex:
    """Postings of a shard. `ranks` int32 [N] is each row's place in docid order, which settles ties."""

    def __init__(self, arrays: tuple[np.ndarray, ...], ranks: np.ndarray) -> None:
        self._pointers, self._bases, self._documents, self._weights = arrays
        self._ranks = np.ascontiguousarray(ranks, dtype=np.int32)

    @classmethod
    def build(cls, matrix: csr_matrix, ranks: np.ndarray) -> SparseIndex:
        """Index the rows of a CSR matrix [N, V] with weights > 0 that half precision holds; zeros are dropped."""
        pointers, bases, documents, weights = [], [], [], []
        total = 0
        for start in range(0, matrix.shape[0], BLOCK):
            block = matrix[start : start + BLOCK].tocsc()
            block.eliminate_zeros()
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
        """(rows int64, scores float32) of the best `k` documents with a score > 0 for each query, best first, ties by docid.

        Queries are CSR rows; scores are fp32 dot products with the stored weights.
        """
        if len(indices) and int(indices.max()) >= self.vocabulary_size:
            raise ValueError(
                f"a query has term {int(indices.max())} but the index has {self.vocabulary_size} columns: table and index are of different models"
            )
        k = max(1, min(k, len(self._ranks)))
        sums, scores, rows = np.empty(BLOCK, np.float32), np.empty(k, np.float32), np.empty(k, np.int64)
        found = []
        for start, stop in zip(indptr[:-1].tolist(), indptr[1:].tolist(), strict=True):
            size = _search(
                self._pointers, self._bases, self._documents, self._weights, HALF, self._ranks,
                indices[start:stop], weights[start:stop], stop - start, sums, k, scores, rows,
            )  # fmt: skip
            order = np.lexsort((self._ranks[rows[:size]], -scores[:size]))
            found.append((rows[:size][order], scores[:size][order]))
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
