"""How often a function runs before and while it is captured. Without a GPU: a capture only runs it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from diptych.optimized.graphs import all_steps, cuda_graph
from diptych.optimized.graphs.all_steps import AllSteps
from diptych.optimized.graphs.cuda_graph import CudaGraphs
from diptych.shared.config import EngineConfig


class Captures(CudaGraphs):
    def __init__(self) -> None:
        self.device, self.are_rehearsed, self.is_capturing = torch.device("cpu"), False, False

    @contextmanager
    def _capturing(self) -> Iterator[Any]:
        self.is_capturing = True
        graph = SimpleNamespace(replay=lambda: None)
        try:
            yield SimpleNamespace(graph=graph, cut=lambda tensors: (graph.replay, tensors))
        finally:
            self.is_capturing = False


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> Captures:
    monkeypatch.setattr(cuda_graph, "_refusing_to_wait", nullcontext)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    return Captures()


@pytest.mark.parametrize(
    ("are_rehearsed", "of_other_size", "num_runs"),
    [(False, False, 3), (False, True, 3), (True, False, 3), (True, True, 1)],
)
def test_runs_of_a_capture(
    captures: Captures, are_rehearsed: bool, of_other_size: bool, num_runs: int
) -> None:
    captures.are_rehearsed, runs = are_rehearsed, []

    def function(cut: Any = None) -> Any:
        runs.append(cut)
        return torch.zeros(1) if cut is None else []

    captures.capture(function, of_other_size)
    assert len(runs) == num_runs
    captures.capture_pieces(function, of_other_size)
    assert len(runs) == 2 * num_runs


def test_what_waits_at_a_later_size_is_named(captures: Captures) -> None:
    captures.are_rehearsed = True

    def function() -> torch.Tensor:
        raise RuntimeError("not permitted" if captures.is_capturing else "a synchronizing operation")

    with pytest.warns(RuntimeWarning, match="makes the CPU wait"):
        assert cuda_graph.try_to_capture(captures, "decoding", "the model", function, True) is None


@pytest.mark.parametrize(
    ("flags", "are_rehearsed"),
    [({}, True), ({"tp": 2}, True), ({"pp": 2}, False), ({"tp": 2, "ep": 2}, False),
     ({"skip_warmup": True}, False)],
    ids=str,
)  # fmt: skip
def test_what_is_rehearsed(
    monkeypatch: pytest.MonkeyPatch, flags: dict[str, Any], are_rehearsed: bool
) -> None:
    monkeypatch.setattr(all_steps, "compile_ahead", nullcontext)
    graphs, rehearsed = SimpleNamespace(are_rehearsed=False), []
    steps: Any = SimpleNamespace(
        config=EngineConfig(model="tiny-moe", **flags),
        device=torch.device("cuda"),
        rehearse=lambda *given: rehearsed.append(given),
        capture=lambda *given: None,
    )
    AllSteps.prepare(steps, SimpleNamespace(), graphs, None, 0)  # type: ignore[arg-type]
    assert graphs.are_rehearsed == (len(rehearsed) == 1) == are_rehearsed
