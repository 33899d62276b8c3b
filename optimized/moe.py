"""Mixture of experts in a handful of launches: routing, sorting by expert, two grouped GEMMs, a sum.

Differs from reference: no loop over experts, and nothing waits for the routing to reach the CPU. Pairs of
token and expert are sorted into blocks on the device and all experts' GEMMs are two launches; few tokens
go pair by pair instead. Sums are in float32 and in a fixed order. The shared experts' gate and up are one
matrix. Assumes that Triton runs here, on a GPU or in its interpreter; refuses float64.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from diptych.optimized.kernels.moe.moe_align import align
from diptych.optimized.kernels.moe.moe_combine import combine
from diptych.optimized.kernels.moe.moe_gemm import down_gemm, up_gemm
from diptych.optimized.kernels.moe.moe_gemv import gemv_experts
from diptych.optimized.kernels.moe.moe_tiles import GemvTile, Shape, plan
from diptych.optimized.kernels.moe.moe_topk import route
from diptych.optimized.layers import MLP, Linear
from diptych.shared.config import MoEConfig
from diptych.shared.interfaces import moe as interface
from diptych.shared.interfaces.moe import TopKOutput


class TopK(interface.TopK):
    def __init__(self, config: MoEConfig) -> None:
        self.config = config

    def __call__(
        self, router_logits: torch.Tensor, correction_bias: torch.Tensor | None = None
    ) -> TopKOutput:
        return TopKOutput(*route(self.config, router_logits, correction_bias))


class FusedExperts(interface.FusedExperts):
    is_deterministic = False  # one tile for any number of tokens
    runner: Any = None  # of `diptych.optimized.moe_runners`, in place of these kernels

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

    # --8<-- [start:run-experts]
    def forward(self, x: torch.Tensor, topk: TopKOutput) -> torch.Tensor:
        if x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise ValueError(f"the optimized experts compute in 32 or 16 bits, not in {x.dtype}")
        if x.shape[0] == 0:
            return torch.empty_like(x)
        if self.runner is not None and len(x) >= self.runner.min_tokens:
            return self.runner.run(x, topk)  # type: ignore[no-any-return]
        x = x if x.stride(1) == 1 else x.contiguous()
        weights, ids = topk.topk_weights.contiguous(), topk.topk_ids.contiguous()
        num_experts, hidden_size, intermediate_size = self.w2.shape
        shape = Shape(num_experts, ids.shape[1], hidden_size, intermediate_size)
        up, down = plan(shape, x.shape[0], x.dtype, x.device, self.is_deterministic)
        b13, b2, limit = self.b13, self.b2, self.swiglu_limit
        if isinstance(up, GemvTile):
            return gemv_experts(x, weights, ids, self.w13, self.w2, (up, down), b13, b2, limit)
        blocks = align(ids, num_experts, up.block_m)
        act = up_gemm(x, self.w13, blocks, ids.shape[1], up, b13, limit)
        return combine(down_gemm(act, self.w2, blocks, weights, down, b2), ids)
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
        if self.shared_expert_gate is None:
            return self.shared_experts.down_proj.add_to(routed, self.shared_experts.activate(x))
        return routed + self.shared_experts(x) * self.shared_expert_gate(x).sigmoid()
