"""The table that closes a run: how good, how fast, how large, where everything lies, what to type next."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from components.evaluation.metrics import METRICS


def closing_table(results: dict[str, dict[str, Any]], root: Path, tracking: str | None) -> str:
    """Text for the terminal, from the results of all stages."""
    found = results["evaluate"]
    lines = ["", f"{found['dataset']} · {found['judged']} judged queries · {results['data']['documents']:,} documents", ""]
    if found["metrics"]:
        lines.append("              " + "".join(f"{name:>10}" for name in METRICS))
        for system, values in found["metrics"].items():
            p = found["significance"].get(system, {}).get("p_holm")
            note = "" if p is None else f"   nDCG@10 against BM25: {found['significance'][system]['difference']:+.4f}, p = {p:.3f}"
            lines.append(f"  {system:<12}" + "".join(f"{values[name]:>10.4f}" for name in METRICS) + note)
    else:
        lines.append(f"  {found['note']}")
    seconds = {name: result["seconds"] for name, result in results.items()}
    lines += [
        "",
        f"query encoding   {found['query_microseconds']:.1f} µs a query (text → dense and sparse vector, batch, one thread)",
        f"index            {results['index']['bytes'] / 2**20:.1f} MiB with texts, {results['index']['vector_bytes_per_document'] / 1024:.2f} KiB of vectors a document",
        "stages           " + " · ".join(f"{name} {value:.0f} s" for name, value in seconds.items()) + f" · all {sum(seconds.values()):.0f} s",
        f"index folder     {root / 'index'}",
        f"report           {root / 'evaluate' / 'report.html'}",
        f"MLflow           {tracking or 'off'}" + (f"   (mlflow ui --backend-store-uri {tracking})" if tracking else ""),
        "",
        "search it        serve run serve.app:app        then, in another terminal:",
        '                 python -m serve.client "what is lift"        or open http://127.0.0.1:8000/',
    ]
    return "\n".join(lines)
