"""Reports a comparison of two precisions: sentences, table rows and an HTML page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment

from diptych.shared.tools.conformance.diff.curve_chart import Curve, curve_chart
from diptych.shared.tools.conformance.diff.outcome import layer_of
from diptych.shared.tools.conformance.diff.precision import Precision, pattern_of
from diptych.shared.tools.conformance.diff.token_choice import Choice, TokenErrors

PAGE = "report.html"
NUM_BEFORE = 8  # tokens of the text that are shown before a choice


class LayerRow(NamedTuple):
    layer: int
    accumulated: float
    own: float
    added: float
    worst_op: str
    worst_error: float


class ChoiceTable(NamedTuple):
    heading: str
    place: str
    before: str  # the end of the text so far
    # Token, A's and B's probability (None: not reported), the sides of which it is the best token: "A", "B",
    # "A, B" or "".
    rows: list[tuple[str, float | None, float | None, str]]


def layer_rows(found: Precision) -> list[LayerRow]:
    rows = []
    for layer, own in found.own_layers.items():
        op = found.worst_op(layer)
        number = layer_of(layer)
        assert number is not None
        rows.append(
            LayerRow(
                number,
                found.accumulated[layer].value,
                own.value,
                found.added[layer].value if layer in found.added else 0.0,
                pattern_of(op) if op is not None else "",
                found.own_ops[op].value if op is not None else 0.0,
            )
        )
    return rows


def token_rows(tokens: TokenErrors) -> list[tuple[str, str]]:
    """(label, text): a summary of the errors of the logits."""
    of_a, of_b = tokens.perplexity
    count = len(tokens.choices)
    rows = [
        ("KL divergence", f"mean {tokens.mean_kl:.2e}, largest {tokens.largest.kl:.2e} nats")
        if tokens.largest is not None
        else ("KL divergence", "no position"),
        ("same best token", f"{tokens.same_best:.2%} of {count} positions"),
        ("perplexity", f"A {of_a:.4f}, B {of_b:.4f} ({of_b / of_a - 1:+.2%})"),
    ]
    first = tokens.first_other
    if first is None or not first.is_answer:
        num_answer = sum(choice.is_answer for choice in tokens.choices)
        rows.append(("greedy answers", f"B chooses all {num_answer} tokens of A's answers"))
    return rows


def choice_tables(tokens: TokenErrors, texts: Sequence[Sequence[int]], tokenizer: Any) -> list[ChoiceTable]:
    """The first position at which the best token differs, and the one with the largest KL divergence.
    `tokenizer` may be None."""
    found = []
    first, largest = tokens.first_other, tokens.largest
    if first is not None:
        where = "A's answers" if first.is_answer else "the prompts"
        found.append(_choice_table(f"First other best token, in {where}", first, texts, tokenizer))
    if largest is not None and largest.kl > 0 and largest is not first:
        found.append(_choice_table("Largest KL divergence", largest, texts, tokenizer))
    return found


def _choice_table(
    heading: str, choice: Choice, texts: Sequence[Sequence[int]], tokenizer: Any
) -> ChoiceTable:
    def text_of(ids: Sequence[int]) -> str:
        return repr(tokenizer.decode(list(ids))) if tokenizer is not None else " ".join(map(str, ids))

    rows: list[tuple[str, float | None, float | None, str]] = []
    for row in choice.top:
        best = ", ".join(label for label, token in zip("AB", choice.best) if token == row.token_id)
        rows.append((f"{text_of([row.token_id])} ({row.token_id})", row.a, row.b, best))
    before = texts[choice.text][: choice.position + 1][-NUM_BEFORE:]
    place = f"prompt-{choice.text}, after position {choice.position}; KL divergence {choice.kl:.2e}"
    return ChoiceTable(heading, place, text_of(before), rows)


def write_precision_report(
    found: Precision, folder: Path, facts: Mapping[str, str], choices: Sequence[ChoiceTable]
) -> Path:
    """Write the page and return its path. `facts`: what was compared, for the page's head."""
    folder.mkdir(parents=True, exist_ok=True)
    page = folder / PAGE
    page.write_text(render(found, facts, choices), encoding="utf-8")
    return page


def render(found: Precision, facts: Mapping[str, str], choices: Sequence[ChoiceTable]) -> str:
    rows = layer_rows(found)
    curves = [
        Curve("output, errors accumulated", "first", [row.accumulated for row in rows]),
        Curve("output, from A's input", "second", [row.own for row in rows]),
        Curve("what the layer adds, from A's input", "third", [row.added for row in rows]),
    ]
    worst = found.worst_layer
    layers = curve_chart(
        "relative error of each layer", "layer", curves, None if worst is None else layer_of(worst)
    )
    kls = Curve("KL divergence", "first", [choice.kl for choice in found.tokens.choices])
    patterns, cells = _heat(found)
    template = Environment(autoescape=True).from_string(TEMPLATE)
    return template.render(
        title="diptych diff: precision", sentence=found.sentence(), facts=facts, rows=rows, curves=curves,
        layers=layers, tokens=token_rows(found.tokens), choices=choices, patterns=patterns, cells=cells,
        positions=curve_chart("KL divergence of each position", "position of the texts, in order", [kls]),
    )  # fmt: skip


def _heat(found: Precision) -> tuple[list[str], list[tuple[str, list[tuple[float, float]]]]]:
    """The ops with an error, and for each layer (error, its share of the largest)."""
    inside = {op: mean.value for op, mean in found.own_ops.items() if layer_of(op) is not None}
    patterns = list(dict.fromkeys(pattern_of(op) for op, error in inside.items() if error > 0))
    largest = max(inside.values(), default=0.0) or 1.0
    cells = []
    for layer in found.own_layers:
        errors = [inside.get(f"{layer}.{pattern}", 0.0) for pattern in patterns]
        cells.append((str(layer_of(layer)), [(error, error / largest) for error in errors]))
    return patterns, cells


STYLE = """\
  :root { color-scheme: light dark; --first: #1565c0; --second: #c62828; --third: #2e7d32; --line: #8884; }
  @media (prefers-color-scheme: dark) { :root { --first: #90caf9; --second: #ef9a9a; --third: #a5d6a7; } }
  body { font-family: sans-serif; max-width: 52rem; margin: 1.5rem auto; padding: 0 1rem; line-height: 1.45; }
  h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
  .wide { overflow-x: auto; }
  table { border-collapse: collapse; margin: 0.5rem 0; }
  td, th { text-align: left; padding: 0.2rem 0.9rem 0.2rem 0; vertical-align: top; }
  th { font-weight: normal; opacity: 0.75; }
  .facts th { white-space: nowrap; } .facts td { overflow-wrap: anywhere; }
  .number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
  .verdict { border-left: 4px solid var(--second); padding: 0.4rem 0.8rem; }
  .heat td { padding: 0.25rem 0.5rem; text-align: right; }
  .heat .name { writing-mode: vertical-rl; transform: rotate(180deg); white-space: nowrap; }
  .wide code { white-space: pre; }
  .bars { min-width: 6rem; }
  .bar { display: block; height: 0.4rem; min-width: 1px; }
  .bar.first { background: var(--first); } .bar.second { background: var(--second); }
  svg { width: 100%; max-width: 44rem; height: auto; font: 11px sans-serif; fill: currentColor; }
  svg .grid { stroke: var(--line); } svg .marked { stroke: var(--second); stroke-dasharray: 4 3; }
  svg g { stroke-width: 1.5; }
  svg .first { stroke: var(--first); fill: var(--first); }
  svg .second { stroke: var(--second); fill: var(--second); }
  svg .third { stroke: var(--third); fill: var(--third); }
  .key span { display: inline-block; margin-right: 1.2rem; }
  .key b { display: inline-block; width: 1.2rem; border-top: 3px solid; vertical-align: middle; }
  .key .first b { color: var(--first); } .key .second b { color: var(--second); }
  .key .third b { color: var(--third); }
"""

HEAD = (
    """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title>
<style>
"""
    + STYLE
    + """\
</style>
</head>
<body>
<h1>{{ title }}</h1>
<p class="verdict">{{ sentence }}</p>
<table class="facts">
{% for name, value in facts.items() %}<tr><th>{{ name }}</th><td>{{ value }}</td></tr>
{% endfor %}</table>
"""
)

CHOICES = """\
{% for table in choices %}
<h2>{{ table.heading }}</h2>
<p>{{ table.place }}. The text so far ends with <code>{{ table.before }}</code>.</p>
<div class="wide"><table>
<tr><th>next token</th><th class="number">A</th><th class="number">B</th><th>best of</th><th></th></tr>
{% for token, a, b, best in table.rows %}<tr><td><code>{{ token }}</code></td>
<td class="number">{{ "–" if a is none else "%.4f" | format(a) }}</td>
<td class="number">{{ "–" if b is none else "%.4f" | format(b) }}</td><td>{{ best }}</td>
<td class="bars"><span class="bar first" style="width: {{ "%.1f" | format(100 * (a or 0)) }}%"></span>
<span class="bar second" style="width: {{ "%.1f" | format(100 * (b or 0)) }}%"></span></td></tr>
{% endfor %}</table></div>
{% endfor %}
"""

TEMPLATE = (
    HEAD
    + """\
<h2>Relative error of each layer</h2>
{{ layers | safe }}
<p class="key">{% for curve in curves %}<span class="{{ curve.css_class }}"><b></b> {{ curve.label }}</span>
{% endfor %}</p>
<div class="wide"><table>
<tr><th class="number">layer</th><th class="number">accumulated</th><th class="number">from A's input</th>
<th class="number">of what it adds</th><th>op that loses most</th><th class="number">its error</th></tr>
{% for row in rows %}<tr><td class="number">{{ row.layer }}</td>
<td class="number">{{ "%.2e" | format(row.accumulated) }}</td>
<td class="number">{{ "%.2e" | format(row.own) }}</td><td class="number">{{ "%.2e" | format(row.added) }}</td>
<td><code>{{ row.worst_op }}</code></td><td class="number">{{ "%.2e" | format(row.worst_error) }}</td></tr>
{% endfor %}</table></div>
{% if patterns %}
<h2>Error of each op, from A's input</h2>
<p>In percent. Ops without any error are left out.</p>
<div class="wide"><table class="heat">
<tr><th>layer</th>
{% for pattern in patterns %}<th><code class="name">{{ pattern }}</code></th>{% endfor %}</tr>
{% for layer, errors in cells %}<tr><th>{{ layer }}</th>{% for error, share in errors %}
<td style="background: rgba(198, 40, 40, {{ "%.2f" | format(0.6 * share) }})">
{{- "%.2f" | format(100 * error) }}</td>
{% endfor %}</tr>
{% endfor %}</table></div>
{% endif %}
<h2>Next tokens</h2>
<table class="facts">
{% for name, value in tokens %}<tr><th>{{ name }}</th><td>{{ value }}</td></tr>
{% endfor %}</table>
{{ positions | safe }}
"""
    + CHOICES
    + "</body>\n</html>\n"
)
