"""Which clause and case catch each planted bug (killers.json, written by find_killers.py)."""

from __future__ import annotations

import importlib
import json
import pkgutil
from functools import cache
from pathlib import Path

import tests.conformance.mutants as mutants
from diptych.shared import registry
from diptych.shared.tools.conformance.clauses.suite import check_implementation, clauses_of
from tests.conformance.mutants import Mutant

KILLERS_FILE = Path(__file__).with_name("killers.json")


@cache
def killers() -> dict[str, list[str]]:
    """Key of a planted bug -> [clause, case]."""
    found: dict[str, list[str]] = json.loads(KILLERS_FILE.read_text()) if KILLERS_FILE.is_file() else {}
    return found


@cache
def planted() -> list[Mutant]:
    """All planted bugs."""
    modules = [
        importlib.import_module(f"{mutants.__name__}.{info.name}")
        for info in pkgutil.iter_modules(mutants.__path__)
    ]
    return [value for module in modules for value in vars(module).values() if isinstance(value, Mutant)]


def holds(mutant: Mutant, killer: list[str]) -> bool:
    """Whether the contract's named case holds for the bug, which it should not. Raises `LookupError` where
    there is no such case."""
    for clause in clauses_of(mutant.component):
        for case in clause.cases:
            if [clause.name, case.name] == killer:
                single = clause.with_cases([case])
                reference = registry.load(mutant.component, "reference")
                (verdict,) = check_implementation([single], mutant.impl, reference, shrink_failures=False)
                return verdict.holds
    raise LookupError(f"{mutant.component} has no clause {killer[0]!r} with a case {killer[1]!r}")


def find_killer(mutant: Mutant) -> list[str] | None:
    """The first [clause, case] that catches the bug; None: it survives."""
    reference = registry.load(mutant.component, "reference")
    # Clauses of one thing come before random sequences; first come those expected to catch the bug.
    clauses = sorted(clauses_of(mutant.component), key=lambda clause: len(clause.cases))
    clauses.sort(key=lambda clause: clause.check.__module__.partition(".contracts.")[2] not in mutant.first)
    for verdict in check_implementation(clauses, mutant.impl, reference, shrink_failures=False):
        if not verdict.holds:
            return [verdict.clause.name, verdict.case.name]
    return None
