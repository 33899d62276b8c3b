"""Collectives of ranks that are threads. Ranks that do not call the same end with an error, where gloo ends
the process and NCCL waits."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Barrier
from typing import Any
from weakref import WeakKeyDictionary

import torch

from diptych.shared.interfaces import Collectives
from diptych.shared.parallel.collective_log import CollectiveLog


class Meeting:
    """Where the ranks of a group exchange tensors."""

    def __init__(self, size: int) -> None:
        self.barrier = Barrier(size)
        self.calls: list[Any] = [None] * size
        self.tensors: list[Any] = [None] * size


MEETINGS: WeakKeyDictionary[Any, Meeting] = WeakKeyDictionary()
"""By store."""


class StrictRanks(Collectives):
    def __init__(self, store: Any, rank: int, size: int, seconds: float, name: str = "tp") -> None:
        self.rank, self.size, self.seconds, self.log = rank, size, seconds, CollectiveLog()
        self.meeting = MEETINGS.setdefault(store, Meeting(size))

    def _exchange(self, call: tuple[Any, ...], x: Any) -> list[Any]:
        """What each rank gives."""
        meeting = self.meeting
        meeting.calls[self.rank], meeting.tensors[self.rank] = call, x
        meeting.barrier.wait(self.seconds)
        calls, tensors = list(meeting.calls), list(meeting.tensors)
        meeting.barrier.wait(self.seconds)
        if len(set(calls)) > 1:
            meeting.barrier.abort()
            raise RuntimeError(f"the ranks differ: {calls}")
        return tensors

    def _same(self, name: str, x: torch.Tensor) -> list[torch.Tensor]:
        return self._exchange((name, tuple(x.shape), x.dtype), x.clone())

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._same("all_reduce", x)).sum(0, dtype=x.dtype)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._same("all_gather", x))

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._same("reduce_scatter", x)).sum(0).chunk(self.size)[self.rank]

    def all_to_all(
        self, x: torch.Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> torch.Tensor:
        sent = self._exchange(("all_to_all", x.dtype), x.split(list(send_counts)))
        received = [parts[self.rank] for parts in sent]
        assert [len(part) for part in received] == list(receive_counts)
        return torch.cat(received)

    def broadcast(self, x: torch.Tensor, source: int = 0) -> torch.Tensor:
        return self._same("broadcast", x)[source]

    def send(self, x: torch.Tensor, to: int) -> None:
        raise NotImplementedError

    def receive(self, like: torch.Tensor, source: int) -> torch.Tensor:
        raise NotImplementedError
