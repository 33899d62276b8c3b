"""FP8 in kernels: values of an FP8 pool widened to the type of q, and K and V rounded to FP8.

GPUs from sm_89 on convert e4m3 in hardware. For older ones, and in the interpreter, kernels get the pool as
uint8 (`kernel_view`) and compute with the bits: sign 1, exponent 4 with a bias of 7, mantissa 3; 0x7f is NaN.
e5m2 is the upper half of a float16, so that one shift widens it: kernels get it as int8 on every GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from diptych.optimized.kernels.portable import INTERPRETED, gpu_of, largest_or_nan

_INTERPRETED = tl.constexpr(INTERPRETED)
MAX_E4M3: tl.constexpr = tl.constexpr(448.0)
MAX_E5M2: tl.constexpr = tl.constexpr(57344.0)

_WIDEN = tl.constexpr("""{
    .reg .b16 low, high;
    mov.b32 {low, high}, $2;
    cvt.rn.f16x2.e4m3x2 $0, low;
    cvt.rn.f16x2.e4m3x2 $1, high;
}""")


def kernel_view(buffer: torch.Tensor) -> torch.Tensor:
    """A pool's buffer for kernels: e5m2 as int8, and e4m3 as uint8 if the GPU does not convert it."""
    if buffer.dtype == torch.float8_e5m2:
        return buffer.view(torch.int8)
    if buffer.dtype != torch.float8_e4m3fn or gpu_of(buffer.device).has_fp8:
        return buffer
    return buffer.view(torch.uint8)


@triton.jit
def for_pool(q, scale, POOL_DTYPE: tl.constexpr):
    """q [rows, head_dim] in the type for K and V of a pool, and the scale of its scores, float32 [rows, 1] or
    a scalar. Two values of FP8 become float16 in one instruction, and bfloat16 in seven. So with an FP8 pool
    a bfloat16 q is converted to float16, divided by the power of two of its largest value. That is exact
    except for values 2^14 times smaller."""
    is_fp8: tl.constexpr = tl.float8e4nv == POOL_DTYPE or tl.uint8 == POOL_DTYPE or tl.int8 == POOL_DTYPE
    if q.dtype == tl.bfloat16 and is_fp8:
        wide = q.to(tl.float32)
        largest = largest_or_nan(tl.abs(wide), 1)[:, None]
        exponent = largest.to(tl.int32, bitcast=True) & 0x7F800000
        power = tl.where(exponent == 0, 1.0, exponent.to(tl.float32, bitcast=True))
        return (wide / power).to(tl.float16), scale * power
    else:
        return q, scale


@triton.jit
def from_pool(x, dtype: tl.constexpr):
    """Elements of a `kernel_view` in the type of q, exactly; FP8 without its scale."""
    if x.dtype == tl.uint8:
        bits = x.to(tl.uint16)
        # At its place in a float16, whose exponent has a bias of 15, the value is 2^8 times too small.
        moved = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        value = moved.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        return tl.where((bits & 0x7F) == 0x7F, float("nan"), value).to(dtype)
    elif x.dtype == tl.int8:
        return (x.to(tl.int16) << 8).to(tl.float16, bitcast=True).to(dtype)
    elif x.dtype == tl.float8e4nv and dtype == tl.float16 and not _INTERPRETED:
        return tl.inline_asm_elementwise(_WIDEN, "=r,=r,r", [x], tl.float16, is_pure=True, pack=4)
    else:
        return x.to(dtype)


@triton.jit
def values_from_pool(x, dtype: tl.constexpr):
    """`from_pool` for V, whose rows are not along the sum of its GEMM. Tensor cores read a transposed operand
    of 16 bits from shared memory with one instruction, and one of 8 bits byte by byte. An impure assembly
    instruction prevents Triton from moving the conversion after that read."""
    if x.dtype == tl.float8e4nv and dtype == tl.float16 and not _INTERPRETED:
        return tl.inline_asm_elementwise(_WIDEN, "=r,=r,r", [x], tl.float16, is_pure=False, pack=4)
    else:
        return from_pool(x, dtype)


@triton.jit
def to_pool(x, scale, dtype: tl.constexpr):
    """x in the element type of a `kernel_view`: FP8 holds x / scale, clamped and rounded to nearest even."""
    if dtype == tl.uint8:
        x = _quotient(x, scale, MAX_E4M3)
        size = tl.abs(x)
        # Normal: the upper bits, rounded to 3 bits of mantissa. Below 2^-6: multiples of 2^-9, which is what
        # the addition of 2^14 leaves in the mantissa.
        bits = size.to(tl.uint32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - ((127 - 7) << 3)
        small = (size + 16384.0).to(tl.uint32, bitcast=True) & 0xFF
        code = tl.where(size < 0.015625, small, normal)
        code = tl.where(x != x, 0x7F, code)
        sign = (x.to(tl.uint32, bitcast=True) >> 24) & 0x80
        return (code | sign).to(tl.uint8)
    elif dtype == tl.int8:
        x = _quotient(x, scale, MAX_E5M2)
        size = tl.abs(x)
        bits = size.to(tl.uint32, bitcast=True)
        normal = ((bits + 0xFFFFF + ((bits >> 21) & 1)) >> 21) - ((127 - 15) << 2)
        small = (size + 128.0).to(tl.uint32, bitcast=True) & 0xFF  # below 2^-14: multiples of 2^-16
        code = tl.where(size < 0.00006103515625, small, normal)
        code = tl.where(x != x, 0x7F, code)
        sign = (x.to(tl.uint32, bitcast=True) >> 24) & 0x80
        return (code | sign).to(tl.uint8).to(tl.int8, bitcast=True)
    elif dtype == tl.float8e4nv:
        return _quotient(x, scale, MAX_E4M3).to(dtype)
    else:
        return x.to(dtype)


@triton.jit
def _quotient(x, scale, MAX: tl.constexpr):
    """float32 x / scale within [-MAX, MAX]; NaN stays."""
    x = tl.div_rn(x.to(tl.float32), tl.full(x.shape, scale, tl.float32))
    return tl.clamp(x, -MAX, MAX, propagate_nan=tl.PropagateNan.ALL)
