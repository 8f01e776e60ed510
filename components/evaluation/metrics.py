"""trec_eval's measures through ir-measures, with its rules kept: missing queries count zero, ties are settled before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import ir_measures
import numpy as np
from ir_measures import RR, R, nDCG

NDCG_10, MRR_10, RECALL_100 = "nDCG@10", "MRR@10", "R@100"
METRICS = (NDCG_10, MRR_10, RECALL_100)
"""The names under which results are stored, logged and shown; `result.json` and the README use no others."""
_MEASURES = {NDCG_10: nDCG @ 10, MRR_10: RR @ 10, RECALL_100: R @ 100}

Ranking = Sequence[tuple[str, float]]
"""Documents with their scores, best first."""


@dataclass(frozen=True)
class Evaluation:
    """Measures of one run over all judged queries, in the order of `qids`."""

    qids: list[str]
    values: dict[str, np.ndarray]
    """metric → float64 [queries]"""
    missing: int
    """Judged queries without any result (they count zero)."""

    @property
    def means(self) -> dict[str, float]:
        """metric → mean over all judged queries."""
        return {name: float(value.mean()) if len(value) else 0.0 for name, value in self.values.items()}


def in_engine_order(ranking: Ranking, exclude: str | None = None) -> list[tuple[str, float]]:
    """The ranking by score descending, then docid ascending, with strictly decreasing scores.

    Tools break ties in different ways (trec_eval by docid descending), so a run must not hold any (case T-110): the scores
    written are those of the ranks, and the true score stays with the hit. `exclude` drops a self hit (case T-119).
    """
    ordered = sorted((hit for hit in ranking if hit[0] != exclude), key=lambda hit: (-hit[1], hit[0]))
    return [(docid, float(len(ordered) - rank)) for rank, (docid, _) in enumerate(ordered)]


def evaluate_run(
    run: Mapping[str, Ranking], qrels: Mapping[str, Mapping[str, int]], drop_self_hits: bool = False
) -> Evaluation:  # fmt: skip
    """Measure `run` on `qrels` (qid → docid → grade).

    Every judged query with at least one relevant document counts; one without results counts zero (case T-121). Grades
    below one are not relevant, gain is max(0, grade) (case T-066); judged documents that are not in the corpus stay in the
    denominators (case T-064).
    """
    judged = sorted(qid for qid, grades in qrels.items() if any(grade >= 1 for grade in grades.values()))
    place = {qid: i for i, qid in enumerate(judged)}
    values = {name: np.zeros(len(judged)) for name in METRICS}
    scored = {
        qid: dict(in_engine_order(run[qid], exclude=qid if drop_self_hits else None)) for qid in judged if run.get(qid)
    }
    clean = {qid: {docid: max(0, int(grade)) for docid, grade in qrels[qid].items()} for qid in judged}
    names = {measure: name for name, measure in _MEASURES.items()}
    if scored:
        for result in ir_measures.iter_calc(list(_MEASURES.values()), clean, scored):
            values[names[result.measure]][place[result.query_id]] = result.value
    return Evaluation(judged, values, missing=sum(not run.get(qid) for qid in judged))


def run_lines(run: Mapping[str, Ranking], tag: str) -> list[str]:
    """TREC run lines with strictly decreasing scores, so that every tool sees the engine's order."""
    lines = []
    for qid, ranking in run.items():
        for rank, (docid, score) in enumerate(in_engine_order(ranking), 1):
            lines.append(f"{qid} Q0 {docid} {rank} {score:g} {tag}")
    return lines
