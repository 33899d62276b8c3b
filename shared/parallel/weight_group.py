"""Weights from a trainer to the ranks of an engine: gloo between CPUs, NCCL between GPUs of one computer.

The engine invites: it makes a store that only this user can read (`meeting.py`). For each update, the trainer
waits there for the engine's word, which follows the check of all names and shapes; then it sends every tensor
to all ranks. The group is formed for the first tensor. NCCL needs a GPU of its own for the trainer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch

from diptych.shared.parallel.meeting import gloo_group, local_store, open_store, use_loopback

SECONDS = 60.0
"""For which each end waits for the other."""
GO = b"go"
T = TypeVar("T", bound=tuple[Any, ...])


class _Member:
    def __init__(self, store: Any, rank: int, size: int, device: torch.device, seconds: float) -> None:
        self.store, self.rank, self.size, self.device = store, rank, size, device
        self.limit = timedelta(seconds=seconds)
        self.num_updates = 0
        self._group: Any = None

    def broadcast(self, x: torch.Tensor) -> None:
        """From rank 0 into the contiguous x of the others, which has its size."""
        from torch.distributed import BroadcastOptions

        if self._group is None:
            self._group = self._connect()
        options = BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = 0, 0, self.limit
        self._group.broadcast([x.reshape(-1).view(torch.uint8)], options).wait(self.limit)

    def _connect(self) -> Any:
        from torch.distributed import PrefixStore

        store = PrefixStore("weights", self.store)
        if self.device.type == "cpu":
            return gloo_group(store, self.rank, self.size, self.limit)
        from torch.distributed import ProcessGroupNCCL

        use_loopback()
        options = ProcessGroupNCCL.Options()
        options._timeout = self.limit
        return ProcessGroupNCCL(store, self.rank, self.size, options)


def invite(num_ranks: int) -> tuple[Any, dict[str, Any]]:
    """The store of a trainer and this number of ranks, to be kept, and what the trainer needs to know."""
    store = local_store(1 + num_ranks)
    return store, {"store": store.path, "world_size": 1 + num_ranks}


class WeightReceiver(_Member):
    """The end of an engine's rank. Rank 1 of the group, the first of the engine, speaks for all."""

    def __init__(
        self, path: str, rank: int, size: int, device: torch.device, seconds: float = SECONDS
    ) -> None:
        super().__init__(open_store(path, size), 1 + rank, size, device, seconds)

    def receive(self, specs: Sequence[T]) -> Iterator[tuple[T, torch.Tensor]]:
        """The tensors that `specs` (name, dtype, shape) announce, in this order."""
        self.say(GO)
        for spec in specs:
            tensor = torch.empty(spec[2], dtype=getattr(torch, spec[1]), device=self.device)
            self.broadcast(tensor)
            yield spec, tensor

    def say(self, word: bytes) -> None:
        """To the trainer: `GO`, or why the update is refused; and after `GO`, "" or why it was."""
        if self.rank == 1:
            key = f"{self.num_updates}"
            self.store.set(f"{key} end" if self.store.check([key]) else key, word or b" ")

    def end(self, problem: str = "") -> None:
        """After an update. The next one has another number."""
        self.say(problem.encode())
        self.num_updates += 1


class WeightSender(_Member):
    """The end of a trainer, in a process of its own. `invitation`: what the engine has answered."""

    def __init__(
        self, invitation: Mapping[str, Any], device: torch.device | str = "cpu", seconds: float = SECONDS
    ) -> None:
        size = int(invitation["world_size"])
        super().__init__(open_store(invitation["store"], size), 0, size, torch.device(device), seconds)
        self.store.set_timeout(self.limit)

    def send(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Send the tensors that the engine has been asked to take, in the same order. Raises `ValueError` if
        the engine refuses them, and `RuntimeError` if it does not answer."""
        key = f"{self.num_updates}"
        self.num_updates += 1
        word = self._word(key)
        if word != GO:
            raise ValueError(word.decode())
        for tensor in tensors.values():
            self.broadcast(tensor.detach().to(self.device).contiguous())
        if problem := self._word(f"{key} end").decode().strip():
            raise ValueError(problem)

    def _word(self, key: str) -> bytes:
        try:
            word: bytes = self.store.get(key)
        except Exception as error:
            raise RuntimeError(f"the engine has not answered within {self.limit.seconds} s") from error
        return word
