"""Experts with 16-bit weights or FP8 blocks by FlashInfer's fused CUTLASS function: sorting, both GEMMs and
the sum in one.

It takes the rows of up before those of gate.
"""

from __future__ import annotations

from typing import Any

import torch

from diptych.optimized.kernels.moe.moe_permute import distinct_choices
from diptych.optimized.moe_runners.base import MoeRunner
from diptych.optimized.moe_runners.layouts import FP8_BLOCKS, swap_halves
from diptych.shared.interfaces.moe import FusedExperts, TopKOutput
from diptych.shared.interfaces.quantized_experts import QuantizedExperts

ALIGNMENT = 128


class FlashInferCutlassRunner(MoeRunner):
    """Supports float16 and bfloat16 weights with and without biases and a swiglu_limit, and FP8 blocks with
    inputs by group and plain SwiGLU."""

    changes_layout = True

    def __init__(self, experts: FusedExperts) -> None:
        super().__init__(experts)
        self.scheme = experts.scheme if isinstance(experts, QuantizedExperts) else None
        self.arguments: dict[str, Any] = {}  # of the library's function, the same in every call
        self.check()

    def check(self) -> None:
        """Raise `ValueError` for experts that the library cannot compute."""
        if self.scheme is None:
            return
        if self.scheme != FP8_BLOCKS:
            raise self.refuse(f"weights: {self.scheme}", f"weights of 16 bits, and {FP8_BLOCKS}")
        if any(size % ALIGNMENT for size in self.experts.w2.shape[1:]):
            sizes = tuple(self.experts.w2.shape[1:])
            raise self.refuse(f"sizes {sizes} with FP8 blocks", f"multiples of {ALIGNMENT}")
        if self.experts.b13 is not None or self.experts.swiglu_limit > 0:
            raise self.refuse("FP8 blocks with biases or a swiglu_limit", "plain SwiGLU")

    def prepare(self) -> None:
        experts = self.experts
        for parameter in (experts.w13, getattr(experts, "w13_scale", None), experts.b13):
            if parameter is not None:
                swap_halves(parameter)
        self.arguments = {
            "fc1_expert_weights": experts.w13.data,
            "fc2_expert_weights": experts.w2.data,
            "quant_scales": [],
            **self.epilogues(),
        }
        if isinstance(experts, QuantizedExperts):  # one row of scales for each block of outputs
            scales = (experts.w13_scale, experts.w2_scale)
            self.arguments["quant_scales"] = [scale[:, ::ALIGNMENT].contiguous() for scale in scales]
            self.arguments["use_deepseek_fp8_block_scale"] = True

    def epilogues(self) -> dict[str, torch.Tensor]:
        """The biases, and the constants of a clamped SwiGLU, float32 [num_experts] each."""
        experts, found = self.experts, {}
        if experts.b13 is not None and experts.b2 is not None:
            found = {"fc1_expert_biases": experts.b13.data, "fc2_expert_biases": experts.b2.data}
        if experts.swiglu_limit > 0:
            constants = {"alpha": 1.702, "beta": 1.0, "limit": experts.swiglu_limit}
            of_expert = torch.ones(len(experts.w2), dtype=torch.float32, device=experts.w2.device)
            found |= {f"swiglu_{name}": value * of_expert for name, value in constants.items()}
        return found

    def run(self, x: torch.Tensor, topk: TopKOutput) -> torch.Tensor:
        from flashinfer.fused_moe import cutlass_fused_moe

        self.check_dtype(x.dtype)
        topk = distinct_choices(topk)
        result = cutlass_fused_moe(
            input=x.contiguous(),
            token_selected_experts=topk.topk_ids,
            token_final_scales=topk.topk_weights,
            output_dtype=x.dtype,
            **self.arguments,
        )
        output: torch.Tensor = result[0] if isinstance(result, (list, tuple)) else result
        return output
