"""Verification of drafts: the tokens of many rows follow the target, whatever the draft's distribution is."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch

from diptych.shared.tools.conformance.clauses.case import Case, table
from diptych.shared.tools.conformance.clauses.compare import Mismatch
from diptych.shared.tools.conformance.clauses.inputs import Inputs
from diptych.shared.tools.conformance.clauses.tolerance import Tolerance
from diptych.shared.tools.conformance.kernels import own_kernels
from diptych.shared.tools.conformance.kernels.draw_frequencies import (
    DRAWS,
    FEW_DRAWS,
    NUM_DRAWS,
    SIGMAS,
    DrawTolerance,
    expect_ids,
    frequency,
)
from diptych.shared.tools.conformance.kernels.problem import Like, Problem, Tensors, bytes_of

VERIFIED: tuple[Case, ...] = table(
    "vocab_size num_drafts sharpness",
    (5, 1, 1.0),
    (8, 2, 1.0),
    (8, 3, 0.5),
    (20, 2, 0.5),
    (6, 2, 0.0),
    name="{vocab_size} tokens, {num_drafts} drafts, draft differs by {sharpness:g}",
    num_draws=NUM_DRAWS,
)


def timed_verify(device: str) -> tuple[Case, ...]:
    vocab_size, counts = (128_256, (1, 8, 32)) if device == "cuda" else (8_000, (1, 8, 32))
    rows = ((n, vocab_size, 3, 0.5) for n in counts)
    return table("num_draws vocab_size num_drafts sharpness", *rows, name="{num_draws} x 3 x {vocab_size}")


def make_verify(case: Case, takes_scale: bool, seed: int = 0) -> Problem:
    """draft_probs float32 [num_rows, num_drafts, vocab_size], draft_token_ids int32 [num_rows, num_drafts],
    drawn from them, target_probs float32 [num_rows, num_drafts + 1, vocab_size]. The results: frequency of
    the token at each place, among rows that reach it, and how often each draft is accepted."""
    inputs = Inputs(5 + seed)
    target = 0.8 * inputs.normal(case.num_drafts + 1, case.vocab_size)
    draft = target[:-1] + case.sharpness * inputs.normal(case.num_drafts, case.vocab_size)
    target, draft = target.softmax(-1), draft.softmax(-1)
    generator = torch.Generator().manual_seed(7 + seed)
    drawn = torch.multinomial(draft.cpu(), case.num_draws, True, generator=generator).T
    tensors = {
        "draft_probs": draft.repeat(case.num_draws, 1, 1),
        "draft_token_ids": drawn.contiguous().to(target.device, torch.int32),
        "target_probs": target.repeat(case.num_draws, 1, 1),
    }
    return Problem(
        case.name, tensors, {}, _walk, "draws", torch.float32,
        tensors["target_probs"].numel(), bytes_of(tensors["draft_probs"], tensors["target_probs"]), 0.0,
        own_kernels.on_gpu(own_kernels.verify, tensors["draft_token_ids"], tensors["target_probs"]),
        limit=partial(_limit, case.num_draws),
    )  # fmt: skip


def _limit(num_draws: int, expected: Tensors) -> Tolerance:
    """The last place, behind all drafts, is reached by the fewest rows."""
    if num_draws < NUM_DRAWS:
        return DrawTolerance(0.0, 0.0, math.inf, FEW_DRAWS, 1.0)
    reached = num_draws * float(expected["accepted"].prod())
    return DrawTolerance(0.0, 0.0, 3 * SIGMAS / math.sqrt(max(reached, 1.0)), DRAWS, max(reached, 1.0))


def _verified(tokens: torch.Tensor, accepted: torch.Tensor) -> dict[str, torch.Tensor]:
    return {**{f"token {i}": each for i, each in enumerate(tokens)}, "accepted": accepted}


def walk_results(problem: Problem, returned: Any) -> dict[str, torch.Tensor]:
    """output_token_ids [num_rows, num_drafts + 1], -1 after the last token, or a tuple that begins with them
    -> frequencies. The acceptance rate of a place is the share of rows that continue, among the rows that
    reach it. Raises `Mismatch` if a row continues after another token than its draft."""
    num_rows, num_places, vocab_size = problem["target_probs"].shape
    ids = expect_ids(returned[0] if isinstance(returned, tuple) else returned, (num_rows, num_places))
    has, drafts = ids >= 0, problem["draft_token_ids"]
    for row, place in (has[:, 1:] & (ids[:, :-1] != drafts)).nonzero()[:1].tolist():
        actual = f"{int(ids[row, place])} at [{row}, {place}]"
        raise Mismatch("a token that others follow", f"its draft {int(drafts[row, place])}", actual)
    counts = has.sum(0).float()
    results = {f"token {i}": frequency(ids[has[:, i], i], vocab_size) for i in range(num_places)}
    return {**results, "accepted": counts[1:] / counts[:-1].clamp(min=1)}


def _walk(problem: Problem, mistake: str = "") -> dict[str, torch.Tensor]:
    p, q = problem["target_probs"][0].cpu().double(), problem["draft_probs"][0].cpu().double()
    both = torch.minimum(p[:-1], q)
    accepted, tokens = both.sum(-1), p.clone()
    if mistake == "no residual":
        tokens[:-1] = both + (1 - accepted[:, None]) * p[:-1]
    if mistake == "all":
        tokens[:-1], accepted = q, torch.ones_like(accepted)
    if mistake == "target only":  # accepted with probability p, whatever q is
        accepted = (p[:-1] * q).sum(-1)
        residual = (p[:-1] - q).clamp(min=0)
        tokens[:-1] = p[:-1] * q + (1 - accepted[:, None]) * residual / residual.sum(-1, keepdim=True)
    return _verified(tokens, accepted)


SUSPECTS = {
    "after a rejection the target is drawn from, not the residual max(p - q, 0)": partial(
        _walk, mistake="no residual"
    ),
    "every draft is accepted": partial(_walk, mistake="all"),
    "drafts are accepted with probability p, not p / q": partial(_walk, mistake="target only"),
}

VERIFY_LIKE = Like(
    "verify", "Drafts are accepted with probability p / q, so that the tokens follow the target.",
    "probabilities", VERIFIED, timed_verify, make_verify, SUSPECTS,
)  # fmt: skip
