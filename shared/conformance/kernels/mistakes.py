"""Finds the mistake of a function from the results of its smallest failing cases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shared.conformance.compare import Mismatch, expect_close
from shared.conformance.kernels.one_call import (
    FAILURES,
    Results,
    call,
    check_form,
    check_values,
    largest_error,
)
from shared.conformance.kernels.problem import Convention, Like, Problem, Tensors

PRECISION_LOST = 0.05
"""A relative error below this has the right formula: what is lost is precision."""
MAX_DIAGNOSED = 3
STRIDES_IGNORED = "strides are ignored: rows that are slices of wider ones give other results"


def name_mistakes(
    function: Callable[..., Any], like: Like, convention: Convention, failing: list[Problem]
) -> list[str]:
    """The known mistakes that explain the smallest failing cases: first those that explain all cases, then
    those that explain some. The cases are run again with random numbers in place of NaN."""
    smallest = sorted(failing, key=lambda problem: problem.size)[:MAX_DIAGNOSED]
    explained = [_mistakes_in(function, like, convention, problem) for problem in smallest]
    names = list(dict.fromkeys(name for each in explained for name in each))
    of_all = [name for name in names if all(name in each for each in explained)]
    return of_all[:1] if of_all else names[:2]


def _mistakes_in(
    function: Callable[..., Any], like: Like, convention: Convention, problem: Problem
) -> list[str]:
    finite = problem.with_finite_memory()
    try:
        if problem.constants.get("layout"):
            call(function, convention, problem.with_constants(layout=""))
            return ["strides or the address are ignored: only a dense tensor of its own is summed"]
        results = call(function, convention, finite)
        check_form(problem, results, "form")
    except Mismatch as mismatch:
        what = mismatch.what.removeprefix("form: ")
        return [f"{what}: {mismatch.actual}, expected {mismatch.expected}"]
    except FAILURES as error:
        return [f"raises {type(error).__name__}: {error}"]
    for name, expected in problem.expected.items():
        unwritten = int((torch.isnan(results[name].cpu()) & ~torch.isnan(expected)).sum())
        if unwritten:
            return [f"elements of {name} are not written, or are NaN"]
    if _holds(problem, results):
        try:
            check_values(problem, call(function, convention, problem), "values")
        except Mismatch:
            return ["memory is read that is not live: it holds NaN"]
        except FAILURES as error:
            return [f"raises {type(error).__name__}: {error}"]
        return _layout_mistakes(function, like, convention, problem)
    found = []
    for name, suspect in like.suspects.items():
        wrong = suspect(finite)
        if explains(problem, wrong, results):
            found.append(name)
    if found:
        return found
    if largest_error(problem, results) < PRECISION_LOST:
        return ["precision is lost: the formula is right, and sums or roundings are not in float32"]
    return []


def _layout_mistakes(
    function: Callable[..., Any], like: Like, convention: Convention, problem: Problem
) -> list[str]:
    """The layout that the function gets wrong, given that the plain layout is right."""
    if like.ranks:
        return []  # the verdict says which bits differ
    variants = {}
    if like.paged:
        variants["the result depends on which pages hold the KV"] = problem.with_other_pages(like.paged)
    if convention.strided:
        variants[STRIDES_IGNORED] = problem.strided(convention.strided)
    for name, variant in variants.items():
        if not _holds(problem, call(function, convention, variant)):
            return [name]
    return ["another call with the same inputs gives another result, or fails"]


def explains(problem: Problem, wrong: Results, results: Results) -> bool:
    """Whether the results equal those of a mistake wherever it has any (not NaN), and differ from the exact
    ones."""

    def where_defined(tensors: Tensors) -> Results:
        return {
            name: torch.where(torch.isnan(each), each, tensors[name].cpu().double())
            for name, each in wrong.items()
        }

    is_truth = _close(problem, wrong, where_defined(problem.expected))
    return _close(problem, where_defined(results), wrong) and not is_truth


def _holds(problem: Problem, results: Results) -> bool:
    return _close(problem, results, problem.expected)


def _close(problem: Problem, results: Results, expected: Tensors) -> bool:
    limit = problem.tolerance
    try:
        for name, truth in expected.items():
            expect_close(name, results[name], truth, limit)
    except Mismatch:
        return False
    return True
