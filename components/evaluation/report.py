"""`report.html`, one page without outside resources: the measures, each query's gain, and how it was made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from components.evaluation import charts
from components.evaluation.metrics import NDCG_10
from components.evaluation.significance import LEVEL, p_text
from components.storage import write_atomic

STYLE = Path(__file__).with_name("report.css")
BASELINE, BEST = "BM25", "hybrid"
_EXAMPLES = 8

Comparison = Mapping[str, float]
"""What `significance.compare` says of one system in one measure."""


@dataclass(frozen=True)
class QueryRow:
    """One query and its nDCG@10 in each system."""

    qid: str
    text: str
    values: Mapping[str, float]


@dataclass(frozen=True)
class ReportData:
    """What the page shows."""

    title: str
    metrics: Mapping[str, Mapping[str, float]]
    """system → metric → mean; empty where nothing is judged."""
    significance: Mapping[str, Mapping[str, Comparison]]
    """system → metric → comparison with BM25; empty without a baseline."""
    queries: Sequence[QueryRow]
    speed: Mapping[str, str]
    facts: Mapping[str, str]
    note: str = ""
    """Why nothing is measured, where nothing is."""
    dev_curve: Sequence[tuple[float, float]] | None = None
    """(dense share, nDCG@10 on dev pairs)"""
    dev_share: float = 0.0
    dev_queries: int = 0

    def differences(self) -> list[tuple[float, QueryRow]]:
        """(hybrid − BM25 in nDCG@10, query), most gained first; empty without both systems."""
        if BASELINE not in self.metrics or BEST not in self.metrics:
            return []
        found = [(row.values[BEST] - row.values[BASELINE], row) for row in self.queries]
        return sorted(found, key=lambda item: (-item[0], item[1].qid))


def write_report(path: Path, data: ReportData) -> None:
    """Write the page atomically."""
    parts = [f"<h1>{escape(data.title)}</h1>"]
    if data.metrics:
        parts.append(f'<p class="soft">{len(data.queries):,} judged queries, all systems measured in one run</p>')
        parts += [_verdict(data), _effectiveness(data), _comparison(data)]
    else:
        parts.append(f'<p class="verdict">{escape(data.note)}</p>')
    if differences := data.differences():
        parts += [_gains(differences), _examples(differences)]
    if data.dev_curve:
        parts.append(_dev_curve(data))
    parts += ["<h2>Speed and size</h2>", _facts(data.speed), "<h2>How it was made</h2>", _facts(data.facts)]
    page = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(data.title)} · Almanac</title><style>{STYLE.read_text(encoding='utf-8')}</style></head>"
        f"<body><main>{''.join(parts)}</main></body></html>\n"
    )
    write_atomic(path, page.encode())


def _verdict(data: ReportData) -> str:
    compared = data.significance.get(BEST, {}).get(NDCG_10)
    if not compared:
        return ""
    difference, p = compared["difference"], compared["p_holm"]
    sure = "a significant difference" if p < LEVEL else "not a significant difference"
    relation = "above" if difference >= 0 else "below"
    return (
        f'<p class="verdict">{BEST.capitalize()} search reaches nDCG@10 <b>{data.metrics[BEST][NDCG_10]:.3f}</b>, '
        f'<span class="{_sign(difference)}">{abs(difference):.3f}</span> {relation} {BASELINE} '
        f"({sure}, p {escape(p_text(p))} after Holm’s correction).</p>"
    )


def _effectiveness(data: ReportData) -> str:
    names = list(next(iter(data.metrics.values())))
    best = {name: max(row[name] for row in data.metrics.values()) for name in names}
    rows = []
    for system, values in data.metrics.items():
        cells = "".join(
            f"<td>{_bold(f'{values[name]:.4f}', values[name] == best[name])}"
            f"{_mark(data.significance.get(system, {}).get(name))}</td>"
            for name in names
        )
        rows.append(f"<tr><td>{escape(system)}</td>{cells}</tr>")
    head = "".join(f"<th>{name}</th>" for name in names)
    table = f"<table><tr><th>system</th>{head}</tr>{''.join(rows)}</table>"
    told = (
        f'<span class="up">▲</span> <span class="down">▼</span> significantly above or below {BASELINE} (paired '
        f"randomisation test, Holm-corrected over the systems, p &lt; {LEVEL}). "
    )
    return (
        f'<h2>Effectiveness</h2><div class="wide">{table}</div>'
        f'<p class="soft">{told if data.significance else ""}Bold: best of the column.</p>'
    )


def _comparison(data: ReportData) -> str:
    rows = {system: found[NDCG_10] for system, found in data.significance.items()}
    if not rows:
        return ""
    lines = "".join(
        f'<tr><td>{escape(system)}</td><td class="{_sign(row["difference"])}">{_signed(row["difference"])}</td>'
        f"<td>{_signed(row['low'])} … {_signed(row['high'])}</td><td>{_p(row['p_holm'])}</td><td>{_p(row['p'])}</td>"
        f"<td>{_p(row['p_t'])}</td><td>{row['wins']:.0f} / {row['ties']:.0f} / {row['losses']:.0f}</td></tr>"
        for system, row in rows.items()
    )
    drawing = charts.intervals(rows, f"difference to {BASELINE} with its 95 % interval")
    names = ("system", "difference", "95 % interval", "p (Holm)", "p", "p (t test)", "won / same / lost")
    head = "".join(f"<th>{name}</th>" for name in names)
    table = f"<table><tr>{head}</tr>{lines}</table>"
    return f'<h2>nDCG@10 against {BASELINE}</h2>{drawing}<div class="wide">{table}</div>'


def _gains(differences: Sequence[tuple[float, QueryRow]]) -> str:
    values = [value for value, _ in differences]
    wins, losses = sum(value > 1e-9 for value in values), sum(value < -1e-9 for value in values)
    told = f"{wins} queries gain, {losses} lose, {len(values) - wins - losses} stay as they are."
    return f'<h2>Query by query: {BEST} − {BASELINE}</h2>{charts.gain_bars(values, told)}<p class="soft">{told}</p>'


def _examples(differences: Sequence[tuple[float, QueryRow]]) -> str:
    helped = [item for item in differences if item[0] > 1e-9][:_EXAMPLES]
    hurt = [item for item in reversed(differences) if item[0] < -1e-9][:_EXAMPLES]
    parts = []
    for title, rows in (("Most helped", helped), ("Most hurt", hurt)):
        lines = "".join(
            f'<li><span class="text"><small>{escape(row.qid)}</small>{escape(row.text)}</span>'
            f'<span class="numbers">{row.values[BASELINE]:.3f} → {row.values[BEST]:.3f} '
            f'<b class="{_sign(value)}">{_signed(value)}</b></span></li>'
            for value, row in rows
        )
        if lines:
            parts.append(f"<h2>{title} <small>nDCG@10, {BASELINE} → {BEST}</small></h2><ol>{lines}</ol>")
    return "".join(parts)


def _dev_curve(data: ReportData) -> str:
    assert data.dev_curve is not None
    told = (
        f"nDCG@10 on {data.dev_queries:,} held-out dev pairs, no evaluated query among them; "
        f"chosen: {data.dev_share:.1f} dense, {1 - data.dev_share:.1f} sparse."
    )
    drawing = charts.share_line(data.dev_curve, data.dev_share, told)
    return f'<h2>Dense share, chosen on dev pairs</h2>{drawing}<p class="soft">{told}</p>'


def _facts(facts: Mapping[str, str]) -> str:
    return (
        "<dl>" + "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts.items()) + "</dl>"
    )


def _mark(compared: Comparison | None) -> str:
    if not compared or compared["p_holm"] >= LEVEL:
        return ""
    return ' <span class="up">▲</span>' if compared["difference"] > 0 else ' <span class="down">▼</span>'


def _bold(text: str, yes: bool) -> str:
    return f"<b>{text}</b>" if yes else text


def _sign(value: float) -> str:
    return "up" if value >= 0 else "down"


def _p(value: float) -> str:
    return escape(p_text(value)).removeprefix("= ")


def _signed(value: float) -> str:
    return f"{value:+.3f}".replace("-", "−")
