"""Measures tiles of linear layers with quantized weights on this GPU, for `diptych tune --quantization`: each
layer alone, over the weights of enough layers that they come from memory and not from the L2 cache."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import triton
from tqdm.auto import tqdm
from triton.runtime.errors import OutOfResources

from diptych.optimized.kernels.gpu_table import GpuTable
from diptych.optimized.kernels.linear.dequantize import dequantize
from diptych.optimized.kernels.linear.quantize_input import QuantizedInput, quantize_input
from diptych.optimized.kernels.linear.quantized_choice import (
    FEW_TOKENS,
    MAX_TOKENS,
    Choice,
    Dequantized,
    as_row,
    multiply_dequantized,
    row_wise,
    shape_name,
    suits_cublas,
)
from diptych.optimized.kernels.linear.quantized_gemm import MAX_TILES, quantized_gemm
from diptych.optimized.kernels.linear.quantized_gemv import GemvTile, quantized_gemv, suits_gemv
from diptych.optimized.kernels.linear.quantized_tiles import Tile, largest_step
from diptych.optimized.tune.linear_tune import L2_BYTES, LinearShape
from diptych.optimized.tune.moe_tune import graph_time
from diptych.shared.types.quant_scheme import QuantScheme

TOKENS = (1, 8, 16, 32, 64, 96, 128, 192, 256)
PARTS = (2, 3, 4, 6)
MAX_CTAS = 512

Layer = dict[str, torch.Tensor]


def tune(
    table: GpuTable, scheme: QuantScheme, shape: LinearShape, all_tokens: Sequence[int]
) -> Iterator[GpuTable]:
    """Yields the table after each measurement, with the fastest tile for one more number of tokens."""
    name = shape_name(scheme, *shape[:2])
    layers = _layers(scheme, shape)
    sizes = [size for size in all_tokens if size <= MAX_TOKENS]
    for num_tokens in tqdm(sizes, desc=name, unit="size", leave=False):
        tile, time = fastest_tile(scheme, layers, num_tokens, shape.added)
        tqdm.write(f"{name}, {num_tokens:3} tokens  {time:6.1f} us  {tile or 'cuBLAS'}")
        rows = {**table.quantized.get(name, {}), str(num_tokens): as_row(tile)}
        table = replace(table, quantized={**table.quantized, name: rows})
        yield table


def fastest_tile(
    scheme: QuantScheme, layers: list[Layer], num_tokens: int, added: bool = False
) -> tuple[Choice | None, float]:
    """The fastest tile, None: cuBLAS, and its time in microseconds, without quantization of the input. added:
    to a residual, whose sum cuBLAS has not."""
    out, size = len(layers[0]["weight"]), layers[0]["weight"].shape[1] * (2 if scheme.is_packed else 1)
    x = torch.randn(num_tokens, size, device=layers[0]["weight"].device).to(torch.bfloat16)
    values = x if scheme.inputs == "none" else quantize_input(x, scheme, layers[0].get("input_scale"))
    y = torch.empty(num_tokens, out, dtype=x.dtype, device=x.device)
    residual = y if added else None
    counters = torch.zeros(MAX_TILES, dtype=torch.int32, device=x.device) if values is x else None
    times: dict[Choice | None, float] = {}
    for tile in candidates(values, scheme, out, size):

        def run(i: int, tile: Any = tile) -> None:
            zero = layers[i].get("weight_zero", layers[i].get("weight_global"))
            given = layers[i]["weight"], layers[i]["weight_scale"], zero, scheme
            if isinstance(tile, Dequantized):
                multiply_dequantized(x, dequantize(*given, x.dtype), y, residual=residual)
            elif isinstance(tile, GemvTile):
                quantized_gemv(values, *given, y, residual=residual, tile=tile)
            else:
                quantized_gemm(values, *given, y, residual=residual, tile=tile, counters=counters)

        try:
            times[tile] = graph_time(run, num_layers=len(layers))
        except OutOfResources:  # shared memory, or registers of so many warps
            continue

    def run_cublas(i: int) -> None:
        assert isinstance(values, QuantizedInput)
        result = row_wise(values, layers[i]["weight"], layers[i]["weight_scale"])
        if added:
            y.add_(result)

    if num_tokens > FEW_TOKENS and suits_cublas(values, layers[0]["weight"], layers[0]["weight_scale"]):
        times[None] = graph_time(run_cublas, num_layers=len(layers))
    return min(times.items(), key=lambda item: item[1])


def candidates(
    values: torch.Tensor | QuantizedInput, scheme: QuantScheme, out: int, size: int
) -> Iterator[Choice]:
    """The tiles worth timing: a warp has 16 to 64 outputs, and registers for their sums. Split-K: with the
    64 outputs that Hopper's tensor cores take, of 4 bits with any, and up to MAX_CTAS, about four for a
    multiprocessor. cuBLAS multiplies dequantized weights by more than 16 tokens."""
    if suits_gemv(values, scheme, size):
        loads = [(1, 1), (1, 2)]
        if scheme.weight_type == "fp8":
            loads = [(1, 1), (1, 2), (2, 1), (2, 2)]
        for rows, warps, (steps, ahead) in itertools.product((1, 2, 4), (4, 8), loads):
            yield GemvTile(rows, warps, steps, ahead)
    num_tokens = len(values.q) if isinstance(values, QuantizedInput) else len(values)
    if num_tokens > 16 and scheme.inputs == "none":
        yield Dequantized()
    if num_tokens > FEW_TOKENS:
        yield from _tiles_of_many(num_tokens, scheme, out, size)
        return
    tokens = next(tokens for tokens in (8, 16, 32, 64) if num_tokens <= tokens)
    largest = largest_step(scheme, size)
    steps_stages = [(largest, stages) for stages in (4, 8, 12)]
    if not scheme.is_packed:
        steps_stages = list(itertools.product(sorted({min(largest, 128), largest}), (3, 5, 8)))
    for rows, warps, (step, stages) in itertools.product((16, 32, 64, 128), (1, 2, 4), steps_stages):
        if rows >= 8 * warps and rows <= 64 * warps and tokens * rows <= 4096 * warps:
            yield Tile(tokens, rows, step, stages, warps)
            is_cut = scheme.is_packed or (rows >= 64 and warps == 4 and isinstance(values, QuantizedInput))
            for parts in PARTS if is_cut else ():
                if triton.cdiv(out, rows) * parts <= MAX_CTAS:
                    yield Tile(tokens, rows, step, stages, warps, parts)


def _tiles_of_many(num_tokens: int, scheme: QuantScheme, out: int, size: int) -> Iterator[Tile]:
    """A thread has at most 64 sums, and as many again of the present step. Split-K: for fewer tiles than
    multiprocessors."""
    step = min(largest_step(scheme, size), 128)
    sizes = [tokens for tokens in (64, 128, 256) if tokens < 2 * num_tokens]
    for tokens, rows, warps, stages in itertools.product(sizes, (64, 128), (4, 8), (3, 4, 6)):
        num_tiles = triton.cdiv(out, rows) * triton.cdiv(num_tokens, tokens)
        if 1024 * warps <= tokens * rows <= 2048 * warps:
            for parts in (1, 2, 3, 4):
                if parts == 1 or (num_tiles <= 128 and num_tiles * parts <= MAX_CTAS):
                    yield Tile(tokens, rows, step, stages, warps, parts)


def _layers(scheme: QuantScheme, shape: LinearShape) -> list[Layer]:
    """Random weights with scales of 1."""
    tensors = scheme.tensors(shape.out_features, shape.in_features)
    num_bytes = tensors["weight"][0][0] * tensors["weight"][0][1]
    layers = []
    for _ in range(max(2, min(-(-3 * L2_BYTES // num_bytes), 64))):
        layer = {name: torch.ones(size, device="cuda").to(dtype) for name, (size, dtype) in tensors.items()}
        codes = torch.randint(0, 256, tensors["weight"][0], dtype=torch.uint8, device="cuda")
        layers.append({**layer, "weight": codes.view(tensors["weight"][1])})
    return layers
