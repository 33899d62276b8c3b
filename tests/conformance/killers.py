"""Which clause must catch each planted bug, and a case that does: killers.json, from find_killers.py."""

from __future__ import annotations

import importlib
import pkgutil

import tests.conformance.mutants as mutants
from diptych.shared import registry
from diptych.shared.tools.conformance.clauses.suite import check_implementation, clauses_of
from tests.conformance.mutants.mutant import PLANTED, killers
from tests.planted import Bug, Bugs


def planted() -> Bugs:
    """All of them."""
    for info in pkgutil.iter_modules(mutants.__path__):
        importlib.import_module(f"{mutants.__name__}.{info.name}")
    return PLANTED


def caught(bug: Bug) -> dict[str, str]:
    """The clause and the case that killers.json names, if they fail; nothing where there are none."""
    name, case_name = killers().get(bug.name, ("", ""))
    clauses = [
        clause.with_cases([case])
        for clause in clauses_of(bug.where)
        for case in clause.cases
        if (clause.name, case.name) == (name, case_name)
    ]
    reference = registry.load(bug.where, "reference")
    verdicts = check_implementation(clauses, bug.planted, reference, shrink_failures=False)
    return {each.clause.name: each.case.name for each in verdicts if not each.holds}
