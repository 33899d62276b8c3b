"""GEMMs of a few tokens as test cases: their data, how to make one kernel do them, and planted bugs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from types import ModuleType
from typing import NamedTuple

import pytest
import torch

from diptych.optimized.kernels.linear import small_batch_linear
from diptych.shared.tools.conformance.clauses.device import check_device
from diptych.shared.tools.conformance.clauses.inputs import Inputs
from diptych.shared.tools.conformance.clauses.poison import amid_poison, poisoned
from diptych.shared.tools.conformance.clauses.tolerance import Tolerance, tolerance
from tests.planted import Bug, Bugs

EPS = 1e-2
"""As large as the squares of the rows below are on average: forgetting it shows."""


@dataclass(frozen=True)
class Case:
    kernel: str
    num_tokens: int
    out_features: int
    in_features: int
    plan: tuple[int, ...] | None = None
    """What the kernel's `plan` returns instead of its own choice."""
    dtype: torch.dtype = torch.float32
    margin: int = 3
    """Of poison around its matrices: with 8, rows begin at multiples of 16 bytes."""


def name_of(case: Case) -> str:
    kind = "-plan" if case.plan else "-aligned" if case.margin == 8 else ""
    return f"{case.kernel}-{case.num_tokens}x{case.in_features}to{case.out_features}{kind}"


def close(dtype: torch.dtype, *kinds: str) -> Tolerance:
    """Outputs have unit variance: an output is off by roundings of its inputs, and its own."""
    rows = [tolerance(kind, dtype) for kind in kinds]
    rms = sum(row.rms for row in rows)
    return Tolerance(
        max(5 * rms, 1e-5), sum(row.rtol for row in rows), rms, "; ".join(r.reason for r in rows)
    )


class Data:
    """Random tensors of a case, each amid poison, and what float64 makes of them."""

    def __init__(self, case: Case, rows: int | None = None) -> None:
        inputs, dtype = Inputs(0), case.dtype
        n, k, m = case.out_features if rows is None else rows, case.in_features, case.num_tokens
        self.x = amid_poison(inputs.normal(m, k, dtype=dtype, std=0.1), case.margin)
        self.norm_weight = inputs.normal(k, dtype=dtype, mean=1.0, std=0.3)
        self.weight = amid_poison(inputs.normal(n, k, dtype=dtype, std=10 * k**-0.5), case.margin)
        self.normed_weight = amid_poison(self.weight / 10, case.margin)
        self.bias = inputs.normal(n, dtype=dtype)
        # As far around as a CTA reaches.
        self.around = poisoned((m + 65, n + 65), dtype, check_device())
        self.residual = self.around[1 : m + 1, :n]
        self.residual.copy_(inputs.normal(m, n, dtype=dtype))

    def product(self) -> torch.Tensor:
        return self.x.double() @ self.weight.double().T

    def product_of_norm(self, unit_offset: bool = False) -> torch.Tensor:
        x = self.x.double()
        normed = x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt()
        normed *= self.norm_weight.double() + unit_offset
        return normed @ self.normed_weight.double().T


Check = Callable[[ModuleType, Case], None]


def run(check: Check, case: Case, patch: pytest.MonkeyPatch, module: ModuleType = small_batch_linear) -> None:
    patch.setattr(module, "kernel_for", lambda *_, **__: case.kernel)
    if case.plan is not None:
        kernel = module.tiled_gemm if case.kernel == "tiled_gemm" else module.warp_gemv
        patch.setattr(sys.modules[kernel.__module__], "plan", lambda *_, **__: case.plan)
    if case.plan is not None and case.kernel == "tiled_gemm":
        patch.setattr(module, "num_parts", lambda *_: case.plan[-1])
        patch.setattr(module, "suits_tiles", lambda *_: True)
    check(module, case)


class Planted(NamedTuple):
    """In one of the kernels, `old` is `new`; `check` on `case` finds it."""

    kernel: str
    old: str
    new: str
    check: Check
    case: Case


def planted(kind: str, rows: dict[str, Planted]) -> Callable[..., None]:
    """The test of these bugs: the check holds with the kernel as it is, and fails with the bug in it."""
    bugs = Bugs(kind)
    for name, row in rows.items():
        entry = f"optimized.kernels.linear.{row.kernel}"
        bugs.words(name, entry, (entry, row.old, row.new), where=row.kernel, finder=row.check.__name__)

    @bugs.found_by()
    def test_planted_bugs(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
        kernel, _, _, check, case = rows[bug.name]
        case = replace(case, dtype=torch.bfloat16)
        expect_right(check, case)
        wrong = getattr(bug.planted, kernel)
        monkeypatch.setattr(small_batch_linear, kernel, wrong)
        for kernels in (small_batch_linear.KERNELS, small_batch_linear.NORM_KERNELS):
            if case.kernel in kernels:
                monkeypatch.setitem(kernels, case.kernel, wrong)
        try:
            run(check, case, monkeypatch)
        except AssertionError as error:
            return {bug.finder: str(error)}
        return {}

    return test_planted_bugs


@cache
def expect_right(check: Check, case: Case) -> None:
    """Once for all bugs that this check finds on this case."""
    with pytest.MonkeyPatch.context() as patch:
        run(check, case, patch)
