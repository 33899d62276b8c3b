"""Borrowed buffers: tensors over memory of captured graphs that they do not own and that other graphs may use
too.

PyTorch allocates a graph's tensors from a pool and does not reuse memory that is still referenced. A runner
that referenced the logits of every size, or the queries of every layer, would keep gigabytes. So it stores
only their addresses, and reads them right after a replay.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Memory(NamedTuple):
    """The address and shape of a tensor, without a reference, so that its memory can be reused."""

    data_ptr: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(tensor: torch.Tensor) -> Memory:
        return Memory(tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)

    def as_tensor(self, borrower: Borrower | None = None) -> torch.Tensor:
        """A tensor over this memory, with its present and later content."""
        values = torch.as_tensor(borrower or Borrower(self)).view(self.dtype)
        return values.as_strided(self.shape, self.strides)


class Borrower:
    """The owner object of a borrowed tensor's memory, which lives as long as the tensor's storage."""

    def __init__(self, memory: Memory) -> None:
        extent = 1 + sum((size - 1) * stride for size, stride in zip(memory.shape, memory.strides))
        # As bytes: the protocol does not know bfloat16.
        self.__cuda_array_interface__ = {
            "data": (memory.data_ptr, False),
            "shape": (extent * memory.dtype.itemsize,),
            "typestr": "|u1",
            "version": 3,
        }
