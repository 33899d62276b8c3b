"""Paged attention whose rows do not depend on each other: keys are summed in the order of positions, in
splits at fixed positions. For deterministic mode.

Roofline bound: those of decode_attention and extend_attention, whose work this does.

Shape: flash attention with two levels. Within a split of SPLIT keys, an online softmax over tiles of BLOCK_N
keys; then the splits, joined one after the other. Tiles and splits begin at multiples of their sizes, counted
from the request's first token: not where a chunk, a cached prefix or a CTA begins. A tile that a row does not
see changes no bit of it. So one CTA may take all splits of a tile of rows (prefill, and decoding of many
requests), or several CTAs may share the splits of a request, joined by a second launch (decoding of fewer
requests): the bits are the same. How many share them follows the batch alone, because a CUDA graph is
captured before lengths are known. Both use one size of tile, because the tensor cores may add in another
order in another size.
"""

from __future__ import annotations

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
from diptych.optimized.kernels.portable import Gpu, gpu_of, pdl_options, prompts_block, rounded

SPLIT = 512
"""Keys of a split: a multiple of every BLOCK_N."""
CTAS = 4
"""CTAs of a launch for each multiprocessor. Where requests times heads are fewer, several share a request."""


# --8<-- [start:join-splits]
@triton.jit
def _joined(acc, largest, total, part, part_largest, part_total):
    """The splits so far, and the next one. acc, part [rows, BLOCK_D]; the others
    [rows, 1]. A split that saw no key (-inf) changes nothing."""
    new_largest = tl.maximum(largest, part_largest)
    base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
    rescale, factor = tl.exp2(largest - base), tl.exp2(part_largest - base)
    # An explicit fma, because the compiler might round differently in two kernels.
    total = tl.fma(total, rescale, part_total * factor)
    acc = tl.fma(acc, tl.broadcast_to(rescale, acc.shape), part * factor)
    return acc, new_largest, total
    # --8<-- [end:join-splits]


@triton.jit
def _normalized(acc, largest, total, sinks, v_scale, HAS_SINKS: tl.constexpr):
    """v_scale * acc over its sum, the weights of sinks (log2(e) times each, [rows, 1]) included."""
    if HAS_SINKS:
        new_largest = tl.maximum(largest, sinks)
        rescale = tl.exp2(largest - new_largest)
        total = tl.fma(total, rescale, tl.exp2(sinks - new_largest))
        acc = acc * rescale
    return acc / tl.where(total == 0.0, 1.0, total) * v_scale


@triton.jit(do_not_specialize=["batch_size", "num_splits", "window"])
def _fixed_split_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, sinks_ptr,
    req_to_token_ptr, req_pool_indices_ptr, seq_lens_ptr, extend_seq_lens_ptr, extend_start_loc_ptr,
    parts_ptr, states_ptr,  # [splits, bs, heads, HEAD_DIM], [2, splits, bs, heads]: maxima and sums
    batch_size, num_splits, scale, v_scale, logit_cap, window,
    stride_q, stride_q_head, stride_k, stride_k_head, stride_v, stride_v_head, stride_row,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_BS: tl.constexpr,
    SPLIT: tl.constexpr, IS_DECODE: tl.constexpr, IS_PART: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    PRECISION: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    head, program = tl.program_id(0), tl.program_id(1)
    num_kv_heads = tl.num_programs(0)
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if IS_DECODE:
        request, tile, num_queries = program, 0, 1
    else:  # the last tiles of a request, which have the most keys, first
        offs_b = tl.arange(0, BLOCK_BS)
        extend_lens = tl.load(extend_seq_lens_ptr + offs_b, mask=offs_b < batch_size, other=0)
        num_tiles = tl.cdiv(extend_lens.to(tl.int32) * GROUP, BLOCK_M)
        request = tl.sum((tl.cumsum(num_tiles, 0) <= program).to(tl.int32), 0)
        if request >= batch_size:
            return
        tile = tl.sum(tl.where(offs_b <= request, num_tiles, 0), 0) - 1 - program
        num_queries = tl.load(extend_seq_lens_ptr + request).to(tl.int32)
    seq_len = tl.load(seq_lens_ptr + request).to(tl.int32)
    row_ptr = req_to_token_ptr + tl.load(req_pool_indices_ptr + request) * stride_row

    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    tokens, heads = rows // GROUP, head * GROUP + rows % GROUP
    live_rows = tokens < num_queries
    query_positions = seq_len - num_queries + tokens
    key_end = tl.minimum(seq_len - num_queries + (tile * BLOCK_M + BLOCK_M - 1) // GROUP + 1, seq_len)
    key_start = 0
    if HAS_WINDOW:
        first_position = seq_len - num_queries + tile * BLOCK_M // GROUP
        key_start = first_visible(first_position, window) // BLOCK_N * BLOCK_N
        first_keys = first_visible(query_positions, window)[:, None]
    if key_start >= key_end:  # an entry of a padded batch
        return

    offs_n, offs_d = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    in_dim = offs_d < HEAD_DIM
    mask_q = live_rows[:, None] & in_dim[None, :]
    if IS_DECODE:
        q_rows = request.to(tl.int64) + tokens
    else:
        q_rows = tl.load(extend_start_loc_ptr + request) + tokens
    q_tile = q_ptr + q_rows[:, None] * stride_q + heads[:, None] * stride_q_head + offs_d[None, :]
    q, scale = for_pool(tl.load(q_tile, mask=mask_q, other=0.0), scale, k_ptr.dtype.element_ty)
    k_head, v_head = k_ptr + head * stride_k_head, v_ptr + head * stride_v_head
    NUM_HEADS = num_kv_heads * GROUP
    out_rows = q_rows * NUM_HEADS + heads
    first_split, end_split = 0, 1  # all keys
    if IS_PART:
        first_split, end_split = key_start // SPLIT + tl.program_id(2), tl.cdiv(key_end, SPLIT)
    for split in range(first_split, end_split, tl.num_programs(2) if IS_PART else 1):
        first_key, end_key = key_start, key_end
        if IS_PART:
            first_key = tl.maximum(key_start, split * SPLIT)
            end_key = tl.minimum(key_end, split * SPLIT + SPLIT)
        all_acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        all_largest = tl.full([BLOCK_M, 1], float("-inf"), tl.float32)
        all_total = tl.zeros([BLOCK_M, 1], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        # --8<-- [start:fixed-splits]
        for start in range(first_key, end_key, BLOCK_N):
            if not IS_PART:  # noqa: SIM102 - the outer one is decided at compile time
                if start % SPLIT == 0:
                    all_acc, all_largest, all_total = _joined(
                        all_acc, all_largest, all_total,
                        acc, largest[:, None], total[:, None],
                    )  # fmt: skip
                    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
                    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
                    total = tl.zeros([BLOCK_M], tl.float32)
            positions = start + offs_n
            # Beyond the end the last key is read again, which is live; its score is masked.
            slots = slots_at(row_ptr, tl.minimum(positions, end_key - 1), PAGE_SIZE)
            k_tile = k_head + slots[:, None] * stride_k + offs_d[None, :]
            k = from_pool(tl.load(k_tile, mask=in_dim[None, :], other=0.0), q.dtype)
            scores = scores_of(q, k, scale, logit_cap, HAS_CAP, PRECISION)
            sees = (positions[None, :] <= query_positions[:, None]) & (positions < end_key)[None, :]
            if HAS_WINDOW:
                sees = sees & (positions[None, :] >= first_keys)
            scores = tl.where(sees, scores, float("-inf"))
            v_tile = v_head + slots[:, None] * stride_v + offs_d[None, :]
            v = values_from_pool(tl.load(v_tile, mask=in_dim[None, :], other=0.0), q.dtype)
            acc, largest, total = accumulate(acc, largest, total, scores, v, PRECISION)
        # --8<-- [end:fixed-splits]

        if IS_PART:
            rows_of_split = batch_size.to(tl.int64) * NUM_HEADS
            part_rows, num_rows = split * rows_of_split + out_rows, num_splits * rows_of_split
            tl.store(parts_ptr + part_rows[:, None] * HEAD_DIM + offs_d[None, :], acc, mask=mask_q)
            tl.store(states_ptr + part_rows, largest, mask=live_rows)
            tl.store(states_ptr + num_rows + part_rows, total, mask=live_rows)
        else:
            all_acc, all_largest, all_total = _joined(
                all_acc, all_largest, all_total, acc, largest[:, None], total[:, None]
            )
            sinks = all_largest
            if HAS_SINKS:
                sinks = LOG2_E * tl.load(sinks_ptr + heads).to(tl.float32)[:, None]
            output = _normalized(all_acc, all_largest, all_total, sinks, v_scale, HAS_SINKS)
            out_tile = out_ptr + out_rows[:, None] * HEAD_DIM + offs_d[None, :]
            tl.store(out_tile, rounded(output, out_ptr.dtype.element_ty), mask=mask_q)


@triton.jit(do_not_specialize=["num_splits", "window"])
def _join_kernel(
    out_ptr, sinks_ptr, seq_lens_ptr, parts_ptr, states_ptr, num_splits, v_scale, window,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr,
    SPLIT: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SINKS: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    request, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    NUM_HEADS = tl.num_programs(1) * GROUP
    offs_g, offs_d = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    in_group = offs_g < GROUP
    mask = in_group[:, None] & (offs_d < HEAD_DIM)[None, :]
    heads = head * GROUP + offs_g
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    seq_len = tl.load(seq_lens_ptr + request).to(tl.int32)
    if seq_len <= 0:
        return
    first = 0
    if HAS_WINDOW:
        first = first_visible(seq_len - 1, window) // SPLIT
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    largest = tl.full([BLOCK_G, 1], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G, 1], tl.float32)
    rows_of_split = tl.num_programs(0).to(tl.int64) * NUM_HEADS
    for split in range(first, tl.cdiv(seq_len, SPLIT)):
        rows = split * rows_of_split + request * NUM_HEADS + heads
        part = tl.load(parts_ptr + rows[:, None] * HEAD_DIM + offs_d[None, :], mask=mask, other=0.0)
        part_largest = tl.load(states_ptr + rows, mask=in_group, other=float("-inf"))
        part_total = tl.load(states_ptr + num_splits * rows_of_split + rows, mask=in_group, other=0.0)
        acc, largest, total = _joined(acc, largest, total, part, part_largest[:, None], part_total[:, None])
    sinks = largest
    if HAS_SINKS:
        sinks = LOG2_E * tl.load(sinks_ptr + heads, mask=in_group, other=0.0).to(tl.float32)[:, None]
    output = _normalized(acc, largest, total, sinks, v_scale, HAS_SINKS)
    out_tile = out_ptr + (request * NUM_HEADS + heads)[:, None] * HEAD_DIM + offs_d[None, :]
    tl.store(out_tile, rounded(output, out_ptr.dtype.element_ty), mask=mask)


def _tile(group: int, block_d: int, is_float32: bool, gpu: Gpu) -> dict[str, int]:
    """Tile sizes, the same for every batch."""
    if is_float32:
        sizes = (16 if block_d > 128 else 32, 32, 4 if block_d > 128 else 8, 2)
    elif block_d > 128:
        sizes = (64, 32, 4, 3)
    else:
        sizes = (64, 64, 4, 3 if gpu.has_large_shared_memory else 2)
    sizes = (max(sizes[0], triton.next_power_of_2(group)), *sizes[1:])
    return dict(zip(("BLOCK_M", "BLOCK_N", "num_warps", "num_stages"), sizes))


def fixed_split_attention(
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
    is_decode: bool,
    v_scale: float = 1.0,
    page_size: int = 1,
    sliding_window: int = -1,
    logit_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    in_parts: bool | None = None,
) -> torch.Tensor:
    """q [num_tokens, num_qo_heads, head_dim], the last extend_seq_lens tokens of each request -> out, alike
    and contiguous. is_decode: one of each request, in order. in_parts: several CTAs for a request; default:
    where requests are too few to fill the GPU. K and V in FP8 are multiplied by their scales: `scale`
    includes that of K."""
    num_tokens, num_qo_heads, head_dim = q.shape
    batch_size, num_kv_heads = seq_lens.shape[0], k_buffer.shape[1]
    if num_tokens == 0:
        return out
    assert q.stride(2) == k_buffer.stride(2) == v_buffer.stride(2) == req_to_token.stride(1) == 1
    k_buffer, v_buffer = kernel_view(k_buffer), kernel_view(v_buffer)
    gpu, group = gpu_of(q.device), num_qo_heads // num_kv_heads
    block_d = max(16, triton.next_power_of_2(head_dim))
    tile = _tile(group, block_d, q.dtype == torch.float32, gpu)
    if in_parts is None:
        in_parts = batch_size * num_kv_heads < CTAS * gpu.num_multiprocessors
    in_parts = in_parts and is_decode
    parts, states, num_splits = out, out, 1
    if in_parts:
        num_splits = triton.cdiv(req_to_token.shape[1], SPLIT)
        parts = torch.empty(num_splits, *q.shape, device=q.device)
        states = torch.empty(2, num_splits, batch_size, num_qo_heads, device=q.device)
        ctas = triton.cdiv(CTAS * gpu.num_multiprocessors, num_kv_heads * batch_size)
        grid = (num_kv_heads, batch_size, min(max(ctas, 2), num_splits))
    else:  # a request's last tile may be nearly empty
        max_tiles = triton.cdiv(num_tokens * group, tile["BLOCK_M"]) + min(batch_size, num_tokens) - 1
        grid = (num_kv_heads, num_tokens if is_decode else max_tiles, 1)
    sizes = {"GROUP": group, "HEAD_DIM": head_dim, "BLOCK_D": block_d, "SPLIT": SPLIT}
    options = {"HAS_WINDOW": sliding_window != -1, "HAS_SINKS": sinks is not None, **pdl_options(q)}
    sinks_or_any = q if sinks is None else sinks
    _fixed_split_kernel[grid](
        q, k_buffer, v_buffer, out, sinks_or_any,
        req_to_token, req_pool_indices, seq_lens, extend_seq_lens, extend_start_loc, parts, states,
        batch_size, num_splits, scale, v_scale, logit_cap, sliding_window,
        q.stride(0), q.stride(1), k_buffer.stride(0), k_buffer.stride(1),
        v_buffer.stride(0), v_buffer.stride(1), req_to_token.stride(0),
        PAGE_SIZE=page_size, BLOCK_BS=16 if is_decode else prompts_block(batch_size),
        IS_DECODE=is_decode, IS_PART=in_parts,
        HAS_CAP=logit_cap > 0, PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        **sizes, **tile, **options,
    )  # fmt: skip
    if in_parts:
        _join_kernel[(batch_size, num_kv_heads)](
            out, sinks_or_any, seq_lens, parts, states, num_splits, v_scale, sliding_window,
            BLOCK_G=triton.next_power_of_2(group), num_warps=1 if block_d <= 128 else 4, **sizes, **options,
        )  # fmt: skip
    return out
