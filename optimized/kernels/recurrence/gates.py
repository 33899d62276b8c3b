"""What stands before and after the recurrence of linear attention, one launch each.

Roofline bound: each value read once and written once, over the memory's bandwidth; for few tokens a launch.

Shape: a CTA has a token and, of the norm, one head: the norm needs all of its columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _decay_and_beta_kernel(
    a_ptr, b_ptr, A_log_ptr, dt_bias_ptr, g_ptr, beta_ptr, stride_a, stride_b,
    HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token, heads = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    mask = heads < HEADS
    a = tl.load(a_ptr + token * stride_a + heads, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + token * stride_b + heads, mask=mask, other=0.0).to(tl.float32)
    x = a + tl.load(dt_bias_ptr + heads, mask=mask, other=0.0)
    softplus = tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))
    g = -tl.exp(tl.load(A_log_ptr + heads, mask=mask, other=0.0)) * softplus
    tl.store(g_ptr + token * HEADS + heads, g, mask=mask)
    tl.store(beta_ptr + token * HEADS + heads, 1.0 / (1.0 + tl.exp(-b)), mask=mask)


def decay_and_beta(
    a: torch.Tensor, b: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """a, b [num_tokens, heads]; A_log, dt_bias [heads] float32 -> g = -exp(A_log) * softplus(a + dt_bias) and
    beta = sigmoid(b), float32."""
    num_tokens, heads = a.shape
    assert a.stride(1) == b.stride(1) == 1
    g, beta = (torch.empty(num_tokens, heads, dtype=torch.float32, device=a.device) for _ in range(2))
    _decay_and_beta_kernel[(num_tokens,)](
        a,
        b,
        A_log,
        dt_bias,
        g,
        beta,
        a.stride(0),
        b.stride(0),
        HEADS=heads,
        BLOCK=triton.next_power_of_2(heads),
    )
    return g, beta


@triton.jit
def _norm_and_gate_kernel(
    o_ptr, z_ptr, weight_ptr, y_ptr, eps, stride_z, HEADS: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr
):
    token, head, offs = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, BLOCK)
    mask = offs < V
    o = tl.load(o_ptr + (token * HEADS + head) * V + offs, mask=mask, other=0.0).to(tl.float32)
    z = tl.load(z_ptr + token * stride_z + head * V + offs, mask=mask, other=0.0).to(tl.float32)
    normed = o * tl.rsqrt(tl.sum(o * o, axis=0) / V + eps) * tl.load(weight_ptr + offs, mask=mask, other=0.0)
    y = normed * z / (1.0 + tl.exp(-z))
    tl.store(y_ptr + (token * HEADS + head) * V + offs, y.to(y_ptr.dtype.element_ty), mask=mask)


def norm_and_gate(o: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """o [num_tokens, heads, v_head_dim], z [num_tokens, heads * v_head_dim], weight [v_head_dim] float32 ->
    the norm of each head of o times silu(z), of z's shape and dtype."""
    num_tokens, heads, v_dim = o.shape
    assert z.stride(1) == 1
    y = torch.empty(num_tokens, heads * v_dim, dtype=z.dtype, device=z.device)
    _norm_and_gate_kernel[(num_tokens, heads)](
        o, z, weight, y, eps, z.stride(0), HEADS=heads, V=v_dim, BLOCK=triton.next_power_of_2(v_dim)
    )
    return y
