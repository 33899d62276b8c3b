"""Planted bugs in the sampler: rounding decides what float64 would decide otherwise."""

from __future__ import annotations

from dataclasses import replace

import torch

from diptych.reference.sampler import Sampler
from diptych.shared.sampling.noise import gumbel_noise
from tests.conformance.mutants.mutant import mutant_of
from tests.conformance.mutants.optimized_sampling import bug
from tests.conformance.mutants.sampling import WithOwnSteps, correct_filter_mask

mutant = mutant_of("sampler")

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


# fmt: off

# Kernels
bug("AdjustingHidesTheNanOfTheBias", "The bias is not added to tokens of -inf.",
    ("adjust", "x += tl.load(bias_ptr + at, mask=inside, other=0.0)",
     'x = tl.where(x == float("-inf"), x, x + tl.load(bias_ptr + at, mask=inside, other=0.0))'))
