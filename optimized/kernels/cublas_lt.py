"""GEMMs by an algorithm of cuBLAS that the caller names.

PyTorch leaves the choice to the library, which guesses by rules. But an algorithm can be written down: nine
numbers (`Config`) rebuild it in any process with the same version of the library, and another version says
whether it has one like it. So a choice can be measured once and kept in a file.

The library counts in columns: a matrix stored by rows is the transposed one to it. y = x @ weightᵀ is then
yᵀ = weight @ xᵀ, where weight [out_features, in_features] is its first matrix, transposed.
"""

from __future__ import annotations

import weakref
from ctypes import byref, c_float, c_int, c_size_t, c_uint32, c_void_p, pointer, sizeof
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch

from optimized.kernels.cublas_lt_api import (
    COMPUTE_32F,
    CONFIG_TYPES,
    CUDA_TYPES,
    TRANSPOSED,
    Algorithm,
    Candidate,
    Cap,
    CublasLtError,
    Functions,
    MatmulDesc,
    Reduction,
    load,
)


class Config(NamedTuple):
    """What makes an algorithm. A field's place is the library's number for the attribute."""

    algo_id: int
    tile_id: int
    splitk_num: int
    reduction_scheme: int
    cta_swizzling: int
    custom_option: int
    stages_id: int
    inner_shape_id: int
    cluster_shape_id: int

    @property
    def sums_in_float32(self) -> bool:
        """And in a fixed order, its parts too."""
        return self.reduction_scheme == (Reduction.COMPUTE_TYPE if self.splitk_num > 1 else Reduction.NONE)


class Problem(NamedTuple):
    """x [num_tokens, in_features] of dtype @ weightᵀ, the result in out_dtype."""

    num_tokens: int
    out_features: int
    in_features: int
    dtype: torch.dtype
    out_dtype: torch.dtype


@dataclass(eq=False)
class Description:
    """A problem in the library's terms: of the GEMM, and of each matrix."""

    product: c_void_p
    weight: c_void_p
    x: c_void_p
    y: c_void_p

    def layouts(self) -> tuple[c_void_p, ...]:
        """In the order of A, B, C and D."""
        return self.weight, self.x, self.y, self.y


class Library:
    """cuBLASLt, with a handle for the device that is current when this is made."""

    def __init__(self, functions: Functions) -> None:
        self.functions = functions
        self.call = functions.call
        self.handle = c_void_p()
        self.call("cublasLtCreate", byref(self.handle))

    def prepare(self, problem: Problem, config: Config) -> Product | None:
        """None: the library has no such algorithm, or not for this problem on this device."""
        description, checked = self.describe(problem), Candidate()
        try:
            algorithm = self.algorithm(problem, config)
            arguments = description.product, *description.layouts(), byref(algorithm), byref(checked)
            self.call("cublasLtMatmulAlgoCheck", self.handle, *arguments)
            wanted = [self.caps(algorithm, cap)[0] for cap in Cap if cap.name.startswith("MIN_ALIGNMENT")]
        except CublasLtError:
            return None
        if checked.state != 0:
            return None
        return Product(self, description, algorithm, checked.workspace_size, max(1, *wanted))

    def describe(self, problem: Problem) -> Description:
        """Destroyed in the library when it is no longer referenced."""
        num_tokens, out, size, dtype, out_dtype = problem
        product, op = c_void_p(), c_int(TRANSPOSED)
        self.call("cublasLtMatmulDescCreate", byref(product), COMPUTE_32F, CUDA_TYPES[torch.float32])
        self.call("cublasLtMatmulDescSetAttribute", product, MatmulDesc.TRANSA, byref(op), sizeof(op))
        matrices = (dtype, size, out), (dtype, size, num_tokens), (out_dtype, out, num_tokens)
        layouts = [self._layout(*matrix) for matrix in matrices]
        description = Description(product, *layouts)
        weakref.finalize(description, self._forget, product, layouts).atexit = False
        return description

    def _forget(self, product: c_void_p, layouts: list[c_void_p]) -> None:
        self.call("cublasLtMatmulDescDestroy", product)
        for layout in layouts:
            self.call("cublasLtMatrixLayoutDestroy", layout)

    def _layout(self, dtype: torch.dtype, rows: int, columns: int) -> c_void_p:
        """Of a dense matrix, in the library's sense of rows and columns."""
        layout = c_void_p()
        self.call("cublasLtMatrixLayoutCreate", byref(layout), CUDA_TYPES[dtype], rows, columns, rows)
        return layout

    def algorithm(self, problem: Problem, config: Config) -> Algorithm:
        algorithm, half, out = Algorithm(), CUDA_TYPES[problem.dtype], CUDA_TYPES[problem.out_dtype]
        types = COMPUTE_32F, CUDA_TYPES[torch.float32], half, half, out, out
        self.call("cublasLtMatmulAlgoInit", self.handle, *types, config.algo_id, byref(algorithm))
        for number, (kind, attribute) in enumerate(zip(CONFIG_TYPES[1:], config[1:]), start=1):
            value, set_attribute = kind(attribute), "cublasLtMatmulAlgoConfigSetAttribute"
            self.call(set_attribute, byref(algorithm), number, byref(value), sizeof(value))
        return algorithm

    def caps(self, algorithm: Algorithm, cap: Cap, most: int = 1) -> list[int]:
        """As many numbers as there are, up to `most`."""
        values, written = (c_uint32 * most)(), c_size_t()
        get_attribute = "cublasLtMatmulAlgoCapGetAttribute"
        self.call(get_attribute, byref(algorithm), cap, values, sizeof(values), byref(written))
        return list(values[: written.value // sizeof(c_uint32)])


class Product:
    """Of one problem by one algorithm: made once, so that a call leaves little to do."""

    def __init__(
        self,
        library: Library,
        description: Description,
        algorithm: Algorithm,
        workspace_size: int,
        alignment: int,
    ) -> None:
        self.workspace_size = workspace_size  # bytes
        self.alignment = alignment  # bytes, of where a matrix begins
        self._matmul = library.functions.matmul
        self._zero, self._one = (pointer(c_float(value)) for value in (0.0, 1.0))
        self._before = library.handle, description.product, self._one
        self._description = description
        self._weight, self._x, self._y, _ = description.layouts()
        self._algorithm = pointer(algorithm)

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor, add: bool = False) -> bool:
        """Writes x @ weightᵀ to y, or with `add` y + x @ weightᵀ. False, and nothing done, where they do not
        lie in memory as the algorithm assumes."""
        x_at, weight_at, y_at = x.data_ptr(), weight.data_ptr(), y.data_ptr()
        is_dense = x.is_contiguous() and weight.is_contiguous() and y.is_contiguous()
        if not is_dense or (x_at | weight_at | y_at) % self.alignment != 0:
            return False
        # Of this call alone: a shared one would tie streams together. A graph keeps its own.
        workspace, workspace_at = None, None
        if self.workspace_size:
            workspace = torch.empty(self.workspace_size, dtype=torch.uint8, device=x.device)
            workspace_at = workspace.data_ptr()
        beta = self._one if add else self._zero
        status = self._matmul(
            *self._before,
            *(weight_at, self._weight, x_at, self._x),
            *(beta, y_at, self._y, y_at, self._y),
            *(self._algorithm, workspace_at, self.workspace_size, current_stream(x.get_device())),
        )
        if status != 0:
            raise CublasLtError(f"cublasLtMatmul: cuBLAS status {status}")
        return True


@cache
def library(device: torch.device) -> Library | None:
    """None where PyTorch came without it."""
    functions = load()
    if functions is None:
        return None
    with torch.cuda.device(device):
        return Library(functions)


def current_stream(device_index: int) -> int:
    """The handle, without an object around it: this is called for every GEMM."""
    return torch._C._cuda_getCurrentRawStream(device_index)
