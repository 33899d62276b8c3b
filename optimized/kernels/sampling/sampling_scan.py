"""The single read of the logits for filters and log-probabilities of a large vocabulary: one CTA per slice of
a row. (For batches with a temperature and no filter: `sampling_race`.)

Roofline bound: 4 * vocab_size bytes a row.

Shape: a CTA holds its slice in registers, a tile [depth, 1024], so that the largest logit is known before
the exponentials are summed. It leaves, for `sampling_pick`:
- the slice's largest logit and the sum of exponentials relative to it (NaN where the slice has one);
- the lowest token id with the largest logit, for greedy rows;
- the largest logit of each group of up to 64 tokens. The k-th largest of these is a lower bound of the k-th
  largest logit, and seldom far below: groups that reach it are all that has to be read again;
- for rows whose top_k keeps many tokens, the best score of the slice, by float32 noise: ~id where a second
  one is within the margin, so that the pick knows that float64 must decide.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from diptych.optimized.kernels.sampling.sampling_noise import (
    MARGIN,
    exponential_of,
    gumbel32,
    lowest_id,
    noise_state,
    token_hash,
)
from diptych.shared.types import SamplingBatchInfo

WIDTH = 1024
MAX_DEPTH = 8
NUM_GROUPS = 2048
"""About so many groups a row: enough that the k largest logits, k up to hundreds, lie in different ones."""
MAX_TOP_K = 1024
"""A row that keeps no more tokens than this is chosen from what reaches the top_k-th largest group maximum;
it needs no score of all tokens."""
LOG2_E = tl.constexpr(1.4426950408889634)


class Scan(NamedTuple):
    """The results of one read of rows [bs, vocab_size]. num_slices CTAs per row."""

    slice_max: torch.Tensor  # [bs, num_slices] float32
    slice_sum: torch.Tensor  # [bs, num_slices] float32: sum of exp((logit - slice_max) / temperature)
    slice_argmax: torch.Tensor  # [bs, num_slices] int32
    slice_best: torch.Tensor  # [bs, num_slices] int32, token id, or ~id if there may be a better one
    group_max: torch.Tensor  # [bs, num_groups] float32
    depth: int  # a group is depth x lanes tokens, WIDTH apart and adjacent
    lanes: int


@triton.jit
def _race(hashes, exponents):
    """w / exp(s), infinite where v >= 1/2: the token with the least has the largest s - log w. exponents: s,
    as one of 2."""
    times = exponential_of(hashes) * tl.exp2(-exponents)
    return tl.where(hashes < 0x80000000, times, float("inf"))


@triton.jit
def _race_winner(
    logits_ptr, first_id, vocab_size, readable, largest, rate, state,
    DEPTH: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Compute, for a finite largest logit, the sum of exponentials and what `_best_score` gives, by noise
    without logarithms of the tokens with v < 1/2 alone. -> the token, its w / exp(s), the sum. Others have at
    least log 2: the token does not hold where it has about as much, as in slices with one likely token.

    Reads the slice again, from L1, a row of the tile at a time: all noise at once would take so many
    registers that few CTAs could hide each other's latency."""
    columns = tl.arange(0, WIDTH)
    best = tl.full([WIDTH], float("inf"), tl.float32)
    weights = tl.zeros([WIDTH], tl.float32)
    for i in range(DEPTH):
        ids = first_id + i * WIDTH + columns
        logits = tl.load(logits_ptr + ids, mask=ids < readable, other=float("-inf"))
        if PADDED:
            logits = tl.where(ids < vocab_size, logits, float("-inf"))
        exponents = (logits - largest) * rate
        weights += tl.exp2(exponents)
        best = tl.minimum(best, _race(token_hash(state, ids), exponents))
    top = tl.min(best, axis=0)
    column = lowest_id(best == top, columns, 0)
    num_near = tl.sum((best <= top * (1.0 + MARGIN)).to(tl.int32), axis=0)
    # Which token of its column it is, and whether another one there is near.
    ids = first_id + column + tl.arange(0, DEPTH) * WIDTH
    logits = tl.load(logits_ptr + ids, mask=ids < vocab_size, other=float("-inf"))
    times = _race(token_hash(state, ids), (logits - largest) * rate)
    top = tl.min(times, axis=0)
    best_id = lowest_id(times == top, ids, 0)
    num_near += tl.sum((times <= top * (1.0 + MARGIN)).to(tl.int32), axis=0) - 1
    return tl.where(num_near > 1, ~best_id, best_id), top, tl.sum(weights, axis=0)


@triton.jit
def _best_score(
    logits_ptr, first_id, vocab_size, readable, largest, rate, state, DEPTH: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """The token of a slice with the best score, relative to the slice's largest logit; ~id if there may be a
    better one."""
    best = tl.full([WIDTH], float("-inf"), tl.float32)
    second = best
    best_ids = tl.zeros([WIDTH], tl.int32)
    for i in range(DEPTH):
        ids = first_id + i * WIDTH + tl.arange(0, WIDTH)
        inside = ids < vocab_size
        logits = tl.load(logits_ptr + ids, mask=ids < readable, other=float("-inf"))
        s = tl.where(logits == largest, 0.0, (logits - largest) * (rate / LOG2_E))
        scores = tl.where(inside, s + gumbel32(state, ids), float("-inf"))
        second = tl.maximum(second, tl.minimum(best, scores))
        best_ids = tl.where(scores > best, ids, best_ids)
        best = tl.maximum(best, scores)
    top = tl.max(best, axis=0)
    best_id = lowest_id(best == top, best_ids, 0)
    near = (best >= top - MARGIN).to(tl.int32) + (second >= top - MARGIN).to(tl.int32)
    return tl.where(tl.sum(near, axis=0) > 1, ~best_id, best_id)


@triton.jit(
    do_not_specialize=["vocab_size", "num_slices"],
    do_not_specialize_on_alignment=["slice_sum_ptr", "slice_best_ptr"],  # halves of one tensor
)
def _scan_kernel(
    logits_ptr, seeds_ptr, positions_ptr, is_greedy_ptr, temperatures_ptr, top_ks_ptr,
    slice_max_ptr, slice_sum_ptr, slice_argmax_ptr, slice_best_ptr, group_max_ptr,
    row_stride, vocab_size, readable, num_slices,
    DEPTH: tl.constexpr, WIDTH: tl.constexpr, LANES: tl.constexpr, PADDED: tl.constexpr,
    SAMPLED: tl.constexpr, GROUPS: tl.constexpr, MAX_TOP_K: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) // num_slices).to(tl.int64)
    piece = tl.program_id(0) % num_slices
    logits_ptr += row * row_stride
    ids = piece * DEPTH * WIDTH + tl.arange(0, DEPTH)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    logits = tl.load(logits_ptr + ids, mask=ids < readable, other=float("-inf"))
    rate = LOG2_E / tl.load(temperatures_ptr + row)
    is_greedy = tl.load(is_greedy_ptr + row).to(tl.int1)
    if SAMPLED:  # all loads ahead of what depends on the first
        needs_score = ~is_greedy & (tl.load(top_ks_ptr + row) > MAX_TOP_K)
        seed, position = tl.load(seeds_ptr + row), tl.load(positions_ptr + row)
    if PADDED:
        logits = tl.where(ids < vocab_size, logits, float("-inf"))

    columns = tl.max(logits, axis=0)  # passes over NaN, which the sum will show
    if GROUPS:
        num_groups: tl.constexpr = WIDTH // LANES
        groups = tl.max(tl.reshape(columns, [num_groups, LANES]), axis=1)
        offsets = (row * num_slices + piece) * num_groups + tl.arange(0, num_groups)
        tl.store(group_max_ptr + offsets, groups)
    largest = tl.max(columns, axis=0)
    at = row * num_slices + piece
    tl.store(slice_max_ptr + at, largest)

    if SAMPLED:
        is_race = needs_score & (tl.abs(largest) < float("inf"))
        if needs_score:
            state = noise_state(seed, position)
            first_id = piece * DEPTH * WIDTH
            time = tl.cast(float("inf"), tl.float32)
            best_id = first_id
            if is_race:
                best_id, time, total = _race_winner(
                    logits_ptr, first_id, vocab_size, readable, largest, rate, state, DEPTH, WIDTH, PADDED
                )
                tl.store(slice_sum_ptr + at, total)
            if time > 0.69:
                best_id = _best_score(
                    logits_ptr, first_id, vocab_size, readable, largest, rate, state, DEPTH, WIDTH
                )
            tl.store(slice_best_ptr + at, best_id)
    else:
        is_race = False
    if not is_race:
        is_largest = logits == largest
        weights = tl.where(is_largest, 1.0, tl.exp2((logits - largest) * rate))
        tl.store(slice_sum_ptr + at, tl.sum(tl.sum(weights, axis=0), axis=0))
        if is_greedy:
            tl.store(slice_argmax_ptr + at, tl.min(lowest_id(is_largest, ids, 0), axis=0))


def readable_columns(logits: torch.Tensor) -> int:
    """vocab_size, rounded up to 16 where rows have that many columns in memory: loads of 16 bytes may then
    cross the end of the vocabulary."""
    num_rows, vocab_size = logits.shape
    rounded = triton.cdiv(vocab_size, 16) * 16
    end = logits.storage_offset() + (num_rows - 1) * logits.stride(0) + rounded
    is_within = rounded <= logits.stride(0) and end * logits.itemsize <= logits.untyped_storage().nbytes()
    return rounded if is_within else vocab_size


def scan(logits: torch.Tensor, info: SamplingBatchInfo, positions: torch.Tensor) -> Scan:
    num_rows, vocab_size = logits.shape
    group_size = min(max(triton.next_power_of_2(vocab_size // NUM_GROUPS + 1) // 2, 1), 64)
    depth = min(group_size, MAX_DEPTH)
    lanes = group_size // depth
    num_slices = triton.cdiv(vocab_size, depth * WIDTH)
    num_groups = num_slices * WIDTH // lanes
    floats = logits.new_empty(2, num_rows, num_slices)
    ints = torch.empty(2, num_rows, num_slices, dtype=torch.int32, device=logits.device)
    with_groups = info.needs_filter or info.num_top_logprobs > 0
    readable = readable_columns(logits)
    groups = logits.new_empty(num_rows, num_groups if with_groups else 0)
    _scan_kernel[(num_rows * num_slices,)](
        logits, info.seeds, positions, info.is_greedy, info.temperatures, info.top_ks,
        floats[0], floats[1], ints[0], ints[1], groups, logits.stride(0), vocab_size, readable, num_slices,
        DEPTH=depth, WIDTH=WIDTH, LANES=lanes, PADDED=readable != vocab_size,
        SAMPLED=not info.is_all_greedy, GROUPS=with_groups,
        MAX_TOP_K=MAX_TOP_K if info.needs_filter else 0, num_warps=8, maxnreg=80,
    )  # fmt: skip
    return Scan(floats[0], floats[1], ints[0], ints[1], groups, depth, lanes)
