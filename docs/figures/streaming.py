"""A streamed answer with a stop string: what each token waits for, and what the client gets in each step."""

from __future__ import annotations

from typing import NamedTuple

from diptych.reference.detokenizer import IncrementalDetokenizer
from diptych.shared.engine.llm import LLM
from diptych.shared.types import SamplingParams
from docs.figures.blocks import boxes, grid, legend
from docs.figures.five_requests import ARRIVALS, FLAGS
from docs.figures.svg import figure

QUESTION = ARRIVALS[3][1]
STOP = ", 9"
KINDS = {
    "fc": "text of the token",
    "f0": "may begin a stop string",
    "fd": "is the stop string",
    "fb": "goes to the client",
}
"""Class of a cell -> its meaning."""


class Piece(NamedTuple):
    """Of one step: texts."""

    token: str
    held: str
    sent: str
    is_cut: bool  # what was held was a stop string


def pieces() -> list[Piece]:
    """The engine's output ids, through the reference's detokenizer step by step."""
    llm = LLM("tiny-dense", **FLAGS)
    params = SamplingParams(temperature=0, max_new_tokens=16, stop=(STOP,))
    prompt = llm.chat_prompt([{"role": "user", "content": QUESTION}])
    (output,) = llm.generate([prompt], params)
    detokenizer = IncrementalDetokenizer(llm.tokenizer, params, prompt)
    found = []
    for i, token_id in enumerate(output.output_ids):
        is_last = i == len(output.output_ids) - 1
        held = detokenizer._held_text
        sent = detokenizer.append([token_id], output.finish_reason if is_last else None)
        token = llm.tokenizer.decode([token_id])
        found.append(Piece(token, held + token if is_last else detokenizer._held_text, sent, is_last))
    assert "".join(piece.sent for piece in found) == output.text
    return found


def make() -> str:
    steps = pieces()
    lanes = {
        "token": [("fc", step.token) for step in steps],
        "held back": [("fd" if step.is_cut else "f0", step.held) for step in steps],
        "sent": [("fb", step.sent) for step in steps],
    }
    rows = [
        [("b", name), *((f"m {kind}", text.replace(" ", "␣")) if text else ("s", "–") for kind, text in lane)]
        for name, lane in lanes.items()
    ]
    rows.append([("s", "step"), *(("s", str(i)) for i, _ in enumerate(steps, start=1))])
    caption = (
        f"<code>{QUESTION}</code>, answered by <code>tiny-dense</code> with the stop string "
        "<code>, 9</code>. The comma of step 2 may begin it, and so may the space behind it. The 8 of step 4 "
        "shows that it does not: three tokens come out together. The comma of step 5 does begin it, and is "
        "never sent."
    )
    return figure(boxes(grid(rows) + legend(KINDS.items())), caption)
