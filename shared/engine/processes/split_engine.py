"""Makes the engine of one server of several that divide prefill and decode among them."""

from __future__ import annotations

from typing import Any

from diptych.shared import registry
from diptych.shared.engine.build.assembly import Assembly
from diptych.shared.engine.processes.cluster_secret import cluster_secret
from diptych.shared.engine.processes.disaggregated import transport_of
from diptych.shared.interfaces import Scheduler, Transport
from diptych.shared.parallel.channel import Channel, Listener


def split_scheduler(assembly: Assembly) -> Scheduler:
    """The scheduler of a prefill server or of a decode server, around that of the assembly; of other servers
    that of the assembly. Raises `ValueError` without a secret, or if the port is taken."""
    config, parts = assembly.config, assembly.parts
    if config.disaggregation_mode is None:
        return assembly.scheduler
    secret = cluster_secret(config.cluster_secret_file)
    transport_class: Any = transport_of(config)  # that of a connection, which takes a channel, too
    servers = registry.load_part("split_servers")

    def make(channel: Channel) -> Transport:
        transport: Transport = transport_class(channel, assembly.kv_pool)
        return transport

    scheduler: Scheduler
    if config.disaggregation_mode == "prefill":
        host, port = config.disaggregation_host, config.disaggregation_port
        try:
            listener = Listener(host, secret, port)
        except OSError as error:
            raise ValueError(f"disaggregation: cannot listen on {host}:{port}: {error.strerror}") from None
        scheduler = servers.PrefillServer(assembly.scheduler, parts, assembly.grammars, make, listener)
        return scheduler
    known = config.prefill_servers.split(",") if config.prefill_servers else ()
    scheduler = servers.DecodeServer(
        assembly.scheduler,
        parts,
        assembly.grammars,
        assembly.model_config.vocab_size,
        config.context_len,
        servers.PrefillServers(make, secret, known),
    )
    return scheduler
