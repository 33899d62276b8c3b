"""LoRA: y += scale * B (A x) for rows of several adapters, in two launches.

Roofline bound: the bytes of A and B of the adapters in the batch, rank * (in + out) * itemsize each (8B
model, rank 16, all layers: 87 MB, 20 us at 4.3 TB/s), and of y twice more. For few tokens the bound is two
launches.

Shape: rows are sorted by adapter into blocks of 16 (moe_align.py), so a block has one A and one B, and its
GEMMs run on tensor cores. `shrink` multiplies with the A of all slices (q, k and v) in one launch; the
input is split into parts of SPLIT_K columns, since a few blocks would leave most of the GPU idle.
`expand_add` adds the parts up and adds B times them to y. Both skip blocks that do not exist: the number of
blocks is on the device, so a CUDA graph serves every batch of its size. Neither shape nor order of sums
depends on the batch.

Blocks and adapters are complete before the first layer. So both kernels, launched before the previous kernels
have ended (programmatic dependent launch), load A or B before they wait for their results. `expand_add` waits
for both the layer's own GEMM and `shrink`, which runs beside it on a second stream (optimized/modes/lora.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from diptych.optimized.kernels.moe.moe_align import Blocks, max_num_blocks
from diptych.optimized.kernels.portable import INTERPRETED, pdl_options, rounded

_INTERPRETED = tl.constexpr(INTERPRETED)

BLOCK_M = 16
"""Rows of a block: the fewest that tensor cores multiply."""
SPLIT_K = 64 if INTERPRETED else 512
"""Columns of a part; for a rank above 32 half of that. Half a part at a time is multiplied."""
MAX_PART = 64 * 1024
"""Bytes of A in a CTA."""
MAX_SLICES = 4
MAX_TILE = 4096
"""Numbers of B in a CTA."""


@triton.jit(do_not_specialize=["num_rows"])
def _shrink_kernel(
    x_ptr, a_ptr, h_ptr, rows_ptr, slots_ptr, num_blocks_ptr, num_rows, stride_x,
    K: tl.constexpr, SLICES: tl.constexpr, RANK: tl.constexpr, STEPS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    block, part, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
    if block >= tl.load(num_blocks_ptr):
        if USE_PDL:  # so that a launch without blocks does not end before the previous one
            tl.extra.cuda.gdc_wait()
        return
    slot = tl.load(slots_ptr + block).to(tl.int64)
    rows = tl.load(rows_ptr + block * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    offs_r = tl.arange(0, RANK)
    columns = (split * STEPS * BLOCK_K + tl.arange(0, BLOCK_K))[None, :]
    a_tile = a_ptr + ((slot * SLICES + part) * RANK + offs_r)[:, None] * K + columns
    weights = ()
    for i in tl.static_range(STEPS):
        weights += (tl.load(a_tile + i * BLOCK_K, mask=columns + i * BLOCK_K < K, other=0.0),)
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
    is_row = (rows < num_rows)[:, None]
    x_tile = x_ptr + rows[:, None] * stride_x + columns
    acc = tl.zeros([BLOCK_M, RANK], tl.float32)
    for i in tl.static_range(STEPS):
        x = tl.load(x_tile + i * BLOCK_K, mask=is_row & (columns + i * BLOCK_K < K), other=0.0)
        a = weights[i]
        if _INTERPRETED:  # it cannot multiply bfloat16
            x, a = x.to(tl.float32), a.to(tl.float32)
        acc = tl.dot(x, a.T, acc, input_precision=PRECISION)
    h_rows = h_ptr + ((split * num_rows + rows[:, None]) * SLICES + part) * RANK
    tl.store(h_rows + offs_r[None, :], acc, mask=is_row)


@triton.jit(do_not_specialize=["num_rows"])
def _expand_add_kernel(
    y_ptr, h_ptr, b_ptr, scales_ptr, rows_ptr, slots_ptr, num_blocks_ptr, num_rows, stride_y,
    N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, N3: tl.constexpr,
    SLICES: tl.constexpr, RANK: tl.constexpr, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    block, tile = tl.program_id(0), tl.program_id(1)
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
    if block >= tl.load(num_blocks_ptr):
        if USE_PDL:  # so that a launch without blocks does not end before the previous one
            tl.extra.cuda.gdc_wait()
        return
    slot = tl.load(slots_ptr + block).to(tl.int64)
    rows = tl.load(rows_ptr + block * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    is_row = (rows < num_rows)[:, None]
    # The slice of the tile, and where it begins in y: a tile never crosses two slices.
    tiles0: tl.constexpr = (N0 + BLOCK_N - 1) // BLOCK_N
    tiles1: tl.constexpr = (N1 + BLOCK_N - 1) // BLOCK_N
    tiles2: tl.constexpr = (N2 + BLOCK_N - 1) // BLOCK_N
    first2: tl.constexpr = tiles0 + tiles1
    part = (
        (tile >= tiles0).to(tl.int32) + (tile >= first2).to(tl.int32) + (tile >= first2 + tiles2).to(tl.int32)
    )
    start = tl.where(part == 0, 0, tl.where(part == 1, N0, tl.where(part == 2, N0 + N1, N0 + N1 + N2)))
    size = tl.where(part == 0, N0, tl.where(part == 1, N1, tl.where(part == 2, N2, N3)))
    first_tile = tl.where(
        part == 0, 0, tl.where(part == 1, tiles0, tl.where(part == 2, first2, first2 + tiles2))
    )
    columns = start + (tile - first_tile) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_column = columns < start + size

    offs_r = tl.arange(0, RANK)
    b_rows = b_ptr + (slot * (N0 + N1 + N2 + N3) + columns)[:, None] * RANK
    b = tl.load(b_rows + offs_r[None, :], mask=is_column[:, None], other=0.0)
    scale = tl.load(scales_ptr + slot * SLICES + part)
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
    y_tile = y_ptr + rows[:, None] * stride_y + columns[None, :]
    mask = is_row & is_column[None, :]
    y = tl.load(y_tile, mask=mask, other=0.0)
    h = tl.zeros([BLOCK_M, RANK], tl.float32)
    for split in tl.range(SPLITS, loop_unroll_factor=8):
        h_rows = h_ptr + ((split * num_rows + rows[:, None]) * SLICES + part) * RANK
        h += tl.load(h_rows + offs_r[None, :], mask=is_row, other=0.0)
    y = y.to(tl.float32) + scale * tl.dot(h, b.to(tl.float32).T, input_precision=PRECISION)
    tl.store(y_tile, rounded(y, y_ptr.dtype.element_ty), mask=mask)


def shrink(x: torch.Tensor, a: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    """x [num_rows, K], a [slots, slices, rank, K] -> A x of each row's slot, in parts: float32
    [parts, num_rows, slices, rank], undefined for rows that are in no block. Rows of `blocks` that x does
    not have are padding."""
    _, num_slices, rank, k = a.shape
    assert x.stride(1) == 1
    assert a.is_contiguous()
    num_rows = x.shape[0]
    split_k = min(SPLIT_K if rank <= 32 else SPLIT_K // 2, MAX_PART // (rank * x.element_size()))
    splits = triton.cdiv(k, split_k)
    h = torch.empty(splits, num_rows, num_slices, rank, dtype=torch.float32, device=x.device)
    _shrink_kernel[(_max_blocks(num_rows, a), num_slices, splits)](
        x, a, h, *blocks, num_rows, x.stride(0), K=k, SLICES=num_slices, RANK=rank,
        STEPS=2, BLOCK_M=BLOCK_M, BLOCK_K=split_k // 2,
        PRECISION=_precision(x), num_warps=4, **pdl_options(x),
    )  # fmt: skip
    return h


def expand_add(
    y: torch.Tensor,
    h: torch.Tensor,
    b: torch.Tensor,
    scales: torch.Tensor,
    sizes: Sequence[int],
    blocks: Blocks,
) -> None:
    """y [num_rows, sum(sizes)] += scales * B h, h being what `shrink` returned. b [slots, sum(sizes), rank],
    scales float32 [slots, slices]."""
    splits, num_rows, num_slices, rank = h.shape
    assert len(sizes) == num_slices <= MAX_SLICES
    assert y.stride(1) == 1
    assert b.is_contiguous()
    n0, n1, n2, n3 = [*sizes, 0, 0, 0][:4]
    block_n = min(max(MAX_TILE // rank, 32), 256)
    num_tiles = sum(triton.cdiv(size, block_n) for size in sizes)
    _expand_add_kernel[(_max_blocks(num_rows, b), num_tiles)](
        y, h, b, scales, *blocks, num_rows, y.stride(0), N0=n0, N1=n1, N2=n2, N3=n3,
        SLICES=num_slices, RANK=rank, SPLITS=splits, BLOCK_M=BLOCK_M, BLOCK_N=block_n,
        PRECISION=_precision(b), num_warps=4, **pdl_options(y),
    )  # fmt: skip


def _max_blocks(num_rows: int, weights: torch.Tensor) -> int:
    return max_num_blocks(num_rows, weights.shape[0], BLOCK_M)


def _precision(x: torch.Tensor) -> str:
    return "ieee" if x.dtype == torch.float32 else "tf32"
