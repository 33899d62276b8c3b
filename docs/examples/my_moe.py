"""A MoE runner of one's own: the experts of every token gathered, then two batched matrix multiplications.

diptych check moe docs/examples/my_moe.py:MyMoE

It copies k experts per token, so it is for a few tokens. Routing and shared experts are the reference's.
"""

from __future__ import annotations

import torch

from diptych.reference.moe import FusedExperts, MoE
from diptych.shared.config import MoEConfig
from diptych.shared.interfaces import TopKOutput


class MyExperts(FusedExperts):
    # --8<-- [start:gathered-experts]
    def forward(self, x: torch.Tensor, topk: TopKOutput) -> torch.Tensor:
        # The weight of an id of -1 (no expert) may be NaN.
        weights = torch.where(topk.topk_ids >= 0, topk.topk_weights, 0.0)
        ids = topk.topk_ids.clamp(min=0).long()  # [num_tokens, k]
        w13, w2 = self.w13[ids], self.w2[ids]  # [num_tokens, k, rows, columns]
        b13, b2 = (0.0 if b is None else b[ids] for b in (self.b13, self.b2))
        gate, up = (torch.einsum("th,tkih->tki", x, w13) + b13).chunk(2, dim=-1)
        y = torch.einsum("tki,tkhi->tkh", self.act_fn(gate, up), w2) + b2
        return (y.float() * weights[..., None]).sum(dim=1).to(x.dtype)

    # --8<-- [end:gathered-experts]


class MyMoE(MoE):
    def __init__(self, config: MoEConfig, hidden_size: int) -> None:
        super().__init__(config, hidden_size)
        sizes = config.num_experts, hidden_size, config.intermediate_size
        self.experts = MyExperts(*sizes, config.bias, config.swiglu_limit)
