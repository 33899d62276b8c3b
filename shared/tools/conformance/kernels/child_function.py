"""The function under check in a process of its own, which never holds an expected value."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import torch

from diptych.shared.tools.conformance.clauses.compare import Mismatch
from diptych.shared.tools.conformance.clauses.device import check_device
from diptych.shared.tools.conformance.clauses.time_limit import DoesNotReturn
from diptych.shared.tools.conformance.kernels.arena import (
    RESULTS,
    SIZE,
    Arena,
    Layout,
    Memory,
    Place,
    free_memory,
)
from diptych.shared.tools.conformance.kernels.functions import (
    Ended,
    Other,
    Outcome,
    Raised,
    memory_as_bytes,
    same_bytes,
    tensors_of,
)
from diptych.shared.tools.conformance.kernels.gpu_memory import MEMORY
from diptych.shared.tools.conformance.kernels.problem import Call

START_SECONDS = 120.0
LARGEST_OUTPUT = 10 * 2**20
"""Bytes that the function may print."""
NUM_ADDRESSES = 5
OVERWRITTEN = 1.0
"""The number in all floating-point inputs of timed calls when their clock has stopped."""
KEEP_MEMORY = {"MALLOC_TRIM_THRESHOLD_": "8589934592", "MALLOC_MMAP_THRESHOLD_": "8589934592"}
"""The C library keeps freed memory, so that a timed call does not wait for pages."""


class ChildFunction:
    """The function in a new process, which gets its inputs only. The process is ended with its whole group
    after a call without an answer. `ends_at`: of time.monotonic, when the whole check must end. `folder`: of
    modules that the target imports."""

    def __init__(
        self, target: str, seconds: float = 60.0, ends_at: float = float("inf"), folder: str = ""
    ) -> None:
        self.target, self.seconds, self.ends_at, self.folder = target, seconds, ends_at, folder
        self.printed, self.tail = 0, b""
        self._num_calls = 0
        self._layout: Layout | None = None
        self._arena = Arena()
        ours, theirs = os.pipe(), os.pipe()  # requests, answers
        self._requests, self._answers = ours[1], theirs[0]
        files = ours[0], theirs[1], self._arena.file
        command = [sys.executable, "-m", "diptych.shared.tools.conformance.kernels.function_process"]
        paths = os.pathsep.join([each for each in sys.path if each])
        env = {**os.environ, **KEEP_MEMORY, "PYTHONPATH": paths}
        self._process = subprocess.Popen(
            [*command, *map(str, files)], pass_fds=files, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, start_new_session=True, env=env,
        )  # fmt: skip
        os.close(ours[0])
        os.close(theirs[1])
        self._reader = threading.Thread(target=self._drain, daemon=True)
        self._reader.start()
        self._is_started = False

    def start(self) -> None:
        """Loads the function. Raises `ValueError` if there is none."""
        if self._is_started:
            return
        device = str(check_device())
        memory = free_memory() // 2 if device == "cpu" else 0
        paths = [self.folder, *sys.path] if self.folder else sys.path
        try:
            answer = self._ask(
                START_SECONDS, do="start", target=self.target, paths=paths, device=device,
                threads=torch.get_num_threads(), memory=memory,
            )  # fmt: skip
        except DoesNotReturn as late:
            raise ValueError(
                f"{self.target} is not loaded within {late.seconds:g} s, "
                + ("the time of the check" if late.seconds < START_SECONDS else "the time limit of a start")
            ) from None
        except Ended as ended:
            raise ValueError(f"{self.target} cannot be loaded: {ended.what}") from None
        if "error" in answer:
            raise ValueError(f"{self.target} cannot be loaded: {answer['error']} ({answer['place']})")
        if answer.get("refusal"):
            raise ValueError(answer["refusal"])
        self._is_started = True
        self._raise_conduct(answer)

    def bind(self, made: Call) -> tuple[str, str] | None:
        """The signature of the function and why it cannot take these arguments; None: it can."""
        self.start()
        layout = Layout(0)
        answer = self._ask(self.seconds, do="bind", args=layout.placed(made.args),
                           kwargs=layout.placed(made.kwargs))  # fmt: skip
        return (answer["signature"], answer["why"]) if "why" in answer else None

    def call(self, made: Call, is_same: bool = False) -> Outcome:
        """`is_same`: in the memory of the call before, with the contents of `made`."""
        self.start()
        if not is_same or self._layout is None:
            self._num_calls += 1
        layout = Layout(self._num_calls % NUM_ADDRESSES * 8192)
        args, kwargs = layout.placed(made.args), layout.placed(made.kwargs)
        layout.write(self._arena)
        self._layout = layout
        answer = self._ask(self.seconds, do="call", args=args, kwargs=kwargs, is_same=is_same)
        self._raise_error(answer)
        return self._outcome(answer, made, args, kwargs, self._arena)

    def time(self, sets: Sequence[Call]) -> tuple[float, Callable[[int], Outcome]]:
        """Seconds of one call of each set, by the clock of this process, and the result of a set. The inputs
        are overwritten when the clock stops: what is computed later is computed from others. A GPU that
        cannot share memory keeps them."""
        self.start()
        layouts, placed = [Layout(0)], []
        for made in sets:  # each with memory of its own
            layouts.append(Layout(layouts[-1].end))
            placed.append((layouts[-1].placed(made.args), layouts[-1].placed(made.kwargs)))
        on_gpu = check_device().type == "cuda"
        handle = MEMORY.handle(layouts[-1].end) if on_gpu else None
        memory: Memory = self._arena if handle is None else MEMORY
        for each in layouts:
            each.write(memory)
        _wait_for_gpu()
        self._raise_error(self._ask(self.seconds, do="prepare", sets=placed, handle=handle))
        begin = time.perf_counter()
        answer = self._ask(self.seconds, do="pass")
        seconds = time.perf_counter() - begin
        self._raise_error(answer)
        modified = None
        if not on_gpu or handle is not None:
            modified = [overwrite(memory, made, *each) for made, each in zip(sets, placed)]
        _wait_for_gpu()

        def output(i: int) -> Outcome:
            answer = self._ask(self.seconds, do="output", index=i)
            self._raise_error(answer)
            found = None if modified is None else modified[i]
            return self._outcome(answer, sets[i], *placed[i], memory, found)

        return seconds, output

    def operators(self, made: Call) -> list[str]:
        """Names of torch's operators in one call, and of kernels on a GPU; none if it fails, or if the time
        of the check is over. Raises `Mismatch` if it ends its process or does not return."""
        layout = Layout(0)
        args, kwargs = layout.placed(made.args), layout.placed(made.kwargs)
        layout.write(self._arena)
        try:
            answer = self._ask(self.seconds, do="operators", args=args, kwargs=kwargs)
        except DoesNotReturn:
            if time.monotonic() < self.ends_at:
                raise
            return []
        return [str(each) for each in answer.get("names", [])][:40]

    def _outcome(
        self,
        answer: dict[str, Any],
        made: Call,
        args: Any,
        kwargs: Any,
        memory: Memory,
        modified: list[str] | None = None,
    ) -> Outcome:
        """`memory`: of the inputs. `modified`: found before they were overwritten."""
        if modified is None:
            modified = modified_in(memory, made, args, kwargs)
        for (_, x), place in zip(tensors_of(made), _places(args, kwargs)):
            if any(x is each for each in made.written):
                memory_as_bytes(x).copy_(memory.bytes_at(place.offset, place.num_bytes))
        wrong = [str(each)[:300] for each in answer.get("wrong", [])]
        return Outcome(self._value(answer.get("value")), wrong, modified)

    def _value(self, sent: Any) -> Any:
        """The answer is not trusted: sizes are checked."""
        try:
            if "tuple" in sent:
                return tuple(self._value(each) for each in sent["tuple"])
            if "other" in sent:
                return None if sent["other"] == "NoneType" else Other(str(sent["other"]))
            dtype = getattr(torch, sent["dtype"])
            shape = tuple(int(n) for n in sent["shape"])
            num_bytes = dtype.itemsize
            for n in shape:
                num_bytes *= n
            offset = int(sent["offset"])
            if min((*shape, 0)) < 0 or offset < RESULTS or offset + num_bytes > SIZE:
                raise ValueError
            raw = self._arena.bytes_at(offset, num_bytes).clone()
            return raw.view(dtype).view(shape).to(torch.device(sent["device"]))
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError):
            raise Ended("the answer of the function's process is malformed") from None

    def _raise_error(self, answer: dict[str, Any]) -> None:
        if "refusal" in answer:
            raise ValueError(answer["refusal"])
        if "error" in answer:
            raise Raised(str(answer["error"]), str(answer["place"]))

    def _raise_conduct(self, answer: dict[str, Any]) -> None:
        if answer.get("wrong"):
            raise Mismatch(f"the module {answer['wrong'][0]}")

    def _ask(self, seconds: float, **request: Any) -> dict[str, Any]:
        data = pickle.dumps(request)
        limit = min(seconds, self.ends_at - time.monotonic())
        deadline = time.monotonic() + limit
        try:
            _write_all(self._requests, struct.pack("<Q", len(data)) + data)
            size = struct.unpack("<Q", self._receive(8, deadline))[0]
            if size > 2**24:
                raise Ended("the answer of the function's process is malformed")
            answer = json.loads(self._receive(size, deadline))
        except TimeoutError:
            self.end()
            raise DoesNotReturn("", max(round(limit, 3), 0.0)) from None
        except (BrokenPipeError, EOFError, ValueError):
            raise Ended(f"the function's process {self._how_ended()}") from None
        if not isinstance(answer, dict):
            raise Ended("the answer of the function's process is malformed")
        return answer

    def _receive(self, size: int, deadline: float) -> bytes:
        data = b""
        while len(data) < size:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._answers], [], [], min(left, 3600.0))[0]:
                raise TimeoutError
            part = os.read(self._answers, size - len(data))
            if not part:
                raise EOFError
            data += part
        return data

    def _how_ended(self) -> str:
        self.end()
        code = self._process.returncode
        if self.printed > LARGEST_OUTPUT:
            return f"printed more than {LARGEST_OUTPUT // 2**20} MiB"
        if code is not None and code < 0:
            what = f"ended with signal {signal.Signals(-code).name}"
            return what + ": it may have taken all memory" * (code == -signal.SIGKILL)
        words = self.tail.decode(errors="replace").strip().splitlines()
        return f"ended with exit code {code}" + (f", after it printed {words[-1][:200]!r}" if words else "")

    def _drain(self) -> None:
        assert self._process.stdout is not None
        with contextlib.suppress(OSError, ValueError):
            while part := os.read(self._process.stdout.fileno(), 65536):
                self.printed += len(part)
                self.tail = (self.tail + part)[-4000:]
                if self.printed > LARGEST_OUTPUT:
                    self._kill()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def end(self) -> None:
        """Ends the process and those that it has started."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(0.5 if self._process.poll() is None and self.printed <= LARGEST_OUTPUT else 0)
        self._kill()
        self._process.wait()
        self._reader.join(1.0)

    def __enter__(self) -> ChildFunction:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._kill()
        self.end()
        for file in (self._requests, self._answers):
            os.close(file)
        self._arena.close()


def modified_in(memory: Memory, made: Call, args: Any, kwargs: Any) -> list[str]:
    """The inputs that are modified."""
    modified = []
    for (name, x), place in zip(tensors_of(made), _places(args, kwargs)):
        found = memory.bytes_at(place.offset, place.num_bytes)
        is_input = not any(x is each for each in made.written)
        if is_input and not same_bytes(found, memory_as_bytes(x).to(found.device)):
            modified.append(name)
    return modified


def overwrite(memory: Memory, made: Call, args: Any, kwargs: Any) -> list[str]:
    """The inputs that are modified; then all numbers of inputs that the function must not write become
    `OVERWRITTEN`."""
    modified = modified_in(memory, made, args, kwargs)
    pairs = list(zip(tensors_of(made), _places(args, kwargs)))
    kept = {place.offset for (_, x), place in pairs if any(x is each for each in made.written)}
    for (_, x), place in pairs:
        if place.offset not in kept and x.is_floating_point():
            num_bytes = place.num_bytes // x.element_size() * x.element_size()
            memory.bytes_at(place.offset, num_bytes).view(x.dtype).fill_(OVERWRITTEN)
    return modified


def _wait_for_gpu() -> None:
    if check_device().type == "cuda":
        torch.cuda.synchronize()


def _places(args: Any, kwargs: Any) -> list[Place]:
    found = []
    for value in (*args, *kwargs.values()):
        values = value if isinstance(value, tuple) and not isinstance(value, Place) else (value,)
        found += [each for each in values if isinstance(each, Place)]
    return found


def _write_all(file: int, data: bytes) -> None:
    while data:
        data = data[os.write(file, data) :]
