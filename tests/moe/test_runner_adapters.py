"""Adapters of MoE runners over stand-ins for their libraries: choices of -1, idle experts, one hot expert."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from diptych.optimized.kernels.linear.quantize_input import quantize_input
from diptych.optimized.kernels.moe.moe_permute import (
    distinct_choices,
    quantize_pairs,
    sort_pairs,
    weighted_sum,
)
from diptych.optimized.moe import FusedExperts
from diptych.optimized.moe_runners import deep_gemm
from diptych.optimized.moe_runners.base import MoeRunner
from diptych.optimized.moe_runners.cutlass import CutlassRunner
from diptych.optimized.moe_runners.deep_gemm import DeepGemmRunner
from diptych.optimized.moe_runners.flashinfer_cutlass import FlashInferCutlassRunner
from diptych.optimized.moe_runners.flashinfer_mxfp4 import FlashInferMxfp4Runner
from diptych.optimized.moe_runners.layouts import FP8_BLOCKS, MXFP4
from diptych.optimized.moe_runners.triton_kernel import TritonKernelRunner
from diptych.optimized.quantized.quantized_moe import QuantizedExperts
from diptych.shared.interfaces import TopKOutput
from diptych.shared.tools.conformance.clauses.compare import expect_close, expect_equal
from diptych.shared.tools.conformance.clauses.device import check_device
from diptych.shared.tools.conformance.clauses.inputs import Inputs
from diptych.shared.tools.conformance.clauses.poison import run_poisoned
from diptych.shared.tools.conformance.clauses.tolerance import Tolerance, tolerance
from diptych.shared.tools.conformance.contracts.moe.expected import experts64
from diptych.shared.tools.conformance.contracts.quantized_experts.outputs import (
    EVERY_KIND,
    LIKE_GPT_OSS,
    ONE_HOT,
    expected,
)
from diptych.shared.types.quant_scheme import QuantScheme
from tests.moe.runner_libraries import DEEP_GEMM, FLASHINFER, SGL_KERNEL, TRITON_KERNELS, install

CHANNELS = QuantScheme("fp8")
ROUNDED_TWICE = Tolerance(0.1, 0.06, 0.02, "gate and up are rounded once more than in the other kernels")
NOT_QUANTIZED = Tolerance(0.3, 0.1, 0.06, "the stand-in does not quantize inputs")


def cases_of(kind: str) -> list[Any]:
    in_bf16 = [case for case in (*EVERY_KIND, *LIKE_GPT_OSS) if case.dtype == torch.bfloat16]
    hot = [case.replace(dtype=torch.bfloat16) for case in ONE_HOT]
    return [case for case in (*in_bf16, *hot) if case.kind == kind]


def check_quantized(case: Any, runner_class: type[MoeRunner], close: Tolerance) -> None:
    experts, inputs = case.make(QuantizedExperts), Inputs(5)
    if case.kind == "fp8 block":
        for scale in (experts.w13_scale.data, experts.w2_scale.data):  # as a checkpoint has them
            scale.copy_(scale[:, ::128].repeat_interleave(128, 1))
    topk, x = case.topk(inputs), inputs.normal(case.num_tokens, case.hidden_size, dtype=case.dtype)
    topk.topk_ids[0] = -1
    topk.topk_weights[0] = torch.nan
    before, wanted = x.clone(), expected(case, experts, x, topk)
    experts.runner = runner_class(experts)
    experts.runner.prepare()
    y = run_poisoned(experts, x, topk)
    expect_equal("x afterwards", x, before)
    expect_close("y", y, wanted, close)


@pytest.mark.parametrize("case", cases_of("fp8 block"), ids=lambda case: case.name)
@pytest.mark.parametrize("max_masked", [0, 128])
def test_deep_gemm(case: Any, max_masked: int, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, DEEP_GEMM)
    monkeypatch.setattr(deep_gemm, "MAX_MASKED_TOKENS", max_masked)
    check_quantized(case, DeepGemmRunner, ROUNDED_TWICE)


@pytest.mark.parametrize("case", cases_of("fp8 block"), ids=lambda case: case.name)
def test_cutlass(case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, SGL_KERNEL)
    check_quantized(case, CutlassRunner, ROUNDED_TWICE)


@pytest.mark.parametrize("case", cases_of("mxfp4"), ids=lambda case: case.name)
def test_triton_kernel_in_mxfp4(case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, TRITON_KERNELS)
    sizes = {name: -(-getattr(case, name) // 64) * 64 for name in ("hidden_size", "intermediate_size")}
    check_quantized(case.replace(**sizes), TritonKernelRunner, tolerance("moe", case.dtype))


@pytest.mark.parametrize("case", cases_of("mxfp4"), ids=lambda case: case.name)
def test_flashinfer_mxfp4(case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FLASHINFER)
    check_quantized(case, FlashInferMxfp4Runner, tolerance("moe", case.dtype))


@pytest.mark.parametrize("case", cases_of("fp8 block"), ids=lambda case: case.name)
def test_flashinfer_cutlass_in_fp8_blocks(case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FLASHINFER)
    check_quantized(case, FlashInferCutlassRunner, NOT_QUANTIZED)


@pytest.mark.parametrize(
    ("choices", "expected"),
    [
        ([[-1, 0], [-1, -1], [5, -1], [1, -1], [0, 1]], [[1, 0], [0, 1], [5, 0], [1, 0], [0, 1]]),
        ([[-1, 3, 0, -1, 1, -1]], [[2, 3, 0, 4, 1, 5]]),
        ([[4, -1, 2]] * 300, [[4, 0, 2]] * 300),
        ([[-1]], [[0]]),
    ],
)
def test_padding_is_an_expert_that_the_token_has_not(
    choices: list[list[int]], expected: list[list[int]]
) -> None:
    ids = torch.tensor(choices, dtype=torch.int32, device=check_device())
    weights = torch.rand(ids.shape, device=check_device()) + 1
    found = distinct_choices(TopKOutput(weights, ids))
    assert found.topk_ids.tolist() == expected
    assert found.topk_ids.dtype == torch.int32
    expect_equal("weights", found.topk_weights, torch.where(ids >= 0, weights, 0.0))


@pytest.mark.parametrize(("bias", "limit"), [(False, 0.0), (True, 1.5), (True, 0.0)])
@pytest.mark.parametrize("runner_class", [TritonKernelRunner, FlashInferCutlassRunner])
def test_16_bits(
    runner_class: type[MoeRunner], bias: bool, limit: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, TRITON_KERNELS | FLASHINFER)
    inputs = Inputs(0)
    experts = FusedExperts(4, 32, 24, bias, limit)
    inputs.fill_(experts)
    experts.to(check_device(), torch.bfloat16)
    ids = torch.tensor([[0, 3], [2, -1], [-1, -1], [-1, 0]], dtype=torch.int32, device=check_device())
    topk, x = TopKOutput(inputs.uniform(4, 2), ids), inputs.normal(4, 32, dtype=torch.bfloat16)
    wanted = experts64(x, topk, experts.w13, experts.w2, experts.b13, experts.b2, limit)
    experts.runner = runner_class(experts)
    experts.runner.prepare()
    for _ in range(2):
        expect_close("y", experts(x, topk), wanted, tolerance("moe", torch.bfloat16))
    with pytest.raises(ValueError, match=r"dtype torch\.float32 is not supported"):
        experts(x.float(), topk)


MXFP4_EXPERTS = QuantizedExperts(2, 128, 128, MXFP4)
STATIC = QuantizedExperts(2, 128, 128, QuantScheme("fp8", None, inputs="static"))
OTHERS = [FusedExperts(2, 128, 128), QuantizedExperts(2, 128, 128, CHANNELS), MXFP4_EXPERTS, STATIC]


@pytest.mark.parametrize("experts", OTHERS)
@pytest.mark.parametrize("runner_class", [DeepGemmRunner, CutlassRunner])
def test_fp8_blocks_are_needed(experts: Any, runner_class: type[MoeRunner]) -> None:
    with pytest.raises(ValueError, match=r"Runner: weights.* is not supported; supported: .*128x128"):
        runner_class(experts)


def test_other_sizes_and_activations_are_refused() -> None:
    with pytest.raises(ValueError, match=r"intermediate size \(128, 96\) is not supported"):
        DeepGemmRunner(QuantizedExperts(2, 128, 96, FP8_BLOCKS))
    with pytest.raises(ValueError, match=r"biases or a swiglu_limit is not supported"):
        CutlassRunner(QuantizedExperts(2, 128, 128, FP8_BLOCKS, bias=True))
    with pytest.raises(ValueError, match=r"sizes \(128, 96\) with FP8 blocks is not supported"):
        FlashInferCutlassRunner(QuantizedExperts(2, 128, 96, FP8_BLOCKS))
    with pytest.raises(ValueError, match=r"MXFP4 with .* size \(128, 96\) is not supported; .* of 64"):
        TritonKernelRunner(QuantizedExperts(2, 128, 96, MXFP4))
    for experts in OTHERS[:2]:
        with pytest.raises(ValueError, match=r"weights: .*; supported: weights: mxfp4"):
            FlashInferMxfp4Runner(experts)
    for runner_class in (FlashInferCutlassRunner, TritonKernelRunner):
        with pytest.raises(ValueError, match=r"weights: fp8 by channel.* is not supported"):
            runner_class(OTHERS[1])
        with pytest.raises(ValueError, match=r"weights: .*, static scales of inputs is not supported"):
            runner_class(STATIC)


@pytest.mark.parametrize(("alignment", "by_expert"), [(1, False), (128, False), (128, True)])
@pytest.mark.parametrize(
    ("num_tokens", "top_k", "num_experts"), [(1, 1, 1), (5, 3, 7), (128, 8, 16), (300, 1, 3), (700, 4, 9)]
)
def test_sorted_pairs(num_tokens: int, top_k: int, num_experts: int, alignment: int, by_expert: bool) -> None:
    if by_expert and num_tokens > alignment:
        return
    inputs = Inputs(num_tokens)
    ids = torch.stack([inputs.permutation(num_experts)[:top_k] for _ in range(num_tokens)])
    ids = torch.where(inputs.uniform(num_tokens, top_k) < 0.2, -1, ids).int()
    order, flat = sort_pairs(ids, num_experts, alignment, by_expert), ids.flatten().tolist()
    num_rows = num_experts * alignment if by_expert else len(order.pairs)
    expect_equal("counts", order.counts.tolist(), [flat.count(e) for e in range(num_experts)])
    for pair, (e, slot) in enumerate(zip(flat, order.slots.flatten().tolist())):
        if e < 0:
            assert slot == num_rows
        elif by_expert:
            assert (slot // alignment, slot % alignment < order.counts[e]) == (e, True)
        else:
            assert order.pairs[slot] == pair
            assert order.experts[slot] == e
            assert order.first[e] <= slot
            assert order.first[e] % alignment == 0
    rows = torch.full((num_rows + 1, 8), torch.nan, device=check_device())
    rows[order.slots.flatten()] = inputs.normal(num_tokens * top_k, 8)
    topk = TopKOutput(torch.where(ids < 0, torch.nan, inputs.uniform(num_tokens, top_k)), ids)
    weighted = rows[order.slots].double() * topk.topk_weights[..., None]
    wanted = torch.where(ids[..., None] >= 0, weighted, 0.0).sum(1)
    expect_close("y", weighted_sum(rows[:-1], order.slots, topk), wanted, tolerance("moe", torch.float32))


@pytest.mark.parametrize("silu", [False, True])
def test_quantized_pairs_have_the_bits_of_quantized_inputs(silu: bool) -> None:
    """In the row of each slot, and nothing elsewhere."""
    inputs, num_rows = Inputs(0), 9
    slots = torch.tensor([[4, 0], [num_rows, 7], [2, num_rows]], device=check_device())
    rows, tokens = torch.tensor([[4, 0, 7, 2], [0, 0, 1, 2]], device=check_device()).unbind()
    x = inputs.normal(num_rows if silu else 3, 384 * (1 + silu), dtype=torch.bfloat16)
    x[0, :128] = 0.0
    source = rows if silu else tokens
    wanted = quantize_input(x, FP8_BLOCKS, silu=silu)
    found = quantize_pairs(x, slots, num_rows, silu)
    expect_equal("q", found.q.view(torch.uint8)[rows], wanted.q.view(torch.uint8)[source])
    expect_equal("scale", found.scale[rows], wanted.scale[source])
