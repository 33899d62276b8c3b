"""Expert dispatch by all-gather, where a CUDA graph can contain it.

Differs from reference: with tensor parallelism all ranks have all tokens, so nothing is gathered
(`run_replicated`). A rank computes its experts for all tokens, and the sum over ranks that follows adds the
outputs, in one kernel with the next norm. One launch finds the experts of this rank. Shapes do not depend on
the routing. Tokens that differ by rank (`run`) are gathered as in the reference.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from diptych.optimized.kernels.moe.local_experts import local_experts
from diptych.shared.interfaces import Collectives, FusedExperts, TopKOutput
from diptych.shared.interfaces import expert_dispatch as interface
from diptych.shared.interfaces.expert_dispatch import Placement


class AllGather(interface.ExpertDispatch):
    def __init__(self, ranks: Collectives, ep: int) -> None:
        self.ranks = ranks
        self.part = ranks.rank * ep // ranks.size

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

    # --8<-- [start:all-gather-dispatch]
    def run_replicated(
        self, x: torch.Tensor, topk: TopKOutput, experts: FusedExperts, placement: Placement
    ) -> torch.Tensor:
        num_local = experts.w13.shape[0]
        ids = local_experts(topk.topk_ids, placement, self.part * num_local, num_local)
        return experts(x, TopKOutput(topk.topk_weights, ids))

    # --8<-- [end:all-gather-dispatch]
