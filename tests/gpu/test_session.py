"""What a session on a GPU does before and around its tests, on the CPU."""

from __future__ import annotations

import importlib
import multiprocessing
import pickle
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from diptych.shared import registry
from diptych.shared.config import EngineConfig
from tests.conformance.test_contracts import cases
from tests.gpu import flashinfer_modules, harness, session
from tests.gpu.flashinfer_modules import BUILT, EXPERTS, Module, missing, modules_of
from tests.house.tree import ROOT

READ_AND_NOT = ("gpu/test_waits.py", "gpu/test_session.py", "conftest.py", "gpu", "docs")
"""A file with such tests, one without, one that is no test, and folders with and without such tests."""


class Source:
    def __init__(self, name: str) -> None:
        self.name = name

    def hash(self) -> str:
        return self.name


def compile_slowly(folder: Path, name: str) -> None:
    """Like Triton's `compile`: a result on disk is loaded."""

    def compile_kernel(src: Source, target: Any = None, options: Any = None) -> str:
        done = folder / f"{src.name} {options}"
        if not done.exists():
            with (folder / "log").open("a") as log:
                log.write(f"{done.name}\n")
            time.sleep(0.3)
            done.touch()
        return done.name

    session.compiled_once(compile_kernel, folder / "locks")(Source(name), "sm_90", {"num_warps": 4})


def test_one_process_compiles_a_kernel_and_the_others_wait(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=compile_slowly, args=(tmp_path, name)) for name in "aabab"]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 5
    assert sorted((tmp_path / "log").read_text().split("\n")[:-1]) == sorted(
        f"{name} {{'num_warps': 4}}" for name in "ab"
    )


def item(nodeid: str, **params: Any) -> Any:
    return SimpleNamespace(nodeid=nodeid, callspec=SimpleNamespace(params=params))


def test_tests_that_wait_for_a_compiler_come_last() -> None:
    contract = "tests/conformance/test_contracts.py::test_clause"
    ordered = [
        item("tests/gpu/test_soak.py::test_rounds_hold[tiny-dense]"),
        item("tests/gpu/test_waits.py::test_a_step", backend="triton"),
        item(f"{contract}[models]", component="models", choice="optimized"),
        item("tests/gpu/test_waits.py::test_a_step", backend="optimized"),
        item(f"{contract}[fa3]", component="attention", choice="fa3"),
        item(f"{contract}[reference]", component="attention", choice="reference"),
    ]
    shuffled = [ordered[i] for i in (4, 0, 5, 2, 3, 1)]
    assert sorted(shuffled, key=session.rank) == ordered


def test_one_worker_computes_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[int] = []

    def function(number: int) -> int:
        computed.append(number)
        return number + 1

    monkeypatch.setenv("PYTEST_XDIST_TESTRUNUID", "run")
    first, second = (harness.computed_once(function, tmp_path) for _ in range(2))
    assert [first(1), second(1), second(2), first(2)] == [2, 2, 3, 3]
    assert computed == [1, 2]


def test_workers_that_wait_compute_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does a result that cannot be written stay."""
    computed: list[int] = []

    def function(number: int) -> Any:
        computed.append(number)
        time.sleep(0.2)
        return number if computed.count(number) > 1 or number else lambda: None

    monkeypatch.setenv("PYTEST_XDIST_TESTRUNUID", "run")
    workers = [harness.computed_once(function, tmp_path) for _ in range(3)]
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(lambda worker: worker(1), workers)) == [1, 1, 1]
    with pytest.raises((AttributeError, pickle.PicklingError)):
        workers[0](0)
    assert workers[1](0) == 0
    assert computed == [1, 0, 0]


class Device:
    """Stands in for `torch.cuda` and for an event that ends with the device's work."""

    def __init__(self) -> None:
        self.now = self.busy_until = 0.0

    def synchronize(self) -> None:
        self.now = max(self.now, self.busy_until)

    def _sleep(self, cycles: int) -> None:
        self.busy_until = self.now + cycles / harness.CYCLES_PER_SECOND

    def Event(self) -> Any:
        return SimpleNamespace(record=lambda: None, query=lambda: self.now >= self.busy_until)


@pytest.mark.parametrize(("seconds", "waits"), [(0.01, False), (0.5, False), (0.01, True)])
def test_a_launch_that_waits_differs_from_a_slow_one(
    seconds: float, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device()

    def launch() -> None:
        device.now += seconds
        if waits:
            device.synchronize()

    monkeypatch.setattr(harness, "torch", SimpleNamespace(cuda=device))
    assert harness.is_launched_without_waiting(launch) == (not waits)


def test_files_without_tests_of_a_gpu_are_not_read() -> None:
    """The mark stands in the file of the test: another one cannot hand it on."""
    files = [
        path for path in (ROOT / "tests").rglob("*.py") if session.OF_GPU.search(path.read_text("utf-8"))
    ]
    assert [path.name for path in files if not path.name.startswith("test_")] == []
    for expression, is_left_out in (("gpu and not gpus or contract", True), ("not gpu", False), ("", False)):
        config: Any = SimpleNamespace(option=SimpleNamespace(markexpr=expression))
        ends = [session.pytest_ignore_collect(ROOT / "tests" / name, config) for name in READ_AND_NOT]
        assert ends == [None, True if is_left_out else None, None, None, True if is_left_out else None]


@pytest.fixture(scope="module")
def attention_cases() -> list[Any]:
    return [
        each.values[1:]
        for each in cases()
        if each.values[0] == "attention" and registry.needs_cuda("attention", each.values[1])
    ]


def test_most_cases_need_only_what_a_session_compiles(attention_cases: list[Any]) -> None:
    needed = [modules_of(choice, clause.name, case) for choice, clause, case in attention_cases]
    left_out = [modules for modules in needed if not modules <= set(BUILT)]
    assert len(left_out) < len(needed) / 10
    assert set(BUILT) <= set().union(*needed)


def test_a_module_that_is_compiled_is_not_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def uri(kernels: str) -> Callable[..., str]:
        return lambda *variant: f"{kernels}-{variant[-5]}"

    env = SimpleNamespace(FLASHINFER_JIT_DIR=tmp_path / "jit", FLASHINFER_AOT_DIR=tmp_path / "aot")
    names = {"get_batch_decode_uri": "decode", "get_batch_prefill_uri": "prefill"}
    functions = {name: uri(kernels) for name, kernels in names.items()}
    jit = SimpleNamespace(env=env, **functions)
    monkeypatch.setitem(sys.modules, "flashinfer.jit", jit)
    wanted = [EXPERTS, Module("decode", head_dim=128), Module("fa2", head_dim=256)]
    for found in (None, jit):
        monkeypatch.setattr(flashinfer_modules, "_known", {})
        monkeypatch.setattr(flashinfer_modules.importlib.util, "find_spec", {"flashinfer": found}.get)
        assert not missing(BUILT)
        assert all(missing([module]) for module in wanted)
    for folder, name in (("jit", "fused_moe_90"), ("aot", "decode-128"), ("jit", "prefill-256")):
        (tmp_path / folder / name).mkdir(parents=True)
        (tmp_path / folder / name / f"{name}.so").touch()
    monkeypatch.setattr(flashinfer_modules, "_known", {})
    assert not missing(wanted)
    assert missing([*wanted, Module("fa3", head_dim=256, has_window=True)]) is False
    assert missing([*wanted, Module("fa2", head_dim=128)])


def test_modules_are_compiled_unless_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[torch.dtype] = []

    def spec(module: Module) -> Any:
        return SimpleNamespace(
            name=module.kernels,
            is_compiled=module.kernels == "decode",
            build=lambda verbose: built.append(module.dtype),
        )

    monkeypatch.setattr(Module, "spec", spec)
    monkeypatch.delenv("MAX_JOBS", raising=False)
    lines = list(flashinfer_modules.build([Module("fa2", torch.float16), Module("decode")]))
    assert [line.split()[-1] for line in lines] == ["fa2", "decode"]
    assert built == [torch.float16]


FILES = sorted(
    path.stem for path in Path(__file__).parent.glob("test_*.py") if path.stem != Path(__file__).stem
)


@pytest.mark.parametrize("name", FILES)
def test_the_flags_of_tests_are_flags(name: str) -> None:
    """Also of tests that no computer without a GPU runs."""
    module = importlib.import_module(f"tests.gpu.{name}")
    functions = [value for key, value in vars(module).items() if key.startswith("test_")]
    marks = [
        mark for each in functions for mark in getattr(each, "pytestmark", []) if mark.name == "parametrize"
    ]
    values = [getattr(value, "values", value) for mark in marks for value in mark.args[1]]
    flat = [each for value in values for each in (value if isinstance(value, tuple) else (value,))]
    for flags in [each for each in flat if isinstance(each, dict)]:
        EngineConfig(model="tiny-dense", **{**harness.OPTIMIZED, **flags})


@pytest.mark.parametrize("backend", [None, *harness.graph_backends()])
def test_engines_of_the_harness_are_configured(backend: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "LLM", EngineConfig)
    for engine in (harness.reference("tiny-moe"), harness.optimized("tiny-moe", backend, page_size=4)):
        assert isinstance(engine, EngineConfig)
        assert engine.device == "cuda"
        assert harness.name_of(dict(engine.use)) == (f"attention={backend}" if engine.use else "default")
