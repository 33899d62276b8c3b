"""What guards every route: API keys."""

from __future__ import annotations

import hashlib
import hmac

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from diptych.shared.server.api.errors import ApiError

PUBLIC_PATHS = ("/", "/health", "/ready")
"""Answered without an API key, for probes and routers. The page at / holds no data: it asks for /status with
the key."""


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
