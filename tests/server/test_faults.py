"""Faults of clients, networks and processes. After each one the pools are whole and others are served."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from diptych.shared.server.http.connections import listen
from tests.server.running import MAIN, ROOT, RunningServer, anthropic_client, openai_client, serving

SUM = [{"role": "user", "content": "What is 12 + 30?"}]
LONG = {"messages": SUM, "max_tokens": 1500, "ignore_eos": True, "temperature": 1.0}


def post(server: RunningServer, path: str, body: Any, **headers: str) -> tuple[int, dict[str, Any]]:
    """Status and JSON. `body`: bytes as they are, anything else as JSON."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(server.url + path, data, {"Content-Type": "application/json", **headers})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def connect(server: RunningServer, body: dict[str, Any]) -> socket.socket:
    """A connection on which a chat request was sent, and nothing read."""
    place = urlsplit(server.url)
    connection = socket.create_connection((place.hostname, place.port))
    data = json.dumps(body).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    return connection


def assert_whole(server: RunningServer) -> None:
    """Idle, nothing leaked, and a good request is answered."""
    load = server.wait_idle()
    assert load["num_used_tokens"] == load["num_evictable_tokens"], "slots without an owner"
    status, answer = post(server, "/v1/chat/completions", {"messages": SUM, "temperature": 0})
    assert status == 200
    assert answer["choices"][0]["message"]["content"] == "12 + 30 = 42"


@pytest.mark.parametrize("is_stream", [True, False], ids=["stream", "whole"])
def test_hundreds_of_disconnects(server: RunningServer, is_stream: bool) -> None:
    connections = [connect(server, {**LONG, "stream": is_stream}) for _ in range(200)]
    time.sleep(0.5)
    for connection in connections:
        connection.close()
    start = time.monotonic()
    assert_whole(server)
    assert time.monotonic() - start < 40  # run to their ends they would take minutes


def test_one_disconnect_leaves_the_others_alone(server: RunningServer) -> None:
    body = {"messages": SUM, "temperature": 0}
    answers: list[str] = []

    def ask() -> None:
        answers.append(post(server, "/v1/chat/completions", body)[1]["choices"][0]["message"]["content"])

    threads = [threading.Thread(target=ask) for _ in range(8)]
    leaving = connect(server, {**LONG, "stream": True})
    for thread in threads:
        thread.start()
    leaving.close()
    for thread in threads:
        thread.join()
    assert answers == ["12 + 30 = 42"] * 8
    assert_whole(server)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b"[]", 400),
        (b'{"messages": 3}', 400),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', 400),
        (b'{"messages": [{"role": "user", "content": "a"}], "temperature": NaN}', 400),
        (b'{"messages": [{"role": "user", "content": "a"}], "seed": 1e400}', 400),
        (b"[" * 100_000, 400),
        (b"\xff\xfe", 400),
    ],
    ids=["empty", "cut", "list", "type", "surrogate", "nan", "infinite", "nested", "bytes"],
)
def test_malformed_bodies(server: RunningServer, body: bytes, status: int) -> None:
    assert post(server, "/v1/chat/completions", body)[0] == status
    assert_whole(server)


def test_large_body(server: RunningServer) -> None:
    status, answer = post(server, "/v1/completions", {"prompt": "a" * 7_000_000})
    assert status == 400
    assert "characters" in answer["error"]["message"]
    status, answer = post(server, "/v1/completions", b"x" * (9 * 2**20))
    assert status == 413
    assert_whole(server)


def test_wrong_content_type(server: RunningServer) -> None:
    """A page of another site can send these without asking."""
    for kind in ("text/csv", "text/plain", "application/x-www-form-urlencoded", ""):
        assert post(server, "/v1/completions", {"prompt": "a"}, **{"Content-Type": kind})[0] == 415


def test_slow_reader_does_not_slow_the_others(server: RunningServer) -> None:
    slow = connect(server, {**LONG, "stream": True, "n": 8})
    start = time.monotonic()
    status, _ = post(server, "/v1/chat/completions", {"messages": SUM, "temperature": 0})
    assert status == 200
    assert time.monotonic() - start < 40
    slow.close()
    assert_whole(server)


def assert_full_server_answers_429(server: RunningServer) -> None:
    """The server takes two requests at one time; the answer has the header Retry-After."""
    for body in ({"prompt": ["a"] * 3}, {"prompt": "a", "n": 3}):  # cannot succeed later
        status, answer = post(server, "/v1/completions", body)
        assert status == 400
        assert "are 3 requests; this server takes at most 2" in answer["error"]["message"]
    connections = [connect(server, {**LONG, "stream": True}) for _ in range(2)]
    for connection in connections:
        connection.recv(10)  # it runs
    request = urllib.request.Request(
        server.url + "/v1/chat/completions",
        json.dumps({"messages": SUM}).encode(),
        {"Content-Type": "application/json"},
    )
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=60)
    assert caught.value.code == 429
    assert int(caught.value.headers["Retry-After"]) >= 1
    for connection in connections:
        connection.close()
    assert_whole(server)


def grammar_processes(server: RunningServer) -> list[int]:
    """Process ids of the engine and of the process that compiles grammars for it, which this starts."""
    body = {"prompt": "A", "max_tokens": 9, "regex": "ab"}
    assert post(server, "/v1/completions", body)[1]["choices"][0]["text"] == "ab"
    tasks = Path(f"/proc/{server.engine}/task").glob("*/children")  # a thread has started it
    workers = [int(child) for task in tasks for child in task.read_text().split()]
    assert workers
    assert all(map(is_alive, workers))
    return [server.engine, *workers]


def is_alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def assert_gone(pids: list[int]) -> None:
    end = time.monotonic() + 60
    while any(map(is_alive, pids)):
        assert time.monotonic() < end, "a process is left"
        time.sleep(0.05)


def client_streams(server: RunningServer) -> list[Any]:
    """A long answer of each API, by its client."""
    client = openai_client(server)
    claude = anthropic_client(server)
    body: dict[str, Any] = {"model": "tiny-dense", "stream": True}
    chats = {**body, "messages": [{"role": "user", "content": "Count from 1 to 100."}]}
    return [
        client.chat.completions.create(**chats),
        client.responses.create(input="Count from 1 to 100.", **body),
        claude.messages.create(max_tokens=1500, **chats),
    ]


def test_death_of_the_engine_ends_everything() -> None:
    import anthropic
    import openai

    with serving("--separate-process", own_interpreter=True) as server:
        processes = grammar_processes(server)
        streams = client_streams(server)
        for stream in streams:
            next(stream)
        connection = connect(server, {**LONG, "stream": True})
        connection.recv(10)
        os.kill(server.engine, signal.SIGKILL)
        rest = _read_all(connection)
        assert b'"error"' in rest
        assert b"SIGKILL" in rest
        assert rest.rstrip().endswith(b"data: [DONE]") or rest.rstrip().endswith(b"0")
        for stream in streams:
            with pytest.raises((openai.APIError, anthropic.APIError), match="SIGKILL"):
                list(stream)
        assert server.process.wait(60) not in (0, None)
        assert_gone(processes)


def test_death_of_the_api_leaves_no_orphan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with serving("--separate-process", own_interpreter=True) as server:
        processes = {*server.children, *grammar_processes(server)}
        assert list(tmp_path.glob("diptych-*")), "the folder of the sockets"
        server.kill()
        assert_gone([*processes])
        assert not list(tmp_path.glob("diptych-*"))


def test_full_server_and_sigterm_drains() -> None:
    with serving(
        "--separate-process", "--drain-seconds", "20", "--max-live-requests", "2", own_interpreter=True
    ) as server:
        assert_full_server_answers_429(server)
        processes = grammar_processes(server)
        connection = connect(server, {**LONG, "max_tokens": 60, "stream": True})
        connection.recv(10)
        server.process.send_signal(signal.SIGTERM)
        assert b'"finish_reason":"length"' in _read_all(connection)
        assert server.process.wait(60) == 0
        assert_gone(processes)


@pytest.mark.full
def test_sigterm_continues_a_paused_server() -> None:
    with serving("--separate-process", "--drain-seconds", "20", own_interpreter=True) as server:
        connection = connect(server, {**LONG, "max_tokens": 60, "stream": True})
        connection.recv(10)
        assert post(server, "/pause_generation", {})[0] == 200
        server.process.send_signal(signal.SIGTERM)
        assert b'"finish_reason":"length"' in _read_all(connection)
        assert server.process.wait(60) == 0


@pytest.mark.full
def test_deadline_of_the_drain() -> None:
    with serving("--separate-process", "--drain-seconds", "0.5", own_interpreter=True) as server:
        connection = connect(server, {**LONG, "stream": True})
        connection.recv(10)
        server.process.send_signal(signal.SIGTERM)
        assert b"the request had not ended 0.5 s after the signal" in _read_all(connection)
        assert server.process.wait(60) == 0


def test_small_chunks_are_sent_at_once() -> None:
    """With Nagle's algorithm the second small chunk waits for the client's acknowledgement: 40 ms."""

    async def is_nodelay() -> bool:
        found: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

        def connected(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            accepted = writer.get_extra_info("socket")
            found.set_result(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0)
            writer.close()

        with listen("127.0.0.1", 0) as listener:
            server = await asyncio.start_server(connected, sock=listener)
            with socket.create_connection(listener.getsockname()):
                result = await asyncio.wait_for(found, 20)
            server.close()
        return result

    assert asyncio.run(is_nodelay())


def test_two_servers_on_one_port(server: RunningServer) -> None:
    port = str(urlsplit(server.url).port)
    second = subprocess.run(
        [sys.executable, "-c", MAIN, "serve", "--port", port],
        cwd=ROOT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert second.returncode == 2
    assert f"cannot listen on 127.0.0.1:{port}" in second.stderr
    assert_whole(server)


def test_api_keys(locked_server: RunningServer) -> None:
    body = {"messages": SUM, "max_tokens": 1}
    for path in ("/health", "/ready"):
        assert urllib.request.urlopen(locked_server.url + path, timeout=60).status == 200
    for path in ("/v1/chat/completions", "/generate", "/flush_cache"):
        assert post(locked_server, path, body)[0] == 401
    for headers, status in (
        ({"Authorization": "Bearer wrong"}, 401),
        ({"Authorization": "Bearer secret"}, 200),
        ({"x-api-key": "other"}, 200),
    ):
        assert post(locked_server, "/v1/chat/completions", body, **headers)[0] == status


def _read_all(connection: socket.socket) -> bytes:
    connection.settimeout(60)
    found = b""
    while piece := connection.recv(65536):
        found += piece
        if found.rstrip().endswith(b"\r\n0"):
            break
    return found
