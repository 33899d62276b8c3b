"""Stage 13, several GPUs: complete the functions that raise NotImplementedError.

diptych course grade 13     # in the folder of `diptych course start`
diptych check --stage 13 my_collectives.py

The contract is in shared/interfaces/collectives.py. `send` and `receive` are complete, over gloo, and all
operations can be made of them. A send may wait until the other rank receives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import torch

from diptych.shared.interfaces import collectives as interface
from diptych.shared.parallel.collective_log import CollectiveLog

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store, Work


class MyCollectives(interface.Collectives):
    def __init__(self, store: Store, rank: int, size: int, seconds: float, name: str = "tp") -> None:
        from torch.distributed import PrefixStore, ProcessGroupGloo

        self.name = name
        self.rank = rank
        self.size = size
        self.log = CollectiveLog()
        self.group = ProcessGroupGloo(PrefixStore(name, store), rank, size, timedelta(seconds=seconds))

    def broadcast(self, x: torch.Tensor, source: int = 0) -> torch.Tensor:
        """The tensor of rank `source`, on every rank a tensor of its own. In the log like `_gather`."""
        raise NotImplementedError("TODO broadcast: one rank sends, the others receive")

    def _gather(self, op: str, x: torch.Tensor) -> list[torch.Tensor]:
        """The tensors of all ranks, in their order. `op`: the name of the public operation, for the log: each
        operation is one entry (`self.log.add(op, self.name, x)`), made before its first message."""
        raise NotImplementedError("TODO gather: who sends when?")

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """[n, ...] -> [size * n, ...]"""
        raise NotImplementedError("TODO gather: one tensor of all parts")

    def _sum(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """The sum, in the dtype of the parts. The reference adds floats in float32 at least and rounds once;
        you may round each addition."""
        raise NotImplementedError("TODO sums: the same bits on every rank")

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, in x's shape and dtype, with the same bits on every rank."""
        raise NotImplementedError("TODO sums: the sum on every rank")

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        """[size * n, ...] -> [n, ...]: this rank's part of the sum."""
        raise NotImplementedError("TODO sums: a part of the sum on each rank")

    def all_to_all(
        self, x: torch.Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> torch.Tensor:
        """Rank r gets the next send_counts[r] rows of x; receive_counts[r] rows come from rank r. In the log
        with any_rows=True, because ranks have different numbers of rows."""
        raise NotImplementedError("TODO rows: who sends which rows when?")

    def send(self, x: torch.Tensor, to: int) -> None:
        self._finish(self.group.send, [x.contiguous()], to, 0)

    def receive(self, like: torch.Tensor, source: int) -> torch.Tensor:
        received = torch.empty_like(like, memory_format=torch.contiguous_format)
        self._finish(self.group.recv, [received], source, 0)
        return received

    def _finish(self, operation: Callable[..., Work], *args: object) -> None:
        """Run it to its end. A rank that has ended, or is late, breaks the group."""
        try:
            operation(*args).wait()
        except RuntimeError:
            self.is_broken = True
            raise
