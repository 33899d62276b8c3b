"""Experts with 16-bit weights by FlashInfer's fused CUTLASS function: routing, both GEMMs and the sum in one.

It takes the rows of up before those of gate. The experts' parameters are swapped in place when the runner
first runs.
"""

from __future__ import annotations

import torch

from optimized.moe_runners.base import MoeRunner
from shared.interfaces.moe import FusedExperts, TopKOutput
from shared.interfaces.quantized_experts import QuantizedExperts


class FlashInferCutlassRunner(MoeRunner):
    """Supports float16 and bfloat16 weights with plain SwiGLU."""

    def __init__(self, experts: FusedExperts) -> None:
        super().__init__(experts)
        if isinstance(experts, QuantizedExperts):
            raise self.refuse(f"weights: {experts.scheme}", "weights that are not quantized")
        if experts.b13 is not None or experts.swiglu_limit > 0:
            raise self.refuse("experts with biases or a swiglu_limit", "plain SwiGLU")
        self.is_swapped = False

    def run(self, x: torch.Tensor, topk: TopKOutput) -> torch.Tensor:
        from flashinfer.fused_moe import cutlass_fused_moe

        if x.dtype not in (torch.float16, torch.bfloat16):
            raise self.refuse(f"dtype {x.dtype}", "float16 and bfloat16")
        if not self.is_swapped:
            self._swap()
        is_choice = topk.topk_ids >= 0  # padding becomes a choice of weight 0
        result = cutlass_fused_moe(
            input=x.contiguous(),
            token_selected_experts=topk.topk_ids.clamp(min=0).to(torch.int32),
            token_final_scales=torch.where(is_choice, topk.topk_weights, 0.0),
            fc1_expert_weights=self.experts.w13,
            fc2_expert_weights=self.experts.w2,
            output_dtype=x.dtype,
            quant_scales=[],
        )
        output: torch.Tensor = result[0] if isinstance(result, (list, tuple)) else result
        return output

    def _swap(self) -> None:
        for w13 in self.experts.w13.data:  # expert by expert: little memory
            gate, up = w13.chunk(2)
            w13.copy_(torch.cat((up, gate)))
        self.is_swapped = True
