"""What the check says about a wrong function: a name must explain every failing case."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from diptych.shared.tools.conformance.kernels.conventions import CONVENTIONS, LIKES, convention_of
from diptych.shared.tools.conformance.kernels.kernel_report import Report
from diptych.shared.tools.conformance.kernels.kernel_report_html import render
from diptych.shared.tools.conformance.kernels.mistakes import is_rounding
from diptych.shared.tools.conformance.kernels.one_call import PRECISION, Conduct
from diptych.shared.tools.conformance.kernels.patterns import NATIVE, check_small
from diptych.shared.tools.conformance.kernels.run import check_arguments, check_kernel
from diptych.shared.tools.conformance.kernels.sampler_like import drawn
from docs.examples.my_kernels import rms_norm, silu_and_mul
from tests.kernel_check.right import decode_flashinfer, extend, moe, paged_decode, rope, sample
from tests.kernel_check.test_check_kernel import QUICK, diptych


def check(like: str, function: Any, library: str = "torch", cases: Any = None) -> Report:
    return check_kernel(function, "f", LIKES[like], convention_of(like, library), cases or QUICK.get(like))


# ---- names ----


def test_a_formula_that_is_a_little_wrong_does_not_only_lose_precision() -> None:
    def other_scale(q: Any, k: Any, v: Any, table: Any, lens: Any) -> Any:
        return paged_decode(q, k, v, table, lens, scale=1.02 * q.shape[2] ** -0.5)

    report = check("attention.decode", other_scale)
    assert report.status == 1
    assert report.names == []
    truth = torch.ones(4, 100, dtype=torch.float64)
    assert is_rounding((truth * 1.01).float(), truth)
    assert not is_rounding((truth * 1.02).float(), truth)
    single = truth.clone()
    single[2, 3] = 1.1  # the norm of the row's error is small
    assert not is_rounding(single.float(), truth)


def test_an_eps_that_no_suspect_has_is_not_called_precision_in_every_case() -> None:
    report = check("rms_norm", lambda x, shape, weight, eps: rms_norm(x, shape, weight, 1e-4))
    assert report.status == 1
    assert PRECISION not in report.names
    assert all(each.startswith("in ") for each in report.names)


def test_mistakes_of_some_cases_are_named_with_a_case() -> None:
    def two_mistakes(x: Any, shape: Any, weight: Any, eps: float) -> Any:
        if x.dtype == torch.float32:
            return rms_norm(x, shape, 1 + weight, eps)
        raise KeyError("lost")

    names = [each.partition(", ")[2] for each in check("rms_norm", two_mistakes).names]
    assert names == [
        "float32: 1 + weight is multiplied, as in Gemma",
        "float16: raises KeyError: 'lost'",
    ]


def test_other_dtypes_have_one_name() -> None:
    report = check("silu_and_mul", lambda x: silu_and_mul(x).float())
    assert report.names == ["dtype of out: float32, expected that of the input"]


def test_a_scale_argument_that_is_ignored_is_named() -> None:
    def own_scale(q: Any, kv: Any, indptr: Any, indices: Any, last: Any, *, sm_scale: float) -> Any:
        return decode_flashinfer(q, kv, indptr, indices, last, sm_scale=q.shape[2] ** -0.5)

    report = check("attention.decode", own_scale, "flashinfer")
    assert report.names == ["the scale argument is ignored: head_dim ** -0.5 is used"]


@pytest.mark.parametrize("order", ["sorted", "shifted"])
def test_rows_that_are_mixed_up_are_found(order: str) -> None:
    def mixed(logits: Any, *parameters: Any) -> Any:
        if order == "shifted":
            return sample(logits, *(each.roll(1) for each in parameters))
        return sample(logits, *parameters).sort().values

    assert check("sampler", mixed).status == 1


def test_the_formula_behind_the_mistakes_of_samplers_is_the_truth() -> None:
    for case in LIKES["sampler"].cases:
        problem = LIKES["sampler"].make(case, True)
        torch.testing.assert_close(drawn(problem), dict(problem.expected))


def test_results_below_the_normal_numbers_of_float16_are_rounded() -> None:
    """The only false alarm of many seeds: a weight of 1.4e-6 makes a row of 2e-6."""
    like = LIKES["moe"]
    cases = tuple(case for case in like.cases if case.name == "65 tokens, 1 of 1 experts, 16-16, float16")
    report = check_kernel(moe, "f", like, convention_of("moe", "torch"), cases, seed=185)
    assert (len(cases), report.status) == (1, 0), report.failing


# ---- refusals of strided rows, and dense inputs ----


def test_refused_strided_rows_do_not_refuse_the_case() -> None:
    def dense_only(q: Any, *others: Any) -> Any:
        if not q.is_contiguous():
            raise ValueError("q must be contiguous")
        return extend(q, *others)

    report = check("attention.extend", dense_only)
    num_cases = len(report.verdicts)
    assert (report.status, report.num_refused) == (0, 0)
    assert report.summary == f"all {num_cases} cases hold, {num_cases} without strided rows"
    assert report.verdicts[0].words == "holds; strided rows refused: q must be contiguous"
    assert all(each.reports for each in report.verdicts)
    assert "strided rows refused" in render(report)


def test_tensors_that_a_convention_splits_are_dense_before_they_are_strided() -> None:
    seen = []

    def watched(q: Any, k: Any, cos: Any, sin: Any) -> Any:
        seen.append(cos.is_contiguous() and sin.is_contiguous())
        return rope(q, k, cos, sin)

    report = check("rope", watched, cases=LIKES["rope"].cases[1:2])
    assert report.status == 0
    assert seen[:3] == [True, True, False]
    for like in ("rope", "mla.decode"):
        for convention in CONVENTIONS[like]:
            problem = LIKES[like].make(LIKES[like].cases[0], True)
            made = convention.build(problem)
            tensors = [each for each in (*made.args, *made.kwargs.values()) if isinstance(each, torch.Tensor)]
            assert all(each.is_contiguous() for each in tensors)


def test_a_function_without_the_argument_of_a_feature_is_not_run() -> None:
    like, convention = LIKES["attention.decode"], convention_of("attention.decode", "torch")
    target = "tests.kernel_check.right:decode_without_window"
    check_arguments(target, like, convention, like.cases)
    with pytest.raises(ValueError, match=r"takes \(q.*unexpected keyword argument 'window_left'"):
        check_arguments(target, like, convention, like.cases, ["window"])


def test_the_table_shows_refused_strided_rows() -> None:
    target = "tests.kernel_check.right:dense_rms_norm"
    result = diptych("check", "kernel", target, "--like", "rms_norm", "--no-timing", "--case", "float16")
    assert result.exit_code == 0, result.output
    assert "without strided rows" in result.stdout
    assert "holds; strided" in result.stdout


def test_small_results_of_8_bits_may_be_zero() -> None:
    exact = torch.linspace(0.001, 1, 64).double()
    got = {"y": torch.where(exact < 0.2, 0, exact)}
    for dtype in (torch.int8, torch.float8_e4m3fn, torch.float32):
        problem: Any = SimpleNamespace(constants={NATIVE: lambda expected: expected}, expected={"y": exact})
        problem.dtype_of = {"y": dtype}.get
        with pytest.raises(Conduct) if dtype == torch.float32 else nullcontext():
            check_small(problem, got)
