"""Norms, rotary embedding, activation, experts and 8-bit GEMM, with exact results by their contracts."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from diptych.shared import registry
from diptych.shared.config import RopeConfig
from diptych.shared.interfaces import TopKOutput
from diptych.shared.modeling.rope import rope_angles
from diptych.shared.tools.conformance.clauses.case import Case, table
from diptych.shared.tools.conformance.clauses.device import building, check_device
from diptych.shared.tools.conformance.clauses.inputs import FLOAT_TYPES, Inputs, type_name
from diptych.shared.tools.conformance.contracts.layers.norm_and_activation import EPS, make_norm
from diptych.shared.tools.conformance.contracts.layers.rotary import CONTEXT_LEN
from diptych.shared.tools.conformance.contracts.moe.expected import experts64
from diptych.shared.tools.conformance.contracts.moe.experts import Experts
from diptych.shared.tools.conformance.kernels import own_kernels
from diptych.shared.tools.conformance.kernels.problem import Like, Problem, Tensors, bytes_of

HALF = torch.bfloat16
ROWS: tuple[Case, ...] = table(
    "num_tokens size std dtype",
    *(
        (*sizes, dtype)
        for dtype in FLOAT_TYPES
        for sizes in (
            (1, 64, 1.0), (5, 63, 1.0), (2, 127, 1.0), (21, 128, 1.0), (2, 129, 1.0), (4, 1000, 1.0),
            (130, 256, 1.0), (1, 4096, 1.0), (2, 16384, 1.0), (7, 96, 1e-3), (7, 96, 3e-2), (3, 96, 3e4),
        )
    ),
    name=lambda num_tokens, size, std, dtype: (
        f"{num_tokens} x {size}{f', values of {std:g}' * (std != 1.0)}, {type_name(dtype)}"
    ),
)  # fmt: skip


def panel() -> str:
    """The implementation whose speed is compared; on a CPU the reference."""
    return "optimized" if check_device().type == "cuda" else "reference"


def timed_rows(device: str) -> tuple[Case, ...]:
    on_gpu = device == "cuda"
    size, counts = (4096, (1, 16, 128, 1024, 8192)) if on_gpu else (1024, (1, 16, 128, 1024))
    rows = ((n, size, 1.0, HALF if on_gpu else torch.float32) for n in counts)
    return table("num_tokens size std dtype", *rows, name=f"{{num_tokens}} x {size}")


def make_rms_norm(case: Case, takes_scale: bool, seed: int = 0, is_added: bool = False) -> Problem:
    """x, residual [num_tokens, size], weight [size]; eps."""
    inputs = Inputs(seed)
    x = (case.std * inputs.normal(case.num_tokens, case.size)).clamp(-6e4, 6e4).to(case.dtype)
    weight = inputs.normal(case.size, dtype=case.dtype)
    tensors = {"x": x, "weight": weight}
    eps = case.fields().get("eps", EPS)
    if is_added:
        tensors["residual"] = (case.std * inputs.normal(*x.shape) / 4).clamp(-3e4, 3e4).to(case.dtype)
        tensors["x"] = x = (x / 4).to(case.dtype)
    norm = make_norm(registry.load("layers", panel()), case.size, case.dtype, weight)
    ours = partial(norm, x)
    if is_added:
        ours = partial(norm.add_and_norm, x.clone(), tensors["residual"].clone())
    num_bytes = (4 if is_added else 2) * bytes_of(x) + bytes_of(weight)
    return Problem(
        case.name, tensors, {"eps": eps}, norm_like, "norm", case.dtype, x.numel(), num_bytes, 0.0, ours
    )


def norm_like(problem: Problem, mistake: str = "") -> dict[str, torch.Tensor]:
    x, weight, eps = problem["x"].cpu(), problem["weight"].cpu().double(), problem.constants["eps"]
    eps = {"no eps": 0.0, "other eps": 1e-6}.get(mistake, eps)
    residual = problem.tensors.get("residual")
    results = {}
    if residual is not None:
        summed = (x + residual.cpu()).double()
        results["residual"] = summed
        x = x if mistake in ("no residual", "residual after") else x + residual.cpu()
        if mistake == "old residual":
            results["residual"] = residual.cpu().double()
    x = x.double()
    mean = x.square().mean(-1, keepdim=True)
    if mistake == "layer norm":
        x = x - x.mean(-1, keepdim=True)
        mean = x.square().mean(-1, keepdim=True)
    if mistake == "sum":
        mean = mean * x.shape[-1]
    root = mean.sqrt() + eps if mistake == "eps outside" else (mean + eps).sqrt()
    if mistake == "no weight":
        weight = torch.ones_like(weight)
    out = x / root * (weight + (mistake == "gemma"))
    if mistake == "swapped":
        return {"out": results["residual"], "residual": out}
    return {"out": out if mistake != "residual after" else out + residual.cpu().double(), **results}  # type: ignore[union-attr]


NORM_SUSPECTS = {
    "eps is added outside the root": partial(norm_like, mistake="eps outside"),
    "eps is left out": partial(norm_like, mistake="no eps"),
    "eps is 1e-6, not the argument": partial(norm_like, mistake="other eps"),
    "the mean is subtracted, as in LayerNorm": partial(norm_like, mistake="layer norm"),
    "squares are summed, not averaged": partial(norm_like, mistake="sum"),
    "the weight is left out": partial(norm_like, mistake="no weight"),
    "1 + weight is multiplied, as in Gemma": partial(norm_like, mistake="gemma"),
}
ADD_SUSPECTS = {
    **NORM_SUSPECTS,
    "the residual is not added": partial(norm_like, mistake="no residual"),
    "the residual is added after the norm": partial(norm_like, mistake="residual after"),
    "the residual is not updated: x is not added to it": partial(norm_like, mistake="old residual"),
    "the results are swapped: the sum is the first": partial(norm_like, mistake="swapped"),
}


def make_silu_and_mul(case: Case, takes_scale: bool, seed: int = 0) -> Problem:
    """x [num_tokens, 2 * size]: the gate, then the other half."""
    x = Inputs(seed).normal(case.num_tokens, 2 * case.size, dtype=case.dtype, std=4.0)
    with building(case.dtype):
        ours = partial(registry.load("layers", panel()).SiluAndMul(), *x.chunk(2, dim=-1))
    num_bytes = bytes_of(x) * 1.5
    return Problem(
        case.name, {"x": x}, {}, _gated, "elementwise", case.dtype, x.numel(), num_bytes, 0.0, ours
    )


def _gated(problem: Problem, form: str = "") -> dict[str, torch.Tensor]:
    x = problem["x"].cpu().double()
    gate, up = (x[:, ::2], x[:, 1::2]) if form == "pairs" else x.chunk(2, dim=-1)
    if form == "swapped":
        gate, up = up, gate
    if form == "gelu":
        return {"out": torch.nn.functional.gelu(gate, approximate="tanh") * up}
    return {"out": torch.sigmoid(gate) * (1.0 if form == "sigmoid" else gate) * up}


SILU_SUSPECTS = {
    "silu is applied to the second half": partial(_gated, form="swapped"),
    "gate and up are taken as neighbours, not as halves": partial(_gated, form="pairs"),
    "sigmoid in place of silu: the gate is not multiplied": partial(_gated, form="sigmoid"),
    "gelu in place of silu": partial(_gated, form="gelu"),
}

HEADS: tuple[Case, ...] = table(
    "head_dim rotary_dim num_qo_heads num_kv_heads dtype",
    *(
        (*sizes, dtype)
        for dtype in FLOAT_TYPES
        for sizes in ((64, 64, 1, 1), (128, 128, 6, 2), (80, 80, 7, 1), (96, 48, 4, 2), (64, 64, 32, 8))
    ),
    name="{rotary_dim} of {head_dim}, {num_qo_heads}:{num_kv_heads} heads, {dtype}",
    positions=(0, 3, 1023, 3, 255, 256, 257, 100, 63),
)


def timed_heads(device: str) -> tuple[Case, ...]:
    on_gpu = device == "cuda"
    shape = (128, 128, 32, 8, HALF) if on_gpu else (64, 64, 8, 2, torch.float32)
    return tuple(
        table("head_dim rotary_dim num_qo_heads num_kv_heads dtype", shape, name=f"{n} tokens",
              positions=tuple(i % CONTEXT_LEN for i in range(n)))[0]
        for n in ((1, 16, 128, 1024, 8192) if on_gpu else (1, 16, 128, 1024))
    )  # fmt: skip


def make_rope(case: Case, takes_scale: bool, seed: int = 0) -> Problem:
    """positions int64 [num_tokens]; q, k [num_tokens, num_heads, head_dim]; cos_sin_cache float32
    [max_positions, rotary_dim], cosines before sines. Dimension i is paired with i + rotary_dim / 2."""
    inputs, num_tokens = Inputs(seed), len(case.positions)
    rope = RopeConfig("default", 10000.0, case.rotary_dim)
    q, k = (
        inputs.normal(num_tokens, n, case.head_dim, dtype=case.dtype)
        for n in (case.num_qo_heads, case.num_kv_heads)
    )
    positions = torch.tensor(case.positions, dtype=torch.int64, device=check_device())
    angles = rope_angles(rope, torch.arange(CONTEXT_LEN))[0]
    cache = torch.cat((angles.cos(), angles.sin()), dim=1).to(check_device())
    with building(case.dtype):
        rotary = registry.load("layers", panel()).RotaryEmbedding(rope, case.head_dim, CONTEXT_LEN)
    tensors = {"positions": positions, "q": q, "k": k, "cos_sin_cache": cache}
    num_bytes = 2 * bytes_of(q, k) * case.rotary_dim / case.head_dim + num_tokens * case.rotary_dim * 4
    return Problem(
        case.name, tensors, {"rotary_dim": case.rotary_dim}, _turned, "rotary", case.dtype, num_tokens,
        num_bytes, 0.0, partial(rotary, positions, q.clone(), k.clone()),
    )  # fmt: skip


def _turned(problem: Problem, mistake: str = "") -> dict[str, torch.Tensor]:
    rotary_dim = problem.constants["rotary_dim"]
    positions = problem["positions"].cpu()
    if mistake == "rows":
        positions = torch.arange(len(positions))
    if mistake == "off by one":
        positions = (positions + 1) % CONTEXT_LEN
    cos, sin = problem["cos_sin_cache"].cpu().double()[positions].chunk(2, dim=1)
    cos, sin = cos[:, None], -sin[:, None] if mistake == "backwards" else sin[:, None]
    results = {}
    for name in ("q", "k"):
        x = problem[name].cpu().double()
        first, rest = x[..., :rotary_dim], x[..., rotary_dim:]
        a, b = (first[..., ::2], first[..., 1::2]) if mistake == "pairs" else first.chunk(2, dim=-1)
        a, b = a * cos - b * sin, b * cos + a * sin
        first = torch.stack((a, b), -1).flatten(-2) if mistake == "pairs" else torch.cat((a, b), -1)
        is_left = mistake == f"no {name}"
        results[name] = x if is_left else torch.cat((first, rest), -1)
    return results


ROPE_SUSPECTS = {
    "dimension 2i is paired with 2i + 1, not i with i + rotary_dim / 2": partial(_turned, mistake="pairs"),
    "pairs turn in the other direction": partial(_turned, mistake="backwards"),
    "row numbers are taken for positions": partial(_turned, mistake="rows"),
    "positions are one too high": partial(_turned, mistake="off by one"),
    "k is not turned": partial(_turned, mistake="no k"),
    "q is not turned": partial(_turned, mistake="no q"),
}

SIZES = "num_tokens num_experts num_used num_chosen hidden_size intermediate_size dtype"
EXPERTS = table(
    SIZES,
    *(
        (*sizes, dtype)
        for dtype in FLOAT_TYPES
        for sizes in (
            (1, 5, 5, 2, 64, 32), (13, 5, 4, 3, 64, 63), (40, 9, 1, 1, 48, 24), (3, 64, 60, 8, 128, 32),
            (130, 8, 3, 2, 128, 129), (65, 1, 1, 1, 16, 16),
        )
    ),
    name="{num_tokens} tokens, {num_chosen} of {num_experts} experts, {hidden_size}-{intermediate_size}, "
    "{dtype}",
    of=Experts,
)  # fmt: skip


def timed_experts(device: str) -> tuple[Case, ...]:
    on_gpu = device == "cuda"
    shape = (64, 64, 8, 2048, 768, HALF) if on_gpu else (8, 8, 2, 256, 128, torch.float32)
    counts = (1, 16, 128, 512) if on_gpu else (1, 16, 128)
    return table(SIZES, *((n, *shape) for n in counts), name="{num_tokens} tokens", of=Experts)


def make_moe(case: Any, takes_scale: bool, seed: int = 0) -> Problem:
    """x [num_tokens, hidden_size]; w13 [num_experts, 2 * intermediate_size, hidden_size], gate before up; w2
    [num_experts, hidden_size, intermediate_size]; topk_weights float32, topk_ids int32 [num_tokens, top_k].
    Weights of experts that are not chosen hold NaN."""
    inputs = Inputs(case.seed + seed)
    module = case.make(registry.load("moe", panel()), inputs)
    topk = case.topk(inputs)
    x = inputs.normal(case.num_tokens, case.hidden_size, dtype=case.dtype)
    w13, w2 = module.w13.data, module.w2.data
    tensors = {"x": x, "w13": w13, "w2": w2, "topk_weights": topk.topk_weights, "topk_ids": topk.topk_ids}
    num_hit = len(topk.topk_ids.unique())
    num_bytes = bytes_of(w13, w2) / case.num_experts * num_hit + 2 * bytes_of(x)
    return Problem(
        case.name, tensors, {}, _experts, "moe", case.dtype, case.num_tokens,
        num_bytes, 6.0 * case.num_tokens * case.num_chosen * case.hidden_size * case.intermediate_size,
        partial(module, x, topk),
    )  # fmt: skip


def _experts(problem: Problem, mistake: str = "") -> dict[str, torch.Tensor]:
    weights, ids, w13 = problem["topk_weights"], problem["topk_ids"], problem["w13"]
    if mistake == "normalised":
        weights = weights / weights.sum(1, keepdim=True)
    if mistake == "unweighted":
        weights = torch.ones_like(weights)
    if mistake == "first":
        weights, ids = weights[:, :1], ids[:, :1]
    if mistake == "swapped":
        w13 = torch.cat(w13.chunk(2, dim=1)[::-1], dim=1)
    return {"out": experts64(problem["x"], TopKOutput(weights, ids), w13, problem["w2"]).cpu()}


MOE_SUSPECTS = {
    "the weights of the experts are normalised again": partial(_experts, mistake="normalised"),
    "outputs of experts are summed without their weights": partial(_experts, mistake="unweighted"),
    "only the first chosen expert is used": partial(_experts, mistake="first"),
    "silu is applied to the second half of w13": partial(_experts, mistake="swapped"),
}

GEMMS: tuple[Case, ...] = table(
    "num_tokens out size dtype",
    *((*sizes, dtype) for dtype in (torch.float16, HALF) for sizes in (
        (1, 64, 256), (5, 96, 128), (17, 160, 640), (33, 80, 272), (130, 128, 512), (3, 64, 4096))),
    name="{num_tokens} x {out} x {size}, {dtype}",
)  # fmt: skip


def timed_gemms(device: str) -> tuple[Case, ...]:
    counts, size = ((1, 16, 128, 1024), 4096) if device == "cuda" else ((1, 16, 128), 512)
    rows = ((n, size, size, HALF) for n in counts)
    return table("num_tokens out size dtype", *rows, name=f"{{num_tokens}} x {size} x {size}")


def make_w8a8(case: Case, takes_scale: bool, seed: int = 0) -> Problem:
    """a int8 [num_tokens, size], b int8 [out, size]; scale_a float32 [num_tokens, 1], one for each token,
    scale_b float32 [out, 1], one for each output channel. out = (a @ b.T) * scale_a * scale_b.T. The int32
    sum is exact."""
    inputs = Inputs(seed)
    a, b = ((inputs.integers(255, n, case.size) - 127).to(torch.int8) for n in (case.num_tokens, case.out))
    unit = 1 / 73 / case.size**0.25  # sums have about unit variance
    scale_a, scale_b = ((0.5 + inputs.uniform(n, 1)) * unit for n in (case.num_tokens, case.out))
    tensors = {"a": a, "b": b, "scale_a": scale_a, "scale_b": scale_b}
    num_bytes = bytes_of(a, b, scale_a, scale_b) + case.num_tokens * case.out * 2
    return Problem(
        case.name, tensors, {"dtype": case.dtype}, _scaled, "quantized linear", case.dtype, case.num_tokens,
        num_bytes, 2.0 * case.num_tokens * case.out * case.size / 2,
        own_kernels.on_gpu(own_kernels.w8a8, a, b, scale_a, scale_b, case.dtype),
    )  # fmt: skip


def scaled_gemm64(tensors: Tensors, mistake: str = "") -> dict[str, torch.Tensor]:
    a, b, scale_a, scale_b = (tensors[name].cpu().double() for name in ("a", "b", "scale_a", "scale_b"))
    if mistake == "first token":
        scale_a = scale_a[:1]
    if mistake == "first channel":
        scale_b = scale_b[:1]
    scale_a = torch.ones_like(scale_a) if mistake == "no a" else scale_a
    scale_b = torch.ones_like(scale_b) if mistake == "no b" else scale_b
    return {"out": a @ b.T * scale_a * scale_b.T}


def _scaled(problem: Problem, mistake: str = "") -> dict[str, torch.Tensor]:
    return scaled_gemm64(problem.tensors, mistake)


W8A8_SUSPECTS = {
    "the scales of the tokens are forgotten": partial(_scaled, mistake="no a"),
    "the scales of the output channels are forgotten": partial(_scaled, mistake="no b"),
    "every token gets the scale of the first": partial(_scaled, mistake="first token"),
    "every output channel gets the scale of the first": partial(_scaled, mistake="first channel"),
}

LAYER_LIKES = (
    Like("rms_norm", "x / sqrt(mean(x²) + eps) * weight, over the last dimension.", "elements", ROWS,
         timed_rows, make_rms_norm, NORM_SUSPECTS, sparse="x", rows=("x",)),
    Like("add_rms_norm", "residual = x + residual, then the RMSNorm of the residual.", "elements", ROWS,
         timed_rows, partial(make_rms_norm, is_added=True), ADD_SUSPECTS,
         sparse="x", rows=("x", "residual")),
    Like("rope", "Pairs of dimensions of q and k turn by position * frequency.", "tokens", HEADS,
         timed_heads, make_rope, ROPE_SUSPECTS, sparse="q", rows=("positions", "q", "k")),
    Like("silu_and_mul", "silu of the first half of each row times the second half.", "elements",
         tuple(case for case in ROWS if case.std == 1.0), timed_rows, make_silu_and_mul, SILU_SUSPECTS,
         sparse="x", rows=("x",)),
    Like("moe", "Each token goes through its experts; their outputs are summed with weights.", "tokens",
         EXPERTS, timed_experts, make_moe, MOE_SUSPECTS, rows=("x", "topk_weights", "topk_ids")),
    Like("w8a8", "GEMM of int8 tokens and int8 weights, with a scale for each token and output channel.",
         "tokens", GEMMS, timed_gemms, make_w8a8, W8A8_SUSPECTS, sparse="a", rows=("a", "scale_a")),
)  # fmt: skip
