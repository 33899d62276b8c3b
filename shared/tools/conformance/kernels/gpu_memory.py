"""Memory of a GPU that the process of a check shares with the process of the function under check."""

from __future__ import annotations

from typing import Any

import torch

ALIGNMENT = 2**20
Handle = tuple[Any, ...]


class GPUMemory:
    """Memory of the process of the check. One object a process, which keeps its memory: a child that is ended
    does not give back what it has opened."""

    def __init__(self) -> None:
        self.raw = torch.empty(0, dtype=torch.uint8)
        self._handle: Handle | None = None

    def handle(self, num_bytes: int) -> Handle | None:
        """What another process opens the memory by, which has `num_bytes` or more. None: the system cannot
        share memory of its GPU."""
        if self._handle is None or len(self.raw) < num_bytes:
            size = -(-num_bytes // ALIGNMENT) * ALIGNMENT
            self.raw = torch.empty(size, dtype=torch.uint8, device="cuda")
            storage: Any = self.raw.untyped_storage()
            try:
                self._handle = tuple(storage._share_cuda_())
            except (RuntimeError, NotImplementedError):
                self._handle = None
        return self._handle

    def bytes_at(self, offset: int, num_bytes: int) -> torch.Tensor:
        """uint8 [num_bytes]"""
        return self.raw[offset : offset + num_bytes]


def opened(handle: Handle) -> torch.UntypedStorage:
    """The memory of another process."""
    torch.cuda.init()
    storage_class: Any = torch.UntypedStorage
    storage: torch.UntypedStorage = storage_class._new_shared_cuda(*handle)
    return storage


MEMORY = GPUMemory()
