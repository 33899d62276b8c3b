"""Settings of every test: no network, one thread, a fixed seed, and no GPU test that quietly does not run."""

import gc
import importlib
import importlib.util
import multiprocessing
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Generator
from functools import cache
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HYPOTHESIS_NO_PLUGINS", "1")  # trio's takes a second, to seed what no test uses
# Read by torch when it is imported, and by the processes that tests start.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # instead of a pool of each worker

import pytest

# Without a GPU, Triton's kernels run in its interpreter. Triton looks when it is imported, and torch imports
# it: so ask the machine, not torch.
HAS_GPU = any(Path("/dev", name).exists() for name in ("nvidiactl", "nvidia0", "dxg"))
if not HAS_GPU or os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
    os.environ.setdefault("TRITON_INTERPRET", "1")


@cache
def cuda_is_available() -> bool:
    import torch

    return torch.cuda.is_available()


def pytest_configure(config: pytest.Config) -> None:
    if HAS_GPU and cuda_is_available():
        config.pluginmanager.register(importlib.import_module("tests.gpu.session"))
    if is_fast_cut(config) and re.search(r"\bnot gpu\b", config.option.markexpr):
        config.pluginmanager.register(importlib.import_module("tests.fast_cut"))


COUNT_FROZEN = gc.get_freeze_count


@pytest.fixture(scope="session", autouse=True)
def _settings() -> Generator[None, None, None]:
    """One fixture for all: pytest looks each one up in every test."""
    import torch
    from typer.main import get_command

    torch.set_num_threads(1)  # the same order of summation on every computer
    with pytest.MonkeyPatch.context() as patch:
        # Else each run of a command in a test makes the options of all commands.
        patch.setattr("typer.testing._get_command", cache(get_command))
        # Engines without `max_total_tokens` get a pool that is quickly filled with zeros and checked.
        patch.setattr("diptych.shared.loading.kv_sizing.MAX_CPU_TOKENS", 8192)
        # It visits all that is frozen, and `LLM.generate` calls it: with what `pytest_collection` froze, more
        # than a million objects. Tests get the number that it returned once.
        frozen = COUNT_FROZEN()
        patch.setattr(gc, "get_freeze_count", lambda: frozen)
        if not HAS_GPU and sys.platform == "linux":  # CUDA does not work in a forked process
            # The other processes of an engine are forked from one that has imported what they need.
            from tests.forked import FORKED

            for name, value in FORKED.items():
                patch.setattr(name, value)
        yield


@pytest.fixture
def spawned_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that compiles grammars is started as it is in use."""
    monkeypatch.setattr("diptych.shared.grammar.compiler.subprocess", subprocess)


@pytest.fixture
def spawned_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are started as they are in use."""
    monkeypatch.setattr("diptych.shared.engine.processes.child.multiprocessing", multiprocessing)


@pytest.fixture(scope="session")
def count_frozen() -> Callable[[], int]:
    """`gc.get_freeze_count` itself."""
    return COUNT_FROZEN


@pytest.fixture(autouse=True)
def _seed() -> None:
    """`torch.manual_seed` would format the stack of calls for each kind of device, in every test."""
    import torch

    if cuda_is_available():
        torch.manual_seed(0)
    else:
        torch.default_generator.manual_seed(0)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is collected lives to the end: looking for garbage in it takes a quarter of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def is_fast_cut(config: pytest.Config) -> bool:
    return "not full" in config.option.markexpr


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(
    collector: pytest.Collector, name: str, obj: object
) -> list[pytest.Item] | None:
    """In the fast cut, a test that is marked `full` is not even collected: one has thousands of cases."""
    marks = getattr(obj, "pytestmark", []) if name.startswith("test_") and callable(obj) else []
    return [] if is_fast_cut(collector.config) and any(mark.name == "full" for mark in marks) else None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Nor are the cases of a grid that are marked `full`: most are."""
    if not is_fast_cut(metafunc.config):
        return
    for marker in metafunc.definition.iter_markers("parametrize"):
        values = marker.args[1] if len(marker.args) > 1 else None
        if isinstance(values, list) and not isinstance(marker.kwargs.get("ids"), (list, tuple)):
            fast = [v for v in values if not any(m.name == "full" for m in getattr(v, "marks", ()))]
            values[:] = fast or values  # without values, pytest would report a skipped test


def _missing(item: pytest.Item) -> str:
    """What a test needs and is not there: `-m real`, GPUs, compiled modules, or a library. Empty: nothing."""
    if item.get_closest_marker("real") and item.config.option.markexpr != "real":
        return "a downloaded model (make test-real)"
    for marker in item.iter_markers("gpus"):
        import torch

        if torch.cuda.device_count() < marker.args[0]:
            return f"{marker.args[0]} GPUs"
    if cuda_is_available():
        for marker in item.iter_markers("compiled"):
            from tests.gpu.flashinfer_modules import missing

            if missing(marker.args):
                return "compiled modules of FlashInfer (python -m tests.gpu.flashinfer_modules --all)"
    libraries = (name for marker in item.iter_markers("library") for name in marker.args)
    return next((name for name in libraries if importlib.util.find_spec(name) is None), "")


MISSING = pytest.StashKey[Counter[str]]()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.collectonly:
        return  # a list of what there is, whatever this computer has
    missing = [_missing(item) for item in items]
    config.stash[MISSING] = Counter(filter(None, missing))
    if any(missing):
        config.hook.pytest_deselected(items=[item for item, name in zip(items, missing) if name])
        items[:] = [item for item, name in zip(items, missing) if not name]
    for item in items:
        if item.get_closest_marker("gpu") and not cuda_is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


def pytest_report_collectionfinish(config: pytest.Config) -> list[str]:
    return [
        f"deselected: {count} tests need {name}"
        for name, count in config.stash.get(MISSING, Counter()).items()
    ]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Where a CUDA GPU is present, a GPU test that skips itself fails: it would otherwise prove nothing."""
    report = yield
    is_skipped = report.skipped and not hasattr(report, "wasxfail")
    if is_skipped and item.get_closest_marker("gpu") and cuda_is_available():
        report.outcome = "failed"
        report.longrepr = f"skipped although a CUDA GPU is present: {report.longrepr}"
    return report
