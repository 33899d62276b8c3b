"""The gated delta rule for prompts, in chunks of 64 tokens: GEMMs in place of a loop over tokens.

The corrections d of a chunk depend on each other: each one reads what the earlier ones have written. With
keys K, values V, the state S before the chunk, and the decay D[i, j] between two of its tokens:

    (I + A) d = diag(beta) (V - diag(exp G) K S),   A = tril(diag(beta) (K Kᵀ) * D, -1)

So d = U - W S, where U and W do not depend on S, and o = diag(exp G) Q S + (Q Kᵀ * D) d. The first kernel
computes U, W and Q Kᵀ * D for all chunks at once, the second one goes from chunk to chunk with S (Yang et
al., arXiv 2406.06484, 2412.06464).

Roofline bound: for long prompts the num_tokens / 64 dependent steps of the second kernel; its GEMMs are a
few percent of the model's.

Shape: the first kernel has a CTA for each chunk and value head, the second for each request, value head
and block of columns of the state. A warp keeps its whole second operand of an MMA in registers, so operands
come in blocks of columns, and q and k are divided by their lengths behind the MMAs. Loops are not
pipelined: with two stages Triton 3.6 gave wrong scores in tf32 (docs/lab/layers.md).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from diptych.optimized.kernels.portable import gpu_of
from diptych.optimized.kernels.recurrence.step_tables import (
    CHUNK,
    FIRST_CHUNK,
    IS_FIRST,
    LAST_CHUNK,
    NUM_FIELDS,
    ROW,
    LinearSteps,
)
from diptych.shared.config.model import LinearAttentionConfig


@triton.jit
def _inverse_length(squares):
    """1 / the length of a vector, from its sum of squares."""
    return tl.rsqrt(squares + 1e-6)


@triton.jit
def _as_columns(x, rows):
    """x by row -> x by column."""
    return tl.sum(tl.where(rows[:, None] == rows[None, :], x[:, None], 0.0), axis=0)


@triton.jit
def _running_sums_kernel(
    g_ptr, decay_ptr, chunks_ptr, SIZE: tl.constexpr, BLOCK: tl.constexpr, L: tl.constexpr
):
    """G of a chunk: the sums of g up to each of its tokens."""
    chunk_ptr = chunks_ptr + 3 * tl.program_id(0)
    first, num_tokens = tl.load(chunk_ptr), tl.load(chunk_ptr + 1)
    rows, columns = tl.arange(0, L), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = (rows < num_tokens)[:, None] & (columns < SIZE)[None, :]
    tile = (first + rows)[:, None] * SIZE + columns[None, :]
    tl.store(decay_ptr + tile, tl.cumsum(tl.load(g_ptr + tile, mask=mask, other=0.0), axis=0), mask=mask)


@triton.jit
def _channel_products_kernel(
    c_ptr, scores_ptr, decay_ptr, chunks_ptr, scale,
    HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BLOCK: tl.constexpr, L: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Q K' * D, and behind those of all chunks K K' * D, where D has a factor for each channel."""
    head, level = tl.program_id(1), tl.program_id(2)
    chunk_ptr = chunks_ptr + 3 * tl.program_id(0)
    first, num_tokens = tl.load(chunk_ptr), tl.load(chunk_ptr + 1)
    rows, columns, is_there = tl.arange(0, L), tl.arange(0, BLOCK), tl.arange(0, L) < num_tokens
    stride: tl.constexpr = HEADS * (2 * K + V)
    q_ptr, G_ptr = c_ptr + first * stride + head * K, decay_ptr + (first * HEADS + head) * K
    middle = ((rows >> level) | 1) << level
    A, scores = tl.zeros((L, L), tl.float32), tl.zeros((L, L), tl.float32)
    q_squares, k_squares = tl.zeros((L,), tl.float32), tl.zeros((L,), tl.float32)
    own = tl.zeros((L,), tl.float32)  # i = j
    for at in range(0, K, BLOCK):
        is_column = (at + columns < K)[None, :]
        mask = is_there[:, None] & is_column
        tile = rows[:, None] * stride + at + columns[None, :]
        q = tl.load(q_ptr + tile, mask=mask, other=0.0)
        k = tl.load(q_ptr + HEADS * K + tile, mask=mask, other=0.0)
        q_squares += tl.sum(q * q, axis=1)
        k_squares += tl.sum(k * k, axis=1)
        own += tl.sum(q * k, axis=1)
        # --8<-- [start:channel-decay]
        # exp(G[i] - G[j]) = exp(G[i] - G[m]) exp(G[m] - G[j]): with m between i and j no
        # factor exceeds 1. Level l has the pairs that the inverse joins at this level: i is
        # in a block of 2 ** l rows, j in the block before it. m is the block's first row.
        tile = rows[:, None] * (HEADS * K) + at + columns[None, :]
        G = tl.load(G_ptr + tile, mask=mask, other=0.0)
        tile = middle[:, None] * (HEADS * K) + at + columns[None, :]
        G -= tl.load(G_ptr + tile, mask=(middle < num_tokens)[:, None] & is_column, other=0.0)
        factor = tl.exp(-tl.abs(G))
        k *= factor
        A += tl.dot(k, tl.trans(k), input_precision=PRECISION)
        scores += tl.dot(q * factor, tl.trans(k), input_precision=PRECISION)
        # --8<-- [end:channel-decay]
    k_unit, q_unit = _inverse_length(k_squares), _inverse_length(q_squares) * scale
    units = _as_columns(k_unit, rows)[None, :]
    i, j = rows[:, None] >> level, rows[None, :] >> level
    is_joined = (i == j + 1) & (j % 2 == 0)
    scores_ptr += (tl.program_id(0).to(tl.int64) * HEADS + head) * (L * L)
    scores_ptr += rows[:, None] * L + rows[None, :]
    tl.store(scores_ptr, scores * q_unit[:, None] * units, mask=is_joined)
    if level == 0:
        diagonal = tl.where(rows[:, None] == rows[None, :], (own * q_unit * k_unit)[:, None], 0.0)
        tl.store(scores_ptr, diagonal, mask=rows[:, None] <= rows[None, :])
    scores_ptr += tl.num_programs(0).to(tl.int64) * (HEADS * L * L)
    tl.store(scores_ptr, A * k_unit[:, None] * units, mask=is_joined)


@triton.jit
def _chunk_writes_kernel(
    c_ptr, g_ptr, beta_ptr, u_ptr, w_ptr, scores_ptr, decay_ptr, chunks_ptr, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BLOCK: tl.constexpr, L: tl.constexpr, LEVELS: tl.constexpr, DECAYS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    chunk_ptr = chunks_ptr + 3 * tl.program_id(0)
    first, num_tokens = tl.load(chunk_ptr), tl.load(chunk_ptr + 1)
    rows, columns, is_there = tl.arange(0, L), tl.arange(0, BLOCK), tl.arange(0, L) < num_tokens
    k_size: tl.constexpr = HEADS // GROUP * K
    stride: tl.constexpr = 2 * k_size + HEADS * V
    tile = rows[:, None] * stride + columns[None, :]
    q_ptr = c_ptr + first * stride + head // GROUP * K
    k_ptr, v_ptr = q_ptr + k_size, c_ptr + first * stride + 2 * k_size + head * V
    heads = first * HEADS + head
    if DECAYS == 1:
        g = tl.load(g_ptr + heads + rows * HEADS, mask=is_there, other=0.0)
    beta = tl.load(beta_ptr + heads + rows * HEADS, mask=is_there, other=0.0)
    if DECAYS == 1:
        G = tl.sum(tl.where(rows[:, None] >= rows[None, :], g[None, :], 0.0), axis=1)  # running sums
        tl.store(decay_ptr + heads + rows * HEADS, G, mask=is_there)
        # The mask comes before exp, which could overflow.
        D = G[:, None] - _as_columns(G, rows)[None, :]
        D = tl.exp(tl.where(rows[:, None] >= rows[None, :], D, float("-inf")))

    A, scores = tl.zeros((L, L), tl.float32), tl.zeros((L, L), tl.float32)
    q_squares, k_squares = tl.zeros((L,), tl.float32), tl.zeros((L,), tl.float32)
    for at in range(0, K, BLOCK):
        mask = is_there[:, None] & (at + columns < K)[None, :]
        q = tl.load(q_ptr + at + tile, mask=mask, other=0.0)
        k = tl.load(k_ptr + at + tile, mask=mask, other=0.0)
        q_squares += tl.sum(q * q, axis=1)
        k_squares += tl.sum(k * k, axis=1)
        if DECAYS == 1:
            A += tl.dot(k, tl.trans(k), input_precision=PRECISION)
            scores += tl.dot(q, tl.trans(k), input_precision=PRECISION)
    k_unit, q_unit = _inverse_length(k_squares), _inverse_length(q_squares) * scale
    scores_ptr += (tl.program_id(0).to(tl.int64) * HEADS + head) * (L * L)
    if DECAYS == 1:
        D *= _as_columns(k_unit, rows)[None, :]
        scores *= D * q_unit[:, None]
        tl.store(scores_ptr + rows[:, None] * L + rows[None, :], scores)
        A *= D * (beta * k_unit)[:, None]
    else:
        scores_ptr += tl.num_programs(0).to(tl.int64) * (HEADS * L * L)
        A = tl.load(scores_ptr + rows[:, None] * L + rows[None, :]) * beta[:, None]

    # --8<-- [start:chunk-inverse]
    # T = (I + A)^-1 of ever larger blocks: that of ((P, 0), (R, Q)) has -Q^-1 R P^-1 below.
    # No number on the way is larger than those of the result.
    T = tl.where(rows[:, None] == rows[None, :], 1.0, 0.0)
    for level in range(LEVELS):  # blocks of 2 ** level rows become blocks of twice as many
        i, j = rows[:, None] >> level, rows[None, :] >> level
        R = tl.where((i == j + 1) & (j % 2 == 0), A, 0.0)
        T -= tl.dot(T, tl.dot(R, T, input_precision="tf32x3"), input_precision="tf32x3")
    # --8<-- [end:chunk-inverse]

    reads = beta * k_unit
    if DECAYS == 1:
        reads *= tl.exp(G)
    for at in range(0, K, BLOCK):
        mask = is_there[:, None] & (at + columns < K)[None, :]
        k = tl.load(k_ptr + at + tile, mask=mask, other=0.0)
        if DECAYS > 1:  # what the scan multiplies by the state, in place of q and k
            G_ptr = decay_ptr + heads * K + at + columns[None, :]
            G = tl.load(G_ptr + rows[:, None] * (HEADS * K), mask=mask, other=0.0)
            G_end = tl.load(
                G_ptr + (num_tokens - 1) * (HEADS * K), mask=(at + columns < K)[None, :], other=0.0
            )
            q = tl.load(q_ptr + at + tile, mask=mask, other=0.0) * q_unit[:, None]
            tl.store(q_ptr + at + tile, q * tl.exp(G), mask=mask)
            tl.store(k_ptr + at + tile, k * k_unit[:, None] * tl.exp(G_end - G), mask=mask)
            k *= tl.exp(G)
        W = tl.dot(T, reads[:, None] * k, input_precision=PRECISION)
        tl.store(w_ptr + heads * K + at + rows[:, None] * (HEADS * K) + columns[None, :], W, mask=mask)
    for at in range(0, V, BLOCK):
        mask = is_there[:, None] & (at + columns < V)[None, :]
        v = tl.load(v_ptr + at + tile, mask=mask, other=0.0)
        U = tl.dot(T, beta[:, None] * v, input_precision=PRECISION)
        tl.store(u_ptr + heads * V + at + rows[:, None] * (HEADS * V) + columns[None, :], U, mask=mask)


@triton.jit
def _chunk_scan_kernel(
    c_ptr, u_ptr, w_ptr, scores_ptr, decay_ptr, o_ptr, states_ptr, order_ptr, requests_ptr, chunks_ptr, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, L: tl.constexpr, DECAYS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    rows, k_offs = tl.arange(0, L), tl.arange(0, BLOCK_K)
    v_offs = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    request = requests_ptr + tl.load(order_ptr + tl.program_id(0)) * NUM_FIELDS
    tile, mask = (
        head * K * V + k_offs[:, None] * V + v_offs[None, :],
        (k_offs < K)[:, None] & (v_offs < V)[None, :],
    )
    row_ptr = states_ptr + tl.load(request + ROW) * (HEADS * K * V)
    k_size: tl.constexpr = HEADS // GROUP * K
    stride: tl.constexpr = 2 * k_size + HEADS * V
    k_tile = rows[:, None] * stride + k_offs[None, :]
    w_tile = rows[:, None] * (HEADS * K) + k_offs[None, :]
    v_tile = rows[:, None] * (HEADS * V) + v_offs[None, :]
    state = tl.zeros((BLOCK_K, BLOCK_V), tl.float32)
    if tl.load(request + IS_FIRST) == 0:
        state = tl.load(row_ptr + tile, mask=mask, other=0.0)
    for chunk in range(tl.load(request + FIRST_CHUNK), tl.load(request + LAST_CHUNK)):
        first, num_tokens = tl.load(chunks_ptr + 3 * chunk), tl.load(chunks_ptr + 3 * chunk + 1)
        is_there, heads = rows < num_tokens, first * HEADS + head
        k_mask, v_mask = is_there[:, None] & (k_offs < K)[None, :], is_there[:, None] & (v_offs < V)[None, :]
        q_ptr = c_ptr + first * stride + head // GROUP * K
        if DECAYS == 1:
            G_end = tl.load(decay_ptr + heads + (num_tokens - 1) * HEADS)
            G = tl.load(decay_ptr + heads + rows * HEADS, mask=is_there, other=0.0)
        W = tl.load(w_ptr + heads * K + w_tile, mask=k_mask, other=0.0)
        corrections = tl.load(u_ptr + heads * V + v_tile, mask=v_mask, other=0.0)
        corrections -= tl.dot(W, state, input_precision=PRECISION)
        q = tl.load(q_ptr + k_tile, mask=k_mask, other=0.0)
        if DECAYS == 1:
            q_unit = _inverse_length(tl.sum(q * q, axis=1)) * scale * tl.exp(G)
            o = tl.dot(q, state, input_precision=PRECISION) * q_unit[:, None]
        else:
            o = tl.dot(q, state, input_precision=PRECISION)
        scores_at = (chunk * HEADS + head) * (L * L)
        scores = tl.load(scores_ptr + scores_at + rows[:, None] * L + rows[None, :])
        o += tl.dot(scores, corrections, input_precision=PRECISION)
        tl.store(o_ptr + heads * V + v_tile, o.to(o_ptr.dtype.element_ty), mask=v_mask)
        k = tl.load(q_ptr + k_size + k_tile, mask=k_mask, other=0.0)
        if DECAYS == 1:
            k_unit = _inverse_length(tl.sum(k * k, axis=1)) * tl.exp(G_end - G)
            kept = tl.where(is_there, k_unit, 0.0)[:, None] * corrections
        else:
            last = decay_ptr + (heads + (num_tokens - 1) * HEADS) * K + k_offs
            G_end, kept = tl.load(last, mask=k_offs < K, other=0.0)[:, None], corrections
        state = state * tl.exp(G_end) + tl.dot(tl.trans(k), kept, input_precision=PRECISION)
        checkpoint = tl.load(chunks_ptr + 3 * chunk + 2)
        if checkpoint > 0:
            tl.store(states_ptr + checkpoint * (HEADS * K * V) + tile, state, mask=mask)
    tl.store(row_ptr + tile, state, mask=mask)


def delta_chunks(
    c: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    o: torch.Tensor,
    states: torch.Tensor,
    config: LinearAttentionConfig,
    steps: LinearSteps,
) -> None:
    """As `delta_tokens`, behind the convolution, for the requests of several tokens."""
    num_long = steps.num_requests - steps.num_single
    if not num_long:
        return
    heads, k_dim, v_dim = config.num_v_heads, config.k_head_dim, config.v_head_dim
    sizes = {
        "HEADS": heads,
        "GROUP": heads // config.num_k_heads,
        "K": k_dim,
        "V": v_dim,
        "L": CHUNK,
        "DECAYS": config.num_decays,
        # tf32 rounds less than an o of 16 bits. Three multiplications in tf32 are nearly one in float32.
        "PRECISION": "tf32x3" if o.dtype == torch.float32 else "tf32",
    }
    writes, reads = c.new_empty(len(c), heads, v_dim), c.new_empty(len(c), heads, k_dim)
    num_products = 2 if config.channel_decay else 1
    scores, decay = c.new_empty(num_products, steps.num_chunks, heads, CHUNK, CHUNK), torch.empty_like(g)
    scale, block_v = k_dim**-0.5, min(max(triton.next_power_of_2(v_dim), 16), 32)
    levels = CHUNK.bit_length() - 1
    if config.channel_decay:
        size = heads * k_dim
        _running_sums_kernel[(steps.num_chunks, triton.cdiv(size, 32))](
            g, decay, steps.chunks, SIZE=size, BLOCK=32, L=CHUNK
        )
        _channel_products_kernel[(steps.num_chunks, heads, levels)](
            c, scores, decay, steps.chunks, scale,
            HEADS=heads, K=k_dim, V=v_dim, BLOCK=32, L=CHUNK, PRECISION=sizes["PRECISION"], num_stages=1,
        )  # fmt: skip
    _chunk_writes_kernel[(steps.num_chunks, heads)](
        c, g, beta, writes, reads, scores, decay, steps.chunks, scale,
        BLOCK=32, LEVELS=levels, num_stages=1, **sizes,
    )  # fmt: skip
    # Scan of 8,192 tokens of 32 heads, us, one H200: 1,397 with 8 warps, 1,647 with 4; of 16 x 512, 1,532 and
    # 1,113.
    grid = num_long, heads, triton.cdiv(v_dim, block_v)
    is_full = grid[0] * grid[1] * grid[2] > 2 * gpu_of(c.device).num_multiprocessors
    _chunk_scan_kernel[grid](
        c, writes, reads, scores, decay, o, states, steps.long, steps.requests,
        steps.chunks, scale, BLOCK_K=max(triton.next_power_of_2(k_dim), 16), BLOCK_V=block_v,
        num_warps=4 if is_full else 8, num_stages=1, **sizes,
    )  # fmt: skip
