"""CUDA graphs played on a CPU, so that what a runner does around them is tested without a GPU.

A capture runs the function once, and a replay again, into the same output. As with a shared pool of memory,
outputs that were given up lie on top of each other.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from diptych.optimized.graphs import cuda_graph
from diptych.optimized.graphs.cuda_graph import Cut, Replay
from diptych.optimized.model_runner import ModelRunner
from diptych.shared.interfaces import CausalLM, Collectives

POOL_SIZE = 1 << 16


class FakeGraphs:
    def __init__(self, device: torch.device, ranks: Collectives) -> None:
        self.ranks = ranks
        self.pool = torch.full((POOL_SIZE,), torch.nan)
        self.calls: list[FakeCall] = []  # in the order of capture

    @classmethod
    def made_by(cls, function: Callable[..., Any], *args: Any) -> Any:
        """What a function makes that makes graphs for a GPU."""
        with patch.object(cuda_graph, "CudaGraphs", cls):
            return function(*args, torch.device("cuda"))

    def capture(self, function: Callable[[], torch.Tensor], of_other_size: bool = False) -> FakeCall:
        self.calls.append(FakeCall(self, function))
        self.pool = self.pool.to(self.calls[-1].memory.device)
        return self.calls[-1]

    def capture_pieces(
        self, function: Callable[[Cut], list[torch.Tensor]], of_other_size: bool = False
    ) -> tuple[Replay, list[torch.Tensor]]:
        pieces = FakePieces(function)
        return pieces.replay, pieces.outputs


class FakeCall:
    def __init__(self, graphs: FakeGraphs, function: Callable[[], torch.Tensor]) -> None:
        self.graphs = graphs
        self.function = function
        self.output: torch.Tensor | None = function().clone()
        self.memory = self.output
        self.is_tracked = False
        self.borrowed: StorageWeakRef | None = None

    def __call__(self) -> torch.Tensor:
        result = self.memory.copy_(self.function())
        if self.is_tracked:
            result = result.clone()
            self.borrowed = StorageWeakRef(result.untyped_storage())
        return result

    @property
    def is_borrowed(self) -> bool:
        """Triton's interpreter keeps the arguments of a kernel in cycles, which are collected first."""
        for generation in range(3):
            if self.borrowed is None or self.borrowed.expired():
                return False
            gc.collect(generation)
        return self.borrowed is not None and not self.borrowed.expired()

    def give_up_output(self, track: bool) -> None:
        self.is_tracked = track
        size = self.memory.numel()
        # At the pool's end: two sizes then differ in every row, not only behind the smaller one.
        self.memory.set_(self.graphs.pool[POOL_SIZE - size :].view(self.memory.shape))
        self.output = None


class FakePieces:
    """The function runs again in a thread of its own, which stops at each `cut` until the next replay."""

    def __init__(self, function: Callable[[Cut], list[torch.Tensor]]) -> None:
        self.function = function
        self.cuts: list[list[torch.Tensor]] = []  # borrowed buffers of each
        self.outputs = [output.clone() for output in function(self._cut_at_capture)]
        self.thread: threading.Thread | None = None
        self.may_run, self.has_stopped = threading.Semaphore(0), threading.Semaphore(0)

    def _cut_at_capture(self, tensors: list[torch.Tensor]) -> tuple[Replay, list[torch.Tensor]]:
        borrowed = [tensor.clone() for tensor in tensors]
        self.cuts.append(borrowed)
        return self.replay, borrowed

    def replay(self) -> None:
        if self.thread is None:
            self.thread = threading.Thread(target=self._run_again, daemon=True)
            self.thread.start()
        self.may_run.release()
        self.has_stopped.acquire()
        if self.error is not None:
            raise self.error

    @torch.inference_mode()
    def _run_again(self) -> None:
        cuts = iter(self.cuts)
        self.error: BaseException | None = None

        def cut(tensors: list[torch.Tensor]) -> tuple[Replay, list[torch.Tensor]]:
            borrowed = next(cuts)
            for memory, tensor in zip(borrowed, tensors, strict=True):
                memory.copy_(tensor)
            self.has_stopped.release()
            self.may_run.acquire()
            return self.replay, borrowed

        self.may_run.acquire()
        try:
            for memory, output in zip(self.outputs, self.function(cut), strict=True):
                memory.copy_(output)
            assert next(cuts, None) is None
        except BaseException as error:
            self.error = error
        self.thread = None
        self.has_stopped.release()


class FakeGraphsRunner(ModelRunner):
    """The runner as it is on a GPU."""

    @staticmethod
    def make_graphs(model: CausalLM, device: torch.device) -> FakeGraphs:  # type: ignore[override]
        graphs: FakeGraphs = FakeGraphs.made_by(cuda_graph.graphs_of_runner, model)
        return graphs
