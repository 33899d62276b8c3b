"""Which cases of a clause `make test` tries; `make test-all` tries all of them.

Each clause has the cases that catch its planted bugs (killers.json), and those that alone run a line (ALONE).
Of a slow component it has one more, which the reference leaves out. Of the others a clause of few cases keeps
them all, and a larger grid keeps a pairwise cover, at most MAX_COVER cases: every pair of values of two axes
occurs in one of them, as far as so many cases can. Of a grid with a single axis that several clauses of a
component share (the model families), each clause keeps a few values, and together they keep all. The
reference has half of a cover: where an implementation is compared with it, it runs the other cases too.
"""

from __future__ import annotations

from collections import Counter
from itertools import combinations
from typing import Any, NamedTuple

from diptych.shared.tools.conformance.clauses.case import fields_of
from diptych.shared.tools.conformance.clauses.clause import Clause
from diptych.shared.tools.conformance.clauses.suite import clauses_of
from tests.conformance.mutants.mutant import killers

MAX_KEPT = 4  # a clause of so few cases keeps them all
MAX_COVER = 4
FEW = 3  # values of a single axis
SLOW = {
    *("collectives", "draft_models", "drafter", "linear_attention", "lora", "mla_attention"),
    *("model_runner", "models", "moe", "quantized_experts", "sampler", "scheduler"),
}
"""Components whose cases take most of the time: models, Triton's interpreter, many steps."""
ALONE = {
    "any-moment": {"retract twice after 3 steps, pages of 4"},
    "fixed-shape": {"window"},
    "refused": {"prompt as long as the context"},
    "fused-experts": {"0 tokens, 2 of 5 experts, 0 empty, 32-16, bfloat16"},
    "routes": {"biased, no tokens"},
}
"""Clause -> cases that run lines which no other test of the fast cut runs."""
MAX_VALUES = 12  # an axis with more values, or with a new one in each case (a seed), counts as no axis


class FastCut(NamedTuple):
    """Names of cases of a clause."""

    whole: set[str]
    half: set[str]  # of half a cover


def fast_cases(clauses: list[Clause], component: str = "") -> dict[str, FastCut]:
    """Clause -> the cases that stay in the fast cut, for the clauses of a component."""
    named: dict[str, set[str]] = {}
    for name, case in killers().values():
        named.setdefault(name, set()).add(case)
    kept = {}
    for number, clause in enumerate(clauses):
        names = [case.name for case in clause.cases]
        chosen = (named.get(clause.name, set()) | ALONE.get(clause.name, set())) & set(names)
        if component in SLOW:
            cover = [names[number % len(names)]]
            half = [] if chosen else cover
        elif len(names) <= MAX_KEPT:
            cover = half = names
        elif cover := pairwise_cover(clause.cases):
            half = cover[: MAX_COVER // 2]
        else:
            cover = half = [names[(number * FEW + i) % len(names)] for i in range(FEW)]
        kept[clause.name] = FastCut({*cover, *chosen}, {*half, *chosen})
    return kept


def fast_clauses(component: str) -> list[Clause]:
    """The clauses of a component, each with the cases of the fast cut."""
    clauses = clauses_of(component)
    kept = fast_cases(clauses, component)
    return [c.with_cases([case for case in c.cases if case.name in kept[c.name].whole]) for c in clauses]


def pairwise_cover(cases: tuple[Any, ...]) -> list[str]:
    """Names of cases in which every pair of values occurs, at most so many; none, where there are no axes.
    Greedy: the case with most new pairs is next."""
    settings = {case.name: _settings(case) for case in cases}
    counts = Counter(axis for axis, _ in set().union(*settings.values()))
    axes = {axis for axis, count in counts.items() if 1 < count <= min(MAX_VALUES, len(cases) - 1)}
    pairs = {
        name: set(combinations(sorted(s for s in own if s[0] in axes), 2 if len(axes) > 2 else 1))
        for name, own in settings.items()
    }
    missing = set().union(*pairs.values())
    kept: list[str] = []
    while missing and len(kept) < MAX_COVER:
        best = max(pairs, key=lambda name: len(pairs[name] & missing))
        kept.append(best)
        missing -= pairs.pop(best)
    return kept


def _settings(case: Any) -> set[tuple[str, str]]:
    return {(name, repr(value)) for name, value in (fields_of(case) or {}).items()}
