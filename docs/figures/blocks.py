"""Pictures that the browser lays out: bars, chips and grids of cells, at every width. Colours are those of
docs/stylesheets/figures.css, by class name. Arguments are texts, not HTML."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import NamedTuple


class Bar(NamedTuple):
    """share, mark: of the longest bar, from 0 to 1; a mark is a line across it. soft: class "s" or ""."""

    name: str
    share: float
    text: str
    cls: str = "sa"
    soft: str = ""
    mark: float | None = None


def percent(share: float) -> str:
    return f"{100 * share:.1f}%"


def span(cls: str, text: str, style: str = "") -> str:
    shown = f' style="{style}"' if style else ""
    return f'<span class="{cls}"{shown}>{escape(text)}</span>' if cls else f"<span>{escape(text)}</span>"


def bars(rows: Iterable[Bar], cls: str = "") -> str:
    """A line for each: name, bar, text. Classes: m monospaced names; edge: the right edge has a line."""
    lines = []
    for row in rows:
        mark = "" if row.mark is None else f'<b class="mark" style="left:{percent(row.mark)}"></b>'
        bar = f'<i class="{row.cls}" style="width:{percent(row.share)}"></i>{mark}'
        name, text = (
            span(f"{kind} {row.soft}".strip(), each) for kind, each in (("name", row.name), ("end", row.text))
        )
        lines.append(f'{name}<div class="track">{bar}</div>{text}')
    return f'<div class="{f"bars {cls}".strip()}">{"".join(lines)}</div>'


def chips(items: Iterable[tuple[str, str]]) -> str:
    """(class, text) one after the other."""
    return f'<div class="chips">{"".join(span(f"chip {cls}", text) for cls, text in items)}</div>'


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """(class of a square, its meaning)"""
    squares = "".join(f'<span><i class="{cls}"></i>{text}</span>' for cls, text in entries)
    return f'<div class="legend">{squares}</div>'


def boxes(body: str) -> str:
    return f'<div class="boxes">{body}</div>'


def heading(text: str) -> str:
    return f'<p class="b">{escape(text)}</p>'


def grid(rows: Sequence[Sequence[tuple[str, ...]]]) -> str:
    """Rows of cells: arguments of `span`. The first column is as wide as its texts."""
    columns = f"grid-template-columns:max-content repeat({len(rows[0]) - 1},minmax(0,1fr))"
    cells = "".join(span(*cell) for row in rows for cell in row)
    return f'<div class="grid-of" style="{columns}">{cells}</div>'
