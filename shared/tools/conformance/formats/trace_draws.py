"""`sampling` of FlashInfer Trace: tokens are drawn of given probabilities, after top-k and top-p."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from diptych.shared.tools.conformance.clauses.case import Case
from diptych.shared.tools.conformance.formats.trace_files import Definition
from diptych.shared.tools.conformance.formats.trace_op import Read, TraceOp, tensor
from diptych.shared.tools.conformance.kernels.conventions import LIKES
from diptych.shared.tools.conformance.kernels.draw_frequencies import (
    FEWEST_DRAWS,
    NUM_DRAWS,
    expect_ids,
    frequency,
)
from diptych.shared.tools.conformance.kernels.problem import Problem
from diptych.shared.tools.conformance.kernels.sampler_like import CLEAR, drawn

NUM_LOGITS = 2**22
"""Logits of a case of a sampler: a large vocabulary has fewer rows, but enough to compare frequencies."""
ORDER = "top-p is applied to what top-k leaves, renormalised"
JOINT = "top-p is applied to all tokens, not to what top-k leaves"
NUM_TRIES = 32


def draws_op(definition: Definition, read: float | None) -> TraceOp | None:
    """`read`: whether top-p applies to what top-k leaves, renormalised; otherwise both apply to the given
    probabilities."""
    inputs = definition.inputs
    if "vocab_size" not in definition.const or "probs" not in inputs:
        return None
    size = definition.const["vocab_size"]
    num_draws = max(min(NUM_LOGITS // size, NUM_DRAWS), FEWEST_DRAWS)
    top_k, top_p = ("top_k" in inputs), ("top_p" in inputs)
    k, p = min(20, max(size // 2, 1)) if top_k else -1, 0.8 if top_p else 1.0
    groups = {(t, k, p) for t in (1.0, 0.4)} | {(0.4, 1 if top_k else -1, p)}
    cases = tuple(
        Case(f"{size} tokens, temperature {t:g}, top-k {k}, top-p {p:g}", vocab_size=size,
             groups=((t, k, p),), num_draws=num_draws)
        for t, k, p in sorted(groups)
    )  # fmt: skip
    like = replace(LIKES["sampler"], cases=cases, timed=lambda _: cases[-1:], rows=())
    if read:
        others = {name: each for name, each in like.suspects.items() if name != ORDER and "first" not in name}
        make = partial(_make_in_order, like.make)
        like = replace(like, make=make, suspects={JOINT: drawn, **others})
    names: dict[str, Read] = {
        "probs": lambda p: (p["logits"] / p["temperature"][:, None]).softmax(-1),
        "top_k": tensor("top_k"), "top_p": tensor("top_p"),
    }  # fmt: skip
    return TraceOp(like, names, {"samples": "frequency"}, {"frequency": _frequency})


def _frequency(problem: Problem, ids: Any) -> torch.Tensor:
    return frequency(expect_ids(ids, problem["logits"].shape[:1]), problem["logits"].shape[1])[None]


def _make_in_order(make: Any, case: Case, takes_scale: bool, seed: int = 0) -> Problem:
    """A problem in which roundings do not change which tokens top-p keeps of those that top-k keeps."""
    for attempt in range(100):
        problem: Problem = make(case, takes_scale, seed + attempt * 7_919)
        ((temperature, k, p),) = case.groups
        probs = (problem["logits"][0].cpu().double() / temperature).softmax(-1)
        kept = probs.sort(descending=True).values[: k if k > 0 else None]
        if p == 1.0 or float((kept.cumsum(0) / kept.sum() - p).abs().min()) > CLEAR:
            break
    return replace(problem, truth=partial(drawn, mistake="top-k first"))


def draws_of_order(definition: Definition, device: torch.device) -> dict[str, torch.Tensor] | None:
    """Inputs for which the second token is drawn only if top-p applies to the given probabilities; None: the
    operation does not have both filters."""
    size = definition.const.get("vocab_size", 0)
    if set(definition.inputs) != {"probs", "top_k", "top_p"} or size < 3:
        return None
    probs = torch.zeros(NUM_TRIES, size, device=device)
    probs[:, :3] = torch.tensor([0.5, 0.3, 0.2], device=device)
    rows = torch.ones(NUM_TRIES, device=device)
    return {
        "probs": probs, "top_k": (2 * rows).to(definition.inputs["top_k"].dtype),
        "top_p": (0.6 * rows).to(definition.inputs["top_p"].dtype),
    }  # fmt: skip
