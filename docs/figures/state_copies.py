"""Prompts with a common beginning: which tokens a copy of a state saves, and which ones have KV only."""

from __future__ import annotations

from docs.figures.svg import NARROW, WIDE, Svg, figure, views

GRID, SHARED = 8, 20
PROMPTS = (("prompt", 23, 0), ("the same", 23, 22), ("parts at 20", 22, SHARED), ("parts at 7", 9, 7))
"""Name, number of tokens, and how many of them have KV in the cache."""
ROW, CELL = 44.0, 18.0


def draw(width: int) -> Svg:
    svg = Svg(width)
    step = (width - 2) / max(num_tokens for _, num_tokens, _ in PROMPTS)
    copies: set[int] = set()
    for i, (name, num_tokens, num_kv) in enumerate(PROMPTS):
        top = i * ROW
        start = max((n for n in copies if n <= num_kv), default=0)
        svg.text(0, top + 12, f"{name}: {num_tokens - start} of {num_tokens} computed", "b")
        for token in range(num_tokens):
            colour = "fa" if token < start else "fb" if token < num_kv else "f0"
            svg.rect(token * step + 1, top + 18, step - 2, CELL, colour)
        if i == 0:
            copies = set(range(GRID, num_tokens + 1, GRID))
        for n in copies:
            if n <= (num_tokens if i == 0 else num_kv):
                svg.line(n * step, top + 16, n * step, top + 20 + CELL, "line")
    entries = [("fa", "from a copy of the state"), ("fb", "has KV, computed again"), ("f0", "new")]
    svg.legend(len(PROMPTS) * ROW + 4, entries)
    return svg


def make() -> str:
    label = (
        "Four prompts and the copies of states. Copies are made after 8 and after 16 tokens of the first "
        "prompt. The same prompt goes on from 16, although all but its last token have KV. One that parts at "
        "20 goes on from 16, too. One that parts at 7 begins at 0."
    )
    caption = (
        "Lines: copies of the state, made at multiples of 8. A prompt goes on from the last copy that is a "
        "beginning of it."
    )
    return figure(views(label, draw(WIDE), draw(NARROW)), caption)
