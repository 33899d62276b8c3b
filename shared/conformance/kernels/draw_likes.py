"""Sampling and verification of drafts: the frequencies of many draws are compared with one distribution."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch

from shared.conformance.case import Case, table
from shared.conformance.inputs import Inputs
from shared.conformance.kernels import own_kernels
from shared.conformance.kernels.problem import Like, Problem, bytes_of
from shared.conformance.sampling import Ask, filtered
from shared.conformance.tolerance import Tolerance

NUM_DRAWS = 20_000
SIGMAS = 5.5
"""A right function fails at one token in 10 million."""

_DRAWS = "a frequency of draws differs from its probability by chance; what cannot be drawn never is"

SAMPLED: tuple[Case, ...] = table(
    "vocab_size temperature top_k top_p",
    (10, 1.0, -1, 1.0),
    (10, 0.5, -1, 1.0),
    (10, 1.0, 3, 1.0),
    (10, 1.0, 1, 1.0),
    (10, 1.0, -1, 0.6),
    (50, 0.8, 20, 0.8),
    (33, 1.5, 7, 0.95),
    name="{vocab_size} tokens, temperature {temperature:g}, top-k {top_k}, top-p {top_p:g}",
    num_draws=NUM_DRAWS,
)


FEW_DRAWS = Tolerance(1.0, 0.0, math.inf, "frequencies of few draws say nothing: such sizes are timed only")


def limit_of_draws(expected: torch.Tensor, num_draws: int) -> Tolerance:
    """The tolerance of frequencies among `num_draws` draws: an impossible token must not be drawn once."""
    if num_draws < NUM_DRAWS:
        return FEW_DRAWS
    smallest = float(expected[expected > 0].min())
    spread = math.sqrt(float(1 - expected.square().sum()) / num_draws) / float(expected.norm())
    rtol = SIGMAS / math.sqrt(smallest * num_draws)
    return Tolerance(0.5 / num_draws, rtol, SIGMAS * spread + 1e-9, _DRAWS)


def frequency(ids: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """float32 [vocab_size]; ids outside of the vocabulary count as NaN of every token."""
    ids = ids.flatten()
    if not bool(((ids >= 0) & (ids < vocab_size)).all()):
        return torch.full((vocab_size,), torch.nan, device=ids.device)
    return (ids.long().bincount(minlength=vocab_size) / max(len(ids), 1)).float()


def timed_draws(device: str) -> tuple[Case, ...]:
    vocab_size, counts = (128_256, (1, 16, 128, 512)) if device == "cuda" else (8_000, (1, 8, 32))
    rows = ((n, vocab_size, 0.8, 40, 0.95) for n in counts)
    return table("num_draws vocab_size temperature top_k top_p", *rows, name="{num_draws} x {vocab_size}")


def make_sampler(case: Case, takes_scale: bool) -> Problem:
    """logits float32 [num_rows, vocab_size], equal rows; temperature, top_p float32, top_k int32 [num_rows],
    where vocab_size means no top-k. top_p applies to the whole distribution, also with a top-k. The result is
    the frequency of each token."""
    logits = Inputs(3).normal(case.vocab_size)
    ask = Ask("", case.temperature, case.top_k, case.top_p)
    kept = filtered(logits.tolist(), ask.req()).kept
    expected = torch.tensor([kept.get(i, 0.0) for i in range(case.vocab_size)], dtype=torch.float64)
    rows = torch.ones(case.num_draws, device=logits.device)
    top_k = case.top_k if case.top_k > 0 else case.vocab_size
    tensors = {
        "logits": logits.repeat(case.num_draws, 1),
        "temperature": rows * case.temperature,
        "top_k": (rows * top_k).to(torch.int32),
        "top_p": rows * case.top_p,
    }
    return Problem(
        case.name, tensors, {}, {"frequency": expected}, "draws", torch.float32, tensors["logits"].numel(),
        bytes_of(tensors["logits"]), 0.0, own_kernels.on_gpu(own_kernels.sampler, *tensors.values()),
        limit=limit_of_draws(expected, case.num_draws),
    )  # fmt: skip


def _drawn(problem: Problem, **change: Any) -> dict[str, torch.Tensor]:
    """The frequencies after a change of one parameter; top_k "off by one" is one more."""
    logits = problem["logits"][0].tolist()
    given = {name: problem[name][0].item() for name in ("temperature", "top_k", "top_p")}
    asked: dict[str, Any] = {**given, **change}
    if asked["top_k"] == "off by one":
        asked["top_k"] = min(given["top_k"] + 1, len(logits))
    ask = Ask("", asked["temperature"], int(asked["top_k"]), asked["top_p"])
    kept = filtered(logits, ask.req()).kept
    return {"frequency": torch.tensor([kept.get(i, 0.0) for i in range(len(logits))], dtype=torch.float64)}


SAMPLER_SUSPECTS = {
    "the temperature is ignored": partial(_drawn, temperature=1.0),
    "top-k is ignored": partial(_drawn, top_k=-1),
    "top-p is ignored": partial(_drawn, top_p=1.0),
    "top-k keeps one token too many": partial(_drawn, top_k="off by one"),
    "the most probable token is always taken": partial(_drawn, top_k=1),
}

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


def make_verify(case: Case, takes_scale: bool) -> Problem:
    """draft_probs float32 [num_rows, num_drafts, vocab_size], draft_token_ids int32 [num_rows, num_drafts],
    drawn from them, target_probs float32 [num_rows, num_drafts + 1, vocab_size]. The results: frequency of
    the token at each place, among rows that reach it, and how often each draft is accepted."""
    inputs = Inputs(5)
    target = 0.8 * inputs.normal(case.num_drafts + 1, case.vocab_size)
    draft = target[:-1] + case.sharpness * inputs.normal(case.num_drafts, case.vocab_size)
    target, draft = target.softmax(-1), draft.softmax(-1)
    generator = torch.Generator().manual_seed(7)
    drawn = torch.multinomial(draft.cpu(), case.num_draws, True, generator=generator).T
    tensors = {
        "draft_probs": draft.repeat(case.num_draws, 1, 1),
        "draft_token_ids": drawn.contiguous().to(target.device, torch.int32),
        "target_probs": target.repeat(case.num_draws, 1, 1),
    }
    p, q = target.cpu().double(), draft.cpu().double()
    expected = _verified(p, q, torch.minimum(p[:-1], q).sum(-1))
    reached = case.num_draws * float(expected["accepted"][:-1].prod() if case.num_drafts > 1 else 1.0)
    smallest = torch.stack([each for name, each in expected.items() if name != "accepted"]).min()
    spread = SIGMAS / math.sqrt(max(reached, 1.0))
    limit = Tolerance(0.5 / case.num_draws, spread / math.sqrt(float(smallest)), 3 * spread, _DRAWS)
    return Problem(
        case.name, tensors, {}, expected, "draws", torch.float32, tensors["target_probs"].numel(),
        bytes_of(tensors["draft_probs"], tensors["target_probs"]), 0.0,
        own_kernels.on_gpu(own_kernels.verify, tensors["draft_token_ids"], tensors["target_probs"]),
        limit=limit if case.num_draws >= NUM_DRAWS else FEW_DRAWS,
    )  # fmt: skip


def _verified(tokens: torch.Tensor, q: torch.Tensor, accepted: torch.Tensor) -> dict[str, torch.Tensor]:
    names = {f"token {i}": each for i, each in enumerate(tokens)}
    return {**names, "accepted": accepted}


def walk_results(ids: Any, vocab_size: int) -> dict[str, torch.Tensor]:
    """output_token_ids [num_rows, num_drafts + 1], -1 after the last token -> frequencies. The acceptance
    rate of a place is the share of rows that continue, among the rows that reach it."""
    ids = ids[0] if isinstance(ids, tuple) else ids
    has = ids >= 0
    counts = has.sum(0).float()
    results = {f"token {i}": frequency(ids[has[:, i], i], vocab_size) for i in range(ids.shape[1])}
    return {**results, "accepted": counts[1:] / counts[:-1].clamp(min=1)}


def _walk(problem: Problem, mistake: str) -> dict[str, torch.Tensor]:
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
    return _verified(tokens, q, accepted)


VERIFY_SUSPECTS = {
    "after a rejection the target is drawn from, not the residual max(p - q, 0)": partial(
        _walk, mistake="no residual"
    ),
    "every draft is accepted": partial(_walk, mistake="all"),
    "drafts are accepted with probability p, not p / q": partial(_walk, mistake="target only"),
}

SAMPLER_LIKE = Like(
    "sampler", "A token of each row is drawn, after temperature, top-k and top-p.", "logits", SAMPLED,
    timed_draws, make_sampler, SAMPLER_SUSPECTS,
)  # fmt: skip
VERIFY_LIKE = Like(
    "verify", "Drafts are accepted with probability p / q, so that the tokens follow the target.",
    "probabilities", VERIFIED, timed_verify, make_verify, VERIFY_SUSPECTS,
)  # fmt: skip
