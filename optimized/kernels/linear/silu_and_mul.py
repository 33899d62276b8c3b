"""silu(gate) * up or gelu(gate) * up of the two halves of each row: one launch.

Roofline bound: 3 * n * size * itemsize bytes over the memory's bandwidth (two halves read, one written). For
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
    gate_up_ptr, y_ptr, num_rows, stride_gate_up,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, GELU: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    offs = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    mask = (rows < num_rows) & (offs < SIZE)
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    gate_tile = gate_up_ptr + rows * stride_gate_up + offs
    gate = tl.load(gate_tile, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_tile + SIZE, mask=mask, other=0.0).to(tl.float32)
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
    return _act_and_mul(gate_up, is_gelu=False)


def gelu_tanh_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """The same with the gelu of GeluTanhAndMul."""
    return _act_and_mul(gate_up, is_gelu=True)


def _act_and_mul(gate_up: torch.Tensor, is_gelu: bool) -> torch.Tensor:
    size = gate_up.shape[-1] // 2
    rows = gate_up if gate_up.dim() == 2 else gate_up.reshape(-1, 2 * size)
    assert rows.stride(1) == 1
    num_rows = rows.shape[0]
    y = torch.empty(num_rows, size, dtype=gate_up.dtype, device=gate_up.device)
    block = min(triton.next_power_of_2(size), BLOCK)
    tile_rows = interpreted_rows(num_rows) or BLOCK // block
    _act_and_mul_kernel[(triton.cdiv(num_rows, tile_rows), triton.cdiv(size, block))](
        rows, y, num_rows, rows.stride(0), SIZE=size, BLOCK=block, ROWS=tile_rows, GELU=is_gelu, num_warps=8,
        **pdl_options(rows),
    )  # fmt: skip
    return y if gate_up.dim() == 2 else y.view(*gate_up.shape[:-1], size)
