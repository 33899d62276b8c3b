"""Starts, calls and ends another process of the engine: a rank or a replica."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.process import BaseProcess
from queue import SimpleQueue
from typing import Any

from diptych.shared.engine.processes import child_messages
from diptych.shared.engine.processes.child_messages import Answer, Ready, Report
from diptych.shared.engine.processes.input_log import Call, decode, encode
from diptych.shared.parallel import channel
from diptych.shared.parallel.channel import Channel
from diptych.shared.parallel.collective_log import Entry, first_difference
from diptych.shared.parallel.patience import LOOK_SECONDS, Activity

REPORT_SECONDS = 5.0
"""Time limit in seconds for a process to report, or to end after its connections are closed."""

ENDING_SECONDS = 0.2
"""For which an error is kept back: a parent that ends kills its children one after the other. What a child
then misses of another is no error, and it does not live so long."""


class EngineProcessEnded(RuntimeError):
    """A process of the engine has ended. The engine cannot be used any more."""


class InboxClosed(Exception):
    """No call comes any more."""


class Child:
    """A handle of another process, over a channel. `process`: None if this process has not started it."""

    def __init__(self, name: str, pipe: Channel, process: BaseProcess | None = None) -> None:
        self.name = name
        self.pipe = pipe
        self.process = process
        # End the child, without waiting, when this object is deleted or this process ends.
        self._finalizer: weakref.finalize[..., Any] = weakref.finalize(self, _end, pipe, process)

    @classmethod
    def spawn(cls, name: str, main: Callable[..., None], *args: object) -> Child:
        """Start `main(*args, pipe)` in a new process."""
        spawn = multiprocessing.get_context("spawn")  # CUDA does not work in a forked process
        pipe, theirs = channel.pair()
        process = spawn.Process(target=main, args=(*args, theirs), name=name)
        with _no_progress_bars():
            process.start()
        theirs.close()
        return cls(name, pipe, process)

    def next_message(self, seconds: float) -> Any:
        """Receive a message while the process starts. Raises `EngineProcessEnded` if it cannot start, or does
        nothing for so many seconds: it may compile kernels for longer."""
        with contextlib.suppress(EOFError, OSError):
            if self._has_message(seconds):
                message = self.receive()
                if isinstance(message, Report):
                    raise EngineProcessEnded(f"{self.name} does not start: {message.error}")
                if isinstance(message, Ready):
                    return message.value
        raise EngineProcessEnded(self.describe_end())

    def _has_message(self, seconds: float) -> bool:
        if self.process is None or self.process.pid is None:
            return self.pipe.poll(seconds)
        activity = Activity(self.process.pid)
        while activity.idle_seconds() <= seconds:
            if self.pipe.poll(min(seconds, LOOK_SECONDS)):
                return True
        return False

    def receive(self) -> Answer:
        """The next message. Raises `EOFError` or `OSError` if the process has ended."""
        try:
            message: Answer = child_messages.decode(self.pipe.receive())
        except ValueError as error:
            raise channel.Refused(f"a message of {self.name} cannot be read: {error}") from None
        return message

    def call(self, data: bytes) -> None:
        """Send a call. If the process has ended, the reader of the pipe detects it."""
        with contextlib.suppress(OSError):
            self.pipe.send(data)

    def report(self) -> Report | None:
        """The process's report; None: it has ended without one, or does not answer."""
        self.call(encode(Call("report", 0.0)))
        end = time.monotonic() + REPORT_SECONDS
        with contextlib.suppress(EOFError, OSError):
            while self.pipe.poll(max(end - time.monotonic(), 0)):
                message = self.receive()
                if isinstance(message, Report):
                    return message
        return None

    def describe_end(self) -> str:
        """A description of how it ended."""
        if self.process is None:
            return f"{self.name} has closed its connection, or does not answer"
        self.process.join(REPORT_SECONDS)  # it closes its connections before it has ended
        code = self.process.exitcode
        if code is None:
            return f"{self.name} does not answer"
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return f"{self.name} has ended with {how}"

    def end(self) -> None:
        """End the process immediately."""
        self._finalizer()


@contextlib.contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Switch off progress bars of a process that starts, by the variable that tqdm reads: only the first
    process draws them."""
    before = os.environ.get("TQDM_DISABLE")
    os.environ["TQDM_DISABLE"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["TQDM_DISABLE"]
        else:
            os.environ["TQDM_DISABLE"] = before


def _end(pipe: Channel, process: BaseProcess | None) -> None:
    if process is not None:
        process.kill()
        process.join()
    pipe.close()


class Inbox:
    """In the child process: receives the parent's calls in a thread. So the process can report while it
    computes, and ends as soon as the parent has ended."""

    def __init__(
        self, pipe: Channel, log: Callable[[], list[Entry]], leave: Callable[[int], object] = os._exit
    ) -> None:
        self.pipe = pipe
        self.leave = leave
        self.log = log
        self._calls: SimpleQueue[Call | None] = SimpleQueue()
        self.hear: Callable[[Call], None] | None = None
        """Gets each `regroup` as soon as it comes, in the thread that reads, and again among the calls; and
        each `hear`, which is no call."""
        self.is_ready = False

    def start(self, value: Any = None) -> None:
        """Tell the parent that this process is ready, and read calls from now on. What the start has made
        lives to the end of the process: no collection visits it again."""
        gc.freeze()
        self.send(Ready(value))
        self.listen()

    def listen(self) -> None:
        """Read calls from now on."""
        self.is_ready = True
        threading.Thread(target=self._read, name="inbox", daemon=True).start()

    def send(self, message: Answer) -> None:
        self.pipe.send(child_messages.encode(message))

    def calls(self, is_busy: bool) -> Iterator[Call]:
        """The received calls; an idle process waits for one. Raises `InboxClosed` after `close`."""
        if not is_busy:
            yield self._next()
        while not self._calls.empty():
            yield self._next()

    def _next(self) -> Call:
        call = self._calls.get()
        if call is None:
            raise InboxClosed
        self._let_hear(call)  # again: it may have come before `hear` was set
        return call

    def _let_hear(self, call: Call) -> None:
        if call.arguments and call.method in ("regroup", "hear") and self.hear is not None:
            self.hear(call)

    def close(self) -> None:
        """Let `calls` end."""
        self._calls.put(None)

    def report(self, error: str = "") -> Report:
        return Report(stacks_of_all_threads(), error, self.log())

    def _read(self) -> None:
        code = 0
        try:
            while True:
                call = decode(self.pipe.receive())
                if call.method == "report":
                    self.send(self.report())
                    continue
                if call.method != "hear":
                    self._calls.put(call)
                self._let_hear(call)
        except (EOFError, ConnectionResetError, BrokenPipeError):
            pass  # the parent has ended, or has closed this process's pipe
        except Exception as error:
            code = 1
            print(f"a call cannot be read: {error}", file=sys.stderr, flush=True)
        self.leave(code)


@contextlib.contextmanager
def reported_end(inbox: Inbox) -> Iterator[None]:
    """End the process at the end of the block, after an error with a last report."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    code = 0
    try:
        yield
    except BaseException as error:
        code = 1
        if inbox.is_ready:  # otherwise the parent reports the error
            time.sleep(ENDING_SECONDS)
            traceback.print_exc()
        with contextlib.suppress(OSError):
            last = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{os.path.basename(last.filename)}:{last.lineno}"
            inbox.send(inbox.report(f"{type(error).__name__}: {error} ({place})"))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads of libraries must not keep it alive


@contextlib.contextmanager
def started(children: Sequence[Child]) -> Iterator[None]:
    """A block in which the children and this process start; an error ends the children."""
    try:
        yield
    except BaseException as error:
        cause = None
        if isinstance(error, RuntimeError) and not isinstance(error, EngineProcessEnded):
            cause = first_end(children) or f"the ranks do not find each other: {error}"
        for child in children:
            child.end()
        if cause is not None:
            raise EngineProcessEnded(cause) from error
        raise


def first_end(children: Sequence[Child]) -> str | None:
    """How the first child that has ended did so; None: none is known to have ended."""
    for child in readable(children, REPORT_SECONDS):
        try:
            message = child.receive()
        except (EOFError, OSError):
            return child.describe_end()
        if isinstance(message, Report):
            return f"{child.name} has ended: {message.error}"
    return None


def signal_of(child: Child) -> int:
    """Minus the signal that has ended the process; 0 or more: none has."""
    return (child.process.exitcode or 0) if child.process is not None else 0


def readable(children: Sequence[Child], seconds: float) -> list[Child]:
    """The children with a message, or that have ended; waits for the first."""
    by_pipe = {child.pipe: child for child in children}
    return [by_pipe[pipe] for pipe in channel.wait(by_pipe, seconds)]


def describe_all(children: Sequence[Child], log: Sequence[Entry]) -> str:
    """The reports of processes as text, and where their collectives differ from the parent's `log`."""
    reports = {child.name: child.report() for child in children}
    lines = [f"{name}: {report.error}\n{report.stacks}" for name, report in reports.items() if report]
    if len(lines) == len(children):
        logs = [log, *(report.log for report in reports.values() if report)]
        lines.append(first_difference(logs) or "the collectives of all ranks agree")
    return "\n".join(lines)


def stacks_of_all_threads() -> str:
    """The stacks of all threads of this process as text."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
    )
