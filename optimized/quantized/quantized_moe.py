"""Quantized experts in a handful of launches.

Differs from reference: no loop over experts. Pairs of token and expert are sorted into blocks on the device,
and weights are dequantized inside the GEMMs, so only quantized bytes are read from memory. Inputs are
quantized by two more launches. With static scales a token is quantized once for each of its experts, and two
small launches find the scales. FP8 is multiplied as FP8 where the GPU can, else widened, which is exact.
Refuses float64, and float16 with MXFP4, whose values may be too large for it. Assumes that Triton runs here,
on a GPU or in its interpreter.
"""

from __future__ import annotations

from typing import Any

import torch

from diptych.optimized.kernels.linear.quantize_input import ExpertScales, QuantizedInput, quantize_input
from diptych.optimized.kernels.moe.moe_align import align
from diptych.optimized.kernels.moe.moe_combine import combine
from diptych.optimized.kernels.moe.moe_mxfp4_gemv import MAX_TOKENS, mxfp4_gemv_experts
from diptych.optimized.kernels.moe.moe_quantized_gemm import (
    ExpertWeights,
    quantized_down_gemm,
    quantized_tiles,
    quantized_up_gemm,
)
from diptych.shared.interfaces.moe import TopKOutput
from diptych.shared.interfaces.quantized_experts import QuantizedExperts as Interface

FIXED_PAIRS = 64
"""Of an expert, for which deterministic mode has its tile."""


class QuantizedExperts(Interface):
    is_deterministic = False  # one tile for any number of tokens
    runner: Any = None  # of `diptych.optimized.moe_runners`, in place of these kernels

    # --8<-- [start:run-quantized-experts]
    def forward(self, x: torch.Tensor, topk: TopKOutput) -> torch.Tensor:
        self._check(x)
        if x.shape[0] == 0:
            return torch.empty_like(x)
        if self.runner is not None and len(x) >= self.runner.min_tokens:
            return self.runner.run(x, topk)
        x = x if x.stride(1) == 1 else x.contiguous()
        weights, ids = topk.topk_weights.contiguous(), topk.topk_ids.contiguous()
        w13 = ExpertWeights(*self.tensors_of("w13"), self.b13)
        w2 = ExpertWeights(*self.tensors_of("w2"), self.b2)
        if self._uses_gemv(len(x)):
            return mxfp4_gemv_experts(x, weights, ids, w13, w2, self.swiglu_limit)
        num_pairs = FIXED_PAIRS * len(self.w13) if self.is_deterministic else ids.numel()
        up_tile, down_tile = quantized_tiles(self.scheme, num_pairs, len(self.w13))
        blocks = align(ids, len(self.w13), up_tile.block_m)
        is_static = self.scheme.inputs == "static"  # a row for each pair, then
        x_q, top_k = self._input(x, "w13", ids), 1 if is_static else ids.shape[1]
        act = quantized_up_gemm(x_q, w13, self.scheme, blocks, top_k, up_tile, self.swiglu_limit)
        act_q = self._input(act, "w2", blocks.experts)
        pairs = quantized_down_gemm(act_q, w2, self.scheme, blocks, weights, down_tile)
        return combine(pairs, ids)
        # --8<-- [end:run-quantized-experts]

    def _uses_gemv(self, num_tokens: int) -> bool:
        is_mxfp4 = self.scheme.weight_type == "mxfp4"
        return is_mxfp4 and num_tokens <= MAX_TOKENS and not self.is_deterministic

    def _input(self, x: torch.Tensor, name: str, experts: torch.Tensor) -> torch.Tensor | QuantizedInput:
        """x as the GEMM of "w13" or "w2" takes it. experts: of its rows, see `ExpertScales`."""
        if self.scheme.inputs == "none":
            return x
        scales = self.input_scales(name)
        if scales is not None:
            return quantize_input(x, self.scheme, ExpertScales(scales, experts))
        return quantize_input(x, self.scheme, tp=self.tp if name == "w2" else None)

    def _check(self, x: torch.Tensor) -> None:
        """Raise `ValueError` for a type that the kernels do not compute."""
        if x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise ValueError(f"the optimized experts compute in 32 or 16 bits, not in {x.dtype}")
        if x.dtype == torch.float16 and self.scheme.weight_type == "mxfp4":
            raise ValueError("MXFP4 experts in float16: values may be too large; use dtype=bfloat16")
