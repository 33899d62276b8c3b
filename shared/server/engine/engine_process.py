"""Starting and ending the engine: a process of its own, or a thread on a laptop, over the same sockets."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import signal
import socket
import stat
import sys
import tempfile
import threading
import time
import uuid
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

import zmq

from diptych.shared.config import EngineConfig
from diptych.shared.server.engine.messages import (
    Dead,
    FromEngine,
    ToEngine,
    Unreadable,
    decode_to_engine,
    encode,
)

EXIT_ENGINE_DIED = 70
"""Exit code of a server whose engine died (EX_SOFTWARE): never 0, so that a supervisor starts it again."""


class ZmqChannel:
    """The engine's end: pulls from one socket, pushes to another."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoints: Endpoints) -> None:
        self._in = context.socket(zmq.PULL)
        self._out = context.socket(zmq.PUSH)
        for end, address in ((self._in, endpoints.to_engine), (self._out, endpoints.from_engine)):
            end.set_hwm(0)  # the API bounds how many requests there are
            end.setsockopt(zmq.LINGER, 1000)  # milliseconds to deliver the last words
            end.connect(address)

    def receive(self, timeout: float) -> ToEngine | Unreadable | None:
        """The next message; None when none comes within `timeout` seconds."""
        if not self._in.poll(int(timeout * 1000)):
            return None
        return decode_to_engine(self._in.recv())

    def send(self, message: FromEngine) -> None:
        self._out.send(encode(message))

    def close(self) -> None:
        self._in.close()
        self._out.close()


@dataclass(frozen=True)
class Endpoints:
    """Addresses of the two sockets, which the API binds."""

    to_engine: str
    from_engine: str


class EngineHandle:
    """A started engine. `is_alive` is False once it has ended, for whatever reason."""

    def __init__(self, endpoints: Endpoints, folder: Path | None) -> None:
        self.endpoints = endpoints
        self._folder = folder
        self.process: BaseProcess | None = None
        self.thread: threading.Thread | None = None
        self._death_pipe: socket.socket | None = None

    @property
    def is_alive(self) -> bool:
        if self.process is not None:
            return self.process.is_alive()
        return self.thread is not None and self.thread.is_alive()

    def describe_end(self) -> str:
        """How the engine ended, for the error that clients get."""
        code = self.process.exitcode if self.process is not None else None
        if code is None:
            return "the engine ended"
        if code < 0:
            return f"the engine process was ended by {signal.Signals(-code).name}"
        return f"the engine process ended with exit code {code}"

    def join(self, timeout: float) -> None:
        """Wait for the end, at most `timeout` seconds; a process that stays longer is killed."""
        if self.process is not None:
            self.process.join(timeout)
            if self.process.is_alive():
                self.process.kill()
                self.process.join()
        elif self.thread is not None:
            self.thread.join(timeout)
        if self._death_pipe is not None:
            self._death_pipe.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def spawn_engine(
    config: EngineConfig, context: zmq.Context[zmq.Socket[bytes]], *, in_thread: bool
) -> EngineHandle:
    """Start an engine that will connect to the handle's endpoints; bind them first or afterwards."""
    if in_thread:
        name = f"inproc://engine-{uuid.uuid4().hex}"
        handle = EngineHandle(Endpoints(f"{name}-in", f"{name}-out"), None)
        handle.thread = threading.Thread(
            target=_thread_main, args=(config, context, handle.endpoints), name="engine", daemon=True
        )
        return handle
    folder = Path(tempfile.mkdtemp(prefix="diptych-"))
    folder.chmod(stat.S_IRWXU)  # sockets that only this user can reach
    handle = EngineHandle(Endpoints(f"ipc://{folder}/in", f"ipc://{folder}/out"), folder)
    spawn = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    handle._death_pipe, theirs = socket.socketpair()
    handle.process = spawn.Process(
        target=_process_main, args=(config, handle.endpoints, theirs), name="diptych-engine"
    )
    return handle


def _thread_main(config: EngineConfig, context: zmq.Context[zmq.Socket[bytes]], endpoints: Endpoints) -> None:
    channel = ZmqChannel(context, endpoints)
    try:
        _serve(config, channel)
    except Exception:
        pass  # reported as Dead: the API ends with it
    finally:
        channel.close()


def _process_main(config: EngineConfig, endpoints: Endpoints, death_pipe: socket.socket) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the API decides
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    folder = Path(endpoints.to_engine.removeprefix("ipc://")).parent
    threading.Thread(target=die_with_the_other_end, args=(death_pipe, folder), daemon=True).start()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    channel = ZmqChannel(context, endpoints)
    code = 0
    try:
        _serve(config, channel)
    except ValueError as error:
        code = 2
        print(f"error: {error}", file=sys.stderr)
    except BaseException:
        import traceback

        code = EXIT_ENGINE_DIED
        traceback.print_exc()
    channel.close()
    context.term()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # no destructor of CUDA or of a worker may keep a dead engine alive


def _serve(config: EngineConfig, channel: ZmqChannel) -> None:
    start = time.perf_counter()
    from diptych.shared.engine.processes.start import start_assembly  # heavy: torch, and kernels
    from diptych.shared.server.engine.engine_loop import EngineLoop

    import_seconds = time.perf_counter() - start

    try:
        assembly = start_assembly(config)
    except BaseException as error:
        with contextlib.suppress(Exception):
            channel.send(Dead(reason=str(error) or type(error).__name__))
        raise
    EngineLoop(assembly, channel, import_seconds).run()


def die_with_the_other_end(death_pipe: socket.socket, folder: Path | None = None) -> None:
    """Ends this process when the one at the pipe's other end ends, however it ends: no orphan stays, and no
    folder, which a process that was killed has not removed."""
    with contextlib.suppress(OSError):
        death_pipe.recv(1)
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(EXIT_ENGINE_DIED)
