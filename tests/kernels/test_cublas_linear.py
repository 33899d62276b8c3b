"""GEMMs by cuBLAS, alone and in layers."""

from __future__ import annotations

import pytest
import torch

from diptych.optimized import layers
from diptych.optimized.kernels.linear import cublas_linear, small_batch_linear
from diptych.shared.tools.conformance.clauses.compare import expect_close
from diptych.shared.tools.conformance.clauses.device import building
from diptych.shared.tools.conformance.clauses.inputs import Inputs
from diptych.shared.tools.conformance.clauses.poison import run_poisoned
from tests.kernels.test_small_batch_linear import close

BF16 = torch.bfloat16


@pytest.mark.parametrize("num_tokens", [40, 100])
def test_layers_left_to_cublas(num_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_batch_linear, "kernel_for", lambda *_, **__: "cublas")
    inputs = Inputs(0)
    with building(BF16):
        merged, down, norm = (
            layers.MergedLinear(48, {"a": 16, "b": 8}), layers.Linear(24, 48), layers.RMSNorm(48, 1e-6)
        )  # fmt: skip
    for module in (merged, down, norm):
        inputs.fill_(module)
    h = inputs.normal(num_tokens, 48, dtype=BF16)
    y = run_poisoned(merged, h, norm)
    total = run_poisoned(down.add_to, h.clone(), y)
    logits = run_poisoned(layers.logits, h, merged.weight)
    assert logits.dtype == torch.float32
    expect_close("logits", logits, h.double() @ merged.weight.double().T, close(BF16, "elementwise"))
    expect_close("sum", total, h.double() + y.double() @ down.weight.double().T, close(BF16, "elementwise"))


def test_a_bias_is_added() -> None:
    inputs = Inputs(0)
    x, weight, bias, residual = (inputs.normal(*shape) for shape in ((6, 40), (24, 40), (24,), (6, 24)))
    weight *= 0.1
    expected = x.double() @ weight.double().T + bias.double()
    expect_close("y", cublas_linear.linear(x, weight, bias), expected, close(torch.float32, "elementwise"))
    expected = expected + residual.double()
    y = cublas_linear.linear_add(x, weight, residual, bias)
    expect_close("sum", y, expected, close(torch.float32, "elementwise"))
