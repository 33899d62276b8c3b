"""Experts in FP8 blocks of 128 by 128, by DeepGEMM's grouped GEMM.

Masked layout, for few tokens: 128 rows for each expert, of which the first are used. Contiguous layout, for
more: the rows of an expert begin at a multiple of 128. Each pair of token and expert is quantized in groups
of 128 inputs before both GEMMs, and padding rows are uninitialized.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from diptych.optimized.kernels.linear.quantize_input import QuantizedInput
from diptych.optimized.kernels.moe.moe_permute import SortedPairs, quantize_pairs, sort_pairs, weighted_sum
from diptych.optimized.moe_runners.base import MoeRunner, PermutedRunner
from diptych.optimized.moe_runners.layouts import FP8_BLOCKS
from diptych.shared.interfaces.moe import FusedExperts, TopKOutput
from diptych.shared.interfaces.quantized_experts import QuantizedExperts

ALIGNMENT = 128
MAX_MASKED_TOKENS = ALIGNMENT
"""Up to so many tokens the masked layout is used: an expert has no more pairs than tokens. It is faster: 205
microseconds for 64 tokens of Qwen3-30B-A3B's experts where the contiguous layout takes 241 (H200)."""


class ExpertRows(NamedTuple):
    values: torch.Tensor  # of the tokens; behind the GEMMs the outputs, bfloat16 [rows, hidden]
    order: SortedPairs
    num_rows: int
    is_masked: bool


class DeepGemmRunner(PermutedRunner[ExpertRows]):
    """Supports FP8 blocks with inputs by group, sizes that are multiples of 128, and bfloat16."""

    dtypes = (torch.bfloat16,)

    def __init__(self, experts: FusedExperts) -> None:
        super().__init__(experts)
        self.quantized = fp8_block_experts(self, experts)

    def pre_permute(self, x: torch.Tensor, topk: TopKOutput) -> ExpertRows:
        self.check_dtype(x.dtype)
        is_masked, num_experts = len(x) <= MAX_MASKED_TOKENS, len(self.quantized.w13)
        order = sort_pairs(topk.topk_ids, num_experts, ALIGNMENT, by_expert=is_masked)
        num_rows = num_experts * ALIGNMENT if is_masked else len(order.pairs)
        return ExpertRows(x if x.stride(1) == 1 else x.contiguous(), order, num_rows, is_masked)

    def run_rows(self, rows: ExpertRows) -> ExpertRows:
        experts, slots = self.quantized, rows.order.slots
        x = quantize_pairs(rows.values, slots, rows.num_rows)
        gate_up = self._gemm(rows, x, experts.w13.data, experts.w13_scale)
        act = quantize_pairs(gate_up, slots, rows.num_rows, silu=True)
        return rows._replace(values=self._gemm(rows, act, experts.w2.data, experts.w2_scale))

    def post_permute(self, rows: ExpertRows, x: torch.Tensor, topk: TopKOutput) -> torch.Tensor:
        return weighted_sum(rows.values, rows.order.slots, topk)

    def _gemm(
        self, rows: ExpertRows, x: QuantizedInput, weight: torch.Tensor, w_scale: torch.Tensor
    ) -> torch.Tensor:
        import deep_gemm

        (num_experts, out, _), order = weight.shape, rows.order
        y = torch.empty(rows.num_rows, out, dtype=torch.bfloat16, device=weight.device)
        w = weight, w_scale[:, ::ALIGNMENT].contiguous()  # one row of scales for each block of outputs
        if rows.is_masked:
            q, scale, by_expert = (tensor.view(num_experts, ALIGNMENT, -1) for tensor in (x.q, x.scale, y))
            expected = -(-order.slots.numel() // num_experts)
            deep_gemm.fp8_m_grouped_gemm_nt_masked((q, scale), w, by_expert, order.counts, expected)
        else:
            deep_gemm.m_grouped_fp8_gemm_nt_contiguous((x.q, x.scale), w, y, order.experts)
        return y


def fp8_block_experts(runner: MoeRunner, experts: FusedExperts) -> QuantizedExperts:
    """`experts`, checked to be FP8 blocks with inputs by group, whole blocks and plain SwiGLU."""
    scheme = experts.scheme if isinstance(experts, QuantizedExperts) else None
    if scheme != FP8_BLOCKS:
        raise runner.refuse(f"weights: {scheme or 'not quantized'}", f"weights: {FP8_BLOCKS}")
    assert isinstance(experts, QuantizedExperts)
    sizes = experts.hidden_size, experts.intermediate_size
    if any(size % ALIGNMENT for size in sizes):
        raise runner.refuse(f"hidden and intermediate size {sizes}", f"multiples of {ALIGNMENT}")
    if experts.b13 is not None or experts.swiglu_limit > 0:
        raise runner.refuse("experts with biases or a swiglu_limit", "plain SwiGLU")
    return experts
