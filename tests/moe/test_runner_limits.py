"""Adapters of MoE runners at sizes and limits that change what a library is given."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from diptych.optimized.kernels.linear.quantize_input import quantize_input
from diptych.optimized.kernels.moe.moe_permute import sort_pairs
from diptych.optimized.moe import FusedExperts
from diptych.optimized.moe_runners.cutlass import CutlassRunner
from diptych.optimized.moe_runners.layouts import FP8_BLOCKS
from diptych.optimized.moe_runners.triton_kernel import TritonKernelRunner
from diptych.optimized.quantized.quantized_moe import QuantizedExperts
from diptych.shared.interfaces import TopKOutput
from diptych.shared.tools.conformance.clauses.compare import expect_close, expect_equal
from diptych.shared.tools.conformance.clauses.device import check_device
from diptych.shared.tools.conformance.clauses.inputs import Inputs
from diptych.shared.tools.conformance.clauses.tolerance import tolerance
from diptych.shared.tools.conformance.contracts.moe.expected import experts64
from tests.moe.runner_libraries import TRITON_KERNELS, install


def test_a_swiglu_limit_below_one(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, TRITON_KERNELS)
    inputs = Inputs(0)
    experts = FusedExperts(2, 32, 24, swiglu_limit=0.5)
    inputs.fill_(experts)
    experts.to(check_device(), torch.bfloat16)
    ids = torch.tensor([[0, 1], [1, 0]], dtype=torch.int32, device=check_device())
    topk, x = TopKOutput(inputs.uniform(2, 2), ids), inputs.normal(2, 32, dtype=torch.bfloat16)
    wanted = experts64(x, topk, experts.w13, experts.w2, None, None, 0.5)
    experts.runner = TritonKernelRunner(experts)
    experts.runner.prepare()
    expect_close("y", experts(x, topk), wanted, tolerance("moe", torch.bfloat16))


def test_each_block_of_outputs_has_its_row_of_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are so many outputs that a step of 129 rows would leave one block out."""
    num_blocks, given = 130, {}

    def gemm(*arguments: Any) -> None:
        given["scales"] = arguments[9].transpose(1, 2)

    install(monkeypatch, {"sgl_kernel": {"fp8_blockwise_scaled_grouped_mm": gemm}})
    assert sys.modules["sgl_kernel"]
    experts = QuantizedExperts(2, 128, 128, FP8_BLOCKS)
    runner = CutlassRunner(experts)
    device, out = check_device(), 128 * num_blocks
    runner.strides = {size: torch.zeros(2, dtype=torch.int64, device=device) for size in (128, out)}
    weight = torch.zeros(2, out, 128, dtype=torch.float8_e4m3fn, device=device)
    scales = torch.arange(2 * num_blocks, device=device).float().view(2, num_blocks, 1)
    order = sort_pairs(torch.tensor([[0], [1]], dtype=torch.int32, device=device), 2)
    x = quantize_input(torch.ones(2, 128, dtype=torch.bfloat16, device=device), FP8_BLOCKS)
    runner._gemm(order, x, weight, scales.repeat_interleave(128, 1))
    expect_equal("scales", given["scales"], scales)
