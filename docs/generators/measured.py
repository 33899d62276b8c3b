"""Tables of measurements, from the files that benchmarks wrote into docs/measurements/data.

`RECORDINGS` of docs/generators/record_measurements.py has the command of each file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from docs.generators import measured_rows as rows
from docs.generators.record_measurements import DATA, RECORDINGS
from docs.generators.tables import table

MAX_COLUMNS = 86
"""Of a command."""


class Measured(NamedTuple):
    """files: names without .json; none: counted when the page is made. rows: from the results of each file,
    in this order."""

    files: Sequence[str]
    head: Sequence[str]
    rows: Callable[..., rows.Rows]


WAITING = ("10 waiting", "1,000", "10,000", "first pass over 10,000")
PANELS = ("reference, 10", "reference, 10,000", "optimized, 10", "optimized, 10,000")
TAILS = ("TTFT p50, ms", "TTFT p99, ms", "ITL p50, ms", "ITL p99, ms", "TPOT p99, ms")
EVEN = ("TTFT p50, ms", "ITL p50, ms", "ITL p99, ms", "p99 / p50", "tokens/s at 64 clients")
LOOPS = [
    f"serve-{loop}{size}" for size in ("", "-mixed-256", "-mixed-128") for loop in ("rates", "concurrency-64")
]
CALLS = (
    "cached tokens",
    "nodes per sequence",
    *(f"{operation}, {panel}" for operation in rows.OPERATIONS for panel in rows.PANELS),
)

TABLES = {
    "scheduling": Measured(["scheduling"], ["policy", "panel", *WAITING], rows.scheduling),
    "scheduling-medians": Measured(["scheduling"], ["policy", *PANELS], rows.scheduling_medians),
    "cache-calls": Measured(["radix-cache"], CALLS, rows.cache_calls),
    "cache-calls-by-depth": Measured(["radix-cache-depth"], CALLS, rows.cache_calls),
    "goodput": Measured(
        ["serve-rates"], ["arrivals/s", "goodput, requests/s", "output tokens/s", *TAILS], rows.goodput
    ),
    "even-times": Measured(LOOPS, ["prompt tokens of a step", "arrivals/s", *EVEN], rows.even_times),
    "pool-steps": Measured(
        [], ["conservativeness", "steps, pool of 10 %", "50 %", "100 %", "retractions"], rows.pool_steps
    ),
}
"""Name in a marker -> its table."""


def measured(name: str) -> str:
    """A table of `TABLES`, and the files that it comes from."""
    if name not in TABLES:
        raise ValueError(f"no measured table {name!r}; there are {', '.join(TABLES)}")
    found = TABLES[name]
    files = [load(file) for file in found.files]
    cells = found.rows(*(file["results"] for file in files))
    is_number = [all(re.match(r"[\d*]|$", str(row[i])) for row in cells) for i in range(len(found.head))]
    align = "".join("r" if each else "l" for each in is_number)
    return f"{table(found.head, cells, align)}\n\n{source(found.files)}"


def source(names: Sequence[str]) -> str:
    if not names:
        return "*Source: counted when this page is built.*"
    places = dict.fromkeys(where(load(name)) for name in names)
    paths = ", ".join(f"`docs/measurements/data/{name}.json`" for name in names)
    return f"*Source: {paths} ({'; '.join(places)}).*"


def where(report: dict[str, Any]) -> str:
    """The hardware and the versions of a result file."""
    versions, machine = report["versions"], report["machine"]
    device = machine["gpus"][0] if machine["gpus"] else machine["cpu"]
    return f"{device}, torch {versions['torch']}"


def load(name: str) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))
    return report


def recording(*names: str) -> str:
    """The commands that write these files, as a block of bash."""
    wrong = sorted(set(names) - set(RECORDINGS))
    if wrong:
        raise ValueError(f"no recording {', '.join(wrong)}; there are {', '.join(RECORDINGS)}")
    lines = []
    for name in names:
        line = ""
        # An option stays with its value.
        for part in re.split(r" (?=-)", f"{RECORDINGS[name].command} {name}.json"):
            if len(line) + len(part) > MAX_COLUMNS:
                lines.append(f"{line} \\")
                line = " "
            line += f" {part}" if line else part
        lines.append(line)
    return "\n".join(["```bash", *lines, "```"])
