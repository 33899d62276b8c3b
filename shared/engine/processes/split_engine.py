"""Makes the engine of one server of several that divide prefill and decode among them."""

from __future__ import annotations

from typing import Any

from diptych.shared import registry
from diptych.shared.config import EngineConfig
from diptych.shared.engine.processes.cluster_secret import cluster_secret
from diptych.shared.engine.processes.disaggregated import transport_of
from diptych.shared.grammar.compiler import GrammarCompiler
from diptych.shared.interfaces import Scheduler, SchedulerParts, Transport
from diptych.shared.parallel.channel import Channel, Listener


def split_scheduler(
    config: EngineConfig,
    scheduler: Scheduler,
    parts: SchedulerParts,
    grammars: GrammarCompiler,
    vocab_size: int,
) -> Scheduler:
    """The scheduler of a prefill server or of a decode server, around this one; of other servers this one.
    Raises `ValueError` without a secret, or if the port is taken."""
    if config.disaggregation_mode is None:
        return scheduler
    secret = cluster_secret(config.cluster_secret_file)
    transport_class: Any = transport_of(config)  # that of a connection, which takes a channel, too
    servers = registry.load_part("split_servers")

    def make(channel: Channel) -> Transport:
        transport: Transport = transport_class(channel, parts.kv_pool)
        return transport

    around: Scheduler
    if config.disaggregation_mode == "prefill":
        host, port = config.disaggregation_host, config.disaggregation_port
        try:
            listener = Listener(host, secret, port)
        except OSError as error:
            raise ValueError(f"disaggregation: cannot listen on {host}:{port}: {error.strerror}") from None
        around = servers.PrefillServer(scheduler, parts, grammars, make, listener)
        return around
    known = config.prefill_servers.split(",") if config.prefill_servers else ()
    prefill_servers = servers.PrefillServers(make, secret, known)
    around = servers.DecodeServer(scheduler, parts, grammars, vocab_size, config, prefill_servers)
    return around
