"""The suite has teeth: each clause catches the bugs that are planted for it, one or two."""

from __future__ import annotations

import pytest

from diptych.shared.tools.conformance.clauses.suite import CONTRACTS
from tests.conformance.find_killers import wrong_counts
from tests.conformance.killers import caught, killers, planted
from tests.conformance.mutants.mutant import REMEDY
from tests.planted import Bug


@planted().found_by(is_fast=lambda number, _: number % 2 == 0)
def test_its_killer_catches_it(bug: Bug) -> dict[str, str]:
    """The clause and case that killers.json names for the bug."""
    return caught(bug)


@pytest.mark.parametrize("component", CONTRACTS)
def test_every_clause_has_a_bug_or_two(component: str) -> None:
    assert wrong_counts(component) == {}, REMEDY


def test_killers_are_those_of_bugs() -> None:
    assert set(killers()) == set(planted()), REMEDY
