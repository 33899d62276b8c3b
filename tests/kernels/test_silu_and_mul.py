"""silu(gate) * up beyond the contract of the layer: long rows, many of them, and what is not finite."""

import pytest
import torch

from diptych.optimized.kernels.linear.silu_and_mul import silu_and_mul
from diptych.shared.tools.conformance.clauses.compare import expect_close
from diptych.shared.tools.conformance.clauses.device import check_device
from diptych.shared.tools.conformance.clauses.inputs import FLOAT_TYPES, Inputs
from diptych.shared.tools.conformance.clauses.poison import amid_poison, run_poisoned
from diptych.shared.tools.conformance.clauses.tolerance import tolerance


def exact(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.double().chunk(2, dim=-1)
    return gate / (1 + (-gate).exp()) * up


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 63), (130, 24), (65, 1), (2, 1025), (1, 3072), (2, 14336)])
def test_against_float64(shape: tuple[int, int], dtype: torch.dtype) -> None:
    gate_up = amid_poison(Inputs(0).normal(shape[0], 2 * shape[1], dtype=dtype, std=3.0))
    y = run_poisoned(silu_and_mul, gate_up)
    assert y.is_contiguous()
    expect_close("y", y, exact(gate_up), tolerance("elementwise", dtype))


def test_what_is_not_finite_is_handed_on_by_its_element_alone() -> None:
    gate_up = Inputs(1).normal(3, 40)
    gate_up[1, 7], gate_up[2, 25] = torch.nan, torch.inf
    y = silu_and_mul(gate_up)
    assert torch.isfinite(y).logical_not().nonzero().tolist() == [[1, 7], [2, 5]]


def test_leading_dimensions_stay() -> None:
    assert silu_and_mul(torch.zeros(2, 3, 8, device=check_device())).shape == (2, 3, 4)
    assert silu_and_mul(torch.zeros(0, 8, device=check_device())).shape == (0, 4)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(2048, 3072), (1025, 12288), (64, 14336)])
def test_large(shape: tuple[int, int]) -> None:
    test_against_float64(shape, torch.bfloat16)
