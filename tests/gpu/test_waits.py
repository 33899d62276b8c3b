"""Launching a step does not wait for the device, which is busy with other work."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from diptych.shared.tools.bench.step import step_of
from diptych.shared.tools.bench.step_inputs import StepCase, fill_pool

from .harness import MODELS, attention_backends, graph_backends, is_launched_without_waiting, optimized

pytestmark = pytest.mark.gpu

CASES = (StepCase("prefill", 2, 0, 300), StepCase("prefill", 3, 100, 30), StepCase("decode", 4, 100))
ENGINES = [(backend, False) for backend in attention_backends()] + [
    (backend, True) for backend in graph_backends()
]


@contextmanager
def refusing_to_wait() -> Iterator[None]:
    """Synchronizing PyTorch calls raise. Events and other libraries are not covered."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that not every call is found
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(("backend", "graphs"), ENGINES)
@pytest.mark.parametrize("model", MODELS)
def test_a_step_is_launched_without_waiting(model: str, backend: str, graphs: bool) -> None:
    llm = optimized(model, backend, disable_cuda_graph=not graphs)
    fill_pool(llm.assembly.kv_pool)
    for case in CASES:
        with step_of(llm.assembly.parts, case, 0.8, 0) as step:
            step()  # compiles, and allocates what later steps share
            with refusing_to_wait():
                step()
            assert is_launched_without_waiting(step), f"{case}: the CPU waited for the device"
