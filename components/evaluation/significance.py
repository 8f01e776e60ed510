"""Whether a difference between two runs is more than chance: paired randomisation, Holm's correction, bootstrap intervals."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

_BLOCK = 1000


def paired_randomisation(a: np.ndarray, b: np.ndarray, samples: int, seed: int) -> float:
    """Two-sided p of the mean difference of paired values under random sign flips; (hits + 1) / (samples + 1)."""
    differences = np.asarray(a, float) - np.asarray(b, float)
    observed = abs(differences.sum()) - 1e-12
    random = np.random.default_rng(seed)
    hits = 0
    for start in range(0, samples, _BLOCK):
        signs = random.integers(0, 2, size=(min(_BLOCK, samples - start), len(differences)), dtype=np.int8) * 2 - 1
        hits += int((np.abs(signs @ differences) >= observed).sum())
    return (hits + 1) / (samples + 1)


def holm(p: Mapping[str, float]) -> dict[str, float]:
    """p values corrected for the number of comparisons by Holm's step-down rule."""
    corrected: dict[str, float] = {}
    largest = 0.0
    for rank, (name, value) in enumerate(sorted(p.items(), key=lambda item: item[1])):
        largest = max(largest, min(1.0, value * (len(p) - rank)))
        corrected[name] = largest
    return corrected


def bootstrap_interval(differences: np.ndarray, samples: int, seed: int, level: float = 0.95) -> tuple[float, float]:
    """(low, high) of the mean by resampling queries."""
    if len(differences) == 0:
        return 0.0, 0.0
    random = np.random.default_rng(seed)
    means = []
    for start in range(0, samples, _BLOCK):
        picked = random.integers(0, len(differences), size=(min(_BLOCK, samples - start), len(differences)))
        means.append(differences[picked].mean(axis=1))
    low, high = np.quantile(np.concatenate(means), [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def compare(per_query: Mapping[str, np.ndarray], baseline: str, samples: int, seed: int) -> dict[str, dict[str, float]]:
    """For every other system: mean difference to the baseline, its 95 % interval, p, Holm-corrected p, wins, ties, losses."""
    base = np.asarray(per_query[baseline], float)
    found: dict[str, dict[str, float]] = {}
    for name, values in per_query.items():
        if name == baseline:
            continue
        differences = np.asarray(values, float) - base
        low, high = bootstrap_interval(differences, samples, seed)
        found[name] = {
            "difference": round(float(differences.mean()) if len(differences) else 0.0, 5), "low": round(low, 5), "high": round(high, 5),
            "p": round(paired_randomisation(values, base, samples, seed), 5),
            "wins": int((differences > 1e-9).sum()), "ties": int((np.abs(differences) <= 1e-9).sum()),
            "losses": int((differences < -1e-9).sum()),
        }  # fmt: skip
    for name, value in holm({name: row["p"] for name, row in found.items()}).items():
        found[name]["p_holm"] = round(value, 5)
    return found
