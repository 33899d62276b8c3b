"""The sampler without sorting: one read of the logits, then only the tokens that can still win.

Differs from reference: a token is drawn first and checked afterwards. The best score of all is the answer if
top-k, top-p and min-p keep its token, which depends on the tokens before it alone; if not, the best of those
before it is next. So no row is sorted, and only what reaches a bound found on the way is looked at again.
Sums and noise are float32 with known errors; where a decision is closer than these, float64 makes it anew, so
tokens equal the reference's. One difference remains: a float64 sum that equals top_p to the last bits may
round to the other side, because it is added in another order. Needs Triton. Loses to the reference for no
batch that was measured; rows that keep tens of thousands of tokens pay a pass over them for each one that
top_p drops, and a batch with sequential filters is sorted after all.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from diptych.optimized.kernels.sampling.sampling_adjust import adjust, dense, empty_rows
from diptych.optimized.kernels.sampling.sampling_check import check
from diptych.optimized.kernels.sampling.sampling_greedy import argmax
from diptych.optimized.kernels.sampling.sampling_logprobs import logprobs
from diptych.optimized.kernels.sampling.sampling_pick import Picked, pick
from diptych.optimized.kernels.sampling.sampling_race import race
from diptych.optimized.kernels.sampling.sampling_scan import Scan, scan
from diptych.optimized.kernels.sampling.sampling_small import MAX_VOCAB_SIZE, sample_small
from diptych.shared.interfaces import sampler as contract
from diptych.shared.sampling.logprobs import logits_at, sort_descending
from diptych.shared.sampling.processors import apply_processors
from diptych.shared.types import LogprobsOutput, SampleOutput, SamplingBatchInfo


class Sampler(contract.Sampler):
    def sample(self, logits: torch.Tensor, info: SamplingBatchInfo, positions: torch.Tensor) -> SampleOutput:
        # --8<-- [start:sample-steps]
        info, positions = dense(info), positions.contiguous()
        logits = adjust(logits, info)
        if info.processors:
            logits = empty_rows(logits).copy_(apply_processors(logits, info))
        in_order = sample_jointly if info.is_sequential is None else sample_in_sequence
        return with_asked(in_order(logits, info, positions), logits, info)
        # --8<-- [end:sample-steps]


def sample_jointly(logits: torch.Tensor, info: SamplingBatchInfo, positions: torch.Tensor) -> SampleOutput:
    """Tokens of adjusted logits, with joint filters."""
    if logits.shape[-1] <= MAX_VOCAB_SIZE:
        return sample_small(logits, info, positions)
    if info.is_all_greedy and not info.return_logprob:
        return SampleOutput(argmax(logits))
    next_token_ids, found = draw(logits, info, positions)

    if found is None:
        return SampleOutput(next_token_ids)
    return SampleOutput(next_token_ids, logprobs(logits, info, *found))


def sample_in_sequence(
    logits: torch.Tensor, info: SamplingBatchInfo, positions: torch.Tensor
) -> SampleOutput:
    """`sample_jointly` for a batch with rows of `is_sequential`: without the tokens beyond top_k, joint
    filters do the same. A row without it keeps the bits of its log-probabilities."""
    assert info.is_sequential is not None
    ordered, ids = sort_descending(logits)
    ranks = torch.arange(logits.shape[-1], device=logits.device)
    is_left = (ranks < info.top_ks[:, None]) | ~info.is_sequential[:, None]
    left = empty_rows(logits).scatter_(-1, ids, ordered.masked_fill(~is_left, float("-inf")))
    token_ids = sample_jointly(left, replace(info, return_logprob=False), positions).next_token_ids
    if not info.return_logprob:
        return SampleOutput(token_ids)
    whole = sample_jointly(logits, info, positions)
    assert whole.logprobs is not None
    gaps = gaps_between(logits, info, whole.next_token_ids[:, None], token_ids[:, None])[:, 0]
    return SampleOutput(
        token_ids, whole.logprobs._replace(token_logprobs=whole.logprobs.token_logprobs + gaps)
    )


def with_asked(output: SampleOutput, logits: torch.Tensor, info: SamplingBatchInfo) -> SampleOutput:
    """`output` with the log-probabilities of `asked_ids`. Two tokens' differ by the difference of their
    logits over temperature, so the sampled token's gives the others."""
    if info.asked_ids is None or output.logprobs is None:
        return output
    gaps = gaps_between(logits, info, output.next_token_ids[:, None], info.asked_ids)
    found = output.logprobs
    top_logprobs = torch.cat((found.top_logprobs, found.token_logprobs[:, None] + gaps), dim=1)
    top_ids = torch.cat((found.top_ids, info.asked_ids), dim=1)
    return output._replace(logprobs=LogprobsOutput(found.token_logprobs, top_logprobs, top_ids))


def gaps_between(
    logits: torch.Tensor, info: SamplingBatchInfo, ids: torch.Tensor, other_ids: torch.Tensor
) -> torch.Tensor:
    """The log-probabilities of other_ids [bs, n] less those of ids [bs, 1]."""
    own, others = logits_at(logits, ids), logits_at(logits, other_ids)
    return ((others - own) / info.temperatures[:, None]).masked_fill(others == own, 0.0)


def draw(
    logits: torch.Tensor, info: SamplingBatchInfo, positions: torch.Tensor
) -> tuple[torch.Tensor, tuple[Scan, Picked] | None]:
    """[bs] int64 tokens, and what log-probabilities are computed from, if requested. -1 for bad rows."""
    # --8<-- [start:gumbel-draw]
    if not info.needs_filter and not info.return_logprob:
        return race(logits, info, positions), None
    scanned = scan(logits, info, positions)
    picked = pick(logits, info, positions, scanned)
    if info.needs_filter:
        check(logits, info, positions, scanned, picked)
    return picked.token_ids, (scanned, picked)
    # --8<-- [end:gumbel-draw]
