"""Limits of time, queues and readers, and what the administration does. Afterwards the pools are whole."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from fastapi import FastAPI
from starlette.responses import PlainTextResponse

from diptych.shared.server.admin import add_admin_routes
from diptych.shared.server.api.state import ServerSettings
from diptych.shared.server.http.access import Caller
from diptych.shared.server.http.errors import ApiError
from tests.server.running import RunningServer, serving
from tests.server.test_faults import SUM, assert_whole, post

PROMPT = {"prompt": "Count:", "max_tokens": 1500, "ignore_eos": True, "temperature": 1.0}
ROUTES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": SUM}),
    "completions": ("/v1/completions", PROMPT),
    "native": ("/generate", {"text": "Count:"}),
    "messages": ("/v1/messages", {"messages": SUM, "max_tokens": 50}),
    "responses": ("/v1/responses", {"input": "What is 12 + 30?"}),
}


def send(server: RunningServer, path: str, body: dict[str, Any], receive_buffer: int = 0) -> socket.socket:
    """A connection on which a request was sent, and nothing read."""
    place = urlsplit(server.url)
    connection = socket.socket()
    if receive_buffer:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.connect((place.hostname, place.port))
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    return connection


def wait_until(condition: Any, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it does not happen"
        time.sleep(0.05)


def num_live(server: RunningServer) -> int:
    number: int = server.get("/server_info")["num_live_requests"]
    return number


def metric(server: RunningServer, name: str) -> float:
    with urllib.request.urlopen(server.url + "/metrics", timeout=60) as answer:
        text = answer.read().decode()
    return float(re.findall(rf"^diptych:{name} (\S+)$", text, re.MULTILINE)[0])


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("route", ROUTES)
def test_a_client_that_leaves_ends_its_request(server: RunningServer, route: str, is_stream: bool) -> None:
    path, body = ROUTES[route]
    server.wait_idle()
    before = metric(server, "num_aborted_requests_total")
    assert post(server, "/pause_generation", {})[0] == 200  # it cannot end by itself
    try:
        connection = send(server, path, {**body, "stream": is_stream})
        wait_until(lambda: num_live(server) == 1)
        connection.close()
        wait_until(lambda: metric(server, "num_aborted_requests_total") == before + 1)
    finally:
        post(server, "/continue_generation", b"")
    assert_whole(server)


@pytest.fixture(scope="module")
def small_server() -> Iterator[RunningServer]:
    """One request runs, one waits, neither for long."""
    sizes = ("--max-running-requests", "1", "--max-queued-requests", "1", "--max-total-tokens", "4096")
    limits = ("--waiting-timeout", "1.5", "--running-timeout", "4", "--write-timeout", "1")
    with serving("--separate-process", *sizes, *limits) as server:
        yield server


def ask_at_once(server: RunningServer, number: int) -> list[tuple[int, dict[str, Any]]]:
    """Long requests, a tenth of a second apart; statuses and answers in that order."""
    found: dict[int, tuple[int, dict[str, Any]]] = {}

    def ask(i: int) -> None:
        found[i] = post(server, "/v1/completions", PROMPT)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(number)]
    for thread in threads:
        thread.start()
        time.sleep(0.1)
    for thread in threads:
        thread.join()
    return [found[i] for i in range(number)]


def test_more_samples_than_the_queue_takes(small_server: RunningServer) -> None:
    status, answer = post(small_server, "/v1/completions", {**PROMPT, "n": 2})
    assert status == 400
    assert "takes at most 1 at one time" in answer["error"]["message"]


def test_queue_overflow_and_time_outs(small_server: RunningServer) -> None:
    running, waiting, turned_away = ask_at_once(small_server, 3)
    assert turned_away[0] == 503
    assert "queue is full" in turned_away[1]["error"]["message"]
    assert waiting[0] == 503
    assert "waited longer than 1.5 s" in waiting[1]["error"]["message"]
    assert running[0] in (200, 503)  # a fast computer is through in 4 s
    if running[0] == 503:
        assert "ran longer than 4.0 s" in running[1]["error"]["message"]
    assert_whole(small_server)


def test_a_time_out_within_a_stream_is_an_error_event(small_server: RunningServer) -> None:
    body = {**PROMPT, "max_tokens": 2000, "stream": True, "logprobs": 5}  # slower than 4 s
    connection = send(small_server, "/v1/completions", body)
    connection.settimeout(60)
    text = b""
    while b"[DONE]" not in text:
        text += connection.recv(65536)
    connection.close()
    assert b'"error"' in text or b'"finish_reason":"length"' in text
    assert text.count(b'"finish_reason":"length"') + text.count(b"ran longer than") == 1
    assert_whole(small_server)


def test_a_client_that_does_not_read_is_dropped(small_server: RunningServer) -> None:
    """Its request is aborted a second after the buffers between the two are full."""
    body = {**PROMPT, "stream": True, "n": 1, "logprobs": 20, "max_tokens": 2000}
    connection = send(small_server, "/v1/completions", body, receive_buffer=4096)
    wait_until(lambda: num_live(small_server) == 1)
    wait_until(lambda: num_live(small_server) == 0)
    connection.close()
    assert_whole(small_server)


@pytest.mark.parametrize("field", ["priority", "top_k", "max_tokens"])
def test_integers_beyond_64_bits_are_refused(server: RunningServer, field: str) -> None:
    body = {"prompt": "a", "max_tokens": 1, field: 10**30}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 400, answer.text
    server.wait_idle()


def test_metrics_count_what_was_done(server: RunningServer) -> None:
    server.wait_idle()
    names = (
        "num_requests_total", "generation_tokens_total", "time_to_first_token_seconds_count",
        "queue_time_seconds_count", "inter_token_latency_seconds_count", "e2e_request_latency_seconds_count",
    )  # fmt: skip
    before = [metric(server, name) for name in names]
    body = {"prompt": "Count:", "max_tokens": 5, "ignore_eos": True, "n": 3, "temperature": 1}
    assert post(server, "/v1/completions", body)[0] == 200
    added = [metric(server, name) - old for name, old in zip(names, before)]
    assert added == [1, 15, 3, 3, 12, 1]
    assert 0 <= metric(server, "queue_time_seconds_sum") < metric(server, "time_to_first_token_seconds_sum")


# ---- administration ----


def test_pause_keeps_requests_and_readiness_says_so(server: RunningServer) -> None:
    server.wait_idle()
    for mode in ("in_place", "retract"):
        connection = send(server, "/v1/completions", {**PROMPT, "stream": True})
        wait_until(lambda: num_live(server) == 1)
        assert post(server, "/pause_generation", {"mode": mode})[0] == 200
        assert status_of(server, "/ready") == 503
        assert status_of(server, "/health") == 200
        steps = server.get("/server_info")["load"]["num_steps"]
        time.sleep(0.3)
        assert server.get("/server_info")["load"]["num_steps"] == steps
        assert num_live(server) == 1
        assert post(server, "/continue_generation", b"")[0] == 200
        assert status_of(server, "/ready") == 200
        wait_until(lambda: server.get("/server_info")["load"]["num_steps"] > steps + 3)  # noqa: B023
        assert num_live(server) == 1
        connection.settimeout(60)
        assert connection.recv(12) == b"HTTP/1.1 200"
        connection.close()
    assert_whole(server)


def test_pause_by_aborting(server: RunningServer) -> None:
    connection = send(server, "/v1/completions", PROMPT)
    wait_until(lambda: num_live(server) == 1)
    assert post(server, "/pause_generation", {"mode": "abort"})[0] == 200
    connection.settimeout(60)
    assert connection.recv(12) == b"HTTP/1.1 503"
    assert post(server, "/pause_generation", {"mode": "never"})[0] == 400
    assert post(server, "/continue_generation", b"")[0] == 200
    wait_until(lambda: status_of(server, "/ready") == 200)
    assert_whole(server)


def test_abort_all_and_flush(server: RunningServer) -> None:
    connections = [send(server, "/v1/completions", PROMPT) for _ in range(3)]
    wait_until(lambda: num_live(server) == 3)
    status, answer = post(server, "/flush_cache", b"")
    assert (status, answer["error"]["type"]) == (409, "invalid_request_error")
    status, answer = post(server, "/abort_request", {"abort_all": True})
    assert (status, answer["num_aborted"]) == (200, 3)
    assert post(server, "/flush_cache?timeout=10", b"")[0] == 200
    for connection in connections:
        connection.close()
    assert server.wait_idle()["num_used_tokens"] == 0
    assert_whole(server)


@pytest.mark.parametrize("timeout", ["nan", "inf", "-1", "601", "a"])
def test_a_flush_has_a_deadline(server: RunningServer, timeout: str) -> None:
    status, answer = post(server, f"/flush_cache?timeout={timeout}", b"")
    assert (status, answer["error"]["param"]) == (400, "timeout")


def test_a_flush_ends_with_its_client() -> None:
    """The engine is never idle."""
    calls: list[str] = []

    async def control(action: str) -> dict[str, bool]:
        calls.append(action)
        return {"flushed": False}

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(0.2)
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        pass

    async def ask() -> None:
        state: Any = SimpleNamespace(client=SimpleNamespace(control=control), settings=ServerSettings())
        app = FastAPI()
        app.add_exception_handler(ApiError, lambda *_: PlainTextResponse())
        add_admin_routes(app, state)
        scope = {"type": "http", "method": "POST", "path": "/flush_cache", "headers": []}
        scope["diptych.caller"] = Caller("", "", is_admin=True)
        await asyncio.wait_for(app({**scope, "query_string": b"timeout=600"}, receive, send), 20)
        assert len(calls) > 1

    asyncio.run(ask())


def status_of(server: RunningServer, path: str) -> int:
    try:
        with urllib.request.urlopen(server.url + path, timeout=60) as answer:
            status: int = answer.status
    except urllib.error.HTTPError as error:
        status = error.code
    return status
