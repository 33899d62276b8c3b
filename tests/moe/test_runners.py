"""The registry of MoE runners: which can be used, and when their weights change layout."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from torch import nn

from diptych import LLM, SamplingParams
from diptych.optimized.moe import FusedExperts
from diptych.optimized.moe_runners import table
from diptych.optimized.moe_runners.base import MoeRunner
from diptych.optimized.moe_runners.cutlass import CutlassRunner
from diptych.optimized.moe_runners.deep_gemm import DeepGemmRunner
from diptych.optimized.moe_runners.flashinfer_cutlass import FlashInferCutlassRunner
from diptych.optimized.moe_runners.flashinfer_mxfp4 import FlashInferMxfp4Runner
from diptych.optimized.moe_runners.layouts import FP8_BLOCKS, MXFP4, swap_halves
from diptych.optimized.moe_runners.triton_kernel import TritonKernelRunner
from diptych.optimized.quantized.quantized_moe import QuantizedExperts
from diptych.shared.config import EngineConfig
from diptych.shared.interfaces import TopKOutput
from diptych.shared.tools.conformance.clauses.device import check_device
from diptych.shared.tools.conformance.contracts.moe.expected import experts64
from diptych.shared.types.quant_scheme import QuantScheme

NAMES = tuple(table.NEEDS)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "compute_capability_major", lambda device: 9)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())


@pytest.mark.parametrize("name", NAMES)
def test_a_computer_without_a_gpu_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=rf"={name} needs a GPU of .*; this is no CUDA GPU"):
        table.find_runner(name, "none", torch.device("cpu"))


@pytest.mark.parametrize("name", NAMES)
def test_another_gpu_or_a_missing_library_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "compute_capability_major", lambda device: 8)
    with pytest.raises(ValueError, match=r"needs a GPU of compute capability .*\.x; this is 8\.x"):
        table.find_runner(name, "none", torch.device("cuda"))
    monkeypatch.setattr(table, "compute_capability_major", lambda device: table.NEEDS[name].majors[-1])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=rf"={name} needs {table.NEEDS[name].library}: pip install"):
        table.find_runner(name, "none", torch.device("cuda"))


RUNNERS = {
    "triton_kernel": TritonKernelRunner,
    "deep_gemm": DeepGemmRunner,
    "cutlass": CutlassRunner,
    "flashinfer_cutlass": FlashInferCutlassRunner,
    "flashinfer_mxfp4": FlashInferMxfp4Runner,
}


def test_what_is_in_neither_table_is_refused(monkeypatch: pytest.MonkeyPatch, hopper: None) -> None:
    for name in ("flashinfer_trtllm", "flashinfer_cutedsl"):
        with pytest.raises(
            ValueError, match=rf"={name} needs a GPU of compute capability 10\.x; this is 9\.x"
        ):
            table.find_runner(name, "none", torch.device("cuda"))
    monkeypatch.setattr(table, "compute_capability_major", lambda device: 10)
    with pytest.raises(ValueError, match=r"flashinfer_trtllm has no adapter .* none; supported: auto, trit"):
        table.find_runner("flashinfer_trtllm", "none", torch.device("cuda"))


@pytest.mark.parametrize(("name", "runner_class"), RUNNERS.items())
def test_every_runner_is_in_a_table(name: str, runner_class: Any, hopper: None) -> None:
    assert table.find_runner(name, "none", torch.device("cuda")) is runner_class
    if name in ("deep_gemm", "cutlass"):
        assert table.find_runner(name, "all_to_all", torch.device("cuda")) is runner_class
    else:  # it changes the layout of parameters, or computes all experts
        with pytest.raises(ValueError, match=rf"{name} has no adapter for expert_dispatch all_to_all"):
            table.find_runner(name, "all_to_all", torch.device("cuda"))


def test_the_engine_refuses_when_it_starts() -> None:
    with pytest.raises(ValueError, match=r"the model has no experts of the optimized panel"):
        LLM("tiny-moe", panel="reference", moe_runner_backend="triton")
    with pytest.raises(ValueError, match=r"deep_gemm needs a GPU"):
        LLM("tiny-moe", panel="optimized", moe_runner_backend="deep_gemm")
    with pytest.raises(ValueError, match=r"deterministic=True works with moe_runner_backend auto or triton"):
        LLM("tiny-moe", panel="optimized", moe_runner_backend="deep_gemm", deterministic=True)


def chosen(scheme: QuantScheme | None, dtype: torch.dtype = torch.bfloat16, **flags: Any) -> Any:
    """What auto takes for experts of a scheme."""
    sizes = 2, 128, 128
    experts = FusedExperts(*sizes) if scheme is None else QuantizedExperts(*sizes, scheme)
    config = EngineConfig(model="tiny-moe", **flags)
    table.use_runner(nn.ModuleList([experts]), config, torch.device("cuda"), dtype)
    return experts.runner


def test_auto_takes_what_was_measured_as_faster(monkeypatch: pytest.MonkeyPatch, hopper: None) -> None:
    runner = chosen(FP8_BLOCKS)
    assert (type(runner), runner.min_tokens) == (CutlassRunner, 512)
    assert type(chosen(MXFP4)) is TritonKernelRunner
    for scheme in (None, QuantScheme("fp8", inputs="token")):
        assert chosen(scheme) is None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "sgl_kernel" else object())
    runner = chosen(FP8_BLOCKS)
    assert (type(runner), runner.min_tokens) == (DeepGemmRunner, 1024)


def test_auto_keeps_the_own_kernels(monkeypatch: pytest.MonkeyPatch, hopper: None) -> None:
    """Another type or GPU, deterministic mode, experts of several ranks, few requests, no library."""
    assert chosen(FP8_BLOCKS, torch.float32) is None
    assert chosen(MXFP4, torch.float16) is None
    assert chosen(FP8_BLOCKS, deterministic=True) is None
    assert chosen(FP8_BLOCKS, tp=2, ep=2) is None
    assert chosen(MXFP4, max_running_requests=4) is None
    monkeypatch.setattr(table, "compute_capability_major", lambda device: 10)
    assert chosen(FP8_BLOCKS) is None
    monkeypatch.setattr(table, "compute_capability_major", lambda device: 9)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert chosen(FP8_BLOCKS) is None


def test_a_long_compilation_is_announced(hopper: None, capsys: pytest.CaptureFixture[str]) -> None:
    chosen(FP8_BLOCKS, moe_runner_backend="cutlass")
    assert capsys.readouterr().err == ""
    chosen(FP8_BLOCKS, moe_runner_backend="flashinfer_cutlass")
    assert "flashinfer_cutlass: FlashInfer compiles its MoE module once" in capsys.readouterr().err


def test_a_named_runner_refuses_the_type_of_the_model(hopper: None) -> None:
    with pytest.raises(ValueError, match=r"dtype torch\.float32 is not supported; supported: bfloat16"):
        chosen(FP8_BLOCKS, torch.float32, moe_runner_backend="deep_gemm")


@pytest.mark.parametrize("scheme", [None, FP8_BLOCKS])
def test_few_tokens_are_computed_by_the_own_kernels(scheme: QuantScheme | None) -> None:
    experts: Any = FusedExperts(2, 128, 128) if scheme is None else QuantizedExperts(2, 128, 128, scheme)
    for parameter in experts.parameters():
        parameter.data.zero_()
    experts.to(check_device())
    experts.runner = Marked(experts)
    experts.runner.min_tokens = 3
    for num_tokens in (2, 3):
        x = torch.zeros(num_tokens, 128, device=check_device())
        topk = TopKOutput(x[:, :1], torch.zeros_like(x[:, :1], dtype=torch.int32))
        assert (experts(x, topk) == (num_tokens >= 3)).all()


class Marked(MoeRunner):
    """Answers with ones."""

    def run(self, x: torch.Tensor, topk: TopKOutput) -> torch.Tensor:
        return torch.ones_like(x)


class Swapped(MoeRunner):
    """Keeps w13 with up before gate."""

    dtypes = (torch.float32,)

    def prepare(self) -> None:
        swap_halves(self.experts.w13)

    def run(self, x: torch.Tensor, topk: TopKOutput) -> torch.Tensor:
        up, gate = self.experts.w13.chunk(2, 1)
        return experts64(x, topk, torch.cat((gate, up), 1), self.experts.w2).to(x.dtype)


def test_weights_change_layout_behind_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    """One change, when the weights are there, and an engine whose answers are those of its own kernels."""
    prompt, params = "What is 12 + 30?", SamplingParams(max_new_tokens=3)
    wanted = LLM("tiny-moe", panel="reference").generate(prompt, params)
    monkeypatch.setattr(table, "find_runner", lambda name, dispatch, device: Swapped)
    options: Any = {"use": {"moe": "optimized"}, "moe_runner_backend": "deep_gemm"}
    swapped = LLM("tiny-moe", panel="reference", **options).generate(prompt, params)
    assert swapped == wanted
