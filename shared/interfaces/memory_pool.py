"""Contracts of the three memory pools.

`req_to_token[req_pool_idx, position]` is a *slot*; a slot's KV is `k_buffer(layer)[slot]`; slot
s is on page s // page_size. Slots of one page are contiguous. Page 0 is a dummy that padding writes to;
the allocator never allocates it. Row 0 of req_to_token is a dummy row of zeros, likewise.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from diptych.shared.types.attention import KVScales


class ReqToTokenPool(ABC):
    """Rows that map a request's positions to slots. Kernels read `req_to_token`; only this class writes it.

    Attributes: `size` rows that can be allocated (ids 1..size); `max_len` positions a row;
    `req_to_token` int32 [size + 1, max_len] on the device.
    """

    size: int
    max_len: int
    req_to_token: torch.Tensor

    @abstractmethod
    def __init__(self, size: int, max_len: int, device: torch.device | str) -> None: ...

    @abstractmethod
    def alloc(self, num_reqs: int) -> list[int] | None:
        """Distinct rows, first in first out; None, without allocating any, if fewer are free. A row's
        contents are undefined until written."""

    @abstractmethod
    def free(self, req_pool_indices: Sequence[int]) -> None:
        """Free rows. A row that is not allocated, or row 0, is an AssertionError."""

    @abstractmethod
    def write(self, req_pool_idx: int, start: int, slots: torch.Tensor) -> None:
        """req_to_token[req_pool_idx, start : start + len(slots)] = slots."""

    @abstractmethod
    def read(self, req_pool_idx: int, start: int, end: int) -> torch.Tensor:
        """Slots of positions [start, end), int64, a copy: on the device, or on the CPU if the pool keeps its
        rows there as well."""

    @abstractmethod
    def write_ragged(
        self,
        req_pool_indices: Sequence[int],
        starts: Sequence[int],
        lens: Sequence[int],
        slots: torch.Tensor,
    ) -> None:
        """`write` for many rows: the next lens[i] of `slots` go to row req_pool_indices[i], from position
        starts[i] on. No position is written twice."""

    @abstractmethod
    def read_each(self, req_pool_indices: Sequence[int], positions: Sequence[int]) -> list[int]:
        """The slot of one position of each row, on the CPU. Synchronizes if the rows are only on a GPU."""

    @abstractmethod
    def available_size(self) -> int:
        """Rows that `alloc` can allocate now."""

    @abstractmethod
    def clear(self) -> None:
        """All rows free."""


class TokenToKVPoolAllocator(ABC):
    """Allocates slots. `size` slots in whole pages: ids page_size .. size + page_size - 1.

    Slots are int64 tensors on `slot_device`; arguments may be on any device. A slot has one owner until it
    is freed. No method evicts: callers evict first.
    """

    size: int
    page_size: int
    device: torch.device

    @abstractmethod
    def __init__(self, size: int, page_size: int, device: torch.device | str) -> None:
        """`size` must be a positive multiple of `page_size` (`ValueError`). `device`: the model's."""

    @property
    @abstractmethod
    def slot_device(self) -> torch.device:
        """Device of allocated slots: the model's, or the CPU for an allocator that works there."""

    @abstractmethod
    def alloc(self, num_tokens: int) -> torch.Tensor | None:
        """Slots of whole pages; `num_tokens` must be a multiple of page_size (`AssertionError`). None,
        without allocating any, if fewer are free. alloc(0) is empty."""

    @abstractmethod
    def alloc_extend(
        self, prefix_lens: Sequence[int], seq_lens: Sequence[int], last_locs: Sequence[int]
    ) -> torch.Tensor | None:
        """Slots for requests that grow from prefix_lens[i] to seq_lens[i] tokens, concatenated in order.

        last_locs[i] is the slot of token prefix_lens[i] - 1 (-1 for an empty prefix;
        if a prefix ends with its page, -1 is allowed too), and
        (last_locs[i] + 1) % page_size == prefix_lens[i] % page_size. Each request first fills the rest of
        its last page (last_loc + 1 ...), then takes new pages in order: consecutive positions of a page
        are consecutive slots. New pages: sum of ceil(seq / page) - ceil(prefix / page). None, without
        allocating any, if fewer are free.
        """

    @abstractmethod
    def alloc_decode(self, seq_lens: Sequence[int], last_locs: Sequence[int]) -> torch.Tensor | None:
        """One slot for each request, whose length is seq_lens[i] afterwards: alloc_extend from
        seq_lens[i] - 1, for all requests together."""

    @abstractmethod
    def free(self, slots: torch.Tensor) -> None:
        """Free every page that has a slot of `slots`. The pages must be allocated: a page freed twice is an
        `AssertionError`, and then nothing is freed. An empty tensor is allowed."""

    @abstractmethod
    def available_size(self) -> int:
        """Free slots, in tokens: a multiple of page_size."""

    @abstractmethod
    def free_slots(self) -> torch.Tensor:
        """All free slots, sorted (for the invariants checker; may be slow)."""

    @abstractmethod
    def clear(self) -> None:
        """All slots free."""


class TokenToKVPool(ABC):
    """K and V of every slot, per layer: `[size + page_size, num_kv_heads, head_dim]`.

    A pool of dtype float8_e4m3fn or float8_e5m2 holds k / k_scale and v / v_scale, computed in float32 at
    least, clamped to the finite values of the type (up to 448, 57344) and rounded to nearest, ties to even.
    Attention multiplies by the scales. `kv_scales` are those of each layer; they are 1 in pools of other
    dtypes.
    """

    size: int
    page_size: int
    num_layers: int
    dtype: torch.dtype
    device: torch.device
    kv_scales: Sequence[KVScales]

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
        kv_scales: Sequence[KVScales] | None = None,
    ) -> None:
        """`kv_scales`: one for each layer; None: all 1."""

    @abstractmethod
    def k_buffer(self, layer_id: int) -> torch.Tensor:
        """[size + page_size, num_kv_heads, head_dim]; a view, not a copy."""

    @abstractmethod
    def v_buffer(self, layer_id: int) -> torch.Tensor:
        """Like `k_buffer`."""

    @abstractmethod
    def store(self, layer_id: int, out_cache_loc: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write k, v [num_tokens, num_kv_heads, head_dim] to the slots, cast to the pool's dtype. Slots are
        distinct, except that several tokens may go to the dummy page. k and v are not modified."""

    @abstractmethod
    def move(self, target_slots: torch.Tensor, source_slots: torch.Tensor) -> None:
        """Copy the KV of all layers from source to target, as if all sources were read before any target
        is written (the two may overlap). Targets are distinct."""

    @property
    def largest_heads(self) -> tuple[int, int]:
        """The most KV heads of a layer, and the largest head_dim."""
        shapes = [self.k_buffer(layer_id).shape for layer_id in range(self.num_layers)]
        return max(shape[1] for shape in shapes), max(shape[2] for shape in shapes)

    @property
    @abstractmethod
    def num_bytes_per_token(self) -> int:
        """Bytes that one slot takes, over all layers."""
