"""Asks for a first-level cache that holds what a kernel has under way.

Shared memory is carved out of that cache: of 256 KB of a Hopper GPU's multiprocessor a kernel may have 228
shared, and 28 are left to hold what is read. A kernel that asks for nothing finds what the previous one of it
left. So a GEMV, which reads weights straight into registers, was slower behind attention, which reads keys
into shared memory: whole steps took up to a tenth longer (docs/lab/decode-batch-1.md). A likely
reason is that a read under way needs a line of the cache to come back to. Triton has no option for it, but
the driver has. Not for every such kernel: the experts' GEMVs (moe_gemv.py) lose by it.
"""

from __future__ import annotations

import ctypes
import warnings
from functools import cache
from typing import Any

import torch

from optimized.kernels.portable import INTERPRETED

CARVEOUT = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, in percent
MAX_L1 = 0  # no more shared memory than the kernel itself has


# --8<-- [start:prefer-l1]
def prefer_l1(launched: Any) -> None:
    """`launched`: what `kernel[grid](...)` returned. Holds for later launches of that kernel, and for graphs
    that are captured from now on."""
    if not INTERPRETED and torch.version.cuda is not None:
        _ask(launched.function)


@cache
def _ask(function: int) -> None:
    """Once for each compiled kernel. A refusal costs speed alone."""
    error = _driver().cuFuncSetAttribute(ctypes.c_void_p(function), CARVEOUT, MAX_L1)
    if error != 0:
        message = f"GEMVs stay slower than they could be: cuFuncSetAttribute gives CUDA error {error}"
        warnings.warn(message, RuntimeWarning, stacklevel=2)


# --8<-- [end:prefer-l1]


@cache
def _driver() -> ctypes.CDLL:
    """Triton has loaded it."""
    return ctypes.CDLL("libcuda.so.1")
