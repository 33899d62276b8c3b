"""RMSNorm of rows, alone or with the sum of a residual: one launch, one pass, the row stays in registers.

Roofline bound: bytes over the memory bandwidth. rms_norm reads and writes each row once, 2 * n * size *
itemsize. rms_norm_add reads two rows and writes one, add_rms_norm reads two and writes two.
add_partial_sums_rms_norm reads one more float32 row for each partial sum. For few tokens the bound is one
launch.

Shape: a CTA takes whole rows, so that the sum of squares needs no second pass and no other CTA. A
long row is a CTA of its own; of short ones (the heads of q and k) it takes several.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from diptych.optimized.kernels.portable import interpreted_rows, pdl_options, rounded

TILE_ELEMENTS = 1024
"""Rows are put together up to so many elements per CTA."""


@triton.jit
def normed_rows(
    x, weight, eps, dtype: tl.constexpr, SIZE: tl.constexpr, UNIT_OFFSET: tl.constexpr
):  # fmt: skip
    """x [rows, columns] float32, 0 from column SIZE on; weight [1, columns] -> the rows' norms, float32."""
    scale = tl.rsqrt(tl.sum(x * x, axis=1) / SIZE + eps)[:, None]
    if UNIT_OFFSET:
        return x * scale * (1.0 + weight)
    else:
        # Rounded twice, as written in the contract: the normalized value, and that times the weight.
        return (x * scale).to(dtype).to(tl.float32) * weight


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_kernel(
    x_ptr, residual_ptr, y_ptr, weight_ptr,
    num_rows, eps, stride_x, stride_part, stride_residual, stride_y,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, ADDS_BEHIND: tl.constexpr, UNIT_OFFSET: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    offs = tl.arange(0, BLOCK)
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    mask = (rows < num_rows) & (offs < SIZE)[None, :]
    weight = tl.load(weight_ptr + offs, mask=offs < SIZE, other=0.0).to(tl.float32)
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    tile = x_ptr + rows * stride_x + offs[None, :]
    x = tl.load(tile, mask=mask, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        x += tl.load(tile + part * stride_part, mask=mask, other=0.0)
    residual_tile = residual_ptr + rows * stride_residual + offs[None, :]
    if HAS_RESIDUAL and not ADDS_BEHIND:
        total = rounded(x + tl.load(residual_tile, mask=mask, other=0.0).to(tl.float32), dtype)
        tl.store(residual_tile, total, mask=mask)
        x = total.to(tl.float32)
    y = normed_rows(x, weight[None, :], eps, dtype, SIZE, UNIT_OFFSET)
    if ADDS_BEHIND:
        y = rounded(y, dtype).to(tl.float32) + tl.load(residual_tile, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + rows * stride_y + offs[None, :], rounded(y, dtype), mask=mask)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, unit_offset: bool = False) -> torch.Tensor:
    """x [..., size], weight [size] -> norm(x), a new contiguous tensor. `unit_offset`: as in GemmaRMSNorm."""
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    y = torch.empty_like(rows, memory_format=torch.contiguous_format)
    _launch(rows, None, y, weight, eps, unit_offset)
    return y if x.dim() == 2 else y.view(x.shape)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, unit_offset: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm(x + residual), x + residual), written over x and residual where each is rows of one stride."""
    rows, residual_rows = x.reshape(-1, x.shape[-1]), residual.reshape(-1, x.shape[-1])
    _launch(rows, residual_rows, rows, weight, eps, unit_offset)
    return rows.view(x.shape), residual_rows.view(x.shape)


def rms_norm_add(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, unit_offset: bool = False
) -> torch.Tensor:
    """residual + norm(x), both [n, size], rounded after the norm and after the sum. residual is
    overwritten. The multiplication by the weight and the sum would be one instruction, which rounds once."""
    _launch(x, residual, residual, weight, eps, unit_offset, adds_behind=True)
    return residual


def add_partial_sums_rms_norm(
    parts: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, unit_offset: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """add_rms_norm of parts.sum(0), float32 [parts, n, size], rounded once. residual [n, size] is
    overwritten."""
    y = torch.empty_like(residual)
    _launch(parts, residual, y, weight, eps, unit_offset)
    return y, residual


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    y: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    unit_offset: bool,
    adds_behind: bool = False,
) -> None:
    num_rows, size = y.shape
    assert x.stride(-1) == 1 or size == 1
    assert residual is None or residual.stride(1) == 1 or size == 1
    block, tile_rows, num_warps = tile_of_rows(size)
    rows = interpreted_rows(num_rows) or tile_rows
    _rms_norm_kernel[(triton.cdiv(num_rows, rows),)](
        x, x if residual is None else residual, y, weight,
        num_rows, eps, x.stride(-2), x.stride(0), 0 if residual is None else residual.stride(0), y.stride(0),
        SIZE=size, BLOCK=block, ROWS=rows, PARTS=x.shape[0] if x.dim() == 3 else 1,
        HAS_RESIDUAL=residual is not None, ADDS_BEHIND=adds_behind, UNIT_OFFSET=unit_offset,
        num_warps=num_warps, enable_fp_fusion=not adds_behind, **pdl_options(x),
    )  # fmt: skip


@cache
def tile_of_rows(size: int) -> tuple[int, int, int]:
    """(columns, rows, warps) of a CTA."""
    block = triton.next_power_of_2(size)
    rows = max(TILE_ELEMENTS // block, 1)
    return block, rows, min(max(block * rows // 512, 1), 16)
