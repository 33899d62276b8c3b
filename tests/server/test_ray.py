"""The Ray Serve application on a local Ray: two replicas of two ranks each, one of which is killed."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

ROOT = Path(__file__).parents[2]
BODY = {"prompt": "Count from 3 to 9.", "max_tokens": 8, "temperature": 0}
OPEN = {"allow_anonymous": "true"}

ray = pytest.importorskip("ray", reason="needs the extra `ray`")
pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    from ray import serve

    from diptych.shared.server.router.ray import app

    os.environ["RAY_AUTH_MODE"] = "disabled"
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ray.init(num_cpus=4, include_dashboard=False, runtime_env={"env_vars": environment})
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(app({"max_total_tokens": "4096", "num_replicas": "2", "num_cpus": "1", "tp": "2", **OPEN}))
    yield f"http://127.0.0.1:{port}/v1/completions"
    serve.shutdown()
    ray.shutdown()
    assert not server_processes()


def server_processes() -> set[int]:
    """Processes of the replicas: those that multiprocessing spawned inside a replica of Ray."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes()
            parent = (folder / "stat").read_text().rsplit(")", 1)[1].split()[1]
            if b"spawn_main" in command and b"ServeReplica" in Path(f"/proc/{parent}/cmdline").read_bytes():
                found.add(int(folder.name))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def test_replicas_answer_alike_and_a_killed_one_comes_back(url: str) -> None:
    texts = {httpx.post(url, json=BODY, timeout=60).json()["choices"][0]["text"] for _ in range(6)}
    assert len(texts) == 1
    before = server_processes()
    assert len(before) == 2
    os.kill(min(before), signal.SIGKILL)
    statuses = []
    end = time.monotonic() + 120
    while len(now := server_processes()) < 2 or now & before == now:
        answer = httpx.post(url, json=BODY, timeout=60)
        statuses.append(answer.status_code)
        assert answer.status_code in (200, 503)
        if answer.status_code == 200:
            assert answer.json()["choices"][0]["text"] in texts
        assert time.monotonic() < end, "no replica has replaced the killed one"
        time.sleep(0.2)
    assert 200 in statuses
    for _ in range(6):
        assert httpx.post(url, json=BODY, timeout=60).json()["choices"][0]["text"] in texts


def test_streams_come_piece_by_piece(url: str) -> None:
    with httpx.stream("POST", url, json={**BODY, "stream": True}, timeout=60) as stream:
        lines = [line for line in stream.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    assert len(lines) > 3


def test_bad_arguments_are_refused_before_anything_starts() -> None:
    from diptych.shared.server.router.ray import app

    with pytest.raises(ValueError, match="unknown arguments \\['modle'\\]"):
        app({"modle": "tiny-dense"})
    with pytest.raises(ValueError, match="page_size"):
        app({"page_size": "-1", **OPEN})
    with pytest.raises(ValueError, match="api_key_file"):
        app({"page_size": "16"})
