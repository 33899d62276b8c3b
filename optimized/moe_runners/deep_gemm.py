"""Experts in FP8 blocks of 128 by 128, by DeepGEMM's grouped GEMM with contiguous rows.

The rows of an expert begin at a multiple of 128. Each row is quantized in groups of 128, before both GEMMs.
Shapes follow from the number of tokens alone, so a CUDA graph can hold the launches.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from optimized.kernels.moe_align import align
from optimized.kernels.quantize_input import quantize_input
from optimized.moe_runners.base import PermutedRunner
from shared.interfaces.moe import FusedExperts, TopKOutput
from shared.interfaces.quantized_experts import QuantizedExperts
from shared.types.quantization import QuantScheme

ALIGNMENT = 128
SCHEME = QuantScheme("fp8", 128, 128, "group")


class ExpertRows(NamedTuple):
    q: torch.Tensor  # [rows, hidden] e4m3; behind the GEMMs the outputs, bfloat16
    scale: torch.Tensor  # float32 [rows, hidden / 128]
    expert_ids: torch.Tensor  # int32 [rows], -1: no row
    pairs: torch.Tensor  # int64 [rows]: token * k + choice, or the number of pairs


class DeepGemmRunner(PermutedRunner[ExpertRows]):
    """Supports FP8 blocks with inputs by group, sizes that are multiples of 128, and bfloat16."""

    def __init__(self, experts: FusedExperts) -> None:
        super().__init__(experts)
        scheme = experts.scheme if isinstance(experts, QuantizedExperts) else None
        if scheme != SCHEME:
            raise self.refuse(f"weights: {scheme or 'not quantized'}", f"weights: {SCHEME}")
        assert isinstance(experts, QuantizedExperts)
        self.quantized = experts
        sizes = experts.hidden_size, experts.intermediate_size
        if any(size % ALIGNMENT for size in sizes):
            raise self.refuse(f"hidden and intermediate size {sizes}", f"multiples of {ALIGNMENT}")
        if experts.b13 is not None or experts.swiglu_limit > 0:
            raise self.refuse("experts with biases or a swiglu_limit", "plain SwiGLU")

    def pre_permute(self, x: torch.Tensor, topk: TopKOutput) -> ExpertRows:
        if x.dtype != torch.bfloat16:
            raise self.refuse(f"dtype {x.dtype}", "bfloat16")
        num_tokens, top_k = topk.topk_ids.shape
        blocks = align(topk.topk_ids.contiguous(), len(self.quantized.w13), ALIGNMENT)
        # Blocks beyond the last used one are uninitialized.
        is_used = torch.arange(len(blocks.experts), device=x.device) < blocks.num_blocks
        pairs = blocks.pairs.view(-1, ALIGNMENT).masked_fill(~is_used[:, None], num_tokens * top_k).flatten()
        expert_ids = blocks.experts.masked_fill(~is_used, -1).repeat_interleave(ALIGNMENT)
        tokens = (pairs // top_k).clamp(max=num_tokens - 1).long()
        quantized = quantize_input(x if x.stride(1) == 1 else x.contiguous(), SCHEME)
        q = quantized.q.view(torch.uint8)[tokens].view(torch.float8_e4m3fn)
        return ExpertRows(q, quantized.scale[tokens], expert_ids, pairs.long())

    def run_rows(self, rows: ExpertRows) -> ExpertRows:
        experts = self.quantized
        gate_up = self._gemm(rows.q, rows.scale, experts.w13, experts.w13_scale, rows.expert_ids)
        act = quantize_input(gate_up, SCHEME, silu=True)
        y = self._gemm(act.q, act.scale, experts.w2, experts.w2_scale, rows.expert_ids)
        return rows._replace(q=y)

    def post_permute(self, rows: ExpertRows, x: torch.Tensor, topk: TopKOutput) -> torch.Tensor:
        ids = topk.topk_ids
        by_pair = x.new_empty(ids.numel() + 1, x.shape[1])
        by_pair[rows.pairs] = rows.q
        outputs = by_pair[:-1].view(*ids.shape, -1).float() * topk.topk_weights[..., None]
        return torch.where(ids[..., None] >= 0, outputs, 0.0).sum(1).to(x.dtype)

    def _gemm(
        self,
        q: torch.Tensor,
        scale: torch.Tensor,
        weight: torch.Tensor,
        w_scale: torch.Tensor,
        ids: torch.Tensor,
    ) -> torch.Tensor:
        import deep_gemm

        y = torch.empty(len(q), weight.shape[1], dtype=torch.bfloat16, device=q.device)
        blocks = w_scale[:, ::ALIGNMENT].contiguous()  # one row of scales for each block of outputs
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous((q, scale), (weight, blocks), y, ids)
        return y
