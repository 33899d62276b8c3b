"""Whether the server lives and takes requests, its version, its load and its metrics."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from fastapi import Depends, FastAPI, Request
from fastapi.responses import PlainTextResponse, Response

from diptych import __version__
from diptych.shared.engine.requests.embedding import NO_TOKENS
from diptych.shared.server.api.generation import Generation
from diptych.shared.server.api.state import ServerState
from diptych.shared.server.http.access import PREFILL_PORT, caller_of, require_overview
from diptych.shared.server.http.connections import until_disconnect
from diptych.shared.server.http.errors import ApiError
from diptych.shared.types import SamplingParams

PROBE_SECONDS = 20.0
"""For one token, or for any step of the engine meanwhile."""


def add_health_routes(app: FastAPI, state: ServerState) -> None:
    @app.get("/health")
    async def health() -> Response:
        problem = state.health_problem
        return PlainTextResponse(problem or "ok", 503 if problem else 200)

    @app.get("/ready")
    async def ready() -> Response:
        """A prefill server says at which port decode servers reach it: the router asks here."""
        problem, port = _not_ready(state), state.ready.prefill_port
        headers = {} if port is None else {PREFILL_PORT: str(port)}
        return PlainTextResponse(problem or "ok", 503 if problem else 200, headers)

    @app.get("/health_generate")
    async def health_generate(request: Request) -> Response:
        """Generate one token. A busy engine need not: it is healthy if it steps."""
        problem = _not_ready(state) or await until_disconnect(request, _probe(request, state))
        return PlainTextResponse(problem or "ok", 503 if problem else 200)

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @app.get("/load", dependencies=[Depends(require_overview)])
    @app.get("/get_load", dependencies=[Depends(require_overview)])
    async def load() -> dict[str, Any]:
        """Requests in the server, and the engine's last report of its own."""
        found = state.client.load
        return {
            "server_load": state.client.num_live,
            **{name: getattr(found, name) for name in found.__struct_fields__},
        }

    @app.get("/metrics")
    async def metrics() -> Response:
        text = state.metrics.render(state.client, state.ready.max_total_tokens)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


def _not_ready(state: ServerState) -> str | None:
    """Why no new request is accepted."""
    if state.health_problem is not None:
        return state.health_problem
    if state.is_draining:
        return "draining"
    if state.client.load.not_ready is not None:
        return state.client.load.not_ready
    return "paused" if state.client.load.is_paused else None


async def _probe(request: Request, state: ServerState) -> str | None:
    """What keeps the engine from generating; None: nothing."""
    is_pooling = bool(state.ready.num_labels)
    params = NO_TOKENS if is_pooling else SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True)
    generation = Generation(state.client, None, state.metrics, [[0]], params, seed=0, is_pooling=is_pooling)
    generation.belong_to(caller_of(request))
    asked = asyncio.ensure_future(_whole(generation))
    num_steps, end = state.client.load.num_steps, time.monotonic() + PROBE_SECONDS
    try:
        while not asked.done() and state.client.load.num_steps == num_steps and time.monotonic() < end:
            await asyncio.wait({asked}, timeout=0.1)
        if asked.done():
            asked.result()
        elif state.client.load.num_steps == num_steps:
            return f"the engine has made no step within {PROBE_SECONDS:g} s"
        return None
    except ApiError as error:
        return error.message
    finally:
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)


async def _whole(generation: Generation) -> None:
    async for _ in generation.run():
        pass
