"""Planted bugs in the sampler: filters, noise, penalties, masks."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import torch

import diptych.reference.sampler as steps
from diptych.reference.sampler import NEG_INF, Sampler
from diptych.shared.sampling.noise import gumbel_noise
from diptych.shared.types import SampleOutput, SamplingBatchInfo
from tests.conformance.mutants.mutant import bugs_in, mutant_of

# Bound here: within a mutant the names of `steps` mean the mutant's own.
correct_apply_penalties, correct_apply_masks = steps.apply_penalties, steps.apply_masks
correct_filter_mask = steps.filter_mask

REPLACEABLE = ("apply_penalties", "apply_masks", "scale", "filter_mask", "gumbel_noise", "logprobs_of")


class WithOwnSteps(Sampler):
    """The reference's sampler, of whose steps a subclass defines some anew, as static methods."""

    def sample(self, logits: torch.Tensor, info: SamplingBatchInfo, positions: torch.Tensor) -> SampleOutput:
        own = {name: getattr(self, name) for name in REPLACEABLE if hasattr(self, name)}
        with patch.multiple(steps, **own):
            return super().sample(logits, info, positions)


# Filters


def top_p_of(left, ordered, info):
    """top_p as a share of the weights that are left."""
    share = left.sum(-1) / ordered.double().exp().sum(-1)
    return replace(info, top_ps=torch.where(info.top_ps < 1.0, info.top_ps * share, 1.0))


@mutant_of("sampler")
class TopPDropsTheCrossingToken(WithOwnSteps):
    """A token is kept only if the sum with it stays within top_p."""

    @staticmethod
    def filter_mask(ordered, info):
        weights = ordered.double().exp()
        keep = weights.cumsum(-1) <= info.top_ps[:, None] * weights.sum(-1, keepdim=True)
        keep[:, 0] = True
        return correct_filter_mask(ordered, replace(info, top_ps=torch.ones_like(info.top_ps))) & keep


@mutant_of("sampler")
class TopPStopsOneLate(WithOwnSteps):
    """The token after a sum of exactly top_p is kept as well: <= for <."""

    @staticmethod
    def filter_mask(ordered, info):
        weights = ordered.double().exp()
        keep = weights.cumsum(-1) - weights <= info.top_ps[:, None] * weights.sum(-1, keepdim=True)
        return correct_filter_mask(ordered, replace(info, top_ps=torch.ones_like(info.top_ps))) & keep


@mutant_of("sampler")
class TopPAfterMinP(WithOwnSteps):
    """top-p looks at what min-p left, renormalised."""

    @staticmethod
    def filter_mask(ordered, info):
        weights = ordered.double().exp()
        left = weights.masked_fill(weights < info.min_ps[:, None], 0.0)
        return correct_filter_mask(ordered, top_p_of(left, ordered, info))


@mutant_of("sampler")
class FiltersOfTheFirstRow(WithOwnSteps):
    """One top_k for the whole batch."""

    @staticmethod
    def filter_mask(ordered, info):
        return correct_filter_mask(ordered, replace(info, top_ks=info.top_ks[:1].expand_as(info.top_ks)))


@mutant_of("sampler")
class SequentialFiltersAreJoint(WithOwnSteps):
    """filter_order=sequential has no effect."""

    @staticmethod
    def filter_mask(ordered, info):
        return correct_filter_mask(ordered, replace(info, is_sequential=None))


@mutant_of("sampler")
class EveryRowIsSequential(WithOwnSteps):
    """One sequential row makes top_p a share of top_k in the whole batch."""

    @staticmethod
    def filter_mask(ordered, info):
        if info.is_sequential is not None:
            info = replace(info, is_sequential=torch.ones_like(info.is_sequential))
        return correct_filter_mask(ordered, info)


# Noise


@mutant_of("sampler")
class NoiseByRow(WithOwnSteps):
    """The place in the batch takes part in the noise."""

    @staticmethod
    def gumbel_noise(seeds, positions, token_ids):
        return gumbel_noise(
            seeds + torch.arange(len(seeds), device=seeds.device)[:, None], positions, token_ids
        )


@mutant_of("sampler")
class NoiseWithoutPosition(WithOwnSteps):
    """Every token of a request is drawn with the same noise."""

    @staticmethod
    def gumbel_noise(seeds, positions, token_ids):
        return gumbel_noise(seeds, torch.zeros_like(positions), token_ids)


@mutant_of("sampler")
class HalfOfTheSeed(WithOwnSteps):
    """Only 32 bits of a seed count."""

    @staticmethod
    def gumbel_noise(seeds, positions, token_ids):
        return gumbel_noise(seeds & 0xFFFFFFFF, positions, token_ids)


@mutant_of("sampler")
class NoiseOfAGenerator(WithOwnSteps):
    """Noise comes from a stream of random numbers: the same request draws something else the next time."""

    @staticmethod
    def gumbel_noise(seeds, positions, token_ids):
        shape = torch.broadcast_shapes(seeds.shape, token_ids.shape)
        return -torch.log(torch.empty(shape, device=token_ids.device).exponential_()).double()


# Penalties, masks, bias


@mutant_of("sampler")
class RepetitionPenaltyOfNegativeLogits(WithOwnSteps):
    """A negative logit is divided too, which makes its token likelier."""

    @staticmethod
    def apply_penalties(logits, info):
        if info.repetition_penalties is not None:
            seen = (info.output_counts > 0) | info.prompt_mask
            logits = torch.where(seen, logits / info.repetition_penalties[:, None], logits)
        return correct_apply_penalties(logits, replace(info, repetition_penalties=None))


@mutant_of("sampler")
class PenaltiesCountThePrompt(WithOwnSteps):
    """frequency and presence penalties take the prompt for output."""

    @staticmethod
    def apply_penalties(logits, info):
        if info.prompt_mask is not None:
            logits = correct_apply_penalties(
                logits, replace(info, frequency_penalties=None, presence_penalties=None)
            )
            counts = info.output_counts + info.prompt_mask.int()
            info = replace(info, output_counts=counts, repetition_penalties=None)
        return correct_apply_penalties(logits, info)


@mutant_of("sampler")
class FrequencyIsPresence(WithOwnSteps):
    """The frequency penalty is subtracted once, however often a token came."""

    @staticmethod
    def apply_penalties(logits, info):
        if info.output_counts is not None:
            info = replace(info, output_counts=info.output_counts.clamp(max=1))
        return correct_apply_penalties(logits, info)


@mutant_of("sampler")
class ABiasLiftsABan(WithOwnSteps):
    """A banned token with a bias is allowed again."""

    @staticmethod
    def apply_masks(logits, info):
        masked = correct_apply_masks(logits, info)
        return masked if info.logit_bias is None else torch.where(info.logit_bias != 0, logits, masked)


@mutant_of("sampler")
class ABanIsALargeNumber(WithOwnSteps):
    """Banned tokens get -10,000: unlikely, not impossible."""

    @staticmethod
    def apply_masks(logits, info):
        masked = correct_apply_masks(logits, info)
        return torch.where((masked == NEG_INF) & (logits != NEG_INF), -1e4, masked)


@mutant_of("sampler")
class VocabMaskHighBitFirst(WithOwnSteps):
    """The bits of vocab_mask are read from the other end of each word."""

    @staticmethod
    def apply_masks(logits, info):
        if info.vocab_mask is not None:
            shifts = torch.arange(31, -1, -1, dtype=torch.int32, device=logits.device)
            bits = ((info.vocab_mask[:, :, None] >> shifts) & 1).flatten(1)[:, : logits.shape[1]]
            logits = logits.masked_fill(bits == 0, NEG_INF)
        return correct_apply_masks(logits, replace(info, vocab_mask=None))


@mutant_of("sampler")
class GreedyIsArgmaxOfTheRawLogits(Sampler):
    """An all-greedy batch takes a short cut past penalties, masks and bias."""

    def sample(self, logits, info, positions):
        if info.is_all_greedy and not info.return_logprob:
            return SampleOutput(logits.argmax(-1).masked_fill(logits.isnan().any(-1), -1))
        return super().sample(logits, info, positions)


bug = bugs_in("sampler", "reference.sampler:Sampler", folder="reference.")
# fmt: off
bug("NearlyGreedyIsGreedy", "A temperature near zero takes the first of the best.",
    ("sampler", "torch.where(info.is_greedy, next_token_ids, drawn)",
     "torch.where(info.is_greedy | (info.temperatures < 1e-3), next_token_ids, drawn)"))
bug("ImpossibleIsUnlikely", "A logit of -inf counts as -6.",
    ("sampler", "logits = logits.float()\n", "logits = logits.float().clamp(min=-6.0)\n"))
bug("RefusesEmptyBatches", "A batch without rows is refused.",
    ("sampler", "logits = logits.float()\n", "logits = logits.float()\n        assert len(logits)\n"))
bug("NoiseOfTwoPositions", "Two consecutive positions have the same noise.",
    ("sampler", "info.seeds[:, None], positions[:, None],", "info.seeds[:, None], positions[:, None] // 2,"))
bug("GreedyRowsTakeTheLastOfTies", "Greedy rows take the highest id of equal logits.",
    ("sampler", "= logits.argmax(dim=-1)\n", "= logits.shape[-1] - 1 - logits.flip(-1).argmax(dim=-1)\n"))
bug("AskingMovesThePosition", "Rows that ask for log-probabilities draw with the noise of the next token.",
    ("sampler", "logits = logits.float()\n",
     "logits, positions = logits.float(), positions + int(info.return_logprob)\n"))
bug("NoiseOfTheRow", "The first row of a batch draws with the noise of the next position.",
    ("sampler", "    noise = gumbel_noise(info.seeds[:, None], positions[:, None], token_ids)\n",
     "    rows = torch.arange(len(logits), device=logits.device)[:, None]\n"
     "    noise = gumbel_noise(info.seeds[:, None], positions[:, None] + (rows > 0).long(), token_ids)\n"))
bug("InfinityIsNaN", "A maximum of +inf minus itself is NaN.",
    ("sampler", ".masked_fill(logits == max_logits, 0.0)", ""))
