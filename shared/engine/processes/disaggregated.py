"""Starts prefill and decode as two engines: decode in this process, prefill in another one."""

from __future__ import annotations

import socket
import time
import weakref
from dataclasses import replace
from typing import Any

from diptych.shared import registry
from diptych.shared.config import EngineConfig
from diptych.shared.config.engine import for_prompts
from diptych.shared.engine.build.assembly import Assembly, assemble
from diptych.shared.engine.build.settings import default_device, default_panel
from diptych.shared.engine.processes.child import Child, Inbox, reported_end
from diptych.shared.engine.processes.devices import device_at
from diptych.shared.interfaces import Transport
from diptych.shared.loading.sent_pool import sent_pool
from diptych.shared.parallel.channel import Channel
from diptych.shared.scheduling.state_checkpoints import StateCheckpoints

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
    prefill_config = for_prompts(prefill_config)
    transport_class = transport_of(config)
    connection, theirs = socket.socketpair()
    child = Child.spawn("prefill engine", _prefill, prefill_config, theirs)
    theirs.close()
    try:
        assembly = assemble(config)
        child.next_message(START_SECONDS)
        transport = transport_class(connection, sent_pool_of(assembly))
    except BaseException:
        connection.close()
        child.end()
        raise
    disaggregation = registry.load_part("disaggregation")
    scheduler = disaggregation.DecodeSide(
        assembly.scheduler,
        assembly.parts,
        assembly.grammars,
        assembly.model_config.vocab_size,
        assembly.config,
        disaggregation.OnePrefillEngine(transport),
    )
    scheduler.child = child  # it ends with the scheduler
    weakref.finalize(scheduler, transport.close)  # a thread of it that outlives Python aborts the process
    return replace(assembly, scheduler=scheduler)


def sent_pool_of(assembly: Assembly) -> Any:
    """The pool that a transport of this engine reads and writes."""
    found = [each.pool for each in assembly.parts.features if isinstance(each, StateCheckpoints)]
    states = found[0] if found else None
    return sent_pool(assembly.config, assembly.kv_pool, assembly.parts.drafter, assembly.dtype, states)


def transport_of(config: EngineConfig) -> type[Transport]:
    """The transport that the configuration chooses."""
    panel = config.panel or default_panel(config.device or default_device())
    chosen: type[Transport] = registry.load("transport", registry.select(panel, config.use)["transport"])
    return chosen


def _prefill(config: EngineConfig, connection: socket.socket, pipe: Channel) -> None:
    """The main function of the prefill engine's process, which ends with the decode engine."""
    inbox = Inbox(pipe, list)
    with reported_end(inbox):
        assembly = assemble(config)
        inbox.start()
        transport = transport_of(config)(connection, sent_pool_of(assembly))
        module = registry.load_part("disaggregation")
        side = module.PrefillSide(assembly.scheduler, assembly.parts, assembly.grammars, transport)
        while not side.is_done:
            if not side.turn():
                time.sleep(module.POLL_SECONDS)
