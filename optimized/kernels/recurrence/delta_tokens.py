"""The convolution and the gated delta rule token by token: for verify steps, single tokens beside prompts and
deterministic mode, where the bits of a token follow from the tokens before it alone.

In a verify step a request has several nodes, which are not written to its state: it is that behind the nodes
of the last step that were accepted, and so are those of the tokens behind them.

Every kind of step runs one compiled kernel. Its loop has the same instructions for each token: of a prompt,
of a chunk, of a decoding request, of a draft, and of a draft of the last step that was accepted. So it does
not matter how tokens are divided into steps. Numbers that differ from step to step are no constants of the
kernel: a constant makes another kernel, which may add in another order.

Roofline bound, of requests of one token: 2 * num_requests * num_v_heads * k_head_dim * v_head_dim * 4 bytes
over the memory's bandwidth. A prompt is as many dependent steps as it has tokens, so latency bounds it, and
it loses to the GEMMs of delta_chunks.py.

Shape: a CTA has one request, one value head and a block of the columns of its state: columns do not depend on
each other, so a tile stays in registers. q and k are computed again by each CTA; they are short. The state is
of an earlier step, so its loads do not wait for the previous kernel.
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
    NUM_KEPT,
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


@triton.jit(do_not_specialize=["num_nodes", "stride_u"])
def _delta_tokens_kernel(
    u_ptr, g_ptr, beta_ptr, o_ptr, states_ptr, inputs_ptr, held_ptr, gates_ptr, weight_ptr,
    order_ptr, requests_ptr, stores_ptr, accepted_ptr, num_nodes, stride_u, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, TAPS: tl.constexpr,
    NODES: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, DECAYS: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    number, head = tl.load(order_ptr + tl.program_id(0)), tl.program_id(1)
    k_offs, v_offs = tl.arange(0, BLOCK_K), tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    k_mask, v_mask = k_offs < K, v_offs < V
    request = requests_ptr + number * NUM_FIELDS
    row, first_token = tl.load(request + ROW).to(tl.int64), tl.load(request + START)
    is_first, num_kept = tl.load(request + IS_FIRST), tl.load(request + NUM_KEPT)
    first_store, last_store = tl.load(request + FIRST_STORE), tl.load(request + LAST_STORE)
    k_size: tl.constexpr = HEADS // GROUP * K
    C: tl.constexpr = 2 * k_size + HEADS * V
    k_offs_c, v_offs_c = k_size + head // GROUP * K + k_offs, 2 * k_size + head * V + v_offs
    tile, mask = head * K * V + k_offs[:, None] * V + v_offs[None, :], k_mask[:, None] & v_mask[None, :]
    row_ptr = states_ptr + row * (HEADS * K * V)
    held_ptr += row * (NODES * C)
    inputs_ptr += row * ((TAPS - 1) * C)
    GATES: tl.constexpr = (DECAYS + 1) * HEADS
    gates_ptr += row * (NODES * GATES) + head * DECAYS
    state = tl.zeros((BLOCK_K, BLOCK_V), tl.float32)
    if is_first == 0:
        state = tl.load(row_ptr + tile, mask=mask, other=0.0)
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    num_accepted = 0
    if NODES > 0:
        num_accepted = tl.load(accepted_ptr + number).to(tl.int32)

    for at in range(0 - num_accepted, tl.maximum(num_kept, num_nodes).to(tl.int32)):
        q = convolved(
            u_ptr, held_ptr, inputs_ptr, weight_ptr, first_token, num_accepted, at, is_first,
            k_offs_c - k_size, k_mask, stride_u, C, TAPS,
        )  # fmt: skip
        k = convolved(
            u_ptr, held_ptr, inputs_ptr, weight_ptr, first_token, num_accepted, at, is_first,
            k_offs_c, k_mask, stride_u, C, TAPS,
        )  # fmt: skip
        v = convolved(
            u_ptr, held_ptr, inputs_ptr, weight_ptr, first_token, num_accepted, at, is_first,
            v_offs_c, v_mask, stride_u, C, TAPS,
        )  # fmt: skip
        q, k = unit(q, 0) * scale, unit(k, 0)
        token = (first_token + at).to(tl.int64)
        # --8<-- [start:one-loop]
        gate = g_ptr + token * (HEADS * DECAYS) + head * DECAYS
        strength = beta_ptr + token * HEADS + head
        if at < 0:  # an accepted draft of the last step
            gate = gates_ptr + GATES * (at + num_accepted)
            strength = gate + (HEADS * DECAYS - head * (DECAYS - 1))
        state *= tl.exp(load_decay(gate, k_offs, k_mask, DECAYS))
        correction = tl.load(strength) * (v - tl.sum(state * k[:, None], axis=0))
        state += k[:, None] * correction[None, :]
        # --8<-- [end:one-loop]
        if at >= 0:
            o = tl.sum(state * q[:, None], axis=0)
            tl.store(o_ptr + (token * HEADS + head) * V + v_offs, o.to(o_ptr.dtype.element_ty), mask=v_mask)
            for store in range(first_store, last_store):
                if tl.load(stores_ptr + 2 * store) == at + 1:
                    checkpoint = tl.load(stores_ptr + 2 * store + 1).to(tl.int64)
                    tl.store(states_ptr + checkpoint * (HEADS * K * V) + tile, state, mask=mask)
        if at + 1 == num_kept:
            tl.store(row_ptr + tile, state, mask=mask)


def tile(v_head_dim: int) -> tuple[int, int]:
    """(columns of the state, warps) of a CTA."""
    return min(max(triton.next_power_of_2(v_head_dim), 16), 64), 4


def delta_tokens(
    u: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    o: torch.Tensor,
    rows: LayerRows,
    layer: LinearLayer,
    steps: LinearSteps,
    num_requests: int,
    order: torch.Tensor,
) -> None:
    """u [num_tokens, num_channels]; g, beta [num_tokens, num_v_heads] float32; g may be one for each channel
    of k. Writes o [num_tokens, num_v_heads, v_head_dim] and the states of rows and checkpoints, those of the
    `num_requests` requests in `order`."""
    config = layer.config
    block_v, num_warps = tile(config.v_head_dim)
    assert u.stride(1) == 1
    if not num_requests:
        return
    _delta_tokens_kernel[(num_requests, config.num_v_heads, triton.cdiv(config.v_head_dim, block_v))](
        u, g, beta, o, rows.states, rows.inputs, rows.held_inputs, rows.held_gates, layer.conv_weight,
        order, steps.requests, steps.stores, steps.accepted, steps.num_nodes, u.stride(0),
        config.k_head_dim**-0.5,
        HEADS=config.num_v_heads, GROUP=config.num_v_heads // config.num_k_heads, K=config.k_head_dim,
        V=config.v_head_dim, TAPS=config.conv_kernel, NODES=rows.held_inputs.shape[1],
        BLOCK_K=max(triton.next_power_of_2(config.k_head_dim), 16), BLOCK_V=block_v,
        DECAYS=config.num_decays, num_warps=num_warps, **pdl_options(u),
    )  # fmt: skip
