"""The outermost layer of an application: request ids, the request log, HEAD, and defects."""

from __future__ import annotations

import logging
import re
import time
import uuid
from typing import Any
from urllib.parse import quote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from diptych.shared.server.http.access import send_error
from diptych.shared.server.http.errors import REQUEST, ApiError, RequestName

LOGGER = logging.getLogger("diptych.server")

REPEAT_SECONDS = 5.0
MAX_KINDS = 1000

ID_HEADERS = (b"x-request-id", b"request-id")  # OpenAI's and Anthropic's

_CLIENT_ID = re.compile(rb"[\x21-\x7e]{1,128}")
"""A valid `x-request-id`; another one is ignored, because it would be written into headers and the log."""


class RequestLog:
    """Gives each request an id, the client's `x-request-id` or a new one: answers have it in the headers of
    both APIs, errors also in the body. Logs each answer at level INFO. Answers HEAD like GET, without the
    body, and an unexpected exception with 500: the log has the traceback, the client only the kind of error.
    The connection stays open."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        client_id, start, status = _client_id(scope), time.monotonic(), 0
        request_id = client_id if client_id is not None else f"req_{uuid.uuid4().hex}".encode()
        REQUEST.set(RequestName(request_id.decode(), scope["path"]))
        is_head = scope["method"] == "HEAD"

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = [each for each in message.get("headers", ()) if each[0].lower() not in ID_HEADERS]
                message = {**message, "headers": [*headers, *((name, request_id) for name in ID_HEADERS)]}
            elif is_head and message["type"] == "http.response.body":
                message = {**message, "body": b""}
            await send(message)

        place = f"{scope['method']} {quote(scope['path'])}"
        if client_id is not None:
            place += f" x-request-id={client_id.decode()}"
        try:
            await self.app({**scope, "method": "GET"} if is_head else scope, receive, send_with_id)
        except Exception as error:
            if status:
                raise  # the answer has begun: the connection is closed
            LOGGER.exception("%s: a defect", place)
            await send_error(ApiError(500, f"internal error ({type(error).__name__})"), scope, send_with_id)
        finally:
            LOGGER.info("%s %s %.3f s", place, status or "no answer", time.monotonic() - start)


def _client_id(scope: Scope) -> bytes | None:
    found = dict(scope["headers"]).get(b"x-request-id", b"")
    return found if _CLIENT_ID.fullmatch(found) else None


class Sparse(logging.Filter):
    """Lets one of several equal warnings or errors through, each REPEAT_SECONDS: what a client can cause, it
    can cause in a loop. The next one says how many were left out."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[Any, tuple[float, int]] = {}  # kind -> time of the last one, number left out since

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        error = record.exc_info[0] if record.exc_info else None
        kind, now = (str(record.msg)[:60], error), time.monotonic()
        last, num_left_out = self._seen.get(kind, (-REPEAT_SECONDS, 0))
        if now - last < REPEAT_SECONDS:
            self._seen[kind] = last, num_left_out + 1
            return False
        if len(self._seen) > MAX_KINDS:
            self._seen.clear()
        self._seen[kind] = now, 0
        if num_left_out:
            record.msg = f"({num_left_out} more like this) {record.msg}"
        return True


def log_sparsely() -> None:
    """Limit the loggers that clients can make write."""
    for name in ("uvicorn.error", "asyncio", LOGGER.name):
        logging.getLogger(name).addFilter(Sparse())


def log_to_stderr() -> None:
    """Write a line for each answer."""
    LOGGER.addHandler(logging.StreamHandler())
    LOGGER.setLevel(logging.INFO)
