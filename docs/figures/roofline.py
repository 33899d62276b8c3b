"""The roofline of one H200 with measured steps: rate of operations over operations per byte, log scales."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

import torch

from docs.figures.svg import HUES, NARROW, WIDE, Svg, figure, views
from docs.figures.tables import FOLDER, number, read_table
from shared.bench.step_cost import Ceilings, StepCost, step_cost
from shared.config.hf_config import read_config
from shared.loading.model_path import resolve_model_path

X_RANGE, Y_RANGE = (0.8, 20_000.0), (2.0, 2000.0)
HEIGHT = 380


class Point(NamedTuple):
    """A measured step. intensity: operations per byte; rate: TFLOP/s."""

    shape: str
    name: str
    intensity: float
    rate: float


def ceilings() -> Ceilings:
    """Of the run that measured the steps, as its page says."""
    text = (FOLDER / "steps.md").read_text(encoding="utf-8")
    match = re.search(r"Memory ([\d.]+) TB/s and GEMM ([\d.]+) TFLOP/s in this run", text)
    assert match is not None
    return Ceilings(float(match[1]) * 1e12, float(match[2]) * 1e12)


def points() -> list[Point]:
    found = []
    for row in read_table("steps.md", "shape"):
        batch, context = int(row["batch"]), int(row["context"])
        cost = cost_of(row["shape"], [context] * batch, [1] * batch)
        found.append(point(row["shape"], f"{batch}", cost, number(row["step, ms"])))
    text = (FOLDER / "steps.md").read_text(encoding="utf-8")
    prefill = re.search(r"8,192 tokens of one request, (\S+): ([\d.]+) ms", text)
    assert prefill is not None
    cost = cost_of(prefill[1], [8192], [8192])
    return [*found, point(prefill[1], "prefill", cost, float(prefill[2]))]


def cost_of(shape: str, seq_lens: list[int], extend_seq_lens: list[int]) -> StepCost:
    config = read_config(resolve_model_path(shape, "dummy"))
    return step_cost(config, seq_lens, extend_seq_lens, torch.bfloat16)


def point(shape: str, name: str, cost: StepCost, ms: float) -> Point:
    return Point(shape, name, cost.flops / cost.num_bytes, cost.flops / ms / 1e9)


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
        if shape == "Qwen3-8B":
            for each in own:
                below = 20 if each.name == "prefill" else 14
                cls = "mid" if each.name == "prefill" else ""
                x = plane.x(each.intensity) + (0 if cls else 8)
                svg.text(x, plane.y(each.rate) + below, each.name, cls)
    svg.legend(HEIGHT + 48, [(f"s{hue}", shape) for hue, shape in zip(HUES, shapes)])
    return svg


def make() -> str:
    steps = ", ".join(f"{each.shape} {each.name}: {each.rate:.0f} TFLOP/s" for each in points())
    label = f"Measured steps below the roofline. {steps}."
    caption = (
        "Steps of the optimized panel on one H200, from the tables of decode and prefill steps. A step at "
        "the slope is bound by the memory bandwidth, one at the flat part by the GEMM rate. Numbers: "
        "requests of a decode step of Qwen3-8B; prefill is one prompt of 8,192 tokens. More requests do more "
        "operations with the same weights, so the points move up and to the right."
    )
    return figure(views(label, draw(WIDE), draw(NARROW)), caption)
