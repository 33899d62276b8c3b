"""Continuous batching in a real run: every token of five requests, in the step that computed it. Animated."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from docs.figures.five_requests import FLAGS, recorded
from docs.figures.svg import NARROW, WIDE, Svg, figure, num, standalone, views

MAX_RUNNING = FLAGS["max_running_requests"]


@dataclass
class Line:
    """A request. cells: step -> (kind, text), kind one of wait, prefill, decode."""

    question: str
    num_computed: int = 0  # prompt tokens that were not in the prefix cache
    cells: dict[int, tuple[str, str]] = field(default_factory=dict)


def lines_of(run: dict[str, Any]) -> list[Line]:
    """What the recording of the five requests has of each."""
    lines = {each["name"]: Line(each["text"], each["prompt"] - each["cached"]) for each in run["requests"]}
    for number, step in enumerate(run["steps"]):
        without = [*step["queue"], *step["running"]]
        for name, *_ in without:
            lines[name].cells[number] = ("wait", "")
        for name, count, _ in step["rows"]:
            lines[name].cells[number] = ("prefill" if count > 1 else "decode", "")
        for name, _place, text, *_ in step["tokens"]:
            kind, _ = lines[name].cells[number]
            lines[name].cells[number] = (kind, text.replace("‹end›", "■").strip() or "␣")
    return list(lines.values())


def draw(lines: list[Line], width: int) -> Svg:
    svg = Svg(width)
    num_steps = max(max(line.cells) for line in lines) + 1
    is_wide = width == WIDE
    left, row = (154.0, 46.0) if is_wide else (0.0, 54.0)
    column = (width - left - 1) / num_steps
    inner = Svg(round(width - left))  # what the sweep uncovers
    classes = {"wait": "r0", "prefill": "fc", "decode": "fa"}
    for i, line in enumerate(lines):
        y = i * row
        svg.text(0, y + 14, line.question, "b")
        note = f"prefill: {line.num_computed} tokens"
        if is_wide:
            svg.text(0, y + 31, note, "s")
        else:
            svg.text(width - 1, y + 14, note, "s end")
        top = y + (4 if is_wide else 20)
        for step, (kind, text) in sorted(line.cells.items()):
            x = step * column
            if kind == "wait":
                inner.line(x + 2, top + 13, x + column - 2, top + 13, "dash")
                continue
            inner.rect(x + 0.5, top, column - 2, 26, classes[kind])
            inner.text(x + column / 2 - 0.5, top + 17.5, text, "m mid")
    bottom = len(lines) * row
    covers = [  # of the cells alone: the questions are always visible
        f'<rect class="cover" x="0" y="{num(i * row + (3 if is_wide else 19))}" width="{num(width - left)}" '
        f'height="28" rx="0" style="animation-timing-function:steps({num_steps},jump-start)"/>'
        for i in range(len(lines))
    ]
    svg.parts.append(
        f'<svg x="{num(left)}" y="0" width="{num(width - left)}" height="{num(bottom)}">'
        + "".join([*inner.parts, *covers])
        + "</svg>"
    )
    svg.height = bottom
    svg.line(left, bottom + 4, width - 1, bottom + 4, "axis")
    for step in range(0, num_steps, 5):
        svg.text(left + (step + 0.5) * column, bottom + 20, str(step + 1), "s mid")
    svg.text(
        0 if is_wide else width - 1, bottom + (20 if is_wide else 38), "step", "s" if is_wide else "s end"
    )
    entries = [("fc", "prefill, and the first token at its end"), ("fa", "decode, one token")]
    svg.legend(bottom + (34 if is_wide else 48), entries)
    return svg


LABEL = (
    f"Five requests over time, at most {MAX_RUNNING} at a time. Each step computes a prompt, or one token of "
    "every running request. A request that waits starts when another one ends."
)


def make() -> str:
    lines = lines_of(recorded())
    caption = (
        "Continuous batching in a real run of the reference panel with <code>tiny-dense</code>, at most "
        f"{MAX_RUNNING} running requests. A column is one step; a dashed line is a step without a token. "
        "Prompts are computed first, at most "
        f"{FLAGS['chunked_prefill_size']} tokens in a step. Later ones have fewer tokens to compute, because "
        "their beginning is in the radix cache. ■ ends an answer."
    )
    return figure(views(LABEL, draw(lines, WIDE), draw(lines, NARROW)), caption)


def make_file() -> str:
    return standalone(draw(lines_of(recorded()), WIDE), LABEL)
