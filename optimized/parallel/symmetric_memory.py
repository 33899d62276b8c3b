"""Memory of each rank that the other ranks of its computer write: what the one-shot sum works on.

It comes from torch's symmetric memory, which maps the memory of another GPU into this process. A group has
one buffer for each rank from its start to its end, so CUDA graphs may contain its addresses. Multicast is not
used.
"""

from __future__ import annotations

import math
import os
import socket
import uuid
from collections.abc import Sequence
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

    from diptych.optimized.kernels.collectives.one_shot_all_reduce import OneShotAllReduce

KIB = 1024
LIMITS = ((2, 2560 * KIB), (4, 512 * KIB), (8, 256 * KIB))
"""(number of ranks, bytes of a tensor up to which the one-shot sum is used instead of NCCL). For two ranks it
follows from times of up to 2 MB on two H200s (docs/measurements/several-gpus.md); the others are chosen from
published times of other engines."""


_groups = count()  # of this process, made before


# --8<-- [start:choose-sum]
def uses_one_shot(num_bytes: int, num_ranks: int) -> bool:
    """Whether a tensor is summed by the one-shot kernel, not by NCCL. Nothing else may
    decide: ranks that choose differently wait for each other forever."""
    return num_bytes <= one_shot_limit(num_ranks)


# --8<-- [end:choose-sum]


def one_shot_limit(num_ranks: int) -> int:
    """Bytes; 0 for more ranks than the kernel serves."""
    return next((limit for most, limit in LIMITS if num_ranks <= most), 0)


class Place(NamedTuple):
    """Where a rank runs."""

    host: str
    gpu: int


def share_memory(places: Sequence[Place]) -> bool:
    """Whether each of these ranks can write into the memory of the others: all are on one computer, on
    different GPUs that reach each other. All ranks find the same answer."""
    gpus = [place.gpu for place in places]
    if len({place.host for place in places}) > 1 or len(set(gpus)) < len(gpus):
        return False
    return all(torch.cuda.can_device_access_peer(a, b) for a in gpus for b in gpus if a != b)


def connect_one_shot(
    store: Store, rank: int, size: int, nccl: Any, device: torch.device
) -> OneShotAllReduce | None:
    """The one-shot sum of a group, whose ranks meet in `store`; `nccl`: its NCCL process group. All ranks
    call it. None if not all reach each other's memory."""
    from diptych.optimized.kernels.collectives.one_shot_all_reduce import DATA_BYTES, OneShotAllReduce

    assert device.index is not None
    store.set(f"place of {rank}", f"{device.index} {socket.gethostname()}")
    texts = [store.get(f"place of {peer}").decode().split(maxsplit=1) for peer in range(size)]
    if one_shot_limit(size) == 0 or not share_memory([Place(host, int(gpu)) for gpu, host in texts]):
        return None
    num_words = one_shot_limit(size) // DATA_BYTES
    memory = SymmetricMemory(store, rank, size, nccl, device, torch.int64, 2, size, num_words)
    one_shot = OneShotAllReduce(memory.of_ranks, rank)
    one_shot.memory = memory  # kept alive
    return one_shot


class SymmetricMemory:
    """`of_ranks`: a tensor of each rank as this rank addresses it, zeros at first."""

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        nccl: Any,
        device: torch.device,
        dtype: torch.dtype,
        *shape: int,
    ) -> None:
        from torch._C._distributed_c10d import _SymmetricMemory

        if next(_groups) > 0:
            from diptych.shared.parallel.counted_store import CountedStore

            store = self._store = CountedStore(store)  # kept: a group does not keep what Python has made
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        self._group = _named_group(store, rank, size, nccl)
        num = math.prod(shape)
        own = _SymmetricMemory.empty_strided_p2p((num,), (1,), dtype, device)
        own.zero_()
        torch.cuda.synchronize(device)  # before another rank can write
        self._handle = _SymmetricMemory.rendezvous(own, self._group.group_name)
        self.of_ranks = [
            (own if peer == rank else self._handle.get_buffer(peer, (num,), dtype)).view(shape)
            for peer in range(size)
        ]


def _named_group(store: Store, rank: int, size: int, nccl: Any) -> Any:
    """A process group under a name of its own: torch's symmetric memory finds groups by their names."""
    from torch import distributed
    from torch._C._distributed_c10d import _register_process_group

    if rank == 0:
        store.set("name", uuid.uuid4().hex)
    name: Any = f"diptych-{store.get('name').decode()}"
    group = distributed.ProcessGroup(store, rank, size)
    kind = distributed.ProcessGroup.BackendType.NCCL
    group._register_backend(torch.device("cuda"), kind, nccl)
    group._set_default_backend(kind)
    group._set_group_name(name)
    _register_process_group(name, group)
    return group
