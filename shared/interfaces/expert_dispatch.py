"""Contract of expert dispatch: tokens go to the ranks that have their experts, and outputs come back."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F

from shared.interfaces.collectives import Collectives
from shared.interfaces.expert_balancer import ExpertMap
from shared.interfaces.moe import FusedExperts, TopKOutput


class Placement:
    """Where the experts of one layer are, on the device of the model. The tensors stay the same ones, so CUDA
    graphs may read them: `use` overwrites them. `logical_to_physical` [num_logical, most], padded with -1;
    `num_replicas` [num_logical]; `load` [num_logical]: the tokens that chose each expert, which `choose`
    counts. All int64."""

    def __init__(self, experts: ExpertMap, layer: int, device: torch.device) -> None:
        """layer: the row of the map."""
        num_physical, num_logical = experts.physical_to_logical.shape[1], experts.num_replicas.shape[1]
        most = num_physical - num_logical + 1  # replicas of one expert, in any later map
        self.layer = layer
        self.logical_to_physical = torch.full((num_logical, most), -1, dtype=torch.int64, device=device)
        self.num_replicas = torch.empty(num_logical, dtype=torch.int64, device=device)
        self.load = torch.zeros(num_logical, dtype=torch.int64, device=device)
        self.use(experts)

    def use(self, experts: ExpertMap) -> None:
        """Use another map from now on."""
        places = experts.logical_to_physical[self.layer]
        self.logical_to_physical[:, : places.shape[1]].copy_(places)
        self.num_replicas.copy_(experts.num_replicas[self.layer])

    # --8<-- [start:choose-replicas]
    def choose(self, topk_ids: torch.Tensor) -> torch.Tensor:
        """topk_ids [num_tokens, k], logical -> physical, int32. -1 stays -1."""
        ids, is_real = topk_ids.long(), topk_ids >= 0
        self.load.scatter_add_(0, ids.clamp(min=0).flatten(), is_real.long().flatten())
        row = torch.arange(len(ids), device=ids.device)[:, None]
        physical = self.logical_to_physical[ids, row % self.num_replicas[ids]]  # replicas in turn
        return torch.where(is_real, physical, -1).to(torch.int32)

    # --8<-- [end:choose-replicas]


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
        """As `run`, for tokens that all ranks have, as in tensor parallelism. topk: their
        *logical* experts; `placement.choose` returns the physical ones. Returns this
        rank's summand: the caller adds over ranks. Here each rank runs some tokens."""
        num_tokens, ids = x.shape[0], placement.choose(topk.topk_ids)
        num_rows = -(-num_tokens // self.ranks.size)
        start, end = (min((self.ranks.rank + i) * num_rows, num_tokens) for i in (0, 1))
        own = TopKOutput(topk.topk_weights[start:end], ids[start:end])
        return F.pad(self.run(x[start:end], own, experts), (0, 0, start, num_tokens - end))

    # --8<-- [end:share-the-rows]
