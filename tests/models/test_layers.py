"""What the reference builds its models from, beyond the contract that `tests/conformance` checks."""

import pytest
import torch

from reference.layers import MLP, Linear, RMSNorm


@pytest.mark.parametrize("bias", [False, True])
def test_mlp(bias: bool) -> None:
    mlp = MLP(10, 14, bias).double()
    for parameter in mlp.parameters():
        parameter.data.normal_()
    assert [linear.bias is not None for linear in (mlp.gate_proj, mlp.up_proj, mlp.down_proj)] == [bias] * 3
    x = torch.randn(3, 10, dtype=torch.float64)

    def linear(layer: Linear, x: torch.Tensor) -> torch.Tensor:
        y = x @ layer.weight.T
        return y if layer.bias is None else y + layer.bias

    gate = linear(mlp.gate_proj, x)
    expected = linear(mlp.down_proj, gate * gate.sigmoid() * linear(mlp.up_proj, x))
    torch.testing.assert_close(mlp(x), expected)


def test_parameters_take_no_gradient() -> None:
    modules = (Linear(3, 4, bias=True), RMSNorm(5, 1e-6), MLP(3, 4))
    assert not any(parameter.requires_grad for module in modules for parameter in module.parameters())
