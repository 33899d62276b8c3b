"""Tiles of the GEMM with quantized weights, and which to take where `diptych tune --quantization` has
measured none."""

from __future__ import annotations

from typing import NamedTuple

from diptych.optimized.kernels.portable import Gpu
from diptych.shared.types.quant_scheme import QuantScheme


class Tile(NamedTuple):
    tokens: int
    rows: int  # outputs
    step: int  # bytes of a weight's row
    stages: int
    warps: int = 4
    parts: int = 1  # of a row: split-K

    def fitted(self, x_bytes: int, gpu: Gpu, is_float32: bool = False) -> Tile:
        """Copy the tile with fewer stages where the GPU has less shared memory. x_bytes: of inputs, for a
        byte of a weight. Tiles of float32 pass through shared memory again when they are multiplied."""
        stage = (self.rows + self.tokens * x_bytes) * self.step + 8 * (self.rows + self.tokens)  # and scales
        space = gpu.shared_memory - (4 * self.rows * self.step + 1024 if is_float32 else 0)
        return self._replace(stages=max(min(self.stages, space // stage), 2))


def can_compute(scheme: QuantScheme, size: int) -> bool:
    """Whether the groups are made of whole tiles."""
    return largest_step(scheme, size) >= (16 if scheme.is_packed else 32)


def fixed_tile(scheme: QuantScheme, size: int) -> Tile:
    """Return a tile for any number of tokens."""
    return Tile(64, 64, min(largest_step(scheme, size), 64), 3)


def plan(num_tokens: int, out: int, scheme: QuantScheme, size: int) -> Tile:
    """Choose the tile that is best on average for few tokens and the layers of Qwen3-8B on an H200. The GPU's
    table has better ones for shapes that `diptych tune --quantization` has measured. Fewer than 64 outputs
    are multiplied by Hopper's older tensor core instruction, which has no e4m3."""
    step = largest_step(scheme, size)
    if num_tokens > 64:
        return Tile(128, 128, min(step, 64 if scheme.inputs == "none" else 128), 3, 8)
    tokens = next(tokens for tokens in (8, 16, 32, 64) if num_tokens <= tokens)
    if scheme.is_packed:
        return Tile(tokens, 32 if tokens == 8 else 64, step, 8, 2 if tokens <= 16 else 4)
    if scheme.weight_type == "fp8" and scheme.inputs != "none" and step == 256 and tokens >= 16:
        return _fp8_plan(tokens, out, size)
    return Tile(tokens, 64, step, 8 if tokens == 16 else 5)


def _fp8_plan(tokens: int, out: int, size: int) -> Tile:
    """Measured with 16 and 64 tokens on an H200 (docs/lab/gemm.md). Where tiles are fewer than half of the
    multiprocessors, rows are cut into parts of 2,048 columns and more; where they are more than twice as
    many, three CTAs fit each."""
    num_tiles = -(-out // 64)
    if num_tiles > 264:
        return Tile(tokens, 64, 128, 4 if tokens == 64 else 6)
    parts = min((192 if tokens == 64 else 128) // num_tiles, size // 2048, 4) if num_tiles <= 64 else 1
    if tokens == 64 and parts > 1:
        return Tile(64, 64, 256, 3, 4, parts)
    return Tile(tokens, 64, 256, 8 if tokens == 16 else 5, 4, max(parts, 1))


def largest_step(scheme: QuantScheme, size: int) -> int:
    """The most bytes of a row, a power of two up to 256, that no group's border cuts. In NVFP4 a tile has
    several groups."""
    if scheme.weight_type == "nvfp4":
        return 64
    if scheme.weight_type == "int4":
        half = scheme.unit(size) // 2
        return min(half & -half, 64)
    return 256 if scheme.group_size is None else min(scheme.group_size & -scheme.group_size, 256)
