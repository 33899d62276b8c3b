"""Contract of expert dispatch: tokens go to the ranks that have their experts, and outputs come back."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from shared.interfaces.collectives import Collectives
from shared.interfaces.moe import FusedExperts, TopKOutput


class ExpertDispatch(ABC):
    """Runs the experts of a layer on the ranks of a group, which are in `ep` parts of successive ranks. Part
    p has the physical experts [p * n, (p + 1) * n). Each rank of a part has an equal part of the intermediate
    size of each of them: the outputs of a part's ranks are summands.
    """

    @abstractmethod
    def __init__(self, ranks: Collectives, ep: int) -> None:
        """ranks.size is a multiple of ep."""

    @abstractmethod
    def run(self, x: torch.Tensor, topk: TopKOutput, experts: FusedExperts) -> torch.Tensor:
        """x [num_tokens, hidden], the tokens of this rank: any number, which may differ by rank and be 0.
        topk: the *physical* experts of these tokens, and their weights; an id of -1 contributes nothing.
        experts: this rank's n physical experts, numbered from 0.

        Returns the sum of weight * output over the experts of each token, as `FusedExperts` defines it, in
        the shape and dtype of x. All ranks of the group call it. No argument is modified."""
