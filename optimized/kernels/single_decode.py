"""Decode attention of a single request: its first keys are on their way while the kernel ahead still runs.

Floor: latency. A thousand keys are a microsecond of bytes; what takes time is one read after the other
(length, slot, key), then the softmax, and the merge of what the programs found.

Shape: as in decode_attention.py a program takes a KV head and a run of keys. Of the keys only the newest is
of this step, so a program reads its first ones into registers before it waits for the kernel ahead, and then
nothing but q and the newest key. Up to 64 keys a program there is no loop at all; beyond, it goes on in tiles
of 128, read ahead as in decode_attention.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from optimized.kernels.paged_softmax import accumulate, scores_of, slots_at
from optimized.kernels.portable import pdl_options
from optimized.kernels.split_keys import (
    finish,
    leave_part,
    merge_if_last,
    num_split_programs,
    split_sizes,
    split_workspace,
)

FIRST_BYTES = 16384
"""Of the keys that a program reads before it waits: 64 of 128 elements in bfloat16."""


@triton.jit
def _single_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, sinks_ptr,
    req_to_token_ptr, req_pool_indices_ptr, seq_lens_ptr, workspace_ptr, counters_ptr,
    scale, logit_cap,
    stride_q_head, stride_k, stride_k_head, stride_v, stride_v_head, stride_row,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, FIRST_N: tl.constexpr, BLOCK_N: tl.constexpr,
    MERGED_G: tl.constexpr,
    HAS_CAP: tl.constexpr, HAS_SINKS: tl.constexpr, PRECISION: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    head, program = tl.program_id(0), tl.program_id(1)
    num_kv_heads, num_programs = tl.num_programs(0), tl.num_programs(1)
    if USE_PDL:
        # The kernel behind this one may read its weights meanwhile.
        tl.extra.cuda.gdc_launch_dependents()
    seq_len = tl.load(seq_lens_ptr).to(tl.int32)
    num_tiles = tl.cdiv(seq_len, FIRST_N)
    run_len = tl.cdiv(num_tiles, num_programs)
    run_start = program * run_len
    run_end = tl.minimum(run_start + run_len, num_tiles)
    if run_start < run_end:
        offs_g, offs_d, offs_n = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
        end = tl.minimum(run_end * FIRST_N, seq_len)
        in_dim = (offs_d < HEAD_DIM)[None, :]
        newest = seq_len - 1
        slots_ptr = req_to_token_ptr + tl.load(req_pool_indices_ptr) * stride_row
        k_head, v_head = k_ptr + head * stride_k_head, v_ptr + head * stride_v_head
        # --8<-- [start:read-then-wait]
        first = run_start * FIRST_N + tl.arange(0, FIRST_N)
        first_slots = slots_at(slots_ptr, tl.minimum(first, newest), PAGE_SIZE)
        first_k = k_head + first_slots[:, None] * stride_k + offs_d[None, :]
        first_v = v_head + first_slots[:, None] * stride_v + offs_d[None, :]
        is_old = (first < newest)[:, None] & in_dim
        old_k = tl.load(first_k, mask=is_old, other=0.0)
        old_v = tl.load(first_v, mask=is_old, other=0.0)
        if USE_PDL:
            tl.extra.cuda.gdc_wait()
        is_new = (first == newest)[:, None] & in_dim
        # .cg: not from a line of the first-level cache that was read before the wait.
        new_k = tl.load(first_k, mask=is_new, other=0.0, cache_modifier=".cg")
        new_v = tl.load(first_v, mask=is_new, other=0.0, cache_modifier=".cg")
        # --8<-- [end:read-then-wait]
        q_tile = q_ptr + (head * GROUP + offs_g)[:, None] * stride_q_head + offs_d[None, :]
        q = tl.load(q_tile, mask=(offs_g < GROUP)[:, None] & in_dim, other=0.0)
        both_k, both_v = tl.where(is_new, new_k, old_k), tl.where(is_new, new_v, old_v)
        first_scores = scores_of(q, both_k.to(q.dtype), scale, logit_cap, HAS_CAP, PRECISION)
        first_scores = tl.where((first < seq_len)[None, :], first_scores, float("-inf"))
        acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
        largest = tl.full([BLOCK_G], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_G], tl.float32)
        acc, largest, total = accumulate(acc, largest, total, first_scores, both_v.to(q.dtype), PRECISION)
        for start in range((run_start + 1) * FIRST_N, end, BLOCK_N):
            positions = start + offs_n
            # Beyond the end, the key at the end is read again: it is live, and its score is masked.
            slots = slots_at(slots_ptr, tl.minimum(positions, end - 1), PAGE_SIZE)
            k_tile = k_head + slots[:, None] * stride_k + offs_d[None, :]
            k = tl.load(k_tile, mask=in_dim, other=0.0).to(q.dtype)
            scores = scores_of(q, k, scale, logit_cap, HAS_CAP, PRECISION)
            scores = tl.where((positions < end)[None, :], scores, float("-inf"))
            v_tile = v_head + slots[:, None] * stride_v + offs_d[None, :]
            v = tl.load(v_tile, mask=in_dim, other=0.0).to(q.dtype)
            acc, largest, total = accumulate(acc, largest, total, scores, v, PRECISION)
        out_head, sinks_ptr = out_ptr + head * GROUP * HEAD_DIM, sinks_ptr + head * GROUP
        if run_len == num_tiles:
            finish(
                out_head, sinks_ptr, acc, largest[:, None], total[:, None], offs_g, offs_d,
                GROUP, HEAD_DIM, HAS_SINKS,
            )  # fmt: skip
        else:
            leave_part(
                workspace_ptr, acc, largest, total, head, num_kv_heads, program, num_programs,
                run_start >= 0, GROUP, HEAD_DIM, BLOCK_G, BLOCK_D,
            )  # fmt: skip
            merge_if_last(
                out_head, sinks_ptr, counters_ptr + head, workspace_ptr, head, num_kv_heads, num_programs,
                0, num_tiles, run_len, GROUP, HEAD_DIM, BLOCK_D, MERGED_G, HAS_SINKS,
            )  # fmt: skip


def single_decode(
    q: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    output: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    counters: torch.Tensor,
    *,
    scale: float,
    page_size: int,
    logit_cap: float,
    sinks: torch.Tensor | None,
) -> None:
    """Of decode_attention, a batch of one without a window. All keys but the newest, too, are read before the
    launch ahead has ended."""
    num_qo_heads, head_dim = q.shape[1:]
    num_kv_heads = k_buffer.shape[1]
    sizes = split_sizes(num_qo_heads // num_kv_heads, head_dim)
    first_n = max(16, FIRST_BYTES // (sizes["BLOCK_D"] * k_buffer.element_size()))
    max_tiles = triton.cdiv(req_to_token.shape[1], first_n)
    num_programs = num_split_programs(q.device, num_kv_heads, 1, max_tiles)
    _single_kernel[(num_kv_heads, num_programs)](
        q, k_buffer, v_buffer, output, q if sinks is None else sinks,
        req_to_token, req_pool_indices, seq_lens,
        split_workspace(q.device, num_programs, num_kv_heads, sizes["GROUP"], head_dim), counters,
        scale, logit_cap, q.stride(1), k_buffer.stride(0), k_buffer.stride(1),
        v_buffer.stride(0), v_buffer.stride(1), req_to_token.stride(0),
        **sizes, PAGE_SIZE=page_size, FIRST_N=first_n, BLOCK_N=2 * first_n,
        HAS_CAP=logit_cap > 0, HAS_SINKS=sinks is not None,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=8, num_stages=5, **pdl_options(q),
    )  # fmt: skip
