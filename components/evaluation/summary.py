"""The words and numbers of the report, from the evaluate stage's result."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from components.config import Config
from components.evaluation.metrics import NDCG_10, Evaluation
from components.evaluation.report import BASELINE, BEST, QueryRow, ReportData
from components.storage import versions


def report_data(
    config: Config, result: Mapping[str, Any], results: Mapping[str, Evaluation], texts: Mapping[str, str]
) -> ReportData:
    """What the report shows; `results` (system → values a query) and `texts` (qid → query) may be empty."""
    queries = [
        QueryRow(qid, texts[qid], {name: float(found.values[NDCG_10][i]) for name, found in results.items()})
        for i, qid in enumerate(results[BEST].qids if results else [])
    ]
    curve = result.get("dev_curve")
    return ReportData(
        title=f"{result['dataset']} · {result['split']}",
        metrics=result["metrics"],
        significance=result["significance"],
        queries=queries,
        speed=_speed(config, result),
        facts=_data_facts(config, result) | (_rules(config, result) if results else {}) | _made_with(config, result),
        note=result.get("note", ""),
        dev_curve=curve,
        dev_share=result["fusion"]["dense_weight"] if curve else 0.0,
        dev_queries=result.get("dev_queries", 0),
    )


def _speed(config: Config, result: Mapping[str, Any]) -> dict[str, str]:
    rounds = config.evaluate.timing_rounds
    searches = {
        f"search, {name}": f"{value:.2f} ms a query at depth {result['depth']:,}"
        for name, value in result.get("search_milliseconds", {}).items()
    }
    return {
        "query encoding": f"{result['query_microseconds']:.1f} µs a query (batched, median of {rounds} rounds)",
        **searches,
        "index": f"{result['index_bytes'] / 2**20:.1f} MiB for {result['index_documents']:,} documents",
    }


def _data_facts(config: Config, result: Mapping[str, Any]) -> dict[str, str]:
    grades = result["grades"]
    gains = ", ".join(f"{found} → {gain}" for found, gain in grades.items()) if grades else "the grades, at least 0"
    return {
        "run": config.run_name,
        "data set": result["dataset"],
        "split": result["split"],
        "grades → gains": gains,
        "judged queries": f"{result['judged']:,}",
    }


def _rules(config: Config, result: Mapping[str, Any]) -> dict[str, str]:
    evaluate, missing = config.evaluate, result["without_results"]
    facts = {
        "without any result (count 0)": ", ".join(f"{name} {count}" for name, count in missing.items()),
        "without a relevant document (count 0)": str(result["without_relevant"]),
        "self hits": "dropped" if result["drop_self_hits"] else "kept",
        "fusion": _fusion(result),
    }
    if BASELINE in result["metrics"]:
        facts["BM25"] = f"bm25s, stemmed English words, k1 {evaluate.bm25_k1:g}, b {evaluate.bm25_b:g}"
        facts["permutations and resamples"] = f"{evaluate.significance_samples:,}"
    return facts


def _fusion(result: Mapping[str, Any]) -> str:
    fusion = result["fusion"]
    chosen = "chosen on dev pairs" if result["fusion_weights"] == "dev" else "fixed"
    method = f"rrf, k {fusion['rrf_k']}" if fusion["method"] == "rrf" else fusion["method"]
    weights = f"{fusion['dense_weight']:g} dense + {fusion['sparse_weight']:g} sparse"
    return f"{method}: {weights} ({chosen}), {fusion['candidates']:,} candidates a side"


def _made_with(config: Config, result: Mapping[str, Any]) -> dict[str, str]:
    made = versions()
    commit = made.pop("commit")
    libraries = ", ".join(f"{name} {number}" for name, number in sorted({**made, **result["tools"]}.items()))
    return {
        "document model": config.model.source,
        "seed": str(config.seed),
        "commit": commit,
        "libraries": libraries,
    }
