"""The contract holds for each dialect."""

from __future__ import annotations

import inspect
import json
from typing import Any

import pytest

from diptych.shared.dialects.gpt_oss import GptOss
from diptych.shared.dialects.parts.choose import dialects
from diptych.shared.interfaces.dialect import Dialect
from diptych.shared.tools.conformance.clauses.clause import Clause
from diptych.shared.tools.conformance.clauses.suite import clauses_of
from diptych.shared.tools.conformance.oracles.read_answers import Read, read, write

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


@any_dialect
def test_a_call_inside_reasoning_ends_it(dialect: Dialect) -> None:
    if dialect.reasoning is None or isinstance(dialect, GptOss):  # whose calls are messages of their own
        return
    text = "I call f.\n" + write(dialect, ("f", {"s": "a </think> b"}))
    whole = read(dialect, [text], {"f": True}, "open")
    assert (whole.reasoning.rstrip(), whole.content) == ("I call f.", "")
    assert [(name, json.loads(arguments)) for name, arguments in whole.calls] == [
        ("f", {"s": "a </think> b"})
    ]
    for cut in range(len(text)):
        assert read(dialect, [text[:cut], text[cut:]], {"f": True}, "open") == whole


@any_dialect
def test_a_marker_in_reasoning_that_begins_no_call_is_reasoning(dialect: Dialect) -> None:
    if dialect.reasoning is None or isinstance(dialect, GptOss):
        return
    text = f"Not {dialect.markers[0]} yet."
    found = read(dialect, [f"{text}{dialect.reasoning.end}Done."], {"f": True}, "open")
    assert found == Read("Done.", text, [])


def test_names_of_dialects_are_their_own() -> None:
    names = [name for cls in DIALECTS.values() for name in cls.tool_parsers]
    assert len(set(names)) == len(names)
    assert all(issubclass(cls, Dialect) for cls in DIALECTS.values())


@pytest.mark.parametrize("name", DIALECTS)
def test_a_dialect_is_a_file_of_at_most_80_lines(name: str) -> None:
    source = inspect.getsource(inspect.getmodule(DIALECTS[name]))  # type: ignore[arg-type]
    assert source.count("\n") <= 80
