"""Runs one call of a function: within a time limit, with poison around its memory, and with unmodified
inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from diptych.shared.tools.conformance.clauses.compare import Mismatch, error_rms, expect_close, expect_equal
from diptych.shared.tools.conformance.clauses.device import check_device
from diptych.shared.tools.conformance.clauses.poison import memory_of, run_poisoned
from diptych.shared.tools.conformance.clauses.time_limit import DoesNotReturn, TimeLimitExceeded, time_limit
from diptych.shared.tools.conformance.kernels.problem import Call, Convention, Problem

FAILURES = (Exception, SystemExit)
"""Whatever a function raises is its failure, not one of the check."""

REFUSALS = (ValueError, NotImplementedError)
"""What a function raises for an input that it does not support."""

Results = dict[str, torch.Tensor]


def limited(function: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    """Raises `DoesNotReturn` at the time limit, if the function can be interrupted. Waits for the GPU, so
    that its errors are raised here."""

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


def call(function: Callable[..., Any], convention: Convention, problem: Problem) -> Results:
    """The results, under the names of the operation. Raises `Mismatch` if an input, or memory beside an
    output, is modified."""
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
    """Raises `Mismatch` if a result has a wrong shape, dtype or device."""
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
    """Raises `Mismatch` if the error of a result exceeds the tolerance."""
    limit = problem.tolerance
    for name, expected in problem.expected.items():
        expect_close(f"{what}: {name}", results[name], expected, limit)


def largest_error(problem: Problem, results: Results) -> float:
    """The norm of the error over the norm of the exact result, for the worst result."""
    return max(error_rms(results[name], expected) for name, expected in problem.expected.items())


def same_bits(a: Results, b: Results) -> bool:
    return all(x.shape == b[name].shape and torch.equal(_bits(x), _bits(b[name])) for name, x in a.items())


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
