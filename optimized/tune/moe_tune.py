"""Measures the tiles of experts on this GPU, for `diptych tune`.

Each GEMM is timed alone, with random routing, over the weights of several layers, so that weights come from
memory and not from the L2 cache.
"""

from __future__ import annotations

import itertools
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from typing import Any

import torch
from tqdm.auto import tqdm

from diptych.optimized.kernels.gpu_table import GpuTable
from diptych.optimized.kernels.moe import moe_gemm, moe_gemv
from diptych.optimized.kernels.moe.moe_align import align
from diptych.optimized.kernels.moe.moe_combine import combine
from diptych.optimized.kernels.moe.moe_tiles import GemvTile, Plan, Shape, Tile
from diptych.shared.config import ModelConfig

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
MAX_GEMV_TOKENS = 16
MAX_SHARED_BYTES = 227 * 1024
NUM_LAYERS = 3


class Layers:
    """Weights of several layers, and a routing for each."""

    def __init__(self, shape: Shape, num_tokens: int, dtype: torch.dtype = torch.bfloat16) -> None:
        num_experts, _, hidden, inter = self.shape = shape
        generator = torch.Generator(device="cuda").manual_seed(0)

        def normal(*size: int) -> torch.Tensor:
            return torch.empty(size, dtype=dtype, device="cuda").normal_(
                0, size[-1] ** -0.5, generator=generator
            )

        self.w13 = [normal(num_experts, 2 * inter, hidden) for _ in range(NUM_LAYERS)]
        self.w2 = [normal(num_experts, hidden, inter) for _ in range(NUM_LAYERS)]
        self.set_tokens(num_tokens)

    def set_tokens(self, num_tokens: int) -> None:
        num_experts, top_k, hidden, _ = self.shape
        generator = torch.Generator(device="cuda").manual_seed(num_tokens)
        dtype = self.w13[0].dtype
        self.x = torch.randn(num_tokens, hidden, generator=generator, device="cuda").to(dtype)
        self.ids, self.weights = [], []
        for _ in range(NUM_LAYERS):
            scores = torch.rand(num_tokens, num_experts, generator=generator, device="cuda")
            best = scores.topk(top_k)
            self.ids.append(best.indices.to(torch.int32))
            self.weights.append(best.values / best.values.sum(-1, keepdim=True))


def graph_time(run: Callable[[int], Any], num_layers: int = NUM_LAYERS, num_replays: int = 5) -> float:
    """Microseconds of run(layer): the median over replays of a graph that cycles through the layers."""
    num_calls = 2 * num_layers
    run(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(num_calls):
            run(i % num_layers)
    times: list[float] = []
    for _ in range(num_replays + 1):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / num_calls * 1e3)
    return statistics.median(times[1:])


def up_tiles(shape: Shape, num_tokens: int) -> Iterator[Tile]:
    """Tiles of the first GEMM, whose weights are 2 * block_n rows."""
    return _tiles(shape, num_tokens, 2)


def down_tiles(shape: Shape, num_tokens: int) -> Iterator[Tile]:
    return _tiles(shape, num_tokens, 1)


def _tiles(shape: Shape, num_tokens: int, parts: int) -> Iterator[Tile]:
    """The tiles worth timing: about as many pairs as experts have, enough bytes in flight if weights
    dominate, and within the registers and shared memory of a CTA."""
    average = num_tokens * shape.top_k / shape.num_experts
    blocks_m = [size for size in (16, 32, 64, 128) if average / 4 <= size <= max(4 * average, 16)] or [128]
    for block_m in blocks_m:
        few = block_m < 64
        sizes: tuple[tuple[int, ...], ...] = ((64, 128), (64, 128, 256), (4, 8), (2, 3, 4), (1,))
        if not few:
            sizes = ((128, 256), (64,), (4, 8), (3, 4), (1, 8))
        for rows, block_k, num_warps, num_stages, group in itertools.product(*sizes):
            shared_bytes = (block_m + rows) * block_k * 2 * num_stages
            registers = block_m * rows // (32 * num_warps)
            if 48 * 1024 <= shared_bytes <= MAX_SHARED_BYTES and 8 <= registers <= 128:
                yield Tile(block_m, rows // parts, block_k, group, num_warps, num_stages)


def gemv_tiles(size: int, num_rows: int) -> Iterator[GemvTile]:
    """Tiles for rows of `size` columns, `num_rows` of them in sequence."""
    for warps, groups, steps, ahead in itertools.product((2, 4, 8), (1, 2), (1, 2, 4), (4, 8, 16)):
        num_tiles = -(-size // (steps * 256)) * num_rows
        in_flight = min(ahead, num_tiles) * steps * groups * 4  # registers a lane
        if num_tiles * groups <= 64 and 32 <= in_flight <= 128 and ahead <= num_tiles:
            yield GemvTile(warps, groups, steps, ahead)


def time_up(layers: Layers, tile: Tile) -> float:
    top_k = layers.shape.top_k
    blocks = [align(ids, layers.shape.num_experts, tile.block_m) for ids in layers.ids]
    return graph_time(lambda i: moe_gemm.up_gemm(layers.x, layers.w13[i], blocks[i], top_k, tile))


def time_down(layers: Layers, tile: Tile) -> float:
    blocks = [align(ids, layers.shape.num_experts, tile.block_m) for ids in layers.ids]
    num_rows, inter = blocks[0].pairs.numel(), layers.shape.intermediate_size
    act = torch.randn(num_rows, inter, device="cuda").to(layers.x.dtype)
    return graph_time(lambda i: moe_gemm.down_gemm(act, layers.w2[i], blocks[i], layers.weights[i], tile))


def time_plan(layers: Layers, plan: Plan) -> float:
    """Time a whole plan, sorting and sum included."""

    def run(i: int) -> torch.Tensor:
        ids, weights = layers.ids[i], layers.weights[i]
        if isinstance(plan.up, GemvTile):
            assert isinstance(plan.down, GemvTile)
            tiles = (plan.up, plan.down)
            return moe_gemv.gemv_experts(layers.x, weights, ids, layers.w13[i], layers.w2[i], tiles)
        assert isinstance(plan.down, Tile)
        blocks = align(ids, layers.shape.num_experts, plan.up.block_m)
        act = moe_gemm.up_gemm(layers.x, layers.w13[i], blocks, layers.shape.top_k, plan.up)
        return combine(moe_gemm.down_gemm(act, layers.w2[i], blocks, weights, plan.down), ids)

    return graph_time(run)


def best_plan(layers: Layers, num_tokens: int, progress: tqdm[Any]) -> tuple[float, Plan]:
    shape = layers.shape
    layers.set_tokens(num_tokens)
    found: list[tuple[float, Plan]] = []

    def fastest(tiles: list[Any], measure: Callable[[Any], float], count: int) -> list[Any]:
        times = []
        for tile in tiles:
            progress.update()
            try:
                times.append((measure(tile), tile))
            except Exception as error:  # more shared memory or registers than available, so no candidate
                progress.write(f"{tile}: {type(error).__name__}")
        return [tile for _, tile in sorted(times)[:count]]

    if num_tokens <= MAX_GEMV_TOKENS:
        up = next(gemv_tiles(shape.hidden_size, 1))
        downs = list(gemv_tiles(shape.intermediate_size, shape.top_k))
        downs = fastest(downs, lambda tile: time_plan(layers, Plan(up, tile)), 2)
        ups = list(gemv_tiles(shape.hidden_size, 1))
        ups = fastest(ups, lambda tile: time_plan(layers, Plan(tile, downs[0])), 2)
        found += [(time_plan(layers, Plan(*tiles)), Plan(*tiles)) for tiles in itertools.product(ups, downs)]
    all_ups, all_downs = list(up_tiles(shape, num_tokens)), list(down_tiles(shape, num_tokens))
    for block_m in sorted({tile.block_m for tile in all_ups}):
        up_sizes = [tile for tile in all_ups if tile.block_m == block_m]
        down_sizes = [tile for tile in all_downs if tile.block_m == block_m]
        up_sizes = fastest(up_sizes, lambda tile: time_up(layers, tile), 2)
        down_sizes = fastest(down_sizes, lambda tile: time_down(layers, tile), 2)
        found += [
            (time_plan(layers, Plan(*tiles)), Plan(*tiles))
            for tiles in itertools.product(up_sizes, down_sizes)
        ]
    return min(found)


def num_candidates(shape: Shape, num_tokens: int) -> int:
    count = len(list(up_tiles(shape, num_tokens))) + len(list(down_tiles(shape, num_tokens)))
    if num_tokens <= MAX_GEMV_TOKENS:
        count += len(list(gemv_tiles(shape.hidden_size, 1)))
        count += len(list(gemv_tiles(shape.intermediate_size, shape.top_k)))
    return count


def compile_tiles(shape: Shape, tiles: list[tuple[str, Any]]) -> None:
    """Compile kernels into Triton's cache, in a separate process. One expert suffices; sizes must be the real
    ones."""
    _, top_k, hidden, inter = shape
    w13 = torch.zeros(1, 2 * inter, hidden, dtype=torch.bfloat16, device="cuda")
    w2 = torch.zeros(1, hidden, inter, dtype=torch.bfloat16, device="cuda")
    x = torch.zeros(16, hidden, dtype=torch.bfloat16, device="cuda")
    ids = torch.zeros(16, top_k, dtype=torch.int32, device="cuda")
    weights = torch.zeros(16, top_k, device="cuda")
    for kind, tile in tiles:
        try:
            if isinstance(tile, GemvTile):
                other = next(gemv_tiles(inter if kind == "up" else hidden, top_k if kind == "up" else 1))
                plan = (tile, other) if kind == "up" else (other, tile)
                moe_gemv.gemv_experts(x, weights, ids, w13, w2, plan)
            elif kind == "up":
                moe_gemm.up_gemm(x, w13, align(ids, 1, tile.block_m), top_k, tile)
            else:
                blocks = align(ids, 1, tile.block_m)
                act = torch.zeros(blocks.pairs.numel(), inter, dtype=torch.bfloat16, device="cuda")
                moe_gemm.down_gemm(act, w2, blocks, weights, tile)
        except Exception:
            continue  # an error is reported at its timing


def compile_all(shape: Shape, all_tokens: list[int], num_processes: int) -> None:
    tiles: set[tuple[str, Any]] = set()
    for num_tokens in all_tokens:
        tiles |= {("up", tile) for tile in up_tiles(shape, num_tokens)}
        tiles |= {("down", tile) for tile in down_tiles(shape, num_tokens)}
        if num_tokens <= MAX_GEMV_TOKENS:
            tiles |= {("up", tile) for tile in gemv_tiles(shape.hidden_size, 1)}
            tiles |= {("down", tile) for tile in gemv_tiles(shape.intermediate_size, shape.top_k)}
    ordered = sorted(tiles, key=str)
    parts = [ordered[i::num_processes] for i in range(num_processes)]
    with ProcessPoolExecutor(num_processes, mp_context=get_context("spawn")) as pool:
        jobs = [pool.submit(compile_tiles, shape, part) for part in parts]
        for job in tqdm(jobs, desc=f"compile {len(ordered)} kernels", unit="process"):
            job.result()


def shape_of(config: ModelConfig) -> Shape | None:
    """The shape of a model's experts; None: it has none."""
    moe = config.moe
    if moe is None:
        return None
    return Shape(moe.num_experts, moe.num_experts_per_tok, config.hidden_size, moe.intermediate_size)


def tune(table: GpuTable, shape: Shape, all_tokens: Sequence[int]) -> Iterator[GpuTable]:
    """Yields the table after each measurement, with the best plan for one more number of tokens."""
    compile_all(shape, list(all_tokens), os.cpu_count() or 1)
    layers = Layers(shape, all_tokens[0])
    with tqdm(total=sum(num_candidates(shape, size) for size in all_tokens), unit="tile") as progress:
        for num_tokens in all_tokens:
            progress.set_description(f"experts, {num_tokens} tokens")
            time, plan = best_plan(layers, num_tokens, progress)
            progress.write(f"{shape.name()}, {num_tokens:5} tokens {time:8.1f} us  {plan}")
            plans = {**table.experts.get(shape.name(), {}), str(num_tokens): [list(tile) for tile in plan]}
            table = replace(table, experts={**table.experts, shape.name(): plans})
            yield table
