"""What stands before and after the recurrence of linear attention, and behind attention with gates, one
launch each.

Roofline bound: each value read once and written once, over the memory's bandwidth; for few tokens a launch.

Shape: a CTA has a token and, of the norm and of attention, whole heads: the norm needs all columns of one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from diptych.optimized.kernels.portable import pdl_options, rounded


@triton.jit
def log_decay(x, A_log):
    """-exp(A_log) * softplus(x)"""
    return -tl.exp(A_log) * tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def _decay_and_beta_kernel(
    a_ptr, b_ptr, A_log_ptr, dt_bias_ptr, g_ptr, beta_ptr, stride_a, stride_b,
    HEADS: tl.constexpr, DECAYS: tl.constexpr, BLOCK: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    token, offs = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    if DECAYS > 1:
        offs += tl.program_id(1) * BLOCK
    mask, is_head = offs < HEADS * DECAYS, offs < HEADS
    dt_bias = tl.load(dt_bias_ptr + offs, mask=mask, other=0.0)
    A_log = tl.load(A_log_ptr + offs // DECAYS, mask=mask, other=0.0)
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    a = tl.load(a_ptr + token * stride_a + offs, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + token * stride_b + offs, mask=is_head, other=0.0).to(tl.float32)
    tl.store(g_ptr + token * (HEADS * DECAYS) + offs, log_decay(a + dt_bias, A_log), mask=mask)
    tl.store(beta_ptr + token * HEADS + offs, 1.0 / (1.0 + tl.exp(-b)), mask=is_head)


def decay_and_beta(
    a: torch.Tensor, b: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """a, b [num_tokens, heads]; A_log, dt_bias [heads] float32 -> g = -exp(A_log) * softplus(a + dt_bias) and
    beta = sigmoid(b), float32. a and dt_bias may have several numbers for each head: then g is [num_tokens,
    heads, so many]."""
    (num_tokens, size), heads = a.shape, b.shape[1]
    assert a.stride(1) == b.stride(1) == 1
    shape = (num_tokens, heads) if size == heads else (num_tokens, heads, size // heads)
    g = torch.empty(shape, dtype=torch.float32, device=a.device)
    beta = torch.empty(num_tokens, heads, dtype=torch.float32, device=a.device)
    block = triton.next_power_of_2(heads if size == heads else max(min(size, 512), heads))
    _decay_and_beta_kernel[(num_tokens, triton.cdiv(size, block))](
        a, b, A_log, dt_bias, g, beta, a.stride(0), b.stride(0),
        HEADS=heads, DECAYS=size // heads, BLOCK=block, num_warps=1, **pdl_options(a),
    )  # fmt: skip
    return g, beta


@triton.jit(do_not_specialize=["num_rows"])
def _norm_and_gate_kernel(
    o_ptr, z_ptr, weight_ptr, y_ptr, num_rows, eps, stride_z,
    HEADS: tl.constexpr, V: tl.constexpr, SILU: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    rows, offs = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    mask = (rows < num_rows)[:, None] & (offs < V)[None, :]
    weight = tl.load(weight_ptr + offs, mask=offs < V, other=0.0)
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    tile = (rows * V)[:, None] + offs[None, :]
    z_rows = rows // HEADS * stride_z + rows % HEADS * V
    o = tl.load(o_ptr + tile, mask=mask, other=0.0).to(tl.float32)
    z = tl.load(z_ptr + z_rows[:, None] + offs[None, :], mask=mask, other=0.0).to(tl.float32)
    normed = o * tl.rsqrt(tl.sum(o * o, axis=1) / V + eps)[:, None] * weight[None, :]
    y = (normed * z if SILU else normed) / (1.0 + tl.exp(-z))
    tl.store(y_ptr + tile, rounded(y, y_ptr.dtype.element_ty), mask=mask)


HEADS_OF_NORM, WARPS_OF_NORM = 16, 4
"""Of a CTA, for any number of tokens: other tiles add the squares in another order, and deterministic mode
has the bits of a token alone. With one head each, most of a long prompt's time is the starting of CTAs."""


def norm_and_gate(
    o: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float, silu: bool = True
) -> torch.Tensor:
    """o [num_tokens, heads, v_head_dim], z [num_tokens, heads * v_head_dim], weight [v_head_dim] float32 ->
    the norm of each head of o times silu(z), or sigmoid(z), of z's shape and dtype."""
    num_tokens, heads, v_dim = o.shape
    assert z.stride(1) == 1
    y = torch.empty(num_tokens, heads * v_dim, dtype=z.dtype, device=z.device)
    _norm_and_gate_kernel[(triton.cdiv(num_tokens * heads, HEADS_OF_NORM),)](
        o, z, weight, y, num_tokens * heads, eps, z.stride(0), HEADS=heads, V=v_dim, SILU=silu,
        ROWS=HEADS_OF_NORM, BLOCK=triton.next_power_of_2(v_dim), num_warps=WARPS_OF_NORM, **pdl_options(z),
    )  # fmt: skip
    return y


@triton.jit(do_not_specialize=["num_rows"])
def _gate_heads_kernel(
    o_ptr, gate_ptr, num_rows, stride_o, stride_gate, stride_gate_head,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    rows, offs = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    mask = (rows < num_rows)[:, None] & (offs < HEAD_DIM)[None, :]
    token, head = rows // HEADS, rows % HEADS
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    o_ptr += (token * stride_o + head * HEAD_DIM)[:, None] + offs[None, :]
    gate_ptr += (token * stride_gate + head * stride_gate_head)[:, None] + offs[None, :]
    gate = tl.load(gate_ptr, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(o_ptr, mask=mask, other=0.0).to(tl.float32) / (1.0 + tl.exp(-gate))
    tl.store(o_ptr, rounded(y, o_ptr.dtype.element_ty), mask=mask)


def gate_heads(o: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """o [num_tokens, heads * head_dim] times sigmoid(gate), gate [num_tokens, heads, head_dim] of any strides
    but the last, rounded once. Written over o."""
    num_tokens, heads, head_dim = gate.shape
    assert o.shape == (num_tokens, heads * head_dim)
    assert o.stride(1) == gate.stride(2) == 1
    rows, num_warps = (16, 4) if num_tokens * heads >= 2048 else (1, 1)  # nothing is added up
    _gate_heads_kernel[(triton.cdiv(num_tokens * heads, rows),)](
        o, gate, num_tokens * heads, o.stride(0), gate.stride(0), gate.stride(1), HEADS=heads,
        HEAD_DIM=head_dim, ROWS=rows, BLOCK=triton.next_power_of_2(head_dim), num_warps=num_warps,
        **pdl_options(o),
    )  # fmt: skip
    return o
