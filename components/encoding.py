"""The folder of encoded documents: its configuration, its schema, which rows make a shard, and how a shard is written."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import Field

from components.section import Section
from components.storage import atomic_file

MANIFEST = "manifest.json"


class EncodeConfig(Section):
    """How the corpus is run through the document encoder."""

    rows_per_shard: int = Field(10_000, ge=1)
    """Documents a shard: the unit that is written atomically, retried and, after a kill, not done again."""
    batch_tokens: int = Field(4096, ge=64)
    """Most tokens in one forward pass, padding included; documents are sorted by length inside a shard."""
    actors: int | None = Field(None, ge=1)
    """Encoder processes; by default one a GPU, or one a node's worth of CPUs where there is no GPU."""
    cpus_per_actor: int | None = Field(None, ge=1)
    """CPUs (and so torch threads) of each encoder; by default an equal share of all there are."""


@dataclass(frozen=True)
class ShardPlan:
    """Which corpus rows make shard number `index`: per corpus file, the half-open row range to read."""

    index: int
    rows: int
    pieces: tuple[tuple[str, int, int], ...]

    @property
    def file(self) -> str:
        """Its file name inside the encode folder."""
        return f"shard-{self.index:05d}.parquet"

    def dumps(self) -> str:
        """As text, to travel in a row of Ray Data."""
        return json.dumps([self.index, self.rows, self.pieces])

    @classmethod
    def loads(cls, text: str) -> ShardPlan:
        """What `dumps` wrote."""
        index, rows, pieces = json.loads(text)
        return cls(index, rows, tuple((file, start, stop) for file, start, stop in pieces))


def plan_shards(files: Sequence[Path], rows_per_shard: int) -> list[ShardPlan]:
    """Cut the corpus, file after file in the given order, into shards of `rows_per_shard` rows (the last one shorter)."""
    plans: list[ShardPlan] = []
    pieces: list[tuple[str, int, int]] = []
    room = rows_per_shard
    for file in files:
        start, stop = 0, pq.ParquetFile(file).metadata.num_rows
        while start < stop:
            take = min(room, stop - start)
            pieces.append((str(file), start, start + take))
            start, room = start + take, room - take
            if room == 0:
                plans.append(ShardPlan(len(plans), rows_per_shard, tuple(pieces)))
                pieces, room = [], rows_per_shard
    if pieces:
        plans.append(ShardPlan(len(plans), rows_per_shard - room, tuple(pieces)))
    return plans


def read_rows(plan: ShardPlan, columns: Sequence[str]) -> pa.Table:
    """The rows of a shard, in corpus order; only the row groups that hold them are read."""
    tables: list[pa.Table] = []
    for file, start, stop in plan.pieces:
        tables.extend(_read_piece(file, start, stop, list(columns)))
    table = pa.concat_tables(tables)
    if table.num_rows != plan.rows:
        raise ValueError(
            f"{plan.file}: wanted {plan.rows} corpus rows, read {table.num_rows}: the corpus changed under this run"
        )
    return table


def _read_piece(file: str, start: int, stop: int, columns: list[str]) -> Iterator[pa.Table]:
    reader = pq.ParquetFile(file, memory_map=True)
    offset = 0
    for group in range(reader.num_row_groups):
        rows = reader.metadata.row_group(group).num_rows
        first, last = max(start, offset), min(stop, offset + rows)
        if first < last:
            yield reader.read_row_group(group, columns=columns).slice(first - offset, last - first)
        offset += rows


def shard_schema(hidden_size: int, vocabulary_size: int) -> pa.Schema:
    """The columns of an encoded shard: `docid`, `dense` float16 [H], and the sparse vector as ids (sorted) and weights."""
    ids = pa.uint16() if vocabulary_size <= 1 << 16 else pa.int32()
    return pa.schema(
        [
            pa.field("docid", pa.string(), nullable=False),
            pa.field("dense", pa.list_(pa.float16(), hidden_size), nullable=False),
            pa.field("sparse_ids", pa.list_(ids), nullable=False),
            pa.field("sparse_weights", pa.list_(pa.float16()), nullable=False),
        ]
    )


def write_shard(
    path: Path, docids: pa.ChunkedArray, dense: np.ndarray, indptr: np.ndarray, ids: np.ndarray, weights: np.ndarray,
    *, vocabulary_size: int, tokens: int,
) -> None:  # fmt: skip
    """Write one encoded shard atomically.

    dense float32 [D, H]; indptr [D + 1], ids and weights [nnz] are the sparse rows. Raises ValueError naming the docid of
    the first row with a NaN, an infinity or a negative weight: a bad vector must not reach an index. Weights that
    underflow float16 to zero are kept out.
    """
    _refuse_bad_rows(docids, dense, indptr, weights)
    half = weights.astype(np.float16)
    keep = half > 0
    lengths = (
        np.add.reduceat(np.append(keep, False).astype(np.int64), indptr[:-1])
        if len(indptr) > 1
        else np.zeros(0, np.int64)
    )
    lengths[np.diff(indptr) == 0] = 0
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    schema = shard_schema(dense.shape[1], vocabulary_size)
    id_type, numpy_id = schema.field("sparse_ids").type, np.uint16 if vocabulary_size <= 1 << 16 else np.int32
    table = pa.table(
        [
            docids.cast(pa.string()),
            pa.FixedSizeListArray.from_arrays(pa.array(dense.astype(np.float16).ravel()), dense.shape[1]),
            pa.ListArray.from_arrays(offsets, pa.array(ids[keep].astype(numpy_id)), type=id_type),
            pa.ListArray.from_arrays(offsets, pa.array(half[keep])),
        ],
        schema=schema.with_metadata({"tokens": str(tokens)}),
    )
    with atomic_file(path) as temporary:
        pq.write_table(table, temporary, compression="zstd")


def bad_rows(dense: np.ndarray, indptr: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """bool [D]: rows with NaN or infinity in the dense vector, or NaN, infinity or a negative number among the sparse weights."""
    bad = ~np.isfinite(dense).all(axis=1)
    wrong = np.flatnonzero(~np.isfinite(weights) | (weights < 0))
    bad[np.searchsorted(indptr, wrong, side="right") - 1] = True
    return bad


def _refuse_bad_rows(docids: pa.ChunkedArray, dense: np.ndarray, indptr: np.ndarray, weights: np.ndarray) -> None:
    bad = bad_rows(dense, indptr, weights)
    if bad.any():
        row = int(np.flatnonzero(bad)[0])
        raise ValueError(
            f"document {docids[row].as_py()!r}: its vector holds NaN, infinity or a negative weight ({int(bad.sum())} such "
            f"rows in this shard). The model is broken (look at the training loss) or overflows in its precision (try model.dtype=float32)."
        )


def shard_counts(path: Path) -> dict[str, int]:
    """Rows, tokens and sparse non-zeros of a written shard."""
    reader = pq.ParquetFile(path)
    nonzeros = 0
    for group in range(reader.num_row_groups):
        nonzeros += len(reader.read_row_group(group, columns=["sparse_ids"])["sparse_ids"].combine_chunks().flatten())
    tokens = int((reader.schema_arrow.metadata or {}).get(b"tokens", b"0"))
    return {"rows": reader.metadata.num_rows, "tokens": tokens, "nonzeros": nonzeros}
