"""Planted bugs in the sampler: greedy rows, bad rows, log-probabilities."""

from __future__ import annotations

from dataclasses import replace

import torch

from diptych.reference.sampler import NEG_INF, Sampler, apply_masks, apply_penalties
from diptych.shared.sampling.logprobs import logprobs_of, sort_descending
from diptych.shared.types import SampleOutput
from tests.conformance.mutants.mutant import mutant_of
from tests.conformance.mutants.sampling import WithOwnSteps

# Greedy, temperature


@mutant_of("sampler")
class GreedyOfProbabilities(Sampler):
    """Greedy rows take the likeliest token after softmax, which rounds."""

    def sample(self, logits, info, positions):
        return super().sample(logits.softmax(-1) if info.is_all_greedy else logits, info, positions)


@mutant_of("sampler")
class GreedyTakesTheLastOfTies(Sampler):
    """Of equal logits the highest id wins."""

    def sample(self, logits, info, positions):
        ids, logprobs = super().sample(logits, info, positions)
        is_largest = logits == logits.amax(dim=-1, keepdim=True)
        for i, token_id in enumerate(ids.tolist()):
            if info.is_greedy[i] and token_id >= 0 and is_largest[i, token_id]:
                ids[i] = is_largest[i].nonzero().max()
        return SampleOutput(ids, logprobs)


@mutant_of("sampler")
class DividesBeforeShifting(WithOwnSteps):
    """logits / temperature overflows for a small temperature."""

    @staticmethod
    def scale(logits, max_logits, temperatures):
        scaled = logits / temperatures[:, None]
        return (scaled - scaled.amax(-1, keepdim=True)).masked_fill(logits == NEG_INF, NEG_INF)


# Bad rows


@mutant_of("sampler")
class NanSpoilsTheBatch(Sampler):
    """One row with a NaN gives every row -1."""

    def sample(self, logits, info, positions):
        output = super().sample(logits, info, positions)
        if logits.isnan().any():
            return output._replace(next_token_ids=torch.full_like(output.next_token_ids, -1))
        return output


@mutant_of("sampler")
class NanBehindAMask(Sampler):
    """NaN is looked for after masking: a banned one is missed."""

    def sample(self, logits, info, positions):
        masked = apply_masks(logits, info)
        return super().sample(masked, info, positions)


@mutant_of("sampler")
class MasksInPlace(Sampler):
    """The caller's logits are overwritten."""

    def sample(self, logits, info, positions):
        logits.copy_(apply_masks(apply_penalties(logits, info), info))
        return super().sample(logits, replace(info, output_counts=None), positions)


# Log-probabilities


@mutant_of("sampler")
class LogprobsBeforePenalties(Sampler):
    """They are those of the raw logits."""

    def sample(self, logits, info, positions):
        output = super().sample(logits, info, positions)
        if output.logprobs is None:
            return output
        raw = logits / info.temperatures[:, None]
        return output._replace(logprobs=logprobs_of(raw, output.next_token_ids, info.num_top_logprobs))


@mutant_of("sampler")
class LogprobsAfterTheFilter(Sampler):
    """They are renormalised over what top-k leaves."""

    def sample(self, logits, info, positions):
        output = super().sample(logits, info, positions)
        if output.logprobs is None or not info.needs_filter:
            return output
        scaled = logits / info.temperatures[:, None]
        least = sort_descending(scaled)[0].gather(1, info.top_ks[:, None] - 1)
        left = torch.where((scaled >= least) | info.is_greedy[:, None], scaled, NEG_INF)
        return output._replace(logprobs=logprobs_of(left, output.next_token_ids, info.num_top_logprobs))


@mutant_of("sampler")
class AskedLogprobsOfTheFirstRow(Sampler):
    """All rows get those of the tokens that the first row asks for."""

    def sample(self, logits, info, positions):
        if info.asked_ids is not None:
            info = replace(info, asked_ids=info.asked_ids[:1].expand_as(info.asked_ids))
        return super().sample(logits, info, positions)


@mutant_of("sampler")
class TopLogprobsHideBannedTokens(WithOwnSteps):
    """Banned tokens come among the best with the log-probability that they would have had."""

    @staticmethod
    def logprobs_of(logits, token_ids, num_top, asked_ids=None):
        found = logprobs_of(logits, token_ids, num_top)
        return found._replace(top_logprobs=found.top_logprobs.nan_to_num(neginf=-30.0))


@mutant_of("sampler")
class TiesOfTopLogprobs(WithOwnSteps):
    """Of equal alternatives the highest id comes first."""

    @staticmethod
    def logprobs_of(logits, token_ids, num_top, asked_ids=None):
        last = logits.shape[-1] - 1
        found = logprobs_of(logits.flip(-1), torch.where(token_ids < 0, token_ids, last - token_ids), num_top)
        return found._replace(top_ids=last - found.top_ids)


@mutant_of("sampler")
class LogprobOfTheLikeliest(WithOwnSteps):
    """The token's log-probability is that of the best one, drawn or not."""

    @staticmethod
    def logprobs_of(logits, token_ids, num_top, asked_ids=None):
        return logprobs_of(logits, torch.where(token_ids < 0, token_ids, logits.argmax(-1)), num_top)
