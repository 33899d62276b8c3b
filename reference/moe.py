"""Mixture of experts: a router, a loop over routed experts, and shared experts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from diptych.reference.layers import MLP, Linear, SiluAndMul
from diptych.shared.config import MoEConfig
from diptych.shared.interfaces import moe as interface
from diptych.shared.interfaces.moe import TopKOutput
from diptych.shared.modeling.layer_choice import ClampedSwiGLU


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


class FusedExperts(interface.FusedExperts):
    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        bias: bool = False,
        swiglu_limit: float = 0.0,
    ) -> None:
        super().__init__(num_experts, hidden_size, intermediate_size, bias, swiglu_limit)
        w13 = torch.empty(num_experts, 2 * intermediate_size, hidden_size)
        w2 = torch.empty(num_experts, hidden_size, intermediate_size)
        self.w13 = nn.Parameter(w13, requires_grad=False)
        self.w2 = nn.Parameter(w2, requires_grad=False)
        if bias:
            self.b13 = nn.Parameter(torch.empty(num_experts, 2 * intermediate_size), requires_grad=False)
            self.b2 = nn.Parameter(torch.empty(num_experts, hidden_size), requires_grad=False)
        self.act_fn = ClampedSwiGLU(swiglu_limit) if swiglu_limit > 0 else SiluAndMul()

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


class MoE(interface.MoE):
    def __init__(self, config: MoEConfig, hidden_size: int) -> None:
        super().__init__(config, hidden_size)
        self.gate = Linear(hidden_size, config.num_experts, config.bias)
        self.topk = TopK(config)
        self.weight_on_input = config.weight_on_input
        num_experts = config.num_local_experts or config.num_experts
        self.experts = FusedExperts(
            num_experts, hidden_size, config.intermediate_size, config.bias, config.swiglu_limit
        )
        self.correction_bias: nn.Parameter | None = None
        if config.routing == "biased-grouped":
            bias = torch.empty(config.num_experts, dtype=torch.float32)
            self.correction_bias = nn.Parameter(bias, requires_grad=False)
        self.shared_experts: MLP | None = None
        self.shared_expert_gate: Linear | None = None
        if config.shared_intermediate_size > 0:
            self.shared_experts = MLP(hidden_size, config.shared_intermediate_size)
            if config.shared_expert_gate:
                self.shared_expert_gate = Linear(hidden_size, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        topk, routed_x = self.topk(self.gate(x), self.correction_bias), x
        if self.weight_on_input:
            routed_x = x * topk.topk_weights.to(x.dtype)
            topk = topk._replace(topk_weights=torch.ones_like(topk.topk_weights))
        if self.expert_parallel is None:
            routed = self.experts(routed_x, topk)
        else:
            routed = self.expert_parallel.run(routed_x, topk, self.experts)
        if self.shared_experts is None:
            return routed
        shared = self.shared_experts(x)
        if self.shared_expert_gate is not None:
            shared = shared * self.shared_expert_gate(x).sigmoid()
        return routed + shared
