"""An MLP on two ranks: which part of each matrix a rank has, and the one sum."""

from __future__ import annotations

from docs.figures.svg import NARROW, WIDE, Svg, figure, views

BOXES = (
    ("x", ("all tokens,", "whole"), "f0"),
    ("W up", ("half of", "the outputs"), ""),
    ("hidden", ("half of", "the values"), ""),
    ("W down", ("half of", "the inputs"), ""),
    ("summand", ("of every", "output"), ""),
)
"""What a rank has, in the order of the computation: name, part, class; "": the color of the rank."""

HEIGHT, GAP = 64.0, 14.0


def box(svg: Svg, x: float, y: float, width: float, height: float, cls: str, lines: tuple[str, ...]) -> None:
    svg.rect(x, y, width, height, cls)
    first = y + height / 2 - 9 * (len(lines) - 1) + 5
    for i, line in enumerate(lines):
        svg.text(x + width / 2, first + 18 * i, line, "mid" if i else "b mid")


def draw_wide() -> Svg:
    svg = Svg(WIDE)
    left, width = 62.0, 88.0
    for rank, color in enumerate(("fa", "fb")):
        y = rank * (HEIGHT + 16)
        svg.text(0, y + HEIGHT / 2 + 5, f"rank {rank}", "s")
        for i, (name, part, cls) in enumerate(BOXES):
            x = left + i * (width + GAP)
            svg.line(x + width, y + HEIGHT / 2, x + width + GAP, y + HEIGHT / 2)
            box(svg, x, y, width, HEIGHT, cls or color, (name, *part))
    x = left + len(BOXES) * (width + GAP)
    box(svg, x, 0, WIDE - x - 1, 2 * HEIGHT + 16, "fc", ("sum", "over all", "ranks: y", "on each"))
    return svg


def draw_narrow() -> Svg:
    svg = Svg(NARROW)
    width = (NARROW - 17) / 2
    for rank, color in enumerate(("fa", "fb")):
        x = rank * (width + 16)
        svg.text(x + width / 2, 14, f"rank {rank}", "s mid")
        for i, (name, part, cls) in enumerate(BOXES):
            y = 22 + i * (HEIGHT + GAP)
            svg.line(x + width / 2, y + HEIGHT, x + width / 2, y + HEIGHT + GAP)
            box(svg, x, y, width, HEIGHT, cls or color, (name, *part))
    y = 22 + len(BOXES) * (HEIGHT + GAP)
    box(svg, 0, y, NARROW - 1, 44, "fc", ("sum over all ranks: y on each",))
    return svg


def make() -> str:
    label = (
        "An MLP on two ranks. Each rank has half of the outputs of the up projection and half of the inputs "
        "of the down projection. Both add their summands once, at the end."
    )
    caption = (
        "Gray is the same on both ranks. The halves of the "
        "hidden values never leave their rank; only the summands do."
    )
    return figure(views(label, draw_wide(), draw_narrow()), caption)
