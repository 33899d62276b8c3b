"""Ranks started by a launcher: torchrun, or one task per rank with the same environment variables.

    torchrun --nproc-per-node 2 --no-python diptych serve --tp 2

RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT define the rendezvous. Every process has the same command. Rank
0 runs it. The others connect to rank 0, get its configuration, and repeat its calls until it ends.
"""

from __future__ import annotations

import os
import secrets
from datetime import timedelta
from multiprocessing.connection import Client, Listener
from typing import TYPE_CHECKING, NoReturn

from diptych.shared.config import EngineConfig
from diptych.shared.engine.build.assembly import Assembly
from diptych.shared.engine.build.settings import default_device
from diptych.shared.engine.processes.child import Child
from diptych.shared.engine.processes.devices import config_of_rank
from diptych.shared.engine.processes.ranks import TIME_LIMIT, assemble_lead, follow

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def is_launched() -> bool:
    """Whether this process is one of several ranks started by a launcher."""
    return all(name in os.environ for name in VARIABLES) and int(os.environ["WORLD_SIZE"]) > 1


def follow_if_launched() -> None:
    """Follow rank 0. Returns only on rank 0, or without a launcher."""
    if is_launched() and int(os.environ["RANK"]) > 0:
        _follow_rank_0()


def assemble_launched(config: EngineConfig) -> Assembly:
    """The engine, on rank 0. Raises `ValueError` unless the launcher has started `config.num_ranks` ranks."""
    follow_if_launched()
    world_size = int(os.environ["WORLD_SIZE"])
    if world_size != config.num_ranks:
        raise ValueError(
            f"the launcher has started {world_size} ranks (WORLD_SIZE); tp * pp is {config.num_ranks}"
        )
    own_config = _on_own_device(config)
    config = config.updated(device=config.device or default_device())  # the same type on all ranks
    store = _meet()
    key = secrets.token_bytes(32)
    with Listener((os.environ["MASTER_ADDR"], 0), authkey=key) as listener:
        store.set("address", f"{listener.address[0]} {listener.address[1]} {key.hex()}")
        followers = [_accept(listener, store, rank, config) for rank in range(1, config.num_ranks)]
    return assemble_lead(own_config, store, followers, TIME_LIMIT)


def _accept(listener: Listener, store: Store, rank: int, config: EngineConfig) -> Child:
    """Accept the connection of a rank; ranks connect one after the other."""
    store.set(f"turn of {rank}", "")
    store.wait([f"{rank} connects"], timedelta(seconds=TIME_LIMIT))
    pipe = listener.accept()
    pipe.send(config)
    return Child(f"rank {rank}", pipe)  # over TCP, with the same methods


def _follow_rank_0() -> NoReturn:
    store, rank = _meet(), int(os.environ["RANK"])
    store.wait([f"turn of {rank}"], timedelta(seconds=TIME_LIMIT))
    host, port, key = store.get("address").decode().split()
    store.set(f"{rank} connects", "")
    pipe = Client((host, int(port)), authkey=bytes.fromhex(key))
    follow(_on_own_device(pipe.recv()), rank, lambda: store, TIME_LIMIT, pipe)
    raise AssertionError("follow ends the process")


def _on_own_device(config: EngineConfig) -> EngineConfig:
    """The config of this rank. LOCAL_RANK counts the ranks of one computer; without it all are on one."""
    local_rank = int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
    return config_of_rank(config, local_rank, local_rank + 1)


def _meet() -> Store:
    """The store that all ranks share."""
    from torch.distributed import PrefixStore, rendezvous

    store, _, _ = next(iter(rendezvous("env://", timeout=timedelta(seconds=TIME_LIMIT))))
    return PrefixStore("diptych", store)
