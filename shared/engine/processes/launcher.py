"""Ranks started by a launcher: torchrun, or one task per rank with the same environment variables.

    export DIPTYCH_CLUSTER_SECRET=$(openssl rand -hex 32)
    torchrun --nproc-per-node 2 --no-python diptych serve --tp 2

RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT define the rendezvous. Every process has the same command. Rank
0 runs it. The others connect to rank 0, get its configuration, and repeat its calls until it ends. Both ends
prove the secret, which the store of the launcher never has: any process on its network can write there.
"""

from __future__ import annotations

import os
import queue
import time
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from diptych.shared.config import EngineConfig
from diptych.shared.engine.build.assembly import Assembly
from diptych.shared.engine.build.settings import default_device
from diptych.shared.engine.processes.child import Child, EngineProcessEnded
from diptych.shared.engine.processes.cluster_secret import cluster_secret
from diptych.shared.engine.processes.devices import config_of_rank
from diptych.shared.engine.processes.ranks import assemble_lead, follow
from diptych.shared.parallel.channel import Listener, connect, decoder
from diptych.shared.parallel.meeting import LOOPBACK, is_launched, is_on_one_computer, local_store, open_store

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store


class Hello(msgspec.Struct):
    """The first message of a rank, and of rank 0 to it: `flags` of the engine, and where ranks of one
    computer meet."""

    rank: int
    flags: dict[str, Any] = {}
    path: str | None = None


_decode = decoder(Hello)


def follow_if_launched(config: EngineConfig) -> None:
    """Follow rank 0. Returns only on rank 0, or without a launcher."""
    if is_launched() and int(os.environ["RANK"]) > 0:
        _follow_rank_0(config)


def assemble_launched(config: EngineConfig) -> Assembly:
    """The engine, on rank 0. Raises `ValueError` unless the launcher has started `config.num_ranks` ranks."""
    follow_if_launched(config)
    world_size = int(os.environ["WORLD_SIZE"])
    if world_size != config.num_ranks:
        raise ValueError(
            f"the launcher has started {world_size} ranks (WORLD_SIZE); tp * pp is {config.num_ranks}"
        )
    secret = cluster_secret(config.cluster_secret_file)
    own_config = _on_own_device(config)
    config = config.updated(device=config.device or default_device())  # the same type on all ranks
    store = _meet(config)
    host = LOOPBACK if is_on_one_computer() else os.environ["MASTER_ADDR"]
    listener = Listener(host, secret)
    store.set("address", f"{host} {listener.port}")
    path = None
    if is_on_one_computer():
        store = local_store(config.num_ranks)
        path = store.path
    try:
        followers = _accept_all(listener, config, path)
    finally:
        listener.close()
    return assemble_lead(own_config, store, followers, config.dist_timeout)


def _accept_all(listener: Listener, config: EngineConfig, path: str | None) -> list[Child]:
    """The other ranks, in their order. Raises `EngineProcessEnded` if one does not come."""
    end, found = time.monotonic() + config.dist_timeout, dict[int, Child]()
    while len(found) < config.num_ranks - 1:
        try:
            pipe = listener.accept(max(end - time.monotonic(), 0.0))
        except queue.Empty:
            missing = [rank for rank in range(1, config.num_ranks) if rank not in found]
            raise EngineProcessEnded(f"ranks {missing} do not connect with the cluster's secret") from None
        rank = _decode(pipe.receive()).rank
        if rank in found or not 0 < rank < config.num_ranks:
            raise ValueError(f"two processes, or a wrong one, connect as rank {rank}")
        pipe.send(msgspec.msgpack.encode(Hello(0, asdict(config), path)))
        found[rank] = Child(f"rank {rank}", pipe)
    return [found[rank] for rank in sorted(found)]


def _follow_rank_0(config: EngineConfig) -> NoReturn:
    secret, store, rank = cluster_secret(config.cluster_secret_file), _meet(config), int(os.environ["RANK"])
    store.wait(["address"], timedelta(seconds=config.dist_timeout))
    host, port = store.get("address").decode().split()
    pipe = connect(host, int(port), secret)
    pipe.send(msgspec.msgpack.encode(Hello(rank)))
    hello = _decode(pipe.receive())
    config = EngineConfig(**hello.flags)
    if hello.path is not None:
        store = open_store(hello.path, config.num_ranks)
    follow(_on_own_device(config), rank, lambda: store, config.dist_timeout, pipe)
    raise AssertionError("follow ends the process")


def _on_own_device(config: EngineConfig) -> EngineConfig:
    """The config of this rank. LOCAL_RANK counts the ranks of one computer; without it all are on one."""
    local_rank = int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
    return config_of_rank(config, local_rank, local_rank + 1)


def _meet(config: EngineConfig) -> Store:
    """The store that all ranks share."""
    from torch.distributed import PrefixStore, rendezvous

    store, _, _ = next(iter(rendezvous("env://", timeout=timedelta(seconds=config.dist_timeout))))
    return PrefixStore("diptych", store)
