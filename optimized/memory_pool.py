"""Memory pools with their state in arrays on the CPU: slots are copied to the device and never read from it.

Differs from reference: slots are allocated on the CPU (`slot_device`). Free pages are a ring (page_ring.py),
and req_to_token has a copy on the CPU, which `read` reads. A batch's slots are computed by array operations;
its rows go to the device in one copy and one launch. `move` is one kernel for all layers. Assumes that
req_to_token is written through its pool. Loses where slots come from the device: freeing them waits for the
device.

Why the CPU: the code that handles slots is Python. The tree stores slots, an extension begins at the last
slot, and a page that is freed twice must be found at once. On the device each such read is a synchronization,
and each operation a launch: about 5 microseconds, some twenty times per request. On arrays an operation takes
about 1 microsecond, and kernels need 12 bytes a token, copied once: 3 KB when 256 requests decode, 96 KB for
8,192 prompt tokens (2 microseconds at 50 GB/s). The copy of req_to_token takes 4 bytes a position: 42 MB for
257 rows of 40,960, of which the system allocates the pages that are used.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from diptych.optimized.kernels.attention.move_kv import can_move, move_kv
from diptych.optimized.page_ring import Array, PageRing
from diptych.shared.interfaces import memory_pool as interface
from diptych.shared.modeling.kv_pool import KVTensors, to_fp8
from diptych.shared.scheduling.pages import num_pages_of
from diptych.shared.types.attention import FP8_TYPES


class ReqToTokenPool(interface.ReqToTokenPool):
    def __init__(self, size: int, max_len: int, device: torch.device | str) -> None:
        self.size = size
        self.max_len = max_len
        self.req_to_token = torch.zeros(size + 1, max_len, dtype=torch.int32, device=device)
        self.is_on_cpu = self.req_to_token.device.type == "cpu"
        # If the device is the CPU, both are the same memory.
        self.cpu_copy: npt.NDArray[np.int32] = (
            self.req_to_token.numpy() if self.is_on_cpu else np.zeros((size + 1, max_len), np.int32)
        )
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
        self.write_ragged([req_pool_idx], [start], [len(slots)], slots)

    def read(self, req_pool_idx: int, start: int, end: int) -> torch.Tensor:
        return torch.from_numpy(self.cpu_copy[req_pool_idx, start:end].astype(np.int64))

    def write_ragged(
        self,
        req_pool_indices: Sequence[int],
        starts: Sequence[int],
        lens: Sequence[int],
        slots: torch.Tensor,
    ) -> None:
        assert len(req_pool_indices) == len(starts) == len(lens)
        assert len(slots) == sum(lens), f"{len(slots)} slots for {sum(lens)} positions"
        if len(slots) == 0:
            return
        rows, first, num = _array(req_pool_indices), _array(starts), _array(lens)
        ends = first + num
        assert ends.max() <= self.max_len, f"positions up to {ends.max()} do not fit a row of {self.max_len}"
        values = _on_cpu(slots).astype(np.int32)
        if len(rows) == 1:  # a long prefix: a slice takes a fifth of the time of an index for each position
            self._write_slice(rows[0], first[0], ends[0], values)
            return
        where = _ragged(rows * self.max_len + first, num)
        self.cpu_copy.reshape(-1)[where] = values
        if not self.is_on_cpu:
            self._copy_to_device(where, values)

    def read_each(self, req_pool_indices: Sequence[int], positions: Sequence[int]) -> list[int]:
        assert len(req_pool_indices) == len(positions)
        slots: list[int] = self.cpu_copy[_array(req_pool_indices), _array(positions)].tolist()
        return slots

    def available_size(self) -> int:
        return len(self._free_rows)

    def clear(self) -> None:
        self._free_rows = deque(range(1, self.size + 1))
        self._used_rows: set[int] = set()

    def _write_slice(self, row: int, start: int, end: int, values: npt.NDArray[np.int32]) -> None:
        self.cpu_copy[row, start:end] = values
        if not self.is_on_cpu:
            source, is_cuda = torch.from_numpy(values), self.req_to_token.is_cuda
            source = source.pin_memory() if is_cuda else source
            self.req_to_token[row, start:end].copy_(source, non_blocking=is_cuda)

    def _copy_to_device(self, where: Array, values: npt.NDArray[np.int32]) -> None:
        """req_to_token.flatten()[where] = values, on the device: one copy, one launch, no synchronization."""
        table = self.req_to_token
        is_cuda = table.device.type == "cuda"
        # The allocator of page-locked memory does not reuse it before the copy has ended.
        buffer = torch.empty(where.nbytes + values.nbytes, dtype=torch.uint8, pin_memory=is_cuda)
        numbers = buffer.numpy()
        numbers[: where.nbytes].view(np.int64)[:] = where
        numbers[where.nbytes :].view(np.int32)[:] = values
        copied = buffer.to(table.device, non_blocking=is_cuda)
        indices, slots = copied[: where.nbytes].view(torch.int64), copied[where.nbytes :].view(torch.int32)
        table.view(-1).index_copy_(0, indices, slots)


class TokenToKVPoolAllocator(interface.TokenToKVPoolAllocator):
    def __init__(self, size: int, page_size: int, device: torch.device | str) -> None:
        if page_size < 1 or size < page_size or size % page_size != 0:
            raise ValueError(f"size ({size}) must be a positive multiple of page_size ({page_size})")
        self.size = size
        self.page_size = page_size
        self.device = torch.device(device)
        self._pages = PageRing(size // page_size)
        self._offsets = np.arange(page_size)

    @property
    def slot_device(self) -> torch.device:
        return torch.device("cpu")

    def alloc(self, num_tokens: int) -> torch.Tensor | None:
        assert num_tokens % self.page_size == 0, f"{num_tokens} tokens, page_size {self.page_size}"
        pages = self._pages.take(num_tokens // self.page_size)
        return None if pages is None else self._slots_of(pages)

    def alloc_extend(
        self, prefix_lens: Sequence[int], seq_lens: Sequence[int], last_locs: Sequence[int]
    ) -> torch.Tensor | None:
        assert len(prefix_lens) == len(seq_lens) == len(last_locs)
        page_size = self.page_size
        prefixes, seqs, lasts = _array(prefix_lens), _array(seq_lens), _array(last_locs)
        self._check_growth(prefixes, seqs, lasts)
        pages_before = num_pages_of(prefixes, page_size)
        num_new = num_pages_of(seqs, page_size) - pages_before
        pages = self._pages.take(int(num_new.sum()))
        if pages is None:
            return None

        # --8<-- [start:alloc-extend]
        # Of each new token: its request, its position, its page's index among the new pages.
        lens = seqs - prefixes
        request = np.repeat(np.arange(len(lens)), lens)
        positions = _ragged(prefixes, lens)
        page = positions // page_size - pages_before[request]  # -1: the page on which the prefix ends
        slots = lasts[request] + 1 + positions - prefixes[request]
        is_new = page >= 0
        first_page = np.cumsum(num_new) - num_new
        new_pages = pages[(first_page[request] + page)[is_new]]
        slots[is_new] = new_pages * page_size + positions[is_new] % page_size
        return torch.from_numpy(slots)
        # --8<-- [end:alloc-extend]

    def alloc_decode(self, seq_lens: Sequence[int], last_locs: Sequence[int]) -> torch.Tensor | None:
        assert len(seq_lens) == len(last_locs)
        if self.page_size == 1:  # each token has a page of its own
            pages = self._pages.take(len(seq_lens))
            return None if pages is None else torch.from_numpy(pages)
        seqs, lasts = _array(seq_lens), _array(last_locs)
        self._check_growth(seqs - 1, seqs, lasts)
        begins_page = (seqs - 1) % self.page_size == 0
        pages = self._pages.take(int(begins_page.sum()))
        if pages is None:
            return None
        slots = lasts + 1
        slots[begins_page] = pages * self.page_size
        return torch.from_numpy(slots)

    def free(self, slots: torch.Tensor) -> None:
        if len(slots) > 0:
            self._pages.free(_on_cpu(slots) // self.page_size)

    def available_size(self) -> int:
        return self._pages.num_free * self.page_size

    def free_slots(self) -> torch.Tensor:
        return self._slots_of(np.sort(self._pages.free_pages()))

    def clear(self) -> None:
        self._pages = PageRing(self.size // self.page_size)

    def _check_growth(self, prefixes: Array, seqs: Array, lasts: Array) -> None:
        is_valid = (prefixes >= 0) & (prefixes <= seqs)
        assert is_valid.all(), f"cannot grow from {prefixes[~is_valid][0]} to {seqs[~is_valid][0]} tokens"
        is_valid = (lasts + 1) % self.page_size == prefixes % self.page_size
        assert is_valid.all(), (
            f"slot {lasts[~is_valid][0]} cannot hold token {prefixes[~is_valid][0] - 1} "
            f"with page_size {self.page_size}"
        )

    def _slots_of(self, pages: Array) -> torch.Tensor:
        """[len(pages) * page_size] slots, page by page."""
        return torch.from_numpy((pages[:, None] * self.page_size + self._offsets).reshape(-1))


class TokenToKVPool(KVTensors):
    on_read: Callable[[int], None] | None = None  # called with a layer before its buffers are read

    def k_buffer(self, layer_id: int) -> torch.Tensor:
        if self.on_read is not None:
            self.on_read(layer_id)
        return self._k[layer_id]

    def v_buffer(self, layer_id: int) -> torch.Tensor:
        return self._v[layer_id]

    def store(self, layer_id: int, out_cache_loc: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        if self.dtype in FP8_TYPES:
            k, v = to_fp8(k, v, self.kv_scales[layer_id], self.dtype)
        self._k[layer_id][out_cache_loc] = k.to(self.dtype)
        self._v[layer_id][out_cache_loc] = v.to(self.dtype)

    def move(self, target_slots: torch.Tensor, source_slots: torch.Tensor) -> None:
        slots = torch.stack([target_slots, source_slots])
        if slots.device != self._k.device:
            slots = slots.pin_memory() if self._k.is_cuda and slots.numel() else slots
            slots = slots.to(self._k.device, non_blocking=self._k.is_cuda)
        targets, sources = slots
        if self._k.is_cuda and can_move(self._k, len(targets)):
            move_kv(self._k, self._v, targets, sources)
        else:
            # Indexing on the right-hand side copies: all sources are read before a target is written.
            self._k[:, targets] = self._k[:, sources]
            self._v[:, targets] = self._v[:, sources]


def _array(values: Sequence[int]) -> Array:
    return np.fromiter(values, np.int64, len(values))


def _on_cpu(slots: torch.Tensor) -> npt.NDArray[Any]:
    """Slots on the CPU. Slots on a device are copied, which waits for the device."""
    return slots.cpu().numpy()


def _ragged(starts: Array, lens: Array) -> Array:
    """The ranges of lens[i] numbers from starts[i] on, concatenated."""
    ends = np.cumsum(lens)
    return np.repeat(starts - (ends - lens), lens) + np.arange(ends[-1] if len(ends) else 0)
