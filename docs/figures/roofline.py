"""The roofline of one H200 with measured steps: rate of operations over operations per byte, log scales."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from diptych.shared.tools.bench.step_cost import Ceilings
from docs.figures.blocks import boxes, legend
from docs.figures.svg import HUES, Svg, figure
from docs.generators.measured import load

X_RANGE, Y_RANGE = (0.8, 20_000.0), (2.0, 2000.0)
HEIGHT = 380
NAMED = "Qwen3-8B"
"""The model whose points have labels."""
LABELS = {"1": (-1, 20, "end"), "prefill": (0, 20, "mid")}
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


def x_of(intensity: float) -> float:
    low, high = X_RANGE
    return 100 * math.log(intensity / low) / math.log(high / low)


def y_of(rate: float) -> float:
    low, high = Y_RANGE
    return 22 + (1 - math.log(rate / low) / math.log(high / low)) * (HEIGHT - 22)


def draw() -> Svg:
    svg, roof = Svg(), ceilings()
    for value in (1, 10, 100, 1000, 10_000):
        svg.line(x_of(value), 22, x_of(value), HEIGHT, "axis")
        svg.text(x_of(value), HEIGHT + 17, f"{value:,}", "s mid")
    for value in (10, 100, 1000):
        svg.line(0, y_of(value), 100, y_of(value), "axis")
        svg.text(0, y_of(value) - 4, f"{value:,}", "s")
    svg.text(0, 13, "TFLOP/s", "s")
    svg.text(100, HEIGHT + 36, "operations per byte", "s end")
    ridge = roof.matrix_rate / roof.bandwidth
    corners = (max(Y_RANGE[0] * 1e12 / roof.bandwidth, X_RANGE[0]), ridge, X_RANGE[1])
    svg.path([(x_of(x), y_of(min(x * roof.bandwidth, roof.matrix_rate) / 1e12)) for x in corners], "roof")
    svg.text(x_of(3), y_of(200), f"{roof.bandwidth / 1e12:.2f} TB/s", "b")
    svg.text(x_of(19_000), y_of(1000), f"{roof.matrix_rate / 1e12:.0f} TFLOP/s", "b end")
    for hue, shape in hues().items():
        own = [each for each in points() if each.shape == shape]
        decode = [(x_of(each.intensity), y_of(each.rate)) for each in own if each.name != "prefill"]
        svg.path(decode, f"l{hue}")
        for each in own:
            x, y = x_of(each.intensity), y_of(each.rate)
            svg.dot(x, y, 4.5, f"s{hue}")
            if shape == NAMED:
                right, below, cls = LABELS.get(each.name, (1.2, 14, ""))
                svg.text(x + right, y + below, each.name, cls)
    return svg


def hues() -> dict[str, str]:
    """Class of a colour -> model shape."""
    return dict(zip(HUES, dict.fromkeys(each.shape for each in points())))


def make() -> str:
    steps = ", ".join(f"{each.shape} {each.name}: {each.rate:.0f} TFLOP/s" for each in points())
    label = f"Measured steps below the roofline. {steps}."
    caption = (
        "Steps of the optimized panel on one H200: decode steps with 1,024 tokens of context, and one prompt "
        "of 8,192 tokens. A step at the slope is bound by the memory bandwidth, one at the flat part by the "
        "rate of matrix multiplications. Numbers: requests of a decode step of Qwen3-8B. More requests do "
        "more operations with the same weights, so the points move up and to the right."
    )
    shapes = legend((f"s{hue}", shape) for hue, shape in hues().items())
    return figure(draw().html("fluid", label) + boxes(shapes), caption)
