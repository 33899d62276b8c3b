"""Capturing functions as CUDA graphs, whole or in pieces.

All graphs of an engine, the drafter's included, share one memory pool, because they never run at the same
time: the outputs of a graph are valid until the next replay. A graph reads and writes fixed addresses, so
inputs go through buffers that the caller owns (decode_graph.py, verify_graph.py, token_buffers.py).
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch

from diptych.optimized.graphs.borrowed_buffers import Borrower, Memory
from diptych.shared.interfaces import CausalLM, Collectives
from diptych.shared.parallel.alone import ALONE
from diptych.shared.parallel.grid import groups_of

Replay = Callable[[], None]
Cut = Callable[[list[torch.Tensor]], tuple[Replay, list[torch.Tensor]]]
"""The function that a function captured in pieces calls: see `Recording.cut`."""


class CudaGraphs:
    """Captures functions without arguments into graphs of one memory pool. Largest first: the memory of
    each serves the smaller ones after it. A replay may overwrite what graphs that were captured later have
    left, so a result that must outlive replays of other graphs is captured before them. Functions may
    contain collectives of `ranks` and of the groups of their grid: all ranks capture the same graphs in the
    same order. The end of an NCCL communicator waits for the graphs that contain it, so they end before any
    of these groups does."""

    def __init__(self, device: torch.device, ranks: Collectives) -> None:
        self.device = device
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream(device)
        self._graphs: list[torch.cuda.CUDAGraph] = []  # kept: a pool ends with its last graph
        self.are_rehearsed = False  # whether all functions have run in a `Rehearsal`
        self.capture_with(ranks)

    def capture_with(self, ranks: Collectives) -> None:
        """Later captures are those of these ranks."""
        self.ranks = ranks
        for group in groups_of(ranks) if ranks.size > 1 else ():
            weakref.finalize(group, _end, self._graphs)

    def capture(self, function: Callable[[], torch.Tensor], of_other_size: bool = False) -> CapturedCall:
        """Capture a function, after a run that compiles kernels and sets up libraries, and one that raises
        `RuntimeError` if it waits for the device. `of_other_size`: another size of the function is captured,
        so where all are rehearsed neither run is needed."""
        with self._prepared(function, of_other_size), self._capturing() as recording:
            output = function()
        return CapturedCall(recording.graph, output)

    def capture_pieces(
        self, function: Callable[[Cut], list[torch.Tensor]], of_other_size: bool = False
    ) -> tuple[Replay, list[torch.Tensor]]:
        """Capture a function in pieces: it calls `cut` where other work is launched between two graphs.
        Returns the replay of the last piece, whose outputs are borrowed buffers too."""
        whole = partial(function, lambda tensors: (_nothing, tensors))
        with self._prepared(whole, of_other_size), self._capturing() as recording:
            outputs = function(recording.cut)
        return recording.graph.replay, [Memory.of(output).as_tensor() for output in outputs]

    @contextlib.contextmanager
    def _prepared(self, function: Callable[[], object], of_other_size: bool) -> Iterator[None]:
        is_ready = of_other_size and self.are_rehearsed
        if not is_ready:
            self._run_before(function)
        try:
            yield
        except RuntimeError:
            if is_ready:
                self._run_before(function)  # its error names what waits
            raise

    def _run_before(self, function: Callable[[], object]) -> None:
        function()
        with _refusing_to_wait():
            function()
        torch.cuda.synchronize(self.device)

    @contextlib.contextmanager
    def _capturing(self) -> Iterator[Recording]:
        recording = Recording(self.pool, self._graphs)
        self.ranks.barrier()  # a rank may set up connections in the run before
        with torch.cuda.stream(self.stream):
            recording.begin()
            try:
                yield recording
            except BaseException:
                with contextlib.suppress(RuntimeError):
                    recording.graph.capture_end()
                raise
            recording.graph.capture_end()


def _end(graphs: list[torch.cuda.CUDAGraph]) -> None:
    for graph in graphs:
        graph.reset()


class Rehearsal(CudaGraphs):
    """Takes the place of graphs where nothing is captured: each function runs once. In `compile_ahead` this
    compiles the kernels of all graphs in parallel, before they are captured one after the other."""

    def __init__(self) -> None:
        pass

    def capture(self, function: Callable[[], torch.Tensor], of_other_size: bool = False) -> CapturedCall:
        return NotCaptured(function())

    def capture_pieces(
        self, function: Callable[[Cut], list[torch.Tensor]], of_other_size: bool = False
    ) -> tuple[Replay, list[torch.Tensor]]:
        function(lambda tensors: (_nothing, []))  # pieces that kept their tensors would fill the memory
        return _nothing, []


_of_drafters: WeakKeyDictionary[CausalLM, CudaGraphs] = WeakKeyDictionary()
"""By target model, between the drafter's captures and the model runner's."""


def graphs_of_drafter(target: CausalLM, device: torch.device) -> CudaGraphs | None:
    """What a drafter captures with, before the runner of its target does. None: not on a GPU."""
    if device.type != "cuda":
        return None
    _of_drafters[target] = CudaGraphs(device, getattr(target, "tp", ALONE))
    return _of_drafters[target]


def graphs_of_runner(
    model: CausalLM, device: torch.device, ranks: Collectives | None = None
) -> CudaGraphs | None:
    """What a model runner captures with: that of its drafter, if there is one. None: not on a GPU. `ranks`:
    those that capture together, where they are not the model's."""
    if device.type != "cuda":
        return None
    graphs = _of_drafters.pop(model, None)
    if graphs is None:
        return CudaGraphs(device, getattr(model, "tp", ALONE) if ranks is None else ranks)
    if ranks is not None:
        graphs.capture_with(ranks)
    return graphs


class Recording:
    """A capture in progress. Its graphs are added to a list."""

    def __init__(self, pool: Any, graphs: list[torch.cuda.CUDAGraph]) -> None:
        self.pool = pool
        self.graphs = graphs

    def begin(self) -> None:
        self.graph = torch.cuda.CUDAGraph()
        self.graphs.append(self.graph)
        self.graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")

    # --8<-- [start:cut-a-graph]
    def cut(self, tensors: list[torch.Tensor]) -> tuple[Replay, list[torch.Tensor]]:
        """End the current graph and begin another. Returns the replay of the ended
        graph and its `tensors` as borrowed buffers, which later pieces and other graphs
        overwrite."""
        self.graph.capture_end()
        replay, borrowed = self.graph.replay, [Memory.of(tensor).as_tensor() for tensor in tensors]
        self.begin()
        return replay, borrowed

    # --8<-- [end:cut-a-graph]


class CapturedCall:
    """A captured function: calling it replays the graph. Graphs that are captured later do not use the memory
    of `output`, until `give_up_output`; after it a result is valid until the next replay of any graph."""

    def __init__(self, graph: torch.cuda.CUDAGraph, output: torch.Tensor) -> None:
        self.graph = graph
        self.output: torch.Tensor | None = output
        self._borrow: Callable[[], torch.Tensor] | None = None
        self._borrower: Callable[[], object | None] = lambda: None

    def __call__(self) -> torch.Tensor:
        self.graph.replay()
        if self.output is not None:
            return self.output
        assert self._borrow is not None
        return self._borrow()

    @property
    def is_borrowed(self) -> bool:
        """Whether the result of the last call, or a view of it, is still referenced. Known only if
        tracked."""
        return self._borrower() is not None

    def give_up_output(self, track: bool) -> None:
        """Let later graphs use the output's memory. `track`: each call returns a new tensor, so that the end
        of the last one is detected."""
        output = self.output
        assert output is not None
        memory = Memory.of(output)

        def borrow() -> torch.Tensor:
            borrower = Borrower(memory)
            self._borrower = weakref.ref(borrower)
            return memory.as_tensor(borrower)

        alias = borrow()
        self._borrower = lambda: None
        self._borrow = borrow if track else lambda: alias
        self.output = None


class NotCaptured(CapturedCall):
    """The result of a function of a `Rehearsal`."""

    def __init__(self, output: torch.Tensor) -> None:
        self.output = output

    def give_up_output(self, track: bool) -> None:
        self.output = None


def _nothing() -> None:
    pass


def try_to_capture(
    graphs: CudaGraphs,
    doing: str,
    what: str,
    function: Callable[[], torch.Tensor],
    of_other_size: bool = False,
) -> CapturedCall | None:
    """Capture; if `what` waits for the device during `doing`, print a message and return None."""
    try:
        return graphs.capture(function, of_other_size)
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        warn_of_launches(doing, f"{what} makes the CPU wait for the GPU")
        return None


def warn_of_launches(doing: str, reason: str) -> None:
    warnings.warn(f"{doing} launches kernel by kernel: {reason}", RuntimeWarning, stacklevel=4)


@contextlib.contextmanager
def _refusing_to_wait() -> Iterator[None]:
    """Within the block, operations that make the CPU wait for the device raise. They cannot be captured, and
    the error of a failed capture does not name them."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that not every wait is found: capturing finds the rest
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
