"""Chooses the kernel and tile of a quantized linear layer for few tokens: from the GPU's table (`gpu_table`),
by scheme, shape and number of tokens, if `diptych tune --quantization` has measured them; otherwise by a
rule.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from optimized.kernels import gpu_table
from optimized.kernels.cublas_linear import HALF_TYPES
from optimized.kernels.quantize_input import QuantizedInput
from optimized.kernels.quantized_gemm import quantized_gemm
from optimized.kernels.quantized_gemv import GemvTile, quantized_gemv, suits_gemv
from optimized.kernels.quantized_tiles import Tile
from shared.types.quantization import QuantScheme

MAX_TOKENS = 64


def multiply(
    x: torch.Tensor | QuantizedInput,
    weight: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    scheme: QuantScheme,
    y: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> None:
    """`quantized_gemm`, or `quantized_gemv` where it is faster."""
    tile = measured_tile(x, weight, scheme)
    if isinstance(tile, GemvTile) or (tile is None and suits_gemv(x, scheme, _values(x).shape[1])):
        quantized_gemv(x, weight, scale, zero, scheme, y, bias=bias, residual=residual, tile=tile)
    else:
        quantized_gemm(x, weight, scale, zero, scheme, y, bias=bias, residual=residual, tile=tile)


def measured_tile(
    x: torch.Tensor | QuantizedInput, weight: torch.Tensor, scheme: QuantScheme
) -> Tile | GemvTile | None:
    """The tile of the GPU's table; None: it has none, or one of another type."""
    num_tokens, size = _values(x).shape
    if num_tokens > MAX_TOKENS or weight.device.type != "cuda" or x.dtype not in HALF_TYPES:
        return None
    measured = _measured(weight.device).get(shape_name(scheme, len(weight), size), {})
    sizes = [tokens for tokens in measured if tokens >= num_tokens]
    if not sizes:
        return None
    tile = measured[min(sizes)]
    return None if isinstance(tile, GemvTile) and not suits_gemv(x, scheme, size) else tile


def shape_name(scheme: QuantScheme, out: int, size: int) -> str:
    return f"{out} x {size} {scheme}"


def as_row(tile: Tile | GemvTile) -> list[Any]:
    """A tile as a row of the table."""
    return ["gemv" if isinstance(tile, GemvTile) else "gemm", *tile]


def from_row(row: list[Any]) -> Tile | GemvTile:
    kind: type[Tile | GemvTile] = GemvTile if row[0] == "gemv" else Tile
    return kind(*row[1:])


def _values(x: torch.Tensor | QuantizedInput) -> torch.Tensor:
    return x.q if isinstance(x, QuantizedInput) else x


@cache
def _measured(device: torch.device) -> dict[str, dict[int, Tile | GemvTile]]:
    """Shape name -> number of tokens -> the tile up to that number."""
    return {
        name: {int(size): from_row(row) for size, row in rows.items()}
        for name, rows in gpu_table.read(torch.cuda.get_device_name(device)).quantized.items()
    }
