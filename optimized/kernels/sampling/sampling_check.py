"""Rows that `sampling_pick` could not decide: whether the filters keep the token that it proposes.

Roofline bound: one read of these rows' logits; for batches without any, an empty launch.

Shape: a fixed number of CTAs shares the slices of the undecided rows, so that a batch without any costs a
launch and one load. For each slice they count and add up the tokens before the proposal, the best of all, and
before a second token, which is likely to be the best of those before it. If min_p drops the proposal, they
count nothing and find the best token of each slice that min_p may keep. The CTA that finishes a row's last
slice puts the slices together in their order and decides. Rows that drop the proposal walk on.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from diptych.optimized.kernels.portable import batch_block, gpu_of
from diptych.optimized.kernels.sampling.sampling_noise import gumbel64, noise_state, scaled_logits
from diptych.optimized.kernels.sampling.sampling_pick import Picked, floor_of
from diptych.optimized.kernels.sampling.sampling_scan import WIDTH, Scan, readable_columns
from diptych.optimized.kernels.sampling.sampling_walk import best_of_slice, is_before, is_kept, lost, walk
from diptych.shared.types import SamplingBatchInfo


@triton.jit
def _settle(
    logits_ptr, counts_ptr, masses_ptr, slice_best_ptr, num_slices, vocab_size, readable, slice_size,
    largest, temperature, total, state, top_k, top_p, min_p, first, first_id, second_id, is_dropped,
    SLICES: tl.constexpr,
):  # fmt: skip
    """The token of a row, from its slices' counts and masses; where min_p drops the first proposal, from the
    slices' best tokens alone."""
    slices = tl.arange(0, SLICES)
    is_slice = slices < num_slices
    counts = tl.load(counts_ptr + slices, mask=is_slice, other=0)
    masses = masses_ptr + 2 * slices
    token_id = first_id
    kept = False
    if not is_dropped:
        mass = tl.sum(tl.load(masses, mask=is_slice, other=0.0).to(tl.float64), axis=0)
        kept = is_kept(
            logits_ptr, vocab_size, readable, largest, temperature, total, top_k, top_p, min_p,
            first, first_id, tl.sum(counts & 0xFFFF, axis=0), mass,
        )  # fmt: skip
    if not kept:
        floor = floor_of(min_p)
        marked = tl.load(slice_best_ptr + slices, mask=is_slice, other=vocab_size)
        ids = tl.where(marked < 0, ~marked, marked)
        logits = tl.load(logits_ptr + ids, mask=ids < vocab_size, other=float("-inf"))
        s = scaled_logits(logits, largest, temperature)
        scores = s.to(tl.float64) + gumbel64(state, ids)
        is_stale = (marked < 0) | lost(s, ids, first, first_id, floor, vocab_size)
        known_mass = tl.sum(tl.load(masses + 1, mask=is_slice, other=0.0).to(tl.float64), axis=0)
        known_count = tl.where(is_dropped, 1, tl.sum(counts >> 16, axis=0))
        known_id = tl.where(is_dropped, -1, second_id)
        token_id = walk(
            logits_ptr, vocab_size, readable, slice_size, largest, temperature, total, state,
            top_k, top_p, min_p, floor, first, first_id, slices, is_stale, s, ids, scores,
            known_id, known_count, known_mass,
        )  # fmt: skip
    return token_id


@triton.jit(
    do_not_specialize=["num_rows", "vocab_size", "num_slices"],
    do_not_specialize_on_alignment=["slice_best_ptr"],
)
def _check_kernel(
    logits_ptr, seeds_ptr, positions_ptr, temperatures_ptr, top_ks_ptr, top_ps_ptr, min_ps_ptr,
    largest_ptr, totals_ptr, slice_best_ptr, proposed_ptr, proposed_ids_ptr, counters_ptr,
    counts_ptr, masses_ptr, token_ids_ptr, row_stride, num_rows, vocab_size, readable, num_slices,
    SIZE: tl.constexpr, SLICES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    rows = tl.arange(0, ROWS)
    is_open = tl.load(proposed_ids_ptr + 2 * rows, mask=rows < num_rows, other=-1) >= 0
    num_open = tl.sum(is_open.to(tl.int32), axis=0)
    if num_open > 0:
        order = tl.cumsum(is_open.to(tl.int32), axis=0) - 1
        for item in range(tl.program_id(0), num_open * num_slices, tl.num_programs(0)):
            row = tl.sum(tl.where(is_open & (order == item // num_slices), rows, 0), axis=0).to(tl.int64)
            piece = item % num_slices
            first_id = tl.load(proposed_ids_ptr + 2 * row)
            second_id = tl.load(proposed_ids_ptr + 2 * row + 1)
            first = tl.load(proposed_ptr + 2 * row)
            second = tl.load(proposed_ptr + 2 * row + 1)
            row_ptr = logits_ptr + row * row_stride
            largest = tl.load(largest_ptr + row)
            temperature = tl.load(temperatures_ptr + row)
            state = noise_state(tl.load(seeds_ptr + row), tl.load(positions_ptr + row))
            min_p = tl.load(min_ps_ptr + row)
            is_dropped = tl.exp(first.to(tl.float64)) < min_p
            at = row * num_slices + piece
            if is_dropped:
                best_id = best_of_slice(
                    row_ptr, vocab_size, piece * SIZE, SIZE, largest, temperature, state,
                    first, first_id, floor_of(min_p),
                )  # fmt: skip
                tl.store(slice_best_ptr + at, best_id)
            else:
                ids = piece * SIZE + tl.arange(0, SIZE)
                logits = tl.load(row_ptr + ids, mask=ids < readable, other=float("-inf"))
                s = scaled_logits(tl.where(ids < vocab_size, logits, float("-inf")), largest, temperature)
                weights = tl.exp(s)
                before_first = is_before(s, ids, first, first_id)
                before_second = is_before(s, ids, second, second_id)
                counts = tl.sum(before_first.to(tl.int32) + (before_second.to(tl.int32) << 16), axis=0)
                tl.store(counts_ptr + at, counts)
                tl.store(masses_ptr + 2 * at, tl.sum(tl.where(before_first, weights, 0.0), axis=0))
                tl.store(masses_ptr + 2 * at + 1, tl.sum(tl.where(before_second, weights, 0.0), axis=0))
            tl.debug_barrier()
            if tl.atomic_add(counters_ptr + row, 1, sem="acq_rel") == num_slices - 1:
                token_id = _settle(
                    row_ptr, counts_ptr + row * num_slices, masses_ptr + 2 * row * num_slices,
                    slice_best_ptr + row * num_slices, num_slices, vocab_size, readable, SIZE,
                    largest, temperature, tl.load(totals_ptr + row).to(tl.float64),
                    state, tl.minimum(tl.load(top_ks_ptr + row), vocab_size).to(tl.int32),
                    tl.load(top_ps_ptr + row).to(tl.float64), min_p,
                    first, first_id, second_id, is_dropped, SLICES,
                )  # fmt: skip
                tl.store(token_ids_ptr + row, token_id.to(tl.int64))


def check(
    logits: torch.Tensor, info: SamplingBatchInfo, positions: torch.Tensor, scanned: Scan, picked: Picked
) -> None:
    """Write the token ids of undecided rows."""
    num_rows, vocab_size = logits.shape
    num_slices = scanned.slice_max.shape[1]
    _check_kernel[(min(num_rows * num_slices, 2 * gpu_of(logits.device).num_multiprocessors or 8),)](
        logits, info.seeds, positions, info.temperatures, info.top_ks, info.top_ps, info.min_ps,
        picked.largest, picked.totals, scanned.slice_best, picked.proposed, picked.proposed_ids,
        picked.counters, torch.empty(num_rows, num_slices, dtype=torch.int32, device=logits.device),
        logits.new_empty(num_rows, num_slices, 2), picked.token_ids, logits.stride(0), num_rows,
        vocab_size, readable_columns(logits), num_slices, SIZE=scanned.depth * WIDTH,
        SLICES=triton.next_power_of_2(num_slices), ROWS=batch_block(num_rows),
        num_warps=8, maxnreg=128,
    )  # fmt: skip
