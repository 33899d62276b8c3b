"""Inputs of quantized linear layers in 8 bits, with the kernel before them: a norm, or SwiGLU.

Roofline bound: bytes over the memory bandwidth, (2 + 1) * n * size for a row of a half type. For few tokens
the bound is one launch.

Shape: a CTA takes a row, which stays in registers between the norm, the largest value and the rounding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from optimized.kernels.portable import INTERPRETED, gpu_of, largest_or_nan, pdl_options, rounded
from shared.interfaces.collectives import Collectives
from shared.types.quantization import QuantScheme

_INTERPRETED = tl.constexpr(INTERPRETED)


@dataclass(frozen=True)
class QuantizedInput:
    q: torch.Tensor  # [num_tokens, size]: e4m3 or int8
    scale: torch.Tensor  # float32 [num_tokens, groups], or [1] for all tokens
    dtype: torch.dtype  # of x, and of what is computed from it


def has_fp8(device: torch.device) -> bool:
    """Whether the GPU converts and multiplies e4m3."""
    return INTERPRETED or gpu_of(device).capability >= (8, 9)


@triton.jit
def e4m3_code(x, NATIVE: tl.constexpr):
    """float32 within ±448 -> uint8, rounded to the nearest e4m3, ties to even."""
    if NATIVE and not _INTERPRETED:
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    bits = x.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # 3 of 23 bits of mantissa stay, and the exponent's bias becomes 7 instead of 127.
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6, multiples of 2^-9, which is the unit in the last place of 2^14.
    subnormal = ((tl.abs(x) + 16384.0) - 16384.0) * 512.0
    code = tl.where(magnitude < 0x3C800000, subnormal.to(tl.uint32), normal)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _nearest_integer(x):
    """Ties to even: beyond 2^23 a float32 is an integer."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _quantize_input_kernel(
    x_ptr, norm_ptr, given_ptr, q_ptr, scale_ptr, eps, size, num_groups, stride_x, stride_q,
    BLOCK: tl.constexpr, GROUP: tl.constexpr, FP8: tl.constexpr, NATIVE: tl.constexpr,
    NORM: tl.constexpr, SILU: tl.constexpr, STATIC: tl.constexpr, AMAX: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    mask = offs < size
    if NORM:
        weight = tl.load(norm_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    x = tl.load(x_ptr + row * stride_x + offs, mask=mask, other=0.0).to(tl.float32)
    if SILU:
        up = tl.load(x_ptr + row * stride_x + size + offs, mask=mask, other=0.0).to(tl.float32)
        x = rounded(x / (1.0 + tl.exp(-x)) * up, dtype).to(tl.float32)
    if NORM:
        # Rounded twice, as in rms_norm.
        x = rounded(x * tl.rsqrt(tl.sum(x * x) / size + eps), dtype).to(tl.float32)
        x = rounded(x * weight, dtype).to(tl.float32)

    LARGEST: tl.constexpr = 448.0 if FP8 else 127.5
    groups = tl.reshape(x, (BLOCK // GROUP, GROUP))
    if STATIC:
        scale = tl.zeros([BLOCK // GROUP], tl.float32) + tl.load(given_ptr)
    else:
        if AMAX:
            largest = tl.zeros([BLOCK // GROUP], tl.float32) + tl.load(given_ptr + row)
        else:
            largest = largest_or_nan(tl.abs(groups), 1)
        scale = tl.div_rn(largest, tl.zeros([BLOCK // GROUP], tl.float32) + LARGEST)
        group = tl.arange(0, BLOCK // GROUP)
        tl.store(scale_ptr + row * num_groups + group, scale, mask=group < num_groups)
    divisor = tl.where(scale == 0.0, 1.0, scale)[:, None]
    divisor = tl.broadcast_to(divisor, (BLOCK // GROUP, GROUP))
    quotient = tl.reshape(tl.div_rn(groups, divisor), (BLOCK,))
    if FP8:
        q = e4m3_code(tl.clamp(quotient, -448.0, 448.0), NATIVE)
    else:
        q = tl.clamp(_nearest_integer(quotient), -128.0, 127.0).to(tl.int8)
    tl.store(q_ptr + row * stride_q + offs, q, mask=mask)


def quantize_input(
    x: torch.Tensor,
    scheme: QuantScheme,
    static: torch.Tensor | None = None,
    norm: tuple[torch.Tensor, float] | None = None,
    silu: bool = False,
    tp: Collectives | None = None,
) -> QuantizedInput:
    """x [num_tokens, size] as `QuantizedLinear` defines it. Before that, norm: (weight, eps) of an RMSNorm of
    x; silu: x [num_tokens, 2 * size] becomes silu(first half) * second half. Both are rounded to the type of
    x. With `tp`, x is a rank's part of each token."""
    num_tokens, size = len(x), x.shape[1] // 2 if silu else x.shape[1]
    assert x.stride(1) == 1
    is_fp8 = scheme.weight_type == "fp8"
    block = triton.next_power_of_2(max(size, 16))
    group = scheme.group_size if scheme.inputs == "group" and scheme.group_size else block
    group = min(group, block)
    num_groups = triton.cdiv(size, group)
    q = torch.empty(num_tokens, size, dtype=torch.uint8 if is_fp8 else torch.int8, device=x.device)
    scale = static
    if scale is None:
        scale = torch.empty(num_tokens, num_groups, dtype=torch.float32, device=x.device)
    given = static
    if tp is not None and scheme.inputs == "token":
        assert norm is None, "the amax of all ranks must be known before the kernel"
        assert not silu, "the amax of all ranks must be known before the kernel"
        given = tp.all_gather(x.abs().amax(1).float()[None]).amax(0)
    if num_tokens > 0:
        _quantize_input_kernel[(num_tokens,)](
            x, x if norm is None else norm[0], scale if given is None else given, q, scale,
            0.0 if norm is None else norm[1], size, num_groups, x.stride(0), q.stride(0),
            BLOCK=block, GROUP=group, FP8=is_fp8, NATIVE=has_fp8(x.device),
            NORM=norm is not None, SILU=silu, STATIC=static is not None,
            AMAX=given is not static, num_warps=min(max(block // 512, 1), 16), **pdl_options(x),
        )  # fmt: skip
    return QuantizedInput(q.view(torch.float8_e4m3fn) if is_fp8 else q, scale, x.dtype)
