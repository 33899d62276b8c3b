"""Sampling from a small vocabulary: whole rows in registers, everything in one launch.

Roofline bound: one read of the logits, 4 * vocab_size bytes a row; at these sizes a launch costs more.

Shape: a CTA holds a tile [rows, vocabulary] and follows the contract without approximation, all in
float64. No sort: the token with the best score is kept if the filters keep it, which is a question about the
tokens before it alone (how many, how much mass). If not, neither is any token after it, and the best of those
before it is next. The first token of the order is always kept, so this ends.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from diptych.optimized.kernels.portable import INTERPRETED
from diptych.optimized.kernels.sampling.sampling_noise import gumbel64, lowest_id, noise_state, scaled_logits
from diptych.shared.types import LogprobsOutput, SampleOutput, SamplingBatchInfo

MAX_VOCAB_SIZE = 4096
TILE = 2048
INTERPRETED_TILE = 1 << 17
MIN_COLUMNS = 64
"""On a GPU: smaller tiles would be no faster, and kernels of their own to compile."""


@triton.jit
def _draw(
    s, ids, rows, is_row, is_done, vocab_size, state, top_ks_ptr, top_ps_ptr, min_ps_ptr, FILTER: tl.constexpr
):
    """The token with the best score among those that are kept, for each row not done already."""
    neg_inf = float("-inf")
    inside = ids < vocab_size
    scores = tl.where(inside, s.to(tl.float64) + gumbel64(state[:, None], ids), neg_inf)
    token_ids = lowest_id(scores == tl.max(scores, axis=1)[:, None], ids, 1)
    if FILTER:
        top_ks = tl.load(top_ks_ptr + rows, mask=is_row, other=1)
        top_ps = tl.load(top_ps_ptr + rows, mask=is_row, other=1.0)
        min_ps = tl.load(min_ps_ptr + rows, mask=is_row, other=0.0)
        weights = tl.where(inside, tl.exp(s.to(tl.float64)), 0.0)  # p / max p
        enough = top_ps * tl.sum(weights, axis=1)
        while tl.min(is_done.to(tl.int32), axis=0) == 0:
            own = tl.max(tl.where(ids == token_ids[:, None], s, neg_inf), axis=1)
            before = (s > own[:, None]) | ((s == own[:, None]) & (ids < token_ids[:, None]))
            num_before = tl.sum(before.to(tl.int32), axis=1)
            mass_before = tl.sum(tl.where(before, weights, 0.0), axis=1)
            is_kept = (num_before < top_ks) & ((mass_before < enough) | (top_ps >= 1.0))
            is_kept &= tl.exp(own.to(tl.float64)) >= min_ps
            is_done |= is_kept | (num_before == 0)
            left = tl.where(before, scores, neg_inf)
            best = lowest_id(before & (left == tl.max(left, axis=1)[:, None]), ids, 1)
            token_ids = tl.where(is_done, token_ids, best)
    return token_ids


@triton.jit(do_not_specialize=["num_top", "num_rows", "vocab_size"])
def _small_kernel(
    logits_ptr, seeds_ptr, positions_ptr, is_greedy_ptr, temperatures_ptr, top_ks_ptr, top_ps_ptr, min_ps_ptr,
    token_ids_ptr, token_logprobs_ptr, top_logprobs_ptr, top_ids_ptr, num_top,
    row_stride, num_rows, vocab_size,
    SAMPLED: tl.constexpr, FILTER: tl.constexpr, LOGPROBS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    is_row = rows < num_rows
    ids = tl.arange(0, COLUMNS)[None, :]
    inside = ids < vocab_size
    logits = tl.load(
        logits_ptr + rows[:, None] * row_stride + ids, mask=is_row[:, None] & inside, other=float("-inf")
    )
    is_nan = logits != logits
    has_nan = tl.max(is_nan.to(tl.int32), axis=1) > 0
    logits = tl.where(is_nan, float("-inf"), logits)
    largest = tl.max(logits, axis=1)
    is_bad = has_nan | (largest == float("-inf"))
    token_ids = lowest_id(inside & (logits == largest[:, None]), ids, 1)
    if SAMPLED or LOGPROBS:
        temperatures = tl.load(temperatures_ptr + rows, mask=is_row, other=1.0)
        s = scaled_logits(logits, largest[:, None], temperatures[:, None])
    if SAMPLED:
        is_greedy = tl.load(is_greedy_ptr + rows, mask=is_row, other=1).to(tl.int1)
        seeds = tl.load(seeds_ptr + rows, mask=is_row, other=0)
        state = noise_state(seeds, tl.load(positions_ptr + rows, mask=is_row, other=0))
        drawn = _draw(
            s, ids, rows, is_row, is_greedy | is_bad, vocab_size, state, top_ks_ptr, top_ps_ptr, min_ps_ptr,
            FILTER,
        )  # fmt: skip
        token_ids = tl.where(is_greedy, token_ids, drawn)
    token_ids = tl.where(is_bad, -1, token_ids)
    tl.store(token_ids_ptr + rows, token_ids.to(tl.int64), mask=is_row)
    if LOGPROBS:
        normaliser = tl.log(tl.sum(tl.where(inside, tl.exp(s.to(tl.float64)), 0.0), axis=1)).to(tl.float32)
        own = tl.max(tl.where(ids == token_ids[:, None], s, float("-inf")), axis=1)
        logprobs = tl.where(is_bad, float("nan"), own - normaliser)
        tl.store(token_logprobs_ptr + rows, logprobs, mask=is_row)
        left = inside & (rows[:, None] < num_rows)
        for i in range(num_top):
            best = tl.max(tl.where(left, s, float("-inf")), axis=1)
            best_ids = lowest_id(left & (s == best[:, None]), ids, 1)
            tl.store(top_logprobs_ptr + rows * num_top + i, best - normaliser, mask=is_row)
            tl.store(top_ids_ptr + rows * num_top + i, best_ids.to(tl.int64), mask=is_row)
            left &= ids != best_ids[:, None]


def sample_small(logits: torch.Tensor, info: SamplingBatchInfo, positions: torch.Tensor) -> SampleOutput:
    """logits [bs, vocab_size <= MAX_VOCAB_SIZE], adjusted already."""
    num_rows, vocab_size = logits.shape
    columns = triton.next_power_of_2(max(vocab_size, 1 if INTERPRETED else MIN_COLUMNS))
    rows = max((INTERPRETED_TILE if INTERPRETED else TILE) // columns, 1)
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    logprobs = None
    if info.return_logprob:
        logprobs = LogprobsOutput(
            logits.new_empty(num_rows),
            logits.new_empty(num_rows, info.num_top_logprobs),
            token_ids.new_empty(num_rows, info.num_top_logprobs),
        )
    outputs = logprobs or (None, None, None)
    _small_kernel[(triton.cdiv(num_rows, rows),)](
        logits, info.seeds, positions, info.is_greedy, info.temperatures, info.top_ks, info.top_ps,
        info.min_ps, token_ids, *outputs, info.num_top_logprobs, logits.stride(0), num_rows, vocab_size,
        SAMPLED=not info.is_all_greedy, FILTER=info.needs_filter, LOGPROBS=info.return_logprob,
        ROWS=rows, COLUMNS=columns, num_warps=4 if columns * rows <= 2048 else 8,
    )  # fmt: skip
    return SampleOutput(token_ids, logprobs)
