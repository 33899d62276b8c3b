"""Around absorbed latent attention for a few tokens: q times W_k before it, and after it the merge of the
split keys with W_v. Two launches.

Roofline bound: the bytes of W_k, and of W_v: heads * 128 * 512 * 2 each (V2-Lite: 2 MB, half a microsecond at
4.3 TB/s). So the bound is a launch.

Shape: a CTA has some columns of one head's matrix in registers. They are loaded before it waits for the
previous kernel (programmatic dependent launch), and serve all tokens. Merging in the attention kernel is one
CTA's work for all heads of a request: half a megabyte for 1,024 keys. Here each head's CTAs read their part.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from diptych.optimized.kernels.portable import INTERPRETED, pdl_options, rounded, where_flag

MAX_TOKENS = 4
PARTS = tl.constexpr(8)
"""The number of parts that are loaded at a time."""


@triton.jit
def _absorb_kernel(
    q_ptr, w_ptr, out_ptr, stride_q, stride_q_head, stride_w,
    NUM_TOKENS: tl.constexpr, NUM_HEADS: tl.constexpr, NOPE: tl.constexpr, RANK: tl.constexpr,
    ROPE: tl.constexpr, BLOCK_NOPE: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    head, block = tl.program_id(0), tl.program_id(1)
    offs_n, offs_c = tl.arange(0, BLOCK_NOPE), block * BLOCK_C + tl.arange(0, BLOCK_C)
    in_w = (offs_n < NOPE)[:, None] & (offs_c < RANK)[None, :]
    w = tl.load(w_ptr + head * stride_w + offs_n[:, None] * RANK + offs_c[None, :], mask=in_w, other=0.0)
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    for token in tl.static_range(NUM_TOKENS):
        q_head = q_ptr + token * stride_q + head * stride_q_head
        out_head = out_ptr + (token * NUM_HEADS + head) * (RANK + ROPE)
        q = tl.load(q_head + offs_n, mask=offs_n < NOPE, other=0.0).to(tl.float32)
        latent = tl.sum(w.to(tl.float32) * q[:, None], 0)
        tl.store(out_head + offs_c, rounded(latent, out_ptr.dtype.element_ty), mask=offs_c < RANK)
        if block == 0:
            offs_r = tl.arange(0, BLOCK_R)
            rope = tl.load(q_head + NOPE + offs_r, mask=offs_r < ROPE, other=0.0)
            tl.store(out_head + RANK + offs_r, rope, mask=offs_r < ROPE)


@triton.jit
def _merge_project_kernel(
    workspace_ptr, sums_ptr, seq_lens_ptr, w_ptr, out_ptr,
    batch_size, num_programs, v_scale, stride_out, stride_w,
    NUM_GROUPS: tl.constexpr, GROUP: tl.constexpr, RANK: tl.constexpr, V_DIM: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_BS: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    """What `mla_decode`'s kernel left: the sums of requests that one CTA computed, and the workspace with the
    parts of the others."""
    head, request = tl.program_id(0), tl.program_id(1)
    offs_c, offs_v = tl.arange(0, BLOCK_C), tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    in_w = (offs_v < V_DIM)[:, None] & (offs_c < RANK)[None, :]
    w = tl.load(w_ptr + head * stride_w + offs_v[:, None] * RANK + offs_c[None, :], mask=in_w, other=0.0)
    requests = tl.arange(0, BLOCK_BS)
    seq_lens = tl.load(seq_lens_ptr + requests, mask=requests < batch_size, other=0).to(tl.int32)
    num_tiles = tl.cdiv(seq_lens, BLOCK_N)
    run_len = tl.cdiv(tl.sum(num_tiles, 0), num_programs)
    tiles_start = tl.sum(tl.where(requests < request, num_tiles, 0), 0)
    tiles_end = tiles_start + tl.sum(tl.where(requests == request, num_tiles, 0), 0)
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if tiles_start == tiles_end:
        return
    first_program, last_program = tiles_start // run_len, (tiles_end - 1) // run_len
    first_part = 2 * first_program + (tiles_start != first_program * run_len).to(tl.int32)
    num_rows = 2 * num_programs * NUM_GROUPS * GROUP
    state_ptr = workspace_ptr + num_rows * RANK
    acc = tl.zeros([BLOCK_C], tl.float32)
    largest, total = tl.full([], float("-inf"), tl.float32), tl.full([], 0.0, tl.float32)
    if first_program == last_program:
        row = request * NUM_GROUPS * GROUP + head
        acc = tl.load(sums_ptr + row * RANK + offs_c, mask=offs_c < RANK, other=0.0).to(tl.float32)
        total += v_scale  # which the sums have
        last_program = -1  # nothing to merge
    for start in range(first_program, last_program + 1, PARTS):
        for i in tl.static_range(PARTS):
            program = start + i
            is_part = program <= last_program
            part = tl.where(program == first_program, first_part, 2 * program)
            row = part * NUM_GROUPS * GROUP + head
            mask = where_flag(offs_c < RANK, is_part)
            values = tl.load(workspace_ptr + row.to(tl.int64) * RANK + offs_c, mask=mask, other=0.0)
            maximum = tl.load(state_ptr + row, mask=is_part, other=float("-inf"))
            weight = tl.load(state_ptr + num_rows + row, mask=is_part, other=0.0)
            new_largest = tl.maximum(largest, maximum)
            rescale, factor = tl.exp2(largest - new_largest), tl.exp2(maximum - new_largest)
            total = total * rescale + weight * factor
            acc = acc * rescale + values * factor
            largest = new_largest
    latent = rounded(acc / total * v_scale, out_ptr.dtype.element_ty).to(tl.float32)
    y = tl.sum(w.to(tl.float32) * latent[None, :], 1)
    out_head = out_ptr + request * stride_out + head * V_DIM
    tl.store(out_head + offs_v, rounded(y, out_ptr.dtype.element_ty), mask=offs_v < V_DIM)


def absorb_few(q: torch.Tensor, w_k: torch.Tensor, rope_dim: int) -> torch.Tensor:
    """q [num_tokens <= MAX_TOKENS, heads, nope + rope], w_k [heads, nope, rank] -> [num_tokens, heads, rank +
    rope]: q times w_k, and the rotated part."""
    num_tokens, num_heads, _ = q.shape
    nope, rank = w_k.shape[1:]
    out = q.new_empty(num_tokens, num_heads, rank + rope_dim)
    block_c = triton.next_power_of_2(rank) if INTERPRETED else 64
    _absorb_kernel[(num_heads, triton.cdiv(rank, block_c))](
        q, w_k, out, q.stride(0), q.stride(1), w_k.stride(0),
        NUM_TOKENS=num_tokens, NUM_HEADS=num_heads, NOPE=nope, RANK=rank, ROPE=rope_dim,
        BLOCK_NOPE=triton.next_power_of_2(nope), BLOCK_C=block_c, BLOCK_R=triton.next_power_of_2(rope_dim),
        num_warps=4, **pdl_options(q),
    )  # fmt: skip
    return out


def merge_and_project(
    workspace: torch.Tensor,
    sums: torch.Tensor,
    seq_lens: torch.Tensor,
    w_v: torch.Tensor,
    out: torch.Tensor,
    *,
    num_programs: int,
    group: int,
    block_n: int,
    kv_scale: float = 1.0,
) -> None:
    """out [batch_size <= MAX_TOKENS, heads, v_head_dim], written; w_v [heads, v_head_dim, rank]. A request of
    seq_len 0 keeps its output."""
    batch_size, num_heads, v_dim = out.shape
    rank = w_v.shape[2]
    assert out.stride(1) == v_dim
    block_v = triton.next_power_of_2(v_dim) if INTERPRETED else 16
    _merge_project_kernel[(num_heads, batch_size, triton.cdiv(v_dim, block_v))](
        workspace, sums, seq_lens, w_v, out, batch_size, num_programs, kv_scale, out.stride(0), w_v.stride(0),
        NUM_GROUPS=num_heads // group, GROUP=group, RANK=rank, V_DIM=v_dim,
        BLOCK_C=triton.next_power_of_2(rank), BLOCK_V=block_v, BLOCK_N=block_n, BLOCK_BS=MAX_TOKENS,
        num_warps=4, **pdl_options(out),
    )  # fmt: skip
