"""TTFT and inter-token latency from the times at which outputs arrived."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from diptych.shared.engine.requests.output_collector import OutputCollector


def percentile(values: Sequence[float], percent: float) -> float:
    """A percentile, with linear interpolation between the two nearest values, as in numpy."""
    if not values:
        raise ValueError(f"the {percent}th percentile of nothing")
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


class Interval(NamedTuple):
    """Two successive outputs of a request, at `start` and `end`."""

    start: float
    end: float
    num_tokens: int  # tokens of the second output; more than one with speculation

    @property
    def seconds(self) -> float:
        return self.end - self.start


class ItlMeter:
    """Records the outputs of requests after each step."""

    def __init__(self, collectors: Sequence[OutputCollector] = ()) -> None:
        self.collectors: list[OutputCollector] = []
        self.first_times: list[float | None] = []
        self.last_times: list[float] = []
        self.num_seen: list[int] = []
        self.intervals: list[Interval] = []
        for collector in collectors:
            self.add(collector)

    def add(self, collector: OutputCollector) -> None:
        self.collectors.append(collector)
        self.first_times.append(None)
        self.last_times.append(0.0)
        self.num_seen.append(0)

    def look(self, now: float) -> None:
        for i, collector in enumerate(self.collectors):
            num_new = collector.num_output_tokens - self.num_seen[i]
            if not num_new:
                continue
            if self.first_times[i] is None:
                self.first_times[i] = now
            else:
                self.intervals.append(Interval(self.last_times[i], now, num_new))
            self.last_times[i] = now
            self.num_seen[i] += num_new

    def steady_intervals(self) -> list[Interval]:
        """The intervals while all requests decode: from the latest first token to the earliest last token."""
        begin = max(time for time in self.first_times if time is not None)
        end = min(self.last_times)
        return [interval for interval in self.intervals if interval.start >= begin and interval.end <= end]


class ItlSummary(NamedTuple):
    """Statistics of intervals, in seconds. `per_token` divides their sum by the number of tokens."""

    num_intervals: int
    per_token: float
    p50: float
    p90: float
    p99: float
    max: float


def summarize(intervals: Sequence[Interval]) -> ItlSummary:
    seconds = [interval.seconds for interval in intervals]
    if not seconds:
        raise ValueError("no ITL was measured: each request must give several tokens while all others decode")
    return ItlSummary(
        len(seconds),
        sum(seconds) / sum(interval.num_tokens for interval in intervals),
        percentile(seconds, 50),
        percentile(seconds, 90),
        percentile(seconds, 99),
        max(seconds),
    )
