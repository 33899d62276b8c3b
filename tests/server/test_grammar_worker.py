"""The process that compiles grammars ends with the engine, however that ends."""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.request
from pathlib import Path

import pytest

from tests.server.running import RunningServer, serving


def children_of(pid: int) -> list[int]:
    """Process ids, also of those that a thread has started."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


def is_alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def ask(server: RunningServer) -> None:
    body = {"prompt": "A", "max_tokens": 9, "regex": "ab"}
    data = json.dumps(body).encode()
    request = urllib.request.Request(
        f"{server.url}/v1/completions", data, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert json.loads(answer.read())["choices"][0]["text"] == "ab"


@pytest.mark.parametrize("end", ["SIGTERM", "SIGKILL of the engine", "SIGKILL of the server"])
def test_no_worker_is_left(end: str) -> None:
    with serving("--separate-process", "--max-total-tokens", "2048") as server:
        ask(server)
        (engine,) = [pid for pid in server.children if children_of(pid)]
        workers = children_of(engine)
        assert workers
        assert all(map(is_alive, workers))
        if end == "SIGTERM":
            assert server.terminate() == 0
        elif end == "SIGKILL of the engine":
            os.kill(engine, signal.SIGKILL)
            assert server.process.wait(30) != 0
        else:
            server.kill()
        give_up = time.monotonic() + 20
        while any(map(is_alive, [engine, *workers])):
            assert time.monotonic() < give_up, "a process is left"
            time.sleep(0.05)
