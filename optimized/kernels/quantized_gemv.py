"""One token times weights in 8 or 4 bits: the quantized linear layers of a decode step at batch 1.

Roofline bound: the weights' bytes, out_features * in_features, half of that for 4 bits, and 4 bytes for each
scale, over the memory bandwidth.

Shape of FP8: as in warp_gemv.py. A warp computes ROWS outputs, each whole. A lane loads 16 bytes of a row at
a time, the first of them before it waits for the previous kernel, and nothing goes through shared memory.
Tensor cores would be idle but for one column. INT4 has int4_gemv.py.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from optimized.kernels.carveout import prefer_l1
from optimized.kernels.cublas_linear import HALF_TYPES
from optimized.kernels.int4_gemv import int4_gemv_kernel
from optimized.kernels.portable import INTERPRETED, pdl_options, rounded
from optimized.kernels.quantize_input import QuantizedInput, has_fp8
from optimized.kernels.quantized_values import widened_e4m3
from shared.types.quantization import QuantScheme


class GemvTile(NamedTuple):
    rows: int  # outputs of a warp; INT4: of a CTA, 16 or 32
    warps: int
    steps: int = 1  # of 16 bytes for each lane, from a row at a time; INT4: 1
    ahead: int = 1  # of these, loaded before the input


@triton.jit
def _load_once(tile, mask, IS_MASKED: tl.constexpr):
    """Weights are read once: they must not evict the input from the cache."""
    if IS_MASKED:
        return tl.load(tile, mask=mask, other=0, eviction_policy="evict_first")
    else:
        return tl.load(tile, eviction_policy="evict_first")


@triton.jit
def _fp8_gemv_kernel(
    x_ptr, x_scale_ptr, weight_ptr, scale_ptr, bias_ptr, residual_ptr, y_ptr, stride_weight, num_groups,
    OUT: tl.constexpr, SIZE: tl.constexpr, GROUP: tl.constexpr, X_GROUP: tl.constexpr, NATIVE: tl.constexpr,
    WARPS: tl.constexpr, ROWS: tl.constexpr, STEPS: tl.constexpr, AHEAD: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    COLUMNS: tl.constexpr = STEPS * 32 * 16
    TILES: tl.constexpr = (SIZE + COLUMNS - 1) // COLUMNS
    MASKED: tl.constexpr = SIZE % COLUMNS != 0
    IS_MASKED: tl.constexpr = MASKED or OUT % (WARPS * ROWS) != 0
    lanes, warps = tl.arange(0, 32), tl.arange(0, WARPS)
    starts = (tl.arange(0, STEPS)[None, None, :] * 32 + lanes[:, None, None]) * 16 + warps[None, :, None] * 0
    columns = starts[:, :, :, None] + tl.arange(0, 16)[None, None, None, :]
    first_rows = tl.program_id(0) * (WARPS * ROWS) + warps * ROWS
    tile_rows = first_rows[None, :, None, None]
    tile = weight_ptr + tile_rows.to(tl.int64) * stride_weight + columns
    weights = ()
    for i in tl.static_range(AHEAD):
        for r in tl.static_range(ROWS):
            mask = (columns + i * COLUMNS < SIZE) & (tile_rows + r < OUT)
            weights += (_load_once(tile + (r * stride_weight + i * COLUMNS), mask, IS_MASKED),)
    rows = first_rows[None, :] + lanes[:, None]
    mask_rows = (lanes < ROWS)[:, None] & (rows < OUT)
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()

    sums = ()
    for _ in tl.static_range(ROWS):
        sums += (tl.zeros([32, WARPS, STEPS], tl.float32),)
    for i in tl.static_range(TILES):
        if i + AHEAD < TILES:
            for r in tl.static_range(ROWS):
                mask = (columns + (i + AHEAD) * COLUMNS < SIZE) & (tile_rows + r < OUT)
                next_tile = tile + (r * stride_weight + (i + AHEAD) * COLUMNS)
                weights += (_load_once(next_tile, mask, IS_MASKED),)
        column = starts + i * COLUMNS
        if MASKED:
            codes = tl.load(x_ptr + i * COLUMNS + columns, mask=columns + i * COLUMNS < SIZE, other=0)
        else:
            codes = tl.load(x_ptr + i * COLUMNS + columns)
        x = widened_e4m3(codes, NATIVE).to(tl.float32)
        if X_GROUP > 0:
            x_scale = tl.load(x_scale_ptr + column // X_GROUP, mask=column < SIZE, other=0.0)
        new_sums = ()
        for r in tl.static_range(ROWS):
            part = tl.sum(x * widened_e4m3(weights[i * ROWS + r], NATIVE).to(tl.float32), 3)
            if X_GROUP > 0:
                part *= x_scale
            if GROUP > 0:
                mask = (column < SIZE) & (first_rows[None, :, None] + r < OUT)
                row = (first_rows[None, :, None] + r).to(tl.int64) * num_groups
                part *= tl.load(scale_ptr + row + column // GROUP, mask=mask, other=0.0)
            new_sums += (sums[r] + part,)
        sums = new_sums

    y = tl.zeros([32, WARPS], tl.float32)
    for r in tl.static_range(ROWS):
        y = tl.where(lanes[:, None] == r, tl.sum(tl.sum(sums[r], 2), 0)[None, :], y)
    if GROUP == 0:
        y *= tl.load(scale_ptr + rows, mask=mask_rows, other=0.0)
    if X_GROUP == 0:
        y *= tl.load(x_scale_ptr)
    if HAS_BIAS:
        y += tl.load(bias_ptr + rows, mask=mask_rows, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        y += tl.load(residual_ptr + rows, mask=mask_rows, other=0.0).to(tl.float32)
    tl.store(y_ptr + rows, rounded(y, y_ptr.dtype.element_ty), mask=mask_rows)


def suits_gemv(x: torch.Tensor | QuantizedInput, scheme: QuantScheme, size: int) -> bool:
    """Whether quantized_gemv computes this: a token times e4m3 by e4m3, or times INT4 with one scale for at
    least 128 inputs."""
    if isinstance(x, QuantizedInput):
        return len(x.q) == 1 and scheme.weight_type == "fp8" and (scheme.group_size or 16) % 16 == 0
    is_int4 = scheme.weight_type == "int4" and scheme.unit(size) % 128 == 0
    return is_int4 and len(x) == 1 and x.dtype in HALF_TYPES


def quantized_gemv(
    x: torch.Tensor | QuantizedInput,
    weight: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    scheme: QuantScheme,
    y: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    tile: GemvTile | None = None,
) -> None:
    """`quantized_gemm` for one token, y [1, out]. `suits_gemv` must hold."""
    values = x.q if isinstance(x, QuantizedInput) else x
    size, out, num_groups = values.shape[1], len(weight), scale.shape[1]
    assert y.shape == (1, out)
    assert values.stride(1) == weight.stride(1) == scale.stride(1) == y.stride(1) == 1
    rows, warps, steps, ahead = tile or plan(scheme)
    options = {
        "OUT": out, "SIZE": size, "WARPS": warps, "ROWS": rows, "AHEAD": ahead,
        "HAS_BIAS": bias is not None, "HAS_RESIDUAL": residual is not None,
        "num_warps": 4 if INTERPRETED else warps, **pdl_options(values),
    }  # fmt: skip
    bias = scale if bias is None else bias
    residual = scale if residual is None else residual
    if isinstance(x, QuantizedInput):
        x_grouped = scheme.inputs == "group" and x.scale.shape[-1] > 1
        launched = _fp8_gemv_kernel[(triton.cdiv(out, warps * rows),)](
            values.view(torch.uint8), x.scale, weight.view(torch.uint8), scale, bias, residual, y,
            weight.stride(0), num_groups, STEPS=steps,
            GROUP=(scheme.group_size or 0) if num_groups > 1 else 0,
            X_GROUP=(scheme.group_size or 0) if x_grouped else 0, NATIVE=has_fp8(values.device), **options,
        )  # fmt: skip
    else:
        launched = int4_gemv_kernel[(triton.cdiv(out, rows),)](
            values.view(torch.int32), weight.view(torch.int32), scale, scale if zero is None else zero,
            bias, residual, y, weight.stride(0) // 4, num_groups,
            UNIT=scheme.unit(size), GROUPED=num_groups > 1, HAS_ZERO=zero is not None, **options,
        )  # fmt: skip
    prefer_l1(launched)


def plan(scheme: QuantScheme) -> GemvTile:
    """The best on average for the layers of Qwen3-8B on an H200. The GPU's table has better ones for shapes
    that `diptych tune --quantization` has measured."""
    if scheme.weight_type == "int4":
        return GemvTile(16, 8, 1, 2)
    return GemvTile(1, 64, 2) if INTERPRETED else GemvTile(2, 8, 2)
