"""Finds the mistake of a function from the results of its failing cases."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

import torch

from diptych.shared.tools.conformance.clauses.compare import Mismatch, error_rms
from diptych.shared.tools.conformance.clauses.inputs import Inputs
from diptych.shared.tools.conformance.kernels.bias import has_few_rows, is_biased, is_nearer, kinds_of_bias
from diptych.shared.tools.conformance.kernels.functions import Mistake, Raised
from diptych.shared.tools.conformance.kernels.one_call import (
    BIAS,
    FAILURES,
    PRECISION,
    REFUSALS,
    Function,
    Results,
    call,
    check_form,
    holds,
)
from diptych.shared.tools.conformance.kernels.patterns import only_multiples, pattern_of
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
LITTLE = 6.0
"""The error of frequencies, over the allowed one, that sums of low precision cause."""
OF_CONTENTS = "right for some contents, wrong for others of the same sizes"
FEW = 0.05
"""The largest share of elements that are few."""
SKIPS_ZEROS = "wrong where inputs are zero: in rows that are zero but for one element, or begin with zero"
FEW_WRONG = "few elements are wrong"
NUM_SMALLEST = 3
"""Failing cases that are compared with every suspect; larger ones are compared with the names found in
these."""


def name_mistakes(
    function: Function,
    like: Like,
    convention: Convention,
    failing: list[tuple[Problem, Problem | None]],
    holding: list[Problem],
    ends_at: float = float("inf"),
) -> list[str]:
    """The known mistake that explains every failing case. If there is none: mistakes that explain some cases,
    each with the smallest of these cases. The cases are run again with random numbers in place of NaN; over
    ranks only the smallest, because each failure ends the processes. `failing`: each with the same sizes and
    other contents. Stops at `ends_at`, of time.monotonic."""
    by_size = sorted(failing, key=lambda pair: (has_few_rows(pair[0]), pair[0].size))[
        : NUM_SMALLEST if like.ranks else None
    ]
    found: list[tuple[Problem, dict[str, Mistake]]] = []
    common = dict(like.suspects)
    names: list[str] = []
    for i, (problem, other) in enumerate(by_size):
        if time.monotonic() > ends_at:
            break
        suspects = like.suspects if i < NUM_SMALLEST else common
        mistakes = {
            each.name: each for each in _mistakes_in(function, like, convention, problem, suspects, other)
        }
        found.append((problem, mistakes))
        names = [name for name in (names if i else mistakes) if name in mistakes]
        common = {name: suspect for name, suspect in like.suspects.items() if name in names}
        if not names and i + 1 >= NUM_SMALLEST:
            break
    if names:
        problem, mistakes = found[0]
        is_same = all(each[names[0]] == mistakes[names[0]] for _, each in found)
        return [f"{mistakes[names[0]]}" if is_same else f"{mistakes[names[0]]}, in {problem.name}"]
    if name := only_multiples([problem for problem, _ in failing], holding):
        return [name]
    return _of_some_cases(found[:NUM_SMALLEST])


def _of_some_cases(found: list[tuple[Problem, dict[str, Mistake]]]) -> list[str]:
    """The first mistake of each case. The size of the errors must be the same kind in all cases: a wrong
    formula has small errors in some."""
    lines: dict[str, str] = {}
    clear = [each for each in found if OF_CONTENTS not in each[1]] or found
    for problem, mistakes in clear:
        for name, mistake in list(mistakes.items())[:1]:
            if name not in (PRECISION, FEW_WRONG) or all(name in each for _, each in clear):
                lines.setdefault(name, f"in {problem.name}: {mistake}")
    return list(lines.values())


def _mistakes_in(
    function: Function,
    like: Like,
    convention: Convention,
    problem: Problem,
    suspects: Mapping[str, Suspect],
    other: Problem | None,
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
        return [_mistake_of_error(error)]
    for name, expected in problem.expected.items():
        unwritten = int((torch.isnan(results[name].cpu()) & ~torch.isnan(expected)).sum())
        if unwritten:
            return [Mistake(f"elements of {name} are not written, or are NaN")]
    if holds(problem, results):
        if problem.constants.get("layout"):
            return [_mistake_of_layout(function, convention, problem)]
        if is_biased(problem, results):
            near = [
                name for name, suspect in suspects.items() if is_nearer(problem, suspect(finite), results)
            ]
            return [Mistake(name) for name in near] or kinds_of_bias(problem, results)
        return _mistakes_of_variants(function, like, convention, problem, other, suspects)
    found = [name for name, suspect in suspects.items() if explains(problem, suspect(finite), results)]
    if found:
        return [Mistake(name) for name in found]
    if (mistakes := pattern_of(problem, results)) or like.ranks:
        return mistakes or _mistakes_of_values(problem, results)
    if _depends_on_others(function, like, convention, finite, results):
        return [Mistake("a row depends on the other rows of its batch")]
    return _mistakes_of_values(problem, results)


def _mistake_of_error(error: BaseException) -> Mistake:
    kind, text = type(error).__name__, str(error)
    if isinstance(error, Raised):
        kind, text = error.kind, text.removeprefix(f"{error.kind}: ")
    return Mistake(f"raises {kind}", text)


def _of_contents(
    function: Function,
    like: Like,
    convention: Convention,
    other: Problem,
    results: Results,
    suspects: Mapping[str, Suspect],
) -> list[Mistake]:
    """What is wrong with other contents, which have zeros: perhaps nothing with numbers in their place."""
    finite = other.with_finite_memory()
    found = [Mistake(name) for name, each in suspects.items() if explains(other, each(finite), results)]
    if found:
        return found
    if like.sparse:
        x = other[like.sparse]
        numbers = Inputs(98).normal(*x.shape) if other.kind != "draws" else torch.full(x.shape, 0.37)
        filled = torch.where(x == 0, numbers.to(x.device, x.dtype), x)
        problem = other.with_tensors(**{like.sparse: filled})
        if holds(problem, call(function, convention, problem)):
            return [Mistake(SKIPS_ZEROS)]
    return pattern_of(other, results) or _mistakes_of_values(other, results) or [Mistake(OF_CONTENTS)]


def _depends_on_others(
    function: Function, like: Like, convention: Convention, problem: Problem, results: Results
) -> bool:
    """Whether the row with the largest error is another alone; of draws, the group of rows."""
    if not like.rows or len(problem[like.rows[0]]) < 2 or problem.constants.get("num_groups") == 1:
        return False
    name, truth = next(iter(problem.expected.items()))
    error = (results[name].cpu().double() - truth).abs().nan_to_num(torch.inf).flatten(1).amax(1)
    row = int(error.argmax())
    try:
        alone = problem.row(row, like.rows)
        of_batch = {name: each[row : row + 1].double().cpu() for name, each in results.items()}
        in_batch = replace(alone, truth=lambda _: of_batch)
        return not holds(in_batch, call(function, convention, alone))
    except (Mismatch, *FAILURES):
        return False


def _mistake_of_form(problem: Problem, mismatch: Mismatch) -> Mistake:
    what = mismatch.what.removeprefix("form: ")
    if mismatch.expected is None:
        return Mistake(what)
    if mismatch.expected == problem.dtype:
        is_of_input = any(each.dtype == problem.dtype for each in problem.tensors.values())
        wanted = "that of the input" if is_of_input else "out_dtype"
        return Mistake(f"{what}: {str(mismatch.actual).removeprefix('torch.')}, expected {wanted}")
    return Mistake(what, f"{mismatch.actual}, expected {mismatch.expected}")


def _mistake_of_layout(function: Function, convention: Convention, problem: Problem) -> Mistake:
    """What is wrong with a layout over ranks, given that a dense tensor is right."""
    try:
        call(function, convention, problem)
    except RankRaises as error:
        return Mistake(f"a layout that is not dense: {error.what}; refuse with a ValueError")
    except Mismatch:
        pass
    return Mistake("strides or the address are ignored: only a dense tensor of its own is summed")


def _mistakes_of_variants(
    function: Function,
    like: Like,
    convention: Convention,
    problem: Problem,
    other: Problem | None,
    suspects: Mapping[str, Suspect],
) -> list[Mistake]:
    """The form of the inputs that the function gets wrong, given that finite memory is right."""
    variants = variants_of(like, convention, problem, other)
    for each in variants[:1] if like.ranks else variants:
        label, variant, mistake = each.label, each.problem, each.mistake
        of = variant if each.contents else problem
        try:
            is_right = holds(of, call(function, convention, variant, each.is_same))
            if not is_right and each.is_same:
                results = call(function, convention, variant)
                if not holds(of, results):
                    return _of_contents(function, like, convention, of, results, suspects)
        except Mismatch as mismatch:
            return [_mistake_of_form(problem, mismatch)]
        except REFUSALS:
            continue
        except FAILURES as error:
            kind = str(_mistake_of_error(error))
            return [Mistake(kind if label == "values" else f"{label}: {kind}; refuse with a ValueError")]
        if not is_right:
            return [Mistake(mistake or "memory is read that is not live: it holds NaN")]
    if like.ranks:
        return []  # the verdict says which bits differ
    if like.rows and len(problem[like.rows[0]]) > 1 and problem.kind != "draws":
        alone = problem.row(1, like.rows)
        try:
            if not holds(alone, call(function, convention, alone)):
                return [Mistake("a row alone is wrong")]
        except (Mismatch, *FAILURES) as error:
            return [_mistake_of_error(error)]
    return [Mistake("another call with the same inputs gives another result, or fails")]


def _mistakes_of_values(problem: Problem, results: Results) -> list[Mistake]:
    """How wrong results are that no suspect explains."""
    if problem.kind == "draws":
        off = max(error_rms(results[name], truth) for name, truth in problem.expected.items())
        return [Mistake(PRECISION)] if off < LITTLE * problem.tolerance.rms else []
    if (kinds := kinds_of_bias(problem, results)) and kinds[0].name == BIAS:
        return kinds
    if all(is_rounding(results[name], truth) for name, truth in problem.expected.items()):
        return [Mistake(PRECISION)]
    for name, truth in problem.expected.items():
        error = (results[name].cpu().double() - truth).abs()
        wrong = (error > problem.tolerance_of(name).allowed(truth)).nonzero()
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

    mistaken = replace(problem, truth=lambda _: wrong)
    return holds(mistaken, where_defined(results)) and not holds(mistaken, where_defined(problem.expected))
