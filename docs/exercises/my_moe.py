"""Stage 11, mixture of experts: complete the functions that raise NotImplementedError.

cp docs/exercises/my_moe.py my_moe.py
diptych check --stage 11 my_moe.py

The contract is in shared/interfaces/moe.py.
"""

from __future__ import annotations

import torch
from torch import nn

from diptych.reference.layers import MLP, Linear, SiluAndMul
from diptych.shared.config import MoEConfig
from diptych.shared.interfaces import moe as interface
from diptych.shared.interfaces.moe import TopKOutput
from diptych.shared.modeling.moe_modules import ClampedSwiGLU


class TopK(interface.TopK):
    def __init__(self, config: MoEConfig) -> None:
        self.config = config

    def __call__(
        self, router_logits: torch.Tensor, correction_bias: torch.Tensor | None = None
    ) -> TopKOutput:
        """router_logits [num_tokens, num_experts] -> weights float32 and ids int32, [num_tokens, experts per
        token]."""
        raise NotImplementedError("TODO routing: scores, the best experts, lowest id first on ties, weights")

    def _mask_groups(self, choice: torch.Tensor) -> torch.Tensor:
        """-inf for the experts outside the topk_group best groups."""
        raise NotImplementedError("TODO routing: only experts of the topk_group best groups can be chosen")


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

    def forward(self, x: torch.Tensor, topk: TopKOutput) -> torch.Tensor:
        """x [num_tokens, hidden_size] -> the same shape. An id of -1 contributes nothing."""
        raise NotImplementedError(
            "TODO experts: for each expert its tokens through w13, act_fn and w2, with biases where there "
            "are some; weighted and summed"
        )


class MoE(interface.MoE):
    def __init__(self, config: MoEConfig, hidden_size: int) -> None:
        super().__init__(config, hidden_size)
        self.gate = Linear(hidden_size, config.num_experts, config.bias)
        self.topk = TopK(config)
        self.weight_on_input = config.weight_on_input
        self.experts = FusedExperts(
            config.num_experts, hidden_size, config.intermediate_size, config.bias, config.swiglu_limit
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
        """x [num_tokens, hidden_size] -> the same shape."""
        raise NotImplementedError("TODO layer: gate, routing, experts, and the shared experts")
