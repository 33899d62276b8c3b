"""Pictures as SVG inside a page: colours and fonts come from docs/stylesheets/figures.css, by class name."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise
from pathlib import Path

WIDE, NARROW = 680, 340
"""Widths of the two views of a picture that needs them. A phone shows the narrow one, so that text is not
scaled down."""

STYLES = Path(__file__).parents[1] / "stylesheets" / "figures.css"

HUES = ("a", "b", "c", "d", "e")
"""Class names of the colours: `fa` is a light fill for text, `sa` a strong one, `la` a line."""


@dataclass
class Svg:
    """A drawing. x and widths are percents of the width of the page, or pixels of a view with a
    fixed `width`; y and heights are pixels. The height grows with what is drawn."""

    width: int = 0
    height: float = 0
    parts: list[str] = field(default_factory=list)

    def x(self, value: float) -> str:
        return num(value) if self.width else f"{round(value, 2):g}%"

    def rect(self, x: float, y: float, width: float, height: float, cls: str, radius: float = 3) -> None:
        size = f'width="{self.x(width)}" height="{num(height)}"'
        round_by = "" if radius == 3 else f' rx="{num(radius)}"'  # 3: by the stylesheet
        self.parts.append(f'<rect class="{cls}" x="{self.x(x)}" y="{num(y)}" {size}{round_by}/>')
        self.height = max(self.height, y + height + 1)

    def text(self, x: float, y: float, text: str, cls: str = "") -> None:
        """y: the baseline. Classes: m monospaced, s soft, b bold, mid and end for the anchor."""
        cls = f' class="{cls}"' if cls else ""
        self.parts.append(f'<text{cls} x="{self.x(x)}" y="{num(y)}">{escape(text)}</text>')
        self.height = max(self.height, y + 5)

    def line(self, x1: float, y1: float, x2: float, y2: float, cls: str = "line") -> None:
        ends = f'x1="{self.x(x1)}" y1="{num(y1)}" x2="{self.x(x2)}" y2="{num(y2)}"'
        self.parts.append(f'<line class="{cls}" {ends}/>')

    def path(self, points: list[tuple[float, float]], cls: str) -> None:
        for start, end in pairwise(points):
            self.line(*start, *end, cls)

    def dot(self, x: float, y: float, radius: float, cls: str) -> None:
        self.parts.append(f'<circle class="{cls}" cx="{self.x(x)}" cy="{num(y)}" r="{num(radius)}"/>')

    def legend(self, y: float, entries: list[tuple[str, str]]) -> float:
        """Coloured squares (class, text) from left to right, in rows. Returns the next free y."""
        x = 0.0
        for cls, text in entries:
            needed = 20 + 7.6 * len(text) + 1.5 * sum(c.isupper() or c.isdigit() for c in text) + 14
            if x and x + needed - 14 > self.width:
                x, y = 0.0, y + 20
            self.rect(x, y, 13, 13, cls)
            self.text(x + 19, y + 11.5, text)
            x += needed
        return y + 26

    def html(self, cls: str, label: str) -> str:
        """A single line, so that Markdown leaves it as it is. label: its first sentence is the title, which
        browsers also show under the pointer; the others are the description."""
        title, _, more = label.partition(". ")
        desc = f"<desc>{escape(more)}</desc>" if more else ""
        size = f'height="{num(self.height)}"'
        if self.width:
            size += f' viewBox="0 0 {self.width} {num(self.height)}" width="{self.width}"'
        head = f'<svg class="{cls}" role="img" {size} xmlns="http://www.w3.org/2000/svg">'
        return f"{head}<title>{escape(title)}</title>{desc}{''.join(self.parts)}</svg>"


def standalone(svg: Svg, label: str) -> str:
    """A file of its own, for README.md: with the stylesheet, and dark where the reader's system is."""
    rules = STYLES.read_text(encoding="utf-8")
    rules = re.sub(r"/\*.*?\*/", "", rules.partition("/* Steps of a picture")[0], flags=re.DOTALL)
    dark = re.search(r'\[data-md-color-scheme="slate"\] \{(.*?)\}', rules, re.DOTALL)
    assert dark is not None
    rules = rules.replace(dark[0], f"@media (prefers-color-scheme: dark) {{ :root {{{dark[1]}}} }}")
    rules = rules.replace(".picture ", "") + ".file { background: var(--paper); }"
    style = f"<style>{' '.join(rules.split())}</style>"
    inside = f'<g transform="translate(16 16)">{"".join(svg.parts)}</g>'
    framed = Svg(svg.width + 32, svg.height + 32, [inside])
    return framed.html("file", label).replace("</desc>", "</desc>" + style, 1) + "\n"


def num(value: float) -> str:
    """At most one decimal place: short, and the same on every computer."""
    return f"{round(value, 1):g}" if abs(value) < 1e5 else str(round(value))


def views(label: str, wide: Svg, narrow: Svg) -> str:
    """label: what a person who cannot see the picture needs to know."""
    return wide.html("wide", label) + "\n" + narrow.html("narrow", label)


def figure(body: str, caption: str, cls: str = "") -> str:
    """caption: HTML."""
    cls = f"picture {cls}".strip()
    return f'<figure class="{cls}">\n{body}\n<figcaption>{caption}</figcaption>\n</figure>\n'


def slider(steps: list[tuple[str, str]], caption: str) -> str:
    """Steps (picture, text): one below the other, and with JavaScript one at a time
    (docs/javascripts/steps.js)."""
    body = "\n".join(
        f'<div class="step">\n<p><b>Step {i} of {len(steps)}.</b> {escape(text)}</p>\n{picture}\n</div>'
        for i, (picture, text) in enumerate(steps, start=1)
    )
    return figure(body, caption, "steps")
