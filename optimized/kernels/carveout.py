"""Sets the L1/shared-memory carve-out of a kernel: the share of a multiprocessor's memory that is L1 cache.

A Hopper multiprocessor has 256 KB; up to 228 KB of it can be shared memory. A kernel that sets nothing runs
with the carve-out of the previous kernel. A GEMV reads weights straight into registers, and was slower behind
attention, which reads keys into shared memory: whole steps took up to a tenth longer
(docs/lab/decode-batch-1.md). A likely reason is that each outstanding read needs a line of the L1 cache.
Triton has no option for it, so the driver is called. The experts' GEMVs (moe_gemv.py) become slower with it.

Every CTA needs 1 KB of shared memory for the system. With the largest L1 cache there is room for a few CTAs
only, so a kernel of more CTAs per multiprocessor says how many.
"""

from __future__ import annotations

import ctypes
import warnings
from functools import cache
from typing import Any

import torch

from diptych.optimized.kernels.portable import INTERPRETED, gpu_of

CARVEOUT = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, in percent
OF_CTA = 1024  # bytes of shared memory for the system


# --8<-- [start:prefer-l1]
def prefer_l1(launched: Any, num_ctas: int = 0) -> None:
    """`launched`: what `kernel[grid](...)` returned. It applies to later launches of
    that kernel, and to graphs captured afterwards. The shared memory is that of
    num_ctas CTAs on a multiprocessor; 0: the least there is. None: the kernel was
    only compiled, in `compile_ahead`."""
    if launched is not None and not INTERPRETED and torch.version.cuda is not None:
        _ask(launched.function, num_ctas * (launched.metadata.shared + OF_CTA))


@cache
def _ask(function: int, room: int) -> None:
    """Called once for each compiled kernel, with bytes. If the driver refuses, only
    speed is lost."""
    whole = gpu_of(torch.device("cuda")).shared_memory + OF_CTA
    percent = -(-100 * room // whole)
    error = _driver().cuFuncSetAttribute(ctypes.c_void_p(function), CARVEOUT, percent)
    if error != 0:
        message = f"kernels stay slow: cuFuncSetAttribute gives CUDA error {error}"
        warnings.warn(message, RuntimeWarning, stacklevel=2)


# --8<-- [end:prefer-l1]


@cache
def _driver() -> ctypes.CDLL:
    """The CUDA driver library, which Triton has loaded."""
    return ctypes.CDLL("libcuda.so.1")
