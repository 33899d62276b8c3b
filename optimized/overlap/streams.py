"""Streams: where a batch runs while the CPU forms the next one.

The scheduler works on the stream that its caller is on: slots, rows of req_to_token, the tensors of a batch.
Models run on a second one, and only there are KV, logits and future tokens read or written. Each launch waits
for what was scheduled before it, never the other way round; the CPU waits only for a batch's results. These
leave on a third stream, while the next batch runs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch

Work = Callable[[], Any]
"""Queues a batch on the device, and returns the tensors to copy to the CPU: one, or tuples of them."""


class Pending(ABC):
    """Results of a launch, on their way to the CPU."""

    @abstractmethod
    def wait(self) -> Any:
        """The work's tensors, on the CPU."""


class Streams(ABC):
    @abstractmethod
    def launch(self, work: Work) -> Pending:
        """Run `work` behind everything launched before. What it raises is raised here."""

    @abstractmethod
    def copy(self, tensors: Any) -> Pending:
        """Inside a launch: copies of tensors that it has computed so far, on their way to the CPU while it
        goes on."""

    def synchronize(self) -> None:  # noqa: B027 - work may be done when it is launched
        """Wait until all that was launched is done."""


class OneStream(Streams):
    """A device that does one thing at a time (CPU, MPS): the same order of work, without the overlap."""

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
    """Of a CUDA GPU. The caller keeps the tensors that `work` reads until its results arrive: the
    allocator of memory knows only of the stream on which a tensor was made."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.forward_stream = torch.cuda.Stream(device)
        # Between two batches a copy to the CPU would take the device 15 microseconds, mostly of waiting.
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
        self.source = source  # kept: its memory belongs to the stream of models, which would use it again

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
    """On its way into page-locked memory; that of an empty tensor would be of no bytes."""
    if not tensor.is_cuda:
        return tensor
    if tensor.numel() == 0:
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    target = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return target.copy_(tensor, non_blocking=True)
