"""Device functions of the experts' epilogues: biases, and gate with up."""

from __future__ import annotations

import triton
import triton.language as tl

GELU = -1.0
"""In place of a limit: the activation is gelu(gate) * up."""


@triton.jit
def gated(gate, up, LIMIT: tl.constexpr):
    """silu(gate) * up, or with a LIMIT > 0 the clamped SwiGLU of FusedExperts, below 0 its gelu. float32."""
    if LIMIT > 0:
        gate = tl.minimum(gate, LIMIT)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
        act = gate / (1.0 + tl.exp(-1.702 * gate)) * (up + 1.0)
    elif LIMIT < 0:
        # (1 + tanh(t)) / 2 is 1 / (1 + exp(-2 t)): gelu is a silu of another slope.
        slope = 1.5957691216057308 * (1.0 + 0.044715 * gate * gate)  # 2 * sqrt(2 / pi)
        act = gate / (1.0 + tl.exp(-gate * slope)) * up
    else:
        act = gate / (1.0 + tl.exp(-gate)) * up
    return act


@triton.jit
def bias_of(bias_ptr, expert, first, offsets, mask, SIZE: tl.constexpr):
    """The bias of an expert's rows first + offsets; SIZE rows each. float32."""
    places = bias_ptr + expert.to(tl.int64) * SIZE + first + offsets
    return tl.load(places, mask=mask, other=0.0).to(tl.float32)
