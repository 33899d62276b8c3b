"""Copies from the CPU to the device, without synchronization.

A copy to a GPU starts from page-locked memory. The allocator of that memory keeps it until the copy is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

ALIGNMENT = 2
"""int64 numbers: kernels are compiled once more for addresses that are no multiple of 16 bytes."""

_NUMPY_TYPES = {torch.int64: np.int64, torch.float32: np.float32}


def to_device(values: Sequence[Any], dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """A tensor of numbers, or of rows of numbers."""
    # numpy: torch takes eight times as long for a list of some hundred numbers.
    return copy_to_device(torch.from_numpy(np.array(values, _NUMPY_TYPES[dtype])), device)


def copy_to_device(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    if torch.device(device).type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    if tensor.numel() > 0:  # there is no page-locked memory of no bytes
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def pinned(*shape: int, device: torch.device) -> torch.Tensor:
    """int64 numbers to be filled in and copied to the device. The allocator of page-locked memory does not
    reuse it before a copy from it is done."""
    return torch.empty(shape, dtype=torch.int64, pin_memory=device.type == "cuda")


def vectors_to_device(vectors: Sequence[Sequence[int]], device: torch.device | str) -> list[torch.Tensor]:
    """Each an int64 tensor, all of them in one copy."""
    flat: list[int] = []
    starts: list[int] = []
    for vector in vectors:
        flat += [0] * (-len(flat) % ALIGNMENT)
        starts.append(len(flat))
        flat += vector
    tensor = to_device(flat, torch.int64, device)
    return [tensor[start : start + len(vector)] for start, vector in zip(starts, vectors)]
