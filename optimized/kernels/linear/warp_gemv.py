"""GEMV: a weight matrix times the hidden state of one token, or of a few, fused with the operations before
and after it.

Roofline bound: the weights' bytes, out_features * in_features * itemsize, over the memory's bandwidth. At
batch 1 a layer of a small model is microseconds of that, so what counts is the time between two kernels: the
memory's bus idles from the last load of one to the first load of the next.

Shape: a warp computes GROUPS outputs, each whole, so nothing is added up across warps or CTAs. It loads the
first AHEAD tiles of its rows of weights into registers *before* it waits for the previous kernel
(programmatic dependent launch), because no kernel writes weights; only then x. It launches its dependents
immediately, so the next kernel does the same, and weights stream continuously across kernels, as far as
registers suffice.

A tile is [32 lanes, WARPS, STEPS, VECTOR]: from the 16 bytes that VECTOR elements are, Triton sees that
lanes lie along columns and warps along rows. All tensors here have that layout or a slice of it, x too,
which each warp loads for itself: so there is no shared memory and no barrier, and a sum over columns is
five shuffles.

Rules of a chain: a kernel launched with programmatic dependent launch may read data written by earlier
kernels, or overwrite data that they read, only after gdc_wait. This waits for the end of the previous kernel,
which must have waited itself, and so on. So every kernel of the chain must wait in each of its CTAs. A kernel
launched normally waits for all earlier work and is safe anywhere.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from diptych.optimized.kernels.carveout import prefer_l1
from diptych.optimized.kernels.portable import INTERPRETED, pdl_options, rounded, widened


@triton.jit
def _load(tile, mask, IS_MASKED: tl.constexpr):
    if IS_MASKED:
        return tl.load(tile, mask=mask, other=0.0)
    else:
        return tl.load(tile)


@triton.jit
def _load_once(tile, mask, IS_MASKED: tl.constexpr):
    """Load weights, which are read once and must not evict x from the cache."""
    if IS_MASKED:
        return tl.load(tile, mask=mask, other=0.0, eviction_policy="evict_first")
    else:
        return tl.load(tile, eviction_policy="evict_first")


@triton.jit
def _load_again(tile, mask, IS_MASKED: tl.constexpr):
    """_load in another form, because otherwise the compiler would keep all of x in registers."""
    if IS_MASKED:
        return tl.load(tile, mask=mask, other=0.0, cache_modifier=".ca")
    else:
        return tl.load(tile, cache_modifier=".ca")


class Norm(NamedTuple):
    """The RMSNorm of a GEMV's input."""

    weight: torch.Tensor
    eps: float
    unit_offset: bool = False  # that of GemmaRMSNorm


@triton.jit
def weighted(x, weight, dtype: tl.constexpr, UNIT_OFFSET: tl.constexpr):
    """Normalized float32 values times the weight of their norm, rounded to `dtype`."""
    weight = weight.to(tl.float32)
    if UNIT_OFFSET:
        return rounded(x * (1.0 + weight), dtype)
    else:
        # Rounded twice, as RMSNorm does: the normalized value, and that times the weight.
        return rounded(rounded(x, dtype).to(tl.float32) * weight, dtype)


@triton.jit
def _warp_gemv_kernel(
    x_ptr, norm_weight_ptr, weight_ptr, bias_ptr, residual_ptr, y_ptr,
    eps, stride_x, stride_weight, stride_residual, stride_y,
    NUM_TOKENS: tl.constexpr, OUT: tl.constexpr, SIZE: tl.constexpr,
    WARPS: tl.constexpr, GROUPS: tl.constexpr, STEPS: tl.constexpr, VECTOR: tl.constexpr, AHEAD: tl.constexpr,
    GATED: tl.constexpr, HAS_NORM: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    UNIT_OFFSET: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    COLUMNS: tl.constexpr = STEPS * 32 * VECTOR
    TILES: tl.constexpr = (SIZE + COLUMNS - 1) // COLUMNS
    MASK_COLUMNS: tl.constexpr = SIZE % COLUMNS != 0
    IS_MASKED: tl.constexpr = MASK_COLUMNS or OUT % (WARPS * GROUPS) != 0
    HALVES: tl.constexpr = 2 if GATED else 1
    PARTS: tl.constexpr = GROUPS * HALVES  # rows of weights of a warp: gate, up, gate, up, ...
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    lanes, warps = tl.arange(0, 32), tl.arange(0, WARPS)
    steps, elements = tl.arange(0, STEPS), tl.arange(0, VECTOR)
    columns = (steps[None, None, :, None] * 32 + lanes[:, None, None, None]) * VECTOR
    columns += elements[None, None, None, :] + warps[None, :, None, None] * 0
    first_rows = tl.program_id(0) * (WARPS * GROUPS) + warps * GROUPS
    tile_rows = first_rows[None, :, None, None]
    tile = weight_ptr + tile_rows.to(tl.int64) * stride_weight + columns
    row_stride = tl.cast(stride_weight, tl.int64)

    # --8<-- [start:load-then-wait]
    weights = ()
    for i in tl.static_range(AHEAD):
        for p in tl.static_range(PARTS):
            mask = (columns + i * COLUMNS < SIZE) & (tile_rows + p // HALVES < OUT)
            row = (p % HALVES) * OUT + p // HALVES
            weights += (_load_once(tile + (row * row_stride + i * COLUMNS), mask, IS_MASKED),)
    if HAS_NORM and TILES == 1:
        norm_weight = _load(norm_weight_ptr + columns, columns < SIZE, MASK_COLUMNS)
    # Results are of [lanes, warps] too: lane g of a warp has that of its row g.
    rows = first_rows[None, :] + lanes[:, None]
    mask_rows = (lanes < GROUPS)[:, None] & (rows < OUT)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + rows, mask=mask_rows, other=0.0).to(tl.float32)
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    # --8<-- [end:load-then-wait]

    residuals, scales = (), ()
    for t in tl.static_range(NUM_TOKENS):
        if HAS_RESIDUAL:
            residual = tl.load(residual_ptr + t * stride_residual + rows, mask=mask_rows, other=0.0)
            residuals += (residual,)
        if HAS_NORM:
            squares = tl.zeros([32, WARPS], tl.float32)
            for i in tl.static_range(TILES):
                mask = columns + i * COLUMNS < SIZE
                x = _load(x_ptr + t * stride_x + i * COLUMNS + columns, mask, MASK_COLUMNS)
                x = widened(x, USE_PDL)
                squares += tl.sum(tl.sum(x * x, 3), 2)
                kept = x
            scale = tl.rsqrt(tl.sum(squares, 0) / SIZE + eps)
            scales += (scale[None, :, None, None],)

    sums = ()
    for _ in tl.static_range(NUM_TOKENS * PARTS):
        sums += (tl.zeros([32, WARPS], tl.float32),)
    for i in tl.static_range(TILES):
        if i + AHEAD < TILES:
            for p in tl.static_range(PARTS):
                mask = (columns + (i + AHEAD) * COLUMNS < SIZE) & (tile_rows + p // HALVES < OUT)
                row = (p % HALVES) * OUT + p // HALVES
                next_tile = tile + (row * row_stride + (i + AHEAD) * COLUMNS)
                weights += (_load_once(next_tile, mask, IS_MASKED),)
        mask = columns + i * COLUMNS < SIZE
        if HAS_NORM and TILES > 1:
            norm_weight = _load(norm_weight_ptr + i * COLUMNS + columns, mask, MASK_COLUMNS)
        new_sums = ()
        for t in tl.static_range(NUM_TOKENS):
            if HAS_NORM and TILES * NUM_TOKENS == 1:
                x = kept
            else:
                x = _load_again(x_ptr + t * stride_x + i * COLUMNS + columns, mask, MASK_COLUMNS)
                x = widened(x, USE_PDL)
            if HAS_NORM:
                x = widened(weighted(x * scales[t], norm_weight, dtype, UNIT_OFFSET), USE_PDL)
            for p in tl.static_range(PARTS):
                products = x * widened(weights[i * PARTS + p], USE_PDL)
                new_sums += (sums[t * PARTS + p] + tl.sum(tl.sum(products, 3), 2),)
        sums = new_sums

    for t in tl.static_range(NUM_TOKENS):
        y = tl.zeros([32, WARPS], tl.float32)
        for g in tl.static_range(GROUPS):
            row_sum = tl.sum(sums[t * PARTS + g * HALVES], 0)
            if GATED:
                # For large negative gates exp(-gate) is infinite and the quotient is 0.
                row_sum = row_sum / (1.0 + tl.exp(-row_sum)) * tl.sum(sums[t * PARTS + g * HALVES + 1], 0)
            y = tl.where(lanes[:, None] == g, row_sum[None, :], y)
        if HAS_BIAS:
            y += bias
        if HAS_RESIDUAL:
            y += residuals[t].to(tl.float32)
        tl.store(y_ptr + t * stride_y + rows, rounded(y, y_ptr.dtype.element_ty), mask=mask_rows)


def warp_gemv(
    x: torch.Tensor,
    weight: torch.Tensor,
    y: torch.Tensor,
    *,
    norm: Norm | None = None,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    gated: bool = False,
) -> None:
    """y = act(norm(x) @ weightᵀ) + bias + residual, rounded once; y may be the residual.

    x [num_tokens, size], y [num_tokens, out]. Gated: weight holds the gate's rows, then as many of up, and
    act is silu(gate) * up."""
    num_tokens, size = x.shape
    out = y.shape[1]
    assert weight.shape == ((2 if gated else 1) * out, size)
    assert x.stride(1) == 1 == weight.stride(1) == y.stride(1)
    assert residual is None or residual.stride(1) == 1
    norm_weight, eps, unit_offset = norm or Norm(x, 0.0, False)
    vector = 16 // x.element_size()
    warps, groups, steps, ahead = plan(out, size, num_tokens, vector, norm is not None, gated)
    launched = _warp_gemv_kernel[(triton.cdiv(out, warps * groups),)](
        x, norm_weight, weight, x if bias is None else bias, x if residual is None else residual, y,
        eps, x.stride(0), weight.stride(0), 0 if residual is None else residual.stride(0), y.stride(0),
        NUM_TOKENS=num_tokens, OUT=out, SIZE=size,
        WARPS=warps, GROUPS=groups, STEPS=steps, VECTOR=vector, AHEAD=ahead,
        GATED=gated, HAS_NORM=norm is not None, HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None,
        UNIT_OFFSET=unit_offset, num_warps=4 if INTERPRETED else warps, **pdl_options(x),
    )  # fmt: skip
    prefer_l1(launched)


def plan(
    out: int, size: int, num_tokens: int, vector: int, normed: bool, gated: bool
) -> tuple[int, int, int, int]:
    """(warps of a CTA, rows of outputs a warp, 512-byte steps a tile, tiles loaded ahead).

    Measured on an H200 in whole steps (docs/lab/decode-batch-1.md). Rows of up to 6 KB go to
    registers whole, of longer ones a tile is enough. Long rows go four to a warp where x is normed, which
    they share, and no gate doubles them, else two, or one where tiles of 4 KB fit.
    """
    all_steps = triton.cdiv(size, 32 * vector)
    steps = min(4, triton.next_power_of_2(all_steps))
    if INTERPRETED:
        return min(256, triton.next_power_of_2(out)), 1, steps, 1
    if all_steps <= 12:
        warps = 8 if all_steps <= 4 and num_tokens == 1 and out <= 8192 else 4
        return warps, 2, steps, triton.cdiv(all_steps, steps)
    if all_steps % 8 == 0 and normed:
        return 4, 1 if gated else 4, 8, 1
    return 4, 4 if normed and not gated else 2, 8 if all_steps >= 32 else steps, 1
