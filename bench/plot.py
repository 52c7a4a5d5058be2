"""The rates of `bench/compare.py` as an SVG: a group of bars a workload, and a line where the roofline is."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

_COLORS = ("#0a58ca", "#b8860b", "#2e7d32", "#8e24aa", "#c62828")
_LEFT, _TOP, _HEIGHT, _BAR, _GAP = 56, 44, 260, 22, 40


def bars(rows: Mapping[str, Mapping[str, Mapping[str, float]]], bounds: Mapping[str, float]) -> str:
    """rows: workload to engine to `tokens_per_s`, `min` and `max`. bounds: workload to tokens a second.

    Each workload has a scale of its own, whose top is the larger of its roofline and its best engine.
    """
    engines = list(next(iter(rows.values())))
    group = _BAR * len(engines)
    width = _LEFT + len(rows) * (group + _GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{_TOP + _HEIGHT + 48}" '
        'font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for place, engine in enumerate(engines):
        x = _LEFT + 120 * place
        parts.append(f'<rect x="{x}" y="10" width="10" height="10" fill="{_COLORS[place % len(_COLORS)]}"/>')
        parts.append(f'<text x="{x + 14}" y="19">{escape(engine)}</text>')
    for place, (workload, own) in enumerate(rows.items()):
        left = _LEFT + place * (group + _GAP)
        parts += _group(workload, own, bounds.get(workload), left, group)
    return "\n".join([*parts, "</svg>\n"])


def _group(
    workload: str, own: Mapping[str, Mapping[str, float]], bound: float | None, left: int, width: int
) -> list[str]:
    top = max(bound or 0.0, *(row["max"] for row in own.values())) * 1.02
    bottom = _TOP + _HEIGHT

    def y(rate: float) -> float:
        return bottom - _HEIGHT * rate / top

    parts = [f'<line x1="{left}" y1="{bottom}" x2="{left + width}" y2="{bottom}" stroke="#333"/>']
    for place, row in enumerate(own.values()):
        x, rate = left + place * _BAR, row["tokens_per_s"]
        middle, color = x + _BAR / 2, _COLORS[place % len(_COLORS)]
        parts += [
            f'<rect x="{x + 2}" y="{y(rate):.1f}" width="{_BAR - 4}" height="{bottom - y(rate):.1f}" fill="{color}"/>',
            f'<line x1="{middle}" y1="{y(row["min"]):.1f}" x2="{middle}" y2="{y(row["max"]):.1f}" stroke="#000"/>',
            f'<text x="{middle}" y="{y(rate) - 4:.1f}" text-anchor="middle" font-size="8">{rate:,.0f}</text>',
        ]
    if bound is not None:
        parts += [
            f'<line x1="{left - 4}" y1="{y(bound):.1f}" x2="{left + width + 4}" y2="{y(bound):.1f}" stroke="#c00" '
            'stroke-dasharray="4 2"/>',
            f'<text x="{left}" y="{y(bound) - 3:.1f}" fill="#c00" font-size="9">roofline {bound:,.0f}</text>',
        ]
    parts.append(f'<text x="{left + width / 2}" y="{bottom + 16}" text-anchor="middle">{escape(workload)}</text>')
    return parts
