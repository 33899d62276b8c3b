"""Planted bugs in the sampler: rounding decides what float64 would decide otherwise."""

from __future__ import annotations

from dataclasses import replace

import torch

from diptych.reference.sampler import Sampler
from diptych.shared.sampling.noise import gumbel_noise
from tests.conformance.mutants.mutant import Mutant
from tests.conformance.mutants.sampling import WithOwnSteps, correct_filter_mask
from tests.kernels.sampling_variants import Change, Variant

NEAR_TIES = ("sampler.near_ties",)


def mutant(impl: type) -> Mutant:
    assert impl.__doc__, f"{impl.__name__}: say what goes wrong"
    return Mutant("sampler", impl.__name__, impl, NEAR_TIES)


# The reference


@mutant
class NoiseOfFloat32(WithOwnSteps):
    """Noise is rounded to float32."""

    @staticmethod
    def gumbel_noise(seeds, positions, token_ids):
        return gumbel_noise(seeds, positions, token_ids).float()


@mutant
class SumsOfFloat32(WithOwnSteps):
    """top_p is compared with sums of float32."""

    @staticmethod
    def filter_mask(ordered, info):
        weights = ordered.exp()
        before = weights.cumsum(-1) - weights
        keep = before < info.top_ps[:, None] * weights.sum(-1, keepdim=True)
        return correct_filter_mask(ordered, info) & (keep | (info.top_ps[:, None] >= 1.0))


@mutant
class NanOfTheBiasIsNothing(Sampler):
    """A token whose logit and bias are infinities of opposite sign is passed over."""

    def sample(self, logits, info, positions):
        if info.logit_bias is not None:
            is_made = (logits + info.logit_bias).isnan() & ~logits.isnan()
            logits = torch.where(is_made, -torch.inf, logits)
            info = replace(info, logit_bias=torch.where(is_made, 0.0, info.logit_bias))
        return super().sample(logits, info, positions)


# Kernels


@mutant
class AdjustingHidesTheNanOfTheBias(Variant):
    """The bias is not added to tokens of -inf."""

    changes = (
        Change(
            "adjust",
            "x += tl.load(bias_ptr + at, mask=inside, other=0.0)",
            'x = tl.where(x == float("-inf"), x, x + tl.load(bias_ptr + at, mask=inside, other=0.0))',
        ),
    )


@mutant
class SmallScoresOfFloat32(Variant):
    """Scores of small vocabularies are float32."""

    changes = (
        Change(
            "small",
            "s.to(tl.float64) + gumbel64(state[:, None], ids), neg_inf",
            "s + gumbel64(state[:, None], ids).to(tl.float32), neg_inf",
        ),
    )


@mutant
class ScoresWithoutAMargin(Variant):
    """Scores of float32 are never computed again in float64."""

    changes = (Change("noise", "MARGIN = tl.constexpr(6e-5)", "MARGIN = tl.constexpr(0.0)"),)


@mutant
class ColumnsWithoutAMargin(Variant):
    """A near tie between two columns of a slice is not seen."""

    changes = (Change("scan", "(best <= top * (1.0 + MARGIN))", "(best <= top)"),)


@mutant
class ATileColumnWithoutAMargin(Variant):
    """A near tie within a column of a slice is not seen."""

    changes = (Change("scan", "(times <= top * (1.0 + MARGIN))", "(times <= top)"),)


@mutant
class LikelyTokensWithoutAMargin(Variant):
    """A near tie of tokens with little noise is not seen."""

    changes = (
        Change(
            "scan",
            "near = (best >= top - MARGIN).to(tl.int32) + (second >= top - MARGIN).to(tl.int32)",
            "near = (best >= top).to(tl.int32)",
        ),
    )


@mutant
class SlicesWithoutAMargin(Variant):
    """A slice with a near tie is not read again where another slice's best score is as good."""

    changes = (
        Change(
            "pick",
            "is_close = scores >= tl.max(scores, axis=0) - MARGIN",
            "is_close = scores >= tl.max(scores, axis=0)",
        ),
    )


@mutant
class WalkWithoutAMargin(Variant):
    """A near tie behind a token that the filters drop is not seen."""

    changes = (
        Change(
            "walk",
            "near = (best >= top - MARGIN).to(tl.int32) + (second >= top - MARGIN).to(tl.int32)",
            "near = (best >= top).to(tl.int32)",
        ),
    )


@mutant
class RaceWithoutSlack(Variant):
    """Parts whose bound is behind the best time by no more than a rounding are left out."""

    changes = (Change("race", "- scaled + slack", "- scaled"),)


@mutant
class RaceForgetsTheHeight(Variant):
    """The slack does not grow with the largest logit, which rounds all bounds."""

    changes = (Change("race", "SLACK + tl.abs(scaled) * ROUNDING", "SLACK"),)


@mutant
class GatheredTopPWithoutAMargin(Variant):
    """In gathered rows top_p is compared with a float32 total, however near."""

    changes = (Change("pick", "slack = EPSILON", "slack = -1.0"),)


@mutant
class TopPWithoutAMargin(Variant):
    """Sums of float32 are never computed again in float64."""

    changes = (Change("walk", "EPSILON = tl.constexpr(2e-5)", "EPSILON = tl.constexpr(0.0)"),)


@mutant
class FloorWithoutRoom(Variant):
    """Tokens just above min_p are left out by a logarithm of float32."""

    changes = (Change("pick", "tl.log(min_p) - 1e-3", "tl.log(min_p) + 2e-7"),)


@mutant
class FreeAtTheFloor(Variant):
    """A token just below min_p counts as kept."""

    changes = (Change("pick", "(best >= floor + 2e-3)", "(best >= floor)"),)
