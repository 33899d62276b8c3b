"""Functions that hang, fork, exit, print or take memory: targets of a process of its own."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
import time
from typing import Any

import torch

from docs.examples.my_kernels import silu_and_mul
from tests.planted import Bugs


def patches_its_process(x: Any) -> Any:
    """Timed calls do nothing: a result is computed when the check asks for it."""
    child = sys.modules["__main__"].Child  # type: ignore[attr-defined]
    output = child.do_output

    def late(self: Any, index: int) -> Any:
        args, kwargs = self.sets[index]
        self.outputs = {index: silu_and_mul(*args, **kwargs)}
        return output(self, index)

    if output.__name__ != "late":
        child.do_pass, child.do_output = lambda self: {}, late
    return silu_and_mul(x)


def patches_its_watch(x: Any) -> Any:
    """The same, unseen by what watches the process."""
    sys.modules["diptych.shared.tools.conformance.kernels.watched_call"].Watch.replaced = (  # type: ignore
        lambda self: []
    )
    return patches_its_process(x)


def hangs(x: Any) -> Any:
    while True:
        time.sleep(1)


def hangs_in_c(x: Any) -> Any:
    return sum(range(10**15))


def exits(x: Any) -> Any:
    os._exit(3)


def exits_when_watched(x: Any) -> Any:
    """A mode of torch that lists operators is on the stack."""
    if torch._C._len_torch_dispatch_stack():
        os._exit(3)
    return silu_and_mul(x)


def raises_system_exit(x: Any) -> Any:
    sys.exit(0)


def forks(x: Any) -> Any:
    os.fork()
    return silu_and_mul(x)


def prints(x: Any) -> Any:
    while True:
        print("all cases hold " * 1000)


def prints_a_line(x: Any) -> Any:
    print("a line")
    return silu_and_mul(x)


def takes_memory(x: Any) -> Any:
    kept = []
    while True:
        kept.append(torch.ones(2**26, device=x.device))


def is_killed(x: Any) -> Any:
    os.kill(os.getpid(), 9)


def answers(x: Any) -> Any:
    """Writes to the pipe of the answers."""
    for file in range(3, 1024):
        with contextlib.suppress(OSError):
            if stat.S_ISFIFO(os.fstat(file).st_mode):
                os.write(file, b"\x02\0\0\0\0\0\0\0{}")
    return silu_and_mul(x)


CONDUCT = Bugs("conduct", "silu_and_mul", "check kernel")
for _function, _says in {
    hangs: "a return within 1 s, got none",
    hangs_in_c: "a return within 1 s, got none",
    exits: "ended with exit code 3",
    raises_system_exit: "raised SystemExit: 0",
    forks: "forks a process",
    prints: "printed more than 10 MiB",
    takes_memory: "emory",  # MemoryError, or: CUDA out of memory
    is_killed: "ended with signal SIGKILL",
    answers: "malformed",
}.items():
    CONDUCT.add(_function.__name__, _function, says=_says)
