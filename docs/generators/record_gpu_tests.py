"""Records a run of the tests on a GPU in docs/measurements/data/, for the page *What works where*.

    make test-gpu
    python -m docs.generators.record_gpu_tests build/gpu-tests/*.xml \
        --card "NVIDIA H100 80GB HBM3" --gpus 2 --torch 2.13.0 --commit 5f9d2320

Writes gpu-tests-CARD-xGPUS.json in place of an older one: per test function, and per component and
implementation of the contracts, the cases that passed, that failed and that were not run. The tests of this
tree that need a GPU and that no report has count as not run.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

from docs.generators.measured import DATA

ROOT = Path(__file__).parents[2]
CONTRACTS = "tests/conformance/test_contracts.py"
COLLECT = """
import sys
import pytest

class Collector:
    def __init__(self):
        self.items = []
    def pytest_deselected(self, items):
        self.items += items
    def pytest_collection_finish(self, session):
        self.items += session.items

collector = Collector()
status = pytest.main(["--collect-only", "-qq", "-p", "no:cacheprovider", "tests"], plugins=[collector])
for item in collector.items:
    if item.get_closest_marker("gpu") or item.nodeid.startswith(sys.argv[1]):
        print("TEST", item.nodeid)
sys.exit(status)
"""


class Case(NamedTuple):
    """file::function[parameters] of a test."""

    file: str
    function: str
    parameters: str


PASSED, FAILED, NOT_RUN = range(3)


def cases_of(report: Path) -> Iterator[tuple[Case, int]]:
    """The tests of a report in JUnit XML, and how each ended."""
    for each in ElementTree.parse(report).iter("testcase"):
        if not each.get("classname"):
            continue  # a file that could not be imported: its tests count as not run
        parts = each.attrib["classname"].split(".")
        files = ("/".join(parts[:i]) + ".py" for i in range(len(parts), 0, -1))
        file = next((file for file in files if (ROOT / file).is_file()), "/".join(parts) + ".py")
        name, _, parameters = each.attrib["name"].partition("[")
        ends = {child.tag for child in each}
        end = FAILED if ends & {"failure", "error"} else NOT_RUN if "skipped" in ends else PASSED
        yield Case(file, name, parameters), end


def collected() -> list[Case]:
    """The tests of this tree that need a GPU, and all clauses of contracts."""
    command = [sys.executable, "-c", COLLECT, CONTRACTS]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    names = [line.removeprefix("TEST ") for line in listing.splitlines() if line.startswith("TEST ")]
    cases = []
    for name in names:
        file, _, test = name.partition("::")
        function, _, parameters = test.partition("[")
        cases.append(Case(file, function.rpartition("::")[2], parameters))
    return cases


def summary(ends: dict[Case, int]) -> dict[str, Any]:
    """Counts of [passed, failed, not run]: `files` by file and function, `contracts` by component and
    implementation."""
    files: dict[str, dict[str, list[int]]] = {}
    contracts: dict[str, dict[str, list[int]]] = {}
    for case, end in sorted(ends.items()):
        files.setdefault(case.file, {}).setdefault(case.function, [0, 0, 0])[end] += 1
        if case.file == CONTRACTS and case.parameters:
            component, choice, *_ = case.parameters.split("-")
            contracts.setdefault(component, {}).setdefault(choice, [0, 0, 0])[end] += 1
    return {"files": files, "contracts": contracts}


def ends_of(reports: Iterable[Path], wanted: Iterable[Case]) -> dict[Case, int]:
    """Each test with its end; of several reports that have a test the last counts, unless it was skipped."""
    ends = dict.fromkeys(wanted, NOT_RUN)
    for report in reports:
        for case, end in cases_of(report):
            if end != NOT_RUN or case not in ends:
                ends[case] = end
    return ends


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("reports", nargs="+", type=Path)
    parser.add_argument("--card", required=True, help="its name, as nvidia-smi prints it")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--torch", required=True, help="its version")
    parser.add_argument("--commit", required=True, help="of the tree that was tested")
    parser.add_argument("--date", default=datetime.date.today().isoformat())
    parser.add_argument("--folder", type=Path, default=DATA)
    given = parser.parse_args(arguments)
    short = re.search(r"[A-Z]+\d+\w*", given.card)
    if short is None:
        parser.error(f"--card {given.card!r} names no GPU, as NVIDIA H100 does")
    record = {name: getattr(given, name) for name in ("card", "gpus", "torch", "commit", "date")}
    record |= summary(ends_of(given.reports, collected()))
    path = given.folder / f"gpu-tests-{short[0]}-x{given.gpus}.json"
    text = json.dumps(record, indent=1)
    path.write_text(
        re.sub(r"\[\s+(\d+),\s+(\d+),\s+(\d+)\s+\]", r"[\1, \2, \3]", text) + "\n", encoding="utf-8"
    )
    counts = [sum(count[i] for file in record["files"].values() for count in file.values()) for i in range(3)]
    print(f"{path}: {counts[PASSED]} passed, {counts[FAILED]} failed, {counts[NOT_RUN]} not run")


if __name__ == "__main__":
    main()
