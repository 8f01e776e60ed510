"""A shard is whole or refused; bad vectors never get in; small shards fall back to exact search."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from scipy.sparse import csr_matrix

from components.indexing import HybridIndex, IndexConfig, Shard, write_shard
from components.indexing.dense import EXACT, DenseIndex, choose_factory
from tests.components.indexing.conftest import Collection, make_collection


def write(folder: Path, c: Collection, **changes: object) -> None:
    values = {"docids": c.docids, "dense": c.dense, "sparse": c.sparse, "model_fingerprint": "m"} | changes
    write_shard(folder, **values)  # type: ignore[arg-type]


def test_counts_and_documents_without_a_side_stand_in_the_manifest(tmp_path: Path) -> None:
    """T-050: kept out of the sparse index, listed, still found by the dense side."""
    c = make_collection(0, documents=5)
    c.sparse = c.sparse.tolil()
    c.sparse[3] = 0
    c.sparse = csr_matrix(c.sparse)
    c.dense[:] = np.eye(5, 8, dtype=np.float32)
    c.dense[4] = 0
    write(tmp_path / "shard-00000", c)
    manifest = Shard(tmp_path / "shard-00000").manifest
    assert c.docids[3] in manifest.without_terms
    assert manifest.without_vector == [c.docids[4]]
    hits = HybridIndex.open(tmp_path).search(_dense_query(c.dense[3]), k=1, mode="dense")[0]
    assert hits[0].docid == c.docids[3]


def _dense_query(vector: np.ndarray):  # type: ignore[no-untyped-def]
    from tests.components.indexing.conftest import Batch

    return Batch(vector[None], np.array([0, 0]), np.zeros(0, np.int32), np.zeros(0, np.float32))


@pytest.mark.parametrize("name", ["dense.faiss", "sparse.weights.npy", "documents.arrow"])
@pytest.mark.parametrize("damage", ["cut", "gone", "flipped"])
def test_a_damaged_file_is_named(tmp_path: Path, collection: Collection, name: str, damage: str) -> None:
    folder = tmp_path / "shard-00000"
    write(folder, collection)
    path = folder / name
    content = bytearray(path.read_bytes())
    if damage == "cut":
        path.write_bytes(content[: len(content) // 2])
    elif damage == "gone":
        path.unlink()
    else:
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    with pytest.raises((ValueError, FileNotFoundError), match=name):
        HybridIndex.open(tmp_path)


def test_more_vectors_than_ids_is_refused(tmp_path: Path, collection: Collection) -> None:
    """T-061."""
    with pytest.raises(ValueError, match="they must be equal"):
        write(tmp_path / "a", collection, docids=collection.docids[:-1])
    with pytest.raises(ValueError, match="occurs twice"):
        write(tmp_path / "b", collection, docids=["x", *collection.docids[1:-1], "x"])


def test_a_bad_vector_is_named_by_its_docid(tmp_path: Path, collection: Collection) -> None:
    dense = collection.dense.copy()
    dense[7, 0] = np.inf
    with pytest.raises(ValueError, match=repr(collection.docids[7])):
        write(tmp_path / "a", collection, dense=dense)
    sparse = collection.sparse.copy()
    sparse.data[0] = np.nan
    row = int(np.searchsorted(sparse.indptr, 0, side="right") - 1)
    with pytest.raises(ValueError, match=repr(collection.docids[row])):
        write(tmp_path / "b", collection, sparse=sparse)


def test_an_empty_shard_is_legal(tmp_path: Path, collection: Collection) -> None:
    write(tmp_path / "shard-00000", collection)
    write_shard(tmp_path / "shard-00001", [], np.zeros((0, 8), np.float32), csr_matrix((0, 60), dtype=np.float32), model_fingerprint="m")
    assert len(HybridIndex.open(tmp_path).search(collection.queries, k=3)) == 6


def test_shards_of_different_models_are_refused(tmp_path: Path, collection: Collection) -> None:
    write(tmp_path / "shard-00000", collection)
    other = [f"x{docid}" for docid in collection.docids]
    write(tmp_path / "shard-00001", collection, docids=other, model_fingerprint="another")
    with pytest.raises(ValueError, match="different models"):
        HybridIndex.open(tmp_path)
    write(tmp_path / "two" / "shard-00000", collection)
    write(tmp_path / "two" / "shard-00001", collection)
    with pytest.raises(ValueError, match="two shards"):
        HybridIndex.open(tmp_path / "two")


def test_too_few_training_points_fall_back_to_exact(caplog: pytest.LogCaptureFixture) -> None:
    """T-098."""
    assert choose_factory("IVF1024,SQ8", 100) == EXACT
    assert "IVF1024" in caplog.text
    assert choose_factory("IVF16,SQ8", 1000) == "IVF16,SQ8"
    assert choose_factory("auto", 1000) == EXACT
    assert choose_factory("auto", 1_000_000).startswith("IVF4096")


def test_an_approximate_index_reports_its_recall_and_a_floor_refuses_it(tmp_path: Path) -> None:
    c = make_collection(0, documents=2000, hidden=16)
    c.dense = np.random.default_rng(0).normal(size=(2000, 16)).astype(np.float32)
    c.dense /= np.linalg.norm(c.dense, axis=1, keepdims=True)
    write(tmp_path / "good", c, config=IndexConfig(dense="IVF4,SQfp16", recall_floor=0.1))
    assert 0.1 < Shard(tmp_path / "good").manifest.dense_recall <= 1
    with pytest.raises(ValueError, match="recall_floor"):
        write(tmp_path / "bad", c, config=IndexConfig(dense="IVF32,PQ2x4", recall_floor=0.99))


def test_vectors_added_in_blocks_are_all_there() -> None:
    """T-101's sibling: 70,000 vectors cross the block size."""
    vectors = np.random.default_rng(0).normal(size=(70_000, 4)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    index = DenseIndex.build(vectors, np.arange(70_000), EXACT)
    assert len(index) == 70_000
    rows, scores = index.search(vectors[69_999:], 1)[0]
    assert scores[0] > 0.99
    assert vectors[rows[0]] @ vectors[69_999] > 0.99
