"""The HTTP application without an engine, in the process of a test: every request ends with one token."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

from diptych.shared.config import EngineConfig
from diptych.shared.dialects.parts.choose import choose_dialect
from diptych.shared.loading.model_path import load_tokenizer, resolve_model_path
from diptych.shared.server.api.encode_prompts import Prompts
from diptych.shared.server.api.state import ServerSettings, ServerState
from diptych.shared.server.app import create_app
from diptych.shared.server.engine.engine_client import Delta, Live
from diptych.shared.server.engine.messages import Finish, Generate, Load, Ready, encode


class FakeClient:
    """In place of `EngineClient`. `sent`: what the engine would have got."""

    is_alive, num_live, death_reason = True, 0, ""

    def __init__(self) -> None:
        self.load = Load()
        self.sent: list[Generate] = []
        self.lives: dict[str, Live] = {}
        self.holds = False  # requests stay until they are aborted
        self.actions: list[tuple[str, dict[str, Any]]] = []

    @property
    def last_beat(self) -> float:
        return time.monotonic()

    def detokenizer(self, *args: Any) -> None:
        return None

    def generate(self, message: Generate, live: Live) -> None:
        encode(message)
        self.sent.append(message)
        if self.holds:
            self.lives[message.rid] = live
        else:
            finish = Finish(kind="length", length=1)
            embedding = [1.0] if message.is_pooling else None
            live.deliver(Delta(token_ids=[5], text="a", finish=finish, embedding=embedding))

    def rids_of(self, name: str, owner: str | None = None) -> list[str]:
        return [
            rid
            for rid, live in self.lives.items()
            if name in (rid, live.name) and owner in (None, live.owner)
        ]

    def set_end_reason(self, reason: str) -> None:
        self.end_reason = reason

    def abort(self, rids: Any, reason: str = "aborted") -> int:
        found = [self.lives.pop(rid) for rid in list(rids) if rid in self.lives]
        for live in found:
            live.deliver(Delta(finish=Finish(kind="abort", message=reason, status=503)))
        return len(found)

    async def control(self, action: str, **args: Any) -> dict[str, Any]:
        self.actions.append((action, args))
        return {
            "flushed": True,
            "num_aborted": 0,
            "nodes": [],
            "num_verifications": 0,
            "num_accepted_tokens": 0,
        }


def make_app(
    context_len: int = 131_072, tool_parser: str = "hermes", **settings: Any
) -> tuple[Any, FakeClient]:
    """The application of a server with these settings and a context as of a large model."""
    config = EngineConfig(model="tiny-dense")
    tokenizer = load_tokenizer(config, resolve_model_path(config.model, config.load_format))
    ready: Any = Ready(
        version=0, context_len=context_len, vocab_size=2**17, num_token_ids=tokenizer.vocab_size,
        max_total_tokens=2 * context_len, max_running_requests=64, max_queued_requests=None,
        eos_token_ids=[0], num_labels=0, vision=None, description={}, prefill_port=None, startup_seconds={},
    )  # fmt: skip
    client: Any = FakeClient()
    state = ServerState(
        ServerSettings(**settings),
        "tiny-dense",
        client,
        ready,
        Prompts(tokenizer, ready, choose_dialect(tokenizer, tool_parser)),
    )
    return create_app(state), client


@asynccontextmanager
async def client_of(app: Any, host: str = "127.0.0.1", **more: Any) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False, client=(host, 1))
    async with httpx.AsyncClient(
        transport=transport, base_url="http://127.0.0.1", timeout=60, **more
    ) as client:
        yield client


class Lag:
    """The longest time for which the event loop ran nothing else, in seconds. It ran itself, or another
    thread kept it from running, as one call that holds the interpreter's lock does.

    Only CPU time counts, and what the loop waits for a core does not: other processes of a busy computer make
    no difference. (`time.thread_time` of the loop alone would miss the calls of other threads.)"""

    def __init__(self) -> None:
        self.longest = 0.0
        self._task: asyncio.Task[None] | None = None

    async def _tick(self) -> None:
        last = _times()
        while True:
            await asyncio.sleep(0)
            now = _times()
            wall, own, everyone, queued = (a - b for a, b in zip(now, last, strict=True))
            stopped = max(wall - own - queued, 0.0)
            self.longest = max(self.longest, own + min(everyone - own, stopped))
            last = _times()

    async def __aenter__(self) -> Lag:
        self._task = asyncio.ensure_future(self._tick())
        await asyncio.sleep(0)
        return self

    async def __aexit__(self, *exception: Any) -> None:
        assert self._task is not None
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task


def _times() -> tuple[float, float, float, float]:
    """Seconds of the clock, of this thread, of all threads, and for which this thread has waited for a core,
    where the system counts it."""
    queued = 0.0
    with suppress(OSError):
        queued = int(Path("/proc/thread-self/schedstat").read_bytes().split()[1]) / 1e9
    return time.perf_counter(), time.thread_time(), time.process_time(), queued
