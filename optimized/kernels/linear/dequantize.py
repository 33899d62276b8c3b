"""Quantized weights in a floating-point type: one launch.

Roofline bound: bytes over the memory bandwidth; 1 or 0.5 read and 2 written for a weight in a half type.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from diptych.optimized.kernels.linear.quantize_input import has_fp8
from diptych.optimized.kernels.linear.quantized_values import from_mxfp4, from_nibbles, widened_e4m3
from diptych.optimized.kernels.portable import INTERPRETED, interpreted_rows, rounded
from diptych.shared.types.quant_scheme import INT4_ZERO, QuantScheme

BLOCK = 1024
UNPACKED = 4096
"""Bytes of a CTA: 32 of each thread."""
RUN = 64
_INTERPRETED = tl.constexpr(INTERPRETED)
_ZERO = tl.constexpr(INT4_ZERO)


@triton.jit
def _dequantize_kernel(
    weight_ptr, scale_ptr, y_ptr, out, size, num_groups, stride_weight, group_size,
    IS_FP8: tl.constexpr, NATIVE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = (rows < out) & (k < size)
    tile = tl.load(weight_ptr + rows * stride_weight + k, mask=mask, other=0)
    w = (widened_e4m3(tile, NATIVE) if IS_FP8 else tile).to(tl.float32)
    group = k // group_size if num_groups > 1 else k * 0
    w *= tl.load(scale_ptr + rows * num_groups + group, mask=mask, other=0)
    tl.store(y_ptr + rows * size + k, rounded(w, y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _unpack_kernel(
    weight_ptr, scale_ptr, zero_ptr, y_ptr, out, row_bytes, num_groups, stride_weight,
    WEIGHT: tl.constexpr, HALF: tl.constexpr, GROUPED: tl.constexpr, HAS_ZERO: tl.constexpr,
    NATIVE: tl.constexpr, ROWS: tl.constexpr, RUNS: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """Bytes of 4-bit weights, in runs that lie in half a unit of HALF bytes: tiles [ROWS, RUNS, RUN]."""
    DTYPE: tl.constexpr = tl.bfloat16 if y_ptr.dtype.element_ty == tl.bfloat16 else tl.float32
    dtype: tl.constexpr = tl.float32 if _INTERPRETED else DTYPE  # holds any value without its scale
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    runs = (tl.program_id(1) * RUNS + tl.arange(0, RUNS)) * RUN
    mask = (rows < out)[:, None] & (runs < row_bytes)[None, :]
    columns = runs[:, None] + tl.arange(0, RUN)[None, :]
    tile_rows = (weight_ptr + rows * stride_weight)[:, None, None]
    tile = tl.load(tile_rows + columns[None, :, :], mask=mask[:, :, None], other=0)
    groups = rows[:, None] * num_groups + (runs // HALF)[None, :] * GROUPED
    scale = tl.load(scale_ptr + groups, mask=mask, other=0)
    if WEIGHT == "nvfp4":
        factor = tl.load(zero_ptr + rows * 2, mask=rows < out, other=0.0)[:, None]
        divisor = tl.load(zero_ptr + rows * 2 + 1, mask=rows < out, other=1.0)[:, None]
        scale = widened_e4m3(scale, NATIVE).to(tl.float32) * factor
        scale = tl.div_rn(scale, tl.broadcast_to(divisor, scale.shape))
        low, high = from_mxfp4(tile, tl.full(tile.shape, 1.0, dtype), dtype)
    else:
        zero = tl.full(scale.shape, _ZERO, tl.float32)
        if HAS_ZERO:
            zero = tl.load(zero_ptr + groups, mask=mask, other=0).to(tl.float32)
        low, high = from_nibbles(tile, zero[:, :, None], HAS_ZERO, dtype)
    low = rounded(low.to(tl.float32) * scale[:, :, None], y_ptr.dtype.element_ty)
    high = rounded(high.to(tl.float32) * scale[:, :, None], y_ptr.dtype.element_ty)
    y_rows = (y_ptr + rows * (2 * row_bytes))[:, None, None]
    if RUN == HALF:  # whole units, as one store: whole sectors of the cache
        both = tl.permute(tl.join(low, high), (0, 1, 3, 2)).reshape(ROWS, RUNS, 2 * RUN)
        places = 2 * runs[:, None] + tl.arange(0, 2 * RUN)[None, :]
        tl.store(y_rows + places[None, :, :], both, mask=mask[:, :, None])
    else:
        places = (runs // HALF * (2 * HALF) + runs % HALF)[:, None] + tl.arange(0, RUN)[None, :]
        tl.store(y_rows + places[None, :, :], low, mask=mask[:, :, None])
        tl.store(y_rows + (places + HALF)[None, :, :], high, mask=mask[:, :, None])


def dequantize(
    weight: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    scheme: QuantScheme,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Tensors of `QuantScheme.tensors` of one layer -> [out, in], rounded once."""
    out, size = len(weight), weight.shape[1] * (2 if scheme.is_packed else 1)
    scale = scale.view(torch.uint8) if scheme.weight_type == "nvfp4" else scale
    y = torch.empty(out, size, dtype=dtype, device=weight.device)
    if scheme.is_packed:
        _unpack(weight, scale, zero, scheme, y)
        return y
    rows, block = interpreted_rows(out) or 1, min(triton.next_power_of_2(size), BLOCK)
    _dequantize_kernel[(triton.cdiv(out, rows), triton.cdiv(size, block))](
        weight.view(torch.uint8) if scheme.weight_type == "fp8" else weight,
        scale, y, out, size, scale.shape[1], weight.stride(0), scheme.group_size or size,
        IS_FP8=scheme.weight_type == "fp8", NATIVE=has_fp8(weight.device), ROWS=rows, BLOCK=block,
    )  # fmt: skip
    return y


def _unpack(
    weight: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None, scheme: QuantScheme, y: torch.Tensor
) -> None:
    out, row_bytes = weight.shape
    half = scheme.unit(y.shape[1]) // 2
    run = min(half & -half, RUN)
    runs = min(triton.next_power_of_2(row_bytes // run), UNPACKED // run)
    rows = interpreted_rows(out) or max(UNPACKED // (run * runs), 1)
    _unpack_kernel[(triton.cdiv(out, rows), triton.cdiv(row_bytes, runs * run))](
        weight, scale, weight if zero is None else zero, y, out, row_bytes, scale.shape[1], weight.stride(0),
        WEIGHT=scheme.weight_type, HALF=half, GROUPED=scale.shape[1] > 1,
        HAS_ZERO=zero is not None and scheme.weight_type == "int4", NATIVE=has_fp8(weight.device),
        ROWS=rows, RUNS=runs, RUN=run,
    )  # fmt: skip
