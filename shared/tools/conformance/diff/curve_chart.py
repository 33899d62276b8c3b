"""Draws errors over layers or positions as an SVG: one curve for each series, on a logarithmic scale."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 440, 260  # small, so that text is readable at the width of a phone
LEFT, RIGHT, TOP, BOTTOM = 44, 10, 12, 40


class Curve(NamedTuple):
    label: str
    css_class: str  # the page has its colours, for light and for dark
    values: Sequence[float]  # at x = 0, 1, ...


def curve_chart(title: str, x_label: str, curves: Sequence[Curve], marked: int | None = None) -> str:
    """The chart as SVG text. Values more than eight decades below the largest one, and zeros, are drawn at
    the bottom. The title of each point (shown when the mouse rests on it) has its value. `marked`: an x that
    gets a vertical line."""
    positive = [v for curve in curves for v in curve.values if v > 0 and math.isfinite(v)]
    high = math.ceil(math.log10(max(positive, default=1.0)) + 1e-9)
    low = min(math.floor(math.log10(min(positive, default=0.1))), high - 1)
    low = max(low, high - 8)
    count = max((len(curve.values) for curve in curves), default=1)

    def x(index: float) -> float:
        return LEFT + (index + 0.5) * (WIDTH - LEFT - RIGHT) / max(count, 1)

    def y(value: float) -> float:
        exponent = math.log10(max(value, 1e-300)) if math.isfinite(value) else high
        share = (min(max(exponent, low), high) - low) / (high - low)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        f"<title>{escape(title)}</title>",
    ]
    step = max(1, math.ceil((high - low) / 5))
    for exponent in range(low, high + 1, step):
        level = y(10.0**exponent)
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{level:.1f}" y2="{level:.1f}"/>'
        )
        parts.append(f'<text x="{LEFT - 6}" y="{level + 4:.1f}" text-anchor="end">1e{exponent}</text>')
    every = max(1, math.ceil(count / 12))
    for index in range(0, count, every):
        below = HEIGHT - BOTTOM + 15
        parts.append(f'<text x="{x(index):.1f}" y="{below}" text-anchor="middle">{index}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 6}" text-anchor="middle">{escape(x_label)}</text>')
    if marked is not None:
        at = f"{x(marked):.1f}"
        parts.append(f'<line class="marked" x1="{at}" x2="{at}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
    for curve in curves:
        points = [(x(i), y(value)) for i, value in enumerate(curve.values)]
        path = " ".join(f"{px:.1f},{py:.1f}" for px, py in points)
        parts.append(f'<g class="{curve.css_class}"><polyline points="{path}" fill="none"/>')
        for i, (px, py) in enumerate(points):
            label = escape(f"{x_label} {i}, {curve.label}: {curve.values[i]:.2e}")
            parts.append(f'<circle cx="{px:.1f}" cy="{py:.1f}" r="2.2"><title>{label}</title></circle>')
        parts.append("</g>")
    return "\n".join([*parts, "</svg>"])
