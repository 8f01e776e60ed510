"""The evaluate section refuses what could only give wrong or missing numbers."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from components.evaluation import EvaluateConfig
from components.evaluation.dev_weights import best_share, share_curve, with_share
from components.indexing import FusionConfig


def test_the_defaults_are_the_papers() -> None:
    config = EvaluateConfig()
    assert config.depth == 1000
    assert (config.fusion.dense_weight, config.fusion.sparse_weight) == (0.7, 0.3)
    assert (config.bm25_k1, config.bm25_b) == (0.9, 0.4)
    assert not config.drop_self_hits


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"metrics": ("nDCG@10", "R@100")}, "metrics lacks MRR@10"),
        ({"metrics": ("nDCG@10", "MRR@10", "R@100", "ndcg")}, "nDCG@10"),
        ({"metrics": ("nDCG@10", "MRR@10", "R@100", "R@1000"), "depth": 500}, "depth=500 is less than a measure needs"),
        ({"depth": 10}, "greater than or equal to 100"),
        ({"bm25_b": 1.5}, "less than or equal to 1"),
        ({"k": 10}, "Extra inputs"),
    ],
)
def test_mistakes_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        EvaluateConfig(**fields)  # type: ignore[arg-type]


def test_the_best_share_follows_the_side_that_knows() -> None:
    good, bad = [("a", 1.0), ("b", 0.5)], [("b", 1.0), ("c", 0.9), ("a", 0.1)]
    fusion = FusionConfig()
    dense_knows = share_curve({"q": good}, {"q": bad}, {"q": {"a": 1}}, fusion)
    sparse_knows = share_curve({"q": bad}, {"q": good}, {"q": {"a": 1}}, fusion)
    assert dense_knows[0][1] < dense_knows[-1][1] == 1.0
    assert best_share(dense_knows, fusion) > 0.5
    assert best_share(sparse_knows, fusion) < 0.5
    missing = share_curve({}, {}, {"q": {"a": 1}}, fusion)
    assert {value for _, value in missing} == {0.0}


def test_among_equal_shares_the_configured_one_stays() -> None:
    fusion = FusionConfig(dense_weight=2, sparse_weight=8)
    assert best_share([(share / 10, 0.5) for share in range(11)], fusion) == 0.2
    assert (with_share(fusion, 0.3).dense_weight, with_share(fusion, 0.3).sparse_weight) == (0.3, 0.7)
