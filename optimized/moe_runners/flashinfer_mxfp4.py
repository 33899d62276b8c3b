"""Experts with MXFP4 weights and bfloat16 inputs by FlashInfer's fused CUTLASS function.

On Hopper it dequantizes weights in registers. The library has its own order of bytes within a matrix, and
needs sizes that are multiples of 128, so matrices, biases and inputs are padded with zeros.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from diptych.optimized.moe_runners.flashinfer_cutlass import ALIGNMENT, FlashInferCutlassRunner
from diptych.optimized.moe_runners.layouts import MXFP4, adjacent_inputs
from diptych.shared.interfaces.moe import TopKOutput
from diptych.shared.interfaces.quantized_experts import QuantizedExperts
from diptych.shared.types.quant_scheme import MXFP4_GROUP


class FlashInferMxfp4Runner(FlashInferCutlassRunner):
    """Supports MXFP4 weights with and without biases and a swiglu_limit, and bfloat16. The library needs
    sizes that are multiples of 128: weights and inputs are padded with zeros."""

    dtypes = (torch.bfloat16,)

    def check(self) -> None:
        if self.scheme != MXFP4:
            raise self.refuse(f"weights: {self.scheme or 'not quantized'}", f"weights: {MXFP4}")

    def prepare(self) -> None:
        from flashinfer.fused_moe import (
            interleave_moe_scales_for_sm90_mixed_gemm,
            interleave_moe_weights_for_sm90_mixed_gemm,
        )

        experts = self.experts
        assert isinstance(experts, QuantizedExperts)
        self.hidden_size, inter = experts.hidden_size, experts.intermediate_size
        hidden_pad, inter_pad = -self.hidden_size % ALIGNMENT, -inter % ALIGNMENT
        self.pad = hidden_pad

        def padded(tensor: torch.Tensor, parts: int, rows: int, columns: int = 0) -> torch.Tensor:
            """Each of the parts of an expert's rows with so many more rows and columns of 0."""
            halves = tensor.chunk(parts, dim=1)[::-1]  # up before gate
            pad = (0, columns, 0, rows) if tensor.dim() == 3 else (0, rows)
            return torch.cat([F.pad(half, pad) for half in halves], dim=1)

        for name, scale_name, sizes in (
            ("w13", "w13_scale", (2, inter_pad, hidden_pad)),
            ("w2", "w2_scale", (1, hidden_pad, inter_pad)),
        ):
            parts, rows, columns = sizes
            weight, scale = getattr(experts, name), getattr(experts, scale_name)
            values = padded(adjacent_inputs(weight.data), parts, rows, columns // 2)
            weight.data = interleave_moe_weights_for_sm90_mixed_gemm(values, "fp4")
            values = padded(scale.data, parts, rows, columns // MXFP4_GROUP)
            scale.data = interleave_moe_scales_for_sm90_mixed_gemm(values)
        if experts.b13 is not None and experts.b2 is not None:
            experts.b13.data = padded(experts.b13.data, 2, inter_pad)
            experts.b2.data = padded(experts.b2.data, 1, hidden_pad)
        self.arguments = {
            "fc1_expert_weights": experts.w13.data,
            "fc2_expert_weights": experts.w2.data,
            "quant_scales": [scale.data.view(torch.int32) for scale in (experts.w13_scale, experts.w2_scale)],
            "use_w4_group_scaling": True,
            **self.epilogues(),
        }

    def run(self, x: torch.Tensor, topk: TopKOutput) -> torch.Tensor:
        if self.pad == 0:
            return super().run(x, topk)
        return super().run(F.pad(x, (0, self.pad)), topk)[:, : self.hidden_size].contiguous()
