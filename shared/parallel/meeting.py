"""Where ranks find each other: the ranks of one computer in a file that only this user can read, and over the
loopback interface.

Ranks that a launcher starts on several computers meet in its store, on the interface that gloo and NCCL
choose. Their data are neither encrypted nor authenticated.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import weakref
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables that a launcher sets."""
LOOPBACK = "127.0.0.1"


def is_launched() -> bool:
    """Whether this process is one of several ranks started by a launcher."""
    return all(name in os.environ for name in LAUNCHED) and int(os.environ["WORLD_SIZE"]) > 1


def is_on_one_computer() -> bool:
    """Whether all ranks are on this computer."""
    return not is_launched() or os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]


def num_computers(num_ranks: int) -> int:
    """Computers with as many successive ranks each, as a launcher tells this rank; 1 if it does not."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks)) if is_launched() else num_ranks
    return num_ranks // local if num_ranks % local == 0 else 1


def local_store(num_ranks: int) -> Any:
    """A new store, which the other ranks open by its path. The file is deleted with this object, so keep it
    until all ranks have started."""
    folder = tempfile.mkdtemp(prefix="diptych-")  # of mode 0700
    store = open_store(f"{folder}/store", num_ranks)
    weakref.finalize(store, shutil.rmtree, folder, ignore_errors=True)
    return store


def open_store(path: str, num_ranks: int) -> Any:
    """The store at this path."""
    from torch.distributed import FileStore

    return FileStore(path, num_ranks)


def gloo_group(store: Store, rank: int, size: int, limit: timedelta) -> Any:
    """The gloo process group of the ranks that meet in `store`."""
    from torch.distributed import ProcessGroupGloo

    if not is_on_one_computer():
        return ProcessGroupGloo(store, rank, size, limit)
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = limit
    options._devices = [ProcessGroupGloo.create_device(hostname=LOOPBACK)]
    return ProcessGroupGloo(store, rank, size, options)


def use_loopback() -> None:
    """Before the first group of ranks on one computer that NCCL or torch connects. Data of GPUs go through
    their memory. An interface that the environment names is for ranks on several computers."""
    if is_on_one_computer():
        name = "lo" if sys.platform == "linux" else "lo0"
        os.environ.update(NCCL_SOCKET_IFNAME=name, GLOO_SOCKET_IFNAME=name)
