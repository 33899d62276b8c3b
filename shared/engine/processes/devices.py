"""Which device each rank and each replica has: GPUs in order, from the configured one on.

Replica r of N ranks has the GPUs r * N to r * N + N - 1, one for each rank. The device of a configuration
with several ranks is that of its first rank.
"""

from __future__ import annotations

import torch

from diptych.shared.config import EngineConfig
from diptych.shared.engine.build.settings import default_device


def config_of_rank(config: EngineConfig, local_rank: int, num_local: int) -> EngineConfig:
    """The config of one of the `num_local` ranks on this computer. Raises `ValueError` if it has fewer
    GPUs."""
    what = f"tp={config.tp}, pp={config.pp}: {num_local} ranks"
    device = device_at(config.device or default_device(), local_rank, num_local, what)
    return config.updated(device=device)


def config_of_replica(config: EngineConfig, replica: int) -> EngineConfig:
    """The config of one of the config.dp replicas. Raises `ValueError` if this computer has too few GPUs."""
    num_ranks = config.num_ranks
    what = f"dp={config.dp} replicas of {num_ranks} ranks"
    device = config.device or default_device()
    device = device_at(device, replica * num_ranks, config.dp * num_ranks, what)
    dir_tokens = max(config.hicache_dir_tokens // config.dp, 1)  # the replicas share a folder
    return config.updated(dp=1, device=device, hicache_dir_tokens=dir_tokens)


def config_in_step(config: EngineConfig, replica: int) -> EngineConfig:
    """The config of one of the config.dp replicas that step together. Raises `ValueError` likewise."""
    of_ranks = f" of {config.tp} ranks" if config.tp > 1 else ""
    what = f"dp={config.dp} replicas{of_ranks} that share experts"
    num, device = config.dp * config.tp, config.device or default_device()
    return config.updated(device=device_at(device, replica * config.tp, num, what))


def device_at(device: str, place: int, num: int, what: str) -> str:
    """The device at `place` of `num` devices, of which `device` is the first: cuda:2 at place 1 is cuda:3.
    All places have the same CPU. Raises `ValueError` if this computer has fewer GPUs; `what` needs them."""
    if not device.startswith("cuda"):
        return device
    first, num_gpus = int(device.partition(":")[2] or 0), torch.cuda.device_count()
    if first + num > num_gpus:
        gpus = f"{num} GPUs" + (f" from cuda:{first} on" if first else "")
        raise ValueError(f"{what} on device={device} need {gpus}; this computer has {num_gpus}")
    return f"cuda:{first + place}"
