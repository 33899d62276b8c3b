"""Samples batches with a temperature and no filter: one CTA per slice of a row, then one CTA per row.

Roofline bound: 4 * vocab_size bytes a row.

Shape: the token with the largest s - log w wins, s being scaled logits and w = -log1p(-v): as if each came at
the time w / exp(s), and the first one won. Exact times of a whole vocabulary would cost more than reading it,
but v < w, so that log2(v) minus the logit over temperature is cheap and never late. The first launch leaves
the earliest such bound of each part, 256 tokens, and its largest logit. The second one computes the part
with the earliest bound as the reference does, in float64, and then each other one whose bound is not after
the best time so far: mostly none.

Greedy rows need no bounds, and where the largest logit over temperature has no float32 there are none: there
parts are chosen by their largest logits. Loses where hundreds of parts tie, as in a greedy row of equal
logits: they are computed one by one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from diptych.optimized.kernels.portable import largest_or_nan
from diptych.optimized.kernels.sampling.sampling_noise import (
    gumbel64,
    log2_of_hash,
    lowest_id,
    noise_state,
    scaled_logits,
    tile_hash,
)
from diptych.optimized.kernels.sampling.sampling_scan import LOG2_E, readable_columns
from diptych.shared.types import SamplingBatchInfo

DEPTH, WIDTH, PARTS = 8, 512, 16
"""A CTA reads a tile [DEPTH, WIDTH]; a part of it is WIDTH / PARTS columns, which one warp holds, so that
warps need not wait for each other. Of four parts that a warp has, the second launch mostly reads one."""
SLACK, ROUNDING = tl.constexpr(1e-4), tl.constexpr(2.0**-20)
"""More than bounds and best scores are off, in units of log2. Logarithms of up to 32 have a relative error of
2^-22 (8e-6); scaled logits that matter, down to REACH, one of 4 roundings and 2 units in the last place of a
division (1.5e-5); sums of up to 70 are rounded 4 times (1.7e-5). So much without the largest logit, which
adds to all sums, and by either launch's division: up to 13 roundings of its size, where ROUNDING is 16."""
REACH = tl.constexpr(27.0)
"""No token wins whose scaled logit is further below the largest: noise lies between -3.2 and 22.9."""


@triton.jit(do_not_specialize=["vocab_size", "num_slices"])
def _bound_kernel(
    logits_ptr, seeds_ptr, positions_ptr, is_greedy_ptr, temperatures_ptr, largest_ptr, bounds_ptr,
    row_stride, vocab_size, readable, num_slices,
    DEPTH: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """largest, bounds: [bs, num_slices * PARTS]; bounds of greedy rows are left out."""
    row = (tl.program_id(0) // num_slices).to(tl.int64)
    piece = tl.program_id(0) % num_slices
    first_id = piece * DEPTH * WIDTH
    ids = first_id + tl.arange(0, DEPTH)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    logits = tl.load(logits_ptr + row * row_stride + ids, mask=ids < readable)
    rate = LOG2_E / tl.load(temperatures_ptr + row)
    seed, position = tl.load(seeds_ptr + row), tl.load(positions_ptr + row)
    is_greedy = tl.load(is_greedy_ptr + row).to(tl.int1)
    if first_id + DEPTH * WIDTH > vocab_size:
        logits = tl.where(ids < vocab_size, logits, float("-inf"))

    at = (row * num_slices + piece) * PARTS + tl.arange(0, PARTS)
    largest = tl.reshape(largest_or_nan(logits, 0), [PARTS, WIDTH // PARTS])
    tl.store(largest_ptr + at, largest_or_nan(largest, 1))
    if not is_greedy:
        noise = log2_of_hash(tile_hash(noise_state(seed, position), first_id, DEPTH, WIDTH))
        bounds = tl.min(tl.fma(logits, tl.full([DEPTH, WIDTH], -1.0, tl.float32) * rate, noise), axis=0)
        tl.store(bounds_ptr + at, tl.min(tl.reshape(bounds, [PARTS, WIDTH // PARTS]), axis=1))


@triton.jit
def _best_of_part(
    logits_ptr, part, vocab_size, largest, temperature, state, is_greedy,
    DEPTH: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """The best score of a part in float64, and the lowest token id that has it."""
    columns: tl.constexpr = WIDTH // PARTS
    places = tl.arange(0, DEPTH * columns)
    first_id = part // PARTS * (DEPTH * WIDTH) + part % PARTS * columns
    ids = first_id + places // columns * WIDTH + places % columns
    logits = tl.load(logits_ptr + ids, mask=ids < vocab_size, other=float("-inf"))
    if is_greedy:
        scores = logits.to(tl.float64)
    else:
        scores = scaled_logits(logits, largest, temperature).to(tl.float64) + gumbel64(state, ids)
    best = tl.max(scores, axis=0)
    return best, lowest_id(scores == best, ids, 0)


@triton.jit(do_not_specialize=["vocab_size", "num_parts"])
def _draw_kernel(
    logits_ptr, seeds_ptr, positions_ptr, is_greedy_ptr, temperatures_ptr, largest_ptr, bounds_ptr,
    token_ids_ptr, row_stride, vocab_size, num_parts,
    DEPTH: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    parts = tl.arange(0, SIZE)
    is_part = parts < num_parts
    part_largest = tl.load(largest_ptr + row * num_parts + parts, mask=is_part, other=float("-inf"))
    bounds = tl.load(bounds_ptr + row * num_parts + parts, mask=is_part, other=float("inf"))
    temperature = tl.load(temperatures_ptr + row)
    is_greedy = tl.load(is_greedy_ptr + row).to(tl.int1)
    state = noise_state(tl.load(seeds_ptr + row), tl.load(positions_ptr + row))
    largest = largest_or_nan(part_largest, 0)

    token_id = -1
    if largest > float("-inf"):  # else a logit is NaN, or no token is possible
        scaled = largest * (LOG2_E / temperature)
        is_race = ~is_greedy & (tl.abs(scaled) < float("inf"))
        bounds = tl.where(is_race, bounds, -part_largest)
        # The last bound of a part that may hold the winner. In a race it is known from the first part on.
        last = tl.where(is_race, float("inf"), tl.where(is_greedy, 0.0, REACH * temperature) - largest)
        best = tl.cast(float("-inf"), tl.float64)
        bound, part = tl.min(bounds, axis=0, return_indices=True)
        while (bound <= last) & (bound < float("inf")):
            score, best_id = _best_of_part(
                logits_ptr + row * row_stride, part, vocab_size, largest, temperature, state, is_greedy,
                DEPTH, WIDTH, PARTS,
            )  # fmt: skip
            is_better = (score > best) | ((score == best) & (best_id < token_id))
            token_id = tl.where(is_better, best_id, token_id)
            best = tl.maximum(best, score)
            if is_race:
                slack = SLACK + tl.abs(scaled) * ROUNDING
                last = 32.0 - best.to(tl.float32) * LOG2_E - scaled + slack
            bounds = tl.where(parts == part, float("inf"), bounds)
            bound, part = tl.min(bounds, axis=0, return_indices=True)
    tl.store(token_ids_ptr + row, token_id.to(tl.int64))


def race(logits: torch.Tensor, info: SamplingBatchInfo, positions: torch.Tensor) -> torch.Tensor:
    """-> the token ids [bs] int64 of a batch without filters."""
    num_rows, vocab_size = logits.shape
    readable = readable_columns(logits)
    num_slices = triton.cdiv(vocab_size, DEPTH * WIDTH)
    num_parts = num_slices * PARTS
    largest, bounds = logits.new_empty(2, num_rows, num_parts)
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    rows = (logits, info.seeds, positions, info.is_greedy, info.temperatures, largest, bounds)
    _bound_kernel[(num_rows * num_slices,)](
        *rows, logits.stride(0), vocab_size, readable, num_slices,
        DEPTH=DEPTH, WIDTH=WIDTH, PARTS=PARTS, num_warps=4, maxnreg=64,
    )  # fmt: skip
    _draw_kernel[(num_rows,)](
        *rows, token_ids, logits.stride(0), vocab_size, num_parts,
        DEPTH=DEPTH, WIDTH=WIDTH, PARTS=PARTS, SIZE=triton.next_power_of_2(num_parts), num_warps=4,
    )  # fmt: skip
    return token_ids
