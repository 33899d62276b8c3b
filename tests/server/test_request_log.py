"""Ids of clients, the request log, and what an unexpected exception becomes."""

from __future__ import annotations

import asyncio
import logging
import re
import urllib.request
from typing import Any
from unittest import TestCase

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

from diptych.shared.server.http.request_log import RequestLog
from tests.server.running import RunningServer
from tests.server.test_limits import wait_until


async def application(scope: Scope, receive: Receive, send: Send) -> None:
    async def pieces():
        yield b"a"
        raise ValueError("in the stream")

    request = Request(scope, receive)
    if request.url.path == "/defect":
        raise KeyError("a prompt")
    answer = StreamingResponse(pieces()) if request.url.path == "/stream" else PlainTextResponse("ok")
    await answer(scope, receive, send)


def get(path: str, request_id: bytes | None = None) -> httpx.Response:
    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(RequestLog(application))
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            headers = {} if request_id is None else {b"x-request-id": request_id}
            return await client.get(path, headers=headers)

    return asyncio.run(ask())


def logged() -> Any:
    return TestCase().assertLogs("diptych.server", logging.INFO)


def test_an_id_is_echoed_and_logged() -> None:
    with logged() as log:
        assert get("/a%0Ab", b"abc-1").headers["x-request-id"] == "abc-1"
        assert log.records[-1].getMessage().startswith("GET /a%0Ab x-request-id=abc-1 200 ")
        answer = get("/a")
        new = answer.headers["x-request-id"]
        assert re.fullmatch("req_[0-9a-f]{32}", new)
        assert answer.headers["request-id"] == new != get("/a").headers["x-request-id"]
        assert log.records[-1].getMessage().startswith("GET /a 200 ")


@pytest.mark.parametrize("wrong", [b"", b"a b", b"a" * 129, b"\x7f", "é".encode()])
def test_an_invalid_id_is_ignored(wrong: bytes) -> None:
    with logged() as log:
        answer = get("/a", wrong)
    assert answer.status_code == 200
    assert answer.headers["x-request-id"].startswith("req_")
    assert "x-request-id" not in "".join(log.output)


def test_a_defect_is_a_500_and_no_closed_connection() -> None:
    with logged() as log:
        answer = get("/defect", b"abc-1")
    assert answer.status_code == 500
    assert answer.json()["error"]["message"] == "internal error (KeyError)"
    assert answer.headers["x-request-id"] == answer.json()["request_id"] == "abc-1"
    assert "a prompt" not in answer.text
    assert "Traceback" in "".join(log.output)
    assert "GET /defect x-request-id=abc-1" in "".join(log.output)


def test_a_defect_within_a_stream_closes_the_connection() -> None:
    with pytest.raises(ValueError, match="in the stream"):
        get("/stream")


def test_the_log_of_a_server(locked_server: RunningServer) -> None:
    """Answers of all layers have the id."""
    for path, key, status in (("/v1/models", "secret", 200), ("/v1/models", "wrong", 401)):
        headers = {"x-request-id": f"id-{status}", "Authorization": f"Bearer {key}"}
        try:
            answer = urllib.request.urlopen(urllib.request.Request(locked_server.url + path, headers=headers))
        except urllib.error.HTTPError as error:
            answer = error
        assert (answer.status, answer.headers["x-request-id"]) == (status, f"id-{status}")
        line = f"GET {path} x-request-id=id-{status} {status} "
        wait_until(lambda line=line: any(each.startswith(line) for each in locked_server.log))
