"""Memory that the process of a check shares with the process of the function under check: tensors of calls
are written to it and read from it."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

SIZE = 128 * 2**30
"""Bytes of addresses. Memory is taken when it is written."""
RESULTS = SIZE // 2
"""The offset from which results are written."""
ALIGNMENT = 256


class Place(NamedTuple):
    """A tensor in the arena: a storage of `num_bytes` at `offset`, and the view of it."""

    offset: int
    num_bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    storage_offset: int


class Memory(Protocol):
    """`Arena`, `GPUMemory`."""

    def bytes_at(self, offset: int, num_bytes: int) -> torch.Tensor: ...


class Arena:
    """A file in memory, mapped by both processes. `file`: its descriptor; None makes one."""

    def __init__(self, file: int | None = None) -> None:
        self.file = _new_file() if file is None else file
        self.map = mmap.mmap(self.file, SIZE)

    def bytes_at(self, offset: int, num_bytes: int) -> torch.Tensor:
        """uint8 [num_bytes], a storage of its own."""
        if num_bytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(self.map, dtype=torch.uint8, count=num_bytes, offset=offset)

    def at(self, place: Place, device: torch.device | None = None) -> torch.Tensor:
        """The tensor in shared memory; with another `device`, a copy of its storage there."""
        raw = self.bytes_at(place.offset, place.num_bytes)
        if device is not None and device.type != "cpu":
            raw = raw.to(device)
        return _viewed(raw, place)

    def close(self) -> None:
        os.close(self.file)


def free_memory() -> int:
    """Bytes of the CPU's memory that can be taken; 0: unknown."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        pass
    try:
        return int(os.sysconf("SC_AVPHYS_PAGES")) * int(os.sysconf("SC_PAGE_SIZE"))
    except (ValueError, OSError):
        return 0


def _viewed(raw: torch.Tensor, place: Place) -> torch.Tensor:
    empty = torch.empty(0, dtype=place.dtype, device=raw.device)
    return empty.set_(raw.untyped_storage(), place.storage_offset, place.shape, place.stride)


def _new_file() -> int:
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("diptych-check")
    else:
        file, path = tempfile.mkstemp(prefix="diptych-check-")
        os.unlink(path)
    os.ftruncate(file, SIZE)
    return file


class Layout:
    """Gives the storages of tensors places one after another, from `offset` on. Tensors of one storage share
    its place."""

    def __init__(self, offset: int) -> None:
        self.end = offset
        self.storages: dict[int, tuple[int, torch.UntypedStorage]] = {}

    def placed(self, value: Any) -> Any:
        """The same arguments with a `Place` for each tensor."""
        if isinstance(value, torch.Tensor):
            return self._place(value)
        if isinstance(value, (tuple, list)):
            return type(value)(self.placed(each) for each in value)
        if isinstance(value, Mapping):
            return {name: self.placed(each) for name, each in value.items()}
        return value

    def _place(self, tensor: torch.Tensor) -> Place:
        storage = tensor.untyped_storage()
        key = id(tensor) if storage.nbytes() == 0 else storage.data_ptr()
        if key not in self.storages:
            self.storages[key] = self.end, storage
            self.end += -(-max(storage.nbytes(), 1) // ALIGNMENT) * ALIGNMENT
        if self.end > RESULTS:
            raise ValueError(f"the inputs of a call have more than {RESULTS} bytes")
        offset, shape, stride = self.storages[key][0], tuple(tensor.shape), tuple(tensor.stride())
        return Place(offset, storage.nbytes(), tensor.dtype, shape, stride, int(tensor.storage_offset()))

    def write(self, memory: Memory) -> None:
        """The contents of all storages, as they are now."""
        for offset, storage in self.storages.values():
            memory.bytes_at(offset, storage.nbytes()).copy_(_raw(storage))

    def read(self, arena: Arena) -> None:
        """Copies the contents of the arena back to the storages."""
        for offset, storage in self.storages.values():
            _raw(storage).copy_(arena.bytes_at(offset, storage.nbytes()))


def _raw(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
