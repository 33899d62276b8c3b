"""Collectives over gloo: any number of processes, on CPUs, on one machine or several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import torch

from diptych.shared.interfaces import collectives as interface
from diptych.shared.parallel.collective_log import CollectiveLog
from diptych.shared.parallel.meeting import gloo_group

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store, Work


class Collectives(interface.Collectives):
    def __init__(self, store: Store, rank: int, size: int, seconds: float, name: str = "tp") -> None:
        from torch.distributed import PrefixStore

        self.name = name
        self.rank = rank
        self.size = size
        self.log = CollectiveLog()
        self.limit = timedelta(seconds=seconds)
        self.group = gloo_group(PrefixStore(name, store), rank, size, self.limit)

    def leave(self) -> None:
        self.group, self.is_broken = None, True  # its connections are closed with the group

    def rejoin(self, store: Store, rank: int, size: int, seconds: float) -> None:
        self.group = gloo_group(store, rank, size, timedelta(seconds=seconds))
        self.group.set_timeout(self.limit)
        self.rank, self.size, self.is_broken = rank, size, False
        self.log.clear()

    # --8<-- [start:all-reduce]
    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return self._sum(self._gather("all_reduce", x))

    def _sum(self, parts: list[torch.Tensor]) -> torch.Tensor:
        dtype = parts[0].dtype
        total = parts[0].to(torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype)
        for part in parts[1:]:  # in the order of ranks, so that all ranks get the same bits
            total = total + part
        return total.to(dtype)

    # --8<-- [end:all-reduce]

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._gather("all_gather", x))

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        return self._sum([part.chunk(self.size)[self.rank] for part in self._gather("reduce_scatter", x)])

    def all_to_all(
        self, x: torch.Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> torch.Tensor:
        self.log.add("all_to_all", self.name, x, any_rows=True)
        received = x.new_empty(sum(receive_counts), *x.shape[1:])
        self._finish(
            self.group.alltoall_base, received, x.contiguous(), list(receive_counts), list(send_counts)
        )
        return received

    def broadcast(self, x: torch.Tensor, source: int = 0) -> torch.Tensor:
        self.log.add("broadcast", self.name, x)
        received = x.clone(memory_format=torch.contiguous_format)
        self._finish(self.group.broadcast, received, source)
        return received

    def send(self, x: torch.Tensor, to: int) -> None:
        self._finish(self.group.send, [x.contiguous()], to, 0)

    def start_send(self, x: torch.Tensor, to: int) -> Work:
        """`send` that returns immediately. x, which is contiguous, must not be overwritten until the work is
        completed."""
        return self.group.send([x], to, 0)

    def receive(self, like: torch.Tensor, source: int) -> torch.Tensor:
        received = torch.empty_like(like, memory_format=torch.contiguous_format)
        self._finish(self.group.recv, [received], source, 0)
        return received

    def _gather(self, op: str, x: torch.Tensor) -> list[torch.Tensor]:
        self.log.add(op, self.name, x)
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.size)]
        self._finish(self.group.allgather, [parts], [x.contiguous()])
        return parts

    def _finish(self, operation: Callable[..., Work], *args: object) -> None:
        """Run the operation to its end."""
        try:
            work = operation(*args)
            if self.meanwhile is not None:
                self.meanwhile()
            work.wait()
        except RuntimeError:
            self.is_broken = True
            raise
