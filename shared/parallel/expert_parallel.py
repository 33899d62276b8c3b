"""Expert parallelism: a rank has some of the experts of each layer, as a whole or, with more ranks than
parts, a piece of each. Attention, embedding and head are divided as with tensor parallelism alone."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from shared.interfaces.collectives import Collectives
from shared.interfaces.expert_balancer import ExpertMap
from shared.interfaces.expert_dispatch import ExpertDispatch
from shared.interfaces.moe import FusedExperts, TopKOutput


class ExpertsLost(RuntimeError):
    """The experts of a part are lost. All ranks raise it in the same layer."""

    def __init__(self, part: int) -> None:
        super().__init__(f"the experts of part {part} are lost")
        self.part = part


class ExpertParallel:
    """The experts of one layer, on all ranks. `load` [num_logical]: tokens of this rank that chose each."""

    lost_part: int | None = None  # found in the next call

    def __init__(self, dispatch: ExpertDispatch, experts: ExpertMap, layer: int) -> None:
        """layer: the row of the map."""
        self.dispatch = dispatch
        self.layer = layer
        self.load = torch.zeros(experts.num_replicas.shape[1], dtype=torch.int64)
        self.use(experts)

    def use(self, experts: ExpertMap) -> None:
        """Use another placement from now on."""
        self.logical_to_physical = experts.logical_to_physical[self.layer]
        self.num_replicas = experts.num_replicas[self.layer]

    # --8<-- [start:choose-replicas]
    def run(self, x: torch.Tensor, topk: TopKOutput, experts: FusedExperts) -> torch.Tensor:
        """Compute the experts of tokens x. topk: their logical experts; experts: those
        of this rank."""
        if self.lost_part is not None:
            lost, self.lost_part = self.lost_part, None
            raise ExpertsLost(lost)
        ids = topk.topk_ids.long()
        self.load += ids[ids >= 0].bincount(minlength=len(self.load))
        row = torch.arange(len(ids))[:, None]
        physical = self.logical_to_physical[ids, row % self.num_replicas[ids]]  # replicas in turn
        chosen = torch.where(ids >= 0, physical, -1).to(torch.int32)
        return self.dispatch.run(x, TopKOutput(topk.topk_weights, chosen), experts)

    # --8<-- [end:choose-replicas]


def by_rows(
    ranks: Collectives, layer: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor
) -> torch.Tensor:
    """layer(x) for x [n, ...] that is the same on every rank: each rank computes some of the rows."""
    num_rows = -(-x.shape[0] // ranks.size)
    y = layer(x[ranks.rank * num_rows : (ranks.rank + 1) * num_rows])
    padded = F.pad(y, (0, 0, 0, num_rows - y.shape[0]))
    return ranks.all_gather(padded)[: x.shape[0]]
