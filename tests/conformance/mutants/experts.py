"""Planted bugs in routing, in the experts, and in the layer around them."""

from __future__ import annotations

from dataclasses import replace

import torch

from diptych.reference.layers import SiluAndMul
from diptych.reference.moe import FusedExperts, MoE, TopK
from diptych.shared.interfaces import TopKOutput
from diptych.shared.modeling.moe_modules import ClampedSwiGLU
from tests.conformance.mutants.mutant import mutant_of, plant
from tests.planted import Bug


def part_of_moe(impl: type) -> Bug:
    """A TopK or FusedExperts that every MoE gets in place of its own."""

    class WithPart(MoE):
        def __init__(self, config, hidden_size: int) -> None:
            super().__init__(config, hidden_size)
            if issubclass(impl, TopK):
                self.topk = impl(config)
            else:
                sizes = config.num_experts, hidden_size, config.intermediate_size
                self.experts = impl(*sizes, config.bias, config.swiglu_limit, config.hidden_act)

    return plant("moe", WithPart, impl)


@part_of_moe
class BiasInTheWeights(TopK):
    """Experts are weighted by what they were chosen by."""

    def __call__(self, router_logits, correction_bias=None):
        weights, ids = super().__call__(router_logits, correction_bias)
        if correction_bias is not None:
            weights = weights + correction_bias[ids.long()]
        return TopKOutput(weights, ids)


class ClampedOnBothSides(ClampedSwiGLU):
    def forward(self, gate, up):
        return super().forward(gate.clamp(min=-self.limit), up)


@part_of_moe
class ClampsTheGateFromBelow(FusedExperts):
    """The gate is clamped on both sides, as up is."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        if isinstance(self.act_fn, ClampedSwiGLU):
            self.act_fn = ClampedOnBothSides(self.act_fn.limit)


@part_of_moe
class SiLUForGELU(FusedExperts):
    """The activation is SwiGLU, whatever hidden_act is."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        if self.hidden_act == "gelu_tanh":
            self.act_fn = SiluAndMul()


@mutant_of("moe")
class WeightsInputAndOutput(MoE):
    """Llama-4's weight multiplies the input, and the result again."""

    def __init__(self, config, hidden_size):
        super().__init__(config, hidden_size)
        if self.weight_on_input:
            topk = self.topk
            self.experts.register_forward_hook(lambda _, args, y: y * self.last.to(y.dtype))

            def remember(logits, bias=None):
                found = topk(logits, bias)
                self.last = found.topk_weights
                return found

            self.topk = remember


@part_of_moe
class NeverRenormalises(TopK):
    """norm_topk_prob is not looked at."""

    def __init__(self, config):
        super().__init__(replace(config, norm_topk_prob=False))


@part_of_moe
class HighestIdOfEquals(TopK):
    """Of equal experts the last is chosen."""

    def __call__(self, router_logits, correction_bias=None):
        bias = None if correction_bias is None else correction_bias.flip(-1)
        weights, ids = super().__call__(router_logits.flip(-1), bias)
        return TopKOutput(weights, self.config.num_experts - 1 - ids)


@part_of_moe
class GroupIsItsBestExpert(TopK):
    """A group's score is its largest, also where it is the sum of two."""

    def _mask_groups(self, choice):
        routing, self.config = self.config, replace(self.config, routing="grouped")
        masked = super()._mask_groups(choice)
        self.config = routing
        return masked


@part_of_moe
class GroupsThatAreOutGetZero(TopK):
    """Experts outside the best groups count 0: more than a negative score."""

    def _mask_groups(self, choice):
        masked = super()._mask_groups(choice)
        return masked.masked_fill(masked == float("-inf"), 0.0)


@part_of_moe
class RoutesInHalf(TopK):
    """Scores are computed in the logits' type."""

    def __call__(self, router_logits, correction_bias=None):
        weights, ids = super().__call__(router_logits, correction_bias)
        return TopKOutput(weights.to(router_logits.dtype).float(), ids)


@part_of_moe
class ExpertZeroIsPadding(FusedExperts):
    """The first expert is treated as padding."""

    def forward(self, x, topk):
        return super().forward(x, topk._replace(topk_ids=topk.topk_ids.where(topk.topk_ids > 0, -1)))


@part_of_moe
class PaddedRowsUnwritten(FusedExperts):
    """Rows of tokens without an expert hold whatever memory held."""

    def forward(self, x, topk):
        y = torch.empty_like(x)
        has_expert = (topk.topk_ids >= 0).any(-1)
        y[has_expert] = super().forward(x, topk)[has_expert]
        return y


@part_of_moe
class RouterWeightsInHalf(FusedExperts):
    """Weights are rounded to the input's type before they multiply."""

    def forward(self, x, topk):
        return super().forward(x, topk._replace(topk_weights=topk.topk_weights.to(x.dtype).float()))


@part_of_moe
class LimitedCapacity(FusedExperts):
    """An expert takes no more than 64 tokens; the rest is dropped."""

    def forward(self, x, topk):
        ids = topk.topk_ids.clone()
        for expert_id in range(len(self.w13)):
            token_rows, slots = (ids == expert_id).nonzero(as_tuple=True)
            ids[token_rows[64:], slots[64:]] = -1
        return super().forward(x, topk._replace(topk_ids=ids))


@part_of_moe
class AddsIntoItsInput(FusedExperts):
    """The result is written over x."""

    def forward(self, x, topk):
        return x.copy_(super().forward(x, topk))


@mutant_of("moe")
class SharedExpertsUngated(MoE):
    """The shared experts' gate is not looked at."""

    def forward(self, x):
        gate, self.shared_expert_gate = self.shared_expert_gate, None
        y = super().forward(x)
        self.shared_expert_gate = gate
        return y


@mutant_of("moe")
class BiasInHalf(MoE):
    """The correction bias has the model's type, in which close experts are equal."""

    def __init__(self, config, hidden_size):
        super().__init__(config, hidden_size)
        if self.correction_bias is not None:
            self.correction_bias.data = self.correction_bias.data.bfloat16()
