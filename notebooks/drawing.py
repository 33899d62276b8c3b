"""Plots of an engine's memory: the page pool and the radix tree. Uses the public interfaces only."""

from __future__ import annotations

import textwrap

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch

from diptych.shared.engine.llm import LLM
from diptych.shared.interfaces import CacheNode

KINDS = (
    "free",
    "in the tree, evictable",
    "in the tree, locked by a request",
    "owned by one request",
    "dummy page",
)
MAX_CHARS = 44  # of an edge's text; longer text is cut in the middle
COLOURS = ("#eeeeee", "#9ecae1", "#3182bd", "#fdae6b", "#555555")


def slot_kinds(llm: LLM) -> np.ndarray:
    """For every slot of the KV pool the index of its kind in KINDS. Each slot has exactly one owner."""
    parts, state = llm.assembly.parts, llm.scheduler.state()
    allocator = parts.allocator
    kinds = np.full(allocator.size + allocator.page_size, -1)
    kinds[: allocator.page_size] = KINDS.index("dummy page")
    kinds[allocator.free_slots().cpu().numpy()] = KINDS.index("free")
    for node in parts.tree_cache.nodes():
        kinds[node.slots] = 2 if node.lock_ref else 1
    # The rest is allocated for a request and not in the tree: its partial page.
    kinds[kinds == -1] = KINDS.index("owned by one request")
    num_alive = len(state.running) + (state.chunked_req is not None)
    assert num_alive or not (kinds == 3).any(), "slots without an owner"
    return kinds


def draw_pool(llm: LLM, title: str = "", pages_per_row: int = 20) -> None:
    """The KV pool: one bar per slot, thin lines between slots, thick ones between pages."""
    page_size = llm.assembly.parts.allocator.page_size
    kinds = slot_kinds(llm)
    row_len = page_size * pages_per_row
    num_rows = -(-len(kinds) // row_len)
    grid = np.full(num_rows * row_len, np.nan)
    grid[: len(kinds)] = kinds
    _, axes = plt.subplots(figsize=(9, 0.28 * num_rows + 0.9))
    axes.imshow(
        grid.reshape(num_rows, row_len), cmap=ListedColormap(COLOURS), vmin=-0.5, vmax=4.5, aspect="auto"
    )
    pages, slots = (np.arange(1, row_len) % page_size == 0), np.arange(1, row_len) - 0.5
    for columns, width in ((slots[~pages], 0.5), (slots[pages], 3)):
        axes.plot(*_parallel(columns, num_rows), color="white", linewidth=width)
    axes.plot(*reversed(_parallel(np.arange(1, num_rows) - 0.5, row_len)), color="white", linewidth=2)
    axes.set(xlim=(-0.5, row_len - 0.5), ylim=(num_rows - 0.5, -0.5))
    axes.set_axis_off()
    axes.set_title(title, loc="left", fontsize=10)
    patches = [Patch(color=colour, label=kind) for kind, colour in zip(KINDS, COLOURS)]
    axes.legend(
        handles=patches, loc="upper center", bbox_to_anchor=(0.5, 0), ncol=3, frameon=False, fontsize=8
    )
    plt.show()


def _parallel(places: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Lines at these places as one line with gaps, which takes a tenth of the bytes of a picture."""
    ends = np.tile([-0.5, length - 0.5, np.nan], len(places))
    return np.repeat(places, 3), ends


def draw_tree(llm: LLM, title: str = "") -> None:
    """The radix tree: every node with the text of its edge, its number of tokens and its locks."""
    nodes = list(llm.assembly.parts.tree_cache.nodes())
    places = layout(nodes)
    height = max((y for _, y in places.values()), default=0) + 1
    depth = max((x for x, _ in places.values()), default=0) + 1
    _, axes = plt.subplots(figsize=(9, 0.8 * height + 0.6))
    axes.plot(0, _root_row(nodes, places), "o", color="black")
    for node in nodes:
        x, y = places[node.node_id]
        is_top = node.parent_id not in places
        parent_x, parent_y = (0, _root_row(nodes, places)) if is_top else places[node.parent_id]
        axes.plot([parent_x, x], [parent_y, y], color="#999999", zorder=1)
        _draw_node(axes, llm, node, x, y)
    axes.set_xlim(-0.3, depth + 0.2)
    axes.set_ylim(height - 0.3, -0.7)
    axes.set_axis_off()
    axes.set_title(title, loc="left", fontsize=10)
    plt.show()


def layout(nodes: list[CacheNode]) -> dict[int, tuple[float, float]]:
    """node_id -> (depth, row): leaves on rows of their own, a parent in the middle of its children."""
    ids = {node.node_id for node in nodes}
    children: dict[int | None, list[int]] = {}
    for node in nodes:
        children.setdefault(node.parent_id if node.parent_id in ids else None, []).append(node.node_id)
    places: dict[int, tuple[float, float]] = {}
    next_row = 0.0

    def place(node_id: int, depth: int) -> float:
        nonlocal next_row
        below = children.get(node_id, [])
        if below:
            rows = [place(child, depth + 1) for child in below]
            row = (rows[0] + rows[-1]) / 2
        else:
            row, next_row = next_row, next_row + 1
        places[node_id] = (depth, row)
        return row

    for top in children.get(None, []):
        place(top, 1)
    return places


def _root_row(nodes: list[CacheNode], places: dict[int, tuple[float, float]]) -> float:
    rows = [places[node.node_id][1] for node in nodes if node.parent_id not in places]
    return (min(rows) + max(rows)) / 2 if rows else 0.0


def _draw_node(axes: Axes, llm: LLM, node: CacheNode, x: float, y: float) -> None:
    text = llm.tokenizer.decode(node.key).replace("\n", "↵") if llm.tokenizer is not None else str(node.key)
    if len(text) > MAX_CHARS:
        text = f"{text[: MAX_CHARS // 2]} … {text[-MAX_CHARS // 2 :]}"
    text = textwrap.fill(text, 24).replace("$", r"\$")  # matplotlib typesets text between two dollars
    label = f"{text}\n{len(node.key)} tokens, {node.lock_ref} locks"
    colour = "#6baed6" if node.lock_ref else "#deebf7"
    box = {"boxstyle": "round", "facecolor": colour, "edgecolor": "#999999"}
    axes.text(x, y, label, ha="center", va="center", fontsize=7, zorder=2, bbox=box)
