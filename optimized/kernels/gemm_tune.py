"""Measures cuBLAS's algorithms for the GEMMs of a model on this GPU, for `diptych tune`, and keeps those that
beat cuBLAS's own choice.

Thousands are timed roughly. A dozen of them are timed again, in turns with the library's own choice, as in a
step: behind other kernels, and for so long that the clock falls to what the GPU's power limit allows. What is
fastest alone and for a moment need not be the fastest there (docs/lab/gemm.md).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from tqdm.auto import tqdm

from optimized.kernels import cublas_linear, cublas_lt
from optimized.kernels.cublas_linear import Shape
from optimized.kernels.cublas_lt import Config, Library, Problem, Product
from optimized.kernels.cublas_lt_api import CublasLtError
from optimized.kernels.gemm_search import MAX_WORKSPACE, Times, best, search
from optimized.kernels.gpu_table import GpuTable
from shared.config import ModelConfig

DTYPE = torch.bfloat16
TOKENS = (*range(16, 256, 8), *range(256, 513, 16), 1024, 2048, 4096, 8192)
"""What decode steps are padded to (decode_graph.py), as far as GEMMs are left to cuBLAS, and prompts."""
POOL_BYTES = 1_800_000_000
"""Of all weights: one head's at least."""
ROUND_BYTES = 160_000_000
"""Of the weights that one measurement goes round: several times what caches hold."""
NUM_FINALISTS = 12
NUM_ROUNDS = 5
TURN_SECONDS = 0.03
"""Of one finalist in a round, so that a round of large GEMMs keeps the GPU at its power limit."""
MIN_GAIN = 0.015
"""Less is within what two measurements of the same differ by."""


def shapes_of(config: ModelConfig) -> dict[Shape, bool]:
    """Of a model's GEMMs without a bias; whether they are added to the residual stream."""
    hidden, moe = config.hidden_size, config.moe
    q_size, kv_size = config.num_qo_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes = {Shape(q_size, hidden): True}
    if not config.qkv_bias:
        shapes |= {Shape(hidden, q_size + 2 * kv_size): False}
    if len(config.moe_layers) < config.num_hidden_layers:
        shapes |= {Shape(hidden, 2 * config.intermediate_size): False}
        shapes |= {Shape(config.intermediate_size, hidden): True}
    if moe is not None:
        shapes |= {Shape(hidden, moe.num_experts): False}
    return shapes | {Shape(hidden, config.vocab_size, in_float32=True): False}


class Layers:
    """One GEMM in many layers, each with its own weights."""

    def __init__(self, library: Library, pool: torch.Tensor, problem: Problem, add: bool) -> None:
        num_tokens, out, size, _, out_dtype = problem
        self.library = library
        self.problem = problem
        self.add = add
        self.num_calls = max(4, -(-ROUND_BYTES // (out * size * DTYPE.itemsize)))
        num_layers = min(self.num_calls, pool.numel() // (out * size))
        self.weights = list(pool[: num_layers * out * size].view(num_layers, out, size))
        self.x = torch.randn(num_tokens, size, dtype=DTYPE, device=pool.device)
        self.y = torch.zeros(num_tokens, out, dtype=out_dtype, device=pool.device)
        seconds = out * size * max(2 / 4e12, 2 * num_tokens / 6e14)  # about, on an H200
        is_decode = num_tokens <= cublas_linear.MAX_EXACT_TOKENS
        self.elsewhere = torch.empty(
            2, int(seconds * 1e12) if is_decode else 0, dtype=DTYPE, device=pool.device
        )

    def run_own_choice(self, i: int) -> object:
        weight = self.weights[i % len(self.weights)]
        if self.add:
            return self.y.addmm_(self.x, weight.T)
        if self.y.dtype != DTYPE:
            return torch.mm(self.x, weight.T, out_dtype=self.y.dtype)
        return F.linear(self.x, weight)

    def run(self, product: Product, i: int) -> None:
        product(self.x, self.weights[i % len(self.weights)], self.y, self.add)

    def rough_times(self, configs: list[Config], batch: int = 64) -> Times:
        """Microseconds, by events around calls that wait on the device: without the CPU in between."""
        times: Times = {}
        num_calls = 3 if self.problem.num_tokens <= cublas_linear.MAX_EXACT_TOKENS else 1
        for start in range(0, len(configs), batch):
            runnable = self._runnable(configs[start : start + batch])
            torch.cuda._sleep(100_000 + 20_000 * num_calls * len(runnable))
            marks = [_mark()]
            for n, product in enumerate(runnable.values()):
                for i in range(num_calls):
                    self.run(product, n * num_calls + i)
                marks.append(_mark())
            torch.cuda.synchronize()
            for config, before, after in zip(runnable, marks, marks[1:]):
                times[config] = before.elapsed_time(after) * 1e3 / num_calls
        return times

    def _runnable(self, configs: list[Config]) -> dict[Config, Product]:
        """Those that have run once: their kernels are loaded."""
        runnable = {}
        for config in configs:
            product = self.library.prepare(self.problem, config)
            if product is None or product.workspace_size > MAX_WORKSPACE:
                continue
            try:
                self.run(product, 0)
            except CublasLtError:
                continue
            runnable[config] = product
        torch.cuda.synchronize()
        return runnable

    def expected(self) -> torch.Tensor:
        """Of the first layer, in float64."""
        x = self.x.double()
        return torch.cat([x @ part.double().T for part in self.weights[0].split(8192)], dim=1)

    def is_right(self, product: Product, expected: torch.Tensor) -> bool:
        """A GEMM with a tile at fault is off by much more than its roundings."""
        before = torch.randn_like(self.y) if self.add else torch.full_like(self.y, torch.nan)
        y = before.clone()
        product(self.x, self.weights[0], y, self.add)
        if self.add:
            expected = expected + before
        error = (y - expected).norm() / expected.norm()
        return bool(error <= max(torch.finfo(y.dtype).eps, 1e-4))

    def final_times(self, configs: list[Config]) -> tuple[float, Times]:
        """Microseconds of the library's own choice, and of these: medians of turns, less what
        other kernels take."""
        prepared = [(config, self.library.prepare(self.problem, config)) for config in configs]
        expected = self.expected()
        finalists = {
            config: product for config, product in prepared if product and self.is_right(product, expected)
        }
        runs: list[Callable[[int], object]] = [lambda i: None, self.run_own_choice]
        runs += [partial(self.run, product) for product in finalists.values()]
        graphs = [self._capture(run) for run in runs]
        count = max(1, round(TURN_SECONDS * 1e6 / self.num_calls / self._replay(graphs[1], 1)))
        rounds = [[self._replay(graph, count) for graph in graphs] for _ in range(NUM_ROUNDS + 1)][1:]
        between, *times = (statistics.median(turns) for turns in zip(*rounds))
        own, *others = (time - between for time in times)
        return own, dict(zip(finalists, others))

    # --8<-- [start:as-in-a-step]
    def _run_between(self) -> None:
        """As a step does: attention reads memory for about as long as GEMMs take, and what the GEMM
        multiplies was written a moment ago."""
        self.elsewhere[0].copy_(self.elsewhere[1])
        self.x.mul_(1)

    # --8<-- [end:as-in-a-step]

    def _capture(self, run: Callable[[int], object]) -> torch.cuda.CUDAGraph:
        self._run_between()
        run(0)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for i in range(self.num_calls):
                self._run_between()
                run(i)
        return graph

    def _replay(self, graph: torch.cuda.CUDAGraph, count: int) -> float:
        """Microseconds a call."""
        start = _mark()
        for _ in range(count):
            graph.replay()
        end = _mark()
        end.synchronize()
        return start.elapsed_time(end) * 1e3 / count / self.num_calls


def _mark() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def tune(layers: Layers, known: list[Config] | None) -> tuple[float, float, Config | None]:
    """Microseconds of the library's own choice, of the fastest, and that one if it is worth an entry."""
    rough = search(layers.library, layers.problem, known, layers.rough_times)
    own, times = layers.final_times(best(rough, NUM_FINALISTS))
    fastest = min(times, key=times.__getitem__, default=None)
    if fastest is None:
        return own, own, None
    return own, times[fastest], fastest if times[fastest] <= (1 - MIN_GAIN) * own else None


def tune_gemms(
    measured: GpuTable, configs: Sequence[ModelConfig], all_tokens: Sequence[int], quick: bool
) -> Iterator[GpuTable]:
    """The table with one more GEMM, again and again. Algorithms of another version of cuBLAS are dropped."""
    shapes = {shape: add for config in configs for shape, add in shapes_of(config).items()}
    device = torch.device("cuda", torch.cuda.current_device())
    library = cublas_lt.library(device)
    if library is None:
        raise ValueError("this PyTorch has no cuBLASLt")
    version, before = library.functions.version(), cublas_linear.table_of(measured)
    kept = before.configs if before.version == version else {}
    table = cublas_linear.Table(version, {shape: dict(rows) for shape, rows in kept.items()})
    pool = torch.empty(POOL_BYTES // DTYPE.itemsize, dtype=DTYPE, device=device).normal_(0, 0.02)
    problems = [
        (shape.problem(num_tokens, DTYPE), add)
        for shape, add in shapes.items()
        for num_tokens in all_tokens
        if num_tokens <= cublas_linear.MAX_EXACT_TOKENS
        or not shape.in_float32  # logits: of a prompt's last tokens
    ]
    for problem, add in (progress := tqdm(problems, unit="GEMM")):
        tune_one(Layers(library, pool, problem, add), table, quick, progress)
        yield cublas_linear.with_gemms(measured, table)


def tune_one(layers: Layers, table: cublas_linear.Table, known: bool, progress: tqdm[Any]) -> None:
    shape, num_tokens = Shape.of(layers.problem), layers.problem.num_tokens
    configs = table.configs.setdefault(shape, {})
    others = [config for config in dict.fromkeys(configs.values()) if config is not None]
    own, fastest, config = tune(layers, others if known else None)
    configs.pop(num_tokens, None)
    if config is not None or num_tokens > cublas_linear.MAX_EXACT_TOKENS:
        configs[num_tokens] = config
    progress.write(
        f"{shape.name():26} {num_tokens:4} tokens {own:8.1f} us, {fastest:8.1f} {fastest / own - 1:+7.1%}"
        f"  {tuple(config) if config else 'not taken'}"
    )
