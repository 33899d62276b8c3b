"""Contracts of the three memory pools.

`req_to_token[req_pool_idx, position]` is a *slot*; a slot's KV is `k_buffer(layer)[slot]`; slot
s belongs to page s // page_size. Slots of one page are contiguous. Page 0 is a dummy that padding writes
to; the allocator never hands it out. Row 0 of req_to_token is a dummy row of zeros, likewise.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch


class ReqToTokenPool(ABC):
    """Rows that map a request's positions to slots.

    Attributes: `size` rows that can be handed out (ids 1..size); `max_len` positions a row;
    `req_to_token` int32 [size + 1, max_len] on the device.
    """

    size: int
    max_len: int
    req_to_token: torch.Tensor

    @abstractmethod
    def __init__(self, size: int, max_len: int, device: torch.device | str) -> None: ...

    @abstractmethod
    def alloc(self, num_reqs: int) -> list[int] | None:
        """So many distinct rows, first in first out, or None (and nothing taken) when fewer are free.
        A row's contents are undefined until written."""

    @abstractmethod
    def free(self, req_pool_indices: Sequence[int]) -> None:
        """Give rows back. A row that is not handed out, or row 0, is an AssertionError."""

    @abstractmethod
    def write(self, req_pool_idx: int, start: int, slots: torch.Tensor) -> None:
        """req_to_token[req_pool_idx, start : start + len(slots)] = slots."""

    @abstractmethod
    def read(self, req_pool_idx: int, start: int, end: int) -> torch.Tensor:
        """Slots of positions [start, end), int64, a copy."""

    @abstractmethod
    def available_size(self) -> int:
        """Rows that `alloc` could hand out now."""

    @abstractmethod
    def clear(self) -> None:
        """All rows free."""


class TokenToKVPoolAllocator(ABC):
    """Hands out slots. `size` slots in whole pages: ids page_size .. size + page_size - 1.

    Slots are int64 tensors on `device`. A slot is handed out to one owner until freed. No method ever
    evicts: callers evict first.
    """

    size: int
    page_size: int
    device: torch.device

    @abstractmethod
    def __init__(self, size: int, page_size: int, device: torch.device | str) -> None:
        """`size` must be a positive multiple of `page_size` (`ValueError`)."""

    @abstractmethod
    def alloc(self, num_tokens: int) -> torch.Tensor | None:
        """Slots of whole pages; `num_tokens` must be a multiple of page_size (`AssertionError`). None, and
        nothing taken, when fewer are free. alloc(0) is empty."""

    @abstractmethod
    def alloc_extend(
        self, prefix_lens: Sequence[int], seq_lens: Sequence[int], last_locs: Sequence[int]
    ) -> torch.Tensor | None:
        """Slots for requests that grow from prefix_lens[i] to seq_lens[i] tokens, concatenated in order.

        last_locs[i] is the slot of token prefix_lens[i] - 1 (-1 for an empty prefix), and
        (last_locs[i] + 1) % page_size == prefix_lens[i] % page_size. Each request first fills the rest of
        its last page (last_loc + 1 ...), then takes new pages in order: consecutive positions of a page
        are consecutive slots. New pages: sum of ceil(seq / page) - ceil(prefix / page). None, and nothing
        taken, when fewer are free.
        """

    @abstractmethod
    def alloc_decode(self, seq_lens: Sequence[int], last_locs: Sequence[int]) -> torch.Tensor | None:
        """One slot for each request, whose length is seq_lens[i] afterwards: alloc_extend from
        seq_lens[i] - 1, for all requests at once."""

    @abstractmethod
    def free(self, slots: torch.Tensor) -> None:
        """Give back every page that a slot of `slots` lies on. The pages must be handed out (a page freed
        twice is an `AssertionError`); an empty tensor is fine. Between `free_group_begin` and
        `free_group_end` nothing freed can be handed out again."""

    @abstractmethod
    def free_group_begin(self) -> None:
        """Start collecting frees. Groups do not nest (`AssertionError`)."""

    @abstractmethod
    def free_group_end(self) -> None:
        """Free all that was collected, in one go."""

    @abstractmethod
    def available_size(self) -> int:
        """Free slots, in tokens: a multiple of page_size."""

    @abstractmethod
    def backup_state(self) -> Any:
        """A value that `restore_state` takes back."""

    @abstractmethod
    def restore_state(self, state: Any) -> None:
        """As if everything allocated or freed since `backup_state` had not been."""

    @abstractmethod
    def free_slots(self) -> torch.Tensor:
        """All free slots, sorted (for the invariants checker; may be slow)."""

    @abstractmethod
    def clear(self) -> None:
        """All slots free."""


class TokenToKVPool(ABC):
    """K and V of every slot, per layer: `[size + page_size, num_kv_heads, head_dim]`."""

    size: int
    page_size: int
    num_layers: int
    dtype: torch.dtype
    device: torch.device

    @abstractmethod
    def __init__(
        self,
        size: int,
        page_size: int,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None: ...

    @abstractmethod
    def k_buffer(self, layer_id: int) -> torch.Tensor:
        """[size + page_size, num_kv_heads, head_dim]; a view, not a copy."""

    @abstractmethod
    def v_buffer(self, layer_id: int) -> torch.Tensor:
        """Like `k_buffer`."""

    @abstractmethod
    def store(self, layer_id: int, out_cache_loc: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write k, v [num_tokens, num_kv_heads, head_dim] to the slots, cast to the pool's dtype. Slots are
        distinct, except that several tokens may go to the dummy page."""

    @abstractmethod
    def move(self, target_slots: torch.Tensor, source_slots: torch.Tensor) -> None:
        """Copy the KV of all layers from source to target, as if all sources were read before any target
        is written (the two may overlap). Targets are distinct."""

    @property
    @abstractmethod
    def num_bytes_per_token(self) -> int:
        """Bytes that one slot takes, over all layers."""
