"""The table of mechanisms of SGLang and mini-sglang, from `mechanisms.tsv`.

A line "# TITLE" begins a section. Other lines are rows of four columns, with tabs between: the mechanism; its
place in the reference panel; that in the optimized panel; a remark. A place is a file, or file:name; "-":
the mechanism does not apply there; empty: the panel does not have it. A remark is empty,
"clause: COMPONENT/NAME", "differs: ...", or "not built: ...".
"""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from docs.generators.tables import wrapping

FILE = Path(__file__).parent / "mechanisms.tsv"
REMARKS = ("clause: ", "differs: ", "not built: ")


class Mechanism(NamedTuple):
    section: str
    name: str
    reference: str
    optimized: str
    remark: str

    @property
    def places(self) -> list[str]:
        return [place for place in (self.reference, self.optimized) if place not in ("", "-")]


def read_mechanisms() -> list[Mechanism]:
    """All rows, in order."""
    found, section = [], ""
    for line in FILE.read_text("utf-8").splitlines():
        if line.startswith("# "):
            section = line.removeprefix("# ")
        else:
            name, reference, optimized, remark = line.split("\t")
            found.append(Mechanism(section, name, reference, optimized, remark))
    return found


def mechanisms() -> str:
    """A table for each section, and the totals."""
    rows = read_mechanisms()
    num_missing = sum(row.remark.startswith("not built") for row in rows)
    num_different = sum(row.remark.startswith("differs") for row in rows)
    parts = [f"{len(rows)} mechanisms: {num_missing} are not built in a panel, and {num_different} differ."]
    for section, its_rows in groupby(rows, key=lambda row: row.section):
        lines = [
            "| Mechanism | reference | optimized | Clause or remark |",
            "|---|---|---|---|",
        ]
        lines += [_line(row) for row in its_rows]
        parts += [f"## {section}", wrapping("\n".join(lines))]
    return "\n\n".join(parts)


def _line(row: Mechanism) -> str:
    kind, _, text = row.remark.partition(": ")
    remark = row.remark
    if kind == "clause":
        component = text.partition("/")[0]
        remark = f"[{text}](../components/{component}.md)"
    return f"| {_escaped(row.name)} | {_place(row.reference)} | {_place(row.optimized)} | {remark} |"


def _place(place: str) -> str:
    if place == "-":
        return "does not apply"
    return f"`{place.replace(':', '` `')}`" if place else "no"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*").replace("<", "&lt;").replace("_", "\\_")
