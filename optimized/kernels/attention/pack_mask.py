"""A batch's mask in FlashInfer's format: eight entries per byte, low bit first; requests share no byte.

Roofline bound: reading a byte for each query and key, and writing an eighth of that: some hundred kilobytes
for draft trees. One launch, without synchronizing the CPU: every CTA sums the sizes of the requests before
its own.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from diptych.optimized.kernels.portable import batch_block

BLOCK = 256
MIN_BATCH_BLOCK = 128
"""Smaller batches share one compiled kernel."""


@triton.jit(do_not_specialize=["batch_size"])
def _pack_mask_kernel(
    mask,
    seq_lens,
    extend_seq_lens,
    packed,
    indptr,
    batch_size,
    BATCH_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    request, block = tl.program_id(0), tl.program_id(1)
    requests = tl.arange(0, BATCH_BLOCK)
    in_batch = requests < batch_size
    num_bits = tl.load(seq_lens + requests, mask=in_batch, other=0)
    num_bits *= tl.load(extend_seq_lens + requests, mask=in_batch, other=0)
    num_bytes = (num_bits + 7) // 8
    first_bit = tl.sum(tl.where(requests < request, num_bits, 0))
    first_byte = tl.sum(tl.where(requests < request, num_bytes, 0))
    num_mine = tl.sum(tl.where(requests == request, num_bits, 0))
    if block == 0:
        tl.store(indptr + request + 1, first_byte + (num_mine + 7) // 8)
        if request == 0:
            tl.store(indptr, 0)
    numbers = block * BLOCK + tl.arange(0, BLOCK)
    places = tl.arange(0, 8)
    entries = numbers[:, None] * 8 + places[None, :]
    bits = tl.load(mask + first_bit + entries, mask=entries < num_mine, other=0).to(tl.int32)
    tl.store(packed + first_byte + numbers, tl.sum(bits << places[None, :], 1), mask=numbers * 8 < num_mine)


def pack_mask(
    mask: torch.Tensor,
    seq_lens: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    packed: torch.Tensor,
    indptr: torch.Tensor,
    max_bytes: int,
) -> None:
    """mask: bool, for each request [extend_seq_len, seq_len], flattened and concatenated -> packed, uint8,
    and indptr [bs + 1], int32: request i's bytes are packed[indptr[i] : indptr[i + 1]]. `max_bytes`: no
    request has more."""
    batch_size = seq_lens.shape[0]
    assert indptr.shape == (batch_size + 1,)
    _pack_mask_kernel[(batch_size, triton.cdiv(max_bytes, BLOCK))](
        mask.view(torch.uint8),
        seq_lens,
        extend_seq_lens,
        packed,
        indptr,
        batch_size,
        BATCH_BLOCK=batch_block(batch_size, MIN_BATCH_BLOCK),
        BLOCK=BLOCK,
    )
