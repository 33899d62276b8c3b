"""What the HTTP applications do with requests of every form. A case raises AssertionError for an answer of
500, a long error, or a body that holds up the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import uvicorn

from diptych.shared.engine.python_runtime import gc_freeze
from diptych.shared.server.http.connections import listen, server_config
from diptych.shared.server.http.limits import MAX_BODY_BYTES
from diptych.shared.server.router.router import Router, prompt_text
from tests.fuzz.mutations import nearly, value
from tests.server.in_process import Lag, make_app
from tests.server.test_bodies import FORMS, MAX_ERROR_BYTES, MAX_LAG, body_of

JSON = b"application/json"
NUM_TRIES = 3
"""Of a body that has held up the event loop: another process of the computer may have."""
SIZES = (2**10, 2**14, 2**16, 2**18, 2**20, MAX_BODY_BYTES - 1024, MAX_BODY_BYTES + 1)
WEIGHTS = (60, 30, 10, 4, 1, 0.1, 0.1)
USER = [{"role": "user", "content": "a"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": USER, "max_tokens": 1},
    "/v1/completions": {"prompt": "a", "max_tokens": 1},
    "/v1/responses": {"input": "a", "max_output_tokens": 1},
    "/v1/messages": {"messages": USER, "max_tokens": 1},
    "/v1/messages/count_tokens": {"messages": USER},
    "/v1/embeddings": {"input": "a"},
    "/generate": {"text": "a", "sampling_params": {"max_new_tokens": 1}},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [5]},
    "/abort_request": {"rid": "a"},
    "/load_lora_adapter": {"lora_name": "a", "lora_path": "a"},
}
HEADERS = (
    (b"host", b"evil.example"), (b"host", b""), (b"origin", b"http://evil.example"), (b"sec-fetch-site",
    b"cross-site"),
    (b"x-forwarded-for", b"127.0.0.1"), (b"authorization", b"Bearer \xff"), (b"content-length",
    b"99999999999999999999"),
    (b"content-length", b"-1"), (b"transfer-encoding", b"chunked"), (b"content-type", b"text/plain"),
    (b"cookie", b"a" * 9000),
    (b"x-request-id", b"a\nb"), (b"x-request-id", b"a" * 500), (b"connection", b"host, content-type, \xff"),
    (b"accept", b"*/*"),
)  # fmt: skip
PATHS = (
    *BODIES, "/", "/health", "/ready", "/metrics", "/status", "/v1/models", "/v1/models/%ff",
    "/flush_cache", "/server_info",
    "/replicas", "/v1/../server_info", "/%00", "//", "/openapi.json", "/pause_generation", "/\\server_info",
)  # fmt: skip


async def call(
    app: Any, method: str, path: str, headers: list[tuple[bytes, bytes]], body: bytes
) -> tuple[int, bytes]:
    """Status and content of an answer of an ASGI application, for bytes that no client would send."""
    scope = {
        "type": "http", "http_version": "1.1", "method": method, "scheme": "http", "path": path,
        "root_path": "",
        "raw_path": path.encode(errors="replace"), "query_string": b"", "headers": headers,
        "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80),
    }  # fmt: skip
    sent: list[dict[str, Any]] = []
    pieces = [body[i : i + 65536] for i in range(0, len(body), 65536)] or [b""]
    over = asyncio.Event()

    async def receive() -> dict[str, Any]:
        if not pieces:
            await over.wait()
            return {"type": "http.disconnect"}
        piece = pieces.pop(0)
        return {"type": "http.request", "body": piece, "more_body": bool(pieces)}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await app(scope, receive, send)
    over.set()
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent)


def content(rng: random.Random, fields: dict[str, list[str]]) -> tuple[str, bytes]:
    """A path and a body: of odd values in known fields, of bytes that are nearly JSON, or of a given size."""
    kind = rng.random()
    if kind < 0.5:
        path, body = rng.choice([*BODIES.items()])
        odd = {rng.choice(fields[path]): value(rng) for _ in range(rng.randrange(1, 4))}
        return path, json.dumps({**body, **odd}).encode()
    if kind < 0.7:
        path, body = rng.choice([*BODIES.items()])
        return path, nearly(json.dumps(body).encode(), rng)
    form = rng.choice(FORMS)
    body_bytes = body_of(form, rng.choices(SIZES, WEIGHTS)[0])
    return form[0], nearly(body_bytes, rng) if rng.random() < 0.5 else body_bytes


def in_loop(case: Callable[[random.Random], Awaitable[None]]) -> tuple[Callable[[random.Random], None], Any]:
    loop = asyncio.new_event_loop()
    return lambda rng: loop.run_until_complete(case(rng)), loop.close


def application() -> tuple[Callable[[random.Random], None], Callable[[], None]]:
    """The server's, over an engine that answers at once."""
    app, _ = make_app(max_live_requests=4096)
    schema = app.openapi()
    fields = {}
    for path in BODIES:
        reference = schema["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        name = (reference.get("$ref") or reference["anyOf"][0]["$ref"]).rpartition("/")[2]
        fields[path] = [*schema["components"]["schemas"][name]["properties"], "unknown"]

    async def case(rng: random.Random) -> None:
        path, body = content(rng, fields)
        for _ in range(NUM_TRIES):
            lag = Lag()
            async with lag:
                status, answer = await call(app, "POST", path, [(b"content-type", JSON)], body)
            assert status < 500, (path, status, answer[:300], body[:300])
            assert status == 200 or len(answer) < MAX_ERROR_BYTES, (path, answer[:300])
            if lag.longest < MAX_LAG:
                return
        raise AssertionError(f"{path} blocks for {lag.longest:.3f} s: {body[:200]!r}")

    run, close_loop = in_loop(case)
    aside = contextlib.ExitStack()
    aside.enter_context(gc_freeze())  # as a server does at its start

    def close() -> None:
        close_loop()
        aside.close()

    return run, close


def router() -> tuple[Callable[[random.Random], None], Callable[[], None]]:
    """Paths, methods and headers of every form, before a server that takes everything."""
    made = Router(["http://127.0.0.1:1"])

    async def pieces() -> AsyncIterator[bytes]:
        yield b"{}"

    answers = httpx.MockTransport(lambda request: httpx.Response(200, content=pieces()))
    made.client = httpx.AsyncClient(transport=answers)
    app, _ = make_app()

    async def case(rng: random.Random) -> None:
        path = rng.choice(PATHS)
        if rng.random() < 0.5:
            path = nearly(path.encode(), rng)[:5000].decode("utf-8", "replace")
        headers = [(b"content-type", JSON), *rng.choices(HEADERS, k=rng.randrange(4))]
        method = rng.choice(["GET", "POST", "HEAD", "OPTIONS", "PUT", "TRACE", "\xff"])
        body = nearly(json.dumps(BODIES["/v1/completions"]).encode(), rng) if method == "POST" else b""
        prompt_text(body)
        for each in (made.app, app):
            status, answer = await call(each, method, path, headers, body)
            is_paused = status == 503 and answer in (b"paused", b"")  # HEAD has no body
            assert status < 500 or is_paused, (method, path, headers, status, answer[:300])
        assert made.replicas[0].load == 0

    return in_loop(case)


RAW = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Content-Length: 33\r\n\r\n"
)
CHUNKED = RAW.replace(b"Content-Length: 33", b"Transfer-Encoding: chunked")
BODY = json.dumps({"prompt": "a", "max_tokens": 1}).encode()[:33]


def bytes_of_requests() -> tuple[Callable[[random.Random], None], Callable[[], None]]:
    """What is nearly HTTP, at a socket."""
    app, _ = make_app()
    server, listener = uvicorn.Server(server_config(app, lifespan="off")), listen("127.0.0.1", 0)
    problems: list[Any] = []

    async def serve() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: problems.append(context))
        await server._serve([listener])

    log = logging.Handler(logging.ERROR)
    log.emit = problems.append  # type: ignore[assignment]
    loggers = [logging.getLogger(name) for name in ("uvicorn.error", "diptych.server")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.addHandler(log)
        logger.setLevel(logging.ERROR)
    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    while not server.started:
        time.sleep(0.01)
    place = listener.getsockname()

    def send(data: bytes) -> bytes:
        received = b""
        with socket.create_connection(place) as connection:
            connection.settimeout(30)
            try:
                connection.sendall(data)
                connection.shutdown(socket.SHUT_WR)
                while piece := connection.recv(65536):
                    received += piece
            except TimeoutError:
                raise AssertionError(f"no answer and no end: {data[:300]!r}") from None
            except OSError:
                pass  # the server has closed the connection
        return received

    def case(rng: random.Random) -> None:
        data = nearly(rng.choice([RAW + BODY, CHUNKED + b"21\r\n" + BODY + b"\r\n0\r\n\r\n"]), rng)
        received = send(data[:200_000])
        assert not problems, (data[:300], problems)
        assert not received or received.startswith(b"HTTP/1.1 "), received[:100]
        assert b"HTTP/1.1 5" not in received, (data[:300], received[:300])
        if rng.random() < 0.02:
            assert send(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n").startswith(b"HTTP/1.1 200")

    def close() -> None:
        server.should_exit = server.force_exit = True
        thread.join(30)
        listener.close()
        for logger, level in zip(loggers, levels):
            logger.removeHandler(log)
            logger.setLevel(level)

    return case, close
