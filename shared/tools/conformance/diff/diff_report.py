"""Writes the result of a comparison: an HTML page, and the two tensors that differ."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from jinja2 import Environment
from safetensors.torch import save_file

from diptych.shared.tools.conformance.diff.error_chart import Series, error_chart
from diptych.shared.tools.conformance.diff.outcome import Divergence, Outcome

PAGE, TENSORS = "report.html", "divergence.safetensors"


def write_report(outcome: Outcome, folder: Path, facts: Mapping[str, str]) -> list[Path]:
    """Write the page and, if tensors diverged, the tensors. Returns the files. `facts`: what was compared,
    for the page's head. A tensors file of an earlier comparison is removed."""
    folder.mkdir(parents=True, exist_ok=True)
    page, tensors = folder / PAGE, folder / TENSORS
    page.write_text(render(outcome, facts), encoding="utf-8")
    if outcome.divergence is None or outcome.divergence.tensors is None:
        tensors.unlink(missing_ok=True)
        return [page]
    save_tensors(outcome.divergence, tensors)
    return [page, tensors]


def save_tensors(divergence: Divergence, file: Path) -> None:
    """Tensors "a" and "b" [tokens, ...] with metadata: op, steps and index; "row" is the row that diverged,
    "tokens" has the (request, position) of each row."""
    assert divergence.tensors is not None
    assert divergence.found is not None
    a, b = (tensor.contiguous().clone() for tensor in divergence.tensors)
    metadata = {
        "op": divergence.op,
        "steps": json.dumps(divergence.steps),
        "row": str(divergence.found.row),
        "index": json.dumps(divergence.found.index),
        "tokens": json.dumps(divergence.keys),
    }
    save_file({"a": a, "b": b}, file, metadata=metadata)


def summary(outcome: Outcome) -> list[str]:
    """Sentences about the comparison: how far it got, and what was not compared."""
    a, b = outcome.num_steps
    lines = [f"{outcome.num_tokens} tokens compared, in {a} steps of A and {b} of B"]
    if not outcome.finished and outcome.divergence is None:
        lines[0] += ": the limit of steps ended it"
    for label, count in zip("AB", outcome.num_one_sided):
        if count and outcome.finished:
            lines.append(f"{count} tokens were computed by {label} alone: the other had them cached")
    part = outcome.schedules_part
    if part is not None:
        where = f"the batches part at step {part.step} ({part.what})"
        lines.append(f"{where}: tokens were compared by request and position")
    for tie in outcome.near_ties:
        lines.append(f"near tie at step {tie.steps[1]}, {tie.key[0]}, position {tie.key[1]}: {tie.what}")
    for label, ops in zip("AB", outcome.one_sided_ops()):
        if ops:
            lines.append(f"only {label} has {', '.join(ops)}")
    return lines


def render(outcome: Outcome, facts: Mapping[str, str]) -> str:
    divergence = outcome.divergence
    series = [Series("largest error of any token", "#1565c0", outcome.errors)]
    marked = None
    if divergence is not None and divergence.token_errors:
        label = f"{divergence.rid}, position {divergence.position}"
        series.append(Series(label, "#c62828", divergence.token_errors))
        marked = divergence.op
    template = Environment(autoescape=True).from_string(_TEMPLATE)
    return template.render(
        facts=facts,
        divergence=divergence,
        tensors=TENSORS,
        summary=summary(outcome),
        worst=outcome.worst,
        chart=error_chart(series, marked),
    )


_TEMPLATE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>diptych diff</title>
<style>
  :root { color-scheme: light dark; }
  body { font-family: sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; line-height: 1.4; }
  table { border-collapse: collapse; margin: 0.5rem 0 1.5rem; }
  td, th { text-align: left; padding: 0.15rem 1rem 0.15rem 0; vertical-align: top; }
  th { font-weight: normal; opacity: 0.7; }
  code, pre { font-family: monospace; }
  pre, .wide { overflow-x: auto; }
  .wide td { white-space: nowrap; }
  svg { width: 100%; min-width: 40rem; height: auto; }
  .differ { color: #c62828; }
  .same { color: #2e7d32; }
</style>
</head>
<body>
<h1>diptych diff</h1>
<table>
{% for name, value in facts.items() %}<tr><th>{{ name }}</th><td>{{ value }}</td></tr>
{% endfor %}</table>
{% if divergence %}
<h2 class="differ">First divergence</h2>
<table>
{% for name, value in divergence.rows() %}<tr><th>{{ name }}</th><td>{{ value }}</td></tr>
{% endfor %}</table>
{% if divergence.found %}
<pre>from safetensors import safe_open
with safe_open("{{ tensors }}", "pt") as file:
    a, b, about = file.get_tensor("a"), file.get_tensor("b"), file.metadata()</pre>
{% endif %}
{% else %}
<h2 class="same">No divergence</h2>
{% endif %}
<ul>
{% for line in summary %}<li>{{ line }}</li>
{% endfor %}</ul>
<h2>Relative error along the model</h2>
<div class="wide">{{ chart | safe }}</div>
<h2>Largest error of each kind of op</h2>
<div class="wide"><table>
<tr><th>kind</th><th>relative error</th><th>allowed there</th><th>op</th><th>token</th></tr>
{% for kind, worst in worst.items() %}<tr>
<td>{{ kind }}</td><td>{{ "%.2e" | format(worst.ratio) }}</td><td>{{ "%.2e" | format(worst.limit) }}</td>
<td><code>{{ worst.op }}</code></td><td>{{ worst.key[0] }}, position {{ worst.key[1] }}</td>
</tr>
{% endfor %}</table></div>
</body>
</html>
"""
