"""The contract holds for each dialect."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from diptych.shared.dialects.parts.choose import dialects
from diptych.shared.interfaces.dialect import Dialect
from diptych.shared.tools.conformance.clauses.clause import Clause
from diptych.shared.tools.conformance.clauses.suite import clauses_of

DIALECTS = {name: cls for name, cls in dialects().items() if name != "plain"}
any_dialect = pytest.mark.parametrize("dialect", [cls() for cls in DIALECTS.values()], ids=list(DIALECTS))
CASES = [
    pytest.param(clause, case, id=f"{clause.name}-{case.name}".replace(" ", "_"))
    for clause in clauses_of("dialect")
    for case in clause.cases
]


@pytest.mark.parametrize("name", [name for name in DIALECTS if name != "hermes"])  # which is the reference
@pytest.mark.parametrize(("clause", "case"), CASES)
def test_clause(name: str, clause: Clause, case: Any) -> None:
    clause.run(DIALECTS[name], case, DIALECTS["hermes"])


def test_names_of_dialects_are_their_own() -> None:
    names = [name for cls in DIALECTS.values() for name in cls.tool_parsers]
    assert len(set(names)) == len(names)
    assert all(issubclass(cls, Dialect) for cls in DIALECTS.values())


@pytest.mark.parametrize("name", DIALECTS)
def test_a_dialect_is_a_file_of_at_most_80_lines(name: str) -> None:
    source = inspect.getsource(inspect.getmodule(DIALECTS[name]))  # type: ignore[arg-type]
    assert source.count("\n") <= 80
