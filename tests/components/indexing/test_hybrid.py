"""Search equals a brute-force reference, and does not depend on how documents are cut into shards."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import csr_matrix

from components.indexing import FusionConfig, HybridIndex, write_shard
from tests.components.indexing.conftest import Batch, Collection, make_collection


def build(folder: Path, c: Collection, cuts: list[int]) -> HybridIndex:
    edges = [0, *cuts, len(c.docids)]
    for number, (start, stop) in enumerate(pairwise(edges)):
        part = slice(start, stop)
        write_shard(
            folder / f"shard-{number:05d}", c.docids[part], c.dense[part], c.sparse[part], model_fingerprint="m"
        )
    return HybridIndex.open(folder)


def reference_lists(c: Collection, query: int, depth: int) -> tuple[list[tuple[str, float]], list[tuple[str, float]]]:
    """(dense, sparse) lists by sorting everything; dense documents in half precision, as they are stored."""
    stored = c.dense.astype(np.float16).astype(np.float32)
    dense = [(d, float(stored[i] @ c.queries.dense[query])) for i, d in enumerate(c.docids) if c.dense[i].any()]
    row = np.zeros(c.sparse.shape[1], np.float32)
    part = slice(c.queries.indptr[query], c.queries.indptr[query + 1])
    row[c.queries.indices[part]] = c.queries.weights[part]
    values = c.sparse @ row
    sparse = [(d, float(values[i])) for i, d in enumerate(c.docids) if values[i] > 0]
    return tuple(sorted(side, key=lambda hit: (-hit[1], hit[0]))[:depth] for side in (dense, sparse))  # type: ignore[return-value]


@pytest.mark.parametrize("seed", range(3))
def test_sparse_and_dense_equal_brute_force(tmp_path: Path, seed: int) -> None:
    c = make_collection(seed)
    index = build(tmp_path, c, [])
    for mode in ("dense", "sparse"):
        found = index.search(c.queries, k=20, mode=mode)
        for query, hits in enumerate(found):
            wanted = reference_lists(c, query, 20)[mode == "sparse"]
            assert [hit.docid for hit in hits] == [docid for docid, _ in wanted]
            np.testing.assert_allclose(
                [hit.score for hit in hits], [score for _, score in wanted], rtol=1e-5, atol=1e-6
            )


@pytest.mark.parametrize("method", ["minmax", "rrf"])
def test_hybrid_equals_the_formula_by_hand(tmp_path: Path, collection: Collection, method: str) -> None:
    fusion = FusionConfig(method=method, candidates=50)
    hits = build(tmp_path, collection, []).search(collection.queries, k=10, fusion=fusion)
    for query, found in enumerate(hits):
        fused: dict[str, float] = {}
        for side, weight in zip(reference_lists(collection, query, 50), (0.7, 0.3), strict=True):
            low, high = min(s for _, s in side), max(s for _, s in side)
            for rank, (docid, score) in enumerate(side, 1):
                part = (score - low) / (high - low + 1e-8) if method == "minmax" else 1 / (60 + rank)
                fused[docid] = fused.get(docid, 0.0) + weight * part
        wanted = sorted(fused.items(), key=lambda hit: (-hit[1], hit[0]))[:10]
        np.testing.assert_allclose([hit.score for hit in found], [score for _, score in wanted], atol=1e-5)
        for hit in found:
            assert hit.score == pytest.approx(hit.dense_part + hit.sparse_part, abs=1e-9)
            assert hit.score == pytest.approx(fused[hit.docid], abs=1e-5)


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    cuts=st.lists(st.integers(0, 300), max_size=4),
    k=st.integers(1, 400),
    mode=st.sampled_from(["hybrid", "dense", "sparse"]),
)
def test_shards_merged_equal_one_shard(
    tmp_path_factory: pytest.TempPathFactory, seed: int, cuts: list[int], k: int, mode: str
) -> None:
    c = make_collection(seed, coarse=True)  # coarse: many ties, also at the k-th place (T-094)
    folder = tmp_path_factory.mktemp("shards")
    one, many = build(folder / "one", c, []), build(folder / "many", c, sorted(cuts))
    assert one.search(c.queries, k=k, mode=mode) == many.search(c.queries, k=k, mode=mode)  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["dense", "sparse", "hybrid"])
def test_equal_documents_are_ordered_by_docid_across_the_last_place(tmp_path: Path, mode: str) -> None:
    """T-110: twenty copies of every vector, so the k-th place and the depth of the lists cut through ties."""
    c = make_collection(3, documents=400)
    copies = np.random.default_rng(1).integers(0, 20, 400)
    c.dense = c.dense[c.dense.any(axis=1)][:20][copies]
    c.sparse = c.sparse[copies]
    one, many = build(tmp_path / "one", c, []), build(tmp_path / "many", c, [130, 260])
    fusion = FusionConfig(candidates=50)
    for k in (1, 7, 10, 33):
        found = one.search(c.queries, k=k, mode=mode, fusion=fusion)  # type: ignore[arg-type]
        assert found == many.search(c.queries, k=k, mode=mode, fusion=fusion)  # type: ignore[arg-type]
        for hits in found:
            assert hits == sorted(hits, key=lambda hit: (-hit.score, hit.docid))
    if mode != "hybrid":
        for query, hits in enumerate(one.search(c.queries, k=10, mode=mode)):  # type: ignore[arg-type]
            wanted = reference_lists(c, query, 400)[mode == "sparse"]
            floor = hits[-1].score
            tied = sorted(docid for docid, score in wanted if abs(score - floor) < 1e-6)
            assert [hit.docid for hit in hits if hit.score == floor] == tied[: sum(hit.score == floor for hit in hits)]


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10_000), k=st.integers(1, 60), method=st.sampled_from(["minmax", "rrf"]))
def test_a_shorter_list_is_the_beginning_of_a_longer_one(
    tmp_path_factory: pytest.TempPathFactory, seed: int, k: int, method: str
) -> None:
    """Scores of hybrid hits do not depend on k, also when k is above the candidates."""
    c = make_collection(seed, coarse=True)
    index = build(tmp_path_factory.mktemp("prefix"), c, [150])
    fusion = FusionConfig(method=method, candidates=20)
    longer = index.search(c.queries, k=100, fusion=fusion)
    assert index.search(c.queries, k=k, fusion=fusion) == [hits[:k] for hits in longer]


def test_ties_go_by_docid_and_documents_are_found_by_id_not_position(tmp_path: Path) -> None:
    """T-095, T-110: ids that are shuffled, scores that are equal."""
    docids = ["b", "a", "c"]
    sparse = csr_matrix(np.eye(60, dtype=np.float32)[[5, 5, 5]])
    dense = np.tile(np.eye(1, 8, dtype=np.float32), (3, 1))
    write_shard(
        tmp_path / "shard-00000",
        docids,
        dense,
        sparse,
        model_fingerprint="m",
        titles=["B", "A", "C"],
        texts=["tb", "ta", "tc"],
    )
    index = HybridIndex.open(tmp_path)
    batch = Batch(dense[:1], np.array([0, 1]), np.array([5], np.int32), np.array([1.0], np.float32))
    for mode in ("hybrid", "dense", "sparse"):
        assert [hit.docid for hit in index.search(batch, k=2, mode=mode)[0]] == ["a", "b"]  # type: ignore[arg-type]
    assert index.documents(["c", "a"]) == {"c": ("C", "tc"), "a": ("A", "ta")}


def test_fewer_than_k_found_and_queries_without_vectors(tmp_path: Path) -> None:
    """T-092: −1 never appears; k above the number of documents is legal; a query of nothing finds nothing."""
    c = make_collection(1, documents=3)
    index = build(tmp_path, c, [])
    for mode in ("hybrid", "dense", "sparse"):
        for hits in index.search(c.queries, k=10, mode=mode):  # type: ignore[arg-type]
            assert len(hits) <= 3
            assert {hit.docid for hit in hits} <= set(c.docids)
    nothing = Batch(np.zeros((1, 8), np.float32), np.array([0, 0]), np.zeros(0, np.int32), np.zeros(0, np.float32))
    assert index.search(nothing, k=10) == [[]]


def test_what_is_refused(tmp_path: Path, collection: Collection) -> None:
    index = build(tmp_path, collection, [])
    broken = Batch(
        collection.queries.dense.copy(), *(getattr(collection.queries, n) for n in ("indptr", "indices", "weights"))
    )
    broken.dense[2, 3] = np.nan
    with pytest.raises(ValueError, match="query 2"):
        index.search(broken)
    broken.dense[2, 3] = 0
    broken.weights = broken.weights.copy()
    broken.weights[broken.indptr[4]] = np.inf
    with pytest.raises(ValueError, match="query 4"):
        index.search(broken)
    with pytest.raises(ValueError, match="at least 1"):
        index.search(collection.queries, k=0)
    with pytest.raises(ValueError, match="mode"):
        index.search(collection.queries, mode="both")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="dimensions"):
        index.search(
            Batch(
                collection.queries.dense[:, :4],
                *(getattr(collection.queries, n) for n in ("indptr", "indices", "weights")),
            )
        )


def test_a_self_hit_is_dropped_after_fusion_and_replaced(tmp_path: Path, collection: Collection) -> None:
    """Spec trap 16."""
    index = build(tmp_path, collection, [])
    all_hits = index.search(collection.queries, k=6)
    exclude = [hits[0].docid for hits in all_hits]
    without = index.search(collection.queries, k=5, exclude=exclude)
    assert without == [hits[1:] for hits in all_hits]


def test_term_weights_explain_the_sparse_score(tmp_path: Path, collection: Collection) -> None:
    index = build(tmp_path, collection, [100])
    hits = index.search(collection.queries, k=5, mode="sparse")
    for query, found in enumerate(hits):
        part = slice(collection.queries.indptr[query], collection.queries.indptr[query + 1])
        weights = index.term_weights([hit.docid for hit in found], collection.queries.indices[part])
        np.testing.assert_allclose(weights @ collection.queries.weights[part], [hit.score for hit in found], rtol=1e-5)
