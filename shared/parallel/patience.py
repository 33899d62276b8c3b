"""Waiting for a rank that is late because it works: it compiles kernels, or reads weights.

A limit of time counts only while the process and those that it has started, such as compilers, use no CPU. A
process on another computer, which cannot be observed, counts as working.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

LONGEST = 1800.0
"""Seconds after which a rank that works is given up too: a rank that waits for the GPU may use a CPU."""
POLL_SECONDS = 0.002
LOOK_SECONDS = 2.0
"""Interval of looking at a process."""
WORKING_SHARE = 0.1
"""Of a CPU: a process that waits for other ranks uses less."""
SAY_SECONDS = 30.0
"""After which the waiting rank says for whom it waits; then after twice the time, and so on."""


class Activity:
    """What a process of this computer does."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._cpu_seconds = 0.0
        self._looked = self._worked = time.monotonic()

    def idle_seconds(self) -> float:
        """Since when the process has not worked. Raises `ProcessLookupError` if it has ended."""
        now = time.monotonic()
        if now - self._looked >= LOOK_SECONDS:
            used = self._used()
            if used - self._cpu_seconds > WORKING_SHARE * (now - self._looked):
                self._worked = now
            self._cpu_seconds, self._looked = used, now
        return now - self._worked

    def _used(self) -> float:
        """CPU seconds of the process and of those that it has started."""
        try:
            process = psutil.Process(self.pid)
            if process.status() == psutil.STATUS_ZOMBIE:
                raise psutil.NoSuchProcess(self.pid)
            used = _seconds(process)
            return used + sum(_seconds(child) for child in process.children(recursive=True))
        except psutil.NoSuchProcess:
            raise ProcessLookupError(f"process {self.pid} has ended") from None


def _seconds(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0  # its parent has it among the times of its children
    return float(times.user + times.system + times.children_user + times.children_system)


def introduce(store: Store, rank: int) -> None:
    """Tell the other ranks which process this is, before the first `meet` in this store."""
    store.set(f"process of {rank}", f"{os.getpid()} {socket.gethostname()}")


def meet(store: Store, name: str, rank: int, size: int, seconds: float) -> None:
    """Returns when all ranks have called it with this name, which no other meeting in this store has. Raises
    `RuntimeError` if a rank has ended, or has not worked for so many seconds."""
    store.set(f"{name} {rank}", "")
    start, said = time.monotonic(), SAY_SECONDS
    late = [peer for peer in range(size) if peer != rank]
    activities: dict[int, Activity | None] = {}
    while late := [peer for peer in late if not store.check([f"{name} {peer}"])]:
        waited = time.monotonic() - start
        if waited < LOOK_SECONDS:
            time.sleep(POLL_SECONDS)
            continue
        time.sleep(25 * POLL_SECONDS)
        for peer in late:
            if peer not in activities:
                activities[peer] = _activity(store, peer)
            _check(peer, activities[peer], waited, seconds)
        if waited > said:
            print(f"rank {rank} waits for rank {late[0]}, which works ({waited:.0f} s)", file=sys.stderr)
            said *= 2


def _activity(store: Store, peer: int) -> Activity | None:
    if not store.check([f"process of {peer}"]):
        return None
    pid, host = store.get(f"process of {peer}").decode().split(maxsplit=1)
    return Activity(int(pid)) if host == socket.gethostname() else None


def _check(peer: int, activity: Activity | None, waited: float, seconds: float) -> None:
    try:
        idle = activity.idle_seconds() if activity is not None else 0.0
    except ProcessLookupError as error:
        raise RuntimeError(f"rank {peer} is missing: {error}") from None
    if idle > seconds:
        raise RuntimeError(f"rank {peer} is missing: its process has done nothing for {seconds:g} s")
    if waited > LONGEST:
        raise RuntimeError(f"rank {peer} is missing for {LONGEST:g} s")
