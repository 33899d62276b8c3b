"""Servers of tests in forked processes: what a server imports is imported once for a worker of pytest.

The imports are most of what a start costs. `RunningServer(own_interpreter=True)` starts the interpreter anew.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import DupFd
from typing import Any

PRELOADED = "tests.server.preloaded"


class ForkedServer:
    """`diptych ARGUMENTS`, with what tests use of `subprocess.Popen`. `stdout` has its stderr as well."""

    def __init__(self, arguments: list[str], folder: str, environment: dict[str, str]) -> None:
        forkserver = multiprocessing.get_context("forkserver")
        forkserver.set_forkserver_preload([PRELOADED])
        read, write = os.pipe()
        self.stdout = open(read, encoding="utf-8", errors="replace")  # noqa: SIM115
        # multiprocessing hands over a file while a process starts, and not before.
        self._process: BaseProcess = forkserver.Process(
            target=_run, args=(_Handed(write), arguments, folder, environment)
        )
        self._process.start()
        os.close(write)

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if (status := self.poll()) is None:
            raise subprocess.TimeoutExpired("diptych", timeout or 0.0)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()


class _Handed:
    """An open file of this process for the process that starts."""

    def __init__(self, file: int) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (DupFd(self.file),)


def _received(handle: Any) -> int:
    return int(handle.detach())


def _run(output: int, arguments: list[str], folder: str, environment: dict[str, str]) -> None:
    for standard in (1, 2):
        os.dup2(output, standard)
    os.close(output)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["diptych", *arguments]
    from diptych.shared.tools.cli import main

    main()
