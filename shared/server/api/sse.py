"""Server-sent events: one JSON line per event, and errors that arrive after the first byte."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from diptych.shared.server.api.long_answers import in_turn, num_values, written
from diptych.shared.server.http.errors import ApiError

DONE = b"data: [DONE]\n\n"


def event(data: dict[str, Any], name: str | None = None) -> bytes:
    """One event. Everything beyond ASCII is escaped: clients split at Unicode's line ends as well."""
    return _event(_json(data), name)


async def long_event(data: dict[str, Any], name: str | None = None) -> bytes:
    """One event, with any number of values."""
    return _event(await in_turn(num_values(data), written, data, _json), name)


def _event(data: bytes, name: str | None) -> bytes:
    head = f"event: {name}\n".encode() if name is not None else b""
    return b"%bdata: %b\n\n" % (head, data)


def _json(data: Any) -> bytes:
    """msgspec takes an eighth of the time that `json` does, but escapes nothing."""
    found = msgspec.json.encode(data)
    return found if found.isascii() else json.dumps(data, separators=(",", ":")).encode()


async def events(chunks: AsyncIterator[dict[str, Any]]) -> AsyncIterator[bytes]:
    """Chunks as events, then DONE. A failure becomes an error event."""
    try:
        async for chunk in chunks:
            yield event(chunk)
    except ApiError as error:
        yield event(error.body())
    yield DONE


async def long_events(chunks: AsyncIterator[dict[str, Any]]) -> AsyncIterator[bytes]:
    """As `events`, of chunks with any number of values."""
    try:
        async for chunk in chunks:
            yield await long_event(chunk)
    except ApiError as error:
        yield event(error.body())
    yield DONE


async def named_events(chunks: AsyncIterator[dict[str, Any]]) -> AsyncIterator[bytes]:
    """Chunks as events with the name in their `type`, and no DONE. A failure becomes an `error` event."""
    try:
        async for chunk in chunks:
            yield event(chunk, chunk["type"])
    except ApiError as error:
        yield event(error.body(), "error")
