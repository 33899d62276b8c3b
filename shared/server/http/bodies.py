"""Bodies: their length while they are read, and their values without holding up other requests."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anyio
import msgspec
from fastapi.routing import APIRoute
from pydantic import TypeAdapter, ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from diptych.shared.server.http.access import send_error
from diptych.shared.server.http.errors import ApiError, bad_request, invalid_body
from diptych.shared.server.http.limits import (
    BODY_SECONDS,
    INLINE_BYTES,
    MAX_DISCARDED,
    MAX_MARKS,
    ONE_CALL_BYTES,
    ONE_CALL_MARKS,
)


class BodyLimit:
    """413 for a body that is too long, counted while it is read; 408 for one that takes too long to arrive;
    415 for one that does not say that it is JSON."""

    def __init__(self, app: ASGIApp, max_bytes: int, seconds: float = BODY_SECONDS) -> None:
        self.app = app
        self.max_bytes = max_bytes
        self.seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or len(length) > 18 or int(length) > self.max_bytes:
            await self._refuse(self._too_long, scope, receive, send)
            return
        kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        has_body = int(length) > 0 or b"transfer-encoding" in headers
        if has_body and kind != b"application/json":
            # A page of another site can send any other type, or none, without the browser asking the server.
            await self._refuse(ApiError(415, "Content-Type must be application/json"), scope, receive, send)
            return
        await self._run_with_limit(scope, receive, send)

    @property
    def _too_long(self) -> ApiError:
        return ApiError(413, f"the body exceeds {self.max_bytes} bytes")

    async def _run_with_limit(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The application may turn the exception that ends its reading into an answer of its own. That one is
        dropped."""
        num_bytes, is_read, refusal = 0, False, None
        end = anyio.current_time() + self.seconds

        async def bounded_receive() -> Message:
            nonlocal num_bytes, is_read, refusal
            if is_read:  # it waits for the client's leave
                return await receive()
            try:
                with anyio.fail_after(max(end - anyio.current_time(), 0.001)):  # without a task
                    message = await receive()
            except TimeoutError:
                refusal = ApiError(408, f"the body did not arrive within {self.seconds:g} s")
                raise refusal from None
            num_bytes += len(message.get("body", b""))
            is_read = not message.get("more_body")
            if num_bytes > self.max_bytes:
                refusal = self._too_long
                raise refusal
            return message

        async def send_unless_refused(message: Message) -> None:
            if refusal is None:
                await send(message)

        try:
            await self.app(scope, bounded_receive, send_unless_refused)
        except ApiError as raised:
            if raised is not refusal:
                raise
        except ClientDisconnect:
            pass  # before its body was there: the client reads no answer
        if refusal is not None:
            await self._refuse(refusal, scope, receive, send)

    async def _refuse(self, error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        """Read what a client is still sending, within reason: one that writes does not read the answer."""
        if error.status != 408:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._discard(receive), self.seconds)
        await send_error(error, scope, send)

    async def _discard(self, receive: Receive) -> None:
        num_bytes = 0
        while num_bytes <= MAX_DISCARDED * self.max_bytes:
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if not message.get("more_body"):
                return


# ---- values ----

_THREAD = ThreadPoolExecutor(1, thread_name_prefix="bodies")
"""One: threads that run Python take the event loop's time in turn."""


class BodyRoute(APIRoute):
    """Validates the body before FastAPI does, which would validate it on the event loop, and report each of a
    million wrong values."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        if self.body_field is None:
            return handle
        kind: Any = self.body_field.field_info.annotation
        adapter: TypeAdapter[Any] = TypeAdapter(kind)
        guards = [each.dependency for each in self.dependencies if each.dependency is not None]

        async def handle_valid(request: Request) -> Response:
            for guard in guards:  # before a body is read
                guard(request)
            content = await request.body()
            if content:
                request = _Validated(request, content, await _validated(adapter, content))
            return await handle(request)

        return handle_valid


class _Validated(Request):
    """A request whose JSON is a model already: FastAPI takes it as it is."""

    def __init__(self, request: Request, content: bytes, value: Any) -> None:
        super().__init__(request.scope, request.receive)
        self._content = content
        self._value = value

    async def body(self) -> bytes:
        return self._content

    async def json(self) -> Any:
        return self._value


async def _validated(adapter: TypeAdapter[Any], content: bytes) -> Any:
    if len(content) <= INLINE_BYTES:
        return read_body(adapter, content, json.loads)
    return await asyncio.get_running_loop().run_in_executor(_THREAD, _read_long_body, adapter, content)


def _read_long_body(adapter: TypeAdapter[Any], content: bytes) -> Any:
    check_size(content)
    return read_body(adapter, content, _loads_with_pauses)


def _loads_with_pauses(content: bytes) -> Any:
    """One call that is short enough, else Python calls, at which a thread lets others run: a list of numbers
    would be read without a pause."""
    is_short = len(content) <= ONE_CALL_BYTES
    if is_short and all(content.count(mark) <= limit for mark, limit in ONE_CALL_MARKS.items()):
        with contextlib.suppress(msgspec.DecodeError, RecursionError):  # it refuses NaN and lone surrogates
            return msgspec.json.decode(content)
    return json.loads(content, parse_int=lambda text: int(text), parse_float=lambda text: float(text))


def check_size(content: bytes) -> None:
    """400 for JSON of too many values: parsing it is one call, which keeps every other thread waiting."""
    if all(content.count(mark) <= limit for mark, (limit, _) in MAX_MARKS.items()):
        return  # not even with those in its texts
    counts = count_marks(content)
    excess = [what for mark, (limit, what) in MAX_MARKS.items() if counts[mark] > limit]
    if excess:
        raise bad_request(f"the body has more than {excess[0]}")


def count_marks(content: bytes, piece: int = INLINE_BYTES) -> Counter[bytes]:
    """How often JSON has each of MAX_MARKS outside of its texts. `piece`: bytes of one call, since each call
    keeps other threads waiting."""
    plain = content.replace(b"\\\\", b"").replace(b'\\"', b"")
    counts: Counter[bytes] = Counter()
    is_text = False
    for start in range(0, len(plain), piece):
        pieces = plain[start : start + piece].split(b'"')
        outside = b"".join(pieces[is_text::2])
        counts.update({mark: outside.count(mark) for mark in MAX_MARKS})
        is_text ^= len(pieces) % 2 == 0
    return counts


def read_body(adapter: TypeAdapter[Any], content: bytes, loads: Callable[[bytes], Any]) -> Any:
    """The model of a body. Raises `ApiError` 400."""
    try:
        value = loads(content)
    except (ValueError, RecursionError):
        raise bad_request("the body is not valid JSON") from None
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False)
        raise invalid_body([{**each, "loc": ("body", *each["loc"])} for each in found], value) from None
