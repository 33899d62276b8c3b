"""Mixture of experts: a router, a loop over routed experts, and shared experts."""

from __future__ import annotations

from types import MappingProxyType

import torch
import torch.nn.functional as F

from diptych.reference.layers import MLP, GeluTanhAndMul, Linear, SiluAndMul
from diptych.shared.config import MoEConfig
from diptych.shared.interfaces import moe as interface
from diptych.shared.interfaces.moe import TopKOutput
from diptych.shared.modeling.moe_modules import ExpertModules, MoEModules


class TopK(interface.TopK):
    def __init__(self, config: MoEConfig) -> None:
        self.config = config

    def __call__(
        self, router_logits: torch.Tensor, correction_bias: torch.Tensor | None = None
    ) -> TopKOutput:
        config = self.config
        logits = router_logits.to(torch.float32)
        has_sigmoid = config.routing in ("biased-grouped", "sigmoid")
        scores = logits.sigmoid() if has_sigmoid else logits.softmax(dim=-1)
        # `choice` selects the experts, `scores` are their weights.
        choice = logits if config.routing == "sigmoid" else scores
        if correction_bias is not None:
            choice = scores + correction_bias.to(torch.float32)
        if config.routing in ("grouped", "biased-grouped"):
            choice = self._mask_groups(choice)
        # Stable: of equal scores the lowest expert id comes first, which torch.topk does not promise.
        order = torch.sort(choice, dim=-1, descending=True, stable=True).indices
        topk_ids = order[:, : config.num_experts_per_tok]
        topk_weights = scores.gather(1, topk_ids)
        if config.norm_topk_prob:
            topk_weights = topk_weights / topk_weights.sum(dim=-1, keepdim=True)
        if config.routed_scaling_factor != 1.0:
            topk_weights = topk_weights * config.routed_scaling_factor
        return TopKOutput(topk_weights, topk_ids.to(torch.int32))

    def _mask_groups(self, choice: torch.Tensor) -> torch.Tensor:
        """Set the scores of experts outside the topk_group best groups to -inf."""
        config = self.config
        grouped = choice.unflatten(-1, (config.num_expert_groups, -1))  # [num_tokens, groups, experts]
        num_best = 2 if config.routing == "biased-grouped" else 1
        group_scores = grouped.topk(min(num_best, grouped.shape[-1]), dim=-1).values.sum(dim=-1)
        order = torch.sort(group_scores, dim=-1, descending=True, stable=True).indices
        is_out = torch.ones_like(group_scores, dtype=torch.bool)
        is_out.scatter_(1, order[:, : config.topk_group], False)
        return grouped.masked_fill(is_out[..., None], float("-inf")).flatten(1)


class FusedExperts(ExpertModules):
    act_classes = MappingProxyType({"silu": SiluAndMul, "gelu_tanh": GeluTanhAndMul})

    # --8<-- [start:run-experts]
    def forward(self, x: torch.Tensor, topk: TopKOutput) -> torch.Tensor:
        y = torch.zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
        for expert_id in topk.topk_ids.unique().tolist():
            if expert_id < 0:
                continue  # padding tokens
            token_rows, slots = (topk.topk_ids == expert_id).nonzero(as_tuple=True)
            b13, b2 = (None if b is None else b[expert_id] for b in (self.b13, self.b2))
            gate, up = F.linear(x[token_rows], self.w13[expert_id], b13).chunk(2, dim=-1)
            hidden = F.linear(self.act_fn(gate, up), self.w2[expert_id], b2)
            y.index_add_(0, token_rows, hidden.to(y.dtype) * topk.topk_weights[token_rows, slots, None])
        return y.to(x.dtype)
        # --8<-- [end:run-experts]


class MoE(MoEModules):
    topk_class = TopK
    experts_class = FusedExperts
    mlp_class = MLP
    linear_class = Linear

    def add_shared_experts(self, routed: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        shared = self.shared_experts(x)
        if self.shared_expert_gate is not None:
            shared = shared * self.shared_expert_gate(x).sigmoid()
        return routed + shared
