"""Contract of collectives: operations in which all ranks of a group take part."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from diptych.shared.interfaces.layers import RMSNorm

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store


class Collectives(ABC):
    """One group of ranks, numbered from 0. Every rank calls the same operations in the same order, with
    tensors of one dtype and, where nothing else is said, of one shape. A call returns when its result may be
    used. No operation changes its arguments, except `all_reduce_add_and_norm`.

    A rank that ends, or that does not arrive within the group's time limit, makes the operation raise
    `RuntimeError` on the others, where `is_broken` is True from then on. The group cannot be used afterwards.

    With one rank every operation returns at once.

    `leave` ends the group on this rank: operations of the others that wait for it raise, and so on from rank
    to rank. Ranks that have left may `rejoin` as another group, without some that have ended. An
    implementation may leave both out.

    `meanwhile`, where it is given, is called once in every operation, between its start and the wait for its
    result; it may run operations of the group, which start in the same order on all ranks.
    """

    rank: int
    size: int
    is_broken: bool = False
    meanwhile: Callable[[], None] | None = None
    grid: Grid | None = None  # of all ranks: the groups of this rank, where there are others
    log: Any
    """A `diptych.shared.parallel.collective_log.CollectiveLog` of what all ranks call in the same order:
    everything but `send` and `receive`."""

    @abstractmethod
    def __init__(self, store: Store, rank: int, size: int, seconds: float, name: str = "tp") -> None:
        """Join a group of `size` ranks, which meet in the store. Groups of different names are apart: a rank
        may be in several. `seconds`: the time limit of joining and of each operation."""

    def leave(self) -> None:
        """Leave the group; no operation is under way. `is_broken` is True afterwards."""
        raise ValueError(f"{type(self).__name__}: a rank cannot leave")

    def rejoin(self, store: Store, rank: int, size: int, seconds: float) -> None:
        """After `leave`: join a group of `size` ranks, which meet in a store that no other group has used.
        Numbers of ranks are new ones, the log is empty, and each operation has the time limit of before.
        `seconds`: the time limit of joining. Raises `RuntimeError`, like an operation."""
        raise ValueError(f"{type(self).__name__}: ranks cannot form another group")

    @abstractmethod
    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, in x's shape and dtype, with the same bits on every rank. Integers are exact.
        The reference adds floats in float32 (at least) in the order of ranks; another implementation may
        round each addition to x's dtype, in an order of its own."""

    def all_reduce_add_and_norm(
        self, x: torch.Tensor, residual: torch.Tensor, norm: RMSNorm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """norm.add_and_norm(all_reduce(x), residual): (norm of the sum, the sum), both may be written over x
        and residual. An implementation may round the sum of all ranks and the residual once."""
        return norm.add_and_norm(self.all_reduce(x), residual)

    def barrier(self) -> None:
        """Returns when all ranks have called it; work that a GPU still has to do is not waited for."""
        self.all_reduce(torch.zeros(1))

    @abstractmethod
    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """[n, ...] -> [size * n, ...]: the tensors of all ranks in their order."""

    @abstractmethod
    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        """[size * n, ...] -> [n, ...]: this rank's part of the sum over ranks, added as in `all_reduce`."""

    @abstractmethod
    def all_to_all(
        self, x: torch.Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> torch.Tensor:
        """Rank r gets the next `send_counts[r]` rows of x. Returns the rows from all ranks, in their order:
        `receive_counts[r]` of rank r. Counts may be 0."""

    @abstractmethod
    def broadcast(self, x: torch.Tensor, source: int = 0) -> torch.Tensor:
        """The tensor of rank `source`. Others pass a tensor of its shape and dtype."""

    @abstractmethod
    def send(self, x: torch.Tensor, to: int) -> None:
        """Give a tensor to one rank, which calls `receive`. Returns when x may be overwritten."""

    @abstractmethod
    def receive(self, like: torch.Tensor, source: int) -> torch.Tensor:
        """The tensor that rank `source` sends, in the shape and dtype of `like`."""


class Grid(NamedTuple):
    """The groups of a rank of a pipeline whose stages are divided."""

    tp: Collectives  # the ranks of its stage, in the order of the parts
    stages: Collectives  # the ranks with its part, in the order of the layers
