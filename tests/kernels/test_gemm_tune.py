"""What is written down about cuBLAS's algorithms: on a clock that the stand-in for the library moves."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from tqdm.auto import tqdm

from optimized.kernels import cublas_linear, cublas_lt, gemm_tune, gpu_table
from optimized.kernels.cublas_linear import Shape, Table
from optimized.kernels.cublas_lt import Config, Library, Problem
from optimized.kernels.cublas_lt_api import Functions
from optimized.kernels.gemm_tune import Layers, shapes_of
from optimized.kernels.gpu_table import GpuTable
from shared.config import ModelConfig
from shared.loading.model_path import resolve_model_path
from tests.kernels.fake_cublas_lt import PROPOSED, STREAM, FakeCublasLt, config_of

SHAPE = Shape(40, 24)
OWN_TIME = 100.0
FAST = PROPOSED[0]._replace(tile_id=3, cluster_shape_id=5, custom_option=0)


class Clock(FakeCublasLt):
    """Algorithms take 200 microseconds, but for those in `times`. `wrong` ones leave out the first token."""

    def __init__(self, times: dict[Config, float], wrong: tuple[Config, ...] = ()) -> None:
        super().__init__()
        self.now = 0.0
        self.times = times
        self.wrong = wrong

    def Matmul(self, handle: int, desc: int, alpha: int, *arguments: object) -> int:
        config = config_of(arguments[9])
        status = super().Matmul(handle, desc, alpha, *arguments)
        self.now += self.times.get(config, 200.0)
        if config in self.wrong:
            self._matrix(arguments[7], arguments[8])[:, 0] = 0
        return status

    def mark(self) -> SimpleNamespace:
        at = self.now
        return SimpleNamespace(at=at, synchronize=lambda: None, elapsed_time=lambda end: (end.at - at) / 1e3)


@pytest.fixture
def on_a_clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Clock]]:
    """The clock of the test, once it is there: time is read from it instead of the device."""
    clocks: list[Clock] = []

    def run_own_choice(layers: Layers, i: int) -> None:
        clocks[0].now += OWN_TIME

    def capture(layers: Layers, run: object) -> SimpleNamespace:
        return SimpleNamespace(replay=lambda: [run(i) for i in range(layers.num_calls)])

    monkeypatch.setattr(cublas_lt, "current_stream", lambda _: STREAM)
    monkeypatch.setattr(gemm_tune, "ROUND_BYTES", 10_000)
    monkeypatch.setattr(gemm_tune, "TURN_SECONDS", 1e-3)
    monkeypatch.setattr(gemm_tune, "_mark", lambda: clocks[0].mark())
    monkeypatch.setattr(Layers, "run_own_choice", run_own_choice)
    monkeypatch.setattr(Layers, "_capture", capture)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    yield clocks
    assert clocks[0].failures == []


def tuned(
    clock: Clock, table: Table, known: bool = False, add: bool = False, num_tokens: int = 16
) -> dict[int, Config | None]:
    pool = torch.randn(20_000).to(torch.bfloat16)
    layers = Layers(Library(Functions(clock)), pool, SHAPE.problem(num_tokens), add)
    with tqdm(disable=True) as progress:
        gemm_tune.tune_one(layers, table, known, progress)
    return table.configs[SHAPE]


@pytest.mark.parametrize("add", [False, True])
def test_the_fastest_is_written_down(on_a_clock: list[Clock], add: bool) -> None:
    on_a_clock.append(Clock({FAST: 90.0, PROPOSED[0]: 95.0}))
    assert tuned(on_a_clock[0], Table("", {}), add=add) == {16: FAST}


def test_too_small_a_gain_is_not(on_a_clock: list[Clock]) -> None:
    on_a_clock.append(Clock({FAST: 99.0}))
    assert tuned(on_a_clock[0], Table("", {SHAPE: {16: FAST, 24: FAST}})) == {24: FAST}


def test_of_prompts_it_is_written_down_that_the_own_choice_is_best(on_a_clock: list[Clock]) -> None:
    """Else the entry of fewer tokens would serve there."""
    on_a_clock.append(Clock({FAST: 99.0}))
    table = Table("", {SHAPE: {520: FAST}})
    assert tuned(on_a_clock[0], table, known=True, num_tokens=1024) == {520: FAST, 1024: None}


def test_what_gives_wrong_results_is_not(on_a_clock: list[Clock]) -> None:
    on_a_clock.append(Clock({FAST: 50.0, PROPOSED[0]: 95.0}, wrong=(FAST,)))
    assert tuned(on_a_clock[0], Table("", {})) == {16: PROPOSED[0]}


def test_known_ones_are_those_of_other_numbers_of_tokens(on_a_clock: list[Clock]) -> None:
    other = FAST._replace(custom_option=2)
    on_a_clock.append(Clock({FAST._replace(tile_id=2): 50.0, other: 60.0}))
    assert tuned(on_a_clock[0], Table("", {SHAPE: {8: other}}), known=True) == {8: other, 16: other}


def test_a_table_is_read_as_it_was_written() -> None:
    configs = {SHAPE: {16: FAST, 128: PROPOSED[0], 1024: None}, Shape(24, 99, in_float32=True): {8: FAST}}
    table = Table("13.1.0", configs)
    written = gpu_table.dumps(cublas_linear.with_gemms(GpuTable("A GPU"), table))
    assert cublas_linear.table_of(gpu_table.parse(written)) == table


def test_the_shapes_of_models() -> None:
    dense, experts, biased = (
        shapes_of(ModelConfig.from_pretrained(resolve_model_path(name, "dummy")))
        for name in ("Qwen3-8B", "Qwen3-30B-A3B", "Qwen2.5-7B")
    )
    assert dense == {
        Shape(4096, 6144): False,
        Shape(4096, 4096): True,
        Shape(4096, 24576): False,
        Shape(12288, 4096): True,
        Shape(4096, 151936, in_float32=True): False,
    }
    assert experts == {
        Shape(2048, 5120): False,
        Shape(4096, 2048): True,
        Shape(2048, 128): False,
        Shape(2048, 151936, in_float32=True): False,
    }
    assert Shape(3584, 4608) not in biased
    problem = Shape(4096, 151936, in_float32=True).problem(64)
    assert problem == Problem(64, 151936, 4096, torch.bfloat16, torch.float32)
