"""Whether a difference between two runs is more than chance: paired tests, Holm's correction, bootstrap intervals.

The randomisation test decides, as it assumes the least (Smucker, Allan and Carterette, CIKM 2007, find that it and the
t test agree on retrieval measures); the t test stands beside it for readers who want it.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from scipy import stats

LEVEL = 0.05
"""Corrected p below which a difference is called significant."""
_BLOCK = 1000
_SAME = 1e-9


def paired_randomisation(a: np.ndarray, b: np.ndarray, samples: int = 10_000, seed: int = 0) -> float:
    """Two-sided p of the mean of paired differences under random sign flips: (hits + 1) / (samples + 1), never 0."""
    differences = np.asarray(a, np.float64) - np.asarray(b, np.float64)
    changed = differences[np.abs(differences) > _SAME]  # a flipped zero changes nothing
    if len(changed) == 0:
        return 1.0
    observed = abs(changed.sum()) * (1 - 1e-12) - 1e-12
    random = np.random.default_rng(seed)
    hits = 0
    for start in range(0, samples, _BLOCK):
        signs = random.integers(0, 2, size=(min(_BLOCK, samples - start), len(changed)), dtype=np.int8) * 2 - 1
        hits += int((np.abs(signs @ changed) >= observed).sum())
    return (hits + 1) / (samples + 1)


def paired_t(a: np.ndarray, b: np.ndarray) -> float:
    """Two-sided p of Student's paired t test; 1 without any difference or with fewer than two pairs."""
    differences = np.asarray(a, np.float64) - np.asarray(b, np.float64)
    if len(differences) < 2 or np.abs(differences).max() <= _SAME:
        return 1.0
    error = differences.std(ddof=1) / np.sqrt(len(differences))
    if error <= _SAME:  # the same difference everywhere
        return 0.0
    return float(2 * stats.t.sf(abs(differences.mean() / error), len(differences) - 1))


def holm(p: Mapping[str, float]) -> dict[str, float]:
    """p values corrected for the number of comparisons by Holm's step-down rule."""
    corrected: dict[str, float] = {}
    largest = 0.0
    for rank, (name, value) in enumerate(sorted(p.items(), key=lambda item: item[1])):
        largest = max(largest, min(1.0, value * (len(p) - rank)))
        corrected[name] = largest
    return corrected


def bootstrap_interval(
    differences: np.ndarray, samples: int = 10_000, seed: int = 0, level: float = 0.95
) -> tuple[float, float]:
    """(low, high) of the mean by resampling queries (percentile bootstrap)."""
    values = np.asarray(differences, np.float64)
    if len(values) == 0:
        return 0.0, 0.0
    random = np.random.default_rng(seed)
    means = []
    for start in range(0, samples, _BLOCK):
        picked = random.integers(0, len(values), size=(min(_BLOCK, samples - start), len(values)))
        means.append(values[picked].mean(axis=1))
    low, high = np.quantile(np.concatenate(means), [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def p_text(p: float) -> str:
    """A p value as people write it: three digits, and none that the samples cannot tell from zero."""
    return "< 0.001" if p < 0.001 else f"= {p:.3f}"


def compare(
    per_query: Mapping[str, np.ndarray], baseline: str, samples: int = 10_000, seed: int = 0
) -> dict[str, dict[str, float]]:
    """How every other system differs from the baseline in one measure (system → values in one order of queries).

    `difference` of the means, its 95 % interval `low` to `high`, `p` (randomisation), `p_t` (t test), `p_holm` (`p`
    corrected over the systems), and on how many queries it `wins`, `ties`, `losses`.
    """
    base = np.asarray(per_query[baseline], np.float64)
    found: dict[str, dict[str, float]] = {}
    for name, values in per_query.items():
        if name == baseline:
            continue
        differences = np.asarray(values, np.float64) - base
        low, high = bootstrap_interval(differences, samples, seed)
        found[name] = {
            "difference": float(differences.mean()) if len(differences) else 0.0, "low": low, "high": high,
            "p": paired_randomisation(values, base, samples, seed), "p_t": paired_t(values, base),
            "wins": int((differences > _SAME).sum()), "losses": int((differences < -_SAME).sum()),
            "ties": int((np.abs(differences) <= _SAME).sum()),
        }  # fmt: skip
    for name, value in holm({name: row["p"] for name, row in found.items()}).items():
        found[name]["p_holm"] = value
    return {name: {key: round(value, 6) for key, value in row.items()} for name, row in found.items()}
