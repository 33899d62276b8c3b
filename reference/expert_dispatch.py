"""Expert dispatch: two ways to send tokens to the ranks of their experts.

`AllGather`: every rank gets all tokens and computes what its own experts add to each; sums over ranks go back
to the ranks of the tokens. The traffic does not depend on the routing, nor do the shapes.
`AllToAll`: a token goes only to the ranks that have its experts, once for each of them. With many ranks that
is less, but the numbers of rows are known only after the routing.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from shared.interfaces import Collectives, FusedExperts, TopKOutput
from shared.interfaces import expert_dispatch as interface


class AllGather(interface.ExpertDispatch):
    def __init__(self, ranks: Collectives, ep: int) -> None:
        self.ranks = ranks
        self.part = ranks.rank * ep // ranks.size

    # --8<-- [start:all-gather-dispatch]
    def run(self, x: torch.Tensor, topk: TopKOutput, experts: FusedExperts) -> torch.Tensor:
        num_tokens, num_local = x.shape[0], experts.w13.shape[0]
        most = int(self.ranks.all_gather(torch.tensor([num_tokens])).max())

        def gather(own: torch.Tensor, padding: int = 0) -> torch.Tensor:
            return self.ranks.all_gather(F.pad(own, (0, 0, 0, most - num_tokens), value=padding))

        all_x, weights, ids = gather(x), gather(topk.topk_weights), gather(topk.topk_ids, -1)
        local_ids = ids - self.part * num_local
        is_here = (ids >= 0) & (local_ids >= 0) & (local_ids < num_local)
        summands = experts(all_x, TopKOutput(weights, torch.where(is_here, local_ids, -1)))
        return self.ranks.reduce_scatter(summands)[:num_tokens]

    # --8<-- [end:all-gather-dispatch]


class AllToAll(interface.ExpertDispatch):
    def __init__(self, ranks: Collectives, ep: int) -> None:
        self.ranks = ranks
        self.ranks_per_part = ranks.size // ep

    # --8<-- [start:all-to-all-dispatch]
    def run(self, x: torch.Tensor, topk: TopKOutput, experts: FusedExperts) -> torch.Tensor:
        num_local, group = experts.w13.shape[0], self.ranks_per_part
        # A copy of a token for each of its experts and each rank with a part of the expert.
        part = topk.topk_ids[..., None].long().div(num_local, rounding_mode="floor")
        target = part * group + torch.arange(group)  # [num_tokens, k, group]
        is_sent = topk.topk_ids[..., None].expand_as(target) >= 0
        order = target[is_sent].argsort(stable=True)
        token, slot, copy = (index[order] for index in is_sent.nonzero(as_tuple=True))
        sent = target[is_sent].bincount(minlength=self.ranks.size)
        ones = [1] * self.ranks.size
        received = self.ranks.all_to_all(sent, ones, ones)  # the numbers of rows first
        there, back = (sent.tolist(), received.tolist()), (received.tolist(), sent.tolist())
        local_ids = (topk.topk_ids[token, slot] % num_local)[:, None]
        ids = self.ranks.all_to_all(local_ids, *there)
        rows = self.ranks.all_to_all(x[token], *there)
        outputs = self.ranks.all_to_all(experts(rows, TopKOutput(torch.ones(ids.shape), ids)), *back)
        # Outputs are weighted and added in one order for all layouts: by rank of choice,
        # then by part.
        y = torch.zeros(*target.shape, x.shape[1], dtype=torch.promote_types(x.dtype, torch.float32))
        y[token, slot, copy] = outputs.to(y.dtype)
        return (y.sum(2) * topk.topk_weights[..., None]).sum(1).to(x.dtype)
        # --8<-- [end:all-to-all-dispatch]
