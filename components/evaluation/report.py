"""`report.html`: one self-contained page with the measures, what each query gained or lost, and how it was all made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from components.evaluation.metrics import METRICS
from components.storage import write_atomic

BASELINE, BEST = "BM25", "hybrid"
_STYLE = """
:root{--ink:#1b1f24;--paper:#fcfcfa;--line:#d9d9d2;--soft:#6a6f76;--up:#2f7d4f;--down:#b4482f;--bar:#35618f}
@media(prefers-color-scheme:dark){:root{--ink:#e6e4df;--paper:#16181b;--line:#33373c;--soft:#9a9fa6;--up:#6cc08b;--down:#e08a72;--bar:#7fb0e0}}
*{box-sizing:border-box}body{margin:0;background:var(--paper);color:var(--ink);font:16px/1.5 system-ui,sans-serif}
main{max-width:54rem;margin:0 auto;padding:2rem 1rem 4rem}h1{font-size:1.6rem;margin:0}h2{font-size:1.1rem;margin:2.2rem 0 .6rem}
p.soft,caption,small{color:var(--soft)}.wide{overflow-x:auto}table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th,td{padding:.35rem .6rem;text-align:right;border-bottom:1px solid var(--line)}th:first-child,td:first-child{text-align:left}
td.text{text-align:left}th{font-weight:600;color:var(--soft)}.up{color:var(--up)}.down{color:var(--down)}svg{width:100%;height:auto;display:block}
dl{display:grid;grid-template-columns:minmax(8rem,14rem) 1fr;gap:.25rem 1rem;font-size:.9rem}dt{color:var(--soft)}dd{margin:0;overflow-wrap:anywhere}
"""


@dataclass(frozen=True)
class ReportData:
    """What the page shows."""

    title: str
    metrics: Mapping[str, Mapping[str, float]]
    """system → metric → mean"""
    significance: Mapping[str, Mapping[str, float]]
    """system → comparison of its nDCG@10 with BM25's; empty without a baseline."""
    per_query: Sequence[Mapping[str, Any]]
    """qid, query and nDCG@10 of each system."""
    facts: Mapping[str, str]
    dev_curve: Sequence[tuple[float, float]] | None = None
    """(dense share, nDCG@10 on dev pairs)"""


def write_report(path: Path, data: ReportData) -> None:
    """Write the page atomically."""
    parts = [_metrics(data)]
    if data.per_query and BASELINE in data.metrics and BEST in data.metrics:
        parts += [_differences(data), _examples(data)]
    if data.dev_curve:
        parts.append(_curve(data.dev_curve))
    parts.append("<h2>How it was made</h2><dl>" + "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in data.facts.items()) + "</dl>")
    page = (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(data.title)} · Almanac</title><style>{_STYLE}</style><main><h1>{escape(data.title)}</h1>"
        f'<p class="soft">{len(data.per_query)} judged queries, measured in one run with trec_eval\'s rules</p>{"".join(parts)}</main></html>'
    )
    write_atomic(path, page.encode())


def _metrics(data: ReportData) -> str:
    best = {name: max(row[name] for row in data.metrics.values()) for name in METRICS}
    rows = []
    for system, values in data.metrics.items():
        cells = "".join(f"<td>{_bold(f'{values[name]:.4f}', values[name] == best[name])}</td>" for name in METRICS)
        compared = data.significance.get(system)
        note = "<td></td><td></td>"
        if compared:
            sign = "up" if compared["difference"] > 0 else "down"
            note = (
                f'<td class="{sign}">{compared["difference"]:+.4f} <small>[{compared["low"]:+.3f}, {compared["high"]:+.3f}]</small></td>'
                f"<td>{compared['p_holm']:.3f}{' †' if compared['p_holm'] < 0.05 else ''}</td>"
            )
        rows.append(f"<tr><td>{escape(system)}</td>{cells}{note}</tr>")
    head = "".join(f"<th>{name}</th>" for name in METRICS)
    return (
        f'<h2>Effectiveness</h2><div class="wide"><table><tr><th>system</th>{head}<th>nDCG@10 − BM25 <small>[95 %]</small></th>'
        f'<th>p</th></tr>{"".join(rows)}</table></div><p class="soft">Paired randomisation test, Holm-corrected; † marks p &lt; .05.</p>'
    )


def _bold(text: str, yes: bool) -> str:
    return f"<b>{text}</b>" if yes else text


def _sorted_differences(data: ReportData) -> list[tuple[float, Mapping[str, Any]]]:
    return sorted(((row[BEST] - row[BASELINE], row) for row in data.per_query), key=lambda item: -item[0])


def _differences(data: ReportData) -> str:
    found = [difference for difference, _ in _sorted_differences(data)]
    width, height = 860.0, 220.0
    step = width / max(1, len(found))
    bars = []
    for i, value in enumerate(found):
        tall = abs(value) * (height / 2 - 6)
        top = height / 2 - tall if value > 0 else height / 2
        bars.append(f'<rect x="{i * step:.2f}" y="{top:.2f}" width="{max(0.5, step - 0.6):.2f}" height="{tall:.2f}" fill="var(--{"up" if value > 0 else "down"})"/>')
    wins, losses = sum(v > 1e-9 for v in found), sum(v < -1e-9 for v in found)
    return (
        f"<h2>Query by query: {BEST} − {BASELINE}, nDCG@10</h2>"
        f'<svg viewBox="0 0 {width:.0f} {height:.0f}" role="img" aria-label="{wins} queries gain, {losses} lose">{"".join(bars)}'
        f'<line x1="0" x2="{width:.0f}" y1="{height / 2}" y2="{height / 2}" stroke="var(--soft)"/>'
        f'<text x="4" y="14" font-size="13" fill="var(--soft)">+1</text><text x="4" y="{height - 4:.0f}" font-size="13" fill="var(--soft)">−1</text></svg>'
        f'<p class="soft">{wins} queries gain, {losses} lose, {len(found) - wins - losses} stay as they are.</p>'
    )


def _examples(data: ReportData) -> str:
    ordered = _sorted_differences(data)
    parts = []
    for title, rows in (("Most helped", ordered[:10]), ("Most hurt", ordered[::-1][:10])):
        cells = "".join(
            f'<tr><td>{escape(str(row["qid"]))}</td><td class="text">{escape(str(row["query"]))}</td><td>{row[BASELINE]:.3f}</td>'
            f'<td>{row[BEST]:.3f}</td><td class="{"up" if difference > 0 else "down"}">{difference:+.3f}</td></tr>'
            for difference, row in rows
        )
        parts.append(
            f'<h2>{title}</h2><div class="wide"><table><tr><th>query</th><th style="text-align:left">text</th><th>{BASELINE}</th>'
            f"<th>{BEST}</th><th>difference</th></tr>{cells}</table></div>"
        )
    return "".join(parts)


def _curve(curve: Sequence[tuple[float, float]]) -> str:
    low, high = min(v for _, v in curve), max(v for _, v in curve)
    points = [(40 + share * 780, 150 - (value - low) / max(1e-9, high - low) * 120) for share, value in curve]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dots = "".join(
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="var(--bar)"><title>dense {share:.1f}: {value:.4f}</title></circle>'
        f'<text x="{x:.1f}" y="180" font-size="13" text-anchor="middle" fill="var(--soft)">{share:.1f}</text>'
        for (x, y), (share, value) in zip(points, curve, strict=True)
    )
    return (
        f'<h2>Dense share, chosen on dev pairs</h2><svg viewBox="0 0 860 190" role="img" aria-label="nDCG@10 on dev pairs by dense share">'
        f'<polyline points="{line}" fill="none" stroke="var(--bar)" stroke-width="2"/>{dots}</svg>'
    )
