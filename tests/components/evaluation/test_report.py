"""The report: whole, self-contained, safe with any text, and right about what it says."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from components.evaluation.plots import gains_png, shares_png, systems_png
from components.evaluation.report import QueryRow, ReportData, write_report
from components.evaluation.significance import compare, p_text

EVIL = "<script>alert('x')</script> & \"quotes\" 中文 😀"


def make_data(
    queries: int = 30, gain: float = 0.1, rows: list[QueryRow] | None = None, **changes: object
) -> ReportData:
    random = np.random.default_rng(0)
    base = random.random(queries) * 0.8
    values = {"BM25": base, "dense": base - 0.3, "hybrid": base + gain}
    fields: dict[str, object] = {
        "title": f"set {EVIL}",
        "metrics": {
            name: {key: float(v.mean()) for key in ("nDCG@10", "MRR@10", "R@100")} for name, v in values.items()
        },
        "significance": {name: {"nDCG@10": row} for name, row in compare(values, "BM25", 300, 0).items()},
        "queries": rows
        if rows is not None
        else [
            QueryRow(f"q{i}", EVIL if i == 0 else f"text {i}", {name: float(v[i]) for name, v in values.items()})
            for i in range(queries)
        ],
        "speed": {"query encoding": "5 µs"},
        "facts": {"seed": "42", "commit": "abc"},
    }
    return ReportData(**fields | changes)  # type: ignore[arg-type]


def page(tmp_path: Path, data: ReportData) -> str:
    write_report(tmp_path / "report.html", data)
    return (tmp_path / "report.html").read_text(encoding="utf-8")


class Balance(HTMLParser):
    """Collects tags that are closed in another order than opened."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.wrong: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Closed in itself."""

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)


def test_the_page_stands_alone_and_is_well_formed(tmp_path: Path) -> None:
    text = page(tmp_path, make_data(dev_curve=[(0.0, 0.4), (0.5, 0.6), (1.0, 0.5)], dev_share=0.5, dev_queries=9))
    assert not re.search(r"(src|href)=|url\(|@import|<link|<script", text)
    assert 'name="viewport"' in text
    assert "prefers-color-scheme: dark" in text
    found = Balance()
    found.feed(text)
    assert found.wrong == []
    assert found.open == []
    assert "nan" not in re.sub(r"<style>.*?</style>", "", text, flags=re.DOTALL).lower()


def test_text_is_shown_as_text(tmp_path: Path) -> None:
    text = page(tmp_path, make_data())
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    assert "中文 😀" in text


def test_significance_is_marked_and_said(tmp_path: Path) -> None:
    text = page(tmp_path, make_data())
    verdict = re.search(r'<p class="verdict">(.*?)</p>', text)
    assert verdict is not None
    assert "above BM25" in verdict[1]
    assert "(a significant difference" in verdict[1]
    rows = re.findall(r"<tr><td>(\w+)</td>(.*?)</tr>", text)
    effectiveness = dict(rows[:3])
    assert "▲" in effectiveness["hybrid"]
    assert "▼" in effectiveness["dense"]
    assert "▲" not in effectiveness["BM25"]
    assert "not a significant difference" in page(tmp_path, make_data(gain=0.0))


def test_most_helped_and_most_hurt_come_first(tmp_path: Path) -> None:
    values = [("up", 0.1, 0.9), ("down", 0.9, 0.2), ("same", 0.5, 0.5), ("slightly", 0.5, 0.6)]
    queries = [QueryRow(qid, f"text of {qid}", {"BM25": a, "hybrid": b, "dense": 0.0}) for qid, a, b in values]
    text = page(tmp_path, make_data(rows=queries))
    helped, hurt = text.split("Most helped")[1].split("Most hurt")
    assert helped.index("text of up") < helped.index("text of slightly")
    assert "text of down" not in helped
    assert "text of down" in hurt
    assert "text of same" not in text
    assert "2 queries gain, 1 lose, 1 stay as they are." in text


@pytest.mark.parametrize("queries", [1, 2])
def test_few_queries_are_drawn_too(tmp_path: Path, queries: int) -> None:
    assert "<svg" in page(tmp_path, make_data(queries))


def test_without_baseline_or_judgements_the_page_says_so(tmp_path: Path) -> None:
    alone = make_data(metrics={"dense": {"nDCG@10": 0.5}}, significance={})
    assert "BM25" not in page(tmp_path, alone)
    bare = make_data(metrics={}, significance={}, rows=[], note="there are no judged queries")
    text = page(tmp_path, bare)
    assert "no judged queries" in text
    assert "5 µs" in text


def test_p_values_are_written_as_people_do() -> None:
    assert p_text(0.00099) == "< 0.001"
    assert p_text(0.0416) == "= 0.042"
    assert p_text(1.0) == "= 1.000"


def test_plots_are_png_files(tmp_path: Path) -> None:
    data = make_data()
    gains_png(tmp_path / "gains.png", [value for value, _ in data.differences()], "t")
    systems_png(tmp_path / "systems.png", data.metrics, ["nDCG@10", "R@100"], "t")
    shares_png(tmp_path / "shares.png", [(0.0, 0.1), (1.0, 0.2)], 1.0, "t")
    for name in ("gains", "systems", "shares"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
