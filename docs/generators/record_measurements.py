"""Writes the results that the measurement pages show: docs/measurements/data/, one JSON file each.

    python -m docs.generators.record_measurements build/results                 # all that are not there yet
    python -m docs.generators.record_measurements build/results --seconds 500   # none that would end later
    python -m docs.generators.record_measurements build/results steps scheduling   # some, again

Files appear in the order of their importance, so a run can be stopped and continued. Each command runs alone.
Most need an H200: a page compares its figures with those of other engines on this GPU. Those with several
ranks need two.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from docs.generators.recordings import RECORDINGS, ROOT


def record(name: str, folder: Path) -> bool:
    """Whether the command succeeded; what it prints is shown."""
    program, *arguments = shlex.split(RECORDINGS[name].command)
    if program == "diptych":  # without an installed script
        arguments[:0] = ["-m", "diptych"]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, *arguments, str(folder / f"{name}.json")]
    start = time.perf_counter()
    status = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}).returncode
    print(f"{name}: {time.perf_counter() - start:.0f} s, exit status {status}", flush=True)
    return status == 0


def main(arguments: Sequence[str] | None = None) -> None:
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the results")
    parser.add_argument("names", nargs="*", help="recordings; default: those whose file is not there")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start none that would end later")
    options = parser.parse_args(arguments)
    folder, deadline = options.folder.absolute(), time.perf_counter() + options.seconds
    if wrong := sorted(set(options.names) - set(RECORDINGS)):
        parser.error(f"no recording {', '.join(wrong)}; there are {', '.join(RECORDINGS)}")
    folder.mkdir(parents=True, exist_ok=True)
    missing = []
    for name in options.names or [name for name in RECORDINGS if not (folder / f"{name}.json").exists()]:
        is_possible = RECORDINGS[name].num_gpus <= torch.cuda.device_count()
        in_time = time.perf_counter() + RECORDINGS[name].seconds <= deadline
        if not (is_possible and in_time and record(name, folder)):
            missing.append(name)
    if missing:
        raise SystemExit(f"not recorded: {', '.join(missing)}")


if __name__ == "__main__":
    main()
