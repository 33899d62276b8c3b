"""Stage 11, mixture of experts: complete the functions that raise NotImplementedError.

diptych course grade 11     # in the folder of `diptych course start`
diptych check --stage 11 my_moe.py

The contract is in shared/interfaces/moe.py.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
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
        token]. `config` has routing, num_experts_per_tok, norm_topk_prob, routed_scaling_factor; with groups
        also num_expert_groups and topk_group."""
        raise NotImplementedError("TODO routing: which experts, and with which weights")

    def _mask_groups(self, choice: torch.Tensor) -> torch.Tensor:
        """choice [num_tokens, num_experts] -> the same, so that experts outside the topk_group best groups
        are never chosen. The score of a group: see the contract."""
        raise NotImplementedError("TODO routing: which groups may take part")


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
        """x [num_tokens, hidden_size] -> the same shape and dtype. topk.topk_ids [num_tokens, k]: an id of -1
        contributes nothing. `self.act_fn(gate, up)` is the activation; `self.b13`, `self.b2` may be None."""
        raise NotImplementedError("TODO experts: what every expert computes for the tokens that chose it")


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
        raise NotImplementedError("TODO layer: the output of the whole layer")
