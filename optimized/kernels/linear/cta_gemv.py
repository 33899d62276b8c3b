"""GEMV for one token, in which all warps of a CTA share every row of the weights. It follows warp_gemv.py's
rules for dependent launches.

Roofline bound: the weights' bytes over the memory's bandwidth.

Shape: a thread has the same columns of each row, so x, its norm and the norm's weight take few registers and
are computed once per CTA; in warp_gemv.py each warp computes them. The registers hold weights instead: the
first block of rows is loaded before the CTA waits for the previous kernel, and the next block while one is
summed. The cost is a sum across warps for each block, through shared memory and two barriers.

Loses in small models and with rows of 12,288 and more, where x fills the registers again. The length of a
row must be divisible by a large power of two.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from diptych.optimized.kernels.carveout import prefer_l1
from diptych.optimized.kernels.linear.warp_gemv import Norm, weighted
from diptych.optimized.kernels.portable import INTERPRETED, gpu_of, pdl_options, rounded, widened

MAX_ROWS = 65536
"""Of GEMMs within a layer. Heads have more: for one token warp_gemv.py is near their bound, for some
cuBLAS; this kernel was not measured."""


@triton.jit
def _load_block(
    weight_ptr, block, stride_weight,
    OUT: tl.constexpr, COLUMNS: tl.constexpr, TILES: tl.constexpr, ROWS: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    """Tiles [ROWS, COLUMNS] of gate, then those of up; nothing behind the last block."""
    rows = block * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    mask = (rows < OUT)[:, None] & (columns >= 0)[None, :]
    weights = ()
    for half in tl.static_range(HALVES):
        for i in tl.static_range(TILES):
            row_starts = weight_ptr + (rows + half * OUT).to(tl.int64)[:, None] * stride_weight
            tile = row_starts + (i * COLUMNS + columns)[None, :]
            # Weights are read once, so they must not evict x from the cache.
            weights += (tl.load(tile, mask=mask, other=0.0, eviction_policy="evict_first"),)
    return weights


@triton.jit
def _cta_gemv_kernel(
    x_ptr, norm_weight_ptr, weight_ptr, bias_ptr, residual_ptr, y_ptr, eps, stride_weight,
    OUT: tl.constexpr, SIZE: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, PROGRAMS: tl.constexpr,
    GATED: tl.constexpr, HAS_NORM: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    UNIT_OFFSET: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    TILES: tl.constexpr = SIZE // COLUMNS
    HALVES: tl.constexpr = 2 if GATED else 1
    BLOCKS: tl.constexpr = OUT // ROWS
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    program = tl.program_id(0)
    columns = tl.arange(0, COLUMNS)[None, :]
    weights = _load_block(weight_ptr, program, stride_weight, OUT, COLUMNS, TILES, ROWS, HALVES)
    norm_weights = ()
    if HAS_NORM:
        for i in tl.static_range(TILES):
            norm_weights += (tl.load(norm_weight_ptr + i * COLUMNS + columns),)
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()

    xs = ()
    for i in tl.static_range(TILES):
        xs += (tl.load(x_ptr + i * COLUMNS + columns),)
    if HAS_NORM:
        squares = tl.zeros([1], tl.float32)
        for i in tl.static_range(TILES):
            x = xs[i].to(tl.float32)
            squares += tl.sum(x * x, 1)
        scale = tl.rsqrt(squares / SIZE + eps)[:, None]
        normed = ()
        for i in tl.static_range(TILES):
            x = xs[i].to(tl.float32) * scale
            normed += (weighted(x, norm_weights[i], dtype, UNIT_OFFSET),)
        xs = normed

    for block in range(program, BLOCKS, PROGRAMS):
        rows = block * ROWS + tl.arange(0, ROWS)
        if HAS_BIAS:
            bias = tl.load(bias_ptr + rows).to(tl.float32)
        if HAS_RESIDUAL:
            residual = tl.load(residual_ptr + rows).to(tl.float32)
        if PROGRAMS < BLOCKS:
            following = _load_block(
                weight_ptr, block + PROGRAMS, stride_weight, OUT, COLUMNS, TILES, ROWS, HALVES
            )
        sums = ()
        for half in tl.static_range(HALVES):
            # The sum starts with the first tile, because starting with zeros takes half as many registers
            # again.
            products = widened(xs[0], USE_PDL) * widened(weights[half * TILES], USE_PDL)
            for i in tl.static_range(1, TILES):
                products += widened(xs[i], USE_PDL) * widened(weights[half * TILES + i], USE_PDL)
            sums += (tl.sum(products, 1),)
        y = sums[0]
        if GATED:
            # For large negative gates exp(-gate) is infinite and the quotient is 0.
            y = y / (1.0 + tl.exp(-y)) * sums[1]
        if HAS_BIAS:
            y += bias
        if HAS_RESIDUAL:
            y += residual
        tl.store(y_ptr + rows, rounded(y, y_ptr.dtype.element_ty))
        if PROGRAMS < BLOCKS:
            weights = following


def cta_gemv(
    x: torch.Tensor,
    weight: torch.Tensor,
    y: torch.Tensor,
    *,
    norm: Norm | None = None,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    gated: bool = False,
) -> None:
    """Compute what `warp_gemv` computes, for one token."""
    size, out = x.shape[1], y.shape[1]
    assert len(x) == 1
    assert weight.shape == ((2 if gated else 1) * out, size)
    assert x.stride(1) == 1 == weight.stride(1) == y.stride(1)
    assert residual is None or residual.stride(1) == 1
    norm_weight, eps, unit_offset = norm or Norm(x, 0.0, False)
    warps, rows, per_sm = plan(out, size)
    rows = min(rows, out & -out)
    num_programs = out // rows
    if per_sm:
        num_programs = min(num_programs, per_sm * max(gpu_of(x.device).num_multiprocessors, 1))
    launched = _cta_gemv_kernel[(num_programs,)](
        x, norm_weight, weight, x if bias is None else bias, x if residual is None else residual, y,
        eps, weight.stride(0),
        OUT=out, SIZE=size, COLUMNS=min(4096, size & -size), ROWS=rows, PROGRAMS=num_programs,
        GATED=gated, HAS_NORM=norm is not None, HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None,
        UNIT_OFFSET=unit_offset, num_warps=warps, **pdl_options(x),
    )  # fmt: skip
    prefer_l1(launched)


def plan(out: int, size: int) -> tuple[int, int, int]:
    """(warps of a CTA, rows a block, CTAs per multiprocessor, or 0 for one CTA per block).

    Measured on an H200 in whole steps (docs/lab/decode-batch-1.md)."""
    if INTERPRETED:
        return 4, 64, 2
    if size != 4096 or out < size:
        return 4, 4, 0
    if out == size:
        return 8, 8, 2
    return (8, 4, 3) if out <= 2 * size else (8, 2, 0)


def can_compute(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether this kernel can compute the GEMV: one token, and rows that are a few tiles whose widths are
    powers of two."""
    size = x.shape[1]
    return len(x) == 1 and len(weight) <= MAX_ROWS and size % 512 == 0 and size // (size & -size) <= 16
