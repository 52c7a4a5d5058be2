"""A load test as one HTML file that needs nothing else: no scripts, fonts or pictures from anywhere."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from enginectl.errors import UsageError
from enginectl.loadtest.plot import TITLES
from enginectl.loadtest.report import Summary, distribution, table
from enginectl.loadtest.run import Run

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 460, 260, 56, 34, 12
_NUM_COLORS = 8
_STYLE = """
:root { color-scheme: light dark; --text: #1d2129; --faint: #8a919e; --line: #d5d9e0; --back: #ffffff;
  --c0: #2f6fd0; --c1: #d0622f; --c2: #2f9d63; --c3: #9a4fc4; --c4: #b58a13; --c5: #1c98a8; --c6: #c43f6d; --c7: #6b7280; }
@media (prefers-color-scheme: dark) { :root { --text: #e6e8ec; --faint: #8a919e; --line: #3a3f4a; --back: #16181d;
  --c0: #7aa9f0; --c1: #f09a72; --c2: #6ccf9a; --c3: #c79ae6; --c4: #e0bd58; --c5: #67cbd8; --c6: #ee88a9; --c7: #a5abb6; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--text); background: var(--back); margin: 2rem auto;
  max-width: 62rem; padding: 0 1rem; }
h1 { font-size: 1.4rem; margin: 0; } h2 { font-size: 1rem; margin: 0 0 .3rem; } p { color: var(--faint); margin: .2rem 0 1.2rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .25rem .9rem; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(20rem, 1fr)); gap: 1.5rem; margin: 1.5rem 0; }
svg { width: 100%; height: auto; } svg text { fill: var(--faint); font-size: 11px; }
.axis { stroke: var(--line); } .curve { fill: none; stroke-width: 1.6; }
.key { display: flex; flex-wrap: wrap; gap: .2rem 1rem; } .key span::before { content: ""; display: inline-block;
  width: .8em; height: .8em; margin-right: .4em; border-radius: 2px; background: var(--color); }
"""


def write_page(
    facts: dict[str, Any], levels: Sequence[Sequence[Run]], summaries: Sequence[Summary], path: Path
) -> None:
    """Write the file. facts: what was run, shown above the table. Raises UsageError if it cannot be written."""
    try:
        path.write_text(page(facts, levels, summaries), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--html {path}: cannot be written: {error.strerror}") from error


def page(facts: dict[str, Any], levels: Sequence[Sequence[Run]], summaries: Sequence[Summary]) -> str:
    """The file's text. All numbers are in it as JSON, too."""
    names = [summary["level"] for summary in summaries]
    charts = [("Output tokens a second", _bars(names, [one["output_tokens_per_s"] for one in summaries]))]
    for latency, title in TITLES.items():
        charts.append((f"{title}, ms", _curves([distribution(runs, latency) for runs in levels])))
    data = json.dumps({**facts, "levels": list(summaries)}).replace("<", "\\u003c")
    key = "".join(f'<span style="--color: {_color(i)}">{escape(name)}</span>' for i, name in enumerate(names))
    figures = "".join(f"<figure style='margin:0'><h2>{escape(title)}</h2>{svg}</figure>" for title, svg in charts)
    shown = " · ".join(f"{name} {value}" for name, value in facts.items() if value is not None)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Load test of {escape(str(facts.get('model', '')))}</title><style>{_STYLE}</style></head><body>"
        f"<h1>Load test of {escape(str(facts.get('model', '')))}</h1><p>{escape(shown)}</p>"
        f'<div class="wide">{_table(summaries)}</div><div class="charts">{figures}</div><div class="key">{key}</div>'
        f'<script type="application/json" id="data">{data}</script></body></html>\n'
    )


def _color(place: int) -> str:
    return f"var(--c{place % _NUM_COLORS})"


def _table(summaries: Sequence[Summary]) -> str:
    rows, columns = table(summaries)
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    lines = ("".join(f"<td>{escape(row.get(column, ''))}</td>" for column in columns) for row in rows)
    return f"<table><tr>{head}</tr>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def _bars(names: Sequence[str], values: Sequence[float]) -> str:
    most = max(values, default=0.0) or 1.0
    step = (_WIDTH - _LEFT) / max(len(values), 1)
    parts = []
    for place, (name, value) in enumerate(zip(names, values, strict=True)):
        height = value / most * (_HEIGHT - _BOTTOM - _TOP - 14)
        x, y = _LEFT + step * (place + 0.15), _HEIGHT - _BOTTOM - height
        middle = x + step * 0.35
        parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{step * 0.7:.1f}" height="{height:.1f}" rx="2" '
            f'style="fill: {_color(place)}"/>'
            f'<text x="{middle:.1f}" y="{y - 4:.1f}" text-anchor="middle">{value:,.0f}</text>'
            f'<text x="{middle:.1f}" y="{_HEIGHT - _BOTTOM + 16}" text-anchor="middle">{escape(name)}</text>'
        )
    return _svg("".join(parts), "bars: output tokens a second by level")


def _curves(curves: Sequence[tuple[list[float], list[float]]]) -> str:
    """Cumulative shares, in the order of the levels."""
    most = max((values[-1] for values, _ in curves if values), default=0.0) or 1.0
    width, height = _WIDTH - _LEFT - 10, _HEIGHT - _BOTTOM - _TOP
    parts = []
    for share in (0.0, 0.5, 0.9, 1.0):
        y = _TOP + height * (1 - share)
        parts.append(f'<line class="axis" x1="{_LEFT}" x2="{_LEFT + width}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{share:.0%}</text>')
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        x, label = _LEFT + width * share, f"{most * share:,.{0 if most >= 40 else 1}f}"
        parts.append(f'<text x="{x:.1f}" y="{_HEIGHT - _BOTTOM + 16}" text-anchor="middle">{label}</text>')
    for place, (values, shares) in enumerate(curves):
        points = " ".join(
            f"{_LEFT + width * value / most:.1f},{_TOP + height * (1 - share):.1f}"
            for value, share in zip(values, shares, strict=True)
        )
        parts.append(f'<polyline class="curve" points="{points}" style="stroke: {_color(place)}"/>')
    return _svg("".join(parts), "curves: share of values up to so many milliseconds, by level")


def _svg(content: str, label: str) -> str:
    axis = f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH}" y1="{_HEIGHT - _BOTTOM}" y2="{_HEIGHT - _BOTTOM}"/>'
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}">{axis}{content}</svg>'
