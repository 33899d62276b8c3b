"""The operations between the GEMMs of latent attention in one launch: the norm of the latent vector, the
rotation of k_r and of the last part of each head of q, and the write of the row to its slot of the pool.

Roofline bound: bytes over the memory's bandwidth: the GEMM's latent part read and the row written once, the
rotated parts of q read and written once. For few tokens the bound is one launch. Separately, these are a
norm, two rotations, two sums of parts and a store.

Shape: the grid is [tokens, 1 + groups of heads]: the first CTA of a token makes the row, the others rotate q,
in place: each thread writes the numbers that it has read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from diptych.optimized.kernels.attention.fp8 import kernel_view, to_pool
from diptych.optimized.kernels.portable import pdl_options

HEADS = 16
"""Of a CTA."""


@triton.jit
def _rotate_pairs(x_pairs, out_pairs, cos, sin, mask, scale, GAP: tl.constexpr):
    """x_pairs, out_pairs: where the first of each pair is; the second is GAP further on."""
    dtype: tl.constexpr = x_pairs.dtype.element_ty
    out_dtype: tl.constexpr = out_pairs.dtype.element_ty
    a = tl.load(x_pairs, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(x_pairs + GAP, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_pairs, to_pool((a * cos - b * sin).to(dtype), scale, out_dtype), mask=mask)
    tl.store(out_pairs + GAP, to_pool((b * cos + a * sin).to(dtype), scale, out_dtype), mask=mask)


@triton.jit
def _mla_rope_store_kernel(
    q_ptr, kv_ptr, weight_ptr, rows_ptr, positions_ptr, out_cache_loc_ptr, cos_sin_ptr,
    last_position, eps, kv_scale, stride_q, stride_q_head, stride_kv, stride_row,
    NUM_HEADS: tl.constexpr, NOPE: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr,
    HEADS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_HALF: tl.constexpr, IS_INTERLEAVED: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    HALF: tl.constexpr = ROPE // 2
    STEP: tl.constexpr = 2 if IS_INTERLEAVED else 1
    GAP: tl.constexpr = 1 if IS_INTERLEAVED else HALF
    offs = tl.arange(0, BLOCK_HALF)
    # Draft tokens may lie beyond the context's end. They are dropped, so their angle does not matter.
    position = tl.minimum(tl.load(positions_ptr + token), last_position)
    cos = tl.load(cos_sin_ptr + position * ROPE + offs, mask=offs < HALF, other=0.0)
    sin = tl.load(cos_sin_ptr + position * ROPE + HALF + offs, mask=offs < HALF, other=0.0)
    if group == 0:
        dtype: tl.constexpr = kv_ptr.dtype.element_ty
        row = rows_ptr + tl.load(out_cache_loc_ptr + token).to(tl.int64) * stride_row
        kv = kv_ptr + token * stride_kv
        offs_c = tl.arange(0, BLOCK_C)
        in_c = offs_c < RANK
        c = tl.load(kv + offs_c, mask=in_c, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + offs_c, mask=in_c, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(c * c, 0) / RANK + eps)
        # Rounded after each multiplication, as RMSNorm does.
        normed = ((c * scale).to(dtype).to(tl.float32) * weight).to(dtype)
        tl.store(row + offs_c, to_pool(normed, kv_scale, rows_ptr.dtype.element_ty), mask=in_c)
        columns = RANK + offs * STEP
        _rotate_pairs(kv + columns, row + columns, cos, sin, offs < HALF, kv_scale, GAP)
    else:
        heads = (group - 1) * HEADS + tl.arange(0, HEADS)
        q_pairs = q_ptr + token * stride_q + heads[:, None] * stride_q_head + NOPE + offs[None, :] * STEP
        in_heads = (heads < NUM_HEADS)[:, None] & (offs < HALF)[None, :]
        _rotate_pairs(q_pairs, q_pairs, cos[None, :], sin[None, :], in_heads, 1.0, GAP)


def mla_rope_store(
    q: torch.Tensor,
    kv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    rows: torch.Tensor,
    out_cache_loc: torch.Tensor,
    is_interleaved: bool,
    kv_scale: float = 1.0,
) -> None:
    """q [n, num_heads, nope + rope], whose last rope numbers of each head are rotated in place; kv [n, rank +
    rope], the result of kv_a_proj; positions and out_cache_loc [n]; cos_sin float32 [positions, rope]
    (cosines, then sines); weight [rank] of the norm; rows [slots, 1, rank + rope] of any type, whose slots
    out_cache_loc are written."""
    num_tokens, num_heads, head_dim = q.shape
    rank, rope = weight.shape[0], cos_sin.shape[1]
    assert kv.shape[1] == rows.shape[2] == rank + rope
    assert q.stride(2) == kv.stride(1) == rows.stride(2) == 1
    if num_tokens == 0:
        return
    heads = min(HEADS, triton.next_power_of_2(num_heads))
    _mla_rope_store_kernel[(num_tokens, 1 + triton.cdiv(num_heads, heads))](
        q, kv, weight, kernel_view(rows), positions, out_cache_loc, cos_sin,
        cos_sin.shape[0] - 1, eps, kv_scale, q.stride(0), q.stride(1), kv.stride(0), rows.stride(0),
        NUM_HEADS=num_heads, NOPE=head_dim - rope, RANK=rank, ROPE=rope, HEADS=heads,
        BLOCK_C=triton.next_power_of_2(rank), BLOCK_HALF=triton.next_power_of_2(rope // 2),
        IS_INTERLEAVED=is_interleaved, num_warps=4, **pdl_options(q),
    )  # fmt: skip
