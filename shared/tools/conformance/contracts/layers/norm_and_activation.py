"""Clauses of the layers: RMSNorm, and the activation of the MLP."""

from __future__ import annotations

import torch

from diptych.shared.interfaces import Layers, RMSNorm
from diptych.shared.tools.conformance.clauses.case import EXAMPLE, Case, grid, table
from diptych.shared.tools.conformance.clauses.clause import contract
from diptych.shared.tools.conformance.clauses.compare import (
    expect_close,
    expect_equal,
    expect_form,
    expect_true,
)
from diptych.shared.tools.conformance.clauses.device import building, check_device
from diptych.shared.tools.conformance.clauses.inputs import FLOAT_TYPES, Inputs, type_name
from diptych.shared.tools.conformance.clauses.poison import amid_poison, poisoned, run_poisoned
from diptych.shared.tools.conformance.clauses.tolerance import tolerance

EPS = 1e-5


class Rows(Case):
    """The shape of an input: num_tokens rows; with `num_heads` > 0 each row has that many heads."""

    seed = 0

    def check(self) -> None:
        if self.size < 1:
            raise ValueError(f"size must be at least 1, got {self.size}")

    def draw(self, inputs: Inputs, size: int | None = None, std: float = 1.0) -> torch.Tensor:
        """A view into a larger tensor of NaN."""
        size = size or self.size
        x = inputs.normal(self.num_tokens, max(self.num_heads, 1) * size, dtype=self.dtype, std=std)
        x = amid_poison(x)
        return x.view(self.num_tokens, self.num_heads, size) if self.num_heads else x


def name_of_rows(dtype: torch.dtype, num_tokens: int, size: int, num_heads: int) -> str:
    return f"{num_tokens} x {size}{f', {num_heads} heads' * bool(num_heads)}, {type_name(dtype)}"


ROWS = table(
    "dtype num_tokens size num_heads",
    *(
        (dtype, *sizes)
        for dtype in FLOAT_TYPES
        for sizes in (
            (1, 1, 0),
            (5, 63, 0),
            (2, 127, 0),
            (3, 128, 7),
            (2, 129, 0),
            (130, 80, 3),
            (4, 1000, 0),
            (1, 4096, 0),
            (0, 64, 0),
        )
    ),
    name=name_of_rows,
    of=Rows,
)


def make_norm(
    impl: Layers, size: int, dtype: torch.dtype, weight: torch.Tensor, name: str = "RMSNorm"
) -> RMSNorm:
    with building(dtype):
        norm: RMSNorm = getattr(impl, name)(size, EPS)
    expect_equal(
        "parameters", [(n, tuple(p.shape)) for n, p in norm.named_parameters()], [("weight", (size,))]
    )
    norm.weight.data.copy_(weight)
    return norm


def rms_norm64(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


@contract("RMSNorm: x / sqrt(mean(x²) + eps) * weight over the last dimension; x is not modified.", ROWS)
def rms_norm(impl: Layers, case: Rows) -> None:
    inputs = Inputs(case.seed)
    x, weight = case.draw(inputs), inputs.normal(case.size, dtype=case.dtype)
    before = x.clone()
    y = run_poisoned(make_norm(impl, case.size, case.dtype, weight), x)
    expect_form("y", y, like=x)
    expect_equal("x afterwards", x, before)
    expect_close("y", y, rms_norm64(x, weight), tolerance("norm", case.dtype))


@contract(
    "RMSNorm takes the mean in float32 (a square of 30000 is no float16), and adds eps before the root.",
    grid("{value:g}, {dtype}", dtype=FLOAT_TYPES, value=(3e4, 256.0, 1e-2, 3e-3, 1e-3, 0.0)),
)
def rms_norm_magnitudes(impl: Layers, case: Case) -> None:
    inputs = Inputs(0)
    x = case.value * inputs.normal(3, 96)
    x[0] = case.value
    x, weight = x.clamp(-6e4, 6e4).to(case.dtype), inputs.normal(96, dtype=case.dtype)
    y = run_poisoned(make_norm(impl, 96, case.dtype, weight), x)
    expect_close("y", y, rms_norm64(x, weight), tolerance("norm", case.dtype))


@contract("add_and_norm is (norm(x + residual), x + residual), the sum rounded to their type.", ROWS)
def add_and_norm(impl: Layers, case: Rows) -> None:
    inputs = Inputs(case.seed)
    x, residual = case.draw(inputs), case.draw(inputs)
    weight = inputs.normal(case.size, dtype=case.dtype)
    total = x + residual
    norm = make_norm(impl, case.size, case.dtype, weight)
    y, new_residual = run_poisoned(norm.add_and_norm, x.clone(), residual.clone())
    expect_form("norm(x + residual)", y, like=x)
    expect_form("x + residual", new_residual, like=x)
    expect_equal("x + residual", new_residual, total)
    expect_close("norm(x + residual)", y, rms_norm64(total, weight), tolerance("norm", case.dtype))


@contract("Rows do not touch each other: one of NaN leaves the others as they are.", EXAMPLE)
def rms_norm_rows_are_independent(impl: Layers, case: Case) -> None:
    inputs = Inputs(0)
    x, weight = inputs.normal(5, 100), inputs.normal(100)
    norm = make_norm(impl, 100, torch.float32, weight)
    x[2] = poisoned((100,), x.dtype)
    y = run_poisoned(norm, x)
    added = run_poisoned(norm.add_and_norm, x.clone(), torch.zeros_like(x))[0]
    for what, result in (("norm", y), ("add_and_norm", added)):
        expect_close(what, result, rms_norm64(x, weight), tolerance("norm", x.dtype))


@contract(
    "GemmaRMSNorm, where a module has one: 1 + weight in place of the weight, all in float32 and rounded "
    "once; add_and_norm likewise.",
    ROWS,
)
def gemma_rms_norm(impl: Layers, case: Rows) -> None:
    if not hasattr(impl, "GemmaRMSNorm"):
        return
    inputs = Inputs(case.seed)
    x, residual = case.draw(inputs), case.draw(inputs)
    weight = inputs.normal(case.size, dtype=case.dtype, std=0.01)
    norm = make_norm(impl, case.size, case.dtype, weight, "GemmaRMSNorm")
    total = x + residual
    alone = run_poisoned(norm, x)
    added, new_residual = run_poisoned(norm.add_and_norm, x.clone(), residual.clone())
    expect_equal("x + residual", new_residual, total)
    for what, y, row in (("y", alone, x), ("norm(x + residual)", added, total)):
        expect_form(what, y, like=x)
        expected = rms_norm64(row, 1.0 + weight.double())
        expect_close(what, y, expected, tolerance("norm", case.dtype))
        if case.dtype != torch.float32 and y.numel() > 0:
            # 1 + weight in a half type would have lost most of the weight: an error below the tolerance.
            num_exact = int((y == expected.to(y.dtype)).sum())
            expect_true(f"{what} is rounded once", num_exact >= 0.95 * y.numel(), f"{num_exact} exact")


@contract("SiluAndMul: silu(gate) * up, in float32; both may be halves of the rows of one tensor.", ROWS)
def silu_and_mul(impl: Layers, case: Rows) -> None:
    x = case.draw(Inputs(case.seed), 2 * case.size, std=4.0)
    with building(case.dtype):
        act_fn = impl.SiluAndMul()
    y = run_poisoned(act_fn, *x.chunk(2, dim=-1))
    gate, up = x.double().chunk(2, dim=-1)
    expected = gate / (1 + torch.exp(-gate)) * up
    expect_form("y", y, like=up, dtype=case.dtype)
    expect_close("y", y, expected, tolerance("elementwise", case.dtype))


@contract(
    "GeluTanhAndMul, where a module has one: gelu(gate), by its formula with tanh, times up, all in float32. "
    "It overflows nowhere.",
    ROWS,
)
def gelu_tanh_and_mul(impl: Layers, case: Rows) -> None:
    if not hasattr(impl, "GeluTanhAndMul"):
        return
    x = case.draw(Inputs(case.seed), 2 * case.size)  # for large negative values 1 + tanh cancels
    if x.numel():
        x[0, ..., 0], x[-1, ..., case.size - 1] = -1e4, 1e4
    with building(case.dtype):
        act_fn = impl.GeluTanhAndMul()
    y = run_poisoned(act_fn, *x.chunk(2, dim=-1))
    gate, up = x.double().chunk(2, dim=-1)
    expected = gate / 2 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3))) * up
    expect_form("y", y, like=up, dtype=case.dtype)
    expect_close("y", y, expected, tolerance("elementwise", case.dtype))


@contract(
    "silu overflows nowhere: it is 0 far on the left and the gate itself far on the right.",
    grid("{value:g}, {dtype}", dtype=FLOAT_TYPES, value=(20.0, 90.0, 1e4)),
)
def silu_extremes(impl: Layers, case: Case) -> None:
    gate = torch.tensor([[-case.value, case.value, 0.0]], dtype=case.dtype)
    up = torch.tensor([[1.0, 2.0, 3.0]], dtype=case.dtype)
    with building(case.dtype):
        act_fn = impl.SiluAndMul()
    y = run_poisoned(act_fn, gate.to(check_device()), up.to(check_device()))
    expected = torch.tensor([[0.0, 2 * case.value, 0.0]], dtype=torch.float64)
    # silu(-20) is -4e-8: within the absolute part.
    expect_close("y", y, expected, tolerance("elementwise", case.dtype))
