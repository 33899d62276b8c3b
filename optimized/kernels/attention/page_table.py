"""A batch's page table in the compressed form of paged attention libraries, from rows of slots.

Request i's pages are indices[indptr[i] : indptr[i + 1]]; the last one has last_page_len[i] tokens.

Roofline bound: reading one slot and writing one page id for every page, 8 bytes each: a few microseconds at
most. It is one launch, without synchronizing the CPU: every CTA sums the pages of the requests before its
own, which costs less than a second kernel for the prefix sum.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from diptych.optimized.kernels.portable import batch_block

BLOCK = 512
MIN_BATCH_BLOCK = 128
"""Smaller batches share one compiled kernel."""


@triton.jit(do_not_specialize=["batch_size", "window"])
def _page_table_kernel(
    req_to_token,
    row_stride,
    req_pool_indices,
    seq_lens,
    extend_seq_lens,
    indptr,
    last_page_len,
    indices,
    batch_size,
    window,
    HAS_WINDOW: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BATCH_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    request, block = tl.program_id(0), tl.program_id(1)
    requests = tl.arange(0, BATCH_BLOCK)
    in_batch = requests < batch_size
    lens = tl.load(seq_lens + requests, mask=in_batch, other=0)
    first_pages = tl.zeros_like(lens)
    if HAS_WINDOW:
        num_new = tl.load(extend_seq_lens + requests, mask=in_batch, other=0)
        first_pages = tl.maximum(lens - num_new - window, 0) // PAGE_SIZE
    num_pages = (lens + PAGE_SIZE - 1) // PAGE_SIZE - first_pages
    start = tl.sum(tl.where(requests < request, num_pages, 0))
    mine = requests == request
    num_mine = tl.sum(tl.where(mine, num_pages, 0))
    first_page = tl.sum(tl.where(mine, first_pages, 0))
    if block == 0:
        length = tl.sum(tl.where(mine, lens, 0))
        tl.store(indptr + request + 1, start + num_mine)
        tl.store(last_page_len + request, (length - 1) % PAGE_SIZE + 1)
        if request == 0:
            tl.store(indptr, 0)
    pages = block * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(req_pool_indices + request)
    slots = tl.load(
        req_to_token + row * row_stride + (first_page + pages) * PAGE_SIZE, mask=pages < num_mine, other=0
    )
    tl.store(indices + start + pages, slots // PAGE_SIZE, mask=pages < num_mine)


def fill_page_table(
    indptr: torch.Tensor,
    indices: torch.Tensor,
    last_page_len: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    *,
    page_size: int,
    max_pages: int,
    window: int = -1,
) -> None:
    """Write indptr [bs + 1], last_page_len [bs] and the pages' ids into indices, all int32. With a window
    w >= 0, request i's table starts at the page of the first position that its new tokens see. `max_pages`:
    no request has more pages in the table."""
    batch_size = seq_lens.shape[0]
    assert indptr.shape == (batch_size + 1,)
    assert last_page_len.shape == (batch_size,)
    _page_table_kernel[(batch_size, triton.cdiv(max_pages, BLOCK))](
        req_to_token,
        req_to_token.stride(0),
        req_pool_indices,
        seq_lens,
        extend_seq_lens,
        indptr,
        last_page_len,
        indices,
        batch_size,
        window,
        HAS_WINDOW=window >= 0,
        PAGE_SIZE=page_size,
        BATCH_BLOCK=batch_block(batch_size, MIN_BATCH_BLOCK),
        BLOCK=BLOCK,
    )
