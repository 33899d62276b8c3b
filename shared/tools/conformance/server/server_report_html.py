"""Writes the results of a run as one HTML file: no script, no other file, light and dark, plots as SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from diptych.shared.tools.conformance.server.checks import GROUPS, Finding, Result
from diptych.shared.tools.conformance.server.verdict import Report, failure_rows

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 440, 220, 42, 40, 12  # small, so that text is readable on a phone
LOWEST, HIGHEST = -7, 1  # decades of an error that a plot shows
NUM_FAILURES = 8  # of one check

STYLE = """
:root { color-scheme: light dark; --text: #1d2530; --dim: #58616e; --line: #d5dae0; --back: #ffffff;
  --good: #13702f; --bad: #b3261e; --warn: #8a5a00; --first: #2459a8; --second: #b04a00; --box: #f5f7f9; }
@media (prefers-color-scheme: dark) { :root { --text: #e6e9ee; --dim: #a3adba; --line: #3a424e;
  --back: #14181e; --good: #6fcf8a; --bad: #ff8a80; --warn: #e6b450; --first: #7fb0ff; --second: #ffa45c;
  --box: #1c222b; } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--text); background: var(--back);
  max-width: 60rem; margin: 0 auto; padding: 1rem; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin-top: 2rem; } h3 { font-size: 1rem; margin: 0; }
.verdict { font-size: 1.15rem; font-weight: 600; border-left: 6px solid; padding: .4rem .8rem; }
.holds { color: var(--good); } .fails { color: var(--bad); } .near { color: var(--warn); }
.not, .dim { color: var(--dim); }
table { border-collapse: collapse; width: 100%; } th, td { text-align: left; vertical-align: top;
  padding: .3rem .6rem .3rem 0; border-bottom: 1px solid var(--line); } th { font-weight: 600; }
td.number { text-align: right; font-variant-numeric: tabular-nums; } td.status { white-space: nowrap; }
article { border: 1px solid var(--line); background: var(--box); border-radius: 6px; padding: .8rem;
  margin: .8rem 0; } dl { display: grid; grid-template-columns: minmax(6rem, 12rem) 1fr; margin: .5rem 0;
  gap: .1rem .8rem; } dt { color: var(--dim); } dd { margin: 0; font-family: ui-monospace, monospace;
  font-size: .9rem; } figure { margin: 1rem 0; } svg { width: 100%; height: auto; max-width: 36rem; }
th, td { overflow-wrap: normal; }
.offers td:last-child { overflow-wrap: anywhere; } tr.group th { padding-top: 1rem; color: var(--dim); }
@media (max-width: 40rem) { dl { grid-template-columns: 1fr; } .checks tr.head { display: none; }
  .checks, .checks tbody, .checks tr, .checks .sentence { display: block; }
  .checks tr { padding: .4rem 0; border-bottom: 1px solid var(--line); }
  .checks td { display: inline; border: 0; } .checks td.number::before { content: "cases: "; } }
"""


def render(report: Report) -> str:
    status = "fails" if report.exit_status else "holds"
    facts = ", ".join(f"{escape(name)} {escape(value)}" for name, value in report.facts.items())
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>Check of a server</title><style>{STYLE}</style></head><body>",
        f'<h1>Check of a server</h1><p class="verdict {status}">{escape(report.sentence)}</p>',
        f'<p class="dim">{facts}</p>',
    ]
    if report.failing:
        parts.append("<h2>Failures</h2>")
        parts += [_failure(result) for result in report.failing]
    plots = [_plots(result, finding) for result in report.results for finding in result.findings]
    if any(plots):
        parts.append("<h2>Errors of log-probabilities</h2>")
        parts += plots
    head = '<tr class="head"><th>result</th><th>check</th><th>what must hold</th><th>cases</th></tr>'
    parts.append(f'<h2>Checks</h2><table class="checks">{head}')
    parts += [_group(group, report.results) for group in GROUPS]
    parts.append('</table><h2>What the server offers</h2><table class="offers">')
    for name, value in vars(report.offers).items():
        if name != "reasons":
            reason = report.offers.reasons.get(name, "")
            text = {True: "yes", False: "no"}.get(value, value) if isinstance(value, bool) else value
            parts.append(
                f"<tr><th>{escape(name)}</th><td>{escape(str(text))}</td><td>{escape(reason)}</td></tr>"
            )
    return "\n".join([*filter(None, parts), "</table></body></html>\n"])


def _failure(result: Result) -> str:
    failures = [finding for finding in result.findings if finding.status == "fails"]
    parts = [f'<article><h3 class="fails">{escape(result.check.name)}</h3>']
    parts.append(
        f'<p>{escape(result.check.sentence)} <span class="dim">{escape(result.check.why)}</span></p>'
    )
    for finding in failures[:NUM_FAILURES]:
        rows = "".join(
            f"<dt>{escape(label)}</dt><dd>{escape(value)}</dd>" for label, value in failure_rows(finding)
        )
        parts.append(f"<dl>{rows}</dl>")
    if len(failures) > NUM_FAILURES:
        parts.append(f"<p>and {len(failures) - NUM_FAILURES} more</p>")
    return "".join([*parts, "</article>"])


def _group(group: str, results: Sequence[Result]) -> str:
    found = [result for result in results if result.check.group == group]
    if not found:
        return ""
    rows = []
    for result in found:
        first = next((each for each in result.findings if each.status == result.status), result.findings[0])
        rows.append(
            f'<tr><td class="status {result.status.partition(" ")[0]}">{escape(result.status)}</td>'
            f'<td>{escape(result.check.name)}</td><td class="sentence">{escape(result.check.sentence)} '
            f'<span class="dim">{escape(first.what if result.status != "holds" else "")}</span></td>'
            f'<td class="number">{result.num_cases or ""}</td></tr>'
        )
    return f'<tr class="group"><th colspan="4">{group}</th></tr>{"".join(rows)}'


def _plots(result: Result, finding: Finding) -> str:
    curve, histogram = finding.evidence.get("by position"), finding.evidence.get("histogram")
    if not curve or not histogram:
        return ""
    name = escape(result.check.name)
    return (
        f"<figure>{by_position(curve)}<figcaption>{name}: largest (line) and mean (dots) error by position, "
        f"in nats</figcaption></figure><figure>{distribution(histogram)}<figcaption>{name}: tokens "
        "by error</figcaption></figure>"
    )


def by_position(curve: Sequence[Sequence[float]]) -> str:
    """SVG of [position, mean error, largest error], errors on a logarithmic scale."""
    first, last = curve[0][0], curve[-1][0]

    def x(position: float) -> float:
        return LEFT + (position - first) / max(last - first, 1) * (WIDTH - LEFT - 16)

    def y(error: float) -> float:
        decade = min(max(math.log10(max(error, 1e-12)), LOWEST), HIGHEST)
        return TOP + (HIGHEST - decade) / (HIGHEST - LOWEST) * (HEIGHT - TOP - BOTTOM)

    parts = [_open("error by position")]
    for decade in range(LOWEST, HIGHEST + 1, 2):
        height = y(10.0**decade)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - 16}" y1="{height:.1f}" y2="{height:.1f}" '
                     'stroke="currentColor" stroke-opacity=".15"/>')  # fmt: skip
        parts.append(_text(LEFT - 6, height + 5, f"1e{decade}", "end"))
    for position in sorted({first, round((first + last) / 2), last}):
        parts.append(_text(x(position), HEIGHT - BOTTOM + 18, f"{position:g}", "middle"))
    line = " ".join(f"{x(position):.1f},{y(largest):.1f}" for position, _, largest in curve)
    parts.append(f'<polyline points="{line}" fill="none" stroke="var(--first)" stroke-width="2"/>')
    for position, mean, largest in curve:
        title = f"<title>position {position:g}: mean {mean:.2e}, largest {largest:.2e}</title>"
        parts.append(
            f'<circle cx="{x(position):.1f}" cy="{y(mean):.1f}" r="3" fill="var(--second)">{title}</circle>'
        )
    return "".join([*parts, _text(WIDTH / 2, HEIGHT - 4, "position", "middle"), "</svg>"])


def distribution(histogram: Sequence[Sequence[float]]) -> str:
    """SVG of [upper edge, count]: a bar for each decade."""
    most = max([count for _, count in histogram] + [1])
    step = (WIDTH - LEFT - 16) / len(histogram)
    parts = [_open("number of tokens by error")]
    for i, (edge, count) in enumerate(histogram):
        height = count / most * (HEIGHT - TOP - BOTTOM - 16)
        left, top = LEFT + i * step, HEIGHT - BOTTOM - height
        parts.append(f'<rect x="{left + 3:.1f}" y="{top:.1f}" width="{step - 6:.1f}" height="{height:.1f}" '
                     'fill="var(--first)"/>')  # fmt: skip
        label = f"{edge:.0e}".replace("e-0", "e-").replace("e+0", "e") if i + 1 < len(histogram) else "more"
        parts.append(_text(left + step / 2, HEIGHT - BOTTOM + 18, label, "middle"))
        if count:
            parts.append(_text(left + step / 2, top - 4, f"{count:g}", "middle"))
    below = _text(WIDTH / 2, HEIGHT - 4, "error below, in nats", "middle")
    return "".join([*parts, below, "</svg>"])


def _open(title: str) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" font-size="14" font-family="system-ui, sans-serif" '
        f'fill="currentColor"><title>{title}</title>'
    )


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
