"""Records a run of the tests on a GPU in docs/measurements/data/, for the page *What works where*.

    make test-gpu-all
    python -m docs.generators.record_gpu_tests build/gpu-tests/*.xml \
        --card "NVIDIA H100 80GB HBM3" --gpus 2 --torch 2.13.0 --commit 5f9d2320

Writes gpu-tests-CARD-xGPUS.json in place of an older one: per test function, and per component and
implementation of the contracts, the cases that passed, that failed and that were not run. The tests of this
tree that need a GPU and that no report has count as not run.
"""

from __future__ import annotations

import datetime
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple
from xml.etree import ElementTree

import typer

from docs.generators.measured import DATA

ROOT = Path(__file__).parents[2]
CONTRACTS = "tests/conformance/test_contracts.py"
PASSED, FAILED, NOT_RUN = range(3)


class Case(NamedTuple):
    """file::function[parameters] of a test."""

    file: str
    function: str
    parameters: str


def case_of(file: str, test: str) -> Case:
    function, _, parameters = test.partition("[")
    return Case(file, function.rpartition("::")[2], parameters)


def cases_of(report: Path) -> Iterator[tuple[Case, int]]:
    """The tests of a report in JUnit XML, and how each ended."""
    for each in ElementTree.parse(report).iter("testcase"):
        if "file" not in each.attrib or each.get("classname") == "":
            continue  # a file that could not be imported, or that was skipped: its tests count as not run
        ends = {child.tag for child in each}
        end = FAILED if ends & {"failure", "error"} else NOT_RUN if "skipped" in ends else PASSED
        yield case_of(each.attrib["file"], each.attrib["name"]), end


def collected() -> list[Case]:
    """The tests of this tree that need a GPU, and all clauses of contracts."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-p", "no:cacheprovider"]
    names: list[str] = []
    for chosen in (["-m", "gpu", "tests"], [CONTRACTS]):
        done = subprocess.run([*command, *chosen], cwd=ROOT, capture_output=True, text=True, check=True)
        names += [line for line in done.stdout.splitlines() if "::" in line]
    return [case_of(*name.split("::", 1)) for name in names]


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


def main(
    reports: list[Path],
    card: Annotated[str, typer.Option(help="its name, as nvidia-smi prints it")],
    torch: Annotated[str, typer.Option(help="its version")],
    commit: Annotated[str, typer.Option(help="of the tree that was tested")],
    gpus: int = 1,
    date: str = str(datetime.date.today()),
    folder: Path = DATA,
) -> None:
    short = re.search(r"[A-Z]+\d+\w*", card)
    if short is None:
        raise typer.BadParameter(f"--card {card!r} names no GPU, as NVIDIA H100 does")
    record: dict[str, Any] = {"card": card, "gpus": gpus, "torch": torch, "commit": commit, "date": date}
    record |= summary(ends_of(reports, collected()))
    path = folder / f"gpu-tests-{short[0]}-x{gpus}.json"
    text = re.sub(r"\[\s+(\d+),\s+(\d+),\s+(\d+)\s+\]", r"[\1, \2, \3]", json.dumps(record, indent=1))
    path.write_text(re.sub(r"\n +", "\n", text) + "\n", encoding="utf-8")
    counts = [sum(count[i] for file in record["files"].values() for count in file.values()) for i in range(3)]
    print(f"{path}: {counts[PASSED]} passed, {counts[FAILED]} failed, {counts[NOT_RUN]} not run")


if __name__ == "__main__":
    typer.run(main)
