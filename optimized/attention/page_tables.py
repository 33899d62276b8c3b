"""The pages that a step's requests read: written on the device, and counted on the CPU for plans, so that
nothing waits for the device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from diptych.optimized.kernels.attention.page_table import fill_page_table
from diptych.shared.interfaces.memory_pool import ReqToTokenPool
from diptych.shared.scheduling.pages import num_pages_of, round_down_to_page
from diptych.shared.types import ForwardBatch


@dataclass(frozen=True)
class HostTable:
    """The page table without page ids, as int32 tensors on the CPU."""

    indptr: torch.Tensor  # [bs + 1]
    last_page_len: torch.Tensor  # [bs]
    kv_lens: torch.Tensor  # [bs], tokens on the table's pages
    num_pages: int  # of all requests
    max_pages: int  # of one

    @staticmethod
    def of(forward_batch: ForwardBatch, page_size: int, window: int) -> HostTable:
        """The table of a batch. With a window w >= 0, a request's table starts at the page of the first
        position that its new tokens see; earlier pages are not listed or read."""
        # numpy: for vectors this short, each call of torch would cost several times as much.
        seq_lens = np.array(forward_batch.seq_lens_cpu, dtype=np.int32)
        kv_lens = seq_lens
        if window >= 0:
            num_new = np.array(forward_batch.extend_seq_lens_cpu, dtype=np.int32)
            first_seen = np.maximum(seq_lens - num_new - window, 0)
            kv_lens = seq_lens - round_down_to_page(first_seen, page_size)
        num_pages = num_pages_of(kv_lens, page_size)
        indptr = np.zeros(len(seq_lens) + 1, dtype=np.int32)
        num_pages.cumsum(out=indptr[1:])
        return HostTable(
            torch.from_numpy(indptr),
            torch.from_numpy((kv_lens - 1) % page_size + 1),
            torch.from_numpy(kv_lens),
            num_pages=int(indptr[-1]),
            max_pages=max(int(num_pages.max()), 1),
        )


@dataclass(frozen=True)
class PageTable:
    """Buffers on the device, int32: request i's pages are indices[indptr[i] : indptr[i + 1]]."""

    indptr: torch.Tensor  # [bs + 1]
    last_page_len: torch.Tensor  # [bs], tokens on each request's last page
    indices: torch.Tensor  # of as many pages as the batch has, or more

    @staticmethod
    def empty(batch_size: int, device: torch.device, indices: torch.Tensor) -> PageTable:
        def vector(size: int) -> torch.Tensor:
            return torch.empty(size, dtype=torch.int32, device=device)

        return PageTable(vector(batch_size + 1), vector(batch_size), indices)

    def fill(
        self, host: HostTable, pool: ReqToTokenPool, forward_batch: ForwardBatch, page_size: int, window: int
    ) -> None:
        """Fill the tables in stream order, without a synchronisation."""
        assert host.num_pages <= len(self.indices), f"{host.num_pages} pages, room for {len(self.indices)}"
        fill_page_table(
            self.indptr,
            self.indices,
            self.last_page_len,
            pool.req_to_token,
            forward_batch.req_pool_indices,
            forward_batch.seq_lens,
            forward_batch.extend_seq_lens,
            page_size=page_size,
            max_pages=host.max_pages,
            window=window,
        )
