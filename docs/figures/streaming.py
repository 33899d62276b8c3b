"""A streamed answer with a stop string: what each token waits for, and what the client gets in each step."""

from __future__ import annotations

from typing import NamedTuple

from diptych.reference.detokenizer import IncrementalDetokenizer
from diptych.shared.engine.llm import LLM
from diptych.shared.types import SamplingParams
from docs.figures.five_requests import ARRIVALS, FLAGS
from docs.figures.svg import NARROW, WIDE, Svg, figure, views

QUESTION = ARRIVALS[3][1]
STOP = ", 9"
LANES = ("token", "held back", "sent")
ROW = 56.0


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


def draw(steps: list[Piece], width: int) -> Svg:
    svg = Svg(width)
    is_wide = width == WIDE
    left = 92 if is_wide else 0
    column = (width - left) / len(steps)
    row = ROW if is_wide else ROW + 18
    for lane, name in enumerate(LANES):
        top = 8 + lane * row + (0 if is_wide else 18)
        svg.text(0, top + (20 if is_wide else -5), name, "b")
        for i, step in enumerate(steps):
            x, text = left + i * column, (step.token, step.held, step.sent)[lane]
            if not text:
                svg.line(x + 8, top + 15, x + column - 8, top + 15, "dash")
                continue
            fill = ("fc", "fd" if step.is_cut else "f0", "fb")[lane]
            svg.rect(x + 2, top, column - 4, 30, fill)
            svg.text(x + column / 2, top + 20, text.replace(" ", "␣"), "m mid")
    bottom = svg.height + 16
    for i in range(len(steps)):
        svg.text(left + (i + 0.5) * column, bottom, str(i + 1), "s mid")
    svg.text(0, bottom if is_wide else bottom + 18, "step", "s")
    entries = [
        ("fc", "text of the token"),
        ("f0", "may begin a stop string"),
        ("fd", "is the stop string"),
        ("fb", "goes to the client"),
    ]
    svg.legend(bottom + (14 if is_wide else 30), entries)
    return svg


def make() -> str:
    steps = pieces()
    label = (
        f"A streamed answer with the stop string {STOP!r}. Each step has a token. Text with which the stop "
        "string may begin is held back until the next token decides."
    )
    caption = (
        f"<code>{QUESTION}</code>, answered by <code>tiny-dense</code> with the stop string "
        "<code>, 9</code>. The comma of step 2 may begin it, and so may the space behind it. The 8 of step 4 "
        "shows that it does not: three tokens come out together. The comma of step 5 does begin it, and is "
        "never sent."
    )
    return figure(views(label, draw(steps, WIDE), draw(steps, NARROW)), caption)
