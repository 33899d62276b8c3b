"""Absorbed latent attention of several new tokens per request: short prompts, drafts, mixed steps in graphs.

Roofline bound: 2 * (row_size + kv_lora_rank) operations for each (query head, visible key), at the tensor
cores' rate: 3.4 times what the expanded form needs, which in turn has to expand the keys.

Shape: as extend_attention, with all query heads on one KV head: the rows of a tile are (token, head) pairs,
tokens first. A tile of rows of the pool is loaded once for scores and values. The grid is an upper bound from
the shapes alone, and lengths come from the tensors, so a CUDA graph can hold the launch. Loses for a few
drafts behind a long prefix: their keys are not split among CTAs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from diptych.optimized.kernels.attention.fp8 import kernel_view
from diptych.optimized.kernels.attention.mla_decode import (
    latent_scores,
    load_query,
    load_rows,
    padded_row_bytes,
    tile_of,
)
from diptych.optimized.kernels.attention.paged_softmax import accumulate, slots_at
from diptych.optimized.kernels.portable import INTERPRETED, gpu_of, prompts_block, rounded


@triton.jit(do_not_specialize=["batch_size", "tail"])
def _mla_extend_kernel(
    q_ptr, rows_ptr, out_ptr, mask_ptr,
    req_to_token_ptr, req_pool_indices_ptr, seq_lens_ptr, extend_seq_lens_ptr, extend_start_loc_ptr,
    batch_size, tail, scale, v_scale, stride_q, stride_q_head, stride_slots,
    NUM_HEADS: tl.constexpr, STRIDE: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr,
    PAGE_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_BS: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    offs_b = tl.arange(0, BLOCK_BS)
    in_batch = offs_b < batch_size
    extend_lens = tl.load(extend_seq_lens_ptr + offs_b, mask=in_batch, other=0)
    num_tiles = tl.cdiv(extend_lens.to(tl.int32) * NUM_HEADS, BLOCK_M)
    ends = tl.cumsum(num_tiles, 0)
    request = tl.sum((ends <= program).to(tl.int32), 0)
    if request >= batch_size:
        return
    tile = tl.sum(tl.where(offs_b <= request, num_tiles, 0), 0) - 1 - program
    num_queries = tl.load(extend_seq_lens_ptr + request).to(tl.int32)
    seq_len = tl.load(seq_lens_ptr + request).to(tl.int32)
    prefix_len = seq_len - num_queries
    slots_ptr = req_to_token_ptr + tl.load(req_pool_indices_ptr + request) * stride_slots

    pairs = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    tokens, heads = pairs // NUM_HEADS, pairs % NUM_HEADS
    live = tokens < num_queries
    offs_n, offs_c, offs_r = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_R)
    q_rows = (tl.load(extend_start_loc_ptr + request) + tokens).to(tl.int64)
    q_pairs = q_ptr + q_rows[:, None] * stride_q + heads[:, None] * stride_q_head
    q_c, q_r = load_query(q_pairs, live[:, None], offs_c, offs_r, RANK, ROPE)
    dtype: tl.constexpr = q_ptr.dtype.element_ty

    query_positions = prefix_len + tokens
    key_end = prefix_len + tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // NUM_HEADS, num_queries - 1) + 1
    if MASK == "flat":
        key_end = seq_len
        sizes = extend_lens * tl.load(seq_lens_ptr + offs_b, mask=in_batch, other=0)
        mask_ptr += tl.sum(tl.where(offs_b < request, sizes, 0), 0)
    if MASK == "tree":
        key_end = seq_len
    acc = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    for start in range(0, key_end, BLOCK_N):
        positions = start + offs_n
        # Beyond the end the last row is read again, which is live; its score is masked.
        slots = slots_at(slots_ptr, tl.minimum(positions, key_end - 1), PAGE_SIZE)
        c, k_r = load_rows(rows_ptr, slots, offs_c, offs_r, dtype, STRIDE, RANK, ROPE)
        scores = latent_scores(q_c, q_r, c, k_r, scale, PRECISION)
        in_keys = live[:, None] & (positions < key_end)[None, :]
        if MASK == "flat":
            entries = (tokens * seq_len)[:, None] + positions[None, :]
            sees = tl.load(mask_ptr + entries, mask=in_keys, other=0) != 0
        elif MASK == "tree":
            columns = positions - (seq_len - tail)
            entries = (q_rows * tail)[:, None] + columns[None, :]
            sees = tl.load(mask_ptr + entries, mask=in_keys & (columns >= 0)[None, :], other=0) != 0
            sees = sees | (in_keys & (columns < 0)[None, :])
        else:
            sees = positions[None, :] <= query_positions[:, None]
        scores = tl.where(sees, scores, float("-inf"))
        acc, largest, total = accumulate(acc, largest, total, scores, c, PRECISION)
    total = tl.where(total == 0.0, 1.0, total)  # a row without visible keys gives zeros
    out_pairs = out_ptr + (q_rows * NUM_HEADS + heads)[:, None] * RANK + offs_c[None, :]
    mask = live[:, None] & (offs_c < RANK)[None, :]
    tl.store(out_pairs, rounded(acc / total[:, None] * v_scale, out_ptr.dtype.element_ty), mask=mask)


def mla_extend(
    q: torch.Tensor,
    rows: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    extend_start_loc: torch.Tensor,
    *,
    kv_lora_rank: int,
    scale: float,
    page_size: int = 1,
    kv_scale: float = 1.0,
    custom_mask: torch.Tensor | None = None,
    tree_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """q [num_tokens, num_qo_heads, row_size], absorbed, of the last extend_seq_lens tokens of each request ->
    weighted sums of c, [num_tokens, num_qo_heads, kv_lora_rank]. Output rows that are not of a request are
    not written. Masks as in ForwardBatch."""
    num_tokens, num_qo_heads, row_size = q.shape
    batch_size = seq_lens.shape[0]
    out = q.new_zeros(num_tokens, num_qo_heads, kv_lora_rank)
    if num_tokens == 0:
        return out
    assert q.stride(2) == rows.stride(2) == req_to_token.stride(1) == 1
    rope = row_size - kv_lora_rank
    block_c, block_r = (max(16, triton.next_power_of_2(size)) for size in (kv_lora_rank, rope))
    row_bytes = padded_row_bytes(kv_lora_rank, rope, q.element_size())
    gpu = gpu_of(q.device)
    pairs = max(16, triton.next_power_of_2(triton.cdiv(num_tokens * num_qo_heads, batch_size)))
    block_m = min(pairs, 64 if gpu.has_large_shared_memory and row_bytes <= 1152 + 128 else 16)
    if INTERPRETED:  # the interpreter's time depends on CTAs, not on rows
        block_m = min(pairs, 64)
    tile = tile_of(row_bytes, block_m, gpu)
    max_tiles = triton.cdiv(num_tokens * num_qo_heads, block_m) + min(batch_size, num_tokens) - 1
    mask, kind, tail = q, "causal", 0
    if custom_mask is not None:
        mask, kind = custom_mask.view(torch.uint8), "flat"
    elif tree_mask is not None:
        mask, kind, tail = tree_mask.contiguous().view(torch.uint8), "tree", tree_mask.shape[2]
    _mla_extend_kernel[(max_tiles,)](
        q, kernel_view(rows), out, mask,
        req_to_token, req_pool_indices, seq_lens, extend_seq_lens, extend_start_loc,
        batch_size, tail, scale * kv_scale, kv_scale, q.stride(0), q.stride(1), req_to_token.stride(0),
        NUM_HEADS=num_qo_heads, STRIDE=rows.stride(0), RANK=kv_lora_rank, ROPE=rope, PAGE_SIZE=page_size,
        BLOCK_M=block_m, BLOCK_C=block_c, BLOCK_R=block_r, BLOCK_N=min(tile.block_n, 32),
        BLOCK_BS=prompts_block(batch_size), MASK=kind,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=8, num_stages=tile.num_stages,
    )  # fmt: skip
    return out
