"""cuBLASLt's functions in Python, behind pointers of C as the library's are: what arrives has gone through
ctypes, and GEMMs are made of the memory that the arguments point at."""

from __future__ import annotations

import ctypes
from collections import Counter
from ctypes import c_float, c_int, c_size_t, c_uint16, c_uint32
from typing import Any

import torch

from optimized.kernels.cublas_lt import Config
from optimized.kernels.cublas_lt_api import (
    COMPUTE_32F,
    CONFIG_TYPES,
    CUDA_TYPES,
    SIGNATURES,
    TRANSPOSED,
    Cap,
    MatmulDesc,
)

NOT_SUPPORTED = 15
INVALID_VALUE = 7
STREAM = 77
TYPES = {number: dtype for dtype, number in CUDA_TYPES.items()}
PROPOSED = (Config(66, 2, 1, 0, 0, 1, 35, 0, 3), Config(66, 1, 4, 4, 0, 0, 35, 0, 2))
"""The second adds its parts up in the output's type."""


class FakeCublasLt:
    """`refused`: algorithms that the check does not accept. `workspace_size`: what it says that they need."""

    def __init__(self, refused: tuple[Config, ...] = (), workspace_size: int = 0) -> None:
        self.refused = refused
        self.workspace_size = workspace_size
        self.matmul_status = 0
        self.failures: list[Exception] = []
        self.counts: Counter[str] = Counter()
        self.workspaces: list[tuple[int | None, int]] = []
        self._objects: list[Any] = [None]
        self.cublasLtGetVersion = ctypes.CFUNCTYPE(c_size_t)(lambda: 130102)
        for name, signature in SIGNATURES.items():
            setattr(self, name, ctypes.CFUNCTYPE(c_int, *signature)(self._counted(name)))

    def _counted(self, name: str) -> Any:
        function = getattr(self, name.removeprefix("cublasLt"))

        def call(*arguments: Any) -> int:
            self.counts[name.removeprefix("cublasLt")] += 1
            try:
                return function(*arguments) or 0
            except Exception as error:  # nothing can be raised through C
                self.failures.append(error)
                return INVALID_VALUE

        return call

    def num_objects(self) -> int:
        """Objects that were not destroyed, without the handle."""
        return sum(thing is not None for thing in self._objects) - 1

    def _new(self, pointer: Any, thing: Any) -> None:
        self._objects.append(thing)
        pointer[0] = len(self._objects) - 1

    def Create(self, handle: Any) -> None:
        self._new(handle, "handle")

    def MatmulDescCreate(self, desc: Any, compute: int, scale: int) -> None:
        assert (compute, scale) == (COMPUTE_32F, CUDA_TYPES[torch.float32])
        self._new(desc, {})

    def MatmulDescSetAttribute(self, desc: int, attribute: int, value: int, size: int) -> None:
        assert size == ctypes.sizeof(c_int)
        self._objects[desc][MatmulDesc(attribute)] = c_int.from_address(value).value

    def MatrixLayoutCreate(self, layout: Any, dtype: int, rows: int, columns: int, stride: int) -> None:
        self._new(layout, (TYPES[dtype], rows, columns, stride))

    def MatmulDescDestroy(self, desc: int) -> None:
        assert isinstance(self._objects[desc], dict)
        self._objects[desc] = None

    def MatrixLayoutDestroy(self, layout: int) -> None:
        assert isinstance(self._objects[layout], tuple)
        self._objects[layout] = None

    def MatmulPreferenceDestroy(self, preference: int) -> None:
        assert isinstance(self._objects[preference], dict)
        self._objects[preference] = None

    def MatmulAlgoInit(self, handle: int, *arguments: Any) -> int | None:
        *types, algo_id, algorithm = arguments
        assert types[:2] == [COMPUTE_32F, CUDA_TYPES[torch.float32]]
        assert types[2] == types[3] != CUDA_TYPES[torch.float32]
        assert types[4] == types[5]
        numbers(algorithm)[0] = algo_id
        return None if algo_id == PROPOSED[0].algo_id else INVALID_VALUE

    def MatmulAlgoConfigSetAttribute(self, algorithm: Any, number: int, value: int, size: int) -> None:
        kind = CONFIG_TYPES[number]
        assert size == ctypes.sizeof(kind)
        numbers(algorithm)[number] = kind.from_address(value).value

    def MatmulAlgoConfigGetAttribute(
        self, algorithm: Any, number: int, value: int, size: int, written: Any
    ) -> None:
        kind = c_uint16 if number in (7, 8) else c_uint32
        kind.from_address(value).value = numbers(algorithm)[number]
        written[0] = size

    def MatmulAlgoCapGetAttribute(
        self, algorithm: Any, cap: int, value: int, size: int, written: Any
    ) -> None:
        found = {Cap.TILE_IDS: [1, 2, 3], Cap.CUSTOM_OPTION_MAX: [2]}.get(Cap(cap), [16])
        assert size >= 4 * len(found)
        (c_uint32 * len(found)).from_address(value)[:] = found
        written[0] = 4 * len(found)

    def MatmulAlgoCheck(
        self, handle: int, desc: int, a: int, b: int, c: int, d: int, algorithm: Any, result: Any
    ) -> int | None:
        result[0].workspace_size = self.workspace_size
        return NOT_SUPPORTED if config_of(algorithm) in self.refused else None

    def MatmulPreferenceCreate(self, preference: Any) -> None:
        self._new(preference, {})

    def MatmulPreferenceSetAttribute(self, preference: int, attribute: int, value: int, size: int) -> None:
        assert size == 8

    def MatmulAlgoGetHeuristic(self, handle: int, desc: int, *arguments: Any) -> None:
        *_, most, found, count = arguments
        for i, config in enumerate(PROPOSED):
            (c_uint32 * len(config)).from_buffer(found[i].algorithm)[:] = config
        count[0] = min(len(PROPOSED), most)

    def Matmul(self, handle: int, desc: int, alpha: int, *arguments: Any) -> int:
        a, layout_a, b, layout_b, beta, c, layout_c, d, layout_d, _, *rest = arguments
        assert self._objects[handle] == "handle"
        assert self._objects[desc] == {MatmulDesc.TRANSA: TRANSPOSED}
        assert (c, layout_c) == (d, layout_d)
        workspace, size, stream = rest
        assert stream == STREAM
        self.workspaces.append((workspace, size))
        first, second, out = (self._matrix(*pair) for pair in ((a, layout_a), (b, layout_b), (d, layout_d)))
        result = c_float.from_address(alpha).value * (first.T.float() @ second.float())
        weight = c_float.from_address(beta).value
        if weight != 0:
            result += weight * out.float()
        out.copy_(result)
        return self.matmul_status

    def _matrix(self, address: int, layout: int) -> torch.Tensor:
        """A view [rows, columns] of what is stored column by column."""
        dtype, rows, columns, stride = self._objects[layout]
        memory = (ctypes.c_char * (columns * stride * dtype.itemsize)).from_address(address)
        return torch.frombuffer(memory, dtype=dtype).view(columns, stride)[:, :rows].T


def numbers(algorithm: Any) -> Any:
    """The bytes of an algorithm as the fake uses them: the attributes one after the other."""
    return ctypes.cast(algorithm, ctypes.POINTER(c_uint32))


def config_of(algorithm: Any) -> Config:
    return Config(*numbers(algorithm)[: len(Config._fields)])
