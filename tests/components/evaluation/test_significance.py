"""Paired tests against exact enumeration and scipy, Holm by hand, coverage of the bootstrap."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from scipy import stats

from components.evaluation.significance import bootstrap_interval, compare, holm, paired_randomisation, paired_t


def exact(differences: np.ndarray) -> float:
    """Two-sided p over every one of the 2^n sign patterns."""
    sums = [abs(float(np.dot(signs, differences))) for signs in product((1, -1), repeat=len(differences))]
    return float(np.mean([value >= abs(differences.sum()) - 1e-9 for value in sums]))


@pytest.mark.parametrize("seed", range(4))
def test_randomisation_is_near_the_exact_test(seed: int) -> None:
    differences = np.round(np.random.default_rng(seed).normal(0.2, 0.5, 10), 2)
    wanted = exact(differences)
    found = paired_randomisation(differences, np.zeros(10), samples=20_000, seed=seed)
    assert found == pytest.approx(wanted, abs=4 * np.sqrt(wanted * (1 - wanted) / 20_000) + 1e-4)


def test_randomisation_is_seeded_and_two_sided() -> None:
    random = np.random.default_rng(1)
    a, b = random.random(50), random.random(50)
    assert paired_randomisation(a, b, 5000, 3) == paired_randomisation(a, b, 5000, 3)
    assert paired_randomisation(a, b, 5000, 3) == pytest.approx(paired_randomisation(b, a, 5000, 3), abs=1e-12)


def test_no_difference_and_a_sure_one() -> None:
    same = np.linspace(0, 1, 50)
    assert paired_randomisation(same, same) == 1.0
    assert paired_t(same, same) == 1.0
    assert paired_randomisation(same + 0.1, same) == pytest.approx(1 / 10_001)
    assert paired_t(np.array([1.0]), np.array([0.0])) == 1.0


def test_false_alarms_are_as_rare_as_promised() -> None:
    random = np.random.default_rng(2)
    p = [paired_randomisation(random.random(40), random.random(40), samples=400, seed=i) for i in range(300)]
    assert 0.02 < np.mean(np.asarray(p) < 0.05) < 0.09


def test_t_is_scipys() -> None:
    random = np.random.default_rng(3)
    a, b = random.random(30), random.random(30)
    assert paired_t(a, b) == pytest.approx(stats.ttest_rel(a, b).pvalue, rel=1e-9)


def test_holm_by_hand() -> None:
    assert holm({"a": 0.01, "b": 0.04, "c": 0.03}) == pytest.approx({"a": 0.03, "c": 0.06, "b": 0.06})
    assert holm({"a": 0.9, "b": 0.8}) == pytest.approx({"a": 1.0, "b": 1.0})
    assert holm({}) == {}


def test_the_bootstrap_interval_is_that_of_theory() -> None:
    values = np.random.default_rng(4).normal(0.3, 1, 400)
    low, high = bootstrap_interval(values, 4000, seed=0)
    error = values.std() / 20
    assert low == pytest.approx(values.mean() - 1.96 * error, abs=0.02)
    assert high == pytest.approx(values.mean() + 1.96 * error, abs=0.02)
    assert bootstrap_interval(np.array([])) == (0.0, 0.0)


def test_two_runs_on_fifty_queries_are_told_apart_or_not() -> None:
    """Case T-124."""
    random = np.random.default_rng(5)
    base = random.random(50)
    found = compare({"BM25": base, "better": base + 0.1, "noise": base + random.normal(0, 0.05, 50)}, "BM25", 2000, 0)
    assert set(found) == {"better", "noise"}
    assert found["better"]["p_holm"] < 0.01
    assert found["better"]["p_holm"] == pytest.approx(2 * found["better"]["p"], abs=1e-5)
    assert found["better"]["difference"] == pytest.approx(0.1)
    assert (found["better"]["wins"], found["better"]["ties"], found["better"]["losses"]) == (50, 0, 0)
    assert found["noise"]["p_holm"] > 0.05
    assert found["noise"]["low"] <= 0 <= found["noise"]["high"]
