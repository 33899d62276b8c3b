"""The host pool: KV pages in the CPU's memory, copied concurrently with forward passes.

Differs from reference: copies are queued on a separate stream while the GPU computes. A store first gathers
its pages on the GPU, on the stream of the passes, so later passes may overwrite the slots immediately. A load
arrives layer by layer; a pass waits for a layer's KV where it first reads that layer
(`TokenToKVPool.on_read`), so it computes the first layers while the others are being copied. Steps that are
one CUDA graph wait for all layers. Assumes that `before_pass` is called on the stream of the passes. Loses
where a store is larger than the staging memory: the passes wait for the copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from diptych.shared.interfaces import TokenToKVPool
from diptych.shared.interfaces import host_pool as interface
from diptych.shared.interfaces.host_pool import byte_rows
from diptych.shared.loading.kv_sizing import STAGING_BYTES
from diptych.shared.to_device import copy_to_device


class HostPool(interface.HostPool):
    pools = "optimized"

    def __init__(self, kv_pool: TokenToKVPool, num_pages: int, page_len: int) -> None:
        self.kv_pool = kv_pool
        self.num_pages = num_pages
        self.page_len = page_len
        self.device = kv_pool.device
        self.is_cuda = self.device.type == "cuda"
        self.rows = [byte_rows(kv_pool, layer_id) for layer_id in range(kv_pool.num_layers)]
        sizes = [rows.shape[1] for rows in self.rows[0]]
        shape = kv_pool.num_layers, num_pages, page_len
        self.buffers = [
            torch.zeros(*shape, size, dtype=torch.uint8, pin_memory=self.is_cuda) for size in sizes
        ]
        self._arrays = [rows.numpy() for buffer in self.buffers for rows in buffer]
        page_num_bytes = kv_pool.num_layers * page_len * sum(sizes)
        self.pages_at_once = max(STAGING_BYTES // page_num_bytes, 1)
        self._staging = [
            torch.empty(shape[0], self.pages_at_once, page_len, size, dtype=torch.uint8, device=self.device)
            for size in sizes
        ]
        self._pending: list[Callable[[], None]] = []  # in the order of their calls
        self._has_loads = False  # since the last pass
        self._has_early_loads = False  # they were started before the next pass
        self._pass_stream: Any = None  # of the passes; None: there was none, or no GPU
        self._stream: Any = torch.cuda.Stream(self.device) if self.is_cuda else None
        self._is_staged: Any = (
            torch.cuda.Event() if self.is_cuda else None
        )  # recorded when the staging memory is free again
        self._is_loaded: list[Any] = [torch.cuda.Event() for _ in self.rows] if self.is_cuda else []
        self._is_asked = hasattr(kv_pool, "on_read")  # for each layer, where it is read
        if self._is_asked:
            kv_pool.on_read = self.wait  # type: ignore[attr-defined]

    # --8<-- [start:host-pool-copies]
    def store(self, pages: Sequence[int], slots: torch.Tensor) -> None:
        self._pending.append(partial(self._store, list(pages), slots))

    def load(self, pages: Sequence[int], slots: torch.Tensor, num_skipped: int = 0) -> None:
        self._pending.append(partial(self._load, list(pages), slots, num_skipped))

    # --8<-- [end:host-pool-copies]

    def before_pass(self) -> None:
        # The pass before has waited for each layer.
        self._has_loads, self._has_early_loads = self._has_early_loads, False
        if self.is_cuda:
            self._pass_stream = torch.cuda.current_stream(self.device)
        self._start_copies()
        if not self._is_asked:
            self.wait_for_all()

    def wait(self, layer_id: int) -> None:
        """Let the current stream wait for a layer's KV."""
        if self._has_loads and self.is_cuda:
            torch.cuda.current_stream(self.device).wait_event(self._is_loaded[layer_id])

    def wait_for_all(self) -> None:
        self.wait(-1)  # layers are loaded in order

    def page_views(self, page: int) -> list[memoryview]:
        return [memoryview(rows[page]).cast("B") for rows in self._arrays]

    def copies_so_far(self) -> Callable[[], None]:
        """The copies start on the stream of the passes, which is not that of the scheduler."""
        before, self._has_loads = self._has_loads, False
        if self._pass_stream is None:
            self._start_copies()
        else:
            self._pass_stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(self._pass_stream):
                self._start_copies()
        self._has_early_loads |= self._has_loads
        self._has_loads |= before
        if not self.is_cuda:
            return lambda: None
        ended = torch.cuda.Event(blocking=True)  # a thread that waits leaves its core to others
        ended.record(self._stream)
        return ended.synchronize

    def _start_copies(self) -> None:
        pending, self._pending = self._pending, []
        for copy in pending:
            copy()

    def _store(self, pages: list[int], slots: torch.Tensor) -> None:
        slots = copy_to_device(slots, self.device)
        if self.is_cuda:
            slots.record_stream(torch.cuda.current_stream(self.device))
        for first in range(0, len(pages), self.pages_at_once):
            group = pages[first : first + self.pages_at_once]
            tokens = slots[first * self.page_len : (first + len(group)) * self.page_len]
            if self.is_cuda:
                torch.cuda.current_stream(self.device).wait_event(self._is_staged)
            for layer_id, rows in enumerate(self.rows):
                for staging, row in zip(self._staging, rows):
                    staging[layer_id, : len(group)] = row[tokens].view(len(group), self.page_len, -1)
            with self._beside():
                for layer_id in range(len(self.rows)):
                    for buffer, staging in zip(self.buffers, self._staging):
                        for i, page, length in _runs(group):
                            target = buffer[layer_id, page : page + length]
                            target.copy_(staging[layer_id, i : i + length], non_blocking=True)
                if self.is_cuda:
                    self._is_staged.record(self._stream)

    def _load(self, pages: list[int], slots: torch.Tensor, num_skipped: int) -> None:
        slots = copy_to_device(slots, self.device)
        with self._beside():
            for layer_id, rows in enumerate(self.rows):
                for buffer, row in zip(self.buffers, rows):
                    shape = len(pages), self.page_len, buffer.shape[-1]
                    loaded = torch.empty(shape, dtype=torch.uint8, device=self.device)
                    for i, page, length in _runs(pages):
                        source = buffer[layer_id, page : page + length]
                        loaded[i : i + length].copy_(source, non_blocking=True)
                    row[slots] = loaded.flatten(0, 1)[num_skipped:]
                if self.is_cuda:
                    self._is_loaded[layer_id].record(self._stream)
        if self.is_cuda:
            slots.record_stream(self._stream)
        self._has_loads = True

    def _beside(self) -> Any:
        """Queue work on the copy stream, after the present work of the current stream."""
        if not self.is_cuda:
            return nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        return torch.cuda.stream(self._stream)


def _runs(pages: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Runs of adjacent pages: (index of the first, the first, how many)."""
    start = 0
    for i in range(1, len(pages) + 1):
        if i == len(pages) or pages[i] != pages[i - 1] + 1:
            yield start, pages[start], i - start
            start = i
