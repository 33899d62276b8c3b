"""The HTTP application: routes, validation errors, and the middleware that guards them."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shared.server import chat, completions, sse
from shared.server.errors import ApiError, bad_request
from shared.server.generation import Generation
from shared.server.native import add_admin_routes, add_native_routes
from shared.server.protocol import ChatRequest, CompletionRequest
from shared.server.state import ServerState

_T = TypeVar("_T")

MAX_DISCARDED = 4
"""Times the longest body: so much of a body that is too long is read and discarded."""


def create_app(state: ServerState) -> FastAPI:
    """The application of a ready engine."""
    app = FastAPI(title="Diptych", docs_url=None, redoc_url=None)
    app.state.server = state
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_bug)
    _add_openai_routes(app, state)
    _add_health_routes(app, state)
    add_native_routes(app, state)
    add_admin_routes(app, state)
    app.add_middleware(BodyLimit, max_bytes=state.settings.max_body_bytes)
    if state.settings.api_keys:
        app.add_middleware(ApiKeys, keys=state.settings.api_keys)
    return app


def _add_openai_routes(app: FastAPI, state: ServerState) -> None:
    @app.post("/v1/chat/completions")
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        check_model(body.model, state)
        generation = await chat.start_chat(body, state)
        chunks = chat.chat_chunks(body, generation, state)
        return await respond(request, body.stream, chunks, generation, chat.fold_chat)

    @app.post("/v1/completions")
    async def text_completions(body: CompletionRequest, request: Request) -> Response:
        check_model(body.model, state)
        generation = await completions.start_completion(body, state)
        chunks = completions.completion_chunks(body, generation, state)
        return await respond(request, body.stream, chunks, generation, completions.fold_completion)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model_card(state)]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        check_model(name, state)
        return _model_card(state)


def _add_health_routes(app: FastAPI, state: ServerState) -> None:
    @app.get("/health")
    async def health() -> Response:
        problem = state.health_problem
        return PlainTextResponse(problem or "ok", 503 if problem else 200)

    @app.get("/ready")
    async def ready() -> Response:
        problem = state.health_problem
        if problem is None and state.is_draining:
            problem = "draining"
        if problem is None and state.client.load.is_paused:
            problem = "paused"
        return PlainTextResponse(problem or "ok", 503 if problem else 200)

    @app.get("/metrics")
    async def metrics() -> Response:
        text = state.metrics.render(state.client, state.ready.max_total_tokens)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


def _model_card(state: ServerState) -> dict[str, Any]:
    return {
        "id": state.model_name,
        "object": "model",
        "created": state.start_time,
        "owned_by": "diptych",
        "max_model_len": state.ready.context_len,
    }


def check_model(name: str | None, state: ServerState) -> None:
    """404 for a model that is not served; a request may leave the name out."""
    if name is not None and name != state.model_name:
        raise ApiError(
            404,
            f"the model {name!r} is not served; {state.model_name!r} is",
            param="model",
            code="model_not_found",
        )


# ---- answers ----


async def respond(
    request: Request,
    is_stream: bool,
    chunks: AsyncIterator[dict[str, Any]],
    generation: Generation,
    fold: Callable[..., dict[str, Any]],
) -> Response:
    """The chunks as a stream, or folded. The status is known before the first byte: the first chunk is
    awaited, which the engine gives only once it has taken the request."""
    if is_stream:
        first = await until_disconnect(request, anext(chunks))
        timeout = request.app.state.server.settings.write_timeout
        return EventStream(sse.events(_chain(first, chunks)), chunks, timeout)
    whole = await until_disconnect(request, _collect(chunks))
    return JSONResponse(fold(whole, generation.usage))


async def _collect(chunks: AsyncIterator[_T]) -> list[_T]:
    return [chunk async for chunk in chunks]


async def _chain(first: _T, rest: AsyncIterator[_T]) -> AsyncIterator[_T]:
    yield first
    async for each in rest:
        yield each


class EventStream(StreamingResponse):
    """Closes the source of its events when the client leaves or does not read for `write_timeout` seconds:
    what runs for it in the engine is aborted."""

    def __init__(
        self, content: AsyncIterator[bytes], source: AsyncIterator[Any], write_timeout: float
    ) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(content, media_type="text/event-stream", headers=headers)
        self._source = source
        self._write_timeout = write_timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def bounded_send(message: Message) -> None:
            await asyncio.wait_for(send(message), self._write_timeout)

        try:
            await super().__call__(scope, receive, bounded_send)
        except asyncio.TimeoutError:
            pass  # the connection is closed without an end of the stream
        finally:
            await self._source.aclose()  # type: ignore[attr-defined]


async def until_disconnect(request: Request, work: Awaitable[_T]) -> _T:
    """The result of `work`; cancelled when the client disconnects before it is there."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError(499, "the client has disconnected")
        return task.result()
    finally:
        for each in (task, watcher):
            each.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


# ---- errors ----


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return JSONResponse(error.body(), error.status, headers=error.headers)


async def _on_validation_error(request: Request, error: Exception) -> Response:
    """FastAPI's 422 as a 400 that names the first wrong field."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    place = [str(part) for part in first["loc"] if part != "body"]
    field = ".".join(place) or None
    if first["type"] == "extra_forbidden":
        message = f"unknown field {field!r}"
    elif first["type"] == "json_invalid":
        field, message = None, "the body is not valid JSON"
    else:
        message = f"{field}: {first['msg']}" if field else first["msg"]
    answer = bad_request(message[:500], field)
    return JSONResponse(answer.body(), answer.status)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    answer = ApiError(error.status_code, str(error.detail))
    return JSONResponse(answer.body(), answer.status, headers=error.headers)


async def _on_bug(request: Request, error: Exception) -> Response:
    """A defect of ours. The log has the traceback, the client only the kind of error."""
    answer = ApiError(500, f"internal error ({type(error).__name__})")
    return JSONResponse(answer.body(), answer.status)


# ---- middleware ----


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
            await _send_error(ApiError(413, f"the body exceeds {self.max_bytes} bytes"), scope, send)
            return
        kind = headers.get(b"content-type", b"application/json").partition(b";")[0].strip().lower()
        if scope["method"] == "POST" and kind != b"application/json" and int(length) > 0:
            await _send_error(ApiError(415, "the body must be application/json"), scope, send)
            return
        num_bytes = 0

        async def counting_receive() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self.max_bytes:
                raise ApiError(413, f"the body exceeds {self.max_bytes} bytes")
            return message

        await self.app(scope, counting_receive, send)

    async def _discard(self, receive: Receive) -> None:
        """Read what a client is still sending, within reason: one that writes does not read the answer."""
        num_bytes = 0
        while num_bytes <= MAX_DISCARDED * self.max_bytes:
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if not message.get("more_body"):
                return


class ApiKeys:
    """401 without a known key, for everything but /health. Keys are compared by their hashes, all of them and
    in constant time."""

    def __init__(self, app: ASGIApp, keys: tuple[str, ...]) -> None:
        self.app = app
        self.hashes = [_hash(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] != "/health" and not self._is_known(scope):
            await _send_error(ApiError(401, "missing or wrong API key", code="invalid_api_key"), scope, send)
            return
        await self.app(scope, receive, send)

    def _is_known(self, scope: Scope) -> bool:
        headers = dict(scope["headers"])
        scheme, _, bearer = headers.get(b"authorization", b"").partition(b" ")
        key = bearer.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"")
        found = _hash(key)
        matches = [hmac.compare_digest(found, known) for known in self.hashes]  # all: constant time
        return any(matches)


def _hash(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


async def _send_error(error: ApiError, scope: Scope, send: Send) -> None:
    async def receive() -> Message:
        return {"type": "http.disconnect"}

    await JSONResponse(error.body(), error.status, headers=error.headers)(scope, receive, send)
