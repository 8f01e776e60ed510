"""A shard is whole or refused; bad vectors never get in; small shards fall back to exact search."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pydantic import ValidationError
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
    write_shard(
        tmp_path / "shard-00001",
        [],
        np.zeros((0, 8), np.float32),
        csr_matrix((0, 60), dtype=np.float32),
        model_fingerprint="m",
    )
    assert len(HybridIndex.open(tmp_path).search(collection.queries, k=3)) == 6
    hits = HybridIndex([Shard(tmp_path / "shard-00001")]).search(collection.queries, k=3)
    assert hits == [[]] * 6
    write(tmp_path / "shard-00002", collection, queries=np.zeros((0, 8), np.float32))  # nothing to measure with
    assert Shard(tmp_path / "shard-00002").manifest.dense_recall == 1.0


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
    assert choose_factory("auto", 1_000_000) == "IVF4096,SQfp16"
    assert choose_factory("auto", 10_000_000) == "IVF4096,SQfp16"  # 200,000 training vectors fill no more lists
    assert choose_factory("auto", 1_000_000, training_vectors=5_000) == "IVF128,SQfp16"
    assert choose_factory("IVF16,PQ8", 5000) == EXACT  # 256 centroids a part
    assert choose_factory("IVF16,PQ8x4", 5000) == "IVF16,PQ8x4"
    assert choose_factory("IVF1024,SQ8", 100_000, training_vectors=1000) == EXACT


def test_an_approximate_index_reports_its_recall_and_a_floor_refuses_it(tmp_path: Path) -> None:
    c = make_collection(0, documents=2000, hidden=16)
    c.dense = np.random.default_rng(0).normal(size=(2000, 16)).astype(np.float32)
    c.dense /= np.linalg.norm(c.dense, axis=1, keepdims=True)
    write(tmp_path / "good", c, config=IndexConfig(dense="IVF4,SQfp16", recall_floor=0.1))
    assert 0.1 < Shard(tmp_path / "good").manifest.dense_recall <= 1
    with pytest.raises(ValueError, match="recall_floor"):
        write(tmp_path / "bad", c, config=IndexConfig(dense="IVF32,PQ2x4", recall_floor=0.99))


def test_a_factory_that_faiss_does_not_know_is_refused_with_the_config() -> None:
    with pytest.raises(ValidationError, match="IVF16,Bogus"):
        IndexConfig(dense="IVF16,Bogus")
    assert IndexConfig(dense="OPQ16,IVF64,PQ16x4fs").dense == "OPQ16,IVF64,PQ16x4fs"


def test_lists_read_by_an_ivf_index_are_derived_logged_and_survive_the_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    c = make_collection(0, documents=2000, hidden=16)
    c.dense += 1.2 * np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)[np.arange(2000) % 8]  # clusters
    c.dense /= np.linalg.norm(c.dense, axis=1, keepdims=True)
    with caplog.at_level("INFO", "components.indexing"):
        write(tmp_path / "a", c, config=IndexConfig(dense="IVF32,SQfp16"))
    probes = Shard(tmp_path / "a").dense.probes
    assert probes is not None
    assert 1 < probes < 32
    assert f"{probes} of 32 lists" in caplog.text
    assert Shard(tmp_path / "a").manifest.dense_probes == probes
    assert Shard(tmp_path / "a").manifest.dense_recall >= 0.95
    write(tmp_path / "b", c, config=IndexConfig(dense="IVF32,SQfp16", probes=3, recall_floor=0))
    assert Shard(tmp_path / "b").dense.probes == 3


def test_a_collection_of_copies_has_full_recall(tmp_path: Path, collection: Collection) -> None:
    """Equal documents stand for each other: which ten of them are found is no loss."""
    collection.dense[:] = collection.dense[collection.dense.any(axis=1)][:2][np.arange(300) % 2]
    write(tmp_path / "a", collection)
    assert Shard(tmp_path / "a").manifest.dense_recall == 1.0


def test_weights_that_half_precision_does_not_hold(tmp_path: Path, collection: Collection) -> None:
    """Explicit and underflowing zeros are no postings; an overflow is refused by docid."""
    sparse = csr_matrix(np.array([[0, 1.0], [1e-9, 0], [0, 0], [2.0, 3.0]], np.float32))
    sparse.data[0] = 0
    few = {"docids": ["a", "b", "c", "d"], "dense": collection.dense[:4]}
    write(tmp_path / "a", collection, sparse=sparse, **few)
    manifest = Shard(tmp_path / "a").manifest
    assert manifest.nonzeros == 2
    assert manifest.without_terms == ["a", "b", "c"]
    sparse.data[-1] = 1e6
    with pytest.raises(ValueError, match="'d'"):
        write(tmp_path / "b", collection, sparse=sparse, **few)


def test_the_same_input_gives_the_same_bytes(tmp_path: Path, collection: Collection) -> None:
    config = IndexConfig(dense="IVF4,SQ8", recall_floor=0)
    texts = [f"text {docid}" for docid in collection.docids]
    write(tmp_path / "a", collection, config=config, texts=texts)
    write(tmp_path / "b", collection, config=config, texts=pa.chunked_array([texts[:7], texts[7:]]))
    assert (tmp_path / "a" / "manifest.json").read_bytes() == (tmp_path / "b" / "manifest.json").read_bytes()


def test_vectors_added_in_blocks_are_all_there() -> None:
    """T-101's sibling: 70,000 vectors cross the block size."""
    vectors = np.random.default_rng(0).normal(size=(70_000, 4)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    index = DenseIndex.build(vectors, np.arange(70_000), EXACT)
    assert len(index) == 70_000
    rows, scores = index.search(vectors[69_999:], 1)[0]
    assert scores[0] > 0.99
    assert vectors[rows[0]] @ vectors[69_999] > 0.99
