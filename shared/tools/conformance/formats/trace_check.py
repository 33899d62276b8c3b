"""Checks a Solution of FlashInfer Trace, after the reference of its Definition."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from diptych.shared.tools.conformance.clauses.compare import Mismatch
from diptych.shared.tools.conformance.clauses.device import check_device
from diptych.shared.tools.conformance.clauses.inputs import Inputs
from diptych.shared.tools.conformance.clauses.time_limit import TimeLimitExceeded, time_limit, until
from diptych.shared.tools.conformance.formats.trace_draws import draws_of_order
from diptych.shared.tools.conformance.formats.trace_files import Definition, Solution, Workload
from diptych.shared.tools.conformance.formats.trace_functions import (
    check_style,
    inputs_of,
    is_dps,
    reference_of,
    sources_of,
)
from diptych.shared.tools.conformance.formats.trace_generic import generic_op
from diptych.shared.tools.conformance.formats.trace_op import TraceOp
from diptych.shared.tools.conformance.formats.trace_ops import op_of, why_unknown
from diptych.shared.tools.conformance.formats.trace_smaller import changed_sizes, smaller
from diptych.shared.tools.conformance.kernels.arena import free_memory
from diptych.shared.tools.conformance.kernels.calls import unwritten
from diptych.shared.tools.conformance.kernels.child_function import ChildFunction
from diptych.shared.tools.conformance.kernels.functions import Raised
from diptych.shared.tools.conformance.kernels.kernel_report import Report
from diptych.shared.tools.conformance.kernels.one_call import sentence
from diptych.shared.tools.conformance.kernels.problem import Call, Convention, Problem
from diptych.shared.tools.conformance.kernels.run import SECONDS, check_kernel

PROPERTIES_ONLY = "properties only: {}, so results are compared with those of the Definition's own reference"
ANOTHER = "the dump's own reference is another operation than the known {}, of which {}"
BY_NAME = (
    "The function does not have the inputs of the Definition in their order: they are passed by name. "
    "flashinfer-bench passes them in order"
)
LARGE_INPUTS = 2**28
"""Bytes beyond which the memory that a check needs is announced; it is also left for results."""
NUM_COPIES = 2
"""Of inputs: those of the check, and those that the function gets."""
SMALLER = "The Definition's own reference is judged with {}, because its inputs are large"
NO_MEMORY = "raised MemoryError"
COMMON_EPS = (1e-5, 1e-6, 1e-8, 1e-12, 0.0)


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
    reference, reports = reference_of(definition), []
    if solution is not None:
        check_style(definition, solution)
    with ExitStack() as stack:
        target, folder = stack.enter_context(sources_of(definition, reference))
        judge = stack.enter_context(ChildFunction(target, seconds, ends_at, folder))
        judge.start()
        with within(ends_at, definition):
            op = op_of(definition, read_off(definition, judge))
        why = "" if op is not None else why_unknown(definition)
        if op is not None:
            if solution is not None:  # half of the time is left for it
                judge.ends_at = min(ends_at, (ends_at + time.monotonic()) / 2)
            reports.append(_judged(judge, definition, op, seconds, seed))
            if solution is not None and is_of_another(definition, reports[0]):
                why = ANOTHER.format(definition.op_type, reports.pop().summary)
                judge.ends_at = ends_at
            else:
                stack.close()  # its memory, too
        if why and solution is not None:
            op = generic_op(definition, partial(results_of, judge, definition, reference), workloads)
            with within(ends_at, definition):
                op = with_cases_of_reference(definition, op)
        if op is None:
            raise ValueError(
                f"{definition.name}: {why}: name a Solution, which is compared with the reference"
            )
        if solution is None:
            return reports
        target, folder = stack.enter_context(sources_of(definition, solution))
        function = stack.enter_context(ChildFunction(target, seconds, ends_at, folder))
        function.start()  # what cannot be loaded is an error, not a refused case
        report = _checked(function, definition, solution, op, seconds, seed)
    if inputs_of(definition, solution) != tuple(definition.inputs):
        report.notes.append(BY_NAME)
    if why:
        report.notes.append(PROPERTIES_ONLY.format(why))
    elif reports[0].status:
        verb = "does not hold" if reports[0].failing else "is not judged"
        report.notes.append(f"The Definition's own reference {verb}: {reports[0].summary}")
    return [*reports, report]


def _judged(judge: ChildFunction, definition: Definition, op: TraceOp, seconds: float, seed: int) -> Report:
    """The report on the Definition's reference. One with large inputs is judged with smaller sizes; if that
    does not hold, with its own ones."""
    small = smaller_of_large(definition)
    small_op = None if small is None else op_of(small, None)
    if small is not None and small_op is not None:
        reference = reference_of(small)
        with (
            sources_of(small, reference) as (target, folder),
            ChildFunction(target, seconds, judge.ends_at, folder) as function,
        ):
            report = _checked(function, small, reference, small_op, seconds, seed)
        notes = [SMALLER.format(changed_sizes(definition, small))]
        try:
            if report.status:
                memory_of_cases(definition)
        except ValueError as error:
            notes.append(f"Its own sizes are not tried: {error}")
        if len(notes) > 1 or not report.status:
            report.notes += notes
            return report
    report = _checked(judge, definition, reference_of(definition), op, seconds, seed)
    for each in report.failing:
        if NO_MEMORY in str(each.failure):
            each.failure, each.refusal = None, each.failure
    report.names = report.names if report.failing else []
    return report


def is_of_another(definition: Definition, report: Report) -> bool:
    """Whether the reference of a dump gives other results than the known operation, or not all: FlashInfer
    names the type of operations that differ from it."""
    return definition.is_dump and any(": raised " not in str(each.failure) for each in report.failing)


def smaller_of_large(definition: Definition) -> Definition | None:
    return smaller(definition) if definition.num_const_bytes >= LARGE_INPUTS else None


def memory_of_cases(definition: Definition, is_reference_alone: bool = False) -> str:
    """What is said of large inputs. Raises `ValueError` if the memory is not enough for them."""
    size, free = definition.num_const_bytes, free_memory()
    if size < LARGE_INPUTS:
        return ""
    if is_reference_alone and smaller_of_large(definition) is not None:
        return f", with inputs of {size / 2**30:.1f} GiB: its reference is judged with smaller sizes first"
    needed = NUM_COPIES * size + LARGE_INPUTS
    if 0 < free < needed:
        raise ValueError(
            f"{definition.name}: its inputs have {size / 2**30:.1f} GiB. A check needs "
            f"{needed / 2**30:.1f} GiB of memory, of which {free / 2**30:.1f} GiB are free"
        )
    return f", with inputs of {size / 2**30:.1f} GiB, which need {needed / 2**30:.1f} GiB of memory"


@contextmanager
def within(ends_at: float, definition: Definition) -> Iterator[None]:
    """Raises `ValueError` if the block does not end in time."""
    try:
        with time_limit(until(ends_at)):
            yield
    except TimeLimitExceeded:
        raise ValueError(f"{definition.name}: the time of the check was over before the first case") from None


def with_cases_of_reference(definition: Definition, op: TraceOp) -> TraceOp:
    """The operation with the cases that the reference computes. Raises `ValueError` if there is none."""
    cases, error = [], None
    for case in op.like.cases:
        try:
            assert op.like.make(case, True, 0).expected
            cases.append(case)
        except Mismatch as mismatch:
            error = sentence(mismatch)
    if not cases:
        raise ValueError(
            f"{definition.name}: no inputs that are made by names and types can be compared: {error}. Name "
            "others: --workload"
        )
    return replace(op, like=replace(op.like, cases=tuple(cases), timed=lambda _: tuple(cases[-1:])))


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
    """What the function returns, in float64 on the CPU. Raises `Mismatch` if it fails."""
    made = convention_of(definition, solution, op).build(problem)
    try:
        value = function.call(made).value
    except (Raised, ValueError, TypeError) as error:
        raise Mismatch(f"the Definition's reference fails: {error}") from None
    try:
        results = made.results(value)
    except TypeError:
        names = ", ".join(definition.outputs)
        raise ValueError(f"{definition.name}: the reference does not return all of {names}") from None
    return {name: each.cpu().double() for name, each in results.items()}


def convention_of(definition: Definition, solution: Solution, op: TraceOp) -> Convention:
    outputs, taken = ", ".join(definition.outputs), inputs_of(definition, solution)
    has_outputs = is_dps(definition, solution)
    inputs = ", ".join((*taken, *(definition.outputs if has_outputs else ())))
    signature = f"{solution.function}({inputs})" + ("" if has_outputs else f" -> {outputs}")
    build = partial(_build, definition, taken, has_outputs, op)
    return Convention("flashinfer-trace", signature, "as the Definition", build)


def _build(
    definition: Definition, taken: Sequence[str], has_outputs: bool, op: TraceOp, problem: Problem
) -> Call:
    """`taken`: the inputs that are passed. None is passed for those that the case leaves out."""
    values = {name: op.inputs[name](problem) for name in definition.inputs}
    absent = problem.constants.get("absent", ())
    passed = tuple(None if name in absent else values[name] for name in taken)
    results = partial(_named, definition, op, problem)
    if not has_outputs:
        return Call(passed, results=results)
    sizes = _sizes(definition, tuple(values.values()))
    made = tuple(
        unwritten(definition.shape_of(spec, sizes), torch.empty(0, dtype=spec.dtype, device=problem.device))
        for spec in definition.outputs.values()
    )
    return Call((*passed, *made), written=made, results=lambda _: results(made))


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
    lengths; of a sampler, whether top-p applies to what top-k leaves."""
    readers = {"gdn": normalises, "sampling": filters_in_order, "rmsnorm": eps_of}
    reader = readers.get(definition.op_type)
    try:
        return reader(definition, reference) if reader else None
    except (Raised, Mismatch, ValueError):
        return None


def filters_in_order(definition: Definition, reference: ChildFunction) -> float | None:
    """Whether top-p applies to what top-k leaves, renormalised."""
    given = draws_of_order(definition, check_device())
    if given is None:
        return None
    taken = inputs_of(definition, reference_of(definition))
    ids = reference.call(Call(tuple(given[name] for name in taken))).value
    return float(isinstance(ids, torch.Tensor) and bool((ids == 0).all()))


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
    if spec is None or "hidden_size" not in definition.const:
        return None
    x = Inputs(0).normal(64, definition.const["hidden_size"], dtype=spec.dtype, std=1e-4)
    given = {"hidden_states": x, "weight": torch.ones_like(x[0]), "residual": torch.zeros_like(x)}
    if not set(definition.inputs) <= set(given):
        return None
    taken = inputs_of(definition, reference_of(definition))
    outcome = reference.call(Call(tuple(given[name] for name in taken)))
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
