"""CUDA graphs played on a CPU, so that what a runner does around them is tested without a GPU.

A capture runs the function once, and a replay again, into the same output. As with a shared pool of memory,
outputs that were given up lie on top of each other.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from optimized.model_runner import ModelRunner

POOL_SIZE = 1 << 16


class FakeGraphs:
    def __init__(self, device: torch.device) -> None:
        self.pool = torch.full((POOL_SIZE,), torch.nan, device=device)

    def capture(self, function: Callable[[], torch.Tensor]) -> FakeCall:
        return FakeCall(self, function)


class FakeCall:
    def __init__(self, graphs: FakeGraphs, function: Callable[[], torch.Tensor]) -> None:
        self.graphs = graphs
        self.function = function
        self.output: torch.Tensor | None = function().clone()
        self.memory = self.output
        self.is_lent = False

    def __call__(self) -> torch.Tensor:
        return self.memory.copy_(self.function())

    def give_up_output(self, track: bool) -> None:
        size = self.memory.numel()
        # At the pool's end: two sizes then differ in every row, not only behind the smaller one.
        self.memory.set_(self.graphs.pool[POOL_SIZE - size :].view(self.memory.shape))
        self.output = None


class FakeGraphsRunner(ModelRunner):
    """The runner as it is on a GPU."""

    def _graphs(self, device: torch.device) -> FakeGraphs:  # type: ignore[override]
        return FakeGraphs(device)
