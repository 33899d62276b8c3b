"""Contract of expert dispatch: tokens go to the ranks that have their experts, and outputs come back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

import torch
import torch.nn.functional as F

from diptych.shared.interfaces.collectives import Collectives
from diptych.shared.interfaces.moe import FusedExperts, TopKOutput


class Placement(Protocol):
    """Where the experts of one layer are, on the device of the model (`diptych.shared.parallel.expert_map`).
    The tensors stay the same ones, so CUDA graphs may read them. All are int64."""

    logical_to_physical: torch.Tensor
    """[num_logical, most replicas], padded with -1."""
    num_replicas: torch.Tensor
    """[num_logical]"""
    load: torch.Tensor
    """[num_logical]: the tokens that chose each expert, which `choose` counts."""

    def choose(self, topk_ids: torch.Tensor, first: int = 0) -> torch.Tensor:
        """topk_ids [num_tokens, k], logical -> physical, int32. -1 stays -1. `first`: where replicas begin to
        take turns, which ranks with tokens of their own choose apart."""


class ExpertDispatch(ABC):
    """Runs the experts of a layer on the ranks of a group, which are in `ep` parts of successive ranks. Part
    p has the physical experts [p * n, (p + 1) * n). Each rank of a part has an equal part of the intermediate
    size of each of them: the outputs of a part's ranks are summands.
    """

    ranks: Collectives

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

    # --8<-- [start:share-the-rows]
    def run_replicated(
        self, x: torch.Tensor, topk: TopKOutput, experts: FusedExperts, placement: Placement
    ) -> torch.Tensor:
        """Do what `run` does for tokens of all ranks, as in tensor parallelism. topk: their
        *logical* experts; `placement.choose` returns the physical ones. Returns this
        rank's summand: the caller adds over ranks. Here each rank runs some tokens."""
        num_tokens, ids = x.shape[0], placement.choose(topk.topk_ids)
        num_rows = -(-num_tokens // self.ranks.size)
        start, end = (min((self.ranks.rank + i) * num_rows, num_tokens) for i in (0, 1))
        own = TopKOutput(topk.topk_weights[start:end], ids[start:end])
        return F.pad(self.run(x[start:end], own, experts), (0, 0, start, num_tokens - end))

    # --8<-- [end:share-the-rows]
