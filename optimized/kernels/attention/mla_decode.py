"""Absorbed latent attention of one new token per request: one launch over the pool's rows, for any lengths.

Roofline bound: the bytes of live rows, read once for each group of query heads: sum(seq_lens) * row_size *
itemsize. With 16 heads each byte is used for 30 operations, far below what tensor cores can do; with 128
heads, in 8 groups, the second-level cache serves the repeated reads and tensor cores are the bound.

Shape: as decode_attention, with up to 16 query heads as the rows of a tile. A tile of rows of the pool is
loaded once: c gives scores, together with k_r, and is then the values. CTAs of different groups and the same
keys are neighbours in the grid.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from diptych.optimized.kernels.attention.fp8 import from_pool, kernel_view
from diptych.optimized.kernels.attention.mla_small_batch import merge_and_project
from diptych.optimized.kernels.attention.paged_softmax import accumulate, capped, dot, slots_at
from diptych.optimized.kernels.attention.split_kv import (
    finish,
    merge_if_last,
    num_split_ctas,
    schedule_tiles,
    split_sizes,
    split_workspace,
    store_partial,
)
from diptych.optimized.kernels.portable import Gpu, batch_block, gpu_of, pdl_options

MAX_GROUP = 16
"""Query heads of a CTA: the smallest tile of tensor cores."""


@triton.jit
def _keys_of(request, seq_lens_ptr, req_pool_indices_ptr, req_to_token_ptr, stride_slots):
    """The number of keys of a request, and the row of their slots."""
    seq_len = tl.load(seq_lens_ptr + request).to(tl.int32)
    return seq_len, req_to_token_ptr + tl.load(req_pool_indices_ptr + request) * stride_slots


@triton.jit
def load_query(q_row, mask_rows, offs_c, offs_r, RANK: tl.constexpr, ROPE: tl.constexpr):
    """The two parts of absorbed queries; q_row, mask_rows [rows, 1]."""
    q_c = tl.load(q_row + offs_c[None, :], mask=mask_rows & (offs_c < RANK)[None, :], other=0.0)
    q_r = tl.load(q_row + RANK + offs_r[None, :], mask=mask_rows & (offs_r < ROPE)[None, :], other=0.0)
    return q_c, q_r


@triton.jit
def load_rows(
    rows_ptr, slots, offs_c, offs_r, dtype: tl.constexpr,
    STRIDE: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr,
):  # fmt: skip
    """Rows of the pool, FP8 without its scale: c [keys, BLOCK_C] and k_r [keys, BLOCK_R]."""
    tile = rows_ptr + slots[:, None] * STRIDE
    c = tl.load(tile + offs_c[None, :], mask=(offs_c < RANK)[None, :], other=0.0)
    k_r = tl.load(tile + RANK + offs_r[None, :], mask=(offs_r < ROPE)[None, :], other=0.0)
    return from_pool(c, dtype), from_pool(k_r, dtype)


@triton.jit
def latent_scores(q_c, q_r, c, k_r, scale, PRECISION: tl.constexpr):
    """log2(e) * the scores, float32 [rows, keys]."""
    products = dot(q_c, tl.trans(c), PRECISION) + dot(q_r, tl.trans(k_r), PRECISION)
    return capped(products, scale, 0.0, False)


@triton.jit(do_not_specialize=["batch_size"])
def _mla_decode_kernel(
    q_ptr, rows_ptr, out_ptr, req_to_token_ptr, req_pool_indices_ptr, seq_lens_ptr,
    workspace_ptr, counters_ptr, batch_size, scale, v_scale, stride_q, stride_q_head, stride_slots,
    STRIDE: tl.constexpr, ROPE: tl.constexpr, BLOCK_R: tl.constexpr,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr,
    MERGED_G: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_BS: tl.constexpr,
    PRECISION: tl.constexpr, MERGES: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    group, program = tl.program_id(0), tl.program_id(1)
    num_groups, num_programs = tl.num_programs(0), tl.num_programs(1)
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
    run_start, run_end, run_len, first_request, first_start = schedule_tiles(
        seq_lens_ptr, batch_size, 0, program, num_programs, BLOCK_N, BLOCK_BS, False
    )
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
    if run_start < run_end:
        offs_g, offs_n = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_N)
        offs_c, offs_r = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_R)
        mask_g = (offs_g < GROUP)[:, None]
        q_heads = q_ptr + (group * GROUP + offs_g)[:, None] * stride_q_head
        out_group, stride_out = out_ptr + group * GROUP * HEAD_DIM, num_groups * GROUP * HEAD_DIM
        dtype: tl.constexpr = q_ptr.dtype.element_ty
        request, tiles_start = first_request, first_start
        seq_len, slots_ptr = _keys_of(
            request, seq_lens_ptr, req_pool_indices_ptr, req_to_token_ptr, stride_slots
        )
        start = (run_start - tiles_start) * BLOCK_N
        first_end = tiles_start + tl.cdiv(seq_len, BLOCK_N)
        q_c, q_r = load_query(q_heads + request * stride_q, mask_g, offs_c, offs_r, HEAD_DIM, ROPE)
        acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
        largest = tl.full([BLOCK_G], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_G], tl.float32)
        for tile in range(run_start, run_end):
            # --8<-- [start:mla-decode-loop]
            # Beyond the end the last row is read again, which is live; its score is
            # masked.
            positions = start + offs_n
            nearest = tl.minimum(positions, seq_len - 1)
            slots = slots_at(slots_ptr, nearest, PAGE_SIZE)
            c, k_r = load_rows(rows_ptr, slots, offs_c, offs_r, dtype, STRIDE, HEAD_DIM, ROPE)
            scores = latent_scores(q_c, q_r, c, k_r, scale, PRECISION)
            scores = tl.where((positions == nearest)[None, :], scores, float("-inf"))
            acc, largest, total = accumulate(acc, largest, total, scores, c, PRECISION)
            # --8<-- [end:mla-decode-loop]
            is_last = start + BLOCK_N >= seq_len
            if is_last:
                if tiles_start >= run_start:
                    finish(
                        out_group + request * stride_out, out_group, acc, largest[:, None], total[:, None],
                        v_scale, offs_g, offs_c, GROUP, HEAD_DIM, False,
                    )  # fmt: skip
                else:
                    store_partial(
                        workspace_ptr, acc, largest, total, group, num_groups, program, num_programs,
                        tiles_start <= run_start, GROUP, HEAD_DIM, BLOCK_G, BLOCK_D,
                    )  # fmt: skip
                acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
                largest = tl.full([BLOCK_G], float("-inf"), tl.float32)
                total = tl.zeros([BLOCK_G], tl.float32)
            is_next = is_last & (tile + 1 < run_end)
            if is_next:
                request += 1
                seq_len, slots_ptr = _keys_of(
                    request, seq_lens_ptr, req_pool_indices_ptr, req_to_token_ptr, stride_slots
                )
                q_c, q_r = load_query(q_heads + request * stride_q, mask_g, offs_c, offs_r, HEAD_DIM, ROPE)
            start = tl.where(is_next, 0, start + BLOCK_N)
            tiles_start = tl.where(is_next, tile + 1, tiles_start)

        tiles_end = tiles_start + tl.cdiv(seq_len, BLOCK_N)
        if tiles_end > run_end:
            store_partial(
                workspace_ptr, acc, largest, total, group, num_groups, program, num_programs,
                tiles_start <= run_start, GROUP, HEAD_DIM, BLOCK_G, BLOCK_D,
            )  # fmt: skip
        if MERGES and tiles_end > run_end:
            merge_if_last(
                out_group + request * stride_out, out_group, counters_ptr + request * num_groups + group,
                workspace_ptr, group, num_groups, num_programs, tiles_start, tiles_end, run_len, v_scale,
                GROUP, HEAD_DIM, BLOCK_D, MERGED_G, False,
            )  # fmt: skip
        if MERGES and (first_start < run_start) & (first_end <= run_end):
            merge_if_last(
                out_group + first_request * stride_out, out_group,
                counters_ptr + first_request * num_groups + group,
                workspace_ptr, group, num_groups, num_programs, first_start, first_end, run_len, v_scale,
                GROUP, HEAD_DIM, BLOCK_D, MERGED_G, False,
            )  # fmt: skip


class Tile(NamedTuple):
    block_n: int  # rows of the pool
    num_stages: int


@cache
def tile_of(row_bytes: int, num_query_rows: int, gpu: Gpu) -> Tile:
    """The largest tile whose loads in flight fit the shared memory beside the queries. A read of rows waits
    for a read of their slots: 3 stages hold one tile, 5 two."""
    for block_n, num_stages in ((64, 5), (32, 5), (32, 3), (16, 3), (16, 2)):
        tiles_in_flight = max((num_stages - 1) // 2, 1)
        num_bytes = row_bytes * (tiles_in_flight * block_n + num_query_rows) + 16 * 1024
        if num_bytes <= gpu.shared_memory and block_n * row_bytes <= 80 * 1024:
            return Tile(block_n, num_stages)
    raise ValueError(
        f"latent attention over rows of {row_bytes} bytes needs more than the {gpu.shared_memory} bytes of "
        "shared memory that a CTA has on this GPU"
    )


@cache
def group_size(num_qo_heads: int) -> int:
    """The number of query heads of each CTA: as many as fit a tile, and equal for all CTAs."""
    return max(n for n in range(1, MAX_GROUP + 1) if num_qo_heads % n == 0)


def padded_row_bytes(kv_lora_rank: int, rope_head_dim: int, itemsize: int) -> int:
    block_r = max(16, triton.next_power_of_2(rope_head_dim))
    return (max(16, triton.next_power_of_2(kv_lora_rank)) + block_r) * itemsize


def mla_decode(
    q: torch.Tensor,
    rows: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    counters: torch.Tensor,
    *,
    kv_lora_rank: int,
    scale: float,
    page_size: int = 1,
    kv_scale: float = 1.0,
    w_v: torch.Tensor | None = None,
    projected: torch.Tensor | None = None,
) -> torch.Tensor:
    """q [bs, num_qo_heads, row_size], absorbed, of the tokens at seq_lens - 1; rows [slots, 1, row_size] of
    the pool, times kv_scale if they are FP8 -> weighted sums of c, [bs, num_qo_heads, kv_lora_rank] of q's
    dtype.

    w_v [num_qo_heads, v_head_dim, kv_lora_rank]: the sums are multiplied with it too, into `projected`, which
    is returned. That is for few requests (mla_small_batch.py).

    counters: int32 [>= bs * num_qo_heads / group_size] of zeros, and zeros again afterwards. A request of
    seq_len 0 is not read, and its output is undefined. seq_lens is read before the previous launch has ended:
    it must be from before the last one that was no programmatic dependent launch."""
    batch_size, num_qo_heads, row_size = q.shape
    out = q.new_empty(batch_size, num_qo_heads, kv_lora_rank)
    if batch_size == 0:
        return out
    group = group_size(num_qo_heads)
    num_groups, rope = num_qo_heads // group, row_size - kv_lora_rank
    assert rows.shape[2] == row_size
    assert q.stride(2) == rows.stride(2) == req_to_token.stride(1) == 1
    assert counters.numel() >= batch_size * num_groups
    sizes = split_sizes(group, kv_lora_rank)
    row_bytes = padded_row_bytes(kv_lora_rank, rope, q.element_size())
    tile = tile_of(row_bytes, sizes["BLOCK_G"], gpu_of(q.device))
    max_tiles = batch_size * triton.cdiv(req_to_token.shape[1], tile.block_n)
    num_programs = num_split_ctas(q.device, num_groups, 1, max_tiles)
    workspace = split_workspace(q.device, num_programs, num_groups, group, kv_lora_rank)
    _mla_decode_kernel[(num_groups, num_programs)](
        q, kernel_view(rows), out, req_to_token, req_pool_indices, seq_lens,
        workspace, counters,
        batch_size, scale * kv_scale, kv_scale, q.stride(0), q.stride(1), req_to_token.stride(0),
        STRIDE=rows.stride(0), ROPE=rope, BLOCK_R=max(16, triton.next_power_of_2(rope)),
        **sizes, PAGE_SIZE=page_size, BLOCK_N=tile.block_n,
        BLOCK_BS=1 if batch_size == 1 else batch_block(batch_size),
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32", MERGES=w_v is None,
        num_warps=8, num_stages=tile.num_stages, **pdl_options(q),
    )  # fmt: skip
    if w_v is None or projected is None:
        return out
    options: dict[str, Any] = {
        "num_programs": num_programs,
        "group": group,
        "block_n": tile.block_n,
        "kv_scale": kv_scale,
    }
    merge_and_project(workspace, out, seq_lens, w_v, projected, **options)
    return projected
