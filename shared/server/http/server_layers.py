"""The layers around an application, outermost first: request ids and log, CORS, access, length of bodies."""

from __future__ import annotations

from typing import Any, Protocol

from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware

from diptych.shared.server.http.access import Guard, Keys
from diptych.shared.server.http.bodies import BodyLimit
from diptych.shared.server.http.request_log import ID_HEADERS, RequestLog


class AccessSettings(Protocol):
    """Who may use a server or a router."""

    @property
    def keys(self) -> Keys: ...

    @property
    def allowed_hosts(self) -> tuple[str, ...]: ...

    @property
    def cors_origins(self) -> tuple[str, ...]: ...


def add_layers(app: Starlette, settings: AccessSettings, max_body_bytes: int) -> None:
    """Browsers ask with OPTIONS, without a key, whether a page of one of `cors_origins` may send requests."""
    origins = settings.cors_origins
    app.add_middleware(BodyLimit, max_bytes=max_body_bytes)
    app.add_middleware(Guard, keys=settings.keys, hosts=settings.allowed_hosts, origins=origins)
    if origins:
        answers: dict[str, Any] = {"expose_headers": [*map(bytes.decode, ID_HEADERS), "retry-after"]}
        methods = ("GET", "POST", "HEAD")
        app.add_middleware(
            CORSMiddleware, allow_origins=origins, allow_methods=methods, allow_headers=["*"], **answers
        )
    app.add_middleware(RequestLog)
