"""Picks each row's token from the results of the scan (`sampling_scan`): one CTA per row.

Roofline bound: the partial results, about 10 KB a row, and the groups that are read again: latency, not
bytes.

Shape: rows differ in what they ask, and each takes the cheapest way that is exact:
- greedy: the lowest id among the slices' best;
- no filter, beside rows with one or for log-probabilities: the best of the slices' best scores, in float64;
- few tokens can be kept (a top_k of up to MAX_TOP_K, or a bound by min_p, or by the best score of all): these
  are gathered, and chosen from in registers;
- else, or if ties make them too many: the best token and perhaps the next are left to `sampling_check`.
The mass that top_p is compared with comes from float32 sums; where it comes too near to tell, one more pass
adds up in float64.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from diptych.optimized.kernels.portable import gpu_of
from diptych.optimized.kernels.sampling.sampling_gather import CAPACITY, LOWEST, MAX_GROUPS, gather, kth_bound
from diptych.optimized.kernels.sampling.sampling_noise import (
    MARGIN,
    gumbel64,
    lowest_id,
    noise_state,
    scaled_logits,
)
from diptych.optimized.kernels.sampling.sampling_scan import LOG2_E, MAX_TOP_K, WIDTH, Scan, readable_columns
from diptych.optimized.kernels.sampling.sampling_walk import (
    EPSILON,
    best_token,
    is_before,
    mass_before,
    refresh,
)
from diptych.shared.types import SamplingBatchInfo


class Picked(NamedTuple):
    token_ids: torch.Tensor  # [bs] int64
    largest: torch.Tensor  # [bs] float32, of the row's logits
    totals: torch.Tensor  # [bs] float32: sum of exp((logit - largest) / temperature)
    # With a filter, for `sampling_check`:
    proposed: torch.Tensor  # [bs, 2] float32: scaled logits of the best token and of one of those before it
    proposed_ids: torch.Tensor  # [bs, 2] int32: their ids; -1 in rows that are decided
    counters: torch.Tensor  # [bs] int32, 0


@triton.jit
def _best_of_slices(logits_ptr, slice_best_ptr, slices, is_slice, vocab_size, largest, temperature, state):
    """What the scan found, for `refresh`: s, ids and scores of the slices' best tokens; which slices must be
    read again before the best of all is known, because float32 could not tell theirs; and which others if
    more than the best of all is asked."""
    marked = tl.load(slice_best_ptr + slices, mask=is_slice, other=0)
    ids = tl.where(is_slice, tl.where(marked < 0, ~marked, marked), vocab_size)
    s = scaled_logits(tl.load(logits_ptr + ids, mask=is_slice, other=float("-inf")), largest, temperature)
    scores = tl.where(is_slice, s.to(tl.float64) + gumbel64(state, ids), float("-inf"))
    is_close = scores >= tl.max(scores, axis=0) - MARGIN
    return s, ids, scores, (marked < 0) & is_close, (marked < 0) & ~is_close


@triton.jit
def _choose(
    logits_ptr, values_ptr, ids_ptr, found, vocab_size, readable, largest, temperature, total, state,
    top_k, top_p, min_p, SIZE: tl.constexpr,
):  # fmt: skip
    """The token, from the (s, id) of all tokens down to some s, among which are all that are kept."""
    places = tl.arange(0, SIZE)
    live = places < found
    s = tl.load(values_ptr + places, mask=live, other=float("-inf"))
    ids = tl.load(ids_ptr + places, mask=live, other=0x7FFFFFFF)
    weights = tl.exp(s.to(tl.float64))
    scores = tl.where(live, s.to(tl.float64) + gumbel64(state, ids), float("-inf"))
    live &= weights >= min_p
    slack = EPSILON  # until the total is exact
    is_kept = False
    token_id = -1
    while not is_kept:
        left = tl.where(live, scores, float("-inf"))
        token_id = lowest_id(live & (left == tl.max(left, axis=0)), ids, 0)
        own = tl.max(tl.where(ids == token_id, s, float("-inf")), axis=0)
        before = (s > own) | ((s == own) & (ids < token_id))
        count = tl.sum(before.to(tl.int32), axis=0)
        is_kept = count < top_k
        if top_p < 1.0:
            mass = tl.sum(tl.where(before, weights, 0.0), axis=0)
            if tl.abs(mass - top_p * total) <= slack * total:
                _, _, total = mass_before(
                    logits_ptr, vocab_size, readable, largest, temperature, own, token_id, EXACT=True
                )
                slack = -1.0
            is_kept &= mass < top_p * total
        is_kept |= count == 0
        live &= before
    return token_id


@triton.jit
def floor_of(min_p):
    """Below the s of every token that can be chosen: one that has a probability, and min_p's share of the
    largest (float32's logarithm, with room)."""
    return tl.maximum(tl.where(min_p > 0.0, tl.log(min_p) - 1e-3, LOWEST), LOWEST)


@triton.jit
def _draw_filtered(
    logits_ptr, slice_best_ptr, slices, is_slice, group_max, group_list_ptr, values_ptr, ids_ptr,
    proposed_ptr, proposed_ids_ptr, vocab_size, readable, num_groups, largest, temperature, total, state,
    top_k, top_p, min_p, MAX_TOP_K: tl.constexpr, DEPTH: tl.constexpr, WIDTH: tl.constexpr,
    LANES: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """The token; or -1, and two proposals for `sampling_check`."""
    is_group = tl.arange(0, GROUPS) < num_groups
    groups = tl.where(is_group, scaled_logits(group_max, largest, temperature), float("-inf"))
    floor = floor_of(min_p)
    nothing = tl.cast(float("-inf"), tl.float32)
    is_free = False
    token_id = -1
    if top_k <= MAX_TOP_K:
        s = tl.where(is_slice, nothing, nothing)
        ids = tl.where(is_slice, slices, vocab_size)
        scores = s.to(tl.float64)
        is_unknown = is_slice
        is_stale = is_slice & False
        bound = tl.maximum(kth_bound(groups, top_k), floor)
        max_groups = MAX_GROUPS
    else:
        s, ids, scores, is_urgent, is_stale = _best_of_slices(
            logits_ptr, slice_best_ptr, slices, is_slice, vocab_size, largest, temperature, state
        )
        s, ids, scores = refresh(
            logits_ptr, vocab_size, DEPTH * WIDTH, largest, temperature, state, nothing, vocab_size, LOWEST,
            slices, is_urgent, s, ids, scores,
        )  # fmt: skip
        is_unknown = is_slice & False
        best, token_id = best_token(s, ids, scores)
        # No token after the best one can be the answer; where min_p drops it, any with s >= floor can.
        bound = tl.where(tl.exp(best.to(tl.float64)) >= min_p, tl.maximum(best, floor), floor)
        max_groups = MAX_GROUPS // 4  # beyond that, a check of all by many CTAs is faster
        is_free = (top_k >= vocab_size) & (top_p >= 1.0) & (best >= floor + 2e-3)

    if not is_free:
        found = gather(
            logits_ptr, vocab_size, largest, temperature, groups, bound, max_groups,
            group_list_ptr, values_ptr, ids_ptr, DEPTH, WIDTH, LANES, GROUPS,
        )  # fmt: skip
        if (found < 0) | (found > CAPACITY):
            token_id = -1
            s, ids, scores = refresh(
                logits_ptr, vocab_size, DEPTH * WIDTH, largest, temperature, state, nothing, vocab_size,
                floor, slices, is_unknown, s, ids, scores,
            )  # fmt: skip
            first, first_id = best_token(s, ids, scores)
            is_next = is_before(s, ids, first, first_id) & (s >= floor) & ~is_stale
            second, second_id = best_token(s, ids, tl.where(is_next, scores, float("-inf")))
            tl.store(proposed_ptr, first)
            tl.store(proposed_ids_ptr, first_id)
            tl.store(proposed_ptr + 1, second)
            tl.store(proposed_ids_ptr + 1, second_id)
            tl.store(slice_best_ptr + slices, tl.where(is_stale, ~ids, ids), mask=is_slice)
        elif found <= 256:
            token_id = _choose(
                logits_ptr, values_ptr, ids_ptr, found, vocab_size, readable, largest, temperature, total,
                state, top_k, top_p, min_p, 256,
            )  # fmt: skip
        else:
            token_id = _choose(
                logits_ptr, values_ptr, ids_ptr, found, vocab_size, readable, largest, temperature, total,
                state, top_k, top_p, min_p, CAPACITY,
            )  # fmt: skip
    return token_id


@triton.jit(
    do_not_specialize=["vocab_size", "num_slices"],
    do_not_specialize_on_alignment=["slice_sum_ptr", "slice_best_ptr"],  # halves of one tensor
)
def _pick_kernel(
    logits_ptr, seeds_ptr, positions_ptr, is_greedy_ptr, temperatures_ptr, top_ks_ptr, top_ps_ptr, min_ps_ptr,
    slice_max_ptr, slice_sum_ptr, slice_argmax_ptr, slice_best_ptr, group_max_ptr,
    group_list_ptr, values_ptr, ids_ptr, token_ids_ptr, largest_ptr, totals_ptr,
    proposed_ptr, proposed_ids_ptr, counters_ptr, row_stride, vocab_size, readable, num_slices, num_groups,
    SAMPLED: tl.constexpr, FILTER: tl.constexpr, MAX_TOP_K: tl.constexpr,
    DEPTH: tl.constexpr, WIDTH: tl.constexpr, LANES: tl.constexpr,
    SLICES: tl.constexpr, GROUPS: tl.constexpr, MAX_GROUPS: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * row_stride
    slices = tl.arange(0, SLICES)
    is_slice = slices < num_slices
    at = row * num_slices + slices
    slice_max = tl.load(slice_max_ptr + at, mask=is_slice, other=float("-inf"))
    slice_sum = tl.load(slice_sum_ptr + at, mask=is_slice, other=0.0)
    temperature = tl.load(temperatures_ptr + row)
    is_greedy = tl.load(is_greedy_ptr + row).to(tl.int1)
    if SAMPLED:  # all loads ahead of what depends on the first
        seed, position = tl.load(seeds_ptr + row), tl.load(positions_ptr + row)
    if FILTER:
        groups = tl.arange(0, GROUPS)
        group_max_ptr += row * num_groups
        group_max = tl.load(group_max_ptr + groups, mask=groups < num_groups, other=float("-inf"))
        top_k = tl.minimum(tl.load(top_ks_ptr + row), vocab_size).to(tl.int32)
        top_p, min_p = tl.load(top_ps_ptr + row).to(tl.float64), tl.load(min_ps_ptr + row)
        tl.store(proposed_ids_ptr + 2 * row, -1)
        tl.store(counters_ptr + row, 0)
    largest = tl.max(slice_max, axis=0)
    is_largest = slice_max == largest
    shares = tl.where(is_largest, 1.0, tl.exp2((slice_max - largest) * (LOG2_E / temperature)))
    total = tl.sum(slice_sum.to(tl.float64) * shares, axis=0)
    tl.store(largest_ptr + row, largest)
    tl.store(totals_ptr + row, total.to(tl.float32))

    is_bad = (total != total) | (largest == float("-inf"))
    token_id = -1
    if not is_bad:
        if is_greedy:
            token_id = lowest_id(
                is_largest & is_slice, tl.load(slice_argmax_ptr + at, mask=is_slice, other=0), 0
            )
        elif SAMPLED:
            state = noise_state(seed, position)
            slice_best_ptr += row * num_slices
            if FILTER:
                token_id = _draw_filtered(
                    logits_ptr, slice_best_ptr, slices, is_slice, group_max,
                    group_list_ptr + row * MAX_GROUPS, values_ptr + row * CAPACITY, ids_ptr + row * CAPACITY,
                    proposed_ptr + 2 * row, proposed_ids_ptr + 2 * row,
                    vocab_size, readable, num_groups, largest, temperature, total, state,
                    top_k, top_p, min_p, MAX_TOP_K, DEPTH, WIDTH, LANES, GROUPS,
                )  # fmt: skip
            else:
                s, ids, scores, is_urgent, _ = _best_of_slices(
                    logits_ptr, slice_best_ptr, slices, is_slice, vocab_size, largest, temperature, state
                )
                s, ids, scores = refresh(
                    logits_ptr, vocab_size, DEPTH * WIDTH, largest, temperature, state,
                    tl.cast(float("-inf"), tl.float32), vocab_size, LOWEST, slices, is_urgent, s, ids, scores,
                )  # fmt: skip
                _, token_id = best_token(s, ids, scores)
    tl.store(token_ids_ptr + row, token_id.to(tl.int64))


def pick(logits: torch.Tensor, info: SamplingBatchInfo, positions: torch.Tensor, scanned: Scan) -> Picked:
    num_rows, vocab_size = logits.shape
    num_slices, num_groups = scanned.slice_max.shape[1], scanned.group_max.shape[1]
    num_filtered = num_rows if info.needs_filter else 0

    def ints(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=logits.device)

    picked = Picked(
        torch.empty(num_rows, dtype=torch.int64, device=logits.device), logits.new_empty(num_rows),
        logits.new_empty(num_rows), logits.new_empty(num_filtered, 2), ints(num_filtered, 2),
        ints(num_filtered),
    )  # fmt: skip
    _pick_kernel[(num_rows,)](
        logits, info.seeds, positions, info.is_greedy, info.temperatures, info.top_ks, info.top_ps,
        info.min_ps, scanned.slice_max, scanned.slice_sum, scanned.slice_argmax, scanned.slice_best,
        scanned.group_max, ints(num_filtered, MAX_GROUPS.value),
        logits.new_empty(num_filtered, CAPACITY.value), ints(num_filtered, CAPACITY.value),
        *picked, logits.stride(0), vocab_size, readable_columns(logits), num_slices, num_groups,
        SAMPLED=not info.is_all_greedy, FILTER=info.needs_filter, MAX_TOP_K=MAX_TOP_K,
        DEPTH=scanned.depth, WIDTH=WIDTH, LANES=scanned.lanes,
        SLICES=triton.next_power_of_2(num_slices), GROUPS=triton.next_power_of_2(max(num_groups, 1)),
        MAX_GROUPS=MAX_GROUPS, CAPACITY=CAPACITY, num_warps=8,
        maxnreg=128 if num_rows > gpu_of(logits.device).num_multiprocessors else None,
    )  # fmt: skip
    return picked
