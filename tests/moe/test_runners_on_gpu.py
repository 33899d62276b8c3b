"""Each MoE runner with its library, beside float64: choices of -1, idle experts, one hot expert."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from diptych.optimized.moe import FusedExperts
from diptych.optimized.moe_runners import table
from diptych.optimized.quantized.quantized_moe import QuantizedExperts
from diptych.shared.interfaces import TopKOutput
from diptych.shared.tools.conformance.clauses.compare import expect_close
from diptych.shared.tools.conformance.clauses.inputs import Inputs
from diptych.shared.tools.conformance.clauses.tolerance import Tolerance
from diptych.shared.tools.conformance.contracts.moe.expected import experts64
from diptych.shared.tools.conformance.contracts.quantized_experts.outputs import Experts, expected
from tests.gpu.flashinfer_modules import EXPERTS

pytestmark = pytest.mark.gpu

CLOSE = Tolerance(0.1, 0.06, 0.02, "gate and up are rounded once more than in the other kernels")
GPT_OSS = {"bias": True, "swiglu_limit": 2.0}
WEIGHTS = [
    ("triton_kernel", "bf16", {}),
    ("triton_kernel", "bf16", GPT_OSS),
    ("triton_kernel", "mxfp4", {}),
    ("triton_kernel", "mxfp4", GPT_OSS),
    ("deep_gemm", "fp8 block", {}),
    ("cutlass", "fp8 block", {}),
    ("flashinfer_cutlass", "bf16", {}),
    ("flashinfer_cutlass", "bf16", GPT_OSS),
    ("flashinfer_cutlass", "fp8 block", {}),
    ("flashinfer_mxfp4", "mxfp4", {}),
    ("flashinfer_mxfp4", "mxfp4", GPT_OSS),
]


def make(kind: str, num_tokens: int, num_used: int, **options: Any) -> tuple[Any, Any, TopKOutput, Any]:
    """Experts, inputs, choices, and the function of the expected output."""
    hidden, inter = (320, 192) if kind == "mxfp4" else (256, 384)
    sizes = {"hidden_size": hidden, "intermediate_size": inter, "num_used": num_used}
    if num_used == 1:
        sizes["num_chosen"] = 1
    fields = {"kind": "mxfp4" if kind == "bf16" else kind, "dtype": torch.bfloat16, **sizes, **options}
    case, inputs = Experts(kind, num_tokens=num_tokens, **fields), Inputs(5)
    topk, x = case.topk(inputs), inputs.normal(num_tokens, hidden, dtype=torch.bfloat16)
    if kind != "bf16":
        experts = case.make(QuantizedExperts)
        if kind == "fp8 block":
            for scale in (experts.w13_scale.data, experts.w2_scale.data):
                scale.copy_(scale[:, ::128].repeat_interleave(128, 1))
        return experts, x, topk, lambda: expected(case, experts, x, topk)
    dense = FusedExperts(5, hidden, inter, case.bias, case.swiglu_limit)
    inputs.fill_(dense)
    dense.to(torch.bfloat16).cuda()
    matrices = dense.w13, dense.w2, dense.b13, dense.b2
    return dense, x, topk, lambda: experts64(x, topk, *matrices, case.swiglu_limit).cuda()


def marks(name: str) -> list[pytest.MarkDecorator]:
    needs = table.NEEDS[name]
    compiled = [pytest.mark.compiled(EXPERTS)] if needs.note == table.COMPILES else []
    return [pytest.mark.library(needs.library), *compiled]


@pytest.mark.parametrize(
    ("name", "kind", "options"),
    [pytest.param(*case, marks=marks(case[0])) for case in WEIGHTS],
    ids=lambda value: str(value),
)
def test_runner(name: str, kind: str, options: dict[str, Any]) -> None:
    runner_class = table.find_runner(name, "none", torch.device("cuda"))
    for num_tokens, num_used in ((1, 4), (23, 4), (200, 4), (200, 1)):
        experts, x, topk, wanted = make(kind, num_tokens, num_used, **options)
        y64 = wanted()
        experts.runner = runner_class(experts)
        experts.runner.prepare()
        expect_close(f"y of {num_tokens} tokens", experts(x, topk), y64, CLOSE)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = experts(x, topk)
        graph.replay()
        expect_close(f"y of {num_tokens} tokens from a graph", y, y64, CLOSE)
