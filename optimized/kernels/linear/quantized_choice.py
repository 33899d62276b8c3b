"""Chooses the kernel and tile of a quantized linear layer: from the GPU's table (`gpu_table`), by scheme,
shape and number of tokens, if `diptych tune --quantization` has measured them; otherwise by a rule.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, TypeGuard

import torch

from diptych.optimized.kernels import gpu_table
from diptych.optimized.kernels.linear.cublas_linear import HALF_TYPES
from diptych.optimized.kernels.linear.dequantize import dequantize
from diptych.optimized.kernels.linear.quantize_input import PADDED_TOKENS, QuantizedInput, is_padded
from diptych.optimized.kernels.linear.quantized_gemm import quantized_gemm
from diptych.optimized.kernels.linear.quantized_gemv import GemvTile, quantized_gemv, suits_gemv
from diptych.optimized.kernels.linear.quantized_tiles import Tile
from diptych.optimized.kernels.portable import INTERPRETED, gpu_of
from diptych.shared.types.quant_scheme import QuantScheme

FEW_TOKENS = 64
"""Beyond, the rule is that cuBLAS multiplies row-wise FP8."""
MAX_TOKENS = 256
"""Beyond, it always does."""
CUBLAS, DEQUANTIZED = ["cublas"], ["dequantized"]
"""Their rows in the table."""


@dataclass(frozen=True)
class Dequantized:
    """The whole weight is dequantized, and cuBLAS multiplies: for weights whose inputs are not quantized."""


Choice = Tile | GemvTile | Dequantized


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
    counters: torch.Tensor | None = None,
) -> None:
    """`quantized_gemm`, or `quantized_gemv` or cuBLAS where it is faster."""
    tile = measured_tile(x, weight, scheme)
    if isinstance(tile, Dequantized):
        assert isinstance(x, torch.Tensor)
        multiply_dequantized(x, dequantize(weight, scale, zero, scheme, x.dtype), y, bias, residual)
    elif isinstance(tile, GemvTile) or (tile is None and suits_gemv(x, scheme, _values(x).shape[1])):
        quantized_gemv(x, weight, scale, zero, scheme, y, bias=bias, residual=residual, tile=tile)
    else:
        quantized_gemm(
            x, weight, scale, zero, scheme, y, bias=bias, residual=residual, tile=tile, counters=counters
        )  # fmt: skip


def multiply_dequantized(
    x: torch.Tensor,
    weight: torch.Tensor,
    y: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> None:
    """y = x @ weightᵀ + bias + residual; y may be the residual."""
    added = bias if residual is None else residual if bias is None else residual + bias
    if added is None:
        torch.mm(x, weight.T, out=y)
    else:
        torch.addmm(added, x, weight.T, out=y)


def measured_tile(
    x: torch.Tensor | QuantizedInput, weight: torch.Tensor, scheme: QuantScheme
) -> Choice | None:
    """The tile of the GPU's table; None: it has none, or cuBLAS, or one of another type."""
    num_tokens, size = _values(x).shape
    if num_tokens > MAX_TOKENS or weight.device.type != "cuda" or x.dtype not in HALF_TYPES:
        return None
    measured = _measured(weight.device).get(shape_name(scheme, len(weight), size), {})
    most = FEW_TOKENS if num_tokens <= FEW_TOKENS else MAX_TOKENS
    sizes = [tokens for tokens in measured if num_tokens <= tokens <= most]
    if not sizes:
        return None
    tile = measured[min(sizes)]
    return None if isinstance(tile, GemvTile) and not suits_gemv(x, scheme, size) else tile


def goes_to_cublas(
    x: torch.Tensor | QuantizedInput, weight: torch.Tensor, scale: torch.Tensor, scheme: QuantScheme
) -> TypeGuard[QuantizedInput]:
    """Whether `row_wise` multiplies, and not a kernel of ours."""
    return (
        len(_values(x)) > FEW_TOKENS
        and suits_cublas(x, weight, scale)
        and measured_tile(x, weight, scheme) is None
    )


def suits_cublas(
    x: torch.Tensor | QuantizedInput, weight: torch.Tensor, scale: torch.Tensor
) -> TypeGuard[QuantizedInput]:
    """Whether torch._scaled_mm has this GEMM: e4m3 with one scale for each row, on Hopper and later."""
    return (
        isinstance(x, QuantizedInput)
        and not INTERPRETED
        and weight.dtype == torch.float8_e4m3fn
        and scale.shape[1] == 1 == x.scale.shape[-1]
        and x.dtype == torch.bfloat16
        and weight.shape[0] % 16 == 0 == weight.shape[1] % 16
        and gpu_of(weight.device).is_hopper_or_newer
    )


def row_wise(x: QuantizedInput, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Multiply by cuBLAS, with the rows behind x if that is faster: they have any values."""
    num_tokens = len(x.q)
    q, x_scale = x.q, x.scale if x.scale.dim() == 2 else x.scale.expand(num_tokens, 1)
    if is_padded(num_tokens) and _has_room(q) and _has_room(x_scale):
        q, x_scale = (rows.as_strided((PADDED_TOKENS, rows.shape[1]), rows.stride()) for rows in (q, x_scale))
    y = torch._scaled_mm(q, weight.T, x_scale.contiguous(), scale.T, out_dtype=x.dtype)
    return y[:num_tokens]


def _has_room(rows: torch.Tensor) -> bool:
    """Whether the memory of these rows goes on for PADDED_TOKENS."""
    end = rows.storage_offset() + (PADDED_TOKENS - 1) * rows.stride(0) + rows.shape[1]
    return end * rows.itemsize <= rows.untyped_storage().nbytes()


def shape_name(scheme: QuantScheme, out: int, size: int) -> str:
    return f"{out} x {size} {scheme}"


def as_row(tile: Choice | None) -> list[Any]:
    """A tile as a row of the table; None: cuBLAS."""
    if isinstance(tile, Dequantized):
        return DEQUANTIZED
    return CUBLAS if tile is None else ["gemv" if isinstance(tile, GemvTile) else "gemm", *tile]


def from_row(row: list[Any]) -> Choice | None:
    if row in (CUBLAS, DEQUANTIZED):
        return None if row == CUBLAS else Dequantized()
    kind: type[Tile | GemvTile] = GemvTile if row[0] == "gemv" else Tile
    return kind(*row[1:])


def _values(x: torch.Tensor | QuantizedInput) -> torch.Tensor:
    return x.q if isinstance(x, QuantizedInput) else x


@cache
def _measured(device: torch.device) -> dict[str, dict[int, Choice | None]]:
    """Shape name -> number of tokens -> the tile up to that number; None: cuBLAS."""
    return {
        name: {int(size): from_row(row) for size, row in rows.items()}
        for name, rows in gpu_table.read(torch.cuda.get_device_name(device)).quantized.items()
    }
