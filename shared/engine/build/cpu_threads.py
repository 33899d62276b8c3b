"""The number of CPU threads of a model, by a measurement.

Threads wait for each other at the end of every GEMM. For small GEMMs this takes longer than the GEMM, and far
longer when other programs use the cores too. So the number is measured where and when the model is loaded.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from statistics import median

import psutil
import torch
import torch.nn.functional as F

from diptych.shared.config import EngineConfig

VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""With one of them the user has chosen."""
SMALL_MODEL = 50_000_000
"""The number of parameters below which one thread is best, without a measurement."""
SECONDS = 0.3
"""Of the whole measurement, about."""
NUM_ROUNDS = 15
"""In each, every number of threads has its turn: what other programs do meets all of them."""
GAIN = 0.7
"""More threads must take less than this part of the time: they lose more on busy cores than they gain on idle
ones."""

_chosen: int | None = None  # by this module, in this process


def choose_threads(model: torch.nn.Module, config: EngineConfig) -> int:
    """Set torch's number of threads to the fastest for a decode step of this model, at most a rank's share;
    returns it. A number that the user has set stays: by a variable, or by `torch.set_num_threads` if it
    differs from torch's default. So does every number in deterministic mode."""
    global _chosen
    most, weights = default_threads() // config.num_ranks, _weights_of(model)
    is_ours = torch.get_num_threads() in (_chosen, default_threads())
    is_users = any(name in os.environ for name in VARIABLES) or not is_ours
    if is_users or not weights or config.deterministic:
        return torch.get_num_threads()
    if sum(parameter.numel() for parameter in model.parameters()) < SMALL_MODEL:
        most = 1
    _chosen = fastest(weights, [2**i for i in range(most.bit_length()) if 2**i < most] + [max(most, 1)])
    torch.set_num_threads(_chosen)
    return _chosen


def default_threads() -> int:
    """The number with which torch begins: of the cores that this process may use."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    physical = psutil.cpu_count(logical=False) or usable
    return physical if torch.get_num_threads() == physical else usable


def fastest(weights: Sequence[torch.Tensor], counts: Sequence[int]) -> int:
    """The one of these numbers of threads, which increase, with which a pass over the weights is fastest."""
    if len(counts) == 1:
        return counts[0]
    inputs = [torch.ones(1, weight.shape[1], dtype=weight.dtype) for weight in weights]

    def seconds_of(count: int, num_passes: int) -> float:
        torch.set_num_threads(count)
        start = time.perf_counter()
        for _ in range(num_passes):
            for x, weight in zip(inputs, weights):
                F.linear(x, weight)
        return time.perf_counter() - start

    seconds_of(counts[0], 1)  # the first pass reads the weights from memory
    one_pass = seconds_of(counts[0], 1)
    num_passes = max(int(SECONDS / (NUM_ROUNDS * len(counts) * max(one_pass, 1e-6))), 1)
    rounds = [[seconds_of(count, num_passes) for count in counts] for _ in range(NUM_ROUNDS)]
    usual = dict(zip(counts, map(median, zip(*rounds))))
    best = counts[0]
    for count in counts[1:]:
        if usual[count] < GAIN * usual[best]:
            best = count
    return best


@torch.no_grad()
def _weights_of(model: torch.nn.Module) -> list[torch.Tensor]:
    """A matrix of each shape; none of a model on a GPU."""
    matrices = [p.detach() for p in model.parameters() if p.dim() == 2 and p.is_floating_point()]
    return [*{p.shape: p for p in matrices if p.device.type != "cuda"}.values()]
