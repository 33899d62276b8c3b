"""Log-probabilities of the tokens drawn, and of the best ones, for large vocabularies.

Roofline bound: the group maxima, 4 bytes a group: the logits have been read already (`sampling_scan`).

Shape: one CTA per row gathers what reaches the num_top-th largest group maximum, and puts each token where
its rank is: how many come before it. Where ties make it too much, each of the best costs a pass over the row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from diptych.optimized.kernels.sampling.sampling_gather import CAPACITY, MAX_GROUPS, gather, kth_bound
from diptych.optimized.kernels.sampling.sampling_noise import lowest_id, scaled_logits
from diptych.optimized.kernels.sampling.sampling_pick import Picked
from diptych.optimized.kernels.sampling.sampling_scan import MAX_TOP_K, WIDTH, Scan
from diptych.optimized.kernels.sampling.sampling_walk import is_before
from diptych.shared.sampling.logprobs import sort_descending
from diptych.shared.types import LogprobsOutput, SamplingBatchInfo

BLOCK = tl.constexpr(4096)


@triton.jit
def _take(
    values_ptr, ids_ptr, found, logits_ptr, vocab_size, largest, temperature, log_total,
    num_top, logprobs_ptr, top_ids_ptr, SIZE: tl.constexpr, HEAD: tl.constexpr,
):  # fmt: skip
    """The best of what was gathered, each to its rank; should there be too few, the lowest ids of -inf."""
    places = tl.arange(0, SIZE)
    inside = places < found
    s = tl.load(values_ptr + places, mask=inside, other=float("-inf"))
    ids = tl.load(ids_ptr + places, mask=inside, other=0)
    ranks = tl.zeros([SIZE], tl.int32)
    chunk: tl.constexpr = 8192 // SIZE
    for start in range(0, found, chunk):
        others = start + tl.arange(0, chunk)
        is_other = others < found
        other_s = tl.load(values_ptr + others, mask=is_other, other=float("-inf"))[None, :]
        other_ids = tl.load(ids_ptr + others, mask=is_other, other=0)[None, :]
        before = is_before(other_s, other_ids, s[:, None], ids[:, None]) & is_other[None, :]
        ranks += tl.sum(before.to(tl.int32), axis=1)
    is_best = inside & (ranks < num_top)
    tl.store(logprobs_ptr + ranks, s - log_total, mask=is_best)
    tl.store(top_ids_ptr + ranks, ids.to(tl.int64), mask=is_best)
    if found < num_top:
        head = tl.arange(0, HEAD)
        logits = tl.load(logits_ptr + head, mask=head < vocab_size, other=0.0)
        is_impossible = scaled_logits(logits, largest, temperature) == float("-inf")
        last = found + tl.cumsum(is_impossible.to(tl.int32), axis=0) - 1
        is_listed = is_impossible & (last < num_top)
        tl.store(logprobs_ptr + last, tl.full([HEAD], float("-inf"), tl.float32), mask=is_listed)
        tl.store(top_ids_ptr + last, head.to(tl.int64), mask=is_listed)


@triton.jit
def _best_after(logits_ptr, vocab_size, largest, temperature, last, last_id):
    """s and id of the token that comes next in the order (s descending, id ascending)."""
    offsets = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_ids = tl.full([BLOCK], 0x7FFFFFFF, tl.int32)
    for start in range(0, vocab_size, BLOCK):
        ids = start + offsets
        logits = tl.load(logits_ptr + ids, mask=ids < vocab_size, other=float("-inf"))
        s = scaled_logits(logits, largest, temperature)
        after = (ids < vocab_size) & ((s < last) | ((s == last) & (ids > last_id)))
        is_better = after & ((s > best) | (best_ids == 0x7FFFFFFF))
        best = tl.where(is_better, s, best)
        best_ids = tl.where(is_better, ids, best_ids)
    top = tl.max(best, axis=0)
    return top, lowest_id(best == top, best_ids, 0)


@triton.jit(do_not_specialize=["num_top"])
def _logprobs_kernel(
    logits_ptr, temperatures_ptr, token_ids_ptr, largest_ptr, totals_ptr, group_max_ptr,
    group_list_ptr, values_ptr, ids_ptr, log_totals_ptr, token_logprobs_ptr, top_logprobs_ptr, top_ids_ptr,
    num_top, row_stride, vocab_size, num_groups,
    DEPTH: tl.constexpr, WIDTH: tl.constexpr, LANES: tl.constexpr, GROUPS: tl.constexpr,
    MAX_GROUPS: tl.constexpr, CAPACITY: tl.constexpr, HEAD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * row_stride
    temperature = tl.load(temperatures_ptr + row)
    largest = tl.load(largest_ptr + row)
    log_total = tl.log(tl.load(totals_ptr + row))
    token_id = tl.load(token_ids_ptr + row)
    logit = tl.load(logits_ptr + tl.maximum(token_id, 0))
    logprob = scaled_logits(logit, largest, temperature) - log_total
    tl.store(token_logprobs_ptr + row, tl.where(token_id < 0, float("nan"), logprob))
    tl.store(log_totals_ptr + row, tl.where(token_id < 0, float("nan"), log_total))
    if HEAD > 0:
        top_logprobs_ptr += row * num_top
        top_ids_ptr += row * num_top
        if token_id < 0:
            head = tl.arange(0, HEAD)
            tl.store(top_logprobs_ptr + head, tl.full([HEAD], float("nan"), tl.float32), mask=head < num_top)
            tl.store(top_ids_ptr + head, head.to(tl.int64), mask=head < num_top)
        else:
            offsets = tl.arange(0, GROUPS)
            group_max = tl.load(
                group_max_ptr + row * num_groups + offsets, mask=offsets < num_groups, other=float("-inf")
            )
            groups = tl.where(
                offsets < num_groups, scaled_logits(group_max, largest, temperature), float("-inf")
            )
            values_ptr += row * CAPACITY
            ids_ptr += row * CAPACITY
            found = gather(
                logits_ptr, vocab_size, largest, temperature, groups, kth_bound(groups, num_top), MAX_GROUPS,
                group_list_ptr + row * MAX_GROUPS, values_ptr, ids_ptr, DEPTH, WIDTH, LANES, GROUPS,
            )  # fmt: skip
            if (found < 0) | (found > CAPACITY):
                last = tl.cast(float("inf"), tl.float32)
                last_id = -1
                for i in range(num_top):
                    last, last_id = _best_after(logits_ptr, vocab_size, largest, temperature, last, last_id)
                    tl.store(top_logprobs_ptr + i, last - log_total)
                    tl.store(top_ids_ptr + i, last_id.to(tl.int64))
            elif found <= 256:
                _take(
                    values_ptr, ids_ptr, found, logits_ptr, vocab_size, largest, temperature, log_total,
                    num_top, top_logprobs_ptr, top_ids_ptr, 256, HEAD,
                )  # fmt: skip
            else:
                _take(
                    values_ptr, ids_ptr, found, logits_ptr, vocab_size, largest, temperature, log_total,
                    num_top, top_logprobs_ptr, top_ids_ptr, CAPACITY, HEAD,
                )  # fmt: skip


def logprobs(logits: torch.Tensor, info: SamplingBatchInfo, scanned: Scan, picked: Picked) -> LogprobsOutput:
    num_rows, vocab_size = logits.shape
    num_top = info.num_top_logprobs
    is_sorted = num_top > MAX_TOP_K  # more than a buffer is sure to hold
    num_gathered = 0 if is_sorted else num_top
    device, num_groups = logits.device, scanned.group_max.shape[1]
    num_buffers = num_rows if num_gathered > 0 else 0
    log_totals = logits.new_empty(num_rows)
    output = LogprobsOutput(
        logits.new_empty(num_rows),
        logits.new_empty(num_rows, num_gathered),
        torch.empty(num_rows, num_gathered, dtype=torch.int64, device=device),
    )
    _logprobs_kernel[(num_rows,)](
        logits, info.temperatures, picked.token_ids, picked.largest, picked.totals, scanned.group_max,
        torch.empty(num_buffers, MAX_GROUPS.value, dtype=torch.int32, device=device),
        logits.new_empty(num_buffers, CAPACITY.value),
        torch.empty(num_buffers, CAPACITY.value, dtype=torch.int32, device=device),
        log_totals, *output, num_gathered, logits.stride(0), vocab_size, num_groups,
        DEPTH=scanned.depth, WIDTH=WIDTH, LANES=scanned.lanes,
        GROUPS=triton.next_power_of_2(max(num_groups, 1)), MAX_GROUPS=MAX_GROUPS, CAPACITY=CAPACITY,
        HEAD=MAX_TOP_K if num_gathered > 0 else 0, num_warps=8,
    )  # fmt: skip
    if not is_sorted:
        return output
    # The same bits as gathered: a row may be beside one that asks for more.
    scaled = (logits - picked.largest[:, None]) / info.temperatures[:, None]
    scaled = scaled.masked_fill(logits == picked.largest[:, None], 0.0)
    best, best_ids = sort_descending(scaled, num_top)
    return LogprobsOutput(output.token_logprobs, best - log_totals[:, None], best_ids)
