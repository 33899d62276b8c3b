"""MoE runners: which can be used, and adapters over stand-ins for their libraries."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from diptych import LLM
from optimized.moe import FusedExperts
from optimized.moe_runners import table
from optimized.moe_runners.deep_gemm import SCHEME, DeepGemmRunner
from optimized.moe_runners.flashinfer_cutlass import FlashInferCutlassRunner
from optimized.quantized_moe import QuantizedExperts
from shared.conformance.compare import expect_close
from shared.conformance.contracts.moe.experts import experts64
from shared.conformance.contracts.quantized_experts.outputs import EVERY_KIND, expected
from shared.conformance.inputs import Inputs
from shared.conformance.tolerance import Tolerance, tolerance
from shared.interfaces import TopKOutput
from shared.types.quantization import QuantScheme

NAMES = tuple(table.NEEDS)
CHANNELS = QuantScheme("fp8")


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "compute_capability_major", lambda device: 9)
    monkeypatch.setattr(table.importlib.util, "find_spec", lambda name: object())


@pytest.mark.parametrize("name", NAMES)
def test_a_computer_without_a_gpu_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=rf"={name} needs a GPU of .*; this is no CUDA GPU"):
        table.find_runner(name, "none", torch.device("cpu"))


@pytest.mark.parametrize("name", NAMES)
def test_another_gpu_or_a_missing_library_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "compute_capability_major", lambda device: 8)
    with pytest.raises(ValueError, match=r"needs a GPU of compute capability .*10\.x; this is 8\.x"):
        table.find_runner(name, "none", torch.device("cuda"))
    monkeypatch.setattr(table, "compute_capability_major", lambda device: 10)
    monkeypatch.setattr(table.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=rf"={name} needs {table.NEEDS[name].library}: pip install"):
        table.find_runner(name, "none", torch.device("cuda"))


def test_what_is_in_neither_table_is_refused(hopper: None) -> None:
    with pytest.raises(ValueError, match=r"cutlass has no adapter .* none; supported: auto, triton, d"):
        table.find_runner("cutlass", "none", torch.device("cuda"))
    with pytest.raises(ValueError, match=r"flashinfer_cutlass has no adapter for expert_dispatch all_to_all"):
        table.find_runner("flashinfer_cutlass", "all_to_all", torch.device("cuda"))
    assert table.find_runner("deep_gemm", "all_to_all", torch.device("cuda")) is DeepGemmRunner
    assert table.find_runner("flashinfer_cutlass", "none", torch.device("cuda")) is FlashInferCutlassRunner


def test_the_engine_refuses_when_it_starts() -> None:
    with pytest.raises(ValueError, match=r"the model has no experts of the optimized panel"):
        LLM("tiny-moe", panel="reference", moe_runner_backend="triton")
    with pytest.raises(ValueError, match=r"deep_gemm needs a GPU"):
        LLM("tiny-moe", panel="optimized", moe_runner_backend="deep_gemm")
    with pytest.raises(ValueError, match=r"deterministic=True works with moe_runner_backend auto or triton"):
        LLM("tiny-moe", panel="optimized", moe_runner_backend="deep_gemm", deterministic=True)


@pytest.mark.parametrize("experts", [FusedExperts(2, 128, 128), QuantizedExperts(2, 128, 128, CHANNELS)])
def test_deep_gemm_needs_fp8_blocks(experts: Any) -> None:
    with pytest.raises(ValueError, match=r"DeepGemmRunner: weights.* is not supported; supported: .*128x128"):
        DeepGemmRunner(experts)


def test_deep_gemm_needs_whole_blocks() -> None:
    with pytest.raises(ValueError, match=r"intermediate size \(128, 96\) is not supported"):
        DeepGemmRunner(QuantizedExperts(2, 128, 96, SCHEME))


def test_deep_gemm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding choices, an idle expert, and rows of no pair, which the library leaves as they are."""

    def grouped(x: Any, w: Any, y: torch.Tensor, expert_ids: torch.Tensor) -> None:
        (q, scale), (weight, w_scale) = x, w
        assert q.shape[0] % 128 == 0
        assert w_scale.shape == (len(weight), weight.shape[1] // 128, weight.shape[2] // 128)
        dense = weight.float() * w_scale.repeat_interleave(128, 1).repeat_interleave(128, 2)
        rows = q.float() * scale.repeat_interleave(128, 1)
        for i, e in enumerate(expert_ids.tolist()):
            if e >= 0:
                y[i] = dense[e] @ rows[i]

    library: Any = ModuleType("deep_gemm")
    library.m_grouped_fp8_gemm_nt_contiguous = grouped
    monkeypatch.setitem(sys.modules, "deep_gemm", library)
    case = next(case for case in EVERY_KIND if case.kind == "fp8 block" and case.dtype == torch.bfloat16)
    experts, inputs = case.make(QuantizedExperts), Inputs(5)
    for name in ("w13_scale", "w2_scale"):  # as a checkpoint has them: one for each block
        scale = getattr(experts, name).data
        scale.copy_(scale[:, ::128].repeat_interleave(128, 1))
    topk = case.topk(inputs)
    x = inputs.normal(case.num_tokens, case.hidden_size, dtype=case.dtype)
    experts.runner = DeepGemmRunner(experts)
    y = experts(x, topk)
    close = Tolerance(0.1, 0.06, 0.02, "gate and up are rounded once more than in the other kernels")
    expect_close("y", y, expected(case, experts, x, topk), close)


def test_flashinfer_cutlass_in_fp8_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights and scales of up come first, and a block of outputs has one row of scales."""

    def fused(**arguments: Any) -> torch.Tensor:
        assert arguments["use_deepseek_fp8_block_scale"]
        matrices = arguments["fc1_expert_weights"], arguments["fc2_expert_weights"]
        w31, w2 = (
            weight.float() * scale.repeat_interleave(128, 1).repeat_interleave(128, 2)
            for weight, scale in zip(matrices, arguments["quant_scales"])
        )
        up, gate = w31.chunk(2, dim=1)
        topk = TopKOutput(arguments["token_final_scales"], arguments["token_selected_experts"])
        y = experts64(arguments["input"], topk, torch.cat((gate, up), 1), w2)
        return y.to(arguments["output_dtype"])

    library: Any = ModuleType("flashinfer.fused_moe")
    library.cutlass_fused_moe = fused
    monkeypatch.setitem(sys.modules, "flashinfer", ModuleType("flashinfer"))
    monkeypatch.setitem(sys.modules, "flashinfer.fused_moe", library)
    case = next(case for case in EVERY_KIND if case.kind == "fp8 block" and case.dtype == torch.bfloat16)
    experts, inputs = case.make(QuantizedExperts), Inputs(5)
    for scale in (experts.w13_scale.data, experts.w2_scale.data):
        scale.copy_(scale[:, ::128].repeat_interleave(128, 1))
    topk, x = case.topk(inputs), inputs.normal(case.num_tokens, case.hidden_size, dtype=case.dtype)
    wanted = expected(case, experts, x, topk)
    experts.runner = FlashInferCutlassRunner(experts)
    close = Tolerance(0.3, 0.1, 0.06, "the stand-in does not quantize inputs")
    expect_close("y", experts(x, topk), wanted, close)
    with pytest.raises(ValueError, match=r"weights: fp8 by channel.* is not supported; supported: weights"):
        FlashInferCutlassRunner(QuantizedExperts(2, 128, 128, CHANNELS))


def test_flashinfer_cutlass(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets up before gate, and padding as a choice of weight 0."""

    def fused(**arguments: Any) -> list[torch.Tensor]:
        ids, weights = arguments["token_selected_experts"], arguments["token_final_scales"]
        assert ids.min() >= 0
        w31, w2 = arguments["fc1_expert_weights"], arguments["fc2_expert_weights"]
        up, gate = w31.chunk(2, dim=1)
        topk = TopKOutput(weights, ids)
        return [
            experts64(arguments["input"], topk, torch.cat((gate, up), 1), w2).to(arguments["output_dtype"])
        ]

    library: Any = ModuleType("flashinfer.fused_moe")
    library.cutlass_fused_moe = fused
    monkeypatch.setitem(sys.modules, "flashinfer", ModuleType("flashinfer"))
    monkeypatch.setitem(sys.modules, "flashinfer.fused_moe", library)
    inputs = Inputs(0)
    experts = FusedExperts(4, 32, 24)
    inputs.fill_(experts)
    experts.to(torch.bfloat16)
    ids = torch.tensor([[0, 3], [2, -1], [-1, -1]], dtype=torch.int32)
    topk, x = TopKOutput(inputs.uniform(3, 2), ids), inputs.normal(3, 32, dtype=torch.bfloat16)
    wanted = experts64(x, topk, experts.w13, experts.w2)
    experts.runner = FlashInferCutlassRunner(experts)
    for _ in range(2):
        expect_close("y", experts(x, topk), wanted, tolerance("moe", torch.bfloat16))
    with pytest.raises(ValueError, match=r"dtype torch\.float32 is not supported"):
        experts(x.float(), topk)
