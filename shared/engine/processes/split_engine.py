"""Makes the engine of one server of several that divide prefill and decode among them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from diptych.shared import registry
from diptych.shared.config import EngineConfig
from diptych.shared.engine.build.assembly import Assembly
from diptych.shared.engine.processes.cluster_secret import cluster_secret
from diptych.shared.engine.processes.disaggregated import sent_pool_of, transport_of
from diptych.shared.interfaces import Scheduler
from diptych.shared.parallel.channel import Listener


def split_scheduler(assembly: Assembly) -> Scheduler:
    """The scheduler of a prefill server or of a decode server, around that of the assembly; of other servers
    the same. Raises `ValueError` without a secret, or if the port is taken."""
    if assembly.config.disaggregation_mode is None:
        return assembly.scheduler
    if assembly.config.tp == 1:
        return split_side(assembly)
    lead: Any = assembly.scheduler
    lead.surround(split_side(replace(assembly, scheduler=lead.scheduler)))
    scheduler: Scheduler = registry.load_part("split_ranks").SplitRanks(lead)
    return scheduler


def split_side(assembly: Assembly) -> Scheduler:
    """The side of one rank, around its scheduler. Only rank 0 has connections."""
    config, tp = assembly.config, assembly.tp
    servers, ranks = registry.load_part("split_servers"), registry.load_part("split_ranks")
    secret = cluster_secret(config.cluster_secret_file)
    heads, peers = None, None
    pool = sent_pool_of(assembly)
    make: Any = partial(_connected, transport_of(config), pool)
    if tp.size > 1:
        whole_pages = registry.load_part("whole_pages")
        heads = whole_pages.HeadParts(pool, tp, num_head_parts(assembly))
        make = partial(_connected, whole_pages.WholeTransport, heads)
    around: Scheduler
    if config.disaggregation_mode == "prefill":
        if tp.rank == 0:
            peers = servers.DecodeServers(make, _listener(config, secret))
        if heads is not None:
            peers = ranks.RankDecodeServers(peers, heads)
        around = servers.PrefillServer(assembly.scheduler, assembly.parts, assembly.grammars, peers)
        return around
    known = config.prefill_servers.split(",") if config.prefill_servers else ()
    if tp.rank == 0:
        peers = servers.PrefillServers(make, secret, known)
    if heads is not None:
        peers = ranks.RankPrefillServers(peers, heads, secret)
    around = servers.DecodeServer(
        assembly.scheduler, assembly.parts, assembly.grammars, assembly.model_config.vocab_size, config, peers
    )
    return around


def num_head_parts(assembly: Assembly) -> int:
    """Parts of a token's KV that differ among the ranks. Rows of latent attention are whole on each."""
    model_config = assembly.model_config
    return 1 if model_config.mla is not None else min(assembly.tp.size, model_config.num_kv_heads)


def _connected(transport: Any, pages: Any, channel: Any) -> Any:
    return transport(channel, pages)


def _listener(config: EngineConfig, secret: bytes) -> Listener:
    host, port = config.disaggregation_host, config.disaggregation_port
    try:
        return Listener(host, secret, port)
    except OSError as error:
        raise ValueError(f"disaggregation: cannot listen on {host}:{port}: {error.strerror}") from None
