"""GEMMs cut into parts of their columns, whose sums are left to the next norm; planted bugs."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from types import ModuleType

import pytest
import torch

from diptych.optimized.kernels.linear import small_batch_linear, tiled_gemm
from diptych.optimized.layers import Linear
from diptych.shared.tools.conformance.clauses.compare import expect_close
from diptych.shared.tools.conformance.clauses.device import check_device
from diptych.shared.tools.conformance.clauses.inputs import HALF_TYPES, type_name
from diptych.shared.tools.conformance.clauses.poison import run_poisoned
from diptych.shared.tools.conformance.clauses.tolerance import Tolerance
from tests.kernels.linear_cases import Case, Data, Planted, close, name_of, planted, run


def summed(columns: int) -> Tolerance:
    """For unrounded float32 sums: tensor cores truncate at each step of 16 columns, where other code rounds.
    On average that is half a unit in the last place of the sum, always towards 0."""
    steps, exact = columns / 16, close(torch.float32, "elementwise")
    reason = f"{steps:g} steps, each cut off; sums up to 4, of variance 1 at most"
    atol, rms = max(exact.atol, steps * 2.0**-22), max(exact.rms, steps * 2.0**-24)
    return Tolerance(atol, exact.rtol, rms, reason)


def check_parts(module: ModuleType, case: Case) -> None:
    assert case.plan is not None
    data = Data(case)
    size = case.in_features
    share = -(-size // (case.plan[4] * case.plan[2])) * case.plan[2]
    parts = run_poisoned(module.linear_partial_sums, data.x, data.weight)
    assert parts.dtype == torch.float32
    assert parts.shape == (case.plan[4], case.num_tokens, case.out_features)
    # Nothing of the half type's rounding.
    expect_close("sum", parts.double().sum(0), data.product(), summed(share))
    for i, part in enumerate(parts):
        columns = slice(i * share, min(i * share + share, size))
        expected = data.x[:, columns].double() @ data.weight[:, columns].double().T
        expect_close(f"part {i}", part, expected, summed(share))


PARTED = [
    Case("tiled_gemm", 3, 70, 328, (16, 64, 64, 3, 2), margin=8),
    Case("tiled_gemm", 33, 40, 512, (64, 32, 128, 2, 4), margin=8),
    Case("tiled_gemm", 20, 64, 600, (32, 64, 128, 2, 3)),  # parts of 256, 256 and 88 columns
    Case("tiled_gemm", 64, 33, 100, (64, 64, 64, 2, 3), margin=8),  # the last part has none
]


@pytest.mark.parametrize("dtype", HALF_TYPES, ids=type_name)
@pytest.mark.parametrize("case", PARTED, ids=name_of)
def test_parts(case: Case, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    run(check_parts, replace(case, dtype=dtype), monkeypatch)


def test_what_is_cut_into_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """By how many, for so many tokens: None where a kernel adds up all of a GEMM. Nothing is computed."""
    monkeypatch.setattr(small_batch_linear, "tiled_gemm", lambda x, weight, y: None)
    monkeypatch.setattr(Linear, "add_to", lambda self, residual, x: residual)

    def parts_of(
        out_features: int, in_features: int, dtype: torch.dtype = torch.bfloat16
    ) -> list[int | None]:
        weight = torch.zeros(out_features, in_features, dtype=dtype, device=check_device())
        found: list[int | None] = []
        for num_tokens in (1, 4, 5, 17, 33, 64, 65):
            x = torch.zeros(num_tokens, in_features, dtype=dtype, device=check_device())
            linear = Linear(in_features, out_features)
            linear.weight.data = weight
            stream = linear.add_later(x.new_zeros(num_tokens, out_features), x)
            found.append(None if stream.pending is None else len(stream.pending.parts))
        return found

    assert parts_of(1024, 1536) == [None, None, 3, 3, 3, 3, None]
    assert parts_of(1024, 1000) == 7 * [None]
    assert parts_of(1024, 1536, torch.float32) == 7 * [None]
    assert parts_of(1032, 3080) == [None, 4, 4, 4, 3, 3, None]
    assert parts_of(128, 1536) == 7 * [None]


SHAPES = [(1024, 2048), (1024, 3072), (2048, 4096), (4096, 4096), (4096, 14336)]


@pytest.mark.gpu
@pytest.mark.parametrize(("num_tokens", "shape"), [*product((5, 32, 64), SHAPES), (64, (5120, 17408))])
def test_large_parts(num_tokens: int, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    plan = tiled_gemm.plan(num_tokens, *shape, False, in_parts=True)
    assert plan.parts > 1
    test_parts(Case("tiled_gemm", num_tokens, *shape, tuple(plan), margin=8), torch.bfloat16, monkeypatch)


test_planted_bugs = planted(
    "split-K",
    {
        "a part goes on to the end": Planted(
            "tiled_gemm", "tl.minimum(first + part_size, size)", "size", check_parts, PARTED[1]
        ),
        "every part is of the first columns": Planted(
            "tiled_gemm", "first = tl.program_id(1) * part_size", "first = 0", check_parts, PARTED[1]
        ),
        "parts are written over each other": Planted(
            "tiled_gemm", "tl.program_id(1) * stride_part", "0", check_parts, PARTED[1]
        ),
    },
)
