"""GEMMs by cuBLAS: by its own choice of an algorithm, or by a measured one where that was faster.

Measured algorithms are in the GPU's table (`gpu_table`), by the weight's shape and the number of tokens. All
add in float32, in one order or another, so the table changes nothing but time. Where cuBLAS has another
version than the table, the table's algorithms are ignored.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F

from optimized.kernels import cublas_lt, gpu_table
from optimized.kernels.cublas_lt import Config, Problem, Product

HALF_TYPES = (torch.float16, torch.bfloat16)
STEP = 8
"""Tokens. The sides of all tiles are multiples of it: so many tokens more or less make the same tiles."""
MAX_EXACT_TOKENS = 512
"""Beyond, an entry serves all numbers of tokens up to the next one's, though it was measured at its own: of
so many tiles, some more change little."""


class Shape(NamedTuple):
    """Of a GEMM, whatever the number of tokens."""

    in_features: int
    out_features: int
    in_float32: bool = False  # the result; else in the type of what is multiplied

    @staticmethod
    def of(problem: Problem) -> Shape:
        in_float32 = problem.out_dtype != problem.dtype
        return Shape(problem.in_features, problem.out_features, in_float32)

    @staticmethod
    def parse(name: str) -> Shape:
        sizes, _, kind = name.partition(", ")
        in_features, out_features = map(int, sizes.split(" to "))
        return Shape(in_features, out_features, kind == "float32")

    def name(self) -> str:
        return f"{self.in_features} to {self.out_features}" + (", float32" if self.in_float32 else "")

    def problem(self, num_tokens: int, dtype: torch.dtype = torch.bfloat16) -> Problem:
        out_dtype = torch.float32 if self.in_float32 else dtype
        return Problem(num_tokens, self.out_features, self.in_features, dtype, out_dtype)


class Table(NamedTuple):
    """What was measured on one kind of GPU."""

    version: str  # of the library
    configs: dict[Shape, dict[int, Config | None]]
    """By the number of tokens, a multiple of STEP. None, of prompts: the library's own choice is best."""

    def entries(self) -> list[tuple[Problem, Config]]:
        return [
            (shape.problem(num_tokens), config)
            for shape, by_tokens in self.configs.items()
            for num_tokens, config in by_tokens.items()
            if config is not None
        ]


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """x [num_tokens, in_features], weight [out_features, in_features] -> x @ weightᵀ + bias, rounded once, to
    out_dtype (default: x's); twice where the library has no GEMM of such types."""
    out_dtype = out_dtype or x.dtype
    product = None if bias is not None else measured_gemm(x, weight, out_dtype)
    if product is not None:
        y = torch.empty(x.shape[0], weight.shape[0], dtype=out_dtype, device=x.device)
        if product(x, weight, y):
            return y
    if out_dtype == x.dtype or bias is not None or not x.is_cuda:
        return F.linear(x, weight, bias).to(out_dtype)
    return torch.mm(x, weight.T, out_dtype=out_dtype)


def linear_add(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """residual + linear(x), written over residual [num_tokens, out_features]. cuBLAS rounds the GEMM
    before it adds, unless it computes it in parts; a bias is added to what was rounded."""
    product = measured_gemm(x, weight, residual.dtype)
    if product is None or not product(x, weight, residual, add=True):
        residual.addmm_(x, weight.T)
    return residual if bias is None else residual.add_(bias)


def measured_gemm(x: torch.Tensor, weight: torch.Tensor, out_dtype: torch.dtype) -> Product | None:
    """None: cuBLAS is to choose."""
    if not x.is_cuda or x.dtype not in HALF_TYPES:
        return None
    return _prepared(x.shape, weight.shape, x.dtype, out_dtype, x.device)


@lru_cache(maxsize=4096)  # prompts may have any number of tokens
def _prepared(
    x: torch.Size, weight: torch.Size, dtype: torch.dtype, out_dtype: torch.dtype, device: torch.device
) -> Product | None:
    problem = Problem(x[0], weight[0], weight[1], dtype, out_dtype)
    measured = table(torch.cuda.get_device_name(device))
    config = config_for(problem, measured)
    library = cublas_lt.library(device) if config is not None else None
    if config is None or library is None or library.functions.version() != measured.version:
        return None
    return library.prepare(problem, config)


def config_for(problem: Problem, table: Table) -> Config | None:
    """That of the next multiple of STEP, if there is one; of prompts, that of the largest size which is not
    larger."""
    by_tokens = table.configs.get(Shape.of(problem), {})
    if problem.num_tokens <= MAX_EXACT_TOKENS:
        return by_tokens.get(-(-problem.num_tokens // STEP) * STEP)
    smaller = [size for size in by_tokens if MAX_EXACT_TOKENS < size <= problem.num_tokens]
    return by_tokens[max(smaller)] if smaller else None


def describe(device: torch.device) -> tuple[bool, str]:
    """Whether measured algorithms are used on this GPU, and how many of them."""
    gpu = torch.cuda.get_device_name(device)
    measured, library = table(gpu), cublas_lt.library(device)
    entries = measured.entries()
    if not entries:
        return False, f"cuBLAS chooses: nothing was measured on {gpu}"
    if library is None:
        return False, "cuBLAS chooses: this PyTorch has no cuBLASLt"
    here = library.functions.version()
    if here != measured.version:
        return False, f"cuBLAS chooses: the table is of cuBLAS {measured.version}, and this is {here}"
    num_found = sum(library.prepare(*entry) is not None for entry in entries)
    return num_found > 0, f"{num_found} of {len(entries)} measured ones (cuBLAS {here})"


@cache
def table(gpu: str) -> Table:
    return table_of(gpu_table.read(gpu))


def table_of(measured: gpu_table.GpuTable) -> Table:
    """Raises `ValueError` for what is no algorithm, or none that sums in float32."""
    configs = {
        Shape.parse(name): {int(size): _config(numbers) for size, numbers in by_tokens.items()}
        for name, by_tokens in measured.gemms.items()
    }
    return Table(measured.cublas, configs)


def with_gemms(measured: gpu_table.GpuTable, table: Table) -> gpu_table.GpuTable:
    """The opposite of `table_of`."""
    gemms = {
        shape.name(): {str(size): config and list(config) for size, config in configs.items()}
        for shape, configs in table.configs.items()
    }
    return replace(measured, cublas=table.version, gemms=gemms)


def _config(numbers: list[int] | None) -> Config | None:
    if numbers is None:
        return None
    if len(numbers) != len(Config._fields):
        raise ValueError(f"{numbers}: an algorithm is {len(Config._fields)} numbers")
    config = Config(*numbers)
    if not config.sums_in_float32:
        raise ValueError(f"{config}: its parts are not added up in float32")
    return config
