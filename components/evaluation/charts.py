"""Drawings inside the report: plain SVG that takes its colours from the page, so it is right in light and in dark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

WIDTH = 860.0


def gain_bars(differences: Sequence[float], label: str) -> str:
    """One bar a query, sorted from most gained to most lost, on a scale that fits the largest."""
    height, left = 240.0, 76.0
    reach = max(0.1, *(abs(value) for value in differences))
    middle, step = height / 2, (WIDTH - left) / len(differences)
    bars = []
    for i, value in enumerate(sorted(differences, reverse=True)):
        tall = max(0.6, abs(value) / reach * (middle - 12))
        top, colour = (middle - tall, "up") if value > 0 else (middle, "down")
        colour = colour if abs(value) > 1e-9 else "line"
        bars.append(
            f'<rect x="{left + i * step:.2f}" y="{top:.2f}" width="{max(0.5, step * 0.82):.2f}" height="{tall:.2f}" '
            f'fill="var(--{colour})"/>'
        )
    scale = "".join(
        f'<text x="{left - 8}" y="{y + 5:.0f}" text-anchor="end">{text}</text>'
        for y, text in ((14.0, f"+{reach:.2f}"), (middle, "0"), (height - 14, f"−{reach:.2f}"))
    )
    axis = f'<line x1="{left}" x2="{WIDTH:.0f}" y1="{middle}" y2="{middle}" class="axis"/>'
    return _svg(height, label, "".join(bars) + axis + scale)


def intervals(rows: Mapping[str, Mapping[str, float]], label: str) -> str:
    """A dot with its 95 % interval for each system (`difference`, `low`, `high`), around a line at zero."""
    left, right, pitch, top = 110.0, 50.0, 44.0, 10.0
    height = top + pitch * len(rows) + 34
    low = min(0.0, *(row["low"] for row in rows.values()))
    high = max(0.0, *(row["high"] for row in rows.values()))
    span = max(1e-6, high - low)

    def place(value: float) -> float:
        return left + (value - low) / span * (WIDTH - left - right)

    parts = [f'<line x1="{place(0):.1f}" x2="{place(0):.1f}" y1="{top}" y2="{height - 26}" class="axis"/>']
    for i, (name, row) in enumerate(rows.items()):
        y = top + pitch * (i + 0.5)
        colour = "up" if row["low"] > 0 else "down" if row["high"] < 0 else "bar"
        parts.append(
            f'<text x="0" y="{y + 5:.0f}" class="name">{escape(name)}</text>'
            f'<line x1="{place(row["low"]):.1f}" x2="{place(row["high"]):.1f}" y1="{y}" y2="{y}" '
            f'stroke="var(--{colour})" stroke-width="3" stroke-linecap="round"/>'
            f'<circle cx="{place(row["difference"]):.1f}" cy="{y}" r="6" fill="var(--{colour})"/>'
        )
    labels = [0.0, *(value for value in (low, high) if abs(value) > span * 0.15)]  # nearer ones would overlap
    for value in labels:
        anchor = _anchor(value, low, high)
        parts.append(
            f'<text x="{place(value):.1f}" y="{height - 8:.0f}" text-anchor="{anchor}">{_signed(value)}</text>'
        )
    return _svg(height, label, "".join(parts))


def share_line(curve: Sequence[tuple[float, float]], chosen: float, label: str) -> str:
    """The measure over the dense share, the chosen share marked."""
    left, right, top, bottom, height = 92.0, 24.0, 48.0, 176.0, 244.0
    low, high = min(value for _, value in curve), max(value for _, value in curve)
    span = max(1e-9, high - low)
    points = [
        (left + share * (WIDTH - left - right), bottom - (value - low) / span * (bottom - top), share, value)
        for share, value in curve
    ]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y, _, _ in points)
    parts = [f'<polyline points="{line}" fill="none" stroke="var(--bar)" stroke-width="2.5"/>']
    for x, y, share, value in points:
        picked = abs(share - chosen) < 1e-9
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{7 if picked else 4}" fill="var(--{"up" if picked else "bar"})">'
            f"<title>dense share {share:.1f}: {value:.4f}</title></circle>"
            f'<text x="{x:.1f}" y="{bottom + 32:.0f}" text-anchor="middle">{share:.1f}</text>'
        )
        if picked:
            anchor = "start" if share < 0.05 else "end" if share > 0.95 else "middle"
            parts.append(f'<text x="{x:.1f}" y="{y - 16:.1f}" text-anchor="{anchor}" class="name">{value:.3f}</text>')
    parts.append(
        f'<text x="{left - 18}" y="{top + 5}" text-anchor="end">{high:.3f}</text>'
        f'<text x="{left - 18}" y="{bottom + 5}" text-anchor="end">{low:.3f}</text>'
        f'<text x="{(left + WIDTH - right) / 2:.0f}" y="{height - 4:.0f}" text-anchor="middle">dense share</text>'
    )
    return _svg(height, label, "".join(parts))


def _anchor(value: float, low: float, high: float) -> str:
    if value == high and high > 0:
        return "end"
    return "start" if value == low and low < 0 else "middle"


def _signed(value: float) -> str:
    return "0" if value == 0 else f"{value:+.3f}".replace("-", "−")


def _svg(height: float, label: str, inside: str) -> str:
    return f'<svg viewBox="0 0 {WIDTH:.0f} {height:.0f}" role="img" aria-label="{escape(label)}">{inside}</svg>'
