"""Mixture of experts in a handful of launches: routing, sorting by expert, two grouped GEMMs, a sum.

Differs from reference: no loop over experts, and nothing waits for the routing to reach the CPU. Pairs of
token and expert are sorted into blocks on the device and all experts' GEMMs are two launches; few tokens
go pair by pair instead. Sums are in float32 and in a fixed order. The shared experts' gate and up are one
matrix. Assumes that Triton runs here, on a GPU or in its interpreter; refuses float64.
"""

from __future__ import annotations

from typing import Any

import torch

from diptych.optimized.kernels.moe.moe_act import GELU
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
from diptych.shared.modeling.moe_modules import ExpertModules, MoEModules


class TopK(interface.TopK):
    def __init__(self, config: MoEConfig) -> None:
        self.config = config

    def __call__(
        self, router_logits: torch.Tensor, correction_bias: torch.Tensor | None = None
    ) -> TopKOutput:
        return TopKOutput(*route(self.config, router_logits, correction_bias))


class FusedExperts(ExpertModules):
    is_deterministic = False  # one tile for any number of tokens
    runner: Any = None  # of `diptych.optimized.moe_runners`, in place of these kernels

    # --8<-- [start:run-experts]
    def forward(self, x: torch.Tensor, topk: TopKOutput) -> torch.Tensor:
        if x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise ValueError(f"the optimized experts compute in 32 or 16 bits, not in {x.dtype}")
        if x.shape[0] == 0:
            return torch.empty_like(x)
        if self.runner is not None and len(x) >= self.runner.min_tokens:
            return self.runner.run(x, topk)
        x = x if x.stride(1) == 1 else x.contiguous()
        weights, ids = topk.topk_weights.contiguous(), topk.topk_ids.contiguous()
        num_experts, hidden_size, intermediate_size = self.w2.shape
        shape = Shape(num_experts, ids.shape[1], hidden_size, intermediate_size)
        up, down = plan(shape, x.shape[0], x.dtype, x.device, self.is_deterministic)
        b13, b2 = self.b13, self.b2
        limit = GELU if self.hidden_act == "gelu_tanh" else self.swiglu_limit
        if isinstance(up, GemvTile) and isinstance(down, GemvTile):
            return gemv_experts(x, weights, ids, self.w13, self.w2, (up, down), b13, b2, limit)
        assert not isinstance(up, GemvTile)
        assert not isinstance(down, GemvTile)
        blocks = align(ids, num_experts, up.block_m)
        act = up_gemm(x, self.w13, blocks, ids.shape[1], up, b13, limit)
        return combine(down_gemm(act, self.w2, blocks, weights, down, b2), ids)
        # --8<-- [end:run-experts]


class MoE(MoEModules):
    topk_class = TopK
    experts_class = FusedExperts
    mlp_class = MLP
    linear_class = Linear

    def add_shared_experts(self, routed: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        if self.shared_expert_gate is None:
            return self.shared_experts.down_proj.add_to(routed, self.shared_experts.activate(x))
        return routed + self.shared_experts(x) * self.shared_expert_gate(x).sigmoid()
