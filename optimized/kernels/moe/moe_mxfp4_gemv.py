"""The MXFP4 experts of a few tokens, pair by pair, without sorting: two launches.

Roofline bound: the chosen experts' weights, read once: 3 * hidden * inter half bytes for each pair, and a
byte for each 32 of them. One token of GPT-OSS-20B: 4 * 13.2 MB, 12 us at 4.3 TB/s.

Shape: as moe_gemv.py: a warp computes whole rows. A lane loads 16 bytes of a row at a time, a unit: 32 inputs
with one scale, the low halves of its bytes for the first 16. Tensor cores would be idle but for one column,
and multiplying on the other cores leaves time for the codes: their sign, exponent and mantissa bit become
those of a float16, two by one operation, which is 2 ** -14 of the value. The factor is part of the row's sum.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from diptych.optimized.kernels.moe.moe_act import bias_of, gated
from diptych.optimized.kernels.moe.moe_quantized_gemm import ExpertWeights
from diptych.optimized.kernels.portable import INTERPRETED, pdl_options, rounded, where_flag, widened
from diptych.optimized.kernels.warp_mma import four
from diptych.shared.types.quant_scheme import MXFP4_GROUP

_INTERPRETED = tl.constexpr(INTERPRETED)
_UNIT = tl.constexpr(MXFP4_GROUP)
_FACTOR = tl.constexpr(2.0**14)

MAX_TOKENS = 4
WARPS = 64 if INTERPRETED else 4
GROUPS = 2
"""Rows of a warp; of the first GEMV as many of gate and of up. They share the input, widened once."""
AHEAD = 3
"""Tiles of each row of the first GEMV that a warp has asked for before it needs the first. The second asks
for the rows of the next choice."""

_DECODE = """{
.reg .b32 a, b, c, d, s;
.reg .b16 h, g;
shl.b32 a, $8, 9; and.b32 a, a, 0x0E000E00; shl.b32 s, $8, 12; lop3.b32 a, s, 0x80008000, a, 0xEA;
shl.b32 b, $8, 5; and.b32 b, b, 0x0E000E00; shl.b32 s, $8, 8; lop3.b32 b, s, 0x80008000, b, 0xEA;
shl.b32 c, $8, 1; and.b32 c, c, 0x0E000E00; shl.b32 s, $8, 4; lop3.b32 c, s, 0x80008000, c, 0xEA;
shr.b32 d, $8, 3; and.b32 d, d, 0x0E000E00; lop3.b32 d, $8, 0x80008000, d, 0xEA;
mov.b32 {h, g}, a; cvt.f32.f16 $0, h; cvt.f32.f16 $2, g;
mov.b32 {h, g}, b; cvt.f32.f16 $4, h; cvt.f32.f16 $6, g;
mov.b32 {h, g}, c; cvt.f32.f16 $1, h; cvt.f32.f16 $3, g;
mov.b32 {h, g}, d; cvt.f32.f16 $5, h; cvt.f32.f16 $7, g;
}"""
_DECODE = tl.constexpr(_DECODE)


@triton.jit
def _values(words):
    """2 ** -14 of the eight values of each int32: of the low halves of its bytes, then of the high ones."""
    if _INTERPRETED:
        values = ()
        for i in tl.static_range(8):
            code = words >> (i % 4 * 8 + i // 4 * 4)
            bits = ((code & 7) << 22) | ((code & 8) << 28)
            values += (bits.to(tl.float32, bitcast=True) * 2.0**112,)
        return values
    else:
        return tl.inline_asm_elementwise(
            _DECODE, "=f,=f,=f,=f,=f,=f,=f,=f,r", [words], is_pure=True, pack=1,
            dtype=(tl.float32,) * 8,
        )  # fmt: skip


@triton.jit
def _split8(x, WARPS: tl.constexpr):
    """[32, WARPS, 8] -> eight of [32, WARPS]."""
    even, odd = tl.split(tl.reshape(x, (32, WARPS, 4, 2)))
    e, o = four(even, WARPS), four(odd, WARPS)
    return e[0], o[0], e[1], o[1], e[2], o[2], e[3], o[3]


@triton.jit
def _inputs(
    x_ptr, units, flag, NUM_UNITS: tl.constexpr, WARPS: tl.constexpr, USE_PDL: tl.constexpr
):  # fmt: skip
    """The 32 inputs of each lane's unit, float32, [32, WARPS] each; without the flag zeros. units [32, 1]."""
    of_warps = (units + tl.arange(0, WARPS)[None, :] * 0)[:, :, None]
    places = x_ptr + of_warps * _UNIT + tl.arange(0, 8)[None, None, :]
    mask = where_flag(of_warps < NUM_UNITS, flag)
    inputs = ()
    for i in tl.static_range(_UNIT // 8):
        inputs += _split8(widened(tl.load(places + i * 8, mask=mask, other=0.0), USE_PDL), WARPS)
    return inputs


@triton.jit
def _load_byte(ptr):
    """int32. In the layout of its use: a load of its own would take its own, and go through shared memory."""
    if _INTERPRETED:
        return tl.load(ptr).to(tl.int32)
    else:
        asm: tl.constexpr = "ld.global.nc.u8 $0, [$1];"
        return tl.inline_asm_elementwise(asm, "=r,l", [ptr.to(tl.int64)], tl.int32, is_pure=True, pack=1)


@triton.jit
def _load_unit(w_ptr, scale_ptr, rows, units, mask, NUM_UNITS: tl.constexpr):
    """A unit of each warp's row, [32, WARPS, 4] int32, and its exponent, [32, WARPS] int32. rows [1, WARPS],
    units [32, 1]; mask [32, WARPS]: without it zeros."""
    unit = rows * NUM_UNITS + units
    places = w_ptr + unit[:, :, None] * 4 + tl.arange(0, 4)[None, None, :]
    words = tl.load(places, mask=mask[:, :, None], other=0)
    return words, _load_byte(scale_ptr + tl.where(mask, unit, 0))


@triton.jit
def _unit_sum(unit, x, WARPS: tl.constexpr):
    """[32, WARPS]: the sum over a unit of weights times inputs, and 2 ** -14."""
    words, total = four(unit[0], WARPS), tl.zeros([32, WARPS], tl.float32)
    for word in tl.static_range(4):
        values = _values(words[word])
        for i in tl.static_range(8):
            total += values[i] * x[i // 4 * (_UNIT // 2) + word * 4 + i % 4]
    bits = tl.where(unit[1] == 0, 0x00400000, unit[1] << 23)
    return total * bits.to(tl.float32, bitcast=True)


@triton.jit
def _mxfp4_up_kernel(
    x_ptr, w_ptr, scale_ptr, bias_ptr, act_ptr, ids_ptr, stride_x,
    TOP_K: tl.constexpr, NUM_UNITS: tl.constexpr, INTER: tl.constexpr, HAS_BIAS: tl.constexpr,
    LIMIT: tl.constexpr, WARPS: tl.constexpr, GROUPS: tl.constexpr, AHEAD: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    TILES: tl.constexpr = (NUM_UNITS + 31) // 32
    PARTS: tl.constexpr = 2 * GROUPS  # rows of weights of a warp: gate, up, gate, up
    pair, lanes = tl.program_id(1), tl.arange(0, 32)[:, None]
    first_rows = tl.program_id(0) * (WARPS * GROUPS) + tl.arange(0, WARPS)[None, :] * GROUPS
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    expert = tl.load(ids_ptr + pair)
    if expert < 0:
        return
    w_ptr += expert.to(tl.int64) * (2 * INTER * NUM_UNITS * 4)
    scale_ptr += expert.to(tl.int64) * (2 * INTER * NUM_UNITS)
    x_row = x_ptr + (pair // TOP_K).to(tl.int64) * stride_x
    weights, sums = (), ()
    for _ in tl.static_range(PARTS):
        sums += (tl.zeros([32, WARPS], tl.float32),)
    for step in tl.static_range(TILES + AHEAD):
        if step < TILES:
            units = step * 32 + lanes
            for p in tl.static_range(PARTS):
                mask = (units < NUM_UNITS) & (first_rows + p // 2 < INTER)
                rows = first_rows + (p // 2 + p % 2 * INTER)
                weights += (_load_unit(w_ptr, scale_ptr, rows, units, mask, NUM_UNITS),)
        if step >= AHEAD:
            x = _inputs(x_row, (step - AHEAD) * 32 + lanes, True, NUM_UNITS, WARPS, USE_PDL)
            new_sums = ()
            for p in tl.static_range(PARTS):
                new_sums += (sums[p] + _unit_sum(weights[(step - AHEAD) * PARTS + p], x, WARPS),)
            sums = new_sums
    for g in tl.static_range(GROUPS):
        gate, up = tl.sum(sums[2 * g], 0) * _FACTOR, tl.sum(sums[2 * g + 1], 0) * _FACTOR
        rows = tl.program_id(0) * (WARPS * GROUPS) + tl.arange(0, WARPS) * GROUPS + g
        if HAS_BIAS:
            gate += bias_of(bias_ptr, expert, 0, rows, rows < INTER, 2 * INTER)
            up += bias_of(bias_ptr, expert, INTER, rows, rows < INTER, 2 * INTER)
        act = rounded(gated(gate, up, LIMIT), act_ptr.dtype.element_ty)
        tl.store(act_ptr + pair * INTER + rows, act, mask=rows < INTER)


@triton.jit
def _choice(
    w_ptr, scale_ptr, expert, first_rows, lanes,
    HIDDEN: tl.constexpr, NUM_UNITS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """All units of each warp's rows of an expert; of padding, -1, zeros."""
    offset = tl.maximum(expert, 0).to(tl.int64) * (HIDDEN * NUM_UNITS)
    weights = ()
    for tile in tl.static_range((NUM_UNITS + 31) // 32):
        units = tile * 32 + lanes
        for g in tl.static_range(GROUPS):
            mask = where_flag((units < NUM_UNITS) & (first_rows + g < HIDDEN), expert >= 0)
            weights += (
                _load_unit(w_ptr + offset * 4, scale_ptr + offset, first_rows + g, units, mask, NUM_UNITS),
            )
    return weights


@triton.jit
def _mxfp4_down_kernel(
    act_ptr, w_ptr, scale_ptr, bias_ptr, y_ptr, ids_ptr, weights_ptr,
    TOP_K: tl.constexpr, HIDDEN: tl.constexpr, NUM_UNITS: tl.constexpr, HAS_BIAS: tl.constexpr,
    WARPS: tl.constexpr, GROUPS: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    token, lanes = tl.program_id(1), tl.arange(0, 32)[:, None]
    first_rows = tl.program_id(0) * (WARPS * GROUPS) + tl.arange(0, WARPS)[None, :] * GROUPS
    # The routing is complete before the first GEMV starts, so its weights are loaded before the wait.
    ids, weights_ptr = ids_ptr + token * TOP_K, weights_ptr + token * TOP_K
    expert, next_expert = tl.load(ids), tl.load(ids + 1 % TOP_K)
    weights = _choice(w_ptr, scale_ptr, expert, first_rows, lanes, HIDDEN, NUM_UNITS, GROUPS)
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    sums = ()
    for _ in tl.static_range(GROUPS):
        sums += (tl.zeros([32, WARPS], tl.float32),)
    for j in tl.range(TOP_K):
        last = j + 1 == TOP_K
        next_expert = tl.where(last, -1, next_expert)
        next_weights = _choice(w_ptr, scale_ptr, next_expert, first_rows, lanes, HIDDEN, NUM_UNITS, GROUPS)
        weight = tl.load(weights_ptr + j, mask=expert >= 0, other=0.0)
        act_row = act_ptr + (token * TOP_K + j) * (NUM_UNITS * _UNIT)
        for tile in tl.static_range((NUM_UNITS + 31) // 32):
            x = _inputs(act_row, tile * 32 + lanes, expert >= 0, NUM_UNITS, WARPS, USE_PDL)
            new_sums = ()
            for g in tl.static_range(GROUPS):
                new_sums += (sums[g] + weight * _unit_sum(weights[tile * GROUPS + g], x, WARPS),)
            sums = new_sums
        weights, expert = next_weights, next_expert
        next_expert = tl.load(ids + tl.minimum(j + 2, TOP_K - 1))
    for g in tl.static_range(GROUPS):
        y = tl.sum(sums[g], 0) * _FACTOR
        rows = tl.program_id(0) * (WARPS * GROUPS) + tl.arange(0, WARPS) * GROUPS + g
        if HAS_BIAS:
            for j in tl.static_range(TOP_K):
                chosen = tl.load(ids + j)
                weight = tl.load(weights_ptr + j, mask=chosen >= 0, other=0.0)
                mask = where_flag(rows < HIDDEN, chosen >= 0)
                y += weight * bias_of(bias_ptr, chosen, 0, rows, mask, HIDDEN)
        y_row = y_ptr + token.to(tl.int64) * HIDDEN
        tl.store(y_row + rows, rounded(y, y_ptr.dtype.element_ty), mask=rows < HIDDEN)


def mxfp4_gemv_experts(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    w13: ExpertWeights,
    w2: ExpertWeights,
    swiglu_limit: float = 0.0,
) -> torch.Tensor:
    """x [num_tokens, hidden] -> the weighted sum of its experts' results, [num_tokens, hidden]."""
    num_tokens, top_k = topk_ids.shape
    hidden, inter = w2.weight.shape[1], w13.weight.shape[1] // 2
    act = torch.empty(num_tokens * top_k, inter, dtype=x.dtype, device=x.device)
    y = torch.empty(num_tokens, hidden, dtype=x.dtype, device=x.device)
    options = {"WARPS": WARPS, "GROUPS": GROUPS, "num_warps": 4, **pdl_options(x)}
    _mxfp4_up_kernel[(triton.cdiv(inter, WARPS * GROUPS), num_tokens * top_k)](
        x, w13.weight.view(torch.int32), w13.scale, x if w13.bias is None else w13.bias, act, topk_ids,
        x.stride(0), TOP_K=top_k, NUM_UNITS=hidden // MXFP4_GROUP, INTER=inter,
        HAS_BIAS=w13.bias is not None, LIMIT=swiglu_limit, AHEAD=AHEAD, **options,
    )  # fmt: skip
    _mxfp4_down_kernel[(triton.cdiv(hidden, WARPS * GROUPS), num_tokens)](
        act, w2.weight.view(torch.int32), w2.scale, x if w2.bias is None else w2.bias, y, topk_ids,
        topk_weights, TOP_K=top_k, HIDDEN=hidden, NUM_UNITS=inter // MXFP4_GROUP,
        HAS_BIAS=w2.bias is not None, **options,
    )  # fmt: skip
    return y
