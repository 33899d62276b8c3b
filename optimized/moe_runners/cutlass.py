"""Experts in FP8 blocks of 128 by 128, by the CUTLASS grouped GEMM of sgl_kernel.

The rows of an expert follow each other without padding. The library takes weights as [in, out] with
successive inputs in memory, and reads problem sizes and offsets of the experts on the GPU.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from diptych.optimized.kernels.linear.quantize_input import QuantizedInput
from diptych.optimized.kernels.moe.moe_permute import SortedPairs, quantize_pairs, sort_pairs, weighted_sum
from diptych.optimized.moe_runners.base import PermutedRunner
from diptych.optimized.moe_runners.deep_gemm import fp8_block_experts
from diptych.shared.interfaces.moe import FusedExperts, TopKOutput

WORKSPACE = 8 * 2**20
"""Bytes for the library's descriptors of all experts' matrices."""
LAYOUT_INTS = 5
"""Numbers that describe the layout of an expert's scales."""


class ExpertRows(NamedTuple):
    values: torch.Tensor  # of the tokens; behind the GEMMs the outputs, [num_pairs, hidden]
    order: SortedPairs


class CutlassRunner(PermutedRunner[ExpertRows]):
    """Supports FP8 blocks with inputs by group, sizes that are multiples of 128, float16 and bfloat16."""

    def __init__(self, experts: FusedExperts) -> None:
        super().__init__(experts)
        self.quantized = fp8_block_experts(self, experts)

    def prepare(self) -> None:
        """What the library reads for each expert and is the same in every call."""
        experts = self.quantized
        self.strides = {
            size: torch.full(experts.w13.shape[:1], size, dtype=torch.int64, device=experts.w13.device)
            for size in (*experts.w13.shape[1:], *experts.w2.shape[1:])
        }

    def pre_permute(self, x: torch.Tensor, topk: TopKOutput) -> ExpertRows:
        self.check_dtype(x.dtype)
        order = sort_pairs(topk.topk_ids, len(self.quantized.w13))
        return ExpertRows(x if x.stride(1) == 1 else x.contiguous(), order)

    def run_rows(self, rows: ExpertRows) -> ExpertRows:
        experts, slots, num_rows = self.quantized, rows.order.slots, len(rows.order.pairs)
        x = quantize_pairs(rows.values, slots, num_rows)
        gate_up = self._gemm(rows.order, x, experts.w13, experts.w13_scale)
        act = quantize_pairs(gate_up, slots, num_rows, silu=True)
        return rows._replace(values=self._gemm(rows.order, act, experts.w2, experts.w2_scale))

    def post_permute(self, rows: ExpertRows, x: torch.Tensor, topk: TopKOutput) -> torch.Tensor:
        return weighted_sum(rows.values, rows.order.slots, topk)

    def _gemm(
        self, order: SortedPairs, x: QuantizedInput, weight: torch.Tensor, w_scale: torch.Tensor
    ) -> torch.Tensor:
        import sgl_kernel

        (num_experts, out, size), device = weight.shape, weight.device
        y = torch.empty(len(x.q), out, dtype=x.dtype, device=device)
        blocks = w_scale[:, ::128].contiguous()  # one row of scales for each block of outputs
        pointers = torch.empty(5, num_experts, dtype=torch.int64, device=device).unbind()
        layouts = torch.empty(2, num_experts, LAYOUT_INTS, dtype=torch.int32, device=device).unbind()
        stride, y_stride = self.strides[size], self.strides[out]
        sizes = torch.stack((order.counts, y_stride, stride), 1).int()
        workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device=device)
        sgl_kernel.fp8_blockwise_scaled_grouped_mm(
            y, *pointers, x.q, weight.transpose(1, 2), x.scale, blocks.transpose(1, 2),
            stride, stride, y_stride, *layouts, sizes, order.first, workspace,
        )  # fmt: skip
        return y
