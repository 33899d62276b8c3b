"""Experts with 16-bit or MXFP4 weights by `matmul_ogs` of triton_kernels, OpenAI's Triton kernels.

The first GEMM gathers its rows, and with a swiglu_limit has the clamped SwiGLU as its epilogue, for which the
rows of gate and up alternate. On Hopper MXFP4 weights get an order that suits the registers of a warp group.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from diptych.optimized.kernels.linear.silu_and_mul import silu_and_mul
from diptych.optimized.kernels.moe.moe_permute import SortedPairs, sort_pairs, weighted_sum
from diptych.optimized.moe_runners.base import PermutedRunner
from diptych.optimized.moe_runners.layouts import MXFP4, adjacent_inputs, interleave_halves
from diptych.shared.interfaces.moe import FusedExperts, TopKOutput
from diptych.shared.interfaces.quantized_experts import QuantizedExperts

ALIGNMENT = 64
"""Of MXFP4 inputs in the library's order for Hopper."""
NUM_WARPS = 8
"""Of the kernels that read MXFP4 scales, whose order depends on it."""
TILE_GROUPS = 4
"""MXFP4 groups whose scales a kernel loads at a time. Groups beyond the inputs are not masked: scales that it
finds there are multiplied by weights of 0, and infinity would become NaN. So scales are padded with zeros."""


class ExpertRows(NamedTuple):
    x: torch.Tensor  # [num_tokens, hidden]; behind the GEMMs [num_pairs, hidden]
    order: SortedPairs


class Matrix(NamedTuple):
    """w13 or w2 as the library takes it."""

    weight: Any  # [num_experts, in, out]
    bias: torch.Tensor | None  # float32
    precision: Any


class TritonKernelRunner(PermutedRunner[ExpertRows]):
    """Supports float16 and bfloat16 weights, MXFP4 with bfloat16, biases and a swiglu_limit."""

    changes_layout = True

    def __init__(self, experts: FusedExperts) -> None:
        super().__init__(experts)
        if not isinstance(experts, QuantizedExperts):
            return
        if experts.scheme != MXFP4:
            raise self.refuse(f"weights: {experts.scheme}", f"weights of 16 bits, and {MXFP4}")
        sizes = experts.hidden_size, experts.intermediate_size
        if any(size % ALIGNMENT for size in sizes):
            raise self.refuse(f"MXFP4 with hidden and intermediate size {sizes}", f"multiples of {ALIGNMENT}")
        self.dtypes = (torch.bfloat16,)

    def prepare(self) -> None:
        experts = self.experts
        if experts.swiglu_limit > 0:
            for parameter in (experts.w13, getattr(experts, "w13_scale", None), experts.b13):
                if parameter is not None:
                    interleave_halves(parameter)
        self.w13 = self._matrix(experts.w13, getattr(experts, "w13_scale", None), experts.b13)
        self.w2 = self._matrix(experts.w2, getattr(experts, "w2_scale", None), experts.b2)

    def _matrix(self, weight: torch.Tensor, scale: torch.Tensor | None, bias: torch.Tensor | None) -> Matrix:
        from triton_kernels.matmul_ogs import PrecisionConfig

        bias = None if bias is None else bias.float()
        if scale is None:
            return Matrix(weight.data.transpose(1, 2), bias, PrecisionConfig())
        from triton_kernels.tensor import FP4, convert_layout, wrap_torch_tensor
        from triton_kernels.tensor_details import layout

        value_layout, value_options = layout.make_default_matmul_mxfp4_w_layout(mx_axis=1)
        scale_layout, scale_options = layout.make_default_matmul_mxfp4_w_scale_layout(
            mx_axis=1, num_warps=NUM_WARPS
        )
        values = wrap_torch_tensor(adjacent_inputs(weight.data).transpose(1, 2), dtype=FP4)
        values = convert_layout(values, value_layout, **value_options)
        padded = F.pad(scale.data, (0, -scale.shape[2] % TILE_GROUPS)).transpose(1, 2)
        scales = convert_layout(wrap_torch_tensor(padded), scale_layout, **scale_options)
        weight.data, scale.data = values.storage.data, scales.storage.data  # the old memory is freed
        return Matrix(values, bias, PrecisionConfig(weight_scale=scales))

    def pre_permute(self, x: torch.Tensor, topk: TopKOutput) -> ExpertRows:
        self.check_dtype(x.dtype)
        return ExpertRows(x.contiguous(), sort_pairs(topk.topk_ids, len(self.experts.w13)))

    def run_rows(self, rows: ExpertRows) -> ExpertRows:
        from triton_kernels.matmul_ogs import (
            FnSpecs,
            FusedActivation,
            GatherIndx,
            RoutingData,
            matmul_ogs,
        )
        from triton_kernels.swiglu import swiglu_fn
        from triton_kernels.tensor import make_ragged_tensor_metadata

        order, (num_experts, num_choices) = rows.order, (len(rows.order.counts), rows.order.slots.shape[1])
        tiles = make_ragged_tensor_metadata(order.counts, len(order.pairs))
        routing = RoutingData(None, order.counts, num_experts, num_choices, tiles)
        gather = GatherIndx(order.pairs, order.slots.flatten())
        activation, limit = None, self.experts.swiglu_limit
        if limit > 0:
            swiglu = FnSpecs("swiglu", swiglu_fn, ("alpha", "limit"), reduction_n=2)
            activation = FusedActivation(swiglu, (1.702, limit))
        act = matmul_ogs(
            rows.x, self.w13.weight, self.w13.bias, routing, gather_indx=gather,
            precision_config=self.w13.precision, fused_activation=activation,
        )  # fmt: skip
        act = silu_and_mul(act) if activation is None else act
        y = matmul_ogs(act, self.w2.weight, self.w2.bias, routing, precision_config=self.w2.precision)
        return rows._replace(x=y)

    def post_permute(self, rows: ExpertRows, x: torch.Tensor, topk: TopKOutput) -> torch.Tensor:
        return weighted_sum(rows.x, rows.order.slots, topk)
