"""Measure a run: `python workflows/evaluate.py --config F --run-name N`.

BM25, dense, sparse and hybrid on the judged queries with trec_eval's rules, in one process on the same data; TREC runs,
per-query values, significance against BM25, a report. The hybrid's dense share may be chosen on held-out dev pairs.
"""

from __future__ import annotations

import importlib.metadata
import logging
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from components.config import Config
from components.evaluation.bm25 import Bm25
from components.evaluation.closing import metrics_lines
from components.evaluation.config import EvaluateConfig
from components.evaluation.dev_weights import Curve, best_share, share_curve, with_share
from components.evaluation.inputs import Judged, corpus_texts, read_dev_pairs, read_judged, sample_titles
from components.evaluation.metrics import Evaluation, Ranking, drop_self_hits, evaluate_run, write_run
from components.evaluation.plots import gains_png, shares_png, systems_png
from components.evaluation.report import BASELINE, BEST, write_report
from components.evaluation.significance import compare
from components.evaluation.summary import report_data
from components.indexing import FusionConfig, HybridIndex
from components.indexing.hybrid import Mode
from components.lookup import QueryBatch, QueryEncoder
from components.storage import atomic_file
from workflows.stage import Stage, StageContext, StageError, main

log = logging.getLogger("almanac")

MODES: tuple[Mode, ...] = ("dense", "sparse", "hybrid")
NOTE = "The collection has no judged queries, so only speed is measured."
REPORT = "report.html"


@dataclass(frozen=True)
class DevChoice:
    """The dense share that was chosen, on how many dev queries, and the whole curve."""

    share: float
    queries: int
    curve: Curve


def run(context: StageContext) -> dict[str, Any]:
    """Evaluate; write runs, per-query values, plots and the report."""
    config, data = context.config.evaluate, context.inputs["data"]
    encoder, index = QueryEncoder.load(context.inputs["tabulate"]), HybridIndex.open(context.inputs["index"])
    if index.model_fingerprint != encoder.manifest.model_fingerprint:
        raise StageError(
            f"the index is of model {index.model_fingerprint}, the table of {encoder.manifest.model_fingerprint}: "
            f"run tabulate, encode and index again"
        )
    judged = read_judged(data)
    batch, microseconds = timed_encoding(encoder, judged.texts or sample_titles(data), config.timing_rounds)
    log.info("evaluate  %d judged queries, %.1f µs each to encode", len(judged.qids), microseconds)
    result = _described(context, judged, index) | {"query_microseconds": round(microseconds, 3)}
    context.log({name: float(result[name]) for name in ("query_microseconds", "index_bytes")})
    if judged.qids:
        result |= _measure(context, encoder, index, judged, batch, result)
    else:
        log.warning("evaluate  %s", NOTE)
        result |= {"metrics": {}, "significance": {}, "without_results": {}, "note": NOTE}
        write_report(context.folder / REPORT, report_data(context.config, result, {}, {}))
    for line in metrics_lines(result):
        log.info("evaluate  %s", line)
    context.tracker.log_artifact(context.folder / REPORT)
    return result


def timed_encoding(encoder: QueryEncoder, texts: list[str], rounds: int) -> tuple[QueryBatch, float]:
    """(the encoded queries, the median microseconds a query when all are encoded at once)."""
    seconds = []
    for _ in range(rounds):
        started = time.perf_counter()
        batch = encoder.encode(texts)
        seconds.append(time.perf_counter() - started)
    return batch, statistics.median(seconds) / len(texts) * 1e6


def choose_share(config: Config, data: Path, encoder: QueryEncoder, index: HybridIndex) -> DevChoice:
    """The dense share with the best nDCG@10 on dev pairs made from this very collection. StageError: there are none.

    Pairs of another collection are left out: their documents are not in this index, though their ids may be.
    """
    own = [pair.name for pair in config.data.pairs if pair.kind != "file" and pair.source in (None, config.data.source)]
    dev = read_dev_pairs(data, own, config.evaluate.dev_queries)
    if not dev.qids:
        raise StageError(
            "evaluate.fusion_weights=dev found no dev pairs of the evaluated collection: give data.pairs one of kind "
            "title_body or qrels with this source and a dev_fraction above 0, or use evaluate.fusion_weights=fixed"
        )
    batch, fusion = encoder.encode(dev.texts), config.evaluate.fusion
    dense, sparse = (_as_run(dev.qids, index.search(batch, fusion.candidates, mode)) for mode in MODES[:2])
    curve = share_curve(dense, sparse, dev.qrels, fusion)
    share = best_share(curve, fusion)
    log.info("evaluate  dense share %.1f, chosen on %d dev queries: %s", share, len(dev.qids), curve)
    return DevChoice(share, len(dev.qids), curve)


def _described(context: StageContext, judged: Judged, index: HybridIndex) -> dict[str, Any]:
    config = context.config
    size = sum(path.stat().st_size for path in context.inputs["index"].rglob("*") if path.is_file())
    return {
        "dataset": config.data.label, "split": config.data.split,
        "grades": {str(found): gain for found, gain in config.data.grades.items()} if config.data.grades else None,
        "judged": len(judged.qids), "judged_without_text": judged.without_text,
        "index_bytes": size, "index_documents": len(index),
        "depth": config.evaluate.depth, "drop_self_hits": config.evaluate.drop_self_hits,
        "tools": {name: importlib.metadata.version(name) for name in ("bm25s", "ir-measures")},
    }  # fmt: skip


def _measure(
    context: StageContext, encoder: QueryEncoder, index: HybridIndex, judged: Judged, batch: QueryBatch,
    described: Mapping[str, Any],
) -> dict[str, Any]:  # fmt: skip
    config, data = context.config.evaluate, context.inputs["data"]
    choice = choose_share(context.config, data, encoder, index) if config.fusion_weights == "dev" else None
    fusion = with_share(config.fusion, choice.share) if choice else config.fusion
    runs, milliseconds = _search_all(config, data, index, judged, batch, fusion)
    results = {name: evaluate_run(found, judged.qrels, config.metrics) for name, found in runs.items()}
    metrics = {name: {key: round(value, 6) for key, value in found.means.items()} for name, found in results.items()}
    context.log({f"{name}.{key}": value for name, row in metrics.items() for key, value in row.items()})
    measured = {
        "metrics": metrics, "significance": _significance(config, results, context.config.seed),
        "search_milliseconds": milliseconds, "fusion": fusion.model_dump(), "fusion_weights": config.fusion_weights,
        "without_results": {name: found.missing for name, found in results.items()},
        "without_relevant": results[BEST].without_relevant,
        "without_tokens": sum(reason is not None for reason in batch.empty),
        "dev_curve": [list(point) for point in choice.curve] if choice else None,
        "dev_queries": choice.queries if choice else 0,
    }  # fmt: skip
    _write(context, {**described, **measured}, judged, runs, results)
    return measured


def _significance(
    config: EvaluateConfig, results: Mapping[str, Evaluation], seed: int
) -> dict[str, dict[str, dict[str, float]]]:
    """system → metric → comparison with BM25; empty without BM25."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for metric in config.metrics if BASELINE in results else ():
        values = {name: evaluation.values[metric] for name, evaluation in results.items()}
        for name, row in compare(values, BASELINE, config.significance_samples, seed).items():
            found.setdefault(name, {})[metric] = row
    return found


def _search_all(
    config: EvaluateConfig, data: Path, index: HybridIndex, judged: Judged, batch: QueryBatch, fusion: FusionConfig
) -> tuple[dict[str, dict[str, Ranking]], dict[str, float]]:
    """(system → run, system → milliseconds a query when all are searched at once).

    Self hits are dropped here, once, so that measures, run files and report all see the same lists (case T-119).
    """
    runs: dict[str, dict[str, Ranking]] = {}
    seconds: dict[str, float] = {}
    if config.bm25:
        baseline = Bm25.build(corpus_texts(data), config.bm25_k1, config.bm25_b)
        started = time.perf_counter()
        runs[BASELINE] = dict(zip(judged.qids, baseline.search(judged.texts, config.depth), strict=True))
        seconds[BASELINE] = time.perf_counter() - started
        log.info("evaluate  %s searched", BASELINE)
    for mode in MODES:
        started = time.perf_counter()
        hits = index.search(batch, config.depth, mode, fusion)
        seconds[mode] = time.perf_counter() - started
        runs[mode] = _as_run(judged.qids, hits)
        log.info("evaluate  %s searched", mode)
    if config.drop_self_hits:
        runs = {name: drop_self_hits(found) for name, found in runs.items()}
    return runs, {name: round(value / len(judged.qids) * 1000, 4) for name, value in seconds.items()}


def _as_run(qids: list[str], hits: list[list[Any]]) -> dict[str, Ranking]:
    return {qid: [(hit.docid, hit.score) for hit in found] for qid, found in zip(qids, hits, strict=True)}


def _write(
    context: StageContext, result: Mapping[str, Any], judged: Judged, runs: Mapping[str, Mapping[str, Ranking]],
    results: Mapping[str, Evaluation],
) -> None:  # fmt: skip
    folder, texts = context.folder, dict(zip(judged.qids, judged.texts, strict=True))
    for name, found in runs.items():
        write_run(folder / ("run.trec" if name == BEST else f"run.{name}.trec"), found, f"almanac-{name}")
    qids = results[BEST].qids
    columns: dict[str, Any] = {
        "qid": qids, "query": [texts[qid] for qid in qids],
        "relevant": [sum(grade >= 1 for grade in judged.qrels[qid].values()) for qid in qids],
    }  # fmt: skip
    for name, evaluation in results.items():
        columns |= {f"{name} {metric}": values for metric, values in evaluation.values.items()}
    with atomic_file(folder / "per_query.parquet") as temporary:
        pq.write_table(pa.table(columns), temporary)
    data = report_data(context.config, result, results, texts)
    write_report(folder / REPORT, data)
    systems_png(folder / "systems.png", data.metrics, context.config.evaluate.metrics, data.title)
    if differences := data.differences():
        gains_png(folder / "gains.png", [value for value, _ in differences], f"{BEST} − {BASELINE} · {data.title}")
    if data.dev_curve:
        shares_png(folder / "shares.png", data.dev_curve, data.dev_share, data.title)


STAGE = Stage(name="evaluate", sections=("evaluate", "seed"), inputs=("data", "tabulate", "index"), run=run)

if __name__ == "__main__":
    main(STAGE)
