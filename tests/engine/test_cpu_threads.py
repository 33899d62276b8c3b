"""The number of CPU threads is measured, and one that the user has set stays."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from diptych.shared.config import EngineConfig
from diptych.shared.engine.build import cpu_threads
from diptych.shared.engine.build.cpu_threads import choose_threads


class Machine:
    """8 cores, on which a GEMM takes `seconds(threads)`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: Callable[[int], float]) -> None:
        self.threads, self.time, self.seconds = 8, 0.0, seconds
        for name in cpu_threads.VARIABLES:
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(cpu_threads, "_chosen", None)
        monkeypatch.setattr(cpu_threads, "default_threads", lambda: 8)
        monkeypatch.setattr(torch, "get_num_threads", lambda: self.threads)
        monkeypatch.setattr(torch, "set_num_threads", lambda count: setattr(self, "threads", count))
        monkeypatch.setattr(cpu_threads.time, "perf_counter", lambda: self.time)
        monkeypatch.setattr(cpu_threads.F, "linear", self.linear)

    def linear(self, x: torch.Tensor, weight: torch.Tensor) -> None:
        self.time += self.seconds(self.threads)


def model(num_parameters: int = 60_000_000) -> torch.nn.Module:
    found = torch.nn.Module()
    found.weight = torch.nn.Parameter(torch.empty(num_parameters, 1, device="meta"))
    return found


KINDS = {
    "idle cores": (lambda n: 0.01 / n, 8),
    "bound by memory": (lambda n: 0.01 / min(n, 2), 2),
    "busy cores": (lambda n: 0.01 if n == 1 else 0.05, 1),
    "a gain of many": (lambda n: 0.01 * 0.9 ** (n - 1), 8),
    "no gain": (lambda n: 0.01, 1),
}


@pytest.mark.parametrize(("seconds", "expected"), KINDS.values(), ids=KINDS)
def test_the_fastest_number(
    monkeypatch: pytest.MonkeyPatch, seconds: Callable[[int], float], expected: int
) -> None:
    machine = Machine(monkeypatch, seconds)
    assert choose_threads(model(), EngineConfig()) == expected == machine.threads
    assert (
        choose_threads(model(), EngineConfig()) == expected
    )  # of the next engine: the number is not the user's


def test_a_small_model_and_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(monkeypatch, lambda n: 0.01 / n)
    assert choose_threads(model(1000), EngineConfig()) == 1
    assert choose_threads(model(), EngineConfig(tp=4)) == 2


@pytest.mark.parametrize("variable", cpu_threads.VARIABLES)
def test_the_users_variable_stays(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    machine = Machine(monkeypatch, lambda n: 0.01)
    monkeypatch.setenv(variable, "8")
    assert choose_threads(model(), EngineConfig()) == machine.threads == 8


def test_deterministic_mode_keeps_the_number(monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(monkeypatch, lambda n: 0.01)
    assert choose_threads(model(), EngineConfig(deterministic=True)) == 8


def test_the_users_number_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, lambda n: 0.01)
    machine.threads = 6
    assert choose_threads(model(), EngineConfig()) == machine.threads == 6
