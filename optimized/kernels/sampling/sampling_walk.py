"""The general method of sampling, for rows that keep too many tokens to gather.

Roofline bound: one read of the row by one CTA, for each token that is tried: nearly always one.

Shape: as in `sampling_small`. The token with the best score is kept if the filters keep it, which the count
and the mass of the tokens before it decide; else the best of those before it is next. The best of each slice
is known from the scan, and stays the best as long as it is before the pivot itself: only slices that lost
theirs are read again. Each step halves what is left, on average, and the first is mostly enough where top_p
is near 1. Sums and scores are float32 first; where the mass comes within EPSILON of the bound, or a second
score within MARGIN of the best, float64 decides.
"""

from __future__ import annotations

import triton
import triton.language as tl

from diptych.optimized.kernels.sampling.sampling_noise import (
    MARGIN,
    gumbel32,
    gumbel64,
    lowest_id,
    scaled_logits,
)

EPSILON = tl.constexpr(2e-5)
"""Of a row's mass: more than the float32 sums are off. The mean of -s over tokens is at most log(vocab_size),
12, so that exponents' roundings (4 of 2^-24, relative) make 3e-6; exp2 adds 2^-22, sums of 8192 terms, of
which a thread adds 32 in sequence, 3e-6."""
BLOCK = tl.constexpr(8192)
SLICE_BLOCK = tl.constexpr(2048)


@triton.jit
def is_before(s, ids, pivot, pivot_id):
    """Whether a token is before the pivot in the order (s descending, id ascending)."""
    return (s > pivot) | ((s == pivot) & (ids < pivot_id))


@triton.jit
def mass_before(logits_ptr, vocab_size, readable, largest, temperature, pivot, pivot_id, EXACT: tl.constexpr):
    """-> count and mass of the tokens before the pivot, and the mass of all: sums of exp(s), of float32 terms
    or, EXACT, of float64 ones."""
    if EXACT:
        size: tl.constexpr = 2048
        masses = tl.zeros([size], tl.float64)
    else:
        size: tl.constexpr = BLOCK
        masses = tl.zeros([size], tl.float32)
    totals = masses
    counts = tl.zeros([size], tl.int32)
    for start in range(0, vocab_size, size):
        ids = start + tl.arange(0, size)
        logits = tl.load(logits_ptr + ids, mask=ids < readable, other=float("-inf"))
        s = scaled_logits(tl.where(ids < vocab_size, logits, float("-inf")), largest, temperature)
        before = is_before(s, ids, pivot, pivot_id)
        weights = tl.exp(s.to(masses.dtype))
        if EXACT:
            totals += weights
        masses += tl.where(before, weights, 0.0)
        counts += before.to(tl.int32)
    count, mass = tl.sum(counts, axis=0), tl.sum(masses, axis=0).to(tl.float64)
    return count, mass, tl.sum(totals, axis=0).to(tl.float64)


@triton.jit
def _best_of_slice(
    logits_ptr,
    vocab_size,
    first,
    size,
    largest,
    temperature,
    state,
    pivot,
    pivot_id,
    floor,
    EXACT: tl.constexpr,
):
    """-> the token with the best score among those of a slice that are before the pivot and have s >= floor,
    vocab_size if there is none; and how many scores are within the margin of its score (EXACT: 1)."""
    if EXACT:
        best = tl.full([SLICE_BLOCK], float("-inf"), tl.float64)
    else:
        best = tl.full([SLICE_BLOCK], float("-inf"), tl.float32)
    second = best
    best_ids = tl.zeros([SLICE_BLOCK], tl.int32)
    for start in range(first, first + size, SLICE_BLOCK):
        ids = start + tl.arange(0, SLICE_BLOCK)
        logits = tl.load(logits_ptr + ids, mask=ids < vocab_size, other=float("-inf"))
        s = scaled_logits(logits, largest, temperature)
        if EXACT:
            scores = s.to(tl.float64) + gumbel64(state, ids)
        else:
            scores = s + gumbel32(state, ids)
        scores = tl.where(is_before(s, ids, pivot, pivot_id) & (s >= floor), scores, float("-inf"))
        second = tl.maximum(second, tl.minimum(best, scores))
        best_ids = tl.where(scores > best, ids, best_ids)
        best = tl.maximum(best, scores)
    top = tl.max(best, axis=0)
    best_id = tl.where(top == float("-inf"), vocab_size, lowest_id(best == top, best_ids, 0))
    if EXACT:
        num_near = 1
    else:
        near = (best >= top - MARGIN).to(tl.int32) + (second >= top - MARGIN).to(tl.int32)
        num_near = tl.sum(near, axis=0)
    return best_id, num_near


@triton.jit
def best_of_slice(
    logits_ptr, vocab_size, first, size, largest, temperature, state, pivot, pivot_id, floor
):  # fmt: skip
    """-> the id of the token with the best score among those of a slice that are before the pivot and have
    s >= floor, vocab_size if there is none."""
    best_id, num_near = _best_of_slice(
        logits_ptr, vocab_size, first, size, largest, temperature, state, pivot, pivot_id, floor, EXACT=False
    )
    if num_near > 1:
        best_id, _ = _best_of_slice(
            logits_ptr, vocab_size, first, size, largest, temperature, state, pivot, pivot_id, floor,
            EXACT=True,
        )  # fmt: skip
    return best_id


@triton.jit
def refresh(
    logits_ptr, vocab_size, slice_size, largest, temperature, state, pivot, pivot_id, floor,
    slices, is_stale, s, ids, scores,
):  # fmt: skip
    """The best token of each slice among those before the pivot and with s >= floor, where `is_stale`; the
    others' are it already. -> s, ids and float64 scores [slices]; vocab_size and -inf where there is none."""
    while tl.max(is_stale.to(tl.int32), axis=0) > 0:
        piece = lowest_id(is_stale, slices, 0)
        best_id = best_of_slice(
            logits_ptr, vocab_size, piece * slice_size, slice_size, largest, temperature, state,
            pivot, pivot_id, floor,
        )  # fmt: skip
        logit = tl.load(logits_ptr + best_id, mask=best_id < vocab_size, other=float("-inf"))
        best_s = scaled_logits(logit, largest, temperature)
        is_piece = slices == piece
        s = tl.where(is_piece, best_s, s)
        ids = tl.where(is_piece, best_id, ids)
        scores = tl.where(is_piece, best_s.to(tl.float64) + gumbel64(state, best_id), scores)
        is_stale &= slices != piece
    return s, ids, scores


@triton.jit
def lost(s, ids, pivot, pivot_id, floor, vocab_size):
    """Which slices must be read again for the best of their tokens before the pivot."""
    return (ids < vocab_size) & ~(is_before(s, ids, pivot, pivot_id) & (s >= floor))


@triton.jit
def best_token(s, ids, scores):
    """-> s and id of the slices' token with the best score."""
    best_id = lowest_id(scores == tl.max(scores, axis=0), ids, 0)
    return tl.max(tl.where(ids == best_id, s, float("-inf")), axis=0), best_id


@triton.jit
def is_kept(
    logits_ptr, vocab_size, readable, largest, temperature, total, top_k, top_p, min_p,
    pivot, pivot_id, count, mass,
):  # fmt: skip
    """Whether the filters keep the pivot. count, mass: of the tokens before it, in float32 sums, as `total`
    is of all."""
    kept = (count < top_k) & (tl.exp(pivot.to(tl.float64)) >= min_p)
    if kept & (top_p < 1.0):
        kept = mass < top_p * total
        if tl.abs(mass - top_p * total) <= total * EPSILON:
            _, exact_mass, exact_total = mass_before(
                logits_ptr, vocab_size, readable, largest, temperature, pivot, pivot_id, EXACT=True
            )
            kept = exact_mass < top_p * exact_total
    return kept | (count == 0)


@triton.jit
def walk(
    logits_ptr, vocab_size, readable, slice_size, largest, temperature, total, state, top_k, top_p, min_p,
    floor, pivot, pivot_id, slices, is_stale, s, ids, scores, known_id, known_count, known_mass,
):  # fmt: skip
    """The token, one of those before the pivot. `floor`: below the s of any token that min_p keeps. is_stale
    to scores: as for `refresh`. known_: a token, and the count and mass before it, should it come up."""
    found = False
    while not found:
        s, ids, scores = refresh(
            logits_ptr, vocab_size, slice_size, largest, temperature, state, pivot, pivot_id, floor,
            slices, is_stale, s, ids, scores,
        )  # fmt: skip
        pivot, pivot_id = best_token(s, ids, scores)
        count, mass = known_count, known_mass
        # Where min_p is the only filter, neither matters.
        if (pivot_id != known_id) & ((top_k < vocab_size) | (top_p < 1.0)):
            count, mass, _ = mass_before(
                logits_ptr, vocab_size, readable, largest, temperature, pivot, pivot_id, EXACT=False
            )
        found = is_kept(
            logits_ptr, vocab_size, readable, largest, temperature, total, top_k, top_p, min_p,
            pivot, pivot_id, count, mass,
        )  # fmt: skip
        is_stale = lost(s, ids, pivot, pivot_id, floor, vocab_size)
    return pivot_id
