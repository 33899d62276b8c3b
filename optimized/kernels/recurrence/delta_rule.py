"""The gated delta rule for requests of one new token: the state is read once and written once.

Roofline bound: 2 * num_requests * num_v_heads * k_head_dim * v_head_dim * 4 bytes over the memory's
bandwidth, and nothing else counts.

Shape: a CTA has one request, one value head and a block of the columns of its state: columns do not
depend on each other, so a tile stays in registers. q and k are normed again by each CTA; they are short.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from diptych.optimized.kernels.recurrence.step_tables import (
    FIRST_STORE,
    IS_FIRST,
    LAST_STORE,
    NUM_FIELDS,
    ROW,
    START,
    LinearSteps,
)
from diptych.shared.config.model import LinearAttentionConfig


@triton.jit
def unit(x, axis: tl.constexpr):
    """x divided by its length."""
    return x * tl.rsqrt(tl.sum(x * x, axis=axis, keep_dims=True) + 1e-6)


@triton.jit
def _delta_rule_kernel(
    c_ptr, g_ptr, beta_ptr, o_ptr, states_ptr, order_ptr, requests_ptr, stores_ptr, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    k_offs, v_offs = tl.arange(0, BLOCK_K), tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    k_mask, v_mask = k_offs < K, v_offs < V
    request = requests_ptr + tl.load(order_ptr + tl.program_id(0)) * NUM_FIELDS
    token = tl.load(request + START)
    k_size: tl.constexpr = HEADS // GROUP * K
    c_ptr += token * (2 * k_size + HEADS * V)
    q = unit(tl.load(c_ptr + head // GROUP * K + k_offs, mask=k_mask, other=0.0), 0) * scale
    k = unit(tl.load(c_ptr + k_size + head // GROUP * K + k_offs, mask=k_mask, other=0.0), 0)
    v = tl.load(c_ptr + 2 * k_size + head * V + v_offs, mask=v_mask, other=0.0)
    g, beta = tl.load(g_ptr + token * HEADS + head), tl.load(beta_ptr + token * HEADS + head)

    tile, mask = head * K * V + k_offs[:, None] * V + v_offs[None, :], k_mask[:, None] & v_mask[None, :]
    row_ptr = states_ptr + tl.load(request + ROW) * (HEADS * K * V)
    state = tl.zeros((BLOCK_K, BLOCK_V), tl.float32)
    if tl.load(request + IS_FIRST) == 0:
        state = tl.load(row_ptr + tile, mask=mask, other=0.0)
    state *= tl.exp(g)
    correction = beta * (v - tl.sum(state * k[:, None], axis=0))
    state += k[:, None] * correction[None, :]
    o = tl.sum(state * q[:, None], axis=0)
    tl.store(o_ptr + (token * HEADS + head) * V + v_offs, o.to(o_ptr.dtype.element_ty), mask=v_mask)
    tl.store(row_ptr + tile, state, mask=mask)
    for store in range(tl.load(request + FIRST_STORE), tl.load(request + LAST_STORE)):
        checkpoint = tl.load(stores_ptr + 2 * store + 1)
        tl.store(states_ptr + checkpoint * (HEADS * K * V) + tile, state, mask=mask)


def delta_rule(
    c: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    o: torch.Tensor,
    states: torch.Tensor,
    config: LinearAttentionConfig,
    steps: LinearSteps,
) -> None:
    """c [num_tokens, num_channels] float32, behind the convolution; g, beta [num_tokens, num_v_heads]
    float32; states [rows, num_v_heads, k_head_dim, v_head_dim] of the layer. Writes the rows of o
    [num_tokens, num_v_heads, v_head_dim] and of `states` that belong to requests of one token."""
    if not steps.num_single:
        return
    block_v = min(max(triton.next_power_of_2(config.v_head_dim), 16), 32)
    _delta_rule_kernel[(steps.num_single, config.num_v_heads, triton.cdiv(config.v_head_dim, block_v))](
        c, g, beta, o, states, steps.single, steps.requests, steps.stores, config.k_head_dim**-0.5,
        HEADS=config.num_v_heads, GROUP=config.num_v_heads // config.num_k_heads, K=config.k_head_dim,
        V=config.v_head_dim, BLOCK_K=max(triton.next_power_of_2(config.k_head_dim), 16), BLOCK_V=block_v,
    )  # fmt: skip
