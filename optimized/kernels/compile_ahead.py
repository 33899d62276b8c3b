"""Compiles kernels before they are needed, many at a time.

Within `compile_ahead` launchers are called as usual, with the shapes of real steps, but no Triton kernel is
launched: each variant is compiled by a thread and loaded at the end. So the list of what is to be compiled
follows from model and flags, by the code that launches, and is written nowhere twice. PyTorch's kernels and
cuBLAS do run. New memory is filled with zeros, so that tensors which a kernel would have written are valid
indices.

Triton's compiler leaves Python's lock in MLIR, LLVM and ptxas, which take two thirds of its time
(docs/lab/cuda-graphs.md). So threads compile in parallel, and kernels need not be read back from other
processes.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from tqdm.auto import tqdm
from triton.runtime import build
from triton.runtime._async_compile import AsyncCompileMode
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from diptych.shared.hardware import num_cpus

_aten = torch.ops.aten
_UNINITIALIZED = {
    _aten.empty.memory_format,
    _aten.empty_like.default,
    _aten.empty_strided.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
}


class Zeros(TorchDispatchMode):
    """Fills uninitialized tensors with zeros."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports Dynamo, which takes more than a second, to keep it away from here

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        return output.zero_() if func in _UNINITIALIZED else output


class Variants:
    """The kernel variants that this thread's launchers ask for. `run` takes the place of `JITFunction.run`;
    other threads go on launching."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.run_jit = JITFunction.run
        self.known: set[Any] = set()
        self.compiled: list[Any] = []  # kernels, or promises of them

    def run(self, jit: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        if threading.get_ident() != self.thread:
            return self.run_jit(jit, *args, grid=grid, warmup=warmup, **options)
        # --8<-- [start:note-a-variant]
        *_, bind = jit.device_caches[driver.active.get_current_device()]
        _, specialization, others = bind(*args, **options)
        key = jit, tuple(specialization), tuple(others.items())
        if key not in self.known:
            self.known.add(key)
            self.compiled.append(self.run_jit(jit, *args, grid=grid, warmup=True, **options))
        # --8<-- [end:note-a-variant]
        return None


@contextmanager
def compile_ahead(num_threads: int | None = None) -> Iterator[Variants]:
    """Compile all kernels that this thread launches within the block, and launch none. They are ready to be
    launched at its end. Results that depend on a kernel mean nothing. The first error of a compiler is raised
    at the end."""
    variants = Variants()
    device = torch.cuda.current_device() if torch.cuda.is_available() else None
    workers = ThreadPoolExecutor(num_threads or _idle_cores(), "compile", _use, (device,))
    with _launchers_one_by_one(), workers as threads:
        with AsyncCompileMode(threads) as mode:
            JITFunction.run = lambda jit, *args, **options: variants.run(jit, *args, **options)
            try:
                with Zeros():
                    yield variants
            finally:
                JITFunction.run = variants.run_jit
            waiting = as_completed(list(mode.raw_futures))
            for _ in tqdm(waiting, "compile kernels", len(mode.raw_futures), leave=False, delay=1.0):
                pass
        list(threads.map(_load, variants.compiled))


@contextmanager
def _launchers_one_by_one() -> Iterator[None]:
    """Within the block each launcher that Triton writes in C is loaded by one thread at a time. They are
    extension modules of one name. When a file is loaded a second time, Python puts its functions into the
    module that bears the name (CPython's import.c, m_size -1), which another thread may be about to read:
    it would launch its kernel by the launcher of another one."""
    load, lock = build._load_module_from_path, threading.Lock()

    def load_alone(name: str, path: str) -> Any:
        with lock:
            return SimpleNamespace(**vars(load(name, path)))

    build._load_module_from_path = load_alone
    try:
        yield
    finally:
        build._load_module_from_path = load


def _idle_cores() -> int:
    """The number of threads: engines that start side by side share the cores, and each compilation takes
    memory."""
    return max(2, num_cpus() - round(os.getloadavg()[0]))


def _use(device: int | None) -> None:
    if device is not None:
        torch.cuda.set_device(device)


def _load(kernel: Any) -> None:
    """Load a kernel, or what is promised to be one. Its launcher, which Triton writes in C, may be compiled
    too."""
    loaded = kernel.result() if hasattr(kernel, "result") else kernel
    loaded._init_handles()
