"""One server from start to end: engine first, then HTTP; draining on SIGTERM; an end when the engine dies."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, TypeVar

import uvicorn

from diptych.shared.config import EngineConfig
from diptych.shared.dialects.parts.choose import dialect_of
from diptych.shared.engine.python_runtime import gc_freeze
from diptych.shared.loading.sampling_defaults import read_sampling_defaults
from diptych.shared.server.api.encode_prompts import Prompts
from diptych.shared.server.api.state import ServerSettings, ServerState
from diptych.shared.server.app import create_app
from diptych.shared.server.engine.engine_client import EngineClient, EngineDead
from diptych.shared.server.engine.engine_process import EXIT_ENGINE_DIED
from diptych.shared.server.http.connections import listen, server_config
from diptych.shared.server.http.request_log import log_sparsely, log_to_stderr
from diptych.shared.server.http.tracing import tracer_to
from diptych.shared.text.tokenizer import Tokenizer

_T = TypeVar("_T")

GRACE_SECONDS = 2.0
"""For error chunks to reach clients after the engine's death, or after the drain's deadline."""


class _Server(uvicorn.Server):
    """uvicorn, with the signals left to us."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def run_server(
    config: EngineConfig,
    settings: ServerSettings,
    load_tokenizer: Callable[[], Tokenizer | None],
    *,
    in_thread: bool,
    announce: Callable[[ServerState, int], None],
) -> int:
    """Serve until a signal or the engine's death; returns the exit code. `announce` is called once requests
    are answered, with the port."""
    sampling_defaults = read_sampling_defaults(config)
    log_sparsely()
    if settings.log_requests:
        log_to_stderr()
    tracer = tracer_to(settings.otlp_traces_endpoint)
    listener = listen(settings.host, settings.port)
    client = EngineClient(config, in_thread=in_thread)
    stop = asyncio.Event()
    with _signals(stop):
        try:
            if in_thread:  # imports of one package in two threads at one time can fail
                load_tokenizer()
            starting = asyncio.ensure_future(client.start())
            tokenizer = await asyncio.to_thread(load_tokenizer)
            ready = await _first(starting, stop)
            if ready is None:
                return 0
            dialect = dialect_of(config, tokenizer)
            model_name = settings.served_model_name or config.model
            state = ServerState(settings, model_name, client, ready, Prompts(tokenizer, ready, dialect))
            state.sampling_defaults = sampling_defaults
            state.adapters.update(config.lora_paths)
            state.metrics.tracer = tracer
            server = _Server(server_config(create_app(state), settings.write_timeout, lifespan="off"))
            serving = asyncio.ensure_future(server.serve(sockets=[listener]))
            while not server.started and not serving.done():
                await asyncio.sleep(0.01)
            with gc_freeze():  # a full collection is longer than any request may keep the others waiting
                announce(state, listener.getsockname()[1])
                return await _until_end(state, server, serving, stop)
        except EngineDead as error:
            print(f"error: {error}", file=sys.stderr)
            return EXIT_ENGINE_DIED
        finally:
            await client.stop()
            listener.close()


async def _until_end(
    state: ServerState, server: uvicorn.Server, serving: asyncio.Future[None], stop: asyncio.Event
) -> int:
    assert state.client.died is not None
    died = asyncio.ensure_future(state.client.died.wait())
    stopped = asyncio.ensure_future(stop.wait())
    events: set[asyncio.Future[Any]] = {died, stopped, serving}
    await asyncio.wait(events, return_when=asyncio.FIRST_COMPLETED)
    is_dead = not state.client.is_alive
    if is_dead:
        print(f"error: {state.client.death_reason}", file=sys.stderr)
        await asyncio.sleep(GRACE_SECONDS / 2)
    else:
        await _drain(state)
    for each in (died, stopped):
        each.cancel()
    server.should_exit = True
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(asyncio.shield(serving), GRACE_SECONDS)
    if not serving.done():
        server.force_exit = True
        await serving
    return EXIT_ENGINE_DIED if is_dead else 0


async def _drain(state: ServerState) -> None:
    """New work gets 503; running requests end, at the deadline by an abort. A paused engine continues,
    so that running requests can end."""
    state.is_draining = True
    if state.client.load.is_paused:
        await _control(state, "continue")
    end = time.monotonic() + state.settings.drain_seconds
    while state.client.num_live and state.client.is_alive and time.monotonic() < end:
        await asyncio.sleep(0.05)
    if state.client.num_live and state.client.is_alive:
        seconds = state.settings.drain_seconds
        state.client.set_end_reason(
            f"the server is shutting down, and the request had not ended {seconds:g} s after the signal"
        )
        await _control(state, "abort_all")
        end = time.monotonic() + GRACE_SECONDS
        while state.client.num_live and time.monotonic() < end:
            await asyncio.sleep(0.02)


async def _control(state: ServerState, action: str) -> None:
    """Run an action of an engine that may have died or hang."""
    with contextlib.suppress(EngineDead, asyncio.TimeoutError):
        await asyncio.wait_for(state.client.control(action), GRACE_SECONDS)


async def _first(work: asyncio.Future[_T], stop: asyncio.Event) -> _T | None:
    """The result of `work`; None when a signal came first."""
    stopped = asyncio.ensure_future(stop.wait())
    events: set[asyncio.Future[Any]] = {work, stopped}
    await asyncio.wait(events, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if stop.is_set() and not work.done():
        work.cancel()
        return None
    return work.result()


@contextlib.contextmanager
def _signals(stop: asyncio.Event) -> Iterator[None]:
    """SIGTERM and SIGINT set `stop`, from the first moment on; a second one ends the process at once."""
    loop = asyncio.get_running_loop()

    def handler(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            raise SystemExit(128 + number)
        loop.call_soon_threadsafe(stop.set)

    numbers = (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
