"""The suite has teeth: its clauses catch every planted bug, in the component in which it is planted."""

from __future__ import annotations

import pytest

from tests.conformance.killers import find_killer, holds, killers, planted
from tests.conformance.mutants import Mutant

MIN_MUTANTS = 500
REMEDY = "run python -m tests.conformance.find_killers"


@pytest.mark.parametrize("mutant", planted(), ids=lambda m: m.key)
def test_its_killer_catches_it(mutant: Mutant) -> None:
    """The clause and case that killers.json names for the bug."""
    killer = killers().get(mutant.key)
    assert killer is not None, f"{mutant.name} has no named killer: {REMEDY}"
    try:
        survives = holds(mutant, killer)
    except LookupError as error:
        raise AssertionError(f"{error}: {REMEDY}") from None
    assert not survives, f"{mutant.name} survives {killer}: {REMEDY}"


@pytest.mark.full
@pytest.mark.parametrize("mutant", planted(), ids=lambda m: m.key)
def test_a_planted_bug_is_caught(mutant: Mutant) -> None:
    assert find_killer(mutant) is not None, f"{mutant.name} survives: the contract has a hole"


def test_there_are_enough_of_them() -> None:
    assert len(planted()) >= MIN_MUTANTS
    assert len({m.key for m in planted()}) == len(planted())


def test_no_killer_is_of_a_bug_that_is_gone() -> None:
    assert set(killers()) <= {m.key for m in planted()}, REMEDY
