"""Which pairs make the batch of a step: a function of seed and step alone, so a resumed run sees the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from components.data.schemas import PAIRS, check_schema
from components.data.writing import mark


@dataclass(frozen=True)
class PairBatch:
    """Q queries with G documents each, the positive first."""

    dataset: str
    qids: list[str]
    queries: list[str]
    documents: list[str]
    """Q·G texts."""
    keys: np.ndarray
    """int64 [Q·G]: a hash of each document's id."""

    def part(self, rank: int, world: int) -> PairBatch:
        """The share of one rank: consecutive queries with their documents."""
        size = len(self.queries) // world
        group = len(self.documents) // len(self.queries)
        q, d = slice(rank * size, (rank + 1) * size), slice(rank * size * group, (rank + 1) * size * group)
        return PairBatch(self.dataset, self.qids[q], self.queries[q], self.documents[d], self.keys[d])


class PairBatches:
    """All training batches over memory-mapped pairs: homogeneous in data set, shuffled anew each epoch."""

    def __init__(
        self,
        folder: Path,
        *,
        batch_size: int,
        negatives: int,
        steps: int,
        seed: int,
        weights: Mapping[str, float] | None = None,
    ) -> None:
        files = sorted(folder.glob("*.parquet"))
        tables = [pq.read_table(path, memory_map=True) for path in files]
        for path, table in zip(files, tables, strict=True):
            check_schema(table.schema, PAIRS, path)
        table = pa.concat_tables(tables).filter(pc.field("split") == "train")
        names = sorted(pc.unique(table["dataset"]).to_pylist())
        if not names:
            raise ValueError(
                f"{folder}: there is no training pair. Give data.pairs (for a bare corpus kind: title_body), or "
                f"train.steps=0."
            )
        unknown = sorted(set(weights or {}) - set(names))
        if unknown:
            raise ValueError(f"train.datasets names {', '.join(unknown)}, but the pairs are of {', '.join(names)}")
        self._tables = [table.filter(pc.field("dataset") == name) for name in names]
        self.names, self.sizes = names, [part.num_rows for part in self._tables]
        share = np.asarray(
            [(weights or {}).get(name, 0.0 if weights else size) for name, size in zip(names, self.sizes, strict=True)]
        )
        self._choice = (
            np.random.default_rng([seed, 0]).choice(len(names), size=steps, p=share / share.sum())
            if steps
            else np.zeros(0, int)
        )
        self._batch_size, self._negatives, self._seed = batch_size, negatives, seed
        self._orders: dict[tuple[int, int], np.ndarray] = {}

    def batch(self, step: int) -> PairBatch:
        """The global batch of a step (0-based)."""
        dataset = int(self._choice[step])
        begin = int((self._choice[:step] == dataset).sum()) * self._batch_size
        rows = [self._row(dataset, begin + i) for i in range(self._batch_size)]
        chosen = self._tables[dataset].take(pa.array(rows)).to_pylist()
        random = np.random.default_rng([self._seed, 2, step])
        documents: list[str] = []
        keys: list[np.int64] = []
        for row in chosen:
            texts, ids = self._documents(row, random)
            documents.extend(texts)
            keys.extend(np.uint64(mark(docid)).astype(np.int64) for docid in ids)
        return PairBatch(
            self.names[dataset],
            [row["qid"] for row in chosen],
            [row["query"] for row in chosen],
            documents,
            np.asarray(keys, np.int64),
        )

    def _row(self, dataset: int, position: int) -> int:
        epoch, place = divmod(position, self.sizes[dataset])
        key = (dataset, epoch)
        if key not in self._orders:
            self._orders = {
                known: order for known, order in self._orders.items() if known[0] != dataset or known[1] == epoch - 1
            }
            self._orders[key] = np.random.default_rng([self._seed, 1, dataset, epoch]).permutation(self.sizes[dataset])
        return int(self._orders[key][place])

    def _documents(self, row: dict[str, Any], random: np.random.Generator) -> tuple[list[str], list[str]]:
        texts, ids = [row["positive"]], [row["positive_docid"]]
        if self._negatives:
            pool = len(row["negatives"])
            if pool == 0:
                raise ValueError(
                    f"query {row['qid']!r} of data set {row['dataset']!r} has no negatives, but "
                    f"train.negatives={self._negatives}: give pairs with negatives, or set train.negatives=0"
                )
            picked = random.choice(pool, size=self._negatives, replace=pool < self._negatives)
            texts += [row["negatives"][i] for i in picked]
            ids += [row["negative_docids"][i] for i in picked]
        return texts, ids
