"""Attention of a few new tokens per request after a long prefix: drafted trees, chains and beams.

Roofline bound: the bytes of live K and V, read once, as in decode_attention; up to some hundred (token, query
head) pairs share each of them, still below what the tensor cores can do.

Shape: the rows of a tile are the (token, query head of one KV head) pairs of a request, as in
extend_attention: 16 drafts of 4 heads fill a tile of 64. Keys are divided into as many equal parts as fill
the GPU, at least a tile each. A second launch merges the results of the parts, one CTA per row. Keys before
the tree are read without a mask, those of the tree under `tree_mask`, whose size does not depend on lengths.
With a window or chunks (tree_window.py) the keys begin at the first one that a token of the request sees.
All requests have equally many new tokens. Grids follow from shapes alone, so a CUDA graph can hold both
launches.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from diptych.optimized.kernels.attention.fp8 import for_pool, from_pool, kernel_view, values_from_pool
from diptych.optimized.kernels.attention.paged_softmax import LOG2_E, accumulate, scores_of, slots_at
from diptych.optimized.kernels.attention.split_kv import num_split_ctas
from diptych.optimized.kernels.attention.tree_window import tree_window
from diptych.optimized.kernels.portable import INTERPRETED, Gpu, gpu_of, rounded

MAX_PARTS = 32
"""A merging CTA loads all parts of its row at once."""


@triton.jit
def _first_tile(
    firsts_ptr, request, NUM_QUERIES: tl.constexpr, PADDED: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    """The tile of the first key that a token of the request sees."""
    first = 0
    if HAS_WINDOW:
        tokens = tl.arange(0, PADDED)
        firsts = firsts_ptr + request * NUM_QUERIES + tokens
        first = tl.min(tl.load(firsts, mask=tokens < NUM_QUERIES, other=1 << 30), 0) // BLOCK_N
    return first


@triton.jit
def _part_of(seq_len, first_tile, part, num_parts, BLOCK_N: tl.constexpr):
    """The keys [start, end) of a part, and the number of parts with keys."""
    num_tiles = tl.cdiv(seq_len, BLOCK_N) - first_tile
    tiles_each = tl.cdiv(num_tiles, num_parts)
    start = (first_tile + part * tiles_each) * BLOCK_N
    return start, tl.minimum(start + tiles_each * BLOCK_N, seq_len), tl.cdiv(num_tiles, tiles_each)


@triton.jit
def _normalised(acc, largest, total, sinks, v_scale, HAS_SINKS: tl.constexpr):
    """acc [rows, BLOCK_D] over its sum, the weights of sinks (log2(e) times each) included, times the scale
    of V; the others [rows, 1]."""
    if HAS_SINKS:
        new_largest = tl.maximum(largest, sinks)
        rescale = tl.exp2(largest - new_largest)
        total = total * rescale + tl.exp2(sinks - new_largest)
        acc = acc * rescale
    total = tl.where(total == 0.0, 1.0, total)  # a row without visible keys gives zeros
    return acc / total * v_scale


@triton.jit(do_not_specialize=["num_parts"])
def _tree_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, sinks_ptr, mask_ptr, firsts_ptr,
    req_to_token_ptr, req_pool_indices_ptr, seq_lens_ptr,
    parts_ptr, maxima_ptr, sums_ptr,  # [num_parts, num_tokens, heads, HEAD_DIM], the others without HEAD_DIM
    num_parts, scale, v_scale, logit_cap,
    stride_q, stride_q_head, stride_k, stride_k_head, stride_v, stride_v_head, stride_row,
    NUM_QUERIES: tl.constexpr, TAIL: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    PADDED: tl.constexpr, HAS_MASK: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr, IS_WHOLE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    TILES: tl.constexpr = (NUM_QUERIES * GROUP + BLOCK_M - 1) // BLOCK_M
    head, tile = tl.program_id(0) // TILES, tl.program_id(0) % TILES
    part, request = tl.program_id(1), tl.program_id(2)
    num_kv_heads, batch_size = tl.num_programs(0) // TILES, tl.num_programs(2)
    seq_len = tl.load(seq_lens_ptr + request).to(tl.int32)
    first_tile = _first_tile(firsts_ptr, request, NUM_QUERIES, PADDED, BLOCK_N, HAS_WINDOW)
    key_start, key_end, num_used = _part_of(seq_len, first_tile, part, num_parts, BLOCK_N)
    if part >= num_used:
        return
    row_ptr = req_to_token_ptr + tl.load(req_pool_indices_ptr + request) * stride_row

    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    tokens, heads = rows // GROUP, head * GROUP + rows % GROUP
    live_rows = tokens < NUM_QUERIES
    q_rows = (request * NUM_QUERIES + tokens).to(tl.int64)
    offs_n, offs_d = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    in_dim = offs_d < HEAD_DIM
    mask_q = live_rows[:, None] & in_dim[None, :]
    q_tile = q_ptr + q_rows[:, None] * stride_q + heads[:, None] * stride_q_head + offs_d[None, :]
    q, scale = for_pool(tl.load(q_tile, mask=mask_q, other=0.0), scale, k_ptr.dtype.element_ty)

    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    k_head, v_head = k_ptr + head * stride_k_head, v_ptr + head * stride_v_head
    if HAS_WINDOW:
        firsts = tl.load(firsts_ptr + q_rows, mask=live_rows, other=0)
    tail_start = seq_len - TAIL
    seen_by_all = tl.maximum(tail_start, 0) // BLOCK_N * BLOCK_N
    whole_end = tl.maximum(tl.minimum(key_end, seen_by_all), key_start)
    for start in range(key_start, whole_end, BLOCK_N):
        slots = slots_at(row_ptr, start + offs_n, PAGE_SIZE)
        k_tile = k_head + slots[:, None] * stride_k + offs_d[None, :]
        k = from_pool(tl.load(k_tile, mask=in_dim[None, :], other=0.0), q.dtype)
        scores = scores_of(q, k, scale, logit_cap, HAS_CAP, PRECISION)
        if HAS_WINDOW:
            scores = tl.where((start + offs_n)[None, :] >= firsts[:, None], scores, float("-inf"))
        v_tile = v_head + slots[:, None] * stride_v + offs_d[None, :]
        v = values_from_pool(tl.load(v_tile, mask=in_dim[None, :], other=0.0), q.dtype)
        acc, largest, total = accumulate(acc, largest, total, scores, v, PRECISION)
    for start in range(whole_end, key_end, BLOCK_N):
        positions = start + offs_n
        # Beyond the end the last key is read again, which is live; its score is masked.
        slots = slots_at(row_ptr, tl.minimum(positions, seq_len - 1), PAGE_SIZE)
        k_tile = k_head + slots[:, None] * stride_k + offs_d[None, :]
        k = from_pool(tl.load(k_tile, mask=in_dim[None, :], other=0.0), q.dtype)
        scores = scores_of(q, k, scale, logit_cap, HAS_CAP, PRECISION)
        if HAS_MASK:
            columns = positions - tail_start
            in_tail = (columns >= 0) & (columns < TAIL)
            entries = (q_rows * TAIL)[:, None] + columns[None, :]
            sees = tl.load(mask_ptr + entries, mask=live_rows[:, None] & in_tail[None, :], other=0) != 0
            in_front = (columns < 0)[None, :]
            if HAS_WINDOW:
                in_front = in_front & (positions[None, :] >= firsts[:, None])
            sees = sees | in_front
        else:
            sees = positions[None, :] <= (seq_len - NUM_QUERIES + tokens)[:, None]
        sees = sees & (positions < seq_len)[None, :]
        scores = tl.where(sees, scores, float("-inf"))
        v_tile = v_head + slots[:, None] * stride_v + offs_d[None, :]
        v = values_from_pool(tl.load(v_tile, mask=in_dim[None, :], other=0.0), q.dtype)
        acc, largest, total = accumulate(acc, largest, total, scores, v, PRECISION)

    NUM_HEADS = num_kv_heads * GROUP
    out_rows = q_rows * NUM_HEADS + heads
    out_tile = out_rows[:, None] * HEAD_DIM + offs_d[None, :]
    if IS_WHOLE:
        sinks = largest
        if HAS_SINKS:
            sinks = LOG2_E * tl.load(sinks_ptr + heads).to(tl.float32)
        output = _normalised(acc, largest[:, None], total[:, None], sinks[:, None], v_scale, HAS_SINKS)
        tl.store(out_ptr + out_tile, rounded(output, out_ptr.dtype.element_ty), mask=mask_q)
    else:
        first = part.to(tl.int64) * batch_size * NUM_QUERIES * NUM_HEADS
        tl.store(parts_ptr + first * HEAD_DIM + out_tile, acc, mask=mask_q)
        tl.store(maxima_ptr + first + out_rows, largest, mask=live_rows)
        tl.store(sums_ptr + first + out_rows, total, mask=live_rows)


@triton.jit(do_not_specialize=["num_parts"])
def _merge_kernel(
    out_ptr, sinks_ptr, firsts_ptr, seq_lens_ptr, parts_ptr, maxima_ptr, sums_ptr, num_parts, v_scale,
    NUM_QUERIES: tl.constexpr, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    PADDED: tl.constexpr, BLOCK_N: tl.constexpr, MAX_PARTS: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    num_rows = tl.num_programs(0)
    request = row // (NUM_QUERIES * NUM_HEADS)
    seq_len = tl.load(seq_lens_ptr + request).to(tl.int32)
    first_tile = _first_tile(firsts_ptr, request, NUM_QUERIES, PADDED, BLOCK_N, HAS_WINDOW)
    _, _, num_used = _part_of(seq_len, first_tile, 0, num_parts, BLOCK_N)
    parts, offs_d = tl.arange(0, MAX_PARTS), tl.arange(0, BLOCK_D)
    is_part = parts < num_used
    rows = parts.to(tl.int64) * num_rows + row
    maxima = tl.load(maxima_ptr + rows, mask=is_part, other=float("-inf"))
    sums = tl.load(sums_ptr + rows, mask=is_part, other=0.0)
    values = tl.load(
        parts_ptr + rows[:, None] * HEAD_DIM + offs_d[None, :],
        mask=is_part[:, None] & (offs_d < HEAD_DIM)[None, :], other=0.0,
    )  # fmt: skip
    largest = tl.max(maxima, 0)
    factors = tl.exp2(maxima - tl.where(largest == float("-inf"), 0.0, largest))
    acc, total = tl.sum(values * factors[:, None], 0), tl.sum(sums * factors, 0)
    sink = largest
    if HAS_SINKS:
        sink = LOG2_E * tl.load(sinks_ptr + row % NUM_HEADS).to(tl.float32)
    output = rounded(_normalised(acc, largest, total, sink, v_scale, HAS_SINKS), out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * HEAD_DIM + offs_d, output, mask=offs_d < HEAD_DIM)


def _tile(rows: int, block_d: int, is_float32: bool, gpu: Gpu) -> dict[str, int]:
    """Tiles for requests with this number of rows."""
    if INTERPRETED:  # the interpreter's time depends on CTAs, not on rows
        sizes = (min(rows, 128), 16, 4, 1)
    elif is_float32:
        sizes = (min(rows, 16 if block_d > 128 else 32), min(32, 8192 // block_d), 4, 2)
    elif block_d > 256:
        sizes = (min(rows, 32), 32 if gpu.has_large_shared_memory else 16, 8, 3)
    elif block_d > 128 and not gpu.has_large_shared_memory:
        sizes = (min(rows, 64), 32, 4, 3)
    else:
        sizes = (min(rows, 64), 32, 4, 5)  # two CTAs share a multiprocessor; with 64 keys only one fits
    return dict(zip(("BLOCK_M", "BLOCK_N", "num_warps", "num_stages"), sizes))


def tree_attention(
    q: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    out: torch.Tensor,
    scale: float,
    v_scale: float = 1.0,
    page_size: int = 1,
    logit_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    tree_mask: torch.Tensor | None = None,
    sliding_window: int = -1,
) -> torch.Tensor:
    """q [num_tokens, num_qo_heads, head_dim], the last num_tokens / bs tokens of each request -> out,
    alike and contiguous. tree_mask: as in ForwardBatch; None: causal, without a window. K and V in FP8 are
    multiplied by their scales: `scale` includes that of K. sliding_window: see `window_of`."""
    num_tokens, num_qo_heads, head_dim = q.shape
    batch_size, num_kv_heads = seq_lens.shape[0], k_buffer.shape[1]
    if num_tokens == 0:
        return out
    k_buffer, v_buffer = kernel_view(k_buffer), kernel_view(v_buffer)
    num_queries, group = num_tokens // batch_size, num_qo_heads // num_kv_heads
    assert num_queries * batch_size == num_tokens
    assert q.stride(2) == k_buffer.stride(2) == v_buffer.stride(2) == req_to_token.stride(1) == 1
    assert tree_mask is None or tree_mask.is_contiguous()
    has_window = sliding_window != -1
    mask = firsts = q  # any tensor
    if has_window:
        assert tree_mask is not None
        firsts, mask = tree_window(tree_mask, seq_lens, sliding_window)
    elif tree_mask is not None:
        mask = tree_mask.view(torch.uint8)
    block_d = max(16, triton.next_power_of_2(head_dim))
    rows = max(16, triton.next_power_of_2(num_queries * group))
    tile = _tile(rows, block_d, q.dtype == torch.float32, gpu_of(q.device))
    num_tiles = num_kv_heads * triton.cdiv(num_queries * group, tile["BLOCK_M"])
    max_parts = min(MAX_PARTS, triton.cdiv(req_to_token.shape[1], tile["BLOCK_N"]))
    num_parts = num_split_ctas(q.device, num_tiles * batch_size, 2, max_parts)
    is_whole = num_parts == 1
    parts, maxima, sums = out, out, out
    if not is_whole:
        parts = torch.empty(num_parts, *q.shape, device=q.device)
        maxima, sums = torch.empty(2, num_parts, num_tokens, num_qo_heads, device=q.device)
    sinks_or_any = q if sinks is None else sinks
    sizes = {"NUM_QUERIES": num_queries, "HEAD_DIM": head_dim, "BLOCK_D": block_d}
    sizes |= {"PADDED": triton.next_power_of_2(num_queries), "HAS_WINDOW": has_window}
    sizes |= {"HAS_SINKS": sinks is not None}
    _tree_kernel[(num_tiles, num_parts, batch_size)](
        q, k_buffer, v_buffer, out, sinks_or_any, mask, firsts,
        req_to_token, req_pool_indices, seq_lens, parts, maxima, sums, num_parts, scale, v_scale,
        logit_cap,
        q.stride(0), q.stride(1), k_buffer.stride(0), k_buffer.stride(1),
        v_buffer.stride(0), v_buffer.stride(1), req_to_token.stride(0),
        TAIL=num_queries if tree_mask is None else tree_mask.shape[2], GROUP=group, PAGE_SIZE=page_size,
        HAS_MASK=tree_mask is not None, HAS_CAP=logit_cap > 0,
        IS_WHOLE=is_whole, PRECISION="ieee" if q.dtype == torch.float32 else "tf32", **sizes, **tile,
    )  # fmt: skip
    if not is_whole:
        _merge_kernel[(num_tokens * num_qo_heads,)](
            out, sinks_or_any, firsts, seq_lens, parts, maxima, sums, num_parts, v_scale,
            NUM_HEADS=num_qo_heads, BLOCK_N=tile["BLOCK_N"], MAX_PARTS=triton.next_power_of_2(num_parts),
            num_warps=1, **sizes,
        )  # fmt: skip
    return out
