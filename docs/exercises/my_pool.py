"""Stage 02, paged memory: complete the functions that raise NotImplementedError.

diptych course grade 02     # in the folder of `diptych course start`
diptych check --stage 02 my_pool.py

The contract of each method is in shared/interfaces/memory_pool.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from diptych.shared.interfaces import memory_pool as interface
from diptych.shared.modeling.kv_pool import to_fp8
from diptych.shared.types.attention import FP8_TYPES, KVScales


class ReqToTokenPool(interface.ReqToTokenPool):
    """Rows that map a request's positions to slots. Row 0 is a dummy row."""

    def __init__(self, size: int, max_len: int, device: torch.device | str) -> None:
        self.size = size
        self.max_len = max_len
        self.req_to_token = torch.zeros(size + 1, max_len, dtype=torch.int32, device=device)
        self.clear()

    def clear(self) -> None:
        self._free_rows = deque(range(1, self.size + 1))
        self._used_rows: set[int] = set()

    def alloc(self, num_reqs: int) -> list[int] | None:
        """Rows from the front of the queue; None, without taking any, if fewer are free."""
        raise NotImplementedError("TODO rows: all rows, or none")

    def free(self, req_pool_indices: Sequence[int]) -> None:
        """A row that is not allocated is an AssertionError."""
        raise NotImplementedError("TODO rows: a row is free or used, never both")

    def write(self, req_pool_idx: int, start: int, slots: torch.Tensor) -> None:
        """Slots of the positions from `start` on."""
        raise NotImplementedError("TODO rows: what a row holds from `start` on")

    def read(self, req_pool_idx: int, start: int, end: int) -> torch.Tensor:
        """Slots of the positions from `start` up to `end`: a copy, int64."""
        raise NotImplementedError("TODO rows: what a row holds between two positions")

    def write_ragged(
        self,
        req_pool_indices: Sequence[int],
        starts: Sequence[int],
        lens: Sequence[int],
        slots: torch.Tensor,
    ) -> None:
        for row, start, row_slots in zip(req_pool_indices, starts, slots.split(list(lens))):
            self.write(row, start, row_slots)

    def read_each(self, req_pool_indices: Sequence[int], positions: Sequence[int]) -> list[int]:
        return self.req_to_token[list(req_pool_indices), list(positions)].tolist()

    def available_size(self) -> int:
        return len(self._free_rows)


class TokenToKVPool(interface.TokenToKVPool):
    """K and V of every slot: two tensors [num_layers, size + page_size, num_kv_heads, head_dim]."""

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
        self.size = size
        self.page_size = page_size
        self.num_layers = num_layers
        self.dtype = dtype
        self.device = torch.device(device)
        self.kv_scales = kv_scales or [KVScales()] * num_layers
        shape = (num_layers, size + page_size, num_kv_heads, head_dim)
        self._k = torch.zeros(shape, dtype=dtype, device=device)
        self._v = torch.zeros(shape, dtype=dtype, device=device)

    def k_buffer(self, layer_id: int) -> torch.Tensor:
        return self._k[layer_id]

    def v_buffer(self, layer_id: int) -> torch.Tensor:
        return self._v[layer_id]

    def store(self, layer_id: int, out_cache_loc: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Row i of k and v [num_tokens, num_kv_heads, head_dim] goes to slot out_cache_loc[i], in the pool's
        dtype. A pool of a dtype in FP8_TYPES holds `to_fp8(k, v, self.kv_scales[layer_id], self.dtype)`."""
        raise NotImplementedError("TODO store: the KV of new tokens, which have any slots")

    def move(self, target_slots: torch.Tensor, source_slots: torch.Tensor) -> None:
        """In all layers, as if all sources were read before any target is written."""
        raise NotImplementedError("TODO store: sources and targets may overlap")

    @property
    def num_bytes_per_token(self) -> int:
        """Bytes of a slot: K and V of all layers."""
        raise NotImplementedError("TODO store: what one token costs")


class TokenToKVPoolAllocator(interface.TokenToKVPoolAllocator):
    """Each page is either in `_free_pages` or in `_used_pages`. Page 0 is the dummy page and in neither."""

    def __init__(self, size: int, page_size: int, device: torch.device | str) -> None:
        if page_size < 1 or size < page_size or size % page_size != 0:
            raise ValueError(f"size ({size}) must be a positive multiple of page_size ({page_size})")
        self.size = size
        self.page_size = page_size
        self.device = torch.device(device)
        self.clear()

    @property
    def slot_device(self) -> torch.device:
        return self.device

    def _take_pages(self, num_pages: int) -> list[int] | None:
        """Pages from the front of the queue; None, without taking any, if fewer are free."""
        raise NotImplementedError("TODO alloc: all pages, or none")

    def alloc(self, num_tokens: int) -> torch.Tensor | None:
        """Slots of whole pages. A number that is no multiple of page_size is an AssertionError."""
        raise NotImplementedError("TODO alloc: the slots of whole pages")

    def alloc_extend(
        self, prefix_lens: Sequence[int], seq_lens: Sequence[int], last_locs: Sequence[int]
    ) -> torch.Tensor | None:
        """Slots of the new tokens of requests that grow from prefix_lens[i] to seq_lens[i] tokens, one
        request after another; None, without taking any page, if too few are free. last_locs[i] is the slot of
        token prefix_lens[i] - 1, and has no meaning if there is none; a slot that has another offset in its
        page than this token is an AssertionError."""
        raise NotImplementedError("TODO extend: which slots exist already, and how many pages are new?")

    def alloc_decode(self, seq_lens: Sequence[int], last_locs: Sequence[int]) -> torch.Tensor | None:
        return self.alloc_extend([seq_len - 1 for seq_len in seq_lens], seq_lens, last_locs)

    def free(self, slots: torch.Tensor) -> None:
        """Free every page that has one of the slots. A page that is not allocated is an AssertionError."""
        raise NotImplementedError("TODO free: each page once")

    # What follows is complete.

    def available_size(self) -> int:
        return len(self._free_pages) * self.page_size

    def free_slots(self) -> torch.Tensor:
        return self._slots_of(sorted(self._free_pages))

    def clear(self) -> None:
        self._free_pages = deque(range(1, self.size // self.page_size + 1))
        self._used_pages: set[int] = set()

    def _slots_of(self, pages: Sequence[int]) -> torch.Tensor:
        """int64 [len(pages) * page_size], page by page."""
        starts = torch.tensor(pages, dtype=torch.int64, device=self.device) * self.page_size
        return (starts[:, None] + torch.arange(self.page_size, device=self.device)).flatten()
