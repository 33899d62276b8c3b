"""What guards every route: the limit of a body, and API keys."""

from __future__ import annotations

import hashlib
import hmac

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from diptych.shared.server.api.errors import ApiError

MAX_DISCARDED = 4
"""Times the longest body: so much of a body that is too long is read and discarded."""

PUBLIC_PATHS = ("/", "/health", "/ready")
"""Answered without an API key, for probes and routers. The page at / holds no data: it asks for /status with
the key."""


class BodyLimit:
    """413 for a body that is too long, counted while it is read; 415 for one that is not JSON."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self.app = app
        self.max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > self.max_bytes:
            await self._discard(receive)
            await send_error(ApiError(413, f"the body exceeds {self.max_bytes} bytes"), scope, send)
            return
        kind = headers.get(b"content-type", b"application/json").partition(b";")[0].strip().lower()
        has_body = int(length) > 0 or b"transfer-encoding" in headers
        if scope["method"] == "POST" and kind != b"application/json" and has_body:
            await self._discard(receive)
            await send_error(ApiError(415, "the body must be application/json"), scope, send)
            return
        await self._run_with_limit(scope, receive, send)

    async def _run_with_limit(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The application may turn the exception that ends its reading into an answer of its own. That one is
        dropped."""
        error = ApiError(413, f"the body exceeds {self.max_bytes} bytes")
        num_bytes = 0

        async def counting_receive() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self.max_bytes:
                raise error
            return message

        async def send_within_limit(message: Message) -> None:
            if num_bytes <= self.max_bytes:
                await send(message)

        try:
            await self.app(scope, counting_receive, send_within_limit)
        except ApiError as raised:
            if raised is not error:
                raise
        if num_bytes > self.max_bytes:
            await self._discard(receive)
            await send_error(error, scope, send)

    async def _discard(self, receive: Receive) -> None:
        """Read what a client is still sending, within reason: one that writes does not read the answer."""
        num_bytes = 0
        while num_bytes <= MAX_DISCARDED * self.max_bytes:
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if not message.get("more_body"):
                return


class ApiKeys:
    """401 without a known key, for everything but PUBLIC_PATHS. Keys are compared by their hashes, all of
    them and in constant time."""

    def __init__(self, app: ASGIApp, keys: tuple[str, ...]) -> None:
        self.app = app
        self.hashes = [_hash(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in PUBLIC_PATHS and not self._is_known(scope):
            await send_error(ApiError(401, "missing or wrong API key", code="invalid_api_key"), scope, send)
            return
        await self.app(scope, receive, send)

    def _is_known(self, scope: Scope) -> bool:
        headers = dict(scope["headers"])
        scheme, _, bearer = headers.get(b"authorization", b"").partition(b" ")
        key = bearer.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"")
        found = _hash(key)
        matches = [hmac.compare_digest(found, known) for known in self.hashes]  # all: constant time
        return any(matches) and key != b""


def _hash(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


async def send_error(error: ApiError, scope: Scope, send: Send) -> None:
    """An answer from outside of the application."""

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    await JSONResponse(error.body(), error.status, headers=error.headers)(scope, receive, send)
