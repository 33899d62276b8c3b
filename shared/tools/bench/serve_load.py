"""Generates load for a server and computes statistics of the outcomes."""

from __future__ import annotations

import asyncio
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from diptych.shared.tools.bench.itl import percentile
from diptych.shared.tools.bench.serve_client import Client, Outcome
from diptych.shared.tools.bench.serve_workloads import Conversation

PERCENTS = (50, 90, 99)
METRICS = ("ttft", "itl", "tpot", "e2e")


@dataclass(frozen=True)
class Arrivals:
    """How conversations start. Open loop: `rate` per second, with exponential intervals (a Poisson process);
    infinity: all at the start. Closed loop: `concurrency` conversations run at any time."""

    rate: float | None = None
    concurrency: int | None = None

    def __post_init__(self) -> None:
        if (self.rate is None) == (self.concurrency is None):
            raise ValueError("give either a request rate or a concurrency")
        if self.rate is not None and not self.rate > 0:
            raise ValueError(f"a request rate must be more than 0, got {self.rate}")
        if self.concurrency is not None and self.concurrency < 1:
            raise ValueError(f"a concurrency must be at least 1, got {self.concurrency}")

    @property
    def name(self) -> str:
        return f"rate {self.rate:g}" if self.rate is not None else f"concurrency {self.concurrency}"

    def intervals(self, seed: int) -> Iterator[float]:
        """The seconds before each start of an open loop."""
        assert self.rate is not None
        dice = random.Random(f"{seed}-arrivals")
        while True:
            yield 0.0 if math.isinf(self.rate) else dice.expovariate(self.rate)


@dataclass(frozen=True)
class Targets:
    """Limits in milliseconds within which a request counts for goodput; None: no limit."""

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    def are_met_by(self, outcome: Outcome) -> bool:
        measured = {
            "ttft": outcome.time_to_first_token,
            "tpot": outcome.time_per_output_token,
            "e2e": outcome.total_time,
        }
        limits = asdict(self)
        return all(
            limits[name] is None or value is None or value * 1000 <= limits[name]
            for name, value in measured.items()
        )


@dataclass
class LoadResult:
    """The outcomes of one rate or concurrency."""

    arrivals: Arrivals
    targets: Targets
    is_flushed: bool = False
    seconds: float = 0.0
    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def good(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.error is None]

    def values(self, metric: str) -> list[float]:
        """The values of a metric in seconds, of all requests (TTFT, TPOT, E2E) or all intervals (ITL).
        "later_ttft": of turns behind the first, which find their history in the prefix cache."""
        if metric in ("ttft", "later_ttft"):
            first = metric == "later_ttft"
            return [outcome.time_to_first_token for outcome in self.good if outcome.turn >= first]
        if metric == "itl":
            return [gap for outcome in self.good for gap in outcome.inter_token_latencies]
        if metric == "tpot":
            return [each for o in self.good if (each := o.time_per_output_token) is not None]
        return [outcome.total_time for outcome in self.good]

    def summary(self, metric: str) -> dict[str, float] | None:
        """Mean, percentiles and maximum in milliseconds. None: nothing was measured."""
        values = [1000 * value for value in self.values(metric)]
        if not values:
            return None
        found = {f"p{percent}": percentile(values, percent) for percent in PERCENTS}
        return {"mean": statistics.fmean(values), **found, "max": max(values)}

    @property
    def output_rate(self) -> float:
        """Output tokens per second."""
        return sum(outcome.num_output_tokens for outcome in self.good) / self.seconds

    @property
    def request_rate(self) -> float:
        """Complete requests per second."""
        return len(self.good) / self.seconds

    @property
    def goodput(self) -> float:
        """Complete requests within the targets, per second."""
        return sum(self.targets.are_met_by(outcome) for outcome in self.good) / self.seconds

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens from the prefix cache, as the server reports it."""
        num_tokens = sum(outcome.num_prompt_tokens for outcome in self.good)
        return sum(outcome.num_cached_tokens for outcome in self.good) / max(num_tokens, 1)

    def as_json(self) -> dict[str, Any]:
        failed = [outcome.error for outcome in self.outcomes if outcome.error is not None]
        rate = self.arrivals.rate
        return {
            "rate": "inf" if rate is not None and math.isinf(rate) else rate,
            "concurrency": self.arrivals.concurrency,
            "is_flushed": self.is_flushed,
            "seconds": self.seconds,
            "num_complete": len(self.good),
            "num_failed": len(failed),
            "errors": sorted(set(map(str, failed)))[:10],
            "num_prompt_tokens": sum(outcome.num_prompt_tokens for outcome in self.good),
            "num_output_tokens": sum(outcome.num_output_tokens for outcome in self.good),
            "request_rate": self.request_rate,
            "output_tokens_per_s": self.output_rate,
            "goodput": self.goodput,
            "hit_rate": self.hit_rate,
            "targets_ms": asdict(self.targets),
            **{f"{metric}_ms": self.summary(metric) for metric in (*METRICS, "later_ttft")},
        }


async def run_load(
    client: Client,
    conversations: Sequence[Conversation],
    result: LoadResult,
    seed: int = 0,
    on_outcome: Callable[[Outcome], None] = lambda outcome: None,
) -> None:
    """Send all requests and wait for the last answer. The result grows meanwhile."""
    arrivals, start = result.arrivals, time.perf_counter()

    async def run(conversation: Conversation) -> None:
        async for outcome in client.run(conversation):
            result.outcomes.append(outcome)
            result.seconds = time.perf_counter() - start
            on_outcome(outcome)

    async def work(queue: Iterator[Conversation]) -> None:
        for conversation in queue:
            await run(conversation)

    tasks: list[asyncio.Task[None]] = []
    try:
        if arrivals.concurrency is not None:
            queue = iter(conversations)
            tasks = [asyncio.create_task(work(queue)) for _ in range(arrivals.concurrency)]
        else:
            due = start
            for conversation, interval in zip(conversations, arrivals.intervals(seed)):
                due += interval  # absolute times, so that a late start does not delay later ones
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                tasks.append(asyncio.create_task(run(conversation)))
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
