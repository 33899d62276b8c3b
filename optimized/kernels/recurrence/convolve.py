"""The causal convolution of linear attention, and the inputs that a request keeps for its next step.

Roofline bound: u once in, c once out, over the memory's bandwidth.

Shape: a CTA has a tile of tokens and channels. A thread loads 16 bytes of u at once, and what one tap reads
the next one finds in the cache. Weights come in loads of 2 bytes, so they are read once for all tokens of the
tile. Keeping inputs is a launch of its own, behind the recurrence: the first tokens of a step read the inputs
that its last ones replace, and the recurrence goes through the held nodes. These, as many as were accepted,
lie between a row's inputs and the new tokens.

Tables and weights are of before the step's first launch, so a kernel may read them before the previous one
ends.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from diptych.optimized.kernels.portable import pdl_options, where_flag
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


@triton.jit
def _input(
    u_ptr, held_ptr, inputs_ptr, first_token, num_accepted, at, is_first, offs, mask, STRIDE_U,
    C: tl.constexpr, TAPS: tl.constexpr,
):  # fmt: skip
    """Input number `at` of a step: below 0, one of earlier steps, or zero before position 0. No branches, so
    that the loads of several inputs are under way at once."""
    before = at + num_accepted
    own, held = where_flag(mask, at >= 0), where_flag(mask, (at < 0) & (before >= 0))
    kept = where_flag(mask, (before < 0) & (is_first == 0))
    x = tl.load(u_ptr + (first_token + at).to(tl.int64) * STRIDE_U + offs, mask=own, other=0.0)
    x += tl.load(held_ptr + before * C + offs, mask=held, other=0.0)
    return x + tl.load(inputs_ptr + (TAPS - 1 + before) * C + offs, mask=kept, other=0.0)


@triton.jit
def convolved(
    u_ptr, held_ptr, inputs_ptr, weight_ptr, first_token, num_accepted, at, is_first, offs, mask, STRIDE_U,
    C: tl.constexpr, TAPS: tl.constexpr,
):  # fmt: skip
    """The channels `offs` of input number `at` of a step, behind the convolution. float32."""
    total = tl.zeros(offs.shape, tl.float32)
    for tap in tl.static_range(TAPS):
        x = _input(
            u_ptr, held_ptr, inputs_ptr, first_token, num_accepted, at - (TAPS - 1) + tap, is_first, offs,
            mask, STRIDE_U, C, TAPS,
        )  # fmt: skip
        weight = tl.load(weight_ptr + offs * TAPS + tap, mask=mask, other=0.0)
        total += x.to(tl.float32) * weight.to(tl.float32)
    return total / (1.0 + tl.exp(-total))


@triton.jit
def _convolve_kernel(
    u_ptr, inputs_ptr, weight_ptr, c_ptr, request_of_ptr, requests_ptr, num_tokens, STRIDE_U,
    C: tl.constexpr, TAPS: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    tokens = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_there, is_channel = tokens < num_tokens, offs < C
    number = tl.load(request_of_ptr + tokens, mask=is_there, other=0)
    request = requests_ptr + number * NUM_FIELDS
    at, row = tokens - tl.load(request + START), tl.load(request + ROW)
    is_first = tl.load(request + IS_FIRST)
    weights = ()
    for tap in tl.static_range(TAPS):
        weights += (tl.load(weight_ptr + offs * TAPS + tap, mask=is_channel, other=0.0).to(tl.float32),)
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    total = tl.zeros((TOKENS, BLOCK), tl.float32)
    for back in tl.static_range(TAPS):
        mask = (is_there & (at >= back))[:, None] & is_channel[None, :]
        x = tl.load(u_ptr + ((tokens - back) * STRIDE_U)[:, None] + offs[None, :], mask=mask, other=0.0)
        if back > 0:  # of earlier steps
            own = (row * (TAPS - 1) + TAPS - 1 + at - back) * C
            mask = (is_there & (at < back) & (is_first == 0))[:, None] & is_channel[None, :]
            x += tl.load(inputs_ptr + own[:, None] + offs[None, :], mask=mask, other=0.0)
        total += x.to(tl.float32) * weights[TAPS - 1 - back][None, :]
    c = total / (1.0 + tl.exp(-total))
    mask = is_there[:, None] & is_channel[None, :]
    tl.store(c_ptr + tokens[:, None] * C + offs[None, :], c, mask=mask)


@triton.jit
def _keep_inputs_kernel(
    u_ptr, g_ptr, beta_ptr, held_ptr, gates_ptr, inputs_ptr, requests_ptr, stores_ptr, accepted_ptr, STRIDE_U,
    C: tl.constexpr, TAPS: tl.constexpr, NODES: tl.constexpr, NUM_NODES: tl.constexpr, HEADS: tl.constexpr,
    DECAYS: tl.constexpr, BLOCK: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Keep the inputs of a step; of a verify step those of the nodes that it began with, and its own nodes
    beside them."""
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    request = requests_ptr + tl.program_id(0) * NUM_FIELDS
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < C
    first_token, is_first = tl.load(request + START), tl.load(request + IS_FIRST)
    row, first_store, last_store = (
        tl.load(request + ROW),
        tl.load(request + FIRST_STORE),
        tl.load(request + LAST_STORE),
    )
    num_accepted = 0
    if NODES > 0:
        num_accepted = tl.load(accepted_ptr + tl.program_id(0))
    own_ptr = inputs_ptr + row.to(tl.int64) * ((TAPS - 1) * C)
    held_ptr += row.to(tl.int64) * (NODES * C)
    for store in range(first_store, last_store + 1):
        target, num_tokens = row, tl.load(request + NUM_KEPT)
        if store < last_store:
            num_tokens, target = tl.load(stores_ptr + 2 * store), tl.load(stores_ptr + 2 * store + 1)
        target_ptr = inputs_ptr + target.to(tl.int64) * ((TAPS - 1) * C)
        # Upwards: input i of the row is read before it is replaced, by a later one.
        for i in tl.static_range(TAPS - 1):
            at = num_tokens - (TAPS - 1) + i
            x = _input(
                u_ptr, held_ptr, own_ptr, first_token, num_accepted, at, is_first, offs, mask, STRIDE_U, C,
                TAPS,
            )  # fmt: skip
            tl.store(target_ptr + i * C + offs, x.to(inputs_ptr.dtype.element_ty), mask=mask)
    for node in range(NUM_NODES):
        token = (first_token + node).to(tl.int64)
        tl.store(held_ptr + node * C + offs, tl.load(u_ptr + token * STRIDE_U + offs, mask=mask), mask=mask)
        if tl.program_id(1) == 0:
            size: tl.constexpr = HEADS * DECAYS
            own_gates = gates_ptr + (row.to(tl.int64) * NODES + node) * (size + HEADS) + offs
            is_head = offs < HEADS
            for at in tl.static_range(0, size, BLOCK):
                is_gate = offs + at < size
                g = tl.load(g_ptr + token * size + at + offs, mask=is_gate)
                tl.store(own_gates + at, g, mask=is_gate)
            tl.store(own_gates + size, tl.load(beta_ptr + token * HEADS + offs, mask=is_head), mask=is_head)


def _block(num_channels: int) -> int:
    return min(triton.next_power_of_2(num_channels), 512)


def convolve(u: torch.Tensor, rows: LayerRows, weight: torch.Tensor, steps: LinearSteps) -> torch.Tensor:
    """u [num_tokens, num_channels], weight [num_channels, taps] -> c [num_tokens, num_channels] float32. That
    of requests whose rows hold drafts is wrong: they go token by token."""
    num_tokens, num_channels = u.shape
    assert u.stride(1) == 1
    assert weight.is_contiguous()
    c = torch.empty(num_tokens, num_channels, dtype=torch.float32, device=u.device)
    _convolve_kernel[(triton.cdiv(num_tokens, 32), triton.cdiv(num_channels, 128))](
        u, rows.inputs, weight, c, steps.request_of, steps.requests, num_tokens, u.stride(0),
        C=num_channels, TAPS=weight.shape[1], TOKENS=32, BLOCK=128, **pdl_options(u),
    )  # fmt: skip
    return c


def keep_inputs(
    u: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, rows: LayerRows, steps: LinearSteps
) -> None:
    """Update `inputs` of the rows and checkpoints of the step; in a verify step also what rows hold."""
    num_channels, num_heads, block = u.shape[1], beta.shape[1], _block(u.shape[1])
    assert num_heads <= block
    _keep_inputs_kernel[(steps.num_requests, triton.cdiv(num_channels, block))](
        u, g, beta, rows.held_inputs, rows.held_gates, rows.inputs, steps.requests, steps.stores,
        steps.accepted, u.stride(0), C=num_channels, TAPS=rows.inputs.shape[1] + 1,
        NODES=rows.held_inputs.shape[1], NUM_NODES=steps.num_nodes, HEADS=num_heads,
        DECAYS=g.numel() // beta.numel(), BLOCK=block, **pdl_options(u),
    )  # fmt: skip
