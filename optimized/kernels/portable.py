"""Helpers to run one kernel on any GPU and in Triton's interpreter: rounding, and features of some GPUs."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

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
    """The number of rows of one CTA in the interpreter, whose time depends on CTAs and not on rows; 0 on a
    GPU, where a kernel uses its own number."""
    return min(triton.next_power_of_2(max(num_rows, 1)), 64) if INTERPRETED else 0


def batch_block(batch_size: int, least: int = 16, factor: int = 4) -> int:
    """The number of requests that a CTA looks at to find its own: at least `batch_size`. Each number is a
    kernel of its own, so there are few. Kernels with several tiles multiply with it, and have still fewer:
    `prompts_block`."""
    size = least
    while size < batch_size:
        size *= factor
    return size


def prompts_block(batch_size: int) -> int:
    """`batch_block` of a prefill kernel, whose CTAs work for longer."""
    return batch_block(batch_size, 64, 16)


class Gpu(NamedTuple):
    """The properties of a GPU by which kernels choose tiles and instructions."""

    capability: tuple[int, int]
    num_multiprocessors: int  # 0: the interpreter
    shared_memory: int  # bytes, the most that one CTA may have

    @property
    def is_hopper_or_newer(self) -> bool:
        """Programmatic dependent launch, tensor descriptors (TMA), bulk copies."""
        return self.capability >= (9, 0)

    @property
    def has_fp8(self) -> bool:
        """Conversions between float8_e4m3fn and wider types."""
        return self.capability >= (8, 9)

    @property
    def has_large_shared_memory(self) -> bool:
        """Enough for the tiles of sm_80, 90 and 100; sm_86, 89 and 120 have 99 KB."""
        return self.shared_memory >= 160 * 1024

    def shared_memory_per_cta(self, num_ctas: int) -> int:
        """Bytes of shared memory of each of `num_ctas` CTAs on one multiprocessor. Its shared memory is 1 KB
        more than one CTA may have, and the driver takes 1 KB of each CTA's share."""
        return (self.shared_memory + 1024) // num_ctas - 1024


_INTERPRETER = Gpu((0, 0), 0, 227 * 1024)


@cache
def gpu_of(device: torch.device) -> Gpu:
    if INTERPRETED:
        return _INTERPRETER
    properties = torch.cuda.get_device_properties(device)
    return Gpu(
        (properties.major, properties.minor),
        properties.multi_processor_count,
        properties.shared_memory_per_block_optin,
    )


def pdl_options(x: torch.Tensor) -> dict[str, Any]:
    """Launch options of a kernel with a USE_PDL switch. Under programmatic dependent launch a kernel may
    start before the previous kernel has ended. It calls gdc_wait before it touches memory that others
    write."""
    return _PDL if gpu_of(x.device).is_hopper_or_newer else _NO_PDL


_PDL = {"USE_PDL": True, "launch_pdl": True}
_NO_PDL = {"USE_PDL": False}
