"""Reports a comparison of two servers: table rows and an HTML page."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment

from diptych.shared.tools.conformance.diff.curve_chart import Curve, curve_chart
from diptych.shared.tools.conformance.diff.precision_report import (
    CHOICES,
    HEAD,
    NUM_BEFORE,
    PAGE,
    ChoiceTable,
)
from diptych.shared.tools.conformance.diff.server_diff import Compared, ServerDiff

NUM_SHOWN = 5  # best tokens of each side


def rows(found: ServerDiff) -> list[tuple[str, str]]:
    """(label, text) for people."""
    worst = found.worst
    limit = found.tolerance
    lines = [("positions", f"{len(found.positions)}, {len(found.errors)} of them with an error")]
    if worst is not None:
        where = f"prompt-{worst.text}, position {worst.position}"
        lines.append(("largest error", f"{worst.error:.2e} nats, allowed {worst.allowed:.2e} ({where})"))
        lines.append(("mean error", f"{found.mean_error:.2e} nats, allowed {2 * limit.mean_error:.2e}"))
    lines.append(("beyond", f"{len(found.beyond)} positions"))
    choices = f"same {found.num('same')}, near ties {found.num('near tie')}, other {found.num('other')}"
    return [*lines, ("best tokens", choices)]


def choice_tables(found: ServerDiff, tokenizer: Any) -> list[ChoiceTable]:
    """The first divergence of greedy text and the largest error, side by side."""
    tables = []
    if found.first_other is not None:
        where = "A's answers" if found.first_other.is_answer else "the prompts"
        heading = f"First other best token, in {where}"
        tables.append(_table(heading, found.first_other, found, tokenizer))
    if found.worst is not None and found.worst.error and found.worst is not found.first_other:
        tables.append(_table("Largest error", found.worst, found, tokenizer))
    return tables


def _table(heading: str, one: Compared, found: ServerDiff, tokenizer: Any) -> ChoiceTable:
    table: list[tuple[str, float | None, float | None, str]] = []
    best_of = [sorted(side.top, key=side.top.__getitem__, reverse=True) for side in (one.a, one.b)]
    for token in dict.fromkeys([*best_of[0][:NUM_SHOWN], *best_of[1][:NUM_SHOWN]]):
        of_a, of_b = (math.exp(side.top[token]) if token in side.top else None for side in (one.a, one.b))
        best = ", ".join(label for label, side in zip("AB", (one.a, one.b)) if side.best == token)
        table.append((f"{tokenizer.decode([token])!r} ({token})", of_a, of_b, best))
    before = found.texts[one.text][: one.position + 1][-NUM_BEFORE:]
    error = "" if one.error is None else f"; error {one.error:.2e}, allowed {one.allowed:.2e}"
    place = f"prompt-{one.text}, after position {one.position}{error}"
    return ChoiceTable(heading, place, repr(tokenizer.decode(before)), table)


def write_server_report(
    found: ServerDiff, folder: Path, facts: Mapping[str, str], choices: list[ChoiceTable]
) -> Path:
    """Write the page and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    curves = [
        Curve("error", "first", [one.error or 0.0 for one in found.positions]),
        Curve("allowed", "second", [one.allowed for one in found.positions]),
    ]
    first = found.first_other
    chart = curve_chart(
        "error of each position", "position of the texts, in order", curves,
        None if first is None else found.positions.index(first),
    )  # fmt: skip
    page = folder / PAGE
    template = Environment(autoescape=True).from_string(TEMPLATE)
    text = template.render(
        title="diptych diff: servers", sentence=found.sentence(), facts=facts, rows=rows(found),
        chart=chart, curves=curves, choices=choices,
    )  # fmt: skip
    page.write_text(text, encoding="utf-8")
    return page


TEMPLATE = (
    HEAD
    + """\
<h2>Errors of log-probabilities</h2>
<table class="facts">
{% for name, value in rows %}<tr><th>{{ name }}</th><td>{{ value }}</td></tr>
{% endfor %}</table>
{{ chart | safe }}
<p class="key">{% for curve in curves %}<span class="{{ curve.css_class }}"><b></b> {{ curve.label }}</span>
{% endfor %}</p>
"""
    + CHOICES
    + "</body>\n</html>\n"
)
