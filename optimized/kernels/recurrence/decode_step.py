"""Linear attention of requests of one new token in one launch: convolution, delta rule, the inputs that a row
keeps, and from a model that leaves them to it also the decay before and the norm with its gate behind.

Roofline bound: that of delta_tokens.py.

Shape: a CTA has one request and one value head: the norm needs all of its columns. q and k are computed again
for each value head of a key head; they are short. Tables, weights and what a row holds are of before the
step's first launch, so they are read before the previous kernel ends.

The channels of v belong to one CTA. Those of q and k are read by all CTAs of the key head, and the last of
these to arrive at a counter replaces them. A CTA arrives when all of its threads have computed with what they
read. So no read is on its way when the last one writes, and no CTA waits for another.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from diptych.optimized.kernels.portable import pdl_options, rounded, where_flag
from diptych.optimized.kernels.recurrence.delta_tokens import load_decay, unit
from diptych.optimized.kernels.recurrence.gates import log_decay, norm_and_gate
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

MAX_COLUMNS = 128
"""Of a state, in a CTA. They fill half of a multiprocessor's registers."""


class Gates(NamedTuple):
    """What a model leaves to the kernel. g = -exp(A_log) * softplus(a + dt_bias), and beta = sigmoid(b)."""

    z: torch.Tensor  # [num_tokens, num_v_heads * v_head_dim]
    A_log: torch.Tensor  # [num_v_heads] float32, and so are dt_bias and the norm's weight
    dt_bias: torch.Tensor
    norm_weight: torch.Tensor
    eps: float
    silu: bool  # else z's gate is a sigmoid


@triton.jit
def _held(inputs_ptr, weight_ptr, row, offs, mask, has_past, C: tl.constexpr, TAPS: tl.constexpr):
    """The inputs that the row holds of some channels, their part of the convolution, the last weight."""
    total, window = tl.zeros(offs.shape, tl.float32), ()
    for tap in tl.static_range(TAPS - 1):
        x_ptr = inputs_ptr + (row * (TAPS - 1) + tap) * C + offs
        x = tl.load(x_ptr, mask=where_flag(mask, has_past), other=0.0)
        weight = tl.load(weight_ptr + offs * TAPS + tap, mask=mask, other=0.0)
        total += x.to(tl.float32) * weight.to(tl.float32)
        window += (x,)
    return window, total, tl.load(weight_ptr + offs * TAPS + TAPS - 1, mask=mask, other=0.0)


@triton.jit
def _convolved(u, total, weight):
    total += u.to(tl.float32) * weight.to(tl.float32)
    return total / (1.0 + tl.exp(-total))


@triton.jit
def _keep(inputs_ptr, row, window, u, offs, mask, C: tl.constexpr, TAPS: tl.constexpr):
    window += (u.to(inputs_ptr.dtype.element_ty),)
    for i in tl.static_range(TAPS - 1):
        tl.store(inputs_ptr + (row * (TAPS - 1) + i) * C + offs, window[i + 1], mask=mask)


@triton.jit
def _decode_step_kernel(
    u_ptr, a_ptr, b_ptr, z_ptr, A_log_ptr, dt_bias_ptr, norm_ptr, o_ptr, states_ptr, inputs_ptr, weight_ptr,
    arrived_ptr, requests_ptr, stores_ptr, stride_u, stride_a, stride_b, stride_z, scale, eps,
    HEADS: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, TAPS: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, DECAYS: tl.constexpr, GATED: tl.constexpr,
    NORMED: tl.constexpr, SILU: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    head, request = tl.program_id(0), requests_ptr + tl.program_id(1) * NUM_FIELDS
    k_head = head // GROUP
    k_offs, v_offs = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    if BLOCK_V < V:
        v_offs += tl.program_id(2) * BLOCK_V
    k_mask, v_mask = k_offs < K, v_offs < V
    token, row, has_past = tl.load(request + START), tl.load(request + ROW), tl.load(request + IS_FIRST) == 0
    first_store, last_store = tl.load(request + FIRST_STORE), tl.load(request + LAST_STORE)
    k_size: tl.constexpr = HEADS // GROUP * K
    C: tl.constexpr = 2 * k_size + HEADS * V
    q_offs_c, v_offs_c = k_head * K + k_offs, 2 * k_size + head * V + v_offs
    k_offs_c = k_size + q_offs_c
    tile, mask = head * K * V + k_offs[:, None] * V + v_offs[None, :], k_mask[:, None] & v_mask[None, :]
    state = tl.load(states_ptr + row * (HEADS * K * V) + tile, mask=where_flag(mask, has_past), other=0.0)
    q_window, q, q_weight = _held(inputs_ptr, weight_ptr, row, q_offs_c, k_mask, has_past, C, TAPS)
    k_window, k, k_weight = _held(inputs_ptr, weight_ptr, row, k_offs_c, k_mask, has_past, C, TAPS)
    v_window, v, v_weight = _held(inputs_ptr, weight_ptr, row, v_offs_c, v_mask, has_past, C, TAPS)
    if GATED:
        A_log = tl.load(A_log_ptr + head)
        dt_bias = load_decay(dt_bias_ptr + head * DECAYS, k_offs, k_mask, DECAYS)
    if NORMED:
        norm_weight = tl.load(norm_ptr + v_offs, mask=v_mask, other=0.0)
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()

    u_ptr += token * stride_u
    q_u = tl.load(u_ptr + q_offs_c, mask=k_mask, other=0.0)
    k_u = tl.load(u_ptr + k_offs_c, mask=k_mask, other=0.0)
    v_u = tl.load(u_ptr + v_offs_c, mask=v_mask, other=0.0)
    g = load_decay(a_ptr + token * stride_a + head * DECAYS, k_offs, k_mask, DECAYS).to(tl.float32)
    beta = tl.load(b_ptr + token * stride_b + head).to(tl.float32)
    if NORMED:
        z = tl.load(z_ptr + token * stride_z + head * V + v_offs, mask=v_mask, other=0.0).to(tl.float32)
    if GATED:
        g, beta = log_decay(g + dt_bias, A_log), 1.0 / (1.0 + tl.exp(-beta))
    q = unit(_convolved(q_u, q, q_weight), 0) * scale
    k = unit(_convolved(k_u, k, k_weight), 0)
    v = _convolved(v_u, v, v_weight)
    # What q reads of the new state, without waiting for it: of the old one, and of the correction.
    kept = tl.exp(g)
    if DECAYS > 1:
        state, kept = state * kept, 1.0
    read = kept * tl.sum(state * q[:, None], axis=0)
    correction = beta * (v - kept * tl.sum(state * k[:, None], axis=0))
    o = read + tl.sum(q * k, axis=0) * correction
    state = kept * state + k[:, None] * correction[None, :]
    if NORMED:
        o *= tl.rsqrt(tl.sum(o * o, axis=0) / V + eps) * norm_weight
        o = (o * z if SILU else o) / (1.0 + tl.exp(-z))
    tl.store(o_ptr + (token * HEADS + head) * V + v_offs, rounded(o, o_ptr.dtype.element_ty), mask=v_mask)

    for store in range(first_store, last_store + 1):
        target = row if store == last_store else tl.load(stores_ptr + 2 * store + 1)
        tl.store(states_ptr + target * (HEADS * K * V) + tile, state, mask=mask)
        _keep(inputs_ptr, target, v_window, v_u, v_offs_c, v_mask, C, TAPS)
    READERS: tl.constexpr = GROUP * ((V + BLOCK_V - 1) // BLOCK_V)
    is_last = True
    if READERS > 1:
        tl.debug_barrier()
        counter_ptr = arrived_ptr + row * (HEADS // GROUP) + k_head
        is_last = tl.atomic_add(counter_ptr, 1, sem="relaxed") == READERS - 1
        if is_last:
            tl.store(counter_ptr, 0)
    if is_last:
        for store in range(first_store, last_store + 1):
            target = row if store == last_store else tl.load(stores_ptr + 2 * store + 1)
            _keep(inputs_ptr, target, q_window, q_u, q_offs_c, k_mask, C, TAPS)
            _keep(inputs_ptr, target, k_window, k_u, k_offs_c, k_mask, C, TAPS)


def is_decode_step(rows: LayerRows, steps: LinearSteps) -> bool:
    """Whether the step is one launch: all requests have one token, and rows hold no drafts."""
    return steps.num_single == steps.num_requests and rows.held_inputs.shape[1] == 0


def decode_step(
    u: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    gates: Gates | None,
    rows: LayerRows,
    arrived: torch.Tensor,
    layer: LinearLayer,
    steps: LinearSteps,
) -> torch.Tensor:
    """u [num_tokens, num_channels]; a [num_tokens, num_v_heads * num_decays], b [num_tokens, num_v_heads];
    without `gates` they are g and beta. arrived: [rows * num_k_heads] int32, 0. Returns o [num_tokens,
    num_v_heads, v_head_dim] of u's dtype, of the delta rule or behind norm and gate. Updates states and
    inputs of the rows and checkpoints."""
    config = layer.config
    heads, k_dim, v_dim = config.num_v_heads, config.k_head_dim, config.v_head_dim
    block_v = min(max(triton.next_power_of_2(v_dim), 16), MAX_COLUMNS)
    z, A_log, dt_bias, norm_weight, eps, silu = gates or (u, b, b, b, 0.0, False)
    assert u.stride(1) == a.stride(1) == b.stride(1) == z.stride(1) == 1
    o = u.new_empty(len(u), heads, v_dim)
    _decode_step_kernel[(heads, steps.num_requests, triton.cdiv(v_dim, block_v))](
        u, a, b, z, A_log, dt_bias, norm_weight, o, rows.states, rows.inputs, layer.conv_weight,
        arrived, steps.requests, steps.stores, u.stride(0), a.stride(0), b.stride(0), z.stride(0),
        k_dim**-0.5, eps,
        HEADS=heads, GROUP=heads // config.num_k_heads, K=k_dim, V=v_dim, TAPS=config.conv_kernel,
        BLOCK_K=max(triton.next_power_of_2(k_dim), 16), BLOCK_V=block_v, DECAYS=config.num_decays,
        GATED=gates is not None, NORMED=gates is not None and block_v >= v_dim, SILU=silu, num_warps=4,
        **pdl_options(u),
    )  # fmt: skip
    if gates is not None and block_v < v_dim:
        return norm_and_gate(o, z, norm_weight, eps, silu).view_as(o)
    return o
