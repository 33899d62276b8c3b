"""Inputs of quantized linear layers in 8 bits, with the kernel before them: a norm, or SwiGLU.

Roofline bound: bytes over the memory bandwidth, (2 + 1) * n * size for a row of a half type. For few tokens
the bound is one launch.

Shape: a CTA takes a row, which stays in registers between the norm, the largest value and the rounding. A
long row is runs of RUN columns, so that few threads are without a value. Values with one scale share
its reciprocal, which takes fewer instructions than a division each (`_quotient`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from diptych.optimized.kernels.attention.paged_softmax import LOG2_E
from diptych.optimized.kernels.portable import (
    INTERPRETED,
    gpu_of,
    largest_or_nan,
    pdl_options,
    rounded,
    widened,
)
from diptych.shared.interfaces.collectives import Collectives
from diptych.shared.types.quant_scheme import QuantScheme

_INTERPRETED = tl.constexpr(INTERPRETED)
_ON_GPU = tl.constexpr(not INTERPRETED)
NUM_COUNTERS = 256
MAX_COUNTED_TOKENS = 256
"""More tokens make enough CTAs without split-K."""
PADDED_TOKENS = 256
"""cuBLAS multiplies 256 rows faster than most numbers between 128 and 256, so behind these tokens there is
room for as many rows. On an H200, 6,144 outputs of 4,096 inputs take 14.5 µs for 256, 21.9 for 136."""
MAX_BLOCK, RUN = 4096, 2048
"""The longest row that a CTA takes at once, and how much it takes of longer ones at a time. Of a row with a
norm it takes all, so that the sum has the order of rms_norm."""


@dataclass(frozen=True)
class QuantizedInput:
    q: torch.Tensor  # [num_tokens, size]: e4m3 or int8
    scale: torch.Tensor  # float32 [num_tokens, groups], or [1] for all tokens
    dtype: torch.dtype  # of x, and of what is computed from it
    counters: torch.Tensor | None = None
    """int32 [NUM_COUNTERS], zeros between the GEMMs of this input, for those with split-K."""


class ExpertScales(NamedTuple):
    """Static scales of experts. There is a row for each entry of `experts`, or several successive ones if x
    has more rows; if it has fewer, several successive rows are of one row of x."""

    scales: torch.Tensor  # float32 [num_experts]
    experts: torch.Tensor  # int32, contiguous; rows of an expert that does not exist are undefined


def is_padded(num_tokens: int) -> bool:
    return PADDED_TOKENS // 2 < num_tokens < PADDED_TOKENS


def has_fp8(device: torch.device) -> bool:
    """Whether the GPU converts and multiplies e4m3."""
    return INTERPRETED or gpu_of(device).capability >= (8, 9)


@triton.jit
def e4m3_code(x, NATIVE: tl.constexpr):
    """float32 -> uint8, rounded to the nearest e4m3, ties to even; ±448 beyond these."""
    if NATIVE and not _INTERPRETED:
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    x = tl.clamp(x, -448.0, 448.0)
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
def _as_rounded(x, dtype: tl.constexpr):
    """float32 x rounded to `dtype`, in float32: two values in three instructions. The compiler rounds one
    bfloat16 at a time."""
    if dtype == tl.bfloat16 and _ON_GPU:
        asm: tl.constexpr = """{
            .reg .b32 pair;
            cvt.rn.bf16x2.f32 pair, $3, $2;
            shl.b32 $0, pair, 16;
            and.b32 $1, pair, 0xffff0000;
        }"""
        return tl.inline_asm_elementwise(asm, "=r,=r,f,f", [x], tl.float32, is_pure=True, pack=2)
    else:
        return rounded(x, dtype).to(tl.float32)


@triton.jit
def _silu(x):
    if _ON_GPU:
        # As tl.exp, except that it may be 0 below 2^-126, which the sum does not show.
        asm: tl.constexpr = "ex2.approx.ftz.f32 $0, $1;"
        exp = tl.inline_asm_elementwise(asm, "=f,f", [x * -LOG2_E], tl.float32, is_pure=True, pack=1)
    else:
        exp = tl.exp(-x)
    return x / (1.0 + exp)


@triton.jit
def _fma(a, b, c):
    if _INTERPRETED:  # Triton 3.6's rounds twice
        return (a.to(tl.float64) * b + c).to(tl.float32)
    else:
        return tl.fma(a, b, c)


@triton.jit
def _divisor(scale):
    """Return what `_quotient` needs of a scale: minus a power of two, the scale times that power, and minus
    the reciprocal of the result. With the power, reciprocals and remainders are normal numbers."""
    scale = tl.where(scale == 0.0, 1.0, scale)
    power = tl.where(scale < 2.0**-60, 2.0**64, tl.where(scale > 2.0**100, 2.0**-64, 1.0))
    divisor = tl.where(scale == float("inf"), 2.0**100, scale * power)
    return -power, divisor, tl.div_rn(-1.0, divisor)


@triton.jit
def _quotient(x, power, divisor, reciprocal, IS_HALF: tl.constexpr, IS_BOUNDED: tl.constexpr):
    """x / scale, rounded to the nearest.

    x times the reciprocal is at most two units in the last place off, and the remainder, which is
    exact, corrects it. For x of at most 11 bits the first correction rounds as a division does, found by a
    search over all significands of x and of the divisor; for others the second one does (Markstein, 1990).
    Remainders of tiny x are not exact, but their quotients round to 0 in 8 bits. IS_BOUNDED: no quotient
    overflows."""
    x = x * power  # negative, so that zeros keep their signs
    estimate = x * reciprocal
    quotient = _fma(_fma(estimate, divisor, x), reciprocal, estimate)
    if not IS_HALF:
        quotient = _fma(_fma(quotient, divisor, x), reciprocal, quotient)
    return quotient if IS_BOUNDED else tl.where(tl.abs(estimate) < 65536.0, quotient, estimate)


@triton.jit
def _codes(x, scale, FP8: tl.constexpr, NATIVE: tl.constexpr, IS_HALF: tl.constexpr, STATIC: tl.constexpr):
    power, divisor, reciprocal = _divisor(scale)
    quotient = _quotient(x, power, divisor, reciprocal, IS_HALF, not STATIC)
    if FP8:
        return e4m3_code(quotient, NATIVE)
    else:
        return tl.clamp(_nearest_integer(quotient), -128.0, 127.0).to(tl.int8)


@triton.jit
def _quantize_input_kernel(
    x_ptr, norm_ptr, given_ptr, experts_ptr, q_ptr, scale_ptr, counters_ptr, eps, size, num_groups,
    num_experts, stride_x, stride_q,
    BLOCK: tl.constexpr, COUNT: tl.constexpr, GROUP: tl.constexpr, FP8: tl.constexpr, NATIVE: tl.constexpr,
    NORM: tl.constexpr, SILU: tl.constexpr, STATIC: tl.constexpr, AMAX: tl.constexpr, COUNTERS: tl.constexpr,
    REPEATS: tl.constexpr, ROWS_OF_EXPERT: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """REPEATS: rows of one row of x. ROWS_OF_EXPERT: rows of one entry of experts; 0: none."""
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    if NORM:
        weight = tl.load(norm_ptr + offs, mask=offs < size, other=0.0).to(tl.float32)
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if COUNTERS > 0 and row == 0:
        tl.store(counters_ptr + tl.arange(0, COUNTERS), 0)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    values = ()
    for i in tl.static_range(COUNT):
        tile, mask = x_ptr + row // REPEATS * stride_x + i * BLOCK + offs, i * BLOCK + offs < size
        x = widened(tl.load(tile, mask=mask, other=0.0), _ON_GPU)
        if SILU:
            x = _as_rounded(_silu(x) * widened(tl.load(tile + size, mask=mask, other=0.0), _ON_GPU), dtype)
        if NORM:
            # Rounded twice, as in rms_norm.
            x = rounded(x * tl.rsqrt(tl.sum(x * x) / size + eps), dtype).to(tl.float32)
            x = rounded(x * weight, dtype).to(tl.float32)
        values += (x,)

    LARGEST: tl.constexpr = 448.0 if FP8 else 127.5
    IS_HALF: tl.constexpr = dtype != tl.float32
    if GROUP == 0:  # one scale for the row
        if ROWS_OF_EXPERT > 0:
            expert = tl.load(experts_ptr + row // ROWS_OF_EXPERT)
            is_expert = (expert >= 0) & (expert < num_experts)
            scale = tl.load(given_ptr + expert, mask=is_expert, other=1.0)
            tl.store(scale_ptr + row, scale)
        elif STATIC:
            scale = tl.load(given_ptr)
        else:
            if AMAX:
                largest = tl.load(given_ptr + row)
            else:
                most = tl.abs(values[0])
                for i in tl.static_range(1, COUNT):
                    most = tl.maximum(most, tl.abs(values[i]), propagate_nan=tl.PropagateNan.ALL)
                largest = largest_or_nan(most, 0)
            scale = tl.div_rn(largest, LARGEST)
            tl.store(scale_ptr + row, scale)
    for i in tl.static_range(COUNT):
        if GROUP == 0:
            codes = _codes(values[i], scale, FP8, NATIVE, IS_HALF, STATIC)
        else:
            groups = tl.reshape(values[i], (BLOCK // GROUP, GROUP))
            largest = largest_or_nan(tl.abs(groups), 1)
            scale = tl.div_rn(largest, LARGEST)
            group = i * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
            tl.store(scale_ptr + row * num_groups + group, scale, mask=group < num_groups)
            codes = tl.reshape(_codes(groups, scale[:, None], FP8, NATIVE, IS_HALF, False), (BLOCK,))
        tl.store(q_ptr + row * stride_q + i * BLOCK + offs, codes, mask=i * BLOCK + offs < size)


def quantize_input(
    x: torch.Tensor,
    scheme: QuantScheme,
    static: torch.Tensor | ExpertScales | None = None,
    norm: tuple[torch.Tensor, float] | None = None,
    silu: bool = False,
    tp: Collectives | None = None,
) -> QuantizedInput:
    """x [num_tokens, size] as `QuantizedLinear` defines it. Before that, norm: (weight, eps) of an RMSNorm of
    x; silu: x [num_tokens, 2 * size] becomes silu(first half) * second half. Both are rounded to the type of
    x. With `tp`, x is a rank's part of each token. static: one scale, or those of experts."""
    num_tokens, size = len(x), x.shape[1] // 2 if silu else x.shape[1]
    experts, num_experts, repeats, rows_of_expert = x, 0, 1, 0
    if isinstance(static, ExpertScales):
        experts, num_experts = static.experts, len(static.scales)
        repeats = max(experts.numel() // num_tokens, 1)
        num_tokens *= repeats
        rows_of_expert = num_tokens // experts.numel()
    assert x.stride(1) == 1
    is_fp8 = scheme.weight_type == "fp8"
    block = triton.next_power_of_2(max(size, 16))
    group = scheme.group_size if scheme.inputs == "group" and scheme.group_size else size
    num_groups = triton.cdiv(size, group) if size else 1
    if norm is None and block > MAX_BLOCK:
        block = max(RUN, group if num_groups > 1 else 0)
    count = triton.cdiv(size, block)
    room = PADDED_TOKENS if is_padded(num_tokens) else num_tokens
    q = torch.empty(room, size, dtype=torch.uint8 if is_fp8 else torch.int8, device=x.device)[:num_tokens]
    given = static.scales if isinstance(static, ExpertScales) else static
    if isinstance(static, torch.Tensor):
        scale = static
    else:
        scale = torch.empty(room, num_groups, dtype=torch.float32, device=x.device)[:num_tokens]
    counters = None
    if num_tokens <= MAX_COUNTED_TOKENS:
        counters = torch.empty(NUM_COUNTERS, dtype=torch.int32, device=x.device)
    if tp is not None and scheme.inputs == "token":
        assert norm is None, "the amax of all ranks must be known before the kernel"
        assert not silu, "the amax of all ranks must be known before the kernel"
        given = tp.all_gather(x.abs().amax(1).float()[None]).amax(0)
    if num_tokens > 0:
        _quantize_input_kernel[(num_tokens,)](
            x, x if norm is None else norm[0], scale if given is None else given, experts, q, scale,
            q if counters is None else counters, 0.0 if norm is None else norm[1],
            size, num_groups, num_experts, x.stride(0), q.stride(0),
            BLOCK=block, COUNT=count, GROUP=group if num_groups > 1 else 0, FP8=is_fp8,
            NATIVE=has_fp8(x.device), NORM=norm is not None, SILU=silu, STATIC=static is not None,
            AMAX=static is None and given is not None, COUNTERS=0 if counters is None else NUM_COUNTERS,
            REPEATS=repeats, ROWS_OF_EXPERT=rows_of_expert,
            num_warps=min(max(block // 512, 1), 16) if count == 1 else 8, **pdl_options(x),
        )  # fmt: skip
    return QuantizedInput(q.view(torch.float8_e4m3fn) if is_fp8 else q, scale, x.dtype, counters)
