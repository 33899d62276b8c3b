"""Sampling: rows of several groups, each with its own logits and parameters, are drawn many times."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from diptych.shared.tools.conformance.clauses.case import Case, table
from diptych.shared.tools.conformance.clauses.inputs import Inputs
from diptych.shared.tools.conformance.clauses.tolerance import Tolerance
from diptych.shared.tools.conformance.kernels import own_kernels
from diptych.shared.tools.conformance.kernels.draw_frequencies import (
    NUM_DRAWS,
    expect_ids,
    frequency,
    limit_of_draws,
)
from diptych.shared.tools.conformance.kernels.problem import Like, Problem, Tensors, bytes_of
from diptych.shared.tools.conformance.oracles.sampling_oracle import Ask, filtered

CLEAR = 1e-4
"""The smallest distance of a probability from top-p, and of the logits around top-k."""

Group = tuple[float, int, float]  # temperature, top-k (-1: none), top-p


def _name(vocab_size: int, groups: tuple[Group, ...], num_draws: int) -> str:
    if len(groups) > 1:
        return f"{vocab_size} tokens, {len(groups)} groups of rows"
    ((temperature, top_k, top_p),) = groups
    return f"{vocab_size} tokens, temperature {temperature:g}, top-k {top_k}, top-p {top_p:g}"


SAMPLED: tuple[Case, ...] = table(
    "vocab_size groups",
    (10, ((1.0, -1, 1.0),)),
    (10, ((0.5, -1, 1.0),)),
    (10, ((1.0, 3, 1.0),)),
    (10, ((1.0, 1, 1.0),)),
    (10, ((1.0, -1, 0.6),)),
    (50, ((0.8, 20, 0.8),)),
    (33, ((1.5, 7, 0.95),)),
    (300, ((2.0, -1, 1.0),)),
    (12, ((1.0, -1, 1.0), (1.0, -1, 1.0))),
    (11, ((0.7, 5, 1.0), (1.0, -1, 0.7), (1.5, 3, 0.9))),
    name=_name,
    num_draws=NUM_DRAWS,
)


def timed_draws(device: str) -> tuple[Case, ...]:
    vocab_size, counts = (128_256, (1, 16, 128, 512)) if device == "cuda" else (8_000, (1, 8, 32))
    rows = ((n, vocab_size, ((0.8, 40, 0.95),)) for n in counts)
    return table("num_draws vocab_size groups", *rows, name="{num_draws} x {vocab_size}")


def make_sampler(case: Case, takes_scale: bool, seed: int = 0) -> Problem:
    """logits float32 [num_rows, vocab_size], temperature, top_p float32, top_k int32 [num_rows], where
    vocab_size means no top-k. Row i has the logits and the parameters of group i % num_groups, `num_draws`
    rows a group. top_p applies to the whole distribution, also with a top-k. The result is the frequency of
    each token in each group."""
    inputs = Inputs(3 + seed)
    logits = inputs.normal(len(case.groups), case.vocab_size)
    while not all(is_clear(row.tolist(), each) for row, each in zip(logits, case.groups)):
        logits = inputs.normal(len(case.groups), case.vocab_size)
    temperatures, top_ks, top_ps = (
        torch.tensor(each, device=logits.device).repeat(case.num_draws) for each in zip(*case.groups)
    )
    tensors = {
        "logits": logits.repeat(case.num_draws, 1),
        "temperature": temperatures,
        "top_k": torch.where(top_ks > 0, top_ks, case.vocab_size).to(torch.int32),
        "top_p": top_ps,
    }
    return Problem(
        case.name, tensors, {"num_groups": len(case.groups)}, drawn, "draws", torch.float32,
        tensors["logits"].numel(), bytes_of(tensors["logits"]), 0.0,
        own_kernels.on_gpu(own_kernels.sampler, *tensors.values()), limit=partial(_limit, case.num_draws),
    )  # fmt: skip


def is_clear(logits: list[float], group: Group) -> bool:
    """Whether roundings do not change which tokens the filters keep."""
    ordered = sorted(logits, reverse=True)
    k = group[1]
    if 0 < k < len(logits) and ordered[k - 1] - ordered[k] < CLEAR:
        return False
    temperature, _, top_p = group
    near = (top_p,) if top_p == 1.0 else (top_p - CLEAR, top_p + CLEAR)
    kept = [set(filtered(logits, Ask("", temperature, k, p).req()).kept) for p in near]
    return kept[0] == kept[-1]


def _limit(num_draws: int, expected: Tensors) -> Tolerance:
    return limit_of_draws(expected["frequency"], num_draws)


def frequencies(problem: Problem, ids: Any) -> dict[str, torch.Tensor]:
    """ids int32 or int64 [num_rows] or [num_rows, 1] -> frequency [num_groups, vocab_size]."""
    num_rows, vocab_size = problem["logits"].shape
    rows = expect_ids(ids, (num_rows,), (num_rows, 1)).view(-1, problem.constants["num_groups"])
    return {"frequency": torch.stack([frequency(each, vocab_size) for each in rows.unbind(1)])}


def drawn(problem: Problem, mistake: str = "") -> dict[str, torch.Tensor]:
    """The probabilities in float64 from the problem's own tensors, with a change for each known mistake."""
    num_groups = problem.constants["num_groups"]
    logits = problem["logits"][:num_groups].cpu().double()
    temperature, top_k, top_p = (
        problem[name][:num_groups].cpu() for name in ("temperature", "top_k", "top_p")
    )
    if mistake == "logits of the first":
        logits = logits[:1].expand_as(logits)
    if mistake == "parameters of the first":
        temperature, top_k, top_p = (each[:1].expand_as(each) for each in (temperature, top_k, top_p))
    if mistake == "no temperature":
        temperature = torch.ones_like(temperature)
    is_any_k = mistake == "no top-k"
    top_k = torch.full_like(top_k, logits.shape[1]) if is_any_k else top_k + (mistake == "one more")
    top_k = torch.ones_like(top_k) if mistake == "greedy" else top_k
    top_p = torch.ones_like(top_p) if mistake in ("no top-p", "greedy") else top_p
    probs, ids = (
        (logits / temperature.double()[:, None]).softmax(-1).sort(dim=-1, descending=True, stable=True)
    )
    is_kept = torch.arange(logits.shape[1]) < top_k[:, None]
    if mistake == "top-k first":
        probs = probs * is_kept
        probs = probs / probs.sum(-1, keepdim=True)
    until = probs.cumsum(-1) if mistake == "crossing dropped" else probs.cumsum(-1) - probs
    is_of_top_p = (until < top_p.double()[:, None]) | (top_p == 1)[:, None]
    is_of_top_p[:, 0] = True
    kept = probs * (is_kept & is_of_top_p)
    return {"frequency": torch.zeros_like(probs).scatter(1, ids, kept / kept.sum(-1, keepdim=True))}


SUSPECTS = {
    "every row gets the parameters of the first": partial(drawn, mistake="parameters of the first"),
    "every row reads the logits of the first": partial(drawn, mistake="logits of the first"),
    "the temperature is ignored": partial(drawn, mistake="no temperature"),
    "top-k is ignored": partial(drawn, mistake="no top-k"),
    "top-p is ignored": partial(drawn, mistake="no top-p"),
    "top-k keeps one token too many": partial(drawn, mistake="one more"),
    "top-p is applied to what top-k leaves, renormalised": partial(drawn, mistake="top-k first"),
    "the token that crosses top_p is dropped": partial(drawn, mistake="crossing dropped"),
    "the most probable token is always taken": partial(drawn, mistake="greedy"),
}

SAMPLER_LIKE = Like(
    "sampler", "A token of each row is drawn, after temperature, top-k and top-p.", "logits", SAMPLED,
    timed_draws, make_sampler, SUSPECTS, sparse="logits",
    rows=("logits", "temperature", "top_k", "top_p"),
)  # fmt: skip
