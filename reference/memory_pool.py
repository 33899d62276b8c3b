"""Memory pools: rows of slots, free slots, and the KV in the slots. Free lists are Python deques."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from diptych.shared.interfaces import memory_pool as interface
from diptych.shared.modeling.kv_pool import KVTensors, to_fp8
from diptych.shared.scheduling.pages import num_pages_of, round_up_to_page
from diptych.shared.types.attention import FP8_TYPES


class ReqToTokenPool(interface.ReqToTokenPool):
    def __init__(self, size: int, max_len: int, device: torch.device | str) -> None:
        self.size = size
        self.max_len = max_len
        self.req_to_token = torch.zeros(size + 1, max_len, dtype=torch.int32, device=device)
        self.clear()

    def alloc(self, num_reqs: int) -> list[int] | None:
        if num_reqs > len(self._free_rows):
            return None
        rows = [self._free_rows.popleft() for _ in range(num_reqs)]
        self._used_rows.update(rows)
        return rows

    def free(self, req_pool_indices: Sequence[int]) -> None:
        for row in req_pool_indices:
            assert row in self._used_rows, f"row {row} of req_to_token is not allocated"
            self._used_rows.remove(row)
            self._free_rows.append(row)

    def write(self, req_pool_idx: int, start: int, slots: torch.Tensor) -> None:
        end = start + len(slots)
        assert end <= self.max_len, f"positions {start}..{end} do not fit a row of {self.max_len}"
        self.req_to_token[req_pool_idx, start:end] = slots

    def read(self, req_pool_idx: int, start: int, end: int) -> torch.Tensor:
        return self.req_to_token[req_pool_idx, start:end].to(torch.int64)

    def write_ragged(
        self,
        req_pool_indices: Sequence[int],
        starts: Sequence[int],
        lens: Sequence[int],
        slots: torch.Tensor,
    ) -> None:
        assert len(req_pool_indices) == len(starts) == len(lens)
        assert len(slots) == sum(lens), f"{len(slots)} slots for {sum(lens)} positions"
        for row, start, row_slots in zip(req_pool_indices, starts, slots.split(list(lens))):
            self.write(row, start, row_slots)

    def read_each(self, req_pool_indices: Sequence[int], positions: Sequence[int]) -> list[int]:
        assert len(req_pool_indices) == len(positions)
        slots: list[int] = self.req_to_token[list(req_pool_indices), list(positions)].tolist()
        return slots

    def available_size(self) -> int:
        return len(self._free_rows)

    def clear(self) -> None:
        self._free_rows = deque(range(1, self.size + 1))
        self._used_rows: set[int] = set()


class TokenToKVPoolAllocator(interface.TokenToKVPoolAllocator):
    """Each page is either in `_free_pages` or in `_used_pages`."""

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

    def alloc(self, num_tokens: int) -> torch.Tensor | None:
        assert num_tokens % self.page_size == 0, f"{num_tokens} tokens, page_size {self.page_size}"
        pages = self._take_pages(num_tokens // self.page_size)
        return None if pages is None else self._slots_of(pages)

    def alloc_extend(
        self, prefix_lens: Sequence[int], seq_lens: Sequence[int], last_locs: Sequence[int]
    ) -> torch.Tensor | None:
        assert len(prefix_lens) == len(seq_lens) == len(last_locs)
        page_size = self.page_size
        # Count first: either all requests get their slots, or none.
        num_new_pages = 0
        for prefix_len, seq_len, last_loc in zip(prefix_lens, seq_lens, last_locs):
            assert 0 <= prefix_len <= seq_len, f"cannot grow from {prefix_len} to {seq_len} tokens"
            assert (last_loc + 1) % page_size == prefix_len % page_size, (
                f"slot {last_loc} cannot hold token {prefix_len - 1} with page_size {page_size}"
            )
            num_new_pages += num_pages_of(seq_len, page_size) - num_pages_of(prefix_len, page_size)
        pages = self._take_pages(num_new_pages)
        if pages is None:
            return None

        # --8<-- [start:alloc-extend]
        new_slots = self._slots_of(pages).tolist()
        num_taken = 0
        slots: list[int] = []
        for prefix_len, seq_len, last_loc in zip(prefix_lens, seq_lens, last_locs):
            page_end = round_up_to_page(prefix_len, page_size)  # of the page on which the prefix ends
            num_filled = min(seq_len, page_end) - prefix_len
            slots.extend(range(last_loc + 1, last_loc + 1 + num_filled))
            num_left = max(seq_len - page_end, 0)
            slots.extend(new_slots[num_taken : num_taken + num_left])
            num_taken += round_up_to_page(num_left, page_size)
        return torch.tensor(slots, dtype=torch.int64, device=self.device)
        # --8<-- [end:alloc-extend]

    def alloc_decode(self, seq_lens: Sequence[int], last_locs: Sequence[int]) -> torch.Tensor | None:
        return self.alloc_extend([seq_len - 1 for seq_len in seq_lens], seq_lens, last_locs)

    def free(self, slots: torch.Tensor) -> None:
        pages = dict.fromkeys(slot // self.page_size for slot in slots.tolist())
        not_used = pages.keys() - self._used_pages
        assert not not_used, f"pages {sorted(not_used)} are not allocated"
        self._used_pages.difference_update(pages)
        self._free_pages.extend(pages)

    def available_size(self) -> int:
        return len(self._free_pages) * self.page_size

    def free_slots(self) -> torch.Tensor:
        return self._slots_of(sorted(self._free_pages))

    def clear(self) -> None:
        self._free_pages = deque(range(1, self.size // self.page_size + 1))  # page 0 is the dummy
        self._used_pages: set[int] = set()

    def _take_pages(self, num_pages: int) -> list[int] | None:
        if num_pages > len(self._free_pages):
            return None
        pages = [self._free_pages.popleft() for _ in range(num_pages)]
        self._used_pages.update(pages)
        return pages

    def _slots_of(self, pages: Sequence[int]) -> torch.Tensor:
        """[len(pages) * page_size] slots, page by page."""
        starts = torch.tensor(pages, dtype=torch.int64, device=self.device) * self.page_size
        return (starts[:, None] + torch.arange(self.page_size, device=self.device)).flatten()


class TokenToKVPool(KVTensors):
    def k_buffer(self, layer_id: int) -> torch.Tensor:
        return self._k[layer_id]

    def v_buffer(self, layer_id: int) -> torch.Tensor:
        return self._v[layer_id]

    def store(self, layer_id: int, out_cache_loc: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        if self.dtype in FP8_TYPES:
            k, v = to_fp8(k, v, self.kv_scales[layer_id], self.dtype)
        self._k[layer_id][out_cache_loc] = k.to(self.dtype)
        self._v[layer_id][out_cache_loc] = v.to(self.dtype)

    def move(self, target_slots: torch.Tensor, source_slots: torch.Tensor) -> None:
        # Indexing on the right-hand side copies: all sources are read before a target is written.
        self._k[:, target_slots] = self._k[:, source_slots]
        self._v[:, target_slots] = self._v[:, source_slots]
