"""Capturing functions as CUDA graphs, whole or in pieces.

All graphs share one pool of memory, because they never run at the same time: what one leaves behind lasts
until the next replay. What a graph reads and writes keeps its address, so inputs go through buffers that the
caller owns (decode_graph.py, verify_graph.py, extend_graph.py).
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from optimized.graphs.borrowed_buffers import Borrower, Memory

Replay = Callable[[], None]
Cut = Callable[[list[torch.Tensor]], tuple[Replay, list[torch.Tensor]]]
"""What a function calls that is captured in pieces: see `Recording.cut`."""


class CudaGraphs:
    """Captures functions without arguments into graphs of one memory pool. Largest first: the memory of
    each serves the smaller ones after it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream(device)

    def capture(self, function: Callable[[], torch.Tensor]) -> CapturedCall:
        """Runs it once before: kernels are compiled and loaded, libraries set up. Nothing may wait for the
        device, neither here nor then: `RuntimeError`."""
        self._rehearse(function)
        with self._capturing() as recording:
            output = function()
        return CapturedCall(recording.graph, output)

    def capture_pieces(
        self, function: Callable[[Cut], list[torch.Tensor]]
    ) -> tuple[Replay, list[torch.Tensor]]:
        """The same for a function that calls `cut` where something is to be launched between two graphs.
        Replays the last one; its outputs are borrowed buffers too."""
        self._rehearse(lambda: function(lambda tensors: (_nothing, tensors)))
        with self._capturing() as recording:
            outputs = function(recording.cut)
        return recording.graph.replay, [Memory.of(output).as_tensor() for output in outputs]

    def _rehearse(self, function: Callable[[], object]) -> None:
        function()
        with _refusing_to_wait():
            function()
        torch.cuda.synchronize(self.device)

    @contextlib.contextmanager
    def _capturing(self) -> Iterator[Recording]:
        recording = Recording(self.pool)
        with torch.cuda.stream(self.stream):
            recording.begin()
            try:
                yield recording
            except BaseException:
                with contextlib.suppress(RuntimeError):
                    recording.graph.capture_end()
                raise
            recording.graph.capture_end()


class Recording:
    """What goes on in a capture: the graph that is under way."""

    def __init__(self, pool: Any) -> None:
        self.pool = pool

    def begin(self) -> None:
        self.graph = torch.cuda.CUDAGraph()
        self.graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")

    # --8<-- [start:cut-a-graph]
    def cut(self, tensors: list[torch.Tensor]) -> tuple[Replay, list[torch.Tensor]]:
        """Ends the graph and begins another. Returns the first one's replay and its
        `tensors` as borrowed buffers: later pieces and other graphs write there."""
        self.graph.capture_end()
        replay, borrowed = self.graph.replay, [Memory.of(tensor).as_tensor() for tensor in tensors]
        self.begin()
        return replay, borrowed

    # --8<-- [end:cut-a-graph]


class CapturedCall:
    """Calling it replays the graph. `output` keeps its memory from the graphs captured later; after
    `give_up_output` they may use it too, and the result of a call is valid until the next replay of any."""

    def __init__(self, graph: torch.cuda.CUDAGraph, output: torch.Tensor) -> None:
        self.graph = graph
        self.output: torch.Tensor | None = output
        self._lend: Callable[[], torch.Tensor] | None = None
        self._borrower: Callable[[], object | None] = lambda: None

    def __call__(self) -> torch.Tensor:
        self.graph.replay()
        if self.output is not None:
            return self.output
        assert self._lend is not None
        return self._lend()

    @property
    def is_lent(self) -> bool:
        """The result of the last call, or a view of it, is still referenced. Known only when tracked."""
        return self._borrower() is not None

    def give_up_output(self, track: bool) -> None:
        """`track`: each call returns another tensor, so that the end of the last one is detected."""
        output = self.output
        assert output is not None
        memory = Memory.of(output)

        def lend() -> torch.Tensor:
            borrower = Borrower(memory)
            self._borrower = weakref.ref(borrower)
            return memory.as_tensor(borrower)

        alias = lend()
        self._borrower = lambda: None
        self._lend = lend if track else lambda: alias
        self.output = None


def _nothing() -> None:
    pass


def try_to_capture(
    graphs: CudaGraphs, doing: str, what: str, function: Callable[[], torch.Tensor]
) -> CapturedCall | None:
    """None, and a word about it, where `what` waits for the device in the midst of `doing`."""
    try:
        return graphs.capture(function)
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        warn_of_launches(doing, f"{what} makes the CPU wait for the GPU")
        return None


def warn_of_launches(doing: str, reason: str) -> None:
    warnings.warn(f"{doing} launches kernel by kernel: {reason}", RuntimeWarning, stacklevel=4)


@contextlib.contextmanager
def _refusing_to_wait() -> Iterator[None]:
    """Operations that make the CPU wait for the device raise: they cannot be captured, and the error of a
    failed capture does not name them."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that not everything is found: capturing finds the rest
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
