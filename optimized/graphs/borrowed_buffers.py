"""Tensors over memory that they do not own: where a captured tensor lies, which other graphs may use too.

PyTorch gives a graph's tensors out of a pool, and keeps from others what is still referred to. A runner that
held on to every size's logits, or to every layer's queries, would keep gigabytes. So it remembers where they
lie, and looks there right after a replay.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Memory(NamedTuple):
    """Where a tensor lies, without keeping that place from being used again."""

    data_ptr: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(tensor: torch.Tensor) -> Memory:
        return Memory(tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)

    def as_tensor(self, borrower: Borrower | None = None) -> torch.Tensor:
        """What lies there now, and what is written there later."""
        values = torch.as_tensor(borrower or Borrower(self)).view(self.dtype)
        return values.as_strided(self.shape, self.strides)


class Borrower:
    """Memory that a tensor may be made of; alive as long as that tensor's storage."""

    def __init__(self, memory: Memory) -> None:
        extent = 1 + sum((size - 1) * stride for size, stride in zip(memory.shape, memory.strides))
        # As bytes: the protocol does not know bfloat16.
        self.__cuda_array_interface__ = {
            "data": (memory.data_ptr, False),
            "shape": (extent * memory.dtype.itemsize,),
            "typestr": "|u1",
            "version": 3,
        }
