"""Expert parallelism: a rank has some of the experts of each layer, as a whole or, with more ranks than
parts, a piece of each. All else is divided as with tensor parallelism alone, and all ranks have all
tokens."""

from __future__ import annotations

import torch

from diptych.shared.interfaces.expert_dispatch import ExpertDispatch, Placement
from diptych.shared.interfaces.moe import FusedExperts, TopKOutput


class ExpertParallel:
    """The experts of one layer, on all ranks."""

    def __init__(self, dispatch: ExpertDispatch, placement: Placement) -> None:
        self.dispatch = dispatch
        self.placement = placement

    def run(self, x: torch.Tensor, topk: TopKOutput, experts: FusedExperts) -> torch.Tensor:
        """This rank's summand of the outputs for tokens x. topk: their logical experts; experts: those of
        this rank."""
        return self.dispatch.run_replicated(x, topk, experts, self.placement)
