"""The table of mechanisms names files, names and clauses that exist, and says why a place is missing."""

from __future__ import annotations

import re
from pathlib import Path

from diptych.shared.tools.conformance.clauses.suite import CONTRACTS, clauses_of
from docs.generators.mechanisms import REMARKS, Mechanism, mechanisms, read_mechanisms

ROOT = Path(__file__).parents[2]
ROWS = read_mechanisms()


def problem_with(row: Mechanism) -> str | None:
    """What is wrong with a row; None: nothing."""
    if len(row.name) < 3:
        return "it has no name"
    for place in row.places:
        file, _, name = place.partition(":")
        path = ROOT / file
        if not path.is_file():
            return f"there is no {file}"
        if name and not re.search(rf"\b{re.escape(name)}\b", path.read_text("utf-8")):
            return f"{file} has no {name}"
    kind, _, text = row.remark.partition(": ")
    if row.remark and not row.remark.startswith(REMARKS):
        return f"the remark {row.remark!r} begins with none of {REMARKS}"
    if kind == "clause":
        component, _, name = text.partition("/")
        if component not in CONTRACTS or name not in {clause.name for clause in clauses_of(component)}:
            return f"there is no clause {text}"
    if "" in (row.reference, row.optimized) and kind not in ("differs", "not built"):
        return "a panel does not have it, and the remark does not say why"
    if kind == "not built" and row.reference not in ("", "-") and row.optimized not in ("", "-"):
        return None if row.reference == row.optimized else "it is not built, and both panels have it"
    return None


def test_every_row_resolves() -> None:
    found = {row.name: problem for row in ROWS if (problem := problem_with(row))}
    assert found == {}


def test_there_are_rows_for_all_mechanisms_of_the_audit() -> None:
    assert len(ROWS) >= 551
    assert len({row.section for row in ROWS}) == 16
    assert mechanisms().count("\n| ") == len(ROWS) + 16
