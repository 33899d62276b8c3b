"""A Ray Serve application: replicas of this server on one or several machines, scaled and routed by Ray.

    serve run diptych.shared.server.router.ray:app model=Qwen/Qwen3-8B num_gpus=1 api_key_file=/etc/keys

Each replica runs a whole server, with the API of `diptych serve`, in a process of its own. Ray passes
requests to it, restarts a replica whose server has ended, and adds replicas under load (num_replicas=auto).
With tp=N a replica's server has N ranks, which end with it.
Needs the extra `ray`.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import socket
import sys
import threading
from dataclasses import fields
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from ray import serve
from starlette.requests import Request
from starlette.responses import Response

from diptych.shared.config import EngineConfig
from diptych.shared.server.api.state import ServerSettings
from diptych.shared.server.engine.engine_process import die_with_the_other_end
from diptych.shared.server.http.access import Keys, read_keys
from diptych.shared.server.router.router import Router

SERVER_FLAGS = {"served_model_name", "api_key_file", "allow_anonymous"}
START_SECONDS = 1800.0
"""Until a replica must answer: a large model on a cold machine compiles kernels and reads its weights."""


@serve.deployment(max_ongoing_requests=1024, health_check_period_s=5)
class Replica:
    """One server, and a proxy to it. `flags`: fields of EngineConfig, and `served_model_name`."""

    def __init__(self, flags: dict[str, Any]) -> None:
        context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
        self.pipe, theirs = socket.socketpair()
        self.process = context.Process(target=_serve, args=(flags, theirs), name="diptych-server")
        self.process.start()
        theirs.close()
        self.pipe.settimeout(START_SECONDS)
        try:
            port = int(self.pipe.recv(16))
        except TimeoutError:
            raise TimeoutError(f"the server did not start within {START_SECONDS:.0f} s") from None
        except (ValueError, OSError):
            self.process.join()
            raise RuntimeError(f"the server ended with exit code {self.process.exitcode}") from None
        self.router = Router([f"http://127.0.0.1:{port}"])

    async def __call__(self, request: Request) -> Response:
        """Pass the request on; a stream as it comes."""
        return await self.router.forward(request)

    def check_health(self) -> None:
        """Ray calls this; after some errors it restarts the replica."""
        if not self.process.is_alive():
            raise RuntimeError(f"the server ended with exit code {self.process.exitcode}")

    def __del__(self) -> None:
        if self.process.is_alive():
            self.process.terminate()  # drains
            self.process.join(30)


def app(args: dict[str, Any]) -> serve.Application:
    """What `serve run` builds.

    args: fields of EngineConfig, served_model_name, num_replicas (a number, or "auto"), num_gpus and num_cpus
    of each replica, and api_key_file, a file of keys on their machines, or allow_anonymous=true: Ray's own
    port asks for no key. Raises `ValueError` for another name or a bad value."""
    flags = dict(args)
    replicas = flags.pop("num_replicas", 1)
    resources = {name: float(flags.pop(name)) for name in ("num_gpus", "num_cpus") if name in flags}
    _config_of(flags)  # raises here, before anything is started
    deployment = Replica.options(  # type: ignore[attr-defined]
        num_replicas=replicas if replicas == "auto" else int(replicas), ray_actor_options=resources
    )
    return deployment.bind(flags)


def _config_of(flags: dict[str, Any]) -> EngineConfig:
    """Make the configuration from values or, as on a command line, their texts."""
    known = {field.name for field in fields(EngineConfig)} | SERVER_FLAGS
    unknown = sorted(flags.keys() - known)
    if unknown:
        raise ValueError(f"unknown arguments {unknown}; known are {sorted(known)}")
    if not flags.get("api_key_file") and str(flags.get("allow_anonymous")).lower() != "true":
        raise ValueError("give api_key_file=FILE, or allow_anonymous=true to serve without a key")
    values = {name: value for name, value in flags.items() if name not in SERVER_FLAGS}
    return TypeAdapter(EngineConfig).validate_python(values)


def _serve(flags: dict[str, Any], pipe: socket.socket) -> None:
    """The server of a replica, in a process of its own, which sends its port."""
    from diptych.shared.engine.build.settings import default_device
    from diptych.shared.loading.model_path import load_tokenizer, resolve_model_path
    from diptych.shared.server.serve import run_server

    threading.Thread(target=die_with_the_other_end, args=(pipe,), daemon=True).start()
    config = _config_of(flags)
    file = flags.get("api_key_file")
    keys = Keys(read_keys(Path(file))) if file else Keys()
    folder = resolve_model_path(config.model, config.load_format)
    code = asyncio.run(
        run_server(
            config,
            ServerSettings(port=0, served_model_name=flags.get("served_model_name"), keys=keys),
            lambda: load_tokenizer(config, folder),
            in_thread=not (config.device or default_device()).startswith("cuda"),
            announce=lambda state, port: pipe.sendall(b"%d" % port),
        )
    )
    sys.exit(code)
