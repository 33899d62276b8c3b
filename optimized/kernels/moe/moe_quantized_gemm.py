"""The experts' two GEMMs with quantized weights, which are dequantized in the tile.

Roofline bound: for few tokens the weights' bytes over the memory bandwidth: 3 * hidden * inter for each
expert that is used in 8 bits, half of that in 4, and the scales; for many tokens the operations, 6 * hidden *
inter a pair of token and expert.

Shape: as moe_gemm.py: a CTA is one block of pairs of one expert by some columns, gate and up of the same
columns together. Weights are the side of the tensor cores that has many rows. Two values of a byte belong to
inputs half a unit apart, so low and high halves are two matrices that are multiplied by two pieces of x, and
nothing is interleaved. The scales of groups are applied to the sum of a group, in float32; those of MXFP4
and NVFP4 to the weights, which stays exact; they are loaded one step ahead, because loads of so few
bytes are not pipelined. A pair's sum has one order, whatever the batch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from diptych.optimized.kernels.linear.quantize_input import QuantizedInput, has_fp8
from diptych.optimized.kernels.linear.quantized_values import (
    from_mxfp4,
    from_nibbles,
    mxfp4_scales,
    widened_e4m3,
)
from diptych.optimized.kernels.moe.moe_act import gated
from diptych.optimized.kernels.moe.moe_align import Blocks
from diptych.optimized.kernels.portable import INTERPRETED, pdl_options, rounded
from diptych.shared.types.quant_scheme import INT4_ZERO, QuantScheme

_INTERPRETED = tl.constexpr(INTERPRETED)
_ZERO = tl.constexpr(INT4_ZERO)


class QuantizedTile(NamedTuple):
    block_m: int  # pairs
    block_n: int  # columns; of the first GEMM as many of gate and of up
    num_warps: int
    num_stages: int


class ExpertWeights(NamedTuple):
    """w13 or w2 of `QuantizedExperts`."""

    weight: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None  # or the factors and divisors of NVFP4
    bias: torch.Tensor | None


def quantized_tiles(
    scheme: QuantScheme, num_pairs: int, num_experts: int
) -> tuple[QuantizedTile, QuantizedTile]:
    """Choose the tiles of both GEMMs, with as many pairs a block as an expert has on average. Measured for
    MXFP4 and up to 32 pairs."""
    average = triton.next_power_of_2(triton.cdiv(num_pairs, num_experts))
    block_m = min(max(average, 16), 64)
    if INTERPRETED:  # a CTA costs time, and a row does not
        tile = QuantizedTile(block_m, 128, 4, 1)
    elif block_m == 64:
        tile = QuantizedTile(block_m, 32, 4, 3)
    elif scheme.weight_type not in ("mxfp4", "nvfp4"):
        tile = QuantizedTile(block_m, 64, 4, 3)
    elif block_m == 16:  # a warp dequantizes 32 rows once, for all pairs
        return QuantizedTile(block_m, 32, 2, 3), QuantizedTile(block_m, 64, 2, 3)
    else:
        return QuantizedTile(block_m, 64, 4, 3), QuantizedTile(block_m, 64, 2, 3)
    return tile, tile


@triton.jit
def _x_tile(x_rows, row_mask, cols, col_mask):
    return tl.load(x_rows + cols[None, :], mask=row_mask[:, None] & col_mask[None, :], other=0)


@triton.jit(do_not_specialize=["num_pairs"])
def _quantized_experts_kernel(
    x_ptr, x_scale_ptr, w_ptr, w_scale_ptr, w_zero_ptr, bias_ptr, out_ptr,
    pairs_ptr, experts_ptr, num_blocks_ptr, topk_weights_ptr, num_pairs, stride_x,
    TOP_K: tl.constexpr, ROWS: tl.constexpr, ROW_BYTES: tl.constexpr, NUM_GROUPS: tl.constexpr,
    NUM_X_GROUPS: tl.constexpr, WEIGHT: tl.constexpr, UNIT: tl.constexpr, IS_UP: tl.constexpr,
    HAS_BIAS: tl.constexpr, LIMIT: tl.constexpr, HAS_ZERO: tl.constexpr,
    NATIVE: tl.constexpr, MULTIPLY_FP8: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STEP: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """x [num_tokens or rows of blocks, K] by w [experts, PARTS * ROWS, ROW_BYTES]."""
    PARTS: tl.constexpr = 2 if IS_UP else 1
    X_SCALED: tl.constexpr = NUM_X_GROUPS > 0
    IS_FP4: tl.constexpr = WEIGHT == "mxfp4" or WEIGHT == "nvfp4"
    IN_LOOP: tl.constexpr = NUM_GROUPS > 1 and not IS_FP4  # scales of groups
    IS_INT8: tl.constexpr = WEIGHT == "int8" and X_SCALED
    x_type: tl.constexpr = tl.float32 if _INTERPRETED else x_ptr.dtype.element_ty
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    block = tl.program_id(1)
    if block >= tl.load(num_blocks_ptr):
        return
    expert = tl.load(experts_ptr + block).to(tl.int64)
    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
    pairs = tl.load(pairs_ptr + rows)
    is_pair = pairs < num_pairs
    x_row = (pairs // TOP_K if IS_UP else rows).to(tl.int64)
    x_rows, x_scales = x_ptr + x_row[:, None] * stride_x, x_scale_ptr + x_row * NUM_X_GROUPS
    first = tl.program_id(0) * BLOCK_N
    places = tl.arange(0, PARTS * BLOCK_N)
    columns = first + places % BLOCK_N
    is_row = columns < ROWS
    w_row = expert * (PARTS * ROWS) + places // BLOCK_N * ROWS + columns
    w_rows, w_scales = w_ptr + w_row[:, None] * ROW_BYTES, w_scale_ptr + w_row * NUM_GROUPS

    y = tl.zeros([PARTS * BLOCK_N, BLOCK_M], tl.int32 if IS_INT8 and not IN_LOOP else tl.float32)
    if IS_FP4:
        units = tl.arange(0, STEP // (UNIT // 2))  # of a step; a unit has one scale
        next_scales = w_scale_ptr + w_row[:, None] * NUM_GROUPS + units[None, :]
        of_units = is_row[:, None] & (units < NUM_GROUPS)[None, :]
        exponents = tl.load(next_scales, mask=of_units, other=0)
    for k in range(0, ROW_BYTES, STEP):
        offs = k + tl.arange(0, STEP)
        in_row = offs < ROW_BYTES
        tile = tl.load(w_rows + offs[None, :], mask=is_row[:, None] & in_row[None, :], other=0)
        if WEIGHT == "int4" or IS_FP4:
            unit = offs // (UNIT // 2)
            cols = unit * UNIT + offs % (UNIT // 2)
            low = _x_tile(x_rows, is_pair, cols, in_row).to(x_type)
            high = _x_tile(x_rows, is_pair, cols + UNIT // 2, in_row).to(x_type)
            if IS_FP4:
                if WEIGHT == "mxfp4":
                    scales = mxfp4_scales(exponents, x_type)
                else:
                    scales = widened_e4m3(exponents, NATIVE).to(x_type)
                next_unit = (k + STEP) // (UNIT // 2)
                of_units = is_row[:, None] & (next_unit + units < NUM_GROUPS)[None, :]
                exponents = tl.load(next_scales + next_unit, mask=of_units, other=0)
                shape: tl.constexpr = (PARTS * BLOCK_N, STEP // (UNIT // 2), UNIT // 2)
                scales = tl.broadcast_to(scales[:, :, None], shape).reshape(PARTS * BLOCK_N, STEP)
                w_low, w_high = from_mxfp4(tile, scales, x_type)
            else:
                group = k // (UNIT // 2)  # of the whole step
                zero = tl.full([PARTS * BLOCK_N], _ZERO, tl.float32)
                if HAS_ZERO:
                    zeros = w_zero_ptr + w_row * NUM_GROUPS + group
                    zero = tl.load(zeros, mask=is_row, other=0).to(tl.float32)
                w_low, w_high = from_nibbles(tile, zero[:, None], HAS_ZERO, x_type)
            part = tl.dot(w_low, low.T, input_precision="ieee")
            part = tl.dot(w_high, high.T, part, input_precision="ieee")
        else:
            group = k // UNIT
            x = _x_tile(x_rows, is_pair, offs, in_row)
            if MULTIPLY_FP8:
                tile, x = tile.to(tl.float8e4nv, bitcast=True), x.to(tl.float8e4nv, bitcast=True)
            elif WEIGHT == "fp8":
                tile = widened_e4m3(tile, NATIVE)
                if X_SCALED:
                    x = widened_e4m3(x, NATIVE)
            if not X_SCALED:
                tile, x = tile.to(x_type), x.to(x_type)
            # Hopper's tensor cores keep 14 bits of a sum of e4m3, so it is added to float32 often.
            part = tl.dot(tile, x.T, input_precision="ieee", max_num_imprecise_acc=STEP)
        if IN_LOOP:
            part = part.to(tl.float32)
            part *= tl.load(w_scales + group, mask=is_row, other=0.0)[:, None]
            if NUM_X_GROUPS > 1:
                part *= tl.load(x_scales + group, mask=is_pair, other=0.0)[None, :]
        y += part
    y = y.to(tl.float32)
    if WEIGHT == "nvfp4":
        factors = w_zero_ptr + w_row * 2
        y *= (tl.load(factors, mask=is_row, other=0.0) / tl.load(factors + 1, mask=is_row, other=1.0))[
            :, None
        ]
    elif not IN_LOOP and WEIGHT != "mxfp4":
        y *= tl.load(w_scales, mask=is_row, other=0.0)[:, None]
    if NUM_X_GROUPS == 1:
        y *= tl.load(x_scales, mask=is_pair, other=0.0)[None, :]

    if HAS_BIAS:
        bias = bias_ptr + w_row
        y += tl.load(bias, mask=is_row, other=0.0).to(tl.float32)[:, None]

    offs_n = first + tl.arange(0, BLOCK_N)
    if IS_UP:
        gate, up = y.reshape(2, BLOCK_N, BLOCK_M).permute(2, 1, 0).split()
        act = rounded(gated(gate, up, LIMIT), out_ptr.dtype.element_ty)
        out_rows = out_ptr + rows.to(tl.int64)[:, None] * ROWS
        tl.store(out_rows + offs_n[None, :], act, mask=(offs_n < ROWS)[None, :])
    else:
        weights = tl.load(topk_weights_ptr + pairs, mask=is_pair, other=0.0)
        result = rounded(y.T * weights[:, None], out_ptr.dtype.element_ty)
        out_rows = out_ptr + pairs.to(tl.int64)[:, None] * ROWS
        tl.store(out_rows + offs_n[None, :], result, mask=is_pair[:, None] & (offs_n < ROWS)[None, :])


def quantized_up_gemm(
    x: torch.Tensor | QuantizedInput,
    w13: ExpertWeights,
    scheme: QuantScheme,
    blocks: Blocks,
    top_k: int,
    tile: QuantizedTile,
    swiglu_limit: float = 0.0,
) -> torch.Tensor:
    """x [num_tokens, hidden] -> gate and up, combined, of each row of `blocks`, [max rows, inter]."""
    inter = w13.weight.shape[1] // 2
    values, dtype = (x.q, x.dtype) if isinstance(x, QuantizedInput) else (x, x.dtype)
    act = torch.empty(blocks.experts.numel() * tile.block_m, inter, dtype=dtype, device=values.device)
    num_pairs = values.shape[0] * top_k
    _launch(x, w13, scheme, blocks, tile, act, inter, act, num_pairs, top_k, swiglu_limit)
    return act


def quantized_down_gemm(
    act: torch.Tensor | QuantizedInput,
    w2: ExpertWeights,
    scheme: QuantScheme,
    blocks: Blocks,
    topk_weights: torch.Tensor,
    tile: QuantizedTile,
) -> torch.Tensor:
    """The weighted result of each pair, [num_tokens, k, hidden]; that of padding pairs is undefined."""
    hidden = w2.weight.shape[1]
    out = torch.empty(*topk_weights.shape, hidden, dtype=act.dtype, device=topk_weights.device)
    _launch(act, w2, scheme, blocks, tile, out, hidden, topk_weights, topk_weights.numel(), 0)
    return out


def _launch(
    x: torch.Tensor | QuantizedInput,
    w: ExpertWeights,
    scheme: QuantScheme,
    blocks: Blocks,
    tile: QuantizedTile,
    out: torch.Tensor,
    rows: int,
    topk_weights: torch.Tensor,
    num_pairs: int,
    top_k: int,
    swiglu_limit: float = 0.0,
) -> None:
    """top_k 0: the second GEMM."""
    is_fp8, is_scaled = scheme.weight_type == "fp8", isinstance(x, QuantizedInput)
    is_nvfp4 = scheme.weight_type == "nvfp4"
    scales = w.scale.view(torch.uint8) if is_nvfp4 else w.scale
    values, x_scale = (x.q, x.scale) if isinstance(x, QuantizedInput) else (x, x)
    row_bytes, num_groups = w.weight.shape[2], w.scale.shape[2]
    size = 2 * row_bytes if scheme.is_packed else row_bytes
    step = 64 if scheme.is_packed else 128
    if num_groups > 1 and scheme.weight_type not in ("mxfp4", "nvfp4"):
        assert scheme.group_size is not None
        step = min(step, scheme.group_size // (2 if scheme.is_packed else 1))
    native = has_fp8(values.device) and not INTERPRETED
    _quantized_experts_kernel[(triton.cdiv(rows, tile.block_n), blocks.experts.numel())](
        values.view(torch.uint8) if is_fp8 and is_scaled else values, x_scale,
        w.weight.view(torch.uint8) if is_fp8 else w.weight, scales, scales if w.zero is None else w.zero,
        out if w.bias is None else w.bias, out,
        blocks.pairs, blocks.experts, blocks.num_blocks, topk_weights, num_pairs, values.stride(0),
        TOP_K=max(top_k, 1), ROWS=rows, ROW_BYTES=row_bytes, NUM_GROUPS=num_groups,
        NUM_X_GROUPS=x_scale.shape[1] if is_scaled else 0, WEIGHT=scheme.weight_type,
        UNIT=scheme.unit(size), IS_UP=top_k > 0, HAS_BIAS=w.bias is not None,
        LIMIT=swiglu_limit, HAS_ZERO=w.zero is not None and not is_nvfp4, NATIVE=native,
        MULTIPLY_FP8=native and is_fp8 and is_scaled, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, STEP=step,
        num_warps=tile.num_warps, num_stages=tile.num_stages, **pdl_options(values),
    )  # fmt: skip
