"""Finds the few largest logits of a row by the maxima of its groups, without a sort.

Roofline bound: the maxima, 4 bytes a group, and the groups that hold something: 256 bytes each.

Shape: the k-th largest group maximum is a lower bound of the k-th largest logit, since each of these groups
has a token that reaches it. A search by quarters finds a value just below it; the groups that reach it are
read again, and their tokens that do are packed into a buffer, in order. Ties cannot be lost: what is compared
is the scaled logit, which falls with the logit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from diptych.optimized.kernels.sampling.sampling_noise import scaled_logits

MAX_GROUPS = tl.constexpr(1024)
CAPACITY = tl.constexpr(2048)
"""Tokens that a row's buffer holds, and groups that are read for it: else nothing is gathered."""
LOWEST = tl.constexpr(-3.4028234663852886e38)
"""Below every token that can be chosen: one of scaled logit -inf has no probability."""
MAX_STEPS = tl.constexpr(12)
CHUNK = tl.constexpr(4096)


@triton.jit
def kth_bound(groups, k):
    """groups: scaled maxima, at most 0. -> at most the k-th largest of them, LOWEST where there are fewer."""
    depths = -groups
    is_finite = depths < float("inf")
    high = tl.max(tl.where(is_finite, depths, 0.0), axis=0)
    count = tl.sum(is_finite.to(tl.int32), axis=0)
    low = high * 0.0
    enough = tl.maximum(k + k // 4, 64)
    bound = tl.where(count < k, LOWEST, -high)
    step = 0
    while (count > enough) & (step < MAX_STEPS):
        # Three values at a time: their counts travel through one sum, 20 bits each.
        first = low + (high - low) * 0.25
        second = low + (high - low) * 0.5
        third = low + (high - low) * 0.75
        ones = (depths <= first).to(tl.int64) + ((depths <= second).to(tl.int64) << 20)
        counts = tl.sum(ones + ((depths <= third).to(tl.int64) << 40), axis=0)
        num_first = (counts & 0xFFFFF).to(tl.int32)
        num_second = ((counts >> 20) & 0xFFFFF).to(tl.int32)
        num_third = (counts >> 40).to(tl.int32)
        if num_first >= k:
            high = first
            count = num_first
        elif num_second >= k:
            low = first
            high = second
            count = num_second
        elif num_third >= k:
            low = second
            high = third
            count = num_third
        else:
            low = third
        bound = -high
        step += 1
    return bound


@triton.jit
def gather(
    logits_ptr, vocab_size, largest, temperature, groups, bound, max_groups, group_list_ptr, values_ptr,
    ids_ptr, DEPTH: tl.constexpr, WIDTH: tl.constexpr, LANES: tl.constexpr, NUM_GROUPS: tl.constexpr,
):  # fmt: skip
    """Packs (s, id) of the tokens with s >= bound -> how many there are; more than CAPACITY: not all are
    there. -1: in more than max_groups groups."""
    reaches = (groups >= bound).to(tl.int32)
    num_groups = tl.sum(reaches, axis=0)
    found = -1
    if num_groups <= max_groups:
        order = tl.cumsum(reaches, axis=0) - 1
        tl.store(group_list_ptr + order, tl.arange(0, NUM_GROUPS), mask=reaches != 0)
        tl.debug_barrier()
        size: tl.constexpr = DEPTH * LANES
        per_chunk: tl.constexpr = CHUNK // size
        per_slice: tl.constexpr = WIDTH // LANES
        within = tl.arange(0, CHUNK)
        found = 0
        start = 0
        while (start < num_groups) & (found <= CAPACITY):
            index = start + within // size
            is_group = index < num_groups
            group = tl.load(group_list_ptr + index, mask=is_group, other=0)
            first = group // per_slice * (DEPTH * WIDTH) + group % per_slice * LANES
            ids = first + within % size // LANES * WIDTH + within % LANES
            inside = is_group & (ids < vocab_size)
            logits = tl.load(logits_ptr + ids, mask=inside, other=float("-inf"))
            s = scaled_logits(logits, largest, temperature)
            is_in = (inside & (s >= bound)).to(tl.int32)
            places = found + tl.cumsum(is_in, axis=0) - 1
            fits = (is_in != 0) & (places < CAPACITY)
            tl.store(values_ptr + places, s, mask=fits)
            tl.store(ids_ptr + places, ids, mask=fits)
            found += tl.sum(is_in, axis=0)
            start += per_chunk
        tl.debug_barrier()
    return found
