"""Quantized inputs beyond the contract: the kernels before them, and division by reciprocals."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from diptych.optimized.kernels.linear import quantize_input as kernel
from diptych.optimized.kernels.linear.quantize_input import quantize_input
from diptych.optimized.kernels.linear.rms_norm import rms_norm
from diptych.optimized.kernels.linear.silu_and_mul import silu_and_mul
from diptych.shared.tools.conformance.clauses.compare import Mismatch, expect_equal
from diptych.shared.tools.conformance.clauses.device import check_device
from diptych.shared.tools.conformance.clauses.inputs import HALF_TYPES, Inputs, type_name
from diptych.shared.tools.conformance.clauses.poison import amid_poison
from diptych.shared.tools.conformance.contracts.quantization.linear import SCHEMES
from tests.planted import Bug, Bugs


@pytest.mark.parametrize("kind", ["fp8 token", "fp8 block", "int8 token"])
def test_norm_and_swiglu_are_those_of_their_own_kernels(kind: str) -> None:
    scheme, dtype = SCHEMES[kind], torch.float16  # the interpreter does not round bfloat16 in all kernels
    weight = Inputs(1).normal(320, dtype=dtype)
    x, gate_up = (amid_poison(Inputs(size).normal(3, size, dtype=dtype)) for size in (320, 640))
    for fused, plain in (
        (quantize_input(x, scheme, norm=(weight, 1e-5)), rms_norm(x, weight, 1e-5)),
        (quantize_input(gate_up, scheme, silu=True), silu_and_mul(gate_up)),
    ):
        expected = quantize_input(plain, scheme)
        expect_equal("q", fused.q.view(torch.uint8), expected.q.view(torch.uint8))
        expect_equal("scale", fused.scale, expected.scale)


def check_codes(module: ModuleType, kind: str, dtype: torch.dtype) -> None:
    """The kernel divides by reciprocals: for tiny and huge scales too, beyond the range of a static one, and
    with the sign of zeros. Rows of one run of columns, and of two."""
    scheme, generator = SCHEMES[kind], torch.Generator().manual_seed(0)
    limits, exponents = torch.finfo(dtype), range(-130, 127, 8)
    for size in (384, 4608):
        exponent = torch.randint(-16, 1, (len(exponents), size), generator=generator).double()
        exponent += torch.tensor(exponents)[:, None]
        x = torch.randn(exponent.shape, generator=generator, dtype=torch.float64) * 2.0**exponent
        x = x.clamp(-limits.max, limits.max).to(dtype)
        if dtype == torch.bfloat16:
            x[x.abs() < limits.tiny] = 0.0  # Triton's interpreter widens subnormal ones wrongly
        x[:, 0], x[:, 1] = 0.0, -0.0
        groups = x.float().unflatten(1, (-1, 128 if scheme.inputs == "group" else size))
        if scheme.inputs == "static":
            scale = torch.tensor([1.7e-3])
            found = module.quantize_input(x.to(check_device()), scheme, scale.to(check_device()))
        else:
            found = module.quantize_input(x.to(check_device()), scheme)
            scale = groups.abs().amax(2) / (448.0 if scheme.weight_type == "fp8" else 127.5)
            expect_equal("scale", found.scale.cpu(), scale)
            scale = scale.where(scale != 0.0, 1.0)[:, :, None]
        quotient = (groups / scale).flatten(1)
        if scheme.weight_type == "fp8":
            expected = quotient.clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
        else:
            expected = quotient.round().clamp(-128, 127).to(torch.int8)
        expect_equal("q", found.q.cpu().view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("dtype", [*HALF_TYPES, torch.float32], ids=type_name)
@pytest.mark.parametrize("kind", ["fp8 token", "fp8 block", "fp8 static", "int8 token", "int8 static"])
def test_codes_are_those_of_a_division(kind: str, dtype: torch.dtype) -> None:
    check_codes(kernel, kind, dtype)


BUGS = Bugs("quantized inputs", finder="check_codes")
for _name, (_kind, *_words) in {
    "quotients are not corrected": (
        "fp8 token",
        "quotient = _fma(_fma(estimate, divisor, x), reciprocal, estimate)",
        "quotient = estimate",
    ),
    "tiny scales stay as they are": ("fp8 token", "scale < 2.0**-60", "scale < 0.0"),
    "a quotient that overflows is NaN": ("fp8 static", "IS_HALF, not STATIC)", "IS_HALF, True)"),
}.items():
    _entry = "optimized.kernels.linear.quantize_input"
    BUGS.words(_name, _entry, (_entry, *_words), where=_kind)


@BUGS.found_by(Mismatch)
def test_planted_bugs(bug: Bug) -> None:
    check_codes(bug.planted, bug.where, torch.bfloat16)
