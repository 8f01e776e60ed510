"""The dense share of the hybrid, chosen on held-out dev pairs; the whole curve is kept, not only its top."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from components.evaluation.metrics import NDCG_10, Ranking, evaluate_run
from components.indexing.fusion import FusionConfig, fuse

SHARES = tuple(round(0.1 * step, 1) for step in range(11))

Curve = list[tuple[float, float]]
"""(dense share, nDCG@10) of each share tried."""


def with_share(fusion: FusionConfig, share: float) -> FusionConfig:
    """`fusion` with weights `share` and 1 − `share`."""
    return fusion.model_copy(update={"dense_weight": share, "sparse_weight": round(1 - share, 6)})


def share_curve(
    dense: Mapping[str, Ranking], sparse: Mapping[str, Ranking], qrels: Mapping[str, Mapping[str, int]],
    fusion: FusionConfig,
) -> Curve:  # fmt: skip
    """nDCG@10 for each dense share, from each side's candidate list of every query (searched once, fused 11 times)."""
    curve = []
    for share in SHARES:
        weights = with_share(fusion, share)
        run = {qid: fuse_rankings(dense.get(qid, ()), sparse.get(qid, ()), weights) for qid in qrels}
        curve.append((share, round(evaluate_run(run, qrels, [NDCG_10]).means[NDCG_10], 6)))
    return curve


def best_share(curve: Curve, fusion: FusionConfig) -> float:
    """The share with the best value; among equals the one nearest to what `fusion` has."""
    configured = fusion.dense_weight / (fusion.dense_weight + fusion.sparse_weight)
    return max(curve, key=lambda point: (point[1], -abs(point[0] - configured)))[0]


def fuse_rankings(dense: Ranking, sparse: Ranking, fusion: FusionConfig, k: int = 10) -> list[tuple[str, float]]:
    """The fused best `k` of two lists, each best first, as `HybridIndex.search` would give them."""
    docids = sorted({docid for docid, _ in dense} | {docid for docid, _ in sparse})
    row = {docid: i for i, docid in enumerate(docids)}
    sides = [
        (np.asarray([row[docid] for docid, _ in side], np.int64), np.asarray([score for _, score in side], np.float64))
        for side in (dense, sparse)
    ]
    rows, scores = fuse(*sides[0], *sides[1], fusion)
    best = np.lexsort((rows, -scores))[:k]
    return [(docids[i], score) for i, score in zip(rows[best].tolist(), scores[best].tolist(), strict=True)]
