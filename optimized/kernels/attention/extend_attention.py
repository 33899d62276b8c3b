"""Attention of several new tokens per request over the paged KV pool, causal or under a mask of the batch.

Roofline bound: 4 * head_dim operations for each (query head, visible key), at the tensor cores' rate.

Shape: flash attention. A CTA holds a tile of BLOCK_M queries and loops over their visible keys, BLOCK_N at a
time, with an online softmax; scores never reach memory. The rows of a tile are (token, query head of one KV
head) pairs, tokens first, so a tile is full for any ratio of heads, and a tree of a few drafts still makes
one GEMM. Keys come in two ranges: first those visible to every row, without a mask, then those on the
diagonal. With a window or a mask of the batch there is one masked range, which begins at the first row's
window.

The grid is an upper bound from the shapes alone ([tiles, num_kv_heads]). The device finds the request of a
tile from extend_seq_lens, and tiles beyond the last one return. So a CUDA graph can hold the launch. The last
tiles of a request, which have the most keys, come first. If the tiles of one long request would leave many
multiprocessors without work, its keys are divided into parts, which tree_attention's second launch merges.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl

from diptych.optimized.kernels.attention.fp8 import for_pool, from_pool, kernel_view, values_from_pool
from diptych.optimized.kernels.attention.paged_softmax import (
    LOG2_E,
    accumulate,
    first_visible,
    scores_of,
    slots_at,
)
from diptych.optimized.kernels.attention.split_kv import INTERPRETED_CTAS
from diptych.optimized.kernels.attention.tree_attention import _merge_kernel, _part_of
from diptych.optimized.kernels.portable import INTERPRETED, Gpu, gpu_of, pdl_options, prompts_block, rounded

MAX_PARTS = 16
MOST_TILES = 2048
"""In all parts: with 128 rows of 128 columns in float32, 130 MiB, less than an MLP of such tokens takes."""
MERGED_KEYS = 16 if INTERPRETED else 512
"""A merge takes about as long per part as a tile takes for so many keys."""
LAUNCHED_KEYS = 0 if INTERPRETED else 3000
"""So does the CPU for a second launch (60 us, one H200): prompts are launched kernel by kernel."""


@triton.jit(do_not_specialize=["batch_size", "window"])
def _extend_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, sinks_ptr, mask_ptr,
    parts_ptr, maxima_ptr, sums_ptr,  # as in tree_attention
    req_to_token_ptr, req_pool_indices_ptr, seq_lens_ptr, extend_seq_lens_ptr, extend_start_loc_ptr,
    batch_size, scale, v_scale, logit_cap, window,
    stride_q, stride_q_head, stride_k, stride_k_head, stride_v, stride_v_head, stride_out, stride_row,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_BS: tl.constexpr,
    HAS_MASK: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    IS_PART: tl.constexpr, PRECISION: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    head, program = tl.program_id(0), tl.program_id(1)
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        # A CTA that exits early waits too, because the next kernel takes the end of this one for the end of
        # previous kernels.
        tl.extra.cuda.gdc_wait()
    offs_b = tl.arange(0, BLOCK_BS)
    in_batch = offs_b < batch_size
    extend_lens = tl.load(extend_seq_lens_ptr + offs_b, mask=in_batch, other=0)
    num_tiles = tl.cdiv(extend_lens.to(tl.int32) * GROUP, BLOCK_M)
    ends = tl.cumsum(num_tiles, 0)
    request = tl.sum((ends <= program).to(tl.int32), 0)
    if request >= batch_size:
        return
    tile = tl.sum(tl.where(offs_b <= request, num_tiles, 0), 0) - 1 - program
    num_queries = tl.load(extend_seq_lens_ptr + request).to(tl.int32)
    seq_len = tl.load(seq_lens_ptr + request).to(tl.int32)
    prefix_len = seq_len - num_queries
    row_ptr = req_to_token_ptr + tl.load(req_pool_indices_ptr + request) * stride_row

    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    tokens, heads = rows // GROUP, head * GROUP + rows % GROUP
    offs_n, offs_d = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    in_dim = offs_d < HEAD_DIM
    live_rows = tokens < num_queries
    mask_q = live_rows[:, None] & in_dim[None, :]
    q_rows = tl.load(extend_start_loc_ptr + request) + tokens
    q_tile = q_ptr + q_rows[:, None] * stride_q + heads[:, None] * stride_q_head + offs_d[None, :]
    q, scale = for_pool(tl.load(q_tile, mask=mask_q, other=0.0), scale, k_ptr.dtype.element_ty)

    query_positions = prefix_len + tokens
    first_position = prefix_len + tile * BLOCK_M // GROUP
    last_position = prefix_len + tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // GROUP, num_queries - 1)
    key_start = 0
    if HAS_WINDOW:
        key_start = first_visible(first_position, window)
        first_keys = first_visible(query_positions, window)[:, None]
    if HAS_MASK:
        key_end = seq_len
        sizes = extend_lens * tl.load(seq_lens_ptr + offs_b, mask=in_batch, other=0)
        mask_start = tl.sum(tl.where(offs_b < request, sizes, 0), 0)
        mask_ptr += mask_start
    else:
        key_end = last_position + 1

    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    k_head, v_head = k_ptr + head * stride_k_head, v_ptr + head * stride_v_head
    if not (HAS_MASK or HAS_WINDOW):
        seen_by_all = (first_position + 1) // BLOCK_N * BLOCK_N
        if IS_PART:
            key_start, part_end, _ = _part_of(seq_len, 0, tl.program_id(2), tl.num_programs(2), BLOCK_N)
            key_end = tl.minimum(key_end, part_end)
            seen_by_all = tl.maximum(tl.minimum(seen_by_all, part_end), key_start)
        for start in range(key_start, seen_by_all, BLOCK_N):
            slots = slots_at(row_ptr, start + offs_n, PAGE_SIZE)
            k_tile = k_head + slots[:, None] * stride_k + offs_d[None, :]
            k = from_pool(tl.load(k_tile, mask=in_dim[None, :], other=0.0), q.dtype)
            scores = scores_of(q, k, scale, logit_cap, HAS_CAP, PRECISION)
            v_tile = v_head + slots[:, None] * stride_v + offs_d[None, :]
            v = values_from_pool(tl.load(v_tile, mask=in_dim[None, :], other=0.0), q.dtype)
            acc, largest, total = accumulate(acc, largest, total, scores, v, PRECISION)
        key_start = seen_by_all

    for start in range(key_start, key_end, BLOCK_N):
        # Beyond the end the last key is read again, which is live; its score is masked.
        positions = start + offs_n
        nearest = tl.minimum(positions, key_end - 1)
        slots = slots_at(row_ptr, nearest, PAGE_SIZE)
        k_tile = k_head + slots[:, None] * stride_k + offs_d[None, :]
        k = from_pool(tl.load(k_tile, mask=in_dim[None, :], other=0.0), q.dtype)
        scores = scores_of(q, k, scale, logit_cap, HAS_CAP, PRECISION)
        if HAS_MASK:
            in_mask = live_rows[:, None] & (positions < key_end)[None, :]
            sees = tl.load(mask_ptr + (tokens * seq_len)[:, None] + positions[None, :], mask=in_mask, other=0)
            sees = sees != 0
        else:
            sees = positions[None, :] <= query_positions[:, None]
        if HAS_WINDOW:
            sees = sees & (positions[None, :] >= first_keys)
        scores = tl.where(sees, scores, float("-inf"))
        v_tile = v_head + slots[:, None] * stride_v + offs_d[None, :]
        v = values_from_pool(tl.load(v_tile, mask=in_dim[None, :], other=0.0), q.dtype)
        acc, largest, total = accumulate(acc, largest, total, scores, v, PRECISION)

    if IS_PART:
        NUM_HEADS = tl.num_programs(0) * GROUP
        out_rows = (tl.program_id(2) * num_queries + q_rows) * NUM_HEADS + heads
        tl.store(parts_ptr + out_rows[:, None] * HEAD_DIM + offs_d[None, :], acc, mask=mask_q)
        tl.store(maxima_ptr + out_rows, largest, mask=live_rows)
        tl.store(sums_ptr + out_rows, total, mask=live_rows)
    else:
        if HAS_SINKS:
            sink = LOG2_E * tl.load(sinks_ptr + heads).to(tl.float32)
            new_largest = tl.maximum(largest, sink)
            rescale = tl.exp2(largest - new_largest)
            total = total * rescale + tl.exp2(sink - new_largest)
            acc = acc * rescale[:, None]
        if HAS_MASK:
            total = tl.where(total == 0.0, 1.0, total)  # a row without visible keys gives zeros
        out_tile = out_ptr + q_rows[:, None] * stride_out + heads[:, None] * HEAD_DIM + offs_d[None, :]
        tl.store(out_tile, rounded(acc / total[:, None] * v_scale, out_ptr.dtype.element_ty), mask=mask_q)


def _tile(rows: int, block_d: int, is_float32: bool, has_mask: bool, gpu: Gpu) -> dict[str, int]:
    """Tiles for requests with this number of rows. Larger ones spill registers.

    A read of K waits for a read of slots: with num_stages 3 one tile is in flight during the computation of
    another, with 5 two are.
    """
    if INTERPRETED:  # the interpreter's time depends on CTAs, not on rows
        sizes = (min(rows, 128), 64, 4, 1)
    elif is_float32:
        sizes = (
            min(rows, 16 if block_d > 128 else 32),
            min(32, 8192 // block_d),
            4 if block_d > 128 else 8,
            2,
        )
    elif block_d > 256:
        is_hopper = gpu.shared_memory > 200 * 1024  # sm_80 has 163 KB
        sizes = (min(rows, 64 if is_hopper else 32), 32 if gpu.has_large_shared_memory else 16, 8, 3)
    elif has_mask:
        sizes = (min(rows, 64), 32, 4, 3)
    elif rows <= 32:
        sizes = (rows, 32 if block_d > 128 else 64, 4, 5)
    elif block_d > 128:
        sizes = (128, 32, 8, 5) if gpu.has_large_shared_memory else (min(rows, 64), 32, 4, 3)
    elif rows == 64:
        sizes = (64, 64, 4, 5)
    else:
        sizes = (128, 64, 8, 5)
    return dict(zip(("BLOCK_M", "BLOCK_N", "num_warps", "num_stages"), sizes))


@lru_cache(maxsize=256)  # asked in each layer
def _num_parts(num_tiles: int, num_keys: int, num_ctas: int) -> int:
    """Into how many parts the keys of one request are divided, so that it takes the shortest time. A
    multiprocessor has one of `num_ctas` tiles at a time; of four rounds and more there is little to gain."""
    if num_tiles >= 4 * num_ctas:
        return 1

    def time_of(parts: int) -> float:
        merged = (parts - 1) * MERGED_KEYS + (parts > 1) * LAUNCHED_KEYS
        return triton.cdiv(num_tiles * parts, num_ctas) / parts + merged / num_keys

    return min(range(1, max(min(MAX_PARTS, MOST_TILES // num_tiles), 1) + 1), key=time_of)


def extend_attention(
    q: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    extend_start_loc: torch.Tensor,
    *,
    out: torch.Tensor,
    scale: float,
    v_scale: float = 1.0,
    page_size: int = 1,
    sliding_window: int = -1,
    logit_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    custom_mask: torch.Tensor | None = None,
    num_keys: int = 0,
) -> torch.Tensor:
    """q [num_tokens, num_qo_heads, head_dim], the last extend_seq_lens tokens of each request -> out,
    alike and contiguous. custom_mask: as in ForwardBatch. K and V in FP8 are multiplied by their scales:
    `scale` includes that of K. num_keys: about as many as the longest request has; 0: not known."""
    num_tokens, num_qo_heads, head_dim = q.shape
    batch_size, num_kv_heads = seq_lens.shape[0], k_buffer.shape[1]
    group = num_qo_heads // num_kv_heads
    if num_tokens == 0:
        return out
    k_buffer, v_buffer = kernel_view(k_buffer), kernel_view(v_buffer)
    block_d = max(16, triton.next_power_of_2(head_dim))
    rows = triton.next_power_of_2(triton.cdiv(num_tokens * group, batch_size))
    gpu, num_parts = gpu_of(q.device), 1
    if num_keys and batch_size == 1 and custom_mask is None and sliding_window == -1:
        num_tiles = num_kv_heads * triton.cdiv(num_tokens * group, 128)
        num_parts = _num_parts(num_tiles, num_keys, gpu.num_multiprocessors or INTERPRETED_CTAS)
    rows = 128 if num_parts > 1 else max(16, rows)
    tile = _tile(rows, block_d, q.dtype == torch.float32, custom_mask is not None, gpu)
    block_m = tile["BLOCK_M"]
    # A request's last tile may be nearly empty.
    max_tiles = triton.cdiv(num_tokens * group, block_m) + min(batch_size, num_tokens) - 1
    mask = None if custom_mask is None else custom_mask.view(torch.uint8)
    sinks_or_any = q if sinks is None else sinks
    parts, maxima, sums = out, out, out
    if num_parts > 1:
        parts = torch.empty(num_parts, *q.shape, device=q.device)
        # Not halves of one tensor: the alignment of the second would be another for odd numbers.
        maxima, sums = (parts.new_empty(num_parts, num_tokens, num_qo_heads) for _ in range(2))
    _extend_kernel[(num_kv_heads, max_tiles, num_parts)](
        q, k_buffer, v_buffer, out, sinks_or_any, q if mask is None else mask, parts, maxima, sums,
        req_to_token, req_pool_indices, seq_lens, extend_seq_lens, extend_start_loc,
        batch_size, scale, v_scale, logit_cap, sliding_window,
        q.stride(0), q.stride(1), k_buffer.stride(0), k_buffer.stride(1),
        v_buffer.stride(0), v_buffer.stride(1), out.stride(0), req_to_token.stride(0),
        GROUP=group, HEAD_DIM=head_dim, PAGE_SIZE=page_size,
        BLOCK_D=block_d, **tile,
        BLOCK_BS=prompts_block(batch_size),
        HAS_MASK=mask is not None, HAS_WINDOW=sliding_window != -1, HAS_CAP=logit_cap > 0,
        HAS_SINKS=sinks is not None, IS_PART=num_parts > 1,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        **pdl_options(q),
    )  # fmt: skip
    if num_parts > 1:
        _merge_kernel[(num_tokens * num_qo_heads,)](
            out, sinks_or_any, q, seq_lens, parts, maxima, sums, num_parts, v_scale,
            NUM_QUERIES=1 << 20, NUM_HEADS=num_qo_heads, HEAD_DIM=head_dim, BLOCK_D=block_d, PADDED=1,
            BLOCK_N=tile["BLOCK_N"], MAX_PARTS=MAX_PARTS, HAS_WINDOW=False, HAS_SINKS=sinks is not None,
            num_warps=1,
        )  # fmt: skip
    return out
