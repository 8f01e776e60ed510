"""Measures against a slow reference, trec_eval's rules, ties, self hits and run files."""

from __future__ import annotations

from pathlib import Path

import ir_measures
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from components.evaluation.metrics import (
    KNOWN_METRICS,
    METRICS,
    drop_self_hits,
    evaluate_run,
    in_engine_order,
    run_lines,
)
from tests.components.evaluation.reference import reference_measures

DOCIDS = [f"d{i}" for i in range(40)]
SCORES = st.one_of(st.sampled_from([0.0, -1.0, 1.0, 0.5, 1e-8, 1.00000001]), st.floats(-1e4, 1e4, width=32))
RANKINGS = st.dictionaries(st.sampled_from(DOCIDS), SCORES, max_size=40)
GRADES = st.dictionaries(st.sampled_from([*DOCIDS, "gone"]), st.integers(-2, 4), min_size=1, max_size=30)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(RANKINGS, GRADES), min_size=1, max_size=5))
def test_measures_are_those_of_the_definitions(queries: list[tuple[dict[str, float], dict[str, int]]]) -> None:
    run = {f"q{i}": list(ranking.items()) for i, (ranking, _) in enumerate(queries)}
    qrels = {f"q{i}": grades for i, (_, grades) in enumerate(queries)}
    found = evaluate_run(run, qrels, KNOWN_METRICS)
    for place, qid in enumerate(found.qids):
        order = [docid for docid, _ in sorted(run[qid], key=lambda hit: (-hit[1], hit[0]))]
        wanted = reference_measures(order, qrels[qid])
        for name in KNOWN_METRICS:
            assert found.values[name][place] == pytest.approx(wanted[name], abs=1e-9), (name, qid)
    assert found.missing == sum(not ranking for ranking, _ in queries)
    assert found.without_relevant == sum(all(grade < 1 for grade in grades.values()) for _, grades in queries)


@settings(max_examples=100, deadline=None)
@given(RANKINGS)
def test_engine_order_is_kept_and_its_scores_strictly_decrease(scores: dict[str, float]) -> None:
    written = in_engine_order(list(scores.items()))
    assert [docid for docid, _ in written] == sorted(scores, key=lambda docid: (-scores[docid], docid))
    values = np.asarray([score for _, score in written], np.float32)
    assert (np.diff(values) < 0).all()
    largest = max(map(abs, scores.values()), default=0)
    for docid, score in written:
        assert score == pytest.approx(scores[docid], abs=max(largest, 1e-30) * 2.0**-22 * (len(scores) + 1))


def test_scores_that_differ_are_written_as_they_are() -> None:
    assert in_engine_order([("b", 2.5), ("a", 7.25), ("c", -3.0)]) == [("a", 7.25), ("b", 2.5), ("c", -3.0)]


def test_ties_are_ranked_alike_by_every_tool(tmp_path: Path) -> None:
    """Case T-110: three documents with equal scores; trec_eval itself would put "c" first."""
    run, qrels = {"q": [("c", 1.0), ("a", 1.0), ("b", 1.0)]}, {"q": {"a": 1}}
    assert evaluate_run(run, qrels).means["MRR@10"] == 1.0
    path = tmp_path / "run.trec"
    path.write_text("".join(run_lines(run, "tag")))
    rows = [line.split() for line in path.read_text().splitlines()]
    assert [row[2] for row in rows] == ["a", "b", "c"]
    assert [row[3] for row in rows] == ["1", "2", "3"]
    assert float(rows[0][4]) > float(rows[1][4]) > float(rows[2][4])
    read = ir_measures.calc_aggregate([ir_measures.RR @ 10], qrels, ir_measures.read_trec_run(str(path)))
    assert read[ir_measures.RR @ 10] == 1.0


def test_a_written_run_has_the_reported_values(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    run = {f"q{i}": [(f"d{j}", float(random.integers(0, 5))) for j in range(50)] for i in range(20)}
    qrels = {qid: {f"d{j}": int(random.integers(-1, 4)) for j in range(0, 60, 3)} for qid in run}
    path = tmp_path / "run.trec"
    path.write_text("".join(run_lines(run, "tag")))
    measure = ir_measures.nDCG @ 10
    clean = {qid: {docid: max(0, grade) for docid, grade in grades.items()} for qid, grades in qrels.items()}
    outside = ir_measures.calc_aggregate([measure], clean, ir_measures.read_trec_run(str(path)))[measure]
    assert evaluate_run(run, qrels).means["nDCG@10"] == pytest.approx(outside, abs=1e-12)


def test_a_query_without_results_counts_zero() -> None:
    """Case T-121: two judged queries, the run has one."""
    found = evaluate_run({"q1": [("d1", 1.0)]}, {"q1": {"d1": 1}, "q2": {"d2": 1}})
    assert found.means == {"nDCG@10": 0.5, "MRR@10": 0.5, "R@100": 0.5}
    assert found.missing == 1
    assert evaluate_run({}, {"q1": {"d1": 1}}).means["nDCG@10"] == 0.0


def test_queries_that_are_not_judged_do_not_count() -> None:
    assert evaluate_run({"q1": [("d1", 1.0)], "q9": [("d1", 1.0)]}, {"q1": {"d1": 1}}).qids == ["q1"]


def test_negative_and_zero_grades_gain_nothing() -> None:
    """Case T-066: grades −1, 0, 1, 2."""
    qrels = {"q": {"a": -1, "b": 0, "c": 1, "d": 2}}
    best = evaluate_run({"q": [("d", 4), ("c", 3), ("b", 2), ("a", 1)]}, qrels).means
    worse = evaluate_run({"q": [("a", 4), ("b", 3), ("c", 2), ("d", 1)]}, qrels).means
    assert best["nDCG@10"] == 1.0
    assert worse["MRR@10"] == pytest.approx(1 / 3)
    assert worse["nDCG@10"] == pytest.approx((1 / 2 + 2 / np.log2(5)) / (2 + 1 / np.log2(3)))


def test_a_judged_document_that_is_not_in_the_corpus_stays_in_the_denominator() -> None:
    """Case T-064."""
    found = evaluate_run({"q": [("d1", 1.0)]}, {"q": {"d1": 1, "nowhere": 1}}).means
    assert found["R@100"] == 0.5
    assert found["nDCG@10"] < 1


def test_self_hits_are_dropped_only_when_asked() -> None:
    """Case T-119: query "a" is document "a"."""
    run, qrels = {"a": [("a", 9.0), ("b", 1.0)]}, {"a": {"b": 1}}
    assert evaluate_run(run, qrels).means["MRR@10"] == 0.5
    assert evaluate_run(run, qrels, drop_self_hits=True).means["MRR@10"] == 1.0
    assert evaluate_run(drop_self_hits(run), qrels).means["MRR@10"] == 1.0


def test_white_space_in_ids_does_not_break_a_run_file() -> None:
    assert list(run_lines({"q 1": [("a\tb", 1.0)]}, "t")) == ["q%201 Q0 a%09b 1 1 t\n"]


def test_mistakes_are_refused() -> None:
    with pytest.raises(ValueError, match="stands twice"):
        evaluate_run({"q": [("a", 1.0), ("a", 0.5)]}, {"q": {"a": 1}})
    with pytest.raises(ValueError, match=r"found \['ndcg'\], wanted some of nDCG@10"):
        evaluate_run({}, {}, ["ndcg"])


def test_the_keys_are_those_that_are_promised() -> None:
    """Case T-125: the names that documentation and result.json use."""
    assert METRICS == ("nDCG@10", "MRR@10", "R@100")
    assert set(METRICS) <= set(KNOWN_METRICS)
    assert set(evaluate_run({}, {"q": {"d": 1}}, KNOWN_METRICS).means) == set(KNOWN_METRICS)
