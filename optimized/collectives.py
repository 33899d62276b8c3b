"""Collectives of CUDA tensors over NCCL, of CPU tensors over gloo.

Differs from reference: one operation of the library instead of a gather and a sum. A sum is rounded to the
tensor's dtype at each addition. NCCL's operations are queued on the current stream, and a CUDA graph may
contain them. A group's NCCL communicator is made at its first CUDA tensor, which takes time and memory, so
use each group once before memory is measured. It has not run on two GPUs yet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from shared.interfaces import collectives as interface
from shared.parallel.collective_log import CollectiveLog

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store, Work


class Collectives(interface.Collectives):
    def __init__(self, store: Store, rank: int, size: int, seconds: float, name: str = "tp") -> None:
        self.name = name
        self.rank = rank
        self.size = size
        self.log = CollectiveLog()
        self._store = store
        self._limit = timedelta(seconds=seconds)
        self._groups: dict[str, Any] = {}  # type of device -> its process group
        self._group("cpu")

    # --8<-- [start:all-reduce]
    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self.log.add("all_reduce", self.name, x)
        total = x.clone(memory_format=torch.contiguous_format)
        self._finish(x, "allreduce", [total])
        return total

    # --8<-- [end:all-reduce]

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        self.log.add("all_gather", self.name, x)
        gathered = x.new_empty(self.size * x.shape[0], *x.shape[1:])
        self._finish(x, "_allgather_base", gathered, x.contiguous())
        return gathered

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        self.log.add("reduce_scatter", self.name, x)
        part = x.new_empty(x.shape[0] // self.size, *x.shape[1:])
        self._finish(x, "_reduce_scatter_base", part, x.contiguous())
        return part

    def all_to_all(
        self, x: torch.Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> torch.Tensor:
        self.log.add("all_to_all", self.name, x, any_rows=True)
        received = x.new_empty(sum(receive_counts), *x.shape[1:])
        self._finish(x, "alltoall_base", received, x.contiguous(), list(receive_counts), list(send_counts))
        return received

    def broadcast(self, x: torch.Tensor, source: int = 0) -> torch.Tensor:
        self.log.add("broadcast", self.name, x)
        received = x.clone(memory_format=torch.contiguous_format)
        self._finish(x, "broadcast", received, source)
        return received

    def send(self, x: torch.Tensor, to: int) -> None:
        self._finish(x, "send", [x.contiguous()], to, 0)

    def receive(self, like: torch.Tensor, source: int) -> torch.Tensor:
        received = torch.empty_like(like, memory_format=torch.contiguous_format)
        self._finish(like, "recv", [received], source, 0)
        return received

    def _finish(self, x: torch.Tensor, operation: str, *args: object) -> None:
        """Run the operation: on a CPU to its end; on a GPU, later work of the current stream waits for it."""
        run: Callable[..., Work] = getattr(self._group(x.device.type), operation)
        try:
            run(*args).wait()
        except RuntimeError:
            self.is_broken = True
            raise

    def _group(self, device_type: str) -> Any:
        if device_type not in self._groups:
            self._groups[device_type] = self._connect(device_type)
        return self._groups[device_type]

    def _connect(self, device_type: str) -> Any:
        from torch import distributed

        store = distributed.PrefixStore(f"{self.name}/{device_type}", self._store)
        if device_type == "cpu":
            return distributed.ProcessGroupGloo(store, self.rank, self.size, self._limit)
        options = distributed.ProcessGroupNCCL.Options()
        options._timeout = self._limit
        return distributed.ProcessGroupNCCL(store, self.rank, self.size, options)
