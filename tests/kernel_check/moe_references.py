"""Judges the references of published Definitions of FlashInfer Trace, one after another.

python -m tests.kernel_check.moe_references DIR [--within SECONDS] records them in `moe_references.json`;
those that ran to the end there are left out. DIR: flashinfer_trace/definitions/moe of flashinfer-bench.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from diptych.shared.tools.conformance.formats.trace_files import read_definition

FILE = Path(__file__).with_name("moe_references.json")
MAX_SECONDS = 600.0


def judged(path: Path, seconds: float, seed: int = 1) -> dict[str, Any]:
    """What `diptych check kernel --definition` says of a Definition's own reference."""
    size = read_definition(path).num_const_bytes / 2**30
    row: dict[str, Any] = {"name": path.stem, "GiB": round(size, 1), "sizes": "none"}
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [sys.executable, "-m", "diptych", "check", "kernel", "--definition", str(path)]
        command += ["--seed", str(seed), "--within", f"{seconds:g}", "--time-limit", f"{seconds:g}"]
        begin = time.monotonic()
        done = subprocess.run([*command, "--json", file.name], capture_output=True, text=True)
        row["seconds"] = round(time.monotonic() - begin)
        text = Path(file.name).read_text(encoding="utf-8")
    if not text:  # refused
        return row | {"says": done.stderr.strip().splitlines()[-1].removeprefix(f"error: {path.stem}: ")}
    report = json.loads(text)
    cases = report["cases"]
    failing = [each["failure"] for each in cases if each["failure"]]
    refused = [each["refusal"] for each in cases if each["refusal"]]
    counts = {"failing": failing, "refused": refused}
    row |= {"holding": len(cases) - len(failing) - len(refused), **counts, "says": report["summary"]}
    return row | {"sizes": "smaller" if any("instead of" in each for each in report["notes"]) else "its own"}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--within", type=float, default=MAX_SECONDS)
    parser.add_argument("--json", type=Path, default=FILE)
    arguments = parser.parse_args()
    paths = sorted(arguments.folder.glob("*.json"), key=lambda each: read_definition(each).num_const_bytes)
    rows = json.loads(arguments.json.read_text(encoding="utf-8")) if arguments.json.is_file() else []
    for path in paths:
        if any(row["name"] == path.stem and "not run" not in row["says"] for row in rows):
            continue
        rows = [row for row in rows if row["name"] != path.stem] + [judged(path, arguments.within)]
        lines = ",\n".join(json.dumps(row) for row in rows)
        arguments.json.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
        print(rows[-1]["name"], rows[-1]["seconds"], rows[-1]["says"], flush=True)


if __name__ == "__main__":
    main()
