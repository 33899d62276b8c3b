"""Attention of one new token per request over an FP8 pool, from memory to registers to tensor cores.

Roofline bound: the bytes of live K and V, read once, as in decode_attention.py, and half of them.

Shape: the grid and the division of keys are those of decode_attention.py. There K and V pass through shared
memory, where e4m3 takes so many instructions and barriers that an FP8 pool is no faster than one of 16 bits.
Here a CTA is one warp. It takes tiles of 32 keys, 16 bytes a lane at a time, widens them in registers and
multiplies them by `mma.sync` (fp8_tiles.py). It asks for the slots of the tile after the next and for K and V
of the next one before it computes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from diptych.optimized.kernels.attention.decode_attention import keys_of
from diptych.optimized.kernels.attention.fp8_tiles import (
    HEAD_DIM,
    TILE,
    add_values,
    load_keys,
    load_q,
    load_slots,
    load_values,
    over_keys,
    scores,
    whole,
)
from diptych.optimized.kernels.attention.paged_softmax import first_visible
from diptych.optimized.kernels.attention.split_kv import (
    finish,
    merge_if_last,
    num_split_ctas,
    schedule_tiles,
    split_workspace,
    store_partial,
)
from diptych.optimized.kernels.carveout import prefer_l1
from diptych.optimized.kernels.portable import INTERPRETED, batch_block, gpu_of, pdl_options, where_flag

MAX_GROUP = 8
MIN_REQUESTS = 16
"""For fewer, decode_attention.py is used, which was faster for one request and as fast for eight."""
CTAS_PER_SM = 8
WARPS = 4 if INTERPRETED else 1


@triton.jit
def _following(
    request, start, seq_len, slots_ptr, first_key, exists,
    seq_lens_ptr, req_pool_indices_ptr, req_to_token_ptr, stride_row, window,
    BLOCK_N: tl.constexpr, HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    """The tile after the one at start. If none exists, any of the same request."""
    is_next = (start + BLOCK_N >= seq_len) & exists
    if is_next:
        request += 1
        seq_len, slots_ptr = keys_of(
            request, seq_lens_ptr, req_pool_indices_ptr, req_to_token_ptr, stride_row
        )
        if HAS_WINDOW:
            first_key = first_visible(seq_len - 1, window)
    start = tl.where(is_next, first_key // BLOCK_N * BLOCK_N, start + BLOCK_N)
    return request, start, seq_len, slots_ptr, first_key


@triton.jit(do_not_specialize=["batch_size", "window"])
def _fp8_decode_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, sinks_ptr,
    req_to_token_ptr, req_pool_indices_ptr, seq_lens_ptr, workspace_ptr, counters_ptr,
    batch_size, scale, v_scale, logit_cap, window,
    stride_q, stride_q_head, stride_k_head, stride_v_head, stride_row,
    STRIDE_K: tl.constexpr, STRIDE_V: tl.constexpr,
    GROUP: tl.constexpr, MERGED_G: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_BS: tl.constexpr,
    WARPS: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    BLOCK_N: tl.constexpr = TILE * WARPS
    head, program = tl.program_id(0), tl.program_id(1)
    num_kv_heads, num_programs = tl.num_programs(0), tl.num_programs(1)
    if USE_PDL:
        # The next kernel may read its weights meanwhile.
        tl.extra.cuda.gdc_launch_dependents()
    run_start, run_end, run_len, first_request, first_start = schedule_tiles(
        seq_lens_ptr, batch_size, window, program, num_programs, BLOCK_N, BLOCK_BS, HAS_WINDOW
    )
    if run_start < run_end:
        always = (tl.arange(0, 32)[:, None] + tl.arange(0, WARPS) >= 0)[:, :, None]
        always &= (tl.arange(0, 4) >= 0)[None, None, :]
        q_heads = q_ptr + head * GROUP * stride_q_head
        k_head, v_head = k_ptr + head * stride_k_head, v_ptr + head * stride_v_head
        out_head, sinks_ptr = out_ptr + head * GROUP * HEAD_DIM, sinks_ptr + head * GROUP
        stride_out = num_kv_heads * GROUP * HEAD_DIM
        offs_g, offs_d = tl.arange(0, 8), tl.arange(0, HEAD_DIM)
        request, tiles_start = first_request, first_start
        seq_len, slots_ptr = keys_of(
            request, seq_lens_ptr, req_pool_indices_ptr, req_to_token_ptr, stride_row
        )
        first_key = 0
        if HAS_WINDOW:
            first_key = first_visible(seq_len - 1, window)
        start = (first_key // BLOCK_N + run_start - tiles_start) * BLOCK_N
        first_end = tiles_start + tl.cdiv(seq_len, BLOCK_N) - first_key // BLOCK_N
        # Lengths and slots were written before this step, so they need no wait.
        slots = load_slots(slots_ptr, start, seq_len, first_key, WARPS, PAGE_SIZE)
        next_request, next_start, next_len, next_ptr, next_first = _following(
            request, start, seq_len, slots_ptr, first_key, run_start + 1 < run_end,
            seq_lens_ptr, req_pool_indices_ptr, req_to_token_ptr, stride_row, window, BLOCK_N, HAS_WINDOW,
        )  # fmt: skip
        next_slots = load_slots(next_ptr, next_start, next_len, next_first, WARPS, PAGE_SIZE)
        if USE_PDL:
            tl.extra.cuda.gdc_wait()
        k = load_keys(k_head, slots, always, STRIDE_K, WARPS)
        v = load_values(v_head, slots, always, STRIDE_V, WARPS)
        q, power = load_q(q_heads + request * stride_q, stride_q_head, GROUP, WARPS)
        zero, lowest = tl.zeros([32, WARPS], tl.float32), tl.full([32, WARPS], float("-inf"), tl.float32)
        nothing = (zero, zero, zero, zero, zero, zero, zero, zero)
        acc = nothing + nothing + nothing + nothing
        largest, total = (lowest, lowest), (zero, zero)
        for tile in range(run_start, run_end):
            has_next = tile + 1 < run_end
            is_last = start + BLOCK_N >= seq_len
            mask = where_flag(always, has_next)
            next_k = load_keys(k_head, next_slots, mask, STRIDE_K, WARPS)
            next_v = load_values(v_head, next_slots, mask, STRIDE_V, WARPS)
            third_request, third_start, third_len, third_ptr, third_first = _following(
                next_request, next_start, next_len, next_ptr, next_first, tile + 2 < run_end,
                seq_lens_ptr, req_pool_indices_ptr, req_to_token_ptr, stride_row, window, BLOCK_N, HAS_WINDOW,
            )  # fmt: skip
            third_slots = load_slots(third_ptr, third_start, third_len, third_first, WARPS, PAGE_SIZE)

            s = scores(k, q, power, start, seq_len, first_key, scale, logit_cap, HAS_CAP, WARPS)
            most0 = tl.maximum(tl.maximum(s[0], s[2]), tl.maximum(s[4], s[6]))
            most1 = tl.maximum(tl.maximum(s[1], s[3]), tl.maximum(s[5], s[7]))
            most0 = tl.maximum(largest[0], over_keys(most0, WARPS))
            most1 = tl.maximum(largest[1], over_keys(most1, WARPS))
            base0 = tl.where(most0 == float("-inf"), 0.0, most0)
            base1 = tl.where(most1 == float("-inf"), 0.0, most1)
            rescale0, rescale1 = tl.exp2(largest[0] - base0), tl.exp2(largest[1] - base1)
            weights, rescaled = (), ()
            for i in tl.static_range(4):
                weights += (tl.exp2(s[2 * i] - base0), tl.exp2(s[2 * i + 1] - base1))
            for m in tl.static_range(16):
                rescaled += (acc[2 * m] * rescale0, acc[2 * m + 1] * rescale1)
            acc = add_values(rescaled, v, weights, WARPS)
            sum0 = (weights[0] + weights[2]) + (weights[4] + weights[6])
            sum1 = (weights[1] + weights[3]) + (weights[5] + weights[7])
            total = (total[0] * rescale0 + sum0, total[1] * rescale1 + sum1)
            largest = (most0, most1)

            if is_last | (tile + 1 == run_end):
                outputs, top, sums = whole(acc, largest, total, WARPS)
                if is_last & (tiles_start >= run_start):
                    finish(
                        out_head + request * stride_out, sinks_ptr, outputs, top[:, None], sums[:, None],
                        v_scale, offs_g, offs_d, GROUP, HEAD_DIM, HAS_SINKS,
                    )  # fmt: skip
                else:
                    store_partial(
                        workspace_ptr, outputs, top, sums, head, num_kv_heads, program, num_programs,
                        tiles_start <= run_start, GROUP, HEAD_DIM, 8, HEAD_DIM,
                    )  # fmt: skip
                acc = nothing + nothing + nothing + nothing
                largest, total = (lowest, lowest), (zero, zero)
                if has_next:
                    tiles_start = tile + 1
                    q, power = load_q(q_heads + next_request * stride_q, stride_q_head, GROUP, WARPS)
            if has_next:
                request, start, seq_len, first_key = next_request, next_start, next_len, next_first
            k, v = next_k, next_v
            next_request, next_start, next_len = third_request, third_start, third_len
            next_ptr, next_first, next_slots = third_ptr, third_first, third_slots

        tiles_end = tiles_start + tl.cdiv(seq_len, BLOCK_N) - first_key // BLOCK_N
        if tiles_end > run_end:
            merge_if_last(
                out_head + request * stride_out, sinks_ptr, counters_ptr + request * num_kv_heads + head,
                workspace_ptr, head, num_kv_heads, num_programs, tiles_start, tiles_end, run_len, v_scale,
                GROUP, HEAD_DIM, HEAD_DIM, MERGED_G, HAS_SINKS,
            )  # fmt: skip
        if (first_start < run_start) & (first_end <= run_end):
            merge_if_last(
                out_head + first_request * stride_out, sinks_ptr,
                counters_ptr + first_request * num_kv_heads + head,
                workspace_ptr, head, num_kv_heads, num_programs, first_start, first_end, run_len, v_scale,
                GROUP, HEAD_DIM, HEAD_DIM, MERGED_G, HAS_SINKS,
            )  # fmt: skip


def suits_fp8_kernel(q: torch.Tensor, k_buffer: torch.Tensor) -> bool:
    """Whether `fp8_decode_attention` computes attention of q [bs, num_qo_heads, head_dim] over a pool."""
    return (
        len(q) >= MIN_REQUESTS
        and k_buffer.dtype == torch.float8_e4m3fn
        and (INTERPRETED or gpu_of(q.device).has_fp8)
        and q.dtype in (torch.bfloat16, torch.float16)
        and q.shape[2] == HEAD_DIM.value
        and q.shape[1] <= MAX_GROUP * k_buffer.shape[1]
    )


def fp8_decode_attention(
    q: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    counters: torch.Tensor,
    *,
    out: torch.Tensor,
    scale: float,
    v_scale: float = 1.0,
    page_size: int = 1,
    sliding_window: int = -1,
    logit_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute what `decode_attention` computes. `suits_fp8_kernel` must hold."""
    batch_size, num_qo_heads, head_dim = q.shape
    num_kv_heads = k_buffer.shape[1]
    group = num_qo_heads // num_kv_heads
    assert q.stride(2) == k_buffer.stride(2) == v_buffer.stride(2) == req_to_token.stride(1) == 1
    assert counters.numel() >= batch_size * num_kv_heads
    if batch_size == 0:
        return out
    k_words, v_words = (buffer.view(torch.uint8).view(torch.int32) for buffer in (k_buffer, v_buffer))
    max_tiles = batch_size * triton.cdiv(req_to_token.shape[1], TILE.value * WARPS)
    num_programs = num_split_ctas(q.device, num_kv_heads, CTAS_PER_SM, max_tiles)
    launched = _fp8_decode_kernel[(num_kv_heads, num_programs)](
        q, k_words, v_words, out, q if sinks is None else sinks,
        req_to_token, req_pool_indices, seq_lens,
        split_workspace(q.device, num_programs, num_kv_heads, group, head_dim), counters,
        batch_size, scale, v_scale, logit_cap, sliding_window,
        q.stride(0), q.stride(1), k_words.stride(1), v_words.stride(1), req_to_token.stride(0),
        STRIDE_K=k_words.stride(0), STRIDE_V=v_words.stride(0),
        GROUP=group, MERGED_G=triton.next_power_of_2(group), PAGE_SIZE=page_size,
        BLOCK_BS=1 if batch_size == 1 else batch_block(batch_size), WARPS=WARPS,
        HAS_WINDOW=sliding_window != -1, HAS_CAP=logit_cap > 0, HAS_SINKS=sinks is not None,
        num_warps=4 if INTERPRETED else WARPS, **pdl_options(q),
    )  # fmt: skip
    prefer_l1(launched, CTAS_PER_SM)
    return out
