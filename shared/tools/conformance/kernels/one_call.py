"""Runs one call of a function with a time limit, and checks its conduct, the form and the values of its
results."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, Protocol

import torch

from diptych.shared.tools.conformance.clauses.compare import Mismatch, error_rms, expect_close, expect_equal
from diptych.shared.tools.conformance.clauses.device import check_device
from diptych.shared.tools.conformance.clauses.poison import memory_of
from diptych.shared.tools.conformance.clauses.time_limit import DoesNotReturn, TimeLimitExceeded, time_limit
from diptych.shared.tools.conformance.kernels.functions import Other, Outcome, same_bytes
from diptych.shared.tools.conformance.kernels.problem import Call, Convention, Problem

FAILURES = (Exception, SystemExit)
"""Whatever a function raises is its failure, not one of the check."""

REFUSALS = (ValueError, NotImplementedError)
"""What a function raises for an input that it does not support."""

Results = dict[str, torch.Tensor]
BIAS = "a bias: all elements are too large, or too small, by one factor"
PRECISION = "precision is lost: errors are as small as of sums or roundings that are not in float32"
STALE = "the result of an earlier call is returned, or computed from its memory"
ROW_FACTOR = 4.0
"""The error of a row may be so many times the limit for the whole result, unless a tolerance has its own."""


class Conduct(Mismatch):
    """What a kernel must not do, whatever its results are. `name`: without the figures of a case."""

    def __init__(self, name: str, detail: str = "") -> None:
        super().__init__(f"{name}: {detail}" if detail else name)
        self.name = name


class Function(Protocol):
    """`ChildFunction`, `LocalFunction`."""

    def call(self, made: Call, is_same: bool = False) -> Outcome: ...


def limited(function: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    """Raises `DoesNotReturn` at the time limit, if the function can be interrupted. It does not wait for a
    GPU: what the function leaves running there is seen by `invoke`."""

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            with time_limit(seconds):
                return function(*args, **kwargs)
        except TimeLimitExceeded:
            raise DoesNotReturn("", seconds) from None

    return call


def device_works() -> bool:
    """False after an illegal memory access of a GPU kernel, after which every call fails."""
    try:
        torch.empty(1, device=check_device()).fill_(1.0).cpu()
    except RuntimeError:
        return False
    return True


def sentence(mismatch: Mismatch) -> str:
    if mismatch.expected is None:  # `what` is the whole sentence
        return mismatch.what
    expected, actual = (
        f"{value:.6g}" if isinstance(value, float) else str(value)
        for value in (mismatch.expected, mismatch.actual)
    )
    return f"{mismatch.what}: expected {expected}, got {actual}"


def call(function: Function, convention: Convention, problem: Problem, is_same: bool = False) -> Results:
    """The results, under the names of the operation. `is_same`: in the memory of the call before. Raises
    `Mismatch` if an input, or memory beside an output, is modified, or if the function does what a kernel
    must not do."""
    made = convention.build(problem)
    beside = [memory_of(each, without_it=True) for each in made.written]
    outcome = function.call(made, is_same)
    return results_of(convention, made, outcome, beside)


def results_of(convention: Convention, made: Call, outcome: Outcome, beside: list[torch.Tensor]) -> Results:
    if outcome.wrong:
        raise Conduct(f"the function {outcome.wrong[0]}")
    if outcome.modified:
        raise Conduct("an input is modified", outcome.modified[0])
    for each, copy in zip(made.written, beside):
        if not torch.equal(memory_of(each, without_it=True), copy):
            raise Mismatch("memory before or after the output", "not modified", "modified")
    try:
        return dict(made.results(outcome.value))
    except (TypeError, KeyError, IndexError, AttributeError) as error:
        form = form_of(outcome.value)
        raise Mismatch("what is returned", convention.signature, form) from error


def form_of(value: Any) -> str:
    return value.name if isinstance(value, Other) else type(value).__name__


def check_form(problem: Problem, results: Results, what: str) -> None:
    """Raises `Mismatch` if a result has a wrong shape, dtype or device."""
    for name, expected in problem.expected.items():
        result = results.get(name)
        if not isinstance(result, torch.Tensor):
            raise Mismatch(f"{what}: {name}", "a tensor", form_of(result))
        for form, actual, wanted in (
            ("shape", list(result.shape), list(expected.shape)),
            ("dtype", result.dtype, problem.dtype_of(name)),
            ("device", result.device, problem.device),
        ):
            expect_equal(f"{what}: {form} of {name}", actual, wanted)


def check_values(problem: Problem, results: Results, what: str) -> None:
    """Raises `Mismatch` if the error of an element, of a row or of a result exceeds the tolerance."""
    for name, expected in problem.expected.items():
        limit = problem.tolerance_of(name)
        expect_close(f"{what}: {name}", results[name], expected, limit)
        if problem.kind != "draws":
            row = ROW_FACTOR * limit.rms if limit.row is None else limit.row
            _check_rows(f"{what}: {name}", results[name], expected, row)


def holds(problem: Problem, results: Results) -> bool:
    try:
        for name, truth in problem.expected.items():
            expect_close(name, results[name], truth, problem.tolerance_of(name))
    except Mismatch:
        return False
    return True


def _check_rows(what: str, result: torch.Tensor, expected: torch.Tensor, allowed: float) -> None:
    """A row is the last dimension. Its error counts relative to its norm: a row may be small as a whole.
    Below the normal numbers of its type an element may be off by one step."""
    if expected.dim() < 2 or not expected.numel():
        return
    error = (result.detach().cpu().double() - expected).nan_to_num(0.0).flatten(0, -2).norm(dim=-1)
    norm = expected.nan_to_num(0.0).flatten(0, -2).norm(dim=-1)
    step = 0.0
    if result.is_floating_point():
        info = torch.finfo(result.dtype)
        step = info.smallest_normal * info.eps
    wrong = (error > allowed * norm + step * expected.shape[-1] ** 0.5 + 1e-30).nonzero()
    if len(wrong):
        row = int(wrong[0])
        ratio = float(error[row] / norm[row].clamp(min=1e-300))
        raise Mismatch(f"{what}, error of row {row} relative to its norm", f"<= {allowed:g}", ratio)


def largest_error(problem: Problem, results: Results) -> float:
    """The norm of the error over the norm of the exact result, for the worst result."""
    return max(error_rms(results[name], expected) for name, expected in problem.expected.items())


def same_bits(a: Results, b: Results) -> bool:
    return all(x.shape == b[name].shape and same_bytes(_bits(x), _bits(b[name])) for name, x in a.items())


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


class History:
    """Digests of results of earlier calls. `contents`: a name of the inputs of a call, in any layout."""

    def __init__(self) -> None:
        self._seen: dict[bytes, str] = {}
        self._drawn: dict[str, Problem] = {}

    def add(self, problem: Problem, results: Results, contents: str) -> None:
        if problem.kind == "draws":
            self._drawn[contents] = problem
        for each in results.values():
            self._seen.setdefault(_digest(each), contents)

    def is_stale(self, results: Results, contents: str) -> bool:
        """Whether a result has the bits of one of other inputs, or the frequencies of other draws, and is not
        constant."""
        tensors = [each for each in results.values() if isinstance(each, torch.Tensor)]
        if any(each.numel() < 8 or each.flatten().double().unique().numel() <= 2 for each in tensors):
            return False
        if any(self._seen.get(_digest(each), contents) != contents for each in tensors):
            return True
        return any(
            all(each.shape == problem.expected[name].shape for name, each in results.items())
            and holds(problem, results)
            for name, problem in self._drawn.items()
            if name != contents
        )


def _digest(tensor: torch.Tensor) -> bytes:
    if not isinstance(tensor, torch.Tensor):
        return b""
    return hashlib.sha256(_bits(tensor).cpu().numpy().tobytes()).digest()
