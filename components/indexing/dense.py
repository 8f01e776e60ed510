"""The dense side of a shard: FAISS behind one small interface. Inner product on unit rows, fp32 scores."""

from __future__ import annotations

import logging
import math
import re
from pathlib import Path
from typing import Any

import faiss
import numpy as np

log = logging.getLogger(__name__)

EXACT = "SQfp16"
"""Every vector compared, kept in half precision: the vectors arrive as float16, so nothing is lost."""
EXACT_LIMIT = 200_000
POINTS_A_CENTROID = 39
"""FAISS's own least number of training points a centroid."""
TARGET_RECALL = 0.985
"""Recall@10 at which raising the lists that an IVF index reads stops: above .98, for other queries will have less."""
SAMPLE = 200
"""Queries that recall is measured on."""
MARGIN = 8
"""Hits asked for beyond k, so that most ties at the k-th place are seen whole in one search."""
BLOCK = 65_536

Found = tuple[np.ndarray, np.ndarray]
"""(rows int64, scores float32) of one query, best first."""


def choose_factory(wanted: str, documents: int, training_vectors: int = 200_000) -> str:
    """The factory string that is used: `wanted`, or by size; exact where there is too little to train on (T-098).

    `auto` above `EXACT_LIMIT` is IVF with about 4 √documents lists, a power of two that the training sample can fill.
    """
    points = min(documents, training_vectors)
    if wanted == "auto":
        if documents <= EXACT_LIMIT:
            return EXACT
        lists = 1 << round(math.log2(4 * math.sqrt(documents)))
        while lists > 1 and lists * POINTS_A_CENTROID > points:
            lists //= 2
        wanted = f"IVF{lists},{EXACT}"
        log.info("dense index for %d documents: %s, trained on %d", documents, wanted, points)
    least = training_points(wanted)
    if least > points:
        log.warning("%s needs %d vectors to train on, there are %d: exact %s instead", wanted, least, points, EXACT)
        return EXACT
    return wanted


def training_points(factory: str) -> int:
    """Vectors that training `factory` needs: 39 for each centroid of its largest codebook."""
    lists = [int(found) for found in re.findall(r"IVF(\d+)", factory)]
    books = [1 << int(bits or 8) for bits in re.findall(r"(?:PQ|RQ|LSQ)\d+(?:x(\d+))?", factory)]
    return POINTS_A_CENTROID * max([0, *lists, *books])


def check_factory(factory: str) -> str:
    """`factory` if FAISS understands it. ValueError: it does not, or `auto` was meant."""
    try:
        faiss.index_factory(3840, factory, faiss.METRIC_INNER_PRODUCT)  # a dimension that most numbers of parts divide
    except RuntimeError as error:
        if "parse" in str(error):
            raise ValueError(
                f"FAISS does not know the index {factory!r}: give auto, or a factory string such as "
                "SQfp16, IVF1024,SQfp16 or HNSW32,SQ8"
            ) from error
    return factory


class DenseIndex:
    """A FAISS index over the rows of a shard that have a dense vector; its ids are the shard's row numbers."""

    def __init__(self, index: Any) -> None:
        """`index` is a `faiss.IndexIDMap` around whatever the factory string made."""
        self._index = index
        self._ivf: Any = faiss.try_extract_index_ivf(faiss.downcast_index(index.index))

    @classmethod
    def build(
        cls, vectors: np.ndarray, rows: np.ndarray, factory: str, training_vectors: int = 200_000,
        probes: int | None = None, queries: np.ndarray | None = None,
    ) -> DenseIndex:  # fmt: skip
        """Index `vectors` (float16 or float32 [N, H], unit rows) under the ascending numbers `rows` (int64 [N]).

        `probes` is how many lists an IVF index reads a query; None raises it until recall@10 of `queries` (float32
        [Q, H]; by default a sample of the vectors) is `TARGET_RECALL`. ValueError: FAISS cannot build this.
        """
        try:
            index = faiss.index_factory(vectors.shape[1], f"IDMap,{factory}", faiss.METRIC_INNER_PRODUCT)
            if len(vectors) and not index.is_trained:
                index.train(sample_rows(vectors, training_vectors))
        except RuntimeError as error:
            reason = str(error).splitlines()[-1]
            raise ValueError(
                f"index.dense={factory} cannot be built for {vectors.shape[1]} dimensions: {reason}"
            ) from error
        for start in range(0, len(vectors), BLOCK):
            block = slice(start, start + BLOCK)
            index.add_with_ids(vectors[block].astype(np.float32), rows[block].astype(np.int64))
        built = cls(index)
        if built._ivf is not None:
            built._set_probes(vectors, rows, probes, sample_rows(vectors) if queries is None else queries)
        return built

    @classmethod
    def open(cls, path: Path) -> DenseIndex:
        """Map an index file into memory."""
        try:
            return cls(faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC))
        except RuntimeError as error:
            reason = str(error).splitlines()[-1]
            raise ValueError(f"{path}: FAISS cannot read it ({reason}). Build the index again.") from error

    def save(self, path: Path) -> None:
        """Write the FAISS file."""
        faiss.write_index(self._index, str(path))

    def __len__(self) -> int:
        return int(self._index.ntotal)

    @property
    def probes(self) -> int | None:
        """Lists read for a query; None where the index has no lists."""
        return int(self._ivf.nprobe) if self._ivf is not None else None

    def search(self, queries: np.ndarray, k: int) -> list[Found]:
        """The best `k` documents of each unit query [Q, H], **and every other that ties with the k-th**, best first.

        So whoever merges shards can settle ties by docid. Lists are shorter where fewer were found: FAISS's −1 never
        leaves this function (T-092). A zero query finds nothing. ValueError: a query holds NaN or infinity.
        """
        bad = np.flatnonzero(~np.isfinite(queries).all(axis=1))
        if len(bad):
            raise ValueError(f"query {int(bad[0])}: its dense vector holds NaN or infinity")
        found: list[Found] = [(np.zeros(0, np.int64), np.zeros(0, np.float32))] * len(queries)
        left = np.flatnonzero(queries.any(axis=1))
        wanted = min(k, len(self))
        asked = min(wanted + MARGIN, len(self))
        while len(left) and wanted:
            scores, rows = self._index.search(np.ascontiguousarray(queries[left], dtype=np.float32), asked)
            tied = (scores[:, -1] == scores[:, wanted - 1]) & (rows[:, -1] >= 0) & (asked < len(self))
            for place in np.flatnonzero(~tied).tolist():
                keep = (rows[place] >= 0) & (scores[place] >= scores[place, wanted - 1])
                found[left[place]] = (rows[place][keep], scores[place][keep])
            left, asked = left[tied], min(4 * asked, len(self))
        return found

    def recall(self, vectors: np.ndarray, rows: np.ndarray, queries: np.ndarray, k: int = 10) -> float:
        """Recall@k of unit `queries` [Q, H] against exact search over the index's own vectors (and their rows).

        A document counts as found when its exact score is among the k best, so equal vectors can stand for each other.
        """
        return self._recall(vectors, rows, queries, _exact_scores(vectors, queries, min(k, len(vectors))))

    def _recall(self, vectors: np.ndarray, rows: np.ndarray, queries: np.ndarray, exact: np.ndarray) -> float:
        if exact.size == 0:
            return 1.0
        hits, k = 0, exact.shape[1]
        for query, floor, (found, _) in zip(queries, exact[:, -1], self.search(queries, k), strict=True):
            scores = vectors[np.searchsorted(rows, found[:k])].astype(np.float32) @ query
            hits += int((scores >= floor - 1e-5).sum())
        return hits / exact.size

    def _set_probes(self, vectors: np.ndarray, rows: np.ndarray, probes: int | None, queries: np.ndarray) -> None:
        lists = self._ivf.nlist
        self._ivf.nprobe = min(probes or 1, lists)
        if probes is None:
            exact = _exact_scores(vectors, queries, min(10, len(vectors)))
            while self._ivf.nprobe < lists and self._recall(vectors, rows, queries, exact) < TARGET_RECALL:
                self._ivf.nprobe = min(self._ivf.nprobe + (self._ivf.nprobe + 1) // 2, lists)
        log.info("dense index reads %d of %d lists a query", self._ivf.nprobe, lists)


def sample_rows(vectors: np.ndarray, count: int = SAMPLE) -> np.ndarray:
    """float32 [at most count, H]: rows spread evenly."""
    places = np.linspace(0, len(vectors) - 1, min(count, len(vectors)), dtype=np.int64)
    return vectors[places].astype(np.float32)


def _exact_scores(vectors: np.ndarray, queries: np.ndarray, k: int) -> np.ndarray:
    """float32 [Q, k]: the k best inner products of each query, best first."""
    best = np.full((len(queries), k), -np.inf, np.float32)
    for start in range(0, len(vectors) if len(queries) else 0, BLOCK):
        block = vectors[start : start + BLOCK].astype(np.float32)
        scores = faiss.knn(queries, block, min(k, len(block)), metric=faiss.METRIC_INNER_PRODUCT)[0]
        best = -np.sort(-np.concatenate([best, scores], axis=1), axis=1)[:, :k]
    return best


def set_threads(count: int) -> None:
    """Threads FAISS may use in this process (Ray sets OMP_NUM_THREADS=1 in its workers, T-087)."""
    faiss.omp_set_num_threads(max(1, count))
