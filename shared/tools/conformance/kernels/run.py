"""Runs a function on every case of an operation and names its mistakes."""

from __future__ import annotations

import time
import traceback
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from diptych.shared.tools.conformance.clauses.compare import Mismatch
from diptych.shared.tools.conformance.clauses.device import check_device
from diptych.shared.tools.conformance.clauses.time_limit import (
    DoesNotReturn,
    TimeLimitExceeded,
    time_limit,
    until,
)
from diptych.shared.tools.conformance.kernels.bias import check_bias
from diptych.shared.tools.conformance.kernels.child_function import ChildFunction
from diptych.shared.tools.conformance.kernels.collective_likes import expect_same_sums, in_order
from diptych.shared.tools.conformance.kernels.conventions import CONVENTIONS
from diptych.shared.tools.conformance.kernels.functions import Ended, LocalFunction, Raised
from diptych.shared.tools.conformance.kernels.kernel_report import Report, Verdict
from diptych.shared.tools.conformance.kernels.mistakes import name_mistakes
from diptych.shared.tools.conformance.kernels.one_call import (
    FAILURES,
    REFUSALS,
    STALE,
    Conduct,
    Function,
    History,
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
from diptych.shared.tools.conformance.kernels.patterns import check_small
from diptych.shared.tools.conformance.kernels.problem import (
    LARGEST_DRAWN,
    Call,
    Convention,
    Like,
    Problem,
    Variant,
    negated,
    other_contents,
    variants_of,
)
from diptych.shared.tools.conformance.kernels.rank_processes import RankProcesses
from diptych.shared.tools.conformance.kernels.rank_worker import FORMS
from diptych.shared.tools.conformance.kernels.triton_interpreter import hints

AGAIN, ALONE = "another call", "a row alone"
OTHER = 1_000_003
"""Added to the seed of a case's inputs: the seed of its other contents."""
SECONDS = 60.0
"""That one call may take: kernels in Triton's interpreter are slow."""


@contextmanager
def running(
    target: str, like: Like, seconds: float = SECONDS, ends_at: float = float("inf")
) -> Iterator[ChildFunction | RankProcesses]:
    """The function in a process of its own, or in those of its ranks, which end with the block. `ends_at`: of
    time.monotonic, when the check ends."""
    with ChildFunction(target, seconds, ends_at) as function:
        if not like.ranks:
            yield function
            return
        function.start()  # the target is named correctly
    with RankProcesses(target, like.ranks, seconds) as ranks:
        ranks.ends_at = ends_at
        yield ranks


def check_arguments(
    target: str,
    like: Like,
    convention: Convention,
    cases: tuple[Any, ...],
    features: Sequence[str] = (),
    function: ChildFunction | None = None,
) -> None:
    """Raises `ValueError` if the function cannot take the arguments of the convention: those of the first
    case, and of the first case of each feature."""
    if function is None:
        with ChildFunction(target) as function:
            return check_arguments(target, like, convention, cases, features, function)
    for case in (cases[0], *(like.more_cases[feature][0] for feature in features)):
        if like.ranks:
            made = Call(*FORMS[convention.library].arguments(torch.empty(0), None))
        else:
            made = convention.build(like.make(case, convention.takes_scale, 0))
        if wrong := function.bind(made):
            fitting = [f"--convention {each}" for each in fitting_conventions(like, case, function)]
            others = f"It can take those of {' or '.join(fitting)}" if fitting else "Other conventions"
            raise ValueError(
                f"{target} takes {wrong[0]}; convention {convention.library} calls "
                f"{convention.signature}: {wrong[1]}. {others}: --list --like {like.name}"
            )
    return None


def fitting_conventions(like: Like, case: Any, function: ChildFunction) -> list[str]:
    """The libraries whose arguments the function can take."""
    found: list[str] = []
    for each in CONVENTIONS.get(like.name, ()) if not like.ranks else ():
        try:
            made = each.build(like.make(case, each.takes_scale, 0))
        except ValueError:  # the convention has no arguments for such a case
            continue
        if function.bind(made) is None:
            found.append(each.library)
    return found


@dataclass(frozen=True)
class Made:
    """A call that was made: its results, or what it raised."""

    what: str
    problem: Problem
    contents: str
    results: Results | None = None
    error: BaseException | None = None

    @cached_property
    def on_cpu(self) -> Results:
        """The results where all checks read them: a GPU is waited for once."""
        found: dict[str, Any] = self.results or {}
        return {
            name: each.detach().cpu() if isinstance(each, torch.Tensor) else each
            for name, each in found.items()
        }


def check_problem(
    function: Function,
    like: Like,
    convention: Convention,
    problem: Problem,
    other: Problem | None = None,
    history: History | None = None,
) -> Verdict:
    """All calls of a case come first; what is expected is computed after them. `other`: the same sizes with
    other contents."""
    dtype = str(problem.dtype).removeprefix("torch.")
    verdict = Verdict(problem.name, dtype, problem.size)
    history = history or History()
    made = _calls(function, like, convention, problem, other, verdict)
    for each in made:
        if each.error is None:
            history.add(each.problem, each.on_cpu, f"{problem.name}: {each.contents}")
    if verdict.refusal is not None:
        return verdict
    try:
        verdict.allowed = problem.tolerance.rms
        for each in made:
            _check_call(each, like, made, verdict, history)
        verdict.reports = observations(like, problem, {each.what: each.on_cpu for each in made})
    except Conduct as conduct:
        verdict.failure, verdict.conduct = sentence(conduct), conduct.name
    except Mismatch as mismatch:
        verdict.failure = sentence(mismatch)
        verdict.ends_check = isinstance(mismatch, (DoesNotReturn, Ended))
    except FAILURES as error:
        verdict.failure = f"{made[-1].what}: raised {described(error)}"
        if isinstance(error, Raised) and error.kind == "MemoryError":
            verdict.conduct = f"raises {error}"  # as in each case: no other mistake is looked for
        verdict.ends_check = not device_works()
    return verdict


def described(error: BaseException) -> str:
    if isinstance(error, Raised):
        return f"{error} ({error.place})"
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({frame.filename}:{frame.lineno})"


def _calls(
    function: Function,
    like: Like,
    convention: Convention,
    problem: Problem,
    other: Problem | None,
    verdict: Verdict,
) -> list[Made]:
    """The calls of a case until one fails or the case is refused."""
    variants = variants_of(like, convention, problem, other)
    if problem.kind != "draws" and not like.ranks:
        variants.append(Variant(AGAIN, AGAIN, problem))
        if like.rows and len(problem[like.rows[0]]) > 1:
            variants.append(Variant(ALONE, ALONE, problem.row(1, like.rows), contents=ALONE))
    made: list[Made] = []
    for variant in variants:
        contents = variant.contents or "values"
        try:
            results = call(function, convention, variant.problem, variant.is_same)
        except REFUSALS as error:
            if variant.label == "values":
                verdict.refusal = str(error)
                return made
            verdict.refused_forms[variant.label] = str(error)
        except (Mismatch, *FAILURES) as error:
            return [*made, Made(variant.what, variant.problem, contents, error=error)]
        else:
            made.append(Made(variant.what, variant.problem, contents, results))
    return made


def _check_call(made: Made, like: Like, all_made: list[Made], verdict: Verdict, history: History) -> None:
    """Raises what is wrong with a call."""
    if made.error is not None:
        raise made.error
    problem, results, what = made.problem, made.on_cpu, made.what
    try:
        check_form(problem, made.results or {}, what)
        if is_known(made, all_made[0]):
            return
        error = largest_error(problem, results)
        verdict.error = verdict.error if error <= verdict.error else error  # NaN is the largest
        check_values(problem, results, what)
    except Mismatch:
        if history.is_stale(results, f"{all_made[0].problem.name}: {made.contents}"):
            raise Conduct(STALE, what) from None
        raise
    if made.contents == "values":
        check_bias(problem, results)
        check_small(problem, results)
    if like.ranks:
        expect_same_sums(what, results["out"], all_made[0].on_cpu["out"])


def is_known(made: Made, first: Made) -> bool:
    """Whether the results have the bits of those of the first call, which hold, and the same values are
    expected: then these hold too."""
    if made is first:
        return False
    is_same = made.problem.expected is first.problem.expected
    return is_same and same_bits(made.on_cpu, first.on_cpu)


def observations(like: Like, problem: Problem, outputs: dict[str, Results]) -> dict[str, bool]:
    """Observations that are not required. `outputs`: form of the inputs -> results."""
    values = outputs["values"]
    if like.ranks:
        ordered = {"out": in_order(problem).cpu()}
        return {"the bits are those of a float32 sum in the order of ranks": same_bits(values, ordered)}
    found = {}
    if AGAIN in outputs:
        found["a second call gives the same bits"] = same_bits(outputs[AGAIN], values)
    if "on other pages" in outputs:
        found["other pages give the same bits"] = same_bits(outputs["on other pages"], values)
    if ALONE in outputs:
        in_batch = {name: result[1:2] for name, result in values.items()}
        found["a row alone gives the same bits"] = same_bits(outputs[ALONE], in_batch)
    return found


def check_kernel(
    function: Any,
    target: str,
    like: Like,
    convention: Convention,
    cases: tuple[Any, ...] | None = None,
    seconds: float = SECONDS,
    seed: int = 0,
) -> Report:
    """Check every case (or only `cases`) and name the mistakes. `function`: a `ChildFunction`,
    `RankProcesses`, or a function in this process. `seconds`: the time limit of one call in this process.
    `seed`: of all inputs. The caller adds timings."""
    chosen = like.cases if cases is None else cases
    device = function.device_name if isinstance(function, RankProcesses) else device_name()
    report = Report(like, convention, target, device, [], [], [], seed=seed)
    caller = as_function(function, seconds)
    ends_at = getattr(function, "ends_at", float("inf"))
    failing: list[tuple[Problem, Problem | None]] = []
    holding, history = list[Problem](), History()
    for case in chosen:
        if time.monotonic() > ends_at:
            break
        verdict = None
        with suppress(TimeLimitExceeded), time_limit(until(ends_at)):
            problem, other = problems_of(like, convention, case, seed)
            verdict = check_problem(caller, like, convention, problem, other, history)
        if verdict is None:
            break
        if verdict.ends_check and time.monotonic() > ends_at:
            break  # not of the function: other calls took the time, or it may take more
        report.verdicts.append(verdict)
        if verdict.ends_check:
            report.names = [str(verdict.failure)]
            break
        if verdict.conduct:
            report.names = list(dict.fromkeys((*report.names, verdict.conduct)))
        elif verdict.failure is not None and (problem.num_elements < LARGEST_DRAWN or not failing):
            failing.append((problem, other))
        elif verdict.failure is None and verdict.refusal is None and problem.num_elements < LARGEST_DRAWN:
            holding.append(problem)
        del problem, other  # the next one is made without them: inputs may take gigabytes
    report.num_not_run = len(chosen) - len(report.verdicts)
    report.notes += hints(str(each.failure) for each in report.failing)
    if failing and not report.num_not_run:
        with suppress(TimeLimitExceeded), time_limit(until(ends_at)):
            names = name_mistakes(caller, like, convention, failing, holding, ends_at)
            report.names += [name for name in names if name not in report.names]
    return report


def problems_of(like: Like, convention: Convention, case: Any, seed: int) -> tuple[Problem, Problem | None]:
    """The problem of a case, and the same sizes with other contents."""
    case_seed = seed + zlib.crc32(case.name.encode()) % OTHER
    problem = like.make(case, convention.takes_scale, case_seed)
    if like.ranks:
        return problem, None
    if problem.num_elements >= LARGEST_DRAWN:
        return problem, negated(problem, like.negated) if like.negated else None
    return problem, other_contents(like, case, convention.takes_scale, case_seed + OTHER)


def as_function(function: Any, seconds: float) -> Function:
    if isinstance(function, (ChildFunction, LocalFunction)):
        return function
    return LocalFunction(function if isinstance(function, RankProcesses) else limited(function, seconds))


def device_name() -> str:
    device = check_device()
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
