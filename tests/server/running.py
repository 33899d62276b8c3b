"""A real `diptych serve` in a process of its own, for tests."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.forked import ForkedCommand

if TYPE_CHECKING:
    import anthropic
    import openai

ROOT = Path(__file__).parents[2]
START_TIMEOUT = 120.0
MAIN = "from diptych.shared.tools.cli import main; main()"


class RunningServer:
    """`url` answers while the process lives. `log`: what it printed so far. `own_interpreter`: the process is
    not forked from one that has imported what a server imports."""

    def __init__(self, *flags: str, command: str = "serve", own_interpreter: bool = False) -> None:
        arguments = [command, "--port", "0", *flags]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        self.process: subprocess.Popen[str] | ForkedCommand
        if own_interpreter or sys.platform != "linux":
            self.process = subprocess.Popen(
                [sys.executable, "-c", MAIN, *arguments],
                cwd=ROOT,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        else:
            self.process = ForkedCommand(arguments, str(ROOT), environment)
        self.log: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.url = self._wait_for_url()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.log.extend(iter(self.process.stdout.readline, ""))

    def _wait_for_url(self) -> str:
        end = time.monotonic() + START_TIMEOUT
        while time.monotonic() < end:
            found = re.search(r" at (http://\S+)", "".join(self.log))
            if found:
                return found[1]
            if self.process.poll() is not None:
                break
            time.sleep(0.05)
        self.kill()
        raise AssertionError("the server did not start:\n" + "".join(self.log))

    @property
    def children(self) -> list[int]:
        """Process ids of the server's child processes (the engine)."""
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(pid) for pid in path.read_text().split()]

    @property
    def engine(self) -> int:
        """Process id of the engine, of a server with --separate-process."""
        (found,) = [
            pid for pid in self.children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]
        return found

    def get(self, path: str) -> dict[str, Any]:
        """The JSON of a GET; anything but 200 raises."""
        with urllib.request.urlopen(self.url + path, timeout=30) as answer:
            found: dict[str, Any] = json.loads(answer.read())
        return found

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The JSON of a POST; anything but 200 raises."""
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            found: dict[str, Any] = json.loads(answer.read())
        return found

    def wait_idle(self, timeout: float = 60.0) -> dict[str, int]:
        """The load once no request is live. Fails when that takes longer than `timeout` seconds."""
        end = time.monotonic() + timeout
        while True:
            info = self.get("/server_info")
            load: dict[str, int] = info["load"]
            if info["num_live_requests"] == load["num_running"] == load["num_waiting"] == 0:
                return load
            assert time.monotonic() < end, f"still busy: {info}"
            time.sleep(0.05)

    def terminate(self, timeout: float = 60.0) -> int:
        """SIGTERM, then the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def serving(*flags: str, command: str = "serve", own_interpreter: bool = False) -> Iterator[RunningServer]:
    """A server that is gone afterwards."""
    server = RunningServer(*flags, command=command, own_interpreter=own_interpreter)
    try:
        yield server
    finally:
        server.kill()


def at_once(check: Callable[[Any], object], values: Iterable[Any]) -> None:
    """Checks whose requests the server takes together: a step of several costs little more than of one."""
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(check, values))


def openai_client(server: RunningServer) -> openai.OpenAI:
    """The client's package is large: only a worker that runs such a test imports it."""
    import openai

    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def anthropic_client(server: RunningServer) -> anthropic.Anthropic:
    import anthropic

    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
