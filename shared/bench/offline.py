"""Offline throughput: so many requests at once, random prompts, answers of a fixed length, a cold cache."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from shared import machine
from shared.bench.step_timer import StepTimes, device_synchronizer, time_steps

if TYPE_CHECKING:
    from shared.engine import LLM


@dataclass(frozen=True)
class Workload:
    """What is asked of the engine: at each concurrency so many requests of equal shape, all at once."""

    concurrency: tuple[int, ...] = (1, 16)
    input_len: int = 32
    output_len: int = 128
    num_repeats: int = 3
    temperature: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("input_len", "output_len", "num_repeats"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not self.concurrency or min(self.concurrency) < 1:
            raise ValueError(f"concurrency must list numbers of at least 1, got {self.concurrency}")

    def prompts(self, concurrency: int, vocab_size: int) -> list[list[int]]:
        """Random token ids; the first ones differ, so that no two prompts share a prefix."""
        if concurrency > vocab_size:
            raise ValueError(f"{concurrency} prompts without a common prefix need a vocabulary of that size")
        dice = random.Random(f"{self.seed}-{concurrency}")
        firsts = dice.sample(range(vocab_size), concurrency)
        return [[first, *(dice.randrange(vocab_size) for _ in range(self.input_len - 1))] for first in firsts]


class Run(NamedTuple):
    """One measurement. Times in seconds from the submission of all requests."""

    num_output_tokens: int
    total_time: float
    time_to_first_token: float | None  # of a single, streamed request

    @property
    def tokens_per_second(self) -> float:
        """Output tokens over the whole time, prefill included."""
        return self.num_output_tokens / self.total_time


@dataclass(frozen=True)
class Result:
    """All runs at one concurrency, and where the steps' time went (measured in a run of its own)."""

    concurrency: int
    runs: tuple[Run, ...]
    steps: StepTimes

    @property
    def speeds(self) -> list[float]:
        return [run.tokens_per_second for run in self.runs]

    @property
    def time_to_first_token(self) -> float | None:
        times = [run.time_to_first_token for run in self.runs if run.time_to_first_token is not None]
        return statistics.median(times) if times else None


def measure(
    llm: LLM,
    workload: Workload,
    on_run: Callable[[str], None] = lambda what: None,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Result]:
    """Warm up, then measure each concurrency `num_repeats` times, and once more with timed steps."""
    results = []
    parts = llm.assembly.parts
    for concurrency in workload.concurrency:
        on_run(f"{concurrency} at once: warm-up")
        _run(llm, workload, concurrency, clock)
        runs = []
        for repeat in range(workload.num_repeats):
            on_run(f"{concurrency} at once: {repeat + 1} of {workload.num_repeats}")
            runs.append(_run(llm, workload, concurrency, clock))
        on_run(f"{concurrency} at once: steps")
        synchronize = device_synchronizer(str(llm.config.device))
        with time_steps(llm.scheduler, parts.model_runner, parts.sampler, synchronize, clock) as steps:
            _run(llm, workload, concurrency, clock)
        results.append(Result(concurrency, tuple(runs), steps))
    return results


def _run(llm: LLM, workload: Workload, concurrency: int, clock: Callable[[], float]) -> Run:
    from shared.types import SamplingParams

    params = SamplingParams(
        max_new_tokens=workload.output_len,
        ignore_eos=True,
        temperature=workload.temperature,
        seed=workload.seed,
    )
    prompts = workload.prompts(concurrency, llm.model_config.vocab_size)
    if not llm.flush_cache():
        raise ValueError("the engine is busy: a benchmark needs it for itself")
    time_to_first_token = None
    num_output_tokens = 0
    start = clock()
    if concurrency == 1:
        for piece in llm.stream(prompts[0], params):
            num_output_tokens += len(piece.output_ids)
            if time_to_first_token is None and num_output_tokens:
                time_to_first_token = clock() - start
    else:
        outputs = llm.generate(prompts, params, progress=False)
        assert isinstance(outputs, list)
        num_output_tokens = sum(output.num_output_tokens for output in outputs)
    total_time = clock() - start
    wanted = concurrency * workload.output_len
    if num_output_tokens != wanted:
        raise ValueError(
            f"{concurrency} requests gave {num_output_tokens} tokens instead of {wanted}: input_len "
            f"{workload.input_len} + output_len {workload.output_len} must fit into the context "
            f"({llm.config.context_len}) and the KV pool ({llm.config.max_total_tokens})"
        )
    return Run(num_output_tokens, total_time, time_to_first_token)


def report(llm: LLM, workload: Workload, results: list[Result]) -> dict[str, Any]:
    """Everything that is needed to judge, repeat or compare the measurement; JSON-compatible."""
    return {
        "benchmark": "offline",
        "versions": machine.versions(),
        "machine": machine.facts(),
        "flags": asdict(llm.config) | {"use": dict(llm.config.use)},
        "components": llm.describe(),
        "workload": asdict(workload),
        "results": [
            {
                "concurrency": result.concurrency,
                "tokens_per_s": {
                    "median": statistics.median(result.speeds),
                    "min": min(result.speeds),
                    "max": max(result.speeds),
                    "runs": result.speeds,
                },
                "time_to_first_token_s": result.time_to_first_token,
                "steps": asdict(result.steps),
                "outside_share": result.steps.outside_share,
            }
            for result in results
        ],
    }
