"""One verification of a real run: a draft tree, the accepted path, and the tokens of each round."""

from __future__ import annotations

from dataclasses import dataclass

from diptych.shared.engine.llm import LLM
from diptych.shared.types import Accepted, DraftTree, SamplingParams
from docs.figures.blocks import boxes, chips, heading, span
from docs.figures.five_requests import EXACT
from docs.figures.svg import figure

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
        **EXACT,
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


def places(parents: list[int]) -> list[tuple[int, int]]:
    """(depth, row) of each node: leaves on rows of their own, a parent beside its first child."""
    children: list[list[int]] = [[] for _ in parents]
    for node, parent in enumerate(parents[1:], start=1):
        children[parent].append(node)
    found = [(0, 0)] * len(parents)
    next_row = 0

    def place(node: int, depth: int) -> None:
        nonlocal next_row
        found[node] = (depth, next_row)
        for i, child in enumerate(children[node]):
            if i:
                next_row += 1
            place(child, depth + 1)

    place(0, 0)
    return found


def draw(drawn: Round) -> str:
    """A column for each depth; a link leads from the row of the parent to that of the child."""
    nodes, path = places(drawn.parents), set(drawn.path)
    num_columns = max(depth for depth, _ in nodes) + 2  # the bonus token has its own
    heads = ["newest", *(f"draft {depth}" for depth in range(1, num_columns - 1)), "bonus"]
    cells = [span("s", head, f"grid-area:1/{depth + 1}") for depth, head in enumerate(heads)]
    depth, row = nodes[drawn.path[-1]]
    order = [(node, drawn.tokens[node], *place, drawn.parents[node]) for node, place in enumerate(nodes)]
    bonus = (-1, drawn.output[-1], depth + 1, row, drawn.path[-1])
    # The accepted path is on top.
    for node, text, depth, row, parent in sorted([*order, bonus], key=lambda each: each[0] in path):
        is_kept = node in path or node < 0
        if depth:
            start = nodes[parent][1] + 2
            link = "link kept" if is_kept else "link"
            cells.append(f'<i class="{link}" style="grid-area:{start}/{depth}/{row + 3}"></i>')
        kind = "fc" if node < 0 else "fb rb" if is_kept else "f0"
        cells.append(span(f"chip m {kind}", text.strip(), f"grid-area:{row + 2}/{depth + 1}"))
    columns = f"grid-template-columns:repeat({num_columns},minmax(0,1fr))"
    return f'<div class="tree" style="{columns}">{"".join(cells)}</div>'


def make() -> str:
    rounds = record()
    drawn, num_tokens = rounds[ROUND], sum(len(each.output) for each in rounds)
    caption = (
        "A verification in the reference panel: <code>tiny-dense</code> with the drafter "
        "<code>tiny-dense-eagle3</code>, temperature 0.8. Green: the accepted path. Grey: drafts that are "
        f"not kept. Yellow: the bonus token. {len(rounds)} verifications gave {num_tokens} tokens; the first "
        "token of the answer came from the prefill step."
    )
    answer = chips(
        ("m fb rb" if number == ROUND else "m f0", "".join(each.output).strip())
        for number, each in enumerate(rounds)
    )
    return figure(boxes(draw(drawn) + heading("The answer, a box for each verification") + answer), caption)
