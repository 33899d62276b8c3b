"""Starts a server for a measurement: `diptych serve` on a free port."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[4]
START_SECONDS = 900.0
STOP_SECONDS = 30.0


@contextlib.contextmanager
def own_server(
    arguments: Sequence[str], start_seconds: float = START_SECONDS, env: Mapping[str, str] = os.environ
) -> Iterator[str]:
    """The URL of a server that runs while the context is open. `env`: its environment. If it does not start,
    raises `ValueError` with the server's output."""
    path = os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH")]))
    command = [
        sys.executable,
        "-c",
        "from diptych.shared.tools.cli import main; main()",
        "serve",
        "--port",
        "0",
    ]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        with log.open("w") as output:
            process = subprocess.Popen(
                [*command, *arguments],
                env={**env, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"},
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        try:
            yield _wait_for_url(process, log, start_seconds)
        finally:
            process.terminate()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_for_url(process: subprocess.Popen[bytes], log: Path, seconds: float) -> str:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        is_running, text = process.poll() is None, log.read_text()
        found = re.search(r"serving \S+ at (http://\S+)", text)
        if found:
            return found[1]
        if not is_running:
            raise ValueError(f"the server did not start: {text.strip()}")
        time.sleep(0.1)
    raise ValueError(f"the server did not start within {seconds:g} s")
