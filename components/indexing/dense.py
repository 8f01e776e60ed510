"""The dense side of a shard: FAISS behind one small interface. Inner product on unit rows, fp32 scores."""

from __future__ import annotations

import logging
import math
from pathlib import Path

import numpy as np

logging.getLogger("faiss.loader").setLevel(logging.WARNING)  # it tells of every instruction set that it tries
import faiss  # noqa: E402

log = logging.getLogger(__name__)

EXACT = "SQfp16"
"""Every vector compared, kept in half precision: the vectors arrive as float16, so nothing is lost."""
EXACT_LIMIT = 200_000
POINTS_A_CLUSTER = 39
"""FAISS's own least number of training points a centroid."""


def choose_factory(wanted: str, documents: int) -> str:
    """The factory string that is used: what was asked for, or by size; exact where there is too little to train on (T-098)."""
    if wanted != "auto":
        clusters = _clusters(wanted)
        if clusters * POINTS_A_CLUSTER > documents:
            log.warning("%s needs %d vectors to train on, the shard has %d: exact %s instead", wanted, clusters * POINTS_A_CLUSTER, documents, EXACT)
            return EXACT
        return wanted
    if documents <= EXACT_LIMIT:
        return EXACT
    clusters = 1 << round(math.log2(4 * math.sqrt(documents)))
    log.info("dense index for %d documents: IVF%d,SQfp16", documents, clusters)
    return f"IVF{clusters},SQfp16"


def _clusters(factory: str) -> int:
    for part in factory.split(","):
        if part.startswith("IVF") and part[3:].split("_")[0].isdigit():
            return int(part[3:].split("_")[0])
        if part.startswith("PQ"):
            return 256
    return 0


class DenseIndex:
    """A FAISS index over the rows of a shard that have a dense vector; rows are the shard's row numbers."""

    def __init__(self, index: faiss.Index, factory: str) -> None:
        self._index, self.factory = index, factory

    @classmethod
    def build(cls, vectors: np.ndarray, rows: np.ndarray, factory: str, training_vectors: int = 200_000) -> DenseIndex:
        """Index `vectors` (float16 or float32 [N, H], unit rows) under the numbers `rows` (int64 [N])."""
        index = faiss.index_factory(vectors.shape[1], f"IDMap2,{factory}", faiss.METRIC_INNER_PRODUCT)
        if len(vectors):
            step = max(1, -(-len(vectors) // training_vectors))
            if not index.is_trained:
                index.train(vectors[::step].astype(np.float32))
            if "IVF" in factory:
                faiss.extract_index_ivf(faiss.downcast_index(index.index)).nprobe = max(1, _clusters(factory) // 32)
            for start in range(0, len(vectors), 65_536):
                block = slice(start, start + 65_536)
                index.add_with_ids(vectors[block].astype(np.float32), rows[block].astype(np.int64))
        return cls(index, factory)

    @classmethod
    def open(cls, path: Path, factory: str) -> DenseIndex:
        """Read an index file, memory-mapped where FAISS can (IVF)."""
        flags = faiss.IO_FLAG_MMAP if "IVF" in factory else 0
        try:
            return cls(faiss.read_index(str(path), flags), factory)
        except RuntimeError as error:
            raise ValueError(f"{path}: FAISS cannot read it ({str(error).splitlines()[-1]}). Build the index again.") from error

    def save(self, path: Path) -> None:
        """Write the FAISS file."""
        faiss.write_index(self._index, str(path))

    def __len__(self) -> int:
        return int(self._index.ntotal)

    def search(self, queries: np.ndarray, k: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """(rows int64, scores float32) of the best `k` documents of each unit query [Q, H], best first.

        Lists are shorter where fewer were found: FAISS's −1 never leaves this function (T-092). A zero query finds nothing.
        ValueError: a query holds NaN or infinity.
        """
        bad = np.flatnonzero(~np.isfinite(queries).all(axis=1))
        if len(bad):
            raise ValueError(f"query {int(bad[0])}: its dense vector holds NaN or infinity")
        empty = (np.zeros(0, np.int64), np.zeros(0, np.float32))
        if len(self) == 0 or len(queries) == 0:
            return [empty for _ in queries]
        scores, rows = self._index.search(np.ascontiguousarray(queries, dtype=np.float32), min(k, len(self)))
        alive = np.abs(queries).sum(axis=1) > 0
        return [
            (rows[q][rows[q] >= 0], scores[q][rows[q] >= 0]) if alive[q] else empty for q in range(len(queries))
        ]

    def recall(self, vectors: np.ndarray, rows: np.ndarray, sample: int = 100, k: int = 10) -> float:
        """Recall@k against exact search, on `sample` of the index's own vectors (with their rows) spread evenly."""
        if len(vectors) == 0:
            return 1.0
        queries = vectors[:: max(1, len(vectors) // sample)][:sample].astype(np.float32)
        scores, places = [], []
        for start in range(0, len(vectors), 65_536):
            block = vectors[start : start + 65_536].astype(np.float32)
            found = faiss.knn(queries, block, min(k, len(block)), metric=faiss.METRIC_INNER_PRODUCT)
            scores.append(found[0])
            places.append(found[1] + start)
        best = np.argsort(-np.concatenate(scores, axis=1), axis=1, kind="stable")[:, :k]
        exact = rows[np.take_along_axis(np.concatenate(places, axis=1), best, axis=1)]
        own = self.search(queries, k)
        return float(np.mean([len(np.intersect1d(wanted, found[0])) / len(wanted) for wanted, found in zip(exact, own, strict=True)]))


def set_threads(count: int) -> None:
    """Threads FAISS may use in this process (Ray sets OMP_NUM_THREADS=1 in its workers, T-087)."""
    faiss.omp_set_num_threads(max(1, count))
