"""The page of `diptych check kernel --html`: verdict, cases, and error and speed over sizes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

from jinja2 import Environment

from diptych.shared.tools.conformance.ci_reports import diptych_version
from diptych.shared.tools.conformance.kernels.kernel_report import Report

WIDTH, HEIGHT = 440, 270  # small, so that text is readable at the width of a phone
LEFT, RIGHT, TOP, BOTTOM = 44, 14, 26, 46
COLORS = ("a", "b", "c", "d")

Points = Sequence[tuple[float, float, str]]  # x, y, what is shown at the point


def render(report: Report) -> str:
    """The HTML page, in one file."""
    errors: dict[str, list[tuple[float, float, str]]] = {}
    for verdict in report.verdicts:
        if verdict.refusal is None and verdict.error > 0 and math.isfinite(verdict.allowed):
            point = verdict.size, verdict.error / verdict.allowed, f"{verdict.case}: {verdict.error:.2e}"
            errors.setdefault(verdict.dtype, []).append(point)
    speeds: dict[str, list[tuple[float, float, str]]] = {
        "this function": [],
        report.like.beside: [],
        "bound": [],
    }
    for timing in report.timings:
        for label, seconds in zip(speeds, (timing.seconds, timing.ours, timing.bound)):
            if seconds is not None and math.isfinite(seconds):
                speeds[label].append((timing.size, 1e6 * seconds, f"{timing.case}: {1e6 * seconds:.1f} µs"))
    template = Environment(autoescape=True).from_string(_TEMPLATE)
    size_name = report.like.size_name
    return template.render(
        report=report,
        errors=plot("error / allowed error", size_name, errors, line=1.0, is_line=False),
        errors_key=key_of(errors),
        speeds=plot("µs of one call", size_name, speeds) if any(speeds.values()) else "",
        speeds_key=key_of(speeds),
        has_bound=any(timing.bound is not None for timing in report.timings),
        reports=observed(report),
        version=diptych_version(),
    )


def observed(report: Report) -> list[str]:
    """How often each optional observation holds."""
    names = list(dict.fromkeys(name for verdict in report.verdicts for name in verdict.reports))
    lines = []
    for name in names:
        values = [verdict.reports[name] for verdict in report.verdicts if name in verdict.reports]
        lines.append(f"{name}: {sum(values)} of {len(values)} cases")
    return lines


def plot(
    title: str,
    size_name: str,
    series: Mapping[str, Points],
    *,
    line: float | None = None,
    is_line: bool = True,
) -> str:
    """A plot with logarithmic axes. `line`: a horizontal line, the limit."""
    points = [point for each in series.values() for point in each if math.isfinite(point[1])]
    if not points:
        return ""
    xs = [point[0] for point in points]
    ys = [point[1] for point in points] + ([line] if line else [])
    x_range = math.log10(min(xs)), math.log10(max(xs))
    y_range = math.floor(math.log10(min(ys))), math.ceil(math.log10(max(ys)) + 1e-9)

    def x_of(value: float) -> float:
        share = (math.log10(value) - x_range[0]) / max(x_range[1] - x_range[0], 1e-9)
        return LEFT + 8 + share * (WIDTH - LEFT - RIGHT - 16)

    def y_of(value: float) -> float:
        share = (math.log10(value) - y_range[0]) / max(y_range[1] - y_range[0], 1)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        f"<title>{escape(title)} over {escape(size_name)}</title>",
    ]
    step = max(1, (y_range[1] - y_range[0]) // 5)
    for exponent in range(y_range[0], y_range[1] + 1, step):
        y = y_of(10.0**exponent)
        parts.append(f'<line class="grid" x1="{LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}"/>')
        label = f"{10.0**exponent:g}" if -2 <= exponent <= 3 else f"1e{exponent}"
        parts.append(_text(LEFT - 6, y + 5, label, "end"))
    shown_until = -math.inf
    for value in sorted(set(xs)):
        if x_of(value) - shown_until > 58:
            parts.append(_text(x_of(value), bottom + 17, _short(value), "middle"))
            shown_until = x_of(value)
    parts.append(_text((LEFT + right) / 2, HEIGHT - 8, size_name, "middle"))
    parts.append(_text(LEFT, 14, title, "start"))
    if line:
        parts.append(
            f'<line class="limit" x1="{LEFT}" y1="{y_of(line):.1f}" x2="{right}" y2="{y_of(line):.1f}"/>'
        )
    for color, each in zip(COLORS, series.values()):
        finite = sorted(point for point in each if math.isfinite(point[1]))
        if not finite:
            continue
        if is_line:
            path = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y, _ in finite)
            parts.append(f'<polyline class="line {color}" points="{path}"/>')
        for x, y, what in finite:
            circle = f'<circle class="{color}" cx="{x_of(x):.1f}" cy="{y_of(y):.1f}" r="3.5">'
            parts.append(f"{circle}<title>{escape(what)}</title></circle>")
    return "\n".join([*parts, "</svg>"])


def key_of(series: Mapping[str, Points]) -> list[tuple[str, str]]:
    """(colour, label) of the series that the plot shows."""
    return [(color, label) for color, (label, points) in zip(COLORS, series.items()) if points]


def _short(value: float) -> str:
    for unit, size in (("M", 1e6), ("k", 1e4)):
        if value >= size:
            return f"{value / (1e6 if unit == 'M' else 1e3):.3g} {unit}"
    return f"{value:g}"


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


_TEMPLATE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>diptych check kernel: {{ report.target }}</title>
<style>
  :root { color-scheme: light dark; --text: #1b1b1f; --back: #ffffff; --grid: #d8d8de; --bad: #b3261e;
          --good: #1b6e2f; --a: #1553b7; --b: #b34700; --c: #5b5b66; --d: #7b1fa2; }
  @media (prefers-color-scheme: dark) {
    :root { --text: #e6e6ea; --back: #16161a; --grid: #3a3a42; --bad: #ff8a80; --good: #81c995;
            --a: #8ab4f8; --b: #ffb074; --c: #b4b4bf; --d: #d7a6f0; } }
  body { font: 16px/1.5 sans-serif; color: var(--text); background: var(--back); max-width: 60rem;
         margin: 1.5rem auto; padding: 0 1rem; overflow-wrap: anywhere; }
  table { border-collapse: collapse; }
  td, th { text-align: left; padding: 0.15rem 1rem 0.15rem 0; vertical-align: top; overflow-wrap: normal; }
  td.number, th.number { text-align: right; white-space: nowrap; }
  @media (max-width: 40rem) {
    h1 { font-size: 1.4rem; } tr.head { display: none; }
    table, tbody, tr, td.verdict { display: block; } td { padding-right: 0.6rem; }
    tr { padding: 0.4rem 0; border-top: 1px solid var(--grid); }
    td.case { display: block; font-weight: bold; }
    td.number, td.type { display: inline-block; } td.number::before { content: attr(data-label) " "; }
    td.verdict { overflow-wrap: anywhere; } }
  .holds { color: var(--good); } .fails { color: var(--bad); }
  svg { width: 100%; height: auto; max-width: 36rem; display: block; margin: 1rem 0 0.3rem; }
  svg text { font: 14px sans-serif; fill: var(--text); }
  svg .grid { stroke: var(--grid); } svg .limit { stroke: var(--bad); stroke-dasharray: 5 4; }
  svg .line { fill: none; stroke-width: 2; }
  svg circle.a { fill: var(--a); } svg .line.a { stroke: var(--a); } .key .a b { background: var(--a); }
  svg circle.b { fill: var(--b); } svg .line.b { stroke: var(--b); } .key .b b { background: var(--b); }
  svg circle.c { fill: var(--c); } svg .line.c { stroke: var(--c); } .key .c b { background: var(--c); }
  svg circle.d { fill: var(--d); } svg .line.d { stroke: var(--d); } .key .d b { background: var(--d); }
  .key { display: flex; flex-wrap: wrap; gap: 0 1.2rem; margin-top: 0; }
  .key b { display: inline-block; width: 0.8em; height: 0.8em; border-radius: 0.4em; margin-right: 0.3em; }
</style>
</head>
<body>
<h1>{{ report.target }}</h1>
<p>Checked as <b>{{ report.like.name }}</b>: {{ report.like.what }} Convention
{{ report.convention.library }}, <code>{{ report.convention.signature }}</code>. Device:
{{ report.device }}. Diptych {{ version }}; <code>--seed {{ report.seed }}</code> repeats the check.</p>
<h2 class="{{ 'fails' if report.status else 'holds' }}">{{ report.summary }}</h2>
<ul>{% for name in report.names %}<li class="fails">{{ name }}</li>{% endfor %}</ul>
{% for note in report.notes %}<p>{{ note }}</p>
{% endfor %}
<h2>Error over sizes</h2>
{% if errors %}{{ errors | safe }}
<p class="key">{% for color, label in errors_key %}<span class="{{ color }}"><b></b>{{ label }}</span>
{% endfor %}</p>
<p>Each point is a case: the relative error against float64, over the largest allowed one. The dashed line is
the limit.</p>{% else %}<p>No case has an error to show.</p>{% endif %}
{% if speeds %}<h2>Speed over sizes</h2>
{{ speeds | safe }}
<p class="key">{% for color, label in speeds_key %}<span class="{{ color }}"><b></b>{{ label }}</span>
{% endfor %}</p>
{% if report.speed %}<p><b>{{ report.speed }}</b></p>{% endif %}
{% for note in report.timing_notes %}<p>{{ note }}</p>
{% endfor %}
{% if has_bound %}<p>The bound is the larger of bytes over bandwidth and FLOPs over GEMM rate, both measured
in this run. Small inputs stay in a cache, which may be faster than the bound.</p>{% endif %}
{% endif %}
<h2>Observed</h2>
<ul>{% for line in reports %}<li>{{ line }}</li>{% endfor %}</ul>
{% if report.operators %}<p>Operators in one call: <code>{{ report.operators | join(", ") }}</code></p>
{% endif %}
<h2>Cases</h2>
<table>
<tr class="head"><th>case</th><th>type</th><th class="number">error</th><th class="number">allowed</th>
<th>verdict</th></tr>
{% for v in report.verdicts %}<tr><td class="case">{{ v.case }}</td><td class="type">{{ v.dtype }}</td>
<td class="number" data-label="error">{{ "%.1e" | format(v.error) }}</td>
<td class="number" data-label="allowed">{{ "%.1e" | format(v.allowed) }}</td>
<td class="verdict {{ 'fails' if v.failure else 'holds' }}">
{{ v.words }}</td></tr>
{% endfor %}</table>
</body>
</html>
"""
