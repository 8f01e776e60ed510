"""trec_eval's measures through ir-measures, with its rules: missing queries count zero, ties are settled before."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal, get_args
from urllib.parse import quote

import ir_measures
import numpy as np
from ir_measures import AP, RR, R, Success, nDCG

from components.storage import write_atomic

NDCG_10, MRR_10, RECALL_100 = "nDCG@10", "MRR@10", "R@100"
METRICS = (NDCG_10, MRR_10, RECALL_100)
"""The names under which the headline results are stored and shown; `result.json` and the README use no others."""
MetricName = Literal["nDCG@10", "MRR@10", "R@100", "R@20", "R@50", "R@1000", "MAP@1000", "Success@1"]
KNOWN_METRICS: tuple[MetricName, ...] = get_args(MetricName)
_MEASURES = {
    NDCG_10: nDCG @ 10, MRR_10: RR @ 10, RECALL_100: R @ 100, "R@20": R @ 20, "R@50": R @ 50, "R@1000": R @ 1000,
    "MAP@1000": AP @ 1000, "Success@1": Success @ 1,
}  # fmt: skip
_GAP = 2.0**-22
"""Smallest difference of two neighbours in a written ranking over its largest score: two steps of a float32."""
_SPACE = re.compile(r"\s")

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
    without_relevant: int = 0
    """Judged queries none of whose documents is relevant (they count zero too, as in trec_eval)."""

    @property
    def means(self) -> dict[str, float]:
        """metric → mean over all judged queries."""
        return {name: float(value.mean()) if len(value) else 0.0 for name, value in self.values.items()}


def in_engine_order(ranking: Ranking, exclude: str | None = None) -> list[tuple[str, float]]:
    """The ranking by score descending, then docid ascending, with scores that strictly decrease as float32.

    Tools break ties in different ways (trec_eval by docid descending, on float32), so a run must not hold any (case
    T-110): scores closer than `_GAP` are moved apart, others stay as they are. `exclude` drops a self hit (case T-119).
    """
    ordered = sorted((hit for hit in ranking if hit[0] != exclude), key=lambda hit: (-hit[1], hit[0]))
    if not ordered:
        return []
    scores = np.asarray([score for _, score in ordered], np.float64)
    slope = np.arange(len(scores)) * (max(float(np.abs(scores).max()), 1e-30) * _GAP)
    apart = np.minimum.accumulate(scores + slope) - slope
    return list(zip((docid for docid, _ in ordered), apart.astype(np.float32).tolist(), strict=True))


def drop_self_hits(run: Mapping[str, Ranking]) -> dict[str, Ranking]:
    """The run without documents whose id is their query's, for collections whose queries are documents (case T-119)."""
    return {qid: [hit for hit in ranking if hit[0] != qid] for qid, ranking in run.items()}


def evaluate_run(
    run: Mapping[str, Ranking], qrels: Mapping[str, Mapping[str, int]], metrics: Iterable[str] = METRICS,
    drop_self_hits: bool = False,
) -> Evaluation:  # fmt: skip
    """Measure `run` on `qrels` (qid → docid → grade), in the order of their qids.

    All judged queries count; one without results counts zero (case T-121), and so does one without relevant documents.
    Grades below one are not relevant and their gain is zero (case T-066); judged documents that are not in the corpus
    stay in the denominators (case T-064). ValueError: an unknown metric, or a docid twice in a ranking.
    """
    names = list(metrics)
    if unknown := [name for name in names if name not in _MEASURES]:
        raise ValueError(f"metrics: found {unknown}, wanted some of {', '.join(KNOWN_METRICS)}")
    judged = sorted(qrels)
    values = {name: np.zeros(len(judged)) for name in names}
    scored = {}
    for qid in judged:
        if ranking := in_engine_order(run.get(qid, ()), exclude=qid if drop_self_hits else None):
            scored[qid] = dict(ranking)
            if len(scored[qid]) < len(ranking):
                raise ValueError(f"query {qid!r}: a document stands twice in its ranking, so its measures mean nothing")
    clean = {qid: {docid: max(0, int(grade)) for docid, grade in qrels[qid].items()} for qid in judged}
    if scored:
        place = {qid: i for i, qid in enumerate(judged)}
        keys = {_MEASURES[name]: name for name in names}
        for result in ir_measures.iter_calc(list(keys), clean, scored):
            values[keys[result.measure]][place[result.query_id]] = result.value
    without = sum(not any(clean[qid].values()) for qid in judged)
    return Evaluation(judged, values, missing=len(judged) - len(scored), without_relevant=without)


def run_lines(run: Mapping[str, Ranking], tag: str) -> Iterator[str]:
    """TREC run lines, each with its line end; scores strictly decrease, so that every tool sees the engine's order.

    White space in an id, which the format cannot hold, is percent-encoded.
    """
    for qid, ranking in run.items():
        for rank, (docid, score) in enumerate(in_engine_order(ranking), 1):
            yield f"{_word(qid)} Q0 {_word(docid)} {rank} {score:.9g} {tag}\n"


def write_run(path: Path, run: Mapping[str, Ranking], tag: str) -> None:
    """Write a TREC run file atomically, a line at a time (see `run_lines`)."""

    def write(handle: BinaryIO) -> None:
        for line in run_lines(run, tag):
            handle.write(line.encode())

    write_atomic(path, write)


def _word(identifier: str) -> str:
    return _SPACE.sub(lambda match: quote(match.group()), identifier)
