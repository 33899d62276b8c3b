"""Expert dispatch by all-gather.

Every rank gets all tokens and computes what its own experts add to each; sums over ranks go back to the ranks
of the tokens. The traffic does not depend on the routing, nor do the shapes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from diptych.shared.interfaces import Collectives, FusedExperts, TopKOutput
from diptych.shared.interfaces import expert_dispatch as interface


class AllGather(interface.ExpertDispatch):
    def __init__(self, ranks: Collectives, ep: int) -> None:
        self.ranks = ranks
        self.part = ranks.rank * ep // ranks.size

    # --8<-- [start:all-gather-dispatch]
    def run(self, x: torch.Tensor, topk: TopKOutput, experts: FusedExperts) -> torch.Tensor:
        num_tokens, num_local = x.shape[0], experts.w13.shape[0]
        most = int(self.ranks.all_gather(torch.tensor([num_tokens], device=x.device)).max())

        def gather(own: torch.Tensor, padding: int = 0) -> torch.Tensor:
            return self.ranks.all_gather(F.pad(own, (0, 0, 0, most - num_tokens), value=padding))

        all_x, weights, ids = gather(x), gather(topk.topk_weights), gather(topk.topk_ids, -1)
        local_ids = ids - self.part * num_local
        is_here = (ids >= 0) & (local_ids >= 0) & (local_ids < num_local)
        summands = experts(all_x, TopKOutput(weights, torch.where(is_here, local_ids, -1)))
        return self.ranks.reduce_scatter(summands)[:num_tokens]

    # --8<-- [end:all-gather-dispatch]
