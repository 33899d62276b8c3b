"""Quantized weights in a floating-point type: one launch.

Roofline bound: bytes over the memory bandwidth; 1 or 0.5 read and 2 written for a weight in a half type.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from diptych.optimized.kernels.linear.quantize_input import has_fp8
from diptych.optimized.kernels.linear.quantized_values import from_mxfp4, widened_e4m3
from diptych.optimized.kernels.portable import interpreted_rows, rounded
from diptych.shared.types.quant_scheme import INT4_ZERO, QuantScheme

BLOCK = 1024
_ZERO = tl.constexpr(INT4_ZERO)


@triton.jit
def _dequantize_kernel(
    weight_ptr, scale_ptr, zero_ptr, y_ptr, out, size, num_groups, stride_weight,
    WEIGHT: tl.constexpr, UNIT: tl.constexpr, HAS_ZERO: tl.constexpr, NATIVE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = (rows < out) & (k < size)
    group = k // UNIT if num_groups > 1 else k * 0
    column = k
    if WEIGHT == "int4" or WEIGHT == "nvfp4":
        column = k // UNIT * (UNIT // 2) + k % (UNIT // 2)
    tile = tl.load(weight_ptr + rows * stride_weight + column, mask=mask, other=0)
    if WEIGHT == "int4":
        zero = _ZERO
        if HAS_ZERO:
            zero = tl.load(zero_ptr + rows * num_groups + group, mask=mask, other=0).to(tl.float32)
        w = tl.where(k % UNIT < UNIT // 2, tile & 15, tile >> 4).to(tl.float32) - zero
    elif WEIGHT == "nvfp4":
        factors = zero_ptr + rows * 2
        one = tl.full(tile.shape, 1.0, tl.float32)
        low, high = from_mxfp4(tile, one, tl.float32)
        w = tl.where(k % UNIT < UNIT // 2, low, high)
    elif WEIGHT == "fp8":
        w = widened_e4m3(tile, NATIVE).to(tl.float32)
    else:
        w = tile.to(tl.float32)
    scale = tl.load(scale_ptr + rows * num_groups + group, mask=mask, other=0)
    if WEIGHT == "nvfp4":
        factor = tl.load(factors, mask=rows < out, other=0.0)
        divisor = tl.load(factors + 1, mask=rows < out, other=1.0)
        scale = widened_e4m3(scale, NATIVE).to(tl.float32) * factor
        scale = tl.div_rn(scale, tl.broadcast_to(divisor, scale.shape))
    w *= scale
    tl.store(y_ptr + rows * size + k, rounded(w, y_ptr.dtype.element_ty), mask=mask)


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
    rows, block = interpreted_rows(out) or 1, min(triton.next_power_of_2(size), BLOCK)
    _dequantize_kernel[(triton.cdiv(out, rows), triton.cdiv(size, block))](
        weight.view(torch.uint8) if scheme.weight_type == "fp8" else weight,
        scale, weight if zero is None else zero, y, out, size, scale.shape[1], weight.stride(0),
        WEIGHT=scheme.weight_type, UNIT=scheme.unit(size), HAS_ZERO=zero is not None,
        NATIVE=has_fp8(weight.device), ROWS=rows, BLOCK=block,
    )  # fmt: skip
    return y
