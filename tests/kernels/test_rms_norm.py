"""RMSNorm's kernel beyond the contract of the layer: in place, long rows, many of them."""

import pytest
import torch

from diptych.optimized.kernels.linear.rms_norm import (
    add_partial_sums_rms_norm,
    add_rms_norm,
    rms_norm,
    rms_norm_add,
)
from diptych.shared.tools.conformance.clauses.compare import expect_close, expect_equal
from diptych.shared.tools.conformance.clauses.device import check_device
from diptych.shared.tools.conformance.clauses.inputs import FLOAT_TYPES, Inputs
from diptych.shared.tools.conformance.clauses.poison import amid_poison, poisoned, run_poisoned
from diptych.shared.tools.conformance.clauses.tolerance import tolerance

EPS = 1e-6
SHAPES = [(1, 1), (3, 63), (1, 127), (2, 129), (130, 24), (5, 1000), (1, 1024), (2, 5120), (1, 16384)]


def exact(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x = x.double()
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight.double()


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_against_float64(shape: tuple[int, int], dtype: torch.dtype) -> None:
    inputs = Inputs(0)
    x = amid_poison(inputs.normal(*shape, dtype=dtype, std=3.0))
    residual = amid_poison(inputs.normal(*shape, dtype=dtype))
    weight = inputs.normal(shape[1], dtype=dtype)
    total = x + residual
    expect_close("norm", run_poisoned(rms_norm, x, weight, EPS), exact(x, weight), tolerance("norm", dtype))
    normed, stream = run_poisoned(add_rms_norm, x, residual, weight, EPS)
    expect_equal("sum", stream, total)
    expect_close("norm of the sum", normed, exact(total, weight), tolerance("norm", dtype))
    residual = amid_poison(inputs.normal(*shape, dtype=dtype))
    norm, before = exact(x, weight), residual.double()
    stream = run_poisoned(rms_norm_add, x, residual, weight, EPS)
    assert stream.data_ptr() == residual.data_ptr()
    # A limit of each element: the norm's, and one more rounding.
    allowed = tolerance("norm", dtype).allowed(norm) + torch.finfo(dtype).eps * (before + norm).abs()
    assert ((stream.double() - before - norm).abs() <= allowed).all()


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
@pytest.mark.parametrize("num_parts", [1, 2, 3, 4])
@pytest.mark.parametrize("shape", [(3, 63), (130, 24), (2, 1024), (1, 5120)])
def test_parts_are_added_up_and_rounded_once(
    shape: tuple[int, int], num_parts: int, dtype: torch.dtype
) -> None:
    inputs = Inputs(0)
    parts = amid_poison(inputs.normal(num_parts, *shape, std=3.0))
    residual = amid_poison(inputs.normal(*shape, dtype=dtype))
    weight = inputs.normal(shape[1], dtype=dtype)
    total = parts.double().sum(0) + residual.double()
    normed, stream = run_poisoned(add_partial_sums_rms_norm, parts, residual, weight, EPS)
    assert stream.data_ptr() == residual.data_ptr()
    expect_close("sum", stream, total, tolerance("elementwise", dtype))
    expect_close("norm of the sum", normed, exact(stream, weight), tolerance("norm", dtype))
    # Halves of the last digit that bfloat16 has: rounded part by part, they would be lost or doubled.
    ulp = torch.finfo(dtype).eps
    small = torch.full((4, *shape), ulp / 2, device=parts.device)
    one = torch.ones(shape, dtype=dtype, device=parts.device)
    _, stream = add_partial_sums_rms_norm(small, one, weight, EPS)
    expect_equal("small parts", stream, torch.full_like(one, 1 + 2 * ulp))


def test_both_results_are_written_in_place_and_nothing_beside_them() -> None:
    inputs = Inputs(1)
    tensors = [poisoned((8, 106), torch.float32, check_device()) for _ in range(2)]
    views = [tensor[3:7, 3:103] for tensor in tensors]
    for view in views:
        view.copy_(inputs.normal(4, 100))
    results = add_rms_norm(*views, inputs.normal(100), EPS)  # type: ignore[call-arg]
    for tensor, view, result in zip(tensors, views, results):
        assert result.data_ptr() == view.data_ptr()
        assert result.stride() == view.stride()
        assert int(torch.isnan(tensor).sum()) == tensor.numel() - view.numel()


def test_a_row_of_nan_or_infinity_stays_alone() -> None:
    inputs = Inputs(2)
    x, weight = inputs.normal(70, 40), inputs.normal(40)
    x[3], x[68, 0] = torch.nan, torch.inf
    y = rms_norm(x, weight, EPS)
    kept = [i for i in range(70) if i not in (3, 68)]
    expect_close("the others", y[kept], exact(x[kept], weight), tolerance("norm", torch.float32))
    assert torch.isnan(y[3]).all()


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(2048, 4096), (4095, 1024), (300, 5120), (16384, 128), (257, 8192)])
def test_large(shape: tuple[int, int]) -> None:
    test_against_float64(shape, torch.bfloat16)
