"""All operations between the QKV GEMM and attention in one launch: the norms of the heads of q and k if a
family has them, the rotation by position, and the writes of K and V to their slots of the pool.

Roofline bound: bytes over the memory's bandwidth: the GEMM read once, q and the pool's rows written once, 2 *
n * (num_qo_heads + 2 * num_kv_heads) * head_dim * itemsize, and a row of cos and sin for each token. For few
tokens the bound is one launch. Separately, these are seven kernels and three times the bytes.

A norm over all heads of q, and one over those of k (OLMo, MiniMax-M2), takes the mean squares of whole rows
from `mean_squares`, a launch of its own: a CTA has some heads, and ranks add up their means in between.

Shape: the grid is [tokens, groups of heads], first those of q, then of k, then of v; a group is of one kind,
so every CTA takes one branch. Heads are loaded as two halves, because dimension i turns together with
i + rotary_dim / 2, and what lies beyond rotary_dim as a third piece.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from diptych.optimized.kernels.attention.fp8 import kernel_view, to_pool
from diptych.optimized.kernels.portable import interpreted_rows, pdl_options
from diptych.shared.types.attention import KVScales

NO_SCALES = KVScales()
TILE_ELEMENTS = 1024
"""Of the heads of one token that a CTA takes."""

MANY_TOKENS = 512
"""From here on a CTA takes several: starting a CTA takes a nanosecond, as long as moving 4 KB."""


@triton.jit
def _cos_sin(
    cos_sin_ptr, positions_ptr, tokens, num_tokens, last_position,
    ROTARY_DIM: tl.constexpr, BLOCK_HALF: tl.constexpr, ROWS_END: tl.constexpr, COLUMNS_END: tl.constexpr,
):  # fmt: skip
    """Load cos and sin of each token, each [TOKENS, 1, BLOCK_HALF]. ROWS_END, COLUMNS_END:
    `RopeConfig.axis_ends`, where a token has three positions; else 0."""
    live = (tokens < num_tokens)[:, None, None]
    offs = tl.arange(0, BLOCK_HALF)[None, None, :]
    mask = live & (offs < ROTARY_DIM // 2)
    if ROWS_END > 0:
        is_row = (offs % 3 == 1) & (offs < ROWS_END)
        is_column = (offs % 3 == 2) & (offs < COLUMNS_END)
        axis = tl.where(is_row, 1, tl.where(is_column, 2, 0))
        places = positions_ptr + axis * num_tokens + tokens[:, None, None]
        positions = tl.load(places, mask=mask, other=0)
    else:
        positions = tl.load(positions_ptr + tokens, mask=tokens < num_tokens, other=0)[:, None, None]
    # Draft tokens may lie beyond the context's end. They are dropped, so their angle does not matter.
    positions = tl.minimum(positions, last_position)
    angles = cos_sin_ptr + positions * ROTARY_DIM + offs
    cos = tl.load(angles, mask=mask, other=0.0)
    sin = tl.load(angles + ROTARY_DIM // 2, mask=mask, other=0.0)
    return cos, sin


@triton.jit
def _weighted(x, scale, weight, dtype: tl.constexpr, UNIT_OFFSET: tl.constexpr):
    """x * scale * weight, rounded as RMSNorm does, after each multiplication, or as GemmaRMSNorm does."""
    if UNIT_OFFSET:
        y = x * scale * (1.0 + weight)
    else:
        y = (x * scale).to(dtype).to(tl.float32) * weight
    return y.to(dtype).to(tl.float32)


@triton.jit
def _weights(
    weight_ptr, heads, offs, end, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, WIDE: tl.constexpr
):
    """The weights of the elements `offs`, below `end`, of each head, float32. WIDE: each head has its own."""
    tile, mask = weight_ptr + offs, offs < end
    if WIDE:
        tile, mask = tile + heads * HEAD_DIM, mask & (heads < NUM_HEADS)
    return tl.load(tile, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _norm_and_rotate(
    x_tile, out_tile, weight_ptr, means_tile, cos, sin, eps, out_scale, live, heads,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
    HAS_NORM: tl.constexpr, WIDE: tl.constexpr, UNIT_OFFSET: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """x_tile, out_tile [TOKENS, HEADS, 1]: where heads begin; means_tile, live [TOKENS, 1, 1];
    heads [1, HEADS, 1]; cos, sin [TOKENS, 1, BLOCK_HALF]. WIDE: the norm is one over all heads, and
    means_tile is where its mean squares are. Waits for the previous kernel, which gives x and them."""
    dtype: tl.constexpr = x_tile.dtype.element_ty
    HALF: tl.constexpr = ROTARY_DIM // 2
    REST: tl.constexpr = HEAD_DIM - ROTARY_DIM
    offs = tl.arange(0, BLOCK_HALF)[None, None, :]
    mask = live & (heads < NUM_HEADS)
    mask_half = mask & (offs < HALF)
    if HAS_NORM:
        weight_a = _weights(weight_ptr, heads, offs, HALF, NUM_HEADS, HEAD_DIM, WIDE)
        weight_b = _weights(weight_ptr + HALF, heads, offs, HALF, NUM_HEADS, HEAD_DIM, WIDE)
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
    a = tl.load(x_tile + offs, mask=mask_half, other=0.0).to(tl.float32)
    b = tl.load(x_tile + HALF + offs, mask=mask_half, other=0.0).to(tl.float32)
    if REST > 0:
        offs_rest = ROTARY_DIM + tl.arange(0, BLOCK_REST)[None, None, :]
        mask_rest = mask & (offs_rest < HEAD_DIM)
        rest = tl.load(x_tile + offs_rest, mask=mask_rest, other=0.0).to(tl.float32)
    if HAS_NORM:
        if WIDE:
            scale = tl.rsqrt(tl.load(means_tile, mask=live, other=0.0) + eps)
        else:
            squares = tl.sum(a * a + b * b, axis=2)
            if REST > 0:
                squares += tl.sum(rest * rest, axis=2)
            scale = tl.rsqrt(squares / HEAD_DIM + eps)[:, :, None]
        a = _weighted(a, scale, weight_a, dtype, UNIT_OFFSET)
        b = _weighted(b, scale, weight_b, dtype, UNIT_OFFSET)
        if REST > 0:
            weight_rest = _weights(weight_ptr, heads, offs_rest, HEAD_DIM, NUM_HEADS, HEAD_DIM, WIDE)
            rest = _weighted(rest, scale, weight_rest, dtype, UNIT_OFFSET)
    # A pool of another type gets what a separate cast would give it, in FP8 over its scale.
    out_dtype: tl.constexpr = out_tile.dtype.element_ty
    tl.store(out_tile + offs, to_pool((a * cos - b * sin).to(dtype), out_scale, out_dtype), mask=mask_half)
    tl.store(
        out_tile + HALF + offs, to_pool((b * cos + a * sin).to(dtype), out_scale, out_dtype), mask=mask_half
    )
    if REST > 0:
        tl.store(out_tile + offs_rest, to_pool(rest.to(dtype), out_scale, out_dtype), mask=mask_rest)


@triton.jit(do_not_specialize=["num_tokens"])
def _qk_norm_rope_store_kernel(
    qkv_ptr, q_ptr, k_ptr, v_ptr, positions_ptr, out_cache_loc_ptr, cos_sin_ptr, q_weight_ptr, k_weight_ptr,
    means_ptr, num_tokens, last_position, eps, k_scale, v_scale,
    stride_qkv, stride_k, stride_k_head, stride_v, stride_v_head,
    NUM_QO_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr,
    TOKENS: tl.constexpr, HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr, BLOCK_DIM: tl.constexpr,
    Q_SPACING: tl.constexpr, HAS_NORM: tl.constexpr, WIDE: tl.constexpr, UNIT_OFFSET: tl.constexpr,
    ROWS_END: tl.constexpr, COLUMNS_END: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    K_HEAD: tl.constexpr = NUM_QO_HEADS * Q_SPACING  # the first of k in a row of qkv
    QO_GROUPS: tl.constexpr = (NUM_QO_HEADS + HEADS - 1) // HEADS
    KV_GROUPS: tl.constexpr = (NUM_KV_HEADS + HEADS - 1) // HEADS
    group = tl.program_id(1)
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    live = tokens < num_tokens
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row = qkv_ptr + (tokens.to(tl.int64) * stride_qkv)[:, None, None]
    means = means_ptr + (tokens * 2)[:, None, None]  # of q and of k
    live = live[:, None, None]
    if group < QO_GROUPS + KV_GROUPS:
        cos, sin = _cos_sin(
            cos_sin_ptr, positions_ptr, tokens, num_tokens, last_position,
            ROTARY_DIM, BLOCK_HALF, ROWS_END, COLUMNS_END,
        )  # fmt: skip
        if group < QO_GROUPS:
            heads = (group * HEADS + tl.arange(0, HEADS))[None, :, None]
            q_row = q_ptr + (tokens.to(tl.int64) * (NUM_QO_HEADS * HEAD_DIM))[:, None, None]
            _norm_and_rotate(
                row + heads * (Q_SPACING * HEAD_DIM), q_row + heads * HEAD_DIM, q_weight_ptr, means,
                cos, sin, eps, 1.0, live, heads, NUM_QO_HEADS,
                HEAD_DIM, ROTARY_DIM, BLOCK_HALF, BLOCK_REST, HAS_NORM, WIDE, UNIT_OFFSET, USE_PDL,
            )  # fmt: skip
        else:
            heads = ((group - QO_GROUPS) * HEADS + tl.arange(0, HEADS))[None, :, None]
            slots = tl.load(out_cache_loc_ptr + tokens, mask=tokens < num_tokens, other=0).to(tl.int64)
            k_row = k_ptr + (slots * stride_k)[:, None, None]
            _norm_and_rotate(
                row + (K_HEAD + heads) * HEAD_DIM, k_row + heads * stride_k_head, k_weight_ptr, means + 1,
                cos, sin, eps, k_scale, live, heads, NUM_KV_HEADS,
                HEAD_DIM, ROTARY_DIM, BLOCK_HALF, BLOCK_REST, HAS_NORM, WIDE, UNIT_OFFSET, USE_PDL,
            )  # fmt: skip
    else:
        heads = ((group - QO_GROUPS - KV_GROUPS) * HEADS + tl.arange(0, HEADS))[None, :, None]
        offs = tl.arange(0, BLOCK_DIM)[None, None, :]
        in_head = live & (heads < NUM_KV_HEADS) & (offs < HEAD_DIM)
        slots = tl.load(out_cache_loc_ptr + tokens, mask=tokens < num_tokens, other=0).to(tl.int64)
        if USE_PDL:
            tl.extra.cuda.gdc_wait()
        v = tl.load(row + (K_HEAD + NUM_KV_HEADS + heads) * HEAD_DIM + offs, mask=in_head, other=0.0)
        v_row = v_ptr + (slots * stride_v)[:, None, None]
        tl.store(
            v_row + heads * stride_v_head + offs, to_pool(v, v_scale, v_ptr.dtype.element_ty), mask=in_head
        )


@triton.jit(do_not_specialize=["num_tokens"])
def _rotate_kernel(
    x_ptr, y_ptr, positions_ptr, cos_sin_ptr, num_tokens, last_position, stride_x, stride_x_head,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
    ROWS_END: tl.constexpr, COLUMNS_END: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    heads = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[None, :, None]
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
    cos, sin = _cos_sin(
        cos_sin_ptr, positions_ptr, tokens, num_tokens, last_position,
        ROTARY_DIM, BLOCK_HALF, ROWS_END, COLUMNS_END,
    )  # fmt: skip
    rows = tokens.to(tl.int64)[:, None, None]
    _norm_and_rotate(
        x_ptr + rows * stride_x + heads * stride_x_head, y_ptr + (rows * NUM_HEADS + heads) * HEAD_DIM,
        cos_sin_ptr, cos_sin_ptr, cos, sin, 0.0, 1.0, (tokens < num_tokens)[:, None, None], heads, NUM_HEADS,
        HEAD_DIM, ROTARY_DIM, BLOCK_HALF, BLOCK_REST, False, False, False, USE_PDL,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens"])
def _mean_squares_kernel(
    x_ptr, means_ptr, num_tokens, stride_x, factor_q, factor_k, Q_SIZE: tl.constexpr, K_SIZE: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    is_k = tl.program_id(1)
    size = tl.where(is_k, K_SIZE, Q_SIZE)
    tile = x_ptr + (tokens.to(tl.int64) * stride_x)[:, None] + is_k * Q_SIZE
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    squares = tl.zeros([TOKENS, BLOCK], dtype=tl.float32)
    for start in range(0, size, BLOCK):
        offs = start + tl.arange(0, BLOCK)[None, :]
        x = tl.load(tile + offs, mask=(tokens < num_tokens)[:, None] & (offs < size), other=0.0)
        squares += x.to(tl.float32) * x.to(tl.float32)
    means = tl.sum(squares, axis=1) * tl.where(is_k, factor_k, factor_q)
    tl.store(means_ptr + tokens * 2 + is_k, means, mask=tokens < num_tokens)


def mean_squares(qkv: torch.Tensor, q_size: int, k_size: int, num_ranks: int = 1) -> torch.Tensor:
    """qkv [n, q_size + k_size + any] -> float32 [n, 2]: the mean squares of the first q_size columns and of
    the next k_size, divided by num_ranks: ranks with equally many columns add them up."""
    assert qkv.stride(1) == 1
    num_tokens = qkv.shape[0]
    tokens = interpreted_rows(num_tokens) or 1
    means = torch.empty(num_tokens, 2, dtype=torch.float32, device=qkv.device)
    _mean_squares_kernel[(triton.cdiv(num_tokens, tokens), 2)](
        qkv, means, num_tokens, qkv.stride(0), 1.0 / (q_size * num_ranks), 1.0 / (k_size * num_ranks),
        Q_SIZE=q_size, K_SIZE=k_size, TOKENS=tokens, BLOCK=TILE_ELEMENTS, num_warps=4, **pdl_options(qkv),
    )  # fmt: skip
    return means


def rotate(
    x: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, axis_ends: tuple[int, int] = (0, 0)
) -> torch.Tensor:
    """The rotation alone: x [n, heads, head_dim], of any strides but the last -> a new contiguous tensor.
    positions, cos_sin and axis_ends as in qk_norm_rope_store."""
    num_tokens, num_heads, head_dim = x.shape
    assert x.stride(2) == 1
    assert positions.is_contiguous()
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    tiles, grid = _tiles(num_tokens, (num_heads,), head_dim, cos_sin.shape[1])
    _rotate_kernel[grid](
        x, y, positions, cos_sin, num_tokens, cos_sin.shape[0] - 1, x.stride(0), x.stride(1),
        NUM_HEADS=num_heads, HEAD_DIM=head_dim, ROTARY_DIM=cos_sin.shape[1], **tiles,
        **_axis_ends(positions, axis_ends), num_warps=4, **pdl_options(x),
    )  # fmt: skip
    return y


def _axis_ends(positions: torch.Tensor, axis_ends: tuple[int, int]) -> dict[str, int]:
    rows_end, columns_end = axis_ends if positions.dim() == 2 else (0, 0)
    assert positions.dim() == 1 or rows_end > 0, f"{positions.dim()}-dimensional positions"
    return {"ROWS_END": rows_end, "COLUMNS_END": columns_end}


def _tiles(
    num_tokens: int,
    head_counts: tuple[int, ...],
    head_dim: int,
    rotary_dim: int,
    is_deterministic: bool = False,
) -> tuple[dict[str, int], tuple[int, int]]:
    """Sizes of a CTA's tile, and the grid for heads of several kinds."""
    is_many = num_tokens >= MANY_TOKENS and not is_deterministic
    tokens = interpreted_rows(num_tokens) or (4 if is_many else 1)
    sizes, num_groups = _sizes(tokens, head_counts, head_dim, rotary_dim)
    return sizes, (triton.cdiv(num_tokens, tokens), num_groups)


@cache
def _sizes(
    tokens: int, head_counts: tuple[int, ...], head_dim: int, rotary_dim: int
) -> tuple[dict[str, int], int]:
    heads = max(TILE_ELEMENTS // triton.next_power_of_2(head_dim), 1)
    heads = min(heads, triton.next_power_of_2(max(head_counts)))
    sizes = {
        "TOKENS": tokens,
        "HEADS": heads,
        "BLOCK_HALF": triton.next_power_of_2(rotary_dim // 2),
        "BLOCK_REST": triton.next_power_of_2(max(head_dim - rotary_dim, 1)),
    }
    return sizes, sum(triton.cdiv(count, heads) for count in head_counts)


def qk_norm_rope_store(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    unit_offset: bool,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    out_cache_loc: torch.Tensor,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    kv_scales: KVScales = NO_SCALES,
    is_deterministic: bool = False,
    means: torch.Tensor | None = None,
    axis_ends: tuple[int, int] = (0, 0),
) -> torch.Tensor:
    """qkv [n, (q_spacing * num_qo_heads + 2 * num_kv_heads) * head_dim]: behind each head of q, q_spacing - 1
    heads are left out. positions and out_cache_loc [n], cos_sin float32 [positions, rotary_dim] (cosines,
    then sines), k_buffer and v_buffer [slots, num_kv_heads, head_dim] of any type, in FP8 over kv_scales
    -> q [n, num_qo_heads, head_dim]. Writes the slots of out_cache_loc; leaves qkv alone.
    `unit_offset`: the norms are those of GemmaRMSNorm.
    is_deterministic: a head is normed in the same order whatever n is.
    means: float32 [n, 2], the mean squares of all heads of q and of k. Each of the two has one norm then, and
    its weight as many elements as the heads together.
    axis_ends: those of `RopeConfig`; positions may be [3, n] with them.

    positions, out_cache_loc, cos_sin and the weights are read before the previous launch has ended: they must
    be from before the last launch that was not a programmatic dependent one."""
    num_tokens, rotary_dim = qkv.shape[0], cos_sin.shape[1]
    q_spacing = (qkv.shape[1] // head_dim - 2 * num_kv_heads) // num_qo_heads
    assert qkv.shape[1] == (q_spacing * num_qo_heads + 2 * num_kv_heads) * head_dim
    assert qkv.stride(1) == k_buffer.stride(2) == v_buffer.stride(2) == 1
    assert positions.is_contiguous()
    assert out_cache_loc.is_contiguous()
    assert (q_weight is None) == (k_weight is None)
    k_buffer, v_buffer = kernel_view(k_buffer), kernel_view(v_buffer)
    q = torch.empty(num_tokens, num_qo_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    heads = (num_qo_heads, num_kv_heads, num_kv_heads)
    tiles, grid = _tiles(num_tokens, heads, head_dim, rotary_dim, is_deterministic)
    _qk_norm_rope_store_kernel[grid](
        qkv, q, k_buffer, v_buffer, positions, out_cache_loc, cos_sin,
        cos_sin if q_weight is None else q_weight, cos_sin if k_weight is None else k_weight,
        cos_sin if means is None else means, num_tokens, cos_sin.shape[0] - 1, eps, *kv_scales,
        qkv.stride(0), k_buffer.stride(0), k_buffer.stride(1), v_buffer.stride(0), v_buffer.stride(1),
        NUM_QO_HEADS=num_qo_heads, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, ROTARY_DIM=rotary_dim,
        BLOCK_DIM=triton.next_power_of_2(head_dim), **tiles, Q_SPACING=q_spacing,
        HAS_NORM=q_weight is not None, WIDE=means is not None, UNIT_OFFSET=unit_offset,
        **_axis_ends(positions, axis_ends), num_warps=4, **pdl_options(qkv),
    )  # fmt: skip
    return q
