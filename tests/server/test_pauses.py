"""Full collections of garbage: a server sets aside what its start has made, or each one would stop it for
longer than any body may."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from diptych.shared.config import EngineConfig
from diptych.shared.engine.processes.child import Inbox
from diptych.shared.engine.python_runtime import gc_freeze_of_process
from diptych.shared.parallel import channel
from diptych.shared.server import serve
from diptych.shared.server.api.state import ServerSettings
from diptych.shared.server.engine.messages import Ready
from diptych.shared.tools.commands import route
from tests.server.in_process import FakeClient


class Client(FakeClient):
    """An engine that is ready at once."""

    def __init__(self, config: EngineConfig, in_thread: bool) -> None:
        super().__init__()
        self.died = asyncio.Event()

    async def start(self) -> Ready:
        return Ready(
            version=0, context_len=64, vocab_size=8, num_token_ids=8, max_total_tokens=64,
            max_running_requests=1, max_queued_requests=None, eos_token_ids=[0], num_labels=0, vision=None,
            description={}, prefill_port=None, startup_seconds={},
        )  # fmt: skip

    async def stop(self) -> None:
        pass


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happens around the blocks in which old objects are aside."""
    found: list[str] = []

    @contextlib.contextmanager
    def recorded() -> Iterator[None]:
        found.append("aside")
        yield
        found.append("back")

    for place in ("server.serve", "engine.python_runtime"):
        monkeypatch.setattr(f"diptych.shared.{place}.gc_freeze", recorded)
    return found


def test_an_api_serves_with_old_objects_aside(monkeypatch: pytest.MonkeyPatch, blocks: list[str]) -> None:
    monkeypatch.setattr(serve, "EngineClient", Client)

    def announce(*_: Any) -> None:
        blocks.append("serves")
        signal.raise_signal(signal.SIGTERM)

    run = serve.run_server(
        EngineConfig(model="tiny-dense"), ServerSettings(port=0), lambda: None, in_thread=False,
        announce=announce,
    )  # fmt: skip
    assert asyncio.run(run) == 0
    assert blocks == ["aside", "serves", "back"]


def test_a_router_serves_with_old_objects_aside(monkeypatch: pytest.MonkeyPatch, blocks: list[str]) -> None:
    monkeypatch.setattr("uvicorn.Server.run", lambda *_, **__: blocks.append("serves"))
    route.route(["http://127.0.0.1:1"], port=0)
    assert blocks == ["aside", "serves", "back"]


def test_an_engine_runs_with_old_objects_aside(blocks: list[str]) -> None:
    """The API's own, where the engine is a thread of it."""

    def run() -> None:
        with gc_freeze_of_process():
            blocks.append("runs")

    run()
    assert blocks == ["aside", "runs", "back"]
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert blocks[3:] == ["runs"]


def test_a_child_sets_old_objects_aside_before_it_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    frozen: list[str] = []
    monkeypatch.setattr("gc.freeze", lambda: frozen.append("aside"))
    ours, theirs = channel.pair()
    Inbox(theirs, list, leave=lambda code: None).start()
    assert frozen == ["aside"]
    ours.close()
