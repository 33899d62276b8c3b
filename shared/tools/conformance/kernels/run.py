"""Runs a function on every case of an operation and names its mistakes."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from diptych.shared import registry
from diptych.shared.tools.conformance.clauses.compare import Mismatch
from diptych.shared.tools.conformance.clauses.device import check_device
from diptych.shared.tools.conformance.clauses.time_limit import DoesNotReturn
from diptych.shared.tools.conformance.kernels.collective_likes import expect_same_sums, in_order
from diptych.shared.tools.conformance.kernels.kernel_report import Report, Verdict
from diptych.shared.tools.conformance.kernels.mistakes import name_mistakes
from diptych.shared.tools.conformance.kernels.one_call import (
    FAILURES,
    REFUSALS,
    Results,
    call,
    check_form,
    check_values,
    device_works,
    largest_error,
    limited,
    same_bits,
    sentence,
)
from diptych.shared.tools.conformance.kernels.problem import Convention, Like, Problem, variants_of
from diptych.shared.tools.conformance.kernels.rank_processes import RankProcesses
from diptych.shared.tools.conformance.kernels.rank_worker import FORMS

SECONDS = 60.0
"""That one call may take: kernels in Triton's interpreter are slow."""


def load_function(target: str) -> Callable[..., Any]:
    """Load package.module:function or file.py:function. Raises `ValueError` if there is none."""
    if ":" not in target:
        raise ValueError(f"{target!r} names no function: write file.py:function or package.module:function")
    function: Callable[..., Any] = registry.load("the kernel", target)
    if not callable(function) or isinstance(function, type):
        kind = "a class" if isinstance(function, type) else f"{type(function).__name__} {function!r:.60}"
        raise ValueError(f"{target} is {kind}, not a function")
    return function


@contextmanager
def running(target: str, like: Like, seconds: float = SECONDS) -> Iterator[Callable[..., Any]]:
    """The function with a time limit. A function over ranks has its own processes, which end with the
    block."""
    function = load_function(target)
    if like.ranks:
        with RankProcesses(target, like.ranks, seconds) as ranks:
            yield ranks
    else:
        yield function


def check_arguments(
    target: str, like: Like, convention: Convention, cases: tuple[Any, ...], features: Sequence[str] = ()
) -> None:
    """Raises `ValueError` if the function cannot take the arguments of the convention: those of the first
    case, and of the first case of each feature."""
    function = load_function(target)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of a builtin: not known
        return
    for case in (cases[0], *(like.more_cases[feature][0] for feature in features)):
        if like.ranks:
            args, kwargs = FORMS[convention.library].arguments(torch.empty(0), None)
        else:
            made = convention.build(like.make(case, convention.takes_scale))
            args, kwargs = made.args, made.kwargs
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            raise ValueError(
                f"{target} takes {signature}; convention {convention.library} calls "
                f"{convention.signature}: {error}. Other conventions: --list --like {like.name}"
            ) from None


def check_problem(
    function: Callable[..., Any], like: Like, convention: Convention, problem: Problem
) -> Verdict:
    verdict = Verdict(
        problem.name,
        str(problem.dtype).removeprefix("torch."),
        problem.size,
        allowed=problem.tolerance.rms,
    )
    outputs: dict[str, Results] = {}
    what = "values"
    try:
        for label, what, variant, _ in variants_of(like, convention, problem):
            results = call_or_refusal(function, convention, variant, label, verdict)
            if verdict.refusal is not None:
                return verdict
            if results is None:
                continue
            outputs[label] = results
            check_form(problem, results, what)
            error = largest_error(problem, results)
            verdict.error = verdict.error if error <= verdict.error else error  # NaN is the largest
            check_values(problem, results, what)
            if like.ranks:
                expect_same_sums(what, results["out"], outputs["values"]["out"])
        what = "another call"
        verdict.reports = observations(function, like, convention, problem, outputs, verdict)
    except Mismatch as mismatch:
        verdict.failure = sentence(mismatch)
        verdict.ends_check = isinstance(mismatch, DoesNotReturn)
    except FAILURES as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{frame.filename}:{frame.lineno}"
        verdict.failure = f"{what}: raised {type(error).__name__}: {error} ({place})"
        verdict.ends_check = not device_works()
    return verdict


def call_or_refusal(
    function: Callable[..., Any], convention: Convention, problem: Problem, form: str, verdict: Verdict
) -> Results | None:
    """The results. None if the function refuses this form of the inputs, which the verdict then has."""
    try:
        return call(function, convention, problem)
    except REFUSALS as error:
        if form == "values":
            verdict.refusal = str(error)
        else:
            verdict.refused_forms[form] = str(error)
        return None


def observations(
    function: Callable[..., Any],
    like: Like,
    convention: Convention,
    problem: Problem,
    outputs: dict[str, Results],
    verdict: Verdict,
) -> dict[str, bool]:
    """Observations that are not required. `outputs`: form of the inputs -> results."""
    values = outputs["values"]
    if like.ranks:
        ordered = {"out": in_order(problem)}
        return {"the bits are those of a float32 sum in the order of ranks": same_bits(values, ordered)}
    found = {}
    if problem.kind != "draws":
        again = call_or_refusal(function, convention, problem, "a second call", verdict)
        if again is not None:
            found["a second call gives the same bits"] = same_bits(again, values)
    if "other pages" in outputs:
        found["other pages give the same bits"] = same_bits(outputs["other pages"], values)
    if like.rows and len(problem[like.rows[0]]) > 1:
        row = problem.row(1, like.rows)
        alone = call_or_refusal(function, convention, row, "a row alone", verdict)
        if alone is not None:
            in_batch = {name: result[1:2] for name, result in values.items()}
            found["a row alone gives the same bits"] = same_bits(alone, in_batch)
    return found


def check_kernel(
    function: Callable[..., Any],
    target: str,
    like: Like,
    convention: Convention,
    cases: tuple[Any, ...] | None = None,
    seconds: float = SECONDS,
) -> Report:
    """Check every case (or only `cases`) and name the mistakes. `seconds`: the time limit of one call. The
    caller adds timings."""
    chosen = like.cases if cases is None else cases
    device = function.device_name if isinstance(function, RankProcesses) else device_name()
    report = Report(like, convention, target, device, [], [], [])
    limited_function = function if like.ranks else limited(function, seconds)
    failing = []
    for case in chosen:
        problem = like.make(case, convention.takes_scale)
        verdict = check_problem(limited_function, like, convention, problem)
        report.verdicts.append(verdict)
        if verdict.ends_check:
            report.num_not_run = len(chosen) - len(report.verdicts)
            return report
        if verdict.failure is not None:
            failing.append(problem)
    if failing:
        report.names = name_mistakes(limited_function, like, convention, failing)
    return report


def device_name() -> str:
    device = check_device()
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
