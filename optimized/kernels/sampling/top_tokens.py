"""The k largest logits of each row and their probabilities, without sorting and in one read.

Roofline bound: reading the logits once. A CTA takes a slice of a row and keeps its k largest, its maximum and
its sum of exponentials; another one for each row makes one of them all."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

SLICE = 4096
NO_TOKEN = tl.constexpr(0x7FFFFFFF)
"""The id of a missing entry, which sorts after all tokens."""


@triton.jit
def _best_left(values, ids, is_left):
    """The largest remaining value and the lowest id that has it."""
    best = tl.max(tl.where(is_left, values, float("-inf")), axis=0)
    return best, tl.min(tl.where(is_left & (values == best), ids, NO_TOKEN), axis=0)


@triton.jit
def _slice_kernel(
    logits_ptr, values_ptr, ids_ptr, maxima_ptr, sums_ptr, row_stride, vocab_size,
    K: tl.constexpr, SLICE: tl.constexpr,
):  # fmt: skip
    row, part, num_parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    ids = part * SLICE + tl.arange(0, SLICE)
    is_left = ids < vocab_size
    x = tl.load(logits_ptr + row * row_stride + ids, mask=is_left, other=float("-inf")).to(tl.float32)
    largest = tl.max(x, axis=0)
    shift = tl.where(largest == float("-inf"), 0.0, largest)
    place = row * num_parts + part
    tl.store(maxima_ptr + place, shift)
    tl.store(sums_ptr + place, tl.sum(tl.exp(x - shift), axis=0))  # NaN if there is a NaN or +inf
    for j in range(K):
        best, best_id = _best_left(x, ids, is_left)
        tl.store(values_ptr + place * K + j, best)
        tl.store(ids_ptr + place * K + j, best_id)
        is_left &= ids != best_id


@triton.jit
def _merge_kernel(
    values_ptr, ids_ptr, maxima_ptr, sums_ptr, probs_ptr, token_ids_ptr, num_parts,
    K: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    parts, candidates = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_C)
    maxima = tl.load(maxima_ptr + row * num_parts + parts, mask=parts < num_parts, other=float("-inf"))
    sums = tl.load(sums_ptr + row * num_parts + parts, mask=parts < num_parts, other=0.0)
    is_left = candidates < num_parts * K
    values = tl.load(values_ptr + row * num_parts * K + candidates, mask=is_left, other=float("-inf"))
    ids = tl.load(ids_ptr + row * num_parts * K + candidates, mask=is_left, other=NO_TOKEN)
    # An empty part's shift is 0, and may be the largest: exponents stay below 0 all the same.
    largest = tl.max(tl.where(sums > 0.0, maxima, float("-inf")), axis=0)
    total = tl.sum(tl.where(sums == 0.0, 0.0, sums * tl.exp(maxima - largest)), axis=0)
    is_good = total >= 1.0  # not where it is NaN, nor where no token is possible
    for j in range(K):
        best, best_id = _best_left(values, ids, is_left)
        prob = tl.where(is_good, tl.exp(best - largest) / total, 0.0)
        tl.store(probs_ptr + row * K + j, prob)
        tl.store(token_ids_ptr + row * K + j, tl.where(is_good, best_id, j).to(tl.int64))
        is_left &= ids != best_id


def top_tokens(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [n, V] -> probabilities float32 [n, k] and token ids int64 [n, k], in order."""
    num_rows, vocab_size = logits.shape
    assert logits.stride(1) == 1
    num_parts = triton.cdiv(vocab_size, SLICE)
    device = logits.device
    floats = torch.empty(num_rows * num_parts * (k + 2), dtype=torch.float32, device=device)
    values, maxima, sums = floats.split([num_rows * num_parts * n for n in (k, 1, 1)])
    ids = torch.empty(num_rows * num_parts * k, dtype=torch.int32, device=device)
    probs = torch.empty(num_rows, k, dtype=torch.float32, device=device)
    token_ids = torch.empty(num_rows, k, dtype=torch.int64, device=device)
    if num_rows == 0:
        return probs, token_ids
    _slice_kernel[(num_rows, num_parts)](
        logits, values, ids, maxima, sums, logits.stride(0), vocab_size,
        K=k, SLICE=min(SLICE, triton.next_power_of_2(vocab_size)), num_warps=4,
    )  # fmt: skip
    _merge_kernel[(num_rows,)](
        values, ids, maxima, sums, probs, token_ids, num_parts,
        K=k, BLOCK_P=triton.next_power_of_2(num_parts), BLOCK_C=triton.next_power_of_2(num_parts * k),
        num_warps=4,
    )  # fmt: skip
    return probs, token_ids
