"""Finds the mistake of a function from the results of its failing cases."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from diptych.shared.tools.conformance.clauses.compare import Mismatch, expect_close
from diptych.shared.tools.conformance.kernels.one_call import FAILURES, REFUSALS, Results, call, check_form
from diptych.shared.tools.conformance.kernels.problem import (
    Convention,
    Like,
    Problem,
    Suspect,
    Tensors,
    variants_of,
)
from diptych.shared.tools.conformance.kernels.rank_processes import RankRaises

ROUNDING = {torch.float32: 0.015, torch.float16: 0.02, torch.bfloat16: 0.034}
"""The largest relative error of a row that roundings of sums in a 16-bit type cause. A scale that is 2 %
wrong causes more in float32."""
ROUNDING_OF_ELEMENT = 3.0
"""The largest error of an element, as a multiple of the error that its row may have."""
FEW = 0.05
"""The largest share of elements that are few."""
PRECISION = "precision is lost: errors are as small as of sums or roundings that are not in float32"
FEW_WRONG = "few elements are wrong"
NUM_SMALLEST = 3
"""Failing cases that are compared with every suspect; larger ones are compared with the names found in
these."""


class Mistake(NamedTuple):
    """`name`: the same in every case with this mistake. `detail`: of one case."""

    name: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.name}: {self.detail}" if self.detail else self.name


def name_mistakes(
    function: Callable[..., Any], like: Like, convention: Convention, failing: list[Problem]
) -> list[str]:
    """The known mistake that explains every failing case. If there is none: mistakes that explain some cases,
    each with the smallest of these cases. The cases are run again with random numbers in place of NaN; over
    ranks only the smallest, because each failure ends the processes."""
    by_size = sorted(failing, key=lambda problem: problem.size)[: NUM_SMALLEST if like.ranks else None]
    found: list[tuple[Problem, dict[str, Mistake]]] = []
    common = dict(like.suspects)
    names: list[str] = []
    for i, problem in enumerate(by_size):
        suspects = like.suspects if i < NUM_SMALLEST else common
        mistakes = {each.name: each for each in _mistakes_in(function, like, convention, problem, suspects)}
        found.append((problem, mistakes))
        names = [name for name in (names if i else mistakes) if name in mistakes]
        common = {name: suspect for name, suspect in like.suspects.items() if name in names}
        if not names and i + 1 >= NUM_SMALLEST:
            break
    if names:
        problem, mistakes = found[0]
        is_same = all(each[names[0]] == mistakes[names[0]] for _, each in found)
        return [f"{mistakes[names[0]]}" if is_same else f"{mistakes[names[0]]}, in {problem.name}"]
    return _of_some_cases(found[:NUM_SMALLEST])


def _of_some_cases(found: list[tuple[Problem, dict[str, Mistake]]]) -> list[str]:
    """The first mistake of each case. The size of the errors must be the same kind in all cases: a wrong
    formula has small errors in some."""
    lines: dict[str, str] = {}
    for problem, mistakes in found:
        for name, mistake in list(mistakes.items())[:1]:
            if name not in (PRECISION, FEW_WRONG) or all(name in each for _, each in found):
                lines.setdefault(name, f"in {problem.name}: {mistake}")
    return list(lines.values())


def _mistakes_in(
    function: Callable[..., Any],
    like: Like,
    convention: Convention,
    problem: Problem,
    suspects: Mapping[str, Suspect],
) -> list[Mistake]:
    """The mistakes that explain one failing case."""
    finite = problem.with_finite_memory()
    try:
        if problem.constants.get("layout"):
            finite = problem.with_constants(layout="")
        results = call(function, convention, finite)
        check_form(problem, results, "form")
    except Mismatch as mismatch:
        return [_mistake_of_form(problem, mismatch)]
    except FAILURES as error:
        return [Mistake(f"raises {type(error).__name__}", str(error))]
    for name, expected in problem.expected.items():
        unwritten = int((torch.isnan(results[name].cpu()) & ~torch.isnan(expected)).sum())
        if unwritten:
            return [Mistake(f"elements of {name} are not written, or are NaN")]
    if _holds(problem, results):
        if problem.constants.get("layout"):
            return [_mistake_of_layout(function, convention, problem)]
        return _mistakes_of_variants(function, like, convention, problem)
    found = [name for name, suspect in suspects.items() if explains(problem, suspect(finite), results)]
    if found:
        return [Mistake(name) for name in found]
    return _mistakes_of_values(problem, results)


def _mistake_of_form(problem: Problem, mismatch: Mismatch) -> Mistake:
    what = mismatch.what.removeprefix("form: ")
    if mismatch.expected is None:
        return Mistake(what)
    if mismatch.expected == problem.dtype:
        is_of_input = any(each.dtype == problem.dtype for each in problem.tensors.values())
        wanted = "that of the input" if is_of_input else "out_dtype"
        return Mistake(f"{what}: {str(mismatch.actual).removeprefix('torch.')}, expected {wanted}")
    return Mistake(what, f"{mismatch.actual}, expected {mismatch.expected}")


def _mistake_of_layout(function: Callable[..., Any], convention: Convention, problem: Problem) -> Mistake:
    """What is wrong with a layout over ranks, given that a dense tensor is right."""
    try:
        call(function, convention, problem)
    except RankRaises as error:
        return Mistake(f"a layout that is not dense: {error.what}; refuse with a ValueError")
    except Mismatch:
        pass
    return Mistake("strides or the address are ignored: only a dense tensor of its own is summed")


def _mistakes_of_variants(
    function: Callable[..., Any], like: Like, convention: Convention, problem: Problem
) -> list[Mistake]:
    """The form of the inputs that the function gets wrong, given that finite memory is right."""
    variants = variants_of(like, convention, problem)
    for label, _, variant, mistake in variants[:1] if like.ranks else variants:
        try:
            holds = _holds(problem, call(function, convention, variant))
        except Mismatch as mismatch:
            return [_mistake_of_form(problem, mismatch)]
        except REFUSALS:
            continue
        except FAILURES as error:
            kind = f"raises {type(error).__name__}: {error}"
            return [Mistake(kind if label == "values" else f"{label}: {kind}; refuse with a ValueError")]
        if not holds:
            return [Mistake(mistake or "memory is read that is not live: it holds NaN")]
    if like.ranks:
        return []  # the verdict says which bits differ
    return [Mistake("another call with the same inputs gives another result, or fails")]


def _mistakes_of_values(problem: Problem, results: Results) -> list[Mistake]:
    """How wrong results are that no suspect explains."""
    if problem.kind == "draws":
        return []
    if all(is_rounding(results[name], truth) for name, truth in problem.expected.items()):
        return [Mistake(PRECISION)]
    limit = problem.tolerance
    for name, truth in problem.expected.items():
        error = (results[name].cpu().double() - truth).abs()
        wrong = (error > limit.atol + limit.rtol * truth.abs()).nonzero()
        if 0 < len(wrong) <= FEW * truth.numel():
            first = wrong[0].tolist()
            detail = f"{len(wrong)} of {truth.numel()} of {name}, the first at {first}"
            return [Mistake(FEW_WRONG, detail)]
    return []


def is_rounding(result: torch.Tensor, truth: torch.Tensor) -> bool:
    """Whether the error of every row (the last dimension), and of every element in it, is so small that it
    can come from roundings."""
    error = (result.cpu().double() - truth).abs()
    allowed = ROUNDING.get(result.dtype, 0.0) * truth.square().mean(-1, keepdim=True).sqrt()
    is_small = error.square().mean(-1, keepdim=True).sqrt() <= allowed
    return bool((is_small & (error <= ROUNDING_OF_ELEMENT * allowed)).all())


def explains(problem: Problem, wrong: Results, results: Results) -> bool:
    """Whether the results equal those of a mistake wherever it has any (not NaN), and differ from the exact
    ones."""

    def where_defined(tensors: Tensors) -> Results:
        return {
            name: torch.where(torch.isnan(each), each, tensors[name].cpu().double())
            for name, each in wrong.items()
        }

    mistaken = replace(problem, expected=wrong)
    return _holds(mistaken, where_defined(results)) and not _holds(mistaken, where_defined(problem.expected))


def _holds(problem: Problem, results: Results) -> bool:
    limit = problem.tolerance
    try:
        for name, truth in problem.expected.items():
            expect_close(name, results[name], truth, limit)
    except Mismatch:
        return False
    return True
