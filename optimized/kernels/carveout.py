"""Sets the L1/shared-memory carve-out of a kernel: the share of a multiprocessor's memory that is L1 cache.

A Hopper multiprocessor has 256 KB; up to 228 KB of it can be shared memory. A kernel that sets nothing runs
with the carve-out of the previous kernel. A GEMV reads weights straight into registers, and was slower behind
attention, which reads keys into shared memory: whole steps took up to a tenth longer
(docs/lab/decode-batch-1.md). A likely reason is that each outstanding read needs a line of the L1 cache.
Triton has no option for it, so the driver is called. The experts' GEMVs (moe_gemv.py) become slower with it.
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
    """`launched`: what `kernel[grid](...)` returned. It applies to later launches of
    that kernel, and to graphs captured afterwards."""
    if not INTERPRETED and torch.version.cuda is not None:
        _ask(launched.function)


@cache
def _ask(function: int) -> None:
    """Called once for each compiled kernel. If the driver refuses, only speed is
    lost."""
    error = _driver().cuFuncSetAttribute(ctypes.c_void_p(function), CARVEOUT, MAX_L1)
    if error != 0:
        message = f"GEMVs stay slow: cuFuncSetAttribute gives CUDA error {error}"
        warnings.warn(message, RuntimeWarning, stacklevel=2)


# --8<-- [end:prefer-l1]


@cache
def _driver() -> ctypes.CDLL:
    """The CUDA driver library, which Triton has loaded."""
    return ctypes.CDLL("libcuda.so.1")
