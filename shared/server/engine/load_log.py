"""The load of an engine: the snapshot that heartbeats carry, and a line every so many batches, on stderr."""

from __future__ import annotations

import sys
import time
from typing import Any

from diptych.shared.interfaces import Scheduler, SchedulerStats
from diptych.shared.server.engine.messages import Load


class LoadLog:
    """`interval`: batches between two lines; None: no lines. pool_size: tokens of the KV pool."""

    def __init__(self, interval: int | None, pool_size: int) -> None:
        self.interval = interval
        self.pool_size = pool_size
        self._last: tuple[float, SchedulerStats] | None = None

    def look(self, scheduler: Scheduler) -> None:
        """Print a line if it is time."""
        if self.interval is None:
            return
        stats, now = scheduler.stats(), time.monotonic()
        if self._last is None:
            self._last = now, stats
        elif stats.num_steps - self._last[1].num_steps >= self.interval:
            print(self.line(stats, now - self._last[0], self._last[1]), file=sys.stderr, flush=True)
            self._last = now, stats

    def line(self, stats: SchedulerStats, seconds: float, last: SchedulerStats) -> str:
        """What has happened since `last`, so many seconds ago."""
        num_prompt = stats.num_prompt_tokens - last.num_prompt_tokens
        num_cached = stats.num_cached_tokens - last.num_cached_tokens
        num_new = stats.num_generated_tokens - last.num_generated_tokens
        num_used = stats.num_used_tokens - stats.num_evictable_tokens
        parts = [
            f"batch {stats.num_steps}",
            f"running {stats.num_running}, waiting {stats.num_waiting}",
            f"{num_new / max(seconds, 1e-9):,.0f} tokens/s, prompts {num_prompt / max(seconds, 1e-9):,.0f}",
            f"hit rate {num_cached / max(num_prompt, 1):.0%}",
            f"pool {num_used / self.pool_size:.0%}",
        ]
        if num_overlapped := stats.num_overlapped - last.num_overlapped:
            parts.append(f"{num_overlapped} of {stats.num_steps - last.num_steps} steps overlapped")
        if stats.num_retractions > last.num_retractions:
            parts.append(f"retracted {stats.num_retractions - last.num_retractions}")
        speculation = stats.speculation
        if num_verified := speculation.num_verifications - last.speculation.num_verifications:
            num_accepted = speculation.num_accepted_tokens - last.speculation.num_accepted_tokens
            parts.append(f"{num_accepted / num_verified + 1:.2f} tokens a verification")
        return "; ".join(parts)


def load_of(scheduler: Scheduler, **of_loop: Any) -> Load:
    """A snapshot of a scheduler. `of_loop`: the fields that the engine's loop knows."""
    stats = scheduler.stats()
    return Load(
        num_running=stats.num_running,
        num_waiting=stats.num_waiting,
        num_steps=stats.num_steps,
        num_used_tokens=stats.num_used_tokens,
        num_evictable_tokens=stats.num_evictable_tokens,
        num_prompt_tokens=stats.num_prompt_tokens,
        num_cached_tokens=stats.num_cached_tokens,
        num_generated_tokens=stats.num_generated_tokens,
        num_retractions=stats.num_retractions,
        num_verifications=stats.speculation.num_verifications,
        num_accepted_tokens=stats.speculation.num_accepted_tokens,
        num_drafted_tokens=stats.speculation.num_drafted_tokens,
        num_overlapped=stats.num_overlapped,
        num_replicas=scheduler.num_replicas,
        problem=scheduler.problem,
        not_ready=scheduler.not_ready,
        **of_loop,
    )
