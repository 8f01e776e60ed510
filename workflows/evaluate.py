"""Measure a run: `python workflows/evaluate.py --config F --run-name N`.

BM25, dense, sparse and hybrid on the judged queries with trec_eval's rules, in one process on the same data; TREC runs,
per-query values, significance against BM25, a report. The dense share of the hybrid may be chosen on held-out dev pairs.
"""

from __future__ import annotations

import logging
import statistics
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from components.evaluation.bm25 import Bm25
from components.evaluation.config import EvaluateConfig
from components.evaluation.metrics import METRICS, NDCG_10, Evaluation, Ranking, evaluate_run, run_lines
from components.evaluation.report import ReportData, write_report
from components.evaluation.significance import compare
from components.indexing import FusionConfig, HybridIndex
from components.lookup import QueryBatch, QueryEncoder
from components.storage import atomic_file, versions, write_atomic
from workflows.stage import Stage, StageContext, main

log = logging.getLogger("almanac")

BM25, DENSE, SPARSE, HYBRID = "BM25", "dense", "sparse", "hybrid"
GRID = [round(0.1 * step, 1) for step in range(11)]


def run(context: StageContext) -> dict[str, Any]:
    """Evaluate and write runs, per-query values and the report."""
    config, data = context.config.evaluate, context.inputs["data"]
    encoder, index = QueryEncoder.load(context.inputs["tabulate"]), HybridIndex.open(context.inputs["index"])
    base = {"dataset": context.config.data.source or context.config.data.corpus, "split": context.config.data.split}
    if not (data / "queries.parquet").exists():
        texts = [title for title in pq.read_table(data / "corpus", columns=["title"])["title"].to_pylist()[:1000] if title] or ["a query"]
        note = "the corpus came without judged queries, so nothing is measured but speed"
        return base | {"metrics": {}, "significance": {}, "judged": 0, "note": note, "query_microseconds": _timed(encoder, texts, config)[1]}
    qids, texts, qrels = read_queries(data)
    batch, microseconds = _timed(encoder, texts, config)
    log.info("evaluate  %d judged queries, %.1f µs each to encode", len(qids), microseconds)
    fusion, curve = choose_fusion(config, data, encoder, index)
    runs: dict[str, dict[str, Ranking]] = {}
    if config.bm25:
        corpus = pq.read_table(data / "corpus", columns=["docid", "text"])
        baseline = Bm25(corpus["docid"].to_pylist(), corpus["text"].to_pylist(), config.bm25_k1, config.bm25_b)
        runs[BM25] = dict(zip(qids, baseline.search(texts, config.depth), strict=True))
    for mode in (DENSE, SPARSE, HYBRID):
        hits = index.search(batch, k=config.depth, mode=mode, fusion=fusion)  # type: ignore[arg-type]
        runs[mode] = {qid: [(hit.docid, hit.score) for hit in found] for qid, found in zip(qids, hits, strict=True)}
    results = {name: evaluate_run(found, qrels, config.drop_self_hits) for name, found in runs.items()}
    significance: dict[str, dict[str, float]] = {}
    if config.bm25:
        values = {name: result.values[NDCG_10] for name, result in results.items()}
        significance = compare(values, BM25, config.significance_samples, context.config.seed)
    metrics = {name: {key: round(value, 5) for key, value in result.means.items()} for name, result in results.items()}
    context.log({f"{name}.{key}": value for name, row in metrics.items() for key, value in row.items()})
    result = base | {
        "metrics": metrics, "significance": significance, "judged": len(results[HYBRID].qids),
        "without_results": {name: found.missing for name, found in results.items()},
        "query_microseconds": round(microseconds, 3), "fusion": fusion.model_dump(), "dev_curve": curve,
        "grades": {str(k): v for k, v in (context.config.data.grades or {}).items()} or None,
    }  # fmt: skip
    _write(context, runs, results, dict(zip(qids, texts, strict=True)), result)
    return result


def read_queries(data: Path) -> tuple[list[str], list[str], dict[str, dict[str, int]]]:
    """(qids, texts, qrels) of the judged queries."""
    table, judgements = pq.read_table(data / "queries.parquet"), pq.read_table(data / "qrels.parquet")
    qrels: dict[str, dict[str, int]] = {}
    for row in judgements.to_pylist():
        qrels.setdefault(row["qid"], {})[row["docid"]] = row["grade"]
    judged = table.filter(pc.is_in(table["qid"], value_set=pa.array(list(qrels), pa.string())))
    texts = dict(zip(judged["qid"].to_pylist(), judged["text"].to_pylist(), strict=True))
    return list(texts), list(texts.values()), {qid: grades for qid, grades in qrels.items() if qid in texts}


def choose_fusion(
    config: EvaluateConfig, data: Path, encoder: QueryEncoder, index: HybridIndex
) -> tuple[FusionConfig, list[tuple[float, float]] | None]:
    """The configured fusion, or the one whose dense share has the best nDCG@10 on the dev pairs, with the curve."""
    if config.fusion_weights == "fixed":
        return config.fusion, None
    pairs = pq.read_table(data / "pairs")
    dev = pairs.filter(pc.field("split") == "dev").slice(0, config.dev_queries).to_pylist()
    if not dev:
        raise ValueError("evaluate.fusion_weights=dev needs dev pairs: give data.pairs with a dev_fraction above 0")
    batch = encoder.encode([row["query"] for row in dev])
    qrels = {row["qid"]: {row["positive_docid"]: 1} for row in dev}
    curve = []
    for share in GRID:
        fusion = config.fusion.model_copy(update={"dense_weight": share, "sparse_weight": round(1 - share, 1)})
        hits = index.search(batch, k=10, fusion=fusion)
        found = {row["qid"]: [(hit.docid, hit.score) for hit in row_hits] for row, row_hits in zip(dev, hits, strict=True)}
        curve.append((share, round(evaluate_run(found, qrels).means[NDCG_10], 5)))
    best = max(curve, key=lambda point: (point[1], -abs(point[0] - 0.5)))[0]
    log.info("evaluate  dense share %.1f, chosen on %d dev pairs: %s", best, len(dev), curve)
    return config.fusion.model_copy(update={"dense_weight": best, "sparse_weight": round(1 - best, 1)}), curve


def _timed(encoder: QueryEncoder, texts: list[str], config: EvaluateConfig) -> tuple[QueryBatch, float]:
    rounds = []
    for _ in range(config.timing_rounds):
        started = time.perf_counter()
        batch = encoder.encode(texts)
        rounds.append((time.perf_counter() - started) / len(texts) * 1e6)
    return batch, statistics.median(rounds)


def _write(
    context: StageContext, runs: dict[str, dict[str, Ranking]], results: dict[str, Evaluation], texts: dict[str, str], result: dict[str, Any]
) -> None:  # fmt: skip
    folder = context.folder
    for name, found in runs.items():
        content = "\n".join(run_lines(found, f"almanac-{name}")) + "\n"
        write_atomic(folder / ("run.trec" if name == HYBRID else f"run.{name}.trec"), content.encode())
    qids = results[HYBRID].qids
    columns: dict[str, Any] = {"qid": qids, "query": [texts[qid] for qid in qids]}
    for name, found in results.items():
        columns |= {f"{name} {metric}": found.values[metric] for metric in METRICS}
    with atomic_file(folder / "per_query.parquet") as temporary:
        pq.write_table(pa.table(columns), temporary)
    per_query = [
        {"qid": qid, "query": texts[qid], **{name: float(found.values[NDCG_10][i]) for name, found in results.items()}}
        for i, qid in enumerate(qids)
    ]
    facts = {
        "data set": f"{result['dataset']}, split {result['split']}", "grades → gains": str(result["grades"] or "as they are"),
        "judged queries": str(result["judged"]), "without results": str(result["without_results"]),
        "fusion": str(result["fusion"]), "seed": str(context.config.seed),
        "query encoding": f"{result['query_microseconds']} µs a query", "index": str(context.inputs["index"].name),
        **{f"version of {name}": value for name, value in versions().items()},
    }  # fmt: skip
    report = ReportData(
        title=str(result["dataset"]), metrics=result["metrics"], significance=result["significance"], per_query=per_query,
        facts=facts, dev_curve=result["dev_curve"],
    )  # fmt: skip
    write_report(folder / "report.html", report)
    context.tracker.log_artifact(folder / "report.html")


STAGE = Stage(name="evaluate", sections=("evaluate", "seed"), inputs=("data", "tabulate", "index"), run=run)

if __name__ == "__main__":
    main(STAGE)
