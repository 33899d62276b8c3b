"""Generates load for a server and computes statistics of the outcomes."""

from __future__ import annotations

import asyncio
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

from diptych.shared.tools.bench.itl import percentile
from diptych.shared.tools.bench.serve_client import Client, Outcome
from diptych.shared.tools.bench.serve_workloads import Conversation

PERCENTS = (50, 90, 99)
METRICS = ("ttft", "itl", "tpot", "e2e")
TURN_METRICS = ("first_ttft", "later_ttft", "alone_ttft", "steady_itl")
LATE = 1.5
"""An inter-token latency above so many medians is reported as late."""


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
    has_cache: bool = True  # False: of the server without a prefix cache
    alone: list[float] = field(default_factory=list)  # TTFT of prompts as long as a later turn's new tokens
    seconds: float = 0.0
    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.arrivals.name + ("" if self.has_cache else ", cache off")

    @property
    def good(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.error is None]

    def values(self, metric: str) -> list[float]:
        """The values of a metric in seconds, of all requests (TTFT, TPOT, E2E) or all intervals (ITL).
        "first_ttft": of first turns; "later_ttft": of the others, which find their history in the prefix
        cache; "alone_ttft": of cold prompts of the new tokens of a later turn; "steady_itl": from the time
        at which all conversations have their first token."""
        if metric == "alone_ttft":
            return self.alone
        if metric.endswith("ttft"):
            is_asked = {"ttft": (True, True), "first_ttft": (True, False), "later_ttft": (False, True)}[
                metric
            ]
            return [each.time_to_first_token for each in self.good if is_asked[each.turn > 0]]
        if metric.endswith("itl"):
            begun = max((each.chunk_times[0] for each in self.good if not each.turn), default=0.0)
            since = begun if metric == "steady_itl" else 0.0
            gaps = (gap for each in self.good for gap in pairwise(each.chunk_times))
            return [after - before for before, after in gaps if before >= since]
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

    @property
    def history_rate(self) -> float | None:
        """Share of prompt tokens that earlier turns have computed: the hit rate of a cache without limits.
        None for chats of text, whose tokens the client does not know."""
        if self.new_len is None:
            return None
        num_tokens = sum(outcome.num_prompt_tokens for outcome in self.good)
        return sum(outcome.history_len for outcome in self.good) / max(num_tokens, 1)

    @property
    def new_len(self) -> int | None:
        """The median of the new tokens of later turns, for conversations of token ids."""
        found = [each.num_prompt_tokens - each.history_len for each in self.good if each.history_len]
        return round(statistics.median(found)) if found else None

    @property
    def user_rate(self) -> float:
        """Output tokens per second of waiting for an answer: what one conversation gets."""
        waited = sum(outcome.total_time for outcome in self.good)
        return sum(outcome.num_output_tokens for outcome in self.good) / max(waited, 1e-9)

    @property
    def later_to_alone(self) -> float | None:
        """The median TTFT of later turns over that of their new tokens alone."""
        later, alone = self.summary("later_ttft"), self.summary("alone_ttft")
        return later["p50"] / alone["p50"] if later and alone else None

    def ttft_by_turn(self) -> list[float]:
        """The median TTFT of each turn, in milliseconds."""
        found: dict[int, list[float]] = {}
        for outcome in sorted(self.good, key=lambda outcome: outcome.turn):
            found.setdefault(outcome.turn, []).append(1000 * outcome.time_to_first_token)
        return [percentile(values, 50) for values in found.values()]

    @property
    def max_itl_to_median(self) -> float | None:
        """The longest over the median of "steady_itl"."""
        itl = self.summary("steady_itl")
        return itl["max"] / itl["p50"] if itl and itl["p50"] else None

    @property
    def late_itl(self) -> float:
        """Share of "steady_itl" above `LATE` medians."""
        values = self.values("steady_itl")
        limit = LATE * percentile(values or [0.0], 50)
        return sum(value > limit for value in values) / max(len(values), 1)

    def turns_as_json(self) -> dict[str, Any]:
        """What conversations of several turns have in addition."""
        by_turn = self.ttft_by_turn()
        if len(by_turn) < 2:
            return {}
        return {
            "history_rate": self.history_rate,
            "new_tokens": self.new_len,
            "tokens_per_s_per_user": self.user_rate,
            "ttft_by_turn_ms": by_turn,
            "later_ttft_to_alone": self.later_to_alone,
            "max_itl_to_median": self.max_itl_to_median,
            "late_itl": self.late_itl,
        }

    def as_json(self) -> dict[str, Any]:
        failed = [outcome.error for outcome in self.outcomes if outcome.error is not None]
        rate = self.arrivals.rate
        return {
            "rate": "inf" if rate is not None and math.isinf(rate) else rate,
            "concurrency": self.arrivals.concurrency,
            "is_flushed": self.is_flushed,
            "has_cache": self.has_cache,
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
            **{f"{metric}_ms": self.summary(metric) for metric in (*METRICS, *TURN_METRICS)},
            **self.turns_as_json(),
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
