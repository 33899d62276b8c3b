"""Which cases of a clause `make test` tries; `make test-all` tries all of them.

A clause of few cases keeps them all. Of a larger grid it keeps a pairwise cover: every pair of values of two
axes occurs in at least one case; in a grid of only two axes, every value does. Added to these are the cases
that catch a planted bug (killers.json).
"""

from __future__ import annotations

from collections import Counter
from itertools import combinations
from typing import Any

from shared.conformance.case import fields_of
from shared.conformance.clause import Clause
from tests.conformance.killers import killers

MAX_KEPT = 4  # a clause of so few cases keeps them all
MAX_VALUES = 12  # an axis with more values, or with a new one in each case (a seed), counts as no axis


def fast_cases(clause: Clause) -> set[str]:
    """Names of the cases that stay in the fast cut."""
    if len(clause.cases) <= MAX_KEPT:
        return {case.name for case in clause.cases}
    named = {case for name, case in killers().values() if name == clause.name}
    return pairwise_cover(clause.cases) | {case.name for case in clause.cases if case.name in named}


def pairwise_cover(cases: tuple[Any, ...]) -> set[str]:
    """Names of cases in which every pair of values occurs. Greedy: the case with most new pairs is next."""
    settings = {case.name: _settings(case) for case in cases}
    counts = Counter(axis for axis, _ in set().union(*settings.values()))
    axes = {axis for axis, count in counts.items() if 1 < count <= min(MAX_VALUES, len(cases) - 1)}
    pairs = {
        name: set(combinations(sorted(s for s in found if s[0] in axes), 2 if len(axes) > 2 else 1)) or found
        for name, found in settings.items()
    }
    missing, kept = set().union(*pairs.values()), set()
    while missing:
        best = max(pairs, key=lambda name: len(pairs[name] & missing))
        kept.add(best)
        missing -= pairs.pop(best)
    return kept


def _settings(case: Any) -> set[tuple[str, str]]:
    return {(name, repr(value)) for name, value in (fields_of(case) or {}).items()}
