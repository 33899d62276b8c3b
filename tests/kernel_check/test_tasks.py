"""A score of a task of KernelBench or GPU MODE: only if all cases hold, each error at most 1.05 times that of
the reference in bfloat16; the score is a share of the bound."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from diptych.shared.tools import cli
from diptych.shared.tools.bench import bare_kernel
from diptych.shared.tools.bench.step_cost import Ceilings
from diptych.shared.tools.conformance.formats.tasks import NATIVE_FACTOR, Task, read_task
from diptych.shared.tools.conformance.kernels.kernel_report import Report, Timing
from diptych.shared.tools.conformance.kernels.run import check_kernel

TASK = """
import torch

class Model(torch.nn.Module):
    def __init__(self, n):
        super().__init__()
        self.layer = torch.nn.Linear(n, n)

    def forward(self, x):
        y = self.layer(x)
        return FORWARD

def get_inputs():
    return [torch.randn(32, 64)]

def get_init_inputs():
    return [64]

class ModelNew(Model):
    def forward(self, x):
        return super().forward(x)
"""
FORWARDS = {
    "plain": "y",
    "one value a row": "y[:, :1]",  # rows near zero, where bfloat16 has no digit right
    "few large elements": "(3 * y) ** 7",  # errors of bfloat16 that are far beyond the norm's
    "a vector": "y[:, 0]",
    "a single number": "(y * y).mean()",
    "two results": "(y, x + 1)",
    "integers": "y.argmax(-1)",
}


@pytest.fixture(params=FORWARDS)
def task(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Task, ModuleType]:
    return written(tmp_path, FORWARDS[request.param])


def written(folder: Path, forward: str) -> tuple[Task, ModuleType]:
    path = folder / "a_task.py"
    path.write_text(TASK.replace("FORWARD", forward))
    spec = importlib.util.spec_from_file_location("a_task", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return read_task(path, str(path)), module


def model(module: ModuleType, dtype: torch.dtype, seed: int, inputs: tuple[Any, ...]) -> Any:
    torch.manual_seed(seed)
    return module.Model(*module.get_init_inputs()).to(dtype)(*(each.to(dtype) for each in inputs))


def in_bfloat16(module: ModuleType, factors: tuple[float, ...] = (1.0, 1.0)) -> Callable[..., Any]:
    """The exact results and the errors of bfloat16 times a factor for each result."""

    def call(target: str, seed: int, init: Any, *inputs: Any) -> Any:
        half, exact = (model(module, dtype, seed, inputs) for dtype in (torch.bfloat16, torch.float64))
        if not isinstance(half, tuple):
            half, exact = (half,), (exact,)
        mixed = tuple(
            (b + factor * (a.double() - b)).float() if a.is_floating_point() else b
            for a, b, factor in zip(half, exact, factors)
        )
        return mixed if len(mixed) > 1 else mixed[0]

    return call


def check(task: Task, function: Callable[..., Any]) -> Report:
    return check_kernel(function, "f", task.like, task.convention, task.like.cases[:2])


def test_the_reference_in_bfloat16_itself_holds(task: tuple[Task, ModuleType]) -> None:
    report = check(task[0], in_bfloat16(task[1]))
    assert report.status == 0, [each.failure for each in report.failing]


@pytest.mark.parametrize("forward", [name for name in FORWARDS if name != "integers"])
def test_the_limit_is_1_05_times_the_error_of_bfloat16(forward: str, tmp_path: Path) -> None:
    assert NATIVE_FACTOR == 1.05
    task, module = written(tmp_path, FORWARDS[forward])
    assert check(task, in_bfloat16(module, (1.04, 1.04))).status == 0
    assert check(task, in_bfloat16(module, (1.06, 1.06))).status == 1


@pytest.mark.parametrize("factors", [(1.0, 1.1), (1.1, 1.0)])
def test_each_result_has_its_own_limit(factors: tuple[float, float], tmp_path: Path) -> None:
    task, module = written(tmp_path, FORWARDS["two results"])
    report = check(task, in_bfloat16(module, factors))
    assert report.status == 1
    assert f"output {factors.index(1.1)}" in str(report.failing[0].failure)


def test_integers_must_be_equal(tmp_path: Path) -> None:
    task, module = written(tmp_path, FORWARDS["integers"])

    def other(*args: Any) -> Any:
        ids = in_bfloat16(module)(*args)
        ids[0] = (ids[0] + 1) % 64
        return ids

    assert check(task, other).status == 1


def test_a_reference_without_a_number_in_bfloat16_is_named(tmp_path: Path) -> None:
    task, module = written(tmp_path, "y / (y.sum() * 0)")
    (failure, *_) = (each.failure for each in check(task, in_bfloat16(module)).failing)
    assert "the task's reference in bfloat16 gives NaN or infinity" in str(failure)


# ---- the score ----


def test_a_score_is_the_geometric_mean_of_bound_over_time_if_all_cases_hold(tmp_path: Path) -> None:
    task, module = written(tmp_path, FORWARDS["plain"])
    right, wrong = (check(task, in_bfloat16(module, (factor,))) for factor in (1.0, 1.1))
    for report in (right, wrong):
        report.timings = [Timing("a", 1, 4.0, None, 1.0), Timing("b", 2, 1.0, None, 1.0)]
    assert right.score == (0.5, right.timings[0])
    assert wrong.score is None
    right.num_not_run = 1
    assert right.score is None
    right.num_not_run = 0
    right.timings.append(Timing("c", 3, 1.0, None, None))  # no bound is known
    assert right.score is None


def test_the_command_gives_a_score_to_a_submission_that_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bare_kernel, "measure_ceilings", lambda *_: Ceilings(1e9, 1e9))
    written(tmp_path, FORWARDS["plain"])
    path, wrong = tmp_path / "a_task.py", tmp_path / "wrong.py"
    wrong.write_text(path.read_text().replace("super().forward(x)", "1.01 * super().forward(x)"))
    scores = []
    for submission in (path, wrong):
        file = tmp_path / f"{submission.stem}.json"
        words = ["check", "kernel", str(submission), "--task", str(path), "--seed", "1", "--json", str(file)]
        result = CliRunner().invoke(cli.app, words)
        assert result.exit_code == (submission == wrong), result.output
        scores.append(json.loads(file.read_text())["score"])
    assert scores[0]["mean share of the bound"] > 0
    assert scores[0]["least at"] == "inputs 0"
    assert scores[1] is None
