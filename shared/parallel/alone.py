"""Collectives of a group of one rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from diptych.shared.interfaces.collectives import Collectives
from diptych.shared.parallel.collective_log import CollectiveLog


class Alone(Collectives):
    """Each operation returns its argument."""

    rank = 0
    size = 1

    def __init__(self) -> None:
        self.log = CollectiveLog()  # of nothing

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_to_all(
        self, x: torch.Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> torch.Tensor:
        return x

    def broadcast(self, x: torch.Tensor, source: int = 0) -> torch.Tensor:
        return x

    def send(self, x: torch.Tensor, to: int) -> None:
        raise ValueError(f"there is no rank {to}")

    def receive(self, like: torch.Tensor, source: int) -> torch.Tensor:
        raise ValueError(f"there is no rank {source}")


ALONE = Alone()
