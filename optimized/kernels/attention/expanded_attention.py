"""Attention over keys and values that were expanded from latent rows, in parts whose results are merged.

Roofline bound: 2 * (head_dim + v_head_dim) operations for each (token, head, visible key), at the tensor
cores' rate.

Shape: flash attention. A CTA holds BLOCK_M tokens of one head and loops over the keys of its request. Keys
lie densely, request after request. A launch may begin with the state of an earlier one, that of other keys of
the same tokens: its output and the log2 of its sum (lse). So a long prefix is attended to in chunks, expanded
one after the other, and merging costs nothing beside the loads. A chunk that has no key of a request leaves
the state as it is; without a state that is an output of zeros and an lse of -inf.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from diptych.optimized.kernels.attention.paged_softmax import accumulate, capped, dot
from diptych.optimized.kernels.portable import INTERPRETED, gpu_of, prompts_block, rounded


@triton.jit(do_not_specialize=["batch_size"])
def _expanded_kernel(
    q_ptr, kv_ptr, rows_ptr, out_ptr, state_ptr, lse_ptr, qo_indptr_ptr, kv_indptr_ptr, batch_size, scale,
    stride_q, stride_q_head, stride_kv, stride_row, stride_out,
    NUM_HEADS: tl.constexpr, NOPE: tl.constexpr, ROPE: tl.constexpr, V_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_BS: tl.constexpr, IS_CAUSAL: tl.constexpr, HAS_STATE: tl.constexpr,
    IS_LAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    head, program = tl.program_id(0), tl.program_id(1)
    offs_b = tl.arange(0, BLOCK_BS)
    in_batch = offs_b < batch_size
    starts = tl.load(qo_indptr_ptr + offs_b, mask=in_batch, other=0)
    lens = tl.load(qo_indptr_ptr + offs_b + 1, mask=in_batch, other=0) - starts
    num_tiles = tl.cdiv(lens.to(tl.int32), BLOCK_M)
    ends = tl.cumsum(num_tiles, 0)
    request = tl.sum((ends <= program).to(tl.int32), 0)
    if request >= batch_size:
        return
    tile = tl.sum(tl.where(offs_b <= request, num_tiles, 0), 0) - 1 - program
    q_start = tl.load(qo_indptr_ptr + request)
    num_queries = (tl.load(qo_indptr_ptr + request + 1) - q_start).to(tl.int32)
    kv_start = tl.load(kv_indptr_ptr + request)
    num_keys = (tl.load(kv_indptr_ptr + request + 1) - kv_start).to(tl.int32)

    tokens = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    live = tokens < num_queries
    q_rows = (q_start + tokens).to(tl.int64)
    offs_n, offs_k = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    offs_r, offs_v = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_V)
    q_tile = q_ptr + q_rows[:, None] * stride_q + head * stride_q_head
    q_n = tl.load(q_tile + offs_k[None, :], mask=live[:, None] & (offs_k < NOPE)[None, :], other=0.0)
    q_r = tl.load(q_tile + NOPE + offs_r[None, :], mask=live[:, None] & (offs_r < ROPE)[None, :], other=0.0)
    mask_out = live[:, None] & (offs_v < V_DIM)[None, :]
    state_tile = state_ptr + (q_rows * NUM_HEADS + head)[:, None] * V_DIM + offs_v[None, :]
    lse_rows = lse_ptr + q_rows * NUM_HEADS + head
    if HAS_STATE:
        acc = tl.load(state_tile, mask=mask_out, other=0.0)
        largest = tl.load(lse_rows, mask=live, other=float("-inf"))
        total = tl.where(largest == float("-inf"), 0.0, 1.0)
    else:
        acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
        largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
    key_end = num_keys
    if IS_CAUSAL:  # the keys end with the tokens themselves
        key_end = tl.minimum(num_keys, num_keys - num_queries + tile * BLOCK_M + BLOCK_M)
    kv_head = kv_ptr + head * (NOPE + V_DIM)
    for start in range(0, key_end, BLOCK_N):
        positions = start + offs_n
        in_keys = positions < key_end
        keys = (kv_start + positions).to(tl.int64)[:, None]
        k_mask, r_mask = (
            in_keys[:, None] & (offs_k < NOPE)[None, :],
            in_keys[:, None] & (offs_r < ROPE)[None, :],
        )
        k_n = tl.load(kv_head + keys * stride_kv + offs_k[None, :], mask=k_mask, other=0.0)
        k_r = tl.load(rows_ptr + keys * stride_row + offs_r[None, :], mask=r_mask, other=0.0)
        products = dot(q_n, tl.trans(k_n), PRECISION) + dot(q_r, tl.trans(k_r), PRECISION)
        scores = capped(products, scale, 0.0, False)
        sees = in_keys[None, :]
        if IS_CAUSAL:
            sees = sees & (positions[None, :] <= (num_keys - num_queries + tokens)[:, None])
        scores = tl.where(sees, scores, float("-inf"))
        v_mask = in_keys[:, None] & (offs_v < V_DIM)[None, :]
        v = tl.load(kv_head + NOPE + keys * stride_kv + offs_v[None, :], mask=v_mask, other=0.0)
        acc, largest, total = accumulate(acc, largest, total, scores, v, PRECISION)
    output = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    if IS_LAST:
        out_tile = out_ptr + q_rows[:, None] * stride_out + head * V_DIM + offs_v[None, :]
        tl.store(out_tile, rounded(output, out_ptr.dtype.element_ty), mask=mask_out)
    else:
        tl.store(state_tile, output, mask=mask_out)
        tl.store(lse_rows, tl.where(total == 0.0, float("-inf"), largest + tl.log2(total)), mask=live)


class AttentionState:
    """Outputs and lse of the parts so far, of tokens over some of their keys."""

    def __init__(self, num_tokens: int, num_heads: int, v_head_dim: int, device: torch.device) -> None:
        self.output = torch.empty(num_tokens, num_heads, v_head_dim, device=device)
        self.lse = torch.empty(num_tokens, num_heads, device=device)  # log2 of the sum of 2 ** score
        self.is_empty = True


def expanded_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    k_rope: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    *,
    scale: float,
    v_head_dim: int,
    state: AttentionState | None = None,
    is_causal: bool,
    out: torch.Tensor | None = None,
) -> None:
    """q [num_tokens, num_heads, head_dim]; kv [num_keys, num_heads * (nope + v_head_dim)], the result of
    kv_b_proj; k_rope [num_keys, rope], the last numbers of rows. Request i has the tokens qo_indptr[i] to
    qo_indptr[i + 1] and the keys kv_indptr[i] to kv_indptr[i + 1], both int64. Causal: its last keys are the
    tokens themselves. Without `out` the result goes to `state`; with it, what `state` holds is merged in, and
    the result is written there, [num_tokens, num_heads, v_head_dim]."""
    num_tokens, num_heads, head_dim = q.shape
    batch_size, rope = qo_indptr.shape[0] - 1, k_rope.shape[1]
    nope = head_dim - rope
    assert q.stride(2) == kv.stride(1) == k_rope.stride(1) == 1
    assert kv.shape[1] == num_heads * (nope + v_head_dim)
    assert out is not None or state is not None
    if num_tokens == 0:
        return
    blocks = [max(16, triton.next_power_of_2(size)) for size in (nope, rope, v_head_dim)]
    is_float32, gpu = q.dtype == torch.float32, gpu_of(q.device)
    if INTERPRETED:  # the interpreter's time depends on CTAs, not on rows
        block_m, block_n, num_warps, num_stages = 64, 64, 4, 1
    elif is_float32:
        block_m, block_n, num_warps, num_stages = 32, 32, 8, 2
    elif gpu.has_large_shared_memory:
        block_m, block_n, num_warps, num_stages = 128, 64, 8, 3
    else:
        block_m, block_n, num_warps, num_stages = 64, 32, 4, 3
    per_request = triton.next_power_of_2(triton.cdiv(num_tokens, batch_size))
    block_m = min(block_m, max(16, per_request))
    max_tiles = triton.cdiv(num_tokens, block_m) + min(batch_size, num_tokens) - 1
    has_state = state is not None and not state.is_empty
    any_float = q if state is None else state.output
    _expanded_kernel[(num_heads, max_tiles)](
        q, kv, k_rope, q if out is None else out, any_float, q if state is None else state.lse,
        qo_indptr, kv_indptr, batch_size, scale,
        q.stride(0), q.stride(1), kv.stride(0), k_rope.stride(0), 0 if out is None else out.stride(0),
        NUM_HEADS=num_heads, NOPE=nope, ROPE=rope, V_DIM=v_head_dim,
        BLOCK_M=block_m, BLOCK_K=blocks[0], BLOCK_R=blocks[1], BLOCK_V=blocks[2], BLOCK_N=block_n,
        BLOCK_BS=prompts_block(batch_size), IS_CAUSAL=is_causal, HAS_STATE=has_state,
        IS_LAST=out is not None, PRECISION="ieee" if is_float32 else "tf32",
        num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip
    if state is not None:
        state.is_empty = False
