"""A session of tests on a GPU, as a plugin of pytest: each kernel is compiled once, whichever test needs it.

Triton: processes share its cache on disk. Here a lock of each kernel lets one process compile it; the others
wait and load it. FlashInfer: a process of the session compiles `flashinfer_modules.BUILT` while other tests
run; tests that may need a module come last, and FlashInfer's own lock lets them wait.

A worker whose CUDA context is lost, by an error in a kernel, ends after that test: every later test would
fail. pytest-xdist starts another one.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

from tests.house.tree import ROOT

LOCKS = Path(tempfile.gettempdir(), f"diptych-kernels-{os.getuid()}")
BUILD_LOG = ROOT / "build" / "gpu-tests" / "flashinfer.txt"
ANSWERS = ROOT / "build" / "gpu-tests" / "answers"
"""What one worker has computed for all (tests/gpu/harness.py)."""
LOST = "AcceleratorError"
"""torch's name of an error after which the CUDA context of the process is unusable."""
FIRST = ("tests/gpu/test_soak.py", "tests/gpu/test_compilations.py", "tests/kernels/")
"""Long tests, and tests of many kernels."""
LONG = (
    "tests/gpu/test_soak.py",
    "tests/gpu/test_lockstep.py",
    "tests/gpu/test_accuracy.py",
    "tests/gpu/test_structured_output.py",
    "tests/kernel_check/",
)
"""Those of a part of the order that begin first, so that none is left when the others have ended."""
MAY_COMPILE = ("flashinfer", "fa3", "optimized")
"""Backends of attention that use FlashInfer; the default backend uses FA3 for prompts."""


def compiled_once(compile_kernel: Callable[..., Any], locks: Path = LOCKS) -> Callable[..., Any]:
    """Triton's `compile`, in one process at a time for each kernel."""

    @functools.wraps(compile_kernel)
    def locked(src: Any, target: Any = None, options: Any = None, **more: Any) -> Any:
        settings = sorted((options or {}).items())
        key = hashlib.sha256(f"{src.hash()} {target} {settings}".encode()).hexdigest()
        locks.mkdir(parents=True, exist_ok=True)
        with (locks / key).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            return compile_kernel(src, target, options, **more)

    return locked


OF_GPU = re.compile(r"mark\.(gpus?|contract)\b")
"""What a file with tests of a GPU contains."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files and folders without a test of a GPU, when only such tests are asked for: each worker would import
    them all, with what only they need, and make 25,000 tests, for half a minute."""
    wanted = "gpu" in config.option.markexpr and "not gpu" not in config.option.markexpr.replace(
        "not gpus", ""
    )
    is_test = collection_path.name.startswith("test_") and collection_path.suffix == ".py"
    return (
        True if wanted and (is_test or collection_path.is_dir()) and not _is_of_gpu(collection_path) else None
    )


def _is_of_gpu(path: Path) -> bool:
    if path.is_dir():
        return any(map(_is_of_gpu, path.rglob("test_*.py")))
    return OF_GPU.search(path.read_text("utf-8")) is not None


def rank(item: pytest.Item) -> int:
    """The order of the tests: long ones, other ones, contracts, those that wait for FlashInfer's modules, and
    at last the reference's contracts."""
    name, params = item.nodeid, getattr(item, "callspec", None)
    values = {} if params is None else params.params
    backend = values.get("backend", values.get("choice"))
    waits = "flashinfer" in name or "fa3" in name or backend in MAY_COMPILE
    waits = waits and values.get("component", "attention") in ("attention", "mla_attention")
    if "test_contracts.py" in name:
        return 5 if backend == "reference" else 4 if waits else 2
    return 0 if name.startswith(FIRST) else 3 if waits else 1


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Within a part of the order long tests come first. Neighbours are shuffled: they need the same kernel,
    and would all wait for the one that compiles it. The whole grids come after all that `make test` has of
    them."""
    items.sort(
        key=lambda item: (
            item.get_closest_marker("full") is not None,
            rank(item),
            not item.nodeid.startswith(LONG),
            hashlib.sha256(item.nodeid.encode()).digest(),
        )
    )


_build: list[subprocess.Popen[bytes]] = []


def pytest_configure(config: pytest.Config) -> None:
    import triton.compiler

    from diptych.optimized.attention import flashinfer_build

    triton.compiler.compile = compiled_once(triton.compiler.compile)
    # Engines without a module start a process that compiles it, which would wait for the session's.
    flashinfer_build.build_in_background = lambda modules: None
    markers, option = config.option.markexpr, config.option
    is_worker = hasattr(config, "workerinput")
    starts_workers = getattr(option, "numprocesses", None) and not is_worker and not option.collectonly
    if starts_workers:
        shutil.rmtree(ANSWERS, ignore_errors=True)
    if starts_workers and "gpu" in markers and markers != "gpus" and _has_flashinfer():
        BUILD_LOG.parent.mkdir(parents=True, exist_ok=True)
        with BUILD_LOG.open("w") as log:
            command = [sys.executable, "-m", "tests.gpu.flashinfer_modules"]
            _build.append(subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, start_new_session=True))


def _has_flashinfer() -> bool:
    import importlib.util

    return importlib.util.find_spec("flashinfer") is not None


def pytest_unconfigure() -> None:
    for process in _build:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        process.wait()


_lost: list[str] = []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if call.excinfo is not None and call.excinfo.typename == LOST:
        _lost.append(item.nodeid)
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logfinish(nodeid: str) -> None:
    if nodeid in _lost and "PYTEST_XDIST_WORKER" in os.environ:
        time.sleep(1.0)  # the report is on its way
        os._exit(1)
