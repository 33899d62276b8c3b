"""The mask of a verify step, flattened: [N, seq_len] for each request, concatenated.

Roofline bound: writing a byte for each node and token: 16 nodes and 4096 tokens are 64 KB. Every CTA sums the
sizes of the requests before its own, so the CPU needs no lengths.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from diptych.optimized.kernels.portable import batch_block

BLOCK = 1024
NUM_PROGRAMS = 512
"""The total number of CTAs, enough to fill a GPU; those of a request take its blocks in turn."""


@triton.jit(do_not_specialize=["batch_size"])
def _mask_kernel(
    visible_ptr, seq_lens_ptr, mask_ptr, batch_size,
    NUM: tl.constexpr, TAIL: tl.constexpr, BATCH_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    request, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    requests = tl.arange(0, BATCH_BLOCK)
    first = tl.sum(tl.load(seq_lens_ptr + requests, mask=requests < request, other=0), axis=0) * NUM
    seq_len = tl.load(seq_lens_ptr + request)
    for block in range(part, tl.cdiv(seq_len * NUM, BLOCK), tl.num_programs(1)):
        entries = block * BLOCK + tl.arange(0, BLOCK)
        node, column = entries // seq_len, entries % seq_len - (seq_len - TAIL)
        inside = node < NUM
        seen = tl.load(
            visible_ptr + (request * NUM + node) * TAIL + column, mask=inside & (column >= 0), other=1
        )
        tl.store(mask_ptr + first + entries, seen, mask=inside)


def flatten_mask(visible: torch.Tensor, seq_lens: torch.Tensor, mask: torch.Tensor) -> None:
    """visible [bs, N, M] bool (of the last M positions), seq_lens [bs] -> mask, bool, long enough."""
    bs, num, num_last = visible.shape
    assert visible.is_contiguous()
    if bs > 0:
        num_parts = min(triton.cdiv(NUM_PROGRAMS, bs), triton.cdiv(mask.shape[0], BLOCK))
        _mask_kernel[(bs, num_parts)](
            visible.view(torch.uint8), seq_lens, mask.view(torch.uint8), bs,
            NUM=num, TAIL=num_last, BATCH_BLOCK=batch_block(bs), BLOCK=BLOCK,
        )  # fmt: skip
