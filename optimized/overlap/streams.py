"""CUDA streams on which a batch runs while the CPU forms the next one.

The scheduler uses its caller's stream for slots, rows of req_to_token and the tensors of a batch. Models run
on a second stream, the only one that reads and writes KV, logits and future tokens. Each launch waits for the
scheduler's earlier work; the scheduler's stream never waits for a launch. The CPU waits only for a batch's
results, which are copied on a third stream while the next batch runs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch

Work = Callable[[], Any]
"""A function that queues a batch on the device and returns the tensors to copy to the CPU: one, or tuples of
them."""


class Pending(ABC):
    """The results of a launch, being copied to the CPU."""

    @abstractmethod
    def wait(self) -> Any:
        """Wait for the results; returns the work's tensors on the CPU."""


class Streams(ABC):
    @abstractmethod
    def launch(self, work: Work) -> Pending:
        """Run `work` after all earlier launches. Its exceptions are raised here."""

    @abstractmethod
    def copy(self, tensors: Any) -> Pending:
        """Inside a launch: start copies of its tensors to the CPU, while the launch continues."""

    def synchronize(self) -> None:  # noqa: B027 - work may be done when it is launched
        """Wait for the end of all launches."""


class OneStream(Streams):
    """Streams of a device without concurrency (CPU, MPS): the same order of work, without overlap."""

    def launch(self, work: Work) -> Pending:
        return Done(work())

    def copy(self, tensors: Any) -> Pending:
        return Done(tensors)


class Done(Pending):
    def __init__(self, result: Any) -> None:
        self.result = result

    def wait(self) -> Any:
        return map_tensors(torch.Tensor.cpu, self.result)


class CudaStreams(Streams):
    """Streams of a CUDA GPU. The caller keeps the tensors that `work` reads until its results arrive, because
    the memory allocator tracks only the stream on which a tensor was made."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.forward_stream = torch.cuda.Stream(device)
        # Between two batches a copy to the CPU would delay the device by 15 microseconds, mostly waiting.
        self.copy_stream = torch.cuda.Stream(device)
        self.scheduled = torch.cuda.Event()
        self.computed = torch.cuda.Event()

    # --8<-- [start:launch-on-a-stream]
    def launch(self, work: Work) -> Pending:
        self.scheduled.record(torch.cuda.current_stream(self.device))
        self.forward_stream.wait_event(self.scheduled)
        try:
            with torch.cuda.stream(self.forward_stream):
                return self.copy(work())
        except BaseException:
            self.forward_stream.synchronize()  # a failed batch keeps no tensors
            raise

    def copy(self, tensors: Any) -> Pending:
        self.computed.record()
        with torch.cuda.stream(self.copy_stream):
            self.copy_stream.wait_event(self.computed)
            on_host = map_tensors(_start_copy, tensors)
            arrived = torch.cuda.Event()
            arrived.record()
        return Arriving(on_host, arrived, tensors)

    # --8<-- [end:launch-on-a-stream]

    def synchronize(self) -> None:
        self.forward_stream.synchronize()


class Arriving(Pending):
    def __init__(self, result: Any, arrived: torch.cuda.Event, source: Any) -> None:
        self.result = result
        self.arrived = arrived
        self.source = source  # kept, because the stream of models would otherwise reuse its memory

    def wait(self) -> Any:
        self.arrived.synchronize()
        self.source = None
        return self.result


def streams_for(device: torch.device) -> Streams:
    return CudaStreams(device) if device.type == "cuda" else OneStream()


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """`value` with every tensor replaced: one of them, None, or a named tuple of such."""
    if value is None:
        return None
    if isinstance(value, torch.Tensor):
        return function(value)
    values = (map_tensors(function, item) for item in value)
    return type(value)(*values) if hasattr(value, "_fields") else tuple(values)


def _start_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Start a copy into page-locked memory. An empty tensor has none: it would take no bytes."""
    if not tensor.is_cuda:
        return tensor
    if tensor.numel() == 0:
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    target = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return target.copy_(tensor, non_blocking=True)
