"""Timelines of recorded runs: steps of the CPU and of the GPU over time."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from docs.figures.blocks import boxes, legend
from docs.figures.svg import Svg, figure
from docs.generators.measured import load

CPU_CLASSES = {
    "schedule": "fa",
    "prepare": "fa",
    "launch": "sa",
    "wait for tokens": "r0",
    "process results": "fc",
    "detokenise": "fc",
}
Bar = tuple[str, float, float]
"""(class, start, end), in milliseconds."""


class Axis:
    """Milliseconds from `start` to `end`, drawn from the left edge to the right one."""

    def __init__(self, svg: Svg, start: float, end: float) -> None:
        self.svg, self.start, self.end = svg, start, end

    def x(self, ms: float) -> float:
        inside = min(max(ms, self.start), self.end)
        return 100 * (inside - self.start) / (self.end - self.start)

    def bars(self, y: float, height: float, bars: list[Bar]) -> None:
        for cls, start, end in bars:
            left, right = self.x(start), self.x(end)
            if right - left > 0.05:
                self.svg.rect(left, y, right - left, height, cls, 1)

    def scale(self, y: float, step: float) -> float:
        """Ticks with their time since the start of the window. Returns the next free y."""
        self.svg.line(0, y, 100, y, "axis")
        ms = 0.0
        while ms <= self.end - self.start:
            x = self.x(self.start + ms)
            self.svg.line(x, y, x, y + 5, "axis")
            anchor = "" if ms == 0 else "end" if x > 96 else "mid"
            self.svg.text(x, y + 19, f"{ms:g} ms" if ms == 0 else f"{ms:g}", f"s {anchor}".strip())
            ms += step
        return y + 30


def first_decode_steps(window: float = 15.5) -> Svg:
    """Normal against overlap, both on the same scale."""
    svg, y = Svg(), 14.0
    titles = ("Normal scheduling", "Overlap scheduling")
    for lag, (run, title) in enumerate(zip(load("overlap")["runs"], titles)):
        launches = [bar for bar in run["cpu"] if bar[0] == "launch"]
        start = launches[0][1] - 2.4
        axis = Axis(svg, start, start + window)
        svg.text(0, y, title, "h")
        svg.text(0, y + 22, "CPU")
        cpu = y + 28
        axis.bars(cpu, 22, [(CPU_CLASSES[name], begin, end) for name, begin, end, *_ in run["cpu"]])
        gpu = cpu + 58
        svg.text(0, gpu - 6, "GPU")
        axis.bars(gpu, 22, [("fb" if i % 2 else "fe", bar[1], bar[2]) for i, bar in enumerate(run["gpu"])])
        # With overlap a pass is in progress when the next one is launched.
        passes = [bar for bar in run["gpu"] if bar[1] >= launches[0][1]][lag:]
        for launch, forward in zip(launches, passes):
            if forward[1] < axis.end:
                middle = axis.x((launch[1] + launch[2]) / 2)
                svg.path([(middle, cpu + 22), (max(axis.x(forward[1]), middle), gpu)], "la")
        y = axis.scale(gpu + 28, 5) + 22
    return svg


def step_times() -> list[float]:
    """Mean milliseconds from the start of a pass to that of the next one, of both runs."""
    times = []
    for run in load("overlap")["runs"]:
        starts = [bar[1] for bar in run["gpu"]]
        times.append((starts[-1] - starts[0]) / (len(starts) - 1))
    return times


def overlap() -> str:
    before, after = step_times()
    run = load("overlap")["runs"][0]
    label = (
        "CPU and GPU over time. Normal: the GPU waits while the CPU processes results and forms the next "
        f"batch, {before:.2f} ms per step. Overlap: passes of the GPU follow one another, {after:.2f} ms per "
        "step."
    )
    caption = (
        f"Decode steps of {run['model']} with {run['num_requests']} requests on one H200, recorded by "
        f"<code>shared/timeline.py</code>. A line leads from a launch to its step. A step takes {before:.2f} "
        f"ms without overlap and {after:.2f} ms with it."
    )
    entries = [("fa", "schedule, prepare"), ("sa", "launch"), ("fc", "process results")]
    steps = [("fb", "a step of the GPU"), ("fe", "the next step")]
    return figure(first_decode_steps().html("fluid", label) + boxes(legend([*entries, *steps])), caption)


def longest_pause(run: dict[str, Any]) -> tuple[float, float]:
    """Between two tokens of the decoding request."""
    return max(pairwise(run["token_times"]), key=lambda pair: pair[1] - pair[0])


def prompt_timeline() -> Svg:
    runs = load("long-prompt")["runs"]
    svg, y = Svg(), 14.0
    start = runs[0]["arrival"] - 12
    end = max(run["first_token"] for run in runs) + 24
    for run, title in zip(runs, ("Prompt computed whole", "In chunks of 512 tokens, mixed")):
        axis = Axis(svg, start, end)
        svg.text(0, y, title, "h")
        svg.text(0, y + 22, "Steps of the GPU")
        classes = {"decode": "sb", "extend": "fc", "mixed": "fc"}
        # A thin line of the background separates steps.
        bars = [(classes[name], begin, stop - 0.8) for name, begin, stop, *_ in run["gpu"]]
        axis.bars(y + 28, 24, [bar for bar in bars if bar[2] > start])
        svg.text(0, y + 72, "Tokens of one decoding request")
        for x in (axis.x(time) for time in run["token_times"] if time < end):
            svg.line(x, y + 80, x, y + 96, "lb")
        left, right = longest_pause(run)
        middle = min((axis.x(left) + axis.x(right)) / 2, 78)
        svg.line(axis.x(left), y + 104, axis.x(right), y + 104, "ld")
        svg.text(middle, y + 120, f"longest pause {right - left:.0f} ms", "mid")
        x = axis.x(run["first_token"])
        svg.line(x, y + 26, x, y + 98, "dash")
        y = axis.scale(y + 132, 50) + 22
    return svg


def chunked_prefill() -> str:
    runs = load("long-prompt")["runs"]
    pauses = [right - left for left, right in map(longest_pause, runs)]
    waits = [run["first_token"] - run["arrival"] for run in runs]
    label = (
        f"Steps of the GPU over time. Computed whole, the prompt stops decoding for {pauses[0]:.0f} ms. In "
        f"chunks the longest pause is {pauses[1]:.0f} ms."
    )
    caption = (
        f"{runs[0]['model']} on one H200: {runs[0]['num_requests']} requests decode, and after 12 ms a "
        f"prompt of {runs[0]['long_len']:,} tokens arrives. The dashed line is its first token, "
        f"{waits[0]:.0f} ms after its arrival when it is computed whole, and {waits[1]:.0f} ms in chunks. "
        "Recorded by <code>shared/timeline.py</code>."
    )
    entries = legend([("sb", "decode"), ("fc", "prompt tokens"), ("sd", "longest pause")])
    return figure(prompt_timeline().html("fluid", label) + boxes(entries), caption)
