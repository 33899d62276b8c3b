"""Runs a component's clauses against an implementation and says what held."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from shared import registry
from shared.conformance.clause import Clause, clauses_in
from shared.conformance.compare import Mismatch
from shared.conformance.shrink import shrink

CONTRACTS: dict[str, tuple[str, ...]] = {
    "schedule_policy": ("schedule_policy",),
    "prefill_adder": ("prefill_adder",),
    "scheduler": ("scheduler", "scheduler_limits"),
}
"""component -> the modules of shared.conformance.contracts that hold its clauses"""


@dataclass(frozen=True)
class Failure:
    what: str
    expected: object
    actual: object
    smallest_case: Any


@dataclass(frozen=True)
class Verdict:
    clause: Clause
    case: Any
    failure: Failure | None

    @property
    def holds(self) -> bool:
        return self.failure is None


def clauses_of(component: str) -> list[Clause]:
    """A component's clauses; an unknown component raises `ValueError` listing the known."""
    if component not in CONTRACTS:
        raise ValueError(f"no contract for {component!r}; there are contracts for {', '.join(CONTRACTS)}")
    modules = [
        importlib.import_module(f"shared.conformance.contracts.{name}") for name in CONTRACTS[component]
    ]
    return [clause for module in modules for clause in clauses_in(module)]


def check_component(component: str, target: str, *, shrink_failures: bool = True) -> Iterator[Verdict]:
    """Every clause and case of a component against `target`: a panel, a backend's name,
    package.module:Class or file.py:Class."""
    clauses = clauses_of(component)
    impl = registry.load(component, target)
    reference = registry.load(component, "reference")
    yield from check_implementation(clauses, impl, reference, shrink_failures=shrink_failures)


def check_implementation(
    clauses: list[Clause], impl: Any, reference: Any, *, shrink_failures: bool = True
) -> Iterator[Verdict]:
    for clause in clauses:
        for case in clause.cases:
            error = _error_of(clause, impl, case, reference)
            if error is None:
                yield Verdict(clause, case, None)
                continue
            smallest = case
            if shrink_failures:
                smallest = shrink(case, partial(_fails_here_only, clause, impl, reference))
                error = _error_of(clause, impl, smallest, reference) or error
            yield Verdict(clause, case, _failure(error, smallest))


def _fails_here_only(clause: Clause, impl: Any, reference: Any, case: Any) -> bool:
    """A smaller case that the reference fails too makes no sense as a case."""
    return (
        _error_of(clause, reference, case, reference) is None
        and _error_of(clause, impl, case, reference) is not None
    )


def _error_of(clause: Clause, impl: Any, case: Any, reference: Any) -> Exception | None:
    try:
        clause.run(impl, case, reference)
    except Exception as error:  # whatever an implementation raises where it should not is its failure
        return error
    return None


def _failure(error: Exception, case: Any) -> Failure:
    if isinstance(error, Mismatch):
        return Failure(error.what, error.expected, error.actual, case)
    return Failure("raised", "no exception", f"{type(error).__name__}: {error}", case)
