"""Tables of measurements, from the files that benchmarks wrote into docs/measurements/data.

A page defines a table in its marker, and other pages show it by its name:

    <!-- generate: measured latency
    files: latency-Qwen3-0.6B latency-Qwen3-8B
    rows: pairs
    head: shape | ms/token
    row: {0.flags.model} | {1.time_per_token_s:ms}
    -->

A file with a folder in its name is a record of tests. `rows` is a function of result_rows.py or
profile_rows.py with its arguments; without it each result is a row. `row` has templates of cells (cells.py);
without it the rows are cells. `names` are the first cells. Columns that `bars` names have a bar behind each
number, on one scale.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from docs.generators import profile_rows, result_rows
from docs.generators.cells import cell
from docs.generators.tables import Notes, notes_of, read, table

DOCS = Path(__file__).parents[1]
DATA = DOCS / "measurements" / "data"
USUAL = DATA.parent / "usual.json"
"""What most files have in common: a key of a file or of its results, such as "flags" -> entries."""
COMMON = "common, besides usual.json"
"""What all results of a file have in common: such a key -> entries that are not the usual ones."""
MAX_COLUMNS = 87
"""Of a command."""

_DEFINITION = re.compile(r"^<!-- generate: measured ([\w-]+)\n(.*?)-->", re.MULTILINE | re.DOTALL)


@cache
def definitions() -> dict[str, Notes]:
    """The tables that pages define, by name."""
    texts = (page.read_text(encoding="utf-8") for page in sorted(DOCS.rglob("*.md")))
    return {name: notes_of(body) for text in texts for name, body in _DEFINITION.findall(text)}


def measured(name: str, notes: Notes | None = None) -> str:
    """A table, and the files that it comes from."""
    if notes is None and name not in definitions():
        raise ValueError(f"no page defines the measured table {name!r}; there are {', '.join(definitions())}")
    of = notes or definitions()[name]
    head, files = of["head"].split(" | "), of.get("files", "").split()
    cells = [list(row) for row in _cells(of, files)]
    is_number = [all(re.match(r"[\d*]|$", str(row[i])) for row in cells) for i in range(len(head))]
    align = "".join("r" if each else "l" for each in is_number)
    columns = [head.index(name) for name in of["bars"].split(" | ")] if "bars" in of else []
    most = max((number_of(row[i]) for row in cells for i in columns), default=0)
    most = 100 if columns and str(cells[0][columns[0]]).endswith("%") else most
    for row in cells:
        for i in columns:
            share = f"--share:{100 * number_of(row[i]) / most:.1f}%"
            row[i] = f'<span class="share" style="{share}">{row[i]}</span>'
    return f"{table(head, cells, align)}\n\n{source(files)}"


def number_of(cell: object) -> float:
    return float(re.sub(r"[^\d.]", "", str(cell)) or 0)


def _cells(of: Notes, files: Sequence[str]) -> list[list[object]]:
    kind, *arguments = of.get("rows", "each").split()
    rows = getattr(result_rows, kind, None) or getattr(profile_rows, kind)
    if arguments:
        rows = rows(*arguments)
    found = list(rows(*map(results_of, files)))
    if "row" in of:
        found = [[cell(template, row) for template in of["row"].split(" | ")] for row in found]
    return [[name, *row] for name, row in zip(of["names"].split(" | "), found)] if "names" in of else found


def source(names: Sequence[str]) -> str:
    if not names:
        return "*Source: counted when this page is built.*"
    if "/" in names[0]:
        return f"*Source: `{names[0]}`.*"
    places = dict.fromkeys(where(load(name)) for name in names)
    paths = ", ".join(f"`docs/measurements/data/{name}.json`" for name in names)
    return f"*Source: {paths} ({'; '.join(places)}).*"


def where(report: dict[str, Any]) -> str:
    """The hardware and the versions of a result file."""
    gpus = report["machine"]["gpus"]
    count = f"{len(gpus)} x " if len(gpus) > 1 else ""
    return f"{count}{(gpus or [report['machine']['cpu']])[0]}, torch {report['versions']['torch']}"


def load(name: str) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))
    usual = json.loads(USUAL.read_text(encoding="utf-8"))
    for key, entries in report.pop(COMMON, {}).items():
        for place in having(report, key):
            place[key] = {**usual[key], **entries, **place[key]}
    return report


def having(report: dict[str, Any], key: str) -> list[dict[str, Any]]:
    """The report or its results, where this key is."""
    places = (report, *report.get("results", ()))
    return [place for place in places if isinstance(place, dict) and key in place]


def results_of(name: str) -> list[dict[str, Any]]:
    """Of a record of tests: its rows, which have their key as `name`."""
    found: Any = read(name) if "/" in name else load(name)["results"]
    return [{"name": key, **row} for key, row in found.items()] if isinstance(found, dict) else found


def recording(*names: str) -> str:
    """The commands that wrote these files, as a block of bash. An option stays with its value."""
    lines = []
    for name in names:
        command = re.sub(r" (?!-)", "\0", f"{load(name)['command']} {name}.json")
        parts = textwrap.wrap(command, MAX_COLUMNS, subsequent_indent="  ", break_on_hyphens=False)
        lines.append(" \\\n".join(parts).replace("\0", " "))
    return "\n".join(["```bash", *lines, "```"])
