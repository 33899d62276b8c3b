"""The gated delta rule for requests of one new token: the state is read once and written once.

In a verify step a request has several nodes, which are not written to its state: it is that behind the nodes
of the last step that were accepted, and so are those of the tokens behind them. They go through the
convolution again, with q left out.

Roofline bound: 2 * num_requests * num_v_heads * k_head_dim * v_head_dim * 4 bytes over the memory's
bandwidth, and nothing else counts.

Shape: a CTA has one request, one value head and a block of the columns of its state: columns do not
depend on each other, so a tile stays in registers. q and k are normed again by each CTA; they are short.
The state is of an earlier step, so its loads do not wait for the previous kernel.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from diptych.optimized.kernels.portable import pdl_options
from diptych.optimized.kernels.recurrence.convolve import convolved
from diptych.optimized.kernels.recurrence.step_tables import (
    FIRST_STORE,
    IS_FIRST,
    LAST_STORE,
    NUM_FIELDS,
    ROW,
    START,
    LayerRows,
    LinearSteps,
)
from diptych.shared.interfaces.linear_attention import LinearLayer


@triton.jit
def unit(x, axis: tl.constexpr):
    """x divided by its length."""
    return x * tl.rsqrt(tl.sum(x * x, axis=axis, keep_dims=True) + 1e-6)


@triton.jit
def load_decay(g_ptr, k_offs, k_mask, DECAYS: tl.constexpr):
    """g of a value head: a number, or [BLOCK_K, 1], one for each channel of k."""
    if DECAYS == 1:
        g = tl.load(g_ptr)
    else:
        g = tl.load(g_ptr + k_offs, mask=k_mask, other=0.0)[:, None]
    return g


@triton.jit
def _write(state, k, v, g, beta):
    """The state behind a token."""
    state *= tl.exp(g)
    correction = beta * (v - tl.sum(state * k[:, None], axis=0))
    return state + k[:, None] * correction[None, :]


@triton.jit
def _delta_rule_kernel(
    c_ptr, g_ptr, beta_ptr, o_ptr, states_ptr, inputs_ptr, held_ptr, gates_ptr, weight_ptr,
    order_ptr, requests_ptr, stores_ptr, accepted_ptr, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, TAPS: tl.constexpr,
    NODES: tl.constexpr, NUM_NODES: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    DECAYS: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    head, number = tl.program_id(1), tl.load(order_ptr + tl.program_id(0))
    k_offs, v_offs = tl.arange(0, BLOCK_K), tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    k_mask, v_mask = k_offs < K, v_offs < V
    request = requests_ptr + number * NUM_FIELDS
    row = tl.load(request + ROW)
    k_size: tl.constexpr = HEADS // GROUP * K
    C: tl.constexpr = 2 * k_size + HEADS * V
    k_offs_c, v_offs_c = k_size + head // GROUP * K + k_offs, 2 * k_size + head * V + v_offs
    tile, mask = head * K * V + k_offs[:, None] * V + v_offs[None, :], k_mask[:, None] & v_mask[None, :]
    row_ptr = states_ptr + row * (HEADS * K * V)
    state = tl.zeros((BLOCK_K, BLOCK_V), tl.float32)
    if tl.load(request + IS_FIRST) == 0:
        state = tl.load(row_ptr + tile, mask=mask, other=0.0)
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()

    if NODES > 0:
        num_accepted = tl.load(accepted_ptr + number)
        held_ptr += row * (NODES * C)
        inputs_ptr += row * ((TAPS - 1) * C)
        GATES: tl.constexpr = (DECAYS + 1) * HEADS
        gates_ptr += row * (NODES * GATES) + head * DECAYS
        for node in range(num_accepted):
            at = node - num_accepted
            k = convolved(
                held_ptr, held_ptr, inputs_ptr, weight_ptr, 0, num_accepted, at, 0, k_offs_c, k_mask, C,
                C, TAPS,
            )  # fmt: skip
            v = convolved(
                held_ptr, held_ptr, inputs_ptr, weight_ptr, 0, num_accepted, at, 0, v_offs_c, v_mask, C,
                C, TAPS,
            )  # fmt: skip
            g = load_decay(gates_ptr + GATES * node, k_offs, k_mask, DECAYS)
            beta = tl.load(gates_ptr + GATES * node + (HEADS * DECAYS - head * (DECAYS - 1)))
            state = _write(state, unit(k, 0), v, g, beta)
        if NUM_NODES > 0:
            tl.store(row_ptr + tile, state, mask=mask)

    for i in range(NUM_NODES if NUM_NODES > 0 else 1):
        token = tl.load(request + START) + i
        q = unit(tl.load(c_ptr + token * C + k_offs_c - k_size, mask=k_mask, other=0.0), 0) * scale
        k = unit(tl.load(c_ptr + token * C + k_offs_c, mask=k_mask, other=0.0), 0)
        v = tl.load(c_ptr + token * C + v_offs_c, mask=v_mask, other=0.0)
        g = load_decay(g_ptr + token * (HEADS * DECAYS) + head * DECAYS, k_offs, k_mask, DECAYS)
        beta = tl.load(beta_ptr + token * HEADS + head)
        # What q reads of the new state, without waiting for it: of the old one, and of the correction.
        kept = tl.exp(g)
        if DECAYS > 1:
            state, kept = state * kept, 1.0
        read = kept * tl.sum(state * q[:, None], axis=0)
        correction = beta * (v - kept * tl.sum(state * k[:, None], axis=0))
        o = read + tl.sum(q * k, axis=0) * correction
        state = kept * state + k[:, None] * correction[None, :]
        tl.store(o_ptr + (token * HEADS + head) * V + v_offs, o.to(o_ptr.dtype.element_ty), mask=v_mask)
    if NUM_NODES == 0:
        tl.store(row_ptr + tile, state, mask=mask)
        for store in range(tl.load(request + FIRST_STORE), tl.load(request + LAST_STORE)):
            checkpoint = tl.load(stores_ptr + 2 * store + 1)
            tl.store(states_ptr + checkpoint * (HEADS * K * V) + tile, state, mask=mask)


def tile(v_head_dim: int) -> tuple[int, int]:
    """(columns of the state, warps) of a CTA."""
    return min(max(triton.next_power_of_2(v_head_dim), 16), 64), 4


def delta_rule(
    c: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    o: torch.Tensor,
    rows: LayerRows,
    layer: LinearLayer,
    steps: LinearSteps,
) -> None:
    """c [num_tokens, num_channels] float32, behind the convolution; g, beta [num_tokens, num_v_heads]
    float32; g may be one for each channel of k. Writes the rows of o
    [num_tokens, num_v_heads, v_head_dim] and the states that belong to requests
    of one token, or of the nodes of a verify step."""
    if not steps.num_single:
        return
    config = layer.config
    block_v, num_warps = tile(config.v_head_dim)
    _delta_rule_kernel[(steps.num_single, config.num_v_heads, triton.cdiv(config.v_head_dim, block_v))](
        c, g, beta, o, rows.states, rows.inputs, rows.held_inputs, rows.held_gates, layer.conv_weight,
        steps.single, steps.requests, steps.stores, steps.accepted, config.k_head_dim**-0.5,
        HEADS=config.num_v_heads, GROUP=config.num_v_heads // config.num_k_heads, K=config.k_head_dim,
        V=config.v_head_dim, TAPS=config.conv_kernel, NODES=rows.held_inputs.shape[1],
        NUM_NODES=steps.num_nodes, BLOCK_K=max(triton.next_power_of_2(config.k_head_dim), 16),
        BLOCK_V=block_v, DECAYS=config.num_decays, num_warps=num_warps, **pdl_options(c),
    )  # fmt: skip
