"""The table of mechanisms names files, names and clauses that exist, and says why a place is missing."""

import re
from pathlib import Path

from diptych.shared.tools.conformance.clauses.suite import CONTRACTS, clauses_of

ROOT = Path(__file__).parents[2]
FILE = ROOT / "docs" / "generators" / "mechanisms.tsv"
ROWS = [line.split("\t") for line in FILE.read_text("utf-8").splitlines() if not line.startswith("# ")]
NOWHERE = ("no", "does not apply")
_PLACE = re.compile(r"`([^`]+)`(?: `([^`]+)`)?")
_CLAUSE = re.compile(r"\[(\w+)/([\w-]+)\]\(\.\./components/\1\.md\)")


def problem_with(name: str, reference: str, optimized: str, remark: str) -> str | None:
    """What is wrong with a row; None: nothing."""
    for place in (reference, optimized):
        match = _PLACE.fullmatch(place)
        path = ROOT / match[1] if match else ROOT
        if place not in NOWHERE and not path.is_file():
            return f"there is no {place}"
        if match and match[2] and not re.search(rf"\b{re.escape(match[2])}\b", path.read_text("utf-8")):
            return f"{match[1]} has no {match[2]}"
    clause = _CLAUSE.fullmatch(remark)
    if clause is None:
        if remark and not remark.startswith(("differs: ", "not built: ")):
            return f"{remark!r} is not a clause, and does not say what differs or is not built"
    elif clause[1] not in CONTRACTS or clause[2] not in {each.name for each in clauses_of(clause[1])}:
        return f"there is no clause {remark}"
    if "no" in (reference, optimized) and (clause or not remark):
        return "a panel does not have it, and the remark does not say why"
    if remark.startswith("not built") and not {reference, optimized} & {*NOWHERE} and reference != optimized:
        return "it is not built, and both panels have it"
    return None if len(name) > 2 else "it has no name"


def test_every_row_resolves() -> None:
    assert len(ROWS) > 500
    assert {row[0]: problem for row in ROWS if (problem := problem_with(*row))} == {}
