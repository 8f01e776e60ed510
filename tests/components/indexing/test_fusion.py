"""Degenerate lists in fusion (spec invariant 11)."""

from __future__ import annotations

import numpy as np
import pytest
from pydantic import ValidationError

from components.indexing.fusion import FusionConfig, fuse


def run(dense: dict[int, float], sparse: dict[int, float], **changes: object) -> dict[int, float]:
    lists = [(np.array(list(d), np.int64), np.array(list(d.values()), np.float32)) for d in (dense, sparse)]
    rows, scores = fuse(*lists[0], *lists[1], FusionConfig(**changes))  # type: ignore[arg-type]
    return dict(zip(rows.tolist(), scores.tolist(), strict=True))


def test_a_constant_list_adds_nothing() -> None:
    assert run({1: 0.5, 2: 0.5}, {3: 2.0, 4: 1.0}) == pytest.approx({1: 0, 2: 0, 3: 0.3, 4: 0}, abs=1e-6)


def test_a_single_hit_adds_nothing_but_is_found() -> None:
    assert run({1: 0.9}, {}) == pytest.approx({1: 0.0})


def test_the_last_of_a_list_counts_as_much_as_an_absent_one() -> None:
    found = run({1: 1.0, 2: 0.5, 3: 0.0}, {9: 1.0, 8: 0.0})
    assert found[3] == 0.0
    assert found[2] == pytest.approx(0.35)


def test_disjoint_and_overlapping_lists() -> None:
    found = run({1: 1.0, 2: 0.0}, {1: 4.0, 5: 2.0}, dense_weight=0.5, sparse_weight=0.5)
    assert found == pytest.approx({1: 1.0, 2: 0.0, 5: 0.0}, abs=1e-6)


def test_reciprocal_ranks() -> None:
    found = run({1: 0.9, 2: 0.8}, {2: 7.0}, method="rrf", dense_weight=1, sparse_weight=1)
    assert found == pytest.approx({1: 1 / 61, 2: 1 / 62 + 1 / 61})


def test_no_weight_at_all_is_refused() -> None:
    with pytest.raises(ValidationError, match="both 0"):
        FusionConfig(dense_weight=0, sparse_weight=0)
