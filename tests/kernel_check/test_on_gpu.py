"""The patterns and the formats on a GPU: names are those of the table, where a pattern has the same form."""

from __future__ import annotations

from pathlib import Path

import pytest

from diptych.shared.tools.bench.bare_kernel import LATE
from diptych.shared.tools.conformance.kernels.gpu_memory import GPUMemory
from tests.kernel_check.cheat_runs import CHEATS, found
from tests.kernel_check.cheats import HONEST
from tests.kernel_check.honest_runs import run_seeds
from tests.kernel_check.test_formats import WRONG, reports_of
from tests.kernel_check.test_timed_calls import failure_of_timing
from tests.kernel_check.trace_data import DEFINITIONS, UNKNOWN, solution
from tests.planted import Bug

pytestmark = pytest.mark.gpu
OF_GPU = {
    5: "the function returns while another stream still writes its result",
    16: "a timed call: ",
    18: "reported: ",
}
"""Pattern -> how its name begins here."""


SOME = 4
"""In the fast cut a pattern is planted for one op of four, and one Definition of four is checked:
each starts processes. `make test-gpu-all` has the others."""


def without_case(name: str) -> str:
    """ "in CASE: NAME" -> "NAME": which cases fail depends on roundings."""
    return name.partition(": ")[2] if name.startswith("in ") else name


@CHEATS.found_by(is_fast=lambda number, bug: number % SOME == bug.plant[0] % SOME)
def test_patterns_are_found_and_named(bug: Bug) -> dict[str, str]:
    name, of_gpu = found(*bug.plant), OF_GPU.get(bug.plant[0])
    is_named = name.startswith(of_gpu) if of_gpu else without_case(name) == without_case(bug.finder)
    return {bug.finder if is_named else name: ""}


@pytest.mark.parametrize("like", HONEST)
def test_right_functions_give_no_alarm(like: str) -> None:
    assert run_seeds(like, range(2)) == []


def test_the_check_shares_its_memory() -> None:
    """Otherwise inputs of timed calls are copies, which it cannot overwrite."""
    assert GPUMemory().handle(1) is not None


def test_results_that_are_computed_after_the_clock_are_named() -> None:
    assert failure_of_timing("tests.kernel_check.conduct:patches_its_watch") == LATE


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.full] * (i % SOME > 0)) for i, name in enumerate(DEFINITIONS)],
)
def test_references_hold_and_wrong_solutions_fail(name: str, tmp_path: Path) -> None:
    """A right Solution has the code of the reference, which is not judged where nothing else is known."""
    *of_reference, on_solution = reports_of(tmp_path, name, solution(name, WRONG[name].plant))
    held = of_reference or reports_of(tmp_path, name, solution(name))
    assert len(held) == 1
    assert bool(of_reference) == (name not in UNKNOWN)
    for report in held:
        assert report.status == 0, [(each.case, each.failure) for each in report.failing]
    names = "; ".join(on_solution.names)
    WRONG[name].expect({"check kernel": names} if on_solution.status == 1 else {})
