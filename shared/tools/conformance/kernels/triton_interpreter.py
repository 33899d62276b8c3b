"""Triton's interpreter, in which kernels run where there is no GPU."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import numpy as np

NO_GPU = ("active drivers", "Found no NVIDIA driver", "not compiled with CUDA")
HINT = (
    "This computer has no GPU: TRITON_INTERPRET=1 before the command runs Triton's kernels in an interpreter"
)
MODULE = "triton.runtime.interpreter"
_PATCHED: set[object] = set()


def round_in_interpreter() -> None:
    """Makes the interpreter convert float32 to bfloat16 as a GPU does, to the nearest number, ties to even.
    Triton 3.9 cuts bits off there: right kernels would fail. Nothing happens where it is not loaded."""
    module: Any = sys.modules.get(MODULE)
    if module is None or module in _PATCHED:
        return
    _PATCHED.add(module)
    builder, types, cast = module.InterpreterBuilder, module.tl, module.InterpreterBuilder.cast_impl

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        if (src.dtype.scalar, dst_type.scalar) != (types.float32, types.bfloat16):
            return cast(self, src, dst_type)
        return module.TensorHandle(nearest(np.asarray(src.data)), dst_type.scalar)

    builder.cast_impl = cast_impl


def nearest(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The bits of float32 numbers in bfloat16, uint16 in the same shape."""
    bits = x.astype(np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(x), bits >> 16 | 0x40, rounded).astype(np.uint16)


def hints(failures: Iterable[str]) -> list[str]:
    """What to do about failures of this computer, not of the function."""
    return [HINT] if any(words in each for each in failures for words in NO_GPU) else []
