"""Checks a Solution of FlashInfer Trace, after the reference of its Definition."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from diptych.shared.tools.conformance.clauses.device import check_device
from diptych.shared.tools.conformance.clauses.inputs import Inputs
from diptych.shared.tools.conformance.formats.trace_files import Definition, Solution, Workload
from diptych.shared.tools.conformance.formats.trace_generic import generic_op
from diptych.shared.tools.conformance.formats.trace_op import TraceOp
from diptych.shared.tools.conformance.formats.trace_ops import op_of
from diptych.shared.tools.conformance.kernels.calls import unwritten
from diptych.shared.tools.conformance.kernels.child_function import ChildFunction
from diptych.shared.tools.conformance.kernels.kernel_report import Report
from diptych.shared.tools.conformance.kernels.problem import Call, Convention, Problem
from diptych.shared.tools.conformance.kernels.run import SECONDS, check_kernel

PROPERTIES_ONLY = (
    "properties only: the exact result of this operation is not known, so results are compared with those of "
    "the Definition's own reference"
)
COMMON_EPS = (1e-5, 1e-6, 1e-8, 1e-12, 0.0)


@contextmanager
def sources_of(solution: Solution) -> Iterator[tuple[str, str]]:
    """The target and the folder of the files of a Solution, which are removed after the block."""
    with tempfile.TemporaryDirectory(prefix="diptych-solution-") as folder:
        for path, text in solution.sources.items():
            file = Path(folder) / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        yield f"{Path(folder) / solution.file}:{solution.function}", folder


def reference_of(definition: Definition) -> Solution:
    return Solution(
        "reference", definition.name, {"reference.py": definition.reference}, "reference.py", "run", False
    )


def check_solution(
    definition: Definition,
    solution: Solution | None,
    workloads: Sequence[Workload] = (),
    *,
    seconds: float = SECONDS,
    ends_at: float = math.inf,
    seed: int = 0,
) -> list[Report]:
    """The reports on the Definition's reference and on the Solution. `workloads`: the cases of an operation
    whose exact result is not known."""
    reference = reference_of(definition)
    with sources_of(reference) as (target, folder), ChildFunction(target, seconds, ends_at, folder) as judge:
        op = op_of(definition, read_off(definition, judge))
        reports = []
        if op is not None:
            reports.append(_checked(judge, definition, reference, op, seconds, seed))
        is_known = op is not None
        op = op or generic_op(definition, partial(results_of, judge, definition, reference), workloads)
        if solution is not None:
            with (
                sources_of(solution) as (target, folder),
                ChildFunction(target, seconds, ends_at, folder) as function,
            ):
                report = _checked(function, definition, solution, op, seconds, seed)
            if not is_known:
                report.notes.append(PROPERTIES_ONLY)
            elif reports[0].status:
                report.notes.append("The Definition's own reference does not hold: " + reports[0].summary)
            reports.append(report)
    if not reports:
        raise ValueError(
            f"{definition.name}: the exact result of this operation, or of this form of it, is not known: "
            "name a Solution, which is compared with the reference"
        )
    return reports


def _checked(
    function: ChildFunction,
    definition: Definition,
    solution: Solution,
    op: TraceOp,
    seconds: float,
    seed: int,
) -> Report:
    convention = convention_of(definition, solution, op)
    like = replace(op.like, name=definition.name)
    return check_kernel(function, solution.name, like, convention, None, seconds, seed)


def results_of(
    function: ChildFunction, definition: Definition, solution: Solution, op: TraceOp, problem: Problem
) -> dict[str, torch.Tensor]:
    """What the function returns, in float64 on the CPU."""
    made = convention_of(definition, solution, op).build(problem)
    results = made.results(function.call(made).value)
    return {name: each.cpu().double() for name, each in results.items()}


def convention_of(definition: Definition, solution: Solution, op: TraceOp) -> Convention:
    outputs = ", ".join(definition.outputs)
    inputs = ", ".join((*definition.inputs, *(definition.outputs if solution.is_dps else ())))
    signature = f"{solution.function}({inputs})" + ("" if solution.is_dps else f" -> {outputs}")
    return Convention(
        "flashinfer-trace", signature, "as the Definition", partial(_build, definition, solution.is_dps, op)
    )


def _build(definition: Definition, is_dps: bool, op: TraceOp, problem: Problem) -> Call:
    values = [op.inputs[name](problem) for name in definition.inputs]
    results = partial(_named, definition, op, problem)
    if not is_dps:
        return Call(tuple(values), results=results)
    sizes = _sizes(definition, values)
    made = tuple(
        unwritten(definition.shape_of(spec, sizes), torch.empty(0, dtype=spec.dtype, device=problem.device))
        for spec in definition.outputs.values()
    )
    return Call((*values, *made), written=made, results=lambda _: results(made))


def _sizes(definition: Definition, values: Sequence[Any]) -> dict[str, int]:
    sizes = definition.const
    for spec, value in zip(definition.inputs.values(), values):
        if spec.shape and isinstance(value, torch.Tensor):
            sizes.update(zip(spec.shape, value.shape))
    return sizes


def _named(definition: Definition, op: TraceOp, problem: Problem, returned: Any) -> dict[str, Any]:
    """Results by their names: a tuple in order, one tensor alone, or a mapping."""
    if len(definition.outputs) == 1 and not isinstance(returned, tuple):
        returned = (returned,)
    if not isinstance(returned, tuple) or len(returned) != len(definition.outputs):
        raise TypeError
    results = {op.outputs[name]: value for name, value in zip(definition.outputs, returned)}
    return results | {name: read(problem, results[name]) for name, read in op.readers.items()}


def read_off(definition: Definition, reference: ChildFunction) -> float | None:
    """What the reference has inside: epsilon of a norm; of a delta rule, whether it divides q and k by their
    lengths."""
    return normalises(definition, reference) if definition.op_type == "gdn" else eps_of(definition, reference)


def normalises(definition: Definition, reference: ChildFunction) -> float | None:
    """Whether 4 q gives the output of q."""
    op = op_of(definition, 0.0)
    if op is None:
        return None
    problem = op.like.make(op.like.cases[0], True, 0)
    larger = problem.with_tensors(q=4 * problem["q"])
    first, second = (
        results_of(reference, definition, reference_of(definition), op, each) for each in (problem, larger)
    )
    return float(second["out"].norm() < 2 * first["out"].norm())


def eps_of(definition: Definition, reference: ChildFunction) -> float | None:
    """The epsilon that the reference of a norm has inside: read off its results for rows of small numbers."""
    spec = definition.inputs.get("hidden_states")
    if definition.op_type != "rmsnorm" or spec is None or "hidden_size" not in definition.const:
        return None
    x = Inputs(0).normal(64, definition.const["hidden_size"], dtype=spec.dtype, std=1e-4)
    given = {"hidden_states": x, "weight": torch.ones_like(x[0]), "residual": torch.zeros_like(x)}
    values = tuple(given[name] for name in definition.inputs if name in given)
    if len(values) != len(definition.inputs):
        return None
    outcome = reference.call(Call(values))
    y = outcome.value[0] if isinstance(outcome.value, tuple) else outcome.value
    if not isinstance(y, torch.Tensor) or y.shape != x.shape:
        return None
    squares, y = x.double().square(), y.double()
    eps = float((squares.sum() / y.square().sum().clamp(min=1e-300)) - squares.mean())
    near = [each for each in COMMON_EPS if abs(eps - each) <= 0.05 * each + 2e-10]
    return near[0] if near else max(eps, 0.0)


def device_text() -> str:
    device = check_device()
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
