"""GEMM with quantized weights: 8 bits by 8 bits, or weights of 8 or 4 bits by inputs of 16.

Roofline bound: for few tokens the weights' bytes over the memory bandwidth: out_features * in_features, half
of that for 4 bits, and 4 bytes for each scale.

Shape: a CTA computes some outputs of some tokens from all inputs or, split-K, from a part of them. Weights
are the side of the tensor cores that has many rows, tokens the side that may have 16. A layer needs as many
CTAs as multiprocessors, and each CTA reads the inputs of all tokens: where outputs are few, parts make more
CTAs without more reads. The last CTA of a tile adds the parts up in their order, so that the order in which
the sum of a token is added up does not depend on the other tokens, nor on which CTA is last. Scales of groups
are applied to the sum of a group, in float32; those of NVFP4 to the weights, which stays exact.

Where the GPU multiplies no e4m3, or the result is float32, e4m3 is widened to float16, which is exact.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from diptych.optimized.kernels.linear.cublas_linear import HALF_TYPES
from diptych.optimized.kernels.linear.quantize_input import QuantizedInput, has_fp8
from diptych.optimized.kernels.linear.quantized_tiles import Tile, plan
from diptych.optimized.kernels.linear.quantized_values import (
    from_nibbles,
    from_nvfp4,
    nvfp4_factor,
    widened_e4m3,
)
from diptych.optimized.kernels.portable import INTERPRETED, gpu_of, pdl_options, rounded
from diptych.shared.types.quant_scheme import INT4_ZERO, QuantScheme

_INTERPRETED = tl.constexpr(INTERPRETED)
_ZERO = tl.constexpr(INT4_ZERO)
BAND = tl.constexpr(8)
MAX_TILES = 1024
"""Counters for split-K of inputs that are not quantized."""


@triton.constexpr_function
def _zero_of(pointer):
    return 0.0 if pointer.type.element_ty.is_floating() else 0


@triton.jit
def _x_tile(x_ptr, rows, cols, stride, num_tokens, size, IS_WHOLE: tl.constexpr):
    mask = (rows < num_tokens)[:, None]
    if not IS_WHOLE:
        mask &= (cols < size)[None, :]
    return tl.load(
        x_ptr + rows.to(tl.int64)[:, None] * stride + cols[None, :], mask=mask, other=_zero_of(x_ptr)
    )


@triton.jit
def _is_last(y, counter_ptr, parts_ptr, PARTS: tl.constexpr):
    """Leaves the sum of a part, and counts it: whether all parts are there."""
    ROWS: tl.constexpr = y.shape[0]
    TOKENS: tl.constexpr = y.shape[1]
    place = tl.arange(0, ROWS)[:, None] * TOKENS + tl.arange(0, TOKENS)[None, :]
    tl.store(parts_ptr + tl.program_id(1) * (ROWS * TOKENS) + place, y)
    tl.debug_barrier()  # the release below is one thread's: all others' stores come before it
    is_last = tl.atomic_add(counter_ptr, 1, sem="acq_rel") == PARTS - 1
    tl.debug_barrier()
    return is_last


@triton.jit
def _sum_of_parts(parts_ptr, ROWS: tl.constexpr, TOKENS: tl.constexpr, PARTS: tl.constexpr):
    place = tl.arange(0, ROWS)[:, None] * TOKENS + tl.arange(0, TOKENS)[None, :]
    # .cg: from where the other CTAs' multiprocessors wrote it.
    y = tl.load(parts_ptr + place, cache_modifier=".cg")
    for i in tl.static_range(1, PARTS):
        y += tl.load(parts_ptr + i * (ROWS * TOKENS) + place, cache_modifier=".cg")
    return y


@triton.jit
def _store_outputs(
    y, tokens, rows, x_scale_ptr, scale_ptr, bias_ptr, residual_ptr, y_ptr,
    num_tokens, out, stride_x_scale, stride_residual, stride_y, num_groups,
    ROWS_SCALED: tl.constexpr, TOKENS_SCALED: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """y [rows, tokens] float32: sums, times the scales that are not applied yet."""
    if ROWS_SCALED:
        y *= tl.load(scale_ptr + rows.to(tl.int64) * num_groups, mask=rows < out, other=0.0)[:, None]
    if TOKENS_SCALED:
        x_scales = x_scale_ptr + tokens.to(tl.int64) * stride_x_scale
        y *= tl.load(x_scales, mask=tokens < num_tokens, other=0.0)[None, :]
    y = y.T
    offs_t, offs_o = tokens[:, None].to(tl.int64), rows[None, :]
    mask = (offs_t < num_tokens) & (offs_o < out)
    if HAS_BIAS:
        y += tl.load(bias_ptr + offs_o, mask=offs_o < out, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        y += tl.load(residual_ptr + offs_t * stride_residual + offs_o, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + offs_t * stride_y + offs_o, rounded(y, y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_tokens"])
def _quantized_gemm_kernel(
    x_ptr, x_scale_ptr, weight_ptr, scale_ptr, zero_ptr, bias_ptr, residual_ptr, y_ptr,
    counters_ptr, workspace_ptr, num_tokens, out, size, part_bytes, num_groups,
    stride_x, stride_x_scale, stride_weight, stride_residual, stride_y,
    WEIGHT: tl.constexpr, UNIT: tl.constexpr, GROUP: tl.constexpr, X_GROUP: tl.constexpr,
    X_SCALED: tl.constexpr, IS_WHOLE: tl.constexpr, HAS_ZERO: tl.constexpr,
    NATIVE: tl.constexpr, MULTIPLY_FP8: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr, PARTS: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    # CTAs that run together share tokens and weights in the L2 cache: BAND tiles of tokens, some of outputs.
    num_token_tiles, num_row_tiles = tl.cdiv(num_tokens, TOKENS), tl.cdiv(out, ROWS)
    first = tl.program_id(0) // (BAND * num_row_tiles) * BAND
    band, place = tl.minimum(num_token_tiles - first, BAND), tl.program_id(0) % (BAND * num_row_tiles)
    tokens = (first + place % band) * TOKENS + tl.arange(0, TOKENS)
    rows = place // band * ROWS + tl.arange(0, ROWS)
    is_row = rows < out
    weight_rows = weight_ptr + rows.to(tl.int64)[:, None] * stride_weight
    scale_rows = scale_ptr + rows.to(tl.int64) * num_groups
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()

    x_type: tl.constexpr = tl.float32 if _INTERPRETED else x_ptr.dtype.element_ty
    IMPRECISE: tl.constexpr = 128 if STEP > 128 else STEP
    IS_INT8: tl.constexpr = WEIGHT == "int8" and X_SCALED
    IN_LOOP: tl.constexpr = GROUP > 0 or X_GROUP > 0  # scales of groups
    row_bytes = size // 2 if WEIGHT == "int4" or WEIGHT == "nvfp4" else size
    first_byte, end_byte = 0, row_bytes
    if PARTS > 1:
        first_byte = tl.program_id(1) * part_bytes
        end_byte = tl.minimum(first_byte + part_bytes, row_bytes)
    y = tl.zeros([ROWS, TOKENS], tl.int32 if IS_INT8 and not IN_LOOP else tl.float32)
    # With stages named, loads of scales are asynchronous too, which no tensor core reads.
    for k in tl.range(first_byte, end_byte, STEP, num_stages=STAGES):
        cols = k + tl.arange(0, STEP)
        mask = is_row[:, None] if IS_WHOLE else is_row[:, None] & (cols < row_bytes)[None, :]
        tile = tl.load(weight_rows + cols[None, :], mask=mask, other=_zero_of(weight_ptr))
        # --8<-- [start:unpack-and-multiply]
        if WEIGHT == "int4":
            # STEP bytes of a unit: its inputs `first` and on, and those half a unit later.
            unit = k // (UNIT // 2)
            first = 2 * k if UNIT == 2 * STEP else unit * UNIT + k % (UNIT // 2)
            group = unit if GROUP > 0 else 0
            cols = first + tl.arange(0, STEP)
            low = _x_tile(x_ptr, tokens, cols, stride_x, num_tokens, size, IS_WHOLE).to(x_type)
            high = _x_tile(x_ptr, tokens, cols + UNIT // 2, stride_x, num_tokens, size, IS_WHOLE).to(x_type)
            zero = tl.zeros([ROWS], tl.float32) + _ZERO
            if HAS_ZERO:
                zeros = zero_ptr + rows.to(tl.int64) * num_groups + group
                zero = tl.load(zeros, mask=is_row, other=0).to(tl.float32)
            w_low, w_high = from_nibbles(tile, zero[:, None], HAS_ZERO, x_type)
            part = tl.dot(w_low, low.T, input_precision="ieee")
            part = tl.dot(w_high, high.T, part, input_precision="ieee")
        # --8<-- [end:unpack-and-multiply]
        elif WEIGHT == "nvfp4":
            HALF: tl.constexpr = UNIT // 2
            cols = cols // HALF * UNIT + cols % HALF
            low = _x_tile(x_ptr, tokens, cols, stride_x, num_tokens, size, IS_WHOLE).to(x_type)
            high = _x_tile(x_ptr, tokens, cols + HALF, stride_x, num_tokens, size, IS_WHOLE).to(x_type)
            groups = k // HALF + tl.arange(0, STEP // HALF)
            of_groups = is_row[:, None] if IS_WHOLE else is_row[:, None] & (groups < num_groups)[None, :]
            scales = tl.load(scale_rows[:, None] + groups[None, :], mask=of_groups, other=0)
            w_low, w_high = from_nvfp4(tile, scales, HALF, NATIVE, x_type)
            y = tl.dot(w_low, low.T, y, input_precision="ieee")
            y = tl.dot(w_high, high.T, y, input_precision="ieee")
        else:
            group = k // GROUP if GROUP > 0 else 0
            x = _x_tile(x_ptr, tokens, cols, stride_x, num_tokens, size, IS_WHOLE)
            if WEIGHT == "fp8" and not MULTIPLY_FP8:
                tile = widened_e4m3(tile, NATIVE)
                if X_SCALED:
                    x = widened_e4m3(x, NATIVE)
            if not X_SCALED:
                tile, x = tile.to(x_type), x.to(x_type)
            if IN_LOOP or not IS_INT8:
                # Hopper's tensor cores keep 14 bits of a sum of e4m3, so it is added to float32 often.
                part = tl.dot(tile, x.T, input_precision="ieee", max_num_imprecise_acc=IMPRECISE)
            else:
                y = tl.dot(tile, x.T, y, out_dtype=tl.int32)  # Triton 3.6 asks for the type
        if IN_LOOP:
            part = part.to(tl.float32)
            if GROUP > 0:
                part *= tl.load(scale_rows + group, mask=is_row, other=0.0)[:, None]
            if X_GROUP > 0:
                x_scales = x_scale_ptr + tokens.to(tl.int64) * stride_x_scale + k // X_GROUP
                part *= tl.load(x_scales, mask=tokens < num_tokens, other=0.0)[None, :]
        if WEIGHT != "nvfp4" and (IN_LOOP or not IS_INT8):
            y += part

    y = y.to(tl.float32)
    if WEIGHT == "nvfp4":
        factors = zero_ptr + rows.to(tl.int64) * 2
        factor = tl.load(factors, mask=is_row, other=0.0) / tl.load(factors + 1, mask=is_row, other=1.0)
        y *= factor[:, None] * nvfp4_factor(x_type)
    is_last = True
    if PARTS > 1:
        parts_ptr = workspace_ptr + tl.program_id(0).to(tl.int64) * (PARTS * ROWS * TOKENS)
        is_last = _is_last(y, counters_ptr + tl.program_id(0), parts_ptr, PARTS)
    if is_last:
        if PARTS > 1:
            tl.store(counters_ptr + tl.program_id(0), 0)
            y = _sum_of_parts(parts_ptr, ROWS, TOKENS, PARTS)
        _store_outputs(
            y, tokens, rows, x_scale_ptr, scale_ptr, bias_ptr, residual_ptr, y_ptr,
            num_tokens, out, stride_x_scale, stride_residual, stride_y, num_groups,
            GROUP == 0 and WEIGHT != "nvfp4", X_SCALED and X_GROUP == 0, HAS_BIAS, HAS_RESIDUAL,
        )  # fmt: skip


def quantized_gemm(
    x: torch.Tensor | QuantizedInput,
    weight: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    scheme: QuantScheme,
    y: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    tile: Tile | None = None,
    counters: torch.Tensor | None = None,
) -> None:
    """y [num_tokens, out] = x̂ @ ŵᵀ + bias + residual, rounded once; y may be the residual. weight, scale and
    zero, or weight_global: as in QuantScheme.tensors. `can_compute` must hold. counters: for inputs that are
    not quantized, [MAX_TILES] as `QuantizedInput.counters`; None: no split-K."""
    is_scaled, is_nvfp4 = isinstance(x, QuantizedInput), scheme.weight_type == "nvfp4"
    scale = scale.view(torch.uint8) if is_nvfp4 else scale  # GPUs before sm_89 have no type for e4m3
    values, dtype = (x.q, x.dtype) if isinstance(x, QuantizedInput) else (x, x.dtype)
    x_scale = x.scale if isinstance(x, QuantizedInput) else scale
    num_tokens, size = values.shape
    out = len(weight)
    assert y.shape == (num_tokens, out)
    assert values.stride(1) == weight.stride(1) == scale.stride(1) == y.stride(1) == 1
    if num_tokens == 0:
        return
    is_fp8 = scheme.weight_type == "fp8"
    gpu = gpu_of(values.device)
    x_bytes = values.itemsize * (2 if scheme.is_packed else 1)
    planned = tile or plan(num_tokens, out, scheme, size)
    chosen = planned.fitted(x_bytes, gpu, dtype == torch.float32 and not is_scaled)
    group = scheme.group_size if scale.shape[1] > 1 and not is_nvfp4 else 0
    x_group = scheme.group_size if scheme.inputs == "group" and x_scale.shape[-1] > 1 else 0
    native = has_fp8(values.device)
    multiply_fp8 = is_fp8 and is_scaled and native and dtype in HALF_TYPES
    if is_fp8 and not multiply_fp8:  # as bytes, e4m3 would pass through registers on its way to tensor cores
        weight = weight.view(torch.uint8)
        values = values.view(torch.uint8) if is_scaled else values
    num_tiles = triton.cdiv(out, chosen.rows) * triton.cdiv(num_tokens, chosen.tokens)
    counters = x.counters if isinstance(x, QuantizedInput) else counters
    parts = chosen.parts if counters is not None and num_tiles <= len(counters) else 1
    part_bytes = triton.cdiv(weight.shape[1], parts * chosen.step) * chosen.step
    workspace = scale
    if parts > 1:
        num_sums = num_tiles * parts * chosen.rows * chosen.tokens
        workspace = torch.empty(num_sums, dtype=torch.float32, device=y.device)
    _quantized_gemm_kernel[(num_tiles, parts)](
        values, x_scale, weight, scale,
        weight if zero is None else zero, values if bias is None else bias,
        values if residual is None else residual, y, scale if counters is None else counters, workspace,
        num_tokens, out, size, part_bytes, scale.shape[1],
        values.stride(0), x_scale.shape[1] if x_scale.dim() == 2 else 0, weight.stride(0),
        0 if residual is None else residual.stride(0), y.stride(0),
        WEIGHT=scheme.weight_type, UNIT=scheme.unit(size), GROUP=group or 0, X_GROUP=x_group or 0,
        X_SCALED=is_scaled, IS_WHOLE=weight.shape[1] % chosen.step == 0,
        HAS_ZERO=zero is not None and not is_nvfp4, NATIVE=native, MULTIPLY_FP8=multiply_fp8,
        TOKENS=chosen.tokens, ROWS=chosen.rows, STEP=chosen.step, STAGES=chosen.stages, PARTS=parts,
        HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None,
        num_warps=chosen.warps, **pdl_options(values),
    )  # fmt: skip
