"""Which clause must catch each planted bug, and a case that does: killers.json, from find_killers.py."""

from __future__ import annotations

import importlib
import json
import pkgutil
from functools import cache
from pathlib import Path

import tests.conformance.mutants as mutants
from diptych.shared import registry
from diptych.shared.tools.conformance.clauses.suite import check_implementation, clauses_of
from tests.conformance.mutants import PLANTED, Mutant

KILLERS_FILE = Path(__file__).with_name("killers.json")


@cache
def killers() -> dict[str, list[str]]:
    """Key of a planted bug -> [clause, case]."""
    found: dict[str, list[str]] = json.loads(KILLERS_FILE.read_text()) if KILLERS_FILE.is_file() else {}
    return found


@cache
def planted() -> list[Mutant]:
    """All planted bugs."""
    for info in pkgutil.iter_modules(mutants.__path__):
        importlib.import_module(f"{mutants.__name__}.{info.name}")
    return PLANTED


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
