"""Engines on the GPU: the optimized panel and the reference."""

from __future__ import annotations

import fcntl
import os
import pickle
from collections.abc import Callable, Iterable, Sequence
from functools import cache, wraps
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from diptych.shared import registry
from diptych.shared.engine.llm import LLM
from diptych.shared.tools.conformance.whole_engine.switches import answers_with_alternatives
from diptych.shared.types import GenerateOutput

from .session import ANSWERS

F = TypeVar("F", bound=Callable[..., Any])

MODELS = ("tiny-dense", "tiny-moe")
REFERENCE = {"device": "cuda", "panel": "reference"}
OPTIMIZED = {
    "device": "cuda",
    "panel": "optimized",
    "max_running_requests": 8,
    "cuda_graph_max_tokens": 256,
    "skip_warmup": True,
}
"""A small batch size and few tokens, so that few graphs are captured. Kernels are compiled when a test needs
them: no engine of a test uses all that it could."""


def attention_backends() -> list[str]:
    """Every registered backend except the reference, once each."""
    by_target = {target: name for name, target in registry.IMPLEMENTATIONS["attention"].items()}
    return sorted(name for name in by_target.values() if name != "reference")


def graph_backends() -> list[str]:
    """Those whose decode steps are replayed."""
    return [name for name in attention_backends() if name != "flex_attention"]


def with_attention(backend: str | None) -> dict[str, Any]:
    return {"use": {"attention": backend}} if backend is not None else {}


def reference(model: str, **flags: Any) -> LLM:
    return LLM(model=model, **{**REFERENCE, "max_total_tokens": 8192, **flags})


def optimized(model: str, backend: str | None = None, **flags: Any) -> LLM:
    """`backend` None: the default of the panel."""
    return LLM(model=model, **{**OPTIMIZED, "max_total_tokens": 8192, **with_attention(backend), **flags})


def computed_once(function: F, folder: Path = ANSWERS) -> F:
    """Like `functools.cache`, by one worker of a session for all: the others wait for it. The arguments have
    a `repr` that tells them apart."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")

    @wraps(function)
    def read_or_compute(*arguments: Any) -> Any:
        if run is None:
            return function(*arguments)
        folder.mkdir(parents=True, exist_ok=True)
        name = f"{run}.{function.__module__}.{function.__qualname__}{arguments!r}".replace("/", "_")
        path, new = folder / name, folder / f"{name}.new"
        with (folder / f"{name}.lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():  # a writer that ends early leaves nothing to read
                new.write_bytes(pickle.dumps(function(*arguments)))
                new.replace(path)
        return pickle.loads(path.read_bytes())

    return cache(read_or_compute)  # type: ignore[return-value]


BUSY_SECONDS = (0.1, 1.0, 4.0)
CYCLES_PER_SECOND = 2_000_000_000


def is_launched_without_waiting(launch: Callable[[], object]) -> bool:
    """Whether `launch` returns while the device is busy. It is busy for longer only where a launch has taken
    so long: other tests wait for it meanwhile."""
    for seconds in BUSY_SECONDS:
        torch.cuda.synchronize()
        torch.cuda._sleep(int(seconds * CYCLES_PER_SECOND))
        busy = torch.cuda.Event()
        busy.record()
        launch()
        has_waited = busy.query()
        torch.cuda.synchronize()
        if not has_waited:
            return True
    return False


@computed_once
def reference_answers(model: str, dtype: str = "float32") -> list[GenerateOutput]:
    """Runs all prompts in one batch on the GPU. Batch invariance is tested elsewhere."""
    return answers_with_alternatives(model, **REFERENCE, dtype=dtype, max_total_tokens=8192)


def some_pairs(rows: Iterable[Any], columns: Sequence[Any], width: int) -> list[Any]:
    """The pairs of a grid for `parametrize`. In the fast cut each row has `width` columns, in turn."""
    return [
        pytest.param(row, column, marks=[pytest.mark.full] * ((j - i) % len(columns) >= width))
        for i, row in enumerate(rows)
        for j, column in enumerate(columns)
    ]


def name_of(value: Any) -> str:
    """A test id: flags as on the command line."""
    if not isinstance(value, dict):
        return str(value)
    return ",".join(f"{name}={value}" for name, value in value.items()) or "default"
