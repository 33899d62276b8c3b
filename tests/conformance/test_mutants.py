"""The suite has teeth: each clause catches the bugs that are planted for it, one or two."""

from __future__ import annotations

import pytest

from diptych.shared.tools.conformance.clauses.suite import CONTRACTS
from tests.conformance.find_killers import wrong_counts
from tests.conformance.killers import holds, killers, planted
from tests.conformance.mutants import Mutant

REMEDY = "run python -m tests.conformance.find_killers"


PARAMS = [pytest.param(m, id=m.key, marks=[pytest.mark.full] * (i % 2)) for i, m in enumerate(planted())]


@pytest.mark.parametrize("mutant", PARAMS)
def test_its_killer_catches_it(mutant: Mutant) -> None:
    """The clause and case that killers.json names for the bug."""
    killer = killers().get(mutant.key)
    assert killer is not None, f"{mutant.name} has no named killer: {REMEDY}"
    try:
        survives = holds(mutant, killer)
    except LookupError as error:
        raise AssertionError(f"{error}: {REMEDY}") from None
    assert not survives, f"{mutant.name} survives {killer}: {REMEDY}"


@pytest.mark.parametrize("component", CONTRACTS)
def test_every_clause_has_a_bug_or_two(component: str) -> None:
    assert wrong_counts(component) == {}, REMEDY


def test_names_are_distinct_and_known() -> None:
    names = [mutant.key for mutant in planted()]
    assert len(set(names)) == len(names)
    assert set(killers()) == set(names), REMEDY
