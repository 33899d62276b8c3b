"""Connections that send nothing, or little by little, and more of them than there are files."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import uvicorn
from starlette.responses import PlainTextResponse

from diptych.shared.server.http.bodies import BodyLimit
from diptych.shared.server.http.connections import EventStream, listen, server_config
from diptych.shared.server.http.limits import raise_file_limit
from diptych.shared.server.http.request_log import Sparse
from tests.server.running import ROOT

GET = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"


@contextlib.asynccontextmanager
async def running(app: Any, **limits: Any) -> AsyncIterator[int]:
    """The port of an application, in this process."""
    config = server_config(app, lifespan="off")
    for name, value in limits.items():
        setattr(config.http, name, value)
    server, listener = uvicorn.Server(config), listen("127.0.0.1", 0)
    serving = asyncio.ensure_future(server._serve([listener]))
    while not server.started:
        await asyncio.sleep(0.01)
    yield listener.getsockname()[1]
    server.should_exit = server.force_exit = True
    await serving
    listener.close()


async def seconds_until_closed(port: int, pieces: list[bytes], pause: float) -> tuple[float, bytes]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    start, received = time.monotonic(), b""
    for piece in pieces:
        with contextlib.suppress(ConnectionError):
            writer.write(piece)
            await writer.drain()
        with contextlib.suppress(asyncio.TimeoutError, ConnectionError):
            received += await asyncio.wait_for(reader.read(65536), pause)
        if reader.at_eof() or reader.exception():
            break
    with contextlib.suppress(ConnectionError):
        received += await asyncio.wait_for(reader.read(), 30)
    writer.close()
    return time.monotonic() - start, received


@pytest.mark.parametrize(
    "pieces",
    [
        [],
        [GET[:5]],
        [GET[i : i + 1] for i in range(len(GET))] * 3,
        [GET, *[GET[i : i + 1] for i in range(20)]],
    ],
    ids=["nothing", "begun", "slow", "slow second"],
)
def test_headers_have_a_deadline(pieces: list[bytes]) -> None:
    async def play() -> None:
        async with running(PlainTextResponse("ok"), header_seconds=0.5) as port:
            seconds, received = await seconds_until_closed(port, pieces, 0.2)
            assert seconds < 10
            assert received.count(b"200 OK") == pieces.count(GET)

    asyncio.run(play())


def test_a_connection_in_use_stays_open() -> None:
    async def slow(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(1)
        await PlainTextResponse("ok")(scope, receive, send)

    async def play() -> None:
        async with running(slow, header_seconds=0.3) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            for _ in range(2):
                writer.write(GET)
                assert b"200 OK" in await reader.readuntil(b"ok")
            writer.close()

    asyncio.run(play())


def test_bodies_have_a_deadline() -> None:
    async def read(scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        await PlainTextResponse("ok")(scope, receive, send)

    async def play() -> None:
        head = (
            GET[:-2].replace(b"GET", b"POST") + b"Content-Type: application/json\r\nContent-Length: 9\r\n\r\n"
        )
        async with running(BodyLimit(read, 100, seconds=0.5)) as port:
            seconds, received = await seconds_until_closed(port, [head, *[b"1"] * 8], 0.2)
            assert b"408" in received[:20]
            assert seconds < 10

    asyncio.run(play())


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_client_that_does_not_read_is_dropped(is_stream: bool) -> None:
    """Also in the middle of an answer that is written as a whole."""
    ends: list[str] = []

    async def large(scope: Any, receive: Any, send: Any) -> None:
        async def pieces() -> AsyncIterator[bytes]:
            try:
                while True:
                    yield b"a" * 2**16
                    await asyncio.sleep(0)  # as for an engine's next step
            finally:
                ends.append("source")

        source = pieces()
        answer = EventStream(source, source) if is_stream else PlainTextResponse(b"a" * 2**26)
        await answer(scope, receive, send)
        ends.append("answer")

    async def play() -> None:
        async with running(large, write_seconds=0.3) as port:
            connection = socket.create_connection(("127.0.0.1", port))
            connection.sendall(GET)
            for _ in range(3000):
                if "answer" in ends:
                    break
                await asyncio.sleep(0.01)
            await asyncio.sleep(1.0)  # a whole answer is in the buffer at once, and its timer runs
            received = 0
            with contextlib.suppress(ConnectionError):
                while piece := await asyncio.to_thread(connection.recv, 2**20):
                    received += len(piece)
            connection.close()
            assert received < 2**26

    asyncio.run(play())
    assert ends == (["source", "answer"] if is_stream else ["answer"])


def test_too_many_connections_are_refused_and_others_served() -> None:
    async def play() -> None:
        async with running(PlainTextResponse("ok"), max_connections=20, header_seconds=60) as port:
            idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(19)]
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(GET)
            assert b"200 OK" in await reader.readuntil(b"ok")
            more, _ = await asyncio.open_connection("127.0.0.1", port)
            with contextlib.suppress(ConnectionError):
                assert await asyncio.wait_for(more.read(), 10) == b""
            for _, each in [*idle, (reader, writer)]:
                each.close()

    asyncio.run(play())


SERVER = """
import resource, sys, uvicorn
resource.setrlimit(resource.RLIMIT_NOFILE, (256, int(sys.argv[1])))
from starlette.responses import PlainTextResponse
from diptych.shared.server.http.connections import EventStream, listen, server_config
from diptych.shared.server.http.request_log import log_sparsely
log_sparsely()
listener = listen("127.0.0.1", 0)
config = server_config(PlainTextResponse("ok"), lifespan="off")
print(listener.getsockname()[1], flush=True)
uvicorn.Server(config).run(sockets=[listener])
"""


@pytest.mark.parametrize("hard_limit", [256, pytest.param(4096, marks=pytest.mark.full)])
def test_more_idle_connections_than_files(hard_limit: int) -> None:
    """A server of 256 files that may have more, or may not, and 350 idle connections."""
    raise_file_limit()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(hard_limit)],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        while True:
            with contextlib.suppress(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", port)).close()
                break
            time.sleep(0.05)
        idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(350)]
        time.sleep(1)
        if hard_limit == 4096:  # all are open, and the next one is served
            with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
                connection.sendall(GET)
                assert b"200 OK" in connection.recv(1000)
        for each in idle:
            each.close()
        time.sleep(0.5)
        with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
            connection.sendall(GET)
            assert b"200 OK" in connection.recv(1000)
    finally:
        process.kill()
    assert process.stderr is not None
    assert len(process.stderr.read()) < 10_000


def test_the_limit_of_files_is_raised() -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    assert raise_file_limit() == resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= min(4096, hard)


def test_equal_warnings_are_written_once() -> None:
    def record(text: str, level: int = logging.ERROR) -> logging.LogRecord:
        return logging.LogRecord("a", level, "", 0, text, (), None)

    sparse = Sparse()
    assert [sparse.filter(record("a")) for _ in range(1000)] == [True] + [False] * 999
    assert sparse.filter(record("b"))
    assert all(sparse.filter(record("c", logging.INFO)) for _ in range(3))
    sparse._seen = {kind: (-100.0, number) for kind, (_, number) in sparse._seen.items()}
    again = record("a")
    assert sparse.filter(again)
    assert again.getMessage() == "(999 more like this) a"
