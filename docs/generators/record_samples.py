"""Writes the outputs of commands that reference pages show: docs/samples/, one file each.

    python -m docs.generators.record_samples              # all, again
    python -m docs.generators.record_samples check diff   # some

A file has the command after a dollar sign, for bash in the root of the repository, then its output. For a new
sample, write a file with the command alone. Times depend on the computer.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "samples"
SERVER = "http://127.0.0.1:8000"
ENDLESS = {"serve": "curl ", "route": "routing to"}
"""Commands that run until they are interrupted: here when a line has this text."""


def command_of(sample: str) -> str:
    """The command at the beginning of a file: lines after a dollar sign, and those that continue them."""
    lines: list[str] = []
    for line in sample.splitlines():
        if not line.startswith("$ ") and not (lines and lines[-1].endswith("\\")):
            break
        lines.append(line)
    return "\n".join(lines)


def record(file: Path, url: str) -> None:
    """Run the command of a file and write its output. `url`: the server that stands for SERVER."""
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "96",
    }
    shown = command_of(file.read_text(encoding="utf-8"))
    command = f"\n{shown}".replace(SERVER, url).replace("\n$ ", "\n")
    end = ENDLESS.get(file.stem)
    running = subprocess.Popen(
        ["bash", "-c", f"exec {command.strip()}" if end else command],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert running.stdout is not None
    text = ""
    for line in running.stdout:
        text += line
        if end and end in line:
            running.send_signal(signal.SIGINT)
    text = text.replace(url, SERVER).replace(f"{ROOT}/", "")
    lines = [line.rstrip() for line in f"{shown}\n{text}".splitlines()]
    file.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")
    print(f"{file.stem}: exit status {running.wait()}")


def main(names: list[str]) -> None:
    from tests.server.running import serving

    shutil.rmtree(ROOT / "build" / "samples", ignore_errors=True)  # what commands write there
    (ROOT / "build" / "samples").mkdir(parents=True)
    with serving() as server:
        for file in [FOLDER / f"{name}.txt" for name in names] or sorted(
            FOLDER.glob("*.txt"), key=lambda file: file.stem
        ):
            record(file, server.url)


if __name__ == "__main__":
    main(sys.argv[1:])
