"""Connections: the socket of a server, and clients that disconnect or do not read."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable
from typing import Any, TypeVar

import h11
import uvicorn
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from diptych.shared.server.http.errors import ApiError
from diptych.shared.server.http.limits import (
    HEADER_SECONDS,
    MAX_CONNECTIONS,
    WRITE_SECONDS,
    raise_file_limit,
)

_T = TypeVar("_T")


def listen(host: str, port: int) -> socket.socket:
    """The listening socket, made before anything slow: a port in use is found in the first second. Its
    connections send small chunks at once, without waiting for the acknowledgement of the previous one (40 ms
    in the TTFT of a client that keeps its connection). Raises `ValueError`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sets TCP_NODELAY only where the protocol is named; other event loops inherit it from here.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ValueError(f"cannot listen on {host}:{port}: {error.strerror}") from None
    return listener


class BoundedProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """uvicorn's connection, which ends when its request has no complete headers after HEADER_SECONDS, when a
    write waits for the client for WRITE_SECONDS, and at once when there are too many."""

    max_connections = MAX_CONNECTIONS
    header_seconds = HEADER_SECONDS
    write_seconds = WRITE_SECONDS
    _deadline: asyncio.TimerHandle | None = None
    _write_deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            transport.abort()
        else:
            self._watch()

    def data_received(self, data: bytes) -> None:
        if self._deadline is None:
            self._watch()
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:  # a request is there
            self._unwatch()

    def send_400_response(self, msg: str) -> None:
        """What follows a request is none. That request has no other answer then, or an unfinished one."""
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        with contextlib.suppress(h11.LocalProtocolError):
            super().send_400_response(msg)
        self.transport.close()

    def pause_writing(self) -> None:
        """The client does not read, and the buffer is full. Only then is there a timer: most pieces of an
        answer wait for nothing."""
        super().pause_writing()
        self._write_deadline = self.loop.call_later(self.write_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._unwatch_write()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unwatch()
        self._unwatch_write()
        super().connection_lost(exc)

    def _watch(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self._deadline = self.loop.call_later(self.header_seconds, self.transport.abort)

    def _unwatch(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _unwatch_write(self) -> None:
        if self._write_deadline is not None:
            self._write_deadline.cancel()
            self._write_deadline = None


def server_config(app: Any, write_seconds: float = WRITE_SECONDS, **more: Any) -> uvicorn.Config:
    """uvicorn's settings. Headers in which a proxy names the client are not believed: clients can send them.

    asyncio accepts `backlog` connections at a time, before one of them is refused. The limits leave files for
    everything else: a server without files can neither answer nor log."""
    num_files = raise_file_limit()
    limits = {"max_connections": min(MAX_CONNECTIONS, num_files // 2), "write_seconds": write_seconds}
    return uvicorn.Config(
        app,
        http=type("Protocol", (BoundedProtocol,), limits),
        ws="none",
        log_level="warning",
        access_log=False,
        proxy_headers=False,
        backlog=min(2048, num_files // 16),
        **more,
    )


class EventStream(StreamingResponse):
    """Closes the source of its events when the client has left: what runs for it in the engine is aborted."""

    def __init__(self, content: AsyncIterator[bytes], source: AsyncIterator[Any]) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(content, media_type="text/event-stream", headers=headers)
        self._source = source

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
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
        # The watcher ends with the answer at the latest; what it reads through may miss a cancellation.
        watcher.add_done_callback(lambda done: done.cancelled() or done.exception())
        await asyncio.gather(task, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
