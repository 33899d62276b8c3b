"""What the reference builds its models from, beyond the contract that `tests/conformance` checks."""

import pytest
import torch

from diptych.reference.layers import MLP, Linear, RMSNorm, RotaryEmbedding
from diptych.shared.config import RopeConfig


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


def test_the_table_of_angles_is_made_anew_for_positions_on_another_device() -> None:
    rotary_emb = RotaryEmbedding(RopeConfig("default", 10000.0, 8), 8, 16)
    positions, (q, k) = torch.arange(3), torch.ones(2, 3, 4, 8)
    expected = rotary_emb(positions, q, k)[0]
    rotary_emb.table = torch.empty(16, 2, 1, 8, device="meta")  # as positions of that device leave it
    assert torch.equal(rotary_emb(positions, q, k)[0], expected)
