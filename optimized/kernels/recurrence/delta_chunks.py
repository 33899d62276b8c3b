"""The gated delta rule for prompts, in chunks of 64 tokens: GEMMs in place of a loop over tokens.

The corrections d of a chunk depend on each other: each one reads what the earlier ones have written. With
keys K, values V, the state S before the chunk, and the decay D[i, j] between two of its tokens:

    (I + A) d = diag(beta) (V - diag(exp G) K S),   A = tril(diag(beta) (K Kᵀ) * D, -1)

So d = U - W S, where U and W do not depend on S. The first kernel computes them for all chunks at once, the
second one goes from chunk to chunk with S. (Yang et al., arXiv 2406.06484, 2412.06464.)

Roofline bound: for long prompts the num_tokens / 64 dependent steps of the second kernel; its GEMMs are a
few percent of the model's.

Shape: the first kernel has a CTA for each chunk and value head, the second for each request, value head
and block of columns of the state.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from diptych.optimized.kernels.recurrence.delta_rule import unit
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
def _decay(G, rows, L: tl.constexpr):
    """D[i, j] = exp(G[i] - G[j]) for i >= j, else 0. The mask comes before exp, which could overflow."""
    G_j = tl.sum(tl.where(rows[:, None] == rows[None, :], G[:, None], 0.0), axis=0)
    return tl.exp(tl.where(rows[:, None] >= rows[None, :], G[:, None] - G_j[None, :], float("-inf")))


@triton.jit
def _chunk_writes_kernel(
    c_ptr, g_ptr, beta_ptr, u_ptr, w_ptr, decay_ptr, chunks_ptr,
    HEADS: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    chunk_ptr = chunks_ptr + 3 * tl.program_id(0)
    first, num_tokens = tl.load(chunk_ptr), tl.load(chunk_ptr + 1)
    rows, k_offs, v_offs = tl.arange(0, L), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    is_there = rows < num_tokens
    k_mask, v_mask = is_there[:, None] & (k_offs < K)[None, :], is_there[:, None] & (v_offs < V)[None, :]
    k_size: tl.constexpr = HEADS // GROUP * K
    tokens = first + rows
    c_rows = c_ptr + tokens[:, None] * (2 * k_size + HEADS * V)
    k = unit(tl.load(c_rows + k_size + head // GROUP * K + k_offs[None, :], mask=k_mask, other=0.0), 1)
    v = tl.load(c_rows + 2 * k_size + head * V + v_offs[None, :], mask=v_mask, other=0.0)
    g = tl.load(g_ptr + tokens * HEADS + head, mask=is_there, other=0.0)
    G = tl.sum(tl.where(rows[:, None] >= rows[None, :], g[None, :], 0.0), axis=1)  # running sums
    beta = tl.load(beta_ptr + tokens * HEADS + head, mask=is_there, other=0.0)

    A = tl.dot(k, tl.trans(k), input_precision="ieee") * beta[:, None] * _decay(G, rows, L)
    # --8<-- [start:chunk-inverse]
    # T = (I + A)^-1 row by row: row i of T - I is -A[i] T, which needs the rows above it.
    T = tl.where(rows[:, None] > rows[None, :], -A, 0.0)
    columns = tl.trans(T)
    for i in range(1, num_tokens):
        row = tl.sum(tl.where(rows[None, :] == i, columns, 0.0), axis=1)
        T += tl.where(rows[:, None] == i, tl.sum(row[:, None] * T, axis=0)[None, :], 0.0)
    T += tl.where(rows[:, None] == rows[None, :], 1.0, 0.0)
    # --8<-- [end:chunk-inverse]

    U = tl.dot(T, beta[:, None] * v, input_precision="ieee")
    W = tl.dot(T, (beta * tl.exp(G))[:, None] * k, input_precision="ieee")
    heads = tokens * HEADS + head
    tl.store(u_ptr + heads[:, None] * V + v_offs[None, :], U, mask=v_mask)
    tl.store(w_ptr + heads[:, None] * K + k_offs[None, :], W, mask=k_mask)
    tl.store(decay_ptr + heads, G, mask=is_there)


@triton.jit
def _chunk_scan_kernel(
    c_ptr, u_ptr, w_ptr, decay_ptr, o_ptr, states_ptr, order_ptr, requests_ptr, chunks_ptr, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, L: tl.constexpr,
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
    state = tl.zeros((BLOCK_K, BLOCK_V), tl.float32)
    if tl.load(request + IS_FIRST) == 0:
        state = tl.load(row_ptr + tile, mask=mask, other=0.0)
    for chunk in range(tl.load(request + FIRST_CHUNK), tl.load(request + LAST_CHUNK)):
        first, num_tokens = tl.load(chunks_ptr + 3 * chunk), tl.load(chunks_ptr + 3 * chunk + 1)
        is_there, tokens = rows < num_tokens, first + rows
        k_mask, v_mask = is_there[:, None] & (k_offs < K)[None, :], is_there[:, None] & (v_offs < V)[None, :]
        c_rows = c_ptr + tokens[:, None] * (2 * k_size + HEADS * V) + head // GROUP * K + k_offs[None, :]
        q = unit(tl.load(c_rows, mask=k_mask, other=0.0), 1) * scale
        k = unit(tl.load(c_rows + k_size, mask=k_mask, other=0.0), 1)
        heads = tokens * HEADS + head
        U = tl.load(u_ptr + heads[:, None] * V + v_offs[None, :], mask=v_mask, other=0.0)
        W = tl.load(w_ptr + heads[:, None] * K + k_offs[None, :], mask=k_mask, other=0.0)
        G_end = tl.load(decay_ptr + (first + num_tokens - 1) * HEADS + head)
        G = tl.load(decay_ptr + heads, mask=is_there, other=0.0)
        G = tl.where(is_there, G, G_end)

        corrections = U - tl.dot(W, state, input_precision="ieee")
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * _decay(G, rows, L)
        o = tl.dot(q * tl.exp(G)[:, None], state, input_precision="ieee")
        o += tl.dot(scores, corrections, input_precision="ieee")
        tl.store(o_ptr + heads[:, None] * V + v_offs[None, :], o.to(o_ptr.dtype.element_ty), mask=v_mask)
        kept = tl.trans(k * tl.exp(G_end - G)[:, None])
        state = state * tl.exp(G_end) + tl.dot(kept, corrections, input_precision="ieee")
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
    """As `delta_rule`, for the requests of several tokens."""
    num_long = steps.num_requests - steps.num_single
    if not num_long:
        return
    heads, v_dim = config.num_v_heads, config.v_head_dim
    writes = torch.empty(len(c), heads, v_dim, dtype=torch.float32, device=c.device)
    reads = torch.empty(len(c), heads, config.k_head_dim, dtype=torch.float32, device=c.device)
    sizes = {
        "HEADS": heads,
        "GROUP": heads // config.num_k_heads,
        "K": config.k_head_dim,
        "V": v_dim,
        "BLOCK_K": max(triton.next_power_of_2(config.k_head_dim), 16),
        "L": CHUNK,
    }
    block_v = max(triton.next_power_of_2(v_dim), 16)
    decay = torch.empty_like(g)
    _chunk_writes_kernel[(steps.num_chunks, heads)](
        c, g, beta, writes, reads, decay, steps.chunks, BLOCK_V=block_v, **sizes
    )
    block_v = min(block_v, 32)
    _chunk_scan_kernel[(num_long, heads, triton.cdiv(v_dim, block_v))](
        c, writes, reads, decay, o, states, steps.order[steps.num_single :], steps.requests, steps.chunks,
        config.k_head_dim**-0.5, BLOCK_V=block_v, num_stages=1, **sizes,  # more do not fit a small GPU
    )  # fmt: skip
