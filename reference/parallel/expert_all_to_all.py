"""Expert dispatch by all-to-all.

A token goes only to the ranks that have its experts, once for each of them. With many ranks that is less
traffic than all-gather, but the numbers of rows are known only after the routing: the CPU waits for them, so
no CUDA graph can contain it.
"""

from __future__ import annotations

import torch

from diptych.shared.interfaces import Collectives, FusedExperts, TopKOutput
from diptych.shared.interfaces import expert_dispatch as interface


class AllToAll(interface.ExpertDispatch):
    def __init__(self, ranks: Collectives, ep: int) -> None:
        self.ranks = ranks
        self.ranks_per_part = ranks.size // ep

    # --8<-- [start:all-to-all-dispatch]
    def run(self, x: torch.Tensor, topk: TopKOutput, experts: FusedExperts) -> torch.Tensor:
        num_local, group = experts.w13.shape[0], self.ranks_per_part
        # A copy of a token for each of its experts and each rank with a part of the expert.
        part = topk.topk_ids[..., None].long().div(num_local, rounding_mode="floor")
        target = part * group + torch.arange(group, device=x.device)  # [num_tokens, k, group]
        is_sent = topk.topk_ids[..., None].expand_as(target) >= 0
        order = target[is_sent].argsort(stable=True)
        token, slot, copy = (index[order] for index in is_sent.nonzero(as_tuple=True))
        sent = target[is_sent].bincount(minlength=self.ranks.size)
        one_each = [1] * self.ranks.size
        received = self.ranks.all_to_all(sent, one_each, one_each)  # the numbers of rows first
        there, back = (sent.tolist(), received.tolist()), (received.tolist(), sent.tolist())
        local_ids = (topk.topk_ids[token, slot] % num_local)[:, None]
        ids = self.ranks.all_to_all(local_ids, *there)
        rows = self.ranks.all_to_all(x[token], *there)
        ones = torch.ones(ids.shape, device=x.device)
        outputs = self.ranks.all_to_all(experts(rows, TopKOutput(ones, ids)), *back)
        # Outputs are weighted and added in one order for all layouts: by rank of choice,
        # then by part.
        dtype = torch.promote_types(x.dtype, torch.float32)
        y = torch.zeros(*target.shape, x.shape[1], dtype=dtype, device=x.device)
        y[token, slot, copy] = outputs.to(y.dtype)
        return (y.sum(2) * topk.topk_weights[..., None]).sum(1).to(x.dtype)
        # --8<-- [end:all-to-all-dispatch]
