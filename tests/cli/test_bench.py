"""The measuring itself is tested with a clock that the test moves, the rest with the built-in model."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from shared.bench.offline import Workload
from shared.bench.step_timer import time_steps
from shared.commands.bench import parse_concurrency


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Machinery:
    """Scheduler, model runner and sampler in one: a step takes 2 + (5 + 1 + 1) + 1 seconds, and one that
    calls model and sampler by themselves 1 second less."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def step(self, in_one: bool = True) -> str:
        self.clock.now += 2
        if in_one:
            self.forward_and_sample()
        else:
            self.forward()
            self.sample()
        self.clock.now += 1
        return "output"

    def forward_and_sample(self) -> None:
        self.forward()
        self.clock.now += 1
        self.sample()

    def forward(self) -> None:
        self.clock.now += 5

    def sample(self) -> None:
        self.clock.now += 1


def test_step_timer_divides_a_step() -> None:
    clock = Clock()
    machinery = Machinery(clock)
    synchronized = []
    with time_steps(machinery, machinery, machinery, lambda: synchronized.append(clock()), clock) as times:
        assert machinery.step() == "output"
    assert (times.num_steps, times.step, times.forward, times.sample) == (1, 10.0, 5.0, 1.0)
    assert times.model_and_sampler == 7.0
    assert times.outside_share == pytest.approx(0.3)
    assert synchronized == [0.0, 2.0, 2.0, 7.0, 8.0, 9.0, 9.0, 10.0]


def test_step_timer_sees_model_and_sampler_by_themselves() -> None:
    clock = Clock()
    machinery = Machinery(clock)
    with time_steps(machinery, machinery, machinery, clock=clock) as times:
        machinery.step()
        machinery.step(in_one=False)
    assert (times.num_steps, times.step, times.forward, times.sample) == (2, 19.0, 10.0, 2.0)
    assert times.model_and_sampler == 13.0


def test_step_timer_leaves_no_trace() -> None:
    machinery = Machinery(Clock())
    with pytest.raises(RuntimeError), time_steps(machinery, machinery, machinery):
        raise RuntimeError
    assert set(vars(machinery)) == {"clock"}


def test_prompts_are_distinct_from_the_first_token_on() -> None:
    prompts = Workload(input_len=5).prompts(16, vocab_size=100)
    assert len({prompt[0] for prompt in prompts}) == 16
    assert {len(prompt) for prompt in prompts} == {5}
    assert prompts == Workload(input_len=5).prompts(16, vocab_size=100)
    assert prompts != Workload(input_len=5, seed=1).prompts(16, vocab_size=100)


@pytest.mark.parametrize(
    "bad", [{"output_len": 0}, {"concurrency": ()}, {"concurrency": (0,)}, {"num_repeats": 0}]
)
def test_workload_refuses_nonsense(bad: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        Workload(**bad)  # type: ignore[arg-type]


def test_concurrency_is_a_list_of_numbers() -> None:
    assert parse_concurrency("1,16") == (1, 16)
    with pytest.raises(ValueError, match="'1;16'"):
        parse_concurrency("1;16")


def test_bench_offline_measures_the_built_in_model(diptych: Callable[..., Result], tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    options = ["--concurrency", "1,3", "--input-len", "8", "--output-len", "6", "--repeats", "2"]
    result = diptych("bench", "offline", *options, "--output", str(file))
    assert result.exit_code == 0, result.output
    data = json.loads(file.read_text())
    assert [row["concurrency"] for row in data["results"]] == [1, 3]
    for row in data["results"]:
        speed = row["tokens_per_s"]
        assert len(speed["runs"]) == 2
        assert 0 < speed["min"] <= speed["median"] <= speed["max"]
        assert 0 < row["outside_share"] < 1
        # One step of prefill gives the first token, five of decode the others.
        assert row["steps"]["num_steps"] == 6
    assert data["results"][0]["time_to_first_token_s"] > 0
    assert data["results"][1]["time_to_first_token_s"] is None
    assert data["flags"]["model"] == "tiny-dense"
    assert data["components"]["scheduler"] == "reference"
    assert data["versions"]["torch"]
    assert data["machine"]["num_torch_threads"] == 1


def test_bench_offline_refuses_what_does_not_fit(diptych: Callable[..., Result]) -> None:
    options = ["--concurrency", "1", "--input-len", "8", "--output-len", "600", "--context-len", "64"]
    result = diptych("bench", "offline", *options)
    assert result.exit_code == 2
    assert "must fit into the context (64)" in result.stderr.splitlines()[-1]
