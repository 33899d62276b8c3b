"""Planted bugs in the dispatch of tokens to experts on other ranks."""

from __future__ import annotations

import torch

from diptych.optimized.parallel.expert_dispatch import AllGather as OptimizedAllGather
from diptych.reference.parallel.expert_all_to_all import AllToAll
from diptych.reference.parallel.expert_dispatch import AllGather
from diptych.shared.interfaces import TopKOutput
from tests.conformance.mutants.mutant import mutant_of


@mutant_of("expert_dispatch")
class ForeignExpertsToo(AllGather):
    """A rank takes an id of another rank's expert for one of its own."""

    def run(self, x, topk, experts):
        num_local = experts.w13.shape[0]
        ids = torch.where(topk.topk_ids >= 0, topk.topk_ids % num_local, -1)
        self.part = 0
        return super().run(x, TopKOutput(topk.topk_weights, ids), experts)


@mutant_of("expert_dispatch")
class EmptyRanksStayAway(AllGather):
    """A rank without tokens returns at once; the others wait for it."""

    def run(self, x, topk, experts):
        return x.clone() if len(x) == 0 else super().run(x, topk, experts)


@mutant_of("expert_dispatch")
class PaddingIsExpertZero(AllToAll):
    """Ids of -1 are sent to expert 0."""

    def run(self, x, topk, experts):
        return super().run(x, TopKOutput(topk.topk_weights, topk.topk_ids.clamp(min=0)), experts)


@mutant_of("expert_dispatch")
class PaddingWeighsNothing(AllGather):
    """Ids of -1 run on expert 0 with the weight 0."""

    def run(self, x, topk, experts):
        weights = torch.where(topk.topk_ids < 0, 0.0, topk.topk_weights)
        return super().run(x, TopKOutput(weights, topk.topk_ids.clamp(min=0)), experts)


@mutant_of("expert_dispatch")
class OnePieceOfAnExpert(AllToAll):
    """A token goes to the first rank of a part alone, which has a piece of the expert."""

    def run(self, x, topk, experts):
        size, self.ranks_per_part = self.ranks_per_part, 1
        ids, num_local = topk.topk_ids, experts.w13.shape[0]
        part = ids.div(num_local, rounding_mode="floor")
        spread = torch.where(ids >= 0, part * size * num_local + ids % num_local, -1)
        y = super().run(x, TopKOutput(topk.topk_weights, spread), experts)
        self.ranks_per_part = size
        return y


@mutant_of("expert_dispatch")
class OutputsAsTheyCome(AllToAll):
    """Outputs come back sorted by rank, and are taken for those of the tokens in their order."""

    def run(self, x, topk, experts):
        target = topk.topk_ids.max(-1).values.argsort(stable=True)
        y = super().run(x, topk, experts)
        return y[target]


@mutant_of("expert_dispatch")
class WeighsInPlace(AllToAll):
    """The weights of padding are zeroed in the caller's tensor."""

    def run(self, x, topk, experts):
        topk.topk_weights[0] = 0.0
        return super().run(x, topk, experts)


@mutant_of("expert_dispatch")
class SharesOfWrongRanks(AllGather):
    """Each rank gives its outputs as those of the first tokens."""

    def run_replicated(self, x, topk, experts, placement):
        y = super().run_replicated(x, topk, experts, placement)
        share = -(-len(x) // self.ranks.size)
        return torch.roll(y, -self.ranks.rank * share, 0)


@mutant_of("expert_dispatch")
class EveryRankComputesAll(OptimizedAllGather):
    """Each rank takes every expert for one of its own."""

    def run_replicated(self, x, topk, experts, placement):
        ids = placement.choose(topk.topk_ids)
        return experts(x, TopKOutput(topk.topk_weights, torch.where(ids < 0, ids, ids % len(experts.w13))))
