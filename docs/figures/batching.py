"""Continuous batching in a real run: every token of five requests, in the step that computed it. Animated."""

from __future__ import annotations

from dataclasses import dataclass, field

from diptych.shared.engine.llm import LLM
from diptych.shared.engine.requests.output_collector import OutputCollector
from diptych.shared.types import SamplingParams
from docs.figures.svg import NARROW, WIDE, Svg, figure, num, standalone, views

ARRIVALS = (
    (0, "What is 7 + 8?"),
    (0, "Count from 3 to 5."),
    (2, "What is 2 + 3?"),
    (4, "Count from 7 to 9."),
    (6, "What is 7 + 5?"),
)
"""(step, question)"""

MAX_RUNNING = 3
ROW = 46.0


@dataclass
class Line:
    """A request. cells: step -> (kind, text), kind one of wait, prefill, decode."""

    question: str
    num_computed: int = 0  # prompt tokens that were not in the prefix cache
    cells: dict[int, tuple[str, str]] = field(default_factory=dict)


class Run:
    def __init__(self) -> None:
        self.llm = LLM(
            "tiny-dense",
            panel="reference",
            device="cpu",
            dtype="float32",
            page_size=1,
            max_total_tokens=512,
            max_running_requests=MAX_RUNNING,
        )
        self.lines = [Line(question) for _, question in ARRIVALS]
        self.collectors: list[OutputCollector] = []

    def to_end(self) -> list[Line]:
        step = 0
        while len(self.collectors) < len(ARRIVALS) or not all(c.is_finished for c in self.collectors):
            for start, question in ARRIVALS[len(self.collectors) :]:
                if start > step:
                    break
                prompt = self.llm.chat_prompt([{"role": "user", "content": question}])
                params = SamplingParams(temperature=0, max_new_tokens=16)
                self.collectors += self.llm.submit(prompt, params)
            known = [collector.num_output_tokens for collector in self.collectors]
            self.llm.step()
            for line, collector, before in zip(self.lines, self.collectors, known):
                self.note(line, collector, before, step)
            step += 1
        return self.lines

    def note(self, line: Line, collector: OutputCollector, before: int, step: int) -> None:
        assert self.llm.tokenizer is not None
        if collector.num_output_tokens == before:
            if not collector.is_finished:
                line.cells[step] = ("wait", "")
            return
        token_id = collector.output_ids[before]
        text = self.llm.tokenizer.decode([token_id]).replace("<|im_end|>", "■").strip()
        line.cells[step] = ("decode" if before else "prefill", text or "␣")
        line.num_computed = collector.num_prompt_tokens - collector.num_cached_tokens


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
    entries = [("fc", "prefill and first token"), ("fa", "decode, one token")]
    svg.legend(bottom + (34 if is_wide else 48), entries)
    return svg


LABEL = (
    f"Five requests over time, at most {MAX_RUNNING} at a time. Each step computes a prompt, or one token of "
    "every running request. A request that waits starts when another one ends."
)


def make() -> str:
    lines = Run().to_end()
    caption = (
        "Continuous batching in a real run of the reference panel with <code>tiny-dense</code>, at most "
        f"{MAX_RUNNING} running requests. A column is one step; a dashed line is a step without a token. "
        "Prompts are computed first. Later ones have fewer tokens to compute, because their beginning is in "
        "the radix cache. ■ ends an answer."
    )
    return figure(views(LABEL, draw(lines, WIDE), draw(lines, NARROW)), caption)


def make_file() -> str:
    return standalone(draw(Run().to_end(), WIDE), LABEL)
