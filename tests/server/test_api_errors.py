"""Errors in the words of each API, by which its clients recognize them."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from diptych.shared.server.api import responses, sse
from diptych.shared.server.http.errors import REQUEST, ApiError, RequestName
from tests.server.in_process import client_of, make_app

USER = {"role": "user", "content": "a"}
ROUTES: dict[str, tuple[dict[str, Any], str]] = {
    "/v1/chat/completions": ({"messages": [USER]}, "max_completion_tokens"),
    "/v1/completions": ({"prompt": "a"}, "max_tokens"),
    "/v1/responses": ({"input": "a"}, "max_output_tokens"),
    "/v1/messages": ({"messages": [USER], "max_tokens": 1}, "max_tokens"),
    "/generate": ({"text": "a"}, ""),
}
"""A body, and the field of its longest answer."""
CONTEXT_LEN = 512


def ask(method: str, path: str, json: Any = None, *, is_draining: bool = False, **settings: Any) -> Any:
    async def play() -> httpx.Response:
        app = make_app(CONTEXT_LEN, **settings)[0]
        app.state.server.is_draining = is_draining
        async with client_of(app) as client:
            return await client.request(method, path, json=json)

    return asyncio.run(play())


def with_prompt(body: dict[str, Any], text: str) -> dict[str, Any]:
    return json.loads(json.dumps(body).replace('"a"', json.dumps(text)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("text", ["one two three " * 300, "a" * 2**20], ids=["tokens", "characters"])
@pytest.mark.parametrize("path", ROUTES)
def test_a_prompt_that_is_too_long(path: str, text: str) -> None:
    answer = ask("POST", path, with_prompt(ROUTES[path][0], text))
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
    assert error["code"] == "context_length_exceeded"
    if path == "/v1/messages":
        said = re.match(r"prompt is too long: (\d+) tokens > (\d+) maximum", error["message"])
        assert said
        assert int(said[1]) >= int(said[2]) == CONTEXT_LEN
    else:
        assert error["message"].startswith("This model's maximum context length is 512 tokens. However, ")


@pytest.mark.parametrize("path", [path for path, (_, field) in ROUTES.items() if field])
def test_an_answer_that_is_too_long(path: str) -> None:
    body, field = ROUTES[path]
    error = ask("POST", path, {**body, field: 600}).json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", field)
    if path == "/v1/messages":
        assert re.match(
            r"input length and `max_tokens` exceed context limit: \d+ \+ 600 > 512,", error["message"]
        )
    else:
        assert re.search(r"maximum context length is 512 .* requested \d+ tokens .* 600 in", error["message"])


@pytest.mark.parametrize(
    ("method", "path", "more", "settings", "status", "kind"),
    [
        ("POST", "/v1/messages", {"temperature": 3}, {}, 400, "invalid_request_error"),
        ("POST", "/v1/messages", {"model": "claude"}, {}, 404, "not_found_error"),
        ("GET", "/v1/messages", {}, {}, 405, "invalid_request_error"),
        ("POST", "/v1/messages", {"x": "a" * 9000}, {"max_body_bytes": 5000}, 413, "request_too_large"),
        ("POST", "/v1/messages", {}, {"max_live_requests": 0}, 400, "invalid_request_error"),
        ("POST", "/v1/messages", {}, {"is_draining": True}, 503, "overloaded_error"),
        ("POST", "/v1/chat/completions", {}, {"is_draining": True}, 503, "server_error"),
        ("POST", "/v1/completions", {"x": "a" * 999}, {"max_body_bytes": 500}, 413, "invalid_request_error"),
    ],
)  # fmt: skip
def test_types_of_errors(
    method: str, path: str, more: dict[str, Any], settings: dict[str, Any], status: int, kind: str
) -> None:
    answer = ask(method, path, {**ROUTES[path][0], **more}, **settings)
    body = answer.json()
    assert (answer.status_code, body["type"], body["error"]["type"]) == (status, "error", kind)
    assert body["request_id"] == answer.headers["request-id"] == answer.headers["x-request-id"]


@pytest.mark.parametrize(
    ("status", "kind"),
    [(403, "permission_error"), (408, "timeout_error"), (409, "conflict_error"), (429, "rate_limit_error"),
     (500, "api_error")],
)  # fmt: skip
def test_other_types_of_anthropic(status: int, kind: str) -> None:
    token = REQUEST.set(RequestName("req_1", "/v1/messages/count_tokens"))
    assert ApiError(status, "no").body()["error"]["type"] == kind
    REQUEST.reset(token)


def test_a_thread_is_refused_so_that_the_client_sends_the_whole_conversation() -> None:
    error = ask("POST", "/v1/messages", {**ROUTES["/v1/messages"][0], "thread": {"type": "create"}}).json()[
        "error"
    ]
    assert error["details"]["error_code"] == "thread_unsupported_request"


# ---- streams ----


async def failing(*events: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    for event in events:
        yield event
    raise ApiError(503, "the server is shutting down")


def written(pieces: AsyncIterator[bytes]) -> list[dict[str, Any]]:
    async def collect() -> str:
        return b"".join([piece async for piece in pieces]).decode()

    found = []
    for block in asyncio.run(collect()).split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.splitlines())
        if lines and lines["data"] != "[DONE]":
            found.append({"event": lines.get("event"), **json.loads(lines["data"])})
    return found


def test_a_failure_in_a_stream_of_responses() -> None:
    created = {
        "type": "response.created",
        "response": {"id": "resp_1", "status": "in_progress"},
        "sequence_number": 0,
    }
    done = {"type": "response.output_item.done", "item": {"id": "msg_1"}, "sequence_number": 1}
    *_, error, failed = written(responses.written(failing(created, done)))
    assert (error["event"], error["type"], error["code"]) == ("error", "error", "server_error")
    assert error["message"] == "the server is shutting down"
    assert (failed["event"], failed["response"]["id"]) == ("response.failed", "resp_1")
    assert failed["response"]["status"] == "failed"
    assert failed["response"]["error"] == {"code": "server_error", "message": error["message"]}
    assert failed["response"]["output"] == [{"id": "msg_1"}]
    assert [error["sequence_number"], failed["sequence_number"]] == [2, 3]


def test_a_failure_in_the_other_streams() -> None:
    token = REQUEST.set(RequestName("req_1", "/v1/messages"))
    error = written(sse.named_events(failing({"type": "message_start"})))[-1]
    assert (error["event"], error["type"], error["error"]["type"]) == ("error", "error", "overloaded_error")
    REQUEST.reset(token)
    assert written(sse.events(failing({"a": 1})))[-1]["error"]["type"] == "server_error"


# ---- HEAD ----


def test_head_is_get_without_a_body() -> None:
    paths = ["/", "/v1/models", "/v1/models/tiny-dense", "/health", "/model_info", "/missing", "/v1/messages"]
    for path in paths:
        get, head = ask("GET", path), ask("HEAD", path)
        assert (head.status_code, head.content) == (get.status_code, b"")
        assert head.headers["content-type"] == get.headers["content-type"]
        assert head.headers["x-request-id"]
