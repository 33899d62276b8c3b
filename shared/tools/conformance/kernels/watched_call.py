"""One call of a function in this process, and what it leaves behind. Loads torch only: the child process of a
check runs it beside the code under check."""

from __future__ import annotations

import _thread
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import overrides
from torch.utils import _python_dispatch

from diptych.shared.tools.conformance.clauses.poison import run_poisoned

WATCHED: tuple[tuple[Any, str], ...] = (
    *((time, name) for name in ("perf_counter", "perf_counter_ns", "time", "monotonic")),
    *((torch, name) for name in ("allclose", "isclose", "equal", "empty")),
    *((torch.Tensor, name) for name in ("clone", "copy_", "cpu", "to", "detach", "data_ptr", "allclose")),
    (torch.testing, "assert_close"),
    (torch.cuda, "synchronize"),
    (torch.cuda, "Event"),
    (threading, "enumerate"),
    (os, "_exit"),
    (os, "write"),
)
"""What a checker or a benchmark uses: the function under check must leave it alone."""

JOIN_SECONDS = 60.0
PEEKS = ("gc.get_objects", "gc.get_referrers", "gc.get_referents")

_copy, _empty, _synchronize = torch.Tensor.copy_, torch.empty, torch.cuda.synchronize
_start_thread, _sleep, _clock = _thread.start_new_thread, time.sleep, time.monotonic


class Watch:
    """Reports what a call does besides computing. One object a process: an audit hook cannot be removed."""

    def __init__(self) -> None:
        self.originals = [(where, name, getattr(where, name)) for where, name in WATCHED]
        self.events: list[str] = []
        self.is_active = False
        self.running: set[object] = set()  # threads that a call started
        sys.addaudithook(self._audit)

    def add(self, *classes: type) -> None:
        """The methods of these classes must stay as they are, too."""
        for each in classes:
            self.originals += [
                (each, name, getattr(each, name)) for name, f in vars(each).items() if callable(f)
            ]

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.is_active:
            return
        if event in PEEKS:
            self.events.append(f"searches the memory of its process ({event})")
        elif event == "os.fork":
            self.events.append("forks a process")
        elif event == "open" and str(args[0]).startswith("/proc/") and str(args[0]).endswith("/mem"):
            self.events.append(f"reads the memory of a process ({args[0]})")

    def run(self, call: Callable[[], Any]) -> tuple[Any, list[str]]:
        """What is returned, and what is wrong. Waits for threads that the call started."""
        self.events.clear()
        modes_before = num_modes()
        self.is_active = True
        try:
            with self.counted_threads():
                returned = call()
        finally:
            self.is_active = False
        wrong = list(dict.fromkeys(self.events))
        if self.running:
            wrong.append("returns while a thread that it started still runs")
            self.join()
        if num_modes() > modes_before:
            wrong.append("leaves a mode behind that intercepts torch's functions")
        return returned, wrong + self.replaced()

    @contextmanager
    def counted_threads(self) -> Iterator[None]:
        """Threads that are started in the block are in `running` until they end."""

        def start(function: Callable[..., Any], args: Any, kwargs: Any = None) -> int:
            token = object()

            def run() -> None:
                try:
                    function(*args, **(kwargs or {}))
                finally:
                    self.running.discard(token)

            self.running.add(token)
            return _start_thread(run, ())

        self.running.clear()
        places: tuple[Any, ...] = (_thread, "start_new_thread"), (threading, "_start_new_thread")
        before = [getattr(*place) for place in places]
        for where, name in places:
            setattr(where, name, start)
        try:
            yield
        finally:
            for (where, name), original in zip(places, before):
                setattr(where, name, original)

    def join(self) -> None:
        """Waits for the threads in `running`."""
        end = _clock() + JOIN_SECONDS
        while self.running and _clock() < end:
            _sleep(1e-4)

    def replaced(self) -> list[str]:
        """The functions of `WATCHED` that are others now, which are put back."""
        wrong = []
        for where, name, original in self.originals:
            if getattr(where, name) is not original:
                setattr(where, name, original)
                wrong.append(f"replaces {getattr(where, '__qualname__', where.__name__)}.{name}")
        return wrong


def num_modes() -> int:
    return len(overrides._get_current_function_mode_stack()) + len(
        _python_dispatch._get_current_dispatch_mode_stack()
    )


def invoke(watch: Watch, function: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, list[str]]:
    """What the function returns, its tensors copied at once, and what is wrong. On a GPU the results, and the
    arguments that may hold them, are copied when the current stream has finished, and compared with a copy
    after all streams have."""
    returned, wrong = watch.run(lambda: run_poisoned(lambda: function(*args, **kwargs)))
    found: list[torch.Tensor] = []
    copies = copied(returned, wrong, found)
    found += [each for each in flat((args, list(kwargs.values()))) if isinstance(each, torch.Tensor)]
    if any(each.is_cuda for each in found):
        torch.cuda.current_stream().synchronize()
        first = [each.clone() for each in found]
        _synchronize()
        if not all(same_bytes(a, b) for a, b in zip(first, found)):
            wrong.append("returns while another stream still writes its result")
        copies = copied(returned, [], [])
    return copies, wrong


def flat(value: Any) -> Iterator[Any]:
    """What is in tuples and lists."""
    if isinstance(value, (tuple, list)):
        for each in value:
            yield from flat(each)
    else:
        yield value


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(*(each.contiguous().view(-1).view(torch.uint8) for each in (a, b)))


def copied(value: Any, wrong: list[str], found: list[torch.Tensor]) -> Any:
    """The same structure of tuples and lists with dense copies of tensors. A tensor must be exactly
    `torch.Tensor`, with memory for all its elements."""
    if isinstance(value, (tuple, list)):
        return tuple(copied(each, wrong, found) for each in value)
    if not isinstance(value, torch.Tensor):
        return value
    if type(value) is not torch.Tensor:
        wrong.append(f"returns {type(value).__name__}, a subclass of Tensor: it may compute when it is read")
        return None
    try:
        has_memory = value.layout is torch.strided and value.untyped_storage().nbytes() >= needed_bytes(value)
    except (RuntimeError, NotImplementedError):
        has_memory = False
    if not has_memory or value.is_meta:
        wrong.append("returns a tensor without memory for all its elements")
        return None
    found.append(value)
    return _copy(_empty(value.shape, dtype=value.dtype, device=value.device), value.detach())


def needed_bytes(tensor: torch.Tensor) -> int:
    if tensor.numel() == 0:
        return 0
    last = tensor.storage_offset() + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride()))
    return int(last + 1) * tensor.element_size()
