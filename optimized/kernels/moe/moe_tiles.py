"""Chooses the tiles of the experts' kernels: from the GPU's table (`gpu_table`), by the experts' shape and
the number of tokens, if it has any; otherwise by a rule.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton

from diptych.optimized.kernels import gpu_table


class Tile(NamedTuple):
    """The tile of one grouped GEMM."""

    block_m: int  # pairs
    block_n: int  # columns; of the first GEMM as many of gate and of up
    block_k: int
    group: int  # blocks of pairs whose CTAs run side by side
    num_warps: int
    num_stages: int
    use_tma: bool = True


FLOAT32_TILE = Tile(64, 64, 32, 8, 4, 2, False)
DETERMINISTIC_TILE = Tile(64, 64, 64, 8, 4, 3)
"""For any number of tokens: the order of a sum may depend on the tile."""


class GemvTile(NamedTuple):
    """The tile of one GEMV of a pair."""

    warps: int
    groups: int  # rows a warp
    steps: int  # of 16 bytes a lane, in a tile
    ahead: int  # tiles of a row that a warp has asked for before it needs the first


class Plan(NamedTuple):
    """The plan of both GEMMs. Two GemvTiles: pair by pair. Two Tiles with the same block_m: sorted by
    expert."""

    up: Tile | GemvTile
    down: Tile | GemvTile


class Shape(NamedTuple):
    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int

    def name(self) -> str:
        return f"{self.num_experts} experts, top {self.top_k}, {self.hidden_size}-{self.intermediate_size}"


@cache
def plan(
    shape: Shape,
    num_tokens: int,
    dtype: torch.dtype,
    device: torch.device,
    is_deterministic: bool = False,
) -> Plan:
    if is_deterministic:
        tile = FLOAT32_TILE if dtype == torch.float32 else DETERMINISTIC_TILE
        return Plan(tile, tile)
    if dtype.itemsize == 2 and device.type == "cuda":
        measured = _measured(torch.cuda.get_device_name(device)).get(shape.name())
        if measured:
            larger = [size for size in measured if size >= num_tokens]
            return measured[min(larger) if larger else max(measured)]
    return default_plan(shape, num_tokens, dtype)


def default_plan(shape: Shape, num_tokens: int, dtype: torch.dtype) -> Plan:
    """Tiles that run on any GPU with little padding: a block has as many pairs as an expert on average."""
    num_pairs = num_tokens * shape.top_k
    if num_tokens <= 4 and num_pairs <= 2 * shape.num_experts:
        # No more than 16 or so tiles a row: the loops over them are unrolled.
        up_steps = max(triton.next_power_of_2(shape.hidden_size) // 4096, 1)
        down_steps = max(triton.next_power_of_2(shape.intermediate_size * shape.top_k) // 8192, 1)
        return Plan(GemvTile(4, 1, min(up_steps, 8), 8), GemvTile(4, 1, min(down_steps, 8), 12))
    average = triton.next_power_of_2(triton.cdiv(num_pairs, shape.num_experts))
    if dtype == torch.float32:
        tile = Tile(min(max(average, 16), 64), 64, 32, 8, 4, 2, False)
        return Plan(tile, tile)
    if average <= 32:
        tile = Tile(max(average, 16), 64, 128, 1, 4, 3)
        return Plan(tile, tile)
    block_m = min(average, 128)
    num_warps = 4 if block_m == 64 else 8
    return Plan(Tile(block_m, 64, 64, 8, num_warps, 3), Tile(block_m, 128, 64, 8, num_warps, 3))


def describe(device: torch.device) -> tuple[bool, str]:
    """Whether measured tiles are used on this GPU, and of which shapes."""
    gpu = torch.cuda.get_device_name(device)
    shapes = list(gpu_table.read(gpu).experts)
    return bool(shapes), "; ".join(shapes) or f"a rule chooses: nothing was measured on {gpu}"


@cache
def _measured(gpu: str) -> dict[str, dict[int, Plan]]:
    """Shape name -> number of tokens -> the plan up to that number."""
    return {
        name: {int(size): Plan(*map(_tile, tiles)) for size, tiles in plans.items()}
        for name, plans in gpu_table.read(gpu).experts.items()
    }


def _tile(numbers: list[Any]) -> Tile | GemvTile:
    return GemvTile(*numbers) if len(numbers) == len(GemvTile._fields) else Tile(*numbers)
