"""Starts prefill and decode as two engines: decode in this process, prefill in another one."""

from __future__ import annotations

import os
import socket
import tempfile
import time
from dataclasses import replace
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from shared import registry
from shared.config import EngineConfig
from shared.engine.assembly import Assembly, assemble, default_device, default_panel
from shared.engine.child import Child, Inbox, reported_end
from shared.engine.devices import device_at
from shared.interfaces import Transport

START_SECONDS = 1800.0
"""Time limit in seconds for the start of the prefill engine, which reads the weights."""


def assemble_disaggregated(config: EngineConfig) -> Assembly:
    """Start a prefill engine and return the decode engine of `config`. Raises `ValueError` as `assemble`
    does, and `EngineProcessEnded` if the prefill engine cannot start."""
    device = config.device or default_device()
    if device == "mps":
        raise ValueError("disaggregation=True runs on device=cpu or cuda; the device is mps")
    config, prefill_config = (
        config.updated(device=device_at(device, place, 2, "disaggregation=True")) for place in (0, 1)
    )
    transport_class = transport_of(config)
    if device != "cpu" and hasattr(transport_class, "pool_class"):
        raise ValueError(
            f"transport={config.use['transport']} needs a pool in the memory of the CPU, and the device is "
            f"{device}; use transport=reference"
        )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(START_SECONDS)
        child = Child.spawn("prefill engine", _prefill, prefill_config, listener.getsockname()[1])
        assembly = None
        try:
            assembly = assemble_decode(config, transport_class)
            child.next_message(START_SECONDS)
            connection, _ = listener.accept()
            connection.settimeout(None)
            transport = transport_class(connection, assembly.kv_pool)
        except BaseException:
            child.end()
            path: Path | None = getattr(assembly and assembly.kv_pool, "path", None)
            if path is not None:  # the transports would have removed it
                path.unlink(missing_ok=True)
            raise
    scheduler = decode_side(assembly, transport)
    scheduler.child = child  # it ends with the scheduler
    return replace(assembly, scheduler=scheduler)


def transport_of(config: EngineConfig) -> type[Transport]:
    """The transport that the configuration chooses."""
    panel = config.panel or default_panel(config.device or default_device())
    chosen: type[Transport] = registry.load("transport", registry.select(panel, config.use)["transport"])
    return chosen


def assemble_decode(config: EngineConfig, transport_class: type[Transport]) -> Assembly:
    """Assemble the decode engine, with its pool in a file if the transport needs that."""
    pool_class: Any = getattr(transport_class, "pool_class", None)
    if pool_class is None:
        return assemble(config)
    panel = config.panel or default_panel(config.device or default_device())
    pools = registry.load("memory_pool", registry.select(panel, config.use)["memory_pool"])
    shared = SimpleNamespace(**{**vars(pools), "TokenToKVPool": pool_class})
    assembly = assemble(config, replace={"memory_pool": shared})
    folder = "/dev/shm" if os.path.isdir("/dev/shm") else None
    handle, path = tempfile.mkstemp(prefix="diptych-", dir=folder)
    os.close(handle)
    pool: Any = assembly.kv_pool
    pool.share(Path(path))
    return assembly


def decode_side(assembly: Assembly, transport: Transport) -> Any:
    """The scheduler of the decode engine."""
    context_len = assembly.config.context_len
    return import_module("reference.disaggregation").DecodeSide(
        assembly.scheduler, assembly.parts, assembly.model_config.vocab_size, context_len, transport
    )


def _prefill(config: EngineConfig, port: int, pipe: Connection) -> None:
    """The main function of the prefill engine's process, which ends with the decode engine."""
    inbox = Inbox(pipe, list)
    with reported_end(inbox):
        assembly = assemble(config)
        inbox.start("ready")
        connection = socket.create_connection(("127.0.0.1", port))
        transport = transport_of(config)(connection, assembly.kv_pool)
        module = import_module("reference.disaggregation")
        side = module.PrefillSide(assembly.scheduler, assembly.parts, transport)
        while not side.is_done:
            if not side.turn():
                time.sleep(module.POLL_SECONDS)
