"""Kernels that are compiled before the first request are all that requests launch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from types import ModuleType
from typing import Any

import pytest

from diptych.shared.engine import compilations
from diptych.shared.engine.compilations import Compilation, Compilations
from tests.gpu.test_hybrid import write_checkpoint

ROOT = Path(__file__).parents[2]
MIXED = {"enable_mixed_chunk": True, "chunked_prefill_size": 128}
BLOCKS = {"cuda_graph_block_len": 4, "page_size": 4, "cuda_graph_max_bs": 8, "chunked_prefill_size": 256}
EAGLE = {"speculative": "eagle3", "speculative_draft_model": "tiny-dense-eagle3"}
FLAGS: list[Any] = [
    {"model": "tiny-moe", **MIXED},
    pytest.param({"model": "tiny-dense", "use": {"attention": "reference"}}, marks=pytest.mark.full),
    pytest.param({"model": "tiny-dense", "use": {"attention": "reference+triton"}}, marks=pytest.mark.full),
    pytest.param({"model": "tiny-dense"}, marks=pytest.mark.full),
    pytest.param({"model": "tiny-dense", "speculative": "ngram"}, marks=pytest.mark.full),
    pytest.param(
        {"model": "tiny-dense", "kv_cache_dtype": "fp8_e4m3", "page_size": 16}, marks=pytest.mark.full
    ),
    pytest.param({"model": "tiny-dense", **BLOCKS}, marks=pytest.mark.full),
    pytest.param({"model": "wide"}, marks=pytest.mark.full),  # a hybrid model
    pytest.param({"model": "wide", "max_running_requests": 32}, marks=pytest.mark.full),
    pytest.param(
        {"model": "wide", "enable_mixed_chunk": True, "chunked_prefill_size": 128}, marks=pytest.mark.full
    ),
    pytest.param({"model": "wide", "deterministic": True}, marks=pytest.mark.full),
    pytest.param({"model": "tiny-dense", "deterministic": True}, marks=pytest.mark.full),
    pytest.param({"model": "tiny-moe", "quantization": "fp8"}, marks=pytest.mark.full),
    pytest.param(
        {"model": "tiny-dense", "speculative": "standalone", "speculative_draft_model": "tiny-dense"},
        marks=pytest.mark.full,
    ),
    pytest.param({"model": "tiny-dense", **EAGLE}, marks=pytest.mark.full),
    pytest.param(
        {
            "model": "tiny-dense",
            **EAGLE,
            "speculative_topk": 1,
            "speculative_num_steps": 3,
            "speculative_auto": True,
        },
        marks=pytest.mark.full,
    ),
]


def test_threads_get_their_own_launchers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Although Python keeps one module for all of their name."""
    build = pytest.importorskip("triton.runtime.build")
    from diptych.optimized.kernels import compile_ahead

    shared, both = ModuleType("launcher"), Barrier(2)

    def load(name: str, path: str) -> ModuleType:
        shared.launch = path  # type: ignore[attr-defined]
        return shared

    def launcher(path: str) -> str:
        module = build._load_module_from_path("launcher", path)
        both.wait(60.0)  # now both have loaded theirs
        return module.launch

    monkeypatch.setattr(build, "_load_module_from_path", load)
    with ThreadPoolExecutor(2) as threads:
        assert len(set(threads.map(launcher, "ab"))) == 1
        with compile_ahead._launchers_one_by_one():
            assert list(threads.map(launcher, "ab")) == ["a", "b"]
    assert build._load_module_from_path is load


@pytest.mark.parametrize("flags", FLAGS, ids=str)
@pytest.mark.full
def test_requests_launch_no_other_variant(flags: dict[str, Any], tmp_path: Path) -> None:
    if flags["model"] not in ("tiny-dense", "tiny-moe"):
        flags = flags | {"model": str(write_checkpoint(tmp_path / "model", flags["model"]))}
    done = subprocess.run(
        [sys.executable, "-m", "tests.model_runner.variant_worker"],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path), "TQDM_DISABLE": "1"},
        input=json.dumps(flags),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["new"] == []
    assert 25 <= found["known"] <= 140
    # Compiled once, then read from the folder, which is no compilation.
    assert found["counts"] == [[1, 1], [1, 2]]


def test_only_compilations_after_the_start_count(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[Compilation] = []
    monkeypatch.setattr(compilations, "_log", log)
    log.append(Compilation("triton", "of another engine", False, 1.0))
    counts = Compilations()
    log.append(Compilation("triton", "a", False, 1.0))
    counts.ready()
    assert [each.kernel for each in counts.before_ready] == ["a"]
    assert counts.num_after_ready == 0
    log += [Compilation("triton", "b", True, 0.1), Compilation("flashinfer", "c", False, 60.0)]
    assert [each.kernel for each in counts.after_ready] == ["b", "c"]
    assert counts.num_after_ready == 1


def test_flashinfer_modules_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    class JitSpec:
        name, is_compiled = "batch_prefill", False

        def build_and_load(self) -> str:
            return "module"

    fakes = {"flashinfer": object(), "flashinfer.jit": object(), "flashinfer.jit.core": _Core(JitSpec)}
    for name, fake in fakes.items():
        monkeypatch.setitem(sys.modules, name, fake)  # type: ignore[arg-type]
    monkeypatch.setattr(compilations, "_watched", {"triton"})
    monkeypatch.setattr(compilations, "_log", log := [])
    for _ in range(2):
        compilations.watch()
    assert JitSpec().build_and_load() == "module"
    assert [(each.compiler, each.kernel, each.is_cached) for each in log] == [
        ("flashinfer", "batch_prefill", False)
    ]


class _Core:
    def __init__(self, spec: type) -> None:
        self.JitSpec = spec
