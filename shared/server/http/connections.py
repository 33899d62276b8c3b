"""Connections: the socket of a server, and clients that disconnect or do not read."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from diptych.shared.server.api.errors import ApiError

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
