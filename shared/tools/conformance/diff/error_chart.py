"""Draws the errors of a model's ops as an SVG: one column for each op, in the order of execution."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape

from diptych.shared.tools.conformance.diff.outcome import layer_of

WIDTH, HEIGHT = 900, 320
LEFT, RIGHT, TOP, BOTTOM = 60, 20, 20, 50
FLOOR = 1e-10
"""Drawn at the bottom: no error at all, and what is smaller (float32 resolves 1e-7)."""


class Series(NamedTuple):
    label: str
    color: str
    errors: Mapping[str, float]  # op -> relative error


def error_chart(series: Sequence[Series], marked_op: str | None = None) -> str:
    """The chart as SVG text, on a logarithmic scale; vertical lines separate the layers. The title of each
    point (shown when the mouse rests on it) names op and error. `marked_op` gets a red line."""
    ops = list(dict.fromkeys(op for one in series for op in one.errors))
    finite = [e for one in series for e in one.errors.values() if math.isfinite(e)]
    top = 10.0 ** math.ceil(math.log10(max([*finite, 1e-4])))
    decades = round(math.log10(top / FLOOR))

    def x(index: float) -> float:
        return LEFT + (index + 0.5) * (WIDTH - LEFT - RIGHT) / max(len(ops), 1)

    def y(error: float) -> float:
        decade = math.log10(min(max(error, FLOOR), top) / FLOOR)
        return HEIGHT - BOTTOM - decade * (HEIGHT - TOP - BOTTOM) / decades

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        'font-family="sans-serif" font-size="11" fill="currentColor">',
        "<title>relative error of every op</title>",
    ]
    for exponent in range(0, decades + 1, 2):
        height = y(FLOOR * 10.0**exponent)
        label = "0" if exponent == 0 else f"1e{round(math.log10(FLOOR)) + exponent}"
        parts.append(_line(LEFT, height, WIDTH - RIGHT, height, "currentColor", 0.15))
        parts.append(_text(LEFT - 8, height + 4, label, "end"))
    layers = [layer_of(op) for op in ops]
    for i, layer in enumerate(layers):
        if i and layer != layers[i - 1]:
            parts.append(_line(x(i - 0.5), TOP, x(i - 0.5), HEIGHT - BOTTOM, "currentColor", 0.3))
    for layer in dict.fromkeys(layer for layer in layers if layer is not None):
        members = [i for i, each in enumerate(layers) if each == layer]
        middle = (members[0] + members[-1]) / 2
        parts.append(_text(x(middle), HEIGHT - BOTTOM + 16, f"layer {layer}", "middle"))
    if marked_op in ops:
        parts.append(_line(x(ops.index(marked_op)), TOP, x(ops.index(marked_op)), HEIGHT - BOTTOM, "#c62828"))
    for number, one in enumerate(series):
        points = [(x(ops.index(op)), y(error), op, error) for op, error in one.errors.items()]
        path = " ".join(f"{px:.1f},{py:.1f}" for px, py, _, _ in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{one.color}" stroke-width="1.5"/>')
        for px, py, op, error in points:
            title = f"<title>{escape(op)}: {error:.2e}</title>"
            parts.append(f'<circle cx="{px:.1f}" cy="{py:.1f}" r="2.5" fill="{one.color}">{title}</circle>')
        parts.append(f'<g fill="{one.color}">')
        parts.append(_text(LEFT + 300 * number, HEIGHT - 8, one.label, "start"))
        parts.append("</g>")
    return "\n".join([*parts, "</svg>"])


def _line(x1: float, y1: float, x2: float, y2: float, color: str, opacity: float = 1.0) -> str:
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" '
        f'stroke="{color}" stroke-opacity="{opacity}"/>'
    )


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
