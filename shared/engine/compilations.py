"""The kernels that this process compiles: by Triton, and by nvcc for FlashInfer.

Both compilers call a hook when they have work, so counting costs nothing while they have none. After the
start of an engine no request should make them work (`Compilations.num_after_ready`).
"""

from __future__ import annotations

import sys
import threading
import time
from typing import Any, NamedTuple


class Compilation(NamedTuple):
    compiler: str  # "triton", "flashinfer"
    kernel: str
    is_cached: bool  # read from the compiler's folder, where it was compiled before
    seconds: float


_log: list[Compilation] = []
_watched: set[str] = set()
_lock = threading.Lock()


def watch() -> None:
    """Record compilations from now on: Triton's, and FlashInfer's if the program has imported it. Repeated
    calls change nothing."""
    with _lock:
        for package, watch_it in (("triton", _watch_triton), ("flashinfer", _watch_flashinfer)):
            if package in sys.modules and package not in _watched:
                _watched.add(package)
                watch_it()


def _watch_triton() -> None:
    """A listener that the program has given to Triton is called too."""
    import triton

    knobs = triton.knobs.compilation
    others = knobs.listener

    def listen(*, src: Any, times: Any, cache_hit: bool, **more: Any) -> None:
        _log.append(Compilation("triton", src.name, cache_hit, times.total / 1e6))
        if others is not None:
            others(src=src, times=times, cache_hit=cache_hit, **more)

    knobs.listener = listen


def _watch_flashinfer() -> None:
    from flashinfer.jit.core import JitSpec

    build_and_load = JitSpec.build_and_load

    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        was_there, start = self.is_compiled, time.perf_counter()
        module = build_and_load(self, *args, **kwargs)
        _log.append(Compilation("flashinfer", self.name, was_there, time.perf_counter() - start))
        return module

    JitSpec.build_and_load = watched


class Compilations:
    """The compilations of this process since `ready` was called, and those before it."""

    def __init__(self) -> None:
        self._start = self._ready = len(_log)

    def ready(self) -> None:
        """The engine can serve: compilations count from now on."""
        self._ready = len(_log)

    @property
    def before_ready(self) -> list[Compilation]:
        return _log[self._start : self._ready]

    @property
    def after_ready(self) -> list[Compilation]:
        return _log[self._ready :]

    @property
    def num_after_ready(self) -> int:
        """Kernels that were compiled while requests waited; not those that were only read from disk."""
        return sum(not each.is_cached for each in self.after_ready)
