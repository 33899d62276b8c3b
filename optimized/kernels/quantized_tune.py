"""Tiles of the GEMM with quantized weights, measured on this GPU: `diptych bench quantization --tiles`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from triton.runtime.errors import OutOfResources

from optimized.kernels.quantize_input import quantize_input
from optimized.kernels.quantized_gemm import Tile, largest_step, quantized_gemm
from optimized.kernels.quantized_gemv import GemvTile, quantized_gemv, suits_gemv
from shared.interfaces import QuantizedLinear
from shared.types.quantization import QuantScheme


def fastest_tile(
    layers: Sequence[QuantizedLinear], x: torch.Tensor, time: Callable[[Callable[[int], object]], float]
) -> tuple[Tile | GemvTile, float]:
    """The fastest tile for the GEMM or GEMV of x with the layers' weights, without quantization of x, and
    what `time` says of run(layer)."""
    first = layers[0]
    is_plain = first.scheme.inputs == "none"
    values = x if is_plain else quantize_input(x, first.scheme, first.input_scale)
    y = torch.empty(len(x), first.out_features, dtype=x.dtype, device=x.device)
    times: dict[Tile | GemvTile, float] = {}
    candidates: list[Tile | GemvTile] = list(tiles(len(x), first.scheme, first.in_features))
    if suits_gemv(values, first.scheme, first.in_features):
        candidates += gemv_tiles(first.scheme)
    for tile in candidates:

        def run(i: int, tile: Any = tile) -> None:
            layer = layers[i]
            kernel = quantized_gemv if isinstance(tile, GemvTile) else quantized_gemm
            kernel(values, layer.weight, layer.weight_scale, layer.weight_zero, layer.scheme, y, tile=tile)

        try:
            times[tile] = time(run)
        except OutOfResources:  # shared memory, or registers of so many warps
            continue
    best = min(times, key=lambda tile: times[tile])
    return best, times[best]


def gemv_tiles(scheme: QuantScheme) -> Iterator[GemvTile]:
    for rows in (1, 2, 4, 8):
        for warps in (2, 4, 8):
            if scheme.weight_type == "int4":
                yield GemvTile(rows, warps)
            else:
                yield from (GemvTile(rows, warps, steps, ahead) for steps in (1, 2, 4) for ahead in (1, 2))


def tiles(num_tokens: int, scheme: QuantScheme, size: int) -> Iterator[Tile]:
    step = largest_step(scheme, size)
    steps = [step] if scheme.weight_type == "int4" else sorted({min(step, 128), step})
    if num_tokens <= 64:
        tokens = 16 if num_tokens <= 16 else 32 if num_tokens <= 32 else 64
        for rows in (16, 32, 64, 128):
            for its_step in steps:
                for stages in (3, 5, 8):
                    for warps in (2, 4, 8):
                        yield Tile(tokens, rows, its_step, stages, warps)
        return
    for tokens, rows, warps in ((64, 64, 4), (64, 128, 4), (128, 64, 4), (128, 128, 8), (256, 128, 8)):
        for its_step in steps if scheme.weight_type == "int4" else (64, 128):
            for stages in (3, 4, 5):
                yield Tile(tokens, rows, min(its_step, step), stages, warps)
