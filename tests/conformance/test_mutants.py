"""The suite has teeth: its clauses catch every planted bug, in the component in which it is planted."""

from __future__ import annotations

import importlib
import pkgutil

import pytest

import tests.conformance.mutants as mutants
from shared import registry
from shared.conformance.suite import check_implementation, clauses_of
from tests.conformance.mutants import Mutant

MIN_MUTANTS = 40


def planted() -> list[Mutant]:
    modules = [
        importlib.import_module(f"{mutants.__name__}.{info.name}")
        for info in pkgutil.iter_modules(mutants.__path__)
    ]
    return [value for module in modules for value in vars(module).values() if isinstance(value, Mutant)]


@pytest.mark.parametrize("mutant", planted(), ids=lambda m: f"{m.component}-{m.name}")
def test_a_planted_bug_is_caught(mutant: Mutant) -> None:
    reference = registry.load(mutant.component, "reference")
    # Those that look at one thing, then random sequences; before all, where the bug is expected to be caught.
    clauses = sorted(clauses_of(mutant.component), key=lambda clause: len(clause.cases))
    clauses.sort(key=lambda clause: clause.check.__module__.partition(".contracts.")[2] not in mutant.first)
    verdicts = check_implementation(clauses, mutant.impl, reference, shrink_failures=False)
    assert not all(verdict.holds for verdict in verdicts), f"{mutant.name} survives: the contract has a hole"


def test_there_are_enough_of_them() -> None:
    assert len(planted()) >= MIN_MUTANTS
    assert len({(m.component, m.name) for m in planted()}) == len(planted())
