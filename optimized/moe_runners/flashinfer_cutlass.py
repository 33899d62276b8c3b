"""Experts with 16-bit weights or FP8 blocks by FlashInfer's fused CUTLASS function: sorting, both GEMMs and
the sum in one.

It takes the rows of up before those of gate. The experts' parameters are swapped in place when the runner
first runs.
"""

from __future__ import annotations

import torch

from optimized.moe_runners.base import MoeRunner
from shared.interfaces.moe import FusedExperts, TopKOutput
from shared.interfaces.quantized_experts import QuantizedExperts
from shared.types.quantization import QuantScheme

FP8_BLOCKS = QuantScheme("fp8", 128, 128, "group")


class FlashInferCutlassRunner(MoeRunner):
    """Supports float16 and bfloat16 weights, and FP8 blocks with inputs by group; plain SwiGLU."""

    def __init__(self, experts: FusedExperts) -> None:
        super().__init__(experts)
        self.is_fp8 = isinstance(experts, QuantizedExperts)
        if isinstance(experts, QuantizedExperts) and experts.scheme != FP8_BLOCKS:
            raise self.refuse(f"weights: {experts.scheme}", f"weights of 16 bits, and {FP8_BLOCKS}")
        if self.is_fp8 and any(size % 128 for size in experts.w2.shape[1:]):
            raise self.refuse(f"sizes {tuple(experts.w2.shape[1:])} with FP8 blocks", "multiples of 128")
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
            quant_scales=self._scales(),
            use_deepseek_fp8_block_scale=self.is_fp8,
        )
        output: torch.Tensor = result[0] if isinstance(result, (list, tuple)) else result
        return output

    def _swap(self) -> None:
        parameters = [self.experts.w13]
        if isinstance(self.experts, QuantizedExperts):
            parameters.append(self.experts.w13_scale)
        for parameter in parameters:
            for w13 in parameter.data.view(torch.uint8):  # expert by expert, to save memory
                gate, up = w13.chunk(2)
                w13.copy_(torch.cat((up, gate)))
        self.is_swapped = True

    def _scales(self) -> list[torch.Tensor]:
        """The scales of w13 and w2: one row for each block of outputs."""
        if not isinstance(self.experts, QuantizedExperts):
            return []
        return [scale[:, ::128].contiguous() for scale in (self.experts.w13_scale, self.experts.w2_scale)]
