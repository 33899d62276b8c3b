"""The host pool: KV pages in the CPU's memory, copied layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from diptych.shared.interfaces import TokenToKVPool
from diptych.shared.interfaces import host_pool as interface
from diptych.shared.interfaces.host_pool import byte_rows


class HostPool(interface.HostPool):
    def __init__(self, kv_pool: TokenToKVPool, num_pages: int, page_len: int) -> None:
        self.kv_pool = kv_pool
        self.num_pages = num_pages
        self.page_len = page_len
        sizes = [rows.shape[1] for rows in byte_rows(kv_pool, 0)]
        shape = kv_pool.num_layers, num_pages, page_len
        self.buffers = [torch.zeros(*shape, size, dtype=torch.uint8) for size in sizes]  # K, and V

    # --8<-- [start:host-pool-copies]
    def store(self, pages: Sequence[int], slots: torch.Tensor) -> None:
        for layer_id in range(self.kv_pool.num_layers):
            for buffer, rows in zip(self.buffers, byte_rows(self.kv_pool, layer_id)):
                tokens = rows[slots.to(rows.device)].cpu()
                buffer[layer_id, list(pages)] = tokens.view(len(pages), self.page_len, -1)

    def load(self, pages: Sequence[int], slots: torch.Tensor, num_skipped: int = 0) -> None:
        for layer_id in range(self.kv_pool.num_layers):
            for buffer, rows in zip(self.buffers, byte_rows(self.kv_pool, layer_id)):
                tokens = buffer[layer_id, list(pages)].flatten(0, 1)[num_skipped:]
                rows[slots.to(rows.device)] = tokens.to(rows.device)

    # --8<-- [end:host-pool-copies]

    def before_pass(self) -> None:
        """Nothing to wait for: copies are synchronous."""

    def page_views(self, page: int) -> list[memoryview]:
        return [memoryview(rows[page].numpy()).cast("B") for buffer in self.buffers for rows in buffer]

    def copies_so_far(self) -> Callable[[], None]:
        return lambda: None
