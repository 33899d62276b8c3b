"""The sampler without sorting: one read of the logits, then only the tokens that can still win.

Differs from reference: a token is drawn first and checked afterwards. The best score of all is the answer if
top-k, top-p and min-p keep its token, which depends on the tokens before it alone; if not, the best of those
before it is next. So no row is sorted, and only what reaches a bound found on the way is looked at again.
Sums and noise are float32 with known errors; where a decision is closer than these, float64 makes it anew, so
tokens equal the reference's. One difference remains: a float64 sum that equals top_p to the last bits may
round to the other side, because it is added in another order. Needs Triton. Loses to the reference for no
batch that was measured; rows that keep tens of thousands of tokens pay a pass over them for each one that
top_p drops.
"""

from __future__ import annotations

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
from diptych.shared.sampling.logprobs import logits_at
from diptych.shared.sampling.processors import apply_processors
from diptych.shared.types import LogprobsOutput, SampleOutput, SamplingBatchInfo


class Sampler(contract.Sampler):
    def sample(self, logits: torch.Tensor, info: SamplingBatchInfo, positions: torch.Tensor) -> SampleOutput:
        # --8<-- [start:sample-steps]
        info, positions = dense(info), positions.contiguous()
        logits = adjust(logits, info)
        if info.processors:
            logits = empty_rows(logits).copy_(apply_processors(logits, info))
        if logits.shape[-1] <= MAX_VOCAB_SIZE:
            return with_asked(sample_small(logits, info, positions), logits, info)
        if info.is_all_greedy and not info.return_logprob:
            return SampleOutput(argmax(logits))
        next_token_ids, found = draw(logits, info, positions)
        # --8<-- [end:sample-steps]

        if found is None:
            return SampleOutput(next_token_ids)
        return with_asked(SampleOutput(next_token_ids, logprobs(logits, info, *found)), logits, info)


def with_asked(output: SampleOutput, logits: torch.Tensor, info: SamplingBatchInfo) -> SampleOutput:
    """`output` with the log-probabilities of `asked_ids`. Two tokens' differ by the difference of their
    logits over temperature, so the sampled token's gives the others."""
    if info.asked_ids is None or output.logprobs is None:
        return output
    own, asked = logits_at(logits, output.next_token_ids[:, None]), logits_at(logits, info.asked_ids)
    gaps = ((asked - own) / info.temperatures[:, None]).masked_fill(asked == own, 0.0)
    found = output.logprobs
    top_logprobs = torch.cat((found.top_logprobs, found.token_logprobs[:, None] + gaps), dim=1)
    top_ids = torch.cat((found.top_ids, info.asked_ids), dim=1)
    return output._replace(logprobs=LogprobsOutput(found.token_logprobs, top_logprobs, top_ids))


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
