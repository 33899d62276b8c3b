"""What lets one kernel run on a GPU and in Triton's interpreter: rounding, and what only some GPUs have."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

INTERPRETED = bool(triton.knobs.runtime.interpret)
_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """float32 x to the nearest value of `dtype`, ties to even, as the hardware does it. The interpreter cuts
    off what bfloat16 cannot hold, so there the bits are rounded beforehand."""
    if _INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        x = bits.to(tl.float32, bitcast=True)
    return x.to(dtype)


@triton.jit
def widened(x, ON_GPU: tl.constexpr):
    """x in float32. A bfloat16 is the upper half of one: two are widened by two instructions, which the
    compiler does not see by itself."""
    if ON_GPU and x.dtype == tl.bfloat16:
        asm: tl.constexpr = "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;"
        return tl.inline_asm_elementwise(asm, "=r,=r,r", [x], tl.float32, is_pure=True, pack=2)
    else:
        return x.to(tl.float32)


@triton.jit
def where_flag(mask, flag):
    """mask & flag, of a block and a scalar. Triton 3.9's interpreter spreads a scalar comparison as integers,
    and then refuses it as a mask."""
    if _INTERPRETED:
        return tl.where(flag, mask, False)
    else:
        return mask & flag


@triton.jit
def _larger_or_nan(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def largest_or_nan(x, axis: tl.constexpr):
    """The maximum, NaN where there is one; tl.max passes over NaN. The interpreter would call a combining
    function for each element."""
    if _INTERPRETED:
        return tl.max(x, axis=axis) + tl.sum(tl.where(x != x, x, 0.0), axis=axis)
    else:
        return tl.reduce(x, axis, _larger_or_nan)


def interpreted_rows(num_rows: int) -> int:
    """How many rows a program takes in the interpreter, where a program costs and a row does not; 0 on a GPU,
    where it is the other way round."""
    return min(triton.next_power_of_2(max(num_rows, 1)), 64) if INTERPRETED else 0


def pdl_options(x: torch.Tensor) -> dict[str, Any]:
    """Launch options of a kernel with a USE_PDL switch: with programmatic dependent launch it may start
    before the kernel ahead of it has ended, and waits by itself (gdc_wait) before it touches memory
    that others write."""
    return _PDL if not INTERPRETED and _has_pdl(x.device) else _NO_PDL


_PDL = {"USE_PDL": True, "launch_pdl": True}
_NO_PDL = {"USE_PDL": False}


@cache
def _has_pdl(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)


@cache
def num_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
