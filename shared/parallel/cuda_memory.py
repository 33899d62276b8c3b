"""CUDA memory of another process of this computer: handles that the driver makes, as plain values.

torch shares tensors in the same way, but as pickles, which can run code. The process that shares a tensor
keeps it until the other has ended its work.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec
import torch

_REFERENCE_COUNTER = re.compile(rb"/torch_[0-9a-zA-Z_]{1,64}")


class Handle(msgspec.Struct, forbid_unknown_fields=True):
    """A tensor in the memory of a GPU."""

    gpu: str  # UUID: the numbers of GPUs differ between processes
    memory: bytes
    num_bytes: int
    offset_bytes: int
    counter: bytes
    counter_offset: int
    event: bytes
    waits: bool
    dtype: str
    shape: list[int]
    stride: list[int]
    start: int


def share(tensor: torch.Tensor) -> Handle:
    """The handle of a CUDA tensor."""
    storage = tensor.untyped_storage()
    device, memory, size, offset, counter, counter_offset, event, waits = storage._share_cuda_()
    return Handle(
        gpu_id(device), memory, size, offset, counter, counter_offset, event, waits,
        str(tensor.dtype).removeprefix("torch."), list(tensor.shape), list(tensor.stride()),
        int(tensor.storage_offset()),
    )  # fmt: skip


def open_shared(handle: Handle) -> torch.Tensor:
    """The tensor of another process. Raises `ValueError` for a handle that names no memory of a GPU here."""
    if not torch.cuda.is_available():
        raise ValueError("CUDA handles need a CUDA GPU, and this process has none")
    found = [i for i in range(torch.cuda.device_count()) if gpu_id(i) == handle.gpu]
    if not found or not _REFERENCE_COUNTER.fullmatch(handle.counter):
        raise ValueError(f"no GPU of this process is {handle.gpu!r}, or the handle is none of torch's")
    dtype = getattr(torch, handle.dtype, None)
    last = sum((size - 1) * step for size, step in zip(handle.shape, handle.stride)) + handle.start
    if not isinstance(dtype, torch.dtype) or not 0 <= last * dtype.itemsize < handle.num_bytes:
        raise ValueError(f"a handle of {handle.num_bytes} bytes holds no {handle.dtype} {handle.shape}")
    try:
        storage: Any = torch.UntypedStorage._new_shared_cuda(
            found[0], handle.memory, handle.num_bytes, handle.offset_bytes, handle.counter,
            handle.counter_offset, handle.event, handle.waits,
        )  # fmt: skip
        empty = torch.empty(0, dtype=dtype, device=f"cuda:{found[0]}")
        return empty.set_(storage, handle.start, handle.shape, handle.stride)
    except RuntimeError as error:
        raise ValueError(f"the CUDA handle cannot be opened: {error}") from None


def gpu_id(device: int) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)
