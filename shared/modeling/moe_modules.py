"""The modules of a mixture of experts, and how they work together. A panel adds routing, experts and linear
layers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from diptych.shared.config import MoEConfig
from diptych.shared.config.model import HiddenAct
from diptych.shared.interfaces import moe as interface


class ExpertModules(interface.FusedExperts):
    """Routed experts whose weights are not quantized."""

    # By `hidden_act`; empty: the panel computes activations without `act_fn`.
    act_classes: Mapping[str, type[nn.Module]] = MappingProxyType({})

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        bias: bool = False,
        swiglu_limit: float = 0.0,
        hidden_act: HiddenAct = "silu",
    ) -> None:
        super().__init__(num_experts, hidden_size, intermediate_size, bias, swiglu_limit, hidden_act)
        w13 = torch.empty(num_experts, 2 * intermediate_size, hidden_size)
        w2 = torch.empty(num_experts, hidden_size, intermediate_size)
        self.w13 = nn.Parameter(w13, requires_grad=False)
        self.w2 = nn.Parameter(w2, requires_grad=False)
        if bias:
            self.b13 = nn.Parameter(torch.empty(num_experts, 2 * intermediate_size), requires_grad=False)
            self.b2 = nn.Parameter(torch.empty(num_experts, hidden_size), requires_grad=False)
        if self.act_classes:
            is_clamped = swiglu_limit > 0
            self.act_fn = ClampedSwiGLU(swiglu_limit) if is_clamped else self.act_classes[hidden_act]()


class MoEModules(interface.MoE):
    topk_class: type[interface.TopK]
    experts_class: type[interface.FusedExperts]
    mlp_class: type[nn.Module]
    linear_class: type[nn.Module]

    def __init__(self, config: MoEConfig, hidden_size: int) -> None:
        super().__init__(config, hidden_size)
        self.gate = self.linear_class(hidden_size, config.num_experts, config.bias)
        self.topk = self.topk_class(config)
        self.weight_on_input = config.weight_on_input
        num_experts = config.num_local_experts or config.num_experts
        self.experts = self.experts_class(
            num_experts, hidden_size, config.intermediate_size, config.bias, config.swiglu_limit,
            **({} if config.hidden_act == "silu" else {"hidden_act": config.hidden_act}),
        )  # fmt: skip
        self.correction_bias: nn.Parameter | None = None
        if config.routing == "biased-grouped":
            bias = torch.empty(config.num_experts, dtype=torch.float32)
            self.correction_bias = nn.Parameter(bias, requires_grad=False)
        self.shared_experts: Any = None
        self.shared_expert_gate: Any = None
        if config.shared_intermediate_size > 0:
            self.shared_experts = self.mlp_class(hidden_size, config.shared_intermediate_size)
            if config.shared_expert_gate:
                self.shared_expert_gate = self.linear_class(hidden_size, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        topk, routed_x = self.topk(self.gate(x), self.correction_bias), x
        if self.weight_on_input:
            routed_x = x * topk.topk_weights.to(x.dtype)
            topk = topk._replace(topk_weights=torch.ones_like(topk.topk_weights))
        if self.expert_parallel is None:
            routed = self.experts(routed_x, topk)
        else:
            routed = self.expert_parallel.run(routed_x, topk, self.experts)
        return routed if self.shared_experts is None else self.add_shared_experts(routed, x)

    @abstractmethod
    def add_shared_experts(self, routed: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """routed + the output of the shared experts for x, times their gate where they have one. May be
        written over routed."""


class ClampedSwiGLU(nn.Module):
    """The activation of GPT-OSS's experts: gate * sigmoid(1.702 gate) * (up + 1); gate at most `limit`, up
    between -limit and limit."""

    def __init__(self, limit: float) -> None:
        super().__init__()
        self.limit = limit

    def forward(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """[..., n], [..., n] -> [..., n]"""
        dtype, wide = up.dtype, torch.promote_types(up.dtype, torch.float32)
        gate, up = gate.to(wide).clamp(max=self.limit), up.to(wide).clamp(-self.limit, self.limit)
        return (gate * torch.sigmoid(1.702 * gate) * (up + 1.0)).to(dtype)
