"""Attention of one query of a real run, block by block: the softmax without all scores at once."""

from __future__ import annotations

import math

import torch

from diptych.shared.engine.llm import LLM
from diptych.shared.types import SamplingParams
from diptych.shared.types.attention import AttentionLayer
from docs.figures.blocks import Bar, bars, boxes
from docs.figures.five_requests import EXACT
from docs.figures.svg import slider

LAYER, HEAD, BLOCK = 3, 3, 8
NUM_STEPS = 7
"""Steps of the engine: the query is the newest token after so many."""

QUESTION = "What is 12 + 30?"
MARKS = {"<|im_start|>": "‹start›", "<|im_end|>": "‹end›", "\n": "↵", " ": "␣"}


def record() -> tuple[list[str], list[float]]:
    """(tokens, scores) of the newest query. float32, so that the scores are the same everywhere."""
    llm = LLM("tiny-dense", **EXACT, max_total_tokens=128)
    backend = llm.assembly.parts.model_runner.attention
    run, seen = backend.run, []

    def recorded(q: torch.Tensor, layer: AttentionLayer, plan: list, **tensors: torch.Tensor) -> torch.Tensor:
        if layer.layer_id == LAYER:
            keys = backend.kv_pool.k_buffer(LAYER)[plan[0].slots]
            kv_head = HEAD // (layer.num_qo_heads // layer.num_kv_heads)
            seen.append(keys[:, kv_head] @ q[-1, HEAD] * layer.scale)
        return run(q, layer, plan, **tensors)

    backend.run = recorded
    prompt = llm.chat_prompt([{"role": "user", "content": QUESTION}])
    (collector,) = llm.submit(prompt, SamplingParams(temperature=0, max_new_tokens=16))
    for _ in range(NUM_STEPS):
        llm.step()
    scores = seen[-1].tolist()
    assert llm.tokenizer is not None
    tokens = []
    for token_id in [*prompt, *collector.output_ids][: len(scores)]:
        text = llm.tokenizer.decode([token_id])
        for token, mark in MARKS.items():
            text = text.replace(token, mark)
        tokens.append(text)
    return tokens, scores


def steps_of(scores: list[float]) -> list[tuple[list[float], str]]:
    """After each block: the weights so far, exp(score - largest score), and what happened; at last the
    weights divided by their sum."""
    found: list[tuple[list[float], str]] = []
    largest, total = -math.inf, 0.0
    for start in range(0, len(scores), BLOCK):
        block = scores[start : start + BLOCK]
        before, largest = largest, max(largest, *block)
        factor = math.exp(before - largest)
        total = total * factor + sum(math.exp(score - largest) for score in block)
        weights = [math.exp(score - largest) for score in scores[: start + len(block)]]
        facts = f"The sum of the weights is {total:.2f}."
        if not found:
            text = (
                f"The first {BLOCK} keys. The largest score is {largest:.1f}. A weight is "
                f"exp(score − {largest:.1f})."
            )
        elif factor < 1:
            text = (
                f"The next {BLOCK} keys have a larger score, {largest:.1f}. What was added up so far is "
                f"multiplied by exp({before:.1f} − {largest:.1f}) = {factor:.2f}."
            )
        else:
            text = f"The next {BLOCK} keys have no larger score: they are only added."
        found.append((weights, f"{text} {facts}"))
    softmax = [weight / total for weight in weights]
    assert torch.allclose(torch.tensor(softmax), torch.tensor(scores).softmax(-1), atol=1e-6)
    end = (
        "Divided by the sum, these are the weights of the softmax, and no step held more than one block of "
        "scores."
    )
    return [*found, (softmax, end)]


def draw(tokens: list[str], scores: list[float], weights: list[float], is_end: bool) -> str:
    """In blocks: the keys that are read, and those that are not, without bars."""
    rows = []
    for i, (token, score) in enumerate(zip(tokens, scores)):
        if i >= len(weights):
            rows.append(Bar(token, 0, "–", "f0", "s"))
            continue
        is_now = i >= len(weights) - BLOCK and not is_end
        text = f"{weights[i]:.0%}".replace("%", " %") if is_end else f"{score:.1f}".replace("-", "−")
        rows.append(Bar(token, weights[i], text, "sa" if is_now else "fa"))
    return boxes(
        "".join(bars(rows[start : start + BLOCK], "m blocks") for start in range(0, len(rows), BLOCK))
    )


def make() -> str:
    tokens, scores = record()
    found = steps_of(scores)
    pictures = [
        (draw(tokens, scores, weights, number == len(found)), text)
        for number, (weights, text) in enumerate(found, start=1)
    ]
    return slider(
        pictures,
        f"Attention of the newest token of a real run: <code>tiny-dense</code>, layer {LAYER}, head {HEAD}, "
        f"after “{QUESTION}”. Rows are keys with their score; a bar is a weight relative to the largest so "
        "far. Strong colour: the block that is read.",
    )
