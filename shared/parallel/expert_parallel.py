"""Expert parallelism: a rank has some of the experts of each layer, as a whole or, with more ranks than
parts, a piece of each. All else is divided as with tensor parallelism alone, and all ranks have all
tokens."""

from __future__ import annotations

import torch

from diptych.shared.interfaces.expert_dispatch import ExpertDispatch, Placement
from diptych.shared.interfaces.moe import FusedExperts, TopKOutput


class ExpertsLost(RuntimeError):
    """The experts of a part are lost. All ranks raise it in the same layer."""

    def __init__(self, part: int) -> None:
        super().__init__(f"the experts of part {part} are lost")
        self.part = part


class ExpertParallel:
    """The experts of one layer, on all ranks."""

    lost_part: int | None = None  # found in the next call

    def __init__(self, dispatch: ExpertDispatch, placement: Placement) -> None:
        self.dispatch = dispatch
        self.placement = placement

    def run(self, x: torch.Tensor, topk: TopKOutput, experts: FusedExperts) -> torch.Tensor:
        """This rank's summand of the outputs for tokens x. topk: their logical experts; experts: those of
        this rank."""
        if self.lost_part is not None:
            lost, self.lost_part = self.lost_part, None
            raise ExpertsLost(lost)
        return self.dispatch.run_replicated(x, topk, experts, self.placement)
