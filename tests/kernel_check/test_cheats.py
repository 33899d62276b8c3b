"""Patterns that pass other checkers are found and named; user code that does not return a result is one clear
verdict; right functions give no alarm for any seed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from diptych.shared.tools.conformance.clauses.compare import Mismatch
from diptych.shared.tools.conformance.kernels.child_function import ChildFunction
from diptych.shared.tools.conformance.kernels.conventions import LIKES, convention_of
from diptych.shared.tools.conformance.kernels.one_call import check_values
from diptych.shared.tools.conformance.kernels.run import check_arguments, check_kernel, problems_of
from tests.kernel_check.cheat_runs import CHEATS, cases_of, found, run_here
from tests.kernel_check.cheats import HONEST, PATTERNS
from tests.kernel_check.conduct import CONDUCT
from tests.kernel_check.honest_runs import run_seeds
from tests.planted import Bug

FAST = [(pattern, "gemm") for pattern in (1, 4, 7, 10, 13, 17)]


@CHEATS.found_by(is_fast=lambda _, bug: bug.plant in FAST)
def test_all_patterns_are_found_and_named(bug: Bug) -> dict[str, str]:
    return {found(*bug.plant): ""}


def test_the_table_has_a_name_for_every_pattern_and_operation() -> None:
    assert [bug.plant for bug in CHEATS.values()] == [
        (pattern, like) for pattern in PATTERNS for like in HONEST
    ]
    assert "NOT NAMED" not in {bug.finder for bug in CHEATS.values()}


def test_right_functions_give_no_alarm() -> None:
    assert run_seeds("gemm", range(3)) == []


def test_results_below_the_normal_numbers_may_be_rounded_once() -> None:
    """With seed 769 the only element of `a` that is not zero is 0.0002."""
    assert run_seeds("gemm", [769]) == []
    like, convention = LIKES["gemm"], convention_of("gemm", "torch")
    case = next(case for case in like.cases if case.name == "1 x 64 x 256, float16")
    _, problem = problems_of(like, convention, case, 769)
    assert problem is not None
    exact, step = problem.expected["out"], 2.0**-24
    assert exact.abs().max() < torch.finfo(torch.float16).smallest_normal
    check_values(problem, {"out": exact.half()}, "rounded")
    for wrong in (exact.mul(1 / step).trunc() * step, exact * (1 + 3e-3), exact * 0):
        with pytest.raises(Mismatch, match="root-mean-square"):
            check_values(problem, {"out": wrong.half()}, "wrong")


@pytest.mark.full
@pytest.mark.parametrize("like", HONEST)
def test_right_functions_give_no_alarm_for_many_seeds(like: str) -> None:
    assert run_seeds(like, range(100)) == []


def verdict_of(function: Callable[..., Any], seconds: float = 1.0) -> tuple[str, int]:
    target = f"{function.__module__}:{function.__name__}"
    like, convention = LIKES["silu_and_mul"], convention_of("silu_and_mul", "torch")
    with ChildFunction(target, seconds) as child:
        check_arguments(target, like, convention, like.cases[:1], (), child)
        report = check_kernel(child, target, like, convention, like.cases[:3])
    assert report.status == 1
    assert report.names
    return str(report.failing[0].failure), report.num_not_run


@CONDUCT.found_by(is_fast=lambda _, bug: bug.name == "exits")
def test_code_that_returns_no_result_has_one_verdict(bug: Bug) -> dict[str, str]:
    failure, num_not_run = verdict_of(bug.plant, 60.0 if bug.says == "memory" else 1.0)
    assert num_not_run == 2 or (num_not_run == 0 and bug.name != "exits")
    return {bug.finder: failure}


@pytest.mark.full
def test_a_check_ends_within_its_time() -> None:
    import time

    target = "tests.kernel_check.conduct:hangs"
    like, convention = LIKES["silu_and_mul"], convention_of("silu_and_mul", "torch")
    with ChildFunction(target, 60.0) as child:
        child.start()
        child.ends_at = time.monotonic() + 0.5
        report = check_kernel(child, target, like, convention)
    assert (report.status, report.failing) == (2, []), "it may be right: it had less than its own time"
    assert report.num_not_run == len(like.cases)


@pytest.mark.full
def test_a_line_that_is_printed_is_no_failure() -> None:
    target = "tests.kernel_check.conduct:prints_a_line"
    like, convention = LIKES["silu_and_mul"], convention_of("silu_and_mul", "torch")
    with ChildFunction(target) as child:
        assert check_kernel(child, target, like, convention, like.cases[:2]).status == 0
        assert child.printed > 0


def test_a_verdict_depends_on_the_seed_only() -> None:
    first, again, other = (run_here(7, "gemm", seed) for seed in (3, 3, 4))
    words = [[each.words for each in report.verdicts] for report in (first, again, other)]
    assert words[0] == words[1]
    assert words[0] != words[2]
    assert cases_of("gemm", 7) == LIKES["gemm"].cases
