"""Writes the results that the measurement pages show: docs/measurements/data/, one JSON file each.

    python -m docs.generators.record_measurements build/results steps scheduling   # again
    python -m docs.generators.record_measurements docs/measurements/data new="diptych bench step --json"

A file has the command that wrote it; the command ends with the option for the file. Most need an H200: a page
compares its figures with those of other engines on this GPU. Those with several ranks need as many.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

from docs.generators.measured import COMMON, USUAL, having, load

ROOT = Path(__file__).parents[2]


def record(name: str, command: str, file: Path) -> None:
    """Runs the command, which shows what it prints. Raises `CalledProcessError` if it fails."""
    program, *arguments = shlex.split(command)
    if program == "diptych":  # without an installed script
        arguments[:0] = ["-m", "diptych"]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path}
    subprocess.run([sys.executable, *arguments, str(file)], cwd=ROOT, env=environment, check=True)
    report = {"command": command, **json.loads(file.read_text(encoding="utf-8"))}
    file.write_text(text_of(report), encoding="utf-8")
    print(f"{name}: recorded", flush=True)


def text_of(report: dict[str, Any]) -> str:
    """JSON with a line for each key and each result. Entries that all results have are written once, and
    those of usual.json are left out; `load` puts them back. Floats with a fraction have five significant
    digits, finer than any measurement."""
    short: Any = {"parse_float": lambda text: float(text if text.endswith(".0") else f"{float(text):.5g}")}
    report = _without_common(json.loads(json.dumps(report), **short))
    tight = partial(json.dumps, separators=(",", ":"))
    values = {key: tight(value) for key, value in report.items()}
    if isinstance(results := report.get("results"), list):
        values["results"] = "[\n" + ",\n".join(map(tight, results)) + "\n]"
    return "{\n" + ",\n".join(f"{tight(key)}:{value}" for key, value in values.items()) + "\n}\n"


def _without_common(report: dict[str, Any]) -> dict[str, Any]:
    """A key stays as it is where a usual entry is missing."""
    common: dict[str, Any] = {}
    for key, usual in json.loads(USUAL.read_text(encoding="utf-8")).items():
        places = having(report, key)
        if not places or any(usual.keys() - place[key].keys() for place in places):
            continue
        first, *others = ({*map(json.dumps, place[key].items())} for place in places)  # 1 is not true
        known = {*map(json.dumps, usual.items())}
        in_each = first.intersection(*others) - known if others else set()
        common[key] = {name: v for name, v in places[0][key].items() if json.dumps((name, v)) in in_each}
        for place in places:
            kept = (each for each in place[key].items() if json.dumps(each) not in known | in_each)
            place[key] = dict(kept)
    return {**report, COMMON: common} if common else report


def main(folder: Path, names: list[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for each in names:
        name, _, command = each.partition("=")
        record(name, command or load(name)["command"], folder.absolute() / f"{name}.json")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
