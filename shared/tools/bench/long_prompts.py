"""Measures how long prompts affect decoding requests: their inter-token latency with and without arrivals."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from diptych.shared.tools.bench.drive import Clock, Sampling, check_fits, check_whole, submit, submitted
from diptych.shared.tools.bench.itl import Interval, ItlMeter, ItlSummary, summarize
from diptych.shared.tools.bench.trace import Traced
from diptych.shared.tools.bench.workloads import LongPrompts, Request

if TYPE_CHECKING:
    from diptych.shared.engine.llm import LLM


class Window(NamedTuple):
    """Some seconds of decoding; shorter than requested if a decoding request ended."""

    seconds: float
    intervals: list[Interval]
    num_arrivals: int
    times_to_first_token: list[float]  # of the long prompts with a first token

    @property
    def itl(self) -> ItlSummary:
        return summarize(self.intervals)


class Repeat(NamedTuple):
    without: Window
    with_arrivals: Window

    @property
    def p99_ratio(self) -> float:
        return self.with_arrivals.itl.p99 / self.without.itl.p99


@dataclass
class LongPromptsResult(Traced):
    """The results, which grow during the measurement."""

    repeats: list[Repeat] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)  # of the engine

    @property
    def p99_ratio(self) -> float:
        return statistics.median(repeat.p99_ratio for repeat in self.repeats)

    def as_json(self) -> dict[str, Any]:
        return {
            "p99_ratio": self.p99_ratio,
            "idle": self.idle_as_json(),
            "runs": [
                {"p99_ratio": repeat.p99_ratio}
                | {name: _as_json(window) for name, window in repeat._asdict().items()}
                for repeat in self.repeats
            ],
            **self.facts,
        }


def _as_json(window: Window) -> dict[str, Any]:
    return {
        "seconds": window.seconds,
        "itl_s": window.itl._asdict(),
        "num_arrivals": window.num_arrivals,
        "times_to_first_token_s": window.times_to_first_token,
    }


def measure(
    llm: LLM,
    workload: LongPrompts,
    result: LongPromptsResult,
    *,
    num_repeats: int = 3,
    num_warm_ups: int = 1,
    on_run: Callable[[str], object] = lambda what: None,
    clock: Clock = time.perf_counter,
) -> None:
    """Measure all windows. Each has new requests; the last one, with the timeline on, does not count."""
    running, long = (case.requests for case in workload.cases(llm.model_config.vocab_size))
    check_fits(llm, [*running, *long])

    def window(what: str, arriving: Sequence[Request]) -> Window:
        on_run(what)
        return run_window(llm, workload, running, arriving, clock)

    for _ in range(num_warm_ups):
        window("warm-up", long)
    for repeat in range(num_repeats):
        what = f"{repeat + 1} of {num_repeats}"
        without = window(f"{what}, without long prompts", [])
        result.repeats.append(Repeat(without, window(f"{what}, with long prompts", long)))
    with result.record(llm):
        window("timeline, with long prompts", long)


def run_window(
    llm: LLM, workload: LongPrompts, running: Sequence[Request], arriving: Sequence[Request], clock: Clock
) -> Window:
    """Measure one window. One of `arriving` is submitted every `interval`, the first at the start. The
    interval that is open at the end counts."""
    sampling = Sampling(workload.temperature, workload.seed)
    with submitted(llm, running, sampling, clock) as (collectors, _):
        meter = ItlMeter(collectors)
        while min(meter.num_seen) < 2:  # the first token arrived while other prompts were computed
            if not llm.step():
                check_whole(collectors, running)  # raises with the request that failed
            meter.look(clock())
        start = now = clock()
        meter.intervals.clear()
        dues = [start + i * workload.interval for i in range(len(arriving))]
        long = ItlMeter()
        try:
            end = start + workload.seconds
            while min(meter.last_times) < end and not any(c.is_finished for c in collectors):
                while len(long.collectors) < len(arriving) and dues[len(long.collectors)] <= now:
                    long.add(submit(llm, arriving[len(long.collectors)], sampling))
                llm.step()
                now = clock()
                meter.look(now)
                long.look(now)
        finally:
            for collector in long.collectors:
                llm.abort(collector.rid)
    waits = [first - due for first, due in zip(long.first_times, dues) if first is not None]
    return Window(now - start, meter.intervals, len(long.collectors), waits)
