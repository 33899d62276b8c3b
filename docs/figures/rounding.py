"""Weights of a real layer rounded to 4 bits: one scale for all of them, and one for each group."""

from __future__ import annotations

import torch

from diptych.shared.engine.llm import LLM
from docs.figures.five_requests import EXACT
from docs.figures.svg import Svg, figure

NAME = "model.layers.0.self_attn.o_proj.weight"
NUM_WEIGHTS, GROUP = 32, 8
LARGEST = 7  # of 4 bits, symmetric
HALF, ROW = 66.0, 176.0


def weights() -> torch.Tensor:
    """The first inputs of the output whose largest weight stands out most, float32 [NUM_WEIGHTS]."""
    llm = LLM("tiny-dense", **EXACT, max_total_tokens=64)
    weight = dict(llm.assembly.parts.model_runner.model.named_parameters())[NAME][:, :NUM_WEIGHTS]
    magnitudes = weight.abs()
    return weight[int((magnitudes.amax(1) / magnitudes.mean(1)).argmax())]


def rounded(values: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(rounded values, scale of each value)"""
    scale = values.unflatten(0, (-1, group)).abs().amax(1) / LARGEST
    by_value = scale.repeat_interleave(group)
    return (values / by_value).round() * by_value, by_value


def error(values: torch.Tensor, group: int) -> float:
    return float((rounded(values, group)[0] - values).norm() / values.norm())


def draw(values: torch.Tensor) -> Svg:
    svg = Svg()
    step = 100 / NUM_WEIGHTS
    largest = float(values.abs().max())
    for panel, group in enumerate((NUM_WEIGHTS, GROUP)):
        top = panel * ROW
        what = f"one scale for {group} weights" if panel == 0 else f"a scale for {group} weights"
        svg.text(0, top + 14, f"{what}: error {error(values, group):.0%}".replace("%", " %"), "b")
        middle = top + 26 + HALF
        found, scales = rounded(values, group)
        for start in range(0, NUM_WEIGHTS, group):
            for k in range(-LARGEST, LARGEST + 1):
                y = middle - HALF * k * float(scales[start]) / largest
                svg.line(start * step + 0.3, y, (start + group) * step - 0.3, y, "axis")
        for i, (value, near) in enumerate(zip(values.tolist(), found.tolist())):
            x, y, at = (i + 0.5) * step, middle - HALF * value / largest, middle - HALF * near / largest
            svg.dot(x, at, 3.2, "sa")
            svg.dot(x, y, 4.2, "r0")
    svg.height = 2 * ROW - 8
    return svg


def make() -> str:
    values = weights()
    label = (
        "Weights rounded to 4 bits. With one scale, the largest weight makes the steps wide, and small "
        f"weights are rounded far: error {error(values, NUM_WEIGHTS):.0%}. With a scale for {GROUP} weights "
        f"the error is {error(values, GROUP):.0%}."
    )
    caption = (
        f"{NUM_WEIGHTS} weights of <code>tiny-dense</code>, rounded to 4 bits. Circles are the weights, dots "
        "are what they become. Grey lines: the values that 4 bits can have. In a group without a large "
        "weight the steps are narrow."
    )
    return figure(draw(values).html("fluid", label), caption)
