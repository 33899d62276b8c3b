"""Linear layers for a few tokens, norm, SwiGLU and residual sum inside, against float64; planted bugs."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

import pytest
import torch

from diptych.optimized.kernels.linear import small_batch_linear, tiled_gemm
from diptych.optimized.kernels.linear.cta_gemv import MAX_ROWS
from diptych.shared.tools.conformance.clauses.compare import expect_close, expect_equal
from diptych.shared.tools.conformance.clauses.device import check_device
from diptych.shared.tools.conformance.clauses.inputs import FLOAT_TYPES, HALF_TYPES, type_name
from diptych.shared.tools.conformance.clauses.poison import run_poisoned
from tests.kernels.fast_grid import fast_grid
from tests.kernels.linear_cases import EPS, Case, Check, Data, Planted, close, name_of, planted, run

CASES = [
    Case("warp_gemv", 1, 1, 1),
    Case("warp_gemv", 1, 70, 96),
    Case("warp_gemv", 2, 33, 320),
    Case("warp_gemv", 3, 5, 257),
    Case("warp_gemv", 1, 40, 3000),
    Case("warp_gemv", 2, 37, 1500, (4, 4, 1, 2)),
    Case("warp_gemv", 1, 64, 2048, (8, 2, 2, 2)),
    Case("cta_gemv", 1, 1, 1),
    Case("cta_gemv", 1, 70, 96),
    Case("cta_gemv", 1, 33, 320),
    Case("cta_gemv", 1, 256, 128),
    Case("sliced_k_gemm", 1, 1, 1),
    Case("sliced_k_gemm", 2, 70, 96),
    Case("sliced_k_gemm", 16, 33, 320),
    Case("sliced_k_gemm", 9, 16, 1100),
    Case("tiled_gemm", 3, 70, 96),
    Case("tiled_gemm", 20, 1, 328),
    Case("tiled_gemm", 33, 70, 1),
    Case("tiled_gemm", 5, 70, 328, margin=8),
    Case("tiled_gemm", 64, 130, 200, margin=8),
    Case("tiled_gemm", 33, 70, 200, (64, 32, 128, 3, 1), margin=8),
    Case("tiled_gemm", 64, 70, 100, (64, 32, 128, 3, 1)),
    Case("cublas", 3, 70, 96),
]


def check_linear(module: ModuleType, case: Case) -> None:
    data = Data(case)
    rounding = close(case.dtype, "elementwise")
    y = run_poisoned(module.linear, data.x, data.weight)
    expect_close("GEMM", y, data.product(), rounding)
    y = run_poisoned(module.linear, data.x, data.weight, data.bias)
    expect_close("GEMM with a bias", y, data.product() + data.bias.double(), rounding)
    assert y.dtype == case.dtype


def check_norm_linear(module: ModuleType, case: Case) -> None:
    data = Data(case)
    before = data.x.clone()
    rounding = close(case.dtype, "norm", "elementwise")
    arguments = data.x, data.norm_weight, EPS, data.normed_weight
    y = run_poisoned(module.norm_linear, *arguments)
    expect_close("GEMM of the norm", y, data.product_of_norm(), rounding)
    y = run_poisoned(module.norm_linear, *arguments, data.bias)
    expect_close("GEMM of the norm with a bias", y, data.product_of_norm() + data.bias.double(), rounding)
    expect_equal("x afterwards", data.x, before)


def check_norm_linear_silu(module: ModuleType, case: Case) -> None:
    data = Data(case, rows=2 * case.out_features)
    y = run_poisoned(module.norm_linear_silu, data.x, data.norm_weight, EPS, data.normed_weight)
    gate, up = data.product_of_norm().chunk(2, dim=-1)
    # Where the library multiplies, gate and up are rounded before the activation.
    rounding = close(case.dtype, "norm", "norm", "elementwise")
    expect_close("activation", y, gate.sigmoid() * gate * up, rounding)


def check_unit_offset(module: ModuleType, case: Case) -> None:
    """The norm of Gemma, in front of a GEMM and of an activation."""
    data = Data(case)
    arguments = data.x, data.norm_weight, EPS, data.normed_weight
    y = run_poisoned(module.norm_linear, *arguments, None, True)
    expected = data.product_of_norm(unit_offset=True)
    # Values are twice as large as those of the other norm.
    expect_close("GEMM of the norm", y / 2, expected / 2, close(case.dtype, "norm", "elementwise"))
    data = Data(case, rows=2 * case.out_features)
    arguments = data.x, data.norm_weight, EPS, data.normed_weight
    y = run_poisoned(module.norm_linear_silu, *arguments, True)
    gate, up = data.product_of_norm(unit_offset=True).chunk(2, dim=-1)
    rounding = close(case.dtype, "norm", "norm", "elementwise")
    expect_close("activation", y / 4, gate.sigmoid() * gate * up / 4, rounding)


def check_linear_add(module: ModuleType, case: Case) -> None:
    data = Data(case)
    expected = data.residual.double() + data.product()
    rounding = close(case.dtype, "elementwise")
    expect_close(
        "sum", run_poisoned(module.linear_add, data.x, data.weight, data.residual), expected, rounding
    )
    assert int((~torch.isnan(data.around)).sum()) == data.residual.numel()
    expected = data.residual.double() + data.product() + data.bias.double()
    y = run_poisoned(module.linear_add, data.x, data.weight, data.residual, data.bias)
    assert y.data_ptr() == data.residual.data_ptr()
    expect_close("sum with a bias", y, expected, rounding)


def check_linear_silu(module: ModuleType, case: Case) -> None:
    data = Data(case, rows=2 * case.out_features)
    y = run_poisoned(module.linear_silu, data.x, data.weight)
    gate, up = data.product().chunk(2, dim=-1)
    rounding = close(case.dtype, "norm", "elementwise")
    expect_close("activation", y, gate.sigmoid() * gate * up, rounding)


CHECKS: list[Check] = [
    check_linear, check_norm_linear, check_norm_linear_silu, check_unit_offset, check_linear_silu,
    check_linear_add,
]  # fmt: skip
CHECKS_BY_NAME = {check.__name__.removeprefix("check_"): check for check in CHECKS}


@fast_grid(case={name_of(case): case for case in CASES}, check=CHECKS_BY_NAME)
def test_against_float64(case: Case, check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    run(check, replace(case, dtype=torch.bfloat16), monkeypatch)


@fast_grid(
    kernel={kernel: kernel for kernel in ("warp_gemv", "sliced_k_gemm", "tiled_gemm", "cublas")},
    dtype={type_name(dtype): dtype for dtype in FLOAT_TYPES},
    check=CHECKS_BY_NAME,
)
def test_every_type(kernel: str, dtype: torch.dtype, check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    if kernel not in ("sliced_k_gemm", "tiled_gemm") or dtype != torch.float32:
        run(check, Case(kernel, 2, 33, 320, dtype=dtype), monkeypatch)


@pytest.mark.parametrize("dtype", HALF_TYPES, ids=type_name)
@pytest.mark.parametrize("kernel", ["warp_gemv", "sliced_k_gemm", "tiled_gemm"])
def test_float32_results_of_half_inputs_are_not_rounded_on_the_way(
    kernel: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(small_batch_linear, "kernel_for", lambda *_, **__: kernel)
    data = Data(Case(kernel, 2, 33, 320, dtype=dtype))
    y = run_poisoned(small_batch_linear.linear, data.x, data.weight, None, torch.float32)
    assert y.dtype == torch.float32
    expect_close("GEMM", y, data.product(), close(torch.float32, "elementwise"))


def test_gates_of_great_size_do_not_make_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_batch_linear, "kernel_for", lambda *_, **__: "warp_gemv")
    weight = torch.tensor([[-1000.0], [2.0]], device=check_device())
    h = torch.ones(1, 1, device=check_device())
    y = run_poisoned(small_batch_linear.norm_linear_silu, h, torch.ones_like(h[0]), 0.0, weight)
    expect_equal("activation", y, torch.zeros_like(h))


@pytest.mark.parametrize("kernel", ["warp_gemv", "sliced_k_gemm", "tiled_gemm"])
def test_a_token_of_nan_or_infinity_stays_alone(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_batch_linear, "kernel_for", lambda *_, **__: kernel)
    case = Case(kernel, 3, 20, 100, dtype=torch.float16)
    data = Data(case)
    expected = data.product()
    data.x[0], data.x[2, 5] = torch.nan, torch.inf
    y = run_poisoned(small_batch_linear.linear, data.x, data.weight)
    expect_close("the other", y[1], expected[1], close(case.dtype, "elementwise"))
    assert not torch.isfinite(y[[0, 2]]).any()


def test_the_kernel_by_shape_and_tokens() -> None:
    def chosen(out_features: int, in_features: int, dtype: torch.dtype = torch.bfloat16) -> list[str]:
        weight = torch.empty(out_features, in_features, dtype=dtype)
        xs = [torch.empty(num_tokens, in_features, dtype=dtype) for num_tokens in (1, 4, 5, 17, 33, 64)]
        is_small = in_features <= 3072 and out_features >= 1024 and dtype != torch.float32
        gated = small_batch_linear.kernel_for(xs[-1], weight, gated=True)
        assert gated == ("tiled_gemm" if is_small else "cublas")
        return [small_batch_linear.kernel_for(x, weight) for x in xs]

    assert chosen(2048, 1024) == [
        "warp_gemv",
        "warp_gemv",
        "tiled_gemm",
        "tiled_gemm",
        "tiled_gemm",
        "tiled_gemm",
    ]
    assert chosen(1000, 1024) == ["warp_gemv", "warp_gemv", "sliced_k_gemm", "cublas", "cublas", "cublas"]
    assert chosen(2048, 4096) == ["cta_gemv", "tiled_gemm", "tiled_gemm", "tiled_gemm", "cublas", "cublas"]
    assert chosen(6144, 4096) == [
        "cta_gemv",
        "tiled_gemm",
        "tiled_gemm",
        "tiled_gemm",
        "tiled_gemm",
        "tiled_gemm",
    ]
    assert chosen(4096, 4096) == ["cta_gemv", "tiled_gemm", "tiled_gemm", "tiled_gemm", "cublas", "cublas"]
    # Of rows that no descriptor takes, of other types, of routers and of heads.
    assert chosen(2048, 4100) == ["warp_gemv"] + 5 * ["cublas"]
    assert chosen(2048, 1024, torch.float32) == ["warp_gemv", "warp_gemv"] + 4 * ["cublas"]
    assert chosen(128, 4096) == chosen(MAX_ROWS + 1, 3080) == ["warp_gemv"] + 5 * ["cublas"]


def test_tiles_fit_a_multiprocessor_and_the_tensor_cores() -> None:
    shared_memory = 227 * 1024  # of Hopper, a CTA
    rows, parts = set(), set()
    shapes = [
        (4096, 12288),
        (4096, 14336),
        (5120, 17408),
        (5120, 5120),
        (6144, 4096),
        (2048, 4096),
        (1024, 3072),
    ]
    for out, size in shapes:
        for gated, in_parts in ((False, False), (True, False), (False, True)):
            for num_tokens in (2, 16, 17, 32, 33, 64):
                plan = tiled_gemm.plan(num_tokens, out, size, gated, in_parts)
                tiles = plan.tokens + (2 if gated else 1) * plan.rows
                assert num_tokens <= plan.tokens
                assert max(plan.tokens, plan.rows) >= 64
                assert 2 * tiles * plan.step * plan.stages + 2048 <= shared_memory
                assert in_parts or plan.parts == 1
                rows.add(plan.rows)
                parts.add(plan.parts)
    assert rows == {32, 64}
    assert parts == {1, 2, 3, 4}


LARGE = [
    Case("warp_gemv", 1, 4096, 1024),
    Case("warp_gemv", 4, 1024, 3072),
    Case("warp_gemv", 1, 1536, 4096),
    Case("cta_gemv", 1, 6144, 4096),
    Case("cta_gemv", 1, 4096, 4096),
    Case("cta_gemv", 1, 5120, 5120),
    Case("sliced_k_gemm", 16, 1024, 2048),
    Case("tiled_gemm", 13, 1024, 4096, margin=8),
    Case("tiled_gemm", 32, 1030, 4096, margin=8),
    Case("tiled_gemm", 61, 1024, 12288, margin=8),
    Case("tiled_gemm", 61, 1024, 4096),
    Case("tiled_gemm", 61, 1024, 1024, margin=8),
]
LONGEST_ROWS = Case("warp_gemv", 1, 640, 17408)
"""A down projection, which adds to the residual: its kernel takes a minute to compile."""


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("case", "check"),
    [*((case, check) for case in LARGE for check in CHECKS), (LONGEST_ROWS, check_linear_add)],
    ids=lambda value: name_of(value) if isinstance(value, Case) else value.__name__.removeprefix("check_"),
)
def test_large(case: Case, check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    run(check, replace(case, dtype=torch.bfloat16), monkeypatch)


GEMV, TAILS, ROWS, GEMM, TILED = (
    Case("warp_gemv", 2, 33, 320),
    Case("warp_gemv", 1, 37, 1500, (4, 4, 1, 2)),
    Case("cta_gemv", 1, 24, 320),
    Case("sliced_k_gemm", 5, 33, 320),
    Case("tiled_gemm", 5, 33, 100),
)
test_planted_bugs = planted("GEMMs of a few tokens", {
    "the norm forgets eps": Planted("warp_gemv", "/ SIZE + eps)", "/ SIZE)", check_norm_linear, GEMV),
    "the norm's mean counts the padding": Planted(
        "warp_gemv", "squares, 0) / SIZE", "squares, 0) / (TILES * COLUMNS)", check_norm_linear, GEMV
    ),
    "the norm's weight is left out": Planted(
        "warp_gemv", "rounded(x, dtype).to(tl.float32) * weight", "rounded(x, dtype).to(tl.float32)",
        check_norm_linear, GEMV,
    ),
    "the norm of Gemma forgets 1 +": Planted(
        "warp_gemv", "1.0 + weight", "weight", check_unit_offset, GEMV
    ),
    "every token has the first one's norm": Planted(
        "warp_gemv", "x * scales[t]", "x * scales[0]", check_norm_linear, GEMV
    ),
    "gate and up are swapped": Planted(
        "warp_gemv", "row = (p % HALVES) * OUT", "row = ((p + 1) % HALVES) * OUT",
        check_norm_linear_silu, GEMV,
    ),
    "the last columns are not masked": Planted(
        "warp_gemv", "SIZE % COLUMNS != 0", "False", check_linear, Case("warp_gemv", 1, 64, 100)
    ),
    "the last rows are not masked": Planted(
        "warp_gemv",
        "element_ty), mask=mask_rows)",
        "element_ty), mask=(lanes < GROUPS)[:, None])",
        check_linear_add,
        TAILS,
    ),
    "the tile ahead is the tile at hand": Planted(
        "warp_gemv",
        "row * row_stride + (i + AHEAD) * COLUMNS",
        "row * row_stride + i * COLUMNS",
        check_linear,
        TAILS,
    ),
    "the residual is the first token's": Planted(
        "warp_gemv", "residuals[t]", "residuals[0]", check_linear_add, GEMV
    ),
    "rows: the norm forgets eps": Planted("cta_gemv", "/ SIZE + eps)", "/ SIZE)", check_norm_linear, ROWS),
    "rows: up is gate": Planted("cta_gemv", "rows + half * OUT", "rows", check_norm_linear_silu, ROWS),
    "rows: the next block is the block at hand": Planted(
        "cta_gemv", "weight_ptr, block + PROGRAMS,", "weight_ptr, block,", check_linear, ROWS
    ),
    "rows: each block has the first one's residual": Planted(
        "cta_gemv", "residual_ptr + rows", "residual_ptr + tl.arange(0, ROWS)", check_linear_add, ROWS
    ),
    "rows: the last columns are left out": Planted(
        "cta_gemv", "static_range(1, TILES)", "static_range(1, TILES - 1)", check_linear, ROWS
    ),
    "gemm: tokens beyond the last are written": Planted(
        "sliced_k_gemm",
        "element_ty), mask=in_out)",
        "element_ty), mask=(rows < OUT) & (tokens >= 0)[None, :])",
        check_linear_add, GEMM,
    ),
    "gemm: the last columns are not masked": Planted(
        "sliced_k_gemm", "(columns + start < SIZE)", "(columns >= 0)", check_linear, GEMM
    ),
    "gemm: the sum of one warp is left out": Planted(
        "sliced_k_gemm", "tl.sum(sums, 0)", "tl.sum(sums, 0) - tl.min(sums, 0)", check_linear, GEMM
    ),
    "tiled: up is gate": Planted("tiled_gemm", "out + row", "row", check_norm_linear_silu, TILED),
    "tiled: tokens beyond the last are written": Planted(
        "tiled_gemm", "element_ty), mask=mask)", "element_ty), mask=(offs_t >= 0) & (offs_o < out))",
        check_linear_add, TILED,
    ),
    "tiled: the last columns are not masked": Planted(
        "tiled_gemm", "(offs_k < size)", "(offs_k >= 0)", check_linear, TILED
    ),
    "tiled: the last tile of columns is left out": Planted(
        "tiled_gemm", "first + part_size, size)", "first + part_size, size - STEP)", check_linear,
        Case("tiled_gemm", 5, 33, 520, margin=8),
    ),
})  # fmt: skip
