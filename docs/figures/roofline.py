"""The roofline of one H200 with measured steps: rate of operations over operations per byte, log scales."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from diptych.shared.tools.bench.step_cost import Ceilings
from docs.figures.svg import HUES, NARROW, WIDE, Svg, figure, views
from docs.figures.timelines import load

X_RANGE, Y_RANGE = (0.8, 20_000.0), (2.0, 2000.0)
HEIGHT = 380
NAMED = "Qwen3-8B"
"""The model whose points have labels."""
LABELS = {"1": (-6, 20, "end"), "prefill": (0, 20, "mid")}
"""Where a label does not go to the right of its point: its offset and class."""


class Point(NamedTuple):
    """A measured step. intensity: operations per byte; rate: TFLOP/s."""

    shape: str
    name: str
    intensity: float
    rate: float


def ceilings() -> Ceilings:
    """Of the run that measured the decode steps."""
    (rates,) = load("steps")["ceilings"].values()
    return Ceilings(rates["bytes_per_s"], rates["flops_per_s"])


def points() -> list[Point]:
    """Decode steps, and the largest prefill step of a model of 8B."""
    decode = [(r, f"{r['batch_size']}") for r in load("steps")["results"]]
    prompts = [r for r in load("prefill")["results"] if r["model"] == NAMED]
    longest = max(prompts, key=lambda r: r["num_new_tokens"])
    return [point(result, name) for result, name in [*decode, (longest, "prefill")]]


def point(result: dict[str, Any], name: str) -> Point:
    intensity = result["flops"] / (result["weight_bytes"] + result["kv_bytes"])
    return Point(result["model"], name, intensity, result["flops_per_s"] / 1e12)


class Plane:
    def __init__(self, svg: Svg, left: float, top: float) -> None:
        self.svg, self.left, self.top = svg, left, top
        self.width, self.height = svg.width - left - 1, HEIGHT - top

    def x(self, value: float) -> float:
        low, high = X_RANGE
        return self.left + math.log(value / low) / math.log(high / low) * self.width

    def y(self, value: float) -> float:
        low, high = Y_RANGE
        return self.top + (1 - math.log(value / low) / math.log(high / low)) * self.height

    def grid(self) -> None:
        for value in (1, 10, 100, 1000, 10_000):
            self.svg.line(self.x(value), self.top, self.x(value), self.top + self.height, "axis")
            self.svg.text(self.x(value), HEIGHT + 17, f"{value:,}", "s mid")
        for value in (10, 100, 1000):
            self.svg.line(self.left, self.y(value), self.left + self.width, self.y(value), "axis")
            self.svg.text(self.left - 5, self.y(value) + 4, f"{value:,}", "s end")
        self.svg.text(0, 13, "TFLOP/s", "s")
        self.svg.text(self.left + self.width, HEIGHT + 36, "operations per byte", "s end")


def draw(width: int) -> Svg:
    svg = Svg(width)
    plane, roof = Plane(svg, 48, 22), ceilings()
    plane.grid()
    ridge = roof.matrix_rate / roof.bandwidth
    first = Y_RANGE[0] * 1e12 / roof.bandwidth
    corners = (max(first, X_RANGE[0]), ridge, X_RANGE[1])
    line = [(plane.x(x), plane.y(min(x * roof.bandwidth, roof.matrix_rate) / 1e12)) for x in corners]
    svg.path(line, "roof")
    svg.text(
        plane.x(0.95),
        plane.y(60 if width == WIDE else 150),
        f"{roof.bandwidth / 1e12:.2f} TB/s",
        "b",
    )
    svg.text(plane.x(19_000), plane.y(950), f"{roof.matrix_rate / 1e12:.0f} TFLOP/s", "b end")
    found = points()
    shapes = list(dict.fromkeys(each.shape for each in found))
    for hue, shape in zip(HUES, shapes):
        own = [each for each in found if each.shape == shape]
        decode = [(plane.x(each.intensity), plane.y(each.rate)) for each in own if each.name != "prefill"]
        svg.path(decode, f"l{hue}")
        for each in own:
            svg.dot(plane.x(each.intensity), plane.y(each.rate), 4.5, f"s{hue}")
        if shape == NAMED:
            for each in own:
                right, below, cls = LABELS.get(each.name, (8, 14, ""))
                svg.text(plane.x(each.intensity) + right, plane.y(each.rate) + below, each.name, cls)
    svg.legend(HEIGHT + 48, [(f"s{hue}", shape) for hue, shape in zip(HUES, shapes)])
    return svg


def make() -> str:
    steps = ", ".join(f"{each.shape} {each.name}: {each.rate:.0f} TFLOP/s" for each in points())
    label = f"Measured steps below the roofline. {steps}."
    caption = (
        "Steps of the optimized panel on one H200: decode steps with 1,024 tokens of context, and one prompt "
        "of 8,192 tokens. A step at the slope is bound by the memory bandwidth, one at the flat part by the "
        "GEMM rate. Numbers: requests of a decode step of Qwen3-8B. More requests do more operations with "
        "the same weights, so the points move up and to the right."
    )
    return figure(views(label, draw(WIDE), draw(NARROW)), caption)
