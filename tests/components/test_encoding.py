"""Shards of encoded documents: which rows make them, and that what is written comes back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from components.encoding import ShardPlan, plan_shards, read_rows, shard_counts, write_shard


@settings(max_examples=30, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 25), min_size=1, max_size=5), per_shard=st.integers(1, 30), group=st.integers(1, 9)
)
def test_shards_cover_the_corpus_once_in_order(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], per_shard: int, group: int
) -> None:
    folder, start, files = tmp_path_factory.mktemp("corpus"), 0, []
    for number, size in enumerate(sizes):
        files.append(folder / f"part-{number:05d}.parquet")
        table = pa.table({"docid": pa.array([str(i) for i in range(start, start + size)], pa.string())})
        pq.write_table(table, files[-1], row_group_size=group)
        start += size
    plans = plan_shards(files, per_shard)
    found = [docid for plan in plans for docid in read_rows(plan, ["docid"])["docid"].to_pylist()]
    assert found == [str(i) for i in range(start)]
    assert all(plan.rows == per_shard for plan in plans[:-1])
    assert [ShardPlan.loads(plan.dumps()) for plan in plans] == plans


def write(path: Path, dense: np.ndarray, weights: list[float], vocabulary: int = 100) -> None:
    docids = pa.chunked_array([[f"d{i}" for i in range(len(dense))]])
    indptr = np.array([0, 2, 2, 3], np.int64)
    write_shard(
        path,
        docids,
        dense,
        indptr,
        np.array([3, 7, 99], np.int32),
        np.array(weights, np.float32),
        vocabulary_size=vocabulary,
        tokens=12,
    )


@pytest.mark.parametrize(("vocabulary", "kind"), [(100, pa.uint16()), (65_536, pa.uint16()), (65_537, pa.int32())])
def test_what_is_written_comes_back(tmp_path: Path, vocabulary: int, kind: pa.DataType) -> None:
    write(tmp_path / "s.parquet", np.eye(3, 4, dtype=np.float32), [1.5, 0.25, 2.0], vocabulary)
    table = pq.read_table(tmp_path / "s.parquet")
    assert table.schema.field("sparse_ids").type.value_type == kind
    assert table["sparse_ids"].to_pylist() == [[3, 7], [], [99]]
    assert table["sparse_weights"].to_pylist() == [[1.5, 0.25], [], [2.0]]
    assert table["dense"].to_pylist()[1] == [0, 1, 0, 0]
    assert shard_counts(tmp_path / "s.parquet") == {"rows": 3, "tokens": 12, "nonzeros": 3}


def test_weights_that_vanish_in_half_precision_are_kept_out(tmp_path: Path) -> None:
    write(tmp_path / "s.parquet", np.eye(3, 4, dtype=np.float32), [1.5, 1e-9, 1e-9])
    assert pq.read_table(tmp_path / "s.parquet")["sparse_ids"].to_pylist() == [[3], [], []]


def test_a_bad_row_is_named_and_nothing_is_written(tmp_path: Path) -> None:
    dense = np.eye(3, 4, dtype=np.float32)
    dense[1, 0] = np.nan
    with pytest.raises(ValueError, match="'d1'"):
        write(tmp_path / "s.parquet", dense, [1, 1, 1])
    with pytest.raises(ValueError, match="'d2'"):
        write(tmp_path / "s.parquet", np.eye(3, 4, dtype=np.float32), [1, 1, -1])
    assert not (tmp_path / "s.parquet").exists()


def test_the_same_content_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write(tmp_path / f"{name}.parquet", np.eye(3, 4, dtype=np.float32), [1, 2, 3])
    assert (tmp_path / "a.parquet").read_bytes() == (tmp_path / "b.parquet").read_bytes()
