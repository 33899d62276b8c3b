"""A clause of a contract: a sentence, cases to try it on, and the check.

    @contract("A key shorter than a page matches nothing.", cases=PAGE_SIZES)
    def short_key_matches_nothing(impl: type[PrefixCache], case: Case) -> None:
        cache = impl(case.page_size)
        ...

A contract check gets one implementation; an agreement check also gets the reference. Both raise `Mismatch`
(any other exception counts as a failure as well). `diptych.shared.tools.conformance.clauses.case` has cases
and grids of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, Literal

Check = Callable[..., None]


@dataclass(frozen=True)
class Clause:
    name: str
    statement: str
    cases: tuple[Any, ...]
    check: Check
    kind: Literal["contract", "agreement"]

    def with_cases(self, cases: Sequence[Any]) -> Clause:
        """The same clause over other cases."""
        return replace(self, cases=tuple(cases))

    def run(self, impl: Any, case: Any, reference: Any) -> None:
        """Raise unless the clause holds for this case. `reference`: the implementation to agree with."""
        if self.kind == "contract":
            self.check(impl, case)
        else:
            self.check(impl, case, reference)


def contract(statement: str, cases: Sequence[Any]) -> Callable[[Check], Clause]:
    """Turn check(impl, case) into a Clause."""
    return _clause("contract", statement, cases)


def agreement(statement: str, cases: Sequence[Any]) -> Callable[[Check], Clause]:
    """Turn check(impl, case, reference) into a Clause."""
    return _clause("agreement", statement, cases)


def _clause(
    kind: Literal["contract", "agreement"], statement: str, cases: Sequence[Any]
) -> Callable[[Check], Clause]:
    assert cases, f"a clause without a case proves nothing: {statement}"

    def make(check: Check) -> Clause:
        return Clause(check.__name__.replace("_", "-"), statement, tuple(cases), check, kind)

    return make


def clauses_in(module: ModuleType) -> list[Clause]:
    """The clauses that a module defines, in its order."""
    return [value for value in vars(module).values() if isinstance(value, Clause)]
