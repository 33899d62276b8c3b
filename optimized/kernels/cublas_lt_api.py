"""The part of cuBLASLt's C interface that is used here, for ctypes: numbers, structures, functions.

PyTorch has loaded the library; the same copy answers here.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_float, c_int, c_int64, c_size_t, c_uint16, c_uint32, c_uint64, c_void_p
from enum import IntEnum
from typing import Any

import torch

CUDA_TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}  # cudaDataType_t
COMPUTE_32F = 68  # cublasComputeType_t: sums in float32
TRANSPOSED = 1  # cublasOperation_t


class Reduction(IntEnum):
    """How parts of a GEMM, split along in_features, are added up: those ways that do it in float32 and in
    a fixed order."""

    NONE = 0
    COMPUTE_TYPE = 2


class MatmulDesc(IntEnum):
    TRANSA = 3


class Preference(IntEnum):
    MAX_WORKSPACE_BYTES = 1


class Cap(IntEnum):
    """What can be asked about an algorithm."""

    TILE_IDS = 6
    CUSTOM_OPTION_MAX = 7
    MIN_ALIGNMENT_A_BYTES = 16
    MIN_ALIGNMENT_B_BYTES = 17
    MIN_ALIGNMENT_C_BYTES = 18
    MIN_ALIGNMENT_D_BYTES = 19


class Algorithm(ctypes.Structure):
    _fields_ = (("data", c_uint64 * 8),)


class Candidate(ctypes.Structure):
    """An algorithm for a GEMM, and what it needs there."""

    _fields_ = (
        ("algorithm", Algorithm),
        ("workspace_size", c_size_t),
        ("state", c_int),  # a status: 0 if it can be used
        ("waves_count", c_float),
        ("reserved", c_int * 4),
    )


CONFIG_TYPES = (c_uint32,) * 7 + (c_uint16,) * 2
"""Of an algorithm's attributes, by their numbers."""

_LAYOUTS = (c_void_p, c_void_p, c_void_p, c_void_p)  # of A, B, C and D
SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cublasLtCreate": (POINTER(c_void_p),),
    "cublasLtMatmulDescCreate": (POINTER(c_void_p), c_int, c_int),
    "cublasLtMatmulDescSetAttribute": (c_void_p, c_int, c_void_p, c_size_t),
    "cublasLtMatmulDescDestroy": (c_void_p,),
    "cublasLtMatrixLayoutCreate": (POINTER(c_void_p), c_int, c_uint64, c_uint64, c_int64),
    "cublasLtMatrixLayoutDestroy": (c_void_p,),
    "cublasLtMatmulAlgoInit": (c_void_p, *[c_int] * 7, POINTER(Algorithm)),
    "cublasLtMatmulAlgoConfigGetAttribute": (
        *(POINTER(Algorithm), c_int, c_void_p, c_size_t, POINTER(c_size_t)),
    ),
    "cublasLtMatmulAlgoConfigSetAttribute": (POINTER(Algorithm), c_int, c_void_p, c_size_t),
    "cublasLtMatmulAlgoCapGetAttribute": (
        *(POINTER(Algorithm), c_int, c_void_p, c_size_t, POINTER(c_size_t)),
    ),
    "cublasLtMatmulAlgoCheck": (c_void_p, c_void_p, *_LAYOUTS, POINTER(Algorithm), POINTER(Candidate)),
    "cublasLtMatmulPreferenceCreate": (POINTER(c_void_p),),
    "cublasLtMatmulPreferenceDestroy": (c_void_p,),
    "cublasLtMatmulPreferenceSetAttribute": (c_void_p, c_int, c_void_p, c_size_t),
    "cublasLtMatmulAlgoGetHeuristic": (
        *(c_void_p, c_void_p, *_LAYOUTS, c_void_p, c_int, POINTER(Candidate), POINTER(c_int)),
    ),
    "cublasLtMatmul": (
        *(c_void_p, c_void_p, c_void_p),  # handle, GEMM, alpha
        *(c_void_p, c_void_p, c_void_p, c_void_p),  # A and B, each with its layout
        *(c_void_p, c_void_p, c_void_p, c_void_p, c_void_p),  # beta, C and D
        *(POINTER(Algorithm), c_void_p, c_size_t, c_void_p),  # workspace, its size, stream
    ),
}
"""Each returns a status."""


class CublasLtError(RuntimeError):
    """A function of the library returned another status than success."""


class Functions:
    """Of the library, or of what stands in for it."""

    def __init__(self, source: Any) -> None:
        for name, signature in SIGNATURES.items():
            getattr(source, name).argtypes = signature
        source.cublasLtGetVersion.restype = c_size_t
        self._source = source
        self.matmul = source.cublasLtMatmul

    def call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._source, name)(*arguments)
        if status != 0:
            raise CublasLtError(f"{name}: cuBLAS status {status}")

    def version(self) -> str:
        number = self._source.cublasLtGetVersion()
        return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def load() -> Functions | None:
    """None where PyTorch came without the library."""
    if torch.version.cuda is None:
        return None
    try:
        return Functions(ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.partition('.')[0]}"))
    except OSError:
        return None
