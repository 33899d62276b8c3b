"""The radix tree of the recorded run: it grows, splits, is locked and is evicted, step by step."""

from __future__ import annotations

from typing import Any

from docs.figures.blocks import boxes, span
from docs.figures.five_requests import recorded
from docs.figures.svg import slider

STEPS = (1, 3, 10, 11, 12, 13, 17, 20)
"""Those in which something is cut, unlocked or evicted, after the first."""


def draw(tree: list[Any], free: str) -> str:
    """An outline: a child is below its parent and to the right of it."""
    depths, lines = {0: 0}, [f'<div class="node">{span("s", f"root; free pages: {free}")}</div>']
    for node_id, parent, text, num_tokens, num_locks, change in tree:
        depths[node_id] = depths[parent] + 1
        kind = "rd s" if change == "evicted" else "fa ra" if num_locks else "f0"
        locks = f", {num_locks} lock{'s' if num_locks > 1 else ''}" if num_locks else ""
        words = f"{span('s', f'{num_tokens} tokens{locks}')} {span('b', change)}"
        box = span(f"chip m {kind}", text.strip())
        lines.append(f'<div class="node" style="--depth:{depths[node_id]}">{box} {words}</div>')
    return boxes("".join(lines))


def make() -> str:
    run = recorded()
    size, num_pages = run["facts"]["page_size"], run["facts"]["num_pages"]
    steps = []
    for number in STEPS:
        step = run["steps"][number - 1]
        events = " ".join(text for _, view, text in step["events"] if view == "tree")
        num_free = step["memory"][0] // size
        picture = draw(step["tree"], f"{num_free} of {num_pages}")
        steps.append((picture, f"In step {number} of the run. {step['title']} {events}"))
    return slider(
        steps,
        f"The radix tree in the recorded run, with pages of {size} tokens and "
        f"{num_pages} pages in the pool. Blue: locked by a running request. Dashed: evicted in this step. "
        "<code>‹start›</code> and <code>‹end›</code> are the marks of the chat template.",
    )
