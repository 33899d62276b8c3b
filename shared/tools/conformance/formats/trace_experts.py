"""`moe` of FlashInfer Trace: experts in FP8 with a scale for each block, chosen as in DeepSeek-V3, or by the
largest logits, whose softmax gives the weights (Qwen3)."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial

import torch

from diptych.shared.tools.conformance.clauses.case import Case
from diptych.shared.tools.conformance.clauses.inputs import Inputs
from diptych.shared.tools.conformance.clauses.tolerance import Tolerance
from diptych.shared.tools.conformance.formats.trace_files import Definition
from diptych.shared.tools.conformance.formats.trace_op import Read, TraceOp, constant, tensor
from diptych.shared.tools.conformance.kernels.problem import Like, Problem, Tensors, bytes_of

FP8 = torch.float8_e4m3fn
FP8_NAN = 0x7F
FP8_RMS = 0.03
"""Of roundings to a mantissa of 3 bits."""
SIZES = ("num_local_experts", "hidden_size", "intermediate_size", "num_hidden_blocks")
ROUTING = re.compile(r"topk(\d+)_ng(\d+)_kg(\d+)")
TENSORS = {
    "routing_logits": "logits", "routing_bias": "bias",
    "hidden_states": "x", "hidden_states_scale": "x_scale",
    "gemm1_weights": "w13", "gemm1_weights_scale": "w13_scale", "gemm2_weights": "w2",
    "gemm2_weights_scale": "w2_scale",
}  # fmt: skip
SCALARS = ("local_expert_offset", "routed_scaling_factor")


def experts_op(definition: Definition, read: float | None) -> TraceOp | None:
    const, inputs, routing = definition.const, definition.inputs, _routing(definition)
    if not routing or not set(SIZES) <= set(const):
        return None
    if inputs["hidden_states"].dtype != FP8 or inputs["gemm1_weights"].dtype != FP8:
        return None
    last = _num_experts(const) - const["num_local_experts"]
    cases = tuple(
        Case(f"{n} tokens, experts from {offset}", num_tokens=n, offset=offset, seed=i)
        for i, (n, offset) in enumerate(((1, 0), (3, last), (17, 0), (33, last)))
    )
    like = Like(
        "moe", "Each token goes through its experts of this rank; their outputs are summed with weights.",
        "tokens", cases, lambda _: cases[-1:], partial(_make, definition, routing),
        SUSPECTS if len(routing) > 1 else {name: SUSPECTS[name] for name in OF_ANY_ROUTING},
    )  # fmt: skip
    names: dict[str, Read] = {name: tensor(mine) for name, mine in TENSORS.items()}
    names |= {name: constant(name) for name in SCALARS}
    return TraceOp(like, names, {"output": "out"})


def _routing(definition: Definition) -> tuple[int, ...]:
    """Chosen experts, groups and chosen groups, which are in the name only; or chosen experts. Empty: not
    known."""
    const, inputs = definition.const, set(definition.inputs)
    if inputs == {*TENSORS, *SCALARS} and (found := ROUTING.search(definition.name)):
        return tuple(map(int, found.groups()))
    is_softmax = inputs == set(TENSORS) - {"routing_bias"} and "renorm" in definition.name
    return (const["top_k"],) if is_softmax and "top_k" in const else ()


def _num_experts(const: dict[str, int]) -> int:
    return const.get("num_experts", const["num_local_experts"])


def _make(
    definition: Definition, routing: tuple[int, ...], case: Case, takes_scale: bool, seed: int = 0
) -> Problem:
    """Numbers of FP8 have about unit variance; scales undo the growth of sums. Experts without a token hold
    NaN."""
    inputs, const = Inputs(case.seed + 1000 * seed), definition.const
    num_local, hidden, size, num_blocks = (const[name] for name in SIZES)
    block, n, num_experts = hidden // num_blocks, case.num_tokens, _num_experts(const)

    def scaled(*shape: int, scale_shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        scale = (0.5 + inputs.uniform(*scale_shape)) * (1.0 if len(shape) == 2 else shape[-1] ** -0.5)
        return inputs.normal(*shape).to(FP8), scale

    x, x_scale = scaled(n, hidden, scale_shape=(num_blocks, n))
    w13, w13_scale = scaled(
        num_local, 2 * size, hidden, scale_shape=(num_local, 2 * size // block, num_blocks)
    )
    w2, w2_scale = scaled(num_local, hidden, size, scale_shape=(num_local, num_blocks, size // block))
    order = torch.stack([inputs.permutation(num_experts) for _ in range(n)])  # no two are equal in bfloat16
    logits = inputs.normal(n, num_experts) if len(routing) > 1 else 4.0 * order / num_experts - 2.0
    bias = definition.inputs.get("routing_bias", definition.inputs["routing_logits"])
    tensors = {
        "logits": logits.to(definition.inputs["routing_logits"].dtype),
        "bias": inputs.normal(num_experts, std=0.1, dtype=bias.dtype),
        "x": x, "x_scale": x_scale, "w13": w13, "w13_scale": w13_scale, "w2": w2, "w2_scale": w2_scale,
    }  # fmt: skip
    constants = {
        "local_expert_offset": case.offset, "routed_scaling_factor": 2.5, "routing": routing,
        "half_unit": 2.0**-4,
    }  # fmt: skip
    problem = Problem(
        case.name, tensors, constants, _experts, "quantized moe", definition.outputs["output"].dtype, n,
        0.0, 0.0, limit=_limit,
    )  # fmt: skip
    used = _weights(problem)[:, case.offset : case.offset + num_local].any(0)
    for each in (w13, w2):
        each.view(torch.uint8)[~used.to(each.device)] = FP8_NAN
    num_used, num_calls = int(used.sum()), int((_weights(problem) > 0).sum())
    num_bytes = bytes_of(w13, w2) / num_local * num_used + 3 * n * hidden
    return replace(problem, num_bytes=num_bytes, flops=6.0 * num_calls * hidden * size)


def _limit(expected: Tensors) -> Tolerance:
    size = max(float(each.square().mean().sqrt()) for each in expected.values())
    reason = "kernels round the activation between the two GEMMs to FP8, up to 1/16 of each number"
    return Tolerance(8 * FP8_RMS * size, 4 * FP8_RMS, 2 * FP8_RMS, reason)


def _weights(problem: Problem, mistake: str = "") -> torch.Tensor:
    """The share [num_tokens, num_experts] of each expert in the sum, float64: 0 for those not chosen."""
    num_chosen, *groups_of = problem.constants["routing"]
    if not groups_of:
        logits = problem["logits"].cpu().double()
        best_logits = logits.topk(num_chosen, -1)
        shares = logits.softmax(-1).gather(1, best_logits.indices)
        shares = shares if mistake == "sum" else best_logits.values.softmax(-1)
        return torch.zeros_like(logits).scatter_(1, best_logits.indices, shares)
    num_groups, kept_groups = groups_of
    scores = problem["logits"].cpu().double().sigmoid()
    biased = scores if mistake == "no bias" else scores + problem["bias"].cpu().double()
    groups = biased.unflatten(1, (num_groups, -1))
    best = groups.topk(min(2, groups.shape[2]), -1).values.sum(-1).topk(kept_groups, -1).indices
    is_kept = torch.zeros(groups.shape[:2], dtype=torch.bool).scatter_(1, best, True)
    if mistake == "groups":
        is_kept |= True
    chosen = groups.masked_fill(~is_kept[:, :, None], -torch.inf).flatten(1).topk(num_chosen, -1).indices
    weights = torch.zeros_like(scores).scatter_(1, chosen, 1.0) * (biased if mistake == "biased" else scores)
    if mistake != "sum":
        weights = weights / weights.sum(1, keepdim=True)
    return weights if mistake == "factor" else weights * problem.constants["routed_scaling_factor"]


def _experts(problem: Problem, mistake: str = "") -> dict[str, torch.Tensor]:
    """In float64, one expert after another."""
    x = problem["x"].cpu().double() * _of_blocks(problem["x_scale"].cpu().T, problem["x"])
    weights, out = _weights(problem, mistake), torch.zeros_like(x)
    offset = 0 if mistake == "offset" else problem.constants["local_expert_offset"]
    for e in range(len(problem["w13"])):
        share = weights[:, offset + e]
        rows = share.nonzero()[:, 0]
        if not len(rows):
            continue
        w13, w2 = (
            problem[name][e].cpu().double() * _of_blocks(problem[f"{name}_scale"][e].cpu(), problem[name][e])
            for name in ("w13", "w2")
        )
        up, gate = (x[rows] @ w13.T).chunk(2, -1)
        if mistake == "swapped":
            up, gate = gate, up
        out[rows] += share[rows, None] * (gate * gate.sigmoid() * up @ w2.T)
    return {"out": out}


def _of_blocks(scales: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The scale of each number of a matrix, float64, from those of its blocks."""
    for dim, size in enumerate(values.shape):
        scales = scales.double().repeat_interleave(size // scales.shape[dim], dim)
    return scales


SUSPECTS = {
    "the weights of the chosen experts are not normalised": partial(_experts, mistake="sum"),
    "routed_scaling_factor is forgotten": partial(_experts, mistake="factor"),
    "the bias of the choice is part of the weights": partial(_experts, mistake="biased"),
    "experts are chosen without the bias": partial(_experts, mistake="no bias"),
    "experts are chosen of all groups": partial(_experts, mistake="groups"),
    "silu is applied to the first half of gemm1": partial(_experts, mistake="swapped"),
    "local_expert_offset is ignored": partial(_experts, mistake="offset"),
}
OF_ANY_ROUTING = (
    "the weights of the chosen experts are not normalised",
    "silu is applied to the first half of gemm1",
)
