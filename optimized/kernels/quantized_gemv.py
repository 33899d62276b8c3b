"""One token times weights in 8 or 4 bits: the quantized linear layers of a decode step at batch 1, with the
norm and the quantization of the input before them, and SwiGLU or the residual sum after them.

Roofline bound: the weights' bytes, out_features * in_features, half of that for 4 bits, and 4 bytes for each
scale, over the memory bandwidth.

Shape: a CTA computes blocks of 16 outputs (SwiGLU: 8, from 8 rows of gate and 8 of up), and each of its warps
a part of every row. Weights go from memory to registers, 16 bytes a lane, the first of them before the CTA
waits for the previous kernel. There they are unpacked, and tensor cores multiply and add up (warp_mma.py).
All eight columns of B are the same token: seven of eight multiplications are wasted, but without tensor cores
multiplication and addition would take more instructions than there is time for while weights arrive.

A run is 64 bytes of a row, 16 in each of four lanes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from optimized.kernels.carveout import prefer_l1
from optimized.kernels.cublas_linear import HALF_TYPES
from optimized.kernels.gemv_inputs import (
    amax_of,
    columns_of,
    loaded_words,
    normed,
    quantized_words,
    words_by_nibble,
)
from optimized.kernels.gemv_weights import add_run, load_step, minus_offset
from optimized.kernels.portable import INTERPRETED, gpu_of, pdl_options, rounded
from optimized.kernels.quantize_input import QuantizedInput, has_fp8
from shared.types.quantization import INT4_ZERO, QuantScheme

_ZERO = tl.constexpr(INT4_ZERO)


class GemvTile(NamedTuple):
    warps: int  # of a CTA
    runs: int  # of a row, loaded by a warp at a time
    ctas_per_sm: int = 0  # CTAs that take one block after the other; 0: a CTA for each block


@triton.jit
def _scaled(y, row, mask, x_scale, scale_ptr, bias_ptr, SCALED: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Sums of products -> outputs. SCALED: y has the scales of the weights already."""
    if not SCALED:
        y *= tl.load(scale_ptr + row, mask=mask, other=0.0)
    y *= x_scale
    if HAS_BIAS:
        y += tl.load(bias_ptr + row, mask=mask, other=0.0).to(tl.float32)
    return y


@triton.jit
def _quantized_gemv_kernel(
    x_ptr, x_scale_ptr, norm_ptr, weight_ptr, scale_ptr, zero_ptr, bias_ptr, residual_ptr, y_ptr,
    eps, stride_words, num_groups,
    OUT: tl.constexpr, SIZE: tl.constexpr, WEIGHT: tl.constexpr, UNIT: tl.constexpr,
    SCALE_BYTES: tl.constexpr, X_GROUP: tl.constexpr, HAS_ZERO: tl.constexpr, NATIVE: tl.constexpr,
    QUANTIZE: tl.constexpr, STATIC: tl.constexpr, GATED: tl.constexpr,
    HAS_NORM: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    WARPS: tl.constexpr, STEP: tl.constexpr, CTAS: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    RUNS: tl.constexpr = (SIZE // 2 if WEIGHT == "int4" else SIZE) // 64
    STEPS: tl.constexpr = (RUNS + WARPS * STEP - 1) // (WARPS * STEP)
    WARP_RUNS: tl.constexpr = STEPS * STEP
    ROUNDS: tl.constexpr = (WARP_RUNS + 7) // 8
    BLOCK: tl.constexpr = 8 if GATED else 16
    BLOCKS: tl.constexpr = (OUT + BLOCK - 1) // BLOCK
    MASKED: tl.constexpr = OUT % BLOCK != 0 or RUNS != WARPS * WARP_RUNS
    IS_FP8: tl.constexpr = WEIGHT == "fp8"
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    lanes, warps = tl.arange(0, 32), tl.arange(0, WARPS)
    first = tl.program_id(0)
    words, scales, zeros = load_step(
        weight_ptr, scale_ptr, zero_ptr, first, 0, stride_words, num_groups,
        OUT, RUNS, SCALE_BYTES, HAS_ZERO, WARPS, WARP_RUNS, STEP, GATED, MASKED,
    )  # fmt: skip
    columns, masks = columns_of(lanes, warps, UNIT, WEIGHT == "int4", RUNS, WARP_RUNS, ROUNDS)
    norm_weights = ()
    if HAS_NORM:
        for i in tl.static_range(len(columns)):
            norm_weights += (tl.load(norm_ptr + columns[i], mask=masks[i], other=0.0),)
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()

    x_scale = 1.0
    if WEIGHT == "int4" or QUANTIZE:
        raw = ()
        for i in tl.static_range(len(columns)):
            raw += (tl.load(x_ptr + columns[i], mask=masks[i], other=0.0),)
        if HAS_NORM:
            raw = normed(raw, norm_weights, eps, SIZE, WARPS)
        if WEIGHT == "int4":
            xs = words_by_nibble(raw, WARPS)
        else:
            if STATIC:
                x_scale = tl.load(x_scale_ptr)
            else:
                x_scale = tl.div_rn(amax_of(raw, WARPS), 448.0 if IS_FP8 else 127.5)
            xs = quantized_words(raw, x_scale, IS_FP8, NATIVE, WARPS)
    else:
        xs = loaded_words(x_ptr, lanes, warps, IS_FP8, NATIVE, RUNS, WARP_RUNS, ROUNDS, WARPS)
        if X_GROUP == 0:
            x_scale = tl.load(x_scale_ptr)

    same_t = (lanes % 4)[:, None] + warps[None, :] * 0
    nothing = tl.zeros([32, WARPS], tl.int32 if WEIGHT == "int8" else tl.float32)
    symmetric = minus_offset(tl.zeros([32, WARPS], tl.int32) + _ZERO, dtype)
    for block in range(first, BLOCKS, CTAS):
        c = (nothing, nothing, nothing, nothing)
        upper_sum, lower_sum = tl.zeros([32, WARPS], tl.float32), tl.zeros([32, WARPS], tl.float32)
        for step in tl.static_range(STEPS):
            if step + 1 < STEPS or CTAS < BLOCKS:
                next_words, next_scales, next_zeros = load_step(
                    weight_ptr, scale_ptr, zero_ptr, block + (step + 1) // STEPS * CTAS,
                    (step + 1) % STEPS * STEP, stride_words, num_groups,
                    OUT, RUNS, SCALE_BYTES, HAS_ZERO, WARPS, WARP_RUNS, STEP, GATED,
                    MASKED or step + 1 == STEPS,
                )  # fmt: skip
            for i in tl.static_range(STEP):
                if SCALE_BYTES > 0:
                    c = (nothing, nothing, nothing, nothing)
                offsets = (symmetric, symmetric)
                if HAS_ZERO:
                    offsets = (minus_offset(zeros[2 * i], dtype), minus_offset(zeros[2 * i + 1], dtype))
                source = same_t + (step * STEP + i) % 8 * 4
                c = add_run(
                    c, words[2 * i], words[2 * i + 1], xs[(step * STEP + i) // 8], source, offsets,
                    WEIGHT, dtype, NATIVE, WARPS,
                )  # fmt: skip
                if SCALE_BYTES > 0:
                    upper, lower = (
                        c[0].to(tl.float32) * scales[2 * i],
                        c[2].to(tl.float32) * scales[2 * i + 1],
                    )
                    if X_GROUP > 0:
                        run = warps * WARP_RUNS + step * STEP + i
                        group_scale = tl.load(x_scale_ptr + run * 64 // X_GROUP, mask=run < RUNS, other=0.0)
                        upper, lower = upper * group_scale[None, :], lower * group_scale[None, :]
                    upper_sum, lower_sum = upper_sum + upper, lower_sum + lower
            if step + 1 < STEPS or CTAS < BLOCKS:
                words, scales, zeros = next_words, next_scales, next_zeros
        if SCALE_BYTES == 0:
            upper_sum, lower_sum = c[0].to(tl.float32), c[2].to(tl.float32)

        sums = (tl.sum(upper_sum, 1), tl.sum(lower_sum, 1))  # [32]: a row in four lanes
        if GATED:
            row = block * 8 + lanes // 4
            mask = row < OUT
            gate = _scaled(sums[0], row, mask, x_scale, scale_ptr, bias_ptr, SCALE_BYTES > 0, HAS_BIAS)
            up = _scaled(sums[1], row + OUT, mask, x_scale, scale_ptr, bias_ptr, SCALE_BYTES > 0, HAS_BIAS)
            # Rounded as if gate and up were written first. For large negative gates exp(-gate) is infinite.
            gate, up = rounded(gate, dtype).to(tl.float32), rounded(up, dtype).to(tl.float32)
            y = gate / (1.0 + tl.exp(-gate)) * up
            tl.store(y_ptr + row, rounded(y, dtype), mask=mask & (lanes % 4 == 0))
        else:
            for half in tl.static_range(2):
                row = block * 16 + lanes // 4 + half * 8
                mask = row < OUT
                y = _scaled(sums[half], row, mask, x_scale, scale_ptr, bias_ptr, SCALE_BYTES > 0, HAS_BIAS)
                if HAS_RESIDUAL:
                    y += tl.load(residual_ptr + row, mask=mask, other=0.0).to(tl.float32)
                tl.store(y_ptr + row, rounded(y, dtype), mask=mask & (lanes % 4 == 0))


def suits_gemv(x: torch.Tensor | QuantizedInput, scheme: QuantScheme, size: int) -> bool:
    """Whether quantized_gemv computes this: one token of a 16-bit type, and whole runs with one scale."""
    num_tokens = len(x.q) if isinstance(x, QuantizedInput) else len(x)
    if num_tokens != 1 or x.dtype not in HALF_TYPES:
        return False
    if scheme.weight_type == "int4":
        return scheme.unit(size) % 128 == 0
    is_group = scheme.inputs == "group" and not isinstance(x, QuantizedInput)
    return (
        scheme.weight_type in ("fp8", "int8")
        and scheme.inputs != "none"
        and not is_group
        and size % 64 == 0
        and (scheme.group_size or 64) % 64 == 0
    )


def quantized_gemv(
    x: torch.Tensor | QuantizedInput,
    weight: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    scheme: QuantScheme,
    y: torch.Tensor,
    *,
    static: torch.Tensor | None = None,
    norm: tuple[torch.Tensor, float] | None = None,
    gated: bool = False,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    tile: GemvTile | None = None,
) -> None:
    """`quantized_gemm` for one token, y [1, out]; `suits_gemv` must hold. An x that is no QuantizedInput is
    quantized as the scheme says, with the scale `static` if there is one, after norm: (weight, eps) of an
    RMSNorm. Gated: the weight has the rows of gate, then those of up, and y is silu(gate) * up."""
    is_quantized = isinstance(x, QuantizedInput)
    values = x.q.view(torch.int32) if isinstance(x, QuantizedInput) else x
    size = values.shape[1] * (4 if is_quantized else 1)
    out, num_groups, kind = y.shape[1], scale.shape[1], scheme.weight_type
    assert len(weight) == out * (2 if gated else 1)
    assert values.stride(1) == weight.stride(1) == scale.stride(1) == y.stride(1) == 1
    assert not (is_quantized and norm is not None)
    assert not (gated and residual is not None)
    group = scheme.unit(size) // 2 if kind == "int4" else scheme.group_size
    x_scale = x.scale if isinstance(x, QuantizedInput) else static
    warps, step, ctas_per_sm = tile or plan(size // 2 if kind == "int4" else size)
    blocks = triton.cdiv(out, 8 if gated else 16)
    ctas = min(blocks, ctas_per_sm * gpu_of(values.device).num_multiprocessors or blocks)
    launched = _quantized_gemv_kernel[(ctas,)](
        values, scale if x_scale is None else x_scale, scale if norm is None else norm[0],
        weight.view(torch.uint8).view(torch.int32), scale, scale if zero is None else zero,
        scale if bias is None else bias, scale if residual is None else residual, y,
        0.0 if norm is None else norm[1], weight.stride(0) // 4, num_groups,
        OUT=out, SIZE=size, WEIGHT=kind, UNIT=scheme.unit(size),
        SCALE_BYTES=(group or 0) if num_groups > 1 else 0,
        X_GROUP=(group or 0) if is_quantized and scheme.inputs == "group" else 0,
        HAS_ZERO=zero is not None, NATIVE=has_fp8(values.device),
        QUANTIZE=not is_quantized and kind != "int4", STATIC=static is not None, GATED=gated,
        HAS_NORM=norm is not None, HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None,
        WARPS=warps, STEP=step, CTAS=ctas, num_warps=4 if INTERPRETED else warps, **pdl_options(values),
    )  # fmt: skip
    prefer_l1(launched)


def plan(row_bytes: int) -> GemvTile:
    """The best on average for the layers of Qwen3-8B on an H200. The GPU's table has better ones for shapes
    that `diptych tune --quantization` has measured."""
    runs = triton.cdiv(row_bytes, 64)
    warps = min(8, triton.next_power_of_2(triton.cdiv(runs, 4)))
    return GemvTile(warps, min(4, triton.cdiv(runs, warps)))
