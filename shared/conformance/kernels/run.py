"""Runs a function on every case of an operation, and names what is wrong with it."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from shared import registry
from shared.conformance.compare import Mismatch, error_rms, expect_close, expect_equal
from shared.conformance.device import check_device
from shared.conformance.kernels.collective_likes import expect_same_sums, in_order
from shared.conformance.kernels.conventions import Call, Convention
from shared.conformance.kernels.problem import Like, Problem, Tensors
from shared.conformance.kernels.rank_processes import RankProcesses
from shared.conformance.kernels.rank_worker import FORMS
from shared.conformance.poison import memory_of, run_poisoned
from shared.conformance.time_limit import DoesNotReturn, TimeLimitExceeded, time_limit

PRECISION_LOST = 0.05
"""A relative error below this has the right formula: what is lost is precision."""
MAX_DIAGNOSED = 3
STRIDES_IGNORED = "strides are ignored: rows that are slices of wider ones give other results"
FAILURES = (Exception, SystemExit)
"""Whatever a function raises is its failure, not one of the check."""
SECONDS = 60.0
"""That one call may take: kernels in Triton's interpreter are slow."""

Results = dict[str, torch.Tensor]


@dataclass
class Verdict:
    """One case. `error`: the norm of the error over that of the truth, `allowed` the largest one. `failure`:
    what is wrong, None where nothing is. `refusal`: why the function does not support the case. `reports`:
    what is observed and not required. `ends_check`: no other case can be run after it."""

    case: str
    dtype: str
    size: int
    error: float = 0.0
    allowed: float = 0.0
    failure: str | None = None
    refusal: str | None = None
    reports: dict[str, bool] = field(default_factory=dict)
    ends_check: bool = False


@dataclass
class Timing:
    """Seconds of one call. `ours`: of what is timed beside it; `bound`: bytes over bandwidth or FLOPs over
    rate, the larger."""

    case: str
    size: int
    seconds: float
    ours: float | None
    bound: float | None


@dataclass
class Report:
    like: Like
    convention: Convention
    target: str
    device: str
    verdicts: list[Verdict]
    timings: list[Timing]
    names: list[str]  # of mistakes that explain the failures
    num_not_run: int = 0  # cases after one that ended the check

    @property
    def failing(self) -> list[Verdict]:
        return [verdict for verdict in self.verdicts if verdict.failure is not None]

    @property
    def status(self) -> int:
        """0: every supported case holds; 1: one fails; 2: none could be checked."""
        if self.failing:
            return 1
        return 2 if self.num_refused == len(self.verdicts) else 0

    @property
    def num_refused(self) -> int:
        return sum(verdict.refusal is not None for verdict in self.verdicts)

    @property
    def timing_notes(self) -> list[str]:
        """What must be known to read the times."""
        if not self.timings:
            return []
        notes = []
        if self.device.startswith("CPU"):
            notes.append("These are times of a CPU: they do not show how fast a kernel is on a GPU.")
        if all(timing.ours is None for timing in self.timings):
            notes.append(
                f"The column {self.like.beside} is empty: the kernel for {self.like.name} needs a CUDA GPU."
            )
        if all(timing.bound is None for timing in self.timings):
            notes.append("There is no bound: the rate of the links between ranks is not measured.")
        return notes

    @property
    def summary(self) -> str:
        num_cases = len(self.verdicts)
        if self.failing:
            rest = f"; {self.num_not_run} more are not run" if self.num_not_run else ""
            return f"{len(self.failing)} of {num_cases} cases fail{rest}"
        if self.num_refused == num_cases:
            return f"all {num_cases} cases are refused: nothing was checked"
        refused = f", {self.num_refused} are refused" if self.num_refused else ""
        return f"all {num_cases - self.num_refused} cases hold{refused}"


def load_function(target: str) -> Callable[..., Any]:
    """package.module:function or file.py:function. Raises `ValueError` where there is none."""
    if ":" not in target:
        raise ValueError(f"{target!r} names no function: write file.py:function or package.module:function")
    function: Callable[..., Any] = registry.load("the kernel", target)
    if not callable(function) or isinstance(function, type):
        kind = "a class" if isinstance(function, type) else f"{type(function).__name__} {function!r:.60}"
        raise ValueError(f"{target} is {kind}, not a function")
    return function


@contextmanager
def running(target: str, like: Like, seconds: float = SECONDS) -> Iterator[Callable[..., Any]]:
    """The function, within the time limit; one over ranks with its processes, which end with the block."""
    function = load_function(target)
    if like.ranks:
        with RankProcesses(target, like.ranks, seconds) as ranks:
            yield ranks
    else:
        yield function


def check_arguments(target: str, like: Like, convention: Convention, cases: tuple[Any, ...]) -> None:
    """`ValueError` where the function cannot take the arguments of the convention at all."""
    function = load_function(target)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of a builtin: not known
        return
    if like.ranks:
        args, kwargs = FORMS[convention.library].arguments(torch.empty(0), None)
    else:
        made = convention.build(like.make(cases[0], convention.takes_scale))
        args, kwargs = made.args, made.kwargs
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise ValueError(
            f"{target} takes {signature}; convention {convention.library} calls "
            f"{convention.signature}: {error}. Other conventions: --list --like {like.name}"
        ) from None


def limited(function: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    """Raises `DoesNotReturn` once the time is up, where it can be interrupted; waits for a GPU, whose errors
    then belong to this call."""

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            with time_limit(seconds):
                returned = function(*args, **kwargs)
                if check_device().type == "cuda":
                    torch.cuda.synchronize()
                return returned
        except TimeLimitExceeded:
            raise DoesNotReturn("", seconds) from None

    return call


def check_problem(
    function: Callable[..., Any], like: Like, convention: Convention, problem: Problem
) -> Verdict:
    verdict = Verdict(
        problem.name,
        str(problem.dtype).removeprefix("torch."),
        problem.size,
        allowed=problem.tolerance.rms,
    )
    variants = [("values", problem)]
    if like.paged:
        variants.append(("on other pages", problem.with_other_pages(like.paged)))
    if convention.strided:
        names = ", ".join(convention.strided)
        variants.append((f"{names} as slices of wider rows", problem.strided(convention.strided)))
    if like.ranks:
        late = (0, like.ranks - 1)
        variants += [(f"when rank {rank} is late", problem.with_constants(late=rank)) for rank in late]
    outputs: list[Results] = []
    what = "values"
    try:
        for what, variant in variants:
            results = call(function, convention, variant)
            outputs.append(results)
            check_form(problem, results, what)
            error = largest_error(problem, results)
            verdict.error = verdict.error if error <= verdict.error else error  # NaN is the largest
            check_values(problem, results, what)
            if like.ranks:
                expect_same_sums(what, results["out"], outputs[0]["out"])
        what = "another call"
        verdict.reports = observations(function, like, convention, problem, outputs)
    except (ValueError, NotImplementedError) as error:
        verdict.refusal = f"{what}: {error}"
    except Mismatch as mismatch:
        verdict.failure = sentence(mismatch)
        verdict.ends_check = isinstance(mismatch, DoesNotReturn)
    except FAILURES as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{frame.filename}:{frame.lineno}"
        verdict.failure = f"{what}: raised {type(error).__name__}: {error} ({place})"
        verdict.ends_check = not device_works()
    return verdict


def observations(
    function: Callable[..., Any], like: Like, convention: Convention, problem: Problem, outputs: list[Results]
) -> dict[str, bool]:
    """What is not required. `outputs`: the results of the problem, and of the same on other pages."""
    if like.ranks:
        ordered = {"out": in_order(problem)}
        return {"the bits are those of a float32 sum in the order of ranks": same_bits(outputs[0], ordered)}
    found = {}
    if problem.kind != "draws":
        again = call(function, convention, problem)
        found["a second call gives the same bits"] = same_bits(again, outputs[0])
    if like.paged:
        found["other pages give the same bits"] = same_bits(outputs[1], outputs[0])
    if like.rows and len(problem[like.rows[0]]) > 1:
        alone = call(function, convention, problem.row(1, like.rows))
        in_batch = {name: result[1:2] for name, result in outputs[0].items()}
        found["a row alone gives the same bits"] = same_bits(alone, in_batch)
    return found


def device_works() -> bool:
    """False after an illegal access of a GPU kernel: every later call fails."""
    try:
        torch.empty(1, device=check_device()).fill_(1.0).cpu()
    except RuntimeError:
        return False
    return True


def sentence(mismatch: Mismatch) -> str:
    expected, actual = (
        f"{value:.6g}" if isinstance(value, float) else str(value)
        for value in (mismatch.expected, mismatch.actual)
    )
    return f"{mismatch.what}: expected {expected}, got {actual}"


def call(function: Callable[..., Any], convention: Convention, problem: Problem) -> Results:
    """The results, under the names of the operation; `Mismatch` where an input is modified, or memory beside
    a tensor that is written."""
    made = convention.build(problem)
    inputs = [(name, each) for name, each in tensors_of(made) if not any(each is out for out in made.written)]
    before = [memory_of(each) for _, each in inputs]
    beside = [memory_of(each, without_it=True) for each in made.written]
    returned = run_poisoned(lambda: function(*made.args, **made.kwargs))
    for (name, each), copy in zip(inputs, before):
        if not torch.equal(memory_of(each), copy):
            raise Mismatch(f"{name} afterwards", "not modified", "modified")
    for each, copy in zip(made.written, beside):
        if not torch.equal(memory_of(each, without_it=True), copy):
            raise Mismatch("memory before or after the output", "not modified", "modified")
    try:
        results = made.results(returned)
        return {name: results[name] for name in problem.expected}
    except (TypeError, KeyError, IndexError, AttributeError) as error:
        form = type(returned).__name__
        raise Mismatch("what is returned", convention.signature, form) from error


def tensors_of(made: Call) -> list[tuple[str, torch.Tensor]]:
    found = []
    for name, value in (*((f"argument {i}", each) for i, each in enumerate(made.args)), *made.kwargs.items()):
        values = value if isinstance(value, tuple) else (value,)
        found += [(name, each) for each in values if isinstance(each, torch.Tensor)]
    return found


def check_form(problem: Problem, results: Results, what: str) -> None:
    """`Mismatch` where a result has another shape, dtype or device."""
    for name, expected in problem.expected.items():
        result = results[name]
        if not isinstance(result, torch.Tensor):
            raise Mismatch(f"{what}: {name}", "a tensor", type(result).__name__)
        for form, actual, wanted in (
            ("shape", list(result.shape), list(expected.shape)),
            ("dtype", result.dtype, problem.dtype),
            ("device", result.device, problem.device),
        ):
            expect_equal(f"{what}: {form} of {name}", actual, wanted)


def check_values(problem: Problem, results: Results, what: str) -> None:
    """`Mismatch` where a result is not the truth within the tolerance."""
    limit = problem.tolerance
    for name, expected in problem.expected.items():
        expect_close(f"{what}: {name}", results[name], expected, limit)


def largest_error(problem: Problem, results: Results) -> float:
    """Norm of the error over that of the truth, of the worst result."""
    return max(error_rms(results[name], expected) for name, expected in problem.expected.items())


def same_bits(a: Results, b: Results) -> bool:
    return all(x.shape == b[name].shape and torch.equal(_bits(x), _bits(b[name])) for name, x in a.items())


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def name_mistakes(
    function: Callable[..., Any], like: Like, convention: Convention, failing: list[Problem]
) -> list[str]:
    """What explains the failures of the smallest failing cases: mistakes that explain all of them first, then
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
    """The plain layout is right: which other one is not?"""
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
    """Whether results are those of a mistake, where it has any (not NaN), and those are not the truth."""

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


def check_kernel(
    function: Callable[..., Any],
    target: str,
    like: Like,
    convention: Convention,
    cases: tuple[Any, ...] | None = None,
    seconds: float = SECONDS,
) -> Report:
    """Every case (or only `cases`), and the names of mistakes; `seconds`: that one call may take. Timings are
    added by the caller."""
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
