"""Writes the results that the measurement pages show: docs/measurements/data/, one JSON file each.

    python -m docs.generators.record_measurements build/results                 # all that are not there yet
    python -m docs.generators.record_measurements build/results --seconds 500   # none that would end later
    python -m docs.generators.record_measurements build/results steps scheduling   # some, again

Files appear in the order of their importance, so a run can be stopped and continued. Each GPU has one
recording at a time. With several GPUs recordings share the CPUs, so times of the CPU may be too long. Most
commands need an H200: a page compares its figures with those of other engines on this GPU. Those with
several ranks need two.
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
from typing import NamedTuple

from docs.generators.recordings import RECORDINGS, ROOT


class Running(NamedTuple):
    name: str
    gpus: Sequence[str]
    process: subprocess.Popen[bytes]
    log: Path
    start: float


def start(name: str, folder: Path, gpus: Sequence[str]) -> Running:
    """One command, which sees these GPUs only."""
    program, *arguments = shlex.split(RECORDINGS[name].command)
    if program == "diptych":  # without an installed script
        arguments[:0] = ["-c", "from diptych.shared.tools.cli import main; main()"]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    env = os.environ | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ",".join(gpus)}
    command = [sys.executable, *arguments, str(folder / f"{name}.json")]
    log = folder / f"{name}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=output, stderr=subprocess.STDOUT)
    return Running(name, gpus, process, log, time.perf_counter())


def finish(running: Running) -> bool:
    """Whether it succeeded; what a failed command printed is shown."""
    status = running.process.wait()
    print(f"{running.name}: {time.perf_counter() - running.start:.0f} s, exit status {status}", flush=True)
    if status:
        print(running.log.read_text(encoding="utf-8", errors="replace"), flush=True)
    running.log.unlink()
    return status == 0


def record(names: Sequence[str], folder: Path, gpus: Sequence[str], seconds: float) -> list[str]:
    """Runs these in order, as many at a time as these GPUs have room for. None is started that would still
    run, by its estimate, after `seconds`. Returns what was not recorded."""
    deadline = time.perf_counter() + seconds
    waiting, running, free, failed = list(names), list[Running](), list(gpus), []
    while True:
        for done in [each for each in running if each.process.poll() is not None]:
            running.remove(done)
            free.extend(done.gpus)
            failed += [] if finish(done) else [done.name]
        left = deadline - time.perf_counter()
        name = next((name for name in waiting if RECORDINGS[name].seconds <= left), None)
        if name is None and not running:
            return [name for name in names if name in failed or name in waiting]
        if name is not None and _has_room(RECORDINGS[name].num_gpus, free, running):
            waiting.remove(name)
            taken, free = free[: RECORDINGS[name].num_gpus], free[RECORDINGS[name].num_gpus :]
            running.append(start(name, folder, taken))
        else:
            time.sleep(0.1)


def _has_room(num_gpus: int, free: Sequence[str], running: Sequence[Running]) -> bool:
    """What measures the CPU runs alone."""
    if num_gpus == 0 or any(not each.gpus for each in running):
        return not running
    return num_gpus <= len(free)


def main(arguments: Sequence[str] | None = None) -> None:
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the results")
    parser.add_argument("names", nargs="*", help="recordings; default: those whose file is not there")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start none that would end later")
    options = parser.parse_args(arguments)
    folder, num_gpus = options.folder.absolute(), torch.cuda.device_count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = visible.split(",") if visible else list(map(str, range(num_gpus)))
    wrong = sorted(set(options.names) - set(RECORDINGS))
    if wrong:
        parser.error(f"no recording {', '.join(wrong)}; there are {', '.join(RECORDINGS)}")
    folder.mkdir(parents=True, exist_ok=True)
    names = options.names or [name for name in RECORDINGS if not (folder / f"{name}.json").exists()]
    too_many = [name for name in names if RECORDINGS[name].num_gpus > num_gpus]
    possible = [name for name in names if name not in too_many]
    missing = record(possible, folder, gpus[:num_gpus], options.seconds)
    if too_many:
        print(f"need more than {num_gpus} GPUs: {', '.join(too_many)}")
    if missing:
        raise SystemExit(f"not recorded: {', '.join(missing)}")


if __name__ == "__main__":
    main()
