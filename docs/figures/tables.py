"""The tables of the measurement pages, as data: a chart is drawn from the table beside it."""

from __future__ import annotations

import re
from pathlib import Path

from docs.generators.expand import expand

FOLDER = Path(__file__).parents[1] / "measurements"

Row = dict[str, str]


def read_table(page: str, first_header: str) -> list[Row]:
    """The table of a page whose first header is this one: rows as header -> text, without marks and links.
    Raises `ValueError` if the page has no such table."""
    lines = expand((FOLDER / page).read_text(encoding="utf-8")).splitlines()
    for number, line in enumerate(lines):
        headers = cells_of(line)
        if headers and headers[0] == first_header:
            rows = []
            for below in lines[number + 2 :]:
                if not below.startswith("|"):
                    break
                rows.append(dict(zip(headers, cells_of(below))))
            return rows
    raise ValueError(f"{page} has no table that begins with {first_header!r}")


def cells_of(line: str) -> list[str]:
    if not line.startswith("|"):
        return []
    plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", line).replace("*", "").replace("`", "")
    return [cell.strip() for cell in plain.strip("|").split("|")]


def number(cell: str) -> float:
    """The first number of a cell: 9390 of "9,390 (vLLM)"."""
    match = re.search(r"[\d.,]*\d", cell)
    if match is None:
        raise ValueError(f"no number in the cell {cell!r}")
    return float(match[0].replace(",", ""))
