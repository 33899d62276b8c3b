"""Tables of the kernel checker: patterns that are planted, what finds them, and checks of right kernels."""

from __future__ import annotations

import json
from pathlib import Path

from docs.generators.tables import table

FOLDER = Path(__file__).parents[2] / "tests" / "kernel_check"


def cheats() -> str:
    """Pattern, what finds it, and in how many of the operations it is found and named."""
    rows = []
    for number, row in json.loads((FOLDER / "cheats.json").read_text(encoding="utf-8")).items():
        found = [each for each in row["found"].values() if each != "NOT NAMED"]
        count = f"{len(found)} of {len(row['found'])}"
        rows.append((number, row["what"], row["finds"], count))
    return table(("", "A kernel that", "What finds it", "Named in"), rows, "rlll")


def honest_kernels() -> str:
    """Checks of right kernels with many seeds."""
    rows = [
        (
            f"`{row['like']}`",
            ", ".join(row["functions"]),
            row["seeds"],
            f"{row['checks']:,}",
            len(row["alarms"]),
        )
        for row in json.loads((FOLDER / "honest_runs.json").read_text(encoding="utf-8"))
    ]
    return table(("Operation", "Functions", "Seeds", "Cases checked", "False alarms"), rows, "llrrr")
