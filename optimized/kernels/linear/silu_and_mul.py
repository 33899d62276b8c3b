"""silu(gate) * up or gelu(gate) * up, of two tensors or of the two halves of each row: one launch.

Roofline bound: 3 * n * size * itemsize bytes over the memory's bandwidth (two values read, one written). For
few tokens the bound is one launch.

Shape: elementwise, so a tile is as many columns as make wide loads, and for short rows several rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from diptych.optimized.kernels.portable import interpreted_rows, pdl_options

BLOCK = 2048


@triton.jit(do_not_specialize=["num_rows"])
def _act_and_mul_kernel(
    gate_ptr, up_ptr, y_ptr, num_rows, stride_gate, stride_up,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, GELU: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    offs = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    mask = (rows < num_rows) & (offs < SIZE)
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    gate = tl.load(gate_ptr + rows * stride_gate + offs, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + rows * stride_up + offs, mask=mask, other=0.0).to(tl.float32)
    if GELU:
        # (1 + tanh(t)) / 2 is 1 / (1 + exp(-2 t)): gelu is a silu of another slope.
        slope = 1.5957691216057308 * (1.0 + 0.044715 * gate * gate)  # 2 * sqrt(2 / pi)
        y = gate / (1.0 + tl.exp(-gate * slope)) * up
    else:
        # For large negative gates exp(-gate) is infinite and the quotient is 0.
        y = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(y_ptr + rows * SIZE + offs, y.to(y_ptr.dtype.element_ty), mask=mask)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [..., 2 * size], gate first -> [..., size], contiguous."""
    gate, up = gate_up.chunk(2, dim=-1)
    return act_and_mul(gate, up)


def act_and_mul(gate: torch.Tensor, up: torch.Tensor, is_gelu: bool = False) -> torch.Tensor:
    """silu(gate) * up, or with the gelu of GeluTanhAndMul: [..., size], [..., size] -> [..., size],
    contiguous."""
    shape, size = up.shape, up.shape[-1]
    gate, up = (x if x.dim() == 2 else x.reshape(-1, size) for x in (gate, up))
    assert gate.stride(1) == up.stride(1) == 1
    num_rows = up.shape[0]
    y = torch.empty(num_rows, size, dtype=up.dtype, device=up.device)
    block = min(triton.next_power_of_2(size), BLOCK)
    tile_rows = interpreted_rows(num_rows) or BLOCK // block
    _act_and_mul_kernel[(triton.cdiv(num_rows, tile_rows), triton.cdiv(size, block))](
        gate, up, y, num_rows, gate.stride(0), up.stride(0), SIZE=size, BLOCK=block, ROWS=tile_rows,
        GELU=is_gelu, num_warps=8, **pdl_options(up),
    )  # fmt: skip
    return y.view(shape)
