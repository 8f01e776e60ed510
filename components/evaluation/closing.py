"""The table that closes a run: how good, how fast, how large, where everything lies, what to type next."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from components.evaluation.metrics import METRICS, NDCG_10
from components.evaluation.significance import LEVEL, p_text


def closing_table(results: Mapping[str, Mapping[str, Any]], root: Path, tracking: str | None) -> str:
    """Text for the terminal, from the results of all stages."""
    found, index = results["evaluate"], results["index"]
    documents = f"{results['data']['documents']:,} documents"
    seconds = {name: result["seconds"] for name, result in results.items()}
    stages = " · ".join(f"{name} {value:.0f} s" for name, value in seconds.items())
    lines = [
        "",
        f"{found['dataset']} · {found['split']} · {found['judged']:,} judged queries · {documents}",
        "",
        *metrics_lines(found),
        "",
        f"query encoding   {found['query_microseconds']:.1f} µs a query (text → dense and sparse vector, batched)",
        f"index            {index['bytes'] / 2**20:.1f} MiB with texts, "
        f"{index['vector_bytes_per_document'] / 1024:.2f} KiB of vectors a document",
        f"stages           {stages} · all {sum(seconds.values()):.0f} s",
        f"index folder     {root / 'index'}",
        f"report           {root / 'evaluate' / 'report.html'}",
        f"MLflow           {tracking or 'off'}"
        + (f"   (mlflow ui --backend-store-uri {tracking})" if tracking and "sqlite" in tracking else ""),
        "",
        "search it        serve run serve.app:app        then, in another terminal:",
        '                 python -m serve.client "what is lift"        or open http://127.0.0.1:8000/',
    ]
    return "\n".join(lines)


def metrics_lines(found: Mapping[str, Any]) -> list[str]:
    """Systems × headline measures, from the result of the evaluate stage; its note where nothing is judged."""
    if not found["metrics"]:
        return [f"  {found['note']}"]
    lines = ["              " + "".join(f"{name:>10}" for name in METRICS)]
    for system, values in found["metrics"].items():
        line = f"  {system:<12}" + "".join(f"{values[name]:>10.4f}" for name in METRICS)
        if compared := found["significance"].get(system, {}).get(NDCG_10):
            sure = "" if compared["p_holm"] < LEVEL else ", not significant"
            line += f"   nDCG@10 − BM25: {compared['difference']:+.4f} (p {p_text(compared['p_holm'])}{sure})"
        lines.append(line)
    missing = {system: count for system, count in found["without_results"].items() if count}
    if missing:
        told = ", ".join(f"{system} {count}" for system, count in missing.items())
        lines.append(f"  queries without any result (they count 0): {told}")
    return lines
