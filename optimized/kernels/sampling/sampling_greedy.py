"""The largest logit of each row, the lowest id on ties, for batches of greedy rows.

Roofline bound: one read of the logits, 4 * vocab_size bytes a row.

Shape: one CTA per slice of a row leaves its largest logit and that one's id; a second launch, one CTA per
row, merges them. -1 for rows with a NaN or without a logit above -inf.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from diptych.optimized.kernels.sampling.sampling_noise import lowest_id
from diptych.optimized.kernels.sampling.sampling_scan import readable_columns

WIDTH = 1024
DEPTH = 8


@triton.jit(do_not_specialize=["vocab_size", "num_slices"])
def _slice_kernel(
    logits_ptr, maxima_ptr, argmax_ptr, row_stride, vocab_size, readable, num_slices,
    DEPTH: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) // num_slices).to(tl.int64)
    piece = tl.program_id(0) % num_slices
    ids = piece * DEPTH * WIDTH + tl.arange(0, DEPTH)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    logits = tl.load(logits_ptr + row * row_stride + ids, mask=ids < readable, other=float("-inf"))
    logits = tl.where(ids < vocab_size, logits, float("-inf"))
    largest = tl.max(tl.max(logits, axis=0), axis=0)  # passes over NaN
    argmax = tl.min(lowest_id(logits == largest, ids, 0), axis=0)
    magnitudes = logits.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    if tl.max(tl.max(magnitudes, axis=0), axis=0) > 0x7F800000:  # that of infinity
        largest = tl.cast(float("inf"), tl.float32)
        argmax = -1
    at = row * num_slices + piece
    tl.store(maxima_ptr + at, largest)
    tl.store(argmax_ptr + at, tl.where(largest == float("-inf"), -1, argmax))


@triton.jit(do_not_specialize=["num_slices"])
def _merge_kernel(maxima_ptr, argmax_ptr, token_ids_ptr, num_slices, SLICES: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    slices = tl.arange(0, SLICES)
    is_slice = slices < num_slices
    maxima = tl.load(maxima_ptr + row * num_slices + slices, mask=is_slice, other=float("-inf"))
    argmax = tl.load(argmax_ptr + row * num_slices + slices, mask=is_slice, other=0)
    # A NaN's slice claims +inf, and its -1 is the lowest of ids.
    token_id = lowest_id(is_slice & (maxima == tl.max(maxima, axis=0)), argmax, 0)
    tl.store(token_ids_ptr + row, token_id.to(tl.int64))


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """float32 [bs, vocab_size], dense in the last dimension -> int64 [bs]."""
    num_rows, vocab_size = logits.shape
    num_slices = triton.cdiv(vocab_size, DEPTH * WIDTH)
    maxima = logits.new_empty(num_rows, num_slices)
    argmaxima = torch.empty(num_rows, num_slices, dtype=torch.int32, device=logits.device)
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    _slice_kernel[(num_rows * num_slices,)](
        logits, maxima, argmaxima, logits.stride(0), vocab_size, readable_columns(logits), num_slices,
        DEPTH=DEPTH, WIDTH=WIDTH, num_warps=8,
    )  # fmt: skip
    _merge_kernel[(num_rows,)](
        maxima, argmaxima, token_ids, num_slices, SLICES=triton.next_power_of_2(num_slices), num_warps=1
    )
    return token_ids
