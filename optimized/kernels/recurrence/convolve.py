"""The causal convolution of linear attention, and the inputs that a request keeps for its next step.

Roofline bound: u once in, c once out, over the memory's bandwidth. The other taps of a token are lines of the
cache that its neighbours have read.

Shape: a CTA has one token and a block of channels. Keeping is a launch of its own: a prompt's first
tokens read the inputs that its last ones replace.
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
    NUM_TOKENS,
    ROW,
    START,
    LinearSteps,
)


@triton.jit
def _input(
    u_ptr, inputs_ptr, first_token, at, is_first, offs, mask, STRIDE_U, C: tl.constexpr, TAPS: tl.constexpr
):
    """Input number `at` of a step: below 0, one of earlier steps, or zero before position 0."""
    if at >= 0:
        x = tl.load(u_ptr + (first_token + at).to(tl.int64) * STRIDE_U + offs, mask=mask, other=0.0)
    elif is_first != 0:
        x = tl.load(u_ptr + offs, mask=mask & (offs < 0), other=0.0)
    else:
        x = tl.load(inputs_ptr + (TAPS - 1 + at) * C + offs, mask=mask, other=0.0)
    return x


@triton.jit
def _convolve_kernel(
    u_ptr, inputs_ptr, weight_ptr, c_ptr, request_of_ptr, requests_ptr, STRIDE_U,
    C: tl.constexpr, TAPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < C
    request = requests_ptr + tl.load(request_of_ptr + token) * NUM_FIELDS
    first_token, is_first = tl.load(request + START), tl.load(request + IS_FIRST)
    inputs_ptr += tl.load(request + ROW).to(tl.int64) * ((TAPS - 1) * C)
    total = tl.zeros((BLOCK,), tl.float32)
    for tap in tl.static_range(TAPS):
        at = token - first_token - (TAPS - 1) + tap
        x = _input(u_ptr, inputs_ptr, first_token, at, is_first, offs, mask, STRIDE_U, C, TAPS)
        weight = tl.load(weight_ptr + offs * TAPS + tap, mask=mask, other=0.0)
        total += x.to(tl.float32) * weight.to(tl.float32)
    tl.store(c_ptr + token.to(tl.int64) * C + offs, total / (1.0 + tl.exp(-total)), mask=mask)


@triton.jit
def _keep_inputs_kernel(
    u_ptr, inputs_ptr, requests_ptr, stores_ptr, STRIDE_U,
    C: tl.constexpr, TAPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The last inputs of a request, and those of its checkpoints before them: these read the old ones."""
    request = requests_ptr + tl.program_id(0) * NUM_FIELDS
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < C
    first_token, is_first = tl.load(request + START), tl.load(request + IS_FIRST)
    row, first_store, last_store = (
        tl.load(request + ROW),
        tl.load(request + FIRST_STORE),
        tl.load(request + LAST_STORE),
    )
    own_ptr = inputs_ptr + row.to(tl.int64) * ((TAPS - 1) * C)
    for store in range(first_store, last_store + 1):
        target, num_tokens = row, tl.load(request + NUM_TOKENS)
        if store < last_store:
            num_tokens, target = tl.load(stores_ptr + 2 * store), tl.load(stores_ptr + 2 * store + 1)
        target_ptr = inputs_ptr + target.to(tl.int64) * ((TAPS - 1) * C)
        # Upwards: input i of the row is read before it is replaced, by a later one.
        for i in tl.static_range(TAPS - 1):
            at = num_tokens - (TAPS - 1) + i
            x = _input(u_ptr, own_ptr, first_token, at, is_first, offs, mask, STRIDE_U, C, TAPS)
            tl.store(target_ptr + i * C + offs, x.to(inputs_ptr.dtype.element_ty), mask=mask)


def convolve(u: torch.Tensor, inputs: torch.Tensor, weight: torch.Tensor, steps: LinearSteps) -> torch.Tensor:
    """u [num_tokens, num_channels], inputs [rows, taps - 1, num_channels] of the layer, weight
    [num_channels, taps] -> c [num_tokens, num_channels] float32. Updates the rows and checkpoints of the
    step in `inputs`."""
    num_tokens, num_channels = u.shape
    taps, block = weight.shape[1], min(triton.next_power_of_2(num_channels), 512)
    assert u.stride(1) == 1
    assert weight.is_contiguous()
    c = torch.empty(num_tokens, num_channels, dtype=torch.float32, device=u.device)
    num_blocks = triton.cdiv(num_channels, block)
    sizes = {"C": num_channels, "TAPS": taps, "BLOCK": block}
    _convolve_kernel[(num_tokens, num_blocks)](
        u, inputs, weight, c, steps.request_of, steps.requests, u.stride(0), **sizes
    )
    _keep_inputs_kernel[(steps.num_requests, num_blocks)](
        u, inputs, steps.requests, steps.stores, u.stride(0), **sizes
    )
    return c
