"""Answers of the generating routes: a stream of events, or their fold."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import Response

from diptych.shared.server.api import sse
from diptych.shared.server.api.generation import Generation
from diptych.shared.server.api.long_answers import json_answer
from diptych.shared.server.api.state import ServerState
from diptych.shared.server.http.access import caller_of
from diptych.shared.server.http.connections import EventStream, until_disconnect
from diptych.shared.server.http.errors import ApiError

_T = TypeVar("_T")
Chunk = dict[str, Any]


def check_model(name: str | None, state: ServerState) -> None:
    """404 for a model that is not served; a request may leave the name out."""
    if name is not None and name != state.model_name and name not in state.adapters:
        served = ", ".join(map(repr, [state.model_name, *sorted(state.adapters)]))
        raise ApiError(
            404,
            f"the model {name!r} is not served; {served} {'are' if state.adapters else 'is'}",
            param="model",
            code="model_not_found",
        )


async def respond(
    request: Request,
    is_stream: bool,
    chunks: AsyncIterator[Chunk],
    generation: Generation,
    fold: Callable[..., Any],
    write: Callable[[AsyncIterator[Chunk]], AsyncIterator[bytes]] = sse.events,
) -> Response:
    """The chunks as a stream, written by `write`, or folded with the usage. The status is known before the
    first byte: the first chunk is awaited, which the engine gives only once it has taken the request."""
    generation.belong_to(caller_of(request))
    if is_stream:
        first = await until_disconnect(request, anext(chunks))
        return EventStream(write(_chain(first, chunks)), chunks)
    whole = await until_disconnect(request, _collect(chunks))
    return await json_answer(generation.num_answer_values, lambda: fold(whole, generation.usage))


async def _collect(chunks: AsyncIterator[_T]) -> list[_T]:
    return [chunk async for chunk in chunks]


async def _chain(first: _T, rest: AsyncIterator[_T]) -> AsyncIterator[_T]:
    yield first
    async for each in rest:
        yield each
