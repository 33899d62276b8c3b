"""Measures a few streams through the whole engine: TTFT, inter-token latency, and the engine's overhead over
a bare step."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from diptych.shared.engine.processes.start import on_every_rank
from diptych.shared.tools.bench.drive import (
    Clock,
    OnTokens,
    Sampling,
    check_fits,
    check_whole,
    flush,
    submitted,
)
from diptych.shared.tools.bench.itl import Interval, ItlMeter, ItlSummary, percentile, summarize
from diptych.shared.tools.bench.offline import OnRun
from diptych.shared.tools.bench.step import step_of, time_step
from diptych.shared.tools.bench.step_inputs import StepCase, fill_pool
from diptych.shared.tools.bench.trace import Traced
from diptych.shared.tools.bench.workloads import Request, Uniform, check_least

if TYPE_CHECKING:
    from diptych.shared.engine.build.assembly import Assembly
    from diptych.shared.engine.llm import LLM


@dataclass(frozen=True)
class Streams:
    """`concurrency` requests of equal lengths."""

    concurrency: int = 1
    input_len: int = 512
    output_len: int = 128
    temperature: float = 0.6
    seed: int = 0

    def __post_init__(self) -> None:
        check_least(self, concurrency=1, input_len=1, output_len=3)

    def requests(self, vocab_size: int) -> list[Request]:
        """The requests, without a common prefix."""
        lens = (self.input_len, self.input_len), (self.output_len, self.output_len)
        return Uniform((self.concurrency,), *lens, self.temperature, self.seed).cases(vocab_size)[0].requests

    @property
    def mean_context_len(self) -> int:
        """The mean number of tokens of a request after a decode step."""
        return self.input_len + self.output_len // 2


class StreamRun(NamedTuple):
    """One run, in seconds. Intervals are those while all requests decode."""

    times_to_first_token: list[float]
    intervals: list[Interval]
    total_time: float

    @property
    def itl(self) -> ItlSummary:
        return summarize(self.intervals)


@dataclass
class LatencyResult(Traced):
    """Results of all runs. It grows during the measurement, so an interrupt keeps the complete runs."""

    streams: Streams
    runs: list[StreamRun] = field(default_factory=list)
    bound: float | None = None  # seconds for a token of each request
    step_time: float | None = None  # of a bare step, in the same process

    @property
    def time_per_token(self) -> float:
        """Seconds, median of the runs."""
        return statistics.median(run.itl.per_token for run in self.runs)

    @property
    def time_to_first_token(self) -> float:
        """Median of the requests, and of the runs."""
        return statistics.median(percentile(run.times_to_first_token, 50) for run in self.runs)

    def itl(self, name: str) -> float:
        """The median over the runs of a field of `ItlSummary`."""
        return statistics.median([float(run.itl._asdict()[name]) for run in self.runs])

    @property
    def overhead(self) -> float | None:
        """What the engine adds to a bare step, as a share of the step."""
        return None if self.step_time is None else self.time_per_token / self.step_time - 1

    def as_json(self) -> dict[str, Any]:
        return {
            "concurrency": self.streams.concurrency,
            "input_len": self.streams.input_len,
            "output_len": self.streams.output_len,
            "time_to_first_token_s": self.time_to_first_token,
            "time_per_token_s": self.time_per_token,
            "itl_s": {name: self.itl(name) for name in ("p50", "p90", "p99", "max")},
            "step_s": self.step_time,
            "step_context_len": self.streams.mean_context_len,
            "overhead": self.overhead,
            "bound_s": self.bound,
            "idle": self.idle_as_json(),
            "runs": [
                {
                    "times_to_first_token_s": run.times_to_first_token,
                    "itl_s": run.itl._asdict(),
                    "total_s": run.total_time,
                }
                for run in self.runs
            ],
        }


def measure(
    llm: LLM,
    result: LatencyResult,
    *,
    num_repeats: int = 3,
    num_warm_ups: int = 1,
    on_run: OnRun = lambda what, num_tokens: None,
    clock: Clock = time.perf_counter,
) -> None:
    """Measure the runs. The run with the timeline comes last, and its times do not count."""
    streams = result.streams
    requests = streams.requests(llm.model_config.vocab_size)

    def run(what: str) -> StreamRun:
        what = f"concurrency {streams.concurrency}: {what}"
        return run_streams(
            llm, streams, requests, clock, on_run(what, streams.concurrency * streams.output_len)
        )

    result.repeat(llm, run, result.runs, num_repeats, num_warm_ups)


def run_streams(
    llm: LLM, streams: Streams, requests: list[Request], clock: Clock, on_tokens: OnTokens | None = None
) -> StreamRun:
    check_fits(llm, requests)
    with submitted(llm, requests, Sampling(streams.temperature, streams.seed), clock) as (collectors, start):
        meter = ItlMeter(collectors)
        while llm.step():
            meter.look(clock())
            if on_tokens is not None:
                on_tokens(sum(meter.num_seen))
    check_whole(collectors, requests)
    firsts = [time - start for time in meter.first_times if time is not None]
    return StreamRun(firsts, meter.steady_intervals(), max(meter.last_times) - start)


def measure_step(llm: LLM, streams: Streams, num_repeats: int = 30) -> float:
    """Seconds of the bare step of the same batch at the mean context, median. Overwrites the pool."""
    flush(llm)
    return on_every_rank(llm.assembly, time_bare_step, astuple(streams), num_repeats)


def time_bare_step(assembly: Assembly, fields: Sequence[Any], num_repeats: int) -> float:
    """Measure the step of `Streams(*fields)`. All ranks call it."""
    streams = Streams(*fields)
    fill_pool(assembly.kv_pool, streams.seed)
    case = StepCase("decode", streams.concurrency, streams.mean_context_len)
    with step_of(assembly.parts, case, streams.temperature, streams.seed, assembly.lora) as step:
        times, _ = time_step(step, assembly.parts.allocator.device, num_repeats, assembly.tp)
    return statistics.median(times)
