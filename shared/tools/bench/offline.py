"""Measures throughput of the whole engine: a warm-up, repeats, and one more run with the timeline on."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from diptych.shared.tools.bench.drive import Clock, Run, Sampling, run_to_end
from diptych.shared.tools.bench.trace import Traced
from diptych.shared.tools.bench.workload_bound import WorkloadBound
from diptych.shared.tools.bench.workloads import Case

if TYPE_CHECKING:
    from diptych.shared.engine.llm import LLM


@dataclass
class CaseResult(Traced):
    """The results of one case. They grow during the measurement, so an interrupt keeps the complete runs."""

    case: Case
    label: str
    ideal_hit_rate: float | None = None
    bound: WorkloadBound | None = None
    facts: dict[str, Any] = field(default_factory=dict)  # of the engine
    runs: list[Run] = field(default_factory=list)

    @property
    def speeds(self) -> list[float]:
        return [run.tokens_per_second for run in self.runs]

    @property
    def speed(self) -> float:
        """Tokens per second, median."""
        return statistics.median(self.speeds)

    @property
    def hit_rate(self) -> float:
        return statistics.median(run.hit_rate for run in self.runs)

    @property
    def time_to_first_token(self) -> float | None:
        times = [run.time_to_first_token for run in self.runs if run.time_to_first_token is not None]
        return statistics.median(times) if times else None

    def as_json(self) -> dict[str, Any]:
        return {
            "case": self.label,
            "num_requests": len(self.case.requests),
            "tokens_per_s": {
                "median": self.speed,
                "min": min(self.speeds),
                "max": max(self.speeds),
            },
            "time_to_first_token_s": self.time_to_first_token,
            "hit_rate": self.hit_rate,
            "ideal_hit_rate": self.ideal_hit_rate,
            "bound": None if self.bound is None else bound_as_json(self.bound, self.speed),
            "idle": self.idle_as_json(),
            "runs": [run.as_json() for run in self.runs],
            **self.facts,
        }


def bound_as_json(bound: WorkloadBound, speed: float) -> dict[str, float]:
    return {
        "tokens_per_s": bound.tokens_per_second,
        "prefill_s": bound.prefill,
        "decode_s": bound.decode,
        "share": speed / bound.tokens_per_second,
    }


OnRun = Callable[[str, int], Any]
"""(what runs now, how many tokens it will give) -> something to call with the tokens so far, or None."""


def measure(
    llm: LLM,
    result: CaseResult,
    sampling: Sampling,
    *,
    num_repeats: int = 3,
    num_warm_ups: int = 1,
    on_run: OnRun = lambda what, num_tokens: None,
    clock: Clock = time.perf_counter,
) -> None:
    """Measure one case. The run with the timeline comes last, and its speed does not count."""

    def run(what: str) -> Run:
        num_tokens = sum(request.output_len for request in result.case.requests)
        on_tokens = on_run(f"{result.label}: {what}", num_tokens)
        return run_to_end(llm, result.case.requests, sampling, clock, on_tokens)

    result.repeat(llm, run, result.runs, num_repeats, num_warm_ups)
