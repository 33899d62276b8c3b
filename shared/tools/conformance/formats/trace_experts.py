"""`moe` of FlashInfer Trace: experts in FP8 with a scale for each block or tensor, or in float32 for kernels
that round weights to FP4. Experts are chosen as in DeepSeek-V3; by the largest logits, whose softmax gives
the weights (Qwen3); by the largest sigmoid, which scales the expert's input (Llama 4); or they are given."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from functools import partial

import torch

from diptych.shared.tools.conformance.clauses.case import Case
from diptych.shared.tools.conformance.clauses.device import check_device
from diptych.shared.tools.conformance.clauses.inputs import Inputs
from diptych.shared.tools.conformance.clauses.tolerance import Tolerance, tolerance
from diptych.shared.tools.conformance.formats.trace_files import Definition
from diptych.shared.tools.conformance.formats.trace_op import Read, TraceOp, constant, tensor
from diptych.shared.tools.conformance.kernels.problem import Like, Problem, Tensors, bytes_of

FP8 = torch.float8_e4m3fn
FP8_NAN = 0x7F
FP8_RMS = 0.03
"""Of roundings to a mantissa of 3 bits."""
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FP4_BLOCK = 32
FP4_RMS = (sum(each**2 for each in FP4) / len(FP4)) ** 0.5
LARGE = 2**30
"""Bytes of weights beyond which two cases are run instead of four."""
ROUTING = re.compile(r"topk(\d+)_ng(\d+)_kg(\d+)")
GROUPS, SOFTMAX, SIGMOID, GIVEN = "groups", "softmax", "sigmoid", "given"
WEIGHTS = {"hidden_states": "x", "gemm1_weights": "w13", "gemm2_weights": "w2"}
BLOCK_SCALES = {
    "hidden_states_scale": "x_scale", "gemm1_weights_scale": "w13_scale", "gemm2_weights_scale": "w2_scale",
}  # fmt: skip
TENSOR_SCALES = {
    "output1_scales_scalar": "up_scale", "output1_scales_gate_scalar": "gate_scale",
    "output2_scales_scalar": "w2_scale",
}  # fmt: skip
CHOICE = {"routing_logits": "logits", "routing_bias": "bias", "topk_ids": "topk_ids"}
SCALARS = ("local_expert_offset", "routed_scaling_factor")


@dataclass(frozen=True)
class Experts:
    """Sizes of the experts of a Definition. `routing`: how they are chosen; `chosen`: the number for each
    token; of groups, also the numbers of groups and of chosen groups. `num_blocks`: of scales along
    hidden_size; 0: one for each expert."""

    num_local: int
    num_experts: int
    hidden: int
    size: int
    routing: str
    chosen: tuple[int, ...]
    num_blocks: int = 0


def experts_op(definition: Definition, read: float | None) -> TraceOp | None:
    experts = _experts_of(definition)
    if experts is None:
        return None
    last = experts.num_experts - experts.num_local
    counts = ((1, 0), (3, last), (17, 0), (33, last))
    num_bytes = definition.num_const_bytes
    cases = tuple(
        Case(f"{n} tokens, experts from {offset}", num_tokens=n, offset=offset, seed=i)
        for i, (n, offset) in enumerate(counts[1:3] if num_bytes > LARGE else counts)
    )
    like = Like(
        "moe", "Each token goes through its experts of this rank; their outputs are summed with weights.",
        "tokens", cases, lambda _: cases[-1:], partial(_make, definition, experts),
        {name: SUSPECTS[name] for name in SUSPECTS_OF[experts.routing]}, negated="x",
    )  # fmt: skip
    tensors = {**WEIGHTS, **BLOCK_SCALES, **TENSOR_SCALES, **CHOICE}
    names: dict[str, Read] = {name: tensor(tensors[name]) for name in definition.inputs if name in tensors}
    names |= {name: constant(name) for name in SCALARS}
    return TraceOp(like, names, {"output": "out"})


def _experts_of(definition: Definition) -> Experts | None:
    """None: this form is not known."""
    const, inputs = definition.const, definition.inputs
    num_local = const.get("num_local_experts", const.get("num_experts"))
    if num_local is None or not {"hidden_size", "intermediate_size"} <= set(const):
        return None
    if not set(WEIGHTS) <= set(inputs):
        return None
    types = inputs["hidden_states"].dtype, inputs["gemm1_weights"].dtype
    is_float = types[0] == torch.bfloat16 and types[1] == torch.float32
    scales = set(BLOCK_SCALES) if "num_hidden_blocks" in const else set() if is_float else set(TENSOR_SCALES)
    if not scales <= set(inputs) or (types != (FP8, FP8) and not is_float):
        return None
    routing, chosen = _routing(definition, set(inputs) - set(WEIGHTS) - scales)
    if not routing or (is_float and const["hidden_size"] % FP4_BLOCK):
        return None
    num_experts, num_blocks = const.get("num_experts", num_local), const.get("num_hidden_blocks", 0)
    sizes = const["hidden_size"], const["intermediate_size"]
    return Experts(num_local, num_experts, *sizes, routing, chosen, num_blocks)


def _routing(definition: Definition, inputs: set[str]) -> tuple[str, tuple[int, ...]]:
    """How experts are chosen. `inputs`: those that are no numbers of experts. Numbers of groups are in the
    name only; whether a softmax or a sigmoid gives the weights is in the reference only."""
    found, top_k = ROUTING.search(definition.name), definition.const.get("top_k")
    if inputs == {"routing_logits", "routing_bias", *SCALARS} and (found or top_k):
        return GROUPS, tuple(map(int, found.groups())) if found else (top_k or 0, 1, 1)
    if top_k is None:
        return "", ()
    if inputs == {"topk_ids"}:
        return GIVEN, (top_k,)
    _, has_topk, after = definition.reference.partition("topk(")
    if inputs == {"routing_logits"} and has_topk and "softmax(" in after:
        return SOFTMAX, (top_k,)
    if inputs == {"routing_logits", "routing_bias"} and top_k == 1 and "sigmoid(" in definition.reference:
        return SIGMOID, (1,)
    return "", ()


def _make(definition: Definition, experts: Experts, case: Case, takes_scale: bool, seed: int = 0) -> Problem:
    """Numbers have about unit variance; scales undo the growth of sums. Experts without a token hold NaN."""
    inputs, n = Inputs(case.seed + 1000 * seed), case.num_tokens
    tensors = _choice(definition, experts, inputs, n)
    constants = {
        "local_expert_offset": case.offset, "routed_scaling_factor": 2.5, "experts": experts,
        "half_unit": 2.0**-4,
    }  # fmt: skip
    is_fp8 = definition.inputs["hidden_states"].dtype == FP8
    if not is_fp8:
        del constants["half_unit"]  # that of the output
    x = inputs.normal(n, experts.hidden)
    tensors["x"] = x.to(FP8 if is_fp8 else torch.bfloat16)
    problem = Problem(
        case.name, tensors, constants, _experts, "quantized moe", definition.outputs["output"].dtype, n,
        0.0, 0.0, limit=_limit if is_fp8 else _limit_of_floats,
    )  # fmt: skip
    shares = _weights(problem)
    used = shares[:, case.offset : case.offset + experts.num_local].any(0)
    of_experts = _weights_of_experts(definition, experts, used, inputs, n)
    num_bytes = bytes_of(of_experts["w13"], of_experts["w2"]) / experts.num_local * int(used.sum())
    flops = 6.0 * int((shares > 0).sum()) * experts.hidden * experts.size
    problem = replace(problem, num_bytes=num_bytes + 3 * n * experts.hidden, flops=flops)
    return problem.with_tensors(**of_experts)


def _choice(definition: Definition, experts: Experts, inputs: Inputs, n: int) -> dict[str, torch.Tensor]:
    """What experts are chosen by: no two logits are equal in bfloat16, unless groups are chosen."""
    order = torch.stack([inputs.permutation(experts.num_experts) for _ in range(n)])
    if experts.routing == GIVEN:
        ids = order[:, : experts.chosen[0]].to(torch.int32)
        weights = (0.25 + 0.5 * inputs.uniform(*ids.shape)).bfloat16().view(torch.int16)
        return {"topk_ids": ids * 2**16 + weights.to(torch.int32)}
    is_of_groups = experts.routing == GROUPS
    logits = inputs.normal(*order.shape) if is_of_groups else 4.0 * order / experts.num_experts - 2.0
    spec = definition.inputs["routing_logits"]
    bias = definition.inputs.get("routing_bias", spec)
    return {
        "logits": logits.to(spec.dtype), "bias": inputs.normal(experts.num_experts, std=0.1, dtype=bias.dtype)
    }  # fmt: skip


def _weights_of_experts(
    definition: Definition, experts: Experts, used: torch.Tensor, inputs: Inputs, n: int
) -> dict[str, torch.Tensor]:
    """Weights and scales, one expert after another: all of them together take gigabytes in float32."""
    num, hidden, size, num_blocks = experts.num_local, experts.hidden, experts.size, experts.num_blocks
    dtype = definition.inputs["gemm1_weights"].dtype
    w13, w2 = (torch.empty(num, *shape, dtype=dtype) for shape in ((2 * size, hidden), (hidden, size)))
    for e in range(num):
        for w in (w13[e], w2[e]):
            if dtype != FP8:
                w.copy_(_as_of_fp4(w.shape, inputs) if used[e] else torch.full(w.shape, torch.nan))
            else:  # magnitudes of 1/8 to 15/8: sign, two bits of the exponent, mantissa
                drawn = torch.randint(256, w.shape, generator=inputs.generator, dtype=torch.uint8)
                drawn = (drawn & 0x9F) | 0x20 if used[e] else torch.full_like(drawn, FP8_NAN)
                w.view(torch.uint8).copy_(drawn)
    made = {"w13": w13.to(check_device()), "w2": w2.to(check_device())}

    def scales(*shape: int, factor: float = 1.0) -> torch.Tensor:
        return (0.5 + inputs.uniform(*shape)) * factor

    of_w13, of_w2 = hidden**-0.5, size**-0.5
    if num_blocks:
        block = hidden // num_blocks
        made["x_scale"] = scales(num_blocks, n)
        made["w13_scale"] = scales(num, 2 * size // block, num_blocks, factor=of_w13)
        made["w2_scale"] = scales(num, num_blocks, size // block, factor=of_w2)
    elif dtype == FP8:
        made["up_scale"], made["gate_scale"] = scales(num, factor=of_w13), scales(num, factor=of_w13)
        made["w2_scale"] = scales(num, factor=of_w2)
    return made


def _as_of_fp4(shape: torch.Size, inputs: Inputs) -> torch.Tensor:
    """float32: what FP4 with a power of 2 as the scale of 32 numbers holds without a rounding. Each block has
    a number of the largest magnitude, from which a kernel finds that scale."""
    rows, columns = shape
    index = torch.randint(16, shape, generator=inputs.generator, dtype=torch.uint8)
    index[:, ::FP4_BLOCK] |= 7
    values = torch.tensor([*FP4, *(-each for each in FP4)])[index.int()]
    exponent = round(math.log2(columns**-0.5 / FP4_RMS))
    num_blocks = -(-columns // FP4_BLOCK)
    exponents = exponent - torch.randint(2, (rows, num_blocks), generator=inputs.generator)
    return values * (2.0**exponents).repeat_interleave(FP4_BLOCK, 1)[:, :columns]


def _limit(expected: Tensors) -> Tolerance:
    size = max(float(each.square().mean().sqrt()) for each in expected.values())
    reason = "kernels round the activation between the two GEMMs to FP8, up to 1/16 of each number"
    return Tolerance(8 * FP8_RMS * size, 4 * FP8_RMS, 2 * FP8_RMS, reason)


def _limit_of_floats(expected: Tensors) -> Tolerance:
    """That of experts in bfloat16, relative to the size of the results."""
    size = max(float(each.square().mean().sqrt()) for each in expected.values())
    limit = tolerance("moe", torch.bfloat16)
    return replace(limit, atol=limit.atol * size)


def _weights(problem: Problem, mistake: str = "") -> torch.Tensor:
    """The share [num_tokens, num_experts] of each expert in the sum, float64: 0 for those not chosen."""
    experts: Experts = problem.constants["experts"]
    if experts.routing == GROUPS:
        return _weights_of_groups(problem, mistake)
    if experts.routing == GIVEN:
        packed = problem["topk_ids"].cpu()
        chosen, shares = packed >> 16, (packed & 0xFFFF).to(torch.int16).view(torch.bfloat16).double()
        weights = shares.new_zeros(len(packed), experts.num_experts)
        return weights.scatter_(1, chosen.long(), torch.ones_like(shares) if mistake == "one" else shares)
    logits = problem["logits"].cpu().double()
    best = logits.topk(experts.chosen[0], -1)
    if experts.routing == SIGMOID:
        shares = torch.ones_like(best.values) if mistake == "one" else best.values.sigmoid()
    else:
        of_all = logits.softmax(-1).gather(1, best.indices)
        shares = of_all if mistake == "sum" else best.values.softmax(-1)
    return torch.zeros_like(logits).scatter_(1, best.indices, shares)


def _weights_of_groups(problem: Problem, mistake: str) -> torch.Tensor:
    num_chosen, num_groups, kept_groups = problem.constants["experts"].chosen
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
    experts, x = problem.constants["experts"], problem["x"].cpu().double()
    if experts.num_blocks:
        x *= _of_blocks(problem["x_scale"].cpu().T, x)
    weights, out = _weights(problem, mistake), torch.zeros_like(x)
    is_of_input = experts.routing in (SIGMOID, GIVEN) and experts.chosen == (1,)
    offset = 0 if mistake == "offset" else problem.constants["local_expert_offset"]
    for e in range(experts.num_local):
        share = weights[:, offset + e, None]
        rows = share[:, 0].nonzero()[:, 0]
        if not len(rows):
            continue
        w13, w2 = (_numbers(problem, name, e) for name in ("w13", "w2"))
        given = x[rows] * share[rows] if is_of_input and mistake != "output" else x[rows]
        up, gate = (given @ w13.T).chunk(2, -1)
        if mistake == "swapped":
            up, gate = gate, up
        y = gate * gate.sigmoid() * up @ w2.T
        out[rows] += y if is_of_input and mistake != "output" else share[rows] * y
    return {"out": out}


def _numbers(problem: Problem, name: str, e: int) -> torch.Tensor:
    """The weights of one expert with their scales, float64."""
    w = problem[name][e].cpu().double()
    if f"{name}_scale" in problem.tensors:
        scale = problem[f"{name}_scale"][e].cpu()
        return w * (_of_blocks(scale, w) if scale.dim() else scale.double())
    if "up_scale" in problem.tensors:
        up, gate = (problem[each][e].cpu().double() for each in ("up_scale", "gate_scale"))
        half = len(w) // 2
        w[:half] *= up
        w[half:] *= gate
    return w


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
    "local_expert_offset is ignored": partial(_experts, mistake="offset"),
    "silu is applied to the first half of gemm1": partial(_experts, mistake="swapped"),
    "the weight of an expert scales its output, not its input": partial(_experts, mistake="output"),
    "the weights of experts are ignored": partial(_experts, mistake="one"),
}
_OF_ALL = "silu is applied to the first half of gemm1"
_SUM = "the weights of the chosen experts are not normalised"
_OUTPUT, _ONE = list(SUSPECTS)[-2:]
SUSPECTS_OF = {
    GROUPS: tuple(SUSPECTS)[:7], SOFTMAX: (_SUM, _OF_ALL), SIGMOID: (_OF_ALL, _OUTPUT, _ONE),
    GIVEN: (_OF_ALL, _OUTPUT, _ONE),
}  # fmt: skip
