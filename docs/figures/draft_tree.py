"""One verification of a real run: a draft tree, the accepted path, and the tokens of each round."""

from __future__ import annotations

from dataclasses import dataclass

from diptych.shared.engine.llm import LLM
from diptych.shared.types import Accepted, DraftTree, SamplingParams
from docs.figures.svg import CHAR, NARROW, WIDE, Svg, figure, views

QUESTION = "Tell me a story about Otto."
ROUND = 1
"""The round that is drawn: its tree has branches beside the accepted path."""


@dataclass
class Round:
    tokens: list[str]  # of the tree's nodes
    parents: list[int]
    path: list[int]  # accepted nodes, the root first
    output: list[str]  # accepted tokens, then the bonus token


def record() -> list[Round]:
    """The rounds of one answer, at a temperature of 0.8. float32, so that the tree is the same everywhere."""
    llm = LLM(
        "tiny-dense",
        panel="reference",
        device="cpu",
        dtype="float32",
        max_total_tokens=512,
        speculative="eagle3",
        speculative_draft_model="tiny-dense-eagle3",
        speculative_num_steps=4,
        speculative_topk=3,
        speculative_num_draft_tokens=12,
    )
    rounds: list[Round] = []
    ops = llm.assembly.parts.draft_tree
    assert ops is not None
    accept = ops.accept

    def text_of(ids: list[int]) -> list[str]:
        assert llm.tokenizer is not None
        return [llm.tokenizer.decode([i]).replace("<|im_end|>", "‹end›").replace("\n", "↵") for i in ids]

    def recorded(tree: DraftTree, target_ids: object) -> Accepted:
        accepted = accept(tree, target_ids)
        num_nodes, num_kept = int(tree.num_nodes[0]), int(accepted.num_accepted[0]) + 1
        rounds.append(
            Round(
                text_of(tree.token_ids[0, :num_nodes].tolist()),
                tree.parents[0, :num_nodes].tolist(),
                accepted.node_indices[0, :num_kept].tolist(),
                text_of(accepted.token_ids[0, :num_kept].tolist()),
            )
        )
        return accepted

    ops.accept = recorded
    prompt = llm.chat_prompt([{"role": "user", "content": QUESTION}])
    llm.generate(prompt, SamplingParams(temperature=0.8, seed=3, max_new_tokens=40), progress=False)
    return rounds


def places(parents: list[int]) -> list[tuple[int, float]]:
    """(depth, row) of each node: leaves on rows of their own, a parent beside its first child."""
    children: list[list[int]] = [[] for _ in parents]
    for node, parent in enumerate(parents[1:], start=1):
        children[parent].append(node)
    found = [(0, 0.0)] * len(parents)
    next_row = 0.0

    def place(node: int, depth: int) -> None:
        nonlocal next_row
        found[node] = (depth, next_row)
        for i, child in enumerate(children[node]):
            if i:
                next_row += 1
            place(child, depth + 1)

    place(0, 0)
    return found


def draw(rounds: list[Round], width: int) -> Svg:
    svg, drawn = Svg(width), rounds[ROUND]
    nodes = places(drawn.parents)
    num_columns = max(depth for depth, _ in nodes) + 2  # the bonus token has its own
    column = (width - 1) / num_columns
    heads = ["newest", *(f"draft {depth}" for depth in range(1, num_columns - 1)), "bonus"]
    for depth, head in enumerate(heads):
        text = head if width == WIDE else head.replace("draft ", "").replace("newest", "new")
        svg.text(depth * column, 13, text, "s")

    def box(text: str, depth: float, row: float, cls: str) -> None:
        svg.rect(depth * column, 24 + 32 * row, CHAR * len(text.strip()) + 12, 24, cls)
        svg.text(depth * column + 6, 40 + 32 * row, text.strip(), "m")

    def link(start: tuple[float, float], end: tuple[float, float], cls: str) -> None:
        """From the column of the parent to that of the child."""
        (x0, row0), (x1, row1) = start, end
        middle = x1 * column - 9
        y0, y1 = 36 + 32 * row0, 36 + 32 * row1
        svg.path([(x0 * column + 20, y0), (middle, y0), (middle, y1), (x1 * column, y1)], cls)

    path = set(drawn.path)
    order = sorted(range(1, len(nodes)), key=lambda node: node in path)  # the accepted path on top
    for node in order:
        link(nodes[drawn.parents[node]], nodes[node], "lb" if node in path else "line")
    last = nodes[drawn.path[-1]]
    link(last, (last[0] + 1, last[1]), "lb")
    for node, (depth, row) in enumerate(nodes):
        box(drawn.tokens[node], depth, row, "fb rb" if node in path else "f0")
    box(drawn.output[-1], last[0] + 1, last[1], "fc")
    y = 24 + 32 * (max(row for _, row in nodes) + 1) + 26
    svg.text(0, y, "The answer, a box for each verification", "b")
    write_rounds(svg, y + 12, rounds)
    return svg


def write_rounds(svg: Svg, y: float, rounds: list[Round]) -> None:
    x = 0.0
    for number, each in enumerate(rounds):
        text = "".join(each.output).strip()
        needed = CHAR * len(text) + 12
        if x and x + needed > svg.width - 1:
            x, y = 0.0, y + 30
        svg.rect(x, y, needed, 24, "fb rb" if number == ROUND else "f0")
        svg.text(x + 6, y + 16, text, "m")
        x += needed + 6


def make() -> str:
    rounds = record()
    drawn, num_tokens = rounds[ROUND], sum(len(each.output) for each in rounds)
    accepted = " ".join(token.strip() for token in drawn.output[:-1])
    label = (
        f"A tree of {len(drawn.tokens)} nodes. Accepted: {accepted}. Bonus token: {drawn.output[-1].strip()}."
    )
    caption = (
        "A verification in the reference panel: <code>tiny-dense</code> with the drafter "
        "<code>tiny-dense-eagle3</code>, temperature 0.8. Green: the accepted path. Grey: drafts that are "
        f"not kept. Yellow: the bonus token. {len(rounds)} verifications gave {num_tokens} tokens; the first "
        "token of the answer came from the prefill step."
    )
    return figure(views(label, draw(rounds, WIDE), draw(rounds, NARROW)), caption)
