"""A server of this project in a thread of the test's process, behind the proxy that plants faults."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import uvicorn

from diptych.shared.config import EngineConfig
from diptych.shared.dialects.parts.choose import dialect_of
from diptych.shared.loading.model_path import load_tokenizer, resolve_model_path
from diptych.shared.server.api.encode_prompts import Prompts
from diptych.shared.server.api.state import ServerSettings, ServerState
from diptych.shared.server.app import create_app
from diptych.shared.server.engine.engine_client import EngineClient
from tests.server_check.faulty_proxy import FaultyProxy

START_TIMEOUT = 120.0


class LocalServer:
    """Serves `config` at `url` until `stop`. Without a fault in `proxy` it is the server as it is."""

    url: str
    proxy: FaultyProxy

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self._error: BaseException | None = None
        self._started = threading.Event()
        self._server: uvicorn.Server | None = None
        self._thread = threading.Thread(target=self._run, name="server", daemon=True)
        # Imports of one package in two threads at one time can fail: the tokenizer comes before the engine.
        self._tokenizer = load_tokenizer(config, resolve_model_path(config.model, config.load_format))
        self._thread.start()
        if not self._started.wait(START_TIMEOUT) or self._error is not None:
            raise RuntimeError(f"the server did not start: {self._error}")

    def stop(self) -> None:
        if self._server is not None:
            self._server.should_exit = True
        self._thread.join(30)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self._error = error
        finally:
            self._started.set()

    async def _serve(self) -> None:
        client = EngineClient(self.config, in_thread=True)
        try:
            ready = await client.start()
            prompts = Prompts(self._tokenizer, ready, dialect_of(self.config, self._tokenizer))
            state = ServerState(ServerSettings(), self.config.model, client, ready, prompts)
            assert self._tokenizer is not None
            self.proxy = FaultyProxy(create_app(state), self._tokenizer)
            self._server = uvicorn.Server(
                uvicorn.Config(self.proxy, port=0, log_level="critical", access_log=False, lifespan="off")
            )
            serving = asyncio.ensure_future(self._server.serve())
            while not self._server.started and not serving.done():
                await asyncio.sleep(0.01)
            port = self._server.servers[0].sockets[0].getsockname()[1]
            self.url = f"http://127.0.0.1:{port}"
            self._started.set()
            await serving
        finally:
            await client.stop()


@contextlib.contextmanager
def local_server(**flags: Any) -> Iterator[LocalServer]:
    """A server of `tiny-dense` on the CPU, gone afterwards. `flags`: of EngineConfig."""
    settings = {"model": "tiny-dense", "device": "cpu", "max_total_tokens": 16384, **flags}
    server = LocalServer(EngineConfig(**settings))
    try:
        yield server
    finally:
        server.stop()
