"""The radix tree of a real run: it grows, splits, is locked and is evicted, step by step."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

from diptych.shared.engine.llm import LLM
from diptych.shared.interfaces import CacheNode
from diptych.shared.types import SamplingParams
from docs.figures.svg import CHAR, NARROW, WIDE, Svg, slider, views

NUM_SLOTS = 68
MARKS = {"<|im_start|>": "‹start›", "<|im_end|>": "‹end›", "\n": "↵"}


@dataclass
class Node:
    node_id: int
    parent_id: int
    text: str
    num_tokens: int
    num_locks: int
    change: str = ""  # since the step before: new, split, evicted


@dataclass
class State:
    nodes: list[Node]
    num_free: int
    text: str


class Run:
    """The reference panel with a pool of so few slots that the fourth question evicts the first answer."""

    def __init__(self) -> None:
        self.llm = LLM(
            "tiny-dense",
            panel="reference",
            device="cpu",
            dtype="float32",
            page_size=1,
            max_total_tokens=NUM_SLOTS,
        )
        self.states: list[State] = []

    def submit(self, question: str) -> int:
        """One step with the prompt. Returns the number of its tokens that came from the tree."""
        prompt = self.llm.chat_prompt([{"role": "user", "content": question}])
        (collector,) = self.llm.submit(prompt, SamplingParams(temperature=0, max_new_tokens=10))
        self.llm.step()
        return collector.num_cached_tokens

    def finish(self) -> None:
        while self.llm.step():
            pass

    def keep(self, text: str) -> None:
        before = {node.node_id: node for node in self.states[-1].nodes} if self.states else {}
        before = {key: node for key, node in before.items() if node.change != "evicted"}
        nodes = [self.node_of(node) for node in self.llm.assembly.parts.tree_cache.nodes()]
        for node in nodes:
            old = before.pop(node.node_id, None)
            if old is None:
                is_upper = any(other.parent_id == node.node_id and not other.change for other in nodes)
                node.change = "split" if is_upper and self.states else "new"
        nodes += [Node(n.node_id, n.parent_id, n.text, n.num_tokens, 0, "evicted") for n in before.values()]
        num_free = len(self.llm.assembly.parts.allocator.free_slots())
        self.states.append(State(nodes, num_free, text))

    def node_of(self, node: CacheNode) -> Node:
        assert self.llm.tokenizer is not None
        text = self.llm.tokenizer.decode(node.key)
        for token, mark in MARKS.items():
            text = text.replace(token, mark)
        if text.endswith(" "):
            text = text[:-1] + "␣"
        return Node(node.node_id, node.parent_id, text, len(node.key), node.lock_ref)


def record() -> list[State]:
    run = Run()
    run.submit("What is 12 + 30?")
    run.keep(
        "The first request runs. Its prompt is one node, whatever its length. The request locks the node, "
        "so it cannot be evicted."
    )
    run.finish()
    run.keep(
        "It has ended, and nothing is locked. Its answer stays below its prompt, without the last token, "
        "which has no KV."
    )
    cached = run.submit("What is 7 + 8?")
    run.keep(
        f"A second question begins with the same {cached} tokens. The edge is split behind them: the new "
        "upper node has the shared tokens. Only the others are computed, and they become a leaf."
    )
    run.finish()
    run.keep("It has ended. Both answers are in the tree.")
    cached = run.submit("What is 12 + 5?")
    run.keep(
        f"A third question shares {cached} tokens with the first one: the path of the match is longer, and "
        "a second edge is split."
    )
    run.finish()
    run.keep("It has ended. Few slots are free.")
    cached = run.submit("Count from 3 to 9.")
    run.keep(
        f"The fourth question shares {cached} tokens. There are too few free slots for the rest, so the leaf "
        "that was not used for the longest time is evicted: the first answer."
    )
    run.finish()
    run.keep(
        "While it decoded it needed more slots than were free. The parent of the evicted answer has become "
        "a leaf and is the oldest, so it is evicted. Its own parent has another child and stays."
    )
    cached = run.submit("What is 12 + 30?")
    run.keep(
        f"The first question again. {cached} of its tokens are still cached, because a later request used "
        "them. The others are computed again, and the next oldest leaf is evicted for them."
    )
    return run.states


def draw(state: State, width: int) -> Svg:
    """An outline: a child is below its parent and to the right of it."""
    svg = Svg(width)
    is_wide = width == WIDE
    indent, note_width = (30.0, 185.0) if is_wide else (13.0, 0.0)
    children: dict[int, list[Node]] = {}
    ids = {node.node_id for node in state.nodes}
    for node in sorted(state.nodes, key=lambda node: node.node_id):
        children.setdefault(node.parent_id if node.parent_id in ids else 0, []).append(node)
    svg.dot(6, 8, 5, "fi")
    svg.text(18, 12.5, f"root, {state.num_free} of {NUM_SLOTS} slots free", "s")
    y = 24.0

    def place(node: Node, x: float, parent: tuple[float, float]) -> None:
        nonlocal y
        room = int((width - x - note_width - 12) / CHAR)
        lines = textwrap.wrap(node.text, room, drop_whitespace=False)
        height = 16.0 * len(lines) + 8
        box_width = CHAR * max(map(len, lines)) + 12
        svg.path([parent, (parent[0], y + height / 2), (x, y + height / 2)], "line")
        svg.rect(x, y, box_width, height, box_class(node))
        for i, line in enumerate(lines):
            svg.text(x + 6, y + 16 + 16 * i, line, "m s" if node.change == "evicted" else "m")
        note, change = note_of(node)
        x_note, y_note = (x + box_width + 8, y + 16) if is_wide else (x + indent, y + height + 14)
        svg.text(x_note, y_note, note, "s")
        svg.text(x_note + 7.4 * len(note) + 8, y_note, change, "b")
        bottom = y + height
        y = bottom + (10 if is_wide else 26)
        for child in children.get(node.node_id, []):
            place(child, x + indent, (x + indent / 2, bottom))

    for node in children.get(0, []):
        place(node, indent, (6, 13))
    return svg


def box_class(node: Node) -> str:
    if node.change == "evicted":
        return "rd"
    return "fa ra" if node.num_locks else "f0"


def note_of(node: Node) -> tuple[str, str]:
    locks = f", {node.num_locks} lock" if node.num_locks else ""
    return f"{node.num_tokens} tokens{locks}", node.change


def make() -> str:
    steps = []
    for state in record():
        label = "The radix tree. Nodes: " + "; ".join(
            " ".join([f"“{n.text}”", *note_of(n)]) for n in state.nodes
        )
        steps.append((views(label, draw(state, WIDE), draw(state, NARROW)), state.text))
    return slider(
        steps,
        "The radix tree of the reference panel with <code>tiny-dense</code>, page size 1 and a pool of "
        f"{NUM_SLOTS} slots. Blue: locked by a running request. Dashed: evicted in this step. "
        "<code>‹start›</code> and <code>‹end›</code> are the marks of the chat template.",
    )
