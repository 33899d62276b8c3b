"""Processes of tests that are forked from one that has imported what engines and servers import.

The imports are most of what a start costs. They happen once for a worker of pytest.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import subprocess
import sys
from importlib import import_module
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerProcess
from multiprocessing.reduction import DupFd
from types import SimpleNamespace
from typing import Any

PRELOADED = "tests.preloaded"


class Forked(ForkServerProcess):
    """With the environment of the process that starts it. `files`: number there -> number here."""

    files = {1: 1, 2: 2}  # noqa: RUF012

    def start(self) -> None:
        multiprocessing.get_context("forkserver").set_forkserver_preload([PRELOADED])
        for standard in (sys.stdout, sys.stderr):
            with contextlib.suppress(ValueError, OSError):
                standard.flush()
        self._environment = dict(os.environ) | self.__dict__.get("_environment", {})
        self._handed = {there: _Handed(here) for there, here in self.files.items()}
        super().start()

    def run(self) -> None:
        handed: dict[int, Any] = self._handed
        for there, here in handed.items():
            os.dup2(here, there)
        for here in set(handed.values()):
            os.close(here)
        if 0 in handed:
            sys.stdin = open(0, closefd=False)  # noqa: SIM115
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        os.environ.clear()
        os.environ.update(self._environment)
        super().run()


class _Handed:
    """An open file of this process for the one that starts: multiprocessing hands it over meanwhile."""

    def __init__(self, file: int) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (DupFd(self.file),)


def _received(handle: Any) -> int:
    return int(handle.detach())


SPAWN = SimpleNamespace(get_context=lambda _: SimpleNamespace(Process=Forked))
"""In place of `multiprocessing`, for code that spawns."""


class ForkedCompiler:
    """The process that compiles grammars, with what its owner uses of `subprocess.Popen`."""

    def __init__(self, _command: list[str], **_: Any) -> None:
        (read, stdin), (stdout, write) = os.pipe(), os.pipe()
        self.stdin, self.stdout = open(stdin, "wb"), open(stdout, "rb")  # noqa: SIM115
        nothing = os.open(os.devnull, os.O_WRONLY)
        self._process = Forked(target=_compile_grammars)
        self._process.files = {0: read, 1: write, 2: nothing}
        self._process.start()
        for file in (read, write, nothing):
            os.close(file)

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    poll = returncode.fget

    def wait(self, timeout: float | None = None) -> int | None:
        self._process.join(timeout)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self._process.pid or 0, number)

    def kill(self) -> None:
        self._process.kill()


def _compile_grammars() -> None:
    from diptych.shared.grammar.worker import main

    os.setsid()  # as its owner asks
    main()


FORKED = {
    "diptych.shared.engine.processes.child.multiprocessing": SPAWN,
    "diptych.shared.grammar.compiler.subprocess": SimpleNamespace(
        Popen=ForkedCompiler, PIPE=subprocess.PIPE, DEVNULL=subprocess.DEVNULL
    ),
}
"""What engines start other processes with -> what tests put in its place."""


class ForkedCommand:
    """`diptych ARGUMENTS`, with what tests use of `subprocess.Popen`. `stdout` has its stderr as well. The
    processes that it starts are forked as it is itself."""

    def __init__(self, arguments: list[str], folder: str, environment: dict[str, str]) -> None:
        read, write = os.pipe()
        self.stdout = open(read, encoding="utf-8", errors="replace")  # noqa: SIM115
        self._process = Forked(target=_command, args=(arguments, folder))
        self._process.files = {1: write, 2: write}
        self._process._environment = environment
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


class ForkedFunction(ForkedCommand):
    """The process of a function under check. It gets three files."""

    def __init__(self, command: list[str], pass_fds: tuple[int, ...], **_: Any) -> None:
        read, write = os.pipe()
        self.stdout = open(read, "rb")  # noqa: SIM115
        nothing = os.open(os.devnull, os.O_RDONLY)
        numbers = dict(zip(range(100, 103), pass_fds))
        self._process = Forked(target=_serve_function, args=([*map(str, numbers)],))
        self._process.files = {0: nothing, 1: write, 2: write, **numbers}
        self._process.start()
        for file in (nothing, write):
            os.close(file)

    @property
    def returncode(self) -> int | None:
        return self.poll()


def _serve_function(numbers: list[str]) -> None:
    os.setsid()
    sys.argv = ["function_process", *numbers]
    import_module("diptych.shared.tools.conformance.kernels.function_process").main()


FUNCTIONS = SimpleNamespace(
    Popen=ForkedFunction, PIPE=-1, STDOUT=-2, DEVNULL=-3, TimeoutExpired=subprocess.TimeoutExpired
)
"""In place of `subprocess`, for `ChildFunction`."""


def share_server() -> None:
    """Processes that are forked from this one use its server."""
    multiprocessing.get_context("forkserver").set_forkserver_preload([PRELOADED])
    forkserver.ensure_running()
    forkserver._forkserver.ensure_running = resource_tracker.ensure_running  # type: ignore[method-assign]


def _command(arguments: list[str], folder: str) -> None:
    os.chdir(folder)
    sys.argv = ["diptych", *arguments]
    forkserver._forkserver.ensure_running = resource_tracker.ensure_running  # type: ignore[method-assign]
    for name, value in {
        **FORKED,
        "diptych.shared.server.engine.engine_process.multiprocessing": SPAWN,
    }.items():
        module, _, attribute = name.rpartition(".")
        setattr(import_module(module), attribute, value)
    from diptych.shared.tools.cli import main

    main()
