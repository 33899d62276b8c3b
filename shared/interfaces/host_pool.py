"""Contract of a host pool: KV pages in the computer's memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch

from diptych.shared.interfaces.memory_pool import TokenToKVPool


class HostPool(ABC):
    """Copies of KV, outside of the device: `num_pages` pages of `page_len` tokens, all layers of each. A page
    holds the bits of the KV pool, whatever their type.

    The caller assigns pages. Calls take effect in their order.
    """

    pools: str = "reference"  # the implementation of `memory_pool` that it is made for
    num_pages: int
    page_len: int

    @abstractmethod
    def __init__(self, kv_pool: TokenToKVPool, num_pages: int, page_len: int) -> None: ...

    @abstractmethod
    def store(self, pages: Sequence[int], slots: torch.Tensor) -> None:
        """Copy the KV of these slots, page_len of them for each page, to the pages: as all passes launched so
        far leave it. Later passes may overwrite the slots."""

    @abstractmethod
    def load(self, pages: Sequence[int], slots: torch.Tensor, num_skipped: int = 0) -> None:
        """Copy the tokens of the pages, without the first `num_skipped`, to as many slots: for passes
        launched later. Passes launched before may still read what was there. Other slots are not touched."""

    @abstractmethod
    def before_pass(self) -> None:
        """Called where each pass is launched, before it."""

    @abstractmethod
    def page_views(self, page: int) -> list[memoryview]:
        """The memory of a page, for another tier: views of bytes, in an order that depends on the layout of
        the KV pool only. They may be read and written when no copy of this page is on its way."""

    @abstractmethod
    def copies_so_far(self) -> Callable[[], None]:
        """Start the copies of all calls so far. The function that is returned waits for their end; any thread
        may call it."""


def byte_rows(kv_pool: TokenToKVPool, layer_id: int) -> list[torch.Tensor]:
    """uint8 [num_slots, bytes] views of K and of V of a layer; of one buffer, where V is a part of K."""
    k, v = kv_pool.k_buffer(layer_id), kv_pool.v_buffer(layer_id)
    buffers = [k] if v.data_ptr() == k.data_ptr() else [k, v]
    return [buffer.flatten(1).view(torch.uint8) for buffer in buffers]
