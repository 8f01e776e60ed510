"""Search over all shards of an index, dense, sparse or both; the same hits however documents are cut into shards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np

from components.indexing.dense import Found
from components.indexing.fusion import FusionConfig, best_first, fuse, list_contributions
from components.indexing.shard import Shard
from components.storage import fingerprint

Mode = Literal["hybrid", "dense", "sparse"]


class Queries(Protocol):
    """What a search needs of an encoded batch (`components.lookup.QueryBatch` has it)."""

    dense: np.ndarray
    indptr: np.ndarray
    indices: np.ndarray
    weights: np.ndarray


@dataclass(frozen=True)
class Hit:
    """A document found."""

    docid: str
    score: float
    """What hits are ordered by: the fused score, or that of the one side asked for."""
    dense: float | None
    """Inner product of the dense vectors; None where the document is not in the dense list."""
    sparse: float | None
    """Dot product of the sparse vectors; None where the document is not in the sparse list."""
    dense_part: float = 0.0
    """What the dense side adds to `score`."""
    sparse_part: float = 0.0


@dataclass(frozen=True)
class _List:
    """One side's candidates of one query over all shards, best first (ties by docid)."""

    rows: np.ndarray
    scores: np.ndarray


class HybridIndex:
    """All shards of an index folder. Threads may share it."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        if not shards:
            raise ValueError("an index needs at least one shard")
        self.shards = list(shards)
        manifests = [shard.manifest for shard in shards]
        for name in ("model_fingerprint", "hidden_size", "vocabulary_size"):
            values = {getattr(manifest, name) for manifest in manifests}
            if len(values) > 1:
                raise ValueError(f"the shards are of different models: {name} is {sorted(values)}. Index again.")
        self.model_fingerprint = manifests[0].model_fingerprint
        self.hidden_size, self.vocabulary_size = manifests[0].hidden_size, manifests[0].vocabulary_size
        self.fingerprint = fingerprint([manifest.model_dump() for manifest in manifests])
        self._offsets = np.cumsum([0, *(len(shard) for shard in shards)])
        self._docids = [docid for shard in shards for docid in shard.docids]
        self._places = {docid: place for place, docid in enumerate(self._docids)}
        if len(self._places) != len(self._docids):
            double = next(docid for place, docid in enumerate(self._docids) if self._places[docid] != place)
            raise ValueError(f"docid {double!r} stands in two shards. Index again.")
        self._ranks = self.shards[0].ranks if len(self.shards) == 1 else np.empty(len(self._docids), np.int32)
        if len(self.shards) > 1:
            order = sorted(range(len(self._docids)), key=self._docids.__getitem__)
            self._ranks[order] = np.arange(len(order), dtype=np.int32)

    @classmethod
    def open(cls, folder: Path | str, verify: bool = True) -> HybridIndex:
        """The index in `folder` (as the index stage wrote it). `verify` compares every file's checksum."""
        found = sorted(path for path in Path(folder).glob("shard-*") if path.is_dir())
        if not found:
            raise FileNotFoundError(f"{folder}: no shards there. Run the index stage.")
        return cls([Shard(path, verify) for path in found])

    def __len__(self) -> int:
        return len(self._docids)

    def search(
        self, batch: Queries, k: int = 10, mode: Mode = "hybrid", fusion: FusionConfig | None = None,
        exclude: Sequence[str | None] | None = None,
    ) -> list[list[Hit]]:  # fmt: skip
        """The best `k` hits of each query, score descending, then docid ascending; fewer where fewer were found.

        Hybrid fuses the `fusion.candidates` best of each side over all shards: a document's score does not depend on k.
        `exclude` names one document a query to leave out, after fusion (spec trap 16). ValueError: k < 1, an unknown
        mode, vectors of another size, or NaN in a query.
        """
        self._check(batch, k, mode)
        fusion = fusion or FusionConfig()
        wanted = k + (exclude is not None)
        depth = fusion.candidates if mode == "hybrid" else wanted
        count = len(batch.indptr) - 1
        nothing = [_List(np.zeros(0, np.int64), np.zeros(0, np.float32))] * count
        dense = self._dense_lists(batch.dense, depth) if mode != "sparse" else nothing
        sparse = self._sparse_lists(batch, depth) if mode != "dense" else nothing
        hits = []
        for query in range(count):
            found = self._join(dense[query], sparse[query], wanted, mode, fusion)
            if exclude is not None:
                found = [hit for hit in found if hit.docid != exclude[query]]
            hits.append(found[:k])
        return hits

    def documents(self, docids: Sequence[str]) -> dict[str, tuple[str, str]]:
        """docid → (title, text). KeyError names a docid that the index does not hold."""
        found = {}
        for docid in docids:
            shard, row = self._locate(docid)
            found[docid] = shard.document(row)
        return found

    def term_weights(self, docids: Sequence[str], terms: np.ndarray) -> np.ndarray:
        """float32 [docids, terms]: stored document weight of each term, to explain a score."""
        result = np.zeros((len(docids), len(terms)), np.float32)
        for i, docid in enumerate(docids):
            shard, row = self._locate(docid)
            result[i] = shard.sparse.term_weights(np.asarray([row]), np.asarray(terms))[0]
        return result

    def _locate(self, docid: str) -> tuple[Shard, int]:
        if docid not in self._places:
            raise KeyError(f"docid {docid!r} is not in the index")
        place = self._places[docid]
        number = int(np.searchsorted(self._offsets, place, side="right")) - 1
        return self.shards[number], place - int(self._offsets[number])

    def _check(self, batch: Queries, k: int, mode: str) -> None:
        if k < 1:
            raise ValueError(f"k is {k}, at least 1 is wanted")
        if mode not in ("hybrid", "dense", "sparse"):
            raise ValueError(f"mode {mode!r}: wanted hybrid, dense or sparse")
        if batch.dense.shape[1] != self.hidden_size:
            raise ValueError(
                f"queries have {batch.dense.shape[1]} dimensions, the index {self.hidden_size}: "
                "table and index are of different models"
            )
        bad = np.flatnonzero(~np.isfinite(batch.weights))
        if len(bad):
            query = int(np.searchsorted(batch.indptr, bad[0], side="right")) - 1
            raise ValueError(f"query {query}: its sparse vector holds NaN or infinity")

    def _dense_lists(self, queries: np.ndarray, depth: int) -> list[_List]:
        return self._merge([shard.dense.search(queries, depth) for shard in self.shards], len(queries), depth, False)

    def _sparse_lists(self, batch: Queries, depth: int) -> list[_List]:
        found = [shard.sparse.search(batch.indptr, batch.indices, batch.weights, depth) for shard in self.shards]
        return self._merge(found, len(batch.indptr) - 1, depth, True)

    def _merge(self, found: list[list[Found]], count: int, depth: int, settled: bool) -> list[_List]:
        """One list a query over all shards, of global rows, by (score, docid), never by FAISS's own ids (T-094).

        `settled`: ties inside a shard are in docid order already.
        """
        lists = []
        for query in range(count):
            parts = [(found[s][query][0] + self._offsets[s], found[s][query][1]) for s in range(len(self.shards))]
            rows, scores = (np.concatenate(side) for side in zip(*parts, strict=True)) if len(parts) > 1 else parts[0]
            if len(parts) > 1 or (not settled and (scores[1:] == scores[:-1]).any()):
                order = np.lexsort((self._ranks[rows], -scores))
                rows, scores = rows[order], scores[order]
            lists.append(_List(rows[:depth], scores[:depth]))
        return lists

    def _join(self, dense: _List, sparse: _List, k: int, mode: Mode, fusion: FusionConfig) -> list[Hit]:
        if mode != "hybrid":
            found = dense if mode == "dense" else sparse
            pairs = zip(found.rows[:k].tolist(), found.scores[:k].tolist(), strict=True)
            if mode == "dense":
                return [Hit(self._docids[row], score, score, None, score, 0.0) for row, score in pairs]
            return [Hit(self._docids[row], score, None, score, 0.0, score) for row, score in pairs]
        rows, scores = fuse(dense.rows, dense.scores, sparse.rows, sparse.scores, fusion)
        best = best_first(scores, self._ranks[rows], k)
        rows, scores = rows[best], scores[best]
        sides = (_side(dense, rows, fusion, fusion.dense_weight), _side(sparse, rows, fusion, fusion.sparse_weight))
        return [
            Hit(self._docids[row], score, d, s, dp, sp)
            for row, score, (d, dp), (s, sp) in zip(rows.tolist(), scores.tolist(), *sides, strict=True)
        ]


def _side(found: _List, rows: np.ndarray, fusion: FusionConfig, weight: float) -> list[tuple[float | None, float]]:
    """For each of `rows`: its own score in the list (None: not in it) and what the list adds to the fused score."""
    if len(rows) == 0 or len(found.rows) == 0:
        return [(None, 0.0)] * len(rows)
    order = np.argsort(rows)
    nearest = order[np.minimum(np.searchsorted(rows, found.rows, sorter=order), len(rows) - 1)]
    places = np.flatnonzero(rows[nearest] == found.rows)
    sides: list[tuple[float | None, float]] = [(None, 0.0)] * len(rows)
    scores, parts = found.scores[places].tolist(), weight * list_contributions(found.scores, fusion)[places]
    for hit, score, part in zip(nearest[places].tolist(), scores, parts.tolist(), strict=True):
        sides[hit] = (score, part)
    return sides
