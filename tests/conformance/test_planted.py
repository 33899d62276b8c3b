"""Planted bugs: each kind has a test, and each bug changes something."""

from __future__ import annotations

from tests.changed_modules import changed_texts
from tests.planted import KINDS, Words, load


def test_every_kind_has_a_test_and_every_bug_changes_something() -> None:
    assert load() or sum(map(len, KINDS.values())) > 1200
    for kind, bugs in KINDS.items():
        assert bugs.tests, f"no test finds the bugs of {kind}"
        for bug in bugs.values():
            assert bug.plant is not None, f"{bug.name} of {kind}: nothing is planted"
            if isinstance(bug.plant, Words):
                assert all(before != after for _, before, after in bug.plant.changes), bug.name
                changed_texts(bug.plant.changes)  # asserts that the words are there
